"""DomainNet: 345 classes of things in six domains."""

from pathlib import Path

from pydantic import Field

from feddg.data.augmentations import AugmentSettings
from feddg.data.data_set import DataSet, Publication, PublishedFile, register_data_set
from feddg.data.domain_net_layouts import WITHOUT_DUPLICATES, list_domain_net
from feddg.data.images import ImageTable
from feddg.data.sets.pardon_protocol import PARDON_PROTOCOL
from feddg.settings import FixedPath, Settings, merge

REMOVED = {
    "clipart": 704,
    "infograph": 1596,
    "painting": 3493,
    "quickdraw": 0,
    "real": 2380,
    "sketch": 1258,
}
"""Copies that DomainBed deletes, by domain."""


class DomainNetOptions(Settings):
    """What ``data.options`` may say of DomainNet."""

    duplicates: FixedPath | None = Field(
        None,
        description="a file of images to leave out, a path domain/class/image in each line "
        "(DomainBed's domain_net_duplicates.txt); by default the one of this name in the root",
    )


def list_whole_domain_net(root: Path | None, duplicates: Path | None = None) -> ImageTable:
    """DomainNet: the official folders, with the official lists where they are beside them.

    Where the lists are there, labels and the split are theirs; otherwise labels are in the order of
    a case-sensitive sort, as folder readers number them.

    Args:
        root: the folder of the six domains, or one around it.
        duplicates: a file of images to leave out.

    Raises:
        DataError: a domain is missing, or a list cannot be read.
    """
    before = {domain: count + REMOVED[domain] for domain, count in DOMAIN_NET.counts.items()}
    return list_domain_net(DOMAIN_NET, root, duplicates, before)


DOMAIN_NET = register_data_set(
    DataSet(
        name="domain_net",
        summary="DomainNet (Peng et al. 2019): 345 classes in six domains",
        load=list_whole_domain_net,
        options=DomainNetOptions,
        preset=merge(PARDON_PROTOCOL, {"train": {"augmentation": "domain_net"}}),
        domains=("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
        augmentation=AugmentSettings(
            crop_scale=(0.7, 1.0), flip=0.5, color_jitter=(0.3, 0.3, 0.3, 0.3), grayscale=0.1
        ),
        class_count=345,
        counts=WITHOUT_DUPLICATES,
        publication=Publication(
            citation="X. Peng, Q. Bai, X. Xia, Z. Huang, K. Saenko and B. Wang, Moment Matching "
            "for Multi-Source Domain Adaptation, ICCV 2019",
            address="http://ai.bu.edu/M3SDA/",
            licence="non-commercial research and education (the authors' fair-use notice)",
            files=(
                PublishedFile(  # as WILDS packs it
                    address="https://worksheets.codalab.org/rest/bundles/"
                    "0x0b8ca76eef384b98b879d0c8c4681a32/contents/blob/",
                    name="domainnet_v1.0.tar.gz",
                    bytes=19_255_770_459,
                    into="domainnet_v1.0",
                ),
            ),
        ),
        layouts=(
            "`domain_net/{clipart,infograph,painting,quickdraw,real,sketch}/<class>`, with "
            "`<domain>_{train,test}.txt` and `domain_net_duplicates.txt` beside them or not",
            "`domainnet_v1.0/metadata.csv` with `image_path, domain, split, category, y` (WILDS)",
        ),
        protocol="one domain held out (DomainBed)",
    )
)
