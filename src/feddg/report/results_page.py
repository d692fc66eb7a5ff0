"""Markdown pages about published results, made from results files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from feddg.comparison.results import RISING, Results, TuningFile
from feddg.comparison.statistics import Accuracies, Key, margins
from feddg.diagnostics import Diagnostic
from feddg.errors import RunError
from feddg.records import ID_TEST, SPLITS, TEST, VAL
from feddg.report.blocks import Cell, Table, column, write_file
from feddg.report.tables import (
    MARK,
    MEANING,
    MethodColumn,
    about_tuning,
    accuracy_columns,
    budget_table,
    budget_words,
    by_method,
    margin_table,
    margin_text,
    mark,
    paper_table,
    to_markdown,
    tuning_table,
)
from feddg.report.text import spelled
from feddg.runs.diagnostics import CONSTANT_ANSWER, STILL_RISING
from feddg.runs.reading import BEST_IN_DOMAIN, EMA_MEAN, FINAL, SWA_MEAN, SelectionRule
from feddg.storage import read_text
from feddg.text import MISSING, counted, percent, readable

BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"
"""Everything between these marks of a page is generated from a results file."""
SEARCH = "<!-- search -->"
"""A page with this mark shows validation domains and one rule."""
NOT_RUN = "not run"
BOLD = "bold: more than chance, corrected for the number of methods (Holm)"
REFERENCE = "fedavg"


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
    write_file(page, remade(before, results))


def remade(page: str, results: Results, tuning: TuningFile | None = None) -> str:
    """Returns the page with its tables generated again.

    Args:
        page: Markdown with the two marks, in their order.
        results: the results in the cells of a plan, or of a file only.
        tuning: the trials of each method, if there were any.

    Raises:
        RunError: a mark is missing.
    """
    if results.plan is not None:
        made = planned_tables(results, tuning)
    else:
        made = search_table(results) if SEARCH in page else tables(results)
    return between_marks(page, made)


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


def _together(coverage: str, *parts: str) -> str:
    """Joins parts of a page, with the explanation of marks after the first, if needed."""
    others = [part.strip() for part in parts if part]
    meaning = [MEANING] if any(MARK in part for part in others) else []
    return "\n\n".join([coverage, *meaning, *others])


def _with_caption(caption: str, table: Table | None) -> str:
    return f"{caption}\n\n{to_markdown(table)}" if table is not None else ""


def _about_rows(results: Results) -> Iterator[Diagnostic]:
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


def _machines(results: Results) -> str:
    return "; ".join(sorted({row.machine for row in results.rows if row.machine}))


def _fluctuation_column(results: Results, heading: str, weights: str) -> MethodColumn:
    """Returns the column of a method's round-to-round fluctuation, mean over its runs."""
    return column(heading, lambda m: percent(results.mean(m, f"fluctuation_{weights}")))


def _marked(results: Results, rules: Sequence[SelectionRule], method: str) -> str:
    """Returns a method's name, marked if its model is no better than a constant by one rule."""
    found = [results.no_better_than_constant(rule).get(method, set()) for rule in rules]
    return spelled(method) + mark(set().union(*found), results.columns)


# With a plan: its table, the paper's numbers beside ours, and every cell that is not run says so.


def planned_tables(results: Results, tuning: TuningFile | None = None) -> str:
    """Returns all tables of a plan's results, as Markdown.

    Args:
        results: results in the plan's cells.
        tuning: the trials of each method, if there were any.
    """
    every, results = results, results.at_largest
    parts = [_by_budget(every)]
    if results.rows:
        rules = (FINAL, SWA_MEAN, BEST_IN_DOMAIN)
        parts += [_planned_accuracy(results, rule) for rule in rules]
        parts += [_planned_margins(results, rule) for rule in rules[:2]]
    parts += _beside_the_paper(results)
    if tuning is not None:
        parts += [*about_tuning(tuning), to_markdown(tuning_table(tuning))]
    if results.differences:
        differences = "\n".join(f"- {one}" for one in results.differences)
        parts.append(f"How this differs from the paper's setting:\n\n{differences}")
    return _together(_planned_coverage(every), *parts)


def _by_budget(results: Results) -> str:
    """Returns every method at every budget; empty without budgets."""
    caption = f"**By budget.** The tables below: {budget_words(results).rstrip(': ')}."
    return _with_caption(caption, budget_table(results))


def cells_run(results: Results) -> str:
    """Returns how much of the plan has been run, such as ``12 of 84``."""
    return f"{len(results.rows)} of {len(results.planned)}"


def _planned_coverage(results: Results) -> str:
    lines = [f"**{cells_run(results)} cells are run.**"]
    if results.rows:
        seeds = ", ".join(map(str, sorted(results.seeds_run)))
        lines.append(f"Seeds: {seeds}. Machines: {_machines(results) or 'not recorded'}.")
    other = len(results.rows) - results.exact
    if other:
        lines.append(
            f"{counted(other, 'cell')} ran with another experiment than the plan's to the letter: "
            "flags were added, or the plan was another one then."
        )
    if results.strangers:
        verb = "belongs" if results.strangers == 1 else "belong"
        lines.append(
            f"{counted(results.strangers, 'row')} of the file {verb} to no cell: left out."
        )
    return "\n".join([*lines, *map(str, _about_rows(results))])


def _planned_accuracy(results: Results, rule: SelectionRule) -> str:
    """Returns accuracy by column under one rule; cells with missing seeds are marked."""
    columns = accuracy_columns(results, rule, missing=NOT_RUN, published=True)
    columns.append(_fluctuation_column(results, "Movement", "last"))
    caption = (
        f"**{rule.name}.** Accuracy on the unseen domain {rule.when}, percent, mean ± standard "
        "deviation over seeds. Movement: mean change of the last weights between neighbouring "
        "evaluated rounds of the second half."
    )
    return _with_caption(caption, by_method(results.methods, columns))


def _planned_margins(results: Results, rule: SelectionRule) -> str:
    """Returns every method against FedAvg, or the best other one without; empty for one method."""
    caption = f"**Margins, {rule.name.lower()}.** Over the cells that both have."
    base = REFERENCE if REFERENCE in results.accuracies(rule) else ""
    named = partial(_marked, results, [rule])
    return _with_caption(caption, margin_table(results, rule, base, named))


def _beside_the_paper(results: Results) -> list[str]:
    if results.paper is None:
        return []
    made = [paper_table(results, split, missing=NOT_RUN) for split in SPLITS]
    parts = [to_markdown(one) for one in made if one is not None]
    if not parts:
        parts = [f"{results.paper['source']} prints no numbers that could stand beside these."]
    return [*parts, "\n".join(f"- {note}" for note in results.paper.get("notes", ()))]


# Without a plan: what the file has, methods ranked, and what the mean of the last rounds explains.


def tables(results: Results) -> str:
    """Returns the tables of a results file as Markdown."""
    if not results.rows:
        return "No run has ended yet."
    every, results = results, results.at_largest
    parts = [_by_budget(every), _accuracy(results), _by_column(results)]
    if len(results.methods) > 1:
        parts += [_margins(results), _explained(results)]
    return _together(_coverage(results), *parts, _costs(results))


def _coverage(results: Results) -> str:
    rows = {method: results.of(method) for method in results.methods}
    most = max(len({row.seed for row in own}) for own in rows.values())
    columns = len(results.columns)
    thin = [f"{spelled(m)} {len(own)}" for m, own in rows.items() if len(own) < most * columns]
    lines = [
        f"{counted(len(results.rows), 'run')}: {counted(len(rows), 'method')}, "
        f"{counted(columns, 'column')}, up to {counted(most, 'seed')}.",
        f"Machines: {_machines(results)}.",
    ]
    if thin:
        lines.append(f"Not all cells are run yet ({most * columns} a method): {', '.join(thin)}.")
    return "\n".join([*lines, *map(str, _about_rows(results))])


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
        _fluctuation_column(results, "fluctuation, last", "last"),
        _fluctuation_column(results, "fluctuation, SWA", "swa"),
        *average("in-domain test, SWA", SWA_MEAN, ID_TEST),
    ]
    caption = (
        "Accuracy on the unseen domain, average over the columns, percent, mean ± standard "
        "deviation over the seeds that have every column. *SWA minus final* is paired by column "
        "and seed, with its 95 % interval over domains. *Fluctuation*: mean change between "
        "neighbouring rounds of the second half."
    )
    return _with_caption(caption, by_method(_ranked(results), columns))


def _by_column(results: Results) -> str:
    rule = _ranking_rule(results)
    groups = {readable(name): [name] for name in results.columns}
    columns = accuracy_columns(results, rule, groups=groups, published=True)
    return _with_caption(f"By column, {rule.name.lower()}:", by_method(_ranked(results), columns))


def _margins(results: Results) -> str:
    best, *others = _ranked(results)
    found = {rule: results.accuracies(rule) for rule in (FINAL, SWA_MEAN, EMA_MEAN)}
    columns = [
        _margin_column(rule.name.lower(), dict.fromkeys(others, own.get(best, {})), own, results)
        for rule, own in found.items()
        if own
    ]
    named = partial(_marked, results, (FINAL, SWA_MEAN))
    caption = (
        f"{named(best)} minus each other method, paired by column and seed, with the 95 % interval "
        f"over domains; {BOLD}:"
    )
    return _with_caption(caption, by_method(others, columns, named=named))


def _explained(results: Results) -> str:
    """Returns how much of each method's lead over FedAvg the SWA weights explain."""
    final, swa = results.accuracies(FINAL), results.accuracies(SWA_MEAN)
    named = partial(_marked, results, (FINAL, SWA_MEAN))
    name = named(REFERENCE)
    if REFERENCE not in final:
        return f"Without {name} nobody's lead can be explained."
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
    return _with_caption(caption, by_method(methods, columns, named=named))


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
    return _with_caption(caption, by_method(_ranked(results), columns))


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


# A search: validation domains only.


def search_table(results: Results) -> str:
    """Returns a search's table: held-out validation after the final round, as Markdown."""
    found = results.accuracies(FINAL, VAL)
    groups: dict[str, Sequence[str]] = {
        f"tested on {readable(name)}": [name] for name in results.columns
    }
    groups["average"] = results.columns
    columns = accuracy_columns(results, FINAL, VAL, groups, published=True)

    def rank(method: str) -> tuple[int, float]:
        """Sorts methods with missing columns last, since their means are not comparable."""
        values = found[method]
        lacks = len(results.columns) - len({name for name, _ in values})
        return lacks, -sum(values.values()) / len(values)

    return to_markdown(by_method(sorted(found, key=rank), columns)).strip()
