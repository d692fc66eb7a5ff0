"""Every command that the pages show is carried out on small data, or says here why it is not.

A command in none of the tables below is carried out by this file. Of those that train, the default
suite reads all settings and deals the images out (``--dry-run``) where a flag or a setting is shown
for the first time; the slow one does so for all, and trains a step.
"""

import os
import re
import shutil
from pathlib import Path

import click
import pytest
import torch

from documented_commands import (
    Shown,
    command_of,
    inline_commands,
    pages,
    parsed,
    shown_commands,
)
from documented_world import World, make_world

COMMANDS = list(dict.fromkeys(shown for page in pages() for shown in shown_commands(page)))
MENTIONED = sorted({words for page in pages() for words in inline_commands(page)})
_LOOPBACK = "test_pardon_over_tls_gives_the_bits_of_the_in_process_transport"
_SERVED = "tests/serving/test_load.py::test_a_storm_of_requests_is_weathered"
_LOOKED_AT = "test_the_folders_of_the_page_are_looked_at_trained_on_and_labelled"
_SHARED = "tests/prediction/test_hub.py::test_uploaded_and_used_from_the_hub"
_REPLAYED = "tests/cli/test_tutorial.py::test_every_command_of_the_page_does_what_it_says"
ELSEWHERE = {
    **{
        f"docs/tutorial.md: feddg {name}": f"tests/cli/test_tutorial.py::{_LOOKED_AT}"
        for name in ("data inspect", "run", "compare", "predict")
    },
    "docs/tutorial.md: feddg export": _REPLAYED,
    "docs/tutorial.md: feddg serve": _REPLAYED,
    "docs/tutorial.md: feddg travel": _REPLAYED,
    "docs/use_a_model.md: feddg serve": _SERVED,
    "docs/use_a_model.md: feddg travel": (
        "tests/prediction/test_travel.py::test_the_command_prints_the_answer_and_its_numbers"
    ),
    "README.md: feddg serve": _SERVED,
    "docs/use_a_model.md: feddg export RUN --hub": _SHARED,
    "docs/use_a_model.md: feddg predict hf:": _SHARED,
    "docs/deploy.md: feddg deploy check": (
        "tests/deploy/test_preflight.py::test_a_site_in_order_is_go"
    ),
    "docs/deploy.md: feddg deploy register": f"tests/deploy/test_deployment.py::{_LOOPBACK}",
    "docs/deploy.md: feddg deploy sign": f"tests/deploy/test_deployment.py::{_LOOPBACK}",
    "docs/deploy.md: feddg deploy run": f"tests/deploy/test_deployment.py::{_LOOPBACK}",
    "docs/deploy.md: feddg deploy validate": (
        "tests/prediction/test_validation.py::test_the_command_writes_counts_and_no_name"
    ),
    "docs/security.md: feddg privacy attack": (
        "tests/attacks/test_attack.py::test_the_command_says_what_was_found"
    ),
    "docs/data_sets.md: feddg data get": (
        "tests/cli/test_data.py::test_it_comes_is_unpacked_and_can_be_inspected"
    ),
}
"""Pages and commands that another test carries out on small data, and which test."""
NOT_CARRIED_OUT = {
    "docs/results/papers.md: feddg compare short/NAME": (
        "NAME is each of the papers' plans, which take hours and need PACS"
    ),
    "docs/data_sets.md: feddg run --data huggingface": (
        "needs a data set of Hugging Face's; tests/data/sets/test_huggingface.py has one in memory"
    ),
}
"""Why not; they are parsed all the same."""
SLOW = ("feddg export", "feddg evaluate")
NEEDS = {
    "--onnx": ("onnx", "onnxscript", "onnxruntime"),
    "feddg deploy": ("flwr",),
    ".parquet": ("pyarrow",),
    "--predictions": ("pyarrow",),
}
"""What must be installed for a command."""
MACHINES = {
    "--device all": ("a GPU", torch.cuda.is_available),
    "--launcher slurm": ("Slurm", lambda: shutil.which("sbatch") is not None),
}
"""What a machine must have for a command to train there."""
SMALL = (
    *("--rounds", "1", "--set", "train.local_steps=1", "--image-size", "16"),
    *("--backbone", "cnn", "--weights", "none"),
)
FEW = {
    "run": (*SMALL, "--clients", "4", "--set", "clients.per_round=null", "-q"),
    "compare": (*SMALL, "--clients", "4", "--seeds", "1", "--jobs", "1", "-q"),
}
"""What commands that train are shortened by."""


def few(shown: Shown) -> tuple[str, ...]:
    """What a command is shortened by; features come without a backbone."""
    words = FEW[shown.words[1]]
    if "compare" in shown.words and "--launcher" not in shown.words:
        words = (*words, "--launcher-option", "reuse=yes")
    return words[len(SMALL) :] if "features" in shown.words else words


def said(table: dict, shown: Shown):
    """What a table says of a command: of its page, or of how the command begins."""
    return next((found for start, found in table.items() if str(shown).startswith(start)), None)


HERE = [c for c in COMMANDS if not said(ELSEWHERE, c) and not said(NOT_CARRIED_OUT, c)]
TRAINING = [shown for shown in HERE if shown.words[1] in FEW]


def shown_first(commands: list[Shown]) -> list:
    """The commands; slow are those of which others before them show every flag and setting."""
    seen, found = set(), []
    for shown in commands:
        fields = [re.split("[ =]", word)[0] for word in shown.words if "." in word and "=" in word]
        new = {shown.words[1], *fields, *(w for w in shown.words if w.startswith("--"))} - seen
        seen |= new
        found.append(pytest.param(shown, id=str(shown), marks=() if new else pytest.mark.slow))
    return found


OTHERS = [
    pytest.param(c, id=str(c), marks=pytest.mark.slow if any(s in str(c) for s in SLOW) else ())
    for c in HERE
    if c.words[1] not in FEW
]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def _copied(source: str, target: str) -> None:
    """Copies a file of a run; plans and images, which no command changes, are linked."""
    of_runs = {"runs", "comparisons"} & set(Path(source).parts)
    linked = not of_runs and source.endswith((".png", ".jpg", ".py", ".md", ".csv"))
    (os.link if linked else shutil.copy)(source, target)


@pytest.fixture
def typed(world, feddg, tmp_path, monkeypatch):
    """Types a command in a copy of the world."""
    place = tmp_path / "place"
    leave_out = shutil.ignore_patterns("cache", "made")
    shutil.copytree(world.place, place, ignore=leave_out, copy_function=_copied)
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.setenv("FEDDG_CACHE", str(world.place / "cache"))

    def type_it(shown: Shown, *more: str) -> None:
        for name in [n for key, names in NEEDS.items() if key in str(shown) for n in names]:
            pytest.importorskip(name, reason=f"needs {name}")
        code, _, errors = feddg(*world.words(shown.words[1:], place), *more)
        assert code == 0, errors

    return type_it


@pytest.mark.parametrize("shown", OTHERS)
def test_a_command_does_its_work(shown, typed):
    typed(shown)


@pytest.mark.parametrize("shown", shown_first(TRAINING))
def test_what_a_command_would_train_is_there(shown, typed):
    typed(shown, *few(shown), "--dry-run")


@pytest.mark.slow
@pytest.mark.parametrize("shown", [c for c in TRAINING if "--dry-run" not in c.words], ids=str)
def test_a_command_trains(shown, typed):
    for words, (needed, is_there) in MACHINES.items():
        if words in str(shown) and not is_there():
            pytest.skip(f"needs {needed}")
    typed(shown, *few(shown))


def test_every_command_is_one_that_there_is(subtests):
    for shown in COMMANDS:
        with subtests.test(shown=shown):
            if "--help" not in shown.words:
                parsed(shown)


def test_every_command_that_a_sentence_names_is_one_that_there_is(subtests):
    for words in MENTIONED:
        with subtests.test(words=words):
            command, rest = command_of(words)
            flags = command.get_params(click.Context(command))
            known = {name for flag in flags for name in flag.opts}
            assert {word for word in rest if word.startswith("--")} <= known | {"--help"}


def test_a_command_that_there_is_not_is_noticed():
    for words in (("run", "--no-such-flag"), ("no-such-command",)):
        with pytest.raises(click.UsageError):
            parsed(Shown("x", ("feddg", *words)))


def test_commands_are_found():
    assert len(COMMANDS) > 60
    assert {shown.page for shown in HERE} >= {"README.md", "docs/tutorial.md", "docs/compare.md"}
    assert ("feddg", "methods") in MENTIONED


@pytest.mark.parametrize("table", [ELSEWHERE, NOT_CARRIED_OUT], ids=["elsewhere", "not"])
def test_nothing_is_said_of_a_command_that_no_page_shows(table):
    for start in table:
        assert any(str(shown).startswith(start) for shown in COMMANDS), start
