"""By label: each client has a taste, a Dirichlet draw around the global label shares.

A client fills the places it has in each domain according to its taste, as long as images last; how
many it holds of which domain stays as it is (Hsu, Qi and Brown, "Measuring the Effects of
Non-Identical Data Distribution for Federated Visual Classification", 2019).
"""

import numpy as np

from feddg.data.partitions import Dealing, PartitionRule, register_partition
from feddg.data.shares import deal_by_shares


def _owners(dealing: Dealing, shares: np.ndarray, targets: np.ndarray) -> np.ndarray:
    random = dealing.random
    assert dealing.alpha is not None
    tastes = _tastes(dealing.labels, dealing.clients, dealing.alpha, random)
    return deal_by_shares(
        dealing.rows_by_domain,
        shares,
        random,
        dealing.classes,
        lambda places, classes: _by_taste(places, classes, tastes, random),
    )


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


register_partition(
    PartitionRule(
        name="dirichlet",
        kind="labels",
        summary="label shares drawn for each client with clients.alpha; sizes stay (Hsu 2019)",
        decide=_owners,
        setting="alpha",
    )
)
