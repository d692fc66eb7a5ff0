"""Tables and conclusion of a comparison, and tables as Markdown, CSV and LaTeX."""

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from feddg.comparison.results import (
    Results,
    TriedRow,
    TuningFile,
    about_margin,
    about_method,
)
from feddg.comparison.statistics import (
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
from feddg.methods.base import METHODS, idea_of
from feddg.records import TEST, as_cell
from feddg.report.blocks import (
    Block,
    Cell,
    Column,
    Fold,
    MadeColumn,
    Page,
    Prose,
    Section,
    Table,
    table_of,
    text_column,
)
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
from feddg.runs.reading import FINAL, SELECTION_RULES, SelectionRule

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


# Tables of a comparison: a row for each method, and columns that are made by method.


BESIDE = (
    ("Balanced", "mean of all runs", "balanced_accuracy"),
    ("Largest class", "of the images", "largest_class_share"),
)
"""Columns beside an accuracy: heading, note and metric."""
PRINTED_TOLERANCE = 0.051
"""Printed averages may differ from their row's mean by rounding, in points."""
MethodColumn = MadeColumn[str]


def by_method(
    methods: Iterable[str],
    columns: Sequence[MethodColumn],
    caption: str = "",
    named: Callable[[str], str] = spelled,
) -> Table:
    """Returns a table with a row for each method.

    Args:
        methods: their labels.
        columns: what stands behind a method's name.
        caption: of the table.
        named: how a label is shown.
    """
    return table_of(methods, [(text_column("Method"), named), *columns], caption)


def accuracy_column(
    results: Results,
    heading: str,
    rule: SelectionRule,
    columns: Sequence[str],
    *,
    split: str = TEST,
    missing: str = MISSING,
    published: bool = False,
) -> MethodColumn:
    """Accuracy of each method under a rule, averaged over columns of the table.

    Args:
        results: whose.
        heading: the column's.
        rule: how a run's round is chosen.
        columns: what is averaged over; a seed counts when it has all of them.
        split: which images.
        missing: what stands where there is none.
        published: whether to say how many seeds of a plan lack, and to mark models that are no
            better than a constant one on test domains; otherwise the best is bold.
    """
    found = results.accuracies(rule, split)
    spreads = {method: average_over_columns(own, columns) for method, own in found.items()}
    best = max((one.mean for one in spreads.values() if one), default=None)
    constant = results.no_better_than_constant(rule) if published and split == TEST else {}

    def made(method: str) -> Cell:
        one = spreads.get(method)
        if one is None:
            return Cell(missing)
        if not published:
            return Cell(spread_text(one), strong=one.mean == best)
        seeds = len(results.seeds)
        few = f" ({one.count} of {seeds})" if results.planned and one.count < seeds else ""
        return Cell(f"{spread_text(one)}{few}{mark(constant.get(method, ()), columns)}")

    return Column(heading), made


def accuracy_columns(
    results: Results,
    rule: SelectionRule,
    split: str = TEST,
    axis: str | None = None,
    missing: str = MISSING,
    published: bool = False,
) -> list[MethodColumn]:
    """One for each column of the table, or each value of an axis, and their average."""
    groups = results.columns_by(axis) if axis else {column: [column] for column in results.columns}
    if len(groups) > 1:
        groups["Average"] = results.columns
    return [
        accuracy_column(
            results,
            readable(heading),
            rule,
            columns,
            split=split,
            missing=missing,
            published=published,
        )
        for heading, columns in groups.items()
    ]


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
    methods = list(results.accuracies(rule, split))
    columns = accuracy_columns(results, rule, split, axis)
    for heading, note, metric in BESIDE:
        means = {m: results.mean(m, metric, rule.name, split, "domain_mean") for m in methods}
        if any(value is not None for value in means.values()):
            columns.append((Column(heading, note), partial(_percent_of, means)))
    caption = _accuracy_caption(results, rule, split)
    if axis:
        caption += " Each column is an average over everything else that varies."
    return by_method(methods, columns, caption, lambda method: marked(results, method))


def _percent_of(means: Mapping[str, float | None], method: str) -> str:
    return percent(means[method])


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
    columns = [
        accuracy_column(results, rule.name, rule, results.columns)
        for rule in SELECTION_RULES.values()
        if not rule.optional or results.accuracies(rule)
    ]
    caption = (
        "Average held-out test accuracy in percent. The columns differ in which model "
        "counts, and their headings say how it was chosen. The test domains never choose."
    )
    return by_method(results.methods, columns, caption)


def margin_table(
    results: Results,
    rule: SelectionRule = FINAL,
    base: str | None = None,
    named: Callable[[str], str] = spelled,
) -> Table | None:
    """Every method's margin over the best other one, and its mean rank; None for one method.

    Args:
        results: the comparison.
        rule: how a run's round is chosen.
        base: a method whose margins stand there in place of ranks.
        named: how a label is shown.
    """
    found = results.accuracies(rule)
    if len(found) < 2:
        return None
    best = {method: best_other(method, found) for method in found}
    over = {
        m: paired_margin(found[m], found[other]) if other else None for m, other in best.items()
    }
    bases = found.get(base or "", {})
    above = {m: paired_margin(own, bases) if m != base else None for m, own in found.items()}
    places = ranks(found)

    def difference(margin: Margin | None) -> Cell:
        return Cell(
            points(margin.mean if margin else None),
            strong=bool(margin and margin.decided) and not base,
        )

    columns: list[MethodColumn] = []
    if base is not None:
        columns += [
            (Column(f"Minus {spelled(base)}", "points"), lambda m: difference(above[m])),
            (Column("95 % interval"), lambda m: interval_text(above[m])),
        ]
    columns += [
        (text_column("Best other method"), lambda m: named(best[m] or "") or MISSING),
        (Column("Minus it" if base else "Margin", "points"), lambda m: difference(over[m])),
        (Column("95 % interval", "" if base else "points"), lambda m: interval_text(over[m])),
    ]
    if base is None:
        columns += [
            (Column("Pairs"), lambda m: number(one.pairs if (one := over[m]) else None)),
            (Column("Mean rank"), lambda m: _mean_rank(places[m].values())),
        ]
    caption = (
        f"Test accuracy {rule.when} minus that of the best other method, paired by "
        "scenario and seed. The interval is Student's t over the pairs; bold where it excludes "
        "zero. None is claimed below three pairs, or where all differences are equal. The best "
        "other method was picked by these same numbers, which favours it a little."
    )
    return by_method(found, columns, "" if base else caption, named)


def _mean_rank(places: Iterable[float]) -> str:
    found = spread(places)
    return f"{found.mean:.2f}" if found else MISSING


def margin_text(margin: Margin | None) -> str:
    """``+1.3 (-0.4 to +2.1)``."""
    return MISSING if margin is None else f"{points(margin.mean)} ({interval_text(margin)})"


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


def paper_table(results: Results, split: str, missing: str = MISSING) -> Table | None:
    """Our accuracies beside a paper's, by its rule; None where it has none for the split.

    Args:
        results: the comparison.
        split: which images.
        missing: what stands for a cell of ours that is not there.
    """
    paper = results.paper or {}
    published: Mapping[str, Mapping[str, float | None]] = paper.get("values", {}).get(split, {})
    if not published:
        return None
    rule = SELECTION_RULES.find(paper.get("rule", FINAL.name))
    ours, printed = results.accuracies(rule, split), paper.get("average", {}).get(split, {})

    def beside(method: str, columns: Sequence[str]) -> str:
        theirs = published.get(method, {})
        own = average_over_columns(ours.get(method, {}), columns)
        if len(columns) == 1:
            return _beside(own, theirs.get(columns[0]), missing)
        whole = set(theirs) <= set(columns)  # a printed average is of all its columns
        mean = _paper_mean(theirs, columns)
        stated = printed.get(method, mean) if whole else mean
        return _beside(own, stated, missing) + mark_of(stated, theirs, columns)

    groups = {column: [column] for column in results.columns}
    if len(groups) > 1:
        groups["Average"] = results.columns
    columns: list[MethodColumn] = [
        (Column(readable(heading), "ours / paper"), partial(beside, columns=group))
        for heading, group in groups.items()
    ]
    source = paper.get("source", "the paper")
    caption = (
        f"{SPLIT_HEADINGS[split]} accuracy in percent ({rule.name.lower()}): ours / {source}. An "
        "asterisk marks a printed average that is not the mean of its printed row; the mean "
        "follows it."
    )
    return by_method(dict.fromkeys([*results.methods, *published]), columns, caption)


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
    return table_of(
        tuning.tried,
        [
            (text_column("Method"), lambda row: Cell(spelled(row.method), strong=row.picked)),
            (text_column("Held out"), lambda row: readable(row.held_out)),
            (
                text_column("Values"),
                lambda row: ", ".join(f"{k} {v}" for k, v in row.values.items()),
            ),
            (Column("In-domain validation", "%"), _score),
            (Column("Trials"), lambda row: str(row.trials)),
            (text_column(""), lambda row: Cell("picked" if row.picked else "", strong=row.picked)),
        ],
    )


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
    if len({run.served.name for run in results.runs()}) > 1:
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
    """Says which runs the numbers are without: not complete ones; which have no folder here."""
    if results.open:
        shown = [f"{name} ({state})" for name, state in results.open[:5]]
        more = f" and {len(results.open) - 5} more" if len(results.open) > 5 else ""
        names = ", ".join(shown) if more else listed(shown)
        yield Diagnostic(
            "runs-unfinished", "warning", f"Not complete, and left out: {names}{more}."
        )
    if count := len({row.folder or row.key for row in results.rows if row.run is None}):
        yield Diagnostic(
            "runs-from-a-file",
            "note",
            f"{counted(count, 'run')} known from a results file alone, without a folder here: "
            "tables of accuracy have them; curves, costs and further metrics do not.",
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
    numbers = results.frame()
    numbers = numbers[numbers["over"] != ""].drop(
        columns=["experiment", "machine", "version", "hashes"]
    )
    of_accuracy = (numbers["metric"] == "accuracy") & (numbers["over"] == "domain_mean")
    numbers["name"] = (numbers["metric"] + "_" + numbers["over"]).mask(of_accuracy, "accuracy")
    names = list(dict.fromkeys(["accuracy", *numbers["name"]]))
    keys = [name for name in numbers if name not in ("metric", "over", "value", "name")]
    wide = numbers.pivot(index=keys, columns="name", values="value").reindex(columns=names)
    wide = wide.reset_index().map(as_cell)
    return str(wide.rename(columns=as_cell).to_csv(index=False, lineterminator="\n"))
