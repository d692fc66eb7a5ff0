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
    caption = (
        f"Training images ({', '.join(names)}; {PER_DOMAIN} each, in this order), every row of "
        "them above the same images re-drawn in the style that clients train against."
    )
    add_figure(folder, "styles.png", picture, caption)


def add_figure(folder: Path, name: str, picture: Image.Image, caption: str) -> None:
    """Writes a picture for the report, and its caption behind those that are there.

    Raises:
        OSError: it cannot be written.
    """
    replace_file(folder / name, lambda aside: picture.save(aside, "PNG"))
    captions = folder / "captions.json"
    try:
        known = json.loads(captions.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or damaged: reading the run says so
        known = {}
    known = known if isinstance(known, dict) else {}
    known.pop(name, None)
    replace_text(captions, json.dumps({**known, name: caption}, ensure_ascii=False))


def _some_rows(images: Images, seed: int) -> torch.Tensor:
    train, domains = images.splits.train, images.table.domains
    rows = []
    for domain in numpy.unique(domains[train]):
        own = torch.from_numpy(train[domains[train] == domain])
        chance = stream(seed, "figure", int(domain))
        rows.append(own[torch.randperm(len(own), generator=chance)[:PER_DOMAIN]])
    return torch.cat(rows)


def grid(*layers: torch.Tensor) -> Image.Image:
    """Returns stacks of uint8 images ``(N, 3, H, W)``, one above the other, ``WIDE`` stacks a row.

    So narrow a picture can still be made out on a phone. Small images are enlarged, unsmoothed.
    """
    count, _, height, width = layers[0].shape
    wide, rows = min(WIDE, count), -(-count // WIDE)
    stack = len(layers) * (height + GAP) - GAP
    between = 3 * GAP if len(layers) > 1 else GAP
    shape = (rows * (stack + between) - between, wide * (width + GAP) - GAP, 3)
    canvas = numpy.full(shape, 255, numpy.uint8)
    for layer, images in enumerate(layers):
        for i, image in enumerate(images.permute(0, 2, 3, 1).numpy()):
            top = (i // wide) * (stack + between) + layer * (height + GAP)
            left = (i % wide) * (width + GAP)
            canvas[top : top + height, left : left + width] = image
    factor = max(1, SCALE_TO // height)
    size = (canvas.shape[1] * factor, canvas.shape[0] * factor)
    return Image.fromarray(canvas).resize(size, Image.Resampling.NEAREST)
