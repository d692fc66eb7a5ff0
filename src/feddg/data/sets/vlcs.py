"""VLCS: birds, cars, chairs, dogs and persons in the photos of four collections."""

from pathlib import Path

from feddg.data.augmentations import AugmentSettings
from feddg.data.data_set import DataSet, Publication, register_data_set
from feddg.data.images import ImageTable
from feddg.data.published import load_published
from feddg.data.sets.pardon_protocol import PARDON_PROTOCOL
from feddg.settings import merge

AROUND = ("VLCS", "images")
"""Folders that the archives in circulation put around the domains."""
DOMAINS = ("Caltech101", "LabelMe", "SUN09", "VOC2007")
CLASSES = ("bird", "car", "chair", "dog", "person")
SPELLINGS = {"Caltech": "Caltech101", "SUN": "SUN09", "VOC": "VOC2007", "PASCAL": "VOC2007"}
SPELLINGS |= {str(label): name for label, name in enumerate(CLASSES)}
PARTS = {"full": "", "train": "train", "crossval": "id_val", "test": "id_test"}
"""``full`` repeats what is in the other three."""


def list_vlcs(root: Path | None) -> ImageTable:
    """VLCS, as DomainBed packs it or as JiGen and Dassl do.

    Of the latter, every image is listed once; where its file is in ``train``, ``crossval`` or
    ``test`` as well, that is its split.

    Raises:
        DataError: a domain is missing, or a class folder is not one of the five.
    """
    return load_published(VLCS, root, AROUND, SPELLINGS, PARTS)


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
        classes=CLASSES,
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
