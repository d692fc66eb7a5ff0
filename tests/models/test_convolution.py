"""Convolutions on tiny maps as matrix products: the same numbers as PyTorch's own."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from feddg.models.backbones import build_network
from feddg.models.convolution import SmallMapConv2d, use_small_map_convolutions


@given(
    size=st.integers(1, 9),
    kernel=st.sampled_from([1, 3, 5]),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    bias=st.booleans(),
    last=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_same_result_and_gradients(size, kernel, stride, padding, bias, last):
    if size + 2 * padding < kernel:
        return
    torch.manual_seed(0)
    # Not 3 channels: of these PyTorch's own backward step writes past its memory for kernels of 1
    # with a stride, channels-last (seen with MALLOC_CHECK_=3), and ends the process now and then.
    plain = nn.Conv2d(8, 5, kernel, stride, padding, bias=bias)
    if last:
        plain = plain.to(memory_format=torch.channels_last)
    fast = copy.deepcopy(plain)
    use_small_map_convolutions(fast)
    assert type(fast) is SmallMapConv2d
    images = torch.randn(2, 8, size, size)
    results = []
    for layer in (plain, fast):
        entry = images.clone().requires_grad_()
        result = layer(entry)
        result.square().sum().backward()
        results.append([result, entry.grad, *(p.grad for p in layer.parameters())])
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_mixed_precision_is_as_near_to_float32_as_pytorchs_own(size):
    torch.manual_seed(0)
    plain = nn.Conv2d(64, 32, 3, 2, 1, bias=False)
    fast = copy.deepcopy(plain)
    use_small_map_convolutions(fast)
    images = torch.randn(4, 64, size, size)
    exact = plain(images)
    with torch.autocast("cpu", torch.bfloat16):
        own, found = plain(images), fast(images)
    assert found.dtype == own.dtype == torch.bfloat16
    assert (found - exact).abs().max() <= 1.5 * (own - exact).abs().max() + 1e-3


def test_a_tiny_result_is_a_matrix_product_and_a_large_one_is_not(monkeypatch):
    layer = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1))
    use_small_map_convolutions(layer)
    used = []
    monkeypatch.setattr(nn.Conv2d, "forward", lambda self, input: used.append(input.shape))
    layer(torch.rand(1, 3, 2, 2))
    assert used == []
    layer[0].forward(torch.rand(1, 3, 8, 8))
    assert used == [(1, 3, 8, 8)]


def test_layers_that_are_no_plain_convolution_stay_as_they_are():
    layers = nn.Sequential(
        nn.Conv2d(4, 4, 3, groups=4),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Conv2d(4, 4, (3, 1)),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    )
    use_small_map_convolutions(layers)
    assert {type(layer) for layer in layers} == {nn.Conv2d}


def test_a_resnets_state_and_embeddings_do_not_change():
    network = build_network("resnet18", 7, weights=None).eval()
    changed = copy.deepcopy(network)
    use_small_map_convolutions(changed)
    assert list(changed.state_dict()) == list(network.state_dict())
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(
            changed.features(images), network.features(images), rtol=1e-4, atol=1e-4
        )
