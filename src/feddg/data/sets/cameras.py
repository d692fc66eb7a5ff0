"""Data sets listed in a file of annotations: Camelyon17, iWildCam and Terra Incognita."""

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from feddg.data.augment import AugmentSettings
from feddg.data.columns import METADATA, check_images, read_columns, read_metadata, roles
from feddg.data.data_set import DataSet, Publication, PublishedFile, register_data_set
from feddg.data.images import ImageTable, check_folder, listed_images
from feddg.data.published import compare_counts, load_published, published_root
from feddg.data.sets.folders import PARDON_PROTOCOL
from feddg.diagnostics import Diagnostic, emit
from feddg.errors import DataError
from feddg.settings import merge
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


# Camelyon17 as WILDS has it: tumour in patches of lymph nodes, from five hospitals.


CAMELYON17_AROUND = ("camelyon17_v1.0", "camelyon17")
CAMELYON17_COLUMNS = ("patient", "node", "x_coord", "y_coord", "tumor", "center", "split")
HELD_OUT = {"1": "val", "2": "test"}
"""Hospitals that the official split holds out; the file itself says nothing of it."""
IN_DOMAIN = {"0": "train", "1": "id_val"}


def list_camelyon17(root: Path | None) -> ImageTable:
    """Camelyon17 in WILDS' folder; the official split holds hospital 1 and hospital 2 out.

    Patches may be stored with transparency (RGBA), which is left away.

    Raises:
        DataError: ``metadata.csv`` or the patches are not there, or a row is of another form.
    """
    folder = published_root(CAMELYON17, root)
    found = read_metadata(folder, CAMELYON17.title, CAMELYON17_AROUND, CAMELYON17_COLUMNS)
    keys = zip(*(found[name] for name in CAMELYON17_COLUMNS[:4]))
    paths = [
        f"patches/patient_{patient}_node_{node}/patch_patient_{patient}_node_{node}_x_{x}_y_{y}.png"
        for patient, node, x, y in keys
    ]
    for name, known in (("tumor", "01"), ("center", "01234"), ("split", "01")):
        for index, value in enumerate(found[name]):
            if value not in tuple(known):
                raise DataError(
                    f"{found.row(index)} has {value!r} as {name}; expected one of "
                    f"{', '.join(known)}."
                )
    check_images(found.file.parent, paths, METADATA)
    hospitals = [f"hospital_{center}" for center in found["center"]]
    table = listed_images(
        found.file.parent,
        paths,
        [CAMELYON17.classes[int(tumor)] for tumor in found["tumor"]],
        hospitals,
        listed_in=METADATA,
        split=[
            HELD_OUT.get(center, IN_DOMAIN[split])
            for center, split in zip(found["center"], found["split"])
        ],
        clients=hospitals,
        class_names=CAMELYON17.classes,
        domain_names=CAMELYON17.domains,
    )
    compare_counts(CAMELYON17, table)
    return table


CAMELYON17 = register_data_set(
    DataSet(
        name="camelyon17",
        summary="Camelyon17 (Bandi et al. 2018, as in WILDS): tumour in lymph nodes of five "
        "hospitals",
        load=list_camelyon17,
        # FedDG-GA's protocol; the network is WILDS' DenseNet-121.
        preset={
            "data": {"image_size": 96},
            "clients": {"number": 3, "partition": "domain"},
            "model": {"backbone": "densenet121", "weights": "imagenet", "normalization": "train"},
            "train": {
                "rounds": 100,
                "batch_size": 32,
                "optimizer": "sgd",
                "lr": 1e-3,
                "augmentation": "camelyon17",
            },
        },
        domains=tuple(f"hospital_{center}" for center in range(5)),
        # Of tissue no side is up; WILDS itself varies nothing.
        augmentation=AugmentSettings(flip=0.5, vertical_flip=0.5, quarter_turns=True),
        classes=("normal", "tumor"),
        counts={
            "hospital_0": 59_436,
            "hospital_1": 34_904,
            "hospital_2": 85_054,
            "hospital_3": 129_838,
            "hospital_4": 146_722,
        },
        split_counts={"train": 302_436, "id_val": 33_560, "val": 34_904, "test": 85_054},
        publication=Publication(
            citation="P. Bandi et al., From Detection of Individual Metastases to Classification "
            "of Lymph Node Status at the Patient Level: The CAMELYON17 Challenge, IEEE TMI 2018; "
            "patches and split: P. W. Koh et al., WILDS: A Benchmark of in-the-Wild Distribution "
            "Shifts, ICML 2021",
            address="https://wilds.stanford.edu/datasets/",
            licence="CC0 1.0 (public domain)",
            files=(
                PublishedFile(
                    address="https://worksheets.codalab.org/rest/bundles/"
                    "0xe45e15f39fb54e9d9e919556af67aabe/contents/blob/",
                    name="camelyon17_v1.0.tar.gz",
                    bytes=10_658_709_504,
                    into="camelyon17_v1.0",
                ),
            ),
        ),
        layouts=("`camelyon17_v1.0/{metadata.csv,patches/}` (WILDS)",),
        protocol="official: hospitals 0, 3 and 4 train, 1 validates, 2 tests; or one held out",
        clients="hospital",
    )
)


# iWildCam as WILDS has it: animals before 323 camera traps, each a domain.


IWILDCAM_AROUND = ("iwildcam_v2.0", "iwildcam")
CATEGORIES = "categories.csv"
UNUSED = 99_999
"""Label of the categories that no image has."""


def list_iwildcam(root: Path | None) -> ImageTable:
    """IWildCam in WILDS' folder; every image lies in ``train/``, whatever its split.

    Domains are camera traps: those that train first, then the others, each by their number.

    Raises:
        DataError: ``metadata.csv`` or the images are not there, or a row is of another form.
    """
    folder = published_root(IWILDCAM, root)
    wanted = ("split", "location_remapped", "y", "filename")
    found = read_metadata(folder, IWILDCAM.title, IWILDCAM_AROUND, wanted)
    labels, places, split = found.numbers("y"), found.numbers("location_remapped"), roles(found)
    for index, name in enumerate(found["filename"]):
        if not name or "/" in name or "\\" in name:
            raise DataError(f"{found.row(index)} has {name!r} as filename; expected a file's name.")
        if labels[index] < 0 or places[index] < 0:
            raise DataError(f"{found.row(index)} has a negative y or location_remapped.")
    home = found.file.parent
    names = _class_names(home, max(labels) + 1)
    paths = [f"train/{name}" for name in found["filename"]]
    check_images(home, paths, METADATA)
    training = {place for place, role in zip(places, split) if role == "train"}
    order = sorted(set(places), key=lambda place: (place not in training, place))
    locations = [f"location_{place}" for place in places]
    table = listed_images(
        home,
        paths,
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
    """Returns the names of the classes by their label; made up where no file says them."""
    file = folder / CATEGORIES
    known: dict[int, str] = {}
    if file.is_file():
        found = read_columns(file, ("y", "name"))
        known = {y: name for y, name in zip(found.numbers("y"), found["name"]) if y != UNUSED}
        count = max(count, max(known, default=-1) + 1)
    names = [known.get(label) or f"class_{label}" for label in range(count)]
    return [name if names.count(name) == 1 else f"{name}_{y}" for y, name in enumerate(names)]


IWILDCAM = register_data_set(
    DataSet(
        name="iwildcam",
        summary="iWildCam (Beery et al. 2020, as in WILDS): 182 species before 323 camera traps",
        load=list_iwildcam,
        # One client for each training location; a tenth of them in a round.
        preset=merge(
            PARDON_PROTOCOL,
            {
                "clients": {"number": 243, "per_round": 24},
                "train": {"rounds": 100},
            },
        ),
        class_count=182,
        split_counts={
            "train": 129_809,
            "val": 14_961,
            "test": 42_791,
            "id_val": 7_314,
            "id_test": 8_154,
        },
        publication=Publication(
            citation="S. Beery, E. Cole and A. Gjoka, The iWildCam 2020 Competition Dataset, 2020; "
            "split: P. W. Koh et al., WILDS: A Benchmark of in-the-Wild Distribution Shifts, "
            "ICML 2021",
            address="https://wilds.stanford.edu/datasets/",
            licence="Community Data License Agreement - Permissive - Version 1.0",
            files=(
                PublishedFile(
                    address="https://worksheets.codalab.org/rest/bundles/"
                    "0x6313da2b204647e79a14b468131fcd64/contents/blob/",
                    name="iwildcam_v2.0.tar.gz",
                    bytes=11_957_420_032,
                    into="iwildcam_v2.0",
                ),
            ),
        ),
        layouts=("`iwildcam_v2.0/{metadata.csv,categories.csv,train/}` (WILDS)",),
        protocol="official: 243 locations train, 32 validate, 48 test; macro-F1 is "
        "official (`--set evaluate.select_by=macro_f1`)",
        clients="camera trap",
    )
)


# Terra Incognita: animals before four camera traps of the American southwest.


TERRA_INCOGNITA_AROUND = ("terra_incognita",)
"""The folder that DomainBed puts around the domains."""
TERRA_INCOGNITA_SPELLINGS = {f"L{number}": f"location_{number}" for number in (100, 38, 43, 46)} | {
    str(number): f"location_{number}" for number in (100, 38, 43, 46)
}
IMAGES = "eccv_18_all_images_sm"
"""The folder of all images in the published archive."""
_STORE = "https://storage.googleapis.com/public-datasets-lila/caltechcameratraps/"


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
    return _once(
        load_published(TERRA_INCOGNITA, root, TERRA_INCOGNITA_AROUND, TERRA_INCOGNITA_SPELLINGS)
    )


def _is_raw(folder: Path) -> bool:
    return any((place / IMAGES).is_dir() for place in (folder, *folder.glob("*/")))


def _once(table: ImageTable) -> ImageTable:
    """Leaves copies of an image in a second class folder of its location out."""
    kept = list(_first_rows(table))
    if len(kept) < len(table):
        text = (
            f"Terra Incognita: {len(table) - len(kept)} images of two animals lie in two class "
            "folders; the first counts."
        )
        emit(Diagnostic("images-left-out", "warning", text))
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
