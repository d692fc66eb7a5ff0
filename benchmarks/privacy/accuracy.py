"""Accuracy against epsilon: updates and styles apart, FedAvg and PARDON; PARDON's noise rows.

    python benchmarks/privacy/accuracy.py digits --out runs/privacy
    python benchmarks/privacy/accuracy.py pacs --root data/PACS --out runs/privacy_pacs

Both train 16 features and a head on fixed features (fixed_features.py) in 100 clients, so that the
epsilons differ; digits_ten_clients trains a small network in 10, where nothing is left. Runs that
are complete are not run again. Writes docs/results/data/privacy_DATA.csv, one row a run, and
docs/results/privacy_DATA.png, after each run.
"""

import argparse
import csv
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy

matplotlib.use("Agg")
import fixed_features  # noqa: F401  (registers the backbones)
import torch
from matplotlib import pyplot

from feddg.api import run
from feddg.experiment import Experiment
from feddg.runs.table import FINAL

RESULTS = Path(__file__).parents[2] / "docs" / "results"
EPSILONS = (16, 1, 8, 4, None)
SHORT = {"rounds": 12, "local_steps": 4, "batch_size": 10, "optimizer": "sgd", "lr": 0.2}
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {
        "data": {"source": "digits", "id_val": 0.0, "id_test": 0.3},
        "hold_out": {"test": "ink"},
        "clients": {"number": 100, "heterogeneity": 0.1},
        "model": {"backbone": "fixed_edges", "weights": None, "normalization": "frozen"},
        "train": {**SHORT, "augmentation": "none"},
        "evaluate": {"every": 1000, "pictures": False},
        "device": "cpu",
    },
    "digits_ten_clients": {
        "data": {"source": "digits", "id_val": 0.0, "id_test": 0.1},
        "hold_out": {"test": "ink"},
        "clients": {"number": 10, "heterogeneity": 0.1},
        "model": {"backbone": "cnn_gn", "weights": None, "normalization": "frozen"},
        "train": {"rounds": 8, "local_steps": 8, "batch_size": 32, "optimizer": "adam", "lr": 0.01},
        "evaluate": {"every": 1000, "pictures": False},
    },
    "pacs": {
        "preset": "pacs",
        "data": {
            "source": "pacs",
            "image_size": 64,
            "leave_out": ["sketch"],
            "id_val": 0.0,
            "id_test": 0.1,
        },
        "hold_out": {"test": "photo"},
        "clients": {"number": 100, "heterogeneity": 0.1},
        "model": {"backbone": "fixed_resnet18", "weights": None, "normalization": "frozen"},
        "train": {**SHORT, "augmentation": "none"},
        "evaluate": {"every": 1000, "pictures": False},
        "device": "cpu",
    },
}
NORMS = {"digits": 0.5, "digits_ten_clients": 2.0, "pacs": 0.5}
"""Clipped without noise is what noise is compared with; so is what is not clipped at all."""
NO_NOISE = "none"
DOTS = {"fedavg": ":", "pardon": "--"}
Asked = tuple[str, str, str, dict[str, Any], dict[str, Any], int]
"""What is noised, a level's name, method, privacy, its settings and the seed."""


def asked(seeds: int, methods: Sequence[str], norm: float) -> Iterator[Asked]:
    """Yields the runs, method by method: FedAvg's are short."""
    for method in methods:
        for seed in range(seeds):
            yield from updates_noised(method, seed, norm)
            if method == "pardon":
                yield from styles_noised(seed)


def updates_noised(method: str, seed: int, norm: float) -> Iterator[Asked]:
    clipped = {"clipping": "fixed", "clipping_norm": norm}
    open_styles = {"open_styles": True} if method == "pardon" else {}
    yield "nothing", "none", method, {}, {}, seed
    for epsilon in EPSILONS:
        noise = {**clipped, **({} if epsilon is None else {"epsilon": epsilon})}
        level = "clipped" if epsilon is None else str(epsilon)
        yield "updates", level, method, {**noise, **open_styles}, {}, seed


def styles_noised(seed: int) -> Iterator[Asked]:
    for unit in ("image", "client"):
        for epsilon in filter(None, EPSILONS):
            noise = {"style_epsilon": epsilon, "style_unit": unit}
            yield f"styles ({unit})", str(epsilon), "pardon", noise, {}, seed
    for share in (0.1, 0.2):  # FISC, Table 10: s = 0.05; no promise
        perturbed = {"noise_scale": 0.05, "noise_coefficient": share}
        yield "Table 10", f"s=0.05 p={share}", "pardon", {}, perturbed, seed


def measured(
    data: str, seeds: int, methods: Sequence[str], out: Path, root: Path | None
) -> list[dict[str, Any]]:
    rows = []
    for what, level, method, privacy, settings, seed in asked(seeds, methods, NORMS[data]):
        fields = {"device": "auto", **SETTINGS[data], "seed": seed}
        if root is not None:
            fields["data"] = {**fields["data"], "root": str(root)}
        experiment = Experiment(
            **fields, method={"name": method, "settings": settings}, privacy=privacy
        )
        done = run(experiment, out, report=False)
        last = FINAL.of(done.table)
        accuracy = {split: last.value(split) for split in ("test", "id_test")}
        spent = done.privacy
        row = {
            "data": data,
            "method": method,
            "noised": what,
            "level": level,
            "seed": seed,
            "rounds": done.rounds_done,
            "test_accuracy": f"{accuracy['test']:.4f}",
            "in_domain_accuracy": f"{accuracy['id_test']:.4f}",
            "epsilon": ";".join(f"{key[0]}:{row.epsilon:.4g}" for key, row in spent.items()),
            "noise": ";".join(f"{key[0]}:{row.noise:.4g}" for key, row in spent.items()),
            "id": experiment.id,
        }
        print(*row.values(), flush=True)
        rows.append(row)
        written(rows, RESULTS / "data" / f"privacy_{data}.csv")
    return rows


def written(rows: list[dict[str, Any]], table: Path) -> None:
    """Writes what there is so far: a long measurement may be ended early."""
    os.makedirs(table.parent, exist_ok=True)
    with open(table, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    drawn(rows, table.parents[1] / f"{table.stem}.png")


def drawn(rows: list[dict[str, Any]], file: Path) -> None:
    """Draws a line for what is noised in which method, over epsilon; at its end without noise."""
    found: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        level = NO_NOISE if row["level"] in ("none", "clipped") else row["level"]
        found[row["method"], row["noised"]][level].append(100 * float(row["test_accuracy"]))
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    levels = [*map(str, sorted(filter(None, EPSILONS))), NO_NOISE]
    for (method, what), by_level in found.items():
        if what == "nothing":
            mean = numpy.mean(by_level[NO_NOISE])
            axes.axhline(
                mean, ls=DOTS.get(method, ":"), lw=1, color="grey", label=f"{method} as is"
            )
        elif what != "Table 10":
            if what.startswith("styles"):
                by_level = by_level | {NO_NOISE: found[method, "nothing"][NO_NOISE]}
            places = [place for place, level in enumerate(levels) if by_level.get(level)]
            shown = [by_level[levels[place]] for place in places]
            axes.errorbar(
                places,
                [numpy.mean(values) for values in shown],
                [numpy.std(values, ddof=1) if len(values) > 1 else 0 for values in shown],
                marker="o",
                capsize=3,
                label=f"{method}, {what}",
            )
    axes.set_xticks(range(len(levels)), levels)
    axes.set(xlabel="epsilon", ylabel="accuracy on the unseen domain, %", ylim=(0, None))
    axes.legend(fontsize=8, loc="best")
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", choices=sorted(SETTINGS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=["fedavg", "pardon"])
    parser.add_argument("--root", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/privacy"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    measured(chosen.data, chosen.seeds, chosen.methods, chosen.out, chosen.root)
