"""Convolutions that are calculated another way give the same numbers as PyTorch's own."""

import copy
import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from feddg.models import convolutions
from feddg.models.backbones import build_network
from feddg.models.convolutions import (
    FoldedNorm,
    SeparableConv,
    SmallMapConv2d,
    WideConv2d,
    _Depthwise,
    loses_bfloat16,
    use_fast_convolutions,
    use_plain_convolutions,
)
from feddg.models.normalization import freeze_statistics, normalised_by, normalize_stored, stored

# On tiny maps.


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
    use_fast_convolutions(fast)
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


@pytest.mark.parametrize("shape", [(8, 4, 4), (2, 7, 4, 4), (2, 8, 1, 4), (2, 8, 0, 0), (8, 4)])
def test_what_a_convolution_takes_and_refuses_the_faster_one_does_too(shape):
    plain = nn.Conv2d(8, 5, 3)
    fast = copy.deepcopy(plain)
    use_fast_convolutions(fast)
    images = torch.randn(shape)
    if shape == (8, 4, 4):
        torch.testing.assert_close(fast(images), plain(images))
        return
    with pytest.raises(RuntimeError) as expected:
        plain(images)
    with pytest.raises(RuntimeError) as found:
        fast(images)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_mixed_precision_is_as_near_to_float32_as_pytorchs_own(size):
    torch.manual_seed(0)
    plain = nn.Conv2d(64, 32, 3, 2, 1, bias=False)
    fast = copy.deepcopy(plain)
    use_fast_convolutions(fast)
    images = torch.randn(4, 64, size, size)
    exact = plain(images)
    with torch.autocast("cpu", torch.bfloat16):
        own, found = plain(images), fast(images)
    assert found.dtype == own.dtype == torch.bfloat16
    assert (found - exact).abs().max() <= 1.5 * (own - exact).abs().max() + 1e-3


def test_a_tiny_result_is_a_matrix_product_and_a_large_one_is_not(monkeypatch):
    layer = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1))
    use_fast_convolutions(layer)
    used = []
    monkeypatch.setattr(
        nn.Conv2d, "_conv_forward", lambda self, input, *_: used.append(input.shape)
    )
    layer(torch.rand(1, 3, 2, 2))
    assert used == []
    layer[0].forward(torch.rand(1, 3, 8, 8))
    assert used == [(1, 3, 8, 8)]


def test_layers_that_are_no_plain_convolution_stay_as_they_are():
    layers = nn.Sequential(
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Conv2d(4, 4, (3, 1)),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    )
    use_fast_convolutions(layers)
    assert {type(layer) for layer in layers} == {nn.Conv2d}


def test_a_resnets_state_and_embeddings_do_not_change():
    network = build_network("resnet18", 7, weights=None).eval()
    changed = copy.deepcopy(network)
    use_fast_convolutions(changed)
    assert list(changed.state_dict()) == list(network.state_dict())
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(
            changed.features(images), network.features(images), rtol=1e-4, atol=1e-4
        )


# Depthwise, in bfloat16.


def test_depthwise_gradients_are_exact_once_and_twice(subtests):
    for size, (kernel, padding), stride in itertools.product(
        [(8, 7), (7, 8)], [(3, 0), (3, 1), (5, 0), (5, 1), (5, 2), (7, 3)], [1, 2]
    ):
        with subtests.test(stride=stride, kernel=kernel, padding=padding, size=size):
            generator = torch.manual_seed(0)
            shapes = (2, 2, *size), (2, 1, kernel, kernel), (2,)
            parts = [
                torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
                for shape in shapes
            ]
            own = nn.functional.conv2d(*parts, stride, padding, 1, 2)
            found = _Depthwise.apply(*parts, stride, padding)
            assert torch.equal(found, own)
            towards = torch.randn(
                own.shape, generator=generator, dtype=torch.float64, requires_grad=True
            )
            firsts = [
                torch.autograd.grad(y, parts, towards, create_graph=True) for y in (own, found)
            ]
            seconds = [
                torch.autograd.grad(sum((g**3).sum() for g in first), [*parts[:2], towards])
                for first in firsts
            ]
            for expected, calculated in (firsts, seconds):
                torch.testing.assert_close(calculated, expected, rtol=1e-10, atol=1e-10)


@functools.cache
def same_padding():
    """timm's convolution with TensorFlow's padding."""
    from timm.layers import create_conv2d

    return functools.partial(create_conv2d, padding="same", depthwise=True)


def symmetric(inputs, outputs, kernel, stride):
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=inputs)


def test_depthwise_layers_in_bfloat16_are_as_near_to_float32_as_pytorchs(subtests):
    for same, kernel, stride, size, last in itertools.product(
        [True, False], [3, 5], [1, 2], [(14, 14), (13, 16), (4, 5)], [True, False]
    ):
        with subtests.test(last=last, size=size, stride=stride, kernel=kernel, same=same):
            torch.manual_seed(0)
            plain = (same_padding() if same else symmetric)(32, 32, kernel, stride=stride)
            fast = copy.deepcopy(plain)
            use_fast_convolutions(fast)
            assert isinstance(fast, SeparableConv)
            images = torch.randn(4, 32, *size)
            if last:
                images = images.to(memory_format=torch.channels_last)

            def gradients(layer, enabled):
                entry = images.clone().requires_grad_()
                layer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                    result = layer(entry)
                result.float().square().sum().backward()
                return [result.detach(), entry.grad, *(p.grad.clone() for p in layer.parameters())]

            exact = gradients(plain, False)
            assert all(map(torch.equal, gradients(fast, False), exact))  # float32 stays PyTorch's
            for truth, own, found in zip(exact, gradients(plain, True), gradients(fast, True)):
                assert found.dtype == own.dtype
                assert found.shape == own.shape
                assert (found - truth).norm() <= 1.2 * (own - truth).norm() + 1e-4 * truth.norm()


def test_in_bfloat16_pytorchs_slow_kernels_are_not_used():
    layer = symmetric(8, 8, 5, 2)
    use_fast_convolutions(layer)
    images = torch.randn(2, 8, 9, 9, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        result = layer(images)
    with torch.profiler.profile(record_shapes=True) as profile:
        result.float().sum().backward()
    backwards = [e for e in profile.events() if e.name == "aten::convolution_backward"]
    assert [e.input_shapes[2] for e in backwards] == [[8, 1, 3, 3]] * 4


# Before frozen normalisation.


def network_of(backbone="efficientnet_lite0", size=32):
    network = build_network(backbone, 3, weights=None, image_size=size).train()
    generator = torch.manual_seed(0)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.1, generator=generator)
            layer.running_var.uniform_(0.5, 1.5, generator=generator)
            nn.init.uniform_(layer.weight, 0.5, 1.5, generator=generator)
            nn.init.normal_(layer.bias, 0, 0.1, generator=generator)
    fast = copy.deepcopy(network)
    use_fast_convolutions(fast)
    return network, copy.deepcopy(fast)  # as a run copies it


def state_after_a_step(network, precision=torch.float32):
    """The logits and the gradients, for one batch."""
    images = torch.rand(4, 3, 32, 32, generator=torch.manual_seed(1))
    network.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision is torch.bfloat16):
        logits = network(images)
    nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 0])).backward()
    found = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **found}


def calls(network, images):
    """How often PyTorch normalises in a forward pass."""
    with torch.profiler.profile() as profile, torch.no_grad():
        network(images)
    return sum(event.name == "aten::batch_norm" for event in profile.events())


@pytest.mark.parametrize(
    ("backbone", "folded"),
    [("efficientnet_lite0", 49), ("timm:mobilenetv3_small_050", 34), ("mobilenet_v2", 52)],
)
def test_frozen_normalisation_is_a_part_of_the_convolution(backbone, folded):
    plain, fast = network_of(backbone)
    images = torch.rand(1, 3, 32, 32)
    for network in (plain, fast):
        freeze_statistics(network)
        for layer in network.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
    assert (calls(plain, images), calls(fast, images)) == (folded, 0)
    expected, found = map(state_after_a_step, (plain, fast))
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-4 * tensor.norm() + 1e-7, name


def test_in_bfloat16_a_folded_network_is_as_near_to_float32_as_pytorchs():
    plain, fast = network_of("timm:mobilenetv3_small_050")
    for network in (plain, fast):
        freeze_statistics(network)
    exact = state_after_a_step(plain)
    own, found = (
        sum(
            (tensor - exact[name]).square().sum()
            for name, tensor in state_after_a_step(network, torch.bfloat16).items()
        )
        for network in (plain, fast)
    )
    assert found <= 1.2 * own


def test_statistics_that_train_and_other_rules_are_not_folded():
    plain, fast = network_of()
    expected, found = map(state_after_a_step, (plain, fast))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(map(torch.equal, plain.state_dict().values(), fast.state_dict().values()))
    for network in (plain, fast):
        freeze_statistics(network)
    with normalised_by(plain, half), normalised_by(fast, half):
        expected, found = map(state_after_a_step, (plain, fast))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def half(layer, inputs):
    return normalize_stored(layer, inputs, stored(layer)) / 2


def test_nothing_is_folded_where_somebody_looks_or_weights_are_not_trained():
    plain, fast = network_of()
    images = torch.rand(1, 3, 32, 32)
    for network in (plain, fast):
        freeze_statistics(network)
    layers = [module for module in fast.modules() if isinstance(module, SeparableConv)]
    hook = layers[3].register_forward_hook(lambda *parts: None)
    assert calls(fast, images) == 1
    hook.remove()
    assert calls(fast, images) == 0
    for layer in layers:
        layer.weight.requires_grad_(False)
    assert calls(fast, images) == len(layers)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_image_by_image_and_of_gradients():
    _, fast = network_of()
    plain, _ = network_of()
    freeze_statistics(plain)
    freeze_statistics(fast)
    images, labels = torch.rand(2, 3, 32, 32), torch.tensor([0, 1])

    def by_image(network, enabled):
        weights = {name: p.detach() for name, p in network.named_parameters()}

        def loss(weights, image, label):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                logits = functional_call(network, weights, (image[None],))
            return nn.functional.cross_entropy(logits, label[None])

        return vmap(grad_and_value(loss), in_dims=(None, 0, 0))(weights, images, labels)[0]

    def twice(network):
        loss = nn.functional.cross_entropy(network(images), labels)
        first = torch.autograd.grad(loss, list(network.parameters()), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), network.classifier.weight)

    expected, found = by_image(plain, False), by_image(fast, False)
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-4 * tensor.norm() + 1e-7, name
    assert all(tensor.isfinite().all() for tensor in by_image(fast, True).values())
    expected, found = twice(plain)[0], twice(fast)[0]
    assert (found - expected).norm() <= 1e-3 * expected.norm()


def test_names_stay_and_plain_layers_come_back():
    plain, fast = network_of()
    assert list(fast.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in fast.named_modules()] == [name for name, _ in plain.named_modules()]
    kinds = {type(layer) for layer in fast.modules()}
    assert any(issubclass(kind, SeparableConv) for kind in kinds)
    assert any(issubclass(kind, FoldedNorm) for kind in kinds)
    use_plain_convolutions(fast)
    assert list(map(type, fast.modules())) == list(map(type, plain.modules()))


@pytest.mark.parametrize("backbone", ["cnn", "resnet18"])
def test_networks_without_depthwise_layers_are_changed_on_tiny_maps_alone(backbone):
    network = build_network(backbone, 3, weights=None)
    use_fast_convolutions(network)
    kinds = {type(m) for m in network.modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d)}
    assert kinds == {SmallMapConv2d, nn.BatchNorm2d}


# What stock PyTorch gets wrong in bfloat16 on CPUs with AMX.


def test_it_is_known_which_layers_may_have_nan_gradients(subtests):
    for layer, spoilt in [
        (nn.Conv2d(3, 32, 3, 2), True),
        (nn.Conv2d(64, 16, 3, 2, padding=1), True),
        (nn.Conv2d(17, 17, 3, 2), False),
        (nn.Conv2d(3, 32, 3), False),
        (nn.Conv2d(3, 64, 7, 2), False),
        (nn.Conv2d(16, 16, 3, 2, groups=16), False),
        (nn.Linear(3, 3), False),
    ]:
        with subtests.test(layer=layer, spoilt=spoilt):
            assert loses_bfloat16(layer) is spoilt


@pytest.mark.parametrize("backbone", ["resnet18", "mobilenet_v3_small", "efficientnet_lite0"])
@pytest.mark.parametrize("frozen", [True, False])
def test_they_are_calculated_in_float32_there(monkeypatch, backbone, frozen):
    monkeypatch.setattr(convolutions, "multiplies_tiles", lambda: True)
    network, seen = build_network(backbone, 3, weights=None, image_size=32), []
    images = torch.rand(2, 3, 32, 32)
    if frozen:
        freeze_statistics(network)
    expected = copy.deepcopy(network).eval()(images)
    use_fast_convolutions(network)
    wide = [layer for layer in network.modules() if isinstance(layer, WideConv2d)]
    assert len(wide) == (0 if backbone == "resnet18" else 1)
    for layer in wide:
        layer.register_forward_hook(lambda layer, given, result: seen.append(result.dtype))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        network.eval()(images).sum().backward()
    assert seen == [torch.float32] * len(wide)
    torch.testing.assert_close(network(images), expected, atol=1e-3, rtol=1e-3)
    use_plain_convolutions(network)
    assert not any(isinstance(layer, WideConv2d) for layer in network.modules())
