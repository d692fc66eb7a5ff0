"""One of five sites sends what cannot be: it is named, and the others go on without it.

Every case is played in process, over the same round loop and checks that every engine has, for
two rounds and one more after a restart.
"""

import math
from dataclasses import replace

import pytest
import torch

from feddg.clients.optim import in_round
from feddg.federation.local_training import load_weights
from feddg.federation.validation import MessageChecks
from feddg.messages import EntrySchema, Refusal, Update
from feddg.methods import fpl
from feddg.methods.base import Method, State
from feddg.models.normalization import never_negative_names
from feddg.privacy.robust import length
from feddg.settings import TrainSettings
from federations import federation, same

CULPRIT = 2
SIZES = (9, 8, 7, 8, 9)
TRAIN = TrainSettings(rounds=2, batch_size=4, local_steps=1, optimizer="sgd", lr=0.05)


def five(method="fedavg", **options):
    """Five clients that have registered with their number of images."""
    small = federation(method, sizes=SIZES, **{"train": TRAIN} | options)
    small.server.checks._registered = dict(enumerate(SIZES))
    return small


def lie(small, purpose, change, culprit=CULPRIT):
    """Has the culprit's messages of a kind changed on their way."""
    way = {"update": "train", "statistics": "client_statistics", "answer": "ask"}[purpose]
    honest = getattr(small.transport, way)

    def said(*given):
        for reply in honest(*given):
            if purpose == "update":
                yield changed(reply) if reply.client == culprit else reply
            else:
                yield (reply[0], changed(reply[1])) if reply[0] == culprit else reply

    def changed(reply):
        return reply if isinstance(reply, Refusal) else change(reply.keep())

    setattr(small.transport, way, said)


def silence(small, purpose):
    """Has the culprit refuse of itself, in messages of a kind."""
    lie(small, purpose, lambda reply: Refusal(CULPRIT, "not today"))


def refused(small):
    return [(row["client"], row["reason"]) for row in small.ledger if row["kind"] == "refusal"]


def play(small, rounds=2):
    small.server.setup()
    for _ in range(rounds):
        small.server.round()


# What a site may change


def weight(ending, value):
    def change(update):
        for name, tensor in update.weights.items():
            if name.endswith(ending):
                tensor.fill_(value)
        return update

    return change


def extra(name, make):
    """Replaces tensors (of an update or another message) whose names begin with ``name``."""

    def change(message):
        tensors = message.extras.tensors if isinstance(message, Update) else message.tensors
        found = [key for key in tensors if key.startswith(name)]
        assert found
        for key in found:
            tensors[key] = make(tensors[key])
        return message

    return change


def filled(value):
    return lambda tensor: torch.full_like(tensor, value)


def moment(row, value):
    """One of the two rows of a style: 0 the means, 1 the deviations."""

    def make(style):
        style[..., row, :] = value
        return style

    return make


def many(rows):
    return lambda tensor: tensor[:1].expand(rows, *tensor.shape[1:]).clone()


def scalar(name, value):
    def change(update):
        update.extras.scalars[name] = value
        return update

    return change


def control_of_a_buffer(update):
    update.extras.tensors["scaffold/featurizer.blocks.0.1.running_mean"] = torch.zeros(32)
    return update


def examples(count):
    return lambda update: replace(update, examples=count)


def more_prototypes(update):
    tensors = update.extras.tensors
    tensors["fpl/prototypes"] = tensors["fpl/prototypes"].repeat(4000, 1)
    tensors["fpl/classes"] = tensors["fpl/classes"].repeat(4000)
    return update


VARIANCE, COUNTER = "running_var", "num_batches_tracked"
CASES = {
    ("fedavg", "update"): {
        "a negative variance": weight(VARIANCE, -0.3),
        "a variance below 0 by a hair": weight(VARIANCE, -1e-30),
        "a variance of 3e38": weight(VARIANCE, 3e38),
        "a negative counter": weight(COUNTER, -1),
        "an endless counter": weight(COUNTER, 2**63 - 1),
        "1e30 images": examples(10**30),
    },
    ("fedig", "update"): {"a negative variance": weight(VARIANCE, -0.3)},
    ("fedbn", "update"): {"a negative variance": weight(VARIANCE, -0.3)},
    ("scaffold", "update"): {
        "a control of 1e5": extra("scaffold/", filled(1e5)),
        "ten times its control": extra("scaffold/", lambda t: 10 * t),
        "a control that is no number": extra("scaffold/", filled(math.nan)),
        "a control of a statistic": control_of_a_buffer,
    },
    ("fpl", "update"): {
        "prototypes of 3e38": extra("fpl/prototypes", filled(3e38)),
        "more prototypes than classes": more_prototypes,
        "three prototypes of one class": extra("fpl/classes", filled(0)),
    },
    ("feddg-ga", "update"): {
        "a loss of 1e20": extra("feddg-ga/loss_own", filled(1e20)),
        "a loss below 0": extra("feddg-ga/loss_own", filled(-5.0)),
    },
    ("feddg-ga", "answer"): {
        "a loss of 3e38": extra("", filled(3e38)),
        "a loss below 0": extra("", filled(-1e20)),
    },
    ("afl", "answer"): {
        "a loss of 3e38": extra("losses", filled(3e38)),
        "a loss below 0": extra("losses", filled(-5.0)),
        "no image": extra("images", filled(0.0)),
        "domain -1": extra("domains", filled(-1)),
    },
    ("copa", "update"): {
        "a classifier too many": scalar("copa/head", 6),
        "classifier 1e18": scalar("copa/head", 10**18),
        "classifier -1": scalar("copa/head", -1),
    },
    ("elcfs", "statistics"): {
        "amplitudes of 2": extra("amplitudes", filled(2.0)),
        "amplitudes below 0": extra("amplitudes", filled(-0.5)),
        "more amplitudes than images": extra("amplitudes", many(5000)),
        "amplitudes of all its images": extra("amplitudes", many(SIZES[CULPRIT])),
    },
    ("pardon", "statistics"): {
        "a style of 1e4": extra("style", filled(1e4)),
        "negative means": extra("style", moment(0, -1e4)),
        "means of 100": extra("style", moment(0, 100.0)),
        "negative deviations": extra("style", moment(1, -1.0)),
    },
    ("vista", "statistics"): {
        "colours of 1.5": extra("style", moment(0, 1.5)),
        "colours below 0": extra("style", moment(0, -0.2)),
        "deviations of 0.6": extra("style", moment(1, 0.6)),
    },
    ("ccst", "statistics"): {
        "styles of 1e4": extra("styles", filled(1e4)),
        "more styles than images": extra("styles", many(5000)),
        "a style of every image in place of one": extra("styles", many(SIZES[CULPRIT])),
    },
}
"""What the culprit sends, by method and kind of message."""
_expected = {}


def undisturbed(method, purpose):
    """The weights and extras of a run whose culprit keeps silent where it could lie."""
    if (method, purpose) not in _expected:
        fine = five(method)
        silence(fine, purpose)
        play(fine)
        _expected[method, purpose] = fine.server.state
    return _expected[method, purpose]


@pytest.mark.parametrize(("method", "purpose"), CASES)
def test_one_of_five_is_named_and_the_others_go_on(method, purpose, subtests):
    for name, change in CASES[method, purpose].items():
        with subtests.test(name):
            small = five(method)
            lie(small, purpose, change)
            play(small)
            state = small.server.state
            assert state.round == 2
            times = 1 if purpose == "statistics" else 2
            assert [client for client, _ in refused(small)] == [CULPRIT] * times
            expected = undisturbed(method, purpose)
            assert same(state.weights, expected.weights)
            for tensor in (*state.weights.values(), *state.extras.values()):
                assert torch.isfinite(tensor).all()
    resumed = five(method)
    resumed.resume(State(**vars(state)), small.transport.memories)
    assert not resumed.server.round().refused


@pytest.mark.parametrize("count", [2**53, 2**53 - 1, 2**40])
def test_a_counter_that_nobody_can_count_on_from_has_no_other_refused(count):
    """The first site's: counters are no mean, the first update's are taken."""
    small = five()
    lie(small, "update", weight(COUNTER, count), culprit=0)
    play(small)
    assert {client for client, _ in refused(small)} == {0}
    assert "more batches than there can have been" in refused(small)[0][1]
    counters = [t for n, t in small.server.state.weights.items() if n.endswith(COUNTER)]
    assert max(map(int, counters)) < 100


def test_what_honest_sites_send_passes(subtests):
    for method in sorted({method for method, _ in CASES}):
        with subtests.test(method=method):
            small = five(method)
            play(small)
            assert refused(small) == []


@pytest.mark.parametrize(
    ("method", "purpose", "change"),
    [
        ("pardon", "statistics", extra("style", filled(1e-42))),
        ("vista", "statistics", extra("style", filled(1e-42))),
        ("fpl", "update", extra("fpl/prototypes", filled(1e-42))),
        ("feddg-ga", "update", extra("feddg-ga/loss_own", filled(1e-42))),
    ],
)
def test_numbers_next_to_nothing_spoil_nothing(method, purpose, change):
    small = five(method)
    lie(small, purpose, change)
    play(small)
    assert refused(small) == []
    for tensor in (*small.server.state.weights.values(), *small.server.state.extras.values()):
        assert torch.isfinite(tensor).all()


def test_a_negative_variance_is_found_by_the_type_of_its_layer():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("running_var", torch.tensor([-1.0]))
            self.first = torch.nn.BatchNorm2d(2)
            self.second = torch.nn.InstanceNorm1d(2, track_running_stats=True)
            self.third = torch.nn.InstanceNorm2d(2)
            self.again = self.first

    assert never_negative_names(Odd()) == {
        f"{layer}.{buffer}"
        for layer in ("first", "second", "again")
        for buffer in ("running_var", "num_batches_tracked")
    }


def test_a_range_that_nobody_declared_is_a_sane_one():
    class Plain(Method):
        sends = Method.sends | {"update/more": EntrySchema("something", (2,))}

    small = federation()
    checks = MessageChecks(Plain(), small.network, 3, small.settings)
    sent = {name: tensor.clone() for name, tensor in small.server.state.weights.items()}

    def fault(value):
        update = Update(0, 4, sent)
        update.extras.tensors["more"] = torch.tensor([value, 0.0])
        return checks.update_fault(update, small.server.state)

    assert fault(1e5) is None
    assert "outside -1e+06 .. 1e+06" in fault(1e20)
    assert "not finite" in fault(math.inf)


def test_a_control_follows_from_the_change_of_the_weights():
    """Exactly ``(x - y) / (K lr) - c``, so twice that is the farthest there can be."""
    train = TRAIN.model_copy(update={"local_steps": 2})
    small = five("scaffold", train=train)
    play(small, 1)
    state, replies = small.server.state, []
    honest = small.transport.train
    small.transport.train = lambda *given: (replies.append(r.keep()) or r for r in honest(*given))
    small.server.round()
    rate = in_round(train, 2).lr
    for update in replies:
        name = "classifier.weight"
        gradient = (state.weights[name] - update.weights[name]) / (2 * rate)
        sent = update.extras.tensors[f"scaffold/{name}"]
        torch.testing.assert_close(sent, gradient - state.extras[f"scaffold/{name}"])


@pytest.mark.parametrize(
    "make", [filled(1e5), filled(-1e6), lambda t: 30 * t], ids=["1e5", "-1e6", "30 times its own"]
)
def test_prototypes_far_larger_than_the_others_draw_nobody(make, monkeypatch, caplog):
    """Its weights are used: they are as honest as the others'."""
    small = five("fpl")
    lie(small, "update", extra("fpl/prototypes", make))
    play(small)
    assert caplog.text.count(f"client {CULPRIT}: its prototypes are left out") == 2
    others = lambda own: [found for client, found in own.items() if client != CULPRIT]  # noqa: E731
    monkeypatch.setattr(fpl, "of_like_size", others)
    fine = five("fpl")
    play(fine)
    assert same(small.server.state.weights, fine.server.state.weights)
    assert same(small.server.state.extras, fine.server.state.extras)


def attacked(lengths):
    """Moves the culprit's weights by so many lengths of all weights (and 1), at random."""

    def change(update):
        floats = {n: t for n, t in update.weights.items() if n.endswith(("weight", "bias"))}
        moves = {n: torch.randn_like(t) for n, t in floats.items()}
        norm = (
            length(update.weights, [n for n, t in update.weights.items() if t.is_floating_point()])
            + 1
        )
        for name, move in moves.items():
            floats[name] += move * (lengths * norm / length(moves, moves))
        return update

    return change


@pytest.mark.parametrize(
    ("backbone", "lengths"),
    [("cnn", 0.5), ("cnn", 95.0), ("cnn", 1e20), ("mobilenet_v3_small", 9.5)],
)
def test_an_attack_from_round_1_on_stops_nobody(backbone, lengths):
    """The others train on, and are not refused for undoing what was done to the model."""
    small = five(backbone=backbone)
    lie(small, "update", attacked(lengths))
    play(small, 3)
    weights = small.server.state.weights
    assert {client for client, _ in refused(small)} <= {CULPRIT}
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    load_weights(small.network, weights)
    images = small.pixels.gather(torch.arange(len(small.labels))).float() / 255
    assert torch.isfinite(small.method.predictor(small.network).eval()(images)).all()


@pytest.mark.parametrize(
    "privacy", [{"record_epsilon": 8.0}, {"epsilon": 8.0, "noised_at": "client"}]
)
def test_an_absurd_change_is_refused_where_clients_noise_what_they_send(privacy):
    """What comes with noise may be compared; only the server's noise forbids it."""
    pytest.importorskip("dp_accounting", reason="differential privacy is an extra")
    epochs = TRAIN.model_copy(update={"local_steps": None, "local_epochs": 1})
    options = {"backbone": "cnn_gn", "freeze": True, "train": epochs, "privacy": privacy}
    small = five(**options)
    lie(small, "update", attacked(1e20))
    play(small, 1)
    assert [client for client, _ in refused(small)] == [CULPRIT]


@pytest.mark.parametrize("lengths", [1e3, 1e20])
def test_an_absurd_change_is_refused_in_the_first_round_already(lengths):
    small = five()
    lie(small, "update", attacked(lengths))
    play(small, 1)
    assert [client for client, _ in refused(small)] == [CULPRIT]
    fine = five()
    silence(fine, "update")
    play(fine, 1)
    assert same(small.server.state.weights, fine.server.state.weights)


def test_no_larger_change_is_believed_after_the_first_round():
    """Whatever was sent in round 1 moves the median of five by nothing."""
    small = five()
    lie(small, "update", attacked(9.5))
    play(small, 1)
    medians = small.server.state.extras["server/changes"]
    silent = undisturbed("fedavg", "update").extras["server/changes"]
    assert float(medians[0]) < 2 * float(silent[0])
