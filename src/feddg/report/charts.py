"""Interactive charts of one run or several, as plotly figures.

Names come from users' folders. plotly reads a small HTML dialect in its texts, so every name goes
through ``label_of``, and axes are numbered with names as tick labels: two long names that are
shortened alike stay two, and names such as ``0`` and ``1`` stay names.
"""

import html
import json
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from feddg.report.blocks import Chart
from feddg.report.looks import looks_of
from feddg.report.wording import number, readable, shortened
from feddg.rows import ID_TEST, ID_VAL, SPLITS, TEST, VAL, ClientRow, ClientsTable, RoundRow
from feddg.runs.evaluations import Evaluations
from feddg.runs.reading import RunRecord

HELD_OUT_COLOURS = ("#c8324b", "#d98a00", "#8c3f8f", "#e0653a")
TRAINING_COLOURS = ("#1f78a4", "#2a9d6f", "#5b6bc0", "#3bb0b0", "#7a8b2f", "#6f7f8f")
HEAT_COLOURS = ((0.0, "#f7f9fa"), (0.5, "#7fb8bd"), (1.0, "#0b5c66"))
SPLIT_TITLES = {
    TEST: "held-out test",
    VAL: "held-out validation",
    ID_VAL: "in-domain validation",
    ID_TEST: "in-domain test",
}
MANY_DOMAINS = 8
MANY_CLASSES = 40
HARDEST_CLASSES = 20
CLASSES_WITH_TEXT = 12
MOST_COLUMNS = 100
LABELLED_CLIENTS = 24

BEYOND_100 = {"range": [0, 116], "tickvals": [0, 20, 40, 60, 80, 100]}
"""An axis of percent with room for the text of a bar that ends at 100."""
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


# --- curves over rounds -------------------------------------------------------------------------


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


def held_out_accuracy_of_runs(runs: Sequence[RunRecord], labels: Sequence[str]) -> Chart:
    """Held-out test accuracy over rounds, one line per run."""
    looks = looks_of({label: run.method for run, label in zip(runs, labels)})
    lines = []
    for run, label in zip(runs, labels):
        points = _mean_points(run.evaluations, TEST)
        line = line_of(points, label_of(label), looks[label].colour, width=3, scale=100)
        lines.append(line.update(line_dash=looks[label].dash))
    caption = (
        "Accuracy on the held-out test domain after each round, one line per run (mean over "
        "domains where there are several)."
    )
    return curves_of(lines, "held-out test accuracy (%)", caption)


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


# --- confusion and per-class accuracy -----------------------------------------------------------


def confusion_matrix(counts: Counts, classes: Sequence[str], caption: str) -> Chart:
    """Which class was taken for which: rows are true classes, in percent of the row.

    Args:
        counts: ``(classes, classes)`` number of images by true and predicted class.
        classes: Names of the classes.
        caption: What the reader sees.
    """
    shares = 100 * _row_shares(counts)
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
    shares = 100 * np.diagonal(_row_shares(counts))
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


def whole_percent(share: float) -> str:
    """A share in percent without decimals; one rounding for matrix and bars, halves to even."""
    return f"{share:.0f}"


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


# --- who holds what -----------------------------------------------------------------------------


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
        z=(100 * _row_shares(columns)).T.round(1).tolist(),
        customdata=columns.T.astype(int).tolist(),
        text=[[f"{title}<br>{label_of(name)}" for title in titles] for name in names],
        hovertemplate="%{text}: %{customdata} images, %{z:.1f} %<extra></extra>",
        zmin=0,
        zmax=100,
        colorscale=HEAT_COLOURS,
        showscale=False,
        xgap=1 if len(groups) <= 60 else 0,
        ygap=2,
    )
    return chart_of(
        [heat],
        _heat_layout(clients, groups, names),
        130 + 34 * len(names),
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
    share = _row_shares(domain_counts.astype(np.float64)).max(axis=1)
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


# --- shared -------------------------------------------------------------------------------------


def _row_shares(counts: Counts) -> Counts:
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
