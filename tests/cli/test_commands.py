"""The command line as a user meets it."""

import json
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from itertools import chain

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from feddg import cli
from feddg.cli import app


def test_help_is_readable_and_names_every_command():
    shown = CliRunner().invoke(app, ["--help"]).output
    sections = dict(part.split(":\n", 1) for part in shown.split("\n\n") if ":\n" in part)
    panels = {name: [row.split()[0] for row in sections[name].splitlines()] for name in cli.PANELS}
    assert [name for name in sections if name in panels] == [*panels]
    assert panels["Start"] == ["demo", "run", "compare", "report"]
    assert sorted(chain(*panels.values())) == sorted(get_command(app).commands)
    flags = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "120"}).output
    for flag in ("--method", "--hold-out", "--clients-per-round", "--heterogeneity", "--weights"):
        assert flag in flags
    assert re.search(r"\nClients:\n  --clients .*?\n\nModel and training:\n  --rounds", flags, re.S)


@pytest.mark.parametrize("group", ["data", "deploy", "privacy"])
def test_a_list_of_commands_says_whole_sentences(group):
    assert "..." not in CliRunner().invoke(app, [group, "--help"]).output.partition("Commands:")[2]


def test_the_version_is_that_of_the_package_and_of_what_it_runs_on():
    shown = CliRunner().invoke(app, ["--version"])
    what = f"torch {version('torch')}, Python {platform.python_version()}"
    assert (shown.exit_code, shown.output) == (0, f"feddg {version('feddg')} ({what})\n")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("comprae", "compare"), ("deploy chekc", "check")],
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


IMPORTS = """
import sys
from feddg.cli import app
try:
    app(["--help"])
except SystemExit:
    pass
slow = {"torch", "pydantic", "rich"}
assert not slow & {*sys.modules}, slow & {*sys.modules}  # help is there at once
from feddg.api import run
assert "torch" not in sys.modules
import feddg.progress
from feddg.methods.base import methods
methods()
from feddg.data.data_set import load_source
load_source("digits")
needed_by_pages = {"scipy.stats", "torchvision", "pandas"}
assert not needed_by_pages & {*sys.modules}, needed_by_pages & {*sys.modules}
import torch
from feddg.clients.optim import MemoryOrderAdam, MemoryOrderSGD
weight = torch.nn.Parameter(torch.ones(2))
for made in (MemoryOrderAdam([weight], 0.1), MemoryOrderSGD([weight], 0.1, 0.9)):
    weight.sum().backward(); made.step(); made.zero_grad()
assert "torch._dynamo" not in sys.modules  # a compiler
from feddg.models.backbones import build_network
build_network("cnn", 2, weights=None)
assert "torchvision" not in sys.modules
import feddg.report.page, feddg.comparison.compare
assert "pandas" not in sys.modules  # a run's page is made without it, too
build_network("resnet18", 2, weights=None)
assert "timm" not in sys.modules
build_network("test_vit", 2, weights=None)
assert "timm" in sys.modules
"""


def test_nothing_heavy_is_imported_before_it_is_needed():
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)


def test_methods_as_json(feddg):
    code, shown, _ = feddg("methods", "--json")
    methods = {row["name"]: row for row in json.loads(shown)}
    assert code == 0
    assert methods["pardon"]["aliases"] == ["fisc"]
    assert methods["pardon"]["settings"]["gamma1"]["default"] == 0.75
    assert "fedavg" in methods


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


def test_no_control_code_of_an_error_reaches_the_terminal(feddg):
    code, _, shown = feddg("data", "inspect", "--root", "no\x1b[2J")
    assert code == 1
    assert "\x1b" not in shown
    assert r"no\x1b[2J does not exist" in shown
