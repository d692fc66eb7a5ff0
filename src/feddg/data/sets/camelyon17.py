"""Camelyon17 as WILDS has it: tumour in patches of lymph nodes, from five hospitals."""

from pathlib import Path

from feddg.data.augmentations import AugmentSettings
from feddg.data.data_set import DataSet, Publication, PublishedFile, register_data_set
from feddg.data.images import ImageTable
from feddg.data.listed_images import listed_images
from feddg.data.published import compare_counts, published_root
from feddg.data.wilds_folders import METADATA, check_images, read_metadata
from feddg.errors import DataError

AROUND = ("camelyon17_v1.0", "camelyon17")
COLUMNS = ("patient", "node", "x_coord", "y_coord", "tumor", "center", "split")
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
    found = read_metadata(folder, CAMELYON17.title, AROUND, COLUMNS)
    keys = zip(*(found[name] for name in COLUMNS[:4]))
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
