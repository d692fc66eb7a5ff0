"""Checks of clients' messages at the server, for any transport."""

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from feddg.clients.client import steps_of_round
from feddg.clients.optim import in_round
from feddg.errors import ClientError, Diverged
from feddg.messages import (
    Check,
    EntrySchema,
    Message,
    Refusal,
    SchemaContext,
    Update,
    Weights,
    differences,
    first_fault,
    first_not_finite,
    found,
    plain_text,
)
from feddg.methods.base import FoundOut, Method, Round, RoundHook, State, has_global_model
from feddg.models.network import Network
from feddg.models.normalization import never_negative_names
from feddg.privacy.building import NO_DEFENCES, Defences
from feddg.privacy.robust import length, moved
from feddg.settings import ExperimentSettings

CHANGES = "server/changes"
"""Name of the stored medians in the state's extras."""
REMEMBERED = 20
"""Number of rounds whose median change is stored."""
LARGEST_FIRST = 1e4
"""Largest change if no round is stored yet, as a multiple of the weights' norm (at least 1)."""
LARGEST_FIRST_MEAN = 100.0
"""The same for a mean of unseen updates, in which one update has little weight."""
OF_MEANS = 0.1
"""Limit for a mean of unseen updates, as a share of the limit for one update, both relative to the
median change.
"""
MOST_BATCHES = 2**32
"""Most batches a client can see in a round. A counter is compared with the one that was sent: with
an absolute limit, one site could send the limit and get all others refused, who count on from
there.
"""
LARGEST_ROUNDING = 1e-6
"""How far below 0 rounding of a masked sum may move a variance; far less than the epsilon that
normalisation adds.
"""


class ChangeSizes(RoundHook):
    """Refuses updates whose change is many times longer than those of earlier rounds.

    In the first round there is only a very large limit; when all updates are in, they are compared
    with each other. Otherwise one client could move the model so far that the honest changes of
    round 2 would be refused. This is also the only check that weights are finite.

    Args:
        times: largest ratio of a change to the median; None for no limit.
        heads: number of rounds that train only heads; changes after them have other lengths.
        lr: the clients' learning rate, for the message; None if unknown.
        sums: entries that no step moves, and whose size the method judges.
    """

    def __init__(
        self,
        times: float | None,
        heads: int = 0,
        lr: float | None = None,
        sums: Collection[str] = (),
    ) -> None:
        self._times, self._heads, self._lr, self._sums = times, heads, lr, sums

    def received(self, update: Update, round: Round) -> Update:
        """Stores the length of the change; refuses the update if it is implausibly long."""
        sent, medians = round.state.weights, _medians(round.state)
        far = moved(update.weights, sent) if update.moved is None else update.moved
        # Of an honest client, a rate is the likely reason at first; later it trained with it.
        rate = "" if medians or self._lr is None else f"; lower train.lr (now {self._lr:g})"
        if not math.isfinite(far):
            bad = first_not_finite(update.weights)
            if bad is not None:
                raise Diverged(f"weight {bad!r} is not finite (NaN or infinite){rate}")
        if self._times is not None and medians:
            times = self._times * (OF_MEANS if update.members else 1)
            limit = times * statistics.median(medians)
            beside = f"{times:g} times the median change of the last rounds"
        elif self._times is not None:
            size = round.scratch[ChangeSizes].get("sent")
            if size is None:  # the same for every update of the round
                size = length(sent, [n for n, t in sent.items() if t.is_floating_point()])
                round.scratch[ChangeSizes]["sent"] = size
            scale = LARGEST_FIRST_MEAN if update.members else LARGEST_FIRST
            limit, beside = scale * (size + 1), "training can"
        else:
            limit, beside = math.inf, ""
        summed = self._sums and math.isfinite(far)
        if not far <= limit and not (summed and moved(update.weights, sent, self._sums) <= limit):
            raise Diverged(
                f"it moved the weights by {far:.3g}, more than {beside} ({limit:.3g}){rate}"
            )
        round.scratch[self][str(update.client)] = far
        return update

    def refused(self, refusal: Refusal, round: Round) -> None:
        """Ignores the change of a client that was refused for another reason."""
        round.scratch[self].pop(str(refusal.client), None)

    def collected(self, updates: Iterator[Update], round: Round) -> Iterator[Update]:
        """In the first round: finds clients whose change is far longer than the others'.

        Raises:
            FoundOut: names these clients.
        """
        yield from updates
        lengths = round.scratch[self]
        if self._times is None or _medians(round.state) or len(lengths) < 3:
            return
        limit = self._times * statistics.median(lengths.values())
        refusals = [
            Refusal(
                int(client),
                f"update refused: it moved the weights by {moved:.3g}, more than {self._times:g} "
                f"times the median of the first round ({limit:.3g})",
            )
            for client, moved in lengths.items()
            if moved > limit > 0
        ]
        if refusals:
            raise FoundOut(refusals)

    def completed(self, state: State, round: Round) -> State:
        """Stores the median of the used changes.

        Nothing is stored if there is no limit: with privacy noise, an exact median in a checkpoint
        would leak.
        """
        if self._times is None:
            state.extras.pop(CHANGES, None)
            return state
        moved = [length for length in round.scratch[self].values() if length > 0]
        medians = _medians(round.state) + ([statistics.median(moved)] if moved else [])
        state.extras[CHANGES] = torch.tensor(medians[-REMEMBERED:], dtype=torch.float64)
        if round.number == self._heads:
            del state.extras[CHANGES]
        return state


def _medians(state: State) -> list[float]:
    lengths = state.extras.get(CHANGES)
    return [] if lengths is None else lengths.tolist()


class MessageChecks(RoundHook):
    """Checks clients' messages against their schemas.

    Args:
        method: the method whose messages are checked.
        network: the network it trains.
        clients: number of clients.
        settings: of the experiment: those of training bound the gradients a client can report.
        defences: what updates pass through, which add to messages.
        registered: number of images each client registered with, if it did.
        classifies: whether the task is classification.
    """

    def __init__(
        self,
        method: Method,
        network: Network,
        clients: int,
        settings: ExperimentSettings,
        *,
        defences: Defences = NO_DEFENCES,
        registered: Mapping[int, int] = MappingProxyType({}),
        classifies: bool = True,
    ) -> None:
        self._method, self._train = method, settings.train
        state = network.state_dict() if has_global_model(method, network) else {}
        # Shapes and dtypes never change, and cost no memory on the meta device.
        self._weights = {name: tensor.to("meta") for name, tensor in state.items()}
        shapes = {name: tensor.shape for name, tensor in self._weights.items()}
        known = (network.classes, clients, network.features_dimension, settings.data.image_size)
        noise = defences.style_noise
        self._context = SchemaContext(*known, shapes, noise=noise, classifies=classifies)
        self._never_negative = sorted(never_negative_names(network) & self._weights.keys())
        added = {key: schema for key, schema in method.sends.items() if key not in Method.sends}
        self._schemas: dict[str, dict[str, EntrySchema]] = {}
        for key, schema in (added | defences.sends).items():
            if schema.sent_by(method):
                purpose, _, name = key.partition("/")
                self._schemas.setdefault(purpose, {})[name] = schema
        self._registered = registered

    def received(self, update: Update, round: Round) -> Update:
        """Refuses an update that does not match the schema."""
        fault = self.update_fault(update, round.state)
        if fault is not None:
            raise ClientError(fault)
        return update

    def update_fault(self, update: Update, state: State) -> str | None:
        """Returns what is wrong with an update, or None if it may be used.

        Finiteness of the weights is checked by :class:`ChangeSizes`.

        Args:
            update: the update of one client, or a mean of several computed by the server.
            state: the server's state from which the client started.
        """
        count, registered = update.examples, self._registered.get(update.client)
        if not update.members and registered is not None and count != registered:
            return f"reports {plain_text(count, 40)} examples, but registered with {registered}"
        fault = layout_fault(update.weights, self._weights)
        if fault:
            return fault
        checks = [self._statistics_check(update, state.weights)]
        if not update.members and ("update" in self._schemas or update.extras):
            context = self._context_of(update, state)
            checks += self._message_checks("update", update.extras, context)
        return first_fault(checks)

    def message_fault(
        self, purpose: str, message: Message, client: int | None = None
    ) -> str | None:
        """Returns what is wrong with a message or an update's extras, or None.

        Args:
            purpose: as in the ledger: ``statistics``, ``update``, ``answer:...``.
            message: its content.
            client: the id of its client, if known.
        """
        images = None if client is None else self._registered.get(client)
        context = replace(self._context, images=images)
        return first_fault(self._message_checks(purpose, message, context))

    def _context_of(self, update: Update, state: State) -> SchemaContext:
        """Returns what is known of an update's sender and round."""
        planned = {"rounds": state.rounds or self._train.rounds}  # see Federation.fit
        train = in_round(self._train.model_copy(update=planned), state.round + 1)
        walked = train.lr * steps_of_round(train, update.examples)  # at least

        def gradients(names: Iterable[str]) -> list[Tensor]:
            moves = [*differences(update.weights, state.weights, names).values()]
            torch._foreach_abs_(moves)
            torch._foreach_div_(moves, walked)
            return moves

        return replace(
            self._context,
            images=self._registered.get(update.client),
            server_extras=state.extras,
            whole=state.round >= self._train.head_rounds,
            gradients=gradients,
        )

    def _statistics_check(self, update: Update, sent: Weights) -> Check:
        """Returns what finds an invalid variance or counter.

        A value below 0 could make the mean unusable for every network, and then honest clients
        would be refused.
        """
        lowest = -LARGEST_ROUNDING if update.members else 0.0
        here = {name: update.weights[name].detach() for name in self._never_negative}
        # What is frozen is the tensor that was sent.
        values = {n: t for n, t in here.items() if update.weights[n] is not sent.get(n)}
        counts = {name: t for name, t in values.items() if not t.is_floating_point()}
        variances = {n: t for n, t in values.items() if n not in counts and t.numel()}
        before = {name: sent[name] for name in counts if name in sent}
        figures = [*counts.values(), *before.values()]
        if variances:  # of all layers together: a device waits for each launch
            figures += torch._foreach_max(torch._foreach_neg([*variances.values()]))

        def judge(numbers: list[float]) -> str | None:
            given = iter(numbers)
            least = {name: next(given) for name in counts}
            known = {name: next(given) for name in before}
            least |= {name: -next(given) for name in variances}
            for name, number in least.items():
                held = f"weight {name!r} holds {number:g}"
                if number < lowest:
                    return f"{held}; a variance or a counter is never below 0"
                if name in counts and number > known.get(name, 0.0) + MOST_BATCHES:
                    return f"{held}, more batches than there can have been"
            return None

        return figures, judge

    def _message_checks(
        self, purpose: str, message: Message, context: SchemaContext
    ) -> Iterator[Check]:
        declared = self._schemas.get(purpose, {})
        bound: dict[str, int] = {}
        met: set[str] = set()
        together: dict[str, Weights] = {}
        # What the server holds under the same name, it must get of every client.
        extras = context.server_extras if context.whole else {}
        expected = {name for name in extras if any(fnmatchcase(name, key) for key in declared)}
        for name, value in (*message.tensors.items(), *message.scalars.items()):
            key = next((key for key in declared if fnmatchcase(name, key)), None)
            if key is None:
                yield found(f"has an undeclared entry {plain_text(name, 60)!r}")
                return
            met.add(key)
            schema = declared[key]
            if isinstance(value, Tensor):
                figures, judge = schema.tensor_check(self._method, context, name, value, bound)
            else:
                figures, judge = found(schema.number_fault(self._method, context, name, value))
            yield figures, partial(_named, plain_text(name, 60), judge)
            expected.discard(name)
            if schema.beyond and isinstance(value, Tensor):
                if judge([]) is not None:
                    return
                together.setdefault(key, {})[name] = value.detach()
        for key, tensors in together.items():
            yield declared[key].possible(self._method, context, tensors)
        missing = sorted((declared.keys() - met) | expected)
        yield found(f"lacks {missing[0]!r}" if missing else None)


def _named(
    name: str, judge: Callable[[list[float]], str | None], figures: list[float]
) -> str | None:
    fault = judge(figures)
    return None if fault is None else f"its {name!r} {fault}"


def layout_fault(weights: Weights, expected: Mapping[str, Tensor]) -> str | None:
    """Returns how names, shapes or dtypes of weights differ from ``expected``, or None."""
    missing, unknown = expected.keys() - weights.keys(), weights.keys() - expected.keys()
    if missing:
        return f"its weights lack {sorted(missing)[:3]}"
    if unknown:
        return f"its weights have the unknown {[plain_text(n, 60) for n in sorted(unknown)[:3]]}"
    for name, tensor in weights.items():
        want = expected[name]
        if tensor.shape != want.shape or tensor.dtype != want.dtype:
            got = f"{tuple(tensor.shape)} {tensor.dtype}"
            return f"weight {name!r} is {got}, expected {tuple(want.shape)} {want.dtype}"
    return None
