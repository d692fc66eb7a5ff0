"""Pictures for the report that need the images: what the method makes of them."""

import json
from pathlib import Path

import numpy
import torch
from PIL import Image

from feddg.files import replace_file, replace_text
from feddg.methods.base import Method, State
from feddg.methods.showing import Redraws
from feddg.randomness import stream
from feddg.runs.prepare import Images

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
    picture = grid(originals, redrawn)
    replace_file(folder / "styles.png", lambda aside: picture.save(aside, "PNG"))
    caption = (
        f"Training images ({', '.join(names)}; {PER_DOMAIN} each, in this order), every row of "
        "them above the same images re-drawn in the style that clients train against."
    )
    replace_text(folder / "captions.json", json.dumps({"styles.png": caption}))


def _some_rows(images: Images, seed: int) -> torch.Tensor:
    train, domains = images.splits.train, images.table.domains
    rows = []
    for domain in numpy.unique(domains[train]):
        own = torch.from_numpy(train[domains[train] == domain])
        chance = stream(seed, "figure", int(domain))
        rows.append(own[torch.randperm(len(own), generator=chance)[:PER_DOMAIN]])
    return torch.cat(rows)


def grid(above: torch.Tensor, below: torch.Tensor) -> Image.Image:
    """Returns pairs of uint8 images ``(N, 3, H, W)``, one above the other, ``WIDE`` pairs a row.

    So narrow a picture can still be made out on a phone. Small images are enlarged, unsmoothed.
    """
    count, _, height, width = above.shape
    wide, rows = min(WIDE, count), -(-count // WIDE)
    pair = 2 * height + GAP
    shape = (rows * (pair + 3 * GAP) - 3 * GAP, wide * (width + GAP) - GAP, 3)
    canvas = numpy.full(shape, 255, numpy.uint8)
    for offset, images in ((0, above), (height + GAP, below)):
        for i, image in enumerate(images.permute(0, 2, 3, 1).numpy()):
            top = (i // wide) * (pair + 3 * GAP) + offset
            left = (i % wide) * (width + GAP)
            canvas[top : top + height, left : left + width] = image
    factor = max(1, SCALE_TO // height)
    size = (canvas.shape[1] * factor, canvas.shape[0] * factor)
    return Image.fromarray(canvas).resize(size, Image.Resampling.NEAREST)
