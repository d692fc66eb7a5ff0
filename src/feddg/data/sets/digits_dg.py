"""Digits-DG: MNIST, MNIST-M, SVHN and synthetic digits."""

from pathlib import Path

from feddg.data.augmentations import AugmentSettings
from feddg.data.data_set import DataSet, Publication, register_data_set
from feddg.data.images import ImageTable
from feddg.data.published import load_published

AROUND = ("digits_dg", "images")
"""Folders around the domains."""
SPELLINGS = {"synthetic": "syn", "synth": "syn", "synthetic digits": "syn"}
PARTS = {"train": "train", "val": "id_val", "test": "id_test"}


def list_digits_dg(root: Path | None) -> ImageTable:
    """Digits-DG as Dassl packs it, ``domain/{train,val}/digit/image``; its split is kept.

    Raises:
        DataError: a domain is missing, or a class folder is no digit.
    """
    return load_published(DIGITS_DG, root, AROUND, SPELLINGS, PARTS)


DIGITS_DG = register_data_set(
    DataSet(
        name="digits_dg",
        summary="Digits-DG (Zhou et al. 2020): digits of MNIST, MNIST-M, SVHN and SYN",
        load=list_digits_dg,
        preset={
            "data": {"image_size": 32},
            "clients": {"number": 3, "partition": "domain"},
            "model": {"backbone": "cnn", "weights": None},
            "train": {
                "rounds": 50,
                "batch_size": 42,
                "optimizer": "sgd",
                "lr": 0.05,
                "augmentation": "digits_dg",
            },
        },
        domains=("mnist", "mnist_m", "svhn", "syn"),
        augmentation=AugmentSettings(),  # Zhou et al. use none
        classes=tuple(str(digit) for digit in range(10)),
        counts=dict.fromkeys(("mnist", "mnist_m", "svhn", "syn"), 6000),
        publication=Publication(
            citation="K. Zhou, Y. Yang, T. M. Hospedales and T. Xiang, Deep Domain-Adversarial "
            "Image Generation for Domain Generalisation, AAAI 2020",
            address="https://github.com/KaiyangZhou/Dassl.pytorch/blob/master/DATASETS.md",
            steps=(
                "Take digits_dg.zip from the link in Dassl.pytorch's DATASETS.md (Google Drive).",
                "Unpack it and give the folder as --root.",
            ),
        ),
        layouts=("`digits_dg/{mnist,mnist_m,svhn,syn}/{train,val}/{0..9}` (Dassl)",),
        protocol="one domain held out; validation as split by its authors (Zhou et al.)",
    )
)
