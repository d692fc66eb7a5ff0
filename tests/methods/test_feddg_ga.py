"""FedDG-GA: weights over two rounds by hand, and its gaps against separate evaluation."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import feddg
from feddg.federation.local_training import load_weights
from feddg.messages import Message, Update
from feddg.methods.base import State
from feddg.methods.composition import build_method
from feddg.methods.feddg_ga import AVERAGED, OWN, WEIGHTS, FedDGGA
from feddg.models.task import Task
from feddg.settings import TrainSettings
from federations import federation, same, trained_alone


def adjusted(weights, gaps, step=0.2, mode="paper"):
    method = build_method("feddg-ga", {"mode": mode})
    return method.adjusted(torch.tensor(weights), torch.tensor(gaps), step).tolist()


def test_three_gaps_by_hand():
    third = [1 / 3] * 3
    paper = adjusted(third, [0.02, 0.01, 0.03])
    assert paper == pytest.approx([1 / 3, 1 / 3 - 0.2, 1 / 3 + 0.2], abs=1e-6)
    code = adjusted(third, [0.02, 0.01, 0.03], mode="code")
    # 1/3 + .2/3 * (2/3, 1/3, 1), divided by their sum 17/15.
    assert code == pytest.approx([17 / 51, 16 / 51, 18 / 51], abs=1e-6)


def test_weights_below_zero_are_clipped_and_the_rest_scaled():
    assert adjusted([0.1, 0.4, 0.5], [-1.0, 0.0, 1.0], step=0.2) == pytest.approx(
        [0, 0.4 / 1.1, 0.7 / 1.1]
    )


def test_a_sampled_round_moves_within_its_own_mass():
    moved = adjusted([0.01, 0.01], [0.0, 4.0], step=0.2)
    assert moved == pytest.approx([0.01 - 0.004, 0.01 + 0.004])


def test_nothing_to_tell_clients_apart_leaves_the_weights(subtests):
    for gaps, mode in itertools.product([[0.0, 0.0, 0.0], [0.5]], ["paper", "code"]):
        with subtests.test(mode=mode, gaps=gaps):
            weights = [0.2, 0.3, 0.5][: len(gaps)]
            assert adjusted(weights, gaps, mode=mode) == pytest.approx(weights)


@given(
    st.lists(
        st.tuples(st.floats(0, 1, width=32), st.floats(-50, 50, width=32)), min_size=1, max_size=9
    ),
    st.floats(0, 1),
    st.sampled_from(["paper", "code"]),
)
def test_weights_stay_positive_and_keep_their_sum(pairs, step, mode):
    weights, gaps = zip(*pairs)
    moved = adjusted(list(weights), list(gaps), step, mode)
    assert min(moved) >= 0
    assert sum(moved) == pytest.approx(sum(weights), rel=1e-4, abs=1e-6)


def one_round(method, state, values, own, averaged):
    """Runs a round of the server's side on single-number models."""
    updates = [
        Update(id, 5, {"w": torch.tensor([v])}, Message({OWN: torch.tensor(o)}))
        for id, v, o in zip(range(3), values, own)
    ]
    state = method.aggregate(state.next(), iter(updates))
    replies = [(id, Message({AVERAGED: torch.tensor(a)})) for id, a in enumerate(averaged)]
    state = method.after_round(state, lambda name, question: iter(replies))
    return state


def test_two_rounds_by_hand():
    method = build_method("feddg-ga", {"step_size": 0.3})
    state = State({"w": torch.zeros(1)}, {WEIGHTS: torch.full((3,), 1 / 3)}, rounds=2)
    state = one_round(method, state, [3.0, 6.0, 9.0], [1.0, 1.0, 1.0], [1.0, 2.0, 3.0])
    assert float(state.weights["w"]) == pytest.approx(6)  # alike, whatever the numbers of images
    # Gaps 0, 1, 2 centred: -1, 0, 1; step 0.3.
    first = [1 / 3 - 0.3, 1 / 3, 1 / 3 + 0.3]
    assert state.extras[WEIGHTS].tolist() == pytest.approx(first, abs=1e-6)
    state = one_round(method, state, [3.0, 6.0, 9.0], [0.0, 0.0, 0.0], [4.0, 0.0, 0.0])
    expected = 3 * first[0] + 6 * first[1] + 9 * first[2]
    assert float(state.weights["w"]) == pytest.approx(expected, rel=1e-6)
    # Gaps 4, 0, 0 centred: 8/3, -4/3, -4/3, over 8/3: 1, -1/2, -1/2; step 0.3 (1 - 1/2).
    second = [first[0] + 0.15, first[1] - 0.075, first[2] - 0.075]
    assert state.extras[WEIGHTS].tolist() == pytest.approx(second, abs=1e-6)
    assert OWN not in state.extras


def test_the_first_step_of_the_authors_code_is_a_little_above_d():
    method = build_method("feddg-ga", {"mode": "code", "step_size": 0.2})
    assert method._step(State({}, round=1, rounds=40)) == pytest.approx(0.2 * 1.025)
    assert method._step(State({}, round=2, rounds=40)) == pytest.approx(0.2)
    assert method._step(State({}, round=5, rounds=0)) == pytest.approx(0.2)


def mean_loss(small, weights, id):
    load_weights(small.network, weights)
    small.network.eval()
    examples = small.examples(id)
    with torch.no_grad():
        logits = small.network(examples.images().float() / 255)
    return float(torch.nn.functional.cross_entropy(logits, examples.labels))


def test_a_rounds_gaps_are_those_measured_separately():
    sgd = TrainSettings(rounds=4, batch_size=4, optimizer="sgd", lr=0.05)
    small, other = federation("feddg-ga", train=sgd), federation(train=sgd)
    start = other.server.state.weights
    local = [trained_alone(id, start, train=sgd) for id in range(3)]
    average = {n: sum(w[n].double() for w in local).div(3).to(start[n].dtype) for n in start}
    gaps = [mean_loss(other, average, id) - mean_loss(other, local[id], id) for id in range(3)]
    small.server.round()
    torch.testing.assert_close(
        small.server.state.weights["classifier.weight"], average["classifier.weight"]
    )
    expected = adjusted([1 / 3] * 3, gaps, 0.2)
    weights = small.server.state.extras[WEIGHTS].tolist()
    assert weights == pytest.approx(expected, abs=1e-3)


def test_clients_outside_the_round_keep_their_weight():
    small = federation("feddg-ga", sizes=(4,) * 6, per_round=3)
    record = small.server.round()
    weights = small.server.state.extras[WEIGHTS]
    idle = [id for id in range(6) if id not in record.clients]
    assert weights[idle].tolist() == pytest.approx([1 / 6] * 3)
    assert float(weights[record.clients].sum()) == pytest.approx(0.5, rel=1e-5)
    assert len(set(weights[record.clients].tolist())) > 1


def test_a_step_of_zero_is_the_plain_mean_of_clients_that_count_alike():
    small = federation("feddg-ga", settings={"step_size": 0})
    alike = federation()
    alike.method.share = lambda state, update: float(torch.tensor(1 / 3))
    assert same(small.run(), alike.run())


def test_clients_whose_weights_are_all_zero_count_alike():
    method = build_method("feddg-ga", {})
    state = State({"w": torch.zeros(1)}, {WEIGHTS: torch.tensor([0.0, 0.0, 1.0])})
    updates = [
        Update(id, 1, {"w": torch.tensor([float(id)])}, Message({OWN: torch.tensor(0.0)}))
        for id in range(2)
    ]
    assert float(method.aggregate(state, iter(updates)).weights["w"]) == pytest.approx(0.5)


def test_a_task_whose_loss_is_below_zero_is_not_taken_for_a_lie():
    """As minus a Dice coefficient, or the likelihood of a Gaussian."""

    def loss(outputs, targets):
        return (outputs - targets).square().mean() - 5

    task = Task(loss, lambda outputs, targets: (targets - outputs).flatten())
    sites = [[(torch.rand(3, 8, 8), torch.rand(1)) for _ in range(6)] for _ in range(2)]
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 1))
    for mode in ("paper", "code"):
        fed = feddg.Federation(sites, net, FedDGGA(mode=mode), task=task, batch_size=3)
        assert fed.fit(1).server.state.round == 1
