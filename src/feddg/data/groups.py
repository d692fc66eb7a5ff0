"""Groups: images that belong together (of one patient, series, slide or burst) and are never split.

A *unit* is a group with all groups that hold copies of its images. In the training domains it has
one role and one client. What cannot be kept together is reported: a group on both sides of a
hold-out, or at two real clients.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

import numpy as np

from feddg.data.decoding import Tile
from feddg.data.images import IMAGE_SUFFIXES, ImageTable, positions
from feddg.data.partition import Dealing, Partition, partition, partitioned_alike
from feddg.data.splits import Splits
from feddg.diagnostics import Diagnostic, warn, warning
from feddg.errors import DataError, first_names
from feddg.rng import numpy_stream

FOLDER, NONE = "folder", "none"
"""Values of ``data.group_by``: the images of a folder are a group; nothing is."""
PART = "group"
"""The part of a pattern that names the group."""
ENOUGH = 5
"""With so many units in a domain, each share of the split gets one at least."""


def with_groups(table: ImageTable, group_by: str | None) -> ImageTable:
    """Returns a table with the group of each image.

    Args:
        table: the images; groups that it already names are kept unless ``group_by`` is given.
        group_by: ``folder``, ``none``, or a regular expression with a part ``(?P<group>...)`` that
            is looked for in each path; None for the patients of DICOM files, if the images are such
            files and every domain has several.

    Raises:
        DataError: the pattern is none, has no such part, or is not found in a path.
    """
    if group_by is None:
        patients = None if table.groups is not None else _patients(table)
        return table if patients is None else replace(table, groups=patients)
    if group_by == NONE:
        return replace(table, groups=None)
    if group_by == FOLDER:
        return replace(table, groups=np.array([str(PurePosixPath(p).parent) for p in table.paths]))
    try:
        matches = [re.search(group_by, path) for path in table.paths]
        groups = [match[PART] if match else "" for match in matches]
    except (re.error, IndexError) as error:
        raise DataError(
            f"data.group_by: {group_by!r} is no regular expression with a part called group "
            rf"({error}); write it as in (?P<group>P\d+)_, or folder for one group a folder."
        ) from None
    for path, group in zip(table.paths, groups):
        if not group:
            raise DataError(
                f"data.group_by: {group_by!r} finds no group in {path}; a pattern must match the "
                "path of every image."
            )
    return replace(table, groups=np.array(groups))


def _patients(table: ImageTable) -> np.ndarray | None:
    """Returns a number for each image's patient, if DICOM files tell them apart; never the ID.

    An image that names no patient is a group of its own. Where all of a domain have one ID, as
    after anonymisation, it tells nothing.
    """
    root = table.root
    suffixes = {PurePosixPath(path).suffix.lower() for path in table.paths}
    dicom = IMAGE_SUFFIXES & {".dcm", ".dicom"}
    if root is None or not dicom or suffixes <= IMAGE_SUFFIXES - dicom:
        return None
    from feddg.data.formats.dicom import patient_of

    ids = [patient_of(root / Tile.named(path).file) for path in table.paths]
    patients = list(zip(table.domains.tolist(), ids))
    for domain in set(table.domains.tolist()):
        if len({id for place, id in patients if place == domain and id}) < 2:
            if len({id for id in ids if id}) > 1:
                warn(
                    "patients-not-told-apart",
                    f"All DICOM files of '{table.domain_names[domain]}' have one patient's ID, or "
                    "none: images of no domain are grouped by patient.",
                    "Say what belongs together (--group-by), or leave that domain out.",
                )
            return None
    # By numbers: who knows how IDs are made could count up to a hash of one. Units are drawn in the
    # order of names, so that of hashes stays.
    order = sorted({*filter(None, ids)}, key=lambda id: hashlib.sha256(id.encode()).hexdigest())
    numbers = {id: f"{number:09}" for number, id in enumerate(order)}
    names = [numbers.get(id, f"#{row}") for row, id in enumerate(ids)]
    return np.array(names) if len(set(names)) < len(names) else None


def units_of(table: ImageTable, contents: Sequence[str] = ()) -> np.ndarray | None:
    """Returns the number of each row's unit, ``(n,)`` int64 from 0; None without groups.

    Args:
        table: all images.
        contents: a hash of each row's file, empty if unknown; or no hashes at all.
    """
    if table.groups is None:
        return None
    _, groups = np.unique(table.groups, return_inverse=True)
    if not len(contents):
        return groups.astype(np.int64)
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    # A node for each group, and one for each image, which its copies share.
    images = (content or row for row, content in enumerate(contents))
    cells = list(zip(images, table.labels.tolist(), table.domains.tolist()))
    number = int(groups.max()) + 1
    edges = groups, number + positions(cells, list(dict.fromkeys(cells)))
    shape = (number + len(cells),) * 2
    graph = coo_array((np.ones(len(cells), np.int8), edges), shape=shape)
    _, joined = connected_components(graph, directed=False)
    _, units = np.unique(joined[groups], return_inverse=True)
    return units.astype(np.int64)


def roles_of_units(
    table: ImageTable, units: np.ndarray, id_val: float, id_test: float, seed: int
) -> np.ndarray:
    """Returns ``train``, ``id_val`` or ``id_test`` for each row, as if no domain were held out.

    The largest units come first, equals in random order; each gets the role that is furthest from
    its share of the unit's classes and domains (the least increase of the squared differences,
    relative to the images of a class in a domain). The last unit of a class in a domain trains. In
    a domain of five units or more, each share that is asked for has one.

    Args:
        table: all images.
        units: ``(n,)`` the unit of each row.
        id_val: share of the training images for in-domain validation.
        id_test: share of the training images for in-domain test.
        seed: the experiment's seed.
    """
    random = numpy_stream(seed, "split", "groups")
    counts = np.zeros((int(units.max()) + 1, *table.counts().shape), np.int64)
    np.add.at(counts, (units, table.domains, table.labels), 1)
    shares = np.array([1 - id_val - id_test, id_val, id_test])
    total = counts.sum(axis=0)
    wanted, weight = shares[:, None, None] * total, 1 / np.maximum(total, 1)
    given, waiting = np.zeros_like(wanted), total.copy()
    present: np.ndarray = np.any(counts, axis=2)  # of each unit in each domain
    left = present.sum(axis=0)
    owed: np.ndarray = (shares[1:, None] > 0) & (left >= ENOUGH)
    roles = np.zeros(len(counts), np.int64)
    for unit in np.lexsort((random.random(len(counts)), -counts.sum(axis=(1, 2)))):
        size, here = counts[unit], present[unit]
        waiting = waiting - size
        costs = ((2 * (given - wanted) + size) * size * weight).sum(axis=(1, 2))
        costs[shares == 0] = np.inf
        role = int(costs.argmin())
        missing = owed & here
        pressing = np.any(missing & (left <= missing.sum(axis=0)), axis=1)
        if ((size > 0) & (given[0] + waiting == 0)).any():
            role = 0
        elif pressing.any():
            role = 1 + int(pressing.argmax())
        roles[unit] = role
        given[role] += size
        left = left - here
        if role:
            owed[role - 1] &= ~here
    for share, domain in np.argwhere(owed):  # units that had to train may have been the last
        for unit in np.argsort(counts.sum(axis=(1, 2)), kind="stable"):
            last = (counts[unit] > 0) & (given[0] == counts[unit])
            if (
                roles[unit] == 0
                and present[unit, domain]
                and not last.any()
                and owed[share, domain]
            ):
                roles[unit] = 1 + share
                given[0] -= counts[unit]
                owed[share] &= ~present[unit]
    if owed.any():
        names = [table.domain_names[domain] for domain in np.flatnonzero(owed.any(axis=0))]
        warn(
            "share-without-groups",
            f"No group of {first_names(names)} can be spared for in-domain validation or test, "
            "since each alone has a class that trains.",
        )
    return np.array(["train", "id_val", "id_test"], dtype="<U7")[roles[units]]


def partitioned_units(units: np.ndarray, scheme: str, dealing: Dealing) -> Partition:
    """Partitions images over clients so that each unit goes to one of them.

    The rules of :func:`feddg.data.partition.partition` see each unit as one image, of its first
    domain and commonest class.

    Args:
        units: ``(n,)`` the unit of each image.
        scheme: names of rules.
        dealing: the images and the settings.

    Raises:
        DataError: there are fewer units than clients, or as :func:`partition` says.
    """
    _, first, unit_of = np.unique(units, return_index=True, return_inverse=True)
    if dealing.clients > len(first):
        raise DataError(
            f"{dealing.clients} clients cannot share {len(first)} groups of training images, which "
            "must not be split. Use fewer clients, smaller groups, or none (--group-by none)."
        )
    counts = np.zeros((len(first), int(dealing.labels.max()) + 1), np.int64)
    np.add.at(counts, (unit_of, dealing.labels), 1)
    of_units = replace(
        dealing,
        domains=dealing.domains[first],
        labels=counts.argmax(axis=1),
        holders=None if dealing.holders is None else dealing.holders[first],
        of="groups of training images",
    )
    found = partition(scheme, of_units)
    return Partition(found.owners[unit_of], dealing.domains, found.clients)


def further_units(
    training: Partition, units: np.ndarray, domains: np.ndarray, seed: int
) -> list[np.ndarray]:
    """Partitions further images as :func:`feddg.data.partition.partitioned_alike` does, by unit."""
    _, first, unit_of = np.unique(units, return_index=True, return_inverse=True)
    parts = partitioned_alike(training, domains[first], seed)
    return [np.flatnonzero(np.isin(unit_of, part)) for part in parts]


def about_groups(table: ImageTable, splits: Splits, owners: np.ndarray) -> Iterator[Diagnostic]:
    """Warns of groups on both sides of the split, at several domains or at several clients.

    Args:
        table: all images.
        splits: the rows by role.
        owners: the client of each training row.
    """
    if table.groups is None:
        return
    names, groups = np.unique(table.groups, return_inverse=True)

    def several(rows: np.ndarray, places: np.ndarray) -> int:
        """The number of groups whose rows are in more than one place."""
        pairs = np.unique(np.stack([groups[rows], places]), axis=1)
        return int((np.bincount(pairs[0], minlength=len(names)) > 1).sum())

    trains = np.unique(groups[splits.train])
    measured = np.concatenate([splits.id_val, splits.id_test, splits.val, splits.test])
    both = len(np.intersect1d(trains, np.unique(groups[measured])))
    every = np.arange(len(table))
    counts = {
        "have images that train and images that measure": both,
        "are in several domains": several(every, table.domains),
        "are at several clients": several(splits.train, owners),
    }
    split_up = [f"{count:,} {words}" for words, count in counts.items() if count]
    text = f"Of {len(names):,} groups {', '.join(split_up)}."
    if both:
        text += " Accuracies are too high where a group is known from training."
        advice = "Give each group to one domain, or leave such groups out."
        yield warning("groups-on-both-sides", text, advice)
    elif split_up:
        yield warning("groups-at-several-sites", text)
