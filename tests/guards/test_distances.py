"""Lengths and distances, against one sum in float64."""

import math

import pytest
import torch

from feddg.guards import distances
from feddg.guards.distances import distance, length


def some_weights(seed):
    chance = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(shape, generator=chance)

    return {
        "contiguous": drawn(5, 4, 3, 3),
        "last": drawn(5, 4, 3, 3).to(memory_format=torch.channels_last),
        "turned": drawn(7, 9).t(),
        "every other": drawn(20)[::2],
        "number": drawn(),
        "none": drawn(0),
        "short": drawn(6).bfloat16(),
        "long": drawn(6).double(),
        "half": drawn(3, 3).half(),
    }


@pytest.mark.parametrize("block", [7, 1 << 18])
def test_they_are_those_of_all_entries_in_float64(monkeypatch, block):
    monkeypatch.setattr(distances, "_BLOCK", block)
    one, other = some_weights(0), some_weights(1)
    wide = {name: one[name].double() for name in one}
    apart = {name: (one[name] - other[name]).double() for name in one}
    for found, whole in ((length(one, one), wide), (distance(one, other, one), apart)):
        total = sum(float(tensor.square().sum()) for tensor in whole.values())
        assert found == pytest.approx(math.sqrt(total), rel=1e-12)


def test_a_distance_does_not_depend_on_how_either_lies_in_memory():
    one, other = some_weights(0), some_weights(1)
    turned = {n: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t.contiguous()
              for n, t in other.items()}  # fmt: skip
    assert distance(one, other, one) == pytest.approx(distance(one, turned, one), rel=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_them_not_finite(bad):
    one, other = some_weights(0), some_weights(1)
    one["last"][2, 1, 0, 2] = bad
    assert not math.isfinite(distance(one, other, one))
    assert not math.isfinite(length(one, one))


def test_the_square_of_the_largest_float32_is_no_infinity():
    large = {"x": torch.tensor([3e38, 0.0])}
    assert length(large, large) == pytest.approx(3e38)
