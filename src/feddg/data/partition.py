"""Who holds what: training images partitioned over clients, and how unlike clients are."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.special import gammaln

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


# How unlike clients are: one number for each kind of skew, beside what chance alone would make.


@dataclass(frozen=True)
class Distance:
    """How far clients' shares of something are from those of all clients together.

    Attributes:
        mean: total variation, half the sum of the absolute differences of the shares, in [0, 1);
            mean over the clients with images, each counted once.
        by_chance: the same, on average, where all images are shuffled among clients of these sizes.
    """

    mean: float
    by_chance: float


@dataclass(frozen=True)
class Skew:
    """How unlike clients are.

    Attributes:
        domains: feature skew: how far clients' domains are from all clients' together.
        labels: label skew: the same of their classes.
        sizes: quantity skew: the Gini coefficient of the numbers of images, 0 for equal clients, to
            1 - 1 / C where one of C clients holds everything.
        smallest: images of the smallest client.
        largest: images of the largest client.
    """

    domains: Distance
    labels: Distance
    sizes: float
    smallest: int
    largest: int


def skew_of(domains: np.ndarray, labels: np.ndarray) -> Skew:
    """Measures how unlike clients are.

    Args:
        domains: ``(C, D)`` images per client and domain.
        labels: ``(C, K)`` images per client and class.
    """
    sizes = np.asarray(domains).sum(axis=1)
    return Skew(
        _distance(np.asarray(domains)),
        _distance(np.asarray(labels)),
        gini(sizes),
        int(sizes.min()) if len(sizes) else 0,
        int(sizes.max(initial=0)),
    )


def total_variation(counts: np.ndarray) -> float:
    """Mean over the rows with images of half the sum of |share - pooled share|.

    Args:
        counts: ``(C, K)`` images per client and kind.
    """
    sizes = counts.sum(axis=1)
    held = counts[sizes > 0] / sizes[sizes > 0, None]
    if not len(held):
        return 0.0
    pooled = counts.sum(axis=0) / counts.sum()
    return float(np.abs(held - pooled).sum(axis=1).mean() / 2)


def gini(sizes: np.ndarray) -> float:
    """Half the mean absolute difference of two sizes, over the mean size (Gini 1912)."""
    ordered, count = np.sort(sizes).astype(np.float64), len(sizes)
    if not ordered.sum():
        return 0.0
    ranks = np.arange(1, count + 1)
    return float(2 * (ranks * ordered).sum() / (count * ordered.sum()) - (count + 1) / count)


def _distance(counts: np.ndarray) -> Distance:
    return Distance(total_variation(counts), _by_chance(counts))


def _by_chance(counts: np.ndarray) -> float:
    """Mean of the total variation over all ways to shuffle the images among the clients.

    A client of n images then holds X of the K of one kind among all N, hypergeometric. Its mean
    deviation is E|X - nK/N| = 2 m (N - K - n + m) / N P(X = m) with m = floor(nK/N) + 1 (Johnson,
    Kemp and Kotz, "Univariate Discrete Distributions"). So a table of counts is enough: no memory
    goes by how many images somebody says that there are.
    """
    sizes, kind = counts.sum(axis=1), counts.sum(axis=0, dtype=np.float64)
    size, total = sizes[sizes > 0, None].astype(np.float64), float(sizes.sum())
    if not total:
        return 0.0
    above = np.floor(size * (kind / total)) + 1
    least = total - kind - size + above
    possible = (above <= size) & (above <= kind) & (least > 0)
    above, least = np.where(possible, above, 0), np.where(possible, least, 0)
    log_chance = (
        _log_ways(kind, above)
        + _log_ways(total - kind, np.where(possible, size - above, 0))
        - _log_ways(total, size)
    )
    away = np.where(possible, 2 * above * (least / total) * np.exp(log_chance), 0)
    return float((away / size).sum(axis=1).mean() / 2)


def _log_ways(of: np.ndarray | float, chosen: np.ndarray) -> np.ndarray:
    """Logarithm of the number of ways to choose so many of so many."""
    ways: np.ndarray = gammaln(of + 1) - gammaln(chosen + 1) - gammaln(of - chosen + 1)
    return ways


def in_words(skew: Skew) -> Iterator[str]:
    """Yields a line for each kind of skew: its number, and how to read it."""
    for kind, found, of in (
        ("Feature skew", skew.domains, "domains"),
        ("Label skew", skew.labels, "classes"),
    ):
        yield (
            f"{kind}: {found.mean:.2f} (by chance alone {found.by_chance:.2f}): mean distance of a "
            f"client's {of} from all clients', 0 for none, below 1."
        )
    yield (
        f"Quantity skew: {skew.sizes:.2f} (Gini coefficient; 0 for equal clients, below 1): "
        f"{skew.smallest:,} images the smallest, {skew.largest:,} the largest."
    )
