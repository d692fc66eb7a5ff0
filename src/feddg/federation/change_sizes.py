"""How far clients moved the weights, and who moved them too far to be believed."""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from feddg.errors import RunError
from feddg.guards.distances import distance, length
from feddg.guards.secure_aggregation import clients_said
from feddg.messages import Refusal, Update, Weights, first_not_finite

LARGEST_SCALE = 1e4
"""Where nothing is known of other changes: the longest change, as a multiple of the weights."""
LARGEST_FIRST_MEAN = 100.0
"""The same for a mean of updates that cannot be seen, in which a single one counts for little."""
OF_MEANS = 0.1
"""How many times longer than those before it such a mean may be, as a share of what one may."""


CHANGES = "server/changes"
"""Name of the remembered medians among the state's extras."""


ALIKE = 10.0
"""How many times the median of its round a client's largest number may be, where a method says that
clients' numbers are alike."""


REMEMBERED = 20
"""Rounds whose median change is remembered."""


class RoundSpoiled(RunError):
    """A round cannot count, because of clients that were found out too late to leave them out.

    Attributes:
        refusals: who, and why.
    """

    def __init__(self, round: int, refusals: Sequence[Refusal]) -> None:
        self.refusals = refusals
        said = "; ".join(f"client {refusal.client}: {refusal.reason}" for refusal in refusals)
        super().__init__(f"round {round}: {said}")


class ChangeSizes:
    """How far clients moved the weights: this round's, and the median of each of the last rounds.

    An update whose change is many times longer than the others' is refused. One far too long by
    itself is refused at once; whether one is too long beside this round's others is known when all
    are in, and then the round is fused again without it.

    Args:
        times: how many times the median a change may be long; None for as long as it likes.
        medians: medians of earlier rounds, from a checkpoint.
    """

    def __init__(self, times: float | None, medians: Tensor | None = None) -> None:
        self._times = math.inf if times is None else times
        self._medians: deque[float] = deque(maxlen=REMEMBERED)
        if medians is not None:
            self._medians.extend(medians.tolist())
        self.lengths: dict[int, float] = {}
        self.sizes: dict[int, dict[str, float]] = {}
        self._members: tuple[int, ...] = ()

    def begin(self, received: Weights) -> None:
        """Starts a round from the weights that its clients are sent."""
        self._received = _floats(received)
        self._norm = length(self._received, self._received)
        self.lengths, self.sizes, self._members = {}, {}, ()

    def fault(self, update: Update, sizes: Mapping[str, float] | None = None) -> str | None:
        """Says that an update's change is too long to be believed, or None; takes note of it.

        Args:
            update: its weights are looked at.
            sizes: the largest number of each extra that is like other clients', by name.
        """
        moved = _length(update.weights, self._received)
        bad = None if math.isfinite(moved) else first_not_finite(update.weights.items())
        if bad is not None:
            return f"weight {bad!r} is not finite (NaN or infinite)"
        if self._medians:
            times = self._times * (OF_MEANS if update.members else 1)
            limit = times * statistics.median(self._medians)
            beside = f"{times:g} times the median change of the last rounds"
        else:
            scale = LARGEST_FIRST_MEAN if update.members else LARGEST_SCALE
            limit = scale * (self._norm + 1) if math.isfinite(self._times) else math.inf
            beside = "training can"
        if not moved <= limit:
            return f"it moved the weights by {moved:.3g}, more than {beside} ({limit:.3g})"
        self.lengths[update.client], self._members = moved, update.members
        self.sizes[update.client] = dict(sizes or {})
        return None

    def forget(self, client: int) -> None:
        """Leaves out of account what a client sent: it was refused for another reason."""
        self.lengths.pop(client, None)
        self.sizes.pop(client, None)

    def outliers(self) -> list[Refusal]:
        """Returns the clients of this round that are far beyond the others of it."""
        if len(self.lengths) < 3:
            return []
        return self._too_long() or self._too_large()

    def _too_long(self) -> list[Refusal]:
        limit = self._times * statistics.median(self.lengths.values())
        return [
            Refusal(
                client,
                f"update refused: it moved the weights by {length:.3g}, more than {self._times:g} "
                f"times the median of its round ({limit:.3g})",
            )
            for client, length in self.lengths.items()
            if length > limit > 0
        ]

    def _too_large(self) -> list[Refusal]:
        """Those whose extras are not of the size of the others'."""
        if math.isinf(self._times):
            return []
        found = dict[int, Refusal]()
        for name in sorted({name for sizes in self.sizes.values() for name in sizes}):
            own = {client: s[name] for client, s in self.sizes.items() if name in s}
            limit = ALIKE * statistics.median(own.values())
            for client, size in own.items():
                if len(own) >= 3 and size > limit > 0:
                    found[client] = Refusal(
                        client,
                        f"update refused: its {name!r} is up to {size:.3g}, more than {ALIKE:g} "
                        f"times the median of its round ({limit:.3g})",
                    )
        return list(found.values())

    def spoiled(self, round: int, fault: str) -> "RoundSpoiled | RunError":
        """Returns what to raise when the fused model is unfit: names who moved it farthest."""
        if not self.lengths:
            return RunError(f"round {round}: {fault}")
        if self._members:
            return RunError(
                f"round {round}: {fault}; it is the mean of {clients_said(self._members)}, and "
                "whose update made it so cannot be told"
            )
        farthest = max(self.lengths, key=self.lengths.__getitem__)
        reason = (
            f"update refused: {fault}, and of all clients it moved the weights farthest "
            f"({self.lengths[farthest]:.3g})"
        )
        return RoundSpoiled(round, [Refusal(farthest, reason)])

    def end(self) -> Tensor:
        """Ends a round that counts; returns the medians to remember."""
        moved = [length for length in self.lengths.values() if length > 0]
        if moved:
            self._medians.append(statistics.median(moved))
        return torch.tensor(list(self._medians), dtype=torch.float64)


def _floats(weights: Weights) -> Weights:
    return {name: t.detach() for name, t in weights.items() if t.is_floating_point()}


def _length(weights: Weights, received: Weights) -> float:
    """Returns how far the weights are from those received.

    Nine digits: a float64 sum over another memory order differs in its last bits, and what is
    remembered must not depend on the transport.
    """
    found = distance(weights, received, [name for name in received if name in weights])
    return float(f"{found:.9g}")
