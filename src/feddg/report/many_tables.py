"""Tables of a comparison."""

import math
from collections.abc import Iterable, Mapping, Sequence

from feddg.comparison.results import KeptTable, Results
from feddg.comparison.statistics import (
    Accuracies,
    Margin,
    Spread,
    average_over_columns,
    best_other,
    paired_margin,
    ranks,
    spread,
)
from feddg.records import TEST
from feddg.report.accuracy_section import SPLIT_HEADINGS
from feddg.report.blocks import Cell, Column, Table
from feddg.report.finding_words import marked
from feddg.report.wording import (
    MISSING,
    counted,
    number,
    percent,
    readable,
    spelled,
)
from feddg.runs.findings import standing
from feddg.runs.reading import FINAL, SELECTION_RULES, SelectionRule, rules_for

PRINTED_TOLERANCE = 0.051
"""Printed averages may differ from their row's mean by rounding, in points."""


def accuracy_table(
    results: Results, rule: SelectionRule, split: str = TEST, axis: str | None = None
) -> Table:
    """Accuracy of every method under one selection rule, by column and on average.

    Args:
        results: the comparison.
        rule: how a run's round is chosen.
        split: which images.
        axis: one column for each value of this axis, averaged over the other axes.
    """
    accuracies = results.accuracies(rule, split)
    columns = results.columns_by(axis) if axis else {column: [column] for column in results.columns}
    if len(columns) > 1:
        columns["Average"] = results.columns
    spreads = {
        method: [average_over_columns(accuracies[method], group) for group in columns.values()]
        for method in results.methods
        if method in accuracies
    }
    best = _best(spreads.values())
    beside = {method: _beside_accuracy(results, method, rule, split) for method in spreads}
    # Runs of before these were recorded have none.
    known = any(value is not None for values in beside.values() for value in values)
    rows = [
        [
            Cell(marked(results, method)),
            *(_spread_cell(s, b) for s, b in zip(row, best)),
            *(Cell(percent(value)) for value in beside[method] if known),
        ]
        for method, row in spreads.items()
    ]
    heads = [Column("Method", numeric=False), *(Column(readable(column)) for column in columns)]
    if known:
        heads += [Column("Balanced", "mean of all runs"), Column("Largest class", "of the images")]
    caption = _accuracy_caption(results, rule, split)
    if axis:
        caption += " Each column is an average over everything else that varies."
    return Table(heads, rows, caption)


def _beside_accuracy(
    results: Results, method: str, rule: SelectionRule, split: str
) -> list[float | None]:
    """Balanced accuracy and the constant model's accuracy, means over all runs of a method."""
    found = [
        standing(result.run.evaluations, result.rounds[rule.name], split)
        for result in results.of(method)
    ]
    whole = [at for at in found if at is not None]
    balanced = [at.balanced for at in whole if at.balanced is not None]
    constant = [at.constant for at in whole if at.constant is not None]
    return [
        math.fsum(values) / len(values) if whole and len(values) == len(whole) else None
        for values in (balanced, constant)
    ]


def _best(rows: Iterable[Sequence[Spread | None]]) -> list[float | None]:
    """The highest mean of every column."""
    return [max((s.mean for s in column if s), default=None) for column in zip(*rows)]


def _of_column(accuracies: Accuracies, column: str) -> Spread | None:
    return spread(value for (place, _), value in accuracies.items() if place == column)


def _spread_cell(found: Spread | None, best: float | None) -> Cell:
    return Cell(spread_text(found), strong=found is not None and found.mean == best)


def spread_text(found: Spread | None) -> str:
    """``83.4 ± 1.2``, in percent; without the deviation for a single value."""
    if found is None:
        return MISSING
    text = percent(found.mean)
    return text if found.deviation is None else f"{text} ± {100 * found.deviation:.1f}"


def _accuracy_caption(results: Results, rule: SelectionRule, split: str) -> str:
    what = SPLIT_HEADINGS[split].lower()
    chosen = rule.when or f"by the rule “{rule.name}”"
    seeds = len(results.seeds_run)
    tail = (
        f"Mean ± standard deviation over {counted(seeds, 'seed')}."
        if seeds > 1
        else "One seed: small differences mean nothing."
    )
    return f"Accuracy in percent, {what} domains, {chosen}. Bold: best of a column. {tail}"


def rules_table(results: Results) -> Table:
    """Average test accuracy of every method under every selection rule."""
    rules = rules_for(result.run.evaluations for result in results.results)
    found = {rule.name: results.accuracies(rule) for rule in rules}
    spreads = {
        method: [
            average_over_columns(found[rule.name].get(method, {}), results.columns)
            for rule in rules
        ]
        for method in results.methods
    }
    best = _best(spreads.values())
    rows = [
        [Cell(spelled(method)), *(_spread_cell(s, b) for s, b in zip(row, best))]
        for method, row in spreads.items()
    ]
    caption = (
        "Average held-out test accuracy in percent. The columns differ in which model "
        "counts, and their headings say how it was chosen. The test domains never choose."
    )
    heads = [
        Column("Method", numeric=False),
        *(Column(rule.name) for rule in rules),
    ]
    return Table(heads, rows, caption)


def margin_table(results: Results, rule: SelectionRule = FINAL) -> Table | None:
    """Every method's margin over the best other one, and its mean rank; None for one method."""
    accuracies = results.accuracies(rule)
    if len(accuracies) < 2:
        return None
    places = ranks(accuracies)
    rows = []
    for method in accuracies:
        other = best_other(method, accuracies)
        margin = paired_margin(accuracies[method], accuracies[other]) if other else None
        if other is None or margin is None:
            continue
        mean_rank = spread(places[method].values())
        cells = [
            Cell(spelled(method)),
            Cell(spelled(other)),
            Cell(points(margin.mean), strong=margin.decided),
            Cell(interval_text(margin)),
            Cell(number(margin.pairs)),
            Cell(f"{mean_rank.mean:.2f}" if mean_rank else MISSING),
        ]
        rows.append(cells)
    heads = [
        Column("Method", numeric=False),
        Column("Best other method", numeric=False),
        Column("Margin", "points"),
        Column("95 % interval", "points"),
        Column("Pairs"),
        Column("Mean rank"),
    ]
    caption = (
        f"Test accuracy {rule.when} minus that of the best other method, paired by "
        "scenario and seed. The interval is Student's t over the pairs; bold where it excludes "
        "zero. None is claimed below three pairs, or where all differences are equal. The best "
        "other method was picked by these same numbers, which favours it a little."
    )
    return Table(heads, rows, caption)


def points(difference: float | None) -> str:
    """A difference of accuracies as ``+1.3`` points."""
    if difference is None or not math.isfinite(difference):
        return MISSING
    return f"{100 * difference:+.1f}"


def interval_text(margin: Margin | None) -> str:
    """``-0.4 to +2.1``, or why none is claimed."""
    if margin is None:
        return MISSING
    if margin.low is None:
        return f"none: {margin.why_no_interval}"
    return f"{points(margin.low)} to {points(margin.high)}"


def paper_table(results: Results | KeptTable, split: str, missing: str = MISSING) -> Table | None:
    """Our accuracies beside a paper's, by its rule; None where it has none for the split.

    Args:
        results: the comparison.
        split: which images.
        missing: what stands for a cell of ours that is not there.
    """
    published = (results.paper or {}).get("values", {}).get(split, {})
    if not published:
        return None
    name = (results.paper or {}).get("rule", FINAL.name)
    rule = SELECTION_RULES.find(name)
    ours = results.accuracies(rule, split)
    printed = (results.paper or {}).get("average", {}).get(split, {})
    rows = []
    for method in dict.fromkeys([*results.methods, *published]):
        theirs: Mapping[str, float | None] = published.get(method, {})
        own = ours.get(method, {})
        cells = [
            Cell(_beside(_of_column(own, column), theirs.get(column), missing))
            for column in results.columns
        ]
        if len(results.columns) > 1:
            average = average_over_columns(own, results.columns)
            whole = set(theirs) <= set(results.columns)  # a printed average is of all its columns
            mean = _paper_mean(theirs, results.columns)
            stated = printed.get(method, mean) if whole else mean
            mark = mark_of(stated, theirs, results.columns)
            cells.append(Cell(_beside(average, stated, missing) + mark))
        rows.append([Cell(spelled(method)), *cells])
    heads = [Column("Method", numeric=False)]
    heads += [Column(readable(column), "ours / paper") for column in results.columns]
    if len(results.columns) > 1:
        heads.append(Column("Average", "ours / paper"))
    source = (results.paper or {}).get("source", "the paper")
    caption = (
        f"{SPLIT_HEADINGS[split]} accuracy in percent ({rule.name.lower()}): ours / {source}. An "
        "asterisk marks a printed average that is not the mean of its printed row; the mean "
        "follows it."
    )
    return Table(heads, rows, caption)


def _beside(ours: Spread | None, theirs: float | None, missing: str) -> str:
    own = missing if ours is None else spread_text(ours)
    return f"{own} / {MISSING if theirs is None else f'{theirs:.2f}'}"


def _paper_mean(theirs: Mapping[str, float | None], columns: Sequence[str]) -> float | None:
    """The mean of a published row; of rows that are not whole, none."""
    values = [theirs.get(column) for column in columns]
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def mark_of(
    stated: float | None, theirs: Mapping[str, float | None], columns: Sequence[str]
) -> str:
    """An asterisk and the mean of a printed row where the printed average is another number."""
    mean = _paper_mean(theirs, columns)
    if stated is None or mean is None or abs(stated - mean) <= PRINTED_TOLERANCE:
        return ""
    return f" * ({mean:.2f})"
