"""Pages in Markdown about kept results: everything between two marks is made from a CSV file.

What stands around the marks is written by hand and kept. With a plan the page is that of its table:
the paper's numbers beside ours, and every cell that is not run says so.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from feddg.comparison.plan import Plan
from feddg.comparison.results import KeptResults, KeptTable, TuningFile
from feddg.comparison.statistics import (
    Accuracies,
    Key,
    Margin,
    average_over_columns,
    paired_margin,
    spread,
)
from feddg.errors import RunError
from feddg.records import ID_TEST, VAL
from feddg.report.kept_findings import mark, sentences, with_meaning
from feddg.report.many_tables import interval_text, points, spread_text
from feddg.report.planned_page import planned_tables
from feddg.report.wording import MISSING, counted, percent, spelled
from feddg.runs.reading import BEST_IN_DOMAIN, EMA_MEAN, FINAL, TAIL_MEAN, SelectionRule
from feddg.storage import read_text, replace_text, why

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
    lines += sentences(table)
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
