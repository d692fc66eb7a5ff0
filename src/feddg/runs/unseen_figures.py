"""Pictures of the unseen domain for the report: some of its images, and the surest mistakes."""

from pathlib import Path

import numpy
import torch
from PIL import Image
from torch import Tensor, nn

from feddg.evaluation.accuracy import Evaluation
from feddg.records import TEST
from feddg.rng import stream
from feddg.runs.figures import add_figure, grid

SHOWN = 12
LOOKED_AT = 4000
"""Images of the test domains that mistakes are looked for among, at most."""


def draw_unseen(
    folder: Path, evaluation: Evaluation, model: nn.Module, classes: tuple[str, ...], seed: int
) -> None:
    """Writes ``unseen.png``, some test images, and ``mistakes.png``, those most surely wrong.

    Without a test domain nothing is written, without a mistake only the first.

    Args:
        folder: where to.
        evaluation: holds the images.
        model: what predicts.
        classes: names of the classes.
        seed: draws which images are shown.

    Raises:
        OSError: a figure cannot be written.
    """
    rows = evaluation.splits.get(TEST)
    if rows is None:
        return
    order = torch.randperm(len(rows), generator=stream(seed, "unseen figure")).numpy()
    rows = rows[order[:LOOKED_AT]]
    shown = rows[:SHOWN]
    names = sorted({evaluation.domain_names[d] for d in evaluation.domains[shown]})
    held = [classes[label] for label in evaluation.labels[shown]]
    add_figure(
        folder,
        "unseen.png",
        _picture(evaluation, shown),
        f"Images of {', '.join(names)}, which no client trained on, row by row: {', '.join(held)}.",
    )
    logits = evaluation.predict(model.eval(), rows)
    wrong, sureness, taken = surest_mistakes(logits, torch.from_numpy(evaluation.labels[rows]))
    if not len(wrong):
        return
    told = [
        f"{classes[evaluation.labels[row]]} taken for {classes[label]} ({share:.0%})"
        for row, label, share in zip(rows[wrong.numpy()], taken.tolist(), sureness.tolist())
    ]
    among = "" if len(order) <= LOOKED_AT else f" among {LOOKED_AT:,} drawn images"
    add_figure(
        folder,
        "mistakes.png",
        _picture(evaluation, rows[wrong.numpy()]),
        f"The images of the unseen domain that the model is most surely wrong about{among}, row by "
        f"row, with the probability it gave: {'; '.join(told)}. Where the label is what is wrong, "
        "mend it.",
    )


def surest_mistakes(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns which images are wrong, surest first, at most :data:`SHOWN`.

    Args:
        logits: ``(n, classes)``; or log-probabilities.
        labels: ``(n,)`` true classes.

    Returns:
        Their positions, the probability of the class they were taken for, and that class.
    """
    sureness, taken = logits.float().softmax(1).max(1)
    wrong = (taken != labels).nonzero().squeeze(1)
    first = sureness[wrong].argsort(descending=True, stable=True)[:SHOWN]
    chosen = wrong[first]
    return chosen, sureness[chosen], taken[chosen]


def _picture(evaluation: Evaluation, rows: numpy.ndarray) -> Image.Image:
    return grid(evaluation.pixels.gather(torch.from_numpy(rows)))
