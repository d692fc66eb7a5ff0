"""All interactive charts, of one or several runs: plotly's traces and layouts."""

import html
import json
from collections.abc import Mapping, Sequence
from itertools import cycle
from statistics import fmean
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feddg.comparison.results import Results, evaluations
from feddg.comparison.results_file import HELD_OUT
from feddg.comparison.statistics import Interval, Margin, average_over_columns, by_seed
from feddg.records import EMA, ID_TEST, LAST, TEST, VAL, ClientsTable, MembershipRow, RoundRow
from feddg.report.blocks import Chart
from feddg.report.text import SPLIT_WORDS, sentence, spelled
from feddg.runs.reading import Run
from feddg.runs.table import FINAL
from feddg.settings import grouped
from feddg.text import readable, shortened

COLOURS: Final = (
    *("#000000", "#e69f00", "#56b4e9", "#d55e00", "#009e73"),
    *("#cc79a7", "#0072b2", "#7a1f4f"),
)
"""Colours of Okabe and Ito, with a dark red for their yellow, which is too light for lines on
white. They can be told apart by colour-blind readers (a test computes it).
"""
HEAT_COLOURS = ((0.0, "#f7f9fa"), (0.5, "#7fb8bd"), (1.0, "#0b5c66"))
DARK = "#0b5c66"
MANY_CLASSES = 40
WIDE_RANGE = 20

Counts = NDArray[np.float64]
Trace = dict[str, Any]
Axis = dict[str, Any]
Point = tuple[float, float]
DASHES: Final = ("solid", "dot", "dash", "dashdot", "longdash")
CLASSES_WITH_TEXT = 12
MOST_COLUMNS = 100
TALLEST = 1000
"""Largest total height of the rows in pixels; if there are very many, rows are thin lines."""
ACCURACY: Final = "held-out test accuracy (%)"


def chart_of(traces: Sequence[Trace], height: int, caption: str, **layout: Any) -> Chart:
    """Returns a chart of plotly traces with the page's template, which is in ``page.js``."""
    text = json.dumps({"data": traces, "layout": layout}, default=lambda array: array.tolist())
    return Chart(json.loads(text, parse_constant=lambda not_finite: None), height, caption)


def line_chart(lines: Sequence[Trace], caption: str, x: Axis, y: Axis, **layout: Any) -> Chart:
    """Returns a line chart with a legend."""
    height = 330 + 12 * len(lines)
    return chart_of(lines, height, caption, xaxis=x, yaxis=y, showlegend=True, **layout)


def line_of(
    points: Sequence[Point],
    name: str,
    colour: str,
    width: float = 2,
    scale: float = 1,
    dash: str = "",
) -> Trace:
    """Returns a line through points, with markers if there are few."""
    return {
        "type": "scatter",
        "x": [x for x, _ in points],
        "y": [round(scale * y, 6) for _, y in points],
        "name": name,
        "mode": "lines+markers" if len(points) <= 15 else "lines",
        "marker": {"size": 6},
        "line": {"color": colour, "width": width} | ({"dash": dash} if dash else {}),
        "hovertemplate": "%{y:.1f} %" if scale == 100 else "%{y:.4g}",
    }


def markers_of(places: Sequence[Point], marker: dict[str, Any], hover: str, **trace: Any) -> Trace:
    """Returns markers at places; ``hover`` is the text shown on pointing."""
    return {
        "type": "scatter",
        "x": [x for x, _ in places],
        "y": [y for _, y in places],
        "mode": "markers",
        "marker": marker,
        "hovertemplate": hover,
        **trace,
    }


def heat_map(
    shares: Counts, counts: Counts, x: Axis, y: Axis, height: int, caption: str, **trace: Any
) -> Chart:
    """Returns shares of 0 to 1 as colours, first row at the top; pointing shows ``counts``."""
    heat = {
        "type": "heatmap",
        "z": (100 * shares).round(1).tolist(),
        "customdata": counts.astype(int).tolist(),
        "zmin": 0,
        "zmax": 100,
        "colorscale": HEAT_COLOURS,
        "showscale": False,
    }
    x, y = x | {"showgrid": False}, y | {"showgrid": False, "autorange": "reversed"}
    return chart_of([heat | trace], height, caption, xaxis=x, yaxis=y)


def axis(title: str, **settings: Any) -> Axis:
    """Returns an axis with a title."""
    return {"title": {"text": title}, **settings}


def names_axis(names: Sequence[str], title: str = "", **settings: Any) -> Axis:
    """Returns an axis of names; if there are very many, they are shown on pointing only."""
    settings |= {"showticklabels": len(names) <= MANY_CLASSES}
    return texts_axis([label_of(name) for name in names], title, **settings)


def texts_axis(texts: Sequence[str], title: str = "", **settings: Any) -> Axis:
    """Returns an axis of texts that are safe."""
    ticks = {"tickmode": "array", "tickvals": list(range(len(texts))), "ticktext": list(texts)}
    return axis(title, **ticks, **settings)


def scale_for(lowest: float, highest: float, ratio: float) -> Axis:
    """Returns axis settings: logarithmic if values span more than ``ratio``, else linear."""
    wide = 0 < lowest * ratio < highest
    return {"type": "log", "dtick": 1, "exponentformat": "power"} if wide else {}


def label_of(name: str) -> str:
    """Returns a name as safe text for a chart."""
    return html.escape(shortened(readable(name)))


def row_shares(counts: Counts) -> Counts:
    """Returns each row divided by its sum; rows of zeros do not change."""
    totals = counts.sum(axis=1, keepdims=True)
    return counts / np.where(totals > 0, totals, 1)


class LineStyle(NamedTuple):
    """Colour and dash of a line."""

    colour: str
    dash: str


LINE_STYLES: Final = tuple(LineStyle(colour, dash) for dash in DASHES for colour in COLOURS)


def line_styles(methods: Sequence[str]) -> dict[str, LineStyle]:
    """Returns a style for every method, all different up to ``LINE_STYLES`` methods.

    Args:
        methods: their labels, in page order.
    """
    return dict(zip(methods, cycle(LINE_STYLES)))


def confusion_matrix(counts: Counts, classes: Sequence[str], caption: str) -> Chart:
    """Returns the confusion matrix: rows are true classes, in percent of the row.

    Args:
        counts: ``(classes, classes)`` number of images by true and predicted class.
        classes: Names of the classes.
        caption: The visible caption.
    """
    shares = row_shares(counts)
    gap = 1 if len(classes) <= MANY_CLASSES else 0
    return heat_map(
        shares,
        counts,
        # Slanted names end below their column: the last is not cut off at a phone's edge.
        names_axis(classes, "recognised as", tickangle=-45),
        names_axis(classes),
        min(700, max(320, 110 + 30 * len(classes))),
        caption,
        text=[[f"{100 * share:.0f}" for share in row] for row in shares],
        texttemplate="%{text}" if len(classes) <= CLASSES_WITH_TEXT else None,
        hovertemplate="%{y} recognised as %{x}<br>%{customdata} images, %{z:.1f} %<extra></extra>",
        xgap=gap,
        ygap=gap,
    )


def client_heat_map(clients: ClientsTable, by: str) -> Chart:
    """Returns a heat map of each client's images by domain or class.

    Clients are sorted by main domain. With more than ``MOST_COLUMNS`` clients, neighbours share a
    column, which shows the sum of their images.

    Args:
        clients: The images of each client.
        by: ``domains`` or ``classes``.
    """
    counts = np.array([getattr(client, by) for client in clients.clients], dtype=np.float64)
    indices = np.flatnonzero(counts.sum(axis=0)) if by == "domains" else np.arange(counts.shape[1])
    names = [getattr(clients, by)[index] for index in indices]
    groups = client_groups(np.array([client.domains for client in clients.clients]))
    columns = np.stack([counts[group][:, indices].sum(axis=0) for group in groups])
    firsts = [clients.clients[group[0]].name for group in groups]
    titles = [
        f"{len(group)} clients together" if len(group) > 1 else label_of(first)
        for group, first in zip(groups, firsts)
    ]
    what = "domain" if by == "domains" else "class"
    return heat_map(
        row_shares(columns).T,
        columns.T,
        names_axis(firsts, "clients, by main domain"),
        names_axis(names),
        130 + round(min(34, TALLEST / len(names)) * len(names)),
        sentence("client_heat_map", grouped=len(groups) < len(counts), what=what),
        text=[[f"{title}<br>{label_of(name)}" for title in titles] for name in names],
        hovertemplate="%{text}: %{customdata} images, %{z:.1f} %<extra></extra>",
        xgap=1 if len(groups) <= 60 else 0,
        ygap=2 if len(names) <= 60 else 0,
    )


def client_groups(domain_counts: NDArray[Any]) -> list[NDArray[np.intp]]:
    """Returns clients sorted by main domain, in at most ``MOST_COLUMNS`` groups.

    Args:
        domain_counts: ``(clients, domains)`` numbers of images.

    Returns:
        Row indices, group by group; every client is in exactly one.
    """
    main = domain_counts.argmax(axis=1)
    share = row_shares(domain_counts.astype(np.float64)).max(axis=1)
    order = np.lexsort((-share, main))
    each = max(1, -(-len(order) // MOST_COLUMNS))
    return np.array_split(order, max(1, -(-len(order) // each)))


def accuracy_curves(run: Run) -> Chart:
    """Returns accuracy after every evaluated round, one line per domain and split."""
    of_last = run.table.where(weights=LAST)
    splits = {split: of_last.where(split=split).by("domain") for split in SPLIT_WORDS}
    names = dict.fromkeys(name for domains in splits.values() for name in domains)
    colours = dict(zip(names, cycle(COLOURS)))
    lines: list[Trace] = []
    for place, (split, words) in enumerate(SPLIT_WORDS.items()):
        domains, width = splits[split], 3 if split in (TEST, VAL) else 1.6
        parts = [(f"{label_of(d)} · {words}", part, colours[d]) for d, part in domains.items()]
        if len(domains) > 1 and len(colours) > len(COLOURS):  # two would look alike
            parts = [(f"{words}, mean of {len(domains)} domains", of_last, COLOURS[place])]
        for name, part, colour in parts:
            line = line_of([*part.curve(split).items()], name, colour, width=width, scale=100)
            if split == ID_TEST:
                line |= {"visible": "legendonly", "line": line["line"] | {"dash": "dot"}}
            lines.append(line)
    caption = sentence("accuracy_curves", averaged=run.default_rule is not FINAL)
    return _over_rounds(lines, caption, axis("accuracy (%)"))


def loss_curves(rounds: Sequence[RoundRow]) -> Chart | None:
    """Returns the mean of each loss term by round, or None before the first round."""
    terms = dict.fromkeys(name for row in rounds for name in row.terms)
    lines = [
        line_of(
            [(row.round, row.terms[name]) for row in rounds if name in row.terms],
            label_of(name),
            colour,
        )
        for name, colour in zip(terms, cycle(COLOURS))
    ]
    if not lines:
        return None
    values = [value for row in rounds for value in row.terms.values() if value == value] or [0.0]
    y = axis("loss term", **scale_for(min(values), max(values), 100))
    return _over_rounds(lines, sentence("loss_curves"), y)


def _over_rounds(lines: Sequence[Trace], caption: str, y: Axis) -> Chart:
    last = max((x for line in lines for x in line["x"]), default=0)
    # Tick marks at whole rounds: left to itself, a short axis has halves.
    ticks = {"dtick": 1} if last <= 10 else {"tickformat": "d"}
    x = axis("round", hoverformat="d", **ticks)
    return line_chart(lines, caption, x, y, hovermode="x unified")


def roc_chart(rows: Sequence[MembershipRow]) -> Chart | None:
    """Returns the ROC curves of membership attacks, with the line of chance; None without any."""
    drawn = [row for row in rows if row.curve]
    if not drawn:
        return None
    lines = [
        line_of(row.curve, f"{row.entry}, {row.attack}", colour)
        for row, colour in zip(drawn, cycle(COLOURS[1:]))
    ]
    lines.append(line_of(((0, 0), (1, 1)), "chance", "#888888", width=1))
    x = axis("others taken for members", range=[0, 1])
    return line_chart(lines, sentence("roc_curves"), x, axis("members found", range=[0, 1]))


def learning_curves(results: Results) -> Chart | None:
    """Returns the held-out test accuracy by round, one line per method."""
    lines = _method_lines(results, {m: _mean_curve(results, m) for m in results.methods})
    return _over_rounds(lines, sentence("learning_curves"), axis(ACCURACY)) if lines else None


SPENT: Final = {
    "images": (1, "images seen in training, all clients", "images seen in training"),
    "bytes": (
        1e6,
        "MB sent, all clients and both ways",
        "everything sent since the start, setup included",
    ),
    "seconds": (60, "min", "the time of training and aggregation"),
}
"""A cost as an axis: its unit, in multiples of the table's, the title, and words for a sentence."""


def accuracy_against(results: Results, spent: str) -> Chart | None:
    """Returns accuracy against the cost so far, a line per method.

    A method of one round is a horizontal line that starts at its cost.

    Args:
        results: the comparison, at one budget if there are several.
        spent: a name of ``SPENT``.
    """
    unit, title, words = SPENT[spent]
    # What is measured in every evaluated round: the exponential mean where all runs serve it.
    weights = EMA if results.default_rule.weights == EMA else LAST
    curves = {
        method: [(x / unit, y) for x, y in _mean_curve(results, method, spent, weights)]
        for method in results.methods
    }
    longest = max((x for points in curves.values() for x, _ in points), default=0)
    for method, points in curves.items():
        if points and all(run.has_one_round for run in results.runs(method)):
            curves[method] = [points[-1], (longest, points[-1][1])]
    lines = _method_lines(results, curves)
    if not lines:
        return None
    mean, timed = weights == EMA, spent == "seconds"
    caption = sentence("accuracy_against", what=words, mean=mean, timed=timed)
    return line_chart(lines, caption, axis(title, rangemode="tozero"), axis(ACCURACY))


def axis_curves(results: Results, name: str) -> Chart | None:
    """Returns average test accuracy over the values of an axis; None if they are not numbers."""
    texts = results.axes[name]
    numbers = {text: value for text in texts if (value := _number(text)) is not None}
    if name == HELD_OUT or len({*numbers.values()}) < max(2, len(texts)):
        return None
    columns = results.columns_by(name)
    measured = {
        method: [
            (numbers[text], mean)
            for text in sorted(numbers, key=numbers.__getitem__)
            if (mean := average_over_columns(cells, columns[text])) is not None
        ]
        for method, cells in results.values(results.default_rule).items()
    }
    curves = {method: [(x, share.mean) for x, share in curve] for method, curve in measured.items()}
    lines = _method_lines(results, curves)
    for line, values in zip(lines, filter(None, measured.values())):
        deviations = [100 * (share.deviation or 0.0) for _, share in values]
        line["error_y"] = {"type": "data", "array": deviations, "thickness": 1}
    caption = sentence("axis_curves", when=results.default_rule.when, name=name)
    x = axis(label_of(name), **scale_for(min(numbers.values()), max(numbers.values()), WIDE_RANGE))
    return line_chart(lines, caption, x, axis(ACCURACY)) if lines else None


def _number(text: str) -> float | None:
    """Returns the number in an axis value; for ``20 of 100`` clients, 100."""
    try:
        return float(text.rpartition(" of ")[2])
    except ValueError:
        return None


def _method_lines(results: Results, curves: Mapping[str, Sequence[Point]]) -> list[Trace]:
    styles = line_styles(results.methods)
    return [
        line_of(points, label_of(spelled(method)), style.colour, 2.5, 100, style.dash)
        for method, points in curves.items()
        for style in [styles[method]]
        if points
    ]


def _mean_curve(
    results: Results, method: str, spent: str | None = None, weights: str = LAST
) -> list[Point]:
    """Returns mean accuracy by round (or mean cost so far), over rounds evaluated in all runs.

    Over the runs of the seeds that have every column, if there are any. Runs at budgets are matched
    by budget, which runs on other images reach in other rounds.
    """
    runs = {(results.column(row), row.seed): row for row in results.of(method) if row.run}
    if whole := by_seed(dict.fromkeys(runs, 0.0), results.columns):
        runs = {key: row for key, row in runs.items() if key[1] in whole}
    curves = {key: evaluations(row, weights) for key, row in runs.items()}
    points = []
    for mark in sorted(set.intersection(*map(set, curves.values()))) if curves else ():
        at = {key: curve[mark][1] for key, curve in curves.items()}
        costs = [getattr(curve[mark][0], spent or "round") for curve in curves.values()]
        seeds = by_seed(at, results.columns) or at
        points.append((fmean(costs), fmean(seeds.values())))
    return points


def margin_plot(results: Results, base: str) -> Chart | None:
    """Returns each method's margin over ``base`` with its confidence interval over domains."""
    rule = results.default_rule
    margins = results.margins(rule, base)
    if not margins:
        return None
    order = sorted(margins, key=lambda name: -margins[name].mean)
    colours = [DARK if margins[name].decided else "#9fb0b8" for name in order]
    rows = [(label_of(spelled(name)), margins[name].domains) for name in order]
    caption = sentence("margin_plot", when=rule.when, base=spelled(base))
    return _margins_chart(rows, base, caption, color=colours)


def forest_plot(results: Results, method: str, base: str, margin: Margin) -> Chart:
    """Returns a method's margin over ``base``, a row for each domain, below its data set's name.

    The last rows are the means over all domains and over data sets, each with its interval.
    """
    rows: list[tuple[str, Interval]] = []
    groups = grouped((name, domain) for domain, name in results.collections.items())
    for name, domains in groups.items():
        rows.append((f"<b>{label_of(name)}</b>", Interval.of([])))
        for domain in domains:
            known = [margin.by_domain[domain]] if domain in margin.by_domain else []
            rows.append((label_of(domain.removeprefix(f"{name}, ")), Interval.of(known)))
    symbols = ["circle"] * len(rows) + ["diamond"] * 2
    rows.append(("<b>all domains</b>", margin.domains))
    rows.append(("<b>all data sets</b>", margin.collections))
    caption = sentence(
        "forest_plot",
        method=spelled(method),
        base=spelled(base),
        when=results.default_rule.when,
        margin=margin,
    )
    return _margins_chart(rows, base, caption, color=DARK, symbol=symbols)


def _margins_chart(
    rows: Sequence[tuple[str, Interval]], base: str, caption: str, **marker: Any
) -> Chart:
    """Returns a dot for each mean, one below the other, with its interval's reach; in points."""
    array = [100 * (interval.reach or 0.0) for _, interval in rows]
    dots = markers_of(
        [(round(100 * interval.mean, 4), row) for row, (_, interval) in enumerate(rows)],
        {"size": 10, **marker},
        "%{x:+.1f} points<extra></extra>",
        error_x={"type": "data", "array": array, "thickness": 2, "color": "#6f7f8f"},
    )
    zero = {"type": "line", "x0": 0, "x1": 0, "yref": "paper", "y0": 0, "y1": 1}
    return chart_of(
        [dots],
        120 + 30 * len(rows),
        caption,
        showlegend=False,
        xaxis=axis(f"points above {spelled(base)}"),
        yaxis=texts_axis([text for text, _ in rows], showgrid=False, range=[len(rows) - 0.5, -0.5]),
        shapes=[zero | {"line": {"color": "#3d4852", "width": 1, "dash": "dot"}}],
    )
