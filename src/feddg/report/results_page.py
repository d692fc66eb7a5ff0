"""Markdown pages about published results, made from results files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from feddg.comparison.results import RISING, Results
from feddg.comparison.statistics import Accuracies, Key, margins
from feddg.diagnostics import Diagnostic
from feddg.errors import RunError
from feddg.records import ID_TEST, TEST
from feddg.report.blocks import Cell, Table, column, write_file
from feddg.report.tables import (
    MARK,
    MEANING,
    MethodColumn,
    accuracy_columns,
    budget_table,
    budget_words,
    by_method,
    margin_text,
    mark,
    to_markdown,
)
from feddg.report.text import spelled
from feddg.runs.diagnostics import CONSTANT_ANSWER, STILL_RISING
from feddg.runs.reading import BEST_IN_DOMAIN, EMA_MEAN, FINAL, SWA_MEAN, SelectionRule
from feddg.storage import read_text
from feddg.text import MISSING, counted, percent, readable

BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"
"""Everything between these marks of a page is generated from a results file."""
REFERENCE = "fedavg"
BOLD = "bold: more than chance, corrected for the number of methods (Holm)"


def write_results_page(file: Path, page: Path) -> None:
    """Writes a results file as Markdown tables, between the marks of a page or to a new page.

    Args:
        file: the results file.
        page: the page; text outside its marks is kept.

    Raises:
        RunError: the results are damaged, the page exists but has no marks, or cannot be written.
    """
    results = Results.read(file)
    new = f"# {file.stem}\n\n{BEGIN}\n{END}\n"
    before = read_text(page, errors="strict") if page.exists() else new
    if BEGIN not in before or END not in before:
        raise RunError(
            f"{page} is there already and is not overwritten: it has no marks {BEGIN} and {END} "
            "for the tables. Put them in, or name another file with --out"
        )
    write_file(page, between_marks(before, tables(results)))


def between_marks(page: str, made: str, begin: str = BEGIN, end: str = END) -> str:
    """Returns the page with the text between two of its marks replaced.

    Raises:
        RunError: a mark is missing.
    """
    before, begun, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise RunError(f"the page needs the marks {begin} and {end}, in this order")
    return f"{before}{begin}\n\n{made}\n\n{end}{after}"


def together(coverage: str, *parts: str) -> str:
    """Joins parts of a page, with the explanation of marks after the first, if needed."""
    others = [part.strip() for part in parts if part]
    meaning = [MEANING] if any(MARK in part for part in others) else []
    return "\n\n".join([coverage, *meaning, *others])


def with_caption(caption: str, table: Table | None) -> str:
    """Returns a table as Markdown below its caption; empty without a table."""
    return f"{caption}\n\n{to_markdown(table)}" if table is not None else ""


def about_rows(results: Results) -> Iterator[Diagnostic]:
    """Yields notes on all runs: how many were still rising, or do not tell."""
    recorded = [value for own in results.values(RISING).values() for value in own.values()]
    rising = sum(value > 0 for value in recorded)
    if rising:
        total = len(recorded)
        text = f"In {counted(rising, 'run')} of {total} accuracy was still rising at the end."
        yield Diagnostic(STILL_RISING, "note", text, "Train longer.")
    silent = len(results.rows) - sum(map(len, results.values("constant", FINAL.name).values()))
    if silent:
        text = (
            f"Whether the model beats {CONSTANT_ANSWER} is not on record for "
            f"{counted(silent, 'run')} (an earlier version kept them)."
        )
        yield Diagnostic("majority-class-unknown", "note", text)


def machines(results: Results) -> str:
    """Returns the machines that the rows name."""
    return "; ".join(sorted({row.machine for row in results.rows if row.machine}))


def fluctuation_column(results: Results, heading: str, weights: str) -> MethodColumn:
    """Returns the column of a method's round-to-round fluctuation, mean over its runs."""
    return column(heading, lambda m: percent(results.mean(m, f"fluctuation_{weights}")))


def marked(results: Results, rules: Sequence[SelectionRule], method: str) -> str:
    """Returns a method's name, marked if its model is no better than a constant by one rule."""
    found = [results.no_better_than_constant(rule).get(method, set()) for rule in rules]
    return spelled(method) + mark(set().union(*found), results.columns)


def tables(results: Results) -> str:
    """Returns the tables of a results file as Markdown."""
    if not results.rows:
        return "No run has ended yet."
    every, results = results, results.at_largest
    parts = [by_budget(every), _accuracy(results), _by_column(results)]
    if len(results.methods) > 1:
        parts += [_margins(results), _explained(results)]
    return together(_coverage(results), *parts, _costs(results))


def _coverage(results: Results) -> str:
    rows = {method: results.of(method) for method in results.methods}
    most = max(len({row.seed for row in own}) for own in rows.values())
    columns = len(results.columns)
    thin = [f"{spelled(m)} {len(own)}" for m, own in rows.items() if len(own) < most * columns]
    lines = [
        f"{counted(len(results.rows), 'run')}: {counted(len(rows), 'method')}, "
        f"{counted(columns, 'column')}, up to {counted(most, 'seed')}.",
        f"Machines: {machines(results)}.",
    ]
    if thin:
        lines.append(f"Not all cells are run yet ({most * columns} a method): {', '.join(thin)}.")
    return "\n".join([*lines, *map(str, about_rows(results))])


def by_budget(results: Results) -> str:
    """Returns every method at every budget; empty without budgets."""
    caption = f"**By budget.** The tables below: {budget_words(results).rstrip(': ')}."
    return with_caption(caption, budget_table(results))


def _accuracy(results: Results) -> str:
    def average(heading: str, rule: SelectionRule, split: str = TEST) -> list[MethodColumn]:
        return accuracy_columns(results, rule, split, {heading: results.columns}, published=True)

    final, swa = results.accuracies(FINAL), results.accuracies(SWA_MEAN)
    columns = [
        *(
            one
            for rule in (FINAL, SWA_MEAN, EMA_MEAN, BEST_IN_DOMAIN)
            for one in average(rule.name.lower(), rule)
        ),
        _margin_column("SWA minus final", swa, final, results),
        fluctuation_column(results, "fluctuation, last", "last"),
        fluctuation_column(results, "fluctuation, SWA", "swa"),
        *average("in-domain test, SWA", SWA_MEAN, ID_TEST),
    ]
    caption = (
        "Accuracy on the unseen domain, average over the columns, percent, mean ± standard "
        "deviation over the seeds that have every column. *SWA minus final* is paired by column "
        "and seed, with its 95 % interval over domains. *Fluctuation*: mean change between "
        "neighbouring rounds of the second half."
    )
    return with_caption(caption, by_method(_ranked(results), columns))


def _by_column(results: Results) -> str:
    rule = _ranking_rule(results)
    groups = {readable(name): [name] for name in results.columns}
    columns = accuracy_columns(results, rule, groups=groups, published=True)
    return with_caption(f"By column, {rule.name.lower()}:", by_method(_ranked(results), columns))


def _margins(results: Results) -> str:
    best, *others = _ranked(results)
    found = {rule: results.accuracies(rule) for rule in (FINAL, SWA_MEAN, EMA_MEAN)}
    columns = [
        _margin_column(rule.name.lower(), dict.fromkeys(others, own.get(best, {})), own, results)
        for rule, own in found.items()
        if own
    ]
    named = partial(marked, results, (FINAL, SWA_MEAN))
    caption = (
        f"{named(best)} minus each other method, paired by column and seed, with the 95 % interval "
        f"over domains; {BOLD}:"
    )
    return with_caption(caption, by_method(others, columns, named=named))


def _explained(results: Results) -> str:
    """Returns how much of each method's lead over FedAvg the SWA weights explain."""
    final, swa = results.accuracies(FINAL), results.accuracies(SWA_MEAN)
    named = partial(marked, results, (FINAL, SWA_MEAN))
    name = named(REFERENCE)
    if REFERENCE not in final:
        return f"Without {name} no lead can be explained."
    methods = [method for method in _ranked(results) if method != REFERENCE]
    plain, averaged = (dict.fromkeys(methods, found.get(REFERENCE, {})) for found in (final, swa))
    columns = [
        _margin_column("both final", final, plain, results),
        _margin_column(f"{name} with its SWA", final, averaged, results),
        _margin_column("both with SWA", swa, averaged, results),
    ]
    caption = (
        f"Lead over {name}, likewise: as tables have it, with both models of the last round; what "
        f"is left of it when only {name} is averaged; and when both are."
    )
    return with_caption(caption, by_method(methods, columns, named=named))


def _margin_column(
    heading: str,
    ours: Mapping[str, Accuracies],
    theirs: Mapping[str, Accuracies],
    results: Results,
) -> MethodColumn:
    """Returns the column of a method's margin between ``ours`` and ``theirs``."""
    pairs = {m: (ours[m], theirs[m]) for m in results.methods if m in ours and m in theirs}
    found = margins(pairs, results.domains)

    def cell(method: str) -> Cell:
        one = found.get(method)
        return Cell(margin_text(one), strong=one is not None and one.decided)

    return column(heading, cell)


def _costs(results: Results) -> str:
    base = REFERENCE if REFERENCE in results.methods else results.methods[0]

    def times(name: str) -> Callable[[str], str]:
        theirs = results.mean(base, name)

        def cell(method: str) -> str:
            ours = results.mean(method, name)
            return f"{ours / theirs:.2f}" if ours is not None and theirs else MISSING

        return cell

    caption = (
        "What a round costs, as a multiple of FedAvg's. Seconds are of processes that shared their "
        "machine with others."
    )
    columns = [column(name, times(name)) for name in ("bytes", "seconds")]
    return with_caption(caption, by_method(_ranked(results), columns))


def _ranked(results: Results) -> list[str]:
    """Returns the methods, best first, those without results last."""
    found = results.accuracies(_ranking_rule(results))
    common = set[Key].intersection(*map(set, found.values())) if found else set()

    def mean(values: Accuracies) -> float:
        return sum(values[key] for key in common) / max(1, len(common))

    return sorted(results.methods, key=lambda m: (m not in found, -mean(found.get(m, {}))))


def _ranking_rule(results: Results) -> SelectionRule:
    """Returns the SWA rule, or the final round's if a method has no SWA."""
    has_tails = list(results.accuracies(SWA_MEAN)) == results.methods
    return SWA_MEAN if has_tails else FINAL
