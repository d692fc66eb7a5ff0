"""Pictures for the report that need the images: what the method makes of them."""

import json
from pathlib import Path

import numpy
import torch
from PIL import Image

from feddg.methods.base import Method, Redraws, State
from feddg.rng import stream
from feddg.runs.prepare import Images
from feddg.runs.reading import CAPTIONS, read_captions
from feddg.storage import replace_file, replace_text

PER_DOMAIN, WIDE, GAP, SCALE_TO = 4, 6, 2, 96


def draw_figures(folder: Path, images: Images, method: Method, state: State, seed: int) -> None:
    """Writes ``styles.png``: some training images above what the method re-draws them as.

    Methods that re-draw nothing leave no figure.

    Raises:
        OSError: the figure cannot be written.
    """
    if not isinstance(method, Redraws):
        return
    rows = _some_rows(images, seed)
    originals = images.pixels.gather(rows)
    redrawn = method.preview(originals, state.agreed)
    if redrawn is None:
        return
    table = images.table
    names = [table.domain_names[d] for d in numpy.unique(table.domains[images.splits.train])]
    caption = (
        f"Training images ({', '.join(names)}; {PER_DOMAIN} each, in this order), every row of "
        "them above the same images re-drawn in the style that clients train against."
    )
    add_figure(folder, "styles.png", grid(originals, redrawn), caption)


def add_figure(folder: Path, name: str, picture: Image.Image, caption: str) -> None:
    """Writes a picture with its caption beside those that are there; replaces one of its name.

    Args:
        folder: the run's folder of figures.
        name: of the PNG file.
        picture: it.
        caption: what it shows.

    Raises:
        OSError: it cannot be written.
        RunError: the file of captions is damaged.
    """
    replace_file(folder / name, lambda aside: picture.save(aside, "PNG"))
    captions = read_captions(folder) | {name: caption}
    replace_text(folder / CAPTIONS, json.dumps(captions))


def _some_rows(images: Images, seed: int) -> torch.Tensor:
    train, domains = images.splits.train, images.table.domains
    rows = []
    for domain in numpy.unique(domains[train]):
        own = torch.from_numpy(train[domains[train] == domain])
        chance = stream(seed, "figure", int(domain))
        rows.append(own[torch.randperm(len(own), generator=chance)[:PER_DOMAIN]])
    return torch.cat(rows)


def grid(*rows: torch.Tensor) -> Image.Image:
    """Returns columns of uint8 images, one of each row above the other, ``WIDE`` columns a line.

    So narrow a picture can still be made out on a phone. Small images are enlarged, unsmoothed.

    Args:
        rows: at least one, each ``(N, 3, H, W)``.
    """
    count, _, height, width = rows[0].shape
    wide, lines = min(WIDE, count), -(-count // WIDE)
    column = len(rows) * (height + GAP) - GAP
    shape = (lines * (column + 3 * GAP) - 3 * GAP, wide * (width + GAP) - GAP, 3)
    canvas = numpy.full(shape, 255, numpy.uint8)
    for place, images in enumerate(rows):
        for i, image in enumerate(images.permute(0, 2, 3, 1).numpy()):
            top = (i // wide) * (column + 3 * GAP) + place * (height + GAP)
            left = (i % wide) * (width + GAP)
            canvas[top : top + height, left : left + width] = image
    factor = max(1, SCALE_TO // height)
    size = (canvas.shape[1] * factor, canvas.shape[0] * factor)
    return Image.fromarray(canvas).resize(size, Image.Resampling.NEAREST)
