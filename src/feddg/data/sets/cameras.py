"""Data sets listed in a file of annotations: Camelyon17, iWildCam and Terra Incognita."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from feddg.data.columns import read_columns
from feddg.data.data_set import define
from feddg.data.images import ImageTable, folder_names, listed_images
from feddg.data.published import (
    METADATA,
    compare_counts,
    folder_of,
    load_published,
    read_metadata,
)
from feddg.data.splits import ROLES
from feddg.diagnostics import warn
from feddg.errors import DataError
from feddg.storage import file_faults, read_text

if TYPE_CHECKING:
    from pandas import DataFrame

HELD_OUT = {"1": "val", "2": "test"}
"""Hospitals that the official split holds out; the metadata file does not tell."""
IN_DOMAIN = {"0": "train", "1": "id_val"}
CATEGORIES = "categories.csv"
UNUSED = 99_999
"""Label of the categories that no image has."""
IMAGES = "eccv_18_all_images_sm"
"""Folder of all images in the published archive."""


def _annotated(file: Path) -> "DataFrame":
    """Returns file name, location and class (``name``) of every annotation."""
    import pandas

    what = f"{file} is no file of annotations with images, categories and annotations"
    with file_faults(DataError, what, ValueError, KeyError, TypeError, RecursionError):
        content = json.loads(read_text(file, DataError))
        images, classes, found = (
            pandas.DataFrame(content[kind], columns=columns)
            for kind, columns in (
                ("images", ["id", "file_name", "location"]),
                ("categories", ["id", "name"]),
                ("annotations", ["image_id", "category_id"]),
            )
        )
        found = found.merge(images, left_on="image_id", right_on="id")
        return found.merge(classes, left_on="category_id", right_on="id")


def list_camelyon17(root: Path | None) -> ImageTable:
    """Camelyon17 in WILDS' folder; the official split holds hospital 1 and hospital 2 out.

    Transparency of patches (RGBA) is ignored. The mirror's patches are in ``hospital/split/class``.

    Raises:
        DataError: ``metadata.csv`` or the patches do not exist, or a row has another format.
    """

    def holds(folder: Path) -> bool:
        return (folder / METADATA).is_file() or {*CAMELYON17.domains} <= {*folder_names(folder)}

    folder = folder_of(CAMELYON17, root, holds)
    if folder is not None and not (folder / METADATA).is_file():
        table = load_published(CAMELYON17, root)
        return replace(table, clients=np.array(table.domain_names)[table.domains])
    key = ("patient", "node", "x_coord", "y_coord")
    cells = read_metadata(CAMELYON17, root, (*key, "tumor", "center", "split"))
    tumors, centers = cells.check("tumor", "01"), cells.check("center", "01234")
    hospitals = [f"hospital_{center}" for center in centers]
    table = listed_images(
        cells.file.parent,
        [
            f"patches/patient_{patient}_node_{node}/"
            f"patch_patient_{patient}_node_{node}_x_{x}_y_{y}.png"
            for patient, node, x, y in zip(*(cells[name] for name in key))
        ],
        [CAMELYON17.classes[int(tumor)] for tumor in tumors],
        hospitals,
        listed_in=METADATA,
        split=[
            HELD_OUT.get(center, IN_DOMAIN[split])
            for center, split in zip(centers, cells.check("split", "01"))
        ],
        clients=hospitals,
        class_names=CAMELYON17.classes,
        domain_names=CAMELYON17.domains,
    )
    compare_counts(CAMELYON17, table)
    return table


CAMELYON17 = define("camelyon17", list_camelyon17)


def list_iwildcam(root: Path | None) -> ImageTable:
    """IWildCam in WILDS' folder; every image lies in ``train/``, whatever its split.

    Domains are camera traps: first those of the training split, then the others, by number.

    Raises:
        DataError: ``metadata.csv`` or the images do not exist, or a row has another format.
    """
    cells = read_metadata(IWILDCAM, root, ("split", "location_remapped", "y", "filename"))
    labels, places = cells.numbers("y"), cells.numbers("location_remapped")
    split = cells.check("split", ROLES)
    for index, name in enumerate(cells["filename"]):
        if not name or "/" in name or "\\" in name:
            raise DataError(f"{cells.row(index)} has {name!r} as filename; expected a file's name.")
    names = _class_names(cells.file.parent, max(labels) + 1)
    training = {place for place, role in zip(places, split) if role == "train"}
    order = sorted(set(places), key=lambda place: (place not in training, place))
    locations = [f"location_{place}" for place in places]
    table = listed_images(
        cells.file.parent,
        [f"train/{name}" for name in cells["filename"]],
        [names[label] for label in labels],
        locations,
        listed_in=METADATA,
        split=split,
        clients=locations,
        class_names=names,
        domain_names=[f"location_{place}" for place in order],
    )
    compare_counts(IWILDCAM, table)
    return table


def _class_names(folder: Path, count: int) -> list[str]:
    """Returns the class names by label; made-up names if no file contains them."""
    file = folder / CATEGORIES
    name_of: dict[int, str] = {}
    if file.is_file():
        table = read_columns(file, ("y", "name"))
        name_of = {y: name for y, name in zip(table.numbers("y"), table["name"]) if y != UNUSED}
        count = max(count, max(name_of, default=-1) + 1)
    names = [name_of.get(label) or f"class_{label}" for label in range(count)]
    return [name if names.count(name) == 1 else f"{name}_{y}" for y, name in enumerate(names)]


IWILDCAM = define("iwildcam", list_iwildcam)


def _from_annotations(root: Path, images: Path) -> ImageTable:
    """Lists the images of Terra Incognita's classes and places, each once.

    Args:
        root: a folder that contains the annotation files (``.json``) at any depth.
        images: the folder of the images.

    Raises:
        DataError: there are no annotations, or they have another format.
    """
    import pandas

    # Hidden ones are what macOS puts beside the files of an archive.
    files = sorted(file for file in root.glob("**/*.json") if not file.name.startswith("."))
    if not files:
        raise DataError(
            f"{images} holds images, and there are no annotations below {root}: unpack the archive "
            "of the annotations there, too."
        )
    found = pandas.concat(map(_annotated, files))
    found["place"] = "location_" + found["location"].astype(str)
    wanted = found["place"].isin(TERRA_INCOGNITA.domains)
    found = found[wanted & found["name"].isin(TERRA_INCOGNITA.classes)]
    if found.empty:
        raise DataError(f"The annotations below {root} name no image of {TERRA_INCOGNITA.title}.")
    # An image of two animals: the first class counts, whatever the order of files.
    found = found.sort_values(["file_name", "name", "place"]).drop_duplicates("file_name")
    for name in found["file_name"]:
        if name.startswith("/") or ".." in name.split("/"):
            raise DataError(f"The annotations name an image outside its folder: {name}.")
    return listed_images(
        root,
        [(images / name).relative_to(root).as_posix() for name in found["file_name"]],
        found["name"].tolist(),
        found["place"].tolist(),
        listed_in="the annotations",
        class_names=TERRA_INCOGNITA.classes,
        domain_names=TERRA_INCOGNITA.domains,
    )


def list_terra_incognita(root: Path | None) -> ImageTable:
    """Terra Incognita, in DomainBed's folders or from the published images and annotations.

    An image of two animals is in two class folders; the alphabetically first counts.

    Raises:
        DataError: a domain is missing, a class folder is not one of the ten, or the annotations
            cannot be read.
    """
    folder = folder_of(TERRA_INCOGNITA, root, lambda folder: (folder / IMAGES).is_dir())
    if root is not None and folder is not None:
        table = _from_annotations(root, folder / IMAGES)
        compare_counts(TERRA_INCOGNITA, table)
        return table
    table = load_published(TERRA_INCOGNITA, root)
    first: dict[tuple[int, str], int] = {}
    for row in np.argsort(table.labels, kind="stable").tolist():
        first.setdefault((int(table.domains[row]), table.paths[row].rpartition("/")[2]), row)
    if len(first) == len(table):
        return table
    text = (
        f"Terra Incognita: {len(table) - len(first)} images of two animals lie in two class "
        "folders; the first counts."
    )
    warn("images-left-out", text)
    return table.take(sorted(first.values()))


TERRA_INCOGNITA = define("terra_incognita", list_terra_incognita)
