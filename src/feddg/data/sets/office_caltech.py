"""Office-Caltech: 10 classes of office things, from three cameras and Caltech-256."""

from pathlib import Path

from feddg.data.augmentations import AugmentSettings
from feddg.data.data_set import DataSet, Publication, register_data_set
from feddg.data.images import ImageTable
from feddg.data.published import load_published

AROUND = (
    *("office_caltech_10", "office_caltech", "OfficeCaltech", "OfficeCaltech10"),
    *("Office-Caltech-10", "domain_adaptation_images", "data", "images"),
)
"""Folders around the domains."""
CLASSES = {
    "back_pack": ("backpack", "003.backpack"),
    "bike": ("touring_bike", "145.touring-bike"),
    "calculator": ("027.calculator",),
    "headphones": ("head_phones", "101.head-phones"),
    "keyboard": ("computer_keyboard", "045.computer-keyboard"),
    "laptop_computer": ("laptop", "laptop_101", "127.laptop-101"),
    "monitor": ("computer_monitor", "046.computer-monitor"),
    "mouse": ("computer_mouse", "047.computer-mouse"),
    "mug": ("coffee_mug", "041.coffee-mug"),
    "projector": ("video_projector", "238.video-projector"),
}
"""The classes as Office-31 calls them, and their other names."""
SPELLINGS = {other: name for name, others in CLASSES.items() for other in others}
SPELLINGS |= dict.fromkeys(("caltech10", "caltech256"), "caltech")
PARTS = {"images": ""}
"""Office-31 has a folder of this name in every domain."""


def list_office_caltech(root: Path | None) -> ImageTable:
    """Office-Caltech with the class names of Office-31 or of Caltech-256.

    Raises:
        DataError: a domain is missing, or a class folder is not one of the ten.
    """
    return load_published(OFFICE_CALTECH, root, AROUND, SPELLINGS, PARTS)


OFFICE_CALTECH = register_data_set(
    DataSet(
        name="office_caltech",
        summary="Office-Caltech (Gong et al. 2012): 10 classes from Amazon, Caltech-256, a DSLR "
        "camera and a webcam",
        load=list_office_caltech,
        preset={
            "data": {"image_size": 224},
            "clients": {"number": 3, "partition": "domain"},
            "model": {"backbone": "resnet18", "weights": "imagenet"},
            "train": {
                "rounds": 100,
                "batch_size": 64,
                "optimizer": "sgd",
                "lr": 0.01,
                "momentum": 0.9,
                "weight_decay": 1e-5,
                "augmentation": "office_caltech",
            },
        },
        domains=("amazon", "caltech", "dslr", "webcam"),
        augmentation=AugmentSettings(
            crop_scale=(0.7, 1.0), flip=0.5, color_jitter=(0.3, 0.3, 0.3, 0.3), grayscale=0.1
        ),
        classes=tuple(CLASSES),
        counts={"amazon": 958, "caltech": 1123, "dslr": 157, "webcam": 295},
        publication=Publication(
            citation="B. Gong, Y. Shi, F. Sha and K. Grauman, Geodesic Flow Kernel for "
            "Unsupervised Domain Adaptation, CVPR 2012",
            steps=(
                "Take Office-Caltech-10 from one of its copies (FedBN's repository links one), or "
                "the ten classes from Office-31 and Caltech-256.",
                "Unpack it and give the folder of the four domains as --root.",
            ),
        ),
        layouts=(
            "`office_caltech_10/{amazon,caltech,dslr,webcam}/<class>`",
            "`{amazon,dslr,webcam,caltech}/images/<class>` (Office-31)",
        ),
        protocol="one domain per client (FedBN, FPL); here one domain is held out",
    )
)
