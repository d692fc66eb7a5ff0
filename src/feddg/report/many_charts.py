"""Charts of a comparison: methods over rounds, bytes, seconds, an axis; and their ranks."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from feddg.comparison.results import HELD_OUT, Results
from feddg.comparison.statistics import Accuracies, paired_margin, ranks, spread
from feddg.records import TEST
from feddg.report.blocks import Chart
from feddg.report.charts import (
    LOG_AXIS,
    chart_of,
    curves_of,
    label_of,
    line_of,
    names_axis,
)
from feddg.report.looks import looks_of
from feddg.report.wording import spelled
from feddg.runs.reading import RunRecord

WIDE_RANGE = 20
Cumulative = Callable[[RunRecord], dict[int, float]]


def learning_curves(results: Results) -> Chart | None:
    """Held-out test accuracy after each round, one line per method."""
    lines = [
        _line(method, points, results)
        for method in results.methods
        if (points := _mean_curve(results, method, None))
    ]
    caption = (
        "Accuracy on the held-out test domains after each round, one line per method: the mean "
        "over all its runs."
    )
    return curves_of(lines, "held-out test accuracy (%)", caption) if lines else None


def accuracy_against(results: Results, what: str) -> Chart | None:
    """Accuracy over what it took so far, one line per method.

    Args:
        results: the comparison.
        what: ``bytes`` sent in all directions, or ``seconds`` of training and fusing.
    """
    cumulative = _bytes_so_far if what == "bytes" else _seconds_so_far
    scale, title = (1e6, "MB sent, all clients and both ways") if what == "bytes" else (60, "min")
    lines = [
        _line(method, [(x / scale, y) for x, y in points], results)
        for method in results.methods
        if (points := _mean_curve(results, method, cumulative))
    ]
    if not lines:
        return None
    caption = {
        "bytes": "Accuracy against everything sent since the start, setup included: mean over a "
        "method's runs, round by round.",
        "seconds": "Accuracy against the time of training and fusing: mean over a method's runs, "
        "round by round. Times compare only between runs on the same, equally busy machine.",
    }[what]
    spread_out = [x for line in lines for x in line.x or () if x > 0]
    wide = bool(spread_out) and max(spread_out) > WIDE_RANGE * min(
        max(line.x) for line in lines if line.x
    )
    layout = {
        "showlegend": True,
        "hovermode": "closest",
        "xaxis": {"title": {"text": title}, **(LOG_AXIS if wide else {"rangemode": "tozero"})},
        "yaxis": {"title": {"text": "held-out test accuracy (%)"}},
    }
    return chart_of(lines, layout, 330 + 12 * len(lines), caption)


def axis_curves(results: Results, axis: str) -> Chart | None:
    """Average test accuracy over the values of an axis, or None where they are no numbers."""
    values = results.axes[axis]
    places = [_number(value) for value in values]
    if axis == HELD_OUT or any(place is None for place in places) or len(values) < 2:
        return None
    lines = []
    for method in results.methods:
        spreads = [spread(_at(results, method, axis, value)) for value in values]
        known = [(x, s) for x, s in zip(places, spreads) if s is not None and x is not None]
        if not known:
            continue
        known.sort(key=lambda point: point[0])
        line = _line(method, [(x, s.mean) for x, s in known], results)
        deviations = [100 * (s.deviation or 0.0) for _, s in known]
        line.update(error_y={"type": "data", "array": deviations, "thickness": 1})
        lines.append(line)
    caption = (
        f"Average held-out test accuracy after the final round by {axis}; bars are the standard "
        "deviation over runs."
    )
    known_places = [place for place in places if place is not None]
    log = min(known_places) > 0 and max(known_places) > WIDE_RANGE * min(known_places)
    layout = {
        "showlegend": True,
        "xaxis": {"title": {"text": label_of(axis)}, **(LOG_AXIS if log else {})},
        "yaxis": {"title": {"text": "held-out test accuracy (%)"}},
    }
    return chart_of(lines, layout, 330 + 12 * len(lines), caption) if lines else None


def _number(text: str) -> float | None:
    """The number in an axis value; of ``20 of 100`` clients, the 100."""
    try:
        return float(text.rpartition(" of ")[2])
    except ValueError:
        return None


def _at(results: Results, method: str, axis: str, value: str) -> list[float]:
    rule = results.served
    return [
        accuracy
        for result in results.of(method)
        if result.place.values.get(axis) == value
        and (accuracy := result.accuracy(rule)) is not None
    ]


def rank_plot(accuracies: Mapping[str, Accuracies]) -> Chart | None:
    """Every method's rank in each column and seed, and the mean; None for a single method."""
    ranked = ranks(accuracies)
    if len(ranked) < 2 or not next(iter(ranked.values())):
        return None
    means = {name: float(np.mean(list(places.values()))) for name, places in ranked.items()}
    order = sorted(means, key=lambda name: means[name])
    xs, ys, sizes, texts = [], [], [], []
    pairs = len(next(iter(ranked.values())))
    for row, name in enumerate(order):
        places, counts = np.unique(list(ranked[name].values()), return_counts=True)
        xs += places.tolist()
        ys += [row] * len(places)
        sizes += (6 + 22 * np.sqrt(counts / pairs)).tolist()
        texts += [
            f"{label_of(spelled(name))}: rank {p:g} in {c} of {pairs}"
            for p, c in zip(places, counts)
        ]
    dots = go.Scatter(
        x=xs,
        y=ys,
        mode="markers",
        marker={"size": sizes, "color": "#9fc9cd", "line": {"width": 0}},
        text=texts,
        hovertemplate="%{text}<extra></extra>",
    )
    mean = go.Scatter(
        x=[means[name] for name in order],
        y=list(range(len(order))),
        mode="markers+text",
        marker={"symbol": "line-ns", "size": 20, "line": {"width": 3, "color": "#0b5c66"}},
        text=[f"{means[name]:.1f}" for name in order],
        textposition="top center",
        cliponaxis=False,
        hovertemplate="mean rank %{x:.2f}<extra></extra>",
    )
    layout = {
        "showlegend": False,
        "hovermode": "closest",
        "xaxis": {
            "title": {"text": "rank (1 is best)"},
            "dtick": 1,
            "range": [0.5, len(order) + 0.5],
        },
        "yaxis": names_axis([spelled(name) for name in order], "")
        | {"range": [len(order) - 0.4, -0.7], "showgrid": False},
    }
    caption = (
        f"Ranks by test accuracy after the final round in {pairs} "
        f"{'pairs' if pairs > 1 else 'pair'} of scenario and seed that all methods have. Dots: how "
        "often a rank occurs; line: the mean rank. Ties share the mean of their ranks."
    )
    return chart_of([dots, mean], layout, 120 + 44 * len(order), caption)


def margin_plot(accuracies: Mapping[str, Accuracies], base: str) -> Chart | None:
    """Each method's margin over ``base`` with its confidence interval."""
    margins = {
        name: margin
        for name, ours in accuracies.items()
        if name != base and (margin := paired_margin(ours, accuracies[base])) is not None
    }
    if not margins:
        return None
    order = sorted(margins, key=lambda name: -margins[name].mean)
    reach = [
        0.0
        if margins[name].high is None
        else 100 * ((margins[name].high or 0) - margins[name].mean)
        for name in order
    ]
    dots = go.Scatter(
        x=[round(100 * margins[name].mean, 4) for name in order],
        y=list(range(len(order))),
        mode="markers",
        marker={
            "size": 10,
            "color": ["#0b5c66" if margins[n].decided else "#9fb0b8" for n in order],
        },
        error_x={"type": "data", "array": reach, "thickness": 2, "color": "#6f7f8f"},
        hovertemplate="%{x:+.1f} points<extra></extra>",
    )
    zero: dict[str, Any] = {"type": "line", "x0": 0, "x1": 0, "yref": "paper", "y0": 0, "y1": 1}
    layout = {
        "showlegend": False,
        "xaxis": {"title": {"text": f"points above {spelled(base)}"}},
        "yaxis": names_axis([spelled(name) for name in order], "")
        | {"range": [len(order) - 0.5, -0.5], "showgrid": False},
        "shapes": [zero | {"line": {"color": "#3d4852", "width": 1, "dash": "dot"}}],
    }
    caption = (
        f"Test accuracy after the final round minus that of {spelled(base)}, paired by scenario "
        "and seed, with 95 % confidence intervals; dark where the interval excludes zero. A dot "
        "without an interval has none: fewer than three pairs, or differences all equal."
    )
    return chart_of([dots], layout, 120 + 36 * len(order), caption)


# --- curves ------------------------------------------------------------------------------------


def _line(method: str, points: Sequence[tuple[float, float]], results: Results) -> go.Scatter:
    look = looks_of({name: name for name in results.methods})[method]
    line = line_of(points, label_of(spelled(method)), look.colour, width=2.5, scale=100)
    line.update(line_dash=look.dash)
    return line


def _mean_curve(
    results: Results, method: str, cumulative: Cumulative | None
) -> list[tuple[float, float]]:
    """Mean accuracy by round (or by mean cost so far), over rounds that all runs evaluated."""
    runs = [result.run for result in results.of(method)]
    evaluated = [
        {r for r in run.evaluations.rounds if run.evaluations.accuracy(r, TEST) is not None}
        for run in runs
    ]
    shared = sorted(set.intersection(*evaluated)) if evaluated else []
    costs = [cumulative(run) for run in runs] if cumulative else []
    points = []
    for round_ in shared:
        values = [run.evaluations.accuracy(round_, TEST) or 0.0 for run in runs]
        place = float(round_)
        if cumulative:
            place = math.fsum(cost.get(round_, 0.0) for cost in costs) / len(runs)
        points.append((place, math.fsum(values) / len(values)))
    return points


def _bytes_so_far(run: RunRecord) -> dict[int, float]:
    total = run.summary.bytes.get("total", 0.0) if run.summary else 0.0
    by_round = {row.round: row.bytes_up + row.bytes_down for row in run.metrics.rounds}
    # What was sent before round 1 is the rest of the ledger's total.
    start = max(0.0, total - sum(by_round.values()))
    return _summed(start, by_round)


def _seconds_so_far(run: RunRecord) -> dict[int, float]:
    setup = run.metrics.setup.seconds if run.metrics.setup else 0.0
    rows = run.metrics.rounds
    used = {r.round: sum(v for name, v in r.seconds.items() if name != "evaluate") for r in rows}
    return _summed(setup, used)


def _summed(start: float, by_round: Mapping[int, float]) -> dict[int, float]:
    summed = {0: start}
    for round_ in sorted(by_round):
        summed[round_] = start = start + by_round[round_]
    return summed
