"""Pictures of what an attack drew, beside the truth."""

from collections.abc import Sequence

import torch
from torch import Tensor

from feddg.attacks.inversion import Inverted
from feddg.attacks.reconstruction import FED, SAMPLE, SENT, UNRELATED, Reconstruction

SHOWN = 6
"""Columns of a picture for each domain."""
Captioned = tuple[list[Tensor], str]
"""Rows of images ``(n, 3, S, S)`` uint8, and the words below them."""


def picture_of(found: Reconstruction, domain_names: Sequence[str]) -> dict[str, Captioned]:
    """Returns the picture of a reconstruction, under its file's name."""
    domains = found.targets.domains
    shown = torch.cat(
        [(domains == d).nonzero().flatten()[:SHOWN] for d in domains.unique().tolist()]
    )
    rows = [found.targets.images[shown], *(_bytes(found.drawn[fed][shown]) for fed in FED)]
    reader = "server" if found.attacker == "server" else "another client"
    names = [domain_names[d] for d in domains.unique().tolist()]
    caption = (
        f"What the {reader} draws from {found.entry.key}, top to bottom: true images "
        f"({', '.join(names)}), drawn from what was {SENT}, from each image's own {SAMPLE}, "
        f"and from an {UNRELATED} image's, which is what chance looks like."
    )
    return {f"attack-{found.attacker}-{_plain(found.entry.key)}.png": (rows, caption)}


def picture_of_inverted(found: Inverted) -> dict[str, Captioned]:
    """Returns the picture of inverted updates, under its file's name."""
    shown = torch.arange(min(2 * SHOWN, len(found.targets)))
    rows = [found.targets.images[shown], _bytes(found.drawn[shown])]
    caption = (
        f"Gradient inversion of single clients' updates of {found.batch_size} images "
        f"(optimizer: {found.optimizer}): true images above what was found."
    )
    return {f"attack-update-{found.optimizer}-{found.batch_size}.png": (rows, caption)}


def _bytes(images: Tensor) -> Tensor:
    return (images * 255).round().to(torch.uint8)


def _plain(key: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in key).strip("-")
