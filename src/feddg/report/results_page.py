"""Pages in Markdown about published results, made from CSV files."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from feddg.comparison.plan import Plan
from feddg.comparison.results import KeptResults, KeptTable, TuningFile
from feddg.comparison.statistics import (
    Accuracies,
    Key,
    Margin,
    average_over_columns,
    best_other,
    paired_margin,
    spread,
)
from feddg.errors import RunError
from feddg.records import ID_TEST, SPLITS, VAL
from feddg.report.blocks import Cell, Column, Table
from feddg.report.tables import (
    about_kept,
    about_tuning,
    interval_text,
    mark,
    paper_table,
    points,
    spread_text,
    to_markdown,
    tuning_table,
    what_was_tuned,
    with_meaning,
)
from feddg.report.text import MISSING, counted, percent, readable, spelled
from feddg.runs.reading import BEST_IN_DOMAIN, EMA_MEAN, FINAL, TAIL_MEAN, SelectionRule
from feddg.storage import read_text, replace_text, why

NOT_RUN = "not run"
PLANNED_RULES = (FINAL, TAIL_MEAN, BEST_IN_DOMAIN)
REFERENCE = "fedavg"


def planned_tables(table: KeptTable, tuning: TuningFile | None = None) -> str:
    """Returns everything that a plan's kept results say, as Markdown.

    Args:
        table: the results in the plan's cells.
        tuning: what was tried for each method before, if anything.
    """
    parts = [_planned_coverage(table)]
    if table.results:
        parts += [_planned_accuracy(table, rule) for rule in PLANNED_RULES]
        parts += [part for rule in PLANNED_RULES[:2] if (part := _planned_margins(table, rule))]
    parts += _beside_the_paper(table)
    if tuning is not None:
        parts += [what_was_tuned(tuning), about_tuning(tuning), to_markdown(tuning_table(tuning))]
    parts = with_meaning([*parts, _differences(table)])
    return "\n\n".join(part.strip() for part in parts if part)


def cells_run(table: KeptTable) -> str:
    """How much of the plan is run: ``12 of 84``."""
    return f"{len(table.results)} of {len(table.cells)}"


def _planned_coverage(table: KeptTable) -> str:
    lines = [f"**{cells_run(table)} cells are run.**"]
    if table.results:
        seeds = ", ".join(map(str, sorted({result.seed for result in table.results})))
        machines = "; ".join(sorted({r.machine for r in table.results if r.machine}))
        lines.append(f"Seeds: {seeds}. Machines: {machines or 'not recorded'}.")
    other = len(table.results) - table.exact
    if other:
        lines.append(
            f"{counted(other, 'cell')} ran with another experiment than the plan's to the letter: "
            "flags were added, or the plan was another one then."
        )
    if table.strangers:
        verb = "belongs" if table.strangers == 1 else "belong"
        lines.append(f"{counted(table.strangers, 'row')} of the file {verb} to no cell: left out.")
    lines += map(str, about_kept(table))
    return "\n".join(lines)


def _planned_accuracy(table: KeptTable, rule: SelectionRule) -> str:
    """Accuracy by column under one rule; a cell of which not every seed is run says so."""
    found = table.accuracies(rule)
    assert table.plan is not None
    constant = table.no_better_than_constant(rule)
    rows = []
    for method in table.methods:
        own, alarms = found.get(method, {}), constant.get(method, set())
        parts = [[column] for column in table.columns]
        if len(table.columns) > 1:
            parts.append(table.columns)
        values = [_of_seeds(own, part, table) for part in parts]
        cells = [
            Cell(text if text == NOT_RUN else text + mark(alarms, part))
            for part, text in zip(parts, values)
        ]
        cells.append(Cell(_movement(table, method)))
        rows.append([Cell(spelled(method)), *cells])
    heads = [Column("Method", numeric=False), *(Column(readable(c)) for c in table.columns)]
    if len(table.columns) > 1:
        heads.append(Column("Average"))
    heads.append(Column("Movement"))
    caption = (
        f"**{rule.name}.** Accuracy on the unseen domain {rule.when}, percent, mean ± standard "
        "deviation over seeds. Movement: mean change of the last weights between neighbouring "
        "evaluated rounds of the second half."
    )
    return f"{caption}\n\n{to_markdown(Table(heads, rows))}"


def _of_seeds(own: Accuracies, columns: list[str], table: KeptTable) -> str:
    """Mean and deviation over the seeds that have all these columns, and how many lack."""
    assert table.plan is not None
    seeds = [s for s in table.plan.seeds if all((column, s) in own for column in columns)]
    if not seeds:
        return NOT_RUN
    means = [sum(own[column, seed] for column in columns) / len(columns) for seed in seeds]
    few = (
        "" if len(seeds) == len(table.plan.seeds) else f" ({len(seeds)} of {len(table.plan.seeds)})"
    )
    return spread_text(spread(means)) + few


def _movement(table: KeptTable, method: str) -> str:
    rows: Iterable[float | None] = (
        result.numbers.get("movement_last") for result in table.by_method().get(method, [])
    )
    found = spread(value for value in rows if value is not None)
    return MISSING if found is None else percent(found.mean)


def _planned_margins(table: KeptTable, rule: SelectionRule) -> str:
    """Every method against FedAvg and against the best other one, paired; none for one method."""
    found, constant = table.accuracies(rule), table.no_better_than_constant(rule)
    if len(found) < 2:
        return ""
    named = {m: spelled(m) + mark(constant.get(m, ()), table.columns) for m in found}
    rows = []
    for method, own in found.items():
        base = None if method == REFERENCE else found.get(REFERENCE)
        above = paired_margin(own, base) if base else None
        other = best_other(method, found)
        margin = paired_margin(own, found[other]) if other else None
        cells = [points(above.mean) if above else MISSING, interval_text(above)]
        cells += [named[other] if other else MISSING]
        cells += [points(margin.mean) if margin else MISSING, interval_text(margin)]
        rows.append([Cell(named[method]), *map(Cell, cells)])
    heads = [
        Column("Method", numeric=False),
        Column("Minus FedAvg", "points"),
        Column("95 % interval"),
        Column("Best other method", numeric=False),
        Column("Minus it", "points"),
        Column("95 % interval"),
    ]
    caption = (
        f"**Margins, {rule.name.lower()}.** Paired by column and seed, over the cells that both "
        "have; Student's t interval of the mean difference. The best other method was picked by "
        "these same numbers, which favours it a little."
    )
    return f"{caption}\n\n{to_markdown(Table(heads, rows))}"


def _beside_the_paper(table: KeptTable) -> list[str]:
    made = [paper_table(table, split, missing=NOT_RUN) for split in SPLITS]
    notes = [
        f"- {note}" for note in (table.plan.paper.notes if table.plan and table.plan.paper else ())
    ]
    parts = [to_markdown(one) for one in made if one is not None]
    if not parts and table.plan is not None and table.plan.paper is not None:
        parts = [f"{table.plan.paper.source} prints no numbers that could stand beside these."]
    return [*parts, "\n".join(notes)]


def _differences(table: KeptTable) -> str:
    said = table.plan.differences if table.plan is not None else ()
    if not said:
        return ""
    return "How this differs from the paper's setting:\n\n" + "\n".join(f"- {one}" for one in said)


# Pages in Markdown about kept results: everything between two marks is made from a CSV file.
#
# What stands around the marks is written by hand and kept. With a plan the page is that of its
# table: the paper's numbers beside ours, and every cell that is not run says so.


BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"
SEARCH = "<!-- search -->"
"""A page that says this shows validation domains, and one rule."""
BASELINE = "fedavg"
RULES = (FINAL, TAIL_MEAN, EMA_MEAN, BEST_IN_DOMAIN)


def remade(
    page: str, kept: KeptResults, plan: Plan | None = None, tuning: TuningFile | None = None
) -> str:
    """Returns the page with its tables made anew.

    Args:
        page: Markdown with the two marks, in their order.
        kept: the results.
        plan: the plan that they were run for; tables of the file alone without one.
        tuning: what was tried for each method first, if anything.

    Raises:
        RunError: a mark is missing, or the file has two results for a cell.
    """
    if plan is not None:
        made = planned_tables(KeptTable.of(kept, plan), tuning)
    elif SEARCH in page:
        made = search_table(kept)
    else:
        made = tables(kept)
    return between_marks(page, made)


def write_kept_page(results: Path, page: Path) -> None:
    """Writes kept results as tables in Markdown, between the marks of a page or into a new one.

    Args:
        results: the CSV file of ``feddg compare --kept``.
        page: what is outside its marks is kept.

    Raises:
        RunError: the results are damaged, the page is there and has no marks, or cannot be written.
    """
    kept = KeptResults.read(results)
    new = f"# {results.stem}\n\n{BEGIN}\n{END}\n"
    before = read_text(page, errors="strict") if page.exists() else new
    if BEGIN not in before or END not in before:
        raise RunError(
            f"{page} is there already and is not overwritten: it has no marks {BEGIN} and {END} "
            "for the tables. Put them in, or name another file with --out"
        )
    text = remade(before, kept)
    try:
        replace_text(page, text)
    except OSError as error:
        raise RunError(f"Cannot write {page}: {why(error)}.") from None


def between_marks(page: str, made: str, begin: str = BEGIN, end: str = END) -> str:
    """Returns the page with something else between two of its marks.

    Raises:
        RunError: a mark is missing.
    """
    before, begun, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise RunError(f"the page needs the marks {begin} and {end}, in this order")
    return f"{before}{begin}\n\n{made}\n\n{end}{after}"


def tables(kept: KeptResults) -> str:
    """Returns the tables of the campaign as Markdown."""
    table = KeptTable.of(kept)
    if not table.results:
        return "No run has ended yet."
    parts = [_coverage(table), _accuracy(table), _by_column(table)]
    if len(table.by_method()) > 1:
        parts += [_margins(table), _explained(table)]
    return "\n\n".join(with_meaning([*parts, _costs(table)]))


def _coverage(table: KeptTable) -> str:
    seeds = {method: sorted({r.seed for r in rows}) for method, rows in table.by_method().items()}
    most = max(map(len, seeds.values()))
    columns = len(table.columns)
    thin = [
        f"{spelled(method)} {len(rows)}"
        for method, rows in table.by_method().items()
        if len(rows) < most * columns
    ]
    lines = [
        f"{counted(len(table.results), 'run')}: {counted(len(seeds), 'method')}, "
        f"{counted(columns, 'column')}, up to {counted(most, 'seed')}.",
        f"Machines: {'; '.join(sorted({r.machine for r in table.results}))}.",
    ]
    if thin:
        lines.append(f"Not all cells are run yet ({most * columns} a method): {', '.join(thin)}.")
    lines += map(str, about_kept(table))
    return "\n".join(lines)


def _accuracy(table: KeptTable) -> str:
    columns = table.columns
    by_rule = {rule: table.accuracies(rule) for rule in RULES}
    constant = {rule: table.no_better_than_constant(rule) for rule in RULES}
    inside = table.accuracies(TAIL_MEAN, ID_TEST)
    rows = []
    for method in _ranked(table):
        means = [
            spread_text(average_over_columns(by_rule[r].get(method, {}), columns))
            + mark(constant[r].get(method, ()), columns)
            for r in RULES
        ]
        gain = paired_margin(by_rule[TAIL_MEAN].get(method, {}), by_rule[FINAL].get(method, {}))
        moved = [
            _mean(r.numbers.get(f"movement_{weights}") for r in table.by_method()[method])
            for weights in ("last", "tail")
        ]
        rows.append(
            [
                spelled(method),
                *means,
                _margin(gain),
                *(percent(value) for value in moved),
                spread_text(average_over_columns(inside.get(method, {}), columns)),
            ]
        )
    heads = [
        "method",
        *(rule.name.lower() for rule in RULES),
        "tail minus final",
        "movement, last",
        "movement, tail",
        "in-domain test, tail",
    ]
    return (
        "Accuracy on the unseen domain, average over the columns, percent, mean ± standard "
        "deviation over the seeds that have every column. *Tail minus final* is paired by column "
        "and seed, with its 95 % interval. *Movement*: mean change between neighbouring rounds of "
        "the second half.\n\n" + _markdown(heads, rows)
    )


def _by_column(table: KeptTable) -> str:
    rule = _ranking_rule(table)
    columns, found = table.columns, table.accuracies(rule)
    constant = table.no_better_than_constant(rule)
    rows = [
        [
            spelled(method),
            *(
                spread_text(spread(v for (c, _), v in found.get(method, {}).items() if c == column))
                + mark(constant.get(method, ()), [column])
                for column in columns
            ),
        ]
        for method in _ranked(table)
    ]
    made = _markdown(["method", *columns], rows)
    return f"By column, {rule.name.lower()}:\n\n{made}"


def _margins(table: KeptTable) -> str:
    rows = []
    best, *others = _ranked(table)
    rules = [rule for rule in (FINAL, TAIL_MEAN, EMA_MEAN) if table.accuracies(rule)]
    for method in others:
        cells = []
        for rule in rules:
            found = table.accuracies(rule)
            cells.append(_margin(paired_margin(found.get(best, {}), found.get(method, {}))))
        rows.append([_marked(table, method), *cells])
    made = _markdown(["method", *(rule.name.lower() for rule in rules)], rows)
    return f"{_marked(table, best)} minus each other method, paired by column and seed:\n\n{made}"


def _explained(table: KeptTable) -> str:
    """How much of each method's lead over plain averaging the mean of the tail explains."""
    final, tail = table.accuracies(FINAL), table.accuracies(TAIL_MEAN)
    name = _marked(table, BASELINE)
    if BASELINE not in final:
        return f"Without {name} nobody's lead can be explained."
    rows = [
        [
            _marked(table, method),
            _margin(paired_margin(final.get(method, {}), final[BASELINE])),
            _margin(paired_margin(final.get(method, {}), tail.get(BASELINE, {}))),
            _margin(paired_margin(tail.get(method, {}), tail.get(BASELINE, {}))),
        ]
        for method in _ranked(table)
        if method != BASELINE
    ]
    heads = ["method", "both final", f"{name} with its tail", "both with their tails"]
    return (
        f"Lead over {name}, paired by column and seed: as tables have it, with both models of the "
        f"last round; what is left of it when only {name} serves its tail; and when both do.\n\n"
        + _markdown(heads, rows)
    )


def _costs(table: KeptTable) -> str:
    rows = []
    found = table.by_method()
    base = found.get(BASELINE, next(iter(found.values())))
    for method in _ranked(table):
        shares = [
            _ratio(
                _mean(r.numbers.get(name) for r in found[method]),
                _mean(r.numbers.get(name) for r in base),
            )
            for name in ("bytes", "seconds")
        ]
        rows.append([spelled(method), *shares])
    return (
        "What a round costs, as a multiple of FedAvg's. Seconds are of processes that shared their "
        "machine with others.\n\n" + _markdown(["method", "bytes", "seconds"], rows)
    )


def _ranked(table: KeptTable) -> list[str]:
    """The methods, best first; those without a number last."""
    found = table.accuracies(_ranking_rule(table))
    common = set[Key].intersection(*map(set, found.values())) if found else set()

    def mean(values: Accuracies) -> float:
        return sum(values[key] for key in common) / max(1, len(common))

    return sorted(
        table.by_method(), key=lambda method: (method not in found, -mean(found.get(method, {})))
    )


def _ranking_rule(table: KeptTable) -> SelectionRule:
    """The mean of the tail, or the final round where a method has no tail."""
    has_tails = table.accuracies(TAIL_MEAN).keys() == table.by_method().keys()
    return TAIL_MEAN if has_tails else FINAL


def _marked(table: KeptTable, method: str) -> str:
    """A method's name, marked where its last model or its tail is no better than a constant."""
    rules = (FINAL, TAIL_MEAN)
    found = [table.no_better_than_constant(rule).get(method, set()) for rule in rules]
    return spelled(method) + mark(set().union(*found), table.columns)


def _mean(values: Iterable[float | None]) -> float | None:
    known = spread(value for value in values if value is not None)
    return None if known is None else known.mean


def _ratio(ours: float | None, theirs: float | None) -> str:
    return f"{ours / theirs:.2f}" if ours is not None and theirs else MISSING


def _margin(found: Margin | None) -> str:
    return MISSING if found is None else f"{points(found.mean)} ({interval_text(found)})"


def search_table(kept: KeptResults) -> str:
    """Returns the table of a search: held-out validation after the final round, as Markdown."""
    table = KeptTable.of(kept)
    columns, found = table.columns, table.accuracies(FINAL, VAL)
    rows = [
        [
            spelled(method),
            *(
                spread_text(spread(v for (c, _), v in values.items() if c == column))
                for column in columns
            ),
            spread_text(average_over_columns(values, columns)),
        ]
        for method, values in sorted(found.items(), key=lambda item: _rank(item[1], columns))
    ]
    heads = ["candidate", *(f"tested on {c}" for c in columns), "average"]
    return _markdown(heads, rows)


def _rank(values: Accuracies, columns: Sequence[str]) -> tuple[int, float]:
    """Whoever lacks columns comes last: its mean is one of other columns."""
    lacks = len(columns) - len({column for column, _ in values})
    return lacks, -sum(values.values()) / len(values)


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (heads, *rows)]
    lines.insert(1, ["---"] * len(heads))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
