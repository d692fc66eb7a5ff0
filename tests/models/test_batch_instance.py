"""Batch-instance normalisation against torch's two, and its gate."""

import pytest
import torch
from torch import nn

from feddg.models.backbones import build_network
from feddg.models.batch_instance import (
    BatchInstanceNorm2d,
    clamp_gates,
    mix_instance_statistics,
)
from feddg.models.norm import batch_norms


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


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gate", [1.0, 0.0, 0.3])
def test_it_mixes_batch_and_instance_normalisation(gate, training):
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
