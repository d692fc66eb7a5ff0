"""Adam and SGD in memory order against PyTorch's plain ones."""

import copy
import itertools
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from feddg.clients.optim import (
    MemoryOrderAdam,
    MemoryOrderSGD,
    in_round,
    make_optimizer,
    rate_share,
    take_step,
)
from feddg.errors import ClientError, ExperimentError
from feddg.experiment import Experiment
from feddg.federation.local_training import train
from feddg.methods.base import Method, methods
from feddg.methods.composition import build_method
from feddg.models.normalization import BatchInstanceNorm2d, gates_apart, statistics_names
from feddg.settings import ServerSettings, TrainSettings
from federations import federation, same

CHANNELS_LAST = torch.channels_last
OPTIMIZERS = {
    "adam": (MemoryOrderAdam, torch.optim.Adam, {}),
    "adam, decay": (MemoryOrderAdam, torch.optim.Adam, {"weight_decay": 0.1}),
    "sgd": (MemoryOrderSGD, torch.optim.SGD, {}),
    "sgd, momentum, decay": (
        MemoryOrderSGD,
        torch.optim.SGD,
        {"momentum": 0.5, "weight_decay": 0.1},
    ),
}
LAYOUTS = {
    "contiguous": (4, 3, 2, 2),
    "channels last": (4, 3, 2, 2),
    "transposed": (5, 4),
    "3d channels last": (4, 3, 2, 2, 2),
    "one by one": (6, 4, 1, 1),
}


def laid_out(tensor, layout):
    """The same numbers in another memory order."""
    if layout == "transposed":
        return tensor.t().contiguous().t()
    if layout == "contiguous":
        return tensor.contiguous()
    three = layout.startswith("3d")
    return tensor.contiguous(memory_format=torch.channels_last_3d if three else CHANNELS_LAST)


def network_and_copy():
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(144, 2))
    first = first.to(memory_format=CHANNELS_LAST)
    return first, copy.deepcopy(first)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_steps_are_those_of_the_plain_loop_and_the_fused_kernels_bit_for_bit(case, fused):
    first, second = network_and_copy()
    mine, plain, settings = OPTIMIZERS[case]
    ours = mine(first.parameters(), 0.01, **settings)
    theirs = plain(second.parameters(), 0.01, foreach=False, fused=fused, **settings)
    for _ in range(4):
        images = torch.randn(5, 3, 8, 8)
        for network, optimizer in ((first, ours), (second, theirs)):
            optimizer.zero_grad()
            network(images).square().sum().backward()
            optimizer.step()
    for one, other in zip(first.parameters(), second.parameters()):
        tolerance = (0, 0) if fused else (1e-5, 1e-6)
        torch.testing.assert_close(one, other, rtol=tolerance[0], atol=tolerance[1])
        assert one.stride() == other.stride()


def test_a_gradient_in_another_memory_order_counts_the_same(subtests):
    """As when a method assigns ``p.grad`` itself; twice, so that moments are old once."""
    for case, layout, other in itertools.product(
        OPTIMIZERS, LAYOUTS, ["contiguous", "channels last", "transposed", "3d channels last"]
    ):
        with subtests.test(other=other, layout=layout, case=case):
            shape = LAYOUTS[layout]
            if other != "contiguous" and len(LAYOUTS[other]) != len(shape):
                continue  # this order is for other shapes
            torch.manual_seed(0)
            weight = nn.Parameter(laid_out(torch.randn(shape), layout))
            plain = nn.Parameter(weight.detach().clone())
            mine, theirs, settings = OPTIMIZERS[case]
            ours = mine([weight], 0.1, **settings)
            reference = theirs([plain], 0.1, foreach=False, fused=False, **settings)
            for _ in range(2):
                gradient = torch.randn(shape)
                weight.grad, plain.grad = laid_out(gradient, other), gradient.clone()
                ours.step()
                reference.step()
            torch.testing.assert_close(weight, plain)
            assert weight.stride() == laid_out(plain.detach(), layout).stride()


FUSED = [case for case in OPTIMIZERS if case != "sgd"]


@pytest.mark.parametrize("case", FUSED)
def test_what_a_kernel_on_raw_memory_cannot_do_is_refused(case):
    make, _, settings = OPTIMIZERS[case]
    holes = nn.Parameter(torch.randn(4, 6)[:, ::2])
    holes.grad = torch.ones(4, 3)
    with pytest.raises(ClientError, match=r"shape \(4, 3\) and strides \(6, 2\).*holes.*clone"):
        make([holes], 0.1, **settings).step()
    overlapping = nn.Parameter(torch.randn(1, 3).expand(4, 3))
    overlapping.grad = torch.ones(4, 3)
    with pytest.raises(ClientError, match="overlaps"):
        make([overlapping], 0.1, **settings).step()
    sparse = nn.Parameter(torch.randn(4, 3))
    sparse.grad = torch.ones(4, 3).to_sparse()
    with pytest.raises(ClientError, match="gradient is sparse"):
        make([sparse], 0.1, **settings).step()


def test_plain_sgd_needs_no_memory_order():
    everything = torch.ones(4, 6)
    weight = nn.Parameter(everything[:, ::2])
    weight.grad = torch.ones(3, 4).t()
    MemoryOrderSGD([weight], 0.5).step()
    expected = torch.tensor([0.5, 1.0]).repeat(4, 3)
    assert torch.equal(everything, expected)


@pytest.mark.parametrize("case", ["adam", "sgd, momentum, decay"])
def test_a_weight_that_changes_its_order_under_its_moments_is_refused(case):
    make, _, settings = OPTIMIZERS[case]
    weight = nn.Parameter(torch.randn(4, 3, 2, 2))
    optimizer = make([weight], 0.1, **settings)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    weight.data = weight.data.contiguous(memory_format=CHANNELS_LAST)
    before = weight.detach().clone()
    with pytest.raises(ClientError, match="moments lie in another order"):
        optimizer.step()
    assert torch.equal(weight, before)


def test_a_parameter_whose_first_gradient_comes_late_gets_its_momentum():
    torch.manual_seed(0)
    ours = nn.ParameterList([torch.randn(3), torch.randn(3)])
    theirs = copy.deepcopy(ours)
    first = MemoryOrderSGD(ours.parameters(), 0.1, 0.5)
    second = torch.optim.SGD(theirs.parameters(), 0.1, 0.5, foreach=False, fused=False)
    for used in (1, 2, 2):
        gradients = torch.randn(used, 3)
        for parameters, optimizer in ((ours, first), (theirs, second)):
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = gradient.clone()
            optimizer.step()
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other)


# Learning rates of rounds against torch's own schedulers; label smoothing; frozen featurizers.


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


SCHEDULERS = {
    "constant": lambda span, final: lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0),
    "cosine": lambda span, final: (
        lambda o: lr_scheduler.CosineAnnealingLR(o, span, eta_min=final * RATE)
    ),
    "linear": lambda span, final: lambda o: lr_scheduler.LinearLR(o, 1.0, final, total_iters=span),
}


@pytest.mark.parametrize("final", [0.0, 0.2])
@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_a_schedule_is_torchs(schedule, final, warmup):
    expected = of_torch(SCHEDULERS[schedule](20 - warmup, final), 20, warmup)
    found = rates(rounds=20, schedule=schedule, schedule_final=final, warmup_rounds=warmup)
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("rounds", "shares", "milestones"),
    [(20, (0.5, 0.75), [10, 15]), (10, (0.3, 0.7), [3, 7]), (7, (0.5,), [4])],
)
def test_step_is_torchs(rounds, shares, milestones):
    expected = of_torch(lambda o: lr_scheduler.MultiStepLR(o, milestones, gamma=0.2), rounds)
    found = rates(rounds=rounds, schedule="step", schedule_steps=shares, schedule_gamma=0.2)
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("by", "turn", "steps_of"),
    [
        ("epoch", {"local_epochs": 2}, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]),
        ("step", {"local_epochs": 2}, range(12)),
        ("step", {"local_steps": 3}, range(9)),
    ],
)
def test_a_cosine_inside_rounds_is_torchs(by, turn, steps_of):
    """Three rounds of two passes over 7 images in batches of 4, or of three steps."""
    settings = {"rounds": 3, "batch_size": 4, "schedule": "cosine", "schedule_by": by}
    train = TrainSettings(lr=RATE, optimizer="sgd", **turn, **settings)
    small, found = federation(train=train, sizes=(7,)), []
    for round in (1, 2, 3):
        client = small.client(round=round, received=small.server.state.weights)
        for _ in client.batches():
            found.append(client.optimizer.param_groups[0]["lr"])
    span = max(steps_of) + 1
    torchs = of_torch(lambda o: lr_scheduler.CosineAnnealingLR(o, span), span)
    assert found == pytest.approx([torchs[at] for at in steps_of], rel=1e-9)


def test_what_a_rate_inside_rounds_does_not_go_with_is_refused():
    with pytest.raises(ExperimentError, match=r"schedule_by: epoch needs .* local_steps is 3"):
        Experiment(data="digits", train={"schedule_by": "epoch", "local_steps": 3})
    chosen = Experiment(data="digits", method="scaffold", train={"schedule_by": "step"})
    with pytest.raises(ExperimentError, match=r"train\.schedule_by to round"):
        build_method("scaffold", {}).check(chosen)


def by_torch(small, make, weights, rounds=3):
    """Client 0's weights after rounds of one optimizer of torch's that is never made again."""
    network = copy.deepcopy(small.network)
    network.load_state_dict(weights)
    optimizer = make(network.parameters())
    for round in range(1, rounds + 1):
        for batch in small.client(round=round, received=weights).batches():
            network.train()
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(batch.images), batch.labels).backward()
            optimizer.step()
    return dict(network.named_parameters())


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        ({"optimizer": "adam"}, lambda p: torch.optim.Adam(p, 0.01)),
        ({"optimizer": "sgd", "momentum": 0.9}, lambda p: torch.optim.SGD(p, 0.01, 0.9)),
    ],
)
def test_moments_are_kept_from_round_to_round(settings, make):
    """Of one client, rounds are then a single training; after a stop from a file, too."""
    train = TrainSettings(rounds=3, batch_size=4, lr=0.01, keep_optimizer=True, **settings)
    small = federation(train=train, sizes=(7,))
    before = {name: tensor.clone() for name, tensor in small.server.state.weights.items()}
    after = {name: tensor.clone() for name, tensor in small.run().items()}
    expected = by_torch(small, make, before)
    for name, parameter in expected.items():  # a step moves by .01; gradients near 0 are rounding
        torch.testing.assert_close(after[name], parameter.detach(), rtol=1e-4, atol=1e-5)

    resumed = federation(train=train, sizes=(7,))
    resumed.run(1)
    kept = resumed.transport.memories[0]
    assert {name.partition("/")[0] for name in kept} == {"optimizer"}
    resumed.transport.memories = {0: {n: t.contiguous().clone() for n, t in kept.items()}}
    resumed.server.round()
    resumed.server.round()
    assert same(resumed.server.state.weights, after)

    fresh = federation(train=train.model_copy(update={"keep_optimizer": False}), sizes=(7,))
    assert not same(fresh.run(), after)
    assert not fresh.transport.memories


def test_clients_that_share_a_worker_keep_their_own_moments():
    """With two clients at once or one after the other; and each as if it were alone."""
    train = TrainSettings(rounds=3, batch_size=4, keep_optimizer=True)
    one, two = (federation(train=train, at_once=count) for count in (1, 2))
    assert same(one.run(), two.run())
    for id, memory in one.transport.memories.items():
        assert same(memory, two.transport.memories[id])
        assert not same(memory, one.transport.memories[(id + 1) % 3])


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


def test_every_method_trains_at_the_rounds_rate(subtests):
    """Round 2 of a step schedule is a round of a run that always had the lower rate."""
    for method in sorted(methods()):
        with subtests.test(method=method):
            plain_sgd = {"optimizer": "sgd", "batch_size": 4, "local_steps": 2, "rounds": 2}

            def optimizers(train, round):
                small = federation(
                    method, train=TrainSettings(**plain_sgd, **train), embedding="bottleneck"
                )
                small.server.setup()
                context, extras = (
                    small.server.state.context,
                    small.method.broadcast(small.server.state).extras,
                )
                client = small.client(
                    0,
                    round=round,
                    context=context,
                    extras=extras,
                    received=small.server.state.weights,
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
    assert torch.equal(client.task_loss(logits, batch.labels), expected)
    (term,) = small.method.head_loss(client, batch, client.network.features(batch.images)).values()
    torch.testing.assert_close(term, expected)
    spread = 0.7 * torch.nn.functional.one_hot(batch.labels, 3) + 0.3 / 3
    by_hand = -(spread * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(expected, by_hand)


def test_head_rounds_leave_the_featurizer_as_it_is(subtests):
    """Under every method, in its first round; the second one trains everything."""
    for method in sorted(methods().keys() - {"local", "ridge"}):
        with subtests.test(method=method):
            sgd = {"optimizer": "sgd"} if method == "scaffold" else {}
            small = federation(
                method,
                train=TrainSettings(
                    rounds=2, batch_size=4, local_steps=2, head_rounds=1, lr=0.01, **sgd
                ),
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
            assert any(
                not torch.equal(first[n], before[n]) for n in trained if n.startswith("classifier")
            )
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


# How a client steps, against plain loops: clipped and watched.


KINDS = [{"optimizer": "adam"}, {"optimizer": "sgd"}, {"optimizer": "sgd", "momentum": 0.5}]
kinds = pytest.mark.parametrize("kind", KINDS, ids=["adam", "sgd", "momentum"])


def settings(kind, **more):
    return TrainSettings(**{"lr": 0.01, "weight_decay": 0.1, **kind, **more})


def four_layers():
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(2, 2)])


def awkward_loss(layers, images):
    """A parameter is used twice, another is in a penalty of its own, a third is not used at all."""
    twice = layers[1](layers[0](layers[1](images)).relu())
    penalty = sum(parameter.square().sum() for parameter in layers[0].parameters())
    return layers[2](twice).square().sum() + 0.1 * penalty


class Accumulating(Method):
    """Takes a step of an optimizer of its own for every third batch; the fourth is left over."""

    def optimizer(self, client):
        """SGD of the classifier alone; the others' gradients enter the norm."""
        return torch.optim.SGD(client.network.classifier.parameters(), 0.1)

    def step(self, client, batch):
        """Adds up, and cuts the length of all gradients."""
        client.backward(self.loss(client, batch))
        client.scratch["batches"] = client.scratch.get("batches", 0) + 1
        if client.scratch["batches"] % 3 == 0:
            nn.utils.clip_grad_norm_(client.network.parameters(), 0.1)
            client.step()


def test_no_gradient_is_left_for_the_next_step_or_client():
    made = federation(Accumulating(), train=TrainSettings(batch_size=4, local_steps=7))
    alone = federation(Accumulating(), train=TrainSettings(batch_size=4, local_steps=7))
    sent = made.server.state.weights
    train(made.client(0, received=sent), made.method)
    assert all(p.grad is not None for p in made.network.parameters())
    second = train(made.client(1, received=sent), made.method).keep().weights
    assert same(second, train(alone.client(1, received=sent), alone.method).keep().weights)
    client = alone.client(0, received=sent)
    client.optimizer = alone.method.optimizer(client)
    for batch in list(client.batches())[:3]:
        alone.method.step(client, batch)
    assert all(p.grad is None for p in alone.network.parameters())


@kinds
def test_clipping_is_by_the_norm_of_all_gradients_together(kind):
    network = four_layers()
    plain, images = copy.deepcopy(network), torch.randn(4, 6)
    chosen = settings(kind, weight_decay=0.0)
    ours = make_optimizer(network, chosen)
    theirs = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[chosen.optimizer](
        plain.parameters(),
        0.01,
        **({"momentum": chosen.momentum} if chosen.optimizer == "sgd" else {}),
    )
    for _ in range(3):
        awkward_loss(network, images).backward()
        take_step(ours, 0.5)
        theirs.zero_grad()
        awkward_loss(plain, images).backward()
        found = [p.grad for p in plain.parameters() if p.grad is not None]
        norm = torch.cat([gradient.flatten() for gradient in found]).norm()
        assert norm > 0.5
        for gradient in found:
            gradient *= 0.5 / norm
        theirs.step()
    for one, other in zip(network.parameters(), plain.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_decay_of_weights_leaves_norms_and_biases_alone():
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4, 2)
    )
    layers.append(nn.MultiheadAttention(4, 2)).append(nn.LSTM(4, 3))
    for parameter in layers.parameters():
        nn.init.uniform_(parameter)
    before = copy.deepcopy(layers)
    chosen = TrainSettings(optimizer="sgd", lr=0.1, weight_decay=0.5, decay="weights")
    optimizer = make_optimizer(layers, chosen)
    sum(0 * p.sum() for p in layers.parameters()).backward()
    take_step(optimizer)
    for name, parameter in layers.named_parameters():
        decays = name in ("0.weight", "4.weight") or (name[0] in "56" and "bias" not in name)
        kept = 0.95 if decays else 1.0
        torch.testing.assert_close(parameter, kept * before.get_parameter(name))


def test_gates_leave_every_group():
    network = nn.Sequential(nn.Conv2d(3, 4, 1), BatchInstanceNorm2d(4))
    chosen = TrainSettings(optimizer="sgd", lr=0.1, weight_decay=0.5, decay="weights")
    optimizer = make_optimizer(network, chosen)
    gates_apart(optimizer, network, chosen, 10.0)
    rates = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    assert rates.pop(id(network[1].gate)) == 1.0
    assert list(rates.values()) == [0.1] * 4


def test_new_settings_leave_the_identity_of_older_experiments_alone():
    def experiment(**train):
        return Experiment(data="digits", hold_out="sketch", train=train)

    plain = experiment().id
    assert experiment(decay="all", gradient_clipping=None).id == plain
    for field, as_ever in (
        ("drop_last", False),
        ("keep_optimizer", False),
        ("schedule_by", "round"),
    ):
        assert experiment(**{field: as_ever}).id == plain
    assert experiment(decay="weights").id != plain
    assert experiment(gradient_clipping=1.0).id != plain
    with pytest.raises(ExperimentError, match=r"train\.gradient_clipping"):
        experiment(gradient_clipping=0)


class Reading(Method):
    """Clips by norm and reads every gradient, between two backward passes and the step."""

    def step(self, client, batch):
        """Two passes, each on half of the loss."""
        for _ in range(2):
            loss = self.loss(client, batch)["cross_entropy"]
            client.backward({"half": 0.5 * loss})
        parameters = list(client.network.parameters())
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        squares = [p.grad.square().sum() for p in parameters]
        client.note({"norm": torch.stack(squares).sum().sqrt()})
        client.step()


class Watching(Method):
    """The same by a step hook, which other methods' steps call too."""

    seen: list[float] = []  # noqa: RUF012

    def optimizer(self, client):
        """Clips right before the step, and reads what is left after it."""
        optimizer = super().optimizer(client)
        parameters = list(client.network.parameters())

        def clip(*_):
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)

        def read(*_):
            grads = [p.grad.flatten() for p in parameters]
            self.seen.append(float(torch.cat(grads).norm()))

        optimizer.register_step_pre_hook(clip)
        optimizer.register_step_post_hook(read)
        return optimizer


def by_hand(small, chosen):
    """A plain loop over client 0's batches that clips by norm 0.1."""
    client = small.client(0, received=small.server.state.weights)
    network = copy.deepcopy(small.network)
    optimizer = (
        torch.optim.Adam(network.parameters(), chosen.lr)
        if chosen.optimizer == "adam"
        else torch.optim.SGD(network.parameters(), chosen.lr, chosen.momentum)
    )
    for batch in client.batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(batch.images), batch.labels).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.1)
        optimizer.step()
    return dict(network.named_parameters())


@kinds
@pytest.mark.parametrize("method", [Reading, Watching, Method])
def test_a_method_may_clip_and_read_gradients(method, kind):
    Watching.seen.clear()
    chosen = TrainSettings(**kind, batch_size=4, lr=0.01, local_epochs=2)
    # Two passes would move running statistics twice: they stay as they are.
    expected = by_hand(federation(train=chosen, freeze=True), chosen)
    if method is Method:
        chosen = chosen.model_copy(update={"gradient_clipping": 0.1})
    small = federation(method(), train=chosen, freeze=True)
    client = small.client(0, received=small.server.state.weights)
    update = train(client, small.method)
    for name, parameter in expected.items():
        torch.testing.assert_close(update.weights[name], parameter, rtol=1e-4, atol=2e-5)
    assert client.steps == 4
    if method is Reading:
        assert update.terms["norm"] == pytest.approx(0.1, rel=1e-4)
        assert 0.5 < update.terms["half"] < 3
    if method is Watching:
        assert Watching.seen == pytest.approx([0.1] * 4, rel=1e-4)


class Assigning(Method):
    """Assigns every gradient itself, in another memory order than the weight's."""

    def step(self, client, batch):
        """Gradients by ``torch.autograd.grad``, made contiguous."""
        loss = self.loss(client, batch)["cross_entropy"]
        parameters = list(client.network.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
            parameter.grad = gradient.contiguous()
        client.note({"cross_entropy": loss})
        client.step()


@kinds
def test_a_method_may_assign_gradients_in_another_memory_order(kind):
    chosen = TrainSettings(**kind, rounds=2, batch_size=4, lr=0.01)
    mine = federation(Assigning(), train=chosen)
    orders = [(p.is_contiguous(), p.dim()) for p in mine.network.parameters()]
    assert (False, 4) in orders  # weights are channels last, so the gradients differ
    assert same(mine.run(), federation(train=chosen).run())


class OwnOptimizer(Method):
    """Brings an optimizer that feddg knows nothing of."""

    def optimizer(self, client):
        """RMSprop."""
        return torch.optim.RMSprop(client.network.parameters(), 0.001)


def test_a_method_may_bring_its_own_optimizer():
    small = federation(OwnOptimizer(), train=TrainSettings(batch_size=4, local_epochs=2))
    twin = federation(train=small.train)
    update = train(small.client(0, received=small.server.state.weights), small.method)
    client, network = twin.client(0), twin.network
    optimizer = torch.optim.RMSprop(network.parameters(), 0.001)
    for batch in client.batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(batch.images), batch.labels).backward()
        optimizer.step()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(update.weights[name], parameter, rtol=0, atol=0)
