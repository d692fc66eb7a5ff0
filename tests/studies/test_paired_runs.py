"""McNemar and the paired bootstrap: by hand, against SciPy, and refusals."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from feddg.errors import RunError
from feddg.studies.image_results import ImageResults
from feddg.studies.paired_runs import compare_images, mcnemar


def test_mcnemar_by_hand():
    """Ten images only the first gets right, two only the second, and thirty both."""
    first = np.array([True] * 10 + [False] * 2 + [True] * 30)
    second = np.array([False] * 10 + [True] * 2 + [True] * 30)
    found = mcnemar(first, second)
    assert (found.only_first, found.only_second) == (10, 2)
    # 2 (C(12,0) + C(12,1) + C(12,2)) / 2^12 = 158 / 4096; and (8 - 1)^2 / 12 = 4.0833.
    assert found.exact == pytest.approx(158 / 4096)
    assert found.asymptotic == pytest.approx(0.0433, abs=1e-4)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_mcnemar_equals_the_sum_of_binomials_and_does_not_care_who_is_first(pairs):
    first, second = np.array(pairs).T
    found, turned = mcnemar(first, second), mcnemar(second, first)
    b, c = found.only_first, found.only_second
    assert b == sum(one and not other for one, other in pairs)
    tail = sum(stats.binom.pmf(k, b + c, 0.5) for k in range(min(b, c) + 1))
    assert found.exact == pytest.approx(min(1, 2 * tail))
    assert (found.exact, found.asymptotic) == (turned.exact, turned.asymptotic)
    assert 0 <= found.asymptotic <= 1


def results(
    labels, predicted, domains=None, name="run", content=None, files=None, rendered=""
) -> ImageResults:
    count = len(labels)
    columns = {
        "file": files or [f"{i:04}.jpg" for i in range(count)],
        "content": content or ["c"] * count,
        "split": ["test"] * count,
        "domain": domains or ["photo"] * count,
        "label": labels,
        "predicted": predicted,
    }
    texts = {key: np.array(value, dtype=str) for key, value in columns.items()}
    return ImageResults(Path(name), "final", 3, rendered, texts)


def test_differences_by_hand_pooled_and_by_domain():
    labels = list("aabb") + list("ab")
    domains = ["ink"] * 4 + ["photo"] * 2
    one = results(labels, list("aabb") + list("bb"), domains)
    other = results(labels, list("aaaa") + list("ab"), domains)
    found = compare_images(one, other, draws=200)
    assert (found.images, found.domains) == (6, ("ink", "photo"))
    by = {(d.metric, d.aggregate): d for d in found.differences}
    accuracy = by["accuracy", "pooled"]
    assert (accuracy.first, accuracy.second) == (pytest.approx(5 / 6), pytest.approx(4 / 6))
    mean = by["accuracy", "domain_mean"]
    assert (mean.first, mean.second) == (0.75, 0.75)
    assert by["balanced_accuracy", "pooled"].first == pytest.approx((2 / 3 + 1) / 2)
    assert (found.mcnemar.only_first, found.mcnemar.only_second) == (2, 1)


def test_the_interval_is_that_of_the_paired_normal_approximation():
    """With many images the bootstrap's interval is mean +- 1.96 standard errors."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 3000)
    first = np.where(random.random(3000) < 0.8, labels, 1 - labels)
    second = np.where(random.random(3000) < 0.7, labels, 1 - labels)
    found = compare_images(
        results(labels.astype(str), first.astype(str)),
        results(labels.astype(str), second.astype(str)),
    )
    (accuracy,) = (
        d for d in found.differences if (d.metric, d.aggregate) == ("accuracy", "pooled")
    )
    gaps = (first == labels).astype(float) - (second == labels)
    error = gaps.std() / 3000**0.5
    assert accuracy.difference == pytest.approx(gaps.mean())
    assert accuracy.low == pytest.approx(gaps.mean() - 1.96 * error, abs=0.25 * error)
    assert accuracy.high == pytest.approx(gaps.mean() + 1.96 * error, abs=0.25 * error)


def test_the_order_of_rows_does_not_matter_and_a_run_equals_itself():
    labels, predicted = list("abcabc"), list("abbacc")
    one = results(labels, predicted)
    files = one.columns["file"][::-1].tolist()
    turned = results(labels[::-1], predicted[::-1], files=files)
    found = compare_images(one, turned, draws=50)
    assert found.mcnemar.exact == 1
    assert all((d.difference, d.low, d.high) == (0, 0, 0) for d in found.differences)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"labels": list("ab"), "predicted": list("ab")}, "different images: 3 and 2"),
        ({"files": ["0000.jpg", "0001.jpg", "x.jpg"]}, r"0002.jpg in one of them only"),
        ({"content": ["c", "other", "c"]}, "0001.jpg has another content"),
        ({"labels": list("abb")}, "0002.jpg has another content, class or domain"),
        ({"domains": ["photo", "photo", "ink"]}, "0002.jpg has another content, class or domain"),
        ({"rendered": "else"}, "drawn differently"),
    ],
)
def test_runs_on_different_images_are_refused(other, message):
    fields = {"labels": list("aba"), "predicted": list("aba")}
    with pytest.raises(RunError, match=message):
        compare_images(results(**fields), results(**fields | other))


def test_a_split_without_images_is_refused():
    one = results(list("ab"), list("ab"))
    with pytest.raises(RunError, match="no results on images of the split 'val'"):
        compare_images(one, one, "val")
