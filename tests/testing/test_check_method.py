"""Faults that a stranger's method may have, each found, named and placed; ours have none."""

import inspect
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch

from feddg.messages import Message
from feddg.methods.base import Method, methods
from feddg.methods.composition import build_method
from feddg.testing import CHECKS, MethodFault, check_method
from feddg.testing.methods import a_recorded_step_does_the_same, odd_clients_train_too


class Plain(Method):
    name = "plain"


class StateOnSelf(Plain):
    def loss(self, client, batch):
        self.last = batch.labels_here.clone()
        return super().loss(client, batch)


class GlobalNumbers(Plain):
    def loss(self, client, batch):
        share = float(torch.rand(()))
        return {name: share * term for name, term in super().loss(client, batch).items()}


class UndeclaredEntry(Plain):
    def report(self, client):
        return Message({"mean": torch.zeros(3)})


class ItemInAStep(Plain):
    def loss(self, client, batch):
        terms = super().loss(client, batch)
        return terms if terms["cross_entropy"].item() > 0 else {}


class HostTensorInAStep(Plain):
    def loss(self, client, batch):
        weights = torch.linspace(1, 2, len(batch))
        terms = super().loss(client, batch)
        return terms | {"light": (batch.images.mean((1, 2, 3)) * weights).mean()}


class ConstantSentInAStep(Plain):
    def loss(self, client, batch):
        half = torch.tensor([0.5]).to(client.device)
        return {name: half[0] * term for name, term in super().loss(client, batch).items()}


class WhoCameFirst(Plain):
    came: ClassVar[list[int]] = []

    def begin(self, client):
        super().begin(client)
        WhoCameFirst.came.append(client.id)
        client.scratch["place"] = len(WhoCameFirst.came)

    def loss(self, client, batch):
        place = client.scratch["place"]
        return {name: term / place for name, term in super().loss(client, batch).items()}


class LostWhenStopped(Plain):
    def begin(self, client):
        super().begin(client)
        turns = client.network.turns = getattr(client.network, "turns", {})
        turns[client.id] = turns.get(client.id, 0) + client.round

    def loss(self, client, batch):
        share = 1 / (1 + client.network.turns[client.id])
        return {name: share * term for name, term in super().loss(client, batch).items()}


class NeedsTwoImages(Plain):
    def loss(self, client, batch):
        terms = super().loss(client, batch)
        return terms | {"spread": client.embeddings(batch).std(0).mean()}


class TakesAnySetting(Plain):
    def __init__(self, settings=None, **fields: Any) -> None:
        super().__init__(settings)


class PythonsNumbers(Plain):
    def draws(self, client, positions, labels):
        return {"share": torch.full((1,), random.random())}

    def loss(self, client, batch):
        share = self.drawn(client, batch)["share"][0]
        return {name: share * term for name, term in super().loss(client, batch).items()}


class SeedInBegin(Plain):
    def begin(self, client):
        super().begin(client)
        torch.manual_seed(0)


class OldWeightsChanged(Plain):
    def aggregate(self, state, updates):
        old = state.weights
        state = super().aggregate(state, updates)
        for name, tensor in old.items():
            tensor.copy_(state.weights[name])
        return state


class OldStateFilled(Plain):
    def aggregate(self, state, updates):
        found = super().aggregate(replace(state, weights=dict(state.weights)), updates).weights
        for name in found:
            state.weights[name] = found[name]
        return state


class ShrunkBeforeSent(Plain):
    def broadcast(self, state):
        for tensor in state.weights.values():
            if tensor.is_floating_point():
                tensor.mul_(0.9)
        return super().broadcast(state)


class ReceivedChanged(Plain):
    def begin(self, client):
        super().begin(client)
        next(iter(client.received.values())).add_(1)


class HalfAggregated(Plain):
    def aggregate(self, state, updates):
        state = super().aggregate(state, updates)
        state.weights = {n: t.half() if t.dim() else t for n, t in state.weights.items()}
        return state


class HalfSent(Plain):
    def broadcast(self, state):
        sent = super().broadcast(state)
        halves = {n: t.half() if t.dim() else t for n, t in sent.weights.items()}
        return replace(sent, weights=halves)


class FirstTwice(Plain):
    def aggregate(self, state, updates):
        def doubled():
            for place, update in enumerate(updates):
                yield update
                if place == 0:
                    yield update

        return super().aggregate(state, doubled())


class WrongTotal(Plain):
    def aggregate(self, state, updates):
        kept = [update.keep() for update in updates]
        total = sum(update.examples for update in kept) - 1
        for name in state.weights:
            parts = [update.weights[name].float() * update.examples / total for update in kept]
            state.weights = {**state.weights, name: sum(parts).to(state.weights[name].dtype)}
        return state


class OnlyTheFirst(Plain):
    def aggregate(self, state, updates):
        state.weights = next(iter(updates)).keep().weights
        return state


class NotKept(Plain):
    def aggregate(self, state, updates):
        return super().aggregate(state, list(updates))


class Unseeded(Plain):
    def loss(self, client, batch):
        share = numpy.random.default_rng().random()
        return {name: share * term for name, term in super().loss(client, batch).items()}


class OnlyOnTheCPU(Plain):
    def loss(self, client, batch):
        share = 1.0 if client.device.type == "cpu" else 0.5
        return {name: share * term for name, term in super().loss(client, batch).items()}


class RemembersNumbers(Plain):
    def begin(self, client):
        super().begin(client)
        client.memory["rounds"] = client.round


class MemoryChanged(Plain):
    def begin(self, client):
        super().begin(client)
        client.memory.setdefault("rounds", torch.zeros(())).add_(1)


class Crashes(Plain):
    def aggregate(self, state, updates):
        state.extras["mean"] = next(iter(updates)).extras.tensors["mean"]
        return state


class NeedsEveryClass(Plain):
    def report(self, client):
        shares = torch.bincount(client.examples.labels).view(3)
        assert len(shares)
        return super().report(client)


KEPT, SHARED, SENT = "nothing is kept on self", "what all share stays", "what is sent stays"
DECLARED, ONCE, TWICE = "messages are declared", "every update counts once", "twice the same"
WAITS, ODD = "a device need not wait", "odd clients train too"
RULES = [check for check in CHECKS if check is not a_recorded_step_does_the_same]
"""The rest; clients/test_graphs.py does more than that one."""
FAULTS = {
    StateOnSelf: (KEPT, "self.last", None),
    GlobalNumbers: (SHARED, "PyTorch's global random numbers", None),
    PythonsNumbers: (SHARED, "Python's global random numbers", None),
    SeedInBegin: (SHARED, "PyTorch's global random numbers", None),
    UndeclaredEntry: (DECLARED, "undeclared entry 'mean'", None),
    ItemInAStep: (WAITS, ".item()", '["cross_entropy"].item()'),
    HostTensorInAStep: (WAITS, "same device", "* weights).mean()"),
    ConstantSentInAStep: (WAITS, "not pinned", ".to(client.device)"),
    WhoCameFirst: (KEPT, "self.came", None),
    LostWhenStopped: ("a stopped run goes on", "resumed", None),
    NeedsTwoImages: (ODD, "one image", None),
    TakesAnySetting: ("settings are checked", "unknown setting", None),
    OldWeightsChanged: (SENT, "state.weights", None),
    OldStateFilled: (SENT, "state.weights", None),
    ShrunkBeforeSent: (SENT, "state.weights", None),
    ReceivedChanged: (SENT, "state.weights", None),
    HalfAggregated: (DECLARED, "torch.float16", None),
    HalfSent: (SENT, "torch.float16", None),
    FirstTwice: (ONCE, "another order", None),
    WrongTotal: (ONCE, "which are equal", None),
    OnlyTheFirst: (ONCE, "1 of 3", None),
    NotKept: (ONCE, "after the next", None),
    Unseeded: (TWICE, "a second run differs", None),
    OnlyOnTheCPU: ("a device has the same bits", "differs", None),
    RemembersNumbers: (DECLARED, "client.memory['rounds']", None),
    MemoryChanged: (SENT, "memory['rounds'] is changed", None),
    Crashes: (DECLARED, "KeyError", 'extras.tensors["mean"]'),
    NeedsEveryClass: (ODD, "shape '[3]'", "torch.bincount"),
}


@pytest.mark.parametrize("method", FAULTS, ids=lambda method: method.__name__)
def test_a_planted_fault_is_said_once_and_where_it_was_raised_or_waited(method, caplog):
    check, words, line = FAULTS[method]
    if hasattr(method, "came"):
        method.came.clear()
    with pytest.raises(MethodFault) as caught:
        check_method(method, CHECKS if check == WAITS else RULES)
    (fault,) = caught.value.faults
    assert fault.check == check
    assert words in fault.what
    assert [record for record in caplog.records if record.levelname != "INFO"] == []
    if line is not None:
        lines, first = inspect.getsourcelines(method)
        (place,) = [first + number for number, text in enumerate(lines) if line in text]
        name = Path(__file__).name
        assert f"{name}:{place}" in fault.what or f"{name}, line {place}," in fault.what


def test_a_method_without_faults_has_none_and_threads_stay():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        check_method(Method)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", sorted(methods()))
def test_methods_of_the_package_have_none(name):
    check_method(methods()[name], RULES)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ccst", {"variant": "pardon"}),
        ("ccst", {"share": "single"}),
        ("rsc", {"muting": "spatial"}),
        ("sfa", {"noise": "adaptive"}),
    ],
)
def test_nor_have_their_variants_with_odd_clients(name, settings):
    check_method(lambda: build_method(name, settings), [odd_clients_train_too])
