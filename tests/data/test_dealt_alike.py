"""Further images dealt out as the first ones were; clients of one domain each with label skew."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddg.data.partition import dealt_alike, partition


@given(
    st.lists(st.integers(3, 40), min_size=1, max_size=4),
    st.integers(1, 8),
    st.floats(0, 1),
    st.lists(st.integers(0, 3), max_size=60),
    st.integers(0, 5),
)
def test_every_image_of_a_known_domain_goes_to_one_client_in_its_share(sizes, n, lam, more, seed):
    first = np.repeat(np.arange(len(sizes)), sizes)
    found = partition(first, first * 0, min(n, len(first)), heterogeneity=lam, seed=seed)
    domains = np.array(more, dtype=np.int64)
    dealt = dealt_alike(found, domains, seed)
    assert len(dealt) == found.clients
    known = np.flatnonzero(domains < len(sizes))
    assert sorted(np.concatenate(dealt).tolist()) == known.tolist()
    for client, rows in enumerate(dealt):
        assert (np.diff(rows) > 0).all()
        for column, domain in enumerate(found.domain_ids):
            held, total = found.counts[client, column], sizes[domain]
            share = held / total * (domains == domain).sum()
            assert abs((domains[rows] == domain).sum() - share) <= 1


def test_a_client_gets_validation_images_of_its_own_domain_alone():
    first = np.repeat([0, 1, 2], 30)
    found = partition(first, first * 0, 3, scheme="domain", seed=0)
    domains = np.array([2, 0, 1, 1, 0, 5])
    assert [rows.tolist() for rows in dealt_alike(found, domains, 0)] == [[1, 4], [2, 3], [0]]


@pytest.mark.parametrize(("alpha", "skew"), [(None, 0.1), (0.5, 0.2), (0.1, 0.4)])
def test_ten_clients_per_domain_with_fewer_classes_each_for_a_smaller_alpha(alpha, skew):
    """FedIG's cross-silo setting (its A.6): 30 clients, 10 of each of three domains."""
    domains = np.repeat([0, 1, 2], 700)
    labels = np.tile(np.arange(7), 300)
    found = partition(domains, labels, 30, scheme="domain", alpha=alpha, seed=0)
    assert (found.counts > 0).sum(1).tolist() == [1] * 30
    assert (found.counts > 0).sum(0).tolist() == [10] * 3
    assert set(found.sizes.tolist()) == {70}
    counts = [np.bincount(labels[rows], minlength=7) / 70 for rows in found.rows]
    distance = np.mean([np.abs(share - 1 / 7).sum() / 2 for share in counts])
    assert distance > skew / 2 if alpha is None else distance > skew
    assert distance < 0.25 if alpha is None else distance < 1
