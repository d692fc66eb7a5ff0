"""Ways to deal training images out to clients, one definition each, and how they are put together.

There are three kinds of skew, and a rule for each: which *domains* a client holds, how many images
(*sizes*), and which *labels* within these. ``clients.partition`` names rules joined by ``+``, at
most one of a kind: ``domain+shards+quantity``. Without a rule for domains all clients have the
global mix of them, as in the field's label-skew benchmarks. A rule of the kind *whole* decides all
by itself and stands alone. Other packages add rules through the entry-point group
``feddg.partitions``.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from feddg.data.shares import Mix, deal_by_shares, whole_shares
from feddg.errors import ExperimentError
from feddg.registry import Registry, is_called
from feddg.rng import numpy_stream

Rounding = Literal["strict", "official"]
Kind = Literal["domains", "sizes", "labels", "whole"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Dealing:
    """Images to deal out, and by which settings; what rules are asked with.

    Attributes:
        domains: ``(n,)`` domain of each image; any integers.
        labels: ``(n,)`` class of each image; any integers.
        clients: number of clients, C.
        seed: the experiment's seed.
        heterogeneity: lambda, from 1 (every client has the global mix) to 0 (one main domain each).
        alpha: Dirichlet concentration over labels.
        shards: label shards per client.
        quantity_alpha: Dirichlet concentration over client sizes.
        rounding: who gets the images left over when shares are rounded down.
        holders: ``(n,)`` who really holds each image, by name; None where nobody knows.
    """

    domains: np.ndarray
    labels: np.ndarray
    clients: int
    seed: int
    heterogeneity: float = 0.1
    alpha: float | None = None
    shards: int | None = None
    quantity_alpha: float | None = None
    rounding: Rounding = "strict"
    holders: np.ndarray | None = None

    @cached_property
    def columns(self) -> np.ndarray:
        """``(n,)`` int64: the place of each image's domain among those that occur, ascending."""
        found: np.ndarray = np.unique(self.domains, return_inverse=True)[1]
        return found

    @cached_property
    def totals(self) -> np.ndarray:
        """``(D,)`` int64: images of each domain that occurs."""
        return np.bincount(self.columns)

    @cached_property
    def classes(self) -> np.ndarray:
        """``(n,)`` int64: the place of each image's label among those that occur, ascending."""
        found: np.ndarray = np.unique(self.labels, return_inverse=True)[1]
        return found

    @cached_property
    def rows_by_domain(self) -> list[np.ndarray]:
        """For each domain that occurs, the positions of its images, ascending."""
        order = np.argsort(self.columns, kind="stable")
        return np.split(order, np.cumsum(self.totals)[:-1])

    @cached_property
    def random(self) -> np.random.Generator:
        """Where the draws come from that decide which images a client gets."""
        return numpy_stream(self.seed, "partition")


@dataclass(frozen=True, eq=False, kw_only=True)
class PartitionRule:
    """A way to deal images out, for one kind of skew.

    Attributes:
        name: its name in ``clients.partition``.
        kind: what it decides, and with it what ``decide`` returns:
            ``domains``: ``decide(dealing) -> Mix``, who is at home where;
            ``sizes``: ``decide(dealing) -> (C,)`` float, positive weights of the clients;
            ``labels``: ``decide(dealing, shares, targets) -> (n,)`` int64, the owner of each image,
            from ``(C, D)`` images per client and domain, whole and before rounding;
            ``whole``: ``decide(dealing) -> (n,)`` int64, the owner of each image.
        summary: one line.
        decide: see ``kind``; it draws from ``dealing.random`` or from streams of its own.
        setting: the field of ``clients`` without which it cannot work; None if there is none.
        aliases: other names that the field has for it.
        keeps_sizes: for labels: whether every client ends with the images that ``shares`` says.
        number: ``(dealing) -> C``: how many clients there are, where the images say so and
            ``clients.number`` does not; ``dealing.clients`` is then this.
    """

    name: str
    kind: Kind
    summary: str
    decide: Callable[..., Any]
    setting: str | None = None
    aliases: tuple[str, ...] = ()
    keeps_sizes: bool = True
    number: Callable[[Dealing], int] | None = None

    @property
    def defined_by(self) -> Callable[..., Any]:
        """What tells it from another definition of the same name."""
        return self.decide


PARTITIONS: Registry[PartitionRule] = Registry(
    "partition",
    "feddg.data.partitions",
    group="feddg.partitions",
    error=ExperimentError,
    named=lambda rule: (rule.name, *rule.aliases),
    adopt=lambda name, loaded: is_called(name, loaded, PartitionRule, ExperimentError),
)
"""All rules by name."""

SETTING_RULES = {"alpha": "dirichlet", "shards": "shards", "quantity_alpha": "quantity"}
"""The rule that a setting stands for where none that reads it is named."""
EVERYWHERE = "iid"
"""The rule for domains where none is named."""


def register_partition(rule: PartitionRule) -> PartitionRule:
    """Makes a rule known.

    Raises:
        ExperimentError: another one has its name.
    """
    return PARTITIONS.add(rule.name, rule, rule.aliases)


def rules_of(names: str, settings: Mapping[str, Any]) -> list[PartitionRule]:
    """Returns the rules by which images are dealt out: domains, sizes, labels; or a whole one.

    Args:
        names: names of rules, joined by ``+``.
        settings: fields of ``clients`` by name, for what names do not say.

    Raises:
        ExperimentError: a rule is unknown, two are of one kind, a rule lacks its setting, or a
            setting has no rule that reads it.
    """
    rules = [PARTITIONS.find(name.strip()) for name in names.split("+")]
    rules += list(_meant_by_settings(settings, rules))
    for kind in ("domains", "sizes", "labels", "whole"):
        alike = [rule.name for rule in rules if rule.kind == kind]
        if len(alike) > 1:
            raise ExperimentError(
                f"clients.partition: {alike[0]} and {alike[1]} both decide the {kind} of clients; "
                "name one"
            )
    whole = [rule.name for rule in rules if rule.kind == "whole"]
    if whole and len(rules) > 1:
        other = next(rule.name for rule in rules if rule.name != whole[0])
        raise ExperimentError(
            f"clients.partition: {whole[0]} decides by itself who holds what; leave out {other}"
        )
    _check_settings(settings, rules)
    if not whole and all(rule.kind != "domains" for rule in rules):
        rules.append(PARTITIONS[EVERYWHERE])
    return sorted(rules, key=lambda rule: ("domains", "sizes", "labels", "whole").index(rule.kind))


def counts_clients(names: str) -> bool:
    """Whether the images say how many clients there are, by rules joined by ``+``.

    Raises:
        ExperimentError: a rule is unknown.
    """
    return any(PARTITIONS.find(name.strip()).number is not None for name in names.split("+"))


def _meant_by_settings(
    settings: Mapping[str, Any], named: Iterable[PartitionRule]
) -> Iterable[PartitionRule]:
    read = {rule.setting for rule in named}
    for setting, name in SETTING_RULES.items():
        if settings.get(setting) is not None and setting not in read:
            yield PARTITIONS[name]


def _check_settings(settings: Mapping[str, Any], rules: list[PartitionRule]) -> None:
    for rule in rules:
        if rule.setting is not None and settings.get(rule.setting) is None:
            raise ExperimentError(f"clients.partition: {rule.name} needs clients.{rule.setting}")


def owners_by(rules: list[PartitionRule], dealing: Dealing) -> np.ndarray:
    """Returns ``(n,)`` int64: the client that holds each image, by rules of :func:`rules_of`."""
    decide = {rule.kind: rule for rule in rules}
    if "whole" in decide:
        owners: np.ndarray = decide["whole"].decide(dealing)
        return owners
    mix: Mix = decide["domains"].decide(dealing)
    weights = decide["sizes"].decide(dealing) if "sizes" in decide else None
    targets = mix.targets(dealing.totals, dealing.clients, weights)
    shares = whole_shares(targets, dealing.totals, mix.homes, dealing.rounding)
    labels = decide.get("labels")
    if labels is None:
        owners = deal_by_shares(dealing.rows_by_domain, shares, dealing.random)
    else:
        owners = labels.decide(dealing, shares, targets)
    if weights is None and (labels is None or labels.keeps_sizes):
        return owners
    return _one_each(owners, dealing, targets)


def _one_each(owners: np.ndarray, dealing: Dealing, targets: np.ndarray) -> np.ndarray:
    """Gives every client that drew less than half an image one of its main domain."""
    sizes = np.bincount(owners, minlength=dealing.clients)
    for client in np.flatnonzero(sizes == 0).tolist():
        rows = dealing.rows_by_domain[int(targets[client].argmax())]
        held = np.bincount(owners[rows], minlength=dealing.clients)
        can_give = sizes > 1
        giver = int(np.where(can_give & (held > 0), held, 0).argmax())
        if not held[giver] or not can_give[giver]:
            rows, giver = np.arange(len(owners)), int(sizes.argmax())
        owners[rows[owners[rows] == giver][-1]] = client
        sizes[client] += 1
        sizes[giver] -= 1
    return owners
