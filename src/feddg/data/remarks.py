"""What is odd about a folder of images, one line each; where a result would mean nothing, it stops.

The same checks run in ``feddg data inspect`` and at the start of every run.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np

from feddg.data.images import ImageTable, plain_name
from feddg.data.splits import Splits
from feddg.errors import DataError

HALF = 0.5
"""A class or client with more of the images than this, and than one and a half even shares."""

SMALL_VALIDATION = 50
"""Fewer images than this choose a round mostly by chance: accuracies are uncertain by 14 points."""
SHOWN = 3

Severity = Literal["note", "warning", "error"]
log = logging.getLogger("feddg")


@dataclass(frozen=True)
class Remark:
    """One thing worth knowing about the images.

    Attributes:
        severity: ``note``; ``warning``, which every run says; or ``error``, which ends it.
        text: one line that names what it is about and what to do.
    """

    severity: Severity
    text: str


def say(remarks: Iterable[Remark]) -> None:
    """Logs remarks, a line each.

    Raises:
        DataError: the first error among them; how many more there are.
    """
    found = list(remarks)
    for remark in found:
        if remark.severity != "error":
            log.log(logging.INFO if remark.severity == "note" else logging.WARNING, remark.text)
    errors = [remark.text for remark in found if remark.severity == "error"]
    if errors:
        more = f" ({len(errors) - 1} more: `feddg data inspect` lists them)" if errors[1:] else ""
        raise DataError(errors[0] + more)


def about_labels(table: ImageTable, bad: Sequence[str] = ()) -> Iterator[Remark]:
    """Finds names that differ in spelling only, and domains and classes without usable images.

    Args:
        table: usable images.
        bad: paths of the files left out.
    """
    for what, names in (("classes", table.class_names), ("domains", table.domain_names)):
        for group in similar(names):
            yield Remark(
                "warning",
                f"the {what} {listed(group)} differ in spelling only: if they are one, rename "
                "their folders",
            )
    counts = table.counts()
    for domain, images in zip(table.domain_names, counts.sum(axis=1).tolist()):
        if not images:
            out = sum(path.split("/")[0] == domain for path in bad)
            why = f": all its {out} files are left out" if out else ""
            yield Remark(
                "error",
                f"domain '{domain}' has no usable image{why}; repair them, or take the folder out",
            )
    classes = counts.sum(axis=0)
    unused = [name for name, images in zip(table.class_names, classes.tolist()) if not images]
    if np.count_nonzero(classes) < 2:
        left = table.class_names[int(classes.argmax())]
        yield Remark(
            "error",
            f"only the class '{left}' has usable images: there is nothing to tell apart; at least "
            "two classes are needed",
        )
    elif unused:
        yield Remark("warning", f"no usable image of {classes_text(unused)} in any domain")
    lacking = {
        domain: [name for name, images in zip(table.class_names, row) if not images]
        for domain, row in zip(table.domain_names, counts.tolist())
        if any(row) and not all(row)
    }
    if lacking:
        parts = [
            f"{domain} lacks {listed(names, quote=False)}"
            for domain, names in list(lacking.items())[:SHOWN]
        ]
        more = f"; and {len(lacking) - SHOWN} more domains" if len(lacking) > SHOWN else ""
        yield Remark("note", f"classes are missing: {'; '.join(parts)}{more}")


def about_splits(table: ImageTable, splits: Splits, *, chosen: bool) -> Iterator[Remark]:
    """Finds classes nobody trains on, and validation sets too small to choose by.

    Args:
        table: usable images.
        splits: their roles.
        chosen: whether the user chose what is held out; an official split is taken as it is.
    """
    trained = _counts(table, splits.train)
    if np.count_nonzero(trained) < 2:
        (left,) = np.flatnonzero(trained)
        yield Remark(
            "error",
            f"only the class '{table.class_names[left]}' is left to train on: there is nothing to "
            "tell apart; hold out fewer domains",
        )
    for role, rows in (("test", splits.test), ("validation", splits.val)):
        counts = _counts(table, rows)
        unseen = np.flatnonzero((trained == 0) & (counts > 0))
        if len(unseen):
            names = [table.class_names[i] for i in unseen]
            images, held = int(counts[unseen].sum()), _domains(table, rows)
            stops: Severity = "error" if chosen and role == "test" else "warning"
            yield Remark(
                stops,
                f"nobody trains on {classes_text(names)}, of which the held-out {role} "
                f"{'domain' if len(held) == 1 else 'domains'} {listed(held)} "
                f"{'has' if len(held) == 1 else 'have'} {images_text(images)}: they cannot be "
                "recognised; add images of other domains, or take the folders out",
            )
    yield from _about_common_class(table, trained)
    yield from _about_validation(splits)


def _about_common_class(table: ImageTable, trained: np.ndarray) -> Iterator[Remark]:
    present = int(np.count_nonzero(trained))
    share = trained.max() / max(1, trained.sum())
    if present > 1 and share > max(HALF, 1.5 / present):
        name = table.class_names[int(trained.argmax())]
        yield Remark(
            "warning",
            f"{share:.0%} of the training images are of the class '{name}': a model reaches that "
            "by always naming it; read the balanced accuracy, and try train.class_weights",
        )


def about_clients(sizes: Sequence[int]) -> Iterator[Remark]:
    """Finds a client that the shared model will be mostly of.

    Args:
        sizes: the training images of each client.
    """
    largest, total = max(sizes, default=0), sum(sizes)
    if len(sizes) > 1 and largest > max(HALF, 1.5 / len(sizes)) * total:
        yield Remark(
            "warning",
            f"client {list(sizes).index(largest)} of {len(sizes)} holds {largest / total:.0%} of "
            "the training images: the average, which weighs clients by images, is mostly its own",
        )


def _about_validation(splits: Splits) -> Iterator[Remark]:
    for where, rows in (("held-out", splits.val), ("training", splits.id_val)):
        if 0 < len(rows) < SMALL_VALIDATION:
            margin = 100 * 1.96 * (0.25 / len(rows)) ** 0.5
            yield Remark(
                "warning",
                f"validation on {where} domains has only {images_text(len(rows))}: which round it "
                f"picks is chance (an accuracy of 50 % is uncertain by {margin:.0f} points)",
            )


def about_copies(
    table: ImageTable,
    files: Sequence[str],
    contents: Sequence[str],
    splits: Splits | None,
    refuse: bool,
    hides_images: str = "",
) -> Iterator[Remark]:
    """Finds files of the same content: within a class, across classes and domains, across splits.

    Args:
        table: usable images.
        files: by row, the file that it comes from.
        contents: by row, a hash of that file's content; empty where it is not known.
        splits: the rows by role, where that is known.
        refuse: whether copies that spoil what is said of the run end it: of training images among
            those that measure, or among each other where single images are hidden.
        hides_images: the field whose epsilon is for a single image; empty for none.
    """
    groups = _copies(files, contents)
    if not groups:
        return
    files = _with_rows(table, files)
    kinds: dict[str, list[list[int]]] = {"labels": [], "domains": [], "same": []}
    for rows in groups:
        labels, domains = set(table.labels[rows].tolist()), set(table.domains[rows].tolist())
        kind = "labels" if len(labels) > 1 else "domains" if len(domains) > 1 else "same"
        kinds[kind].append(rows)
    said: dict[str, tuple[Severity, str]] = {
        "labels": ("warning", "in two classes: one of the labels is wrong"),
        "domains": ("warning", "in two domains: held out, one of them would not be unseen"),
        "same": ("note", "in the same class of the same domain"),
    }
    for kind, (severity, what) in said.items():
        if kinds[kind]:
            yield Remark(
                severity, f"{_contents(kinds[kind])}, {what} ({_pair(files, kinds[kind])})"
            )
    if splits is not None:
        yield from _leaks(files, groups, splits, len(table), refuse)
    if splits is not None and hides_images:
        training = set(splits.train.tolist())
        held = [own for rows in groups if len(own := [r for r in rows if r in training]) > 1]
        if held:
            remedy = "; remove them, or confirm with data.duplicates: warn" if refuse else ""
            yield Remark(
                "error" if refuse else "warning",
                f"{hides_images} is for one file, and {_contents(held)} ({_pair(files, held)}): of "
                f"an image with copies more is told than that epsilon says{remedy}",
            )


def _leaks(
    files: Sequence[str], groups: list[list[int]], splits: Splits, count: int, refuse: bool
) -> Iterator[Remark]:
    roles = np.full(count, "", dtype="<U7")
    for role in ("train", "id_val", "id_test", "val", "test"):
        roles[getattr(splits, role)] = role
    leaked: dict[str, list[list[int]]] = {}
    for rows in groups:
        own = roles[rows].tolist()
        training = [row for row, role in zip(rows, own) if role == "train"]
        for role in dict.fromkeys(own):
            measured = [row for row, other in zip(rows, own) if other == role]
            if training and role not in ("train", ""):
                leaked.setdefault(role, []).append([training[0], *measured])
    if leaked:
        images = {role: sum(len(rows) - 1 for rows in found) for role, found in leaked.items()}
        each = ", ".join(f"{number} of {role}" for role, number in images.items())
        example = _pair(files, next(iter(leaked.values())))
        remedy = "; remove them, or confirm with data.duplicates: warn" if refuse else ""
        yield Remark(
            "error" if refuse else "warning",
            f"copies of training images are among those that measure ({each}; {example}): "
            f"accuracies are too high{remedy}",
        )


def similar(names: Sequence[str]) -> list[list[str]]:
    """Returns groups of names that differ in case, blanks, ``_`` and ``-`` only."""
    groups = (list(group) for _, group in groupby(sorted(names, key=plain_name), key=plain_name))
    return [sorted(group) for group in groups if len(group) > 1]


def listed(names: Sequence[str], *, quote: bool = True) -> str:
    """Returns the first names, and how many more there are."""
    shown = [f"'{name}'" if quote else name for name in names[:SHOWN]]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(shown) + more


def classes_text(names: Sequence[str]) -> str:
    """Returns ``the class 'a'`` or ``the classes 'a', 'b'``."""
    return f"the {'class' if len(names) == 1 else 'classes'} {listed(names)}"


def images_text(count: int) -> str:
    """Returns ``1 image`` or ``5 images``."""
    return f"{count:,} image{'' if count == 1 else 's'}"


def _counts(table: ImageTable, rows: np.ndarray) -> np.ndarray:
    return np.bincount(table.labels[rows], minlength=len(table.class_names))


def _domains(table: ImageTable, rows: np.ndarray) -> list[str]:
    return [table.domain_names[i] for i in np.unique(table.domains[rows])]


def _copies(files: Sequence[str], contents: Sequence[str]) -> list[list[int]]:
    """Rows of different files with the same content, one row for each file."""
    first = {file: row for row, file in reversed(list(enumerate(files)))}
    twice = Counter(contents[row] for row in first.values() if contents[row])
    groups: dict[str, list[int]] = {}
    for row in sorted(first.values()):
        if twice[contents[row]] > 1:
            groups.setdefault(contents[row], []).append(row)
    return list(groups.values())


def _with_rows(table: ImageTable, files: Sequence[str]) -> Sequence[str]:
    """Returns the files as messages name them: with their row, where a table of a user's lists."""
    if table.listed_rows is None:
        return files
    rows = table.listed_rows.tolist()
    return [f"{file} (row {row} of {table.listed_in})" for file, row in zip(files, rows)]


def _contents(groups: list[list[int]]) -> str:
    files = sum(map(len, groups))
    return f"{files} files are {images_text(len(groups))}"


def _pair(files: Sequence[str], groups: list[list[int]]) -> str:
    one, other, *_ = groups[0]
    return f"{files[one]} = {files[other]}"
