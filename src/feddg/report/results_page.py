"""Pages in Markdown about published results, made from results files."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from feddg.comparison.results import RISING, Results, TuningFile
from feddg.comparison.statistics import Accuracies, Key, paired_margin
from feddg.diagnostics import Diagnostic
from feddg.errors import RunError
from feddg.records import ID_TEST, SPLITS, VAL
from feddg.report.blocks import Column
from feddg.report.tables import (
    MARK,
    MEANING,
    MethodColumn,
    about_tuning,
    accuracy_column,
    accuracy_columns,
    by_method,
    margin_table,
    margin_text,
    mark,
    paper_table,
    to_markdown,
    tuning_table,
    what_was_tuned,
)
from feddg.report.text import MISSING, counted, percent, readable, spelled
from feddg.runs.diagnostics import STILL_RISING
from feddg.runs.reading import BEST_IN_DOMAIN, EMA_MEAN, FINAL, TAIL_MEAN, SelectionRule
from feddg.storage import read_text, replace_text, why

NOT_RUN = "not run"
PLANNED_RULES = (FINAL, TAIL_MEAN, BEST_IN_DOMAIN)
RULES = (FINAL, TAIL_MEAN, EMA_MEAN, BEST_IN_DOMAIN)
REFERENCE = "fedavg"


def with_meaning(parts: Iterable[str]) -> str:
    """Returns parts of a page together; behind the first what marks mean, where there are some."""
    first, *others = [part.strip() for part in parts if part]
    marked = any(MARK in part for part in others)
    return "\n\n".join([first, MEANING, *others] if marked else [first, *others])


def _about_rows(results: Results) -> Iterator[Diagnostic]:
    """Yields what is to be known of all runs: how many were still rising, or do not tell."""
    known = [value for own in results.values(RISING).values() for value in own.values()]
    rising = sum(value > 0 for value in known)
    if rising:
        text = f"In {counted(rising, 'run')} of {len(known)} accuracy was still rising at the end."
        yield Diagnostic(STILL_RISING, "note", text, "Train longer.")
    silent = len(results.rows) - sum(map(len, results.values("constant", FINAL.name).values()))
    if silent:
        text = (
            "Whether the model beats always answering the most frequent class is not on record "
            f"for {counted(silent, 'run')} (an earlier version kept them)."
        )
        yield Diagnostic("majority-class-unknown", "note", text)


def _machines(results: Results) -> str:
    return "; ".join(sorted({row.machine for row in results.rows if row.machine}))


def _movement(results: Results, weights: str) -> Callable[[str], str]:
    """How far a method's accuracy moves from round to round, mean over its runs."""
    return lambda method: percent(results.mean(method, f"movement_{weights}"))


# With a plan: its table, the paper's numbers beside ours, and every cell that is not run says so.


def planned_tables(results: Results, tuning: TuningFile | None = None) -> str:
    """Returns everything that the results of a plan say, as Markdown.

    Args:
        results: in the plan's cells.
        tuning: what was tried for each method before, if anything.
    """
    parts = [_planned_coverage(results)]
    if results.rows:
        parts += [_planned_accuracy(results, rule) for rule in PLANNED_RULES]
        parts += [_planned_margins(results, rule) for rule in PLANNED_RULES[:2]]
    parts += _beside_the_paper(results)
    if tuning is not None:
        parts += [what_was_tuned(tuning), about_tuning(tuning), to_markdown(tuning_table(tuning))]
    if results.differences:
        differences = "\n".join(f"- {one}" for one in results.differences)
        parts.append(f"How this differs from the paper's setting:\n\n{differences}")
    return with_meaning(parts)


def cells_run(results: Results) -> str:
    """How much of the plan is run: ``12 of 84``."""
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
    """Accuracy by column under one rule; a cell of which not every seed is run says so."""
    columns = accuracy_columns(results, rule, missing=NOT_RUN, published=True)
    columns.append((Column("Movement"), _movement(results, "last")))
    caption = (
        f"**{rule.name}.** Accuracy on the unseen domain {rule.when}, percent, mean ± standard "
        "deviation over seeds. Movement: mean change of the last weights between neighbouring "
        "evaluated rounds of the second half."
    )
    return f"{caption}\n\n{to_markdown(by_method(results.methods, columns))}"


def _planned_margins(results: Results, rule: SelectionRule) -> str:
    """Every method against FedAvg and against the best other one, paired; none for one method."""
    constant = results.no_better_than_constant(rule)
    table = margin_table(
        results,
        rule,
        REFERENCE,
        lambda method: method and spelled(method) + mark(constant.get(method, ()), results.columns),
    )
    caption = (
        f"**Margins, {rule.name.lower()}.** Paired by column and seed, over the cells that both "
        "have; Student's t interval of the mean difference. The best other method was picked by "
        "these same numbers, which favours it a little."
    )
    return f"{caption}\n\n{to_markdown(table)}" if table is not None else ""


def _beside_the_paper(results: Results) -> list[str]:
    if results.paper is None:
        return []
    made = [paper_table(results, split, missing=NOT_RUN) for split in SPLITS]
    parts = [to_markdown(one) for one in made if one is not None]
    if not parts:
        parts = [f"{results.paper['source']} prints no numbers that could stand beside these."]
    return [*parts, "\n".join(f"- {note}" for note in results.paper.get("notes", ()))]


# Everything between two marks of a page is made from a results file; what stands around is kept.


BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"
SEARCH = "<!-- search -->"
"""A page that says this shows validation domains, and one rule."""


def remade(page: str, results: Results, tuning: TuningFile | None = None) -> str:
    """Returns the page with its tables made anew.

    Args:
        page: Markdown with the two marks, in their order.
        results: in the cells of a plan, or those of a file alone.
        tuning: what was tried for each method first, if anything.

    Raises:
        RunError: a mark is missing.
    """
    if results.plan is not None:
        made = planned_tables(results, tuning)
    elif SEARCH in page:
        made = search_table(results)
    else:
        made = tables(results)
    return between_marks(page, made)


def write_results_page(file: Path, page: Path) -> None:
    """Writes a results file as tables in Markdown, between the marks of a page or into a new one.

    Args:
        file: the results file.
        page: what is outside its marks is kept.

    Raises:
        RunError: the results are damaged, the page is there and has no marks, or cannot be written.
    """
    results = Results.read(file)
    new = f"# {file.stem}\n\n{BEGIN}\n{END}\n"
    before = read_text(page, errors="strict") if page.exists() else new
    if BEGIN not in before or END not in before:
        raise RunError(
            f"{page} is there already and is not overwritten: it has no marks {BEGIN} and {END} "
            "for the tables. Put them in, or name another file with --out"
        )
    text = remade(before, results)
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


def tables(results: Results) -> str:
    """Returns the tables of a results file as Markdown."""
    if not results.rows:
        return "No run has ended yet."
    parts = [_coverage(results), _accuracy(results), _by_column(results)]
    if len(results.methods) > 1:
        parts += [_margins(results), _explained(results)]
    return with_meaning([*parts, _costs(results)])


def _coverage(results: Results) -> str:
    rows = {method: results.of(method) for method in results.methods}
    most = max(len({row.seed for row in own}) for own in rows.values())
    columns = len(results.columns)
    thin = [
        f"{spelled(method)} {len(own)}" for method, own in rows.items() if len(own) < most * columns
    ]
    lines = [
        f"{counted(len(results.rows), 'run')}: {counted(len(rows), 'method')}, "
        f"{counted(columns, 'column')}, up to {counted(most, 'seed')}.",
        f"Machines: {_machines(results)}.",
    ]
    if thin:
        lines.append(f"Not all cells are run yet ({most * columns} a method): {', '.join(thin)}.")
    return "\n".join([*lines, *map(str, _about_rows(results))])


def _accuracy(results: Results) -> str:
    final, tail = results.accuracies(FINAL), results.accuracies(TAIL_MEAN)
    columns = [
        accuracy_column(results, rule.name.lower(), rule, results.columns, published=True)
        for rule in RULES
    ]
    columns += [
        (Column("tail minus final"), lambda m: _margin(tail.get(m), final.get(m))),
        (Column("movement, last"), _movement(results, "last")),
        (Column("movement, tail"), _movement(results, "tail")),
        accuracy_column(
            results,
            "in-domain test, tail",
            TAIL_MEAN,
            results.columns,
            split=ID_TEST,
            published=True,
        ),
    ]
    return (
        "Accuracy on the unseen domain, average over the columns, percent, mean ± standard "
        "deviation over the seeds that have every column. *Tail minus final* is paired by column "
        "and seed, with its 95 % interval. *Movement*: mean change between neighbouring rounds of "
        "the second half.\n\n" + to_markdown(by_method(_ranked(results), columns))
    )


def _by_column(results: Results) -> str:
    rule = _ranking_rule(results)
    columns = [
        accuracy_column(results, readable(column), rule, [column], published=True)
        for column in results.columns
    ]
    made = to_markdown(by_method(_ranked(results), columns))
    return f"By column, {rule.name.lower()}:\n\n{made}"


def _margins(results: Results) -> str:
    best, *others = _ranked(results)
    columns: list[MethodColumn] = []
    for rule in (FINAL, TAIL_MEAN, EMA_MEAN):
        if found := results.accuracies(rule):
            columns.append((Column(rule.name.lower()), _over(found.get(best), found)))
    named = partial(_marked, results)
    made = to_markdown(by_method(others, columns, named=named))
    return f"{named(best)} minus each other method, paired by column and seed:\n\n{made}"


def _explained(results: Results) -> str:
    """How much of each method's lead over plain averaging the mean of the tail explains."""
    final, tail = results.accuracies(FINAL), results.accuracies(TAIL_MEAN)
    named = partial(_marked, results)
    name = named(REFERENCE)
    if REFERENCE not in final:
        return f"Without {name} nobody's lead can be explained."
    columns: list[MethodColumn] = [
        (Column("both final"), lambda m: _margin(final.get(m), final[REFERENCE])),
        (Column(f"{name} with its tail"), lambda m: _margin(final.get(m), tail.get(REFERENCE))),
        (Column("both with their tails"), lambda m: _margin(tail.get(m), tail.get(REFERENCE))),
    ]
    methods = [method for method in _ranked(results) if method != REFERENCE]
    return (
        f"Lead over {name}, paired by column and seed: as tables have it, with both models of the "
        f"last round; what is left of it when only {name} serves its tail; and when both do.\n\n"
        + to_markdown(by_method(methods, columns, named=named))
    )


def _costs(results: Results) -> str:
    base = REFERENCE if REFERENCE in results.methods else results.methods[0]

    def times(method: str, name: str) -> str:
        ours, theirs = results.mean(method, name), results.mean(base, name)
        return f"{ours / theirs:.2f}" if ours is not None and theirs else MISSING

    columns: list[MethodColumn] = [
        (Column(name), partial(times, name=name)) for name in ("bytes", "seconds")
    ]
    return (
        "What a round costs, as a multiple of FedAvg's. Seconds are of processes that shared their "
        "machine with others.\n\n" + to_markdown(by_method(_ranked(results), columns))
    )


def _ranked(results: Results) -> list[str]:
    """The methods, best first; those without a number last."""
    found = results.accuracies(_ranking_rule(results))
    common = set[Key].intersection(*map(set, found.values())) if found else set()

    def mean(values: Accuracies) -> float:
        return sum(values[key] for key in common) / max(1, len(common))

    return sorted(results.methods, key=lambda m: (m not in found, -mean(found.get(m, {}))))


def _ranking_rule(results: Results) -> SelectionRule:
    """The mean of the tail, or the final round where a method has no tail."""
    has_tails = list(results.accuracies(TAIL_MEAN)) == results.methods
    return TAIL_MEAN if has_tails else FINAL


def _marked(results: Results, method: str) -> str:
    """A method's name, marked where its last model or its tail is no better than a constant."""
    found = [results.no_better_than_constant(rule).get(method, set()) for rule in RULES[:2]]
    return spelled(method) + mark(set().union(*found), results.columns)


def _over(ours: Accuracies | None, theirs: dict[str, Accuracies]) -> Callable[[str], str]:
    return lambda method: _margin(ours, theirs.get(method))


def _margin(ours: Accuracies | None, theirs: Accuracies | None) -> str:
    return margin_text(paired_margin(ours or {}, theirs or {}))


def search_table(results: Results) -> str:
    """Returns the table of a search: held-out validation after the final round, as Markdown."""
    found = results.accuracies(FINAL, VAL)
    parts = {f"tested on {readable(column)}": [column] for column in results.columns}
    columns = [
        accuracy_column(results, heading, FINAL, part, split=VAL, published=True)
        for heading, part in {**parts, "average": results.columns}.items()
    ]
    methods = sorted(found, key=lambda method: _rank(found[method], results.columns))
    return to_markdown(by_method(methods, columns)).strip()


def _rank(values: Accuracies, columns: Sequence[str]) -> tuple[int, float]:
    """Whoever lacks columns comes last: its mean is one of other columns."""
    lacks = len(columns) - len({column for column, _ in values})
    return lacks, -sum(values.values()) / len(values)
