"""How many images of each domain every client holds, and images laid on these places."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from feddg.errors import DataError

Arrange = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""``(places, classes) -> owners``: the client of each image of a domain, its images by class."""


@dataclass(frozen=True, eq=False)
class Mix:
    """Which domains clients hold, and how strictly.

    Attributes:
        homes: for each domain, the clients at home in it.
        heterogeneity: lambda: the share of every domain that is dealt out to all clients alike.
    """

    homes: list[np.ndarray]
    heterogeneity: float

    def targets(
        self, totals: np.ndarray, clients: int, weights: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns ``(C, D)`` float: images of each domain that a client is to hold.

        Args:
            totals: ``(D,)`` images of each domain.
            clients: number of clients, C.
            weights: ``(C,)`` positive: how large clients are to be; None for all alike.
        """
        shared, own = self.heterogeneity, 1 - self.heterogeneity
        columns = []
        for total, home in zip(totals.tolist(), self.homes):
            if weights is None:
                target = np.full(clients, shared * total / clients)
                target[home] += own * total / len(home)
            else:
                target = shared * total * weights / weights.sum()
                target[home] += own * total * weights[home] / weights[home].sum()
            columns.append(target)
        return np.stack(columns, axis=1)


def proportional_homes(totals: np.ndarray, clients: int) -> list[np.ndarray]:
    """Returns the home clients of each domain, such that clients are about equally large.

    With more domains than clients, whole domains go, largest first, to the smallest client.
    """
    if len(totals) > clients:
        return _packed(totals, clients)
    homes = np.ones(len(totals), dtype=np.int64)
    # A heap of (-images per home, domain): equal crowding goes to the first domain.
    crowded = [(-float(total), domain) for domain, total in enumerate(totals)]
    heapq.heapify(crowded)
    for _ in range(clients - len(totals)):
        domain = crowded[0][1]
        homes[domain] += 1
        heapq.heapreplace(crowded, (-totals[domain] / homes[domain], domain))
    return _contiguous(homes)


def equal_homes(totals: np.ndarray, clients: int) -> list[np.ndarray]:
    """Returns equally many home clients for each domain; the largest have one more if need be.

    Raises:
        DataError: a domain has fewer images than home clients, or there are fewer clients than
            domains.
    """
    if clients < len(totals):
        raise DataError(
            f"One domain per client needs at least {len(totals)} clients, one for each training "
            f"domain; there are {clients}. Use more clients or the partition 'heterogeneous'."
        )
    homes = np.full(len(totals), clients // len(totals))
    homes[np.argsort(-totals, kind="stable")[: clients % len(totals)]] += 1
    crowded = np.flatnonzero(homes > totals)
    if len(crowded):
        raise DataError(
            f"{homes[crowded[0]]} clients cannot share a domain of {totals[crowded[0]]} training "
            "images. Use fewer clients."
        )
    return _contiguous(homes)


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


def whole_shares(
    targets: np.ndarray, totals: np.ndarray, homes: list[np.ndarray], rounding: str
) -> np.ndarray:
    """Rounds targets to integers that add up to each domain's images.

    Args:
        targets: ``(C, D)`` images each client is to hold of each domain.
        totals: ``(D,)`` images of each domain.
        homes: for each domain, the clients at home in it.
        rounding: who gets what is left over: first the homes of the domain, then the clients
            furthest below their own total (``strict``); or simply the first clients (``official``).

    Returns:
        ``(C, D)`` int64.
    """
    owed = np.zeros(len(targets))
    columns = []
    for target, total, home in zip(targets.T, totals.tolist(), homes):
        shares = _whole(target, total, home, owed, rounding)
        owed += target - shares
        columns.append(shares)
    return np.stack(columns, axis=1)


def _whole(
    target: np.ndarray, total: int, home: np.ndarray, owed: np.ndarray, rounding: str
) -> np.ndarray:
    # Sums such as 0.1 * 10 + 0.9 * 10 may end just below the integer they stand for.
    shares: np.ndarray = np.floor(target + 1e-9).astype(np.int64)
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


def deal_by_shares(
    rows_by_domain: list[np.ndarray],
    shares: np.ndarray,
    random: np.random.Generator,
    classes: np.ndarray | None = None,
    arrange: Arrange | None = None,
) -> np.ndarray:
    """Returns ``(n,)`` int64: the owner of each image, when clients hold what ``shares`` says.

    Args:
        rows_by_domain: for each domain, the positions of its images.
        shares: ``(C, D)`` images per client and domain.
        random: where the order of a domain's images comes from.
        classes: ``(n,)`` class of each image; needed with ``arrange``.
        arrange: who gets which of a domain's images, ordered by class; None for chance.
    """
    owners = np.empty(sum(map(len, rows_by_domain)), dtype=np.int64)
    for rows, share in zip(rows_by_domain, shares.T):
        places = np.repeat(np.arange(len(share)), share)
        rows = random.permutation(rows)
        if arrange is not None:
            assert classes is not None
            rows = rows[np.argsort(classes[rows], kind="stable")]
            places = arrange(places, classes[rows])
        owners[rows] = places
    return owners
