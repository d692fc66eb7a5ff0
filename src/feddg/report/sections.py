"""The sections of a run's page."""

import itertools
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy
import numpy as np
import plotly.graph_objects as go

from feddg.comparison.results import Results, about_method, more_metrics
from feddg.data.partition import in_words, skew_of
from feddg.evaluation.accuracy import FEW_IMAGES, about_support
from feddg.records import (
    ID_TEST,
    ID_VAL,
    SPLITS,
    TEST,
    VAL,
    AdaptationRow,
    BadImageRow,
    EvaluationRow,
    SetupRow,
)
from feddg.report.blocks import (
    Block,
    Cell,
    Chart,
    Code,
    Column,
    Fact,
    Facts,
    Fold,
    MadeColumn,
    Pair,
    Prose,
    Section,
    Shares,
    Table,
    table_of,
    text_column,
)
from feddg.report.charts import (
    HELD_OUT_COLOURS,
    TRAINING_COLOURS,
    Counts,
    chart_of,
    client_heat_map,
    label_of,
)
from feddg.report.text import (
    AGGREGATE_WORDS,
    MISSING,
    counted,
    duration,
    interval_words,
    listed,
    metric_title,
    number,
    percent,
    percent_sign,
    readable,
    reference_words,
    shortened,
    size,
    spelled,
    warning_words,
)
from feddg.runs.diagnostics import (
    LEARNED_NOTHING,
    STILL_RISING,
    SplitAccuracy,
    about_result,
    about_run,
    accuracy_interval,
    mean_measured,
    split_accuracy,
)
from feddg.runs.reading import (
    EXPERIMENT_FILE,
    FINAL,
    Alphas,
    Evaluations,
    RunRecord,
    SelectionRule,
    final_round,
    find_rule,
    flatten,
    read_adapted,
    read_alphas,
    rules_for,
)

SPLIT_HEADINGS = {
    TEST: "Held-out test",
    VAL: "Held-out validation",
    ID_VAL: "In-domain validation",
    ID_TEST: "In-domain test",
}
MOST_DOMAINS = 12
Chosen = Mapping[SelectionRule, int | None]
"""The round that each rule chooses."""


def final_table(run: RunRecord, every_domain: bool = False) -> Table:
    """Accuracy by split and domain under each selection rule.

    Args:
        run: The run.
        every_domain: Show all domains of a split even when there are very many; otherwise a long
            list is cut to its mean, lowest and highest.
    """
    evaluations = run.evaluations
    chosen = {rule: rule.choose(evaluations) for rule in rules_for([evaluations])}
    columns = [Column("Split", numeric=False), Column("Domain", numeric=False), Column("Images")]
    columns += [Column(rule.name, _round_note(rule, round_)) for rule, round_ in chosen.items()]
    columns += [Column(heading, "final round") for heading in ("95 % interval", "Balanced")]
    columns.append(Column("Largest class", "of the images"))
    rows: list[list[Cell]] = []
    for split in SPLITS:
        part = _split_rows(evaluations, split, chosen, every_domain)
        rows += [[Cell(SPLIT_HEADINGS[split]), *row] for row in part]
    caption = (
        "Accuracy in percent. Each column named after a rule shows one and the same model, chosen "
        "by that rule; the underlined number made the choice. The test split never chooses. The "
        "interval is that of the final round's accuracy (Wilson), the balanced accuracy is the "
        "mean over classes, and the share of the largest class is what always answering it reaches."
    )
    return Table(columns, rows, caption, grouped=True)


def _round_note(rule: SelectionRule, round_: int | None) -> str:
    if round_ is None:
        return "no validation domain" if rule.split == VAL else "not evaluated"
    return f"round {round_}"


def _split_rows(
    evaluations: Evaluations, split: str, chosen: Chosen, every_domain: bool
) -> Iterator[list[Cell]]:
    domains = evaluations.domains(split)
    if len(domains) > 1:
        yield _mean_row(evaluations, split, chosen)
    names = {domain: readable(domain) for domain in domains}
    if len(domains) > MOST_DOMAINS and not every_domain:
        names = _extremes(evaluations, split)
    for domain, name in names.items():
        yield _domain_row(evaluations, split, domain, name, chosen, alone=len(domains) == 1)


def _mean_row(evaluations: Evaluations, split: str, chosen: Chosen) -> list[Cell]:
    last = evaluations.rounds[-1]
    domains, images = (
        evaluations.domains(split),
        sum(r.examples for r in evaluations.at(last, split)),
    )
    cells = [
        Cell(percent(rule.measure(evaluations, round_, split)), split == TEST, rule.split == split)
        for rule, round_ in chosen.items()
    ]
    beside = _beside_cells(evaluations.at(last, split))
    return [Cell(f"mean of {len(domains)} domains"), Cell(number(images)), *cells, *beside]


def _beside_cells(rows: Sequence[EvaluationRow]) -> list[Cell]:
    """Reference values of the final round's accuracy: interval, balanced, largest class."""
    names = ("balanced_accuracy", "largest_class_share")
    beside = (percent(mean_measured(rows, name)) for name in names)
    return [Cell(interval_words(accuracy_interval(rows)) or MISSING), *map(Cell, beside)]


def _domain_row(
    evaluations: Evaluations,
    split: str,
    domain: str,
    name: str,
    chosen: Chosen,
    alone: bool,
) -> list[Cell]:
    found = [
        None if round_ is None else evaluations.of(rule.weights).get(round_, split, domain)
        for rule, round_ in chosen.items()
    ]
    images = next((row.examples for row in found if row), None)
    cells = [
        Cell(
            percent(row.accuracy if row else None),
            strong=alone and split == TEST,
            chose=alone and rule.split == split,
        )
        for rule, row in zip(chosen, found)
    ]
    last = evaluations.get(evaluations.rounds[-1], split, domain)
    return [Cell(name), Cell(number(images)), *cells, *_beside_cells([last] if last else [])]


def _extremes(evaluations: Evaluations, split: str) -> dict[str, str]:
    """The domains with the lowest and the highest accuracy in the last round, with their names."""
    rows = sorted(evaluations.at(evaluations.rounds[-1], split), key=lambda row: row.accuracy)
    if not rows:
        return {}
    lowest, highest = rows[0].domain, rows[-1].domain
    return {lowest: f"lowest: {readable(lowest)}", highest: f"highest: {readable(highest)}"}


def has_long_splits(evaluations: Evaluations) -> bool:
    """Whether ``final_table`` leaves domains out unless asked for all."""
    return any(len(evaluations.domains(split)) > MOST_DOMAINS for split in SPLITS)


def held_out_accuracy(run: RunRecord, rule: SelectionRule) -> float | None:
    """Held-out test accuracy (mean over domains) of the round that a rule chooses."""
    return rule.measure(run.evaluations, rule.choose(run.evaluations), TEST)


def rounds_text(run: RunRecord) -> str:
    """``50``, or ``17 of 50`` when not all rounds have been done."""
    done, planned = run.rounds_done, run.rounds_planned
    return str(done) if planned in (None, done) else f"{done} of {planned}"


# Test-time adaptation: accuracy under each one that was tried, and alpha layer by layer.


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


# What ``feddg report --analyses`` found, as charts.


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


# Results class by class, each with the number of images behind it.


def class_table(counts: Counts, classes: Sequence[str], name: str) -> Fold:
    """Recall and precision of every class, and what it is taken for most often.

    Args:
        counts: ``(classes, classes)`` numbers of images by true and predicted class.
        classes: names of the classes.
        name: whose images they are.
    """
    right, support, named = np.diagonal(counts), counts.sum(axis=1), counts.sum(axis=0)

    def share(of: Counts, index: int) -> str:
        return percent(float(right[index] / of[index]) if of[index] else None)

    columns: list[MadeColumn[int]] = [
        (text_column("Class"), lambda index: readable(classes[index])),
        (Column("Images"), lambda index: number(float(support[index]))),
        (Column("Recall", "of its images, %"), lambda index: share(support, index)),
        (Column("Precision", "of what got its name, %"), lambda index: share(named, index)),
        (Column("Predicted", "times"), lambda index: number(float(named[index]))),
        (
            text_column("Mostly taken for", "its images, %"),
            lambda index: _most_taken_for(counts[index], classes, index),
        ),
    ]
    caption = (
        "Recall: how many images of the class were recognised. Precision: how many of the images "
        "given its name are of it; a class that was never named has none. Few images make both "
        "uncertain."
    )
    title = f"{counted(len(classes), 'class', 'classes')} of {name}, one by one"
    return Fold(title, [table_of(range(len(classes)), columns, caption)])


def _most_taken_for(row: Counts, classes: Sequence[str], index: int) -> str:
    others = numpy.where(numpy.arange(len(row)) == index, 0, row)
    if not others.any():
        return MISSING
    most = int(others.argmax())
    return f"{readable(classes[most])} ({percent(float(others[most] / row.sum()))})"


# What a run took: time, memory, bytes.


ACTIVITIES = {
    "prepare": "preparing the images",
    "setup": "the exchange before training",
    "train": "training",
    "aggregate": "aggregation",
    "evaluate": "evaluation",
    "other": "everything else",
}
VISIBLE_SHARE = 0.002
COSTS = (
    ("To a client, per round", "down_per_client_round"),
    ("From a client, per round", "up_per_client_round"),
    ("To a client, before training", "setup_down_per_client"),
    ("From a client, before training", "setup_up_per_client"),
    ("All messages", "total"),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run took, from its summary or, before there is one, from the rows so far."""

    seconds: Mapping[str, float]
    total_seconds: float
    images_per_second: float | None
    passes_per_image: float | None
    peak_memory: int | None
    bytes: Mapping[str, Any]


def cost_of(run: RunRecord) -> Cost:
    """The cost of a run so far."""
    summary = run.summary
    seconds = dict((summary and summary.seconds) or _seconds_so_far(run))
    total = max(seconds.pop("total", 0.0), sum(seconds.values()))
    rest = total - sum(seconds.values())
    if rest > 0.005 * total:
        seconds["other"] = rest
    order = list(ACTIVITIES)
    known = sorted(seconds, key=lambda name: order.index(name) if name in order else len(order))
    return Cost(
        {name: seconds[name] for name in known},
        total,
        (summary and summary.images_per_second) or _mean_speed(run),
        _passes_per_image(run),
        summary.peak_memory_bytes if summary else None,
        (summary and summary.bytes) or _bytes_so_far(run),
    )


def _seconds_so_far(run: RunRecord) -> dict[str, float]:
    seconds = {"setup": run.metrics.setup.seconds} if run.metrics.setup else {}
    for row in run.metrics.rounds:
        for activity, value in row.seconds.items():
            seconds[activity] = seconds.get(activity, 0.0) + value
    return seconds


def _mean_speed(run: RunRecord) -> float | None:
    images = sum(row.images for row in run.metrics.rounds)
    seconds = sum(row.seconds.get("train", 0.0) for row in run.metrics.rounds)
    return images / seconds if seconds > 0 else None


def _passes_per_image(run: RunRecord) -> float | None:
    """How often an image of a training step goes through the networks; None if not counted."""
    counted = [row for row in run.metrics.rounds if row.passes and row.images]
    images = sum(row.images for row in counted)
    return sum(row.passes for row in counted) / images if images else None


def _bytes_so_far(run: RunRecord) -> dict[str, float]:
    rounds = run.metrics.rounds
    asked = sum(len(row.clients) for row in rounds)
    if not asked:
        return {}
    up, down = sum(row.bytes_up for row in rounds), sum(row.bytes_down for row in rounds)
    return {
        "up_per_client_round": up / asked,
        "down_per_client_round": down / asked,
        "total": up + down,
    }


def run_cost_table(run: RunRecord) -> Table:
    """What a run took."""
    cost = cost_of(run)
    rows = [Cell("Time in all"), Cell(duration(cost.total_seconds), strong=True)]
    texts = {f"Time for {activity_text(name)}": duration(s) for name, s in cost.seconds.items()}
    texts["Images per second of training"] = number(cost.images_per_second)
    texts["Passes through the network per image"] = _times(cost)
    texts["Peak memory"] = size(cost.peak_memory)
    texts |= {text: size(cost.bytes.get(key)) for text, key in COSTS}
    table = table_of(
        texts, [(text_column(""), str), (Column("This run"), lambda text: texts[text])]
    )
    return replace(table, rows=[rows, *table.rows])


def _times(cost: Cost) -> str:
    times = cost.passes_per_image
    return number(None) if times is None else f"{times:.2f}"


def activity_text(name: str) -> str:
    """What an activity's seconds were spent on, in words."""
    return ACTIVITIES.get(name, readable(name))


def time_shares(cost: Cost) -> Shares:
    """Where the time went, as one divided bar."""
    parts = [
        (activity_text(name), value / cost.total_seconds, duration(value))
        for name, value in cost.seconds.items()
        if value > VISIBLE_SHARE * cost.total_seconds
    ]
    return Shares(parts, f"Where the time went: {duration(cost.total_seconds)} in all.")


def cost_table(results: Results) -> Table | None:
    """What a run of each method took, mean over its runs; None without any."""
    methods = [method for method in results.methods if results.runs(method)]
    if not methods:
        return None
    costs = {m: [(cost_of(r), max(1, r.rounds_done)) for r in results.runs(m)] for m in methods}

    def mean(of: Callable[[Cost, int], float]) -> Callable[[str], float | None]:
        return lambda method: _mean([of(*cost) for cost in costs[method]])

    def column(
        heading: str,
        note: str,
        shown: Callable[[float | None], str],
        of: Callable[[Cost, int], float],
    ) -> MadeColumn[str]:
        return Column(heading, note), lambda method: shown(mean(of)(method))

    columns: list[MadeColumn[str]] = [
        (text_column("Method"), spelled),
        column("Time", "a run", duration, lambda cost, rounds: cost.total_seconds),
        column(
            "Training", "a round", duration, lambda c, rounds: c.seconds.get("train", 0) / rounds
        ),
        column(
            "Fusing", "a round", duration, lambda c, rounds: c.seconds.get("aggregate", 0) / rounds
        ),
        column("Before training", "", duration, lambda cost, rounds: cost.seconds.get("setup", 0)),
        column("Images", "per second", number, lambda cost, rounds: cost.images_per_second or 0),
        column(
            "From a client",
            "per round",
            size,
            lambda c, rounds: c.bytes.get("up_per_client_round", 0),
        ),
        column(
            "From a client",
            "before training",
            size,
            lambda c, rounds: c.bytes.get("setup_up_per_client", 0),
        ),
        column("Peak memory", "", size, lambda cost, rounds: cost.peak_memory or 0),
    ]
    return table_of(methods, columns, "Mean over the runs of a method.")


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


# The groups that a method put clients into before training.


MOST_NAMED = 8


def groups_table(run: RunRecord, setup: SetupRow) -> Table | None:
    """How many clients each group has, and which; None where the method grouped nobody."""
    found = [
        (what, place, members)
        for what, groups in setup.groups.items()
        for place, members in enumerate(groups, start=1)
    ]
    columns: list[MadeColumn[tuple[str, int, Sequence[int]]]] = [
        (text_column("Grouped"), lambda group: f"By {readable(group[0]).lower()}"),
        (text_column("Group"), lambda group: f"Group {group[1]}"),
        (Column("Clients"), lambda group: number(len(group[2]))),
        (text_column("Which"), lambda group: _members([run.client_name(id) for id in group[2]])),
    ]
    return table_of(found, columns, grouped=True) if found else None


def _members(names: list[str]) -> Cell:
    if len(names) <= MOST_NAMED:
        return Cell(", ".join(names))
    return Cell(f"{names[0]} and {len(names) - 1} more", items=tuple(names))


# The section about who holds what: pictures, and a number for each kind of skew.


MOST_LISTED = 50


def holdings_section(run: RunRecord) -> Section | None:
    """Who holds what; None where the run did not write it down."""
    clients = run.clients
    if clients is None or not clients.clients:
        return None
    sizes = sorted(sum(client.domains) for client in clients.clients)
    text = (
        f"{counted(len(sizes), 'client')} hold {counted(sum(sizes), 'training image')}: "
        f"{number(sizes[0])} the smallest, {number(sizes[len(sizes) // 2])} the median, "
        f"{number(sizes[-1])} the largest."
    )
    blocks: list[Block] = [Prose(text), client_heat_map(clients, "domains")]
    blocks.append(client_heat_map(clients, "classes"))
    if len(sizes) > 1:
        domains = numpy.array([client.domains for client in clients.clients])
        labels = numpy.array([client.classes for client in clients.clients])
        blocks += [Prose(line) for line in in_words(skew_of(domains, labels))]
    if clients.bad_images:
        blocks.append(_bad_images(clients.bad_images))
    return Section("Who holds what", blocks)


def _bad_images(images: Sequence[BadImageRow]) -> Fold:
    columns: list[MadeColumn[BadImageRow]] = [
        (text_column("File"), lambda image: image.path),
        (text_column("Reason"), lambda image: image.reason),
    ]
    title = f"{counted(len(images), 'image')} could not be used"
    return Fold(title, [table_of(images[:MOST_LISTED], columns, cut_note(len(images)))])


def cut_note(total: int) -> str:
    """Says that only the first rows are listed, where that is so."""
    return f"The first {MOST_LISTED} of {number(total)}." if total > MOST_LISTED else ""


# Every metric by domain, with the images behind it; and over domains, counted in two ways.


def metrics_section(run: RunRecord) -> Section | None:
    """Every metric of the final round's model; None where only accuracies were written."""
    evaluations = run.evaluations
    names = more_metrics([run])
    if len(names) < 2:
        return None
    rows = [
        [Cell(SPLIT_HEADINGS[split]), *row]
        for split in SPLITS
        for row in _metric_rows(evaluations, split, names, _class_names(run))
    ]
    columns = [Column("Split", numeric=False), Column("Domain", numeric=False), Column("Images")]
    columns += [Column(metric_title(name)) for name in names]
    columns += [Column("Smallest class", "images", numeric=False)]
    blocks: list[Block] = [Table(columns, rows, _caption(), grouped=True)]
    domains = evaluations.at(evaluations.rounds[-1], TEST)
    support = [(TEST, d.domain, evaluations.support(TEST, d.domain) or []) for d in domains]
    few = about_support(support, _class_names(run))
    return Section("Metrics", [*(Prose(str(one), notice=True) for one in few), *blocks])


def compared_metrics(results: Results) -> Table | None:
    """Every metric of every method on held-out test domains, final round, means over runs."""
    names = more_metrics(results.runs())
    if len(names) < 2:
        return None
    columns: list[MadeColumn[tuple[str, str]]] = [
        (text_column("Method"), lambda pair: spelled(pair[0])),
        (text_column("Over domains"), lambda pair: AGGREGATE_WORDS[pair[1]]),
    ]
    columns += [(Column(metric_title(name)), partial(_over_runs, results, name)) for name in names]
    caption = (
        "Held-out test domains after the final round, percent, mean over all runs of a method "
        f"that have the number. {_caption()}"
    )
    pairs = itertools.product(results.methods, AGGREGATE_WORDS)
    return table_of(pairs, columns, caption, grouped=True)


def _over_runs(results: Results, metric: str, pair: tuple[str, str]) -> str:
    return percent(results.mean(pair[0], metric, FINAL.name, TEST, pair[1]))


def _class_names(run: RunRecord) -> Sequence[str]:
    return run.clients.classes if run.clients is not None else ()


def _metric_rows(
    evaluations: Evaluations, split: str, names: Sequence[str], classes: Sequence[str]
) -> Iterator[list[Cell]]:
    last = evaluations.rounds[-1]
    measured = evaluations.at(last, split)
    if len(measured) > 1:
        images = number(sum(row.examples for row in measured))
        for aggregate, words in AGGREGATE_WORDS.items():
            values = [evaluations.value(last, split, name, aggregate) for name in names]
            shown = [Cell(percent(value), strong=split == TEST) for value in values]
            yield [Cell(f"{words} ({len(measured)})"), Cell(images), *shown, Cell("")]
    for row in measured if len(measured) <= MOST_DOMAINS else []:
        values = [row.metric(name) for name in names]
        support = evaluations.support(split, row.domain)
        yield [
            Cell(readable(row.domain)),
            Cell(number(row.examples)),
            *(Cell(percent(value)) for value in values),
            Cell(_smallest(support, classes)),
        ]


def _smallest(support: Sequence[int] | None, classes: Sequence[str]) -> str:
    """The class with the fewest images, and how many have none."""
    if not support:
        return MISSING
    seen = [(count, index) for index, count in enumerate(support) if count]
    absent = len(support) - len(seen)
    parts = []
    if seen:
        count, index = min(seen)
        name = readable(classes[index]) if index < len(classes) else str(index)
        parts.append(f"{name}: {number(count)}")
    if absent:
        parts.append(f"{number(absent)} of {number(len(support))} classes without any")
    return "; ".join(parts)


def _caption() -> str:
    return (
        "Percent. Mean of domains counts each domain once, pooled counts each image once; which "
        "one a paper prints can change who wins. AUROC and ECE (expected calibration error, lower "
        "is better) need probabilities of all images together and are not pooled."
    )


# Experiments and environments as tables.


def differing_settings(runs: Sequence[RunRecord], labels: Sequence[str]) -> Table | None:
    """The settings in which the runs' experiments differ, or None when they do not."""
    flat = [dict(flatten(run.experiment)) for run in runs]
    keys = dict.fromkeys(key for settings in flat for key in settings if key != "name")
    differing = [key for key in keys if len({settings.get(key) for settings in flat}) > 1]
    columns: list[MadeColumn[str]] = [(text_column("Setting"), str)]
    columns += [
        (text_column(label), partial(_setting, settings)) for label, settings in zip(labels, flat)
    ]
    caption = "Everything else is the same in all runs."
    return table_of(differing, columns, caption) if differing else None


def _setting(settings: Mapping[str, str], key: str) -> str:
    return settings.get(key, MISSING)


def mapping_table(content: Mapping[str, Any], headings: tuple[str, str]) -> Table:
    """A mapping as two columns; nested names are joined by dots."""
    name, value = map(text_column, headings)
    return table_of(flatten(content), [(name, lambda pair: pair[0]), (value, lambda pair: pair[1])])


# The top of a run's page: its result in plain words, what speaks against it, its key numbers.


def tested_on(run: RunRecord) -> str:
    """``, tested on photo``: the end of a heading, empty when no domain is held out."""
    whose = _held_out_words(run)
    return f", tested on {whose}" if whose else ""


def _held_out_words(run: RunRecord) -> str:
    names = [readable(name) for name in run.held_out(TEST)]
    return listed(names) if len(names) <= 3 else f"{len(names)} held-out domains"


def on_data(runs: Sequence[RunRecord]) -> str:
    """`` on pacs``: the middle of a heading; empty where the runs' data differ or are unknown."""
    names = {_data_name(run) for run in runs}
    name = names.pop() if len(names) == 1 else ""
    return f" on {name}" if name else ""


def _data_name(run: RunRecord) -> str:
    """The data set, or the folder of images."""
    data = run.experiment.get("data") or {}
    source, root = str(data.get("source") or ""), data.get("root")
    return Path(str(root)).name if source == "folder" and root else readable(source)


def data_tags(runs: Sequence[RunRecord]) -> list[str]:
    """Size of the images and the day of the runs, as far as they are recorded."""
    sizes = {(run.experiment.get("data") or {}).get("image_size") for run in runs} - {None}
    tags = [f"{sizes.pop()} pixels a side"] if len(sizes) == 1 else []
    days = sorted(day for run in runs if (day := _day(run)) is not None)
    if days:
        first, last = (f"{day.day} {day:%B %Y}" for day in (days[0], days[-1]))
        tags.append(first if first == last else f"{first} to {last}")
    return tags


def _day(run: RunRecord) -> datetime | None:
    try:
        return datetime.fromisoformat(str(run.environment.get("started")))
    except ValueError:
        return None


def served_accuracy(run: RunRecord) -> SplitAccuracy | None:
    """The accuracy of the model that the run serves on the held-out test domains."""
    rule = run.served
    return split_accuracy(run.evaluations.of(rule.weights), rule.choose(run.evaluations))


def result_sentence(run: RunRecord) -> str:
    """The result in plain words, with the reference values of its accuracy."""
    accuracy = held_out_accuracy(run, run.served)
    if accuracy is None:
        return "The held-out test domain has not been evaluated yet."
    round_ = final_round(run.evaluations)
    when = "before any training" if round_ == 0 else f"after {counted(round_ or 0, 'round')}"
    at = served_accuracy(run)
    interval = f" (95 % interval {interval_words(at.accuracy)})" if at else ""
    warnings = warning_words(about_result(run))
    start = f"{warnings[0].upper()}{warnings[1:]}: " if warnings else ""
    when = when if start else f"{when[0].upper()}{when[1:]}"
    sentence = (
        f"{start}{when}, {_model_words(run)} recognised {percent_sign(accuracy)}{interval} of "
        f"the images of {_held_out_words(run)}, which no client trained on."
    )
    return " ".join(part for part in (sentence, reference_words(at) if at else "") if part)


def _model_words(run: RunRecord) -> str:
    rule = run.served
    return "the shared model" if rule is FINAL else f"the shared model ({rule.name.lower()})"


def status_text(run: RunRecord) -> str:
    """The status in a few words."""
    if run.status == "completed":
        return f"completed, {counted(run.rounds_done, 'round')}"
    return f"{run.status}, {rounds_text(run)} rounds"


def notices(run: RunRecord) -> Iterator[Prose]:
    """What to know before trusting the numbers; of few images, the metrics' own section says it."""
    for one in about_run(run):
        if one.code != FEW_IMAGES:
            yield Prose(str(one), notice=True)


def key_facts(run: RunRecord) -> Facts:
    """The numbers a reader looks for first."""
    rule = run.served
    last = rule.choose(run.evaluations)
    in_domain = rule.measure(run.evaluations, last, ID_TEST)
    split = "test" if in_domain is not None else "validation"
    in_domain = in_domain if in_domain is not None else rule.measure(run.evaluations, last, ID_VAL)
    cost = cost_of(run)
    facts = [
        *_accuracy_facts(run),
        Fact(f"In-domain {split}", percent_sign(in_domain), f"correct, {rule.name.lower()}"),
        *_federation_facts(run),
        Fact("Time", duration(cost.total_seconds), f"{number(cost.images_per_second)} images/s"),
        Fact("Sent by a client", size(cost.bytes.get("up_per_client_round")), "per round"),
    ]
    return Facts(facts)


def _accuracy_facts(run: RunRecord) -> Iterator[Fact]:
    at = served_accuracy(run)
    rule = run.served.name.lower()
    note = f"95 % interval {interval_words(at.accuracy)}" if at else f"correct, {rule}"
    accuracy = percent_sign(held_out_accuracy(run, run.served))
    yield Fact("Held-out test", accuracy, note, accent=True)
    if at is None:
        return
    if at.balanced is not None:
        chance = f"guessing: {percent_sign(at.chance)}" if at.chance else "mean over classes"
        yield Fact("Balanced accuracy", percent_sign(at.balanced), chance)
    if at.constant is not None:
        note = "share of the images; what always naming it reaches"
        yield Fact("Largest class", percent_sign(at.constant), note)
    if at.most_predicted is not None and at.true is not None:
        class_id, share = at.most_predicted
        classes = run.clients.classes if run.clients else []
        name = shortened(readable(classes[class_id])) if class_id < len(classes) else "one class"
        note = f"“{name}”, {percent_sign(at.true[class_id])} of the images"
        yield Fact("Commonest prediction", percent_sign(share), note)


def _federation_facts(run: RunRecord) -> Iterator[Fact]:
    settings = run.experiment.get("clients") or {}
    total = len(run.clients.clients) if run.clients else settings.get("number")
    per_round = settings.get("per_round") or total
    if total is not None:
        yield Fact("Clients", number(total), f"{number(per_round)} in each round")
    model = run.experiment.get("model") or {}
    if model.get("backbone"):
        weights = Path(str(model.get("weights") or "none")).name
        yield Fact("Model", str(model["backbone"]), f"starting weights: {weights}")


# What to do next: commands that fit what was found.


REPEATS = 3
Step = tuple[str, str]
"""Why, and the command."""


def run_steps(run: RunRecord) -> list[Section]:
    """What to do after a run; nothing for one that was not even planned."""
    steps = list(_run_steps(run)) if run.experiment.get("data") else []
    return [_section(steps)] if steps else []


def comparison_steps(results: Results, decided: bool) -> list[Section]:
    """What to do after a comparison; nothing for folders that no plan holds together.

    Args:
        results: the comparison.
        decided: whether the best method is told from the next one.
    """
    steps = list(_comparison_steps(results, decided))
    return [_section(steps)] if steps else []


def _section(steps: Sequence[Step]) -> Section:
    blocks: list[Block] = [block for why, command in steps for block in (Prose(why), Code(command))]
    return Section("What to do next", blocks)


def _run_steps(run: RunRecord) -> Iterator[Step]:
    folder, file = str(run.folder), str(run.folder / EXPERIMENT_FILE)
    if run.status != "completed":
        yield "Go on from the last completed round:", _command("resume", folder)
    codes = {one.code for one in about_result(run)}
    if codes & LEARNED_NOTHING:
        yield from _after_nothing(run, file)
    if STILL_RISING in codes and run.rounds_planned:
        rounds = str(2 * run.rounds_planned)
        yield "Accuracy still rose: train twice as long:", _command("run", file, "--rounds", rounds)
    if run.status == "completed" and not codes & LEARNED_NOTHING:
        yield (
            "One run cannot tell a difference from chance. Repeat it with other seeds beside the "
            "plain average of clients:",
            _command("compare", "--methods", _methods(run), *_data_flags(run), "--seeds", "3"),
        )
        yield (
            "See what adapting to the unseen domain at test time changes:",
            _command("evaluate", folder),
        )


def _after_nothing(run: RunRecord, file: str) -> Iterator[Step]:
    data = run.experiment.get("data") or {}
    if data.get("source") == "folder" and data.get("root"):
        yield (
            "Look at the images first: labels, sizes, ranges of values, duplicates:",
            _command("data", "inspect", "--root", str(data["root"])),
        )
    rate = (run.experiment.get("train") or {}).get("lr")
    if not rate:
        return
    for words, factor in (("larger", 10.0), ("smaller", 0.1)):
        again = _command("run", file, "--lr", f"{factor * float(rate):g}")
        yield f"Try a learning rate ten times {words} than {float(rate):g}:", again


def _methods(run: RunRecord) -> str:
    return ",".join(dict.fromkeys(["fedavg", run.method]))


def _data_flags(run: RunRecord) -> list[str]:
    data: dict[str, Any] = run.experiment.get("data") or {}
    flags = ["--data", str(data.get("source"))]
    flags += ["--root", str(data["root"])] if data.get("root") else []
    test, val = (",".join(run.held_out(split)) for split in (TEST, VAL))
    if test:
        flags += ["--hold-out", f"val={val},test={test}" if val else test]
    rounds = run.rounds_planned
    return flags + (["--rounds", str(rounds)] if rounds else [])


def _comparison_steps(results: Results, decided: bool) -> Iterator[Step]:
    folders = {run.folder.parent for run in results.runs()}
    plan = folders.pop() / "plan.yaml" if len(folders) == 1 else None
    if plan is None or not plan.is_file():
        return
    again = ("compare", str(plan), "--out", str(plan.parent))
    if results.open:
        yield "Carry out what is missing; complete runs are kept:", _command(*again)
    codes = {one.code for method in results.methods for one in about_method(results, method)}
    planned = {run.rounds_planned for run in results.runs()}
    if STILL_RISING in codes and len(planned) == 1 and (rounds := planned.pop()):
        longer = (*again[:3], f"{plan.parent}-longer", "--rounds", str(2 * rounds))
        yield "Accuracy still rose in some runs: train twice as long:", _command(*longer)
    if not decided and len(results.methods) > 1:
        seeds = max(2 * len(results.seeds), REPEATS)
        yield (
            f"These runs do not decide. Use {number(seeds)} seeds; complete runs are kept:",
            _command(*again, "--seeds", str(seeds)),
        )


def _command(*words: str) -> str:
    return shlex.join(["feddg", *words])
