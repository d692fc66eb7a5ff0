"""Flags come from the settings: every one names a field, once, and says what the field says."""

import ast
import io
import math
import re
from pathlib import Path

import click
import pytest
from rich.console import Console
from typer.main import get_command

import feddg
from feddg.cli import app
from feddg.errors import ExperimentError
from feddg.experiment import Experiment
from feddg.options import (
    FLAGS,
    NOT_PRESET,
    PRESET_PARTS,
    assigned,
    field_of,
    held_out,
    path_of,
    print_json,
    seeds,
)
from feddg.report.blocks import Cell, Column, Table
from feddg.report.terminal import print_table
from feddg.runs import beforehand
from feddg.settings import leaves, nested

PACKAGE = Path(feddg.__file__).parent
SOURCES = [PACKAGE / "options.py", *PACKAGE.glob("cli/*.py"), *PACKAGE.glob("*/commands.py")]


def options(*names):
    command = get_command(app)
    for name in names:
        command = command.commands[name]
    return {
        option.opts[0]: option
        for option in command.get_params(click.Context(command))
        if isinstance(option, click.Option)
    }


def flag_of(name):
    return f"--{name.replace('_', '-')}"


def test_the_help_of_a_command_says_once_what_its_arguments_are(feddg):
    for words in (("predict",), ("deploy", "register"), ("resume",)):
        code, out, _ = feddg(*words, "--help")
        assert code == 0
        assert out.count("rguments:") == 1
        assert "folder" in re.split(r"rguments:|Options:", out)[1]


def test_every_flag_is_a_field_and_its_help_is_the_fields_description(subtests):
    for name in FLAGS:
        with subtests.test(name=name):
            field = field_of(path_of(name))
            assert field.description
            assert options("run")[flag_of(name)].help == field.description
            default = Experiment().model_dump()
            for part in path_of(name).split("."):
                default = default[part]


def test_no_flag_is_named_twice_in_the_source():
    named = [
        node.value
        for file in SOURCES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"--[a-z][a-z-]*", node.value)
    ]
    # A reader names its flag in its error, too, and a command its flags where it says how to go on.
    readers = [
        *("--privacy", "--seeds", "--set"),
        *("--accept-licence", "--from", "--root"),
    ]
    once = [*(name for name in named if name not in readers), *map(flag_of, FLAGS)]
    assert len(once) == len(set(once))


def test_types_and_bounds_are_the_fields():
    run = options("run")
    assert run["--optimizer"].type.choices == ("adam", "sgd")
    rate = run["--lr"].type
    assert (type(rate), rate.min, rate.min_open) == (click.FloatRange, 0, True)
    size = run["--image-size"].type
    assert (type(size), size.min, size.max) == (click.IntRange, 8, 1024)
    assert run["--local-steps"].type.min == 1
    share = run["--heterogeneity"].type
    assert (share.min, share.max, share.max_open) == (0, 1, False)
    assert run["--root"].type.convert("images", None, None) == Path("images")


def test_defaults_are_told_from_presets():
    run = options("run")
    assert run["--seed"].show_default == "0"
    assert run["--image-size"].show_default == "the preset's; for folders 160"
    rate = Experiment(data="folder").train.lr
    assert run["--lr"].show_default == f"the preset's; for folders {rate:g}"
    for preset in ("digits", "pacs", "folder", "office_home", "iwildcam", "fedig"):
        chosen = Experiment(data="folder", preset=preset).model_dump()
        plain = leaves({part: chosen[part] for part in chosen if part not in ("method", "preset")})
        for path in map(path_of, FLAGS):
            if path not in plain or path == "model.normalization":
                continue
            if plain[path] != field_of(path).get_default():
                assert path.split(".")[0] in PRESET_PARTS
                assert path not in NOT_PRESET


def test_each_command_takes_the_fields_that_suit_it():
    inspect = options("data", "inspect")
    assert "--heterogeneity" in inspect
    assert "--lr" not in inspect
    compare = options("compare")
    assert "--methods" in compare
    assert "--method" not in compare
    assert compare["--heterogeneity"].help.startswith(field_of("clients.heterogeneity").description)
    assert {"--methods", "--hold-out", "--rounds", "--seeds"} <= options("demo").keys()


def test_what_flags_say_arrives_as_nested_fields(feddg, monkeypatch):
    said = {}
    monkeypatch.setattr(beforehand, "preview", lambda file, out, again, **given: said.update(given))
    monkeypatch.setattr("feddg.progress.show_preview", lambda found: None)
    feddg("run", "--lr", "0.5", "--hold-out", "val=ink,test=a,b", "--root", "x", "--dry-run",
          "--normalization", "frozen", "--set", "train.momentum=0.9")  # fmt: skip
    assert said == {
        "train": {"lr": 0.5, "momentum": 0.9},
        "hold_out": {"test": ["a", "b"], "val": ["ink"]},
        "data": {"root": Path("x")},
        "model": {"normalization": "frozen"},
    }
    assert nested("train.lr", 1) == {"train": {"lr": 1}}


@pytest.mark.parametrize(
    ("flag", "value"), [("--optimizer", "adm"), ("--lr", "0"), ("--rounds", "x")]
)
def test_a_value_out_of_range_is_a_usage_error(feddg, flag, value):
    code, _, errors = feddg("run", flag, value)
    assert code == 2
    assert flag in errors
    assert "Traceback" not in errors


# What people write on the command line.


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


def test_a_short_name_that_is_set_keeps_the_fields_beside_it(feddg, monkeypatch):
    said = {}
    monkeypatch.setattr(beforehand, "preview", lambda file, out, again, **given: said.update(given))
    monkeypatch.setattr("feddg.progress.show_preview", lambda found: None)
    feddg("run", "--image-size", "16", "--clients-per-round", "2", "--clients", "6", "--dry-run",
          "--set", "data=digits", "--set", "clients=4", "--set", "method.mu=0.1",
          "--set", "method=fedprox")  # fmt: skip
    assert said == {
        "data": {"source": "digits", "image_size": 16},
        "clients": {"number": 4, "per_round": 2},
        "method": {"name": "fedprox", "settings": {"mu": 0.1}},
    }


def test_a_number_that_is_none_is_null_in_json(capsys):
    print_json({"é": [math.nan, -math.inf, 0.5]})
    assert capsys.readouterr().out == '{\n "é": [\n  null,\n  null,\n  0.5\n ]\n}\n'


def test_set_reads_numbers_flags_and_words():
    pairs = ["train.lr=1e-4", "method.local_clustering=false", "data.resize=pad", "seed=3"]
    assert assigned(pairs) == {
        "train": {"lr": 1e-4},
        "method": {"settings": {"local_clustering": False}},
        "data": {"resize": "pad"},
        "seed": 3,
    }
    with pytest.raises(ExperimentError, match="FIELD=VALUE"):
        assigned(["lr"])


@pytest.mark.parametrize(
    ("text", "read"), [("3", 3), ("7,8,9", [7, 8, 9]), ("7,", [7]), (" 7 , ", [7]), ("0,", [0])]
)
def test_seeds_are_how_many_or_which(text, read):
    assert seeds(text) == read


@pytest.mark.parametrize("text", ["", ",", "7,,8", "7,8,", ",7", "one"])
def test_seeds_written_otherwise_are_refused(text):
    with pytest.raises(ExperimentError, match="--seeds"):
        seeds(text)


def test_a_table_wider_than_the_terminal_cuts_nothing():
    """What does not fit follows in a further table, beside the first column again."""
    names = ["FedAvg, with settings of its own", "PARDON, released copies of images"]
    intervals = {f"Over the domains {n}": f"-{n}1.5 to +{n}4.5" for n in range(5)}
    columns = [Column("Method", numeric=False), *map(Column, intervals)]
    rows = [[*map(Cell, (name, *intervals.values()))] for name in names]
    table = Table(columns, rows, "A caption. " * 12)
    for width in (40, 80, 300):
        shown = io.StringIO()
        print_table(Console(file=shown, width=width), table)
        text = shown.getvalue()
        assert max(map(len, text.splitlines())) <= width
        assert all(text.count(cell) == len(names) for cell in intervals.values())
        assert "…" not in text
        if width > 40:
            assert text.count(names[0]) == text.count(names[1]) == text.count("Method")
    assert text.count("Method") == 1
