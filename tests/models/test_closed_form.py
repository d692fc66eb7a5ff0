"""Closed-form classifiers: packing, and both ways of solving. Ridge's tests have the oracle."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from feddg.messages import Message, SchemaContext, first_fault
from feddg.models.closed_form import (
    CONFIDENCES,
    CORRECT,
    EXAMPLES,
    LARGEST_LOSS,
    LOSSES,
    PENALTIES,
    QUESTION,
    SCALES,
    chosen_by,
    extended,
    left_out_answer,
    left_out_schemas,
    means,
    packed,
    solved,
    sums_faults,
    unpacked,
)
from feddg.testing.device import second_device, traffic


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
    assert float(answer.tensors[LOSSES].max()) == LARGEST_LOSS
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


def test_one_client_of_a_few_does_not_choose_for_all():
    penalties = (0.1, 1.0, 10.0)
    honest = [[80, 83, 60], [50, 55, 30], [70, 72, 55], [61, 66, 40]]
    answers = answers_of([*honest, [0, 0, 100]])
    for lie, answer in enumerate(answers):
        answer.tensors[LOSSES] = torch.full((3, len(SCALES)), 2.0).double()
        answer.tensors[LOSSES][:, 3] = 1.0
        if lie == 4:
            answer.tensors[LOSSES].fill_(100.0)[:, 0] = 0.0
    choice = chosen_by(answers, penalties)
    assert (choice.penalty, choice.scale) == (1.0, SCALES[3])


def test_more_right_answers_than_images_are_no_answer():
    answer = left_out_schemas(lambda method: 1)[f"answer:{QUESTION}/{CORRECT}"]
    context = SchemaContext(2, 2, 3, images=20)
    for count, fault in ((20, False), (21, True), (10**6, True), (-1, True)):
        check = answer.tensor_check(None, context, CORRECT, torch.tensor([count]), {})
        assert (first_fault([check]) is not None) is fault


# Sums that no images can give.


def some_sums(images=60, features=8, classes=3, seed=0):
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randn(images, features, generator=rng) + 3 * torch.randn(images, 1, generator=rng)
    return means(rows, torch.arange(images) % classes, classes)


def covariance(change):
    """Changes what is left of z z^T and z y^T without the means."""

    def changed(gram, cross):
        mean, share = gram[:-1, -1].clone(), cross[-1].clone()
        squares = gram[:-1, :-1] - torch.outer(mean, mean)
        with_labels = cross[:-1] - torch.outer(mean, share)
        squares, with_labels = change(squares, with_labels)
        gram[:-1, :-1] = squares + torch.outer(mean, mean)
        cross[:-1] = with_labels + torch.outer(mean, share)

    return changed


def turned_least(squares, with_labels):
    values, vectors = torch.linalg.eigh(squares)
    values[0] = -3.5e-3 * values[-1]
    return vectors @ values.diag() @ vectors.T, with_labels


def signs(squares, with_labels):
    turn = torch.ones_like(squares).triu(1) * torch.tensor([1.0, -1.0]).double().repeat(4)
    turn = turn + turn.T + torch.eye(len(squares))
    return squares * turn, with_labels


def doubtful_shares(gram, cross):
    cross[-1] += torch.tensor([0.5, -0.5, 0.0]).double() / 60


IMPOSSIBLE = {
    "labels that do not add up": lambda gram, cross: cross[:-1].mul_(-1),
    "class means a little too far": covariance(lambda s, c: (s, 3 * c)),
    "class means turned, far": covariance(lambda s, c: (s, -5 * c)),
    "class means of other classes": lambda gram, cross: cross[:-1].copy_(cross[:-1].roll(1, 1) * 2),
    "another share": lambda gram, cross: cross[-1].copy_(torch.tensor([1.0, 0.0, 0.0])),
    "half an image": doubtful_shares,
    "a share below 0": lambda gram, cross: cross[-1].add_(torch.tensor([-1.0, 1.0, 0.0])),
    "too small squares": covariance(lambda s, c: (0.1 * s, c)),
    "squares turned": covariance(lambda s, c: (-0.5 * s, c)),
    "the smallest eigenvalue turned": covariance(turned_least),
    "products with turned signs": covariance(signs),
    "no mean": lambda gram, cross: (gram[:-1, -1].zero_(), gram[-1, :-1].zero_()),
    "all times 2": lambda gram, cross: (gram.mul_(2), cross.mul_(2)),
    "nothing": lambda gram, cross: (gram.zero_(), cross.zero_()),
    "no number": lambda gram, cross: gram[2, 2].fill_(math.nan),
    "infinity": lambda gram, cross: cross[2, 2].fill_(math.inf),
}


def test_sums_that_no_images_can_give(subtests):
    for change in IMPOSSIBLE.values():
        with subtests.test(change=change):
            gram, cross = some_sums()
            assert sums_faults(gram[None], cross[None], [60])[0] is None
            change(gram, cross)
            assert sums_faults(gram[None], cross[None], [60])[0] is not None


def test_sums_of_images_are_never_refused(subtests):
    for kind, images in itertools.product(
        ["float32", "one class", "duplicates", "huge", "tiny", "zeros"], [1, 2, 7, 500]
    ):
        with subtests.test(images=images, kind=kind):
            rng = torch.Generator().manual_seed(images)
            rows, labels = torch.randn(images, 96, generator=rng).relu(), torch.arange(images) % 5
            match kind:
                case "one class":
                    labels = torch.zeros_like(labels) + 3
                case "duplicates":
                    rows, labels = rows[:1].expand(images, -1), labels * 0
                case "huge":
                    rows[:, ::2] *= 1e6
                case "tiny":
                    rows[:, ::2] *= 1e-18
                case "zeros":
                    rows[:, ::2] = 0
            gram, cross = means(rows, labels, 5)
            assert sums_faults(gram[None], cross[None], [images])[0] is None
            step = 2.0**-26  # of a masked sum
            rounded = [(each / step).round() * step for each in (gram, cross)]
            faults = sums_faults(*(each[None] for each in rounded), [None], several=True)
            assert faults == [None]


def test_noised_sums_have_no_negative_eigenvalues_left():
    """Of an eigenvalue just above -lambda the inverse is huge: it counts as 0."""
    values = torch.tensor([4.0, 2.0, 1.0, -0.5]).double()
    scale = values.clamp(min=0).mean()
    penalty = float(0.5 / values.mean()) + 1e-6
    gram = torch.eye(5).double()
    gram[:-1, :-1] = values.diag()
    cross = torch.zeros(5, 2).double()
    cross[:-1] = torch.tensor([[1.0, -1.0]] * 4)
    cross[-1] = 0.5
    weight, _ = next(solved(gram, cross, [penalty]))
    expected = 1 / (values.clamp(min=0) + penalty * scale)
    torch.testing.assert_close(weight, torch.stack([expected, -expected]))


def test_a_device_solves_for_all_penalties_at_once():
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(40, 6, generator=generator), torch.arange(40) % 3
    features[:, 5] = features[:, 4]  # penalty 0 has many solutions
    gram, cross = means(features, labels, 3)
    part, its_cross = means(features[:9], labels[:9], 3)
    total, own = (packed(gram), cross), (packed(part), its_cross)
    penalties = (0.0, *PENALTIES)
    asked = Message({}, {EXAMPLES: 40})
    answers, waits = [], 0
    with second_device() as device:
        for place in ("cpu", device):
            there = [t.to(place) for t in (*total, *own, features[:9].double(), labels[:9])]
            with traffic() as seen:
                answer = left_out_answer(asked, there[:2], there[2:4], *there[4:], penalties)
            answers.append({name: tensor.cpu() for name, tensor in answer.tensors.items()})
            waits = seen.waits.total()
    assert waits == 2  # for the solver's check, and for the answer
    assert torch.equal(*(answer[CORRECT] for answer in answers))
    for name in (LOSSES, CONFIDENCES):
        torch.testing.assert_close(*(one[name] for one in answers), rtol=1e-9, atol=1e-9)
