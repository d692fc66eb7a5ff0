"""Data sets that are folders of images by domain and class: any folder, and the published ones."""

from pathlib import Path
from typing import Any

from feddg.data.augment import AugmentSettings
from feddg.data.data_set import ANY, SCRATCH, DataSet, Publication, register_data_set
from feddg.data.images import LAYOUT, ImageTable, from_folder
from feddg.data.published import load_published, needs_root
from feddg.errors import DataError
from feddg.settings import merge

PARDON_PROTOCOL: dict[str, Any] = {
    "data": {"image_size": 224},
    "clients": {"number": 100, "per_round": 20, "heterogeneity": 0.1},
    "model": {"backbone": "resnet50", "weights": "imagenet", "embedding": "linear"},
    "train": {"rounds": 50, "lr": 3e-5, "batch_size": 32, "augmentation": "pacs"},
}


# FedIG's protocols for four domains of any data set (its sections 4.1 and A.6).


FEDIG: dict[str, Any] = {
    "data": {"image_size": 224, "id_val": 0.2, "id_test": 0.0},
    "clients": {"number": 3, "partition": "domain"},
    "model": {
        "backbone": "resnet18",
        "weights": "imagenet",
        "embedding": "bottleneck",
        "normalization": "train",
    },
    "train": {
        "rounds": 40,
        "local_steps": 200,
        "batch_size": 64,
        "optimizer": "sgd",
        "lr": 0.01,
        "momentum": 0.5,
        "augmentation": "pacs",
    },
}
SILOS: dict[str, Any] = {
    "clients": {"number": 30, "per_round": 10},
    "train": {"rounds": 120, "local_steps": 20},
}


def _instead(name: str) -> str:
    return (
        "it is a protocol for images of another data set. Name theirs as the source and this one "
        f"as the preset: --data pacs --root FOLDER --preset {name}"
    )


register_data_set(
    DataSet(
        name="fedig",
        summary="FedIG's protocol for four domains: one domain per client",
        instead=_instead("fedig"),
        preset=FEDIG,
    )
)
register_data_set(
    DataSet(
        name="fedig_silos",
        summary="FedIG's protocol for four domains: ten clients per domain, with clients.alpha for "
        "label skew",
        instead=_instead("fedig_silos"),
        preset=merge(FEDIG, SILOS),
    )
)


# What an experiment without pretrained weights is filled in with: a small network that learns.


register_data_set(
    DataSet(
        name=SCRATCH,
        summary="a small network for any images, trained without pretrained weights",
        instead="it is no data set but what stands in for a preset with pretrained weights where "
        "there are none. Name your images as the source: --data folder --root FOLDER",
        preset={
            "data": {"image_size": 64},
            "model": {"backbone": "cnn", "weights": None, "embedding": "none"},
            "train": {"rounds": 30, "local_epochs": 2, "batch_size": 16, "lr": 1e-3},
        },
    )
)


# Any folder of images, and the experiment values of every data set without its own.


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
            # Of 1e-5 to 3e-4 the best on in-domain validation; see docs/benchmarks.md.
            "train": {"lr": 3e-5, "augmentation": "pacs"},
            # Single rounds are noise on an unseen domain, and this mean forgets soon enough for
            # models that still rise; see docs/benchmarks.md.
            "server": {"averaging": "ema"},
        },
    )
)


# PACS: photos, art paintings, cartoons and sketches of 7 classes.


PACS_AROUND = ("pacs", "kfold", "images", "rawimages")
"""Folders that the archives in circulation put around the domains."""


def list_pacs(root: Path | None) -> ImageTable:
    """PACS, from the folder of its four domains or one around it.

    Domains have the order of the FedDG benchmark's files (photo, art_painting, cartoon, sketch)
    whatever the spelling of their folders; labels are in alphabetical order. Image counts that
    differ from the published ones are logged as a warning, since copies differ.

    Raises:
        DataError: a domain is missing, or a class folder is not one of PACS's seven.
    """
    return load_published(PACS, root, PACS_AROUND)


PACS = register_data_set(
    DataSet(
        name="pacs",
        summary="PACS (Li et al. 2017): 7 classes as photo, art painting, cartoon and sketch",
        load=list_pacs,
        preset=PARDON_PROTOCOL,
        domains=("photo", "art_painting", "cartoon", "sketch"),
        # PARDON's Table I, which FISC has too.
        validated_by={
            "photo": "art_painting",
            "art_painting": "cartoon",
            "cartoon": "sketch",
            "sketch": "photo",
        },
        # PARDON's training transform for PACS and IWildCam (official code).
        augmentation=AugmentSettings(
            crop_scale=(0.7, 1.0), flip=0.5, color_jitter=(0.3, 0.3, 0.3, 0.3), grayscale=0.1
        ),
        classes=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
        counts={"photo": 1670, "art_painting": 2048, "cartoon": 2344, "sketch": 3929},
        publication=Publication(
            citation="D. Li, Y. Yang, Y.-Z. Song and T. M. Hospedales, Deeper, Broader and Artier "
            "Domain Generalization, ICCV 2017",
            address="https://github.com/facebookresearch/DomainBed",
            steps=(
                "Take PACS from the link in DomainBed's domainbed/scripts/download.py (Google "
                "Drive), or in the scripts of Dassl.pytorch (DATASETS.md).",
                "Unpack it and give the folder as --root.",
            ),
        ),
        layouts=(
            "`{PACS,kfold,images,raw_images}/{art_painting,cartoon,photo,sketch}/<class>`; lists "
            "of a split beside the domains are not read",
        ),
        protocol="one or two domains held out (PARDON's Tables I and II)",
    )
)


# Office-Home: 65 classes of things in offices and homes, in four domains.


OFFICE_HOME_AROUND = (
    "OfficeHomeDataset_10072016",
    "OfficeHomeDataset",
    "OfficeHome",
    "office_home_dg",
    "images",
)
"""Folders that the archives in circulation put around the domains."""
OFFICE_HOME_SPELLINGS = {"Real": "Real_World"}
"""Beside ``Real World`` (the archive's), ``Real_World``, ``RealWorld`` and ``real_world``."""
OFFICE_HOME_PARTS = {"train": "train", "val": "id_val", "test": "id_test"}
"""Dassl has these between domain and class."""
# In the order of a case-sensitive sort, as folder readers number them.
OFFICE_HOME_CLASSES = """
    Alarm_Clock Backpack Batteries Bed Bike Bottle Bucket Calculator Calendar Candles Chair
    Clipboards Computer Couch Curtains Desk_Lamp Drill Eraser Exit_Sign Fan File_Cabinet Flipflops
    Flowers Folder Fork Glasses Hammer Helmet Kettle Keyboard Knives Lamp_Shade Laptop Marker
    Monitor Mop Mouse Mug Notebook Oven Pan Paper_Clip Pen Pencil Postit_Notes Printer Push_Pin
    Radio Refrigerator Ruler Scissors Screwdriver Shelf Sink Sneakers Soda Speaker Spoon TV Table
    Telephone ToothBrush Toys Trash_Can Webcam
"""


def list_office_home(root: Path | None) -> ImageTable:
    """Office-Home, from the folder of its four domains or one around it; Dassl's split is kept.

    Domains are Art, Clipart, Product and Real_World, whatever the spelling of their folders; labels
    are in alphabetical order. Image counts that differ from the published ones are logged as a
    warning, since copies differ.

    Raises:
        DataError: a domain is missing, or a class folder is not one of the 65.
    """
    return load_published(
        OFFICE_HOME, root, OFFICE_HOME_AROUND, OFFICE_HOME_SPELLINGS, OFFICE_HOME_PARTS
    )


OFFICE_HOME = register_data_set(
    DataSet(
        name="office_home",
        summary="Office-Home (Venkateswara et al. 2017): 65 classes as art, clipart, product photo "
        "and real-world photo",
        load=list_office_home,
        preset=merge(PARDON_PROTOCOL, {"train": {"augmentation": "office_home"}}),
        domains=("Art", "Clipart", "Product", "Real_World"),
        # PARDON's Table I.
        validated_by={
            "Art": "Clipart",
            "Clipart": "Real_World",
            "Real_World": "Product",
            "Product": "Art",
        },
        # PARDON's training transform for Office-Home (official code).
        augmentation=AugmentSettings(
            crop_scale=(0.7, 1.0), flip=0.5, color_jitter=(0.4, 0.4, 0.4, 0.4), grayscale=0.1
        ),
        classes=tuple(OFFICE_HOME_CLASSES.split()),
        counts={"Art": 2427, "Clipart": 4365, "Product": 4439, "Real_World": 4357},
        publication=Publication(
            citation="H. Venkateswara, J. Eusebio, S. Chakraborty and S. Panchanathan, Deep "
            "Hashing Network for Unsupervised Domain Adaptation, CVPR 2017",
            address="https://www.hemanthdv.org/officeHomeDataset.html",
            licence="for non-commercial research and education (the authors' fair-use notice)",
            steps=(
                "Open the address, read the authors' notice and follow their download link.",
                "Unpack OfficeHomeDataset_10072016.zip and give the folder as --root.",
            ),
        ),
        layouts=(
            "`OfficeHomeDataset_10072016/{Art,Clipart,Product,Real World}/<class>`; the fourth "
            "also `Real_World`, `RealWorld`, `real_world` or `real`",
            "`office_home_dg/{art,clipart,product,real_world}/{train,val}/<class>` (Dassl)",
        ),
        protocol="one or two domains held out (PARDON's Tables I and II)",
    )
)


# VLCS: birds, cars, chairs, dogs and persons in the photos of four collections.


VLCS_AROUND = ("VLCS", "images")
"""Folders that the archives in circulation put around the domains."""
DOMAINS = ("Caltech101", "LabelMe", "SUN09", "VOC2007")
VLCS_CLASSES = ("bird", "car", "chair", "dog", "person")
VLCS_SPELLINGS = {"Caltech": "Caltech101", "SUN": "SUN09", "VOC": "VOC2007", "PASCAL": "VOC2007"}
VLCS_SPELLINGS |= {str(label): name for label, name in enumerate(VLCS_CLASSES)}
VLCS_PARTS = {"full": "", "train": "train", "crossval": "id_val", "test": "id_test"}
"""``full`` repeats what is in the other three."""


def list_vlcs(root: Path | None) -> ImageTable:
    """VLCS, as DomainBed packs it or as JiGen and Dassl do.

    Of the latter, every image is listed once; where its file is in ``train``, ``crossval`` or
    ``test`` as well, that is its split.

    Raises:
        DataError: a domain is missing, or a class folder is not one of the five.
    """
    return load_published(VLCS, root, VLCS_AROUND, VLCS_SPELLINGS, VLCS_PARTS)


VLCS = register_data_set(
    DataSet(
        name="vlcs",
        summary="VLCS (Fang et al. 2013): 5 classes in the photos of Caltech101, LabelMe, SUN09 "
        "and VOC2007",
        load=list_vlcs,
        preset=merge(PARDON_PROTOCOL, {"train": {"augmentation": "vlcs"}}),
        domains=DOMAINS,
        # DomainBed's training transform, which it has for all its data sets.
        augmentation=AugmentSettings(
            crop_scale=(0.7, 1.0), flip=0.5, color_jitter=(0.3, 0.3, 0.3, 0.3), grayscale=0.1
        ),
        classes=VLCS_CLASSES,
        counts=dict(zip(DOMAINS, (1415, 2656, 3282, 3376))),
        publication=Publication(
            citation="C. Fang, Y. Xu and D. N. Rockmore, Unbiased Metric Learning: On the "
            "Utilization of Multiple Datasets and Web Images for Softening Bias, ICCV 2013",
            address="https://github.com/facebookresearch/DomainBed",
            steps=(
                "Take VLCS from the link in DomainBed's domainbed/scripts/download.py (Google "
                "Drive), or in the scripts of Dassl.pytorch (DATASETS.md).",
                "Unpack it and give the folder as --root.",
            ),
        ),
        layouts=(
            "`VLCS/{Caltech101,LabelMe,SUN09,VOC2007}/{bird,car,chair,dog,person}` (DomainBed)",
            "`VLCS/{CALTECH,LABELME,SUN,PASCAL}/{full,train,crossval,test}/{0,1,2,3,4}` (JiGen, "
            "Dassl)",
        ),
        protocol="one domain held out (DomainBed); FedIG: `--preset fedig`",
    )
)


# Office-Caltech: 10 classes of office things, from three cameras and Caltech-256.


OFFICE_CALTECH_AROUND = (
    *("office_caltech_10", "office_caltech", "OfficeCaltech", "OfficeCaltech10"),
    *("Office-Caltech-10", "domain_adaptation_images", "data", "images"),
)
"""Folders around the domains."""
OFFICE_CALTECH_CLASSES = {
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
OFFICE_CALTECH_SPELLINGS = {
    other: name for name, others in OFFICE_CALTECH_CLASSES.items() for other in others
}
OFFICE_CALTECH_SPELLINGS |= dict.fromkeys(("caltech10", "caltech256"), "caltech")
OFFICE_CALTECH_PARTS = {"images": ""}
"""Office-31 has a folder of this name in every domain."""


def list_office_caltech(root: Path | None) -> ImageTable:
    """Office-Caltech with the class names of Office-31 or of Caltech-256.

    Raises:
        DataError: a domain is missing, or a class folder is not one of the ten.
    """
    return load_published(
        OFFICE_CALTECH, root, OFFICE_CALTECH_AROUND, OFFICE_CALTECH_SPELLINGS, OFFICE_CALTECH_PARTS
    )


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
        classes=tuple(OFFICE_CALTECH_CLASSES),
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


# Digits-DG: MNIST, MNIST-M, SVHN and synthetic digits.


DIGITS_DG_AROUND = ("digits_dg", "images")
"""Folders around the domains."""
DIGITS_DG_SPELLINGS = {"synthetic": "syn", "synth": "syn", "synthetic digits": "syn"}
DIGITS_DG_PARTS = {"train": "train", "val": "id_val", "test": "id_test"}


def list_digits_dg(root: Path | None) -> ImageTable:
    """Digits-DG as Dassl packs it, ``domain/{train,val}/digit/image``; its split is kept.

    Raises:
        DataError: a domain is missing, or a class folder is no digit.
    """
    return load_published(DIGITS_DG, root, DIGITS_DG_AROUND, DIGITS_DG_SPELLINGS, DIGITS_DG_PARTS)


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
