"""The command line as a user meets it."""

import json
import logging

import pytest
from PIL import Image
from typer.testing import CliRunner

from feddg import cli
from feddg.cli import app
from feddg.cli.parsing import assigned, held_out
from feddg.errors import ExperimentError

TINY = ["--rounds", "1", "--local-epochs", "1", "--batch-size", "64", "--clients", "3", "-q"]


@pytest.fixture
def feddg(monkeypatch, tmp_path, capsys):
    """Runs the command line in an empty folder; returns (exit code, output, errors)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(logging.getLogger("feddg"), "handlers", [])

    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["feddg", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        return ended.value.code or 0, shown.out, shown.err

    return call


def test_help_is_readable_and_names_every_command():
    shown = CliRunner().invoke(app, ["--help"]).output
    for command in ("run", "resume", "demo", "methods", "data", "style", "report"):
        assert command in shown
    flags = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "120"}).output
    for flag in ("--method", "--hold-out", "--clients-per-round", "--heterogeneity", "--weights"):
        assert flag in flags


def test_help_does_not_import_torch():
    import subprocess
    import sys

    code = "import sys; from feddg.cli import app; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_methods_as_json(feddg):
    code, shown, _ = feddg("methods", "--json")
    methods = {row["name"]: row for row in json.loads(shown)}
    assert code == 0
    assert methods["pardon"]["aliases"] == ["fisc"]
    assert methods["pardon"]["settings"]["gamma1"]["default"] == 0.75
    assert "fedavg" in methods


def test_a_run_and_the_same_run_again(feddg, tmp_path):
    command = ["run", "--data", "digits", "--hold-out", "val=ink,test=sketch", *TINY]
    code, shown, _ = feddg(*command)
    assert code == 0
    assert "held-out test" in shown
    assert "sketch" in shown
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "report.html").is_file()
    code, _, errors = feddg(*command)
    assert code == 0
    assert "nothing is run again" in errors
    code, shown, _ = feddg("report", folder, folder, "--out", tmp_path / "both.html")
    assert code == 0
    assert (tmp_path / "both.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--data", "digits", "--hold-out", "skech"], "sketch"),
        (["run", "--data", "digits"], "--hold-out"),
        (["run", "--data", "digits", "--hold-out", "tset=ink"], "tset"),
        (["run", "--data", "digits", "--method", "pardn"], "pardon"),
        (["run", "--data", "folder", "--root", "absent", "--hold-out", "x"], "absent"),
        (["run", "--data", "digits", "--hold-out", "ink", "--clients", "5000"], "5000|5,000"),
        (["run", "--data", "digits", "--hold-out", "ink", "--weights", "no.pth"], "no.pth"),
        (["run", "--data", "digits", "--hold-out", "ink", "--set", "lr"], "FIELD=VALUE"),
        (["run", "--data", "digits", "--hold-out", "ink", "--device", "tpu9"], "tpu9"),
        (["run", "nothing.yaml"], "nothing.yaml"),
        (["resume", "nowhere"], "nowhere"),
        (["report", "nowhere"], "nowhere"),
        (["data", "inspect", "--root", "nowhere"], "nowhere"),
    ],
)
def test_a_mistake_is_one_line_without_a_traceback(arguments, words, feddg):
    code, _, errors = feddg(*arguments)
    assert code == 1
    (line,) = [line for line in errors.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert any(word in line for word in words.split("|"))


def make_images(root, size=(20, 24)):
    for domain, colour in (("red", (200, 30, 30)), ("blue", (30, 30, 200))):
        for label, tone in (("dark", 0), ("light", 120)):
            folder = root / domain / label
            folder.mkdir(parents=True)
            for i in range(4):
                shade = tuple(min(255, c + tone + i) for c in colour)
                Image.new("RGB", size, shade).save(folder / f"{i}.png")


def test_inspect_lists_bad_files_and_clients(feddg, tmp_path):
    make_images(tmp_path / "images")
    bad = tmp_path / "images/red/dark/zero.jpg"
    bad.touch()
    text = tmp_path / "images/red/dark/text.jpg"
    text.write_text("not an image")
    held = ["--hold-out", "blue", "--clients", "2"]
    code, shown, _ = feddg("data", "inspect", "--root", tmp_path / "images", "--json", *held)
    assert code == 0
    found = json.loads(shown)
    assert found["counts"]["red"] == {"dark": 4, "light": 4}
    assert {image["path"] for image in found["bad_images"]} == {
        "red/dark/zero.jpg",
        "red/dark/text.jpg",
    }
    assert sum(client["red"] for client in found["clients"]) == found["splits"]["train"]
    assert feddg("data", "inspect", "--root", tmp_path / "images", *held)[0] == 0


def test_a_folder_with_bad_images_trains_on_the_rest_and_says_so(feddg, tmp_path):
    make_images(tmp_path / "images")
    Image.new("CMYK", (9, 9)).save(tmp_path / "images/red/dark/cmyk.jpg")
    Image.new("RGB", (1, 1)).save(tmp_path / "images/red/dark/pixel.png")
    (tmp_path / "images/red/dark/zero.jpg").touch()
    where = ["--data", "folder", "--root", tmp_path / "images", "--hold-out", "blue"]
    model = ["--backbone", "cnn", "--weights", "none", "--image-size", "16"]
    code, _, errors = feddg("run", *where, *model, *TINY, "--clients", "2")
    assert code == 0
    assert "zero.jpg" in errors or "1 " in errors
    (folder,) = (tmp_path / "runs").iterdir()
    bad = json.loads((folder / "clients.json").read_text())["bad_images"]
    assert [image["path"] for image in bad] == ["red/dark/zero.jpg"]


def test_style_transfer_of_files(feddg, tmp_path):
    make_images(tmp_path / "images")
    source, style = tmp_path / "images/red/dark", tmp_path / "images/blue/dark"
    arguments = [source, "--style", style, "--out", tmp_path / "out", "--size", "32"]
    code, shown, _ = feddg("style", "transfer", *arguments)
    assert code == 0
    assert "4 images" in shown
    red, _, blue = Image.open(tmp_path / "out/0.png").convert("RGB").resize((1, 1)).getpixel((0, 0))
    assert blue > red


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("sketch", {"test": ["sketch"], "val": []}),
        ("a,b", {"test": ["a", "b"], "val": []}),
        ("val=a,test=b", {"test": ["b"], "val": ["a"]}),
        ("val=a,b,test=c", {"test": ["c"], "val": ["a", "b"]}),
    ],
)
def test_hold_out_spellings(text, held):
    assert held_out(text) == held


def test_set_reads_numbers_flags_and_words():
    pairs = ["train.lr=1e-4", "method.local_clustering=false", "data.resize=pad", "seed=3"]
    assert assigned(pairs) == {
        "train": {"lr": 1e-4},
        "method": {"local_clustering": False},
        "data": {"resize": "pad"},
        "seed": 3,
    }
    with pytest.raises(ExperimentError, match="FIELD=VALUE"):
        assigned(["lr"])


def test_compare_shows_its_plan_and_runs_nothing(feddg, tmp_path):
    code, _, shown = feddg(
        *("compare", "--data", "digits", "--methods", "fedavg,pardon"),
        *("--hold-out", "sketch;val=ink,test=photo", "--clients", "6:2,3"),
        *("--heterogeneity", "0,1", "--seeds", "4,5", "--rounds", "1"),
        *("--no-estimate", "--dry-run"),
    )
    assert code == 0
    assert "32 runs: 0 complete, 0 to continue, 32 to start" in shown
    assert "2 of 6, 3" in shown
    assert not (tmp_path / "comparisons").exists()


@pytest.mark.parametrize("flag", [["--clients", "a:b"], ["--seeds", "one"], ["--methods", "pardo"]])
def test_compare_names_a_mistake(feddg, flag):
    code, _, shown = feddg("compare", "--data", "digits", "--hold-out", "lodo", *flag, "--dry-run")
    assert code == 1
    assert flag[1] in shown
