"""The command line as a user meets it."""

import ast
import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from feddg import cli
from feddg.cli import app
from feddg.errors import WeightsError
from feddg.runs.folder import RunFolder

TINY = ["--rounds", "1", "--local-epochs", "1", "--batch-size", "64", "--clients", "3", "-q"]


def test_help_is_readable_and_names_every_command():
    shown = CliRunner().invoke(app, ["--help"]).output
    for command in ("run", "resume", "demo", "methods", "data", "style", "report"):
        assert command in shown
    flags = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "120"}).output
    for flag in ("--method", "--hold-out", "--clients-per-round", "--heterogeneity", "--weights"):
        assert flag in flags


def test_the_version_is_that_of_the_package_and_of_what_it_runs_on():
    shown = CliRunner().invoke(app, ["--version"])
    what = f"torch {version('torch')}, Python {platform.python_version()}"
    assert (shown.exit_code, shown.output) == (0, f"feddg {version('feddg')} ({what})\n")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("comprae", "compare"), ("deploy simualte", "simulate"), ("style tarin", "train")],
)
def test_a_mistyped_command_names_the_nearest_once(typed, meant):
    shown = CliRunner().invoke(app, typed.split(), env={"COLUMNS": "200"})
    assert shown.exit_code == 2
    assert shown.output.count(f"'{meant}'") == 1


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("run --label-smoothing 0.1", "--set train.label_smoothing=VALUE."),
        ("compare --gamma1=2", "--set method.gamma1=VALUE."),
        ("run --momentum 0.9", "--set train.momentum=VALUE."),
        ("run --lrr 0.1", "Did you mean '--lr'?"),
        ("run --nonsense", "No such option '--nonsense'."),
    ],
)
def test_a_field_without_a_flag_is_said_with_how_to_set_it(typed, said):
    shown = CliRunner().invoke(app, typed.split(), env={"COLUMNS": "200"})
    assert shown.exit_code == 2
    assert said in shown.output


def test_help_does_not_import_torch():
    import subprocess
    import sys

    code = (
        "import sys; from feddg.cli import app; assert not {'torch', 'pydantic'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["run", "compare", "use", "data", "deploy"])
def test_commands_know_nothing_but_the_api(name):
    source = Path(cli.__file__).with_name(f"{name}.py").read_text("utf-8")
    tree = ast.parse(source)
    typed = [
        late
        for node in tree.body
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for late in ast.walk(node)
    ]
    found = {
        node.module if node.module != "feddg" else f"feddg.{node.names[0].name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node not in typed and node.module
    }
    ours = {module for module in found if module.startswith("feddg")}
    assert ours <= {"feddg.api", *(module for module in ours if module.startswith("feddg.cli."))}


def test_training_does_not_import_a_compiler():
    code = (
        "import sys, torch\n"
        "from feddg.clients.optim import MemoryOrderAdam, MemoryOrderSGD\n"
        "weight = torch.nn.Parameter(torch.ones(2))\n"
        "for made in (MemoryOrderAdam([weight], 0.1), MemoryOrderSGD([weight], 0.1, 0.9)):\n"
        "    weight.sum().backward(); made.step(); made.zero_grad()\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_methods_as_json(feddg):
    code, shown, _ = feddg("methods", "--json")
    methods = {row["name"]: row for row in json.loads(shown)}
    assert code == 0
    assert methods["pardon"]["aliases"] == ["fisc"]
    assert methods["pardon"]["settings"]["gamma1"]["default"] == 0.75
    assert "fedavg" in methods


def test_the_demo_compares_explains_the_best_and_ends_with_its_page(feddg, tmp_path):
    command = ["demo", "--methods", "fedavg,mixstyle", "--hold-out", "sketch", "--rounds", "1"]
    code, shown, _ = feddg(*command, "--seeds", "1")
    assert code == 0
    *_, last = (line for line in shown.splitlines() if line.strip())
    assert last.startswith("report: ")
    assert "tell it from" in shown  # one pair decides nothing
    page = Path(last.removeprefix("report: ")).read_text()
    name = "FedAvg" if "What FedAvg does" in page else "MixStyle"
    assert f"What {name} does: " in shown
    assert f"What {name} does" in page


def test_the_demos_plan_holds_every_domain_out_under_the_mean_of_the_last_rounds():
    from feddg.comparison.plan import demo_plan

    plan = demo_plan({}, {"train": {"rounds": 3}})
    assert plan.hold_out == "lodo"
    assert len(plan.methods) >= 3
    assert len(plan.seeds) >= 2
    assert plan.base["server"]["averaging"] == "swa"
    assert plan.base["train"]["rounds"] == 3


def test_the_demo_fills_the_cores_and_starts_no_process_for_one(monkeypatch):
    from feddg.comparison import plan as demonstration

    monkeypatch.setattr(demonstration, "available_cores", lambda: 2)
    plan = demonstration.demo_plan({}, {})
    assert demonstration.jobs_of_demo(plan) == 2
    assert demonstration.jobs_of_demo(plan, 1) == 0
    assert demonstration.jobs_of_demo(plan, 10_000) == demonstration.MOST_JOBS
    one = demonstration.demo_plan({"methods": ["fedavg"], "hold_out": ["ink"], "seeds": 1}, {})
    assert demonstration.jobs_of_demo(one, 8) == 0


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
        (["run", "--data", "digits", "--set", "train.lr=a: ["], "train.lr"),
        (["run", "--data", "digits", "--clients", "2", "--clients-per-round", "5"], "at most 2"),
        (["data", "inspect", "--root", "nowhere"], "nowhere"),
    ],
)
def test_a_mistake_is_one_line_without_a_traceback(arguments, words, feddg):
    code, _, errors = feddg(*arguments)
    assert code == 1
    (line,) = [line for line in errors.splitlines() if line.strip()]
    assert line.startswith("error: ")
    assert any(word in line for word in words.split("|"))


def test_a_run_does_not_import_what_only_pages_and_comparisons_need():
    import subprocess
    import sys

    code = (
        "import sys; from feddg.api import run; import feddg.cli.progress; "
        "from feddg.methods.base import methods; methods(); "
        "print({'plotly', 'scipy.stats', 'torchvision', 'sklearn', 'pandas'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
    code = "import sys, feddg.report.page, feddg.comparison.compare; print('pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False", "a run's page is made without it, too"


def test_a_dry_run_says_where_every_setting_comes_from_and_runs_nothing(feddg, tmp_path):
    (tmp_path / "e.yaml").write_text("{data: digits, hold_out: sketch, seed: 7}")
    flags = ["--method", "pardon", "--clients", "4", "--dry-run"]
    code, shown, _ = feddg("run", "e.yaml", *flags)
    assert code == 0
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert rows["seed"][1:] == ["7", "e.yaml"]
    assert rows["clients.number"][1:] == ["4", "you", "said"]
    assert rows["hold_out.val"][1:] == ["none", "default"]
    assert rows["train.lr"][1:] == ["0.001", "preset", "digits"]
    assert rows["method.settings.gamma1"][1:] == ["0.75", "default"]
    clients = [line.split("│") for line in shown.splitlines() if "│ client-" in line]
    counts = [cells[2] for cells in clients]
    assert "Label skew: " in shown
    train = int(shown.split("images: train ")[1].split(",")[0])
    assert sum(map(int, counts)) == train
    assert len(counts) == 4
    assert not (tmp_path / "runs").exists()
    flags = ["--hold-out", "chalk", "--backbone", "resnet18", "--dry-run"]
    _, shown, _ = feddg("run", "e.yaml", *flags)
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert rows["hold_out.test"][1:] == ["chalk", "you", "said"]


def test_no_control_code_of_an_error_reaches_the_terminal(feddg):
    code, _, shown = feddg("data", "inspect", "--root", "no\x1b[2J")
    assert code == 1
    assert "\x1b" not in shown
    assert r"no\x1b[2J does not exist" in shown


def test_a_dry_run_does_not_lay_missing_weights_on_the_user(feddg, image_folder, monkeypatch):
    def absent(backbone):
        raise WeightsError("no network")

    monkeypatch.setattr("feddg.runs.prepare.fetch_imagenet", absent)
    where = ["--root", image_folder, "--hold-out", "red", "--clients", "2"]
    code, shown, said = feddg("run", *where, "--dry-run")
    assert code == 0, said
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert rows["model.weights"][1:] == ["none", "ImageNet's", "cannot", "be", "had", "here"]
    assert rows["train.lr"][2:4] == ["preset", "scratch,"]


def test_a_run_that_cannot_begin_leaves_no_folder(feddg, tmp_path):
    where = ["--data", "digits", "--hold-out", "sketch", "--backbone", "resnet18"]
    code, _, _ = feddg("run", *where, "--weights", "no.pth", *TINY)
    assert code == 1
    assert not (tmp_path / "runs").exists()


def test_a_failed_runs_folder_stays_where_it_holds_anything_else(tmp_path):
    folder = tmp_path / "mine"
    with RunFolder(folder) as ours:
        ours.write_json("clients.json", {})
        (folder / "figures").mkdir()
        ours.remove_unstarted()
        assert (folder / "clients.json").is_file()
        (folder / "figures").rmdir()
        ours.remove_unstarted()
        assert not folder.exists()
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with RunFolder(folder) as theirs:
        theirs.write_json("clients.json", {})
        (folder / "notes.txt").unlink()
        theirs.remove_unstarted()
        assert (folder / "clients.json").is_file()


def test_without_a_terminal_a_run_prints_lines_and_none_when_quiet(feddg):
    command = ["run", "--data", "digits", "--hold-out", "sketch", *TINY]
    code, _, errors = feddg(*command)
    told = [line for line in errors.splitlines() if not line.startswith("warning: ")]
    assert (code, told) == (0, [])
    code, _, errors = feddg(*command[:-1], "--seed", "1")
    assert code == 0
    lines = [line for line in errors.splitlines() if not line.startswith("warning: ")]
    assert lines[0] == "fedavg: 1 rounds"
    assert lines[-1].startswith("round   1")
    assert "test/sketch 0." in lines[-1]
