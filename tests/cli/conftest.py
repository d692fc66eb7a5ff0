"""The command line in an empty folder, and a folder of images."""

import logging

import pytest
from PIL import Image

from feddg import cli


@pytest.fixture
def feddg(monkeypatch, tmp_path, capsys):
    """Runs the command line in an empty folder; returns (exit code, output, errors)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(logging.getLogger("feddg"), "handlers", [])

    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["feddg", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        return ended.value.code or 0, shown.out, shown.err

    return call


@pytest.fixture
def image_folder(tmp_path):
    """Two domains, red and blue, of two classes, four images each."""
    root = tmp_path / "images"
    for domain, colour in (("red", (200, 30, 30)), ("blue", (30, 30, 200))):
        for label, tone in (("dark", 0), ("light", 120)):
            folder = root / domain / label
            folder.mkdir(parents=True)
            for i in range(4):
                shade = tuple(min(255, c + tone + i) for c in colour)
                Image.new("RGB", (20, 24), shade).save(folder / f"{i}.png")
    return root
