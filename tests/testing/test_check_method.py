"""Ten faults that a stranger's method may have, each found and named; ours have none."""

from typing import Any, ClassVar

import pytest
import torch

from feddg.messages import Message
from feddg.methods.base import Method, methods
from feddg.methods.composition import build_method
from feddg.testing import CHECKS, MethodFault, check_method
from feddg.testing.methods import (
    a_device_need_not_wait,
    a_recorded_step_does_the_same,
    odd_clients_train_too,
)


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
        client.network.turns = getattr(client.network, "turns", 0) + client.round

    def loss(self, client, batch):
        share = 1 / (1 + client.network.turns)
        return {name: share * term for name, term in super().loss(client, batch).items()}


class NeedsTwoImages(Plain):
    def loss(self, client, batch):
        terms = super().loss(client, batch)
        return terms | {"spread": client.embeddings(batch).std(0).mean()}


class TakesAnySetting(Plain):
    def __init__(self, settings=None, **fields: Any) -> None:
        super().__init__(settings)


FAULTS = {
    StateOnSelf: ("nothing is kept on self", "self.last"),
    GlobalNumbers: ("twice the same", "client.stream"),
    UndeclaredEntry: ("messages are declared", "undeclared entry 'mean'"),
    ItemInAStep: ("a device need not wait", "_local_scalar_dense"),
    HostTensorInAStep: ("a device need not wait", "same device"),
    ConstantSentInAStep: ("a device need not wait", "not pinned"),
    WhoCameFirst: ("clients in any order", "client 2"),
    LostWhenStopped: ("a stopped run goes on", "resumed"),
    NeedsTwoImages: ("odd clients train too", "one image"),
    TakesAnySetting: ("settings are checked", "unknown setting"),
}
OTHERWISE = {
    "centralised": "it trains where all images are",
    "local": "every client has a model of its own",
}
BY_NAME = {check.__name__.replace("_", " "): check for check in CHECKS}


@pytest.mark.parametrize("method", FAULTS, ids=lambda method: method.__name__)
def test_a_planted_fault_is_found_and_said(method):
    check, words = FAULTS[method]
    with pytest.raises(MethodFault, match=r"^plain has 1 fault") as caught:
        check_method(method, [BY_NAME[check]])
    assert words in str(caught.value)


def test_all_that_is_wrong_is_said_at_once():
    pytest.importorskip("flwr", reason="Flower is an optional extra")
    with pytest.raises(MethodFault, match=r"^plain has ") as caught:
        check_method(LostWhenStopped)
    found = {fault.check: fault.what for fault in caught.value.faults}
    assert "resumed" in found["a stopped run goes on"]
    assert "over Flower it differs" in found["a network changes nothing"]


def test_a_method_without_faults_has_none():
    check_method(Plain)


ON_A_DEVICE = (a_device_need_not_wait, a_recorded_step_does_the_same)
RULES = [check for check in CHECKS if check not in ON_A_DEVICE]
"""The rest; federation/test_second_device.py and clients/test_graphs.py do more than the others."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("name", sorted(methods().keys() - OTHERWISE.keys()))
def test_methods_of_the_package_have_none(name, rule):
    check_method(methods()[name], [rule])


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
