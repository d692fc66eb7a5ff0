"""Energy, its threshold and how well it tells foreign images."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from feddg.evaluation.accuracy import Score, energy, energy_threshold

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
    assert energy_threshold(torch.empty(0)) is None


def test_scores_are_counted_by_hand():
    import numpy
    import torch

    from feddg.data.pixels import ArrayPixels
    from feddg.evaluation.accuracy import Evaluation

    pixels = ArrayPixels(numpy.arange(5, dtype=numpy.uint8)[:, None, None, None].repeat(3, 3))
    labels, domains = numpy.array([0, 1, 1, 0, 1]), numpy.array([0, 0, 2, 2, 2])

    class Brightness(torch.nn.Module):
        def forward(self, images):
            # Images 0..4 have brightness i / 255: class 1 from image 2 on.
            bright = images.mean((1, 2, 3)) * 255
            return torch.stack([2 - bright - 0.5, bright - 2 + 0.5], 1)

    rows = {"test": numpy.arange(5)}
    evaluation = Evaluation(
        pixels, rows, labels, domains, ("a", "b", "c"), 2, 2, torch.device("cpu")
    )
    scores: list[Score] = evaluation.scores(Brightness())
    assert [(s.domain, s.correct, s.examples) for s in scores] == [("a", 1, 2), ("c", 2, 3)]
    assert scores[1].confusion.tolist() == [[0, 1], [0, 2]]
    # Image 0: logits (1.5, -1.5), label 0. Image 1: (0.5, -0.5), label 1.
    by_hand = (numpy.log(1 + numpy.exp(-3)) + numpy.log(1 + numpy.exp(1))) / 2
    assert scores[0].loss == pytest.approx(by_hand, rel=1e-6)
