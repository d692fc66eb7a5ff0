"""Camera traps as LILA publishes them: one folder of images, annotations in COCO's JSON."""

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from feddg.data.data_set import DataSet
from feddg.data.images import ImageTable
from feddg.data.listed_images import listed_images
from feddg.errors import DataError
from feddg.storage import read_text


def list_camera_traps(root: Path, images: Path, definition: DataSet) -> ImageTable:
    """Lists the images of a data set's classes and places, each once.

    Args:
        root: somewhere below it are the annotations, files that end in ``.json``.
        images: the folder of the images.
        definition: whose classes count, and whose domains, called ``location_<number>``.

    Raises:
        DataError: there are no annotations, or they are of another form.
    """
    # Hidden ones are what macOS puts beside the files of an archive.
    files = sorted(file for file in root.glob("**/*.json") if not file.name.startswith("."))
    if not files:
        raise DataError(
            f"{images} holds images, and there are no annotations below {root}: unpack the archive "
            "of the annotations there, too."
        )
    label_of: dict[str, str] = {}
    place_of: dict[str, str] = {}
    for file in files:
        for name, place, label in _annotated(file):
            if f"location_{place}" in definition.domains and label in definition.classes:
                # An image of two animals: the first class counts, whatever the order of files.
                label_of[name] = min(label, label_of.get(name, label))
                place_of[name] = f"location_{place}"
    names = sorted(label_of)
    if not names:
        raise DataError(f"The annotations below {root} name no image of {definition.title}.")
    below = images.relative_to(root).as_posix()
    return listed_images(
        root,
        [name if below == "." else f"{below}/{name}" for name in names],
        [label_of[name] for name in names],
        [place_of[name] for name in names],
        listed_in="the annotations",
        class_names=definition.classes,
        domain_names=definition.domains,
    )


def _annotated(file: Path) -> Iterator[tuple[str, str, str]]:
    """Yields file name, place and class of every annotation."""
    try:
        content: Any = json.loads(read_text(file, DataError))
        classes = {one["id"]: str(one["name"]) for one in content["categories"]}
        shown = {one["id"]: one for one in content["images"]}
        for annotation in content["annotations"]:
            image = shown[annotation["image_id"]]
            name = str(image["file_name"])
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise DataError(f"{file} names an image outside its folder: {name}.")
            yield name, str(image["location"]), classes[annotation["category_id"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{file} is no file of annotations with images, categories and annotations "
            f"({type(error).__name__}: {error}). Take it out of the folder."
        ) from None
