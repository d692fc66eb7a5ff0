"""What of the closed-form start, outlines, DART and two other ideas helps, at 15 thousand images.

    python benchmarks/methods/search.py PACS RESNET18 docs/results/data/search_pacs.csv

As ``grid.yaml``: PACS at 64 pixels, 100 clients, 12 rounds of 2 steps, chosen on a validation
domain that nobody trains on. Interrupted, it goes on; ``--tested`` gives one column.
"""

import argparse
import copy
import math
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import Field
from torch import Tensor

import feddg
from feddg.clients.client import Batch, Client
from feddg.methods.base import Method, MethodSettings, register
from feddg.models.network import Network


class AnchorSettings(MethodSettings):
    """Settings of Anchor."""

    weight: float = Field(1.0, ge=0, description="of the squared distance")


@register
class Anchor(Method):
    """Embeddings stay near those of the network that training starts from.

    The idea of MIRO (Cha et al., ECCV 2022) in its plainest form: one variance for all dimensions.
    """

    name = "anchor"
    settings: AnchorSettings

    def network(self, network: Network) -> Network:
        """Keeps a copy of the starting network, which is not trained."""
        self.start = copy.deepcopy(network).eval().requires_grad_(False)
        return network

    def head_loss(self, client: Client, batch: Batch, embeddings: Tensor) -> dict[str, Tensor]:
        """Adds the distance, as a share of the starting embeddings' length."""
        with torch.no_grad():
            start = self.start.features(batch.images)
        distance = (embeddings - start).square().sum(1).mean() / start.square().sum(1).mean()
        terms = super().head_loss(client, batch, embeddings)
        return terms | {"anchor": self.settings.weight * distance}


@register
class Falling(Method):
    """The learning rate falls inside a client's turn, along half a cosine."""

    name = "falling"

    def step(self, client: Client, batch: Batch) -> None:
        """Takes a step at this step's rate."""
        share = client.steps / (client.train.local_steps or 1)
        assert client.optimizer is not None
        for group in client.optimizer.param_groups:
            group["lr"] = client.train.lr * (1 + math.cos(math.pi * share)) / 2
        super().step(client, batch)


RIDGE, RANDOM = {"train": {"head": "ridge"}}, {"train": {"head": "random"}}
FIXED = {"train": {"head": "ridge", "head_rounds": 6}}
TRIED: list[dict[str, Any]] = [
    {"name": "dart", "label": "DART"},
    {"name": "outlines", "label": "Outlines, random head", "experiment": RANDOM},
    {"name": "fedavg", "label": "FedAvg, head in closed form", "experiment": RIDGE},
    {"name": "outlines", "label": "Outlines"},
    {"name": "anchor", "label": "anchored embeddings", "weight": 0.1},
    {"name": "falling", "label": "rate falling in the turn"},
    {"name": "fedavg", "label": "FedAvg, that head fixed for 6 rounds", "experiment": FIXED},
    {"name": "dart", "label": "DART, head in closed form", "experiment": RIDGE},
]
"""Beside FedAvg, which is the grid's "12 rounds of 2 steps"."""


def main() -> None:
    """Runs what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pacs", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--tested", nargs="+", help="domains to test on; all by default")
    parser.add_argument("--out", type=Path, default=Path("comparisons/search-pacs"))
    asked = parser.parse_args()
    plan = yaml.safe_load((Path(__file__).parent / "grid.yaml").read_text(encoding="utf-8"))
    plan |= {
        "name": "search-pacs",
        "title": "PACS, two domains out, parts of a method",
        "question": "",
        "methods": TRIED,
    }
    plan["base"]["train"] |= {"rounds": 12, "local_steps": 2}
    if asked.tested:
        plan["hold_out"] = [one for one in plan["hold_out"] if one["test"] in asked.tested]
    given = {"data": {"root": str(asked.pacs)}, "model": {"weights": str(asked.weights)}}
    feddg.compare(
        plan, asked.out, overrides=given, results=asked.results, drop_weights=True, report=False
    )


if __name__ == "__main__":
    main()
