"""What is made from images is for its owner alone; what may not be read or written is said."""

import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from damage import Original, draw_images
from feddg.api import run
from feddg.data.decoded import open_pixels
from feddg.data.images import from_folder
from feddg.deploy.site import SiteMemory
from feddg.errors import DataError, FeddgError, RunError
from feddg.experiment import Experiment, load_experiment
from feddg.report.page import write_report
from feddg.runs.folder import RunFolder
from feddg.runs.reading import read_run
from feddg.storage import kept_array

NOBODY = 65534


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Iterator[Original]:
    """A finished run with its report, made where everything may be read by all."""
    before = os.umask(0)
    try:
        made = Original.made(tmp_path_factory.mktemp("original") / "new")
        write_report([made.folder], made.folder / "report.html")
    finally:
        os.umask(before)
    return made


@pytest.fixture
def open_umask() -> Iterator[None]:
    """A mask that hides nothing by itself."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def nobody() -> Iterator[Path]:
    """A folder of a user who has no special rights; the test is that user."""
    if os.geteuid() != 0:
        folder = Path(tempfile.mkdtemp())
        yield folder
        return
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    os.chown(folder, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield folder
    finally:
        os.seteuid(0)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_run_is_for_its_owner_alone(original):
    assert mode(original.folder) == 0o700
    assert mode(original.folder / "checkpoint") == 0o700
    files = [p for p in original.folder.rglob("*") if p.is_file()]
    # The lock holds no images and no weights, and lies in the folder.
    own = [p for p in files if p.name != ".lock"]
    assert len(own) > 12
    assert {p.name: mode(p) for p in own if mode(p) != 0o600} == {}


def test_caches_are_for_their_owner_alone(original):
    inside = [original.cache, *original.cache.rglob("*")]
    assert len(inside) == 4, "the folder, pixels, which images are bad, hashes"
    assert {mode(p) for p in inside if p.is_dir()} == {0o700}
    assert {mode(p) for p in inside if p.is_file()} == {0o600}


def test_stylized_copies_figures_and_snapshots_are_for_their_owner_alone(
    tmp_path, original, open_umask
):
    experiment = load_experiment(
        original.folder / "experiment.yaml",
        {"method": {"name": "ccst", "settings": {}}, "train": {"rounds": 1}},
    )
    done = run(experiment, tmp_path / "runs", cache=tmp_path / "cache", report=False, snapshots=[1])
    held = [tmp_path / "runs", *done.folder.rglob("*"), *(tmp_path / "cache").rglob("*")]
    parts = {"figures", "snapshots", "checkpoint"}
    assert parts <= {p.name for p in held if p.is_dir()}
    assert any(p.suffix == ".npy" and p.parent.name == "cache" for p in held)
    private = [p for p in held if p.name != ".lock"]
    assert {mode(p) for p in private if p.is_dir()} == {0o700}
    assert {mode(p) for p in private if p.is_file()} == {0o600}


def test_no_pictures_where_none_are_asked_for(tmp_path, original):
    experiment = load_experiment(
        original.folder / "experiment.yaml",
        {
            "method": {"name": "ccst", "settings": {}},
            "train": {"rounds": 1},
            "evaluate": {"pictures": False},
        },
    )
    done = run(experiment, tmp_path, cache=original.cache, report=False)
    assert not list(done.folder.rglob("*.png"))
    assert (
        experiment.id
        != experiment.model_copy(
            update={"evaluate": experiment.evaluate.model_copy(update={"pictures": True})}
        ).id
    )


def test_the_default_leaves_ids_as_they_were():
    said, unsaid = Experiment(evaluate={"pictures": True}), Experiment()
    assert said.id == unsaid.id


def test_a_sites_memory_is_for_its_owner_alone(tmp_path, open_umask):
    memory = SiteMemory(tmp_path / "cache", "run", "site")
    memory.keep(1, {"weight": torch.zeros(2)})
    inside = [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]
    assert {mode(p) for p in inside if p.is_dir()} == {0o700}
    assert [mode(p) for p in inside if p.is_file()] == [0o600]


def test_an_unwritable_output_folder_is_said(nobody):
    (nobody / "runs").mkdir(0o500)
    with (
        pytest.raises(RunError, match=r"cannot write .*Permission denied"),
        RunFolder(nobody / "runs" / "one"),
    ):
        pass


@pytest.mark.parametrize("name", ["experiment.yaml", "."])
def test_an_unreadable_run_is_said(nobody, name):
    folder = nobody / "run"
    folder.mkdir()
    (folder / "experiment.yaml").write_text("seed: 1\n")
    (folder / name).chmod(0)
    with pytest.raises(FeddgError, match=r"Cannot read .*Permission denied"):
        assert read_run(folder).experiment
    with pytest.raises(FeddgError, match=r"Cannot read .*Permission denied"):
        load_experiment(folder / "experiment.yaml")


@pytest.mark.parametrize("where", ["", "a", "a/cat"])
def test_unreadable_folders_of_images_are_said(nobody, where):
    images = draw_images(nobody / "images")
    (images / where).chmod(0)
    with pytest.raises(DataError, match=r"may not be read|Permission denied"):
        from_folder(images)


def test_an_unreadable_image_is_left_out_and_said(nobody, caplog):
    images = draw_images(nobody / "images")
    (images / "a/cat/0.png").chmod(0)
    with caplog.at_level(logging.WARNING, "feddg"):
        table, _, bad = open_pixels(from_folder(images), 8, cache=nobody / "cache")
    assert (len(table), [b.reason for b in bad]) == (23, ["cannot be read: Permission denied"])
    assert "a/cat/0.png (cannot be read: Permission denied)" in caplog.text


def test_an_unwritable_cache_is_said(nobody, caplog):
    (nobody / "cache").mkdir(0o500)
    with pytest.raises(DataError, match=r"Cannot write the pixel cache .*Permission denied"):
        open_pixels(from_folder(draw_images(nobody / "images")), 8, cache=nobody / "cache")
    with caplog.at_level(logging.WARNING, "feddg"):
        found = kept_array(nobody / "cache" / "stylized.npy", lambda: numpy.arange(3))
    assert found.tolist() == [0, 1, 2]
    assert "Cannot keep" in caplog.text
    assert "Permission denied" in caplog.text
