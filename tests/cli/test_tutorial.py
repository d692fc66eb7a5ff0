"""The tutorial, replayed: its commands one after another, and what they say."""

import csv
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from image_folders import make_folder

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
INSTALLS = "pip install"
QUICKER = {"--image-size 96": "--image-size 32"}
"""What is learned is not looked at here."""
ONE_RUN = QUICKER | {"lodo": "emojitwo", "fedavg,ridge": "ridge"}


def blocks(language: str) -> list[str]:
    """The page's blocks of a language: commands, or what they say."""
    text = PAGE.read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """The page's commands, a block each, without those that install."""
    return [block for block in blocks("sh") if not block.startswith(INSTALLS)]


def quicker(command: str, changes: dict[str, str] = QUICKER) -> str:
    for longer, shorter in changes.items():
        command = command.replace(longer, shorter)
    return command


def skeleton(line: str) -> str:
    """The beginning of a warning, without its numbers."""
    return re.sub(r"\d[\d,.\u202f]*", "#", line)[:30]


def test_the_folders_of_the_page_are_looked_at_trained_on_and_labelled(feddg, runs_here, tmp_path):
    make_folder(tmp_path / "images", ("blob", "emojitwo", "noto"), ("food", "people"), each=12)
    make_folder(tmp_path / "new", ("mono",), ("food",), each=2)
    _, inspect, train, compare, predict, *_ = commands()
    blob, held, noto = (tmp_path / "images" / d / "food" for d in ("blob", "emojitwo", "noto"))
    broken, copy = blob / "broken.png", held / "from_noto.png"
    broken.write_bytes((blob / "0.png").read_bytes()[:60])
    shutil.copy(noto / "1.png", copy)
    with Image.open(noto / "2.png") as image:
        image.convert("RGB").save(held / "again.jpg", quality=98, subsampling=0)

    def typed(command: str) -> tuple[int, set[str]]:
        words = shlex.split(command.replace("\\\n", " "))[1:]
        found = [next(iter(tmp_path.glob(w))) if "*" in w else w for w in words]
        code, shown, errors = feddg(*found)
        return code, {skeleton(line) for line in (shown + errors).splitlines()}

    odd, stopped, trained = (
        [line for line in block.splitlines() if line.startswith(("warning:", "error:"))]
        for block in blocks("text")[:3]
    )
    code, said = typed(inspect)
    assert code == 1  # there is an error among what it says
    assert set(map(skeleton, odd)) <= said
    code, said = typed(quicker(train))
    assert code == 1
    assert set(map(skeleton, stopped)) <= said
    broken.unlink()
    copy.unlink()
    code, said = typed(quicker(train))
    assert code == 0
    assert set(map(skeleton, trained)) <= said
    assert typed(quicker(compare, ONE_RUN))[0] == 0
    assert (tmp_path / "answer" / "report.html").is_file()
    assert typed(predict)[0] == 0
    assert (tmp_path / "labels.csv").is_file()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder in which `feddg` and `python` are those of this process."""
    if shutil.which("bash") is None or shutil.which("curl") is None:
        pytest.skip("needs bash and curl")
    for name in ("fastapi", "python_multipart", "onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(name, reason="needs the extras `export` and `serve`")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, module in (("feddg", "-m feddg"), ("python", "")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


def carry_out(command: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-euc", command], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_every_command_of_the_page_does_what_it_says(place):
    names = [command.split()[1] for command in commands() if command.startswith("feddg")]
    assert names == ["data", "run", "compare", "predict", "travel", "export", "serve"]
    make, inspect, train, compare, predict, travel, export, serve, ask = commands()
    carry_out(make, place)
    assert "noto" in carry_out(inspect, place)
    carry_out(quicker(train), place)
    carry_out(quicker(compare, ONE_RUN), place)
    (run,) = (place / "runs").iterdir()
    assert (run / "report.html").is_file()
    assert "95 % interval" in (run / "model_card.md").read_text("utf-8")
    carry_out(predict, place)
    with (place / "labels.csv").open(newline="", encoding="utf-8") as table:
        rows = list(csv.DictReader(table))
    assert len(rows) == len(list((place / "new").iterdir())) > 100
    assert all(row["label"] for row in rows)
    assert "data:image/jpeg" in (place / "labels.html").read_text("utf-8")
    assert re.search("Expected accuracy|look unlike anything", carry_out(travel, place))
    carry_out(export, place)
    assert (place / "model.onnx").stat().st_size > 1000
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = subprocess.Popen(
        ["bash", "-euc", f"exec {serve.strip()} --port {port}"],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        for line in started.stdout:
            if f"127.0.0.1:{port}" in line:
                break
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        answer = json.loads(carry_out(ask.replace("8000", str(port)), place))
    finally:
        started.terminate()
        started.communicate(timeout=60)
    labelled = {Path(row["file"]).name: row["label"] for row in rows}
    (image,) = answer["images"]
    assert image["label"] == labelled[image["name"]]
