"""Who holds what: training images dealt out to clients.

Everything follows from one idea. Every domain has its *home* clients. A client is to hold

    n(c, d) = lambda * n_d / C  +  (1 - lambda) * [c is a home of d] * n_d / homes(d)

images of domain ``d`` (Bai, Bagchi and Inouye, "Benchmarking Algorithms for Federated Domain
Generalization", ICLR 2024): with heterogeneity parameter lambda = 1 every one of the ``C`` clients
has the global mix of domains, with lambda = 0 each domain stays at home.

Label skew comes on top and leaves these numbers as they are: each client has a taste, a draw from
a Dirichlet distribution around the global label shares, and fills its places according to it as
long as images last (Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution
for Federated Visual Classification", 2019).
"""

import heapq
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from feddg.errors import DataError
from feddg.randomness import numpy_stream

Rounding = Literal["strict", "official"]
Scheme = Literal["heterogeneous", "domain"]


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
    scheme: Scheme = "heterogeneous",
    heterogeneity: float = 0.1,
    alpha: float | None = None,
    rounding: Rounding = "strict",
    seed: int,
) -> Partition:
    """Deals images out to clients: every image to exactly one client, every client at least one.

    Args:
        domains: ``(n,)`` domain of each image; any integers.
        labels: ``(n,)`` class of each image.
        clients: number of clients, C.
        scheme: ``heterogeneous`` gives a domain as many home clients as its size deserves, so that
            clients are about equally large. ``domain`` gives every client a single domain and
            every domain equally many clients (one more for the largest ones if that does not come
            out even), whatever the heterogeneity.
        heterogeneity: lambda, from 1 (every client has the global mix) to 0 (one main domain each).
        alpha: concentration of the label tastes: small for clients with few classes each, large
            for the same classes everywhere. ``None`` for no skew beyond chance.
        rounding: who gets the images left over when ``n(c, d)`` is rounded down: first the homes
            of the domain, then the clients furthest below their own total (``strict``); or simply
            the first clients, as the benchmark's code does (``official``), which leaks single
            images of other domains into them even at lambda = 0.
        seed: the experiment's seed.

    Returns:
        The partition; its rows are positions in ``domains``.

    Raises:
        DataError: more clients than images, fewer clients than domains in the scheme ``domain``,
            an argument out of range, or a client without images (``official`` rounding only).
    """
    _check(domains, labels, clients, heterogeneity, alpha, scheme)
    domain_ids, columns = np.unique(domains, return_inverse=True)
    totals = np.bincount(columns, minlength=len(domain_ids))
    if scheme == "domain":
        homes, heterogeneity = _contiguous(_equal_homes(totals, clients)), 0.0
    else:
        homes = _homes(totals, clients)
    random = numpy_stream(seed, "partition")
    tastes = None if alpha is None else _tastes(labels, clients, alpha, random)
    owners = _deal(columns, labels, homes, clients, heterogeneity, rounding, tastes, random)
    found = Partition(owners, np.asarray(domains, dtype=np.int64), clients)
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


def heterogeneous(
    domains: np.ndarray,
    clients: int,
    heterogeneity: float,
    seed: int,
    rounding: Rounding = "strict",
) -> list[np.ndarray]:
    """Returns each client's rows under heterogeneity lambda; labels fall as they may.

    See ``partition`` for arguments and errors.
    """
    return partition(
        domains,
        np.zeros(len(domains), dtype=np.int64),
        clients,
        heterogeneity=heterogeneity,
        rounding=rounding,
        seed=seed,
    ).rows


def dirichlet(labels: np.ndarray, clients: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Returns each client's rows under label skew alone; client sizes differ by one at most.

    See ``partition`` for arguments and errors.
    """
    one_domain = np.zeros(len(labels), dtype=np.int64)
    return partition(one_domain, labels, clients, heterogeneity=1.0, alpha=alpha, seed=seed).rows


def one_domain_per_client(
    domains: np.ndarray, seed: int, clients_per_domain: int = 1
) -> list[np.ndarray]:
    """Returns each client's rows when every client holds (a share of) one domain.

    See ``partition`` for errors.
    """
    clients = len(np.unique(domains)) * clients_per_domain
    labels = np.zeros(len(domains), dtype=np.int64)
    return partition(domains, labels, clients, scheme="domain", seed=seed).rows


def _check(
    domains: np.ndarray,
    labels: np.ndarray,
    clients: int,
    heterogeneity: float,
    alpha: float | None,
    scheme: str,
) -> None:
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
    if alpha is not None and not (0 < alpha < np.inf):
        raise DataError(f"alpha must be a positive number, not {alpha}.")
    present = len(np.unique(domains))
    if scheme == "domain" and clients < present:
        raise DataError(
            f"One domain per client needs at least {present} clients, one for each training "
            f"domain; there are {clients}. Use more clients or the scheme 'heterogeneous'."
        )


def _homes(totals: np.ndarray, clients: int) -> list[np.ndarray]:
    """Returns the home clients of each domain, such that clients are about equally large."""
    if len(totals) <= clients:
        return _contiguous(_proportional_homes(totals, clients))
    return _packed(totals, clients)


def _proportional_homes(totals: np.ndarray, clients: int) -> np.ndarray:
    """Returns how many homes each domain has: one more for the most crowded until all are used."""
    homes = np.ones(len(totals), dtype=np.int64)
    # A heap of (-images per home, domain): equal crowding goes to the first domain.
    crowded = [(-float(total), domain) for domain, total in enumerate(totals)]
    heapq.heapify(crowded)
    for _ in range(clients - len(totals)):
        domain = crowded[0][1]
        homes[domain] += 1
        heapq.heapreplace(crowded, (-totals[domain] / homes[domain], domain))
    return homes


def _equal_homes(totals: np.ndarray, clients: int) -> np.ndarray:
    homes = np.full(len(totals), clients // len(totals))
    homes[np.argsort(-totals, kind="stable")[: clients % len(totals)]] += 1
    crowded = np.flatnonzero(homes > totals)
    if len(crowded):
        raise DataError(
            f"{homes[crowded[0]]} clients cannot share a domain of {totals[crowded[0]]} training "
            "images. Use fewer clients."
        )
    return homes


def _contiguous(homes: np.ndarray) -> list[np.ndarray]:
    """Lays the clients out side by side: the first ``homes[0]`` are at home in domain 0, ..."""
    return np.split(np.arange(homes.sum()), np.cumsum(homes)[:-1])


def _packed(totals: np.ndarray, clients: int) -> list[np.ndarray]:
    """Gives whole domains, largest first, to the client with the fewest images so far."""
    homes = np.empty((len(totals), 1), dtype=np.int64)
    smallest = [(0, client) for client in range(clients)]
    for domain in np.argsort(-totals, kind="stable"):
        images, client = smallest[0]
        homes[domain] = client
        heapq.heapreplace(smallest, (images + int(totals[domain]), client))
    return list(homes)


def _tastes(
    labels: np.ndarray, clients: int, alpha: float, random: np.random.Generator
) -> np.ndarray:
    """Returns ``(clients, classes)`` label shares, one draw per client.

    With equally frequent classes this is the symmetric Dirichlet distribution of parameter alpha;
    otherwise its mean is the global label shares.
    """
    _, counts = np.unique(labels, return_counts=True)
    shares = counts / counts.sum()
    # A little of the mean is mixed in, so that a client whose favourites are gone still chooses.
    tastes: np.ndarray = (
        random.dirichlet(alpha * len(shares) * shares, size=clients) + 1e-9 * shares
    )
    return tastes


def _deal(
    columns: np.ndarray,
    labels: np.ndarray,
    homes: list[np.ndarray],
    clients: int,
    heterogeneity: float,
    rounding: Rounding,
    tastes: np.ndarray | None,
    random: np.random.Generator,
) -> np.ndarray:
    """Returns the owner of each image."""
    _, classes = np.unique(labels, return_inverse=True)
    owners = np.empty(len(columns), dtype=np.int64)
    owed = np.zeros(clients)
    by_domain = np.split(np.argsort(columns, kind="stable"), np.cumsum(np.bincount(columns))[:-1])
    for rows, home in zip(by_domain, homes):
        target = np.full(clients, heterogeneity * len(rows) / clients)
        target[home] += (1 - heterogeneity) * len(rows) / len(home)
        shares = _whole(target, len(rows), home, owed, rounding)
        owed += target - shares
        places = np.repeat(np.arange(clients), shares)
        rows = random.permutation(rows)
        if tastes is not None:
            rows = rows[np.argsort(classes[rows], kind="stable")]
            places = _by_taste(places, classes[rows], tastes, random)
        owners[rows] = places
    return owners


def _whole(
    target: np.ndarray, total: int, home: np.ndarray, owed: np.ndarray, rounding: Rounding
) -> np.ndarray:
    """Rounds one domain's targets to integers that add up to ``total``.

    Args:
        target: ``(clients,)`` images each client is to hold of this domain.
        total: images of this domain.
        home: clients at home in it.
        owed: ``(clients,)`` images each client fell short of its targets in earlier domains.
        rounding: who gets what is left over.
    """
    # Sums such as 0.1 * 10 + 0.9 * 10 may end just below the integer they stand for.
    shares = np.floor(target + 1e-9).astype(np.int64)
    left = total - int(shares.sum())
    if rounding == "official":
        first = np.arange(left)
    else:
        stranger = np.ones(len(target), dtype=bool)
        stranger[home] = False
        short = np.round(owed + target - shares, 6)
        first = np.lexsort((-short, stranger))[:left]
    shares[first] += 1
    return shares


def _by_taste(
    places: np.ndarray, classes: np.ndarray, tastes: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """Fills places with images of one domain according to each client's taste.

    All places choose a class at once; of a class in short supply a random part of them get it, and
    the others choose again among what is left.

    Args:
        places: ``(n,)`` the client of each place.
        classes: ``(n,)`` the classes of the images to give away, ascending.
        tastes: ``(clients, classes)`` label shares.
        random: where the choices come from.

    Returns:
        ``(n,)`` the client of each image.
    """
    supply = np.bincount(classes, minlength=tastes.shape[1])
    start = np.cumsum(supply) - supply
    owners = np.empty_like(places)
    waiting = random.permutation(places)
    while len(waiting):
        choices = _choose(waiting, tastes, supply > 0, random)
        order = np.argsort(choices, kind="stable")
        waiting, choices = waiting[order], choices[order]
        demand = np.bincount(choices, minlength=len(supply))
        turn = np.arange(len(choices)) - (np.cumsum(demand) - demand)[choices]
        served = turn < supply[choices]
        owners[(start[choices] + turn)[served]] = waiting[served]
        taken = np.minimum(demand, supply)
        start, supply = start + taken, supply - taken
        waiting = random.permutation(waiting[~served])
    return owners


def _choose(
    places: np.ndarray, tastes: np.ndarray, available: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """Returns a class for each place, drawn with its client's taste among the available ones."""
    clients, client = np.unique(places, return_inverse=True)
    upto = np.cumsum(tastes[clients] * available, axis=1)
    # One search for all: client k's cumulative shares lie in the interval (k, k + 1].
    upto = upto / upto[:, -1:] + np.arange(len(clients))[:, None]
    found: np.ndarray = np.searchsorted(
        upto.ravel(), client + random.random(len(places)), side="right"
    )
    classes = tastes.shape[1]
    chosen: np.ndarray = np.clip(found - client * classes, 0, classes - 1)
    return chosen
