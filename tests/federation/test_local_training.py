"""A client's choice among its own models, against a client that stops at each step."""

from collections import defaultdict
from dataclasses import replace
from typing import ClassVar

import dp_accounting
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import settings as settings_of_private_steps
from hypothesis import strategies as st
from scipy import stats
from torch import nn

import feddg
from feddg.api import resume, run
from feddg.clients.client import Client, RecordNoise
from feddg.errors import ClientError, ExperimentError
from feddg.experiment import Experiment
from feddg.federation import local_training
from feddg.federation.federation import build
from feddg.federation.inprocess import TRAIN
from feddg.federation.local_training import clipped_sum, image_gradients, private_step, train
from feddg.messages import Broadcast, EntrySchema, Message, Update
from feddg.methods.base import Method
from feddg.models.precision import autocast
from feddg.privacy.building import build_defences
from feddg.records import PRIVACY_ROWS
from feddg.runs.channel import _reply, _result, buffers_of, message_in
from feddg.runs.observer import Observer
from feddg.settings import TrainSettings
from feddg.testing import check_method
from feddg.testing.methods import a_network_changes_nothing, messages_are_declared
from federations import SmallFederation, federation, same

STEPS = 7


def settings(steps=STEPS, every=None):
    return TrainSettings(
        rounds=1, local_steps=steps, select_every=every, batch_size=4, optimizer="sgd", lr=0.1
    )


def client_of(small, validation):
    """Client 0, which validates on other clients' images."""
    own = small.examples(0)
    if validation is not None:
        own = replace(own, validation=validation(small))
    weights = small.server.state.weights
    return Client(0, own, small.worker, round=1, received=weights)


def others(small):
    """The other clients' images, some labels wrong: an accuracy that goes up and down."""
    held = small.examples(1)
    rows = torch.arange(7, 18)
    return replace(held, rows=rows, labels=small.labels[rows].roll(1), domains=rows * 0)


def state_after(steps):
    small = federation(train=settings(steps))
    client = client_of(small, others)
    train(client, small.method)
    state = {name: t.clone() for name, t in small.network.state_dict().items()}
    validation = client.examples.validation
    images = validation.images().float() / 255
    with torch.no_grad():
        guess = small.network.eval()(images).argmax(1)
    return state, float((guess == validation.labels).float().mean())


@pytest.mark.parametrize("every", [1, 2, 3, 20])
def test_the_best_of_the_models_that_were_tried_is_sent(every):
    small = federation(train=settings(every=every))
    update = train(client_of(small, others), small.method)
    tried = sorted({*range(every, STEPS + 1, every), STEPS})
    models = {steps: state_after(steps) for steps in tried}
    best = max(tried, key=lambda steps: (models[steps][1], -steps))
    assert same(dict(update.weights), models[best][0])


def test_accuracies_differ_so_that_there_is_a_choice():
    assert len({state_after(steps)[1] for steps in range(1, STEPS + 1)}) > 1


def nothing(small):
    none = small.examples(1)
    return replace(none, rows=none.rows[:0], labels=none.labels[:0], domains=none.domains[:0])


@pytest.mark.parametrize(("every", "validation"), [(None, others), (2, nothing)])
def test_without_the_setting_or_images_for_it_the_last_model_is_sent(every, validation):
    small = federation(train=settings(every=every))
    update = train(client_of(small, validation), small.method)
    assert same(dict(update.weights), state_after(STEPS)[0])


def test_what_stays_local_is_that_of_the_best_model():
    small = federation("fedbn", train=settings(every=1))
    client = client_of(small, others)
    update = train(client, small.method)
    assert client.memory
    assert all(torch.equal(client.memory[name], update.weights[name]) for name in client.memory)


def test_a_client_for_whom_nobody_set_images_aside_is_refused_by_name():
    small = federation(train=settings(every=2))
    small.server.settings = small.server.settings.model_copy(update={"attempts": 1})
    with pytest.raises(Exception, match=r"no validation images.*train\.select_every"):
        small.run(1)


# DP-SGD: each image's own gradient, bounded; noise of the stated size; counted by epochs.


@pytest.mark.parametrize(("backbone", "freeze"), [("cnn_gn", False), ("cnn", True)])
def test_every_image_has_the_gradient_it_has_alone(backbone, freeze):
    client = federation(backbone=backbone, freeze=freeze).client(0)
    batch = next(client.plain_batches())
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):  # as a step has it
        found, losses = image_gradients(client, batch)
    for i in range(len(batch)):
        client.network.zero_grad()
        logits = client.network.classifier(client.network.features(batch.images[i : i + 1]))
        loss = client.task_loss(logits, batch.labels[i : i + 1])
        loss.backward()
        assert float(losses[i]) == pytest.approx(float(loss.detach()), rel=1e-4)
        for name, parameter in client.network.named_parameters():
            torch.testing.assert_close(found[name][i], parameter.grad, rtol=1e-3, atol=1e-5)


NUMBER = st.floats(allow_nan=True, allow_infinity=True, width=32)
IMAGES = st.lists(st.lists(NUMBER, min_size=3, max_size=3), min_size=1, max_size=5)


@settings_of_private_steps(max_examples=200, deadline=None)
@given(IMAGES, st.integers(0, 4), st.sampled_from([0.01, 1.0, 40.0]))
def test_no_image_moves_the_sum_by_more_than_the_norm(images, at, norm):
    def total(rows):
        values = torch.tensor(rows)
        parts = clipped_sum({"a": values[:, :2], "b": values[:, 2:]}, norm)
        return torch.cat([parts["a"], parts["b"]])

    without = [*images]
    without[at % len(images)] = [0.0] * 3
    moved = float((total(images) - total(without)).norm())
    assert moved <= norm * (1 + 1e-6)


def test_the_noise_of_a_step_has_the_stated_variance_and_cannot_be_drawn_again():
    client = federation(backbone="cnn_gn").client(0)
    batch = next(client.plain_batches())
    quiet = clipped_sum(image_gradients(client, batch)[0], 0.5)
    drawn = []
    client.step = lambda: None
    for _ in range(4):
        private_step(client, batch, RecordNoise(2.0, 0.5))
        found = {n: p.grad.double() for n, p in client.network.named_parameters()}
        drawn.append(torch.cat([(found[n] - t / len(batch)).flatten() for n, t in quiet.items()]))
    errors = (torch.stack(drawn) / (2.0 * 0.5 / len(batch))).flatten().numpy()
    assert len(errors) > 10_000
    low, high = stats.chi2.ppf([5e-10, 1 - 5e-10], len(errors))
    assert low * 0.999 < (errors**2).sum() < high * 1.001  # gradients are float32
    assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("there", [False, True])
def test_weights_under_which_one_image_has_no_finite_loss_do_not_tell_whether_it_is_there(there):
    """A hostile server's: they sum brightness up, to infinity for a white image alone."""
    images = torch.zeros(8, 3, 8, 8, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(8)  # epsilon is for one file, so none is there twice
    site = [(image, label % 2) for label, image in enumerate(images)]
    if there:
        site[1] = torch.full((3, 8, 8), 255, dtype=torch.uint8), 1
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    private = {"privacy": {"record_epsilon": 8.0}, "normalization": "frozen", "batch_size": 4}
    fed = feddg.Federation([site], net, local_epochs=1, lr=0.01, **private)
    weights = dict(fed.server.state.weights)
    weights["classifier.weight"] = torch.full((2, 192), 4e36) * torch.tensor([[1.0], [0.0]])
    noise = fed.defences.record_noise.multiplier
    told = Message({}, {"noised_records/noise": noise, "noised_records/epochs": 1})
    (reply,) = fed.transport.train([0], Broadcast(1, weights, told))
    assert isinstance(reply, Update)
    assert all(tensor.isfinite().all() for tensor in reply.weights.values())


FIELDS = {
    "data": {"source": "digits", "image_size": 8, "id_val": 0.5},
    "hold_out": "sketch",
    "clients": 3,
    "model": {"backbone": "cnn_gn", "weights": None},
    "train": {"rounds": 2, "local_epochs": 2, "batch_size": 256},
    "device": "cpu",
    "precision": "float32",
}


def test_a_run_counts_every_epoch(tmp_path):
    experiment = Experiment(**FIELDS, privacy={"record_epsilon": 4})
    done = run(experiment, tmp_path, cache=tmp_path / "cache", report=False)
    rows = PRIVACY_ROWS.read(done.folder / "privacy.jsonl")
    assert [row.round for row in rows] == [1, 1, 2, 2]
    assert {(row.unit, row.noised_at) for row in rows} == {("image", "client")}
    assert 3.95 < rows[-1].epsilon <= 4
    assert not done.rounds[0].terms


@pytest.fixture
def dearest(monkeypatch):
    """Notes every noised step; returns the epsilon of the image that was in most of them."""
    steps = defaultdict(list)

    def noted(client, batch, noise):
        private_step(client, batch, noise)
        for row in client.training.rows[batch.positions].tolist():
            steps[row].append(noise.multiplier)

    monkeypatch.setattr(local_training, "private_step", noted)

    def epsilon(delta):
        most = max(steps.values(), key=len)
        assert len({*most}) == 1
        accountant = PLDAccountant()
        accountant.compose(dp_accounting.GaussianDpEvent(most[0]), len(most))
        return accountant.get_epsilon(delta)

    return epsilon


TEN = {
    "data": FIELDS["data"] | {"leave_out": ["chalk", "photo"]},
    "clients": 10,
    "train": {"rounds": 2, "local_epochs": 2, "batch_size": 32},
    "evaluate": {"every": 2, "pictures": False},
}
"""Clients of about 36 images: one or two batches each, where all together make a dozen."""


@pytest.mark.parametrize(
    "change",
    [
        {"clients": {"number": 10, "per_round": 3}},
        {"clients": {"number": 7, "partition": "quantity", "quantity_alpha": 0.3}},
        {"method": "local"},
        {"method": "centralised", "train": {"rounds": 2, "batch_size": 32, "local_steps": 5}},
        {"method": "fedgma+centralised", "clients": {"number": 10, "per_round": 3}},
    ],
    ids=str,
)
def test_what_is_said_to_be_spent_is_what_the_steps_cost(change, dearest, tmp_path):
    experiment = Experiment(**{**FIELDS, **TEN, **change}, privacy={"record_epsilon": 8})
    done = run(experiment, tmp_path, cache=tmp_path / "cache", report=False)
    said = PRIVACY_ROWS.read(done.folder / "privacy.jsonl")[-1]
    spent = dearest(said.delta)
    assert spent * 0.999 < said.epsilon <= 8
    assert said.epsilon < spent * 1.01 or "centralised" in experiment.method.name


@pytest.mark.parametrize("method", ["fedavg", "centralised"])
def test_a_resumed_run_has_spent_the_steps_of_both_parts(method, dearest, tmp_path):
    class Stop(Observer):
        def client(self, round, reply):
            if round == 2:
                raise KeyboardInterrupt

    three = TEN | {"train": TEN["train"] | {"rounds": 3}, "method": method}
    experiment = Experiment(**FIELDS | three, privacy={"record_epsilon": 8})
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path, cache=tmp_path / "cache", observer=Stop(), report=False)
    done = resume(tmp_path / experiment.label, cache=tmp_path / "cache")
    said = PRIVACY_ROWS.read(done.folder / "privacy.jsonl")
    assert [row.round for row in said].count(2) == 2 * [row.round for row in said].count(1)
    assert dearest(said[-1].delta) * 0.999 < said[-1].epsilon <= 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "pardon"}, "statistics/style|trains in its own way"),
        ({"method": "fedprox"}, "trains in its own way"),
        ({"model": {"backbone": "cnn", "normalization": "train"}}, "choose model.backbone cnn_gn"),
        ({"train": {"rounds": 2, "local_steps": 3}}, "set train.local_epochs"),
        (
            {"data": FIELDS["data"] | {"tile": 16}},
            "record_epsilon protects one image, but data.tile",
        ),
        ({"train": {"rounds": 2, "class_weights": "balanced"}}, "set it to none"),
    ],
)
def test_what_mixes_images_is_refused(change, words):
    experiment = Experiment(**{**FIELDS, **change}, privacy={"record_epsilon": 4})
    with pytest.raises(ExperimentError, match=words):
        build_defences(experiment, *build(experiment, 10))


def test_a_style_of_tiles_hides_a_client_and_no_image():
    tiled = {**FIELDS, "method": "pardon", "data": FIELDS["data"] | {"tile": 16}}
    experiment = Experiment(**tiled, privacy={"style_epsilon": 4})
    with pytest.raises(ExperimentError, match=r"style_epsilon protects one image, but data\.tile"):
        build_defences(experiment, *build(experiment, 10))
    experiment = Experiment(**tiled, privacy={"style_epsilon": 4, "style_unit": "client"})
    assert "for a client" in build_defences(experiment, *build(experiment, 10)).diagnostics[0].text


# What a client does in a round, whatever carries the messages.


def test_mixed_precision_sees_the_weights_of_the_last_step():
    """A context around the whole round must train as one opened afresh for every step."""
    settings = TrainSettings(batch_size=4, local_epochs=3, lr=0.01)
    federation = SmallFederation(Method(), sizes=(24,), train=settings)
    worker, start = federation.worker, federation.server.state.weights
    worker.threads = None  # as many as the loop by hand has
    worker.autocast = autocast("bfloat16", torch.device("cpu"))

    def client() -> Client:
        return Client(0, federation.examples(0), worker, round=1, received=start)

    trained = {n: t.clone() for n, t in train(client(), Method()).weights.items()}

    by_hand = client()
    worker.network.load_state_dict(start)
    by_hand.set_training()
    optimizer = torch.optim.Adam(worker.network.parameters(), settings.lr, fused=True)
    for batch in by_hand.batches():
        with torch.autocast("cpu", torch.bfloat16):
            logits = worker.network(batch.images)
            loss = torch.nn.functional.cross_entropy(logits, batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, tensor in worker.network.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=0, msg=name)


def test_a_report_in_16_bits_is_sent_in_32():
    class Reports(Method):
        name = "reports"
        sends: ClassVar = Method.sends | {"update/mean": EntrySchema("of something", (3,))}

        def report(self, client):
            return Message({"mean": torch.ones(3, dtype=torch.bfloat16)})

    small = SmallFederation(Reports())
    small.run(1)
    assert {reply.extras.tensors["mean"].dtype for reply in small.replies} == {torch.float32}


class Halves(Method):
    """Declares numbers in 16 bits wherever a client may send some."""

    name = "halves"
    sends: ClassVar = Method.sends | {
        f"{purpose}/{dtype}": EntrySchema("of something", (3,), dtype, low=0.0, high=0.3)
        for purpose in ("statistics", "update", "answer:how")
        for dtype in (torch.bfloat16, torch.float16)
    }

    def numbers(self):
        dtypes = (torch.bfloat16, torch.float16)
        return Message({str(dtype): torch.tensor([0.0, 0.1, 0.3]).to(dtype) for dtype in dtypes})

    def client_statistics(self, client):
        return self.numbers()

    def report(self, client):
        return self.numbers()

    def answer(self, client, name, question):
        return self.numbers()

    def after_round(self, state, ask):
        assert all(len(reply.tensors) == 2 for _, reply in ask("how", Message()))
        return super().after_round(state, ask)


def test_a_report_in_the_16_bits_that_are_declared_is_sent_in_them():
    small = SmallFederation(Halves())
    small.run(1)
    assert len(small.replies) == 3
    for reply in small.replies:
        assert {name: str(t.dtype) for name, t in reply.extras.tensors.items()} == {
            name: name for name in ("torch.bfloat16", "torch.float16")
        }
        crossed = _result(0, TRAIN, message_in(*_crossed(_reply(reply, None))))[0]
        assert same(crossed.extras.tensors, reply.extras.tensors)


def _crossed(message):
    sizes, here = buffers_of(message)
    return int(sizes[0]), here, None


def test_numbers_in_16_bits_keep_the_rules_over_every_transport():
    check_method(Halves, [messages_are_declared, a_network_changes_nothing])


class Keeps(Method):
    """A client remembers its classifier as it is, and has an Adam that counts in Python."""

    class Counting(torch.optim.SGD):
        """Counts its steps."""

        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1

    name = "keeps"

    def optimizer(self, client):
        return self.Counting(client.network.parameters(), 0.1)

    def report(self, client):
        client.memory["head"] = client.network.classifier.weight.detach()
        return super().report(client)


def test_what_a_client_remembers_of_the_network_is_a_copy():
    small = federation(Keeps(), sizes=(8, 6))
    small.server.round()
    first, second = (small.transport.memories[id]["head"] for id in (0, 1))
    assert first.data_ptr() != second.data_ptr()
    assert not torch.equal(first, second)


def test_an_optimizer_that_counts_in_python_cannot_be_kept():
    small = federation(Keeps(), train=TrainSettings(rounds=2, batch_size=4, keep_optimizer=True))
    with pytest.raises(ClientError, match="optimizer's 'step' is a number: make it a tensor"):
        train(small.client(0, received=small.server.state.weights), small.method)
