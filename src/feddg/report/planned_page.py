"""The tables of a plan from kept results, in Markdown: what is run and what is not, and a paper."""

from collections.abc import Iterable

from feddg.comparison.results import KeptTable, TuningFile
from feddg.comparison.statistics import Accuracies, best_other, paired_margin, spread
from feddg.records import SPLITS
from feddg.report.blocks import Cell, Column, Table
from feddg.report.formats import to_markdown
from feddg.report.kept_findings import mark, sentences, with_meaning
from feddg.report.many_tables import interval_text, paper_table, points, spread_text
from feddg.report.tuning_section import remarks_of, tuning_table, what_was_tuned
from feddg.report.wording import MISSING, counted, percent, readable, spelled
from feddg.runs.reading import BEST_IN_DOMAIN, FINAL, TAIL_MEAN, SelectionRule

NOT_RUN = "not run"
RULES = (FINAL, TAIL_MEAN, BEST_IN_DOMAIN)
REFERENCE = "fedavg"


def planned_tables(table: KeptTable, tuning: TuningFile | None = None) -> str:
    """Returns everything that a plan's kept results say, as Markdown.

    Args:
        table: the results in the plan's cells.
        tuning: what was tried for each method before, if anything.
    """
    parts = [_coverage(table)]
    if table.results:
        parts += [_accuracy(table, rule) for rule in RULES]
        parts += [part for rule in RULES[:2] if (part := _margins(table, rule))]
    parts += _beside_the_paper(table)
    if tuning is not None:
        parts += [what_was_tuned(tuning), remarks_of(tuning), to_markdown(tuning_table(tuning))]
    parts = with_meaning([*parts, _differences(table)])
    return "\n\n".join(part.strip() for part in parts if part)


def cells_run(table: KeptTable) -> str:
    """How much of the plan is run: ``12 of 84``."""
    return f"{len(table.results)} of {len(table.cells)}"


def _coverage(table: KeptTable) -> str:
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
    lines += sentences(table)
    return "\n".join(lines)


def _accuracy(table: KeptTable, rule: SelectionRule) -> str:
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


def _margins(table: KeptTable, rule: SelectionRule) -> str:
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
