"""Tables and verdicts of a comparison, and tables as Markdown, CSV and LaTeX."""

import csv
import io
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from feddg.comparison.results import (
    RISING,
    KeptTable,
    Results,
    TriedRow,
    TuningFile,
    about_margin,
    about_method,
    constant_name,
)
from feddg.comparison.statistics import (
    Accuracies,
    Key,
    Margin,
    Spread,
    average_over_columns,
    best_other,
    paired_margin,
    ranks,
    spread,
)
from feddg.diagnostics import Diagnostic, gravest_first
from feddg.evaluation.metrics import METRICS
from feddg.methods.base import METHODS, idea_of
from feddg.records import SPLITS, TEST, as_cell
from feddg.report.blocks import Block, Cell, Column, Fold, Page, Prose, Section, Table
from feddg.report.sections import SPLIT_HEADINGS
from feddg.report.text import (
    AGGREGATE_WORDS,
    MISSING,
    counted,
    listed,
    marked,
    method_warnings,
    metric_title,
    number,
    percent,
    percent_sign,
    readable,
    spelled,
)
from feddg.runs.diagnostics import STILL_RISING, split_accuracy
from feddg.runs.reading import AGGREGATES, FINAL, SELECTION_RULES, SelectionRule, rules_for

MARK = " †"
"""Stands behind a number, and a method, of which a model is no better than the majority class."""
MEANING = (
    f"{MARK.strip()} In at least one run the model is no better than always answering the most "
    "frequent class: by the share of images, or by the mean over classes, the difference is no "
    "more than chance explains. Such a number says nothing about a method."
)


def mark(places: Iterable[Key], columns: Iterable[str]) -> str:
    """Returns the mark if one of the places lies in one of the columns; nothing otherwise."""
    among = set(columns)
    return MARK if any(column in among for column, _ in places) else ""


def with_meaning(parts: Iterable[str]) -> list[str]:
    """Returns parts of a page, and behind the first what the marks mean where there are some."""
    first, *others = parts
    marked = any(MARK in part for part in others)
    return [first, MEANING, *others] if marked else [first, *others]


def about_kept(table: KeptTable) -> Iterator[Diagnostic]:
    """Yields what is to be known of all runs: how many were still rising, or do not tell."""
    told = [r.numbers[RISING] for r in table.results if RISING in r.numbers]
    rising = sum(value > 0 for value in told)
    if rising:
        text = f"In {counted(rising, 'run')} of {len(told)} accuracy was still rising at the end."
        yield Diagnostic(STILL_RISING, "note", text, "Train longer.")
    silent = sum(constant_name(FINAL) not in r.numbers for r in table.results)
    if silent:
        text = (
            "Whether the model beats always answering the most frequent class is not on record "
            f"for {counted(silent, 'run')} (an earlier version kept them)."
        )
        yield Diagnostic("majority-class-unknown", "note", text)


# Tables of a comparison.


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
        split_accuracy(result.run.evaluations, result.rounds[rule.name], split)
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


# What was tried for each method before the table was run, and what was picked.


def tuning_section(tuning: TuningFile | None) -> Section | None:
    """The section, or None where nothing was tried."""
    if tuning is None or not tuning.tried:
        return None
    said = [what_was_tuned(tuning), about_tuning(tuning)]
    if any(row.constant for row in tuning.tried):
        said.append(MEANING)
    prose = [Prose(text) for text in said if text]
    return Section("What was tuned", [*prose, tuning_table(tuning)])


def about_tuning(tuning: TuningFile) -> str:
    """What to know about the choices, in sentences; empty where there is nothing."""
    return " ".join(map(str, tuning.diagnostics()))


def what_was_tuned(tuning: TuningFile) -> str:
    """How the values were picked, in sentences."""
    rounds = f", {counted(tuning.rounds, 'round')} each" if tuning.rounds else ""
    return (
        "Before these runs, each of these combinations was tried, without the domains that are "
        f"held out ({counted(len(tuning.seeds), 'seed')}{rounds}). For each method and each "
        "hold-out, by its own trials, that was picked which did best on in-domain validation: "
        f"{_measured(tuning)}, {tuning.rule.lower()}, mean over trials."
    )


def _measured(tuning: TuningFile) -> str:
    """What picked, in words; all of it where methods differ."""
    found = {
        f"{metric_title(row.metric)} ({AGGREGATE_WORDS.get(row.over, row.over)})"
        for row in tuning.tried
    }
    return " or ".join(sorted(found))


def tuning_table(tuning: TuningFile) -> Table:
    """Every combination that was tried, and what it reached."""
    columns = [
        Column("Method", numeric=False),
        Column("Held out", numeric=False),
        Column("Values", numeric=False),
        Column("In-domain validation", note="%"),
        Column("Trials"),
        Column("", numeric=False),
    ]
    return Table(columns, _rows(tuning.tried))


def _rows(tried: Sequence[TriedRow]) -> list[list[Cell]]:
    return [
        [
            Cell(spelled(row.method), strong=row.picked),
            Cell(readable(row.held_out)),
            Cell(", ".join(f"{name} {value}" for name, value in row.values.items())),
            Cell(_score(row)),
            Cell(str(row.trials)),
            Cell("picked" if row.picked else "", strong=row.picked),
        ]
        for row in tried
    ]


def _score(row: TriedRow) -> str:
    if row.score is None:
        return "no value"
    return percent(row.score) + (MARK if row.constant else "")


# What a comparison comes to, in words: which method is best, and what speaks against saying so.


def best_method(results: Results) -> str | None:
    """The method with the best average; None where none has every column."""
    averages = _averages(results)
    return max(averages, key=lambda method: averages[method], default=None)


def _averages(results: Results) -> dict[str, float]:
    return {
        method: average.mean
        for method, values in results.accuracies(results.served).items()
        if (average := average_over_columns(values, results.columns)) is not None
    }


def _margin_of(results: Results, best: str) -> tuple[str, Margin] | None:
    """The best other method, and the margin over it."""
    accuracies = results.accuracies(results.served)
    other = best_other(best, accuracies)
    margin = paired_margin(accuracies[best], accuracies[other]) if other else None
    return (other, margin) if other is not None and margin is not None else None


def about_best(results: Results) -> tuple[str, str] | None:
    """What the best method does, in its own words; None where none is best, or it has none.

    Returns:
        A heading, and the words: the idea, and how sure it is that the method is the best.
    """
    best = best_method(results)
    if best is None or best.lower() not in METHODS:
        return None
    idea = idea_of(METHODS.find(best.lower()))
    told = _margin_of(results, best)
    sure = (
        ""
        if is_decided(results) or told is None
        else (
            f" It has the best average here, but these runs do not tell it from {spelled(told[0])}."
        )
    )
    return (f"What {spelled(best)} does", f"{idea}{sure}") if idea else None


def is_decided(results: Results) -> bool:
    """Whether the best method is told from the next one."""
    best = best_method(results)
    found = _margin_of(results, best) if best is not None else None
    return found is not None and found[1].decided


def conclusion(results: Results) -> Diagnostic:
    """Which method is best, and whether these runs tell it from the next one."""
    question = f"{results.question} " if results.question else ""
    best = best_method(results)
    if best is None:
        text = f"{question}No method has a result in every column yet."
        return Diagnostic("no-result", "note", text)
    over = "" if len(results.columns) == 1 else f", averaged over {len(results.columns)} columns"
    text = (
        f"{question}{spelled(best)} recognised {percent_sign(_averages(results)[best])} of the "
        f"held-out test images {results.served.when}{over}{_but(results, best)}"
    )
    found = _margin_of(results, best)
    if found is None:
        return Diagnostic("one-method", "note", f"{text}.")
    other, margin = found
    text += f", {percent(margin.mean)} points more than {spelled(other)}{_but(results, other)}"
    if margin.low is None:
        text = f"{text}. No interval is claimed ({margin.why_no_interval}): nothing is decided."
        return Diagnostic("not-decided", "note", text)
    text = f"{text} (95 % interval {interval_text(margin)})."
    if margin.decided:
        text = f"{text} The difference is larger than chance between these runs explains."
        return Diagnostic("decided", "note", text)
    text = f"{text} These runs do not decide which of the two is better."
    return Diagnostic("not-decided", "note", text)


def _but(results: Results, method: str) -> str:
    """The warnings about a method, in parentheses after its number; empty without any."""
    warnings = method_warnings(results, method)
    return f" (but {warnings})" if warnings else ""


def about_results(results: Results) -> list[Diagnostic]:
    """Returns what must be known before trusting the numbers; the gravest first."""
    found = [
        replace(one, text=f"{spelled(method)}: {one.text}.")
        for method in results.methods
        for one in about_method(results, method)
    ]
    best = best_method(results)
    found += about_margin(results, best) if best is not None else ()
    if len({result.run.served.name for result in results.results}) > 1:
        found.append(
            Diagnostic(
                "models-differ",
                "note",
                "The runs serve different models (final round, means over rounds): the numbers are "
                "the final round's for all; the others are under “Which round counts”.",
            )
        )
    if len(results.seeds_run) == 1 and len(results.methods) > 1:
        found.append(
            Diagnostic(
                "one-seed",
                "note",
                "1 seed only: how much of a difference is chance cannot be told.",
                "Run more seeds.",
            )
        )
    return [*_left_out(results), *gravest_first(found)]


def _left_out(results: Results) -> Iterator[Diagnostic]:
    """Says which runs the numbers are without: not complete ones, and those without a folder."""
    if results.open:
        shown = [f"{name} ({state})" for name, state in results.open[:5]]
        more = f" and {len(results.open) - 5} more" if len(results.open) > 5 else ""
        names = ", ".join(shown) if more else listed(shown)
        yield Diagnostic(
            "runs-unfinished", "warning", f"Not complete, and left out: {names}{more}."
        )
    if left := results.elsewhere:
        names = listed(left[:3]) if len(left) <= 3 else f"{', '.join(left[:3])} and more"
        yield Diagnostic(
            "runs-elsewhere",
            "note",
            f"{counted(len(left), 'complete run')} left out, known from kept results alone, "
            f"without run folders here: {names}.",
            "`feddg report` with the file of kept results shows all of them.",
        )


# A page's tables as Markdown, CSV and LaTeX: the same cells, in other clothes.


_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "–": "--",
    "×": r"$\times$",
    "\N{NO-BREAK SPACE}": "~",
    "\N{NARROW NO-BREAK SPACE}": r"\,",
}


def page_tables(page: Page) -> Iterator[tuple[str, Table]]:
    """Yields every table of a page with a name that says where it stands: ``accuracy``."""
    seen: dict[str, int] = {}
    for section in page.sections:
        for words, table in _tables(section.blocks, section.title):
            name = re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")
            seen[name] = seen.get(name, 0) + 1
            yield (name if seen[name] == 1 else f"{name}_{seen[name]}"), table


def _tables(blocks: Sequence[Block], words: str) -> Iterator[tuple[str, Table]]:
    for block in blocks:
        if isinstance(block, Table):
            yield words, block
        elif isinstance(block, Fold | Section):
            yield from _tables(block.blocks, f"{words} {block.title}")


def to_markdown(table: Table) -> str:
    """Returns a table as GitHub Markdown, its caption below."""
    heads = [_markdown(_heading(column)) for column in table.columns]
    rule = ["---:" if column.numeric else ":---" for column in table.columns]
    rows = [
        [f"**{_markdown(cell.text)}**" if cell.strong else _markdown(cell.text) for cell in row]
        for row in table.rows
    ]
    lines = ["| " + " | ".join(row) + " |" for row in (heads, rule, *rows)]
    caption = f"\n\n{table.caption}" if table.caption else ""
    return "\n".join(lines) + caption + "\n"


def _markdown(text: str) -> str:
    return re.sub(r"([\\|*_`<>])", r"\\\1", text.replace("\n", " "))


def _heading(column: Column) -> str:
    return f"{column.heading} ({column.note})" if column.note else column.heading


def to_csv(table: Table) -> str:
    """Returns a table as CSV, texts as they are shown."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([as_cell(_heading(column)) for column in table.columns])
    writer.writerows([[_plain(cell) for cell in row] for row in table.rows])
    return out.getvalue()


def _plain(cell: Cell) -> str:
    text = cell.text.replace("\N{NO-BREAK SPACE}", " ").replace("\N{NARROW NO-BREAK SPACE}", "")
    return "" if text == "–" else str(as_cell(text))


def to_latex(table: Table) -> str:
    """Returns a table as a LaTeX ``table`` environment; needs the package ``booktabs``."""
    form = "".join("r" if column.numeric else "l" for column in table.columns)
    heads = " & ".join(_latex(_heading(column)) for column in table.columns)
    rows = [" & ".join(map(_latex_cell, row)) + r" \\" for row in table.rows]
    caption = [rf"\caption{{{_latex(table.caption)}}}"] if table.caption else []
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\begin{{tabular}}{{{form}}}",
        r"\toprule",
        heads + r" \\",
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
        *caption,
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex_cell(cell: Cell) -> str:
    text = _latex(cell.text)
    return rf"\textbf{{{text}}}" if cell.strong else text


def _latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text.replace("\n", " "))


def results_csv(results: Results) -> str:
    """Returns every number of a comparison as CSV: one row per run, selection rule and split."""
    axes = list(dict.fromkeys(a for r in results.results for a in r.place.conditions))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heads = ["method", "column", "held_out_test", *axes, "seed", "rule", "round", "split"]
    numbers = _numbers(results)
    writer.writerow(map(as_cell, [*heads, "accuracy", "folder", *map("_".join, numbers)]))
    for result in results.results:
        place = result.place
        conditions = [place.conditions.get(axis, "") for axis in axes]
        first = [place.method, results.column(place), place.scenario, *conditions, place.seed]
        for rule in SELECTION_RULES.values():
            round_ = result.rounds[rule.name]
            for split in SPLITS:
                accuracy = result.accuracy(rule, split)
                if accuracy is not None:
                    last = [rule.name, round_, split, repr(accuracy), result.run.folder.name]
                    found = result.run.evaluations.of(rule.weights)
                    more = [found.value(round_, split, *number) for number in numbers]
                    told = ["" if value is None else repr(value) for value in more]
                    writer.writerow(map(as_cell, [*first, *last, *told]))
    return out.getvalue()


def _numbers(results: Results) -> list[tuple[str, str]]:
    """Every metric of the runs with every aggregate over domains, as columns."""
    runs = [result.run.evaluations for result in results.results]
    known = {name for run in runs for split in SPLITS for name in run.metrics(split)}
    metrics = [name for name in METRICS if name in known] + sorted(known - METRICS.keys())
    return list(itertools.product(metrics, AGGREGATES))
