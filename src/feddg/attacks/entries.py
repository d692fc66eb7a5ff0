"""What a method sends beside weights, found by what it declares: the entries an attack can read.

An *entry* is one declared thing of a message, named as in the ledger (``describe/style``). What a
client sends under it becomes *rows*, one vector each: an entry whose first length only the sender
knows (a number of styles, of images, of classes held) has a row for each, every other has one. The
statistics of batch normalisation travel among the weights; they are an entry of their own,
``update/statistics``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from feddg.errors import ExperimentError, nearest
from feddg.messages import Known, Message, Sent, Update, Weights
from feddg.methods.base import Method, local_names
from feddg.models.network import Network
from feddg.models.normalization import statistics_names
from feddg.rng import stream

LONGEST = 16_384
"""Numbers of a row that are kept as they are; a longer one is hashed into so many."""
STATISTICS = "update/statistics"


@dataclass(frozen=True)
class SentEntry:
    """One thing that leaves a client beside its weights.

    Attributes:
        key: ``purpose/name`` as in the ledger; the name may end in ``*``.
        what: what it is, in the method's words.
        has_rows: whether the first length counts rows.
        names: names of the weights that are it; none for an entry of its own.
    """

    key: str
    what: str
    has_rows: bool = False
    names: tuple[str, ...] = ()

    @property
    def purpose(self) -> str:
        """The message it is part of: ``describe`` or ``update``."""
        return self.key.partition("/")[0]

    @property
    def name(self) -> str:
        """Its name in the message."""
        return self.key.partition("/")[2]

    def rows(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Returns what a message says under the entry, ``(rows, length)`` float32, or None.

        Args:
            tensors: of the message, by name; of the weights for statistics.
        """
        found = [
            tensors[name]
            for name in (self.names or sorted(n for n in tensors if fnmatchcase(n, self.name)))
            if name in tensors
        ]
        if not found:
            return None
        vectors = [
            tensor.detach().float().cpu().flatten(1 if self.has_rows else 0) for tensor in found
        ]
        joined = torch.cat(vectors, dim=-1)
        return hashed(joined if self.has_rows else joined[None]).clone()

    def of_update(self, update: Update) -> Tensor | None:
        """Returns the rows of an update."""
        return self.rows(update.weights if self.names else update.extras.tensors)

    def received(self, agreed: Message | None, extras: Message, weights: Weights) -> Tensor | None:
        """Returns the rows of the same name in what the server sends to clients, or None.

        Args:
            agreed: what the setup agreed on.
            extras: of a broadcast.
            weights: of a broadcast.
        """
        if self.names:
            return self.rows(weights)
        return self.rows((agreed.tensors if agreed else {}) | extras.tensors)


def hashed(rows: Tensor) -> Tensor:
    """Returns rows of at most ``LONGEST`` numbers: longer ones as a count sketch.

    Every number is added, with a random sign, to one of the places (Charikar et al., "Finding
    frequent items in data streams", ICALP 2002): inner products stay what they are on average.
    """
    length = rows.shape[1]
    if length <= LONGEST:
        return rows
    chance = stream(0, "sketch", length)
    places = torch.randint(LONGEST, (length,), generator=chance)
    signs = torch.randint(2, (length,), generator=chance) * 2.0 - 1
    return torch.zeros(len(rows), LONGEST).index_add_(1, places, rows * signs)


def entries_of(method: Method, network: Network) -> dict[str, SentEntry]:
    """Returns everything but weights that leaves a client under a method, by key.

    Numbers are left out, and so are class ids. The statistics of normalisation belong to it where
    the method treats them apart from the weights (FedBN, SiloBN, FedIG).
    """
    known = Known(network.classes, 0, network.features_dimension)
    found = {
        key: SentEntry(key, form.what, _has_rows(form, method, known))
        for key, form in method.sends.items()
        if key not in Method.sends and _is_attackable(key, form, method, known)
    }
    statistics = local_names(method, network) & statistics_names(network)
    return found | (_statistics(network) if statistics else {})


def chosen_entries(method: Method, network: Network, wanted: str | None) -> dict[str, SentEntry]:
    """Returns the entries to attack: all of the method's, or the one asked for.

    Args:
        method: the run's.
        network: what it trains.
        wanted: an entry's key or its name; ``statistics`` for those of normalisation under any
            method that trains them; None for all.

    Raises:
        ExperimentError: the method sends nothing of the kind; says what it does send.
    """
    entries = entries_of(method, network)
    statistics = _statistics(network)
    if wanted in ("statistics", STATISTICS) and statistics:
        return statistics
    if not entries:
        further = (
            ", `--entry statistics` the normalisation statistics among them" if statistics else ""
        )
        raise ExperimentError(
            f"{method.name} shares nothing but weights (and counts): there is no style, spectrum "
            "or prototype to attack. `--kind update` and `--kind membership` attack the weights"
            f"{further}"
        )
    if wanted is None:
        return entries
    found = {key: entry for key, entry in entries.items() if wanted in (key, entry.name)}
    if not found:
        raise ExperimentError(
            f"{method.name} sends no {wanted!r}{nearest(wanted, entries)}; it sends: "
            f"{', '.join(entries)}"
        )
    return found


def _statistics(network: Network) -> dict[str, SentEntry]:
    state = network.state_dict()
    names = sorted(n for n in statistics_names(network) if state[n].is_floating_point())
    if not names:
        return {}
    what = "the running means and variances of its normalisation layers, among the weights"
    return {STATISTICS: SentEntry(STATISTICS, what, names=tuple(names))}


def _is_attackable(key: str, form: Sent, method: Method, known: Known) -> bool:
    if form.when is not None and not form.when(method):
        return False
    if not form.dtype.is_floating_point or not key.startswith(("describe/", "update/")):
        return False
    return form.entry_of is not None or bool(_shape(form, method, known))


def _has_rows(form: Sent, method: Method, known: Known) -> bool:
    shape = _shape(form, method, known)
    first = shape[0] if shape else 0
    return isinstance(first, str) and known.dimension(first) is None


def _shape(form: Sent, method: Method, known: Known) -> tuple[int | str, ...]:
    shape = form.shape(method, known) if callable(form.shape) else form.shape
    return shape or ()
