"""Adam and SGD in memory order against PyTorch's plain ones."""

import copy

import pytest
import torch
from torch import nn

from feddg.clients.optimizers import MemoryOrderAdam, MemoryOrderSGD
from feddg.errors import ClientError

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


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_steps_are_those_of_the_plain_loop(case):
    first, second = network_and_copy()
    mine, plain, settings = OPTIMIZERS[case]
    ours = mine(first.parameters(), 0.01, **settings)
    theirs = plain(second.parameters(), 0.01, foreach=False, fused=False, **settings)
    for _ in range(4):
        images = torch.randn(5, 3, 8, 8).contiguous(memory_format=CHANNELS_LAST)
        for network, optimizer in ((first, ours), (second, theirs)):
            optimizer.zero_grad()
            network(images).square().sum().backward()
            optimizer.step()
    for one, other in zip(first.parameters(), second.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_steps_are_those_of_pytorchs_fused_kernel_bit_for_bit(case):
    first, second = network_and_copy()
    mine, plain, settings = OPTIMIZERS[case]
    ours = mine(first.parameters(), 0.01, **settings)
    theirs = plain(second.parameters(), 0.01, fused=True, **settings)
    for _ in range(3):
        images = torch.randn(5, 3, 8, 8)
        for network, optimizer in ((first, ours), (second, theirs)):
            optimizer.zero_grad()
            network(images).square().sum().backward()
            optimizer.step()
    for one, other in zip(first.parameters(), second.parameters()):
        assert torch.equal(one, other)


@pytest.mark.parametrize("other", ["contiguous", "channels last", "transposed", "3d channels last"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_a_gradient_in_another_memory_order_counts_the_same(case, layout, other):
    """As when a method assigns ``p.grad`` itself; twice, so that moments are old once."""
    shape = LAYOUTS[layout]
    if other != "contiguous" and len(LAYOUTS[other]) != len(shape):
        pytest.skip("this order is for other shapes")
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
    with pytest.raises(ClientError, match=r"shape \(4, 3\).*holes.*clone"):
        make([holes], 0.1, **settings).step()
    overlapping = nn.Parameter(torch.randn(1, 3).expand(4, 3))
    overlapping.grad = torch.ones(4, 3)
    with pytest.raises(ClientError, match="overlaps"):
        make([overlapping], 0.1, **settings).step()


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_gradients_unlike_their_parameter_are_refused(case):
    make, _, settings = OPTIMIZERS[case]
    sparse = nn.Parameter(torch.randn(4, 3))
    sparse.grad = torch.ones(4, 3).to_sparse()
    with pytest.raises(ClientError, match="dense"):
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
    with pytest.raises(ClientError, match="another memory order than its optimizer's moments"):
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


def test_a_closure_is_called_with_gradients_on():
    weight = nn.Parameter(torch.ones(3))
    optimizer = MemoryOrderSGD([weight], 0.5)

    def closure():
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert torch.equal(weight.detach(), torch.zeros(3))
