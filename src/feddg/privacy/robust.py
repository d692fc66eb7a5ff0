"""Robust aggregation: Krum, median, trimmed mean, norm bounding and centred clipping."""

import logging
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from feddg.errors import NotEnoughUpdates
from feddg.messages import Read, Update, Weights, differences, on_host, read
from feddg.methods.base import Round
from feddg.privacy.defence import AGGREGATION, EXTRAS, LOCAL_LAYERS, Defence, register
from feddg.settings import Positive, Settings

log = logging.getLogger("feddg")

_PIECE = 1 << 22
"""Number of entries processed together."""
_NUMBERS_AT_ONCE = 1 << 23


def length(weights: Weights, names: Iterable[str]) -> float:
    """Returns the Euclidean norm of the named entries together."""
    return sum(on_host(_norms(weights[name] for name in names)))


def distance(one: Weights, other: Weights, names: Iterable[str]) -> float:
    """Returns the Euclidean distance of two sets of weights over the named entries."""
    return sum(on_host(_norms(differences(one, other, names).values())))


def moved(weights: Weights, sent: Weights, sums: Collection[str] = ()) -> float:
    """Returns what :func:`moving` reads."""
    return read([moving(weights, sent, sums)])[0]


def moving(weights: Weights, sent: Weights, sums: Collection[str] = ()) -> Read[float]:
    """Returns what reads how far weights lie from those sent, over the float entries of both.

    Nine digits: a float64 sum over another memory order differs in its last bits, and what is
    remembered must not depend on the transport.

    Args:
        weights: of one update.
        sent: those that training began from.
        sums: entries that no step moves, left out.
    """
    trained = [n for n, t in sent.items() if t.is_floating_point() and n not in sums]
    shared = [name for name in trained if weights.get(name, sent[name]) is not sent[name]]
    norms = _norms(differences(weights, sent, shared).values())
    return norms, lambda lengths: float(f"{sum(lengths):.9g}")


@torch.no_grad()
def _norms(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns the Euclidean norm of tensors together; nothing of none."""
    tensors = list(tensors)
    norms = torch._foreach_norm(tensors, dtype=torch.float64) if tensors else ()
    return [torch.linalg.vector_norm(torch.stack(norms))] if norms else []


def shrunk(trained: Weights, sent: Weights, names: Iterable[str], norm: float) -> Weights | None:
    """Returns weights whose change is shortened to ``norm``, or None if it is not longer.

    Equation: ``w <- x + (w - x) min(1, norm / |w - x|)``. A change that is not finite counts as
    none, as an image's gradient does: whether a client's training failed would be seen otherwise.

    Args:
        trained: w; not changed.
        sent: x.
        names: entries that are measured and shortened; the others are taken from ``trained``.
        norm: above 0.
    """
    names = sorted(names)
    change = distance(trained, sent, names)
    if not math.isfinite(change):
        log.warning(
            "a change became infinite or NaN in training and counts as none: lower train.lr"
        )
        return trained | {name: sent[name].to(trained[name]) for name in names}
    if not change > norm:
        return None
    moved = {n: sent[n].to(trained[n]) for n in names}
    return trained | {n: x + (trained[n].detach() - x) * (norm / change) for n, x in moved.items()}


# What defences share that wait for all updates of a round: keep them, and aggregate them by rank.
#
# Memory: one model per client of the round, and pieces of at most 32 MiB.


def kept(defence: Defence, updates: Iterable[Update]) -> list[Update]:
    """Returns copies of all updates.

    Raises:
        NotEnoughUpdates: there are fewer updates than the defence needs.
    """
    copies = [update.keep() for update in updates]
    if len(copies) < defence.least:
        raise NotEnoughUpdates(
            f"{defence.name} needs {defence.least} good updates in a round, and {len(copies)} came"
        )
    return copies


def aggregated(updates: Sequence[Update], by_rank: Callable[[Tensor], Tensor]) -> Update:
    """Returns one update whose every entry is computed from the clients' sorted entries.

    Integer entries are the lower median.

    Args:
        updates: at least one.
        by_rank: maps sorted entries ``(clients, places)`` to ``(places,)``.
    """
    first = updates[0]
    weights = {}
    for name, tensor in first.weights.items():
        rule = by_rank if tensor.is_floating_point() else lower_median
        parts = [
            rule(torch.stack(piece).sort(dim=0).values).to(tensor.dtype)
            for piece in _pieces([update.weights[name].reshape(-1) for update in updates])
        ]
        weights[name] = torch.cat(parts).reshape(tensor.shape) if parts else tensor
    examples = sum(update.examples for update in updates)
    return replace(first, weights=weights, examples=examples)


def lower_median(ranked: Tensor) -> Tensor:
    """Returns the lower median of sorted entries ``(clients, places)``."""
    return ranked[(len(ranked) - 1) // 2]


def _pieces(rows: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    width = max(1, _PIECE // len(rows))
    return zip(*(torch.split(row, width) for row in rows)) if len(rows[0]) else iter(())


# Krum and multi-Krum: only the updates that lie closest together are used.
#
# Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent"
# (NeurIPS 2017), sections 4 and 5.
#
# Equation: of n updates, f of them bad, ``score_i`` = sum of the squared distances to the
# ``n - f - 2`` nearest others; the ``selected`` lowest scores are averaged (1 is Krum, more are
# multi-Krum).
#
# Break-down point: f of n clients, with ``n >= 2 f + 3`` and ``selected <= n - f - 2``: 3 of 10.
# Memory: one model per client of the round, and pieces of at most 64 MiB.
#
# Decisions: chosen clients count alike. Ties go to the lower client. Distances are of what is
# aggregated, normalisation statistics among it, in float64.


class KrumSettings(Settings):
    """Settings of Krum."""

    bad_clients: int = Field(1, ge=1, description="f: how many may be bad")
    selected: int = Field(1, ge=1, description="updates that are averaged; more than 1: multi-Krum")


@register
class Krum(Defence):
    """The mean of the updates with the smallest distances to their neighbours."""

    name = "krum"
    Settings = KrumSettings
    breaks: ClassVar[dict[str, str]] = {
        AGGREGATION: "and Krum leaves some out",
        LOCAL_LAYERS: "whose mean a new domain gets, and Krum does not look at them",
    }
    aggregates = True

    @property
    def least(self) -> int:
        """2 f + 3, and enough to select from."""
        f = self.settings.bad_clients
        return int(max(2 * f + 3, self.settings.selected + f + 2))

    def collected(self, updates: Iterator[Update], round: Round) -> Iterator[Update]:
        """Yields the chosen updates, in client order."""
        copies = kept(self, updates)
        distances = squared_distances(copies, round.state.weights, sorted(self.facts.aggregated))
        order = torch.argsort(scores(distances, self.settings.bad_clients), stable=True)
        chosen = [copies[k] for k in sorted(order[: self.settings.selected].tolist())]
        log.info("krum uses the updates of clients %s", [update.client for update in chosen])
        for update in chosen:
            yield replace(update, examples=1)


def scores(squares: Tensor, bad: int) -> Tensor:
    """Returns Krum's scores ``(n,)`` from squared distances ``(n, n)``; lower is better."""
    n = len(squares)
    others = squares.masked_fill(torch.eye(n, dtype=torch.bool), torch.inf)
    return others.sort(dim=1).values[:, : n - bad - 2].sum(1)


def squared_distances(updates: Sequence[Update], sent: Weights, names: Sequence[str]) -> Tensor:
    """Returns the squared distances of the updates' named entries, ``(n, n)`` float64 on the CPU.

    Products are computed from the changes relative to ``sent``, because weights would nearly
    cancel.
    """
    n = len(updates)
    products = torch.zeros(n, n, dtype=torch.float64)
    for name in names:
        start = sent[name].reshape(-1)
        rows = [update.weights[name].reshape(-1) for update in updates]
        width = max(1, _NUMBERS_AT_ONCE // n)
        for at in range(0, len(start), width):
            piece = torch.stack([row[at : at + width] for row in rows]).double()
            changes = piece - start[at : at + width].to(piece)
            products += (changes @ changes.T).cpu()
    norms = products.diagonal()
    return (norms[:, None] + norms[None, :] - 2 * products).clamp_min(0)


# Coordinate-wise median: every weight takes the middle of the clients' values.
#
# Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates" (ICML
# 2018), Option I of Algorithm 1.
#
# Equation: ``w_j = median_k w_kj``; of an even number the mean of the middle two.
#
# Break-down point: ``ceil(n / 2) - 1`` of n clients, 4 of 10: as long as fewer than half are bad,
# every weight stays between two honest clients' values. Memory: one model per client of the round.
#
# Decision: clients count alike, since what they say of their images is not checked.


@register
class Median(Defence):
    """Replaces the mean by the coordinate-wise median."""

    name = "median"
    breaks: ClassVar[dict[str, str]] = {AGGREGATION: "and a median leaves one"}
    aggregates = True

    def collected(self, updates: Iterator[Update], round: Round) -> Iterator[Update]:
        """Yields one update: the median."""
        yield aggregated(kept(self, updates), middle)


def middle(ranked: Tensor) -> Tensor:
    """Returns the median of sorted entries ``(clients, places)``, as ``(places,)``."""
    upper = ranked[len(ranked) // 2]
    return lower_median(ranked).lerp(upper, 0.5)


# Trimmed mean: of every weight, the f lowest and f highest values are left out.
#
# Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates" (ICML
# 2018), Option II of Algorithm 1, with f in place of a share, so that what is withstood is what is
# said.
#
# Equation: ``w_j`` = mean of the ``n - 2 f`` values of ``w_kj`` that are left, in float64.
#
# Break-down point: f of n clients, with ``n >= 2 f + 1``: up to 4 of 10. Memory: one model per
# client of the round.
#
# Decision: clients count alike, since what they say of their images is not checked.


class TrimmedMeanSettings(Settings):
    """Settings of the trimmed mean."""

    bad_clients: int = Field(1, ge=1, description="f: values left out at either end")


@register
class TrimmedMean(Defence):
    """The mean of each coordinate's middle values."""

    name = "trimmed_mean"
    Settings = TrimmedMeanSettings
    breaks: ClassVar[dict[str, str]] = {AGGREGATION: "and a trimmed mean leaves one"}
    aggregates = True

    @property
    def least(self) -> int:
        """2 f + 1."""
        return int(2 * self.settings.bad_clients + 1)

    def collected(self, updates: Iterator[Update], round: Round) -> Iterator[Update]:
        """Yields one update: the trimmed mean."""
        yield aggregated(kept(self, updates), self._trimmed)

    def _trimmed(self, ranked: Tensor) -> Tensor:
        f = self.settings.bad_clients
        return ranked[f : len(ranked) - f].double().mean(0)


# Norm bounding: the server shortens changes that are longer than a norm.
#
# Sun et al., "Can You Really Backdoor Federated Learning?" (2019), section 4.
#
# Equation: ``D_k <- D_k min(1, C / |D_k|)`` at the server, with a given C, or the median of the
# round's lengths.
#
# Break-down point: it bounds harm instead of undoing it: f bad clients of n move the mean by at
# most ``f C / n`` beyond what the others' changes do. With the median as C, f must be less than
# half. Memory: with a given norm one model; with the median one per client of the round.
#
# Decision: clients count alike, or one that claims many images would be bounded by nothing.


class NormBoundingSettings(Settings):
    """Settings of norm bounding."""

    norm: Positive | None = Field(
        None, description="longest change of the weights; none for the median of the round's"
    )


@register
class NormBounding(Defence):
    """Shortens long changes at the server."""

    name = "norm_bounding"
    Settings = NormBoundingSettings
    sees_updates = True
    breaks: ClassVar[dict[str, str]] = {
        EXTRAS: "which a bound on the weights does not bound",
        LOCAL_LAYERS: "whose mean a new domain gets, and this bound does not hold for them",
    }

    def collected(self, updates: Iterator[Update], round: Round) -> Iterator[Update]:
        """Yields every update, shortened if it is too long."""
        sent, aggregated = round.state.weights, sorted(self.facts.aggregated)
        norm = self.settings.norm
        if norm is None:
            copies = kept(self, updates)
            norm = statistics.median(distance(copy.weights, sent, aggregated) for copy in copies)
            updates = iter(copies)
        for update in updates:
            weights = shrunk(update.weights, sent, aggregated, norm)
            yield replace(update, weights=weights or update.weights, examples=1)


# Centred clipping: a mean whose terms are shortened where they lie far from it, again and again.
#
# Karimireddy, He and Jaggi, "Learning from History for Byzantine Robust Optimization" (ICML 2021),
# equation (CC) and Algorithm 2.
#
# Equation: ``v <- v + mean_k (w_k - v) min(1, tau / |w_k - v|)``, ``iterations`` times, from the
# weights that the clients were sent; tau is given, or the median of the ``|w_k - v|``.
#
# Break-down point: fewer than half. One iteration is norm bounding; further ones measure from what
# most clients agree on, so that what a bad client is left with is no longer a whole norm.
#
# Decisions: clients count alike. Their agreement is found anew in every round: a client of a
# federation is not in every round, and its change is no gradient of the last one's weights.


class CentredClippingSettings(Settings):
    """Settings of centred clipping."""

    norm: Positive | None = Field(
        None, description="tau, the longest distance that counts; none for the median of all"
    )
    iterations: int = Field(3, ge=1, description="how often the centre is moved")


@register
class CentredClipping(Defence):
    """The mean of changes that are clipped around a robust centre."""

    name = "centred_clipping"
    Settings = CentredClippingSettings
    breaks: ClassVar[dict[str, str]] = {AGGREGATION: "and centred clipping leaves one"}
    aggregates = True

    def collected(self, updates: Iterator[Update], round: Round) -> Iterator[Update]:
        """Yields one update: the centre; entries that are not aggregated are the lower median."""
        copies, names = kept(self, updates), sorted(self.facts.aggregated)
        centre = {name: round.state.weights[name].to(copies[0].weights[name]) for name in names}
        for _ in range(self.settings.iterations):
            lengths = [distance(copy.weights, centre, names) for copy in copies]
            norm = self.settings.norm or statistics.median(lengths)
            shares = [min(1.0, norm / length) if length else 1.0 for length in lengths]
            centre = {
                name: sum(
                    (
                        (copy.weights[name].double() - at.double()) * (share / len(copies))
                        for copy, share in zip(copies, shares)
                    ),
                    at.double(),
                ).to(at.dtype)
                for name, at in centre.items()
            }
        update = aggregated(copies, lower_median)
        yield replace(update, weights=update.weights | centre)
