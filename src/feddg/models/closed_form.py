"""A linear classifier in closed form, from sums over features: least squares with a penalty.

With z = [f, 1] for features f, and one-hot labels y, only the means of z z^T and z y^T are needed.
Those of several clients are averaged by numbers of images, and a client's own can be subtracted.
:mod:`feddg.methods.ridge` has the equations and their source.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax, normalize

from feddg.errors import ClientError
from feddg.messages import MOST_ROWS, EntrySchema, Message, SchemaContext, on_device, on_host

QUESTION = "left_out"
EXAMPLES, CORRECT, LOSSES, CONFIDENCES = "examples", "correct", "losses", "confidences"
"""The question to left-out clients, and the entries of their answers."""
PENALTIES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Lambdas to choose from."""
MANY = 10
"""The least number of clients for which the spread of their accuracies is informative."""
DEVIATION_OF_MEDIAN = 1.4826 * 1.2533
"""Standard error of a median, times the root of their number, over the median deviation."""
GROUPS = 25
"""Clients' answers are averaged in this many groups, of whose means the median counts."""
SCALES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Factors for logits before a softmax, because least-squares scores lie in [0, 1]."""
USUAL_SCALE = 16.0
"""The scale if no client can be left out to choose it."""

ROUNDING = 1e-8
"""Rounding errors allowed in honest means, as shares of the squared features."""
ROUNDING_OF_SEVERAL = 2.0**-25
"""The same in entries of a masked sum, of which small ones may round to 0."""
LARGEST_FEATURES = 10.0
"""A client's mean squared features may be this many times the median of all clients."""
LARGEST_LOSS = 100.0
"""A client's mean loss without it counts as this if it is larger."""


def extended(features: Tensor) -> Tensor:
    """Returns z = [f, 1] of features ``(B, d)``: ``(B, d + 1)`` float64."""
    features = features.double()
    return torch.cat([features, features.new_ones(len(features), 1)], dim=1)


def means(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Returns the means of z z^T, ``(d + 1, d + 1)``, and of z y^T, ``(d + 1, classes)``."""
    rows = extended(features)
    cross = rows.new_zeros(rows.shape[1], classes)
    cross.index_add_(1, labels, rows.T)
    return rows.T @ rows / len(rows), cross / len(rows)


def gram_of_means(sums: Sequence[Tensor], *, published: bool = False) -> Tensor:
    """Returns the sum of z z^T, ``(d + 1, d + 1)``, estimated from clients' sums of z y^T.

    A class's covariance is estimated from how its means differ between clients: FedCOF, see
    :mod:`feddg.methods.ridge`. A class that only one client has counts as its mean.

    Args:
        sums: each client's, ``(d + 1, classes)`` float64; the last row counts images.
        published: as FedCOF's code: every image counts as the mean of all, whatever its class, and
            1 is added to the variances of features inside classes.
    """
    total = sums[0].new_zeros(len(sums[0]), len(sums[0]))
    for of_class in range(sums[0].shape[1]):
        present = [each[:, of_class] for each in sums if each[-1, of_class] > 0]
        if not present:
            continue
        stacked = torch.stack(present)
        count, all = stacked[:, -1:].sqrt(), stacked.sum(0)
        if len(stacked) > 1:
            spread = stacked / count - count * all / all[-1]
            total += spread.T @ spread * ((all[-1] - 1).clamp(min=0) / (len(stacked) - 1))
        if published:
            total.diagonal()[:-1].add_((all[-1] - 1).clamp(min=0))
        else:
            total += torch.outer(all, all) / all[-1]
    if published:
        every = torch.stack(list(sums)).sum((0, 2))
        total += torch.outer(every, every) / every[-1]
    return total


def clipped(features: Tensor, most: float) -> Tensor:
    """Returns features ``(B, d)`` divided by ``most``, or by their length if it is larger."""
    lengths: Tensor = features.norm(dim=1, keepdim=True)
    return features / lengths.clamp(min=most)


def packed(matrix: Tensor) -> Tensor:
    """Returns the upper half of a symmetric matrix ``(r, r)`` as ``(r (r + 1) / 2,)``.

    Off-diagonal entries are multiplied by sqrt 2, so the length is the matrix's Frobenius norm.
    """
    upper, _, _, once = _triangle(len(matrix), matrix.device)
    return matrix.flatten()[upper] * math.sqrt(2) / once


def unpacked(half: Tensor) -> Tensor:
    """Undoes :func:`packed`, of one or several ``(..., r (r + 1) / 2)``."""
    rows = (math.isqrt(8 * half.shape[-1] + 1) - 1) // 2
    _, places, twice, _ = _triangle(rows, half.device)
    return (half / twice)[..., places]


@lru_cache(maxsize=2)
def _triangle(rows: int, device: torch.device) -> tuple[Tensor, ...]:
    """Returns how the upper half of a matrix ``(r, r)`` is packed.

    Where its entries lie in the matrix, and where the matrix's lie in it; and two vectors of
    factors: sqrt 2 for those off the diagonal, and for those on it, 1 for the others.
    """
    row, column = torch.triu_indices(rows, rows)
    places, diagonal = torch.empty(rows, rows, dtype=torch.int64), row == column
    places[row, column] = places[column, row] = torch.arange(len(row))
    ones = torch.ones(len(row), dtype=torch.float64)
    twice, once = (ones.where(mask, math.sqrt(2)) for mask in (diagonal, ~diagonal))
    parts = {"upper": row * rows + column, "places": places, "twice": twice, "once": once}
    return tuple(on_device(parts, device).values())


def solved(gram: Tensor, cross: Tensor, penalties: Sequence[float]) -> Iterator[tuple[Tensor, ...]]:
    """Yields the classifier for each penalty: weight ``(classes, d)`` and bias ``(classes,)``.

    Args:
        gram: ``(d + 1, d + 1)`` float64, the mean of z z^T.
        cross: ``(d + 1, classes)`` float64, the mean of z y^T.
        penalties: lambdas, at least 0; without one the shortest solution is taken.
    """
    total = gram[-1, -1].clamp(min=1e-3)  # 1, or a half where features are clipped; noised, maybe
    both = torch.cat([gram, cross], 1)
    middles = both[-1] / total
    mean, share = middles[: len(gram) - 1], middles[len(gram) :]
    both = both[:-1] - total * torch.outer(mean, middles)
    centred, target = both[:, : len(gram) - 1], both[:, len(gram) :]
    scale = centred.diagonal().mean().clamp(min=torch.finfo(centred.dtype).tiny)
    unit = torch.eye(len(centred), dtype=centred.dtype, device=centred.device)
    tried, root = (ROUNDING, *penalties), total.sqrt()
    fits: Iterator[tuple[Any, Any]]
    if centred.device.type == "cpu":
        fits = (torch.linalg.cholesky_ex(centred + each * scale * unit) for each in tried)
    else:  # all at once: few launches, and the host waits once
        shifts = _sent(tried, centred.device)[:, None, None]
        factors, faults = torch.linalg.cholesky_ex(centred + shifts * scale * unit)
        spoiled = on_host([*faults])
        if not any(spoiled) and min(penalties) > 0:
            every = torch.cholesky_solve(target.expand(len(penalties), -1, -1), factors[1:])
            yield from zip(every.mT * root, (share - mean @ every) * root)
            return
        fits = iter(zip(factors, spoiled))
    squares = not next(fits)[1]
    values: Tensor | None = None
    for penalty, (factor, fault) in zip(penalties, fits):
        if penalty > 0 and squares and not fault:
            weight = torch.cholesky_solve(target, factor)
        else:  # singular, or made no sum of squares by noise
            if values is None:
                values, vectors = torch.linalg.eigh(centred)
                least = len(values) * torch.finfo(values.dtype).eps * values.abs().max()
                values = values.clamp(min=0)
            shifted = values + penalty * values.mean()
            inverse = torch.where(shifted > least, 1 / shifted, 0.0)
            weight = vectors @ (inverse[:, None] * (vectors.T @ target))
        yield weight.T * root, (share - mean @ weight) * root


@lru_cache(maxsize=8)
def _sent(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Returns numbers ``(n,)`` in float64 on a device, where they stay; the host does not wait."""
    return on_device({"": torch.tensor(numbers, dtype=torch.float64)}, device)[""]


def solved_as_published(gram: Tensor, cross: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Returns Fed3R's and FedCOF's classifier: rows of length 1, and a bias of 0.

    Args:
        gram: ``(d + 1, d + 1)`` float64, the sum of z z^T.
        cross: ``(d + 1, classes)`` float64, the sum of z y^T.
        penalty: what is added to the sum's diagonal.
    """
    shifted = gram[:-1, :-1] + penalty * torch.eye(len(gram) - 1).to(gram)
    pair = shifted.cpu(), cross[:-1].cpu()  # CUDA has no solver for singular sums
    weight = torch.linalg.lstsq(*pair, driver="gelsd").solution.T.to(gram)
    return normalize(weight), weight.new_zeros(len(weight))


def sums_faults(
    grams: Tensor, crosses: Tensor, images: Sequence[int | None], *, several: bool = False
) -> list[str | None]:
    """Returns why clients' sums cannot come from images, or None, of each.

    For any features, the means of products of [z, y] are a matrix without negative eigenvalues,
    and the one-hot labels of an image add up to its 1.

    Args:
        grams: ``(K, d + 1, d + 1)`` float64.
        crosses: ``(K, d + 1, classes)`` float64.
        images: their numbers, of those in whose sums each image is once.
        several: whether they are means over clients, rounded under masks.
    """
    rounding = ROUNDING_OF_SEVERAL if several else 0.0
    shares, diagonals = crosses[:, -1], grams.diagonal(dim1=1, dim2=2)
    counts = shares * _sent(tuple(count or 0.0 for count in images), grams.device)[:, None]
    ones = torch.stack([diagonals[:, -1], shares.sum(1)])
    bounds = 1e-6 * diagonals.clamp(min=0).sqrt() + shares.shape[1] * rounding
    lower = torch.cat([crosses.mT, shares.diag_embed()], 2)
    matrix = torch.cat([torch.cat([grams, crosses], 2), lower], 1)
    smallest = torch.finfo(matrix.dtype).tiny
    raised = matrix.diagonal(dim1=1, dim2=2).mul_(1 + ROUNDING)
    raised.add_(matrix.shape[1] * rounding + smallest)
    figures = [
        (counts - counts.round()).abs().amax(1),
        (ones - 1).abs().amax(0),
        torch.cat([diagonals, shares], 1).amin(1),
        ((crosses.sum(2) - grams[:, :, -1]).abs() <= bounds).all(1).to(grams),
        torch.linalg.cholesky_ex(matrix)[1].to(grams),
    ]
    faults: list[str | None] = []
    for apart, off, least, labelled, fault in torch.stack(figures, 1).tolist():  # one wait
        if not (apart <= 1e-3 and off <= 1e-6 and least >= -rounding):
            faults.append("its sums are no means over images")
        else:
            faults.append(None if labelled and not fault else "its sums are those of no features")
    return faults


def outliers(squares: Mapping[int, Tensor]) -> dict[int, str]:
    """Returns the clients with outlying mean squared features, and why; of three or more."""
    if len(squares) < 3:
        return {}
    features = dict(zip(squares, on_host(list(squares.values()))))
    limit = LARGEST_FEATURES * statistics.median(features.values())
    return {
        id: f"its mean squared features are {mean:.3g}, more than {LARGEST_FEATURES:g} times "
        f"the median of all clients ({limit:.3g})"
        for id, mean in features.items()
        if mean > limit
    }


class Choice(NamedTuple):
    """The choice from the answers of left-out clients.

    Attributes:
        penalty: lambda, chosen by the mean accuracy over clients.
        scale: the logits' scale with the least mean cross-entropy.
        accuracies: at each client, in the order of the answers.
        confidences: the mean largest probability at each client, in the same order.
    """

    penalty: float
    scale: float
    accuracies: list[float]
    confidences: list[float]


def left_out_answer(
    question: Message,
    total: tuple[Tensor, ...],
    own: tuple[Tensor, ...],
    features: Tensor,
    labels: Tensor,
    penalties: Sequence[float],
) -> Message:
    """Returns how well classifiers solved without a client do at it.

    Args:
        question: the number of images in the total.
        total: packed mean of z z^T, and mean of z y^T, over all clients.
        own: the same means of the client.
        features: of its images, ``(n, d)`` float64.
        labels: ``(n,)``.
        penalties: lambdas.

    Raises:
        ClientError: the total contains only its own images.
    """
    examples = question.scalars.get(EXAMPLES, 0)
    if not isinstance(examples, int) or examples <= len(labels):
        raise ClientError("was told a total without any images but its own")
    share = len(labels) / examples
    rest = torch._foreach_sub(total, torch._foreach_mul(own, share))
    gram, cross = torch._foreach_div(rest, 1 - share)
    correct, losses, confidences = [], [], []
    classifiers = solved(unpacked(gram), cross, penalties)
    if features.device.type != "cpu":  # the same in few launches
        weights, biases = map(torch.stack, zip(*classifiers))
        all = features @ weights.mT + biases[:, None]
        likely = log_softmax(all[:, None] * _sent(SCALES, all.device)[:, None, None], 3)
        true = labels.expand(likely.shape[:3])[..., None]
        right = (all.argmax(2) == labels).sum(1)
        loss, confidence = -likely.gather(3, true).mean((2, 3)), likely.amax(3).exp().mean(2)
        return _answer(len(labels), right, loss, confidence)
    for weight, bias in classifiers:
        scores = features @ weight.T + bias
        correct.append((scores.argmax(1) == labels).sum())
        scaled = [scale * scores for scale in SCALES]
        losses.append(torch.stack([cross_entropy(logits, labels) for logits in scaled]))
        confidences.append(torch.stack([logits.softmax(1).amax(1).mean() for logits in scaled]))
    answers = (torch.stack(each) for each in (correct, losses, confidences))
    return _answer(len(labels), *answers)


def _answer(examples: int, correct: Tensor, losses: Tensor, confidences: Tensor) -> Message:
    # Of a few clients with a few images each, a classifier of the others may be far off.
    losses, confidences = losses.clamp(max=LARGEST_LOSS), confidences.clamp(max=1)
    entries = {CORRECT: correct, LOSSES: losses, CONFIDENCES: confidences}
    return Message(entries, {EXAMPLES: examples})


def chosen_by(answers: Sequence[Message], penalties: Sequence[float]) -> Choice:
    """Returns the choice that does best at left-out clients, all weighted equally.

    What a client says counts relative to its own mean, and by the median over up to :data:`GROUPS`
    groups of clients, so that one of a few clients cannot choose for all.

    With :data:`MANY` clients or more, takes the largest penalty that is at most one standard error
    of the difference worse than the best (the one-standard-error rule, Breiman et al. 1984). If
    many clients share few domains, a left-out client resembles the others, and its best penalty is
    too small for an unseen domain.
    """
    right, losses, confidences = (
        torch.stack([m.tensors[name] for m in answers]).cpu()
        for name in (CORRECT, LOSSES, CONFIDENCES)
    )
    counts = torch.tensor([int(m.scalars[EXAMPLES]) for m in answers])
    accuracies = right.double() / counts[:, None]
    means = _of_groups(accuracies)
    # Of equal medians, the best mean.
    best = max(range(len(penalties)), key=lambda p: (_median(means)[p], means[:, p].mean()))
    if len(answers) >= MANY:
        behind = means[:, best, None] - means
        spread = _median((behind - _median(behind)).abs())
        error = DEVIATION_OF_MEDIAN * spread / len(means) ** 0.5
        alike = (_median(behind) <= error).nonzero().flatten().tolist()
        best = max(alike, key=lambda place: penalties[place])
    scale = int(_median(_of_groups(losses[:, best])).argmin())
    chances = confidences[:, best, scale].tolist()
    return Choice(penalties[best], SCALES[scale], accuracies[:, best].tolist(), chances)


def _of_groups(said: Tensor) -> Tensor:
    """Returns what clients said ``(K, values)``, less their own means, as means of groups."""
    relative = said - said.mean(1, keepdim=True)
    return torch.stack([relative[first::GROUPS].mean(0) for first in range(min(GROUPS, len(said)))])


def _median(values: Tensor) -> Tensor:
    return values.quantile(0.5, dim=0)


def own_images(method: object, context: SchemaContext, name: str) -> tuple[float, float]:
    """Returns the range of a client's number of images: one number, if it has registered."""
    return (1, MOST_ROWS) if context.images is None else (context.images, context.images)


def left_out_schemas(
    penalties: Callable[[Any], int], when: Callable[[Any], bool] | None = None
) -> dict[str, EntrySchema]:
    """Returns the schemas of :func:`left_out_answer`'s entries, by ``purpose/name``.

    Args:
        penalties: returns the number of lambdas, given the method.
        when: whether a method, with its settings, asks at all; all do by default.
    """
    by_scale = partial(
        EntrySchema,
        shape=lambda method, context: (penalties(method), len(SCALES)),
        dtype=torch.float64,
        low=0,
        when=when,
    )
    entries = {
        CORRECT: EntrySchema(
            "how many of its own images the classifiers without it recognise",
            lambda method, context: (penalties(method),),
            dtype=torch.int64,
            within=lambda method, context, name: (0, own_images(method, context, name)[1]),
            when=when,
        ),
        LOSSES: by_scale("their mean losses on these, by scale of the logits", high=LARGEST_LOSS),
        CONFIDENCES: by_scale(
            "their mean largest probabilities on these, by scale of the logits", high=1
        ),
        EXAMPLES: EntrySchema("how many images it has", integer=True, within=own_images, when=when),
    }
    return {f"answer:{QUESTION}/{name}": schema for name, schema in entries.items()}
