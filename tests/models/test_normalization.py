"""Batch-instance normalisation against torch's two, and its gate."""

import itertools

import numpy
import pytest
import torch
from torch import nn

from feddg.methods.fedig import mixed
from feddg.models.backbones import build_network
from feddg.models.normalization import (
    BatchInstanceNorm2d,
    Stored,
    batch_norms,
    clamp_gates,
    map_moments,
    mix_instance_statistics,
    normalised_by,
    normalize_stored,
    stored,
    stored_in,
)


def maps():
    return torch.randn(4, 5, 6, 7, generator=torch.Generator().manual_seed(0)) * 2 + 1


def layers(gate):
    batch, instance = nn.BatchNorm2d(5), nn.InstanceNorm2d(5)
    with torch.no_grad():
        batch.weight.copy_(torch.arange(1.0, 6.0))
        batch.bias.copy_(torch.arange(5.0) - 2)
    mixed = BatchInstanceNorm2d(5, gate)
    mixed.load_state_dict(batch.state_dict(), strict=False)
    return mixed, batch, instance


def test_it_mixes_batch_and_instance_normalisation(subtests):
    for gate, training in itertools.product([1.0, 0.0, 0.3], [True, False]):
        with subtests.test(training=training, gate=gate):
            mixed, batch, instance = layers(gate)
            mixed.train(training)
            batch.train(training)
            scale, shift = batch.weight[:, None, None], batch.bias[:, None, None]
            plain = (batch(maps()) - shift) / scale
            expected = (gate * plain + (1 - gate) * instance(maps())) * scale + shift
            torch.testing.assert_close(mixed(maps()), expected, rtol=1e-4, atol=1e-4)
            for name, buffer in batch.named_buffers():
                torch.testing.assert_close(dict(mixed.named_buffers())[name], buffer)


def test_a_network_keeps_its_function_with_the_gate_at_one():
    network = build_network("resnet18", 3, weights=None)
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    network.eval()
    with torch.no_grad():
        before = network(images)
        new = mix_instance_statistics(network, 1.0)
        network.eval()
        torch.testing.assert_close(network(images), before, rtol=1e-4, atol=1e-5)
    assert len(new) == len(batch_norms(network)) == 20


def test_scales_and_shifts_that_are_not_trained_stay_so():
    network = nn.Sequential(nn.BatchNorm2d(5), nn.BatchNorm2d(5).requires_grad_(False))
    new = mix_instance_statistics(network, 1.0)
    assert [layer.weight.requires_grad for layer in new] == [True, False]
    assert [layer.bias.requires_grad for layer in new] == [True, False]
    assert all(layer.gate.requires_grad for layer in new)


def test_maps_of_one_pixel_and_batches_of_one_stay_finite():
    mixed, _, _ = layers(0.5)
    mixed.eval()
    assert torch.isfinite(mixed(torch.randn(1, 5, 1, 1))).all()


def test_gates_are_clamped():
    mixed, _, _ = layers(1.0)
    with torch.no_grad():
        mixed.gate.copy_(torch.tensor([-1.0, 0.0, 0.5, 1.0, 3.0]))
    outside = mixed(maps())
    clamp_gates([mixed])
    assert mixed.gate.tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]
    torch.testing.assert_close(mixed(maps()), outside)


@pytest.mark.parametrize("gate", [0.0, 1.0])
def test_a_gate_at_its_bound_can_leave_it(gate):
    mixed = BatchInstanceNorm2d(5, gate).train()
    mixed(maps()).pow(3).sum().backward()
    assert (mixed.gate.grad != 0).all()


def test_maps_of_mixed_precision_stay_what_they_are():
    mixed = BatchInstanceNorm2d(5, 0.5).eval()
    assert mixed(maps().bfloat16()).dtype == torch.bfloat16


# Normalisation by other moments, against loops over images and channels.


def layer(channels=3, seed=0):
    """A layer with statistics, scale and shift unlike those of a new one."""
    rng = torch.Generator().manual_seed(seed)
    made = nn.BatchNorm2d(channels).eval()
    with torch.no_grad():
        for tensor in (made.weight, made.running_var):
            tensor.copy_(0.5 + torch.rand(channels, generator=rng))
        for tensor in (made.bias, made.running_mean):
            tensor.copy_(torch.randn(channels, generator=rng))
    return made.requires_grad_(False)


def moments_maps(count=4, channels=3, size=5, seed=1):
    return 2 * torch.randn(count, channels, size, size, generator=torch.manual_seed(seed)) + 0.3


def by_loops(made, inputs, u):
    """MixIG of Eq. 3, one pixel map after the other, in double precision."""
    out = numpy.empty(inputs.shape)
    for image, planes in enumerate(inputs.double().numpy()):
        for c, plane in enumerate(planes):
            own = (plane.mean(), (plane.var() + made.eps) ** 0.5)
            ours = (float(made.running_mean[c]), (float(made.running_var[c]) + made.eps) ** 0.5)
            mean, deviation = (u[c] * a + (1 - u[c]) * b for a, b in zip(own, ours))
            scale, shift = float(made.weight[c]), float(made.bias[c])
            out[image, c] = (plane - mean) / deviation * scale + shift
    return torch.from_numpy(out).float()


def mixed_output(made, inputs, mixing, seed=3):
    drawn = torch.rand(made.num_features, generator=torch.Generator().manual_seed(seed))
    return mixed({made: stored(made)}, mixing, drawn)(made, inputs).detach()


@pytest.mark.parametrize("mixing", [(0, 1), (0.5, 1), (-0.1, 1.1), (0.5, 0.5)])
def test_mixed_statistics_follow_equation_three(mixing):
    made, inputs = layer(), moments_maps()
    low, high = mixing
    u = low + (high - low) * torch.rand(3, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(
        mixed_output(made, inputs, mixing), by_loops(made, inputs, u.tolist()), rtol=1e-4, atol=1e-5
    )


def test_u_of_zero_is_batch_normalisation_by_the_global_statistics():
    made, inputs = layer(), moments_maps()
    torch.testing.assert_close(mixed_output(made, inputs, (0, 0)), made(inputs))


def test_u_of_one_is_instance_normalisation_with_the_same_scale_and_shift():
    made, inputs = layer(), moments_maps()
    expected = nn.functional.instance_norm(inputs, weight=made.weight, bias=made.bias, eps=made.eps)
    torch.testing.assert_close(mixed_output(made, inputs, (1, 1)), expected)


def test_extrapolated_deviations_stay_positive():
    made = layer()
    made.running_var.fill_(400.0)
    inputs = 0.01 * moments_maps()
    out = mixed_output(made, inputs, (1.5, 1.5))
    assert torch.isfinite(out).all()
    own = inputs.mean((2, 3), keepdim=True)
    mean = 1.5 * own - 0.5 * made.running_mean[:, None, None]
    least = made.eps**0.5
    expected = (inputs - mean) / least * made.weight[:, None, None] + made.bias[:, None, None]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)


def test_moments_of_maps_and_their_gradients_are_torchs_own():
    inputs = moments_maps().double().contiguous(memory_format=torch.channels_last).requires_grad_()
    mean, variance = map_moments(inputs)
    expected = torch.var_mean(inputs, dim=(2, 3), correction=0)
    torch.testing.assert_close((variance, mean), expected)
    assert torch.autograd.gradcheck(map_moments, inputs)
    assert torch.autograd.gradgradcheck(map_moments, inputs)
    found = map_moments(inputs.detach().bfloat16())
    assert [part.dtype for part in found] == [torch.float32] * 2


def test_one_pixel_has_no_moments_and_keeps_to_the_global_ones():
    made, inputs = layer(), moments_maps(size=1)
    assert torch.equal(mixed_output(made, inputs, (1, 1)), made(inputs))


def test_a_rule_lasts_as_long_as_its_block_even_through_an_error():
    network = build_network("cnn", 3, weights=None, embedding="bottleneck").eval()
    images = torch.rand(2, 3, 32, 32)
    plain = network(images)
    with pytest.raises(KeyError), normalised_by(network, lambda made, inputs: {}["nothing"]):
        network(images)
    assert torch.equal(network(images), plain)
    seen = []

    def rule(made, inputs):
        seen.append(made)
        return normalize_stored(made, inputs, stored(made))

    with normalised_by(network, rule):
        assert torch.equal(network(images), plain)
    assert seen == list(batch_norms(network).values())
    network(images)
    assert len(seen) == 4


@pytest.mark.parametrize("backbone", ["test_efficientnet", "regnetx_002"])
def test_layers_that_hold_their_activation_keep_it_under_a_rule_and_a_gate(backbone):
    network = build_network(backbone, 3, weights=None, image_size=32).eval()
    images = torch.rand(2, 3, 32, 32)
    plain = network(images)
    with normalised_by(network, lambda made, inputs: normalize_stored(made, inputs, stored(made))):
        assert torch.equal(network(images), plain)
    gated = mix_instance_statistics(network, gate=1.0)
    assert len(gated) == len(batch_norms(network)) > 0
    torch.testing.assert_close(network.eval()(images), plain)


def test_statistics_are_found_by_name_in_a_state():
    network = build_network("resnet18", 2, weights=None)
    state = {name: torch.full_like(t, 7) for name, t in network.state_dict().items()}
    found = stored_in(network, state)
    assert len(found) == 20
    assert all(isinstance(entry, Stored) for entry in found.values())
    assert all(bool((part == 7).all()) for entry in found.values() for part in entry)
