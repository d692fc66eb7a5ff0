"""Noised styles: the sensitivity holds for adversarial neighbours, the noise is the stated one."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from feddg.api import run
from feddg.errors import ExperimentError
from feddg.experiment import Experiment
from feddg.guards.accounting import gaussian_epsilon
from feddg.records import PRIVACY_ROWS
from feddg.runs.prepare import build, guards_for
from feddg.styles.codec import load_codec
from feddg.styles.private import (
    PublicReference,
    StyleNoise,
    clipped_mean,
    private_style,
    public_reference,
    sensitivity,
)
from feddg.styles.statistics import image_moments, style_from_averages
from federations import federation

CHANNELS = 3
NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=64)
IMAGE = st.lists(NUMBERS, min_size=2 * CHANNELS, max_size=2 * CHANNELS)
REFERENCE = PublicReference(
    torch.tensor([[1.0, -2.0, 0.0]] * 2), torch.tensor([[0.1, 7.0, 1e-3]] * 2), 1
)


def moments_of(images):
    return torch.tensor(images, dtype=torch.float64).reshape(-1, 2, CHANNELS)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(IMAGE, min_size=1, max_size=6), IMAGE, st.integers(0, 5), st.sampled_from([0.1, 1, 30])
)
def test_no_image_moves_the_mean_by_more_than_the_sensitivity(images, other, at, radius):
    neighbour = list(images)
    neighbour[at % len(images)] = other
    one, two = (clipped_mean(moments_of(m), REFERENCE, radius) for m in (images, neighbour))
    bound = sensitivity(StyleNoise(1.0, "image"), len(images), radius)
    assert torch.isfinite(one).all()
    assert float((one - two).norm()) <= bound * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(st.lists(IMAGE, min_size=2, max_size=5), st.lists(IMAGE, min_size=2, max_size=5))
def test_no_client_moves_its_mean_by_more_than_the_sensitivity(images, others):
    size = min(len(images), len(others))
    one, two = (clipped_mean(moments_of(m[:size]), REFERENCE, 2.5) for m in (images, others))
    bound = sensitivity(StyleNoise(1.0, "client"), size, 2.5)
    assert float((one - two).norm()) <= bound * (1 + 1e-9)


def test_the_worst_neighbours_reach_the_bound():
    far = [[1e9, 0, 0, 0, 0, 0], [-1e9, 0, 0, 0, 0, 0]]
    images = [[1.0, -2.0, 0.0] * 2] * 3
    one, two = (clipped_mean(moments_of([*images, f]), REFERENCE, 2.0) for f in far)
    bound = sensitivity(StyleNoise(1.0, "image"), 4, 2.0)
    assert float((one - two).norm()) == pytest.approx(bound, rel=1e-6)


def moments(count=5, seed=0):
    chance = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 3, 16, 16, generator=chance)
    codec = load_codec("colors")
    return image_moments(codec.style_features(images)), codec


def test_over_10_000_draws_the_noise_has_the_stated_variance():
    found, codec = moments()
    noise = StyleNoise(0.7, "image", norm=50.0)
    reference = public_reference(codec)
    radius = noise.norm * reference.radius
    mean = clipped_mean(found.averages, reference, radius)
    drawn = torch.stack(
        [(private_style(found, codec, noise)[0] - reference.centre[0]) for _ in range(10_000)]
    )
    errors = ((drawn / reference.spread[0] - mean[0]) / (0.7 * 2 * radius / 5)).flatten().numpy()
    low, high = stats.chi2.ppf([5e-10, 1 - 5e-10], len(errors))
    assert low < (errors**2).sum() < high
    assert stats.kstest(errors, "norm").pvalue > 1e-9


def test_the_noise_cannot_be_drawn_again_and_nothing_else_varies():
    found, codec = moments()
    one, two = (private_style(found, codec, StyleNoise(1.0)) for _ in range(2))
    assert not torch.equal(one, two)
    bare = StyleNoise(0.0, norm=1e6)
    expected = style_from_averages(found.averages.mean(0))
    assert torch.allclose(private_style(found, codec, bare), expected, atol=1e-6)
    public_reference.cache_clear()
    again = public_reference(codec)
    public_reference.cache_clear()
    assert torch.equal(again.centre, public_reference(codec).centre)


def test_deviations_are_made_from_noised_moments():
    # A client whose images are all alike has deviation 0; released, it must not show.
    flat = image_moments(load_codec("colors").style_features(torch.full((4, 3, 8, 8), 0.5)))
    styles = torch.stack([private_style(flat, load_codec("colors"), StyleNoise(2.0))[1]] * 1)
    drawn = torch.stack(
        [private_style(flat, load_codec("colors"), StyleNoise(2.0))[1] for _ in range(50)]
    )
    assert torch.isfinite(styles).all()
    assert float(drawn.std()) > 0.05


@pytest.mark.parametrize("method", ["pardon", "ccst", "vista"])
def test_what_leaves_a_client_is_noised(method):
    options = {"settings": {"codec": "colors"}}
    said = []
    for noise in (None, StyleNoise(1e-9, norm=1e3), StyleNoise(0.5)):
        small = federation(method, style_noise=noise, **options)
        name = "styles" if method == "ccst" else "style"
        said.append(small.method.describe(small.client(0)).tensors[name].reshape(2, -1))
    plain, clipped, noised = said
    assert noised.shape == plain.shape
    if method == "ccst":  # the others leave their clusters out
        torch.testing.assert_close(clipped, plain, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(noised, plain, atol=1e-3)


DIGITS = {
    "data": {"source": "digits", "image_size": 16},
    "hold_out": "sketch",
    "clients": 3,
    "model": {"backbone": "cnn_gn", "weights": None, "normalization": "frozen"},
    "train": {"rounds": 1, "local_steps": 1, "batch_size": 8},
    "device": "cpu",
    "precision": "float32",
}


def chosen(method, privacy, **settings):
    choice = {"name": method, "settings": settings}
    return Experiment(**DIGITS, method=choice, privacy=privacy)


@pytest.mark.parametrize("unit", ["image", "client"])
def test_a_run_with_both_counts_both(tmp_path, unit):
    privacy = {"epsilon": 16, "style_epsilon": 4, "style_unit": unit}
    experiment = chosen("pardon", privacy, codec="colors")
    done = run(experiment, tmp_path, cache=tmp_path / "cache", report=False)
    spent = done.record.privacy
    assert set(spent) == {("update", "client"), ("describe", unit)}
    style = spent["describe", unit]
    assert (style.round, style.clients, style.noised_at) == (0, [0, 1, 2], "client")
    assert style.budget == 4
    assert 3.95 < style.epsilon <= 4
    assert gaussian_epsilon(style.noise, 1e-5) == pytest.approx(4, rel=0.01)
    rows = PRIVACY_ROWS.read(done.folder / "privacy.jsonl")
    assert [row.message for row in rows] == ["describe", "update"]


def refused(method, privacy, **settings):
    experiment = chosen(method, privacy, **settings)
    return guards_for(experiment, *build(experiment, 10))


@pytest.mark.parametrize(
    ("method", "privacy", "settings", "words"),
    [
        ("fedavg", {"style_epsilon": 8}, {}, "fedavg: sends none"),
        ("elcfs", {"style_epsilon": 8}, {}, "elcfs: describe/.* cannot be noised"),
        ("ccst", {"style_epsilon": 8}, {"share": "single"}, "set method.share to overall"),
        ("pardon", {"epsilon": 8}, {}, "neither clipped nor noised"),
        ("pardon", {"epsilon": 8, "style_epsilon": 1, "open_styles": True}, {}, "exclude each"),
        ("pardon", {"style_epsilon": -1}, {}, "style_epsilon"),
    ],
)
def test_styles_that_cannot_be_protected_are_refused(method, privacy, settings, words):
    with pytest.raises(ExperimentError, match=words):
        refused(method, privacy, **settings)


@pytest.mark.parametrize("more", [{"open_styles": True}, {"style_epsilon": 1}])
def test_updates_can_be_protected_beside_styles(more):
    guards = refused("pardon", {"epsilon": 8, **more})
    assert guards.noised
    assert len(guards.promises) == (1 if "open_styles" in more else 2)


def test_the_reference_is_no_image_of_anybody():
    codec = load_codec("colors")
    reference = public_reference(codec)
    assert numpy.isfinite(reference.radius)
    assert (reference.spread > 0).all()
