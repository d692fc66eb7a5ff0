"""One hostile site of five under ridge: sums that no images can give, and false ones that can be.

    FEDDG_RESNET18=FILE python benchmarks/privacy/ridge_lies.py PACS --out runs/ridge_lies

ResNet-18's 512 features of PACS at 96 pixels, photo unseen, five sites, heterogeneity 0.1, one
round. Site 2 changes its sums before it sends them. docs/results/data/ridge_lies.csv says what it
sent, whether any images have such sums, accuracy, and which sites were refused.
"""

import argparse
import csv
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from feature_table import write_table
from pydantic import Field
from torch import Tensor

from feddg.api import run
from feddg.experiment import Experiment
from feddg.messages import Message, Update, Weights
from feddg.methods.ridge import CROSS, GRAM
from feddg.models.backbones import build_network
from feddg.models.closed_form import packed, unpacked
from feddg.privacy.defence import Defence, register
from feddg.rng import stream
from feddg.settings import Settings

FILE = Path(__file__).parents[2] / "docs" / "results" / "data" / "ridge_lies.csv"
LIAR, SEED = 2, 0
Change = Callable[[Tensor, Tensor], None]
"""Changes the means of z z^T ``(d + 1, d + 1)`` and z y^T ``(d + 1, classes)`` in place."""


def around_means(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Change:
    """Returns a change of what is left of both without the means of the features."""

    def changed(gram: Tensor, cross: Tensor) -> None:
        mean, share = gram[:-1, -1].clone(), cross[-1].clone()
        squares = gram[:-1, :-1] - torch.outer(mean, mean)
        with_labels = cross[:-1] - torch.outer(mean, share)
        squares, with_labels = change(squares, with_labels)
        gram[:-1, :-1] = squares + torch.outer(mean, mean)
        cross[:-1] = with_labels + torch.outer(mean, share)

    return changed


def least_turned(squares: Tensor, with_labels: Tensor) -> tuple[Tensor, Tensor]:
    """Makes the smallest eigenvalue a little negative."""
    values, vectors = torch.linalg.eigh(squares)
    values[0] = -3.5e-3 * values[-1]
    return vectors @ values.diag() @ vectors.T, with_labels


def times(factor: float) -> Change:
    """Returns the sums of features that are longer by a factor."""

    def changed(gram: Tensor, cross: Tensor) -> None:
        gram[:-1] *= factor
        gram[:, :-1] *= factor
        cross[:-1] *= factor

    return changed


def turned(gram: Tensor, cross: Tensor) -> None:
    """Turns the features as no network would."""
    draws = torch.randn(len(gram) - 1, len(gram) - 1, generator=stream(SEED, "turn")).double()
    turn, _ = torch.linalg.qr(draws)
    gram[:-1] = turn @ gram[:-1]
    gram[:, :-1] = gram[:, :-1] @ turn.T
    cross[:-1] = turn @ cross[:-1]


def exchanged(gram: Tensor, cross: Tensor) -> None:
    """Gives every class the images of another."""
    cross.copy_(cross.roll(1, 1))


def both(one: Change, other: Change) -> Change:
    """Returns one change after the other."""

    def changed(gram: Tensor, cross: Tensor) -> None:
        one(gram, cross)
        other(gram, cross)

    return changed


IMPOSSIBLE: dict[str, Change] = {
    "labels that do not add up": lambda g, c: c[:-1].mul_(-1),
    "class means three times as far apart": around_means(lambda s, c: (s, 3 * c)),
    "class means turned round": around_means(lambda s, c: (s, -5 * c)),
    "twice other classes' sums": lambda g, c: c[:-1].copy_(2 * c[:-1].roll(1, 1)),
    "shares of one class alone": lambda g, c: c[-1].copy_(torch.eye(c.shape[1])[0]),
    "half an image more of a class": lambda g, c: c[-1, :2].add_(torch.tensor([3e-4, -3e-4])),
    "a share below 0": lambda g, c: c[-1, :2].add_(torch.tensor([-1.0, 1.0])),
    "a tenth of the squares": around_means(lambda s, c: (0.1 * s, c)),
    "squares turned round": around_means(lambda s, c: (-0.5 * s, c)),
    "no squares": around_means(lambda s, c: (0 * s, c)),
    "the smallest eigenvalue turned": around_means(least_turned),
    "other features' squares": around_means(lambda s, c: (s.roll(1, 0).roll(1, 1), 9 * c)),
    "no mean": lambda g, c: (g[:-1, -1].zero_(), g[-1, :-1].zero_()),  # type: ignore[dict-item]
    "all times 2": lambda g, c: (g.mul_(2), c.mul_(2)),  # type: ignore[dict-item]
    "all times -1": lambda g, c: (g.neg_(), c.neg_()),  # type: ignore[dict-item]
    "nothing": lambda g, c: (g.zero_(), c.zero_()),  # type: ignore[dict-item]
    "not a number": lambda g, c: g[2, 2].fill_(math.nan),
    "infinity": lambda g, c: c[2, 2].fill_(math.inf),
    "features ten times as long": times(10.0),
    "features a thousand times as long": times(1000.0),
}
POSSIBLE: dict[str, Change] = {
    "as they are": lambda g, c: None,
    "labels exchanged": exchanged,
    "features times 3": times(3.0),
    "features turned": turned,
    "labels exchanged and features times 3": both(exchanged, times(3.0)),
    "features turned and times 3": both(turned, times(3.0)),
}


class FalseSumsSettings(Settings):
    """What the liar sends."""

    lie: str = Field("as they are", description="a name of the changes above")


@register
class FalseSums(Defence):
    """An attack where defences sit, at the client: its sums are changed."""

    name = "false_sums"
    summary = "sends other sums than its images'"
    Settings = FalseSumsSettings

    def protect(self, update: Update, received: Weights, message: Message) -> Update:
        """Changes the liar's sums."""
        if update.client != LIAR:
            return update
        gram, cross = unpacked(update.weights[GRAM]).double(), update.weights[CROSS].double()
        cross = cross.clone()
        (IMPOSSIBLE | POSSIBLE)[self.settings.lie](gram, cross)
        update.weights = update.weights | {GRAM: packed(gram), CROSS: cross}
        return update


def features_of(root: Path, out: Path) -> Path:
    """Writes what ResNet-18 makes of PACS at 96 pixels, once."""
    file = out / "pacs.parquet"
    if file.is_file():
        return file
    network = build_network("resnet18", 7, weights=os.environ["FEDDG_RESNET18"])
    chosen = Experiment(data={"source": "pacs", "root": str(root), "image_size": 96})
    return write_table(chosen, network, file)


def main() -> None:
    """Runs all cases and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/ridge_lies"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    table = features_of(asked.root, asked.out)
    rows: list[dict[str, Any]] = []
    for possible, lies in ((True, POSSIBLE), (False, IMPOSSIBLE)):
        for lie in lies:
            chosen = Experiment(
                data={"source": "features", "root": str(table), "id_val": 0.0, "id_test": 0.0},
                hold_out={"test": "photo"},
                clients={"number": 5, "heterogeneity": 0.1},
                method="ridge",
                defences=[{"name": "false_sums", "lie": lie}],
                seed=SEED,
                device="cpu",
            )
            done = run(chosen, asked.out, report=False)
            (test,) = done.evaluations.at(1, "test")
            refused = sorted({one.client for row in done.metrics.rounds for one in row.refused})
            about = {
                "sent": lie,
                "possible": str(possible),
                "accuracy": f"{100 * test.accuracy:.1f}",
            }
            rows.append(about | {"refused": " ".join(map(str, refused))})
            print(*rows[-1].values(), sep=", ", flush=True)
    with FILE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
