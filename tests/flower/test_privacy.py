"""Clipped and noised updates: by hand, over the in-process grid, and what is refused."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="Flower is an optional extra")

from flwr.app import Context, RecordDict
from flwr.app import Message as Envelope
from flwr.supercore.task_identity import TaskIdentity

from feddg.errors import ExperimentError
from feddg.experiment import Experiment
from feddg.flower.parcels import Parcel, update_parcel
from feddg.flower.privacy import Privacy, clip_update, epsilon, private
from feddg.flower.replies import read_update
from feddg.messages import Message, Update
from feddg.methods.base import State
from feddg.runs.prepare import build
from feddg.runs.reading import read_rows
from flower_grid import SMALL, Deployment, experiment, weights


def clipped(kind, norm, received, trained):
    """What leaves a site that was sent ``received`` and trained to ``trained``."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    told = Message({}, {"clipping": kind, "clipping_norm": norm})
    asked = Parcel({"round": 1}, {"weights": Message(received), "extras": told})
    update = update_parcel(Update(0, 7, trained, terms={"cross_entropy": 2.0}))
    envelope = Envelope(asked.to_records(), 1, "train")
    envelope.metadata.__dict__["_message_id"] = "asked"
    context = Context(1, 1, {}, RecordDict(), {})

    def train(message, context):
        return Envelope(update.to_records(), reply_to=message)

    reply = clip_update(envelope, context, train)
    return read_update(0, Parcel.from_records(reply.content))


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_a_change_of_length_5_becomes_one_of_length_1(kind):
    received = {"a": torch.tensor([1.0]), "n": torch.tensor(3), "b": torch.tensor([[2.0, 2.0]])}
    trained = {"a": torch.tensor([4.0]), "n": torch.tensor(9), "b": torch.tensor([[2.0, 6.0]])}
    update = clipped(kind, 1.0, received, trained)
    torch.testing.assert_close(update.weights["a"], torch.tensor([1.6]))
    torch.testing.assert_close(update.weights["b"], torch.tensor([[2.0, 2.8]]))
    assert update.weights["n"].item() == 9
    assert update.weights["n"].dtype == torch.int64
    assert update.terms == {}
    assert update.examples == 7
    assert update.extras.scalars == ({"norm_bit": 1} if kind == "adaptive" else {})


@pytest.mark.parametrize("change", [0.0, 0.5])
def test_a_short_change_stays_as_it_is(change):
    update = clipped("adaptive", 1.0, {"a": torch.zeros(1)}, {"a": torch.full((1,), change)})
    assert update.weights["a"].item() == change
    assert update.extras.scalars == {"norm_bit": 0}


FROZEN = {"model": {"backbone": "cnn", "weights": None, "normalization": "frozen"}}


def guarded(**privacy):
    chosen = experiment(**FROZEN)
    method, network = build(chosen, 10)
    method = private(method, network, Privacy(**privacy), chosen)
    initial = network.state_dict()
    return method, State(initial, method.initial_extras(network, 3))


def test_the_mean_of_four_gets_noise_of_a_quarter_of_the_norm_times_the_multiplier():
    method, state = guarded(clipping="fixed", clipping_norm=2.0, noise_multiplier=3.0)
    updates = [Update(k, 10**k, state.weights) for k in range(4)]
    first, second = (
        method.aggregate(State(state.weights, state.extras), updates).weights for _ in range(2)
    )
    trained = sorted(method.released)
    noise = torch.cat([(first[n] - state.weights[n]).flatten() for n in trained])
    assert len(noise) > 10_000
    assert noise.std().item() == pytest.approx(2.0 * 3.0 / 4, rel=0.05)
    assert all(not torch.equal(first[name], second[name]) for name in trained)
    frozen = first.keys() - set(trained)
    assert frozen
    assert all(torch.equal(first[name], state.weights[name]) for name in frozen)


def test_every_site_counts_the_same():
    method, state = guarded(clipping="fixed")
    updates = [
        Update(k, examples, {n: torch.full_like(t, k) for n, t in state.weights.items()})
        for k, examples in enumerate((1, 10, 1000))
    ]
    found = method.aggregate(State(state.weights, state.extras), updates).weights
    for name in method.released:
        torch.testing.assert_close(found[name], torch.ones_like(found[name]))


@pytest.mark.parametrize(("bits", "factor"), [((1, 1), 0.1), ((0, 0), -0.1), ((1, 0), 0.0)])
def test_the_norm_grows_while_most_updates_are_clipped(bits, factor):
    method, state = guarded(clipping="adaptive", clipping_norm=0.5)
    updates = [
        Update(k, 5, state.weights, Message({}, {"norm_bit": bit})) for k, bit in enumerate(bits)
    ]
    found = method.aggregate(State(state.weights, dict(state.extras)), updates)
    told = method.broadcast(found).extras.scalars
    assert told["clipping"] == "adaptive"
    assert told["clipping_norm"] == pytest.approx(0.5 * math.exp(factor))


def test_epsilon_in_closed_form():
    assert epsilon(2, 1.0) == pytest.approx(1 + 2 * math.sqrt(5 * math.log(10)))
    assert epsilon(1, 0.0) == math.inf


ONE_ROUND = {**SMALL["train"], "rounds": 1, "local_steps": 2, "batch_size": 16}


def test_over_the_grid_no_update_is_longer_than_the_norm(tmp_path):
    chosen = experiment(method="fedprox", train=ONE_ROUND, **FROZEN)
    deployment = Deployment(tmp_path, chosen, clipping="adaptive", **{"clipping-norm": 0.25})
    found = deployment.start()
    _, network = build(chosen, 10)
    change = [found[f"weights/{n}"] - t for n, t in network.state_dict().items()]
    assert 0.05 < math.sqrt(sum(float(part.square().sum()) for part in change)) <= 0.25 + 1e-5
    layouts = [
        row for row in read_rows(deployment.path / "ledger.jsonl") if row["kind"] == "layout"
    ]
    told = {scalar for layout in layouts for scalar in layout["scalars"]}
    assert {"clipping", "clipping_norm", "norm_bit"} <= told
    index = json.loads((deployment.path / "checkpoint/checkpoint.json").read_text())
    norm = load_file(deployment.path / "checkpoint" / index["state"])["extras/privacy/norm"]
    assert norm.item() == pytest.approx(0.25 * math.exp(0.1))  # all three were clipped
    assert (
        json.loads((deployment.path / "deployment.json").read_text())["privacy"]["clipping_norm"]
        == 0.25
    )


def test_a_wide_norm_without_noise_is_fedavg(tmp_path):
    # The three sites hold the same number of images, so their plain mean is the weighted one.
    chosen = experiment(train=ONE_ROUND, **FROZEN)
    plain = Deployment(tmp_path / "plain", chosen).start()
    wide = Deployment(tmp_path / "wide", chosen, clipping="fixed", **{"clipping-norm": 1e6}).start()
    assert plain.keys() == wide.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(wide[name], tensor)


def test_a_run_keeps_the_privacy_it_began_with(tmp_path):
    chosen = experiment(train=ONE_ROUND, **FROZEN)
    deployment = Deployment(tmp_path, chosen, clipping="fixed")
    deployment.grid.fail = lambda site, message: message.metadata.message_type == "train"
    with pytest.raises(Exception, match="0 good updates"):
        deployment.start()
    deployment.config["clipping"] = "none"
    with pytest.raises(ExperimentError, match="choose another 'out'"):
        deployment.start()
    assert weights(deployment.path)


UNSOUND = {
    "pardon": "describe/style .* would leave the site neither clipped nor noised",
    "ccst": "describe/styles",
    "fpl": "update/fpl/",
    "scaffold": "update/",
    "feddg-ga": "answer:",
    "fedbn": "stay with each site",
    "fedgma": "its own 'aggregate'",
    "randaug+fedgma": "its own 'aggregate'",
}


@pytest.mark.parametrize("name", UNSOUND)
def test_methods_that_clipping_does_not_protect_are_refused(name):
    chosen = experiment(method=name, **FROZEN)
    with pytest.raises(ExperimentError, match=UNSOUND[name]):
        private(*build(chosen, 10), Privacy(clipping="fixed"), chosen)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "mixstyle", "jigen", "randaug+rsc"])
def test_methods_whose_server_takes_the_mean_of_weights_are_protected(name):
    chosen = experiment(method=name, **FROZEN)
    method, network = build(chosen, 10)
    found = private(method, network, Privacy(clipping="fixed"), chosen)
    assert found.name == method.name
    assert isinstance(found, type(method))


def test_running_statistics_are_refused_unless_frozen():
    def protected(normalization):
        model = {"backbone": "resnet18", "weights": None, "normalization": normalization}
        chosen = Experiment(**{**SMALL, "model": model})
        return private(*build(chosen, 10), Privacy(clipping="fixed"), chosen)

    with pytest.raises(ExperimentError, match=r"set model.normalization to frozen"):
        protected("train")
    assert protected("frozen")


def test_noise_without_clipping_is_refused():
    chosen = experiment(**FROZEN)
    with pytest.raises(ExperimentError, match="set clipping"):
        private(*build(chosen, 10), Privacy(noise_multiplier=1.0), chosen)
