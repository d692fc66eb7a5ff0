"""Clipped and noised updates: by hand, verified at the server, and what the noise is."""

import itertools
import math

import numpy
import pytest
import torch
from scipy import stats

from feddg.clients.client import Client
from feddg.errors import ExperimentError
from feddg.experiment import Experiment
from feddg.federation.federation import build
from feddg.federation.server import Hooks
from feddg.messages import Message, Refusal, Update
from feddg.methods.base import Round, State
from feddg.privacy.accounting import Account
from feddg.privacy.building import build_defences
from feddg.privacy.defence import WeightNames
from feddg.privacy.noise import Clipping
from feddg.privacy.robust import distance
from feddg.settings import PrivacySettings, TrainSettings
from federations import federation, same
from odd_inputs import NOT_FINITE


def clipped(kind, norm, received, trained):
    """What leaves a client that was sent ``received`` and trained to ``trained``."""
    floats = frozenset(name for name, t in received.items() if t.is_floating_point())
    defence = Clipping(PrivacySettings(clipping=kind))
    update = Update(0, 7, trained, terms={"cross_entropy": 2.0})
    defence.facts = WeightNames(floats, floats)
    return defence.protect(update, received, Message({}, {"norm": norm}))


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_a_change_of_length_5_becomes_one_of_length_1(kind):
    received = {"a": torch.tensor([1.0]), "n": torch.tensor(3), "b": torch.tensor([[2.0, 2.0]])}
    trained = {"a": torch.tensor([4.0]), "n": torch.tensor(9), "b": torch.tensor([[2.0, 6.0]])}
    update = clipped(kind, 1.0, received, trained)
    torch.testing.assert_close(update.weights["a"], torch.tensor([1.6]))
    torch.testing.assert_close(update.weights["b"], torch.tensor([[2.0, 2.8]]))
    assert update.weights["n"].item() == 9
    assert update.weights["n"].dtype == torch.int64
    assert trained["a"].item() == 4.0  # the network's own tensors are left alone
    assert update.terms == {}
    assert update.examples == 7
    assert update.extras.scalars == ({"clipping/norm_bit": 1} if kind == "adaptive" else {})


@pytest.mark.parametrize("change", [0.0, 0.5])
def test_a_short_change_stays_as_it_is(change):
    update = clipped("adaptive", 1.0, {"a": torch.zeros(1)}, {"a": torch.full((1,), change)})
    assert update.weights["a"].item() == change
    assert update.extras.scalars == {"clipping/norm_bit": 0}


@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_change_that_is_not_finite_counts_as_none(value):
    received = {"a": torch.ones(2), "b": torch.zeros(1)}
    update = clipped("fixed", 1.0, received, {"a": torch.tensor([value, 2.0]), "b": torch.ones(1)})
    assert same(update.weights, received)


def test_whether_training_failed_does_not_show_under_clipping(monkeypatch):
    plain = Client.task_loss

    def failing(client, outputs, targets):
        return plain(client, outputs, targets) * (math.nan if client.id == 1 else 1)

    monkeypatch.setattr(Client, "task_loss", failing)
    small = federation(privacy={"clipping": "fixed", "clipping_norm": 0.1}, freeze=True)
    small.server.setup()
    row = small.server.round()
    assert not row.refused
    (update,) = [reply for reply in small.replies if reply.client == 1]
    assert isinstance(update, Update)


def test_a_client_whose_training_failed_once_goes_on_from_what_it_kept_before(monkeypatch):
    plain = Client.task_loss

    def failing(client, outputs, targets):
        return plain(client, outputs, targets) * (math.nan if client.round == 2 else 1)

    monkeypatch.setattr(Client, "task_loss", failing)
    train = TrainSettings(rounds=3, batch_size=4, optimizer="adam", keep_optimizer=True)
    small = federation(privacy={"clipping": "fixed"}, freeze=True, train=train, sizes=(8, 8))
    small.server.setup()
    small.server.round()
    kept, sent = dict(small.transport.memories[1]), small.server.state.weights
    small.server.round()
    assert kept
    assert same(small.transport.memories[1], kept)
    assert same(small.server.state.weights, sent)
    small.server.round()
    assert not same(small.server.state.weights, sent)


@pytest.mark.parametrize("norm", [0.01, 3.0, 1e6])
def test_it_clips_as_flowers_own_adaptive_clipping_does(norm):
    theirs = pytest.importorskip("flwr.supercore.differential_privacy")
    rng = torch.Generator().manual_seed(4)
    received = {name: torch.randn(50, 20, generator=rng) for name in "abc"}
    trained = {name: t + torch.randn(50, 20, generator=rng) / 9 for name, t in received.items()}
    expected = [t.numpy().copy() for t in trained.values()]
    bit = theirs.compute_adaptive_clip_model_update(
        expected, [t.numpy() for t in received.values()], norm
    )
    update = clipped("adaptive", norm, received, trained)
    assert update.extras.scalars["clipping/norm_bit"] == int(bit)
    for found, wanted in zip(update.weights.values(), expected, strict=True):
        # Theirs sums the squares in float32.
        numpy.testing.assert_allclose(found.numpy(), wanted, rtol=1e-6, atol=1e-6)


FROZEN = {"model": {"backbone": "cnn", "weights": None, "normalization": "frozen"}}


def chosen(privacy=None, method="fedavg", **fields):
    settings = privacy or {"clipping": "fixed"}
    fields = {"data": "digits", "hold_out": "sketch", "clients": 3, **FROZEN, **fields}
    return Experiment(method=method, privacy=settings, **fields)


def defended(defences=(), **privacy):
    experiment = chosen(privacy, defences=defences, clients=6)
    method, network = build(experiment, 10)
    defences = build_defences(experiment, method, network)
    extras = defences.initial_extras()
    return method, defences, lambda: State(dict(network.state_dict()), dict(extras))


def released(method, defences, state, updates):
    """The server's side of a round."""
    hooks, round = Hooks(reversed(defences.defences)), Round(1, [], state)
    return hooks.completed(method.aggregate(state.next(), hooks.received(updates, round)), round)


@pytest.mark.parametrize("came", [4, 6])
def test_noise_is_of_the_planned_number_and_does_not_tell_how_many_came(came):
    method, defences, start = defended(clipping="fixed", clipping_norm=2.0, noise_multiplier=3.0)
    sent = start().weights
    updates = [Update(k, 10**k, sent) for k in range(came)]
    first, second = (released(method, defences, start(), updates).weights for _ in range(2))
    trained = sorted(defences.facts.trained)
    noise = torch.cat([(first[n].double() - sent[n].double()).flatten() for n in trained])
    assert len(noise) > 10_000
    low, high = stats.chi2.ppf([5e-10, 1 - 5e-10], len(noise))
    assert low < float(noise.square().sum()) / (2.0 * 3.0 / 6) ** 2 < high
    assert stats.kstest(noise.numpy(), "norm").pvalue > 1e-9
    assert all(not torch.equal(first[name], second[name]) for name in trained)
    frozen = first.keys() - set(trained)
    assert frozen
    assert all(torch.equal(first[name], sent[name]) for name in frozen)


def test_every_client_counts_the_same():
    method, defences, start = defended(clipping="fixed", clipping_norm=1e9)
    sent = start().weights
    updates = [
        Update(k, examples, {n: torch.full_like(t, k) for n, t in sent.items()})
        for k, examples in enumerate((1, 10, 1000))
    ]
    found = released(method, defences, start(), updates).weights
    for name in defences.facts.trained:
        torch.testing.assert_close(found[name], torch.ones_like(found[name]))


@pytest.mark.parametrize(("bits", "factor"), [((1, 1), 0.1), ((0, 0), -0.1), ((1, 0), 0.0)])
def test_the_norm_grows_while_most_updates_are_clipped(bits, factor):
    method, defences, start = defended(clipping="adaptive", clipping_norm=0.5)
    updates = [
        Update(k, 5, start().weights, Message({}, {"clipping/norm_bit": bit}))
        for k, bit in enumerate(bits)
    ]
    found = released(method, defences, start(), updates)
    told = (
        Hooks(defences.defences)
        .broadcast(method.broadcast(found), Round(2, [], found))
        .extras.scalars
    )
    assert told == {"clipping/norm": pytest.approx(0.5 * math.exp(factor))}


@pytest.mark.parametrize("rule", [(), ("median",), ("krum",)])
def test_each_good_updates_bit_counts_whatever_the_rule_makes_of_them(rule):
    method, defences, start = defended(rule, clipping="adaptive", clipping_norm=0.5)
    sent = start().weights
    far = sent | {"classifier.weight": sent["classifier.weight"] + 1}
    updates = [
        Update(k, 5, far if k == 5 else sent, Message({}, {"clipping/norm_bit": bit}))
        for k, bit in enumerate((0, 1, 1, 1, 1, 0))  # the last one is refused
    ]
    found = released(method, defences, start(), updates)
    norm = float(found.extras["defences/clipping/norm"])
    assert norm == pytest.approx(0.5 * math.exp(0.2 * (0.5 - 1 / 5)))


def test_the_count_of_clipped_updates_is_noised_too():
    settings = {"clipping": "adaptive", "clipping_norm": 0.5, "noise_multiplier": 1.0}
    method, defences, start = defended(**settings)
    update = Update(0, 5, start().weights, Message({}, {"clipping/norm_bit": 1}))
    norms = []
    for _ in range(100):
        # Of a run that has spent nothing: to add up 100 takes minutes.
        defences.defences[0].account = Account()
        state = released(method, defences, start(), [update])
        norms.append(float(state.extras["defences/clipping/norm"]))
    # The one update, which was clipped, is half a one below the middle; six were planned.
    noise = numpy.array([0.5 - 6 * math.log(norm / 0.5) / 0.2 for norm in norms])
    low, high = stats.chi2.ppf([5e-10, 1 - 5e-10], len(noise))
    assert low < (noise**2).sum() < high


# Whole rounds, and what the server verifies

LOUD = TrainSettings(rounds=2, batch_size=4, optimizer="sgd", lr=0.5)


def loud(**privacy):
    return federation(privacy={"clipping": "fixed", **privacy}, train=LOUD, freeze=True)


def test_in_process_no_update_is_longer_than_the_norm_and_none_is_refused():
    small = loud(clipping="adaptive", clipping_norm=0.25)
    start = small.server.state.weights
    record = small.server.round()
    assert not record.refused
    assert record.terms == {}
    change = [small.server.state.weights[n].double() - t.double() for n, t in start.items()]
    length = math.sqrt(sum(float(part.square().sum()) for part in change))
    assert 0.05 < length <= 0.25 + 1e-6
    norm = small.server.state.extras["defences/clipping/norm"]
    assert norm.item() == pytest.approx(0.25 * math.exp(0.1))  # all three were clipped


def test_the_ledger_lists_what_the_defence_says_and_nothing_else():
    small, plain = loud(clipping="adaptive"), federation(train=LOUD, freeze=True)
    said = []
    for run in (small, plain):
        run.run(1)
        layouts = {row["id"]: set(row["scalars"]) for row in run.ledger if row["kind"] == "layout"}
        rows = [row for row in run.ledger if row["kind"] == "message"]
        said.append({(row["direction"], s) for row in rows for s in layouts[row["layout"]]})
    assert said[0] - said[1] == {("down", "clipping/norm"), ("up", "clipping/norm_bit")}
    defence = small.server.defences.defences[0]
    assert [f"clipping/{entry.removeprefix('update/')}" for entry in defence.sends] == [
        "clipping/norm_bit"
    ]


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_the_variance_of_the_released_mean_in_process(method):
    runs = [
        federation(
            method,
            privacy={"clipping": "fixed", "clipping_norm": 0.25, "noise_multiplier": z},
            train=LOUD,
            freeze=True,
        )
        for z in (0.0, 2.0)
    ]
    quiet, noisy = (run.run(1) for run in runs)
    names = sorted(runs[0].server.defences.facts.trained)
    noise = torch.cat([(noisy[n].double() - quiet[n].double()).flatten() for n in names])
    deviation = 2.0 * 0.25 / 3
    low, high = stats.chi2.ppf([5e-10, 1 - 5e-10], len(noise))
    assert low < float((noise / deviation).square().sum()) < high
    assert stats.kstest(noise.numpy() / deviation, "norm").pvalue > 1e-9


def tampering(small, change):
    """Has client 1's updates changed on their way."""
    original = small.transport.train

    def train(clients, broadcast):
        for reply in original(clients, broadcast):
            yield change(reply.keep()) if reply.client == 1 else reply

    small.transport.train = train
    return small


def lengthened(by):
    def change(update):
        name = "classifier.weight"
        update.weights[name] = update.weights[name] + by
        return update

    return change


def saying(bit):
    def change(update):
        update.extras = Message({}, {} if bit is None else {"clipping/norm_bit": bit})
        return update

    return change


@pytest.mark.parametrize("by", [1e30, 0.5, 1e-4])
def test_a_change_longer_than_the_norm_is_refused_by_name(by):
    small = tampering(loud(clipping_norm=0.05), lengthened(by))
    record = small.server.round()
    assert [refusal.client for refusal in record.refused] == [1]
    reason = record.refused[0].reason
    assert "long; the norm is 0.05" in reason or "it moved the weights by" in reason
    assert [row["client"] for row in small.ledger if row["kind"] == "refusal"] == [1]


def test_a_norm_bit_that_is_none_is_refused_by_name(subtests):
    for bit in [None, 2, -1, 0.5, True, "1", "x" * 10_000, 10**400]:
        with subtests.test(bit=bit):
            small = tampering(loud(clipping="adaptive", clipping_norm=0.05), saying(bit))
            record = small.server.round()
            assert [refusal.client for refusal in record.refused] == [1]
            assert "norm_bit" in record.refused[0].reason
            assert len(record.refused[0].reason) < 200


def test_honest_rounding_is_never_refused(subtests):
    for scale, norm in itertools.product([1e-3, 1.0, 1e3], [1e-6, 1e-3, 0.1, 10.0]):
        with subtests.test(norm=norm, scale=scale):
            rng = torch.Generator().manual_seed(1)
            sent = {"a": torch.randn(300, 300, generator=rng) * scale}
            trained = {"a": sent["a"] + torch.randn(300, 300, generator=rng)}
            update = clipped("fixed", norm, sent, trained)
            facts = WeightNames(frozenset("a"), frozenset("a"))
            defence = Clipping(PrivacySettings(clipping="fixed", clipping_norm=norm))
            defence.facts, state = facts, State(sent)
            defence.remember(state, defence.initial_memory())
            assert defence.received(update, Round(1, [], state)) is update


def test_a_wide_norm_without_noise_is_fedavg_with_equal_counts():
    plain = federation(sizes=(6, 6, 6), freeze=True).run()
    wide = {"clipping": "fixed", "clipping_norm": 1e6}
    found = federation(sizes=(6, 6, 6), freeze=True, privacy=wide).run()
    for name, tensor in plain.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)


def test_clients_that_train_at_once_clip_alike():
    privacy = {"clipping": "adaptive", "clipping_norm": 0.2}
    alone, together = (
        federation(privacy=privacy, train=LOUD, freeze=True, at_once=n) for n in (1, 3)
    )
    assert same(alone.run(), together.run())


def test_a_failed_round_leaves_the_norm_alone_and_a_restart_goes_on_from_it():
    small = loud(clipping="adaptive", clipping_norm=0.25)
    before = small.server.state.extras["defences/clipping/norm"].clone()
    original = small.transport.train
    small.transport.train = lambda clients, broadcast: iter([Refusal(id, "no") for id in clients])
    with pytest.raises(Exception, match="0 good updates"):
        small.server.round()
    assert torch.equal(small.server.state.extras["defences/clipping/norm"], before)
    small.transport.train = original
    small.server.round()
    state = small.server.state
    again = loud(clipping="adaptive", clipping_norm=0.25)
    again.resume(State(state.weights, state.extras, round=1, rounds=2), {})
    for run in (small, again):
        run.server.round()
    assert same(again.server.state.weights, small.server.state.weights)
    assert same(again.server.state.extras, small.server.state.extras)
    assert not torch.equal(state.extras["defences/clipping/norm"], before)


# What it goes with

UNSOUND = {
    "pardon": "statistics/style .* neither clipped nor noised",
    "ccst": "statistics/styles",
    "fpl": "update/fpl/",
    "scaffold": "update/",
    "feddg-ga": "answer:",
    "afl": "answer:",
    "fedbn": "stay with each client",
    "fedgma": "its own 'aggregate'",
    "randaug+fedgma": "its own 'aggregate'",
}
SENDS_NOTHING = {"name": "pardon", "contrastive": "ordinary"}


def test_methods_that_clipping_does_not_protect_are_refused(subtests):
    for name in UNSOUND:
        with subtests.test(name=name):
            experiment = chosen({"clipping": "fixed", "noise_multiplier": 1.0}, method=name)
            with pytest.raises(ExperimentError, match=UNSOUND[name]):
                build_defences(experiment, *build(experiment, 10))


def test_methods_whose_server_takes_the_mean_of_weights_are_protected(subtests):
    plain = ["fedavg", "fedprox", "mixstyle", "jigen", "randaug+rsc", "group_dro", "irm+mixup"]
    for name in [*plain, SENDS_NOTHING]:
        with subtests.test(name=name):
            experiment = chosen(method=name)
            assert build_defences(experiment, *build(experiment, 10)).defences


def test_a_mean_of_another_kind_goes_with_clipping_but_not_with_noise_at_the_server():
    def trained(norm=None):
        privacy = {} if norm is None else {"clipping": "fixed", "clipping_norm": norm}
        small = federation("fedgma", privacy=privacy, freeze=True, sizes=(8, 8, 8))
        sent = small.server.state.weights
        small.server.round()
        weights = small.server.state.weights
        floats = [name for name, tensor in sent.items() if tensor.is_floating_point()]
        return weights, distance(weights, sent, floats)

    free, far = trained()
    assert same(trained(1e6)[0], free)
    assert trained(0.01)[1] < 0.0101 < far


def test_running_statistics_are_refused_unless_frozen():
    def protected(normalization):
        model = {"backbone": "resnet18", "weights": None, "normalization": normalization}
        experiment = chosen(model=model)
        return build_defences(experiment, *build(experiment, 10))

    with pytest.raises(ExperimentError, match=r"set model.normalization to frozen"):
        protected("train")
    assert protected("frozen")


def test_noise_without_clipping_is_refused():
    with pytest.raises(ExperimentError, match="set clipping"):
        chosen({"noise_multiplier": 1.0})


def test_noise_where_the_featurizer_stays_as_it_is_is_refused():
    train = {"rounds": 3, "head_rounds": 1}
    experiment = chosen({"clipping": "fixed", "noise_multiplier": 1.0}, train=train)
    with pytest.raises(ExperimentError, match=r"train.head_rounds is 1: .* noise on updates"):
        build_defences(experiment, *build(experiment, 10))
    experiment = chosen(train=train)
    assert build_defences(experiment, *build(experiment, 10))
