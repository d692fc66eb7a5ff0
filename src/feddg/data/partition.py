"""Partitions training images over clients by rules, and measures how much clients differ.

Three independent rules decide: which domains clients hold (kind ``domains``), how many images
(``sizes``) and which classes (``labels``). A rule of kind ``whole`` decides everything by itself.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from feddg.errors import DataError, ExperimentError
from feddg.registry import Registry
from feddg.rng import numpy_stream
from feddg.settings import grouped
from feddg.text import counted, number

Kind = Literal["domains", "sizes", "labels", "whole"]
SETTING_RULES = {"alpha": "dirichlet", "shards": "shards", "quantity_alpha": "quantity"}
"""The rule that a setting implies if no rule that reads it is named."""
_SMALL_ALPHA = 0.1
"""Below it, gamma variates are drawn as logarithms: too many would round to zero."""
IMAGES = "training images"


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
        """``(clients,)`` int64: the number of images of each client."""
        return np.bincount(self.owners, minlength=self.clients)

    @cached_property
    def domain_ids(self) -> np.ndarray:
        """The domains that occur, ascending; the columns of ``counts``."""
        return np.unique(self.domains)

    @cached_property
    def counts(self) -> np.ndarray:
        """``(clients, len(domain_ids))`` int64: images per client and domain."""
        columns = np.searchsorted(self.domain_ids, self.domains)
        shape = (self.clients, len(self.domain_ids))
        cells = np.ravel_multi_index((self.owners, columns), shape)
        return np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)


def partitioned_alike(found: Partition, domains: np.ndarray, seed: int) -> list[np.ndarray]:
    """Partitions further images: each client gets the share of a domain that it already holds.

    Args:
        found: the existing partition.
        domains: ``(n,)`` domain of each further image; images of domains that no client holds are
            left over.
        seed: the experiment's seed.

    Returns:
        One int64 array per client: positions in ``domains``, ascending; some may be empty.
    """
    random, starts = (numpy_stream(seed, "partition", use) for use in ("further", "starts"))
    by_domain: list[list[np.ndarray]] = []
    for domain, counts in zip(found.domain_ids, found.counts.T):
        rows = random.permutation(np.flatnonzero(domains == domain))
        by_domain.append(np.split(rows, _bounds(counts, len(rows), starts)))
    return [np.sort(np.concatenate(parts)) for parts in zip(*by_domain)]


def _bounds(weights: np.ndarray, images: int, random: np.random.Generator) -> np.ndarray:
    """Returns where a row of images is cut so that each client's expected part is its share.

    Rounded from a drawn start: from the same one, few images would go to the same clients in every
    domain or class.

    Args:
        weights: ``(C,)`` relative sizes of the clients' parts.
        images: their number.
        random: the draw's stream.

    Returns:
        ``(C - 1,)`` int64 positions, ascending.
    """
    ends = np.cumsum(weights)
    shares = ends[:-1] / ends[-1]  # exactly 1 where the others have none
    cuts: np.ndarray = np.floor(shares * images + random.random()).astype(np.int64)
    return np.minimum(cuts, images)


def held_alike(holders: np.ndarray, further: np.ndarray) -> list[np.ndarray]:
    """Assigns further images to the clients that hold them in reality.

    Args:
        holders: ``(n,)`` names; the clients are these names, sorted.
        further: ``(m,)`` holder of each further image; images of other holders are left over.

    Returns:
        One int64 array per client: positions in ``further``, ascending; some may be empty.
    """
    rows = grouped((name, row) for row, name in enumerate(further.tolist()))
    return [np.array(rows.get(name, []), np.int64) for name in np.unique(holders).tolist()]


@dataclass(frozen=True, eq=False, kw_only=True)
class Dealing:
    """The images to partition and the settings; the argument of all rules.

    Attributes:
        domains: ``(n,)`` domain of each image; any integers.
        labels: ``(n,)`` class of each image; any integers.
        clients: number of clients, C.
        seed: the experiment's seed.
        heterogeneity: lambda, from 1 (every client has the global mix) to 0 (one main domain each).
        alpha: concentration of the labels: small for clients with few classes each, large for the
            same classes everywhere. ``None`` for no Dirichlet skew.
        shards: runs of images sorted by class that each client gets. ``None`` for no shards.
        quantity_alpha: concentration of the sizes. ``None`` for sizes as even as domains allow.
        holders: ``(n,)`` names of who holds each image in reality; None if unknown. Under a rule
            that uses them, they are the clients, whatever ``clients`` is.
        of: what they are, for messages: images, or groups of images that are never split.
    """

    domains: np.ndarray
    labels: np.ndarray
    clients: int
    seed: int
    heterogeneity: float = 0.1
    alpha: float | None = None
    shards: int | None = None
    quantity_alpha: float | None = None
    holders: np.ndarray | None = None
    of: str = IMAGES

    @cached_property
    def columns(self) -> np.ndarray:
        """``(n,)`` int64: the index of each image's domain among those that occur, ascending."""
        return np.unique(self.domains, return_inverse=True)[1]

    @cached_property
    def totals(self) -> np.ndarray:
        """``(D,)`` int64: the number of images of each domain that occurs."""
        return np.bincount(self.columns)

    @cached_property
    def classes(self) -> np.ndarray:
        """``(n,)`` int64: the index of each image's label among those that occur, ascending."""
        return np.unique(self.labels, return_inverse=True)[1]

    @cached_property
    def rows_by_domain(self) -> list[np.ndarray]:
        """For each domain that occurs, the positions of its images, ascending."""
        order = np.argsort(self.columns, kind="stable")
        return np.split(order, np.cumsum(self.totals)[:-1])

    @cached_property
    def random(self) -> np.random.Generator:
        """The random generator that decides which images a client gets."""
        return numpy_stream(self.seed, "partition")


@dataclass(frozen=True, eq=False, kw_only=True)
class PartitionRule:
    """A rule that partitions images, for one kind of skew.

    Attributes:
        name: its name in ``clients.partition``.
        kind: what it decides, and with it what ``decide`` returns:
            ``domains``: ``decide(dealing) -> Mix``, the main domains of clients;
            ``sizes``: ``decide(dealing) -> (C,)`` float, positive weights of the clients;
            ``labels``: ``decide(dealing, shares, targets) -> (n,)`` int64, the owner of each image,
            ``shares`` and ``targets`` being ``(C, D)`` images per client and domain, rounded and
            before rounding;
            ``whole``: ``decide(dealing) -> (n,)`` int64, the owner of each image.
        summary: one line.
        decide: see ``kind``; it draws from ``dealing.random`` or its own streams.
        setting: the field of ``clients`` that it needs; None if there is none.
        aliases: other names for it in ``clients.partition``.
        keeps_sizes: for ``labels``: whether every client gets exactly the images in ``shares``.
        number: ``(dealing) -> C``: the number of clients, if the images determine it rather than
            ``clients.number``; ``dealing.clients`` is then this number.
    """

    name: str
    kind: Kind
    summary: str
    decide: Callable[..., Any]
    setting: str | None = None
    aliases: tuple[str, ...] = ()
    keeps_sizes: bool = True
    number: Callable[[Dealing], int] | None = None


PARTITIONS: Registry[PartitionRule] = Registry(
    "partition",
    "feddg.data.partition",
    group="feddg.partitions",
    error=ExperimentError,
    made_of=PartitionRule,
)
"""All rules by name; several can be joined by ``+``."""


register_partition = PARTITIONS.register
"""Registers a rule under its name and aliases."""


def _rule(
    name: str, kind: Kind, summary: str, **more: Any
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Registers the decorated function as the ``decide`` of a rule."""

    def register(decide: Callable[..., object]) -> Callable[..., object]:
        rule = PartitionRule(name=name, kind=kind, summary=summary, decide=decide, **more)
        return register_partition(rule).decide

    return register


def rules_of(names: str, settings: Mapping[str, object]) -> dict[Kind, PartitionRule]:
    """Returns the rules of a partition by kind: domains, sizes and labels; or a ``whole`` one.

    Args:
        names: names of rules, joined by ``+``.
        settings: fields of ``clients`` by name; they decide where no rule is named.

    Raises:
        ExperimentError: a rule is unknown, two are of one kind, a rule lacks its setting, or a
            setting has no rule that reads it.
    """
    rules = [PARTITIONS.find(name.strip()) for name in names.split("+")]
    read = {rule.setting for rule in rules}
    for setting, name in SETTING_RULES.items():
        if settings.get(setting) is not None and setting not in read:
            rules.append(PARTITIONS[name])
    for kind, alike in grouped((rule.kind, rule.name) for rule in rules).items():
        if len(alike) > 1:
            raise ExperimentError(
                f"clients.partition: {alike[0]} and {alike[1]} both decide the {kind} of clients; "
                "name one"
            )
    of_kind = {rule.kind: rule for rule in rules}
    if "whole" in of_kind and len(rules) > 1:
        whole = of_kind.pop("whole")
        other = next(iter(of_kind.values()))
        raise ExperimentError(
            f"clients.partition: {whole.name} already decides which client holds which images; "
            f"leave out {other.name}"
        )
    for rule in rules:
        if rule.setting is not None and settings.get(rule.setting) is None:
            raise ExperimentError(f"clients.partition: {rule.name} needs clients.{rule.setting}")
    if "whole" not in of_kind:
        of_kind.setdefault("domains", PARTITIONS["iid"])
    return of_kind


def counts_clients(names: str) -> bool:
    """Returns whether rules joined by ``+`` take the number of clients from the images.

    Raises:
        ExperimentError: a rule is unknown.
    """
    return any(PARTITIONS.find(name.strip()).number is not None for name in names.split("+"))


def partition(scheme: str, dealing: Dealing) -> Partition:
    """Partitions images over clients: each image goes to one client, each client gets at least one.

    Args:
        scheme: names of rules, joined by ``+``; see :data:`PARTITIONS`.
        dealing: the images and the settings.

    Returns:
        The partition; its rows are positions in ``dealing.domains``.

    Raises:
        DataError: more clients than images, fewer clients than domains in the scheme ``domain``, an
            argument is out of range, or a rule of another package leaves a client without images.
        ExperimentError: rules that are unknown or contradict each other.
    """
    rules = rules_of(scheme, vars(dealing))
    for rule in rules.values():
        if rule.number is not None:
            dealing = replace(dealing, clients=rule.number(dealing))
    clients, images, of = dealing.clients, len(dealing.domains), dealing.of
    if clients < 1:
        raise DataError(f"There must be at least one client, not {clients}.")
    if clients > images:
        raise DataError(f"{clients} clients cannot share {images} {of}. Use fewer clients.")
    parts = Partition(_owners(rules, dealing), dealing.domains, clients)
    if not parts.sizes.all():
        empty = int(np.argmin(parts.sizes))
        raise DataError(f"clients.partition: {scheme} leaves client {empty} without {of}.")
    return parts


def _owners(rules: Mapping[Kind, PartitionRule], dealing: Dealing) -> np.ndarray:
    """Returns ``(n,)`` int64: the client of each image, by the rules of :func:`rules_of`."""
    if "whole" in rules:
        return rules["whole"].decide(dealing)
    mix: Mix = rules["domains"].decide(dealing)
    sizes, labels = rules.get("sizes"), rules.get("labels")
    weights = np.ones(dealing.clients) if sizes is None else sizes.decide(dealing)
    targets = mix.targets(dealing.totals, weights)
    shares = whole_shares(targets, dealing.totals, mix.homes)
    if labels is None:
        owners = deal_by_shares(dealing, shares)
    else:
        owners = labels.decide(dealing, shares, targets)
    if sizes is None and (labels is None or labels.keeps_sizes):
        return owners
    return _one_each(owners, dealing, targets)


def _one_each(owners: np.ndarray, dealing: Dealing, targets: np.ndarray) -> np.ndarray:
    """Gives every client without images one image, of its main domain if possible."""
    sizes = np.bincount(owners, minlength=dealing.clients)
    for client in np.flatnonzero(sizes == 0).tolist():
        rows = dealing.rows_by_domain[int(targets[client].argmax())]
        counts = np.bincount(owners[rows], minlength=dealing.clients)
        can_give = sizes > 1
        giver = int(np.where(can_give & (counts > 0), counts, 0).argmax())
        if not counts[giver] or not can_give[giver]:
            rows, giver = np.arange(len(owners)), int(sizes.argmax())
        owners[rows[owners[rows] == giver][-1]] = client
        sizes[client] += 1
        sizes[giver] -= 1
    return owners


@dataclass(frozen=True, eq=False)
class Mix:
    """Which domains clients hold, and how strictly.

    Attributes:
        homes: for each domain, its home clients.
        heterogeneity: lambda: the share of every domain that is spread over all clients.
    """

    homes: list[np.ndarray]
    heterogeneity: float

    def targets(self, totals: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Returns ``(C, D)`` float: the target number of images per client and domain.

        Args:
            totals: ``(D,)`` images of each domain.
            weights: ``(C,)`` positive: relative sizes of clients.
        """
        targets: np.ndarray = self.heterogeneity * totals * weights[:, None] / weights.sum()
        for domain, home in enumerate(self.homes):
            own = weights[home]
            targets[home, domain] += (1 - self.heterogeneity) * totals[domain] * own / own.sum()
        return targets


def proportional_homes(dealing: Dealing) -> list[np.ndarray]:
    """Returns the home clients of each domain, so that clients are about equally large.

    With more domains than clients, each whole domain, largest first, goes to the client with the
    fewest images so far.
    """
    totals, clients = dealing.totals, dealing.clients
    if len(totals) > clients:
        packed = np.empty((len(totals), 1), dtype=np.int64)
        images = np.zeros(clients, dtype=np.int64)
        for domain in np.argsort(-totals, kind="stable"):
            packed[domain] = images.argmin()
            images[packed[domain]] += totals[domain]
        return list(packed)
    homes = np.ones(len(totals), dtype=np.int64)
    for _ in range(clients - len(totals)):
        homes[np.argmax(totals / homes)] += 1  # of the most crowded, the first
    return _contiguous(homes)


def _contiguous(homes: np.ndarray) -> list[np.ndarray]:
    """Numbers the home clients domain by domain: the first ``homes[0]`` belong to domain 0, ..."""
    return np.split(np.arange(homes.sum()), np.cumsum(homes)[:-1])


def whole_shares(targets: np.ndarray, totals: np.ndarray, homes: list[np.ndarray]) -> np.ndarray:
    """Rounds targets to integers that add up to each domain's images.

    Images that are left over go first to the homes of the domain, then to the clients furthest
    below their own total.

    Args:
        targets: ``(C, D)`` target number of images per client and domain.
        totals: ``(D,)`` images of each domain.
        homes: for each domain, its home clients.

    Returns:
        ``(C, D)`` int64.
    """
    # Sums such as 0.1 * 10 + 0.9 * 10 may end just below the integer they stand for.
    shares: np.ndarray = np.floor(targets + 1e-9).astype(np.int64)
    owed = np.zeros(len(targets))
    for target, share, total, home in zip(targets.T, shares.T, totals.tolist(), homes):
        stranger = ~np.isin(np.arange(len(target)), home)
        short = np.round(owed + target - share, 6)
        share[np.lexsort((-short, stranger))[: total - int(share.sum())]] += 1
        owed += target - share
    return shares


def deal_by_shares(
    dealing: Dealing,
    shares: np.ndarray,
    arrange: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Returns ``(n,)`` int64: the owner of each image, if clients hold what ``shares`` says.

    Args:
        dealing: the images.
        shares: ``(C, D)`` images per client and domain.
        arrange: ``(places, classes) -> owners``: assigns the images of a domain, sorted by class,
            to places of clients; None assigns at random.
    """
    owners = np.empty(len(dealing.domains), dtype=np.int64)
    for rows, share in zip(dealing.rows_by_domain, shares.T):
        places = np.repeat(np.arange(len(share)), share)
        rows = dealing.random.permutation(rows)
        if arrange is not None:
            rows = rows[np.argsort(dealing.classes[rows], kind="stable")]
            places = arrange(places, dealing.classes[rows])
        owners[rows] = places
    return owners


# By domain: the global mix everywhere; one domain each; or main domains, part of which leaves home.
#
# Of the last, a client is to hold ``n(c, d) = lambda * n_d / C + (1 - lambda) * [c is a home of d]
# * n_d / homes(d)`` images of domain ``d`` (Bai, Bagchi and Inouye, "Benchmarking Algorithms for
# Federated Domain Generalization", ICLR 2024): with heterogeneity lambda = 1 every one of the ``C``
# clients has the global mix of domains, with lambda = 0 each domain stays at home. A domain has as
# many homes as its size deserves, so that clients are about equally large.


@_rule("iid", "domains", "the global mix of domains everywhere")
def _global_mix(dealing: Dealing) -> Mix:
    return Mix(proportional_homes(dealing), 1.0)


@_rule("domain", "domains", "one domain each, equally many clients for every domain")
def _one_domain_mix(dealing: Dealing) -> Mix:
    totals, clients = dealing.totals, dealing.clients
    if clients < len(totals):
        raise DataError(
            f"One domain per client needs at least {len(totals)} clients, one for each training "
            f"domain; there are {clients}. Use more clients or the partition 'heterogeneous'."
        )
    homes = np.full(len(totals), clients // len(totals))
    # The largest domains may have one more.
    homes[np.argsort(-totals, kind="stable")[: clients % len(totals)]] += 1
    crowded = np.flatnonzero(homes > totals)
    if len(crowded):
        raise DataError(
            f"{homes[crowded[0]]} clients cannot share a domain of {totals[crowded[0]]} "
            f"{dealing.of}. Use fewer clients."
        )
    return Mix(_contiguous(homes), 0.0)


@_rule(
    "heterogeneous",
    "domains",
    "main domains, of which clients.heterogeneity (lambda) says how much leaves home",
)
def _home_mix(dealing: Dealing) -> Mix:
    return Mix(proportional_homes(dealing), dealing.heterogeneity)


# By label: each client has a taste, a Dirichlet draw around the global label shares.
#
# A client fills the places it has in each domain according to its taste, as long as images last;
# how many it holds of which domain stays as it is (Hsu, Qi and Brown, "Measuring the Effects of
# Non-Identical Data Distribution for Federated Visual Classification", 2019).


@_rule(
    "dirichlet",
    "labels",
    "label shares drawn for each client with clients.alpha; sizes stay (Hsu 2019)",
    setting="alpha",
)
def _dirichlet_owners(dealing: Dealing, shares: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """With equally frequent classes a taste is a draw from Dir(alpha), symmetric.

    Otherwise its mean is the global label shares p: Dir(alpha C p), for C classes. Hsu et al. draw
    Dir(alpha p), which is C times as uneven.
    """
    assert dealing.alpha is not None
    random, counts = dealing.random, np.bincount(dealing.classes)
    mean = counts / counts.sum()
    tastes = random.dirichlet(dealing.alpha * len(mean) * mean, size=dealing.clients)
    tastes += 1e-9 * mean  # so that a client whose favourites are gone still chooses
    return deal_by_shares(
        dealing, shares, lambda places, classes: _by_taste(places, classes, tastes, random)
    )


def _by_taste(
    places: np.ndarray, classes: np.ndarray, tastes: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """Fills clients' places with images of one domain by each client's label shares.

    All places choose a class at once. If a class runs short, a random part of them gets it, and the
    others choose again among the remaining classes.

    Args:
        places: ``(n,)`` the client of each place.
        classes: ``(n,)`` the classes of the images to give away, ascending.
        tastes: ``(clients, classes)`` label shares.
        random: source of the choices.

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
    """Returns a class for each place, drawn from its client's label shares among those left."""
    clients, client = np.unique(places, return_inverse=True)
    upto = np.cumsum(tastes[clients] * available, axis=1)
    # One search for all: client k's cumulative shares lie in the interval (k, k + 1].
    upto = upto / upto[:, -1:] + np.arange(len(clients))[:, None]
    drawn: np.ndarray = np.searchsorted(
        upto.ravel(), client + random.random(len(places)), side="right"
    )
    classes = tastes.shape[1]
    return np.clip(drawn - client * classes, 0, classes - 1)


# By label: each class is partitioned by a Dirichlet draw over the clients, sizes following.
#
# For every class the clients' shares of its images are drawn from Dir(alpha) (Yurochkin et al.,
# "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019; the label skew of Li
# et al., "Federated Learning on Non-IID Data Silos", ICDE 2022), so that clients differ in size,
# too. Under a domain skew, the draws weigh what a client is to hold of each domain: they are the
# same in all domains, and with all clients alike the shares are exactly the papers'.


@_rule(
    "class_dirichlet",
    "labels",
    "each class partitioned by a draw with clients.alpha; sizes follow (Yurochkin 2019)",
    setting="alpha",
    keeps_sizes=False,
)
def _class_dirichlet_owners(
    dealing: Dealing, shares: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    assert dealing.alpha is not None
    random, classes = dealing.random, int(dealing.classes.max()) + 1
    starts = numpy_stream(dealing.seed, "partition", "starts")
    # Normalised gamma variates are a Dirichlet draw; tiny ones that round to zero stay a share.
    size, small = (dealing.clients, classes), dealing.alpha < _SMALL_ALPHA
    drawn = (
        _log_gammas(dealing.alpha, size, random)
        if small
        else random.gamma(dealing.alpha, size=size) + 1e-12
    )
    owners = np.empty(len(dealing.domains), dtype=np.int64)
    for rows, target in zip(dealing.rows_by_domain, targets.T):
        taken = drawn
        if small:  # the largest of those with a target becomes 1
            taken = np.exp(np.minimum(drawn - drawn[target > 0].max(axis=0), 0))
        for of_class in range(classes):
            members = random.permutation(rows[dealing.classes[rows] == of_class])
            weight = target * taken[:, of_class]
            cuts = _bounds(weight, len(members), starts)
            sizes = np.diff(cuts, prepend=0, append=len(members))
            owners[members] = np.repeat(np.arange(dealing.clients), sizes)
    return owners


def _log_gammas(
    alpha: float, size: int | tuple[int, int], random: np.random.Generator
) -> np.ndarray:
    """Returns logarithms of gamma variates: G(alpha) is G(alpha + 1) U ** (1 / alpha)."""
    larger = np.log(random.gamma(alpha + 1, size=size))
    return larger - random.exponential(1 / alpha, size=size)


# By label: images sorted by class are cut into shards, and each client gets a few of them.
#
# With one domain and clients of one size these are the shards of McMahan et al., "Communication-
# Efficient Learning of Deep Networks from Decentralized Data" (AISTATS 2017), which the field
# calls the pathological split: two shards for each of 100 clients. Under a domain or size skew a
# client's images of every domain come in as many shards, in the same order in all domains, so that
# it holds the same few classes everywhere.


@_rule(
    "shards",
    "labels",
    "clients.shards runs of images sorted by class each (McMahan 2017: 2)",
    setting="shards",
    aliases=("pathological",),
)
def _shard_owners(dealing: Dealing, shares: np.ndarray, targets: np.ndarray) -> np.ndarray:
    assert dealing.shards is not None
    each = dealing.shards
    if dealing.clients * each > len(dealing.labels):
        raise DataError(
            f"{dealing.clients} clients with {each} shards each need at least "
            f"{dealing.clients * each} {dealing.of}; there are {len(dealing.labels)}. Use fewer "
            "shards or fewer clients."
        )
    # Which client holds each shard, in the order in which they lie along the sorted images.
    order = dealing.random.permutation(dealing.clients * each)

    def arrange(places: np.ndarray, classes: np.ndarray) -> np.ndarray:
        counts = np.bincount(places, minlength=dealing.clients)
        client, number = np.divmod(order, each)
        sizes = counts[client] // each + (number < counts[client] % each)
        return np.repeat(client, sizes)

    return deal_by_shares(dealing, shares, arrange)


# By size: how many images clients hold is a Dirichlet draw.
#
# Clients' shares of all images are drawn from Dir(alpha) (Li et al., "Federated Learning on Non-
# IID Data Silos: An Experimental Study", ICDE 2022, section IV-C); a small alpha for few large
# clients and many small ones. Under a domain skew the homes of a domain share it in these
# proportions.


@_rule(
    "quantity",
    "sizes",
    "sizes drawn with clients.quantity_alpha (Li 2022)",
    setting="quantity_alpha",
)
def _weights(dealing: Dealing) -> np.ndarray:
    assert dealing.quantity_alpha is not None
    random = numpy_stream(dealing.seed, "partition", "quantity")
    if dealing.quantity_alpha < _SMALL_ALPHA:
        logs = _log_gammas(dealing.quantity_alpha, dealing.clients, random)
        drawn = np.exp(logs - logs.max())
    else:
        drawn = random.gamma(dealing.quantity_alpha, size=dealing.clients)
    # Nobody is to hold nothing: the least is a thousandth of the mean.
    return np.maximum(drawn, max(1e-3 * drawn.mean(), 1e-12))


def _holders(dealing: Dealing) -> np.ndarray:
    if dealing.holders is None:
        raise DataError(
            "clients.partition client needs to know which client holds each image: give a table "
            "with the column client (--data table), or choose another partition."
        )
    return dealing.holders


@_rule(
    "client",
    "whole",
    "who really holds the data, as the images say: as many clients as there are",
    number=lambda dealing: len(np.unique(_holders(dealing))),
    aliases=("natural",),
)
def _natural_owners(dealing: Dealing) -> np.ndarray:
    owners: np.ndarray = np.unique(_holders(dealing), return_inverse=True)[1]
    return owners.astype(np.int64)


@dataclass(frozen=True)
class Distance:
    """How far the clients' shares differ from the shares of all clients together.

    Attributes:
        mean: total variation (half the sum of the absolute differences of the shares), in [0, 1);
            the mean over clients with images.
        by_chance: its expected value if all images are shuffled among clients of these sizes.
    """

    mean: float
    by_chance: float


@dataclass(frozen=True)
class Skew:
    """How much clients differ.

    Attributes:
        domains: feature skew: the distance of clients' domains from all clients' domains.
        labels: label skew: the same for classes.
        sizes: quantity skew: the Gini coefficient of the numbers of images, from 0 (equal clients)
            to 1 - 1 / C (one of C clients holds everything).
        smallest: images of the smallest client.
        largest: images of the largest client.
    """

    domains: Distance
    labels: Distance
    sizes: float
    smallest: int
    largest: int


def skew_of(domains: np.ndarray, labels: np.ndarray) -> Skew:
    """Measures how much clients differ.

    Args:
        domains: ``(C, D)`` images per client and domain.
        labels: ``(C, K)`` images per client and class.
    """
    sizes = domains.sum(axis=1)
    return Skew(
        Distance(total_variation(domains), _by_chance(domains)),
        Distance(total_variation(labels), _by_chance(labels)),
        gini(sizes),
        int(sizes.min()) if len(sizes) else 0,
        int(sizes.max(initial=0)),
    )


def total_variation(counts: np.ndarray) -> float:
    """Mean of half the sum of |share - pooled share| over the rows with images.

    Args:
        counts: ``(C, K)`` images per client and kind.
    """
    sizes = counts.sum(axis=1)
    shares = counts[sizes > 0] / sizes[sizes > 0, None]
    if not len(shares):
        return 0.0
    pooled = counts.sum(axis=0) / counts.sum()
    return float(np.abs(shares - pooled).sum(axis=1).mean() / 2)


def gini(sizes: np.ndarray) -> float:
    """Gini coefficient: half the mean absolute difference of two sizes, over the mean size."""
    ordered, count = np.sort(sizes).astype(np.float64), len(sizes)
    if not ordered.sum():
        return 0.0
    ranks = np.arange(1, count + 1)
    return float(2 * (ranks * ordered).sum() / (count * ordered.sum()) - (count + 1) / count)


def _by_chance(counts: np.ndarray) -> float:
    """Expected total variation if the images are shuffled among the clients.

    A client of n images then holds X of the K of one kind among all N, hypergeometric. Its mean
    deviation is E|X - nK/N| = 2 m (N - K - n + m) / N P(X = m) with m = floor(nK/N) + 1 (Johnson,
    Kemp and Kotz, "Univariate Discrete Distributions"). So a table of counts is enough, and memory
    does not grow with the number of images.
    """
    from scipy.special import betaln  # scipy.stats has it, and takes a second to import

    def ways(among: np.ndarray | int, taken: np.ndarray) -> np.ndarray:
        """Returns the logarithm of how many ways there are to take some."""
        return np.asarray(-np.log1p(among) - betaln(1 + among - taken, 1 + taken))

    sizes, kind = counts.sum(axis=1), counts.sum(axis=0)
    size, total = sizes[sizes > 0, None], int(sizes.sum())
    if not total:
        return 0.0
    above = size * kind // total + 1
    possible = (above <= np.minimum(kind, size)) & (size - above <= total - kind)
    log = ways(kind, above) + ways(total - kind, size - above) - ways(total, size)
    chance = np.exp(np.where(possible, log, -np.inf))
    away = 2 * above * ((total - kind - size + above) / total) * chance
    return float((away / size).sum(axis=1).mean() / 2)


def in_words(skew: Skew) -> Iterator[str]:
    """Yields a line for each kind of skew: its value, and how to read it."""
    for kind, value, of in (
        ("Feature skew", skew.domains, "domains"),
        ("Label skew", skew.labels, "classes"),
    ):
        yield (
            f"{kind}: {value.mean:.2f} (by chance alone {value.by_chance:.2f}): mean distance of a "
            f"client's {of} from all clients', 0 for none, below 1."
        )
    yield (
        f"Quantity skew: {skew.sizes:.2f} (Gini coefficient; 0 for equal clients, below 1): "
        f"{counted(skew.smallest, 'image')} the smallest, {number(skew.largest)} the largest."
    )
