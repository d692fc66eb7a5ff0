"""A page about a table of predictions: thumbnails, the most doubtful first."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from feddg.data.decoding import Tile, UnusableImageError, decode_parts, quiet_pillow
from feddg.diagnostics import Diagnostic
from feddg.prediction.classifier import ImagePreparation
from feddg.prediction.predict import Doubtful, Prediction
from feddg.report.blocks import template_named, thumbnail, write_file

SIDE = 144
"""Of a thumbnail, pixels."""
DOUBT_IN = (0.5, 0.8, 0.95, 1.01)
"""Confidences that part the page: below a half, ..."""


@dataclass(frozen=True)
class Thumbnail:
    """One picture of the page.

    Attributes:
        row: what was predicted.
        name: the file's own name, without its folders.
        source: the picture, as a ``data:`` address; None where the file is not there any more.
    """

    row: Prediction
    name: str
    source: str | None


def write_predictions_page(
    found: Doubtful,
    out: Path,
    *,
    preparation: ImagePreparation,
    result: str,
    diagnostics: Sequence[Diagnostic] = (),
) -> Path:
    """Writes one self-contained page; returns ``out``.

    It holds small copies of the images: who may read it may see them.

    Args:
        found: the table's most doubtful rows.
        out: the page.
        preparation: how files become colours.
        result: how good the model was where nobody trained.
        diagnostics: the warnings about the model.

    Raises:
        RunError: it cannot be written.
    """
    with quiet_pillow(tiled=preparation.reading.tile is not None):
        thumbnails = [_thumbnail(row, preparation) for row in found.rows]
    text = template_named("predictions.html.j2").render(
        found=found,
        groups=list(_groups(thumbnails)),
        labels=found.labels.most_common(),
        result=result,
        diagnostics=diagnostics,
        side=SIDE,
    )
    return write_file(out, text)


def _groups(thumbnails: Sequence[Thumbnail]) -> Iterator[tuple[str, list[Thumbnail]]]:
    """The thumbnails in parts of like confidence, with headings."""
    low = 0.0
    for high in DOUBT_IN:
        part = [one for one in thumbnails if low <= (one.row.confidence or 0) < high]
        if part:
            words = f"{low:.0%} to {high:.0%}" if high <= 1 else f"{low:.0%} and more"
            yield (f"Confidence below {high:.0%}" if low == 0 else f"Confidence {words}"), part
        low = high


def _thumbnail(row: Prediction, preparation: ImagePreparation) -> Thumbnail:
    tile = Tile.named(row.file)
    name = os.path.basename(row.file)
    file = Path(os.fsdecode(tile.file))
    try:
        (pixels,) = decode_parts(
            file, [tile.box], SIDE, "pad", preparation.reading, preparation.bits
        )
    except UnusableImageError:
        return Thumbnail(row, name, None)
    return Thumbnail(row, name, thumbnail(pixels))
