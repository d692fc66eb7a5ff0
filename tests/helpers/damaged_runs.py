"""Damaged run folders, as they are continued, read and compared."""

import json
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from damage import ROUNDS, Case, Place
from feddg.comparison.results import read_comparison
from feddg.prediction.model import load_trained
from feddg.runs.execute import carry_out, experiment_of, is_complete
from feddg.runs.folder import RunFolder
from feddg.runs.reading import Run, read_adapted, read_run
from odd_inputs import DEEP, cut, flip, folder, loop, pipe, write

RESUMED, READ, COMPARED = "A run is continued", "A run is read", "A comparison is read"


def resumed(path: Path, cache: Path) -> Run:
    """Continues the run."""
    return carry_out(path, experiment_of(path, cache), cache=cache)


def continued(place: Place, path: Path | None = None) -> None:
    """Continues the run and compares its end with the original's."""
    done = resumed(path or place.run, place.cache)
    assert done.status == "completed"
    name = f"checkpoint/state-{ROUNDS}.safetensors"
    ours, theirs = load_file(done.folder / name), load_file(place.original.folder / name)
    assert all((ours[key] == tensor).all() for key, tensor in theirs.items())


def damaged(name: str, damage: Callable[[Path], Any]) -> Callable[[Place], None]:
    """Continues a run of which one file is damaged."""

    def play(place: Place) -> None:
        path = place.run
        damage(path / name)
        continued(place, path)

    return play


def change(**fields: Any) -> Callable[[Path], Any]:
    """Changes fields of a JSON file."""
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def without(*words: str) -> Callable[[Path], Any]:
    """Takes the lines out of a file that hold all of some words."""

    def damage(path: Path) -> None:
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(x for x in lines if not all(word in x for word in words)))

    return damage


def no_checkpoint(place: Place) -> None:
    shutil.rmtree(place.run / "checkpoint")
    continued(place)


def renamed(place: Place) -> None:
    continued(place, place.run.rename(place.run.with_name("scaffold-01234567")))


def another_experiment(place: Place, old: str, new: str) -> None:
    path = place.run
    text = (path / "experiment.yaml").read_text()
    assert old in text
    (path / "experiment.yaml").write_text(text.replace(old, new))
    continued(place, path)


def continued_and_read(name: str, damage: Callable[[Path], Any]) -> Callable[[Place], None]:
    """Continues a run whose records are damaged, and reads it."""

    def play(place: Place) -> None:
        damage(place.run / name)
        done = resumed(place.run, place.cache)
        read_all(done.folder)
        assert is_complete(done.folder)

    return play


def debris(place: Place) -> None:
    left = [".metrics.jsonl.4194305.1", "checkpoint/.state-3.safetensors.4194305.1"]
    for name in left:
        (place.run / name).write_text("half")
    os.utime(place.run / left[0], (0, time.time() - 100_000))
    continued(place)
    assert not any((place.run / name).exists() for name in left)


def written_again(place: Place, name: str) -> None:
    (place.run / name).unlink()
    continued(place)
    assert (place.run / name).is_file()


def opened(make: Callable[[Path], Path]) -> Callable[[Place], None]:
    def play(place: Place) -> None:
        with RunFolder(make(place.root / "new") / "run"):
            pass

    return play


AS_AT_FIRST = "Some classes have fewer than 20 images"
BAD_INDEX = r"checkpoint\.json is damaged"
LAST, MEMORY = f"checkpoint/state-{ROUNDS}.safetensors", f"checkpoint/memory-0-{ROUNDS}.safetensors"
INDEX = "checkpoint/checkpoint.json"
CASES: list[Case] = [
    *(
        Case(RESUMED, f"{what} {how}", damaged(name, damage), error=fault)
        for what, name, how, damage, fault in (
            ("the state", LAST, "has a flipped bit", flip, r"state-3\.safetensors is damaged"),
            ("the state", LAST, "is cut short", cut, r"state-3\.safetensors is damaged"),
            ("the state", LAST, "is missing", os.unlink, r"state-3\.safetensors is missing"),
            ("the state", LAST, "is a pipe", pipe, "a pipe"),
            ("a client's memory", MEMORY, "has a flipped bit", flip, "memory-0-3.* is damaged"),
            ("a client's memory", MEMORY, "is missing", os.unlink, "memory-0-3.* is missing"),
        )
    ),
    *(
        Case(RESUMED, f"the index {how}", damaged(INDEX, damage), error=BAD_INDEX)
        for how, damage in {
            "has a flipped bit": flip,
            "is empty": write(""),
            "says that the round is NaN": lambda p: p.write_text(
                p.read_text().replace('"round": 3', '"round": NaN')
            ),
            "says round 10^5000": lambda p: p.write_text(
                p.read_text().replace('"round": 3', '"round": 1' + "0" * 5000)
            ),
            "names a file outside of the folder": change(state="../../other.safetensors"),
            "has its files in a list": change(memories=["memory-0-3.safetensors"]),
        }.items()
    ),
    *(
        Case(RESUMED, f"{what}, the records are there", play, said=AS_AT_FIRST)
        for what, play in (
            ("the index is missing", damaged(INDEX, os.unlink)),
            ("the checkpoints are gone", no_checkpoint),
        )
    ),
    Case(
        RESUMED,
        "`checkpoint` is a file",
        damaged("checkpoint", lambda p: (shutil.rmtree(p), p.write_text(""))),
        error=r"cannot write .*checkpoint|cannot write .*exists",
    ),
    *(
        Case(RESUMED, f"`rounds.jsonl` {how}", continued_and_read("rounds.jsonl", damage), error)
        for how, damage, error in (
            ("is gone", os.unlink, r"rounds\.jsonl has 0 of 3 rounds"),
            (
                "lacks a round",
                without('"round":2', '"kind":"round"'),
                r"rounds\.jsonl has 2 of 3 rounds",
            ),
        )
    ),
    *(
        Case(
            RESUMED, f"`ledger.jsonl` {how}", continued_and_read("ledger.jsonl", damage), said=said
        )
        for how, damage, said in (
            ("is gone", os.unlink, r"lists 0 of the [\d,]+ bytes"),
            (
                "lacks two rounds",
                lambda p: (without('"round":1,')(p), without('"round":3,')(p)),
                r"lists [\d,]+ of the [\d,]+ bytes",
            ),
            (
                "is cut inside a round",
                without('"round":3,', '"client":1,', '"up"'),
                r"lists [\d,]+ of the [\d,]+ bytes",
            ),
        )
    ),
    *(
        Case(RESUMED, what, damaged(name, damage), error=error)
        for what, name, damage, error in (
            (
                "`metrics.jsonl` has a damaged row",
                "metrics.jsonl",
                lambda p: p.write_text("{oops\n" + p.read_text()),
                r"metrics\.jsonl is damaged in row 1",
            ),
            (
                "`rounds.jsonl` has a round that is a word",
                "rounds.jsonl",
                lambda p: p.write_text('{"kind":"round","round":"two"}\n' + p.read_text()),
                r"rounds\.jsonl is damaged in row 1: round\.round: ",
            ),
            (
                "`metrics.jsonl` has other rows",
                "metrics.jsonl",
                write('{"kind":"setup","round":0}\n'),
                r"metrics\.jsonl is damaged in row 1: weights: Field required",
            ),
            ("`metrics.jsonl` is a folder", "metrics.jsonl", folder, "it is a folder"),
            ("`ledger.jsonl` is a pipe", "ledger.jsonl", pipe, "a pipe"),
            ("`summary.json` is empty", "summary.json", write(""), r"summary\.json is damaged"),
            ("`summary.json` is a pipe", "summary.json", pipe, "a pipe"),
            ("`experiment.yaml` is gone", "experiment.yaml", os.unlink, "holds no run"),
        )
    ),
    Case(
        RESUMED,
        "somebody changed the experiment's seed",
        lambda p: another_experiment(p, "\nseed: 0", "\nseed: 1"),
        error=r"says experiment \w{8}, but the checkpoint is of \w{8}",
    ),
    Case(RESUMED, "the folder has another run's id", renamed),
    Case(RESUMED, "half-written files of a killed process", debris),
    *(
        Case(
            RESUMED, f"`{name}` is gone", partial(written_again, name=name), said="is written anew"
        )
        for name in ("clients.json", "environment.json", "metrics.jsonl")
    ),
    Case(
        RESUMED,
        "the output folder is a file",
        opened(lambda p: (p.write_text(""), p)[1]),
        error="cannot write .*Not a directory|cannot write .*exists",
    ),
    Case(
        RESUMED,
        "the output folder is a link to itself",
        opened(loop),
        error="cannot write .*File exists",
    ),
    Case(
        RESUMED,
        "the run's name has 5,000 letters",
        opened(lambda p: p / ("x" * 5000)),
        error="cannot write .*too long",
    ),
]


def read_all(path: Path) -> None:
    """Reads every part of a run folder."""
    run = read_run(path)
    assert run.settings
    for part in ("environment", "clients", "table", "rounds", "ledger", "summary"):
        getattr(run, part)
    run.pictures()
    read_adapted(path)


def read(name: str, damage: Callable[[Path], Any]) -> Callable[[Place], None]:
    def play(place: Place) -> None:
        target = place.finished / name
        target.parent.mkdir(exist_ok=True)
        damage(target)
        read_all(place.finished)

    return play


def served_by(place: Place, damage: Callable[[Path], Any], name: str) -> None:
    damage(place.finished / name)
    load_trained(place.finished)


CASES += [
    *(
        Case(READ, what, read(name, damage), error=error)
        for what, name, damage, error in (
            ("`clients.json` is cut short", "clients.json", cut, r"clients\.json is damaged"),
            (
                "`clients.json` has other types",
                "clients.json",
                change(classes=3),
                r"clients\.json is damaged: classes: ",
            ),
            (
                "`environment.json` is nested 100,000 levels deep",
                "environment.json",
                write(DEEP),
                r"environment\.json is damaged",
            ),
            (
                "`captions.json` is cut short",
                "figures/captions.json",
                write('{"styles.png": "Tra'),
                r"captions\.json is damaged",
            ),
            (
                "`adaptation.jsonl` lacks a field",
                "adaptation.jsonl",
                write('{"split": "test"}\n'),
                r"adaptation\.jsonl is damaged in row 1: .*: Field required",
            ),
        )
    ),
    Case(
        READ,
        "`ledger.jsonl` is cut inside a round",
        read("ledger.jsonl", without('"round":2,', '"client":1,', '"up"')),
        said=r"ledger\.jsonl lists [\d,]+ of the [\d,]+ bytes of its rounds\.",
    ),
    Case(
        READ,
        "a link to itself in place of the folder",
        lambda p: read_run(loop(p.root / "a")),
        error="Too many levels",
    ),
    Case(
        READ,
        "a file in place of the folder",
        lambda p: read_run(p.file("a", "")),
        error="There is no run folder",
    ),
    *(
        Case(
            READ,
            f"the model is loaded, and the {what}",
            partial(served_by, damage=damage, name=name),
            error=error,
        )
        for what, name, damage, error in (
            ("state has a flipped bit", LAST, flip, "its checksum is another one"),
            ("state is a pipe", LAST, pipe, "a pipe"),
            ("index is gone", INDEX, os.unlink, "holds no whole checkpoint"),
            ("index has a flipped bit", INDEX, flip, r"checkpoint\.json is damaged"),
        )
    ),
]


def compared(content: str) -> Callable[[Place], None]:
    def play(place: Place) -> None:
        read_comparison(place.file("comparison/comparison.json", content).parent)

    return play


CELL = '{"method": "a", "held_out": "b", "conditions": {}, "seed": 0, "folder": %s}'
CASES += [
    Case(COMPARED, what, play, error=error)
    for what, play, error in (
        ("it has no cells", compared('{"name": "a"}'), "cells: Field required"),
        ("its cells are a number", compared('{"name": "a", "cells": 3}'), "damaged: cells: "),
        (
            "a cell's run lies outside of its folder",
            compared('{"name": "a", "cells": [' + CELL % '"../../b"' + "]}"),
            r"cells\.0\.folder",
        ),
        (
            "a cell's run is a number",
            compared('{"name": "a", "cells": [' + CELL % "3" + "]}"),
            r"cells\.0\.folder",
        ),
    )
]
