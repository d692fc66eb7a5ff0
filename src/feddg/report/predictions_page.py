"""Pages of thumbnails: for predictions, and for the expected accuracy at a new site."""

import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from feddg.errors import first_names
from feddg.methods.base import title_of
from feddg.prediction.classifier import ImageClassifier
from feddg.prediction.model_file import ModelDescription
from feddg.prediction.predict import MOST_SHOWN, PredictedFiles
from feddg.prediction.travel import Travel
from feddg.report.blocks import Block, Prose, Table, picture_of, template_named, write_file
from feddg.report.text import table_from
from feddg.text import counted, number, printable

SIDE = 144
"""Side of a thumbnail in pixels."""


def write_predictions_page(
    found: PredictedFiles, out: Path, run: Path | str, images: Sequence[Path | str]
) -> Path:
    """Writes one self-contained page; returns its path.

    It contains small copies of the images, so everyone who can read the page sees them.

    Args:
        found: the predictions; the most doubtful are shown.
        out: the file to write.
        run: the run folder, or the file of the model, as it was named.
        images: files, folders and globs, as they were named.

    Raises:
        RunError: it cannot be written.
    """
    model, usable = found.classifier, found.labels.total()
    rows = [
        (image.file, image.label or "", image.confidence or 0.0, image.unlike_training)
        for image in found.doubtful
    ]
    tags = [f"{counted(usable, 'image')} labelled"]
    tags += [f"{number(found.failed)} could not be used"] if found.failed else []
    tags += [] if found.unlike is None else [f"{number(found.unlike)} unlike the training images"]
    more = f" Of these images the {len(rows)} least confident are shown."
    labels = [f"{name}: {number(count)}" for name, count in found.labels.most_common()]
    return _write(
        out,
        title="Predictions, the most doubtful first",
        tags=tags,
        lead=f"How many of these labels are right was not measured. {model.result}"
        + (more if usable > len(rows) else ""),
        origin=_origin(model, run, images),
        blocks=[Prose(f"Labels: {first_names(labels, 20)}.")],
        thumbnails=_thumbnails(rows, model.description),
        diagnostics=model.diagnostics,
        faults=found.faults,
        failed=found.failed,
    )


def write_travel_page(
    found: Travel, out: Path, run: Path | str, images: Path | str | Sequence[Path | str]
) -> Path:
    """Writes one self-contained page about a model at a new site; returns its path.

    It contains small copies of the images, so everyone who can read the page sees them.

    Args:
        found: the estimates.
        out: the file to write.
        run: the run folder, as it was named.
        images: files, folders and globs, as they were named.

    Raises:
        RunError: it cannot be written.
    """
    shown = found.images[:MOST_SHOWN]
    rows = [(image.file, image.label, image.risk or 0.0, image.unlike_training) for image in shown]
    tags = [counted(len(found.images), "image")]
    tags += [f"{number(found.labels)} with a label"] if found.labels else []
    tags += [f"{number(found.failed)} could not be used"] if found.failed else []
    sentences = [Prose(str(one), notice=one.severity == "warning") for one in found.diagnostics[1:]]
    words = "{:.1%} likely wrong" if found.expected else ""
    advice = Prose(str(found.advice), notice=True)
    blocks: list[Block] = [advice, *sentences]
    if found.expected is not None:
        blocks += [sites_table(found)] if found.calibration.sites else []
        blocks.append(table_from("answers", classes=found.classes, labels=found.labels))
    return _write(
        out,
        title="Will the model travel?",
        tags=tags,
        lead=found.expectation or "Its accuracy cannot be estimated.",
        origin=_origin(found.model, run, images),
        blocks=blocks,
        thumbnails=_thumbnails(rows, found.model.description, words),
        diagnostics=found.model.diagnostics,
    )


def sites_table(found: Travel) -> Table:
    """Returns the held-out sites: estimated and true accuracy."""
    estimate, estimates = found.calibration.comparable(found.signals)
    return table_from("sites", sites=zip(found.calibration.sites, estimates), estimate=estimate)


def _origin(
    model: ImageClassifier, run: Path | str, images: Path | str | Sequence[Path | str]
) -> str:
    """Returns which model labelled which images, and when."""
    identity = model.identity
    named = [images] if isinstance(images, str | Path) else images
    parts = [title_of(str(identity.get("method") or "")), identity.get("backbone"), f"model {run}"]
    parts += [f"images {first_names([str(name) for name in named], 3)}", date.today().isoformat()]
    return " · ".join(printable(str(part)) for part in parts if part)


def _write(out: Path, **parts: Any) -> Path:
    """Fills the template with the parts of a page."""
    parts = {"faults": (), "failed": 0, "side": SIDE} | parts
    return write_file(out, template_named("predictions.html.j2").render(**parts))


def _thumbnails(
    rows: Sequence[tuple[str, str, float, bool | None]],
    about: ModelDescription,
    number: str = "{:.1%}",
) -> list[dict[str, Any]]:
    """Returns the pictures of the page; one whose file is gone has no source."""
    return [
        {
            "file": file,
            "name": os.path.basename(file),
            "source": picture_of(file, SIDE, about.reading, about.known_depths),
            "label": label,
            "number": number.format(share),
            "unlike_training": bool(unlike),
        }
        for file, label, share, unlike in rows
    ]
