"""Energy and its threshold."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from feddg.runs.energy import energy, energy_threshold

NUMBERS = some.lists(some.floats(-50, 50), min_size=2, max_size=6)


@given(NUMBERS)
def test_energy_is_minus_the_logarithm_of_the_sum_of_exponentials(logits):
    expected = -math.log(math.fsum(math.exp(value) for value in logits))
    found = energy(torch.tensor([logits], dtype=torch.float64))
    assert found.tolist() == pytest.approx([expected], abs=1e-9)


@given(NUMBERS)
def test_log_probabilities_have_no_energy_and_no_threshold(logits):
    shares = torch.tensor([logits, logits[::-1]]).log_softmax(1)
    assert energy(shares).abs().max() < 1e-4
    assert energy_threshold(energy(shares)) is None


def test_the_threshold_lets_the_wanted_share_of_images_pass():
    energies = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    threshold = energy_threshold(energies, 0.9)
    assert int((energies <= threshold).sum()) == 900
    few = energies[:27]
    assert int((few > energy_threshold(few)).sum()) == 1  # of 27, and not 2
    assert energy_threshold(torch.empty(0)) is None
