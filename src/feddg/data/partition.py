"""Who holds what: training images dealt out to clients, by the rules that an experiment names."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from feddg.data.partitions import Dealing, Rounding, owners_by, rules_of
from feddg.errors import DataError
from feddg.rng import numpy_stream


@dataclass(frozen=True, eq=False)
class Partition:
    """Clients and the images they hold.

    Attributes:
        owners: ``(n,)`` int64, the client that holds each image.
        domains: ``(n,)`` int64, the domain of each image.
        clients: number of clients.
    """

    owners: np.ndarray
    domains: np.ndarray
    clients: int

    def __len__(self) -> int:
        return self.clients

    @cached_property
    def rows(self) -> list[np.ndarray]:
        """One int64 array per client: the positions of its images, ascending."""
        order = np.argsort(self.owners, kind="stable")
        return np.split(order, np.cumsum(self.sizes)[:-1])

    @cached_property
    def sizes(self) -> np.ndarray:
        """``(clients,)`` int64: how many images each client holds."""
        return np.bincount(self.owners, minlength=self.clients)

    @cached_property
    def domain_ids(self) -> np.ndarray:
        """The domains that occur, ascending: the columns of ``counts``."""
        return np.unique(self.domains)

    @cached_property
    def counts(self) -> np.ndarray:
        """``(clients, len(domain_ids))`` int64: images per client and domain."""
        columns = np.searchsorted(self.domain_ids, self.domains)
        shape = (self.clients, len(self.domain_ids))
        cells = np.ravel_multi_index((self.owners, columns), shape)
        return np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)


def partition(
    domains: np.ndarray,
    labels: np.ndarray,
    clients: int,
    *,
    scheme: str = "heterogeneous",
    heterogeneity: float = 0.1,
    alpha: float | None = None,
    shards: int | None = None,
    quantity_alpha: float | None = None,
    rounding: Rounding = "strict",
    holders: np.ndarray | None = None,
    seed: int,
) -> Partition:
    """Deals images out to clients: every image to exactly one client, every client at least one.

    Args:
        domains: ``(n,)`` domain of each image; any integers.
        labels: ``(n,)`` class of each image.
        clients: number of clients, C.
        scheme: names of rules, joined by ``+``; see :mod:`feddg.data.partitions`.
        heterogeneity: lambda, from 1 (every client has the global mix) to 0 (one main domain each).
        alpha: concentration of the labels: small for clients with few classes each, large for the
            same classes everywhere. ``None`` for no Dirichlet skew.
        shards: runs of images sorted by class that each client gets. ``None`` for no shards.
        quantity_alpha: concentration of the sizes. ``None`` for sizes as even as domains allow.
        rounding: who gets the images left over when shares are rounded down: first the homes
            of the domain, then the clients furthest below their own total (``strict``); or simply
            the first clients, as the code of Bai et al. does (``official``), which leaks single
            images of other domains into them even at lambda = 0.
        holders: ``(n,)`` who really holds each image, by name; None where nobody knows. Under a
            rule that counts them, they are the clients, however many ``clients`` says.
        seed: the experiment's seed.

    Returns:
        The partition; its rows are positions in ``domains``.

    Raises:
        DataError: more clients than images, fewer clients than domains in the scheme ``domain``,
            an argument out of range, or a client without images (``official`` rounding only).
        ExperimentError: rules that are unknown or contradict each other.
    """
    for name, value in (("alpha", alpha), ("quantity_alpha", quantity_alpha), ("shards", shards)):
        if value is not None and not (0 < value < np.inf):
            raise DataError(f"{name} must be a positive number, not {value}.")
    settings = {"alpha": alpha, "shards": shards, "quantity_alpha": quantity_alpha}
    rules = rules_of(scheme, settings)
    dealing = Dealing(
        domains=np.asarray(domains, dtype=np.int64),
        labels=np.asarray(labels),
        clients=clients,
        seed=seed,
        heterogeneity=heterogeneity,
        rounding=rounding,
        holders=holders,
        **settings,  # type: ignore[arg-type]
    )
    number = next((rule.number for rule in rules if rule.number is not None), None)
    if number is not None:
        clients = number(dealing)
        dealing = replace(dealing, clients=clients)
    _check(domains, labels, clients, heterogeneity)
    found = Partition(owners_by(rules, dealing), dealing.domains, clients)
    if not found.sizes.all():
        empty = int(np.argmin(found.sizes))
        raise DataError(
            f"Client {empty} would hold no images: {len(domains)} images are too few for {clients} "
            "clients with rounding 'official'. Use rounding 'strict' or fewer clients."
        )
    return found


def dealt_alike(found: Partition, domains: np.ndarray, seed: int) -> list[np.ndarray]:
    """Deals further images out: of each domain, every client gets the share it already holds.

    Args:
        found: who holds what so far.
        domains: ``(n,)`` domain of each further image; those that no client holds are left over.
        seed: the experiment's seed.

    Returns:
        One int64 array per client: positions in ``domains``, ascending; some may be empty.
    """
    random = numpy_stream(seed, "partition", "further")
    dealt: list[list[np.ndarray]] = [[] for _ in range(found.clients)]
    for domain, counts in zip(found.domain_ids, found.counts.T):
        rows = random.permutation(np.flatnonzero(domains == domain))
        bounds = np.round(np.cumsum(counts) / counts.sum() * len(rows)).astype(np.int64)
        for own, part in zip(dealt, np.split(rows, bounds[:-1])):
            own.append(part)
    return [np.sort(np.concatenate(parts)) for parts in dealt]


def held_alike(holders: np.ndarray, further: np.ndarray) -> list[np.ndarray]:
    """Gives further images to who holds them.

    Args:
        holders: ``(n,)`` names: the clients are these, in the order of their names.
        further: ``(m,)`` who holds each further image; those of nobody among them are left over.

    Returns:
        One int64 array per client: positions in ``further``, ascending; some may be empty.
    """
    names = np.unique(holders)
    places = np.minimum(np.searchsorted(names, further), len(names) - 1)
    rows = np.flatnonzero(names[places] == further)
    rows = rows[np.argsort(places[rows], kind="stable")]
    sizes = np.bincount(places[rows], minlength=len(names))
    return np.split(rows, np.cumsum(sizes)[:-1])


def _check(domains: np.ndarray, labels: np.ndarray, clients: int, heterogeneity: float) -> None:
    if len(labels) != len(domains):
        raise ValueError(f"{len(labels)} labels for {len(domains)} domains")
    if clients < 1:
        raise DataError(f"There must be at least one client, not {clients}.")
    if clients > len(domains):
        raise DataError(
            f"{clients} clients cannot share {len(domains)} training images. Use fewer clients."
        )
    if not 0 <= heterogeneity <= 1:
        raise DataError(f"heterogeneity must lie between 0 and 1, not {heterogeneity}.")
