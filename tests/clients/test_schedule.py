"""Learning rates of rounds against torch's own schedulers; label smoothing; frozen featurizers."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from feddg.clients.schedule import in_round, rate_share
from feddg.errors import ExperimentError
from feddg.experiment import Experiment
from feddg.methods.catalogue import methods
from feddg.models.normalization import statistics_names
from feddg.settings import ServerSettings, TrainSettings
from federations import federation

RATE = 0.1


def rates(**settings):
    train = TrainSettings(lr=RATE, **settings)
    return [in_round(train, round).lr for round in range(1, train.rounds + 1)]


def of_torch(make, rounds, warmup=0):
    """The rates of torch's scheduler, stepped once a round, behind its linear warm-up."""
    optimizer = torch.optim.SGD([torch.zeros(1)], RATE)
    scheduler = make(optimizer)
    if warmup:
        rising = lr_scheduler.LinearLR(optimizer, 1 / (warmup + 1), total_iters=warmup)
        scheduler = lr_scheduler.SequentialLR(optimizer, [rising, make(optimizer)], [warmup])
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing is optimized, and torch says so
        for _ in range(rounds):
            found.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
    return found


@pytest.mark.parametrize("final", [0.0, 0.2])
@pytest.mark.parametrize("warmup", [0, 3])
def test_cosine_is_torchs(final, warmup):
    span = 20 - warmup
    expected = of_torch(
        lambda o: lr_scheduler.CosineAnnealingLR(o, span, eta_min=final * RATE), 20, warmup
    )
    found = rates(rounds=20, schedule="cosine", schedule_final=final, warmup_rounds=warmup)
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("final", [0.0, 0.2])
@pytest.mark.parametrize("warmup", [0, 3])
def test_linear_is_torchs(final, warmup):
    span = 20 - warmup
    expected = of_torch(
        lambda o: lr_scheduler.LinearLR(o, 1.0, final, total_iters=span), 20, warmup
    )
    found = rates(rounds=20, schedule="linear", schedule_final=final, warmup_rounds=warmup)
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("rounds", "shares", "milestones"),
    [(20, (0.5, 0.75), [10, 15]), (10, (0.3, 0.7), [3, 7]), (7, (0.5,), [4])],
)
def test_step_is_torchs(rounds, shares, milestones):
    expected = of_torch(lambda o: lr_scheduler.MultiStepLR(o, milestones, gamma=0.2), rounds)
    found = rates(rounds=rounds, schedule="step", schedule_steps=shares, schedule_gamma=0.2)
    assert found == pytest.approx(expected, rel=1e-9)


def test_warm_up_before_a_constant_rate_is_torchs():
    expected = of_torch(lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0), 10, warmup=4)
    assert rates(rounds=10, warmup_rounds=4) == pytest.approx(expected, rel=1e-9)


@given(
    st.sampled_from(["constant", "cosine", "linear", "step"]),
    st.integers(2, 60),
    st.data(),
)
def test_every_rate_is_above_0_and_at_most_the_full_one(schedule, rounds, data):
    warmup = data.draw(st.integers(0, rounds - 1))
    train = TrainSettings(rounds=rounds, schedule=schedule, warmup_rounds=warmup)
    shares = [rate_share(train, round) for round in range(1, rounds + 1)]
    assert all(0 < share <= 1 for share in shares)
    assert shares[:warmup] == sorted(shares[:warmup])
    assert shares[warmup:] == sorted(shares[warmup:], reverse=True)


def test_a_constant_rate_leaves_the_settings_alone():
    train = TrainSettings(rounds=3)
    assert in_round(train, 2) is train


@pytest.mark.parametrize("method", sorted(methods()))
def test_every_method_trains_at_the_rounds_rate(method):
    """Round 2 of a step schedule is a round of a run that always had the lower rate."""
    plain_sgd = {"optimizer": "sgd", "batch_size": 4, "local_steps": 2, "rounds": 2}

    def optimizers(train, round):
        small = federation(
            method, train=TrainSettings(**plain_sgd, **train), embedding="bottleneck"
        )
        small.server.setup()
        agreed, extras = (
            small.server.state.agreed,
            small.method.broadcast(small.server.state).extras,
        )
        client = small.client(
            0, round=round, agreed=agreed, extras=extras, received=small.server.state.weights
        )
        found = [client.optimizer, *client.scratch.values()]
        return [
            group["lr"]
            for optimizer in found
            if isinstance(optimizer, torch.optim.Optimizer)
            for group in optimizer.param_groups
        ]

    lower = optimizers({"lr": 0.2, "schedule": "step", "schedule_steps": (0.5,)}, 2)
    full = optimizers({"lr": 0.2}, 2)
    assert lower == pytest.approx([0.1 * rate for rate in full])


def test_scaffold_divides_by_the_rounds_rate():
    """Its control is the mean gradient of the client's steps, whatever the rate."""
    train = {"optimizer": "sgd", "batch_size": 4, "local_steps": 1, "rounds": 2}
    small = federation(
        "scaffold",
        train=TrainSettings(lr=0.2, schedule="step", schedule_steps=(0.5,), **train),
        server_settings=ServerSettings(largest_change=None),
    )
    small.run()
    always = federation("scaffold", train=TrainSettings(lr=0.02, **train))
    always.server.state.weights = {
        name: tensor.clone() for name, tensor in small.server.state.weights.items()
    }
    for fed in (small, always):
        fed.transport.memories = {}
        fed.server.state.round = 1
        fed.server.state.weights = {n: t.clone() for n, t in small.server.state.weights.items()}
        for name, tensor in fed.server.state.extras.items():
            if name.startswith("scaffold/"):
                fed.server.state.extras[name] = torch.zeros_like(tensor)
    small.server.round()
    always.server.round()
    found, expected = small.server.state, always.server.state
    for name, tensor in expected.extras.items():
        if name.startswith("scaffold/") and tensor.is_floating_point():
            torch.testing.assert_close(found.extras[name], tensor)


def test_label_smoothing_is_torchs():
    small = federation(train=TrainSettings(batch_size=4, label_smoothing=0.3))
    client = small.client()
    batch = next(client.batches())
    logits = client.network(batch.images)
    expected = torch.nn.CrossEntropyLoss(label_smoothing=0.3)(logits, batch.labels)
    assert torch.equal(client.class_loss(logits, batch.labels), expected)
    (term,) = small.method.head_loss(client, batch, client.network.features(batch.images)).values()
    torch.testing.assert_close(term, expected)
    spread = 0.7 * torch.nn.functional.one_hot(batch.labels, 3) + 0.3 / 3
    by_hand = -(spread * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(expected, by_hand)


@pytest.mark.parametrize("method", sorted(methods().keys() - {"local"}))
def test_head_rounds_leave_the_featurizer_as_it_is(method):
    """Under every method, in its first round; the second one trains everything."""
    sgd = {"optimizer": "sgd"} if method == "scaffold" else {}
    small = federation(
        method,
        train=TrainSettings(rounds=2, batch_size=4, local_steps=2, head_rounds=1, lr=0.01, **sgd),
        server_settings=ServerSettings(largest_change=None),
        embedding="bottleneck",
    )
    small.server.setup()
    trained = {n for n, p in small.network.named_parameters() if p.requires_grad}
    before = {n: t.clone() for n, t in small.server.state.weights.items()}
    row = small.server.round()
    assert not row.refused
    first = {n: t.clone() for n, t in small.server.state.weights.items()}
    for name, tensor in first.items():
        if name.startswith("featurizer."):
            # FedIG's server takes roots of variances and squares them again.
            torch.testing.assert_close(tensor, before[name], rtol=1e-6, atol=0)
    assert any(not torch.equal(first[n], before[n]) for n in trained if n.startswith("classifier"))
    small.server.round()
    second = small.server.state.weights
    moved = {n for n in second if not torch.equal(first[n], second[n])}
    assert any(name.startswith("featurizer.") for name in moved & trained)
    assert moved & {f"featurizer.{n}" for n in statistics_names(small.network.featurizer)}
    assert {n for n, p in small.network.named_parameters() if p.requires_grad} == trained


@pytest.mark.parametrize("field", ["head_rounds", "warmup_rounds"])
def test_some_rounds_must_be_left(field):
    with pytest.raises(ExperimentError, match=f"{field} must be fewer than all 3 rounds"):
        Experiment(data="digits", hold_out="sketch", train={"rounds": 3, field: 3})
