"""A site's images: read from its own folder, numbered as the federation does, compared over time.

What they were when the site joined a run is kept at the site. Of a change the coordinator is told
that there is one; which files it is about stands in the site's own log.
"""

import logging
from dataclasses import replace
from pathlib import Path

import numpy

from feddg.clients.client import Worker
from feddg.data.data_set import load_source
from feddg.data.decoding import Reading
from feddg.data.fingerprint import ContentHashes, difference, images_file
from feddg.data.images import ImageTable, from_class_folders
from feddg.data.pixels import PixelStore, open_pixels
from feddg.errors import ClientError, DataError
from feddg.evaluation.accuracy import Evaluation
from feddg.experiment import Experiment
from feddg.flower.memory import SiteMemory
from feddg.runs.provenance import methods_files

log = logging.getLogger("feddg")

DIGITS = "digits:"


def load_pixels(
    images: str, domain: str | None, experiment: Experiment, cache: Path
) -> tuple[ImageTable, PixelStore]:
    """Returns the usable images of a folder, or of the built-in digits, with their pixels.

    Args:
        images: ``digits:DOMAIN``, a folder ``root/domain/class/*``, or with ``domain`` a folder
            ``root/class/*``.
        domain: what the images of ``root/class/*`` are called.
        experiment: how images are resized.
        cache: folder of the decoded pixels.

    Raises:
        DataError: the images cannot be used.
    """
    if images.startswith(DIGITS):
        whole = load_source("digits")
        rows = numpy.flatnonzero(whole.domains == whole.domain_id(images.removeprefix(DIGITS)))
        table = _own_domains(whole.take(rows))
    elif domain is not None:
        table = from_class_folders(images, domain)
    else:
        table = load_source("folder", images)
    data = experiment.data
    usable, pixels, _ = open_pixels(
        table,
        data.image_size,
        cache=cache,
        resize=data.resize,
        reading=Reading.of(data),
        budget_bytes=int(data.pixel_budget_gb * 2**30),
        on_bad_image=data.on_bad_image,
    )
    return usable, pixels


def _own_domains(table: ImageTable) -> ImageTable:
    """Leaves out the names of domains without images."""
    present, domains = numpy.unique(table.domains, return_inverse=True)
    names = tuple(table.domain_names[domain] for domain in present)
    return replace(table, domains=domains.astype(numpy.int64), domain_names=names)


def positions(table: ImageTable, classes: list[str], domains: list[str]) -> ImageTable:
    """Returns the table with its labels and domains numbered as the whole federation does.

    Raises:
        DataError: a class or domain that the federation does not have.
    """
    for what, mine, all_ in (
        ("class", table.class_names, classes),
        ("domain", table.domain_names, domains),
    ):
        unknown = sorted(set(mine) - set(all_))
        if unknown:
            raise DataError(
                f"its {what} {unknown[0]!r} is not among the federation's: {', '.join(all_)}"
            )
    label_of = numpy.array([classes.index(name) for name in table.class_names])
    domain_of = numpy.array([domains.index(name) for name in table.domain_names])
    return replace(
        table,
        labels=label_of[table.labels],
        domains=domain_of[table.domains],
        class_names=tuple(classes),
        domain_names=tuple(domains),
    )


def test_images(
    table: ImageTable, pixels: PixelStore, experiment: Experiment, worker: Worker
) -> Evaluation:
    """Returns all images of a table as a test split."""
    return Evaluation(
        pixels,
        {"test": numpy.arange(len(table))},
        table.labels,
        table.domains,
        table.domain_names,
        len(table.class_names),
        experiment.evaluate.batch_size,
        worker.device,
        worker.autocast,
    )


def require_same_images(
    memory: SiteMemory, table: ImageTable, experiment: Experiment, cache: Path
) -> None:
    """Keeps which images a site joins a run with, or makes sure that they are still the same.

    So it does with the files that the method reads, such as a codec's weights.

    Args:
        memory: the site's part of the run.
        table: its images now.
        experiment: names the files.
        cache: where hashes of files are remembered.

    Raises:
        ClientError: they changed.
        FeddgError: what is kept cannot be read or written; names the file.
    """
    hashes = None if table.root is None else ContentHashes(table.root, cache)
    now, before = images_file(table, hashes), memory.images()
    now = now.model_copy(update={"files": methods_files(experiment)})
    if before is None:
        memory.keep_images(now)
        return
    changes = difference(before, now)
    if changes:
        log.error(
            "%s changed since this site joined the run: %s; put them back, or ask the "
            "coordinator for a new run",
            changes.what,
            changes,
        )
        raise ClientError(
            f"its {changes.what} changed since it joined this run; its own log says which; put "
            "them back, or start a new run"
        )
