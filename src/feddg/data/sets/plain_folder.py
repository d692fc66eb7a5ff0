"""Any folder of images, and the experiment values of every data set without its own."""

from pathlib import Path

from feddg.data.data_set import ANY, DataSet, register_data_set
from feddg.data.images import LAYOUT, ImageTable, from_folder
from feddg.data.published import needs_root
from feddg.errors import DataError


def list_folder(root: Path | None) -> ImageTable:
    """Any folder laid out as ``root/domain/class/image``.

    Raises:
        DataError: the folder is missing or empty, or has fewer than two classes.
    """
    table = from_folder(needs_root(ANY, root))
    if len(table.class_names) < 2:
        raise DataError(
            f"{root} holds the class '{table.class_names[0]}' only; there is nothing to tell "
            f"apart. Expected two or more class folders: {LAYOUT}."
        )
    return table


register_data_set(
    DataSet(
        name=ANY,
        summary="any folder of images: root/domain/class/image",
        load=list_folder,
        preset={
            "model": {"backbone": "resnet18", "weights": "imagenet", "embedding": "linear"},
            # Of 1e-5 to 3e-4 the best on in-domain validation; see docs/sensible_results.md.
            "train": {"lr": 3e-5, "augmentation": "pacs"},
            # Single rounds are noise on an unseen domain, and this mean forgets soon enough for
            # models that still rise; see docs/sensible_results.md.
            "server": {"serve": "ema"},
        },
    )
)
