"""PACS: photos, art paintings, cartoons and sketches of 7 classes."""

from pathlib import Path

from feddg.data.augmentations import AugmentSettings
from feddg.data.data_set import DataSet, Publication, register_data_set
from feddg.data.images import ImageTable
from feddg.data.published import load_published
from feddg.data.sets.pardon_protocol import PARDON_PROTOCOL

AROUND = ("pacs", "kfold", "images", "rawimages")
"""Folders that the archives in circulation put around the domains."""


def list_pacs(root: Path | None) -> ImageTable:
    """PACS, from the folder of its four domains or one around it.

    Domains have the order of the FedDG benchmark's files (photo, art_painting, cartoon, sketch)
    whatever the spelling of their folders; labels are in alphabetical order. Image counts that
    differ from the published ones are logged as a warning, since copies differ.

    Raises:
        DataError: a domain is missing, or a class folder is not one of PACS's seven.
    """
    return load_published(PACS, root, AROUND)


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
