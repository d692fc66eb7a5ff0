"""Handwritten digits in four domains, built in."""

from pathlib import Path

from feddg.data.augmentations import AugmentSettings
from feddg.data.data_set import DataSet, Publication, register_data_set
from feddg.data.images import ImageTable
from feddg.errors import DataError


def draw_digits(root: Path | None = None) -> ImageTable:
    """Handwritten digits in four domains: see :mod:`feddg.data.digit_drawing`.

    Raises:
        DataError: a folder was given, which would go unused.
    """
    if root is not None:
        raise DataError("The data source 'digits' is built in and reads no folder: leave out root.")
    from feddg.data.digit_drawing import render_digits  # scikit-learn's data are slow to import

    return render_digits()


register_data_set(
    DataSet(
        name="digits",
        summary="handwritten digits drawn in ink, chalk, photo and sketch; built in",
        load=draw_digits,
        preset={
            "data": {"image_size": 32},
            "clients": {"number": 6, "heterogeneity": 0.1},
            "model": {"backbone": "cnn", "weights": None},
            "train": {
                "rounds": 10,
                "local_epochs": 2,
                "batch_size": 16,
                "lr": 1e-3,
                "augmentation": "digits",
            },
        },
        domains=("ink", "chalk", "photo", "sketch"),
        augmentation=AugmentSettings(shift=2),  # digits keep their orientation and colours
        classes=tuple(str(digit) for digit in range(10)),
        publication=Publication(
            citation="Scans: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, "
            "UCI Machine Learning Repository 1998",
            address="https://archive.ics.uci.edu/dataset/80",
        ),
    )
)
