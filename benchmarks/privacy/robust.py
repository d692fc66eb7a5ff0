"""Hostile sites: updates that pull the wrong way, and false styles, under what defends.

    python benchmarks/privacy/robust.py updates --out runs/robust
    python benchmarks/privacy/robust.py styles --out runs/robust

``updates``: ten sites, of which none, two or four send their training's change times -4, under
every robust aggregation. ``styles``: one of five sites sends PARDON's or VISTA's server a false
style, with and without the range that styles must lie in. Runs that are complete are not run again.
Writes docs/results/data/robust_KIND.csv, one row a run, after each run.
"""

import argparse
import csv
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from feddg.api import run
from feddg.clients.client import Client
from feddg.experiment import Experiment
from feddg.messages import Message, SchemaContext, Update, Weights
from feddg.methods.base import Round, weighted_mean
from feddg.methods.base import register as register_method
from feddg.methods.pardon import Pardon, PardonSettings
from feddg.methods.style_exchange import OneStyleEach
from feddg.methods.vista import Vista, VistaSettings
from feddg.privacy.defence import Defence
from feddg.privacy.defence import register as register_defence
from feddg.privacy.robust import aggregated, kept, middle
from feddg.rng import stream
from feddg.settings import Settings

DATA = Path(__file__).parents[2] / "docs" / "results" / "data"
SEEDS = (0, 1)
SITES, LIARS = 10, (0, 2, 4)
SETTINGS: dict[str, Any] = {
    "data": {"source": "digits", "image_size": 16, "id_val": 0.0, "id_test": 0.2},
    "hold_out": {"test": "ink"},
    "model": {"backbone": "cnn", "weights": None},
    "train": {"rounds": 10, "local_epochs": 2, "batch_size": 16, "optimizer": "adam", "lr": 0.003},
    "evaluate": {"every": 1000, "pictures": False, "averages": "never"},
    "device": "cpu",
}
DEFENCES: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "norm_bounding": [{"name": "norm_bounding"}],
    "median": [{"name": "median"}],
    "trimmed_mean, f = 4": [{"name": "trimmed_mean", "bad_clients": 4}],
    "krum, f = 3": [{"name": "krum", "bad_clients": 3}],
    "krum, f = 3, selected = 5": [{"name": "krum", "bad_clients": 3, "selected": 5}],
    "centred_clipping": [{"name": "centred_clipping"}],
    "bucketed_median": [{"name": "bucketed_median"}],
}


# Updates that pull the wrong way


class FlippedSettings(Settings):
    """Who lies, and how."""

    clients: list[int] = Field(description="who lies")
    times: float = Field(-4.0, description="what the change of their trained weights is times")


@register_defence
class Flipped(Defence):
    """An attack where defences sit, at the client: what was trained is turned round."""

    name = "flipped"
    summary = "sends the opposite of what was trained"
    Settings = FlippedSettings

    def protect(self, update: Update, received: Weights, message: Message) -> Update:
        """Leaves statistics as they are: what cannot be is refused anyway."""
        if update.client not in self.settings.clients:
            return update
        changed = {
            name: received[name] + self.settings.times * (update.weights[name] - received[name])
            for name in self.facts.trained
        }
        return replace(update, weights=update.weights | changed)


class BucketedSettings(Settings):
    """How many updates a bucket has."""

    size: int = Field(2, ge=1, description="updates of a bucket, which are averaged")


@register_defence
class BucketedMedian(Defence):
    """The median of the means of random buckets (Karimireddy, He and Jaggi 2022, Algorithm 1)."""

    name = "bucketed_median"
    summary = "the median of means of random buckets"
    Settings = BucketedSettings
    aggregates = True

    def collected(self, updates: Iterator[Update], round: Round) -> Iterator[Update]:
        """Yields one update: the median of the buckets."""
        copies = kept(self, updates)
        order = torch.randperm(len(copies), generator=stream(0, "buckets", round.number)).tolist()
        size = self.settings.size
        buckets = [[copies[k] for k in order[at : at + size]] for at in range(0, len(order), size)]
        means = [
            replace(bucket[0], weights=weighted_mean((update.weights, 1) for update in bucket))
            for bucket in buckets
        ]
        yield aggregated(means, middle)


def updates() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yields what a row says, and the experiment's fields."""
    for defence, chosen in DEFENCES.items():
        for liars in LIARS:
            for seed in SEEDS:
                drawn = torch.randperm(SITES, generator=stream(seed, "liars"))[:liars]
                attack = [{"name": "flipped", "clients": sorted(drawn.tolist())}] if liars else []
                yield (
                    {"defence": defence, "liars": liars, "sites": SITES, "seed": seed},
                    {
                        "clients": {"number": SITES, "heterogeneity": 0.1},
                        "defences": [*attack, *chosen],
                    },
                )


# Styles that lie

Lie = Literal["none", "ten thousand", "largest there is"]
LIES: tuple[tuple[Lie, bool], ...] = (
    ("none", True),
    ("ten thousand", False),
    ("ten thousand", True),
    ("largest there is", True),
)


class Lying(OneStyleEach):
    """The first client's style is false; ranges may be as wide as they were before there were any.

    Mixed in before a method's own class.
    """

    def client_statistics(self, client: Client) -> Message:
        """Puts another style in the first client's place."""
        message = super().client_statistics(client)
        lie = self.settings.lie  # type: ignore[attr-defined]
        if client.id == 0 and lie != "none":
            style = message.tensors["style"]
            largest = super().style_range(SchemaContext(0, 0, 0))[1].to(style)
            message.tensors["style"] = largest if lie != "ten thousand" else style * 0 + 1e4
        return message

    def style_range(self, context: SchemaContext) -> tuple[Tensor, Tensor]:
        """The range, or 1e4 either way."""
        low, high = super().style_range(context)
        if self.settings.ranges:  # type: ignore[attr-defined]
            return low, high
        return torch.full_like(low, -1e4), torch.full_like(high, 1e4)


class LyingPardonSettings(PardonSettings):
    """PARDON's, and the lie."""

    lie: Lie = Field("none", description="what the first client sends")
    ranges: bool = Field(True, description="whether a style must lie in its range")


class LyingVistaSettings(VistaSettings):
    """VISTA's, and the lie."""

    lie: Lie = Field("none", description="what the first client sends")
    ranges: bool = Field(True, description="whether a style must lie in its range")


@register_method
class LyingPardon(Lying, Pardon):
    """PARDON with a liar."""

    name, aliases = "lying-pardon", ()
    settings: LyingPardonSettings


@register_method
class LyingVista(Lying, Vista):
    """VISTA with a liar."""

    name = "lying-vista"
    settings: LyingVistaSettings


def styles() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yields what a row says, and the experiment's fields."""
    for method in ("pardon", "vista"):
        for lie, ranges in LIES:
            for seed in SEEDS:
                settings = {"lie": lie, "ranges": ranges}
                yield (
                    {"method": method, "lie": lie, "ranges": ranges, "seed": seed},
                    {
                        "clients": {"number": 5, "heterogeneity": 0.1},
                        "train": SETTINGS["train"] | {"rounds": 5},
                        "method": {"name": f"lying-{method}", "settings": settings},
                    },
                )


def measured(kind: str, out: Path) -> None:
    """Carries out the runs, and writes what there is after each."""
    rows: list[dict[str, Any]] = []
    for row, fields in {"updates": updates, "styles": styles}[kind]():
        done = run(Experiment(**SETTINGS | fields, seed=row["seed"]), out, report=False)
        evaluations = done.evaluations
        last = evaluations.rounds[-1]
        for column, split in (("unseen", "test"), ("seen", "id_test")):
            accuracies = [found.accuracy for found in evaluations.at(last, split)]
            row[f"{column}_accuracy"] = f"{statistics.mean(accuracies):.4f}"
        rows.append(row)
        print(*row.values(), flush=True)
        with (DATA / f"robust_{kind}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("updates", "styles"))
    parser.add_argument("--out", type=Path, default=Path("runs/robust"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    measured(chosen.kind, chosen.out)
