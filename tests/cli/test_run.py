"""`feddg run` and `feddg demo` from the command line."""

import json
import os
import re
import shutil
from pathlib import Path

from PIL import Image

from feddg.errors import WeightsError

TINY = ["--rounds", "1", "--local-epochs", "1", "--batch-size", "64", "--clients", "3"]
TINY += ["--image-size", "8", "-q"]


def test_the_demo_compares_and_ends_with_its_page(feddg, runs_here):
    command = ["demo", "--methods", "fedavg,local", "--hold-out", "mono", "--rounds", "1"]
    command += ["--set", "data.image_size=32", "--set", "train.local_steps=2", "--jobs", "1"]
    code, shown, _ = feddg(*command)
    assert code == 0
    *_, last = (line for line in shown.splitlines() if line.strip())
    assert last.startswith("report: ")
    assert "1 domain says nothing about others." in shown
    assert "<title>" in Path(last.removeprefix("report: ")).read_text()


def test_the_demos_plan_holds_every_style_out_and_begins_from_imagenet_weights():
    from feddg.comparison.plan import demo_plan, expand_plan

    plan = demo_plan({}, {"train": {"rounds": 2}})
    assert plan.hold_out == "lodo"
    assert {"fedavg", "local"} <= {method.name for method in plan.methods}
    assert plan.base["train"]["rounds"] == 2
    cells = expand_plan(plan)
    assert {cell.experiment.hold_out.test for cell in cells} == {
        (style,) for style in ("noto", "blob", "emojitwo", "mono")
    }
    assert {cell.experiment.model.weights for cell in cells} == {"imagenet"}


def test_the_demo_fills_the_cores_and_starts_no_process_for_one(monkeypatch):
    from feddg.comparison import plan as demonstration

    monkeypatch.setattr(demonstration, "available_cores", lambda: 2)
    plan = demonstration.demo_plan({}, {})
    assert demonstration.jobs_of_demo(plan) == 2
    assert demonstration.jobs_of_demo(plan, 1) == 0
    many = demonstration.demo_plan({"seeds": 3}, {})
    assert demonstration.jobs_of_demo(many, 10_000) == demonstration.MOST_JOBS
    one = demonstration.demo_plan({"methods": ["fedavg"], "hold_out": ["mono"], "seeds": 1}, {})
    assert demonstration.jobs_of_demo(one, 8) == 0


def test_a_run_and_the_same_run_again(feddg, tmp_path):
    command = ["run", "--data", "digits", "--hold-out", "val=ink,test=sketch", *TINY]
    code, shown, errors = feddg(*command)
    told = [line for line in errors.splitlines() if not line.startswith("warning: ")]
    assert (code, told) == (0, []), "it is quiet"
    assert "Held-out test" in shown
    assert "sketch" in shown
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "report.html").is_file()
    code, _, errors = feddg(*command)
    assert code == 0
    assert "nothing is run again" in errors
    code, shown, _ = feddg("report", folder, folder, "--out", tmp_path / "both.html")
    assert code == 0
    assert (tmp_path / "both.html").is_file()


def test_a_dry_run_says_where_every_setting_comes_from_and_runs_nothing(feddg, tmp_path):
    (tmp_path / "e.yaml").write_text("{data: digits, hold_out: sketch, seed: 7}")
    flags = ["--method", "pardon", "--clients", "4", "--dry-run"]
    code, shown, _ = feddg("run", "e.yaml", *flags)
    assert code == 0
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert rows["seed"][1:] == ["7", "e.yaml"]
    assert rows["clients.number"][1:] == ["4", "you", "said"]
    assert rows["hold_out.val"][1:] == ["none", "e.yaml"]
    assert rows["train.lr"][1:] == ["0.001", "preset", "digits"]
    assert rows["method.settings.gamma1"][1:] == ["0.75", "default"]
    clients = [line.split("│") for line in shown.splitlines() if "│ client-" in line]
    counts = [cells[2] for cells in clients]
    assert "Label skew: " in shown
    train = int(shown.split("images: train ")[1].split(",")[0])
    assert sum(map(int, counts)) == train
    assert len(counts) == 4
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_says_that_the_images_changed_as_the_run_would(feddg, image_folder):
    command = ["run", "--root", image_folder, "--hold-out", "red", "--rounds", "1", "--clients",
               "2", "--image-size", "16", "--backbone", "cnn", "--weights", "none", "--set",
               "train.local_steps=1"]  # fmt: skip
    assert feddg(*command, "-q")[0] == 0
    assert "(complete)" in feddg(*command, "--dry-run")[1]
    next(image_folder.rglob("0.png")).unlink()
    code, _, errors = feddg(*command, "--dry-run")
    assert code == 1
    assert "learns from scratch, learning rate 0.001, 1 round." in errors
    assert "error: images changed since" in errors
    assert errors.splitlines()[-1] == feddg(*command)[2].splitlines()[-1]
    code, shown, _ = feddg(*command, "--dry-run", "--again")
    assert code == 0
    assert re.search(r"run folder: .*\.2 \(new\)", shown)


def test_a_run_that_cannot_begin_leaves_no_folder(feddg, tmp_path):
    where = ["--data", "digits", "--hold-out", "sketch", "--backbone", "resnet18"]
    code, _, _ = feddg("run", *where, "--weights", "no.pth", *TINY)
    assert code == 1
    assert not list((tmp_path / "runs").iterdir())


def test_without_a_terminal_a_run_prints_lines(feddg):
    code, _, errors = feddg("run", "--data", "digits", "--hold-out", "sketch", *TINY[:-1])
    assert code == 0
    lines = [line for line in errors.splitlines() if not line.startswith("warning: ")]
    assert re.fullmatch(r"rounds: 1 of 1; round 1: sketch \d+\.\d%, in-domain \d+\.\d%", lines[-1])


def test_a_folder_with_bad_images_trains_on_the_rest_and_says_so(feddg, image_folder, tmp_path):
    Image.new("CMYK", (9, 9)).save(image_folder / "red/dark/cmyk.jpg")
    Image.new("RGB", (1, 1)).save(image_folder / "red/dark/pixel.png")
    (image_folder / "red/dark/zero.jpg").touch()
    where = ["--data", "folder", "--root", image_folder, "--hold-out", "blue"]
    model = ["--backbone", "cnn", "--weights", "none"]
    code, _, errors = feddg("run", *where, *model, *TINY, "--clients", "2")
    assert code == 0
    assert "zero.jpg" in errors or "1 " in errors
    (folder,) = (tmp_path / "runs").iterdir()
    bad = json.loads((folder / "clients.json").read_text())["bad_images"]
    assert [image["path"] for image in bad] == ["red/dark/zero.jpg"]


def test_a_dry_run_does_not_lay_missing_weights_on_the_user(feddg, image_folder, monkeypatch):
    def absent(backbone, weights):
        raise WeightsError("no network")

    monkeypatch.setattr("feddg.runs.beforehand.require_weights", absent)
    where = ["--root", image_folder, "--hold-out", "red", "--clients", "2"]
    code, shown, said = feddg("run", *where, "--dry-run")
    assert code == 0, said
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert rows["model.weights"][1:] == ["none", "ImageNet's", "cannot", "be", "had", "here"]
    assert rows["train.lr"][2:4] == ["preset", "scratch,"]


def test_a_dry_run_warns_of_the_data(feddg, image_folder):
    shutil.copytree(image_folder / "blue", image_folder / "green")
    for file in (image_folder / "green").rglob("*.png"):
        Image.new("RGB", (20, 24), tuple(os.urandom(3))).save(file)
    (image_folder / "blue" / "dark").rename(image_folder / "blue" / "darks")
    where = ["--root", image_folder, "--hold-out", "red", "--clients", "2", "--weights", "none"]
    code, shown, said = feddg("run", *where, "--dry-run")
    assert code == 0, said
    assert "The classes 'dark', 'darks' differ in spelling only" in " ".join(shown.split())
    assert "blue lacks dark" in " ".join(shown.split())
