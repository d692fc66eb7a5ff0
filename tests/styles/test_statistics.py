"""Styles from sums, against numpy on the feature maps themselves."""

from itertools import pairwise

import numpy
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.cluster import AgglomerativeClustering
from torch import Tensor

from feddg.api import run
from feddg.errors import ExperimentError
from feddg.experiment import Experiment
from feddg.federation.federation import build
from feddg.privacy.accounting import gaussian_epsilon
from feddg.privacy.building import build_defences
from feddg.records import PRIVACY_ROWS
from feddg.styles import statistics
from feddg.styles.codec import load_codec
from feddg.styles.codecs import ColorsCodec
from feddg.styles.statistics import (
    FeatureMoments,
    PublicReference,
    StyleNoise,
    clipped_mean,
    finch,
    image_moments,
    interpolation_style,
    measure,
    perturb,
    private_style,
    public_reference,
    sensitivity,
    style_from_averages,
)
from federations import federation
from style_images import slow_finch


def style_by_numpy(maps: Tensor) -> np.ndarray:
    """Mean and standard deviation with every pixel of every map ``(n, C, h, w)`` as a sample."""
    samples = maps.double().numpy().transpose(1, 0, 2, 3).reshape(maps.shape[1], -1)
    deviation = np.sqrt(((samples - samples.mean(1, keepdims=True)) ** 2).mean(1) + 1e-5)
    return np.stack([samples.mean(1), deviation])


def random_maps(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3 + 1


def test_an_images_style_is_that_of_its_map() -> None:
    maps = random_maps(5, 7, 4, 6)
    styles = image_moments(maps).styles()
    assert styles.shape == (5, 2, 7)
    assert styles.dtype == torch.float64
    for style, single in zip(styles, maps):
        np.testing.assert_allclose(style, style_by_numpy(single[None]), rtol=1e-12)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(0, 1000),
)
@settings(max_examples=50, deadline=None)
def test_a_pooled_style_is_that_of_the_concatenated_maps(
    groups: list[int], channels: int, side: int, seed: int
) -> None:
    labels = np.unique(groups, return_inverse=True)[1]
    maps = random_maps(len(labels), channels, side, side, seed=seed)
    pooled = image_moments(maps).pooled(labels).styles()
    assert len(pooled) == labels.max() + 1
    for group, style in enumerate(pooled):
        np.testing.assert_allclose(style, style_by_numpy(maps[labels == group]), rtol=1e-9)


def test_pooling_everything_and_pooling_twice() -> None:
    maps = random_maps(6, 3, 4, 4)
    moments = image_moments(maps)
    whole = moments.pooled()
    assert len(whole) == 1
    np.testing.assert_allclose(whole.styles()[0], style_by_numpy(maps), rtol=1e-12)
    stepwise = moments.pooled(torch.tensor([0, 1, 1, 0, 2, 2])).pooled()
    np.testing.assert_allclose(stepwise.sums, whole.sums, rtol=1e-6)
    np.testing.assert_allclose(stepwise.counts, whole.counts, rtol=1e-6)


def test_larger_maps_weigh_more() -> None:
    small, large = random_maps(1, 2, 2, 2), random_maps(1, 2, 8, 8, seed=1)
    parts = [image_moments(small), image_moments(large)]
    both = FeatureMoments(torch.cat([p.counts for p in parts]), torch.cat([p.sums for p in parts]))
    samples = torch.cat([small.flatten(2), large.flatten(2)], dim=2)[..., None]
    np.testing.assert_allclose(both.pooled().styles()[0], style_by_numpy(samples), rtol=1e-12)


def test_large_means_do_not_swallow_small_deviations() -> None:
    maps = 2000 + 0.01 * random_maps(4, 3, 8, 8)
    style = image_moments(maps).pooled().styles()[0]
    np.testing.assert_allclose(style, style_by_numpy(maps), rtol=1e-6)


def test_flat_maps_have_the_smallest_deviation() -> None:
    flat = torch.full((3, 2, 5, 5), 1234.567)
    deviation = image_moments(flat).pooled().styles()[0, 1]
    np.testing.assert_allclose(deviation, torch.full((2,), 1e-5).double().sqrt(), rtol=1e-6)


def test_a_variance_made_negative_by_rounding_counts_as_zero() -> None:
    style = style_from_averages(torch.tensor([[3.0], [9.0 - 1e-3]]))
    np.testing.assert_allclose(style, torch.tensor([[3.0], [1e-5**0.5]]), rtol=1e-6)


@pytest.mark.parametrize("groups", [[0, 1], [0, 0, 2], []])
def test_groups_that_do_not_fit_are_an_error(groups: list[int]) -> None:
    moments = image_moments(random_maps(3, 2, 2, 2))
    with pytest.raises(ValueError, match="every row needs a group"):
        moments.pooled(torch.tensor(groups, dtype=torch.int64))


class PlainCodec(ColorsCodec):
    """Styles of the pixels themselves, three times as bright."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def style_features(self, images: Tensor) -> Tensor:
        self.batches.append(len(images))
        return images * 3


def test_measuring_encodes_images_in_the_unit_range_by_batches() -> None:
    images = torch.randint(0, 256, (7, 3, 4, 4), dtype=torch.uint8)
    codec = PlainCodec()
    moments = measure(codec, images, batch_size=3)
    assert codec.batches == [3, 3, 1]
    assert len(moments) == 7
    for style, image in zip(moments.styles(), images):
        expected = style_by_numpy(image[None].double() / 255 * 3)
        np.testing.assert_allclose(style, expected, rtol=1e-6)


def test_measured_styles_may_enter_training() -> None:
    images = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    styles = measure(PlainCodec(), images).styles()
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (styles * weight).sum().backward()
    np.testing.assert_allclose(weight.grad, styles.sum((0, 1)), rtol=1e-6)


# FINCH against a slow version written from the paper, cases by hand, and its promises.


def on_circle(*degrees: float) -> np.ndarray:
    angles = np.radians(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def together(labels: np.ndarray) -> np.ndarray:
    return labels[:, None] == labels[None, :]


@given(st.integers(1, 60), st.integers(3, 8), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_equals_the_slow_version(count: int, width: int, seed: int) -> None:
    points = np.random.default_rng(seed).normal(size=(count, width))
    found = [labels.tolist() for labels in finch(points)]
    assert found == slow_finch(points.tolist())


def test_blocks_of_the_neighbor_search_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    points = np.random.default_rng(0).normal(size=(50, 4))
    whole = finch(points)
    monkeypatch.setattr(statistics, "_SIMILARITIES_AT_ONCE", 7 * 50)
    for expected, found in zip(whole, finch(points), strict=True):
        assert (expected == found).all()


def test_two_levels_by_hand() -> None:
    result = finch(on_circle(0, 1, 90, 91, 5, 6, 95, 96))
    assert [p.tolist() for p in result] == [
        [0, 0, 1, 1, 2, 2, 3, 3],
        [0, 0, 1, 1, 0, 0, 1, 1],
    ]


def test_a_level_with_a_single_cluster_is_kept_only_as_the_first() -> None:
    assert [p.tolist() for p in finch(on_circle(0, 1, 30, 31, 90, 91))] == [[0, 0, 1, 1, 2, 2]]
    assert [p.tolist() for p in finch(on_circle(0, 2, 3, 7))] == [[0, 0, 0, 0]]


def test_means_are_of_the_original_points() -> None:
    # The long vector pulls the first pair's mean from 5 to 9.9 degrees, nearer to the third pair
    # (30) than to the second (-12), and so keeps the second level from joining everything.
    points = on_circle(0, 10, -12, -12.5, 30, 30.5, -20, -20.5)
    assert len(finch(points)) == 1
    points[1] *= 50
    assert [p.tolist() for p in finch(points)] == [
        [0, 0, 1, 1, 2, 2, 3, 3],
        [0, 0, 1, 1, 0, 0, 1, 1],
    ]


def test_separated_pairs_are_the_clusters_of_single_linkage() -> None:
    random = np.random.default_rng(3)
    centers = random.normal(size=(9, 16))
    points = np.repeat(centers, 2, axis=0) + 1e-3 * random.normal(size=(18, 16))
    other = AgglomerativeClustering(n_clusters=9, metric="cosine", linkage="single")
    assert (together(finch(points)[0]) == together(other.fit_predict(points))).all()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_up_to_three_different_points_are_one_cluster(count: int) -> None:
    points = np.random.default_rng(count).normal(size=(count, 5))
    assert [p.tolist() for p in finch(points)] == [[0] * count]


def test_a_point_with_a_copy_needs_no_other_neighbor() -> None:
    assert finch(on_circle(0, 0, 90, 90))[0].tolist() == [0, 0, 1, 1]
    assert finch(on_circle(0, 0, 90))[0].tolist() == [0, 0, 0]
    assert finch(np.ones((7, 3)))[0].tolist() == [0] * 7


def test_zero_vectors_are_clustered() -> None:
    assert finch(np.zeros((4, 3)))[0].tolist() == [0] * 4
    labels = finch(np.concatenate([np.zeros((2, 2)), on_circle(0, 1)]))[0]
    assert labels.tolist() == [0, 0, 1, 1]
    assert finch(np.array([[0.0, 0.0], [-0.0, 0.0], [1.0, 0.0], [1.0, 0.1]]))[0].tolist() == [
        0,
        0,
        1,
        1,
    ]


tied_points = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.lists(st.integers(-1, 1), min_size=width, max_size=width), min_size=1, max_size=24
    )
)


@given(tied_points, st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_promises_hold_with_ties_and_copies(points: list[list[int]], random) -> None:
    rows = np.array(points, dtype=np.float32)
    partitions = finch(rows)
    order = np.array(random.sample(range(len(rows)), len(rows)))
    for labels, reordered in zip(partitions, finch(rows[order]), strict=True):
        assert (together(labels)[np.ix_(order, order)] == together(reordered)).all()
    same = (rows[:, None] == rows[None, :]).all(axis=2)
    for labels in partitions:
        assert together(labels)[same].all()
        first = [labels.tolist().index(label) for label in range(labels.max() + 1)]
        assert first == sorted(first)
    for fine, coarse in pairwise(partitions):
        assert together(coarse)[together(fine)].all()
        assert 2 <= coarse.max() + 1 <= (fine.max() + 1) / 2


@pytest.mark.parametrize(
    "vectors", [np.zeros((0, 3)), np.zeros((3, 0)), np.zeros(3), np.array([[1.0, np.nan]])]
)
def test_nothing_to_cluster_is_an_error(vectors: np.ndarray) -> None:
    with pytest.raises(ValueError, match="finite"):
        finch(vectors)


def test_the_input_is_left_alone() -> None:
    vectors = np.array([[-0.0, 1.0], [2.0, 0.0]])
    finch(vectors)
    assert np.signbit(vectors[0, 0])


# Client and interpolation styles, against numpy on feature maps and cases by hand.


def styles_near(directions: list[int], generator: torch.Generator) -> Tensor:
    """Styles of 8 channels, each close to a unit vector, so that FINCH sees those groups."""
    styles = torch.eye(16)[directions].view(-1, 2, 8) * 5 + 1
    return styles + 0.01 * torch.rand(styles.shape, generator=generator)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_groups_have_one_voice_whatever_their_size(generator: torch.Generator) -> None:
    few = styles_near([0, 0, 9, 9], generator)
    many = torch.cat([few, few[:1].expand(10, 2, 8)])
    style, groups = interpolation_style(many)
    assert groups.max() == 1
    means = torch.stack([many[groups == 0].mean(0), many[groups == 1].mean(0)])
    np.testing.assert_allclose(style, means.mean(0), rtol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_clients_form_one_group(count: int, generator: torch.Generator) -> None:
    styles = styles_near(list(range(count)), generator)
    style, groups = interpolation_style(styles)
    np.testing.assert_allclose(style, styles.mean(0), rtol=1e-6)
    assert groups.tolist() == [0] * count


def test_perturbation_shrinks_and_adds_noise(generator: torch.Generator) -> None:
    style = torch.stack([torch.full((50_000,), -2.0), torch.full((50_000,), 3.0)])
    noise = perturb(style, 0.05, 0.1, generator) - 0.9 * style
    # 100,000 draws: the standard error of their mean is 0.00016, of their deviation 0.00011.
    assert abs(noise.mean().item()) < 0.001
    assert noise.std().item() == pytest.approx(0.05, abs=0.001)


def test_perturbation_depends_on_the_generator_alone() -> None:
    style = torch.ones(2, 4, dtype=torch.float64)
    first, again, other = (
        perturb(style, 0.5, 0.0, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.dtype == torch.float64


def test_no_perturbation_is_none() -> None:
    style = torch.tensor([[-1.0, 2.0], [0.5, 0.25]])
    assert torch.equal(perturb(style, 0.0, 0.0, torch.Generator()), style)


def test_deviations_stay_positive_and_means_may_be_negative() -> None:
    style = torch.zeros(2, 1000)
    mean, deviation = perturb(style, 1.0, 0.5, torch.Generator().manual_seed(0))
    assert mean.min() < 0
    assert deviation.min() == pytest.approx(1e-5)


# Noised styles: the sensitivity holds for adversarial neighbours, the noise is the stated one.


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
    rng = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 3, 16, 16, generator=rng)
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
        said.append(small.method.client_statistics(small.client(0)).tensors[name].reshape(2, -1))
    plain, clipped, noised = said
    assert noised.shape == plain.shape
    if method == "ccst":  # the others leave their clusters out
        torch.testing.assert_close(clipped, plain, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(noised, plain, atol=1e-3)


DIGITS = {
    "data": {"source": "digits", "image_size": 8},
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
    spent = done.privacy
    assert set(spent) == {("update", "client"), ("statistics", unit)}
    style = spent["statistics", unit]
    assert (style.round, style.clients, style.noised_at) == (0, [0, 1, 2], "client")
    assert style.budget == 4
    assert 3.95 < style.epsilon <= 4
    assert gaussian_epsilon(style.noise, 1e-5) == pytest.approx(4, rel=0.01)
    rows = PRIVACY_ROWS.read(done.folder / "privacy.jsonl")
    assert [row.message for row in rows] == ["statistics", "update"]


def refused(method, privacy, **settings):
    experiment = chosen(method, privacy, **settings)
    return build_defences(experiment, *build(experiment, 10))


def test_styles_that_cannot_be_protected_are_refused(subtests):
    for method, privacy, said, words in [
        ("fedavg", {"style_epsilon": 8}, {}, "fedavg: sends none"),
        ("elcfs", {"style_epsilon": 8}, {}, "elcfs: statistics/.* cannot be noised"),
        ("ccst+elcfs", {"style_epsilon": 8}, {}, "statistics/amplitudes .* cannot be noised"),
        ("ccst", {"style_epsilon": 8}, {"share": "single"}, "set method.share to overall"),
        ("pardon", {"epsilon": 8}, {}, "neither clipped nor noised"),
        ("pardon", {"epsilon": 8, "style_epsilon": 1, "open_styles": True}, {}, "exclude each"),
        ("pardon", {"style_epsilon": -1}, {}, "style_epsilon"),
    ]:
        with subtests.test(words=words), pytest.raises(ExperimentError, match=words):
            refused(method, privacy, **said)


@pytest.mark.parametrize("more", [{"open_styles": True}, {"style_epsilon": 1}])
def test_updates_can_be_protected_beside_styles(more):
    defences = refused("pardon", {"epsilon": 8, **more})
    assert any(defence.noised for defence in defences.defences)
    assert len(defences.diagnostics) == (1 if "open_styles" in more else 2)


def test_the_reference_is_no_image_of_anybody():
    codec = load_codec("colors")
    reference = public_reference(codec)
    assert numpy.isfinite(reference.radius)
    assert (reference.spread > 0).all()
