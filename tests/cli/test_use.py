"""``predict``, ``export`` and ``serve`` asked for what cannot be: one clear line, and no debris."""

import os
import shutil
import sys

import pytest
from filelock import FileLock

from feddg.api import run
from feddg.experiment import Experiment
from feddg.prediction import predict as prediction_files
from feddg.prediction.predict import part_of
from feddg.runs.observer import Observer
from image_folders import make_folder, noise

ENDS = {
    "nothing": (["predict", "{run}", "empty", "--out", "x.csv"], "no image in empty"),
    "no images": (["predict", "{run}", "texts", "--out", "x.csv"], "no image in texts"),
    "nowhere": (["predict", "{run}", "absent", "--out", "x.csv"], "absent does not exist"),
    "no glob": (["predict", "{run}", "abs*nt", "--out", "x.csv"], "abs*nt matches nothing"),
    "below a file": (["predict", "{run}", "new", "--out", "file/x.csv"], "cannot write file/x.csv"),
    "another ending": (["predict", "{run}", "new", "--out", "x.txt"], "must end in one of .csv"),
    "no such rule": (["predict", "{run}", "new", "--out", "x.csv", "--which", "bset"], "'bset'"),
    "a model that it has not": (
        ["predict", "{run}", "new", "--out", "x.csv", "--which", "wise_ft"],
        "no 'wise_ft' model",
    ),
    "an unfinished run, strictly": (
        ["predict", "{begun}", "new", "--out", "x.csv", "--strict"],
        "This is round 0 of 2, not the model that it will serve. `feddg resume",
    ),
    "no run": (["predict", "empty", "new", "--out", "x.csv"], "holds no run"),
    "a run without a model": (["predict", "{bare}", "new", "--out", "x.csv"], "no whole check"),
    "models of their own": (["predict", "{local}", "new", "--out", "x.csv"], "model of its own"),
    "export: models of their own": (
        ["export", "{local}", "--safetensors", "x.safetensors"],
        "model of its own",
    ),
    "export: no such rule": (
        ["export", "{run}", "--safetensors", "x.safetensors", "--which", "bset"],
        "'bset'",
    ),
    "export: another ending": (["export", "{run}", "--onnx", "x.bin"], "must end in .onnx"),
    "export: a folder": (
        ["export", "{run}", "--safetensors", "a.safetensors"],
        "cannot write a.safetensors",
    ),
    "travel: no run": (["travel", "empty", "new"], "holds no run"),
    "travel: nothing": (["travel", "{run}", "empty"], "no image in empty"),
    "travel: models of their own": (["travel", "{local}", "new"], "model of its own"),
    "travel: not over a file": (
        ["travel", "{run}", "new", "--choose", "3", "--labels", "a.csv"],
        "a.csv exists; name a new file",
    ),
    "travel: labels without a file": (["travel", "{run}", "new", "--choose", "3"], "--labels"),
    "export: no run": (["export", "empty", "--torch", "x.pt2"], "holds no run"),
    "serve: no run": (["serve", "empty"], "holds no run"),
    "serve: models of their own": (["serve", "{local}"], "model of its own"),
    "serve: no such rule": (["serve", "{run}", "--which", "bset"], "'bset'"),
    "serve: limits": (["serve", "{run}", "--at-once", "0"], "at_once"),
}


class _Interrupts(Observer):
    def round(self, row):
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs: finished, interrupted in its first round, without its model, of personal models."""
    root = tmp_path_factory.mktemp("runs")
    make_folder(root / "images", ("a", "b", "c"), each=6)
    chosen = {
        "data": {"source": "folder", "root": str(root / "images"), "image_size": 16},
        "hold_out": "c",
        "clients": 2,
        "model": {"backbone": "cnn", "weights": None},
        "train": {"rounds": 1, "local_steps": 1, "batch_size": 4},
    }

    def trained(observer=None, **changes):
        kept = {"cache": root / "cache", "report": False, "observer": observer}
        return run(Experiment(**{**chosen, **changes}), root, **kept).folder

    found = {"run": trained(), "local": trained(method="local")}
    with pytest.raises(KeyboardInterrupt):
        trained(_Interrupts(), train={**chosen["train"], "rounds": 2}, name="begun")
    (found["begun"],) = root.glob("begun*")
    found["bare"] = root / "bare"
    shutil.copytree(found["run"], found["bare"])
    shutil.rmtree(found["bare"] / "checkpoint")
    return {name: str(folder) for name, folder in found.items()}


@pytest.fixture
def place(tmp_path):
    """What is in the folder in which the commands are typed."""
    for name in ("empty", "texts", "new", "a.csv", "a.safetensors"):
        (tmp_path / name).mkdir()
    for name in ("texts/a.txt", "file"):
        (tmp_path / name).write_text("mine")
    for number in range(9):
        noise(number).save(tmp_path / "new" / f"{number}.png")
    return tmp_path


def everything(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.parametrize(("command", "words"), ENDS.values(), ids=ENDS)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(command, words, runs, feddg, place):
    if command[0] == "serve":
        pytest.importorskip("fastapi", reason="needs the extra `serve`")
        pytest.importorskip("python_multipart", reason="needs the extra `serve`")
    before = everything(place)
    code, _, errors = feddg(*(word.format(**runs) for word in command))
    assert code == 1
    (line,) = errors.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert everything(place) == before


def test_a_model_of_an_unfinished_run_says_so(runs, feddg, place):
    code, _, errors = feddg("predict", runs["begun"], "new", "--out", "x.csv", "-q")
    assert code == 0
    assert "This is round 0 of 2" in " ".join(errors.replace("│", " ").split())


def test_the_next_command_is_quoted_for_the_shell(runs, feddg, place):
    (place / "new").rename(place / "my images")
    code, shown, _ = feddg("predict", runs["run"], "my images", "--out", "x.csv", "-q")
    assert code == 0
    assert f"feddg travel {runs['run']} 'my images'\n" in shown


def test_the_same_table_twice_is_the_same_table(runs, feddg, place):
    command = ("predict", runs["run"], "new", "--out", "there/was/none/x.csv", "-q")
    assert feddg(*command)[0] == 0
    first = (place / "there/was/none/x.csv").read_bytes()
    assert feddg(*command)[0] == 0
    assert (place / "there/was/none/x.csv").read_bytes() == first
    assert everything(place / "there/was/none") == [".x.csv.lock", "x.csv"]


def test_a_table_that_somebody_writes_is_left_to_them(runs, feddg, place):
    with FileLock(place / ".x.csv.lock"):
        code, _, errors = feddg("predict", runs["run"], "new", "--out", "x.csv", "-q")
    assert code == 1
    assert "being written by another process" in errors
    assert not (place / "x.csv").exists()


@pytest.mark.parametrize(
    ("more", "how"), [((), "goes on where it stopped"), (("--adapt", "tent"), "begins anew")]
)
def test_ctrl_c_says_what_the_same_command_will_do(runs, feddg, place, monkeypatch, more, how):
    whole = prediction_files.predict_batches

    def stopped(predictor, files):
        yield next(whole(predictor, files))
        raise KeyboardInterrupt

    command = ("predict", runs["run"], "new", "--out", "x.csv", "--batch-size", "4", "-q", *more)
    with monkeypatch.context() as patched:
        patched.setattr(prediction_files, "predict_batches", stopped)
        code, _, errors = feddg(*command)
    assert code == 130
    assert errors.splitlines() == [f"interrupted; the same command {how}"]
    code, shown, _ = feddg(*command)
    assert code == 0
    assert ("continued: 4 images" in shown) == (not more)
    assert not part_of(place / "x.csv").exists()
    assert [path.name for path in place.glob(".x.csv*")] == [".x.csv.lock"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names themselves")
def test_names_that_are_no_text_are_written_all_the_same(runs, feddg, place):
    noise(50).save(place / "a.png")
    os.rename(place / "a.png", os.fsencode(place / "new") + b"/a\xff.png")
    code, shown, _ = feddg("predict", runs["run"], "new", "--out", "x.jsonl", "-q")
    assert code == 0
    assert "10 of 10 images" in shown
    assert "a\\\\xff.png" in (place / "x.jsonl").read_text("utf-8")
