"""The experiment's images, decoded, and what is odd about them."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from feddg.data.data_set import DATA_SETS, load_images_of
from feddg.data.decoding import BadImage, Reading
from feddg.data.fingerprint import ContentHashes, ImagesFile, file_of, images_file
from feddg.data.images import ImageTable
from feddg.data.inspection import (
    Ignored,
    Remark,
    Survey,
    about_copies,
    about_ignored,
    about_labels,
    about_splits,
    about_survey,
    ignored_files,
    survey,
)
from feddg.data.pixels import PixelStore, open_pixels
from feddg.data.splits import Splits
from feddg.experiment import Experiment
from feddg.runs.named_files import named_files

Progress = Callable[[str, int, int], None]


class Loaded(NamedTuple):
    """The experiment's images: usable rows and their pixels, files left out, which they are.

    ``ignored`` counts, by kind, what lies in their folder and is none of them; ``surveyed`` says
    how they are stored, ``reading`` what is made of it.
    """

    table: ImageTable
    pixels: PixelStore
    bad: list[BadImage]
    contents: ImagesFile
    ignored: dict[str, Ignored]
    surveyed: Survey
    reading: Reading


def load_table(experiment: Experiment, cache: Path | None, progress: Progress) -> Loaded:
    """Loads the experiment's images.

    Raises:
        DataError: the images cannot be used as asked.
    """
    data = experiment.data
    table = load_images_of(data)
    hashes = None if table.root is None else ContentHashes(table.root, cache)
    reading = Reading.of(data)
    surveyed = Survey({}, {}) if table.root is None else survey(table)
    opened = open_pixels(
        table,
        data.image_size,
        cache=cache,
        resize=data.resize,
        budget_bytes=int(data.pixel_budget_gb * 2**30),
        on_bad_image=data.on_bad_image,
        progress=lambda done, total: progress("decoding images", done, total),
        seen=None if hashes is None else hashes.see,
        reading=reading,
        surveyed=surveyed,
    )
    contents = images_file(table, hashes).model_copy(
        update={"depths": dict(surveyed.depths), "files": named_files(experiment)}
    )
    return Loaded(*opened, contents, ignored_files(table), surveyed, reading)


def table_remarks(loaded: Loaded) -> list[Remark]:
    """Returns what is odd about an experiment's images, whoever holds them."""
    return [
        *about_ignored(loaded.ignored),
        *about_survey(loaded.surveyed, loaded.reading),
        *about_labels(loaded.table, [image.path for image in loaded.bad]),
    ]


def split_remarks(experiment: Experiment, loaded: Loaded, splits: Splits | None) -> list[Remark]:
    """Returns what is odd about how an experiment's images are split, and which are copies."""
    data, held = experiment.data, experiment.hold_out
    found: list[Remark] = []
    if splits is not None:
        found += about_splits(loaded.table, splits, chosen=bool(held.test or held.val))
    if data.duplicates != "ignore":
        files = [file_of(path) for path in loaded.table.paths]
        contents = loaded.contents.contents()
        hashes = [contents[file][1] if file in contents else "" for file in files]
        refuse = data.duplicates == "refuse"
        if data.duplicates == "auto":
            refuse = data.split_file is None and DATA_SETS.find(data.source).publication is None
        hides_images = experiment.privacy.hides_images
        found += about_copies(loaded.table, files, hashes, splits, refuse, hides_images)
    return found
