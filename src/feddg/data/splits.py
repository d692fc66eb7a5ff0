"""Which rows are for training, validation and test."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from feddg.data.images import ImageTable
from feddg.errors import DataError
from feddg.rng import numpy_stream
from feddg.settings import grouped


@dataclass(frozen=True, eq=False)
class Splits:
    """Rows of a table by role, each an ascending int64 array; no row has two roles.

    Attributes:
        train: training images of clients.
        id_val: in-domain validation, from the training domains.
        id_test: in-domain test, from the training domains.
        val: all images of the held-out validation domains.
        test: all images of the held-out test domains.
    """

    train: np.ndarray
    id_val: np.ndarray
    id_test: np.ndarray
    val: np.ndarray
    test: np.ndarray

    def spread(self, of: np.ndarray) -> "Splits":
        """Returns the splits of other rows, each of which belongs to a row here and has its role.

        Args:
            of: ``(rows,)`` the row here that each belongs to.
        """
        parts = {role: np.flatnonzero(np.isin(of, getattr(self, role))) for role in ROLES}
        return Splits(**parts)


ROLES = tuple(field.name for field in fields(Splits))


def hold_out(
    table: ImageTable,
    test: Sequence[str],
    val: Sequence[str] = (),
    *,
    id_val: float = 0.05,
    id_test: float = 0.05,
    seed: int,
    own: np.ndarray | None = None,
    contents: Sequence[str] = (),
) -> Splits:
    """Holds out whole domains, and a stratified share of the others.

    ``id_val`` and ``id_test`` of each training domain's images are set aside, in proportion to its
    classes (largest remainders); the last image of a class in a domain always trains. The choice of
    images does not depend on which domains are held out. Copies of an image in one class and domain
    all get the role of the first. Images that the table holds back (``ImageTable.held_back``) are
    the in-domain test, and alone measure in held-out domains.

    Args:
        table: all images.
        test: names of the domains to test on.
        val: names of the domains to validate on.
        id_val: share of each training domain set aside for in-domain validation.
        id_test: share of each training domain set aside for in-domain test.
        seed: the experiment's seed.
        own: ``(n,)`` published in-domain role of each image, instead of random shares.
        contents: a hash of each row's file, empty if unknown; or no hashes at all.

    Raises:
        DataError: a name is unknown or in both lists, a held-out domain has no images, or nothing
            is left to train on.
    """
    check_shares(id_val, id_test)
    roles = in_domain_roles(table, id_val, id_test, seed, contents) if own is None else own
    roles = roles.astype("<U7")  # a copy
    new = table.held_back
    if new is not None:
        roles[roles == "id_test"] = "train"
        roles[new] = "id_test"
    for role, names in (("test", test), ("val", val)):
        for name in names:
            chosen = table.domains == table.domain_id(name)
            if not chosen.any():
                raise DataError(f"Domain '{name}' is to be held out but has no images.")
            if role == "val" and (roles[chosen] == "test").all():
                raise DataError(f"Domain '{name}' is held out for both validation and test.")
            roles[chosen] = role
    splits = from_roles(roles)
    if new is None:
        return splits
    return replace(splits, val=splits.val[new[splits.val]], test=splits.test[new[splits.test]])


def check_shares(id_val: float, id_test: float) -> None:
    """Raises DataError unless both shares are at least 0 and leave something to train on."""
    if min(id_val, id_test) < 0 or id_val + id_test >= 1:
        raise DataError(
            f"id_val ({id_val}) and id_test ({id_test}) must not be negative and must add up to "
            "less than 1, or no image is left to train on."
        )


def from_roles(roles: np.ndarray) -> Splits:
    """Returns the splits of a column of roles, one of ``ROLES`` for each row.

    Raises:
        DataError: a role is unknown, or nothing is left to train on.
    """
    unknown = set(np.unique(roles).tolist()) - set(ROLES)
    if unknown:
        raise DataError(f"Unknown split '{min(unknown)}'; there are: {', '.join(ROLES)}.")
    rows = {role: np.flatnonzero(roles == role) for role in ROLES}
    if not len(rows["train"]):
        raise DataError(
            "No images are left to train on: hold out fewer domains or smaller in-domain shares."
        )
    return Splits(**rows)


def in_domain_roles(
    table: ImageTable, id_val: float, id_test: float, seed: int, contents: Sequence[str] = ()
) -> np.ndarray:
    """Returns train, id_val or id_test for every row, as if no domain were held out.

    See :func:`hold_out`.
    """
    random = numpy_stream(seed, "split")
    counts = table.counts()
    val = _spread(counts * id_val, np.maximum(counts - 1, 0), random)
    test = _spread(counts * id_test, np.maximum(counts - 1 - val, 0), random)
    cells = np.ravel_multi_index((table.domains, table.labels), counts.shape)
    shuffled = np.lexsort((random.random(len(table)), cells))
    cells = cells[shuffled]
    before = np.cumsum(counts) - counts.ravel()
    place = np.arange(len(table)) - before[cells]
    last_val = val.ravel()[cells]
    last_test = last_val + test.ravel()[cells]
    roles = np.full(len(table), "train", dtype="<U7")
    roles[shuffled[place < last_test]] = "id_test"
    roles[shuffled[place < last_val]] = "id_val"
    _keep_copies_together(roles, table, contents)
    return roles


def _keep_copies_together(roles: np.ndarray, table: ImageTable, contents: Sequence[str]) -> None:
    """Gives copies of an image, in one class and domain, the role of the first, in place.

    They go to training if no other image of their class and domain does.
    """
    keys = zip(contents, table.domains.tolist(), table.labels.tolist())
    groups = grouped((key, row) for row, key in enumerate(keys) if key[0])
    training = table.take(np.flatnonzero(roles == "train")).counts()
    for (_, domain, label), rows in groups.items():
        group_roles = roles[rows]
        if (group_roles != group_roles[0]).any():
            others = training[domain, label] - np.count_nonzero(group_roles == "train")
            roles[rows] = group_roles[0] if others else "train"
            training[domain, label] = others + len(rows) * (roles[rows[0]] == "train")


def _spread(quotas: np.ndarray, most: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Rounds each domain's quotas per class to integers, by largest remainders.

    Args:
        quotas: ``(domains, classes)`` target numbers, each rounded down or up; each row keeps its
            rounded sum as far as ``most`` allows.
        most: ``(domains, classes)`` largest numbers allowed.
        random: breaks ties, so that the first classes do not get all remaining images.
    """
    whole: np.ndarray = np.minimum(np.floor(quotas).astype(np.int64), most)
    upper = np.minimum(np.ceil(quotas - 1e-9), most)
    for quota, given, limit in zip(quotas, whole, upper):
        left = max(round(float(quota.sum())) - int(given.sum()), 0)
        order = np.lexsort((random.random(len(quota)), -np.round(quota - given, 9)))
        given[order[given[order] < limit[order]][:left]] += 1
    return whole
