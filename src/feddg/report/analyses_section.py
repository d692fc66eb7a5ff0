"""What ``feddg report --analyses`` found, as charts."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import plotly.graph_objects as go

from feddg.report.blocks import Block, Chart, Pair, Prose, Section
from feddg.report.charts import (
    HELD_OUT_COLOURS,
    TRAINING_COLOURS,
    chart_of,
    label_of,
)
from feddg.report.wording import percent
from feddg.runs.reading import RunRecord

CLASS_COLOURS = tuple(
    colour for pair in zip(TRAINING_COLOURS, cycle(HELD_OUT_COLOURS)) for colour in pair
)[:10]
NAME_TAG = {"bgcolor": "rgba(255,255,255,0.8)", "showarrow": False, "yshift": 18}
BARE = {"showticklabels": False, "title": {"text": ""}, "showgrid": False}


def analyses_sections(run: RunRecord) -> list[Section]:
    """The sections of the analyses that a run has had; none without."""
    found = run.analyses
    if found is None:
        return []
    return [
        Section("Features", _feature_maps(found["features"])),
        Section("Loss landscape", _landscapes(found["landscape"])),
        Section("Grey levels of clients", _grey_levels(found["grey_levels"])),
    ]


def _feature_maps(found: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    labels, domains = np.array(found["labels"]), np.array(found["of_domain"])
    held_out = {found["domains"][d] for d, out in zip(domains, found["held_out"]) if out}
    for each in found["maps"]:
        points = np.array(each["points"])
        when = "before training" if each["round"] == 0 else f"after round {each['round']}"
        by_class = _scatter(points, labels, found["classes"], CLASS_COLOURS, f"{when}, by class")
        names = [f"{d} (unseen)" if d in held_out else d for d in found["domains"]]
        by_domain = _scatter(points, domains, names, CLASS_COLOURS, f"{when}, by domain")
        blocks.append(Pair(by_class, by_domain))
    blocks.append(
        Prose(
            "t-SNE maps of the features in front of the classifier: near points have similar "
            "features, while far distances and the axes mean nothing. Classes should fall apart, "
            "domains should mix."
        )
    )
    return blocks


def _scatter(
    points: np.ndarray, groups: np.ndarray, names: Sequence[str], colours: Sequence[str], text: str
) -> Chart:
    traces = [
        go.Scatter(
            x=points[groups == group, 0].tolist(),
            y=points[groups == group, 1].tolist(),
            name=label_of(name),
            mode="markers",
            marker={"size": 5, "color": colour, "opacity": 0.75},
            hoverinfo="name",
        )
        for (group, name), colour in zip(enumerate(names), cycle(colours))
        if (groups == group).any()
    ]
    layout = {"xaxis": BARE, "yaxis": BARE, "showlegend": True, "hovermode": "closest"}
    return chart_of(traces, layout, 400, f"Features {text}.")


def _landscapes(found: dict[str, Any]) -> list[Block]:
    titles = {"seen": "training images", "unseen": "images of unseen domains"}
    blocks: list[Block] = []
    for name, losses in found["losses"].items():
        surface = go.Contour(
            x=found["x"],
            y=found["y"],
            z=np.log10(np.maximum(losses, 1e-6)).round(4).tolist(),
            customdata=losses,
            hovertemplate="loss %{customdata:.3g}<extra></extra>",
            colorscale="Teal",
            showscale=False,
            contours={"coloring": "heatmap"},
            line={"width": 0.5, "color": "#ffffff"},
        )
        marks = go.Scatter(
            x=[point["x"] for point in found["points"]],
            y=[point["y"] for point in found["points"]],
            text=[label_of(point["name"]) for point in found["points"]],
            mode="markers",
            marker={"size": 10, "color": "#c8324b", "line": {"width": 1, "color": "#ffffff"}},
            hovertemplate="%{text}<extra></extra>",
        )
        axis = {"title": {"text": "distance in weights"}, "showgrid": False}
        names = [
            {"x": point["x"], "y": point["y"], "text": label_of(point["name"])} | NAME_TAG
            for point in found["points"]
        ]
        layout = {"xaxis": axis, "yaxis": axis, "annotations": names, "showlegend": False}
        caption = (
            f"Loss on {titles.get(name, name)} over the plane through the marked models; "
            "logarithmic colours, dark is high. Clients: after one more round of their own "
            "training."
        )
        blocks.append(chart_of([surface, marks], layout, 430, caption))
    return blocks


def _grey_levels(found: dict[str, Any]) -> list[Block]:
    before = _histograms(found["clients"], found["before"], "before")
    if any(after is None for after in found["after"]) or not found["after"]:
        return [before, Prose("The method re-draws no images, so there is no after.")]
    text = (
        "Mean difference between two clients' histograms (total variation; 0 is the same, 100 "
        f"nothing in common): {percent(overlap_gap(found['before']))} before, "
        f"{percent(overlap_gap(found['after']))} after."
    )
    return [Pair(before, _histograms(found["clients"], found["after"], "after")), Prose(text)]


def overlap_gap(histograms: Sequence[Sequence[float]]) -> float | None:
    """Mean total variation distance over pairs of histograms, in [0, 1]; None for fewer than 2."""
    shares = np.array(histograms)
    pairs = [(i, j) for i in range(len(shares)) for j in range(i)]
    if not pairs:
        return None
    return float(np.mean([np.abs(shares[i] - shares[j]).sum() / 2 for i, j in pairs]))


def _histograms(names: Sequence[str], rows: Sequence[Sequence[float]], when: str) -> Chart:
    lines = []
    for name, shares, colour in zip(names, rows, cycle(CLASS_COLOURS)):
        width = 256 / len(shares)
        lines.append(
            go.Scatter(
                x=[(bin_ + 0.5) * width for bin_ in range(len(shares))],
                y=[round(100 * share, 3) for share in shares],
                name=label_of(name),
                mode="lines",
                line={"color": colour, "width": 2},
                hovertemplate="%{y:.1f} %",
            )
        )
    layout = {
        "showlegend": True,
        "xaxis": {"title": {"text": "grey level"}, "range": [0, 256]},
        "yaxis": {"title": {"text": "share of pixels (%)"}, "rangemode": "tozero"},
    }
    caption = f"Grey levels of some clients' images {when} the method re-draws them."
    return chart_of(lines, layout, 340 + 12 * len(lines), caption)
