"""DomainNet, 345 classes of things in six domains, and Mini-DomainNet, 126 of them in four."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

import numpy as np
from pydantic import Field

from feddg.data.augment import AugmentSettings
from feddg.data.columns import check_images
from feddg.data.data_set import DataSet, Publication, PublishedFile, register_data_set
from feddg.data.images import ImageTable, check_folder, from_folder, listed_images
from feddg.data.published import (
    compare_counts,
    domains_folder,
    known_names,
    published_root,
    rename,
)
from feddg.data.sets.folders import PARDON_PROTOCOL
from feddg.diagnostics import Diagnostic, emit
from feddg.errors import DataError
from feddg.settings import FixedPath, Settings, merge
from feddg.storage import read_text

AROUND = ("domain_net", "domainnet", "DomainNet", "domainnet_v1.0", "images")
LISTS = ("", "splits_mini")
"""Folders that hold the lists, below that of the domains."""
DUPLICATES = "domain_net_duplicates.txt"
ROLES = {"train": "train", "test": "id_test"}
WITHOUT_DUPLICATES = {
    "clipart": 48_129,
    "infograph": 51_605,
    "painting": 72_266,
    "quickdraw": 172_500,
    "real": 172_947,
    "sketch": 69_128,
}


@dataclass
class _Listed:
    """Images of lists, in columns."""

    paths: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)
    split: list[str] = field(default_factory=list)


def list_domain_net(
    definition: DataSet,
    root: Path | None,
    duplicates: Path | None,
    with_duplicates: Mapping[str, int] | None = None,
    *,
    needs_lists: bool = False,
) -> ImageTable:
    """Lists DomainNet or a part of it.

    Args:
        definition: with its domains.
        root: the folder of the domains, or one around it.
        duplicates: a file of images to leave out; None for the known one in the folder.
        with_duplicates: counts by domain where nothing is left out.
        needs_lists: whether lists say which classes count.

    Raises:
        DataError: a domain or list is missing, or cannot be read.
    """
    start = published_root(definition, root)
    check_folder(start)
    folder = domains_folder(start, definition, AROUND, known_names(definition))
    lists = _lists(folder, definition.domains, mini=needs_lists)
    if needs_lists and not lists:
        names = f"{definition.domains[0]}_train.txt, {definition.domains[0]}_test.txt, ..."
        raise DataError(
            f"{folder} has no splits_mini/ with {names}, which say the classes of "
            f"{definition.title}. `feddg data get {definition.name}` says where they are."
        )
    if lists:
        table = _from_lists(folder, definition, lists)
    else:
        check_folder(folder)
        listed = from_folder(folder)
        table = rename(
            listed, replace(definition, classes=listed.class_names), _names(definition, listed)
        )
    table = _without(table, folder, duplicates, bool(with_duplicates))
    compare_counts(definition, table, *([with_duplicates] if with_duplicates else []))
    return table


def _names(definition: DataSet, table: ImageTable) -> dict[str, str]:
    return known_names(replace(definition, classes=table.class_names))


def _lists(folder: Path, domains: Collection[str], *, mini: bool) -> dict[tuple[str, str], Path]:
    """Returns the list of every domain and part; none where one is missing."""
    for place in ("splits_mini",) if mini else LISTS:
        files = {(d, part): folder / place / f"{d}_{part}.txt" for d in domains for part in ROLES}
        if all(file.is_file() for file in files.values()):
            return files
    return {}


def _from_lists(
    folder: Path, definition: DataSet, lists: Mapping[tuple[str, str], Path]
) -> ImageTable:
    found = _Listed()
    for (domain, part), file in lists.items():
        for number, line in enumerate(read_text(file, DataError).splitlines(), start=1):
            path, _, label = line.strip().rpartition(" ")
            steps = PurePosixPath(path).parts
            if not line.strip():
                continue
            if len(steps) != 3 or ".." in steps or not label.isdecimal():
                raise DataError(
                    f"line {number} of {file} is {line.strip()!r}; expected domain/class/image and "
                    "a label."
                )
            found.paths.append(path)
            found.labels.append(int(label))
            found.classes.append(steps[1])
            found.domains.append(domain)
            found.split.append(ROLES[part])
    return _table(folder, definition, found)


def _table(folder: Path, definition: DataSet, found: _Listed) -> ImageTable:
    listed_in = "the official lists"
    name_of: dict[int, str] = {}
    for label, name in zip(found.labels, found.classes):
        if name_of.setdefault(label, name) != name:
            raise DataError(
                f"{listed_in} in {folder}: the label {label} stands for both {name_of[label]} and "
                f"{name}."
            )
    if len(set(name_of.values())) < len(name_of):
        raise DataError(f"{listed_in} in {folder}: one class has two labels.")
    check_images(folder, found.paths, f"{listed_in} in {folder}")
    return listed_images(
        folder,
        found.paths,
        found.classes,
        found.domains,
        listed_in=listed_in,
        split=found.split,
        class_names=[name_of[label] for label in sorted(name_of)],
        domain_names=definition.domains,
    )


def _without(
    table: ImageTable, folder: Path, duplicates: Path | None, known_to_have: bool
) -> ImageTable:
    """Leaves the images out that a file lists."""
    file = duplicates
    if file is None:
        places = (folder / DUPLICATES, folder.parent / DUPLICATES)
        file = next((place for place in places if place.is_file()), None)
    if file is None:
        whole = sum(WITHOUT_DUPLICATES.values())
        if known_to_have and len(table) > whole:
            emit(
                Diagnostic(
                    "known-copies",
                    "warning",
                    "DomainNet holds copies: DomainBed leaves 9,431 out.",
                    f"Put its {DUPLICATES} into {folder}, or name it: "
                    "--set data.options.duplicates=FILE.",
                )
            )
        return table
    listed = {
        line.strip().removeprefix("./") for line in read_text(file, DataError).splitlines()
    } - {""}
    kept = np.flatnonzero([path not in listed for path in table.paths])
    out = len(table) - len(kept)
    text = f"DomainNet: {out} images left out, as {file} lists them."
    emit(Diagnostic("images-left-out", "warning", text))
    if listed and not out:
        text = f"None of the {len(listed)} lines of {file} is an image of {folder}."
        emit(Diagnostic("list-matches-nothing", "warning", text, "Write domain/class/image."))
    return table.take(kept)


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
            "`domainnet_v1.0/<domain>/<class>` (WILDS), in our own random split",
        ),
        protocol="one domain held out (DomainBed)",
    )
)


def list_mini_domain_net(root: Path | None) -> ImageTable:
    """Mini-DomainNet: DomainNet's folders and Dassl's lists of them, which say class and split.

    Raises:
        DataError: a list is missing or cannot be read.
    """
    return list_domain_net(MINI_DOMAIN_NET, root, None, needs_lists=True)


MINI_DOMAIN_NET = register_data_set(
    DataSet(
        name="mini_domain_net",
        summary="Mini-DomainNet (Zhou et al. 2021): 126 classes in four domains of DomainNet",
        load=list_mini_domain_net,
        preset={
            "data": {"image_size": 96},
            "clients": {"number": 3, "partition": "domain"},
            "model": {"backbone": "resnet18", "weights": "imagenet"},
            "train": {"rounds": 60, "lr": 1e-4, "batch_size": 32, "augmentation": "domain_net"},
        },
        domains=("clipart", "painting", "real", "sketch"),
        class_count=126,
        publication=Publication(
            citation="K. Zhou, Y. Yang, Y. Qiao and T. Xiang, Domain Adaptive Ensemble Learning, "
            "IEEE TIP 2021; images: DomainNet (Peng et al. 2019)",
            address="https://github.com/KaiyangZhou/Dassl.pytorch/blob/master/DATASETS.md",
            licence="non-commercial research and education (DomainNet's fair-use notice)",
            steps=(
                "Take DomainNet (`feddg data get domain_net` or its own page).",
                "Take splits_mini.zip from the link in Dassl.pytorch's DATASETS.md, and unpack it "
                "into the folder of the domains.",
                "Give that folder as --root.",
            ),
        ),
        layouts=(
            "`domainnet/{clipart,painting,real,sketch}/<class>` and "
            "`domainnet/splits_mini/<domain>_{train,test}.txt` (Dassl)",
        ),
        protocol="one domain held out (Zhou et al.)",
    )
)
