"""Closed-form classifiers: packing, and both ways of solving. Ridge's tests have the oracle."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from feddg.messages import LARGEST, Message, SchemaContext, first_fault
from feddg.models.closed_form import (
    CONFIDENCES,
    CORRECT,
    EXAMPLES,
    LOSSES,
    QUESTION,
    SCALES,
    chosen_by,
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
    check = schema.tensor_check(None, context, LOSSES, answer.tensors[LOSSES], {})
    assert first_fault([check]) is None


def answers_of(correct):
    """Answers of clients with 100 images each, of which so many are right by penalty."""
    nothing = torch.zeros(len(correct[0]), len(SCALES), dtype=torch.float64)
    return [
        Message(
            {CORRECT: torch.tensor(own), LOSSES: nothing, CONFIDENCES: nothing}, {EXAMPLES: 100}
        )
        for own in correct
    ]


def test_of_many_clients_the_largest_penalty_that_is_not_told_from_the_best_is_taken():
    penalties = (0.1, 1.0, 10.0)
    # Behind by one on average, now more and now less; and by nine, always.
    correct = [[80, 79 + 4 * (-1) ** place, 71] for place in range(12)]
    assert chosen_by(answers_of(correct), penalties).penalty == 1.0
    assert chosen_by(answers_of(correct[:4]), penalties).penalty == 0.1  # too few to say
    behind = [(before - after) / 100 for before, after, _ in correct]
    error = (sum((b - 0.01) ** 2 for b in behind) / 11 / 12) ** 0.5
    assert error >= 0.01
    steady = [[80, 79, 71] for _ in range(12)]
    assert chosen_by(answers_of(steady), penalties).penalty == 0.1
