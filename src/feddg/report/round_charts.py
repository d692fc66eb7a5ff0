"""Charts over the rounds: accuracy by domain, loss terms."""

from collections.abc import Sequence
from itertools import cycle

import plotly.graph_objects as go

from feddg.records import ID_TEST, ID_VAL, SPLITS, TEST, VAL, RoundRow
from feddg.report.blocks import Chart
from feddg.report.charts import (
    HELD_OUT_COLOURS,
    TRAINING_COLOURS,
    curves_of,
    label_of,
    line_of,
)
from feddg.report.wording import readable
from feddg.runs.reading import Evaluations, RunRecord

SPLIT_TITLES = {
    TEST: "held-out test",
    VAL: "held-out validation",
    ID_VAL: "in-domain validation",
    ID_TEST: "in-domain test",
}
MANY_DOMAINS = 8


def accuracy_curves(run: RunRecord) -> Chart:
    """Accuracy after every evaluated round: one line per domain and split."""
    evaluations = run.evaluations
    colours = _domain_colours(evaluations)
    lines: list[go.Scatter] = []
    for split in SPLITS:
        domains = evaluations.domains(split)
        if len(domains) > MANY_DOMAINS:
            lines.append(_mean_line(evaluations, split))
        else:
            lines += [_domain_line(evaluations, split, name, colours[name]) for name in domains]
    caption = (
        "Share of images classified correctly after each round; round 0 is before training. "
        "Held-out domains (thick) are seen by no client. Touch a name to hide or show its line."
    )
    return curves_of(lines, "accuracy (%)", caption)


def _domain_colours(evaluations: Evaluations) -> dict[str, str]:
    held_out = evaluations.domains(TEST) + evaluations.domains(VAL)
    training = [
        name
        for name in dict.fromkeys(evaluations.domains(ID_VAL) + evaluations.domains(ID_TEST))
        if name not in held_out
    ]
    return dict(zip(held_out, cycle(HELD_OUT_COLOURS))) | dict(
        zip(training, cycle(TRAINING_COLOURS))
    )


def _domain_line(evaluations: Evaluations, split: str, domain: str, colour: str) -> go.Scatter:
    points = [
        (round_, row.accuracy)
        for round_ in evaluations.rounds
        if (row := evaluations.get(round_, split, domain)) is not None
    ]
    return _split_line(points, split, f"{label_of(domain)} · {SPLIT_TITLES[split]}", colour)


def _mean_line(evaluations: Evaluations, split: str) -> go.Scatter:
    colours = HELD_OUT_COLOURS if split in (TEST, VAL) else TRAINING_COLOURS
    name = f"{SPLIT_TITLES[split]}, mean of {len(evaluations.domains(split))} domains"
    return _split_line(
        _mean_points(evaluations, split), split, name, colours[1 if split == VAL else 0]
    )


def _mean_points(evaluations: Evaluations, split: str) -> list[tuple[int, float]]:
    means = ((round_, evaluations.accuracy(round_, split)) for round_ in evaluations.rounds)
    return [(round_, mean) for round_, mean in means if mean is not None]


def _split_line(
    points: Sequence[tuple[int, float]], split: str, name: str, colour: str
) -> go.Scatter:
    held_out = split in (TEST, VAL)
    line = line_of(points, name, colour, width=3 if held_out else 1.6, scale=100)
    if split == ID_TEST:
        line.update(visible="legendonly", line_dash="dot")
    return line


def loss_curves(rounds: Sequence[RoundRow]) -> Chart | None:
    """The mean of each loss term over rounds, or None before the first round."""
    terms = list(dict.fromkeys(name for row in rounds for name in row.terms))
    colours = cycle(TRAINING_COLOURS[:2] + HELD_OUT_COLOURS + TRAINING_COLOURS[2:])
    lines = [
        line_of(
            [(row.round, row.terms[name]) for row in rounds if name in row.terms],
            label_of(readable(name)),
            colour,
        )
        for name, colour in zip(terms, colours)
    ]
    if not lines:
        return None
    caption = (
        "Each term of the training loss, averaged over the examples of the clients of a round."
    )
    values = [value for row in rounds for value in row.terms.values() if value == value]
    return curves_of(lines, "loss term", caption, logarithmic=_spans_magnitudes(values))


def _spans_magnitudes(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) > 100 * min(values)
