"""A small world in which the commands of the pages can be typed: images, runs, plans."""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

import published_trees
from documented_commands import ROOT
from feddg.api import compare, run
from feddg.comparison.plan import load_plan
from feddg.experiment import Experiment
from feddg.records import RoundRow
from feddg.runs.observer import Observer
from image_folders import make_folder

SMALL = {
    "model": {"backbone": "cnn", "weights": None},
    "clients": {"number": 2},
    "train": {"rounds": 1, "local_steps": 1, "batch_size": 4},
    "evaluate": {"every": 1},
}
SITES = ("site_a", "site_b", "site_c")
PLAN = {"methods": ["fedavg"], "hold_out": ["sketch"], "seeds": [0]}


@dataclass(frozen=True)
class World:
    """Where everything is.

    Attributes:
        place: the folder in which commands are typed, and the home directory.
        names: what is called otherwise here than on the pages.
    """

    place: Path
    names: dict[str, str]

    def words(self, shown: Sequence[str], place: Path) -> list[str]:
        """Returns the words of a command as the shell would, typed in a copy of the place."""
        found: list[str] = []
        for word in shown:
            word = self.names.get(word, word).replace("~/", "")
            matches = sorted(place.glob(word)) if "*" in word else []
            found += [match.relative_to(place).as_posix() for match in matches] or [word]
        return found


class _Interrupts(Observer):
    """Ctrl-C at the end of the first round."""

    def round(self, row: RoundRow) -> None:
        raise KeyboardInterrupt


def make_world(place: Path) -> World:
    """Fills an empty folder with what the pages take for granted."""
    make_folder(place / "images", ("photo", "sketch", "ink"), ("dog", "cat"), each=8)
    for name in ("new_images", "coordinator/test"):
        make_folder(place / name, ("sketch",), ("dog", "cat"), each=2)
    make_folder(place / "photos", ("winter", "summer"), ("dog", "cat"), each=8)
    make_folder(place / "paintings", ("oil",), ("dog",), each=4)
    make_folder(place / "more", each=1)
    shutil.copy(place / "more/a/x/0.png", place / "more/0.png")
    rows = [
        f"{site},{kind},{n},{n % 3}" for site in SITES for kind in ("dog", "cat") for n in range(8)
    ]
    rows = [f"{row[: row.rindex(',')]}.{n},{n % 3}" for n, row in enumerate(rows)]
    (place / "features.csv").write_text("\n".join(["domain,label,f0,f1", *rows]))
    make_folder(place / "nuclei", ("stained", "large", "small"), ("dog", "cat"), each=8)
    rows = [
        f"{file.relative_to(place / 'nuclei').as_posix()},{file.parts[-2]},{file.parts[-3]},"
        f"P{n // 2},s{n % 2},t{n % 3}"
        for n, file in enumerate(sorted((place / "nuclei").rglob("*.png")))
    ]
    heading = "path,label,domain,group,light,side"
    (place / "nuclei" / "table.csv").write_text("\n".join([heading, *rows]))
    published_trees.pacs(place / "PACS")
    published_trees.vlcs_folders(place / "VLCS")
    published_trees.camelyon17(place)
    shutil.copytree(ROOT / "benchmarks", place / "benchmarks")
    data = {"source": "folder", "root": str(place / "images"), "image_size": 16, "id_val": 0.2}
    chosen = {**SMALL, "data": data, "hold_out": "sketch"}
    (place / "experiment.yaml").write_text(yaml.safe_dump(chosen))
    (place / "plan.yaml").write_text(yaml.safe_dump({"base": {**SMALL, "data": data}, **PLAN}))
    begun = _make_runs(place, chosen)
    names = {
        "...": "experiment.yaml",
        "RUN": "runs/my-run",
        "FEDAVG_RUN": "runs/fedavg-0",
        "RIDGE_RUN": "runs/ridge-0",
        "FEDBN_RUN": "runs/fedbn-0",
        "dense": "dog",
        "IMAGES": "images",
        "model.weights=RESNET18": "model.weights=null",
    }
    names |= {"DOMAIN": "sketch", "METHOD": "fedavg"}
    return World(place, names | {"runs/pardon-folder-sketch-s0-1a2b3c4d": f"runs/{begun.name}"})


def _make_runs(place: Path, chosen: dict) -> Path:
    """Finishes a run and a comparison, and returns the folder of a run that was interrupted."""
    runs, cache = place / "runs", place / "cache"
    finished = run(Experiment(**chosen), place / "made", cache=cache, report=False).folder
    for name in ("pardon-0", "fedavg-0", "first-0", "my-run", "A", "B"):
        shutil.copytree(finished, runs / name)
    for method in ("ridge", "fedbn"):
        experiment = Experiment(**{**chosen, "method": method, "name": f"{method}-0"})
        made = run(experiment, place / "made", cache=cache, report=False).folder
        shutil.copytree(made, runs / f"{method}-0")
    compare(load_plan(place / "plan.yaml"), place / "comparisons" / "mine", cache=cache)
    train = {**SMALL["train"], "rounds": 2}
    experiment = Experiment(**{**chosen, "train": train, "name": "begun"})
    with suppress(KeyboardInterrupt):
        run(experiment, runs, cache=cache, report=False, observer=_Interrupts())
    return runs / experiment.label
