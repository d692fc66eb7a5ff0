"""Test-time adaptation: accuracy under each one that was tried, and alpha layer by layer."""

from collections.abc import Sequence
from itertools import cycle

import numpy as np
import plotly.graph_objects as go

from feddg.records import SPLITS, TEST, AdaptationRow
from feddg.report.blocks import Block, Cell, Chart, Column, Section, Table
from feddg.report.charts import HELD_OUT_COLOURS, TRAINING_COLOURS, chart_of, label_of
from feddg.report.wording import percent, readable
from feddg.runs.reading import FINAL, Alphas, RunRecord, find_rule, read_adapted, read_alphas

_SHORT = ("held-out test", "held-out val.", "in-domain val.", "in-domain test")
SHORT_SPLITS = dict(zip(SPLITS, _SHORT))


def adaptation_section(run: RunRecord) -> Section | None:
    """How the model adapts to images as it predicts; None if nothing of it is known."""
    blocks: list[Block] = []
    scores = read_adapted(run.folder)
    if scores:
        blocks.append(_table(scores))
    alphas = read_alphas(run.folder)
    if alphas is not None and len(alphas.values):
        blocks.append(_boxes(alphas))
    return Section("Test-time adaptation", blocks)


def _table(scores: Sequence[AdaptationRow]) -> Table:
    """A row per adaptation, of the model that was measured last."""
    newest = max(enumerate(scores), key=lambda item: (item[1].round, item[0]))[1]
    last, which = newest.round, newest.which
    found: dict[tuple[str, int], dict[tuple[str, str], list[float]]] = {}
    for score in (score for score in scores if (score.round, score.which) == (last, which)):
        cells = found.setdefault((score.adaptation, score.batch_size), {})
        cells.setdefault((score.split, score.domain), []).append(score.accuracy)
    places = sorted({p for cells in found.values() for p in cells}, key=_order)
    columns = [Column("Adaptation", numeric=False)]
    columns += [Column(readable(domain), SHORT_SPLITS[split]) for split, domain in places]
    rows = []
    for (name, batch_size), cells in found.items():
        several = len({size for other, size in found if other == name}) > 1
        texts = [
            Cell(percent(sum(cells[p]) / len(cells[p])) if p in cells else "", p[0] == TEST)
            for p in places
        ]
        rows.append([Cell(f"{name}, batch {batch_size}" if several else name), *texts])
    spelt = "" if which == FINAL.model else f"“{find_rule(which).name}” "
    caption = (
        f"Accuracy (%) of the {spelt}model after round {last} under test-time adaptations (feddg "
        "evaluate). “Global” is no adaptation; “own statistics” serves each client's domain by "
        "the statistics the client keeps, the mean where several clients share a domain."
    )
    return Table(columns, rows, caption)


def _order(place: tuple[str, str]) -> tuple[int, str]:
    return SPLITS.index(place[0]), place[1]


def _boxes(alphas: Alphas) -> Chart:
    """A box per layer and domain; drawn from quantiles, so that the page stays small."""
    held_out = set(alphas.domains[alphas.splits == TEST].tolist())
    colours = {True: cycle(HELD_OUT_COLOURS), False: cycle(TRAINING_COLOURS)}
    layers = list(range(1, len(alphas.layers) + 1))
    traces = []
    for domain, values in alphas.by_domain().items():
        low, first, middle, third, high = np.quantile(values, (0.05, 0.25, 0.5, 0.75, 0.95), axis=0)
        traces.append(
            go.Box(
                x=layers,
                q1=first.round(4).tolist(),
                median=middle.round(4).tolist(),
                q3=third.round(4).tolist(),
                lowerfence=low.round(4).tolist(),
                upperfence=high.round(4).tolist(),
                name=label_of(domain) + (" (unseen)" if domain in held_out else ""),
                marker={"color": next(colours[domain in held_out])},
                line={"width": 1},
            )
        )
    layout = {
        "boxmode": "group",
        "showlegend": True,
        "xaxis": {"title": {"text": "layer, from the image to the classifier"}, "dtick": 1},
        "yaxis": {"title": {"text": "alpha"}, "rangemode": "tozero"},
    }
    caption = (
        "How far each layer adapts to an image: the share alpha of the image's own statistics, "
        "the rest being the federation's. Boxes hold half of a domain's images, whiskers 90 %."
    )
    return chart_of(traces, layout, 380, caption)
