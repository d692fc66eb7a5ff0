"""Adam in memory order against PyTorch's plain one."""

import copy

import pytest
import torch
from torch import nn

from feddg.clients.optimizers import InPlaceAdam


def test_steps_are_those_of_the_plain_loop():
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(144, 2))
    first = first.to(memory_format=torch.channels_last)
    second = copy.deepcopy(first)
    settings = {"lr": 0.01, "weight_decay": 0.1}
    ours = InPlaceAdam(first.parameters(), **settings)
    theirs = torch.optim.Adam(second.parameters(), foreach=False, fused=False, **settings)
    for _ in range(4):
        images = torch.randn(5, 3, 8, 8).contiguous(memory_format=torch.channels_last)
        for network, optimizer in ((first, ours), (second, theirs)):
            optimizer.zero_grad()
            network(images).square().sum().backward()
            optimizer.step()
    for one, other in zip(first.parameters(), second.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert one.stride() == other.stride()


def test_a_gradient_in_another_memory_order_counts_the_same():
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    plain = nn.Parameter(weight.detach().clone())
    gradient = torch.randn(4, 3, 2, 2)
    weight.grad, plain.grad = gradient.clone(), gradient.clone()
    InPlaceAdam([weight], 0.1).step()
    torch.optim.Adam([plain], 0.1, foreach=False).step()
    torch.testing.assert_close(weight, plain)


def test_memory_that_is_used_again_holds_nothing_of_before():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 2))
    network = network.to(memory_format=torch.channels_last)
    start = copy.deepcopy(network.state_dict())
    images = torch.randn(5, 3, 4, 4)

    def trained(optimizer):
        network.load_state_dict(start)
        for _ in range(3):
            optimizer.zero_grad()
            network(images).square().sum().backward()
            optimizer.step()
        return copy.deepcopy(network.state_dict())

    spent = InPlaceAdam(network.parameters(), 0.1)
    fresh = trained(spent)
    moments = {id(state["exp_avg"]) for state in spent.state.values()}
    again = InPlaceAdam(network.parameters(), 0.1, spent=spent)
    for name, tensor in trained(again).items():
        assert torch.equal(tensor, fresh[name])
    assert {id(state["exp_avg"]) for state in again.state.values()} == moments
    assert not spent.state


def test_memory_of_other_parameters_or_optimizers_is_left_alone():
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    for spent in (InPlaceAdam(first.parameters(), 0.1), torch.optim.SGD(second.parameters(), 0.1)):
        first(torch.ones(1, 3)).sum().backward()
        spent.step()
        assert not InPlaceAdam(second.parameters(), 0.1, spent=spent).state


@pytest.mark.parametrize(("pending", "most"), [(0, 1), (50, 2), (10**9, 6)])
def test_a_step_taken_inside_the_backward_pass_is_the_step_after_it(monkeypatch, pending, most):
    """Also where a parameter is used twice, is in a penalty of its own, or is not used at all."""
    monkeypatch.setattr("feddg.clients.optimizers.PENDING_BYTES", pending)
    torch.manual_seed(0)
    network = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(2, 2)])
    plain = copy.deepcopy(network)
    images = torch.randn(4, 6)

    def loss(layers):
        twice = layers[1](layers[0](layers[1](images)).relu())
        penalty = sum(parameter.square().sum() for parameter in layers[0].parameters())
        return layers[2](twice).square().sum() + 0.1 * penalty

    waiting = []
    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: waiting.append(sum(p.grad is not None for p in network.parameters()))
        )
    ours = InPlaceAdam(network.parameters(), 0.01, weight_decay=0.1)
    theirs = InPlaceAdam(plain.parameters(), 0.01, weight_decay=0.1)
    for _ in range(3):
        ours.descend(loss(network))
        loss(plain).backward()
        theirs.step()
        theirs.zero_grad()
    for one, other in zip(network.parameters(), plain.parameters()):
        assert torch.equal(one, other)
        assert one.grad is None
    assert max(waiting) == most


def test_a_backward_pass_that_fails_leaves_no_hook(monkeypatch):
    monkeypatch.setattr("feddg.clients.optimizers.PENDING_BYTES", 0)
    layer = nn.Linear(2, 1)
    adam = InPlaceAdam(layer.parameters(), 0.1)
    with pytest.raises(RuntimeError, match="does not require grad"):
        adam.descend(torch.ones(()))
    adam.descend(layer(torch.ones(1, 2)).sum())
    before = layer.weight.detach().clone()
    layer(torch.ones(1, 2)).sum().backward()
    assert torch.equal(layer.weight, before)
