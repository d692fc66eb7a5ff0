"""FEMNIST: handwritten digits and letters of 3,550 writers, each a domain."""

import string
from pathlib import Path

from feddg.data.augmentations import AugmentSettings
from feddg.data.columns import Columns
from feddg.data.data_set import DataSet, Publication, register_data_set
from feddg.data.images import ImageTable
from feddg.data.leaf import list_leaf
from feddg.data.listed_images import listed_images
from feddg.data.published import compare_counts, published_root
from feddg.data.wilds_folders import check_images, holding, read_metadata, roles
from feddg.errors import DataError

AROUND = ("femnist_v1.0", "femnist", "data")
TABLES = ("metadata.csv", "femnist_new_metadata.csv")
JSONS = ("all_data/*.json", "train/*.json", "test/*.json", "*.json")


def list_femnist(root: Path | None) -> ImageTable:
    """FEMNIST as LEAF's JSON files, or in a folder like WILDS' with ``metadata.csv``.

    LEAF stores the first image of nearly every writer twice: it is used once. Where its files are
    split, images of a writer that trains are in-domain test, those of other writers test.

    Raises:
        DataError: there is neither, or a file is of another form.
    """
    folder = published_root(FEMNIST, root)
    if holding(folder, TABLES, AROUND) is not None:
        table = _listed(folder)
    else:
        home = holding(folder, JSONS, AROUND)
        if home is None:
            raise DataError(
                f"{folder} holds neither LEAF's JSON files (all_data/, or train/ and test/) nor "
                f"{' or '.join(TABLES)}."
            )
        table = list_leaf(home, FEMNIST)
    compare_counts(FEMNIST, table)
    return table


def _listed(root: Path) -> ImageTable:
    wanted, optional = ("path", "split", "y", "domain_remapped"), ("domain",)
    found = read_metadata(root, FEMNIST.title, AROUND, wanted, optional, TABLES)
    labels = found.numbers("y")
    for index, label in enumerate(labels):
        if not 0 <= label < len(FEMNIST.classes):
            raise DataError(f"{found.row(index)} has y {label}; expected 0 to 61.")
    check_images(found.file.parent, found["path"], found.file.name)
    writers, order = _writers(found)
    return listed_images(
        found.file.parent,
        found["path"],
        [FEMNIST.classes[label] for label in labels],
        writers,
        listed_in=found.file.name,
        split=roles(found),
        clients=writers,
        class_names=FEMNIST.classes,
        domain_names=order,
    )


def _writers(found: Columns) -> tuple[list[str], list[str]]:
    """The writer of each image, and all of them in the order of their numbers."""
    numbers = found.numbers("domain_remapped")
    names = found["domain"] if "domain" in found else [f"writer_{number}" for number in numbers]
    order = dict(sorted(zip(numbers, names)))
    return list(names), list(dict.fromkeys([*order.values(), *names]))


FEMNIST = register_data_set(
    DataSet(
        name="femnist",
        summary="FEMNIST (Caldas et al. 2018): digits and letters of 3,550 writers",
        load=list_femnist,
        preset={
            "data": {"image_size": 28},
            "clients": {"number": 100, "per_round": 20, "heterogeneity": 0.1},
            "model": {"backbone": "cnn", "weights": None},
            "train": {"rounds": 50, "batch_size": 32, "lr": 1e-3, "augmentation": "femnist"},
        },
        augmentation=AugmentSettings(shift=2),  # letters keep their orientation
        classes=tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
        publication=Publication(
            citation="S. Caldas et al., LEAF: A Benchmark for Federated Settings, 2018; images: "
            "P. J. Grother, NIST Special Database 19",
            address="https://github.com/TalwalkarLab/leaf/tree/master/data/femnist",
            licence="BSD-2-Clause (LEAF's scripts); the images are NIST's",
            steps=(
                "Clone LEAF (the address above) and run "
                "`data/femnist/preprocess.sh -s niid --sf 1.0 -k 0 -t user`, which downloads the "
                "images from NIST and writes JSON files.",
                "Give LEAF's folder data/femnist as --root.",
            ),
        ),
        layouts=(
            "`data/{train,test}/*.json` or `data/all_data/*.json` (LEAF)",
            "`femnist_v1.0/metadata.csv` or `femnist_new_metadata.csv` with `path, split, y, "
            "domain_remapped` (FedDG benchmark, PARDON)",
        ),
        protocol="as LEAF's files or the list are split; a client per writer: `--partition client`",
        clients="writer",
    )
)
