"""Checks of a method of one's own: what feddg demands of its own.

A method that breaks one of these rules trains, and gives numbers that cannot be trusted: another
run, another order of clients, a resumed run or a GPU would give others.
"""

import copy
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from types import FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

import numpy
import torch
from torch import Tensor, nn
from torch.utils import backend_registration

from feddg.clients import together
from feddg.diagnostics import emit, note
from feddg.errors import ExperimentError, FeddgError, in_words
from feddg.federation.federation import Clients
from feddg.federation.server import Hooks
from feddg.federation.validation import layout_fault
from feddg.messages import Broadcast, Message, Refusal, Update, Weights, copied, first_not_finite
from feddg.methods.base import Method, Round, RoundHook, State, has_global_model
from feddg.methods.baselines import FedProx
from feddg.methods.composition import compose
from feddg.models.backbones import build_network
from feddg.models.convolutions import use_plain_convolutions
from feddg.privacy.robust import moved
from feddg.simple import Federation
from feddg.testing.device import second_device, traffic
from feddg.text import counted

CLASSES, SIDE, ROUNDS, BATCH = 3, 16, 2, 4
ROUNDING = 1e-3
"""How far another order of updates may move the aggregate, as a share of a round's change."""
HAS_SECOND_DEVICE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
SIZES = (6, 5, 4)
"""Images of the clients: full batches, and batches that are not full."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with a method.

    Attributes:
        check: the check that found it.
        what: what happened, and where.
        why: why it matters.
    """

    check: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.check}: {self.what}. {self.why}"


class FaultsFound(AssertionError):
    """What was checked breaks rules.

    Attributes:
        faults: which ones.
    """

    def __init__(self, name: str, faults: list[Fault]) -> None:
        lines = [f"{name} has {counted(len(faults), 'fault')}:", *map(str, faults)]
        super().__init__("\n".join(lines))
        self.faults = faults


class MethodFault(FaultsFound):
    """A method breaks a rule."""


# What is seen of a method while it trains, and what is kept from it.


@contextmanager
def quietly() -> Iterator[list[BaseException]]:
    """Holds back the package's warnings inside the block; yields the errors that came with them."""
    errors: list[BaseException] = []

    def hold(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None:
            errors.append(record.exc_info[1])
        return record.levelno < logging.WARNING

    log = logging.getLogger("feddg")
    log.filters.insert(0, hold)  # of two, the inner one is asked first
    try:
        yield errors
    finally:
        log.removeFilter(hold)


@contextmanager
def other_global_numbers(seed: int) -> Iterator[None]:
    """Sets all global generators inside the block, and puts them back."""
    before = random.getstate(), numpy.random.get_state()  # noqa: NPY002 - what others may use
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        numpy.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            numpy.random.set_state(before[1])  # noqa: NPY002


@contextmanager
def as_they_were() -> Iterator[None]:
    """Puts PyTorch's settings back that a method may have changed inside the block."""
    count, dtype = torch.get_num_threads(), torch.get_default_dtype()
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            yield
        finally:
            torch.set_num_threads(count)
            torch.set_default_dtype(dtype)


def global_numbers() -> dict[str, object]:
    """Returns what all parts of a program share: the global generators, and PyTorch's settings."""
    return {
        "Python's global random numbers": random.getstate(),
        "numpy's global random numbers": repr(numpy.random.get_state()),  # noqa: NPY002
        "PyTorch's global random numbers": content(torch.get_rng_state()),
        "PyTorch's default dtype": torch.get_default_dtype(),
        "PyTorch's number of threads": torch.get_num_threads(),
        "PyTorch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "PyTorch's gradient mode": torch.is_grad_enabled(),
    }


def content(value: object, depth: int = 4) -> object:
    """Returns what tells the content of an object, for comparisons."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return tuple(value.shape), value.dtype, flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, numpy.ndarray):
        return value.shape, value.dtype, value.tobytes()
    if isinstance(value, torch.Generator):
        return content(value.get_state())
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, nn.Module):
        return content(value.state_dict())
    if depth and isinstance(value, dict):
        return [(repr(name), content(item, depth - 1)) for name, item in value.items()]
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [content(item, depth - 1) for item in value]
    plain = isinstance(value, type | ModuleType | FunctionType) or not hasattr(value, "__dict__")
    return repr(value) if plain or not depth else (repr(value), content(vars(value), depth - 1))


def changed(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """Returns the names of what differs, sorted."""
    return sorted(n for n in before | after if before.get(n, ...) != after.get(n, ...))


class Watch(RoundHook):
    """Knows what a round was given, which nobody may change.

    Attributes:
        found: what was changed first, or None.
        refusals: why clients' updates were refused.
    """

    def __init__(self) -> None:
        self.refusals: list[str] = []
        self.found: str | None = None
        self._given: dict[str, tuple[Weights, Weights]] = {}

    def _give(self, given: dict[str, Weights]) -> None:
        self._given |= {name: (tensors, copied(tensors)) for name, tensors in given.items()}

    def start(self, state: State, labels: Weights, memories: dict[int, Weights]) -> None:
        """Begins a round of a state, of clients' labels, and of what they remember."""
        context = {} if state.context is None else state.context.tensors
        self._given.clear()
        self._give({"state.weights": state.weights, "state.extras": state.extras})
        self._give({"client.context": context, "client.examples.labels": labels})
        self._give({f"client {id}'s memory": dict(kept) for id, kept in memories.items()})

    def changed(self) -> str | None:
        """Returns what is not as it was given, or None."""
        for what, (now, before) in self._given.items():
            name = differs(now, before)
            if name is not None:
                return f"{what}[{name}] is changed in place"
        return None

    def broadcast(self, broadcast: Broadcast, round: Round) -> Broadcast:
        """See :class:`RoundHook`."""
        for name, tensor in broadcast.weights.items():
            kept = round.state.weights.get(name)
            if kept is not None and kept.dtype != tensor.dtype and self.found is None:
                self.found = f"the broadcast holds {name!r} as {tensor.dtype}, not {kept.dtype}"
        extras = broadcast.extras.tensors
        self._give({"client.received": broadcast.weights, "client.extras": extras})
        return broadcast

    def refused(self, refusal: Refusal, round: Round) -> None:
        """See :class:`RoundHook`."""
        self.refusals.append(f"client {refusal.client}: {refusal.reason}")

    def completed(self, state: State, round: Round) -> State:
        """See :class:`RoundHook`."""
        self.found = self.found or self.changed()
        return state


def differs(one: Weights, other: Weights) -> str | None:
    """Returns the first entry that differs, or None."""
    if one.keys() != other.keys():
        return f"the entries {sorted(one.keys() ^ other.keys())[:3]}"
    return next((repr(n) for n, t in one.items() if not torch.equal(t.cpu(), other[n].cpu())), None)


# The federation that a method trains in.


class _Images(list[Any]):
    """A client's images; every third is of the first client's domain, the others of its own."""

    domains: list[int]


class _Small(Federation):
    """A federation of noise whose brightest channel is the class."""

    def __init__(
        self,
        method: Method,
        sizes: tuple[int, ...] = SIZES,
        steps: int = 2,
        classes: int = CLASSES,
        **fields: Any,
    ) -> None:
        rng = numpy.random.default_rng(0)
        clients = []
        for id, count in enumerate(sizes):
            labels = numpy.arange(count) % classes
            images = rng.integers(0, 120, (count, 3, SIDE, SIDE))
            images[numpy.arange(count), labels] += 100
            pixels = torch.from_numpy(images.astype(numpy.uint8))
            clients.append(_Images(zip(pixels, labels.tolist())))
            clients[-1].domains = [0 if image % 3 == 1 else id for image in range(count)]
        network = build_network("cnn", CLASSES, weights=None, image_size=SIDE)
        chosen: dict[str, Any] = {"batch_size": BATCH, "local_steps": steps, "rounds": ROUNDS}
        chosen |= {"averaging": "none", "precision": "float32"}
        super().__init__(clients, network, method, **(chosen | fields))
        for worker in self.workers:  # a CPU's own have other last bits than a device's
            use_plain_convolutions(worker.network)
        self.watch = Watch()
        self.server.hooks = Hooks([*self.server.hooks.all, self.watch])

    def trained(self, rounds: int = ROUNDS) -> Weights:
        """Returns the global weights after some more rounds."""
        if not self.server.state.round:
            self.server.setup()
        labels = {str(id): examples.labels for id, examples in enumerate(self.clients)}
        for _ in range(rounds):
            self.watch.start(self.server.state, labels, self.transport.memories)
            self.server.round()
        return self.server.state.weights

    def update(self, clients: list[int]) -> Weights:
        """Returns what the last of some clients sends in the first round."""
        self.server.setup()
        broadcast = self.method.broadcast(self.server.state)
        *_, last = self.transport.train(clients, broadcast)
        if isinstance(last, Refusal):
            raise FeddgError(last.reason)
        return last.keep().weights | last.extras.tensors


Make = Callable[[], Method]
Found = tuple[str, str] | None
CHECKS: list[Callable[[Make], Found]] = []
"""Every check, in order; each returns what is wrong and why it matters, or None.

What is wrong once shows in many ways, so causes come before what they lead to.
"""


def _check(check: Callable[[Make], Found]) -> Callable[[Make], Found]:
    CHECKS.append(check)
    return check


def _check_on_device(check: Callable[[Make], Found]) -> Callable[[Make], Found]:
    return _check(check) if HAS_SECOND_DEVICE else check


@dataclass
class _Watched:
    """A short run, and what was seen of it."""

    small: _Small
    kept: list[str]
    shared: list[str]
    errors: list[BaseException]
    error: Exception | None
    weights: Weights


def _kept(small: _Small) -> dict[str, object]:
    """Returns the attributes of the method and its class."""
    values: dict[str, object] = {}
    for part in (*reversed(type(small.method).__mro__[:-1]), small.method):
        values |= vars(part)
    return {n: content(v) for n, v in values.items() if not n.startswith("__") and n != "settings"}


@lru_cache(maxsize=1)
def _trained(make: Make) -> _Watched:
    """Trains once for several checks."""
    with quietly() as errors, other_global_numbers(1):
        small, error = _Small(make()), None
        kept, shared = _kept(small), global_numbers()
        try:
            small.trained()
        except Exception as raised:
            error = raised
        changes = changed(kept, _kept(small)), changed(shared, global_numbers())
    return _Watched(small, *changes, errors, error, small.server.state.weights)


@_check
def messages_are_declared(make: Make) -> Found:
    """What clients send must be declared, finite, and a message; weights keep their form."""
    seen = _trained(make)
    small, refusals = seen.small, seen.small.watch.refusals
    if seen.error is not None and not isinstance(seen.error, FeddgError):
        raise seen.error
    if refusals or seen.error is not None:
        reason = refusals[0] if refusals else str(seen.error)
        return "; ".join([reason, *map(in_words, seen.errors[:1])]), (
            "The server refuses what is not declared in `sends`, or out of range"
        )
    fault = layout_fault(seen.weights, small.network.state_dict())
    if fault is not None:
        return (
            f"after {ROUNDS} rounds of aggregate {fault}",
            "The next client would train with other numbers than were aggregated",
        )
    bad = first_not_finite(seen.weights)
    if bad is not None:
        return f"the global weight {bad!r} is not finite after {ROUNDS} rounds", "It is lost"
    extras = Message(small.server.state.extras)
    if differs(Message.from_bytes(extras.to_bytes()).tensors, extras.tensors):
        return "state.extras changes when it is stored", "A checkpoint must hold what it was given"
    return None


@_check
def nothing_is_kept_on_self(make: Make) -> Found:
    """A method object has no state of clients or rounds."""
    seen = _trained(make)
    if not seen.kept:
        return None
    return (
        f"training changed {', '.join(f'self.{name}' for name in seen.kept[:3])}",
        "Clients call a method from several threads and processes, and a resumed run begins "
        "with a new object: keep it in client.scratch, client.memory or state.extras",
    )


@_check
def what_all_share_stays(make: Make) -> Found:
    """No global generator is drawn from or seeded, and no setting of PyTorch changed."""
    seen = _trained(make)
    if not seen.shared:
        return None
    return (
        f"training changed {', '.join(seen.shared[:3])}",
        "Draw from client.stream(...), never from a global generator, and seed none: other parts "
        "of the program use them, too, and nobody could repeat the numbers",
    )


@_check
def what_is_sent_stays(make: Make) -> Found:
    """Weights, extras, context and labels are not changed in place by whoever is given them."""
    watch = _trained(make).small.watch
    fault = watch.found or watch.changed()
    if fault is None:
        return None
    return (
        fault,
        "A round may fail half-way and be done again, and other clients get the same tensors: put "
        "new ones into the state, and give what is sent the type of the network",
    )


@_check
def every_update_counts_once(make: Make) -> Found:
    """The aggregate takes every update once, in any order, and none after the next is drawn."""
    small = _Small(make())
    method = small.method
    if not has_global_model(method, small.network):
        return None
    small.server.setup()
    state, drawn = small.server.state, list[int]()
    replies = small.transport.train(range(len(SIZES)), method.broadcast(state))
    updates = [reply.keep() for reply in replies if isinstance(reply, Update)]

    def aggregated(updates: Sequence[Update], spoilt: bool = False) -> Weights:
        def stream() -> Iterator[Update]:
            for update in updates:
                given = update.keep()
                drawn.append(given.client)
                yield given
                for tensor in [*given.weights.values(), *given.extras.tensors.values()]:
                    if spoilt and tensor.is_floating_point():
                        tensor.fill_(math.nan)

        start = replace(state.next(), weights=copied(state.weights))
        return method.aggregate(start, stream()).weights

    why = "Every client has its share in the model, once"
    expected = aggregated(updates)
    if len(drawn) != len(updates):
        return f"aggregate draws {len(drawn)} of {len(updates)} updates", why
    if differs(expected, aggregated(updates, spoilt=True)):
        return "aggregate uses an update after the next one is drawn", (
            "Its tensors are the client's live weights by then: update.keep() copies them"
        )
    turned = aggregated(updates[::-1])
    if moved(turned, expected) > ROUNDING * moved(expected, state.weights):
        return "aggregate gives other weights when the same updates come in another order", why
    for equal in (updates[0].weights, state.weights):  # a server may go on where clients stood
        try:
            mean = aggregated([replace(update, weights=equal) for update in updates])
        except Exception:  # it knows that no client would send this
            return None
        for name in updates[0].weights.keys() & state.weights.keys():  # or keep some of its own
            old = state.weights[name]
            step = moved({name: updates[0].weights[name]}, {name: old})
            if old.any() and step and moved({name: mean[name]}, equal) <= ROUNDING * step:
                return None
    return "aggregate gives other weights than all updates have, which are equal", why


def _unlike(one: Weights, other: Weights, what: str, why: str) -> Found:
    """Returns what is wrong where an entry differs, whose name stands in ``what`` for ``{}``."""
    differ = differs(one, other)
    return None if differ is None else (what.format(differ), why)


@_check
def twice_the_same(make: Make) -> Found:
    """The same experiment gives the same bits."""
    return _unlike(
        _trained(make).weights,
        _Small(make()).trained(),
        "a second run differs in {}",
        "Draw from client.stream(...), and keep nothing outside client.memory and state.extras: "
        "nobody could repeat it",
    )


@_check
def clients_in_any_order(make: Make) -> Found:
    """What a client sends does not depend on who trained before."""
    return _unlike(
        _Small(make()).update([0, 1, 2]),
        _Small(make()).update([2]),
        "client 2 sends another {} when clients 0 and 1 trained before it",
        "Workers deal clients out in any order, and sites do not know each other",
    )


@_check
def a_stopped_run_goes_on(make: Make) -> Found:
    """A checkpoint holds all that a run needs, of clients that rest, too."""
    whole, second = (_Small(make(), (6, 5, 4, 6), clients_per_round=2) for _ in range(2))
    whole.trained(1)
    second.server.state = copy.deepcopy(whole.server.state)
    second.transport.memories = {
        id: Message.from_bytes(Message(memory).to_bytes()).tensors
        for id, memory in whole.transport.memories.items()
    }
    expected = whole.trained(ROUNDS - 1)
    second.transport.hand_out(second.server.state.context)
    second.server.round()
    return _unlike(
        expected,
        second.server.state.weights,
        "a run that was stopped after round 1 and resumed differs in {}",
        "What lasts belongs into client.memory (tensors) or state.extras (tensors)",
    )


@_check
def a_network_changes_nothing(make: Make) -> Found:
    """Over Flower, in messages of bytes, a run has the same bits."""
    if find_spec("flwr") is None or find_spec("feddg.deploy") is None:
        emit(note("not-checked", "Not tried over a network: feddg[flower] is missing."))
        return None
    from feddg.deploy.nodes import NodesHere
    from feddg.deploy.server_app import transport_to_programs
    from feddg.deploy.transport import Policy

    names = [f"site_{id}" for id in range(len(SIZES))]
    for id, name in enumerate(names):
        setattr(_Programs, name, staticmethod(partial(_site, make, id)))
    with TemporaryDirectory() as cache:
        grid = NodesHere(
            {n: {"program": f"{__name__}:_Programs.{n}", "cache": cache} for n in names}
        )
        policy = Policy(len(names), wait=1, poll=0)
        transport = transport_to_programs(grid, names, "check", policy, keys=None)
        there = _Small(make(), transport=transport)
        expected, weights = _trained(make).weights, there.trained()
    if there.watch.refusals:
        return f"over Flower {there.watch.refusals[0]}", "Sites do not share a process"
    why = "What a client needs crosses in messages"
    return _unlike(expected, weights, "over Flower it differs in {}", why)


class _Programs:
    """The programs of the sites of a check, by the site's name."""


def _site(make: Make, id: int) -> Federation:
    """Returns what a site's program makes, anew for every message."""
    site = _Small(make())
    site.clients = Clients([site.clients[id]])
    return site


def _files_of(method: Method) -> set[str]:
    """Returns the files in which a method's class defines its hooks."""
    own = vars(type(method)).values()
    return {hook.__code__.co_filename for hook in own if isinstance(hook, FunctionType)}


@lru_cache(maxsize=1)
def _on_device(make: Make) -> tuple[Weights, Counter[str]]:
    """Trains on a device: returns the weights, and what a step waits for."""
    # Another number of images in a batch may round an output of the network otherwise.
    nobody_joins = patch.object(together, "images_at_once", return_value=0)
    with second_device() as name, nobody_joins:

        def seen(steps: int) -> tuple[Weights, Counter[str]]:
            small = _Small(make(), steps=steps, device=name)
            small.server.setup()
            with traffic(_files_of(small.method)) as seen:
                for _ in range(ROUNDS):
                    small.server.round()
            return small.server.state.weights, seen.waits

        _, short = seen(1)
        weights, long = seen(2)
    return weights, long - short


@_check_on_device
def a_device_need_not_wait(make: Make) -> Found:
    """Tensors are where they must be, and nothing waits for a device inside a step."""
    _, waits = _on_device(make)
    if not waits or make().waits:
        return None
    return (
        f"a step waits for the device: {', '.join(map(str, waits))}",
        "A GPU is idle while the host waits: no .item(), no masks, no .to(device) of what "
        "`draws` could have sent with the batch",
    )


@_check_on_device
def a_device_has_the_same_bits(make: Make) -> Found:
    """On a device that is not the CPU."""
    weights, _ = _on_device(make)
    why = "Draw on the CPU, the same for every device"
    return _unlike(_trained(make).weights, weights, "on a device it differs in {}", why)


@_check_on_device
def a_recorded_step_does_the_same(make: Make) -> Found:
    """On a device, a step that is recorded gives the same bits; says why none is."""
    with second_device() as name:
        plain, recorded = (
            _Small(make(), device=name, train={"graphs": graphs}) for graphs in (False, True)
        )
        expected, weights = plain.trained(2 * ROUNDS), recorded.trained(2 * ROUNDS)
    for why in recorded.worker.graphs.refused.values():
        emit(note("not-recorded", f"Its steps are not recorded: one {why}."))
    return _unlike(
        expected,
        weights,
        "with recorded steps it differs in {}",
        "A replay calls no Python: what a step brings or leaves must be tensors in "
        "client.scratch, or come from `draws`",
    )


@_check
def odd_clients_train_too(make: Make) -> Found:
    """Clients of one image, without a class or without images, and a lone client."""
    odd: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
        "clients of one image": ((1, 1, 5), {}),
        "a client without a class": ((2, 6), {}),
        "clients of one and the same class": ((4, 6), {"classes": 1}),
        "a client alone": ((6,), {}),
        "batches of one image": ((3, 2), {"batch_size": 1}),
    }
    for what, (sizes, fields) in odd.items():
        small = _Small(make(), sizes, steps=1, **fields)
        try:
            lost = first_not_finite(small.trained()) is not None
            faults = [*small.watch.refusals, *["weights are not finite"] * lost]
        except Exception as error:
            faults = [in_words(error)]
        if faults:
            return f"{what}: {faults[0]}", "Federations have such clients"
    return None


@_check
def settings_are_checked(make: Make) -> Found:
    """An unknown setting is refused, and every setting says what it is."""
    method = make()
    try:
        type(method)(no_such_setting=1)
    except ExperimentError:
        pass
    else:
        return "an unknown setting is taken", "A typing error would change nothing, silently"
    fields = type(method).Settings.model_fields.items()
    plain = [name for name, field in fields if not field.description]
    if plain:
        return f"setting {plain[0]!r} has no description", "`feddg methods` shows nothing of it"
    return None


@_check
def others_may_join_in(make: Make) -> Found:
    """It composes with another method, or says why not."""
    kind, given = type(make()), make().settings.model_dump(exclude_unset=True)
    try:
        both = compose((kind, FedProx)) if not issubclass(kind, FedProx) else kind
    except ExperimentError:
        return None  # one clear line
    try:
        _Small(both(**{**given, "mu": 0.5})).trained(1)
    except Exception as error:
        return f"with fedprox: {in_words(error)}", "Hooks call super() and add to it"
    return None


def check_method(
    method: type[Method] | Callable[[], Method],
    checks: Sequence[Callable[[Make], Found]] = CHECKS,
) -> None:
    """Checks a method: the same bits twice, in any order, resumed, on a device; and more.

    PyTorch has one thread meanwhile, whatever it has otherwise.

    Args:
        method: its class, or what makes an object with other settings.
        checks: which of ``CHECKS``.

    Raises:
        MethodFault: it breaks a rule; says which, where and why it matters. What shows in later
            checks may come of it, so these are not tried.
    """
    if checks is CHECKS:  # the class may be another than it was
        _trained.cache_clear()
        _on_device.cache_clear()
    if getattr(method, "gathers_images", False):
        text = "It trains where all images are: only its settings are checked."
        emit(note("not-checked", text))
        checks = [check for check in checks if check is settings_are_checked]
    with as_they_were(), quietly():
        torch.set_num_threads(1)
        for check in checks:
            try:
                found = check(method)
            except Exception as error:
                found = in_words(error), "It cannot be trained"
            if found is not None:
                name = getattr(method, "name", "") or getattr(method, "__qualname__", repr(method))
                fault = Fault(check.__name__.replace("_", " "), *found)
                raise MethodFault(name, [fault])
