"""Pages of thumbnails: for predictions, and for the expected accuracy at a new site."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddg.data.decoding import Tile, UnusableImageError, decode_parts, quiet_pillow
from feddg.evaluation.travel import ESTIMATORS
from feddg.prediction.model_file import ImagePreparation
from feddg.prediction.predict import MOST_SHOWN, PredictedFiles
from feddg.prediction.travel import Travel, expectation
from feddg.report.blocks import (
    Block,
    Prose,
    Table,
    column,
    table_of,
    template_named,
    text_column,
    thumbnail,
    write_file,
)
from feddg.text import MISSING, counted, number, percent, readable

SIDE = 144
"""Side of a thumbnail in pixels."""


@dataclass(frozen=True)
class Thumbnail:
    """A picture of the page.

    Attributes:
        file: the file as it was named or found.
        label: the predicted class.
        number: confidence or risk, in words.
        unlike_training: whether the image is unlike the training images.
        source: the picture as a ``data:`` address; None if the file does not exist any more.
    """

    file: str
    label: str
    number: str
    unlike_training: bool
    source: str | None

    @property
    def name(self) -> str:
        """The file name without folders."""
        return os.path.basename(self.file)


def write_predictions_page(found: PredictedFiles, out: Path) -> Path:
    """Writes one self-contained page; returns its path.

    It contains small copies of the images, so everyone who can read the page sees them.

    Args:
        found: the predictions; the most doubtful are shown.
        out: the file to write.

    Raises:
        RunError: it cannot be written.
    """
    model, usable = found.classifier, found.labels.total()
    rows = [
        (one.file, one.label or "", one.confidence or 0.0, one.unlike_training)
        for one in found.doubtful
    ]
    tags = [f"{counted(usable, 'image')} labelled"]
    tags += [f"{number(found.failed)} could not be used"] if found.failed else []
    tags += [] if found.unlike is None else [f"{number(found.unlike)} unlike the training images"]
    more = f" Of these images the {len(rows)} least confident are shown."
    labels = found.labels.most_common()
    listed = ", ".join(f"{name}: {number(count)}" for name, count in labels[:20])
    others = f" and {len(labels) - 20} more" if len(labels) > 20 else ""
    return _write(
        out,
        title="Predictions, the most doubtful first",
        tags=tags,
        lead=model.result + (more if usable > len(rows) else ""),
        blocks=[Prose(f"Labels: {listed}{others}.")],
        thumbnails=_thumbnails(rows, model.preparation),
        diagnostics=model.diagnostics,
        faults=found.faults,
        failed=found.failed,
    )


def write_travel_page(found: Travel, out: Path) -> Path:
    """Writes one self-contained page about a model at a new site; returns its path.

    It contains small copies of the images, so everyone who can read the page sees them.

    Args:
        found: the estimates.
        out: the file to write.

    Raises:
        RunError: it cannot be written.
    """
    shown = found.images[:MOST_SHOWN]
    rows = [(one.file, one.label, one.risk or 0.0, one.unlike_training) for one in shown]
    tags = [counted(len(found.images), "image")]
    tags += [f"{number(found.labels)} with a label"] if found.labels else []
    tags += [f"{number(found.failed)} could not be used"] if found.failed else []
    sentences = [Prose(str(one), notice=one.severity == "warning") for one in found.diagnostics[1:]]
    words = "{:.1%} likely wrong" if found.expected else ""
    advice = Prose(str(found.advice), notice=True)
    blocks: list[Block] = [advice, *sentences]
    if found.expected is not None:
        blocks += [sites_table(found)] if found.calibration.sites else []
        blocks += [estimates_table(found), classes_table(found)]
    lead = expectation(found.expected) if found.expected else "Its accuracy cannot be estimated."
    return _write(
        out,
        title="Will the model travel?",
        tags=tags,
        lead=lead,
        blocks=blocks,
        thumbnails=_thumbnails(rows, found.model.preparation, words),
        diagnostics=found.model.diagnostics,
    )


def sites_table(found: Travel) -> Table:
    """Returns the held-out sites: estimated and true accuracy."""
    return table_of(
        found.calibration.sites,
        [
            text_column("left out", lambda site: readable(site.site)),
            column("images", lambda site: site.images),
            column("estimated", lambda site: percent(site.signals.combined)),
            column("true", lambda site: percent(site.accuracy)),
        ],
        "Accuracy in percent at sites left out of a model: estimated without their labels, and "
        f"true. Without these sites the estimate for the new images is "
        f"{percent(found.signals.combined)}.",
    )


def estimates_table(found: Travel) -> Table:
    """Returns each estimator's value before calibration."""
    return table_of(
        found.signals.estimates.items(),
        [
            text_column("estimator", lambda pair: ESTIMATORS[pair[0]].title),
            text_column("source", lambda pair: ESTIMATORS[pair[0]].source),
            column("accuracy", lambda pair: percent(pair[1])),
        ],
        "What each estimator says about these images, in percent, before correction by the "
        "left-out sites.",
    )


def classes_table(found: Travel) -> Table:
    """Returns the expected accuracy of the predictions of each class."""
    return table_of(
        found.classes,
        [
            text_column("answer", lambda one: one.name),
            column("images", lambda one: one.answers),
            column(
                "estimated correct",
                lambda one: MISSING if one.right is None else percent(one.right),
            ),
        ],
        "Of the images labelled as a class, the percentage estimated to be correct; none where "
        "there are few.",
    )


def _write(out: Path, **parts: Any) -> Path:
    """Fills the template with the parts of a page."""
    parts = {"faults": (), "failed": 0, "side": SIDE} | parts
    return write_file(out, template_named("predictions.html.j2").render(**parts))


def _thumbnails(
    rows: Sequence[tuple[str, str, float, bool | None]],
    preparation: ImagePreparation,
    number: str = "{:.1%}",
) -> list[Thumbnail]:
    with quiet_pillow(tiled=preparation.reading.tile is not None):
        return [
            Thumbnail(file, label, number.format(share), bool(unlike), _picture(file, preparation))
            for file, label, share, unlike in rows
        ]


def _picture(name: str, preparation: ImagePreparation) -> str | None:
    tile = Tile.named(name)
    file = Path(os.fsdecode(tile.file))
    try:
        (pixels,) = decode_parts(
            file, [tile.box], SIDE, "pad", preparation.reading, preparation.bits
        )
    except UnusableImageError:
        return None
    return thumbnail(pixels)
