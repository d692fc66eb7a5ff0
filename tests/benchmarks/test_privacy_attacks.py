"""The measurement of attacks runs from the images to its tables with one command."""

import csv
import importlib.util
import sys
from pathlib import Path

import numpy
import pytest
from PIL import Image

from extras import needs

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "privacy"
DOMAINS = ("photo", "art_painting", "cartoon", "sketch")
pytestmark = [
    needs("torchmetrics"),
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
]


@pytest.fixture
def loaded(monkeypatch):
    """Loads a script of the folder, which may load its neighbours."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name):
        spec = importlib.util.spec_from_file_location(f"privacy_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


def draw_images(folder, count, chance):
    """Writes images of two flat halves, which differ from each other."""
    folder.mkdir(parents=True)
    for number in range(count):
        halves = chance.integers(0, 256, (2, 1, 3), dtype=numpy.uint8)
        pixels = numpy.broadcast_to(halves.repeat(16, 0), (32, 32, 3))
        Image.fromarray(numpy.ascontiguousarray(pixels)).save(folder / f"{number}.png")


def attacked(loaded, tmp_path, capsys, runs):
    """Attacks runs on drawn images; returns the folder of what was found."""
    chance = numpy.random.default_rng(0)
    for domain in DOMAINS:
        for label in ("one", "two"):
            draw_images(tmp_path / "pacs" / domain / label, 11, chance)
    draw_images(tmp_path / "public", 20, chance)
    out = tmp_path / "out"
    command = ["--pacs", tmp_path / "pacs", "--public", tmp_path / "public", "--out", out]
    loaded("attacks").main([*map(str, command), "--small", "--runs", ",".join(runs)])
    loaded("page").main(["--data", str(out)])
    return out, capsys.readouterr().out


def rows_of(file):
    with file.open(newline="") as content:
        return list(csv.DictReader(content))


def test_one_command_goes_from_images_to_tables(loaded, tmp_path, capsys):
    out, page = attacked(loaded, tmp_path, capsys, ("pardon", "fedavg"))
    drawn = rows_of(out / "privacy_reconstruction.csv")
    assert {row["run"] for row in drawn} == {"pardon"}
    attackers = {"server", "client of photo", "client of art_painting"}
    assert {row["attacker"] for row in drawn} == attackers
    assert {row["domain"] for row in drawn} == {*DOMAINS, "all"}
    assert {row["fed"] for row in drawn} == {"sent", "sample", "unrelated"}
    for row in drawn:  # all sides count the same
        alike = [other for other in drawn if other["fed"] == "sent"]
        same = [r for r in alike if all(r[k] == row[k] for k in ("attacker", "domain", "images"))]
        assert same
    assert {row["run"] for row in rows_of(out / "privacy_membership.csv")} == {"pardon", "fedavg"}
    assert len(rows_of(out / "privacy_updates.csv")) == 2
    grids = {file.name for file in (out / "grids").iterdir()}
    assert {"pardon-server.png", "pardon-client-photo.png", "pardon-transferred.png"} <= grids
    assert "| pardon | photo | sent |" in page
    assert "| fedavg | update/weights | threshold |" in page


@pytest.mark.slow
def test_every_method_is_attacked_by_one_command(loaded, tmp_path, capsys):
    out, page = attacked(loaded, tmp_path, capsys, loaded("attacks").RUNS)
    drawn = rows_of(out / "privacy_reconstruction.csv")
    assert {row["run"] for row in drawn} == set(loaded("attacks").RUNS) - {"fedavg"}
    assert "| fedbn | photo | sent |" in page
