"""Ridge: against scikit-learn on all images together, and an attack on its privacy."""

import math
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddg.clients.client import Client, RecordNoise
from feddg.data.data_set import load_source
from feddg.data.decoded import open_pixels
from feddg.errors import ClientError, ExperimentError, NotEnoughUpdates
from feddg.experiment import Experiment, explain
from feddg.messages import Message
from feddg.methods.composition import build_method
from feddg.methods.ridge import (
    CROSS,
    GRAM,
    LEFT_OUT,
    PENALTY,
    SCALE,
    SENSITIVITY,
    RidgeClassifier,
)
from feddg.models.backbones import build_network
from feddg.models.closed_form import (
    CORRECT,
    EXAMPLES,
    QUESTION,
    gram_of_means,
    packed,
    solved,
    unpacked,
)
from feddg.privacy.accounting import gaussian_noise
from feddg.settings import TrainSettings
from federations import CLASSES, features_of, federation, ridge_of
from partitions import partition

TRAIN = TrainSettings(rounds=1, batch_size=16, trainable="head")


def federation_of(sizes, penalties=(1.0,), method="ridge", settings=None, **options):
    """A federation on images and a featurizer that nobody trained."""
    chosen = build_method(method, {"penalties": penalties} | (settings or {}))
    return federation(chosen, sizes=sizes, train=TRAIN, backbone="cnn_gn", **options)


def share_of(chosen, name):
    state = chosen.server.state
    return (state.weights[f"classifier.{name}"].double() / state.extras[SCALE]).numpy()


@pytest.mark.parametrize(
    ("sizes", "penalty"), [((300,), 1.0), ((40, 3, 57, 20, 60, 30, 25, 15, 35, 15), 0.01)]
)
def test_it_is_the_ridge_of_all_images_together(sizes, penalty):
    chosen = federation_of(sizes, [penalty])
    chosen.run()
    features, labels = features_of(chosen)
    expected = ridge_of(features, labels, penalty)
    # The solution is in double precision, the classifier that is served in single.
    numpy.testing.assert_allclose(share_of(chosen, "weight"), expected.coef_, atol=1e-6)
    numpy.testing.assert_allclose(share_of(chosen, "bias"), expected.intercept_, atol=1e-6)


@pytest.fixture(scope="module", params=["digits", "pacs"])
def embedded(request):
    """256 features ``(n, 256)`` of real images, their labels and domains."""
    if request.param == "digits":
        table, size, weights, backbone = load_source("digits"), 16, None, "cnn_gn"
    else:
        table = load_source("pacs", request.getfixturevalue("shared_data") / "pacs")
        table = table.take(numpy.arange(0, len(table), 18))
        size, weights, backbone = 32, "imagenet", "efficientnet_lite0"
    table, pixels, *_ = open_pixels(table, size, cache=None)
    network = build_network(backbone, len(table.class_names), weights=weights, image_size=size)
    network.eval()
    with torch.no_grad():
        parts = [
            network.features(pixels.gather(rows).float() / 255)
            for rows in torch.arange(len(table)).split(64)
        ]
    return torch.cat(parts).unflatten(1, (256, -1)).mean(2), table.labels, table.domains


def sums_over(embedded, clients, heterogeneity, monkeypatch):
    """Both sums of clients who hold these, before they are wiped."""
    features, labels, domains = embedded
    rows = partition(domains, labels, clients, heterogeneity=heterogeneity, seed=0).rows
    order, sizes = torch.from_numpy(numpy.concatenate(rows)), tuple(map(len, rows))
    classes = int(labels.max()) + 1
    chosen = federation_of(sizes, [0.3], classes=classes)
    chosen.labels, own = torch.from_numpy(labels)[order], features[order]
    monkeypatch.setattr(Client, "frozen_features", lambda client: own[client.examples.rows])
    solve, sums = chosen.method.after_round, {}

    def noted(state, ask):
        sums.update(state.weights)
        return solve(state, lambda name, question: iter(()))  # nobody is left out

    chosen.method.after_round = noted
    chosen.run()
    return sums


@pytest.mark.parametrize(
    ("clients", "heterogeneity"),
    [(1, 0.0), (10, 0.5), (300, 1.0)],
)
def test_real_features_give_the_ridge_of_all_however_they_are_spread(
    embedded, clients, heterogeneity, monkeypatch
):
    sums = sums_over(embedded, clients, heterogeneity, monkeypatch)
    weight, bias = next(solved(unpacked(sums[GRAM]), sums[CROSS], [0.3]))
    features, labels, _ = embedded
    expected = ridge_of(features.double().numpy(), labels, 0.3, sums[CROSS].shape[1])
    numpy.testing.assert_allclose(weight.detach(), expected.coef_, rtol=0, atol=1e-6)
    numpy.testing.assert_allclose(bias.detach(), expected.intercept_, rtol=0, atol=1e-6)


def test_without_a_penalty_it_is_the_shortest_least_squares_solution():
    chosen = federation_of((150, 200), [0.0])  # 350 images, 256 features, some of them always 0
    chosen.run()
    features, labels = features_of(chosen)
    centred, targets = features - features.mean(0), numpy.eye(CLASSES)[labels]
    expected = numpy.linalg.pinv(centred, rcond=1e-7) @ (targets - targets.mean(0))
    found = centred @ share_of(chosen, "weight").T
    numpy.testing.assert_allclose(found, centred @ expected, atol=1e-4)


def test_a_client_left_out_is_one_whose_images_nobody_used():
    chosen = federation_of((40, 30, 50, 20), [0.001, 0.1, 10.0])
    chosen.run()
    accuracies = []
    for penalty in (0.001, 0.1, 10.0):
        row = []
        for out in range(4):
            model = ridge_of(*features_of(chosen, [c for c in range(4) if c != out]), penalty)
            features, labels = features_of(chosen, [out])
            row.append(float((model.predict(features).argmax(1) == labels).mean()))
        accuracies.append(row)
    best = int(numpy.mean(accuracies, axis=1).argmax())
    extras = chosen.server.state.extras
    assert float(extras[PENALTY]) == (0.001, 0.1, 10.0)[best]
    assert extras[LEFT_OUT].tolist() == pytest.approx(accuracies[best])


def test_its_sums_are_not_in_the_model():
    chosen = federation_of((20, 30))
    weights = chosen.run()
    assert not weights["classifier.gram"].any()
    assert not weights["classifier.cross"].any()


def test_secure_aggregation_changes_the_sums_by_its_rounding_alone():
    found = []
    for defences in ((), (("secure_aggregation", {}),)):
        chosen = federation_of((20, 30, 25), defences=defences)
        solve, sums = chosen.method.after_round, {}

        def noted(state, ask, solve=solve, sums=sums):
            sums.update(state.weights)
            return solve(state, ask)

        chosen.method.after_round = noted
        chosen.run()
        found.append((chosen, sums))
    (plain, open_sums), (masked, opened) = found
    assert masked.server.defences.masking is not None
    for name in ("classifier.gram", "classifier.cross"):
        # Fixed point of 26 bits: each client's mean is off by half a step at most.
        error = (opened[name] - open_sums[name]).abs().max()
        assert 0 < float(error) <= 2.0**-27 * (1 + 1e-6)
    numpy.testing.assert_allclose(share_of(masked, "bias"), share_of(plain, "bias"), atol=1e-4)
    left_out = [c.server.state.extras[LEFT_OUT].tolist() for c in (plain, masked)]
    assert left_out[0] == pytest.approx(left_out[1], abs=0.06)


@pytest.mark.parametrize(
    ("change", "reason", "class_means"),
    [
        (lambda weights: weights[CROSS].fill_(50.0), "no means over images", False),
        (lambda weights: weights[GRAM][:9].fill_(1e3), "no features", False),
        (lambda weights: weights[CROSS][-1].copy_(torch.eye(3)[0]), "no features", True),
    ],
)
def test_sums_of_no_images_are_refused_and_the_others_solve_without(change, reason, class_means):
    chosen = federation_of((20, 30, 25), settings={"class_means": class_means})
    honest = chosen.transport.train

    def lying(clients, broadcast):
        for update in honest(clients, broadcast):
            if update.client == 1:
                with torch.no_grad():
                    change(update.weights)
            yield update

    chosen.transport.train = lying
    chosen.server.setup()
    row = chosen.server.round()
    assert [(r.client, reason in r.reason) for r in row.refused] == [(1, True)]
    assert class_means or sorted(row.left_out) == [0, 2]


def test_a_client_of_far_larger_features_is_named(monkeypatch):
    chosen = federation_of((20, 30, 25, 20, 25))
    plain = Client.frozen_features

    def longer(client):
        return plain(client) * (4 if client.id == 1 else 1)

    monkeypatch.setattr(Client, "frozen_features", longer)
    chosen.server.setup()
    row = chosen.server.round()
    assert [(r.client, "times the median" in r.reason) for r in row.refused] == [(1, True)]
    assert sorted(row.left_out) == [0, 2, 3, 4]


@pytest.mark.parametrize("lie", [21, 10**6])
def test_a_client_that_has_more_right_than_images_has_no_say(lie):
    alone = federation_of((20, 20, 25, 20, 25), [0.01, 1.0, 100.0])
    alone.run()
    chosen = federation_of((20, 20, 25, 20, 25), [0.01, 1.0, 100.0])
    honest = chosen.transport.ask

    def lying(*asked):
        for id, answer in honest(*asked):
            if id == 1:
                answer.tensors[CORRECT] = torch.tensor([0, 0, lie])
            yield id, answer

    chosen.transport.ask = lying
    chosen.run()
    extras = chosen.server.state.extras
    assert float(extras[PENALTY]) == float(alone.server.state.extras[PENALTY]) < 100
    assert float(extras[LEFT_OUT][1]) == -1
    assert [(r["client"], "correct" in r["reason"]) for r in refusals(chosen)] == [(1, True)]


def refusals(chosen):
    return [row for row in chosen.ledger if row["kind"] == "refusal"]


def test_masked_sums_may_be_larger_than_any_step_but_are_of_some_features(monkeypatch):
    chosen = federation_of((20, 30, 25), defences=(("secure_aggregation", {}),))
    plain = Client.frozen_features
    monkeypatch.setattr(Client, "frozen_features", lambda client: 1.7 * plain(client))
    assert chosen.run()["classifier.weight"].any()
    chosen = federation_of((20, 30, 25), defences=(("secure_aggregation", {}),))
    honest = chosen.method.report

    def lying(client):
        message = honest(client)
        if client.id == 1:
            client.network.classifier.cross.data *= 3
        return message

    chosen.method.report = lying
    with pytest.raises(NotEnoughUpdates, match="clients 0, 1, 2 is refused"):
        chosen.run()


@pytest.mark.slow
def test_ten_thousand_clients():
    chosen = federation_of((1,) * 10_000, [0.1, 1.0])
    chosen.run()
    assert (chosen.server.state.extras[LEFT_OUT] >= 0).all()
    assert chosen.accuracy() > 0.9


@pytest.mark.parametrize("partner", ["randconv", "ccst"])
def test_further_versions_of_images_join_the_sums(partner):
    settings = {"codec": "colors"} if partner == "ccst" else {}
    alone = federation_of((20, 30))
    both = federation_of((20, 30), method=f"ridge+{partner}", settings=settings)
    alone.run()
    both.run()
    assert not numpy.allclose(share_of(alone, "weight"), share_of(both, "weight"), atol=1e-3)
    assert both.accuracy() > 0.6


# Class means alone.


def test_class_means_give_what_their_spread_says():
    """FedCOF's equations, loop by loop."""
    sizes = (40, 3, 57, 20, 60, 1)
    chosen = federation_of(sizes, settings={"class_means": True}, penalties=[0.3])
    asked, ask = [], chosen.transport.ask
    chosen.transport.ask = lambda *given: asked.append(given) or ask(*given)
    chosen.run()
    assert not asked
    everything, total = features_of(chosen)[0], sum(sizes)
    second = numpy.zeros((everything.shape[1],) * 2)
    by_class = {c: [] for c in range(CLASSES)}
    for client in range(len(sizes)):
        features, labels = features_of(chosen, [client])
        for c in set(labels.tolist()):
            by_class[c].append((features[labels == c].mean(0), (labels == c).sum()))
    for held in by_class.values():
        count = sum(n for _, n in held)
        middle = sum(n * mean for mean, n in held) / count
        spread = sum(n * numpy.outer(mean - middle, mean - middle) for mean, n in held)
        second += (count - 1) / (len(held) - 1) * spread + count * numpy.outer(middle, middle)
    _, labels = features_of(chosen)
    mean, targets = everything.mean(0), numpy.eye(CLASSES)[labels]
    centred = second / total - numpy.outer(mean, mean)
    cross = everything.T @ targets / total - numpy.outer(mean, targets.mean(0))
    lam = 0.3 * numpy.trace(centred) / len(centred)
    weight = numpy.linalg.solve(centred + lam * numpy.eye(len(centred)), cross)
    numpy.testing.assert_allclose(share_of(chosen, "weight"), weight.T, atol=1e-5)
    bias = targets.mean(0) - mean @ weight
    numpy.testing.assert_allclose(share_of(chosen, "bias"), bias, atol=1e-4)


def unit_rows(weight):
    return weight / numpy.linalg.norm(weight, axis=1, keepdims=True)


def test_class_means_solved_as_fedcof_published_it():
    """Its code, loop by loop: no scatter between classes, 1 on the diagonal, rows of length 1."""
    sizes = (40, 3, 57, 20, 60, 1)
    chosen = federation_of(sizes, settings={"class_means": True, "solution": "published"})
    chosen.run()
    features, labels = features_of(chosen)
    gram = numpy.zeros((features.shape[1],) * 2)
    for c in range(CLASSES):
        held = []
        for client in range(len(sizes)):
            own, classes = features_of(chosen, [client])
            if (classes == c).any():
                held.append(((classes == c).sum(), own[classes == c].mean(0)))
        count = sum(n for n, _ in held)
        middle = sum(n * mean for n, mean in held) / count
        covariance = sum(n * numpy.outer(mean - middle, mean - middle) for n, mean in held)
        covariance = covariance / (len(held) - 1) + numpy.eye(len(gram))
        gram += (count - 1) * covariance
    middle = features.mean(0)
    gram += len(features) * numpy.outer(middle, middle)
    weight = numpy.linalg.solve(gram, features.T @ numpy.eye(CLASSES)[labels]).T
    numpy.testing.assert_allclose(share_of(chosen, "weight"), unit_rows(weight), atol=1e-5)
    assert (share_of(chosen, "bias") == 0).all()


def test_ridge_solved_as_fed3r_published_it():
    chosen = federation_of((20, 30), settings={"solution": "published", "when_unknown": 0.5})
    asked, ask = [], chosen.transport.ask
    chosen.transport.ask = lambda *given: asked.append(given) or ask(*given)
    chosen.run()
    assert not asked
    features, labels = features_of(chosen)
    gram = features.T @ features + 0.5 * numpy.eye(features.shape[1])
    weight = numpy.linalg.solve(gram, features.T @ numpy.eye(CLASSES)[labels]).T
    numpy.testing.assert_allclose(share_of(chosen, "weight"), unit_rows(weight), atol=1e-5)
    assert (share_of(chosen, "bias") == 0).all()


def test_class_means_of_images_drawn_alike_have_their_covariance():
    """The estimate has no bias: over many clients of unequal sizes it is that of the images."""
    rng = numpy.random.default_rng(0)
    shape, means = rng.normal(size=(4, 4)), rng.normal(size=(2, 4)) * 3
    sums, second = [], numpy.zeros((5, 5))
    for size in rng.integers(1, 30, 4000):
        labels = rng.integers(0, 2, size)
        rows = numpy.hstack(
            [rng.normal(size=(size, 4)) @ shape + means[labels], numpy.ones((size, 1))]
        )
        second += rows.T @ rows
        sums.append(torch.tensor(rows.T @ numpy.eye(2)[labels]))
    found = gram_of_means(sums).numpy()
    numpy.testing.assert_allclose(found, second, atol=0.03 * second.max())


def test_class_means_are_a_small_message():
    full, small = (
        federation_of((20, 30), settings={"class_means": means}) for means in (False, True)
    )
    up = []
    for chosen in (full, small):
        chosen.run()
        (row, *_) = [r for r in chosen.ledger if r.get("purpose") == "update"]
        up.append(row["bytes"])
    rows = full.network.features_dimension + 1
    assert up[0] - up[1] == 8 * rows * (rows + 1) // 2
    assert small.accuracy() > 0.8


# Privacy.


CLIPPED = {"clip": 5.0}


def sums_of(chosen, rows, labels):
    """Both sums of a method over features, in one vector."""
    extended = chosen.extended(torch.tensor(rows))
    cross = extended.new_zeros(extended.shape[1], CLASSES)
    cross.index_add_(1, torch.tensor(labels), extended.T)
    return torch.cat([packed(extended.T @ extended), cross.flatten()])


@given(st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=4), st.integers(0, CLASSES - 1))
def test_no_image_moves_the_sums_by_more_than_the_sensitivity(features, label):
    method = build_method("ridge", CLIPPED)
    rows, labels = [[1.0, 2.0, -3.0, 0.5], [0.0, 1.0, 0.0, 4.0]], [0, 1]
    without = sums_of(method, rows, labels)
    with_it = sums_of(method, [*rows, features], [*labels, label])
    assert float((with_it - without).norm()) <= SENSITIVITY * (1 + 1e-9)


def test_the_longest_image_moves_the_sums_by_the_sensitivity():
    method = build_method("ridge", CLIPPED)
    moved = sums_of(method, [[1e9, 0.0, 0.0, 0.0]], [1]).norm()
    assert float(moved) == pytest.approx(SENSITIVITY)


def test_who_knows_all_but_one_image_cannot_tell_more_than_epsilon_allows():
    """The best test there is between two neighbours: along the direction in which they differ."""
    epsilon, delta, trials = 1.0, 1e-3, 2000
    multiplier = gaussian_noise(epsilon, delta)
    method = build_method("ridge", CLIPPED)
    rows, labels = [[9.0, -9.0, 3.0], [1.0, 2.0, -3.0], [0.0, 1.0, 0.5]], [0, 1, 2]
    with_it, without = (sums_of(method, rows[n:], labels[n:]) for n in (0, 1))
    direction = with_it - without
    distance = float(direction.norm())
    assert distance == pytest.approx(SENSITIVITY)  # the worst image there is

    def released(images):
        """What leaves a client with these images, as sums."""
        classifier = RidgeClassifier(3, CLASSES)
        examples = SimpleNamespace(classes=CLASSES)
        worker = SimpleNamespace(record_noise=RecordNoise(multiplier, 1.0))
        network = SimpleNamespace(classifier=classifier)
        client = SimpleNamespace(scratch={}, examples=examples, worker=worker, network=network)
        batch = SimpleNamespace(labels=torch.tensor(labels[images:]))
        method.head_loss(client, batch, torch.tensor(rows[images:]))
        method.report(client)
        sums = torch.cat([classifier.gram.detach(), classifier.cross.detach().flatten()])
        return sums * (3 - images)

    scores = {
        left: numpy.array([float((released(left) - without) @ direction) for _ in range(trials)])
        for left in (0, 1)
    }
    # With probability 1 - 1e-6 the true rates lie within this of those that were counted.
    slack = math.sqrt(math.log(2 / 1e-6) / (2 * trials))
    for at in numpy.quantile(scores[0], [0.1, 0.3, 0.5, 0.7, 0.9]):
        found, false = ((scores[left] > at).mean() for left in (0, 1))
        assert found - slack <= math.exp(epsilon) * (false + slack) + delta
    # And the noise is no larger than promised: the scores' deviation is the noise along it.
    noise = scores[1].std() / distance
    assert noise == pytest.approx(multiplier * SENSITIVITY, rel=0.05)


@pytest.mark.parametrize(
    ("settings", "examples", "named"),
    [
        (CLIPPED, 100, "stay private"),
        ({"class_means": True}, 100, "stay private"),
        ({}, 40, "without any images but its own"),
    ],
)
def test_a_hostile_server_learns_nothing_by_asking(settings, examples, named):
    chosen = federation_of((40, 40), settings=settings)
    question, client = Message({}, {EXAMPLES: examples}), chosen.client()
    client.received = {GRAM: torch.zeros(1), CROSS: torch.zeros(1)}  # sums that it made up
    with pytest.raises(ClientError, match=named):
        chosen.method.answer(client, QUESTION, question)


def experiment(**fields):
    given = {"method": "ridge", "data": "digits", "hold_out": "sketch", "model": {"weights": None}}
    return Experiment(**(given | fields))


def checked(**fields):
    chosen = experiment(**fields)
    build_method(chosen.method.name, chosen.method.settings).check(chosen)


def test_what_it_cannot_be_is_refused_by_field(subtests):
    for fields, named in [
        ({"train": {"trainable": "all"}}, "set train.trainable to head"),
        ({"model": {"embedding": "linear"}}, "set model.embedding to none"),
        ({"privacy": {"record_epsilon": 2.0}}, "method.clip"),
        (
            {
                "method": {"name": "ridge", "class_means": True},
                "defences": ["secure_aggregation"],
            },
            "method.class_means",
        ),
        ({"method": {"name": "ridge", "penalties": [-1.0]}}, "penalties.0: "),
        ({"method": {"name": "ridge", "clip": 5.0, "solution": "published"}}, "method.solution"),
        (
            {
                "method": {"name": "ridge+randconv", "clip": 5.0},
                "privacy": {"record_epsilon": 2.0},
            },
            "more than once",
        ),
    ]:
        with subtests.test(named=named), pytest.raises(ExperimentError, match=named):
            checked(**fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"train": {"class_weights": "balanced"}}, "train.class_weights does nothing"),
        ({"train": {"label_smoothing": 0.1}}, "train.label_smoothing does nothing"),
        ({"server": {"weighting": "uniform"}}, "server.weighting does nothing"),
        (
            {"train": {"label_smoothing": 0.1}, "server": {"weighting": "uniform"}},
            "train.label_smoothing does nothing, server.weighting does nothing",
        ),
    ],
)
def test_what_weighs_images_or_clients_is_said_to_do_nothing(fields, named):
    found = [*build_method("ridge", {}).diagnostics(experiment(**fields))]
    assert {(one.code, one.severity) for one in found} == {("without-effect", "warning")}
    assert ", ".join(one.text.partition(":")[0] for one in found) == named
    assert not [*build_method("ridge", {}).diagnostics(experiment())]


def test_what_others_train_by_makes_no_other_experiment_of_it():
    plain = experiment()
    train = {"rounds": 9, "local_epochs": 3, "local_steps": 2, "select_every": 5, "drop_last": True}
    assert experiment(train=train).id == plain.id
    assert experiment(train=train).train == plain.train
    assert (plain.train.rounds, plain.train.local_steps) == (1, None)
    sources = explain({"method": "ridge", "data": "digits", "train": {"rounds": 9}})
    assert sources["train.rounds"].source == "ridge has one round"
    checked(train=train)
    checked(train=train, method={"name": "ridge", "clip": 5.0}, privacy={"record_epsilon": 2.0})


def test_a_private_run_notes_what_an_image_costs():
    options = {"privacy": {"record_epsilon": 4.0, "delta": 1e-4}}
    chosen = federation_of((40, 40), settings=CLIPPED, **options)
    assert [d.name for d in chosen.server.defences.defences] == ["noised_records"]
