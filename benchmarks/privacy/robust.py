"""Hostile sites: updates that pull the wrong way, and false styles, under what defends.

    python benchmarks/privacy/robust.py updates --out runs/robust
    python benchmarks/privacy/robust.py styles --out runs/robust

``updates``: five sites, of which none or one sends its training's change times -4, and ten, of
which none, two or four do, under every robust aggregation: a small network on digits, and a head on
ImageNet features of emoji. ``styles``: one of five sites sends PARDON's or VISTA's server a false
style, with and without the range that styles must lie in. Writes docs/results/data/robust_KIND.csv,
one row a run, after each run; rows that are there are not run again. The first ones, of November
2026, were written without their machine and precision.
"""

import argparse
import csv
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from feature_table import write_table
from pydantic import Field
from torch import Tensor

from feddg.api import run
from feddg.clients.client import Client
from feddg.experiment import Experiment
from feddg.messages import Message, SchemaContext, Update, Weights
from feddg.methods.base import register as register_method
from feddg.methods.pardon import Pardon, PardonSettings
from feddg.methods.style_exchange import OneStyleEach
from feddg.methods.vista import Vista, VistaSettings
from feddg.models.backbones import build_network
from feddg.privacy.defence import Defence
from feddg.privacy.defence import register as register_defence
from feddg.rng import stream
from feddg.runs.table import FINAL
from feddg.settings import Settings

DATA = Path(__file__).parents[2] / "docs" / "results" / "data"
SEEDS = (0, 1, 2)
LIARS = {5: (0, 1), 10: (0, 2, 4)}
SETTINGS: dict[str, Any] = {
    "data": {"source": "digits", "image_size": 16, "id_val": 0.0, "id_test": 0.2},
    "hold_out": {"test": "ink"},
    "model": {"backbone": "cnn", "weights": None},
    "train": {"rounds": 10, "local_epochs": 2, "batch_size": 16, "optimizer": "adam", "lr": 0.003},
    "evaluate": {"every": 1000, "pictures": False, "averages": "never"},
    "device": "cpu",
}
EMOJI = SETTINGS | {
    "hold_out": {"test": "noto"},
    "model": {"backbone": "features"},
    "train": SETTINGS["train"] | {"head": "random", "rounds": 20},
}
"""The same of a head on features that were extracted beforehand."""


def defences(sites: int) -> dict[str, list[dict[str, Any]]]:
    """Returns every robust aggregation, by name."""
    trimmed, krum = (4, 3) if sites == 10 else (1, 1)
    return {
        "none": [],
        "norm_bounding": [{"name": "norm_bounding"}],
        "median": [{"name": "median"}],
        f"trimmed_mean, f = {trimmed}": [{"name": "trimmed_mean", "bad_clients": trimmed}],
        f"krum, f = {krum}": [{"name": "krum", "bad_clients": krum}],
        f"krum, f = {krum}, selected = {sites // 2}": [
            {"name": "krum", "bad_clients": krum, "selected": sites // 2}
        ],
        "centred_clipping": [{"name": "centred_clipping"}],
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


def updates(out: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yields what a row says, and the experiment's fields."""
    table = {"source": "features", "root": emoji_features(out), "id_val": 0.0, "id_test": 0.2}
    kinds = {"emoji": EMOJI | {"data": table}, "digits": SETTINGS}
    for (images, settings), sites, seed in product(kinds.items(), LIARS, SEEDS):
        for (defence, chosen), liars in product(defences(sites).items(), LIARS[sites]):
            drawn = torch.randperm(sites, generator=stream(seed, "liars"))[:liars]
            attack = [{"name": "flipped", "clients": sorted(drawn.tolist())}] if liars else []
            about = {"images": images, "defence": defence, "liars": liars, "sites": sites}
            clients = {"number": sites, "heterogeneity": 0.1}
            yield (
                about | {"seed": seed},
                settings | {"clients": clients, "defences": [*attack, *chosen]},
            )


def emoji_features(out: Path) -> Path:
    """Writes what EfficientNet-Lite0 makes of emoji at 96 pixels, once."""
    file = out / "emoji.parquet"
    if file.is_file():
        return file
    network = build_network("efficientnet_lite0", 7, weights="imagenet", image_size=96)
    chosen = Experiment(data={"source": "emoji", "image_size": 96})
    return write_table(chosen, network, file)


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


def styles(out: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
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
    """Carries out the runs that have no row yet, and writes what there is after each."""
    file = DATA / f"robust_{kind}.csv"
    with file.open(newline="", encoding="utf-8") as content:
        rows: list[dict[str, Any]] = list(csv.DictReader(content))
    for row, fields in {"updates": updates, "styles": styles}[kind](out):
        about = {name: str(value) for name, value in row.items()}
        if any(about.items() <= known.items() for known in rows):
            continue
        done = run(Experiment(**SETTINGS | fields, seed=row["seed"]), out, report=False)
        last = FINAL.of(done.table)
        for column, split in (("unseen", "test"), ("seen", "id_test")):
            about[f"{column}_accuracy"] = f"{last.value(split):.4f}"
        made_with = [done.environment.get(name, "") for name in ("processor", "precision")]
        rows.append(about | {"machine": ", ".join(made_with)})
        print(*about.values(), flush=True)
        with file.open("w", newline="", encoding="utf-8") as content:
            writer = csv.DictWriter(content, dict.fromkeys(name for row in rows for name in row))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("updates", "styles"))
    parser.add_argument("--out", type=Path, default=Path("runs/robust"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    measured(chosen.kind, chosen.out)
