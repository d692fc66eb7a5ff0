"""Every interactive chart: of one run and of many, over rounds, classes and clients."""

import html
import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, Final, NamedTuple

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from feddg.comparison.results import HELD_OUT, Results
from feddg.comparison.statistics import Accuracies, paired_margin, ranks, spread
from feddg.methods.base import METHODS
from feddg.records import ID_TEST, ID_VAL, SPLITS, TEST, VAL, ClientRow, ClientsTable, RoundRow
from feddg.report.blocks import Chart
from feddg.report.text import number, readable, shortened, spelled
from feddg.runs.reading import Evaluations, RunRecord

HELD_OUT_COLOURS = ("#c8324b", "#d98a00", "#8c3f8f", "#e0653a")
TRAINING_COLOURS = ("#1f78a4", "#2a9d6f", "#5b6bc0", "#3bb0b0", "#7a8b2f", "#6f7f8f")
HEAT_COLOURS = ((0.0, "#f7f9fa"), (0.5, "#7fb8bd"), (1.0, "#0b5c66"))
MANY_CLASSES = 40
LOG_AXIS = {"type": "log", "dtick": 1, "exponentformat": "power"}

Counts = NDArray[np.float64]

SMALL = {"font": {"size": 13}}
TEMPLATE: dict[str, Any] = {
    "layout": {
        "font": {
            "family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif",
            "size": 13,
            "color": "#3d4852",
        },
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "hoverlabel": {"bgcolor": "#ffffff", "bordercolor": "#cfd6dc", "align": "left"},
        "legend": {
            "orientation": "h",
            "yref": "container",
            "y": 0,
            "yanchor": "bottom",
            "xref": "container",
            "x": 0,
        },
        "xaxis": {
            "automargin": True,
            "gridcolor": "#eef1f4",
            "zeroline": False,
            "ticks": "",
            "title": SMALL,
        },
        "yaxis": {
            "automargin": True,
            "gridcolor": "#e3e8ec",
            "zeroline": False,
            "ticklabelstandoff": 6,
            "ticks": "",
            "title": SMALL,
        },
    }
}


def line_of(
    points: Sequence[tuple[float, float]],
    name: str,
    colour: str,
    width: float = 2,
    scale: float = 1,
) -> go.Scatter:
    """A line through points, with markers when they are few."""
    few = len(points) <= 15
    return go.Scatter(
        x=[round_ for round_, _ in points],
        y=[round(scale * value, 6) for _, value in points],
        name=name,
        mode="lines+markers" if few else "lines",
        marker={"size": 6},
        line={"color": colour, "width": width},
        hovertemplate="%{y:.1f} %" if scale == 100 else "%{y:.4g}",
    )


def curves_of(
    lines: Iterable[go.Scatter], title: str, caption: str, logarithmic: bool = False
) -> Chart:
    """Lines over rounds."""
    traces = list(lines)
    layout = {
        "hovermode": "x unified",
        "showlegend": True,
        "xaxis": {"title": {"text": "round"}, "hoverformat": "d"} | _whole_rounds(traces),
        "yaxis": {"title": {"text": title}, **(LOG_AXIS if logarithmic else {})},
    }
    return chart_of(traces, layout, 330 + 12 * len(traces), caption)


def _whole_rounds(traces: Sequence[go.Scatter]) -> dict[str, Any]:
    """Tick marks at whole rounds; left to itself, a short axis has halves."""
    last = max((x for trace in traces for x in trace.x or ()), default=0)
    return {"dtick": 1} if last <= 10 else {"tickformat": "d"}


def row_shares(counts: Counts) -> Counts:
    """Each row divided by its sum; a row of zeros stays zeros."""
    totals = counts.sum(axis=1, keepdims=True)
    return counts / np.where(totals > 0, totals, 1)


def names_axis(names: Sequence[str], title: str) -> dict[str, Any]:
    """An axis of names; of very many, they show only when the reader points at something."""
    return {
        "title": {"text": title},
        "tickmode": "array",
        "tickvals": list(range(len(names))),
        "ticktext": [label_of(name) for name in names],
        "showticklabels": len(names) <= MANY_CLASSES,
    }


def label_of(name: str) -> str:
    """A name as safe text in a chart."""
    return html.escape(shortened(readable(name)))


def chart_of(traces: Sequence[Any], layout: dict[str, Any], height: int, caption: str) -> Chart:
    """A chart of plotly traces under the page's template."""
    figure = json.loads(go.Figure(list(traces), {**layout, "template": "none"}).to_json())
    figure["layout"].pop("template", None)  # the page holds one template for all its charts
    return Chart(figure, height, caption)


def whole_percent(share: float) -> str:
    """A share in percent without decimals; one rounding for matrix and bars, halves to even."""
    return f"{share:.0f}"


# How a method's lines look: the same colour and dash on every page.


COLOURS: Final = (
    "#6f7f8f",
    "#c8324b",
    "#1f78a4",
    "#d98a00",
    "#2a9d6f",
    "#8c3f8f",
    "#3bb0b0",
    "#8a5a2b",
    "#e377a8",
)
DASHES: Final = ("solid", "dot", "dash", "dashdot")


class Look(NamedTuple):
    """Colour and dash of a line."""

    colour: str
    dash: str


LOOKS: Final = tuple(Look(colour, dash) for dash in DASHES for colour in COLOURS)


def looks_of(methods: Mapping[str, str]) -> dict[str, Look]:
    """Returns the look of every label, no two alike while there are no more than ``LOOKS``.

    A method's look is that of its place among all methods, so it is the same on every page. What is
    no method of ours has one by its name; where that is taken on a page, the next free one.

    Args:
        methods: the label of every line and the method it is of, in the order of the page.
    """
    places = {name: place for place, name in enumerate(METHODS)}
    # Ours first: they must not lose their look to a name that happens to fall on it.
    order = sorted(methods, key=lambda label: methods[label].lower() not in places)
    taken: dict[str, int] = {}
    for label in order:
        name = methods[label].lower()
        wanted = places.get(name, zlib.crc32(name.encode()))
        used = set(taken.values())
        choices = ((wanted + step) % len(LOOKS) for step in range(len(LOOKS)))
        taken[label] = next((c for c in choices if c not in used), wanted % len(LOOKS))
    return {label: LOOKS[taken[label]] for label in methods}


# Charts by class: which was taken for which, and how many were recognised.


HARDEST_CLASSES = 20
CLASSES_WITH_TEXT = 12

BEYOND_100 = {"range": [0, 116], "tickvals": [0, 20, 40, 60, 80, 100]}
"""An axis of percent with room for the text of a bar that ends at 100."""


def confusion_matrix(counts: Counts, classes: Sequence[str], caption: str) -> Chart:
    """Which class was taken for which: rows are true classes, in percent of the row.

    Args:
        counts: ``(classes, classes)`` number of images by true and predicted class.
        classes: Names of the classes.
        caption: What the reader sees.
    """
    shares = 100 * row_shares(counts)
    with_text = len(classes) <= CLASSES_WITH_TEXT
    gap = 1 if len(classes) <= MANY_CLASSES else 0
    heat = go.Heatmap(
        z=shares.round(1).tolist(),
        customdata=counts.astype(int).tolist(),
        text=[[whole_percent(share) for share in row] for row in shares],
        texttemplate="%{text}" if with_text else None,
        hovertemplate="%{y} recognised as %{x}<br>%{customdata} images, %{z:.1f} %<extra></extra>",
        zmin=0,
        zmax=100,
        colorscale=HEAT_COLOURS,
        showscale=False,
        xgap=gap,
        ygap=gap,
    )
    layout = {
        "xaxis": names_axis(classes, "recognised as") | {"showgrid": False},
        "yaxis": names_axis(classes, "") | {"showgrid": False, "autorange": "reversed"},
    }
    return chart_of([heat], layout, _class_height(len(classes)), caption)


def class_accuracy(counts: Counts, classes: Sequence[str]) -> Chart:
    """Accuracy of each class; of very many classes, the hardest."""
    shares = 100 * np.diagonal(row_shares(counts))
    totals = counts.sum(axis=1).astype(int)
    order = list(range(len(classes)))
    caption = "Accuracy by class; the line marks the mean over classes."
    if len(classes) > MANY_CLASSES:
        order = np.argsort(shares, kind="stable")[:HARDEST_CLASSES].tolist()
        caption = f"The {HARDEST_CLASSES} hardest of {len(classes)} classes, by accuracy."
    bars = go.Bar(
        x=shares[order].round(1).tolist(),
        y=list(range(len(order))),
        orientation="h",
        marker={"color": "#2b8a94"},
        text=[whole_percent(shares[index]) for index in order],
        textposition="outside",
        cliponaxis=False,
        customdata=[
            f"{label_of(classes[index])}: {number(totals[index])} images" for index in order
        ],
        hovertemplate="%{customdata}<br>%{x:.1f} % correct<extra></extra>",
    )
    names = [classes[index] for index in order]
    present = shares[totals > 0]
    layout = {
        "xaxis": {
            "title": {"text": "correct (%)"},
        }
        | BEYOND_100,
        "yaxis": names_axis(names, "") | {"showgrid": False, "autorange": "reversed"},
        "shapes": [_mean_mark(float(present.mean()) if present.size else 0.0)],
        "bargap": 0.3,
    }
    return chart_of([bars], layout, _class_height(len(order)), caption)


def _mean_mark(position: float) -> dict[str, Any]:
    line = {"color": "#3d4852", "width": 1, "dash": "dot"}
    return {
        "type": "line",
        "x0": position,
        "x1": position,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": line,
    }


def _class_height(classes: int) -> int:
    return min(700, max(320, 110 + 30 * classes))


# Charts of who holds what: each client's images over the domains, or over the classes.


MOST_COLUMNS = 100
LABELLED_CLIENTS = 24
TALLEST = 1000
"""Pixels of all rows together; of very many, each is a thin line."""


def client_heat_map(clients: ClientsTable, by: str) -> Chart:
    """How each client's images spread over the domains, or over the classes.

    Clients stand in the order of their main domain. Beyond ``MOST_COLUMNS`` clients, neighbours
    with the same main domain share a column, which then shows their images taken together.

    Args:
        clients: Who holds what.
        by: ``domains`` or ``classes``.
    """
    counts = np.array([getattr(client, by) for client in clients.clients], dtype=np.float64)
    held = np.flatnonzero(counts.sum(axis=0)) if by == "domains" else np.arange(counts.shape[1])
    names = [getattr(clients, by)[index] for index in held]
    groups = client_groups(np.array([client.domains for client in clients.clients]))
    columns = np.stack([counts[group][:, held].sum(axis=0) for group in groups])
    titles = [_group_title([clients.clients[index] for index in group]) for group in groups]
    heat = go.Heatmap(
        z=(100 * row_shares(columns)).T.round(1).tolist(),
        customdata=columns.T.astype(int).tolist(),
        text=[[f"{title}<br>{label_of(name)}" for title in titles] for name in names],
        hovertemplate="%{text}: %{customdata} images, %{z:.1f} %<extra></extra>",
        zmin=0,
        zmax=100,
        colorscale=HEAT_COLOURS,
        showscale=False,
        xgap=1 if len(groups) <= 60 else 0,
        ygap=2 if len(names) <= 60 else 0,
    )
    return chart_of(
        [heat],
        _heat_layout(clients, groups, names),
        130 + round(min(34, TALLEST / len(names)) * len(names)),
        _heat_caption(by, together=len(groups) < len(counts)),
    )


def client_groups(domain_counts: NDArray[Any]) -> list[NDArray[np.intp]]:
    """Clients in the order of their main domain, cut into at most ``MOST_COLUMNS`` or so groups.

    Args:
        domain_counts: ``(clients, domains)`` numbers of images.

    Returns:
        Row indices, group by group; every client is in exactly one, and all clients of a group
        have the same main domain.
    """
    main = domain_counts.argmax(axis=1)
    share = row_shares(domain_counts.astype(np.float64)).max(axis=1)
    order = np.lexsort((-share, main))
    per_column = -(-len(order) // MOST_COLUMNS)
    groups: list[NDArray[np.intp]] = []
    for domain in np.unique(main):
        members = order[main[order] == domain]
        groups += np.array_split(members, -(-len(members) // per_column))
    return groups


def _group_title(members: Sequence[ClientRow]) -> str:
    if len(members) == 1:
        return label_of(members[0].name)
    return f"{len(members)} clients together"


def _heat_layout(
    clients: ClientsTable, groups: Sequence[NDArray[np.intp]], names: Sequence[str]
) -> dict[str, Any]:
    total = len(clients.clients)
    title = "clients, by main domain"
    if total <= LABELLED_CLIENTS:
        x_axis = names_axis([clients.clients[group[0]].name for group in groups], title)
    else:
        x_axis = {"title": {"text": title}, "showticklabels": False}
    y_axis = names_axis(names, "") | {"autorange": "reversed", "showgrid": False}
    return {"xaxis": x_axis | {"showgrid": False}, "yaxis": y_axis}


def _heat_caption(by: str, together: bool) -> str:
    what = "domain" if by == "domains" else "class"
    column = "a few similar clients taken together" if together else "a client"
    return (
        f"Each column is {column}, each row a {what}. The darker, the larger the share of the "
        "images in the column, which add up to 100 %."
    )


# Charts over the rounds: accuracy by domain, loss terms.


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


# Charts of a comparison: methods over rounds, bytes, seconds, an axis; and their ranks.


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
    columns = results.columns_by(axis)[value]
    own = results.accuracies(results.served).get(method, {})
    return [accuracy for (column, _), accuracy in own.items() if column in columns]


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
    runs = results.runs(method)
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
