"""How a client steps, against plain loops: inside the backward pass, clipped, watched, reused."""

import copy

import pytest
import torch
from torch import nn

from feddg.clients import stepping
from feddg.clients.stepping import Stepper
from feddg.errors import ClientError, ExperimentError
from feddg.experiment import Experiment
from feddg.federation.turns import train
from feddg.methods.base import Method
from feddg.models.normalization import BatchInstanceNorm2d, gates_apart
from feddg.settings import TrainSettings
from federations import federation, same

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


@kinds
@pytest.mark.parametrize(("pending", "most"), [(0, 1), (50, 2), (10**9, 6)])
def test_a_step_taken_inside_the_backward_pass_is_the_step_after_it(
    monkeypatch, pending, most, kind
):
    monkeypatch.setattr(stepping, "PENDING_BYTES", pending)
    network = four_layers()
    plain, images = copy.deepcopy(network), torch.randn(4, 6)
    waiting = []
    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: waiting.append(sum(p.grad is not None for p in network.parameters()))
        )
    stepper = Stepper()
    ours = stepper.optimizer(network, settings(kind))
    theirs = stepper.optimizer(plain, settings(kind))
    for _ in range(3):
        stepper.descend(ours, awkward_loss(network, images))
        awkward_loss(plain, images).backward()
        theirs.step()
        theirs.zero_grad()
    for one, other in zip(network.parameters(), plain.parameters()):
        assert torch.equal(one, other)
        assert one.grad is None
    assert max(waiting) == most


@kinds
def test_a_backward_pass_that_fails_leaves_no_hook(monkeypatch, kind):
    monkeypatch.setattr(stepping, "PENDING_BYTES", 0)
    layer, stepper = nn.Linear(2, 1), Stepper()
    optimizer = stepper.optimizer(layer, settings(kind))
    with pytest.raises(RuntimeError, match="does not require grad"):
        stepper.descend(optimizer, torch.ones(()))
    stepper.descend(optimizer, layer(torch.ones(1, 2)).sum())
    before = layer.weight.detach().clone()
    layer(torch.ones(1, 2)).sum().backward()
    assert torch.equal(layer.weight, before)


def test_a_refused_step_inside_the_backward_pass_is_an_error_of_the_client(monkeypatch):
    monkeypatch.setattr(stepping, "PENDING_BYTES", 0)
    layer, stepper = nn.Linear(3, 4), Stepper()
    layer.weight = nn.Parameter(torch.randn(4, 6)[:, ::2])
    optimizer = stepper.optimizer(layer, settings(KINDS[2]))
    with pytest.raises(ClientError, match="holes"):
        stepper.descend(optimizer, layer(torch.ones(1, 3)).sum())


@kinds
def test_memory_that_is_used_again_holds_nothing_of_before(kind):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 2))
    network = network.to(memory_format=torch.channels_last)
    start, images = copy.deepcopy(network.state_dict()), torch.randn(5, 3, 4, 4)
    stepper = Stepper()

    def trained():
        network.load_state_dict(start)
        optimizer = stepper.optimizer(network, settings(kind))
        for _ in range(3):
            stepper.descend(optimizer, network(images).square().sum())
        return optimizer, copy.deepcopy(network.state_dict())

    def moments(optimizer):
        return {id(t) for state in optimizer.state.values() for t in state.values()}

    first, fresh = trained()
    used = moments(first)
    stepper.keep(first)
    second, again = trained()
    assert same(again, fresh)
    assert moments(second) == used
    assert not [state for state in first.state.values() if state]
    apart, _ = trained()  # the second one was not given back: it may still step
    assert not moments(apart) & used or not used


def test_memory_of_other_parameters_kinds_or_orders_is_left_alone():
    images = torch.ones(1, 3, 4, 4)
    network, other = (nn.Conv2d(3, 2, 2) for _ in range(2))
    adam, sgd = settings(KINDS[0]), settings(KINDS[2])

    def used(stepper, network, kind):
        optimizer = stepper.optimizer(network, kind)
        stepper.descend(optimizer, network(images).sum())
        stepper.keep(optimizer)
        return stepper

    assert not used(Stepper(), other, adam).optimizer(network, adam).state
    assert not used(Stepper(), network, adam).optimizer(network, sgd).state
    stepper = used(Stepper(), network, sgd)
    network.to(memory_format=torch.channels_last)
    stepper.descend(stepper.optimizer(network, sgd), network(images).sum())
    stepper = Stepper()
    stepper.keep(torch.optim.SGD(network.parameters(), 0.1))
    assert not stepper.optimizer(network, sgd).state


def test_gradients_left_by_a_turn_that_failed_do_not_count():
    layer, stepper = nn.Linear(2, 1), Stepper()
    layer(torch.ones(1, 2)).sum().backward()
    optimizer, before = stepper.optimizer(layer, settings(KINDS[1])), layer.weight.detach().clone()
    stepper.step(optimizer)
    assert torch.equal(layer.weight, before)


@kinds
@pytest.mark.parametrize("pending", [0, 10**9])
def test_clipping_is_by_the_norm_of_all_gradients_together(monkeypatch, kind, pending):
    monkeypatch.setattr(stepping, "PENDING_BYTES", pending)
    network, stepper = four_layers(), Stepper()
    plain, images = copy.deepcopy(network), torch.randn(4, 6)
    chosen = settings(kind, weight_decay=0.0)
    ours = stepper.optimizer(network, chosen)
    theirs = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[chosen.optimizer](
        plain.parameters(),
        0.01,
        **({"momentum": chosen.momentum} if chosen.optimizer == "sgd" else {}),
    )
    for _ in range(3):
        stepper.descend(ours, awkward_loss(network, images), 0.5)
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
    before = copy.deepcopy(layers)
    chosen = TrainSettings(optimizer="sgd", lr=0.1, weight_decay=0.5, decay="weights")
    stepper = Stepper()
    optimizer = stepper.optimizer(layers, chosen)
    stepper.descend(optimizer, sum(0 * p.sum() for p in layers.parameters()))
    for name, parameter in layers.named_parameters():
        kept = 0.95 if name in ("0.weight", "4.weight") else 1.0
        torch.testing.assert_close(parameter, kept * before.get_parameter(name))


def test_gates_leave_every_group():
    network = nn.Sequential(nn.Conv2d(3, 4, 1), BatchInstanceNorm2d(4))
    chosen = TrainSettings(optimizer="sgd", lr=0.1, weight_decay=0.5, decay="weights")
    optimizer = Stepper().optimizer(network, chosen)
    gates_apart(optimizer, network, chosen, 10.0)
    rates = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    assert rates.pop(id(network[1].gate)) == 1.0
    assert list(rates.values()) == [0.1] * 4


def test_new_settings_leave_the_identity_of_older_experiments_alone():
    def experiment(**train):
        return Experiment(data="digits", hold_out="sketch", train=train)

    plain = experiment().id
    assert experiment(decay="all", gradient_clipping=None).id == plain
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
def test_a_method_may_clip_and_read_gradients(monkeypatch, method, kind):
    """Although the network counts as large, and would step inside the backward pass."""
    monkeypatch.setattr(stepping, "PENDING_BYTES", 0)
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
