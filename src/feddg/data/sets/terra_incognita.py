"""Terra Incognita: animals before four camera traps of the American southwest."""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from feddg.data.augmentations import AugmentSettings
from feddg.data.camera_traps import list_camera_traps
from feddg.data.data_set import DataSet, Publication, PublishedFile, register_data_set
from feddg.data.images import ImageTable, check_folder
from feddg.data.published import compare_counts, load_published, published_root
from feddg.data.sets.pardon_protocol import PARDON_PROTOCOL
from feddg.settings import merge

AROUND = ("terra_incognita",)
"""The folder that DomainBed puts around the domains."""
SPELLINGS = {f"L{number}": f"location_{number}" for number in (100, 38, 43, 46)} | {
    str(number): f"location_{number}" for number in (100, 38, 43, 46)
}
IMAGES = "eccv_18_all_images_sm"
"""The folder of all images in the published archive."""
_STORE = "https://storage.googleapis.com/public-datasets-lila/caltechcameratraps/"
log = logging.getLogger("feddg")


def list_terra_incognita(root: Path | None) -> ImageTable:
    """Terra Incognita, in DomainBed's folders or from the published images and annotations.

    An image of two animals is in two class folders: the first in the alphabet counts.

    Raises:
        DataError: a domain is missing, a class folder is not one of the ten, or the annotations
            cannot be read.
    """
    folder = published_root(TERRA_INCOGNITA, root)
    check_folder(folder)
    images = next(folder.glob(f"**/{IMAGES}"), None) if _is_raw(folder) else None
    if images is not None:
        table = list_camera_traps(folder, images, TERRA_INCOGNITA)
        compare_counts(TERRA_INCOGNITA, table)
        return table
    return _once(load_published(TERRA_INCOGNITA, root, AROUND, SPELLINGS))


def _is_raw(folder: Path) -> bool:
    return any((place / IMAGES).is_dir() for place in (folder, *folder.glob("*/")))


def _once(table: ImageTable) -> ImageTable:
    """Leaves copies of an image in a second class folder of its location out."""
    kept = list(_first_rows(table))
    if len(kept) < len(table):
        log.warning(
            "Terra Incognita: %d images of two animals lie in two class folders; the first counts.",
            len(table) - len(kept),
        )
    return table if len(kept) == len(table) else table.take(kept)


def _first_rows(table: ImageTable) -> Iterator[int]:
    seen: set[tuple[int, str]] = set()
    order = np.lexsort((np.arange(len(table)), table.labels))
    first = np.zeros(len(table), dtype=bool)
    for row in order.tolist():
        key = int(table.domains[row]), table.paths[row].rpartition("/")[2]
        first[row] = key not in seen
        seen.add(key)
    yield from np.flatnonzero(first).tolist()


TERRA_INCOGNITA = register_data_set(
    DataSet(
        name="terra_incognita",
        summary="Terra Incognita (Beery et al. 2018, as in DomainBed): 10 classes before four "
        "camera traps",
        load=list_terra_incognita,
        preset=merge(PARDON_PROTOCOL, {"train": {"augmentation": "terra_incognita"}}),
        domains=("location_100", "location_38", "location_43", "location_46"),
        augmentation=AugmentSettings(
            crop_scale=(0.7, 1.0), flip=0.5, color_jitter=(0.3, 0.3, 0.3, 0.3), grayscale=0.1
        ),
        classes=(
            *("bird", "bobcat", "cat", "coyote", "dog", "empty"),
            *("opossum", "rabbit", "raccoon", "squirrel"),
        ),
        # Of present downloads; DomainBed's paper counts 24,788 together.
        counts={
            "location_100": 4741,
            "location_38": 9736,
            "location_43": 3970,
            "location_46": 5883,
        },
        publication=Publication(
            citation="S. Beery, G. Van Horn and P. Perona, Recognition in Terra Incognita, ECCV "
            "2018; selection: I. Gulrajani and D. Lopez-Paz, In Search of Lost Domain "
            "Generalization, ICLR 2021",
            address="https://lila.science/datasets/caltech-camera-traps",
            licence="Community Data License Agreement (permissive variant)",
            files=(
                PublishedFile(
                    address=f"{_STORE}eccv_18_all_images_sm.tar.gz",
                    name="terra_incognita_images.tar.gz",
                ),
                PublishedFile(
                    address=f"{_STORE}eccv_18_annotations.tar.gz",
                    name="terra_incognita_annotations.tar.gz",
                ),
            ),
        ),
        layouts=(
            "`terra_incognita/location_{38,43,46,100}/<class>` (DomainBed)",
            "`eccv_18_all_images_sm/` with the annotations' JSON files beside it (LILA)",
        ),
        protocol="one location held out (DomainBed)",
    )
)
