"""What every interactive chart is made of: lines, axes of names, colours, as plotly figures.

Names come from users' folders. plotly reads a small HTML dialect in its texts, so every name goes
through ``label_of``, and axes are numbered with names as tick labels: two long names that are
shortened alike stay two, and names such as ``0`` and ``1`` stay names.
"""

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from feddg.report.blocks import Chart
from feddg.report.wording import readable, shortened

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
