"""FINCH against a slow version written from the paper, cases by hand, and its promises."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import AgglomerativeClustering

from feddg.styles import finch as finch_module
from feddg.styles.finch import finch


def slow_finch(points: list[list[float]]) -> list[list[int]]:
    """Every level of FINCH in plain Python, with the stopping rules of the authors' release."""
    partitions: list[list[int]] = []
    clusters = [[i] for i in range(len(points))]
    while True:
        means = [
            [sum(points[i][k] for i in members) / len(members) for k in range(len(points[0]))]
            for members in clusters
        ]
        merged = join(clusters, [nearest(i, means) for i in range(len(means))])
        first = not partitions
        if not first and (len(merged) <= 1 or len(merged) == len(clusters)):
            return partitions
        partitions.append([next(c for c, m in enumerate(merged) if i in m) for i in flat(clusters)])
        if len(merged) <= 1 or (not first and len(clusters) - len(merged) == 1):
            return partitions
        clusters = merged


def flat(clusters: list[list[int]]) -> list[int]:
    return sorted(i for members in clusters for i in members)


def nearest(i: int, points: list[list[float]]) -> int:
    def cosine(j: int) -> float:
        dot = math.fsum(a * b for a, b in zip(points[i], points[j]))
        return dot / (math.hypot(*points[i]) * math.hypot(*points[j]))

    return max((j for j in range(len(points)) if j != i), key=cosine, default=i)


def join(clusters: list[list[int]], neighbor: list[int]) -> list[list[int]]:
    """Union-find over the links, merged clusters ordered by their first member."""
    parent = list(range(len(clusters)))

    def root(i: int) -> int:
        return i if parent[i] == i else root(parent[i])

    for i, j in enumerate(neighbor):
        parent[root(i)] = root(j)
    merged: dict[int, list[int]] = {}
    for i, members in enumerate(clusters):
        merged.setdefault(root(i), []).extend(members)
    return sorted(merged.values(), key=min)


def on_circle(*degrees: float) -> np.ndarray:
    angles = np.radians(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def together(labels: np.ndarray) -> np.ndarray:
    return labels[:, None] == labels[None, :]


@given(st.integers(1, 60), st.integers(3, 8), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_equals_the_slow_version(count: int, width: int, seed: int) -> None:
    points = np.random.default_rng(seed).normal(size=(count, width))
    found = [labels.tolist() for labels in finch(points).partitions]
    assert found == slow_finch(points.tolist())


def test_blocks_of_the_neighbor_search_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    points = np.random.default_rng(0).normal(size=(50, 4))
    whole = finch(points)
    monkeypatch.setattr(finch_module, "_SIMILARITIES_AT_ONCE", 7 * 50)
    for expected, found in zip(whole.partitions, finch(points).partitions, strict=True):
        assert (expected == found).all()


def test_two_levels_by_hand() -> None:
    result = finch(on_circle(0, 1, 90, 91, 5, 6, 95, 96))
    assert [p.tolist() for p in result.partitions] == [
        [0, 0, 1, 1, 2, 2, 3, 3],
        [0, 0, 1, 1, 0, 0, 1, 1],
    ]
    assert result.finest is result.partitions[0]
    assert result.coarsest is result.partitions[1]


def test_a_level_with_a_single_cluster_is_kept_only_as_the_first() -> None:
    assert [p.tolist() for p in finch(on_circle(0, 1, 30, 31, 90, 91)).partitions] == [
        [0, 0, 1, 1, 2, 2]
    ]
    assert [p.tolist() for p in finch(on_circle(0, 2, 3, 7)).partitions] == [[0, 0, 0, 0]]


def test_means_are_of_the_original_points() -> None:
    # The long vector pulls the first pair's mean from 5 to 9.9 degrees, nearer to the third pair
    # (30) than to the second (-12), and so keeps the second level from joining everything.
    points = on_circle(0, 10, -12, -12.5, 30, 30.5, -20, -20.5)
    assert len(finch(points).partitions) == 1
    points[1] *= 50
    assert [p.tolist() for p in finch(points).partitions] == [
        [0, 0, 1, 1, 2, 2, 3, 3],
        [0, 0, 1, 1, 0, 0, 1, 1],
    ]


def test_separated_pairs_are_the_clusters_of_single_linkage() -> None:
    random = np.random.default_rng(3)
    centers = random.normal(size=(9, 16))
    points = np.repeat(centers, 2, axis=0) + 1e-3 * random.normal(size=(18, 16))
    other = AgglomerativeClustering(n_clusters=9, metric="cosine", linkage="single")
    assert (together(finch(points).finest) == together(other.fit_predict(points))).all()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_up_to_three_different_points_are_one_cluster(count: int) -> None:
    points = np.random.default_rng(count).normal(size=(count, 5))
    assert [p.tolist() for p in finch(points).partitions] == [[0] * count]


def test_a_point_with_a_copy_needs_no_other_neighbor() -> None:
    assert finch(on_circle(0, 0, 90, 90)).finest.tolist() == [0, 0, 1, 1]
    assert finch(on_circle(0, 0, 90)).finest.tolist() == [0, 0, 0]
    assert finch(np.ones((7, 3))).finest.tolist() == [0] * 7


def test_zero_vectors_are_clustered() -> None:
    assert finch(np.zeros((4, 3))).finest.tolist() == [0] * 4
    labels = finch(np.concatenate([np.zeros((2, 2)), on_circle(0, 1)])).finest
    assert labels.tolist() == [0, 0, 1, 1]
    assert finch(np.array([[0.0, 0.0], [-0.0, 0.0], [1.0, 0.0], [1.0, 0.1]])).finest.tolist() == [
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
    partitions = finch(rows).partitions
    order = np.array(random.sample(range(len(rows)), len(rows)))
    for labels, reordered in zip(partitions, finch(rows[order]).partitions, strict=True):
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
