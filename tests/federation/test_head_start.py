"""Training that starts from a classifier in closed form, in process and over Flower."""

import json

import pytest
import torch

from feddg.api import run
from feddg.diagnostics import collected
from feddg.errors import ExperimentError
from feddg.experiment import checked_settings
from feddg.messages import Broadcast, Message
from feddg.methods.base import methods
from feddg.methods.ridge import CROSS, GRAM
from feddg.models.closed_form import PENALTIES, SCALES, packed, unpacked
from feddg.privacy.building import build_defences
from feddg.settings import TrainSettings
from federations import features_of, federation, ridge_of, same
from flower_grid import Deployment, experiment, weights

SIZES = (40, 30, 50, 20)


def started(method="fedavg", sizes=SIZES, backbone="cnn_gn", **train):
    """A federation after its setup, on a featurizer that nobody trained."""
    settings = TrainSettings(**{"rounds": 1, "batch_size": 16, "head": "ridge"} | train)
    chosen = federation(method, sizes=sizes, train=settings, backbone=backbone)
    chosen.start()
    return chosen


def test_the_classifier_is_the_ridge_of_all_images_with_what_does_best_at_clients_left_out():
    chosen = started()
    clients = range(len(SIZES))
    accuracies, losses = [], []
    for penalty in PENALTIES:
        models = [
            ridge_of(*features_of(chosen, [c for c in clients if c != o]), penalty) for o in clients
        ]
        rows = [features_of(chosen, [out]) for out in clients]
        scores = [model.predict(features) for model, (features, _) in zip(models, rows)]
        accuracies.append([float((s.argmax(1) == y).mean()) for s, (_, y) in zip(scores, rows)])
        pairs = [(torch.tensor(s), torch.tensor(y)) for s, (_, y) in zip(scores, rows)]
        means = [
            [float(torch.nn.functional.cross_entropy(scale * s, y)) for s, y in pairs]
            for scale in SCALES
        ]
        losses.append([sum(each) / len(each) for each in means])
    best = max(range(len(PENALTIES)), key=lambda i: sum(accuracies[i]))
    scale = SCALES[min(range(len(SCALES)), key=lambda j: losses[best][j])]
    model = ridge_of(*features_of(chosen), PENALTIES[best])
    state = chosen.server.state.weights
    expected = torch.tensor(scale * model.coef_)
    torch.testing.assert_close(state["classifier.weight"].double(), expected, rtol=1e-4, atol=1e-5)
    expected = torch.tensor(scale * model.intercept_)
    torch.testing.assert_close(state["classifier.bias"].double(), expected, rtol=1e-4, atol=1e-5)
    assert list(chosen.setup.left_out.values()) == pytest.approx(accuracies[best])


def test_clients_begin_round_1_with_it():
    chosen = started(lr=1e-12)
    before = {n: t.clone() for n, t in chosen.server.state.weights.items()}
    assert not chosen.server.round().refused
    assert chosen.accuracy() > 0.8
    after = chosen.server.state.weights["classifier.weight"]
    torch.testing.assert_close(after, before["classifier.weight"])


def featurizer_bytes(rows):
    """Bytes of the featurizer that each client was sent before round 1, by the ledger's rows."""
    layouts = {row["id"]: row["tensors"] for row in rows if row["kind"] == "layout"}
    sent = dict.fromkeys(range(3), 0)
    for row in rows:
        if row["kind"] == "message" and (row["round"], row["direction"]) == (0, "down"):
            held = [t["bytes"] for t in layouts[row["layout"]] if "featurizer." in t["name"]]
            sent[row["client"]] = sent.get(row["client"], 0) + sum(held)
    return sent


@pytest.mark.parametrize("method", ["fedavg", "pardon"])
def test_the_network_is_sent_once_before_round_1(method):
    chosen = started(method, sizes=(40, 30, 50))
    state = chosen.server.state.weights.items()
    once = sum(t.numel() * t.element_size() for name, t in state if name.startswith("featurizer."))
    assert set(featurizer_bytes(chosen.ledger).values()) == {once}


def test_what_weighs_images_is_said_to_act_from_round_1_on():
    for train, named in (({"class_weights": "balanced"}, ["train.class_weights acts"]), ({}, [])):
        with collected() as found:
            started(**train)
        said = [each.text for each in found if each.code == "head-counts-alike"]
        assert len(said) == len(named)
        assert all(name in text for name, text in zip(named, said))


def test_a_single_client_has_nobody_to_be_left_out_of():
    chosen = started(sizes=(60,))
    assert chosen.setup.left_out == {}
    assert chosen.accuracy() > 0.8


def test_every_method_starts_from_it(subtests):
    for method in sorted(methods().keys() - {"local", "ridge", "scaffold"}):
        with subtests.test(method=method):
            chosen = started(method, sizes=(7, 5, 6), backbone="cnn", local_steps=1, batch_size=4)
            assert len(chosen.setup.left_out) == 3
            assert chosen.server.state.weights["classifier.weight"].any()
            assert not chosen.server.round().refused


@pytest.mark.parametrize(
    ("method", "reason"), [("ridge", "no linear classifier"), ("local", "shares no classifier")]
)
def test_what_has_no_such_classifier_is_refused(method, reason):
    with pytest.raises(ExperimentError, match=reason):
        started(method)


def larger(sums):
    """The sums of features that are a hundred times as large."""
    matrix = unpacked(sums[GRAM])
    scale = torch.full((len(matrix),), 100.0).double()
    scale[-1] = 1
    return {GRAM: packed(matrix * torch.outer(scale, scale)), CROSS: scale[:, None] * sums[CROSS]}


def test_bad_sums_are_refused_by_their_clients_name(subtests):
    for change, reason in [
        (lambda m: m.weights.update({CROSS: torch.zeros(2, 2).double()}), "expected"),
        (lambda m: m.weights.update({GRAM: m.weights[GRAM].float()}), "float32"),
        (lambda m: m.weights[GRAM].fill_(torch.nan), "not finite"),
        (lambda m: setattr(m, "examples", 31), "registered with 30"),
        (lambda m: m.weights.pop(GRAM), "lack "),
        (lambda m: m.weights[CROSS].mul_(3), "no means over images"),
        (lambda m: m.weights[CROSS][0].fill_(1e5), "no features"),
        (lambda m: m.weights[GRAM][1].fill_(1e5), "no features"),
        (lambda m: m.weights[GRAM][0].fill_(-1.0), "no means over images"),
        (lambda m: m.weights.update(larger(m.weights)), "10 times the median"),
    ]:
        with subtests.test(reason=reason):
            settings = TrainSettings(rounds=1, head="ridge")
            chosen = federation(sizes=(20, 30, 10), train=settings, backbone="cnn_gn")
            honest = chosen.transport.train

            def lying(clients, broadcast):
                for update in honest(clients, broadcast):
                    if update.client == 1:
                        change(update)
                    yield update

            chosen.transport.train = lying
            chosen.start()
            refused = [row for row in chosen.ledger if row["kind"] == "refusal"]
            assert [row["client"] for row in refused] == [1]
            assert reason in refused[0]["reason"]
            assert sorted(chosen.setup.left_out) == [0, 2]


@pytest.mark.parametrize(
    "hiding",
    [
        {"defences": [{"name": "secure_aggregation"}]},
        {"privacy": {"clipping": "fixed"}},
        {"privacy": {"record_epsilon": 2.0}},
        {"defences": [{"name": "median"}]},
        {"defences": [{"name": "norm_bounding", "settings": {"norm": 1.0}}]},
    ],
)
def test_what_hides_updates_does_not_go_with_open_sums(hiding):
    chosen = federation(backbone="cnn_gn")
    fields = {"clients": {"number": 3}, "model": {"normalization": "frozen"}, **hiding}
    build_defences(checked_settings(fields), chosen.method, chosen.network)
    with pytest.raises(ExperimentError, match=r"train\.head is ridge"):
        build_defences(
            checked_settings({**fields, "train": {"head": "ridge"}}), chosen.method, chosen.network
        )


def test_a_question_without_sums_is_not_answered():
    chosen = federation(train=TrainSettings(rounds=1, head="ridge"), backbone="cnn_gn")
    replies = chosen.transport.ask([0], Broadcast(0, {}), "left_out", Message())
    ((_, reply),) = replies
    assert "sums that it was not sent" in reply.reason


@pytest.mark.parametrize("trainable", ["all", "head"])
def test_flower_starts_from_the_same_bits(tmp_path, trainable):
    train = {
        "rounds": 1,
        "local_steps": 2,
        "batch_size": 16,
        "head": "ridge",
        "trainable": trainable,
    }
    chosen = experiment(train=train)
    expected = run(chosen, tmp_path / "in-process", cache=tmp_path / "cache", report=False)
    deployment = Deployment(tmp_path, chosen)
    assert same(deployment.start(), weights(expected.folder))
    assert len(expected.setup.left_out) == 3
    if trainable == "all":
        ledgers = [folder / "ledger.jsonl" for folder in (expected.folder, deployment.path)]
        rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in ledgers]
        here, there = map(featurizer_bytes, rows)
        for id in range(3):  # Flower's own headers are counted there
            assert 0 < here[id] < there[id] < 1.01 * here[id]
