"""Charts by class: which was taken for which, and how many were recognised."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from feddg.report.blocks import Chart
from feddg.report.charts import (
    HEAT_COLOURS,
    MANY_CLASSES,
    Counts,
    chart_of,
    label_of,
    names_axis,
    row_shares,
    whole_percent,
)
from feddg.report.wording import number

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
