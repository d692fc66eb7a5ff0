"""Pictures and tables for the report that need the images or the network."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn.functional import pad

from feddg.data.pixels import Vectors
from feddg.evaluation.accuracy import Evaluation
from feddg.methods.base import Method, State
from feddg.records import TEST
from feddg.rng import stream
from feddg.runs.prepare import Images
from feddg.runs.reading import CAPTIONS, MISTAKE, read_captions
from feddg.storage import replace_file, replace_text

PER_DOMAIN, WIDE, GAP, SCALE_TO = 4, 6, 2, 96
SHOWN = 12
LOOKED_AT = 4000
"""Largest number of test images searched for mistakes."""


def draw_figures(folder: Path, images: Images, method: Method, state: State, seed: int) -> None:
    """Writes ``styles.png``: some training images above their stylized copies.

    Methods that stylize nothing have no figure.

    Raises:
        OSError: the figure cannot be written.
    """
    domains = images.table.domains
    rows = some_of_each(domains, images.splits.train, PER_DOMAIN, seed, "figure")
    originals = images.pixels.gather(torch.from_numpy(rows))
    stylized = method.preview(originals, state.context)
    if stylized is None:
        return
    names = [images.table.domain_names[d] for d in numpy.unique(domains[images.splits.train])]
    caption = (
        f"Training images ({', '.join(names)}; {PER_DOMAIN} each, in this order), every row of "
        "them above the same images stylized in the style that clients train against."
    )
    add_figure(folder, "styles.png", grid(originals, stylized), caption)


def add_figure(folder: Path, name: str, picture: Image.Image, caption: str) -> None:
    """Adds a picture with its caption to a run's figures; replaces one with the same name.

    Args:
        folder: the run's folder of figures.
        name: name of the PNG file.
        picture: the picture.
        caption: text below it.

    Raises:
        OSError: it cannot be written.
        RunError: the file of captions is damaged.
    """
    replace_file(folder / name, lambda aside: picture.save(aside, "PNG"))
    captions = read_captions(folder) | {name: caption}
    replace_text(folder / CAPTIONS, json.dumps(captions))


def some_of_each(
    domains: numpy.ndarray, rows: numpy.ndarray, most: int, seed: int, purpose: str
) -> numpy.ndarray:
    """Returns rows drawn from each domain, at most ``most`` of each.

    Args:
        domains: domain of every image.
        rows: the rows to draw from.
        most: largest number of rows per domain.
        seed: the experiment's seed.
        purpose: name of the random stream.
    """
    drawn = []
    for domain in numpy.unique(domains[rows]):
        part = rows[domains[rows] == domain]
        order = torch.randperm(len(part), generator=stream(seed, purpose, int(domain)))
        drawn.append(part[order[:most].numpy()])
    return numpy.concatenate(drawn)


def grid(*rows: torch.Tensor) -> Image.Image:
    """Returns images as a grid: columns with one image of each row, ``WIDE`` columns a line.

    The width suits a phone. Small images are enlarged without smoothing.

    Args:
        rows: at least one, each ``(N, 3, H, W)``.
    """
    wide = min(WIDE, len(rows[0]))
    columns = torch.cat([pad(images, (0, GAP, 0, GAP), value=255) for images in rows], 2)
    columns = pad(columns, (0, 0, 0, 2 * GAP), value=255)
    columns = torch.cat(
        [columns, columns.new_full((-len(columns) % wide, *columns.shape[1:]), 255)]
    )
    lines = [torch.cat([*line], 2) for line in columns.split(wide)]
    canvas = Image.fromarray(torch.cat(lines, 1)[:, : -3 * GAP, :-GAP].permute(1, 2, 0).numpy())
    factor = max(1, SCALE_TO // rows[0].shape[2])
    return ImageOps.scale(canvas, factor, Image.Resampling.NEAREST)


def draw_unseen(
    folder: Path,
    evaluation: Evaluation,
    logits: Callable[[numpy.ndarray], Tensor],
    classes: tuple[str, ...],
    seed: int,
) -> None:
    """Writes ``unseen.png``, some test images, and the most confident mistakes, each a picture.

    Without a test domain, or of features, nothing is written; without mistakes only the first.

    Args:
        folder: the folder to write to.
        evaluation: the images.
        logits: returns the model's ``(n, classes)`` for rows.
        classes: names of the classes.
        seed: seed for choosing the images.

    Raises:
        OSError: a figure cannot be written.
    """
    rows = evaluation.splits.get(TEST)
    if rows is None or isinstance(evaluation.pixels, Vectors):
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
    labels = torch.from_numpy(evaluation.labels[rows])
    wrong, sureness, taken = surest_mistakes(logits(rows), labels)
    for earlier in folder.glob(f"{MISTAKE}*.png"):
        earlier.unlink()
    for place, (row, label, share) in enumerate(
        zip(rows[wrong.numpy()], taken.tolist(), sureness.tolist()), start=1
    ):
        add_figure(
            folder,
            f"{MISTAKE}{place:02}.png",
            _picture(evaluation, numpy.array([row])),
            f"{classes[evaluation.labels[row]]} taken for {classes[label]} ({share:.0%})",
        )


def surest_mistakes(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the most confident wrong predictions, at most :data:`SHOWN`.

    Args:
        logits: ``(n, classes)`` logits or log-probabilities.
        labels: ``(n,)`` true classes.

    Returns:
        Their positions, the probability of the predicted class, and that class.
    """
    sureness, taken = logits.float().softmax(1).max(1)
    wrong = (taken != labels).nonzero().squeeze(1)
    first = sureness[wrong].argsort(descending=True, stable=True)[:SHOWN]
    chosen = wrong[first]
    return chosen, sureness[chosen], taken[chosen]


def _picture(evaluation: Evaluation, rows: numpy.ndarray) -> Image.Image:
    return grid(evaluation.pixels.gather(torch.from_numpy(rows)))
