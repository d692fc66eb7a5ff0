"""Numbers for how unlike clients are, against slow calculations and known cases."""

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddg.data.skew import gini, in_words, skew_of, total_variation

tables = st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32)).map(
    lambda drawn: np.random.default_rng(drawn[2]).integers(0, 9, drawn[:2])
)


def slow_total_variation(rows: list[list[int]]) -> float:
    pooled = [sum(column) / max(1, sum(map(sum, rows))) for column in zip(*rows)]
    distances = [
        sum(abs(count / sum(row) - share) for count, share in zip(row, pooled)) / 2
        for row in rows
        if sum(row)
    ]
    return sum(distances) / len(distances) if distances else 0.0


def slow_gini(sizes: list[int]) -> float:
    pairs = itertools.product(sizes, sizes)
    total = sum(sizes)
    return sum(abs(a - b) for a, b in pairs) / (2 * len(sizes) * total) if total else 0.0


@given(tables)
def test_numbers_equal_the_slow_ones(counts):
    assert total_variation(counts) == pytest.approx(slow_total_variation(counts.tolist()))
    sizes = counts.sum(axis=1)
    assert gini(sizes) == pytest.approx(slow_gini(sizes.tolist()), abs=1e-12)


@pytest.mark.parametrize(
    "counts", [[[3, 1], [2, 5]], [[4, 0, 2], [1, 1, 1], [0, 0, 3]], [[7], [2]]]
)
def test_chance_is_the_mean_over_shuffles(counts):
    table, random = np.array(counts), np.random.default_rng(0)
    images = np.repeat(np.arange(table.shape[1]), table.sum(axis=0))
    ends = table.sum(axis=1).cumsum()[:-1]
    shuffled = [
        np.array([np.bincount(own, minlength=table.shape[1]) for own in np.split(order, ends)])
        for order in (random.permutation(images) for _ in range(4000))
    ]
    expected = np.mean([total_variation(dealt) for dealt in shuffled])
    assert skew_of(table, table).labels.by_chance == pytest.approx(expected, abs=0.01)


def test_no_memory_goes_by_how_many_images_clients_say_they_have():
    counts = np.array([[3 * 10**6, 0], [0, 3 * 10**6], [3, 4]])
    tracemalloc.start()
    found = skew_of(counts, counts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**6
    assert (found.smallest, found.largest) == (7, 3 * 10**6)
    assert 0 < found.labels.by_chance < 0.1


def test_equal_clients_have_no_skew():
    found = skew_of(np.full((4, 3), 20), np.full((4, 5), 12))
    assert (found.domains.mean, found.labels.mean, found.sizes) == (0, 0, 0)
    assert (found.smallest, found.largest) == (60, 60)


def test_clients_of_one_class_each_are_as_far_as_can_be():
    counts = np.eye(4, dtype=int) * 50
    found = skew_of(counts, counts)
    assert found.labels.mean == pytest.approx(3 / 4)
    assert found.labels.by_chance < 0.2
    assert gini(np.array([0, 0, 0, 7])) == pytest.approx(3 / 4)


def test_small_clients_seem_skewed_by_chance_alone_and_the_words_say_so():
    labels = np.random.default_rng(0).multinomial(3, [0.1] * 10, size=200)
    found = skew_of(labels.sum(axis=1, keepdims=True), labels)
    assert found.labels.mean > 0.6
    assert found.labels.by_chance == pytest.approx(found.labels.mean, abs=0.03)
    lines = list(in_words(found))
    assert [line.split(":")[0] for line in lines] == [
        "Feature skew",
        "Label skew",
        "Quantity skew",
    ]
    assert f"{found.labels.mean:.2f} (by chance alone" in lines[1]


def test_clients_without_images_are_no_fault():
    nobody = skew_of(np.zeros((2, 3), int), np.zeros((2, 2), int))
    assert (nobody.labels.mean, nobody.sizes, nobody.largest) == (0, 0, 0)
    some = skew_of(np.array([[5, 0], [0, 0]]), np.array([[2, 3], [0, 0]]))
    assert (some.domains.mean, some.labels.mean, some.smallest) == (0, 0, 0)
