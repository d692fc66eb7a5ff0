"""Closed-form classifiers: packing, and both ways of solving. Ridge's tests have the oracle."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from feddg.models.closed_form import packed, solved, unpacked


@given(st.integers(1, 9), st.integers(0, 2**31))
def test_packing_keeps_a_matrix_and_its_length(rows, seed):
    half = torch.randn(rows, rows, generator=torch.Generator().manual_seed(seed)).double()
    matrix = half + half.T
    torch.testing.assert_close(unpacked(packed(matrix)), matrix)
    torch.testing.assert_close(packed(matrix).norm(), matrix.norm())


def test_penalties_are_solved_alike_by_both_ways():
    rng = torch.Generator().manual_seed(1)
    rows = torch.cat([torch.randn(50, 6, generator=rng), torch.ones(50, 1)], 1).double()
    gram, targets = rows.T @ rows / 50, torch.eye(3).double()[torch.arange(50) % 3]
    (small, one), (none, two) = solved(gram, rows.T @ targets / 50, [1e-12, 0.0])
    torch.testing.assert_close(small, none)
    torch.testing.assert_close(one, two)
