"""FPL: its loss on six vectors by a slow double loop, prototypes and clusters by hand."""

import math

import pytest
import torch

from feddg.errors import ExperimentError
from feddg.federation.local_training import load_weights
from feddg.messages import Message, Update
from feddg.methods.base import State
from feddg.methods.composition import build_method
from feddg.methods.fpl import CLASSES, PROTOTYPES, clustered, met, prototype_terms
from feddg.settings import TrainSettings
from federations import federation, same

PROTOTYPE_ROWS = torch.tensor([[1.0, 0.2], [0.1, 1.0], [-1.0, 0.5], [0.3, -2.0], [2.0, 1.0]])
PROTOTYPE_CLASSES = torch.tensor([0, 1, 0, 2, 1])
SIX = torch.tensor([[1.0, 0.1], [0.5, 0.5], [-1.0, 2.0], [0.2, -1.0], [3.0, 1.0], [-0.4, -0.3]])
LABELS = torch.tensor([0, 1, 0, 2, 1, 2])


def cosine(a, b):
    return float(a @ b) / (math.hypot(*a.tolist()) * math.hypot(*b.tolist()))


def by_hand(temperature):
    contrast = distance = 0.0
    for z, label in zip(SIX, LABELS.tolist()):
        powers = [math.exp(cosine(z, p) / temperature) for p in PROTOTYPE_ROWS]
        own = [i for i, c in enumerate(PROTOTYPE_CLASSES.tolist()) if c == label]
        contrast -= math.log(sum(powers[i] for i in own) / sum(powers)) / 6
        mean = sum(PROTOTYPE_ROWS[i] for i in own) / len(own)
        distance += float((z - mean).square().mean()) / 6
    return contrast, distance


@pytest.mark.parametrize("temperature", [0.02, 0.5])
def test_six_vectors(temperature):
    terms = prototype_terms(SIX, *met(LABELS, PROTOTYPE_CLASSES), PROTOTYPE_ROWS, temperature)
    contrast, distance = by_hand(temperature)
    assert float(terms["prototype_contrast"]) == pytest.approx(contrast, rel=1e-4)
    assert float(terms["prototype_distance"]) == pytest.approx(distance, rel=1e-5)


def test_images_of_a_class_without_prototypes_are_left_out():
    kept = PROTOTYPE_CLASSES != 2
    terms = prototype_terms(SIX, *met(LABELS, PROTOTYPE_CLASSES[kept]), PROTOTYPE_ROWS[kept], 0.5)
    known = LABELS != 2
    both = met(LABELS[known], PROTOTYPE_CLASSES[kept])
    assert terms == prototype_terms(SIX[known], *both, PROTOTYPE_ROWS[kept], 0.5)
    unknown = met(torch.full((6,), 7), PROTOTYPE_CLASSES)
    assert prototype_terms(SIX, *unknown, PROTOTYPE_ROWS, 0.5) == {}


def test_one_class_has_no_contrast():
    zeros = torch.zeros(6, dtype=torch.int64)
    terms = prototype_terms(SIX, *met(zeros, torch.tensor([0, 0])), PROTOTYPE_ROWS[:2], 0.02)
    assert float(terms["prototype_contrast"]) == pytest.approx(0, abs=1e-5)


def test_gradients_are_finite_at_the_smallest_temperature_and_at_zero():
    embeddings = torch.cat([SIX, torch.zeros(1, 2)]).requires_grad_()
    labels = torch.cat([LABELS, torch.tensor([1])])
    terms = prototype_terms(embeddings, *met(labels, PROTOTYPE_CLASSES), PROTOTYPE_ROWS, 0.02)
    sum(terms.values()).backward()
    assert torch.isfinite(embeddings.grad).all()


def test_mixed_precision_leaves_the_contrast_in_float32():
    exact = prototype_terms(SIX, *met(LABELS, PROTOTYPE_CLASSES), PROTOTYPE_ROWS, 0.02)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = prototype_terms(SIX, *met(LABELS, PROTOTYPE_CLASSES), PROTOTYPE_ROWS, 0.02)
    assert mixed == exact


def test_prototypes_are_clustered_class_by_class():
    east, north, west = [1.0, 0.1], [0.1, 1.0], [-1.0, 0.1]
    # Class 0 has two directions with two prototypes each, class 2 one, class 5 a single prototype.
    rows = [[2.0, 0.2], [1.0, 0.2], [0.1, 3.0], [0.2, 1.0], north, [0.2, 2.0], west]
    means, labels = clustered(torch.tensor([*rows, east]), torch.tensor([0, 0, 0, 0, 2, 2, 5, 9]))
    assert labels.tolist() == [0, 0, 2, 5, 9]
    expected = [[1.5, 0.2], [0.15, 2.0], [0.15, 1.5], west, east]
    torch.testing.assert_close(means, torch.tensor(expected))


@pytest.mark.parametrize(
    ("name", "settings"),
    [("fpl", {}), ("ccst+fpl", {"variant": "pardon"}), ("sfa+fpl", {})],
)
def test_a_clients_prototypes_are_its_class_means(name, settings):
    train = TrainSettings(rounds=1, batch_size=3, optimizer="sgd", lr=1e-12)
    small = federation(name, settings=settings, train=train, freeze=True)
    small.server.setup()
    small.server.round()
    update = small.replies[1]
    load_weights(small.network, small.server.state.weights)
    examples = small.examples(1)
    with torch.no_grad():
        embeddings = small.network.eval().features(examples.images().float() / 255)
    classes = sorted(set(examples.labels.tolist()))
    assert update.extras.tensors[CLASSES].tolist() == classes
    for row, c in zip(update.extras.tensors[PROTOTYPES], classes):
        expected = embeddings[examples.labels == c].mean(0)
        torch.testing.assert_close(row, expected, rtol=1e-3, atol=1e-4)


def server_round(method, state, prototypes, classes):
    message = Message({PROTOTYPES: torch.tensor(prototypes), CLASSES: torch.tensor(classes)})
    return method.aggregate(state, iter([Update(0, 1, {"w": torch.zeros(1)}, message)]))


def test_prototypes_of_classes_absent_from_a_round_are_dropped():
    method = build_method("fpl", {})
    state = server_round(method, State({}), [[1.0, 0.0], [0.0, 1.0]], [0, 1])
    state = server_round(method, state, [[0.0, 5.0]], [1])
    assert state.extras[CLASSES].tolist() == [1]
    assert state.extras[PROTOTYPES].tolist() == [[0.0, 5.0]]


def test_round_one_is_fedavg_and_round_two_is_not():
    fpl, fedavg = federation("fpl"), federation()
    assert same(fpl.run(1), fedavg.run(1))
    assert not same(fpl.run(1), fedavg.run(1))
    assert {"prototype_contrast", "prototype_distance"} < fpl.replies[-1].terms.keys()


def test_prototypes_go_down_from_round_two():
    small = federation("fpl")
    small.run(2)
    layouts = {row["id"]: row for row in small.ledger if row["kind"] == "layout"}
    down = [row for row in small.ledger if row.get("direction") == "down"]
    names = {row["round"]: {t["name"] for t in layouts[row["layout"]]["tensors"]} for row in down}
    assert PROTOTYPES not in names[1]
    assert {PROTOTYPES, CLASSES} < names[2]


def test_a_temperature_of_zero_is_refused():
    with pytest.raises(ExperimentError, match="temperature: "):
        build_method("fpl", {"temperature": 0})
