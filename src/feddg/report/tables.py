"""Tables of a comparison, its conclusion in words, and tables as Markdown, CSV and LaTeX."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from feddg.comparison.plan import DATA
from feddg.comparison.results import Results, about_budgets, about_method, about_provenance
from feddg.comparison.statistics import (
    LEAST,
    Accuracies,
    Interval,
    Margin,
    Spread,
    average_over_columns,
)
from feddg.comparison.tuning import TuningFile
from feddg.diagnostics import Diagnostic, gravest_first, note, warning
from feddg.errors import first_names
from feddg.records import TEST, as_cell, as_csv
from feddg.report.blocks import Block, Cell, Column, Fold, Page, Prose, Section, Table
from feddg.report.text import (
    AGGREGATE_WORDS,
    capital,
    metric_title,
    points,
    sentence,
    spelled,
    split_heading,
    table_from,
)
from feddg.runs.diagnostics import EARLY, IN_WORDS, MAJORITY, OF_SETTINGS, STILL_RISING, UNSTEADY
from feddg.runs.idle import DEAL_OUT, ONE_DOMAIN
from feddg.runs.table import FINAL, SELECTION_RULES, SelectionRule
from feddg.settings import grouped
from feddg.text import (
    MISSING,
    SPACE,
    THIN_SPACE,
    counted,
    listed,
    percent,
    percent_sign,
    readable,
    short,
)

MARK = " †"
"""Marks a number or a method if one of its models is no better than the majority class."""
MEANING = (
    f"{MARK.strip()} In at least one run the model is {IN_WORDS[MAJORITY]}: by images or by the "
    "mean over classes, the difference is within chance. Such a number says nothing about a method."
)
MethodColumn = tuple[Column, Mapping[str, Cell | str]]
"""A column, and what it has for each method by label; a dash for those it lacks."""
SEEN_FROM = 0.03
"""A difference that a table should be able to show: where it cannot, it says so."""
MOST_DOMAINS = 6
"""With more domains, a table shows how far their differences spread."""
ADVICE = {
    STILL_RISING: "Train longer.",
    EARLY: "Part of a difference may come from the missing rounds; averages of models and falling "
    "learning rates follow the plan, too. Plan as many rounds as the privacy budget pays for.",
    UNSTEADY: "Average the last rounds (--averaging swa), or lower the learning rate.",
    ONE_DOMAIN: DEAL_OUT,
}


def by_method(
    methods: Iterable[str],
    columns: Sequence[MethodColumn],
    caption: str = "",
    named: Callable[[str], str] = spelled,
) -> Table:
    """Returns a table with a row for each method.

    Args:
        methods: their labels.
        columns: the columns after the method's name.
        caption: the table's caption.
        named: how a label is shown.
    """
    rows = [
        [named(method), *(own.get(method, MISSING) for _, own in columns)] for method in methods
    ]
    cells = [[one if isinstance(one, Cell) else Cell(one) for one in row] for row in rows]
    heads = [Column("Method", numeric=False), *(column for column, _ in columns)]
    return Table(heads, cells, caption)


def accuracy_columns(
    results: Results,
    rule: SelectionRule,
    split: str = TEST,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> list[MethodColumn]:
    """Accuracy of each method under a rule, averaged over columns of the table.

    Args:
        results: whose.
        rule: how a run's round is chosen.
        split: which images.
        groups: by heading, what is averaged over; a seed counts when it has all of them. Each
            column by itself and their average, if None.
    """
    values = results.values(rule, split=split)
    is_fit = results.no_method_fit is None
    made: list[MethodColumn] = []
    for heading, columns in (column_groups(results) if groups is None else groups).items():
        spreads = {method: average_over_columns(own, columns) for method, own in values.items()}
        best = max((one.mean for one in spreads.values() if one), default=None)
        cells = {
            method: Cell(spread_text(one), strong=is_fit and one is not None and one.mean == best)
            for method, one in spreads.items()
        }
        made.append((Column(heading), cells))
    return made


def column_groups(results: Results, axis: str | None = None) -> dict[str, Sequence[str]]:
    """The columns by heading: each one or each value of an axis, and the average if several."""
    groups = results.columns_by(axis) if axis else {column: [column] for column in results.columns}
    named: dict[str, Sequence[str]] = {readable(name): group for name, group in groups.items()}
    whole = "All domains" if axis == DATA else "Average"  # of data sets with unlike numbers of them
    return named | ({whole: results.columns} if len(groups) > 1 else {})


def accuracy_table(
    results: Results,
    rule: SelectionRule,
    split: str = TEST,
    axis: str | None = None,
    *,
    brief: bool = False,
) -> Table:
    """Accuracy of every method under one selection rule, by column and on average.

    Args:
        results: the comparison.
        rule: how a run's round is chosen.
        split: which images.
        axis: one column for each value of this axis, averaged over the other axes.
        brief: whether to show accuracies only.
    """
    accuracies = results.values(rule, split=split)
    methods, seeds = list(accuracies), {row.seed for row in results.rows}
    columns = accuracy_columns(results, rule, split, column_groups(results, axis))

    beside = (
        ("balanced_accuracy", "Balanced", "average"),
        ("largest_class_share", "Largest class", "of the images"),
    )
    for metric, heading, below in () if brief else beside:
        if means := results.values(rule, metric, split):
            columns.append((Column(heading, below), mean_percents(results, means, rule, split)))
    caption = sentence(
        "accuracy_caption",
        split=split_heading(split).lower(),
        chosen=rule.when or f"by the rule “{rule.title}”",
        bold=results.no_method_fit is None,
        seeds=len(seeds),
        some=any(len(one) < len(results.columns) * len(seeds) for one in accuracies.values()),
        averaged=bool(axis),
    )

    def named(method: str) -> str:
        warnings = method_warnings(results, method)
        return f"{spelled(method)} ({warnings})" if warnings else spelled(method)

    return by_method(methods, columns, caption, named)


def mean_percents(
    results: Results, shares: Mapping[str, Accuracies], rule: SelectionRule, split: str = TEST
) -> dict[str, Cell | str]:
    """The mean of each method's shares over the columns that any method has, in percent.

    As long as a column is not measured there is none, as there is none of accuracies.
    """
    measured = {column for own in results.values(rule, split=split).values() for column, _ in own}
    columns = list(dict.fromkeys(column for own in shares.values() for column, _ in own))
    columns += [column for column in results.columns if column not in measured]
    means = {method: average_over_columns(own, columns) for method, own in shares.items()}
    return {method: percent(one.mean if one else None) for method, one in means.items()}


def method_warnings(results: Results, method: str) -> str:
    """The warnings about a method, for parentheses after its name; empty if there are none.

    If no method is fit to use, a general statement already covers all.
    """
    diagnostics = about_method(results, method) if results.no_method_fit is None else ()
    warnings = [(code, where) for code, severity, where in diagnostics if severity == "warning"]
    return "; ".join(f"{code.replace('-', ' ')}{where}" for code, where in warnings)


def spread_text(found: Spread | None) -> str:
    """``83.4 ± 1.2``, in percent; without the deviation for a single value."""
    if found is None:
        return MISSING
    text = percent(found.mean)
    return text if found.deviation is None else f"{text} ± {100 * found.deviation:.1f}"


def rules_table(results: Results) -> Table:
    """Average test accuracy of every method under every selection rule."""
    columns = [
        made
        for rule in SELECTION_RULES.values()
        if results.values(rule)
        for made in accuracy_columns(results, rule, groups={rule.title: results.columns})
    ]
    return by_method(results.methods, columns, sentence("rules_caption"))


def budget_table(results: Results) -> Table | None:
    """Average accuracy of every method at every budget; None without budgets."""
    rule, columns = results.default_rule, list[MethodColumn]()
    for budget in results.budgets:
        part = results.at(budget)
        columns += accuracy_columns(part, rule, groups={f"{short(budget)} images": part.columns})
    caption = sentence("budget_caption", chosen=rule.when or rule.title)
    return by_method(results.methods, columns, caption) if columns else None


def budget_words(results: Results) -> str:
    """The start of a sentence about the largest budget; empty without budgets."""
    return f"{short(results.budgets[-1])} images seen in training: " if results.budgets else ""


def main_tables(every: Results, *, brief: bool = False) -> list[Table]:
    """How a comparison came out: by budget, and at the largest one accuracies and margins.

    Args:
        every: the comparison at all its budgets.
        brief: whether to leave out what stands beside accuracies and margins.
    """
    results, rule = every.at_largest, every.at_largest.default_rule
    tables = [budget_table(every)]
    if results.rows:
        axis = DATA if brief and results.collections else None
        tables.append(accuracy_table(results, rule, axis=axis, brief=brief))
        tables.append(margin_table(results, rule, brief=brief))
    return [table for table in tables if table is not None]


def margin_table(
    results: Results,
    rule: SelectionRule = FINAL,
    base: str = "",
    named: Callable[[str], str] = spelled,
    *,
    brief: bool = False,
) -> Table | None:
    """Every method's margin over one method or over the best other one; None for one method.

    Args:
        results: the comparison.
        rule: how a run's round is chosen.
        base: the method that all are set beside; each one's best other method if empty.
        named: how a label is shown.
        brief: whether to leave out what the intervals were computed from.
    """
    accuracies = results.values(rule)
    if len(accuracies) < 2:
        return None
    margins, claims = results.margins(rule, base), results.no_method_fit is None
    columns: list[MethodColumn] = []

    def add(column: Column, shown: Callable[[Margin], Cell | str]) -> None:
        columns.append((column, {method: shown(one) for method, one in margins.items()}))

    if not base:
        add(Column("Best other method", numeric=False), lambda one: named(one.other))
    head, note = f"Minus {spelled(base)}" if base else "Margin", "95 % interval"
    add(Column(head, "points"), lambda one: Cell(points(one.mean), strong=one.decided and claims))
    add(Column("Over domains", note), lambda one: interval_text(one.domains, "domain"))
    if results.collections:
        add(Column("Over data sets", note), over_data_sets)
    add(Column("Over seeds", note), lambda one: interval_text(one.seeds, "seed"))
    names = domains_of(results, margins.values())
    if len(names) > 1:
        note = " / ".join(map(readable, names)) if len(names) <= MOST_DOMAINS else ""
        add(Column("By domain", note), lambda one: by_domain(one, names))
    if not brief:
        add(Column("Detectable", "points"), detectable_text)
        add(Column("Domains"), lambda one: str(one.domains.count))
        add(Column("Seeds"), lambda one: str(one.seeds.count))
    lags = bool(base) or len(accuracies) == 2
    about = {"when": rule.when, "base": base, "brief": brief, "few": LEAST, "lags": lags}
    caption = sentence("margins_caption", **about)
    # Of a pair the lead, which may be decided, and not the lag behind the best of several.
    order = sorted(margins.items(), key=lambda item: item[1].decided)
    pairs = {frozenset((name, margin.other)): margin for name, margin in order}
    return by_method(accuracies, columns, f"{caption} {unseen(pairs.values())}".strip(), named)


def domains_of(results: Results, margins: Iterable[Margin]) -> list[str]:
    """Returns the domains of some margins, in the order of the table's columns."""
    known = {name for margin in margins for name in margin.by_domain}
    return [name for name in dict.fromkeys(results.domains.values()) if name in known]


def by_domain(margin: Margin, names: Sequence[str]) -> Cell:
    """``+1.3 / -0.2 / +4.0``: the difference on each of these domains, or how they spread if many.

    On a page, many can be unfolded.
    """
    differences = [points(margin.by_domain.get(name)) for name in names]
    if len(names) <= MOST_DOMAINS:
        return Cell(" / ".join(differences))
    values = margin.by_domain.values()
    above = f"{sum(value > 0 for value in values)} of {len(values)} above 0"
    items = tuple(f"{readable(name)} {text}" for name, text in zip(names, differences))
    return Cell(f"{points(min(values))} to {points(max(values))}, {above}", items=items)


def over_data_sets(margin: Margin) -> str:
    """``+1.2 (-0.4 to +2.8)``: the mean over data sets, each the mean of its domains."""
    interval = margin.collections
    return f"{points(interval.mean)} ({interval_text(interval, 'data set')})"


def unseen(margins: Iterable[Margin]) -> str:
    """Says where a true lead of three points would rather not be claimed; empty if it would."""
    needed = [m.detectable for m in margins if not m.decided and m.detectable is not None]
    blind = [f"{100 * lead:.1f}" for lead in sorted(needed) if lead > SEEN_FROM]
    seen = f"{100 * SEEN_FROM:.0f}"
    return sentence("unseen", points=seen, leads=blind, compared=len(needed)) if blind else ""


def detectable_text(margin: Margin) -> str:
    """The true difference that would be claimed half the time, in points."""
    return MISSING if margin.detectable is None else f"{100 * margin.detectable:.1f}"


def interval_text(interval: Interval, unit: str) -> str:
    """``-0.4 to +2.1``, or why none is claimed.

    Args:
        interval: the interval.
        unit: what its values are of: ``domain`` or ``seed``.
    """
    if interval.reach is not None:
        return f"{points(interval.low)} to {points(interval.high)}"
    if interval.count >= LEAST:
        return f"equal on all {unit}s"
    if interval.count == 0:
        return f"no {unit} in common"
    return f"only {interval.count} {unit}s" if interval.count > 1 else f"one {unit} only"


def tuning_section(tuning: TuningFile | None) -> Section | None:
    """The section about tuning, or None if nothing was tuned."""
    if tuning is None or not tuning.tried:
        return None
    texts = [*about_tuning(tuning), *([MEANING] if any(r.constant for r in tuning.tried) else [])]
    return Section("What was tuned", [*map(Prose, texts), tuning_table(tuning)])


def about_tuning(tuning: TuningFile) -> list[str]:
    """How the values were chosen, and notes about the choices, one paragraph each."""
    metrics = {
        f"{metric_title(row.metric)} ({AGGREGATE_WORDS.get(row.over, row.over)})"
        for row in tuning.tried
    }
    about = {"seeds": len(tuning.seeds), "rounds": tuning.rounds, "rule": tuning.rule.lower()}
    how = sentence("tuning", metrics=sorted(metrics), **about)
    return [text for text in (how, " ".join(map(str, tuning.diagnostics()))) if text]


def tuning_table(tuning: TuningFile) -> Table:
    """Every combination tried, with its result."""
    return table_from("tried", rows=tuning.tried, mark=MARK)


def conclusion(results: Results) -> Diagnostic:
    """Which method is best, if any, and whether these runs distinguish it from the next one."""
    if results.no_method_fit is not None:
        return results.no_method_fit
    question = f"{results.question} " if results.question else ""
    if results.leader is None:
        return note("no-result", f"{question}No method has a result in every column yet.")
    best, average, margin = results.leader

    def but(method: str) -> str:
        warnings = method_warnings(results, method)
        return f" (but {warnings})" if warnings else ""

    over = "" if len(results.columns) == 1 else f", averaged over {len(results.columns)} columns"
    text = (
        f"{question}{spelled(best)} recognised {percent_sign(average)} of the "
        f"held-out test images {results.default_rule.when}{over}{but(best)}"
    )
    if margin is None:
        return note("one-method", f"{text}.")
    other = margin.other
    more = "more" if margin.mean >= 0 else "less"
    text += f", {percent(abs(margin.mean))} points {more} than {spelled(other)}{but(other)}"
    known = [
        f"{interval_text(interval, unit)} {over}"
        for interval, unit, over in (
            (margin.domains, "domain", "over domains"),
            (margin.collections, "data set", "over data sets, each the mean of its domains"),
            (margin.seeds, "seed", "over seeds on these domains"),
        )
        if interval.reach is not None
    ]
    if known:
        text += f" (95 % {'intervals' if len(known) > 1 else 'interval'} {', '.join(known)})"
    code = "decided" if margin.decided and margin.mean > 0 else "not-decided"
    verdict = sentence("lead", margin=margin, detectable=detectable_text(margin), few=LEAST)
    return note(code, f"{text}. {verdict}")


def lead_of(every: Results) -> str:
    """The conclusion at the largest budget, with that budget before it if there are several."""
    return f"{budget_words(every)}{conclusion(every.at_largest)}"


def about_results(every: Results) -> list[Diagnostic]:
    """Returns the caveats about the numbers at the largest budget, the gravest first."""
    results = every.at_largest
    findings = grouped(
        ((code, severity), (where, spelled(method)))
        for method in results.methods
        for code, severity, where in about_method(results, method)
        # Where no method is fit, that says the gravest of all of them.
        if results.no_method_fit is None or severity != "warning" or code in OF_SETTINGS
    )
    diagnostics = [*results.notices]
    for (code, severity), places in findings.items():
        where = ", ".join(f"{listed(names)}{runs}" for runs, names in grouped(places).items())
        text = f"{capital(IN_WORDS.get(code, code.replace('-', ' ')))}: {where}."
        diagnostics.append(Diagnostic(code, severity, text, ADVICE.get(code, "")))
    if shared := [group for group in results.shared if len(group) > 1]:
        groups = "; ".join(" / ".join(map(readable, group)) for group in shared)
        text = f"Counted as one domain, since they share test images: {groups}."
        diagnostics.append(note("shared-test-images", text))
    if pairs := [f"{spelled(first)} / {spelled(one)}" for one, first in results.twins.items()]:
        text = f"The same runs under two labels, compared once: {'; '.join(pairs)}."
        diagnostics.append(note("same-runs", text))
    diagnostics += about_provenance(results)
    diagnostics += about_budgets(every)
    if len({row.seed for row in results.rows}) == 1 and len(results.methods) > 1:
        text = "One seed only: what another would give is not known."
        diagnostics.append(note("one-seed", text, "Run more seeds."))
    return [*_left_out(results), *gravest_first(diagnostics)]


def model_sentence(results: Results) -> str:
    """Which kind of model a comparison's numbers belong to, and why."""
    rules, rule = {run.default_rule for run in results.runs()}, results.default_rule
    differ = rules != {rule}
    return sentence("kind_of_model", title=rule.title.lower(), runs=bool(rules), differ=differ)


def _left_out(results: Results) -> Iterator[Diagnostic]:
    """Reports incomplete runs, which the numbers leave out, and runs without a folder here."""
    if results.open:
        names = first_names([f"{name} ({state})" for name, state in results.open], 5)
        text = f"Incomplete, and left out: {names}."
        yield warning("runs-unfinished", text)
    if count := len({row.of_run for row in results.rows if row.run is None}):
        text = (
            f"{counted(count, 'run')} known from a results file alone, without a folder here: "
            "tables of accuracy have them; curves, costs and further metrics do not."
        )
        yield note("runs-from-a-file", text)


def page_tables(page: Page) -> Iterator[tuple[str, Table]]:
    """Yields every table of a page with the name of its place, such as ``accuracy``."""
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
        elif isinstance(block, Fold):
            yield from _tables(block.blocks, f"{words} {block.title}")


def _texts(
    table: Table, escaped: Callable[[str], str], strong: str
) -> tuple[list[str], list[list[str]]]:
    """Headings and fields, escaped; bold ones formatted with ``strong``."""
    heads = [escaped(_heading(column)) for column in table.columns]
    texts = [[(escaped(cell.text), cell.strong) for cell in row] for row in table.rows]
    return heads, [[strong % text if bold else text for text, bold in row] for row in texts]


def _heading(column: Column) -> str:
    return f"{column.heading} ({column.note})" if column.note else column.heading


def to_markdown(table: Table) -> str:
    """Returns a table as GitHub Markdown, with its caption below."""
    heads, rows = _texts(table, as_markdown, "**%s**")
    rule = ["---:" if column.numeric else ":---" for column in table.columns]
    lines = ["| " + " | ".join(row) + " |" for row in (heads, rule, *rows)]
    caption = f"\n\n{table.caption}" if table.caption else ""
    return "\n".join(lines) + caption + "\n"


def as_markdown(text: str) -> str:
    """Returns text as one line of Markdown that shows it as it is."""
    return re.sub(r"([\\|*_`<>])", r"\\\1", text.replace("\n", " "))


def to_csv(table: Table) -> str:
    """Returns a table as CSV, with texts as shown."""
    plain = str.maketrans({SPACE: " ", THIN_SPACE: ""})
    rows = [[cell.text.translate(plain) for cell in row] for row in table.rows]
    shown = [["" if text == MISSING else text for text in row] for row in rows]
    return as_csv([map(_heading, table.columns), *shown])


_LATEX = str.maketrans(
    {letter: f"\\{letter}" for letter in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"±": r"$\pm$", "×": r"$\times$", MISSING: "--", SPACE: "~", THIN_SPACE: r"\,", "\n": " "}
)


def to_latex(table: Table) -> str:
    """Returns a table as a LaTeX ``table`` environment; needs the package ``booktabs``."""
    from pandas import DataFrame

    heads, rows = _texts(table, lambda text: text.translate(_LATEX), r"\textbf{%s}")
    form = "".join("r" if column.numeric else "l" for column in table.columns)
    shown = DataFrame(rows, columns=heads).style.hide(axis="index")
    caption = table.caption.translate(_LATEX) or None
    return shown.to_latex(
        column_format=form, position_float="centering", hrules=True, caption=caption
    )


def margins_csv(results: Results) -> str:
    """Returns every method's margin over the best other one as CSV, with both intervals."""
    numbers = results.margin_frame().map(as_cell)
    return str(numbers.to_csv(index=False, lineterminator="\n"))
