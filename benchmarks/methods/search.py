"""What of the closed-form start, outlines and three other ideas helps, at 15 thousand images.

    python benchmarks/methods/search.py PACS RESNET18 docs/results/data/search_pacs.csv

As ``grid.yaml``: PACS at 64 pixels, 100 clients, 12 rounds of 2 steps, chosen on a validation
domain that nobody trains on. Interrupted, it goes on; ``--tested`` gives one column. With
``--budgets`` what did best runs as ``pacs.yaml`` has it, into that plan's results.
"""

import argparse
import copy
import math
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml
from pydantic import Field
from torch import Tensor

import feddg
from feddg.clients.client import Batch, Client
from feddg.methods.base import Method, MethodSettings, register
from feddg.methods.outlines import outlines
from feddg.methods.randconv import convolved, random_kernel
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


@register
class OneEach(Method):
    """A client shows half of its images in one changed form, drawn anew each round.

    DART (Jain et al., CVPR 2023) trains models under different augmentations and averages them;
    clients do it at once.
    """

    name = "one-each"
    forms: ClassVar[tuple[str, ...]] = ("plain", "outlines", "convolved", "grey", "contrast")

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """The loss on the batch, half of it in this client's form of the round."""
        drawn = torch.randint(len(self.forms), (), generator=client.stream("form"))
        form = self.forms[int(drawn)]
        rng = client.stream("half", client.steps)
        chosen = torch.rand(len(batch.images), generator=rng) < 0.5
        images = batch.images.clone()
        some = images[chosen]
        if form == "outlines":
            some = outlines(some)
        elif form == "convolved":
            size = (1, 3, 5, 7)[int(torch.randint(4, (), generator=rng))]
            share = float(torch.rand((), generator=rng))
            some = convolved(client.network, some, random_kernel(size, rng), share)
        elif form == "grey":
            some = some.mean(1, keepdim=True).expand_as(some)
        elif form == "contrast":
            middle = some.mean((1, 2, 3), keepdim=True)
            some = (middle + 2 * (some - middle)).clamp(0, 1)
        images[chosen] = some.to(images)
        return self.head_loss(client, batch, client.network.features(images))


DOMAINS = ("sketch", "art_painting", "cartoon", "photo")
RIDGE, RANDOM = {"train": {"head": "ridge"}}, {"train": {"head": "random"}}
FIXED = {"train": {"head": "ridge", "head_rounds": 6}}
TRIED: list[dict[str, Any]] = [
    {"name": "one-each", "label": "one augmentation a client and round"},
    {"name": "outlines", "label": "Outlines, random head", "experiment": RANDOM},
    {"name": "fedavg", "label": "FedAvg, head in closed form", "experiment": RIDGE},
    {"name": "outlines", "label": "Outlines"},
    {"name": "anchor", "label": "anchored embeddings", "weight": 0.1},
    {"name": "falling", "label": "rate falling in the turn"},
    {"name": "fedavg", "label": "FedAvg, that head fixed for 6 rounds", "experiment": FIXED},
    {
        "name": "one-each",
        "label": "one augmentation a client and round, head in closed form",
        "experiment": RIDGE,
    },
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
    parser.add_argument("--budgets", action="store_true", help="the best, as in pacs.yaml")
    asked = parser.parse_args()
    file = Path(__file__).parent / ("pacs.yaml" if asked.budgets else "grid.yaml")
    plan = yaml.safe_load(file.read_text(encoding="utf-8"))
    if asked.budgets:
        plan |= {"methods": TRIED[:1], "hold_out": [{"test": domain} for domain in DOMAINS]}
    else:
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
