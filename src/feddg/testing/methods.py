"""Checks of a method of one's own: what feddg demands of its own.

A method that breaks one of these rules trains, and gives numbers that cannot be trusted: another
run, another order of clients, a resumed run or a GPU would give others.
"""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import torch
from torch.utils import backend_registration

from feddg.diagnostics import Diagnostic, emit
from feddg.errors import ExperimentError, FeddgError
from feddg.federation.server import Hooks
from feddg.messages import Message, Refusal, Weights
from feddg.methods.base import Method, Round, RoundHook
from feddg.methods.baselines import FedProx
from feddg.methods.composition import compose
from feddg.models.backbones import build_network
from feddg.models.convolutions import use_plain_convolutions
from feddg.simple import Federation
from feddg.testing.device import Traffic, second_device, traffic

CLASSES, SIDE, ROUNDS, BATCH = 3, 16, 2, 4
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
        super().__init__("\n".join([f"{name} has {len(faults)} fault(s):", *map(str, faults)]))
        self.faults = faults


class MethodFault(FaultsFound):
    """A method breaks rules."""


class _Refused(RoundHook):
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def refused(self, refusal: Refusal, round: Round) -> None:
        self.reasons.append(f"client {refusal.client}: {refusal.reason}")


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
        for count in sizes:
            labels = numpy.arange(count) % classes
            images = rng.integers(0, 120, (count, 3, SIDE, SIDE))
            images[numpy.arange(count), labels] += 100
            pixels = torch.from_numpy(images.astype(numpy.uint8))
            clients.append(list(zip(pixels, labels.tolist())))
        network = build_network("cnn", CLASSES, weights=None, image_size=SIDE)
        chosen: dict[str, Any] = {"batch_size": BATCH, "local_steps": steps, "rounds": ROUNDS}
        chosen |= {"averaging": "none", "precision": "float32"}
        super().__init__(clients, network, method, **(chosen | fields))
        for worker in self.workers:  # a CPU's own have other last bits than a device's
            use_plain_convolutions(worker.network)
        self.seen = _Refused()
        self.server.hooks = Hooks([*self.server.hooks.all, self.seen])

    def trained(self, rounds: int = ROUNDS) -> Weights:
        """Returns the global weights after some more rounds."""
        if not self.server.state.round:
            self.server.setup()
        for _ in range(rounds):
            self.server.round()
        return self.server.state.weights

    def update(self, clients: list[int]) -> Weights:
        """Returns what the last of some clients sends in the first round."""
        self.server.setup()
        broadcast = self.method.broadcast(self.server.state)
        *_, last = self.transport.train(clients, broadcast)
        if isinstance(last, Refusal):
            raise FeddgError(last.reason)
        sent: Weights = last.keep().weights | last.extras.tensors
        return sent


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


def _differs(one: Weights, other: Weights) -> str | None:
    """Returns the first entry that differs, or None."""
    if one.keys() != other.keys():
        return f"the entries {sorted(one.keys() ^ other.keys())[:3]}"
    return next((repr(n) for n, t in one.items() if not torch.equal(t.cpu(), other[n].cpu())), None)


Make = Callable[[], Method]
Found = tuple[str, str] | None
CHECKS: list[Callable[[Make], Found]] = []
"""Each returns what is wrong and why it matters, or None."""


def _check(check: Callable[[Make], Found]) -> Callable[[Make], Found]:
    CHECKS.append(check)
    return check


@lru_cache(maxsize=1)
def _trained(make: Make) -> tuple[_Small, list[str], FeddgError | None]:
    """Trains once for several checks: returns what changed on the method, and the error, too."""
    method = make()
    small, error = _Small(method), None

    def kept() -> dict[str, str]:
        own = {**vars(type(method)), **vars(method)}
        return {n: repr(v) for n, v in own.items() if not n.startswith("__") and n != "settings"}

    before = kept()
    try:
        with other_global_numbers(1):
            small.trained()
    except FeddgError as raised:
        error = raised
    after = kept()
    return small, sorted(n for n in before | after if before.get(n) != after.get(n)), error


def _weights(make: Make) -> Weights:
    small, _, error = _trained(make)
    if error is not None:
        raise error
    return small.server.state.weights


@_check
def messages_are_declared(make: Make) -> Found:
    """What clients send must be declared, finite, and a message."""
    small, _, error = _trained(make)
    weights = small.server.state.weights
    if error is not None:
        reasons = "; ".join(small.seen.reasons[:1]) or str(error)
        return reasons, "The server refuses what is not declared in `sends`, or out of range"
    if small.seen.reasons:
        return small.seen.reasons[0], "The server goes on without this client"
    bad = next((n for n, t in weights.items() if not t.double().isfinite().all()), None)
    if bad is not None:
        return f"the global weight {bad!r} is not finite after {ROUNDS} rounds", "It is lost"
    extras = Message(small.server.state.extras)
    if _differs(Message.from_bytes(extras.to_bytes()).tensors, extras.tensors):
        return "state.extras changes when it is stored", "A checkpoint must hold what it was given"
    return None


@_check
def nothing_is_kept_on_self(make: Make) -> Found:
    """A method object has no state of clients or rounds."""
    _, changed, _ = _trained(make)
    if changed:
        return (
            f"training changed {', '.join(f'self.{name}' for name in changed[:3])}",
            "Clients call a method from several threads and processes, and a resumed run begins "
            "with a new object: keep it in client.scratch, client.memory or state.extras",
        )
    return None


@_check
def twice_the_same(make: Make) -> Found:
    """The same experiment gives the same bits, whatever global generators hold."""
    with other_global_numbers(2):
        differs = _differs(_weights(make), _Small(make()).trained())
    if differs:
        return (
            f"a second run differs in {differs}",
            "Draw from client.stream(...), never from a global generator: nobody could repeat it",
        )
    return None


@_check
def clients_in_any_order(make: Make) -> Found:
    """What a client sends does not depend on who trained before."""
    method = make()
    differs = _differs(_Small(method).update([0, 1, 2]), _Small(make()).update([2]))
    if differs:
        return (
            f"client 2 sends another {differs} when clients 0 and 1 trained before it",
            "Workers deal clients out in any order, and sites do not know each other",
        )
    return None


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
    differs = _differs(expected, second.server.state.weights)
    if differs:
        return (
            f"a run that was stopped after round 1 and resumed differs in {differs}",
            "What lasts belongs into client.memory (tensors) or state.extras (tensors)",
        )
    return None


@_check
def a_network_changes_nothing(make: Make) -> Found:
    """Over Flower, in messages of bytes, a run has the same bits."""
    if find_spec("flwr") is None:
        emit(
            Diagnostic("not-checked", "note", "Not tried over a network: feddg[flower] is missing.")
        )
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
        transport = transport_to_programs(grid, names, "check", Policy(len(names), wait=1, poll=0))
        there = _Small(make(), transport=transport)
        differs = _differs(_weights(make), there.trained())
    if there.seen.reasons:
        return f"over Flower {there.seen.reasons[0]}", "Sites do not share a process"
    if differs:
        return f"over Flower it differs in {differs}", "What a client needs crosses in messages"
    return None


class _Programs:
    """The programs of the sites of a check, by the site's name."""


def _site(make: Make, id: int) -> Federation:
    """Returns what a site's program makes, anew for every message."""
    site = _Small(make())
    site.clients = [site.clients[id]]
    return site


@_check
def a_device_need_not_wait(make: Make) -> Found:
    """On a device that is not the CPU: same bits, and nothing waits inside a step."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return None
    expected = _weights(make)
    with second_device() as name:

        def counted(steps: int) -> tuple[Weights, Traffic]:
            small = _Small(make(), steps=steps, device=name)
            small.server.setup()
            with traffic() as seen:
                for _ in range(ROUNDS):
                    small.server.round()
            return small.server.state.weights, seen

        try:
            _, short = counted(1)
            found, long = counted(2)
        except (RuntimeError, TypeError) as error:
            text = str(error).splitlines()[0]
            return f"on a device: {text}", "Tensors of a step must be where client.device says"
    differs = _differs(expected, found)
    if differs:
        return f"on a device it differs in {differs}", "Draw on the CPU, the same for every device"
    waits = long.waits - short.waits
    if waits:
        return (
            f"a step waits for the device: {', '.join(map(str, waits))}",
            "A GPU is idle while the host waits: no .item(), no masks, no .to(device) of what "
            "`draws` could have sent with the batch",
        )
    return None


@_check
def a_recorded_step_does_the_same(make: Make) -> Found:
    """On a device, a step that is recorded gives the same bits; says why none is."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return None
    with second_device() as name:
        plain, recorded = (
            _Small(make(), device=name, train={"graphs": graphs}) for graphs in (False, True)
        )
        differs = _differs(plain.trained(2 * ROUNDS), recorded.trained(2 * ROUNDS))
    for why in recorded.worker.graphs.refused.values():
        emit(Diagnostic("not-recorded", "note", f"Its steps are not recorded: one {why}."))
    if differs:
        return (
            f"with recorded steps it differs in {differs}",
            "A replay calls no Python: what a step brings or leaves must be tensors in "
            "client.scratch, or come from `draws`",
        )
    return None


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
            weights = small.trained()
        except Exception as error:
            return f"{what}: {type(error).__name__}: {error}", "Federations have such clients"
        if small.seen.reasons:
            return f"{what}: {small.seen.reasons[0]}", "Federations have such clients"
        if not all(t.double().isfinite().all() for t in weights.values()):
            return f"{what}: weights are not finite", "Federations have such clients"
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
    own = type(make())
    try:
        both = compose((own, FedProx)) if not issubclass(own, FedProx) else own
    except ExperimentError:
        return None  # one clear line
    try:
        _Small(both(mu=0.5)).trained(1)
    except Exception as error:
        return f"with fedprox: {type(error).__name__}: {error}", "Hooks call super() and add to it"
    return None


def check_method(
    method: type[Method] | Callable[[], Method],
    checks: Sequence[Callable[[Make], Found]] = CHECKS,
) -> None:
    """Checks a method: the same bits twice, in any order, resumed, on a device; and more.

    Args:
        method: its class, or what makes an object with other settings.
        checks: which of ``CHECKS``.

    Raises:
        MethodFault: it breaks rules; says which, where and why they matter.
    """
    faults = []
    if checks is CHECKS:
        _trained.cache_clear()  # the class may be another than it was
    for check in checks:
        try:
            found = check(method)
        except Exception as error:
            found = f"{type(error).__name__}: {error}", "It cannot be trained"
        if found is not None:
            faults.append(Fault(check.__name__.replace("_", " "), *found))
    if faults:
        raise MethodFault(getattr(method, "name", repr(method)), faults)
