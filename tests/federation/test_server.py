"""The round loop: sampling, aggregation, refusals, determinism."""

import math

import pytest
import torch

from feddg.errors import ClientError, ExperimentError, NotEnoughUpdates
from feddg.experiment import Experiment
from feddg.messages import Refusal
from feddg.methods.base import Method, RoundHook, weighted_mean
from feddg.methods.baselines import FedAvg
from feddg.models.backbones import build_network
from feddg.privacy.building import build_defences
from feddg.settings import ServerSettings, TrainSettings
from federations import federation, same


def test_same_seed_same_weights_and_other_seed_other_weights():
    assert same(federation().run(), federation().run())
    assert not same(federation().run(), federation(seed=1).run())


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_a_round_is_the_weighted_mean_of_clients_trained_one_by_one(weighting):
    small = federation(server_settings=ServerSettings(weighting=weighting))
    start = {name: t.clone() for name, t in small.server.state.weights.items()}
    small.server.round()
    total: dict[str, torch.Tensor] = {}
    for id, size in enumerate(small.sizes):
        lone = federation(train=small.train)
        lone.server.sample = lambda round, attempt=0, id=id: [id]
        lone.server.round()
        for name, tensor in lone.server.state.weights.items():
            part = size / sum(small.sizes) if weighting == "examples" else 1 / len(small.sizes)
            share = tensor.double() * part
            total[name] = total[name] + share if name in total else share
    for name, tensor in small.server.state.weights.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor.double(), total[name], rtol=1e-5, atol=1e-7)
            assert not torch.equal(tensor, start[name]) or "bias" in name


def test_every_method_but_one_with_weights_of_its_own_counts_clients_alike():
    """Of clients that are of one size it makes no difference; of a one-round method's sums none."""

    def ends(method, sizes):
        train = TrainSettings(rounds=1, batch_size=4)
        settings = [ServerSettings(weighting=one) for one in ("examples", "uniform")]
        found = [
            federation(method, sizes=sizes, train=train, server_settings=one).run()
            for one in settings
        ]
        return same(*found)

    assert ends("fedavg", (6, 6))
    found = {method: ends(method, (9, 5)) for method in ("fedprox", "fedbn", "scaffold", "ridge")}
    assert found == {"fedprox": False, "fedbn": False, "scaffold": True, "ridge": True}


def test_clients_alike_beside_sums_by_images_are_refused():
    chosen = Experiment(
        data="digits",
        hold_out="sketch",
        server={"weighting": "uniform"},
        defences=["secure_aggregation"],
    )
    with pytest.raises(ExperimentError, match=r"server\.weighting: uniform needs every update"):
        build_defences(chosen, FedAvg(), build_network("cnn", 10, weights=None))


def test_one_client_one_step_is_plain_gradient_descent():
    train = TrainSettings(rounds=1, optimizer="sgd", lr=0.1, batch_size=64, local_epochs=1)
    small = federation(sizes=(9,), train=train, freeze=True)
    network = federation(sizes=(9,), train=train).network.eval()
    images = small.pixels.gather(torch.arange(9)).float() / 255
    loss = torch.nn.functional.cross_entropy(network(images), small.labels)
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    expected = {
        name: parameter.detach() - 0.1 * gradient
        for (name, parameter), gradient in zip(network.named_parameters(), gradients)
    }
    weights = small.run()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-6)


class Sick(Method):
    """FedAvg whose client 1 fails in the way a test names."""

    illness = "nan"

    def loss(self, client, batch):
        terms = super().loss(client, batch)
        if client.id == 1 and self.illness == "nan":
            terms["cross_entropy"] = terms["cross_entropy"] * math.nan
        if client.id == 1 and self.illness == "error":
            raise ClientError("the cable is out")
        return terms


@pytest.mark.parametrize(("illness", "words"), [("nan", "nan"), ("error", "the cable is out")])
def test_a_failing_client_is_left_out_and_named(illness, words):
    method = Sick()
    method.illness = illness
    small = federation(method)
    record = small.server.round()
    assert [refusal.client for refusal in record.refused] == [1]
    assert words in record.refused[0].reason
    assert record.examples == 7 + 6
    assert all(torch.isfinite(t).all() for t in small.server.state.weights.values())
    assert any(row["kind"] == "refusal" and row["client"] == 1 for row in small.ledger)
    healthy = federation()
    healthy.server.sample = lambda round, attempt=0: [0, 2]
    healthy.server.round()
    assert same(small.server.state.weights, healthy.server.state.weights)


def test_too_few_good_updates_fail_cleanly_and_leave_the_state_alone():
    small = federation(Sick(), server_settings=ServerSettings(min_updates=3, attempts=2))
    before = {name: t.clone() for name, t in small.server.state.weights.items()}
    with pytest.raises(NotEnoughUpdates, match=r"2 good updates of 3.*min_updates is 3.*client 1"):
        small.server.round()
    assert small.server.state.round == 0
    assert same(small.server.state.weights, before)
    assert sum(isinstance(reply, Refusal) for reply in small.replies) == 2


def test_hooks_see_the_completed_round_and_one_that_fails_leaves_the_round_before():
    class Looks(RoundHook):
        def completed(self, state, round):
            assert small.server.state is state
            if round.number == 2:
                raise KeyboardInterrupt
            return state

    small = federation()
    small.add_hook(Looks())
    small.server.setup()
    small.server.round()
    first = small.server.state
    with pytest.raises(KeyboardInterrupt):
        small.server.round()
    assert small.server.state is first


def test_a_client_without_images_is_refused_by_name():
    small = federation(sizes=(4, 0, 4))
    record = small.server.round()
    assert [refusal.client for refusal in record.refused] == [1]
    assert "no images" in record.refused[0].reason


def test_weighted_mean_of_equal_items_is_exact_and_integers_are_copied():
    item = {"w": torch.rand(5), "count": torch.tensor(3)}
    mean = weighted_mean([(item, 3), (item, 1), (item, 77)])
    assert torch.equal(mean["w"], item["w"])
    assert mean["count"].dtype == torch.int64
    assert int(mean["count"]) == 3
    with pytest.raises(ValueError, match="no updates"):
        weighted_mean([])


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_weighted_mean_of_sixteen_bits_is_taken_in_float32(kind):
    one, next_one = torch.ones(1).to(kind), (torch.ones(1) + torch.finfo(kind).eps).to(kind)
    mean = weighted_mean([({"w": one}, 1)] + [({"w": next_one}, 1)] * 99)
    assert torch.equal(mean["w"], next_one)
    assert mean["w"].dtype == kind


def test_weighted_mean_against_numpy_in_double_precision():
    generator = torch.Generator().manual_seed(0)
    items = [({"w": torch.randn(50, generator=generator)}, n) for n in (1, 20, 3, 400, 7)]
    expected = sum(t["w"].double() * n for t, n in items) / 431
    torch.testing.assert_close(weighted_mean(items)["w"].double(), expected, rtol=1e-6, atol=1e-7)
