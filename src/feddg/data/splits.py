"""Which rows are for training, validation and test, and the protocols of benchmarks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import permutations
from pathlib import Path

import numpy as np

from feddg.data.columns import read_columns
from feddg.data.data_set import DATA_SETS
from feddg.data.images import ImageTable, plain_name
from feddg.errors import DataError, ExperimentError, first_names, nearest
from feddg.rng import numpy_stream

Scenario = dict[str, tuple[str, ...]]


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
    images does not depend on the held-out domains. Copies of an image in one class and domain all
    get the role of the first. Images that the table holds back (``ImageTable.held_back``) are the
    in-domain test, and alone measure in held-out domains.

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
    if min(id_val, id_test) < 0 or id_val + id_test >= 1:
        raise DataError(
            f"id_val ({id_val}) and id_test ({id_test}) must not be negative and must add up to "
            "less than 1, or no image is left to train on."
        )
    if own is None:
        roles = _in_domain_roles(table, id_val, id_test, seed)
        _keep_copies_together(roles, table, contents)
    else:
        roles = own.astype("<U7")
    new = table.held_back
    if new is not None:
        roles[roles == "id_test"] = "train"
        roles[new] = "id_test"
    for role, names in (("test", test), ("val", val)):
        for name in names:
            held = table.domains == table.domain_id(name)
            if not held.any():
                raise DataError(f"Domain '{name}' is to be held out but has no images.")
            if role == "val" and (roles[held] == "test").all():
                raise DataError(f"Domain '{name}' is held out for both validation and test.")
            roles[held] = role
    splits = from_roles(roles)
    if new is None:
        return splits
    return replace(splits, val=splits.val[new[splits.val]], test=splits.test[new[splits.test]])


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


def from_csv(table: ImageTable, csv_path: Path | str, skipped: Iterable[str] = ()) -> Splits:
    """Reads a benchmark's split file and matches its rows to the table's by path.

    Args:
        table: all usable images.
        csv_path: a file with at least the columns ``split`` and ``path``.
        skipped: paths of unusable images, which may be missing in the table.

    Raises:
        DataError: the file cannot be read, lacks a column, has an unknown split, or its rows and
            the table's do not match one to one.
    """
    csv_path = Path(csv_path).expanduser()
    found = read_columns(
        csv_path, ("split", "path"), remedy="A split file says both of each image."
    )
    role_of = _unique(csv_path, zip(found["path"], found["split"]))
    paths, left_out = list(table.paths), set(skipped)
    if not role_of.keys() >= set(paths):
        # Copies spell folders differently (Real World, real_world): compare plain names.
        role_of = _unique(csv_path, ((_plain_path(path), role) for path, role in role_of.items()))
        paths, left_out = [_plain_path(p) for p in paths], {_plain_path(p) for p in left_out}
    _check_match(csv_path, set(role_of), set(paths), left_out)
    return from_roles(np.array([role_of[path] for path in paths]))


def _in_domain_roles(table: ImageTable, id_val: float, id_test: float, seed: int) -> np.ndarray:
    """Returns train, id_val or id_test for every row, as if no domain were held out."""
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
    return roles


def _keep_copies_together(roles: np.ndarray, table: ImageTable, contents: Sequence[str]) -> None:
    """Gives copies of an image, in one class and domain, the role of the first, in place.

    They go to training if no other image of their class and domain does.
    """
    groups: dict[tuple[str, int, int], list[int]] = {}
    keys = zip(contents, table.domains.tolist(), table.labels.tolist())
    for row, key in enumerate(keys):
        if key[0]:
            groups.setdefault(key, []).append(row)
    training = table.take(np.flatnonzero(roles == "train")).counts()
    for (_, domain, label), rows in groups.items():
        own = roles[rows]
        if (own != own[0]).any():
            others = training[domain, label] - np.count_nonzero(own == "train")
            roles[rows] = own[0] if others else "train"
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


def _unique(csv_path: Path, found: Iterable[tuple[str, str]]) -> dict[str, str]:
    role_of: dict[str, str] = {}
    for path, role in found:
        if path in role_of:
            raise DataError(f"Split file {csv_path} lists {path} twice.")
        role_of[path] = role
    return role_of


def _plain_path(path: str) -> str:
    *folders, name = path.split("/")
    return "/".join((*map(plain_name, folders), name))


def _check_match(csv_path: Path, listed: set[str], present: set[str], skipped: set[str]) -> None:
    for paths, what in (
        (listed - present - skipped, "lists {} images that are not in the data"),
        (present - listed, "does not list {} images of the data"),
    ):
        if paths:
            raise DataError(
                f"Split file {csv_path} {what.format(len(paths))}: "
                f"{first_names(sorted(paths), 3)}. Paths must read domain/class/file."
            )


# Benchmark protocols: which domains are held out, scenario by scenario.


PROTOCOLS = {
    "lodo": "leave one domain out: each is the test domain once",
    "ltdo": "leave two domains out: each is the test domain once and the validation domain once",
    "ltdo-all": "leave two domains out: every ordered pair",
}


def known_domains(*data_sets: str) -> tuple[str, ...]:
    """Returns the domains of the first of these data sets that defines them.

    So a benchmark can be planned without its images.
    """
    found = (DATA_SETS[name].domains for name in data_sets if name in DATA_SETS)
    return next(filter(None, found), ())


def scenarios(protocol: str, domains: Sequence[str], preset: str = "") -> list[Scenario]:
    """Returns the scenarios of a protocol.

    Args:
        protocol: one of ``PROTOCOLS``.
        domains: the data set's domains.
        preset: the data set whose ``validated_by`` gives the validation domain for each test
            domain; without one for these domains, the next in the list validates.

    Raises:
        ExperimentError: unknown protocol, or too few domains for it.
    """
    if protocol not in PROTOCOLS:
        protocols = "; ".join(f"{name}: {text}" for name, text in PROTOCOLS.items())
        raise ExperimentError(
            f"unknown protocol {protocol!r}{nearest(protocol, PROTOCOLS)}; there are: {protocols}"
        )
    needed = 2 if protocol == "lodo" else 3
    if len(domains) < needed:
        raise ExperimentError(f"{protocol} needs {needed} domains or more, got {list(domains)}")
    if protocol == "lodo":
        return [{"test": (name,), "val": ()} for name in domains]
    if protocol == "ltdo-all":
        return [{"test": (test,), "val": (val,)} for val, test in permutations(domains, 2)]
    validates: Mapping[str, str] = DATA_SETS[preset].validated_by if preset in DATA_SETS else {}
    if set(validates) != set(domains):
        validates = dict(zip(domains, (*domains[1:], domains[0])))
    return [{"test": (name,), "val": (validates[name],)} for name in domains]
