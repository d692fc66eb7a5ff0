"""Closed-form classifiers: packing, and both ways of solving. Ridge's tests have the oracle."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from feddg.messages import LARGEST, Message, SchemaContext
from feddg.models.closed_form import (
    EXAMPLES,
    LOSSES,
    QUESTION,
    extended,
    left_out_answer,
    left_out_schemas,
    packed,
    solved,
    unpacked,
)


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


def test_a_classifier_that_is_far_off_has_a_loss_that_may_be_sent():
    rows = torch.eye(3).double()
    labels = torch.tensor([0, 1, 0])
    own = extended(1e5 * rows)
    other = extended(rows + 1e-3)
    targets = torch.eye(2).double()
    part = packed(own.T @ own / 3), own.T @ targets[labels] / 3
    rest = packed(other.T @ other / 3), other.T @ targets[1 - labels] / 3
    total = tuple((a + b) / 2 for a, b in zip(part, rest))
    answer = left_out_answer(Message({}, {EXAMPLES: 6}), total, part, 1e5 * rows, labels, [1e-9])
    assert float(answer.tensors[LOSSES].max()) == LARGEST
    schema = left_out_schemas(lambda method: 1)[f"answer:{QUESTION}/{LOSSES}"]
    context = SchemaContext(2, 2, 3)
    assert schema.tensor_fault(None, context, LOSSES, answer.tensors[LOSSES], {}) is None
