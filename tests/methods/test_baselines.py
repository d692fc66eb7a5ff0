"""FedProx: the proximal term and its gradient by hand, and mu = 0."""

import json
import logging

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import feddg
from feddg import Experiment, run
from feddg.errors import ExperimentError, RunError
from feddg.federation.local_training import load_weights
from feddg.methods.composition import build_method
from feddg.models.backbones import build_network
from feddg.prediction.model import load_model
from feddg.rng import stream
from feddg.runs.folder import checkpoint_memories
from feddg.runs.observer import Observer
from feddg.runs.prepare import deal, in_process, load_table
from feddg.settings import TrainSettings
from federations import CLASSES, SmallFederation, affine_names, federation, same
from odd_inputs import NOT_FINITE
from run_folders import accuracy_rows

SGD = TrainSettings(rounds=2, batch_size=4, optimizer="sgd", lr=0.1)


def moved_client(mu):
    """A client that has moved away from what it received, and a batch."""
    small = federation("fedprox", settings={"mu": mu}, train=SGD, freeze=True)
    received = {name: t.clone() for name, t in small.server.state.weights.items()}
    client = small.client(0, received=received)
    small.method.begin(client)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in small.network.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=noise)
    return small, client, next(client.batches())


def test_the_term_is_half_mu_times_the_squared_distance():
    small, client, batch = moved_client(0.6)
    term = small.method.loss(client, batch)["proximal"]
    squares = [
        (parameter.detach().double() - client.received[name].double()).square().sum()
        for name, parameter in small.network.named_parameters()
    ]
    assert float(term.detach()) == pytest.approx(0.3 * float(sum(squares)), rel=1e-5)


def test_a_step_adds_mu_times_the_displacement_to_the_gradient():
    small, client, batch = moved_client(0.6)
    parameters = dict(small.network.named_parameters())
    loss = torch.nn.functional.cross_entropy(small.network(batch.images), batch.labels)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    expected = {
        name: p.detach() - 0.1 * (g + 0.6 * (p.detach() - client.received[name]))
        for (name, p), g in zip(parameters.items(), gradients)
    }
    small.method.step(client, batch)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-4, atol=1e-6)


def test_mu_zero_is_fedavg_bit_for_bit():
    zero = federation("fedprox", settings={"mu": 0})
    assert same(zero.run(), federation().run())
    assert not same(federation("fedprox").run(), zero.server.state.weights)


def test_what_stays_local_is_not_held():
    small = federation("fedbn+fedprox")
    weights = small.server.state.weights
    client = small.client(0, received={name: t + 1 for name, t in weights.items()})
    load_weights(small.network, weights)
    small.method.begin(client)
    displacements = [received - p.detach() for p, received in client.scratch["fedprox"]]
    parameters = {name for name, _ in small.network.named_parameters()}
    assert len(displacements) == len(parameters - affine_names(small.network)) < len(parameters)
    assert all(torch.allclose(d, torch.tensor(1.0)) for d in displacements)


@pytest.mark.parametrize("mu", [-0.1, *NOT_FINITE])
def test_a_weight_out_of_range_is_refused(mu):
    with pytest.raises(ExperimentError, match="fedprox: mu"):
        build_method("fedprox", {"mu": mu})


# Every client alone, and all images in one place: against plain loops and by hand.


TRAIN = TrainSettings(rounds=3, batch_size=4, optimizer="sgd", lr=0.05)
SMALL = {
    "data": {"source": "digits", "image_size": 8, "id_val": 0.1, "id_test": 0.1},
    "hold_out": {"val": "chalk", "test": "sketch"},
    "clients": {"number": 3},
    "train": {"rounds": 2, "batch_size": 64},
}


def plain_loop(small: SmallFederation, id: int, rounds: list[int]) -> nn.Module:
    """Torch alone: the network trained on a client's images, in the order of its random streams."""
    network = build_network("cnn", CLASSES, weights=None, embedding="none", seed=0)
    network = network.to(memory_format=torch.channels_last).train()
    held = small.examples(id)
    for round in rounds:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
        order = torch.randperm(len(held), generator=stream(0, "client", id, round, "order"))
        batches = list(order.split(4))
        if len(batches[-1]) == 1:
            batches[-2:] = [torch.cat(batches[-2:])]
        for batch in batches:
            images = small.pixels.gather(held.rows[batch]).float() / 255
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images), held.labels[batch]).backward()
            optimizer.step()
    return network


def close(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(one[name].float(), other[name].float(), atol=1e-5) for name in one
    )


def test_a_client_that_rests_keeps_its_model_and_one_that_comes_late_starts_from_the_first():
    small = federation("local", train=TRAIN)
    start = {name: tensor.clone() for name, tensor in small.server.state.weights.items()}
    turns = {1: [0, 1], 2: [1], 3: [1, 2]}
    small.server.sample = lambda round, attempt=0: turns[round]
    small.run()
    for id, rounds in {0: [1], 1: [1, 2, 3], 2: [3]}.items():
        assert close(small.transport.memories[id], plain_loop(small, id, rounds).state_dict())
    assert not close(small.transport.memories[0], small.transport.memories[1])
    assert same(small.server.state.weights, start)


def test_clients_alone_keep_what_a_layer_of_two_names_learns():
    torch.manual_seed(0)
    layer, site = nn.Linear(192, 192), TensorDataset(torch.rand(8, 3, 8, 8), torch.arange(8) % 3)
    body = nn.Sequential(nn.Flatten(), layer, nn.ReLU(), layer, nn.Linear(192, 3))
    fed = feddg.Federation([site], body, "local", lr=0.05, batch_size=4)
    fed.fit(1)
    memory = fed.transport.memories[0]
    first, second = (memory[f"featurizer.model.{number}.weight"] for number in (1, 3))
    assert torch.equal(first, second)
    assert not torch.equal(first, layer.weight)


def test_no_weights_leave_a_client_and_the_starting_network_is_sent_while_it_is_needed():
    small = federation("local", train=TRAIN)
    small.run()
    layouts = {row["id"]: row["tensors"] for row in small.ledger if row["kind"] == "layout"}
    messages = [row for row in small.ledger if row["kind"] == "message"]
    assert not any(layouts[row["layout"]] for row in messages if row["direction"] == "up")
    down = {row["round"]: row["bytes"] for row in messages if row["direction"] == "down"}
    assert down[1] > 10_000
    assert down[2] == down[3] < 100


@pytest.fixture(scope="module")
def alone(tmp_path_factory, cache):
    """A completed run of clients alone."""
    chosen = Experiment(**SMALL, method="local")
    return run(chosen, tmp_path_factory.mktemp("runs"), cache=cache, report=False)


def test_a_domain_has_the_mean_over_all_clients_own_models(alone, cache):
    memories = checkpoint_memories(alone.folder)
    assert sorted(memories) == [0, 1, 2]
    found = in_process(alone.experiment, cache, lambda *_: None)
    network, evaluation = found.worker.network, found.evaluation
    labels = torch.from_numpy(evaluation.labels)
    for split, domain, rows in evaluation.parts():
        name = evaluation.domain_names[domain]
        right = []
        for memory in memories.values():
            network.load_state_dict(memory)
            logits = evaluation.predict(network.eval(), rows)
            right.append(float((logits.argmax(1) == labels[rows]).double().mean()))
        (row,) = (row for row in accuracy_rows(alone, 2, split) if row.domain == name)
        assert row.value == pytest.approx(numpy.mean(right), abs=1e-6)
        assert row.examples == len(rows)
        assert row.support == numpy.bincount(labels[rows], minlength=10).tolist()


def test_there_is_no_model_to_be_loaded(alone):
    with pytest.raises(RunError, match=r"local .*model of its own"):
        load_model(alone.folder)


def test_it_goes_on_where_it_stopped_with_the_same_numbers(alone, cache, tmp_path):
    class AfterOne(Observer):
        def round(self, row):
            if row.round == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(alone.experiment, tmp_path, cache=cache, observer=AfterOne())
    again = run(alone.experiment, tmp_path, cache=cache, report=False)
    ours, theirs = (run.frame().drop(columns="seconds") for run in (again, alone))
    assert ours.equals(theirs)


def partitioned(**change):
    """The images of an experiment, partitioned."""
    experiment = Experiment(**{**SMALL, **change})
    return experiment, deal(experiment, load_table(experiment, None, lambda *_: None))


@pytest.mark.parametrize(
    ("clients", "train", "share"),
    [
        ({"number": 3}, {"local_epochs": 2, "batch_size": 50}, 1),
        ({"number": 6, "per_round": 2}, {"batch_size": 50, "local_epochs": 1}, 1 / 3),
        ({"number": 4, "per_round": 3}, {"batch_size": 50, "local_steps": 7}, 3 / 4),
    ],
)
def test_one_client_holds_everything_and_takes_the_steps_of_a_round(clients, train, share):
    train = {"rounds": 1, **train}
    _, spread = partitioned(clients=clients, train=train)
    experiment, gathered = partitioned(clients=clients, train=train, method="centralised")
    assert spread.steps is None
    assert len(gathered.partition) == 1
    assert len(gathered[0]) == sum(map(len, spread))
    steps = [
        train.get("local_steps")
        or train["local_epochs"] * len([0 for start in range(0, size, 50) if size - start != 1])
        for size in spread.partition.sizes
    ]
    assert gathered.steps == round(sum(steps) * share)
    assert gathered.trained_by(experiment).train.local_steps == gathered.steps
    assert numpy.array_equal(gathered.splits.test, spread.splits.test)


def test_all_images_in_one_place_is_a_plain_loop_over_them():
    small = federation("centralised", sizes=(18,), train=TRAIN)
    small.run()
    assert close(small.server.state.weights, plain_loop(small, 0, [1, 2, 3]).state_dict())


def test_images_in_one_place_are_in_the_sums_of_ridge_once():
    """Without a number of steps: 100 steps of several clients are no whole pass over all images."""
    experiment, gathered = partitioned(
        clients={"number": 4}, train={"batch_size": 50}, method="centralised+ridge"
    )
    train = gathered.trained_by(experiment).train
    assert (gathered.steps, train.local_steps, train.local_epochs) == (None, None, 1)


def test_a_centralised_run_says_who_held_what_and_beats_chance(tmp_path, cache):
    train, data = {"rounds": 3, "batch_size": 32}, SMALL["data"] | {"image_size": 16}
    chosen = Experiment(**{**SMALL, "train": train, "data": data}, method="centralised")
    done = run(chosen, tmp_path, cache=cache, report=False)
    held = json.loads((done.folder / "clients.json").read_text())["clients"]
    assert [len(held), sum(held[0]["classes"])] == [1, sum(held[0]["domains"])]
    assert done.result.value("id_test") > 0.3
    assert [row.clients for row in done.rounds] == [[0]] * 3


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("local", {"defences": "median"}, "local sends no weights: leave out defences"),
        ("centralised", {"privacy": {"clipping": "fixed"}}, "set privacy.clipping to none"),
        ("local", {"server": {"optimizer": "fedadam"}}, "server.optimizer"),
        ("centralised", {"server": {"min_updates": 2}}, "set server.min_updates to 1"),
    ],
)
def test_what_needs_updates_of_many_is_refused(name, change, words):
    experiment = Experiment(**SMALL, **change, method=name)
    with pytest.raises(ExperimentError, match=words):
        build_method(name, {}).check(experiment)


def test_thin_classes_are_warned_of_once_in_a_run(tmp_path, cache, caplog):
    with caplog.at_level(logging.WARNING, "feddg"):
        few = Experiment(**SMALL | {"train": {"rounds": 1, "local_steps": 1}})
        run(few, tmp_path, cache=cache, report=False)
    said = [r.message for r in caplog.records if "have fewer than 20 images" in r.message]
    assert len(said) == 1
