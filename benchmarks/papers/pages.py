"""Makes the page of all of the papers' tables, and a longer one of each, from plans and CSV files.

    python benchmarks/papers/pages.py [NAME ...]

For a table NAME, the plan is ``short/NAME`` of the package, and the results, from
``feddg compare PLAN --results CSV``, are ``docs/results/data/papers/NAME.csv``, with
``NAME.tuning.json`` beside it where values were tuned. ``docs/results/papers.md`` has a short table
of each; ``runs/papers/NAME.md`` every selection rule, margin, and the cells that are not run.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from feddg.comparison.plan import Plan, load_plan, table_cells
from feddg.comparison.results import Results
from feddg.comparison.results_file import read_results
from feddg.comparison.statistics import Key, Margin, average_over_columns
from feddg.comparison.tuning import TuningFile
from feddg.diagnostics import Diagnostic
from feddg.records import CONSTANT, FLUCTUATION, LAST, RISING, SPLITS, TEST
from feddg.report.blocks import Column, Table
from feddg.report.page import BEGIN, END, between_marks
from feddg.report.tables import (
    MARK,
    MEANING,
    MethodColumn,
    about_tuning,
    budget_table,
    budget_words,
    by_domain,
    by_method,
    column_groups,
    domains_of,
    interval_text,
    margin_table,
    points,
    spread_text,
    to_markdown,
    tuning_table,
    unseen,
)
from feddg.report.text import spelled, split_heading
from feddg.runs.diagnostics import CONSTANT_ANSWER, STILL_RISING
from feddg.runs.table import BEST_IN_DOMAIN, FINAL, SELECTION_RULES, SWA_MEAN, SelectionRule
from feddg.text import MISSING, counted, percent, readable

ROOT = Path(__file__).resolve().parents[2]
PLANS = Path("src/feddg/comparison/papers/short")
DATA = Path("docs/results/data/papers")
PAGES = Path("runs/papers")
INDEX = Path("docs/results/papers.md")
NOT_RUN = "not run"
REFERENCE = "fedavg"
PRINTED_TOLERANCE = 0.051
"""Printed averages may differ from their row's mean by rounding, in points."""
LEADS = ("minus FedAvg, final", "minus FedAvg, SWA")


def make(names: Sequence[str] = (), root: Path = ROOT) -> list[Path]:
    """Writes the pages of these tables, all by default, and the list; returns what was written."""
    written = []
    for name in tables(names, root):
        plan = load_plan(root / PLANS / f"{name}.yaml")
        path = root / PAGES / f"{name}.md"
        page = path.read_text("utf-8") if path.is_file() else new_page(name, plan)
        path.parent.mkdir(parents=True, exist_ok=True)
        results, tuning = results_of(name, plan, root), tuning_of(name, root)
        rows = read_results(root / DATA / f"{name}.csv")
        made = planned_tables(results, plan, len(rows) - len(results.rows), tuning)
        path.write_text(between_marks(page, made), "utf-8")
        written.append(path)
    index = root / INDEX
    list_of_all = listing(tables((), root), root)
    index.write_text(between_marks(index.read_text("utf-8"), list_of_all), "utf-8")
    return [*written, index]


def tables(names: Sequence[str] = (), root: Path = ROOT) -> list[str]:
    """Returns the names of these tables, all by default.

    Raises:
        SystemExit: there is no such table.
    """
    every = sorted(path.stem for path in (root / PLANS).glob("*.yaml"))
    if unknown := set(names) - set(every):
        raise SystemExit(f"no plan {', '.join(sorted(unknown))}; there are: {', '.join(every)}")
    return list(names) or every


def results_of(name: str, plan: Plan, root: Path = ROOT) -> Results:
    """The results of a table; none yet where there is no file."""
    return Results.read(root / DATA / f"{name}.csv", plan)


def tuning_of(name: str, root: Path = ROOT) -> TuningFile | None:
    """What was tried before a table was run; None where nothing was, or it was not kept."""
    return TuningFile.read(root / DATA / f"{name}.tuning.json")


def new_page(name: str, plan: Plan) -> str:
    """The frame of a page: what stands around its tables."""
    return (
        f"# {plan.title}\n\n"
        f"    feddg compare short/{name} --results {DATA}/{name}.csv\n"
        f"    python benchmarks/papers/pages.py {name}\n\n"
        "The first command runs what is missing, the second makes this page from the file."
        f"\n\n{BEGIN}\n\n{END}\n"
    )


def planned_tables(
    results: Results, plan: Plan, strangers: int = 0, tuning: TuningFile | None = None
) -> str:
    """Returns all tables of a plan's results, as Markdown.

    Args:
        results: results in the plan's cells.
        plan: the plan.
        strangers: number of rows of the file that are in no cell.
        tuning: the trials of each method, if there were any.
    """
    every, results = results, results.at_largest
    parts = [by_budget(every)]
    if results.rows:
        rules = (FINAL, SWA_MEAN, BEST_IN_DOMAIN)
        parts += [accuracy(results, rule) for rule in rules]
        parts += [margins_of(results, rule) for rule in rules[:2]]
    parts += beside_the_paper(results, plan.notes.get("paper") or {})
    if tuning is not None:
        parts += [*about_tuning(tuning), to_markdown(tuning_table(tuning))]
    if plan.notes.get("differences"):
        differences = "\n".join(f"- {one}" for one in plan.notes["differences"])
        parts.append(f"How this differs from the paper's setting:\n\n{differences}")
    return together(coverage(every, plan, strangers), *parts)


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
    recorded = [
        value for own in results.values(FINAL, RISING, "", "").values() for value in own.values()
    ]
    rising = sum(value > 0 for value in recorded)
    if rising:
        total = len(recorded)
        text = f"In {counted(rising, 'run')} of {total} accuracy was still rising at the end."
        yield Diagnostic(STILL_RISING, "note", text, "Train longer.")
    silent = len(results.rows) - sum(map(len, results.values(FINAL, CONSTANT, "", "").values()))
    if silent:
        text = (
            f"Whether the model beats {CONSTANT_ANSWER} is not on record for "
            f"{counted(silent, 'run')} (an earlier version kept them)."
        )
        yield Diagnostic("majority-class-unknown", "note", text)


def machines(results: Results) -> str:
    """Returns the machines that the rows name."""
    return "; ".join(sorted({row.machine for row in results.rows if row.machine}))


def fluctuation(results: Results, method: str) -> float | None:
    """Returns the round-to-round fluctuation of the last weights, mean over a method's runs."""
    found = results.frame().query(f"metric == {FLUCTUATION!r} and weights == {LAST!r}")
    own = found[found["method"] == method]["value"]
    return float(own.mean()) if len(own) else None


def no_better_than_constant(
    results: Results, rule: SelectionRule = FINAL
) -> dict[str, set[tuple[str, int]]]:
    """Returns by method the columns and seeds whose model is no better than a constant one."""
    values = results.values(rule, CONSTANT, "", "")
    found = {method: {k for k, v in own.items() if v} for method, own in values.items()}
    return {method: places for method, places in found.items() if places}


def marked(results: Results, rules: Sequence[SelectionRule], method: str) -> str:
    """Returns a method's name, marked if its model is no better than a constant by one rule."""
    found = [no_better_than_constant(results, rule).get(method, set()) for rule in rules]
    return spelled(method) + mark(set().union(*found), results.columns)


def by_budget(results: Results) -> str:
    """Returns every method at every budget; empty without budgets."""
    caption = f"**By budget.** The tables below: {budget_words(results).rstrip(': ')}."
    return with_caption(caption, budget_table(results))


def cells_run(results: Results) -> str:
    """Returns how much of the plan has been run, such as ``12 of 84``."""
    return f"{len(results.rows)} of {len(results.planned)}"


def exact(results: Results, plan: Plan) -> int:
    """Returns the number of rows whose settings match the plan for any tried value."""
    tuned = table_cells(plan) if plan.tune is not None else None
    wanted = {c.portable_id for c in tuned} if tuned else {c.experiment for c in results.planned}
    return sum(row.experiment in wanted for row in results.rows)


def coverage(results: Results, plan: Plan, strangers: int) -> str:
    """Returns which cells of the plan are run, and with what."""
    lines = [f"**{cells_run(results)} cells are run.**"]
    if results.rows:
        seeds = ", ".join(map(str, sorted({row.seed for row in results.rows})))
        lines.append(f"Seeds: {seeds}. Machines: {machines(results) or 'not recorded'}.")
    other = len(results.rows) - exact(results, plan)
    if other:
        lines.append(
            f"{counted(other, 'cell')} ran with another experiment than the plan's to the letter: "
            "flags were added, or the plan was another one then."
        )
    if strangers:
        verb = "belongs" if strangers == 1 else "belong"
        lines.append(f"{counted(strangers, 'row')} of the file {verb} to no cell: left out.")
    return "\n".join([*lines, *map(str, about_rows(results))])


def mark(places: Iterable[Key], columns: Iterable[str]) -> str:
    """Returns the mark if one of the places is in one of the columns, else an empty text."""
    among = set(columns)
    return MARK if any(column in among for column, _ in places) else ""


def accuracy_column(
    results: Results, rule: SelectionRule, heading: str, columns: Sequence[str]
) -> MethodColumn:
    """Accuracy of each method on some columns, and how many seeds lack.

    Models that are no better than a constant one are marked.
    """
    found, constant = results.values(rule), no_better_than_constant(results, rule)

    def cell(method: str) -> str:
        one, seeds = average_over_columns(found.get(method, {}), columns), len(results.seeds)
        if one is None:
            return NOT_RUN
        lack = f" ({one.count} of {seeds})" if one.count < seeds else ""
        return spread_text(one) + lack + mark(constant.get(method, ()), columns)

    return Column(heading), {method: cell(method) for method in results.methods}


def accuracy(results: Results, rule: SelectionRule) -> str:
    """Returns accuracy by column under one rule; cells with missing seeds are marked."""
    groups = column_groups(results).items()
    columns = [accuracy_column(results, rule, heading, group) for heading, group in groups]
    moved = {method: percent(fluctuation(results, method)) for method in results.methods}
    columns.append((Column("Fluctuation"), moved))
    caption = (
        f"**{rule.title}.** Accuracy on the unseen domain {rule.when}, percent, mean ± standard "
        "deviation over seeds. Fluctuation: mean change of the last weights between neighbouring "
        "evaluated rounds of the second half."
    )
    return with_caption(caption, by_method(results.methods, columns))


def margins_of(results: Results, rule: SelectionRule) -> str:
    """Returns every method against FedAvg, or the best other one without; empty for one method."""
    caption = f"**Margins, {rule.title.lower()}.** Over the cells that both have."
    base = REFERENCE if REFERENCE in results.values(rule) else ""
    named = partial(marked, results, [rule])
    return with_caption(caption, margin_table(results, rule, base, named))


def beside_the_paper(results: Results, paper: Mapping[str, Any]) -> list[str]:
    """Returns our numbers beside the paper's, by split, and the notes on them."""
    if not paper:
        return []
    made = [paper_table(results, paper, split) for split in SPLITS]
    parts = [to_markdown(one) for one in made if one is not None]
    if not parts:
        parts = [f"{paper['source']} prints no numbers that could stand beside these."]
    return [*parts, "\n".join(f"- {note}" for note in paper.get("notes", ()))]


def paper_table(
    results: Results, paper: Mapping[str, Any], split: str, missing: str = NOT_RUN
) -> Table | None:
    """Our accuracies beside a paper's, by its rule; None if it has none for the split.

    Args:
        results: the comparison.
        paper: the paper's numbers, as in a plan's notes.
        split: which images.
        missing: the text for a missing accuracy of ours.
    """
    published: Mapping[str, Mapping[str, float | None]] = paper.get("values", {}).get(split, {})
    if not published:
        return None
    rule = SELECTION_RULES.find(paper.get("rule", FINAL.name))
    ours, averages = results.values(rule, split=split), paper.get("average", {}).get(split, {})

    def compared(columns: Sequence[str]) -> Callable[[str], str]:
        def cell(method: str) -> str:
            theirs = published.get(method, {})
            own = average_over_columns(ours.get(method, {}), columns)
            printed, mean = theirs.get(columns[0]), ""
            if len(columns) > 1:
                whole = set(theirs) <= set(columns)  # a printed average is of all its columns
                row_mean = _printed_mean(theirs, columns)
                printed = averages.get(method, row_mean) if whole else row_mean
                mean = mark_of(printed, theirs, columns)
            text = missing if own is None else spread_text(own)
            return f"{text} / {MISSING if printed is None else f'{printed:.2f}'}{mean}"

        return cell

    methods = dict.fromkeys([*results.methods, *published])
    columns: list[MethodColumn] = [
        (Column(heading, "ours / paper"), dict(zip(methods, map(compared(group), methods))))
        for heading, group in column_groups(results).items()
    ]
    caption = (
        f"{split_heading(split)} accuracy in percent ({rule.title.lower()}): ours / "
        f"{paper.get('source', 'the paper')}. An asterisk marks a printed average that is not the "
        "mean of its printed row; the mean follows it."
    )
    return by_method(methods, columns, caption)


def _printed_mean(theirs: Mapping[str, float | None], columns: Sequence[str]) -> float | None:
    """The mean of a published row; None if the row is incomplete."""
    values = [value for column in columns if (value := theirs.get(column)) is not None]
    return math.fsum(values) / len(values) if 0 < len(values) == len(columns) else None


def mark_of(
    stated: float | None, theirs: Mapping[str, float | None], columns: Sequence[str]
) -> str:
    """An asterisk and a printed row's mean, if the printed average differs from it."""
    mean = _printed_mean(theirs, columns)
    if stated is None or mean is None or abs(stated - mean) <= PRINTED_TOLERANCE:
        return ""
    return f" * ({mean:.2f})"


def listing(names: Sequence[str], root: Path = ROOT) -> str:
    """How much of each table is run on how many images; its columns where leads can be told.

    A table of one domain and fewer than three seeds has no interval: its numbers are in its file.
    """
    parts, others = [], []
    for name in names:
        plan = load_plan(root / PLANS / f"{name}.yaml")
        results = results_of(name, plan, root)
        title = (plan.title or name).removesuffix(", shortened")
        about = f"{cells_run(results)} cells"
        if results.rows:
            title = f"[{title}]({(DATA / name).relative_to(INDEX.parent).as_posix()}.csv)"
            about += f", {counted(len({row.seed for row in results.rows}), 'seed')}"
        images = results.values("", "images_per_round", "", "").get(REFERENCE)
        rounds = plan.base["train"].get("rounds")
        if images and rounds:
            about += f", {fmean(images.values()) * rounds / 1000:.0f}k images"
        if other := len(results.rows) - exact(results, plan):
            about += f"; {counted(other, 'cell')} ran under another plan than today's"
        if leads := leads_of(results):
            table = short_table(results, leads, plan.notes.get("paper") or {})
            parts.append(f"### {title}\n\n`{name}`: {about}.\n\n{table}")
        else:
            named = title if results.rows else f"{title}, `{name}`"  # a link has the name
            others.append(f"- {named}: {about}.")
    return "\n\n".join([*parts, "### One domain, few seeds", "\n".join(others)])


def leads_of(results: Results) -> list[dict[str, Margin]]:
    """Leads over FedAvg by the last model and the averaged weights, where intervals are known."""
    found = [results.margins(rule, REFERENCE) for rule in (FINAL, SWA_MEAN)]
    return [own for own in found if any(map(with_intervals, own.values()))]


def short_table(
    results: Results, leads: Sequence[dict[str, Margin]], paper: Mapping[str, Any]
) -> str:
    """Accuracy of the last model, of the averaged weights and in the paper; leads over FedAvg."""
    final, swa = results.values(FINAL), results.values(SWA_MEAN)
    constant = no_better_than_constant(results)
    printed = paper.get("values", {}).get(TEST, {})
    methods = [method for method in results.methods if method in final]
    others = [method for method in methods if method != REFERENCE] or methods
    measured = {column for method in others for column, _ in final[method]}
    run = [column for column in results.columns if column in measured]

    def cells(method: str) -> list[str]:
        found = [spelled(method) + mark(constant.get(method, ()), results.columns)]
        for place in run:
            ours = [average_over_columns(own[method], [place]) for own in (final, swa)]
            theirs = printed.get(method, {}).get(place)
            found.append(
                " / ".join([*(spread_text(one) if one else "-" for one in ours)])
                + (f" / {theirs:.1f}" if theirs is not None else "")
            )
        for own in leads:
            found.append(with_intervals(own.get(method), domains_of(results, own.values())))
        return found

    head = ["method", *map(readable, run), *LEADS]
    head_line, *lines = (f"| {' | '.join(line)} |" for line in (head, *map(cells, methods)))
    table = "\n".join([head_line, f"|{'---|' * len(head)}", *lines])
    return "\n\n".join(filter(None, [table, unseen(m for own in leads for m in own.values())]))


def with_intervals(margin: Margin | None, domains: Sequence[str] = ()) -> str:
    """A lead with the intervals that can be claimed, and by domain; empty without any."""
    if margin is None:
        return ""
    over = (("domains", margin.domains), ("seeds", margin.seeds))
    known = [f"{of} {interval_text(one, of)}" for of, one in over if one.reach is not None]
    if len(domains) > 1:
        known += [f"by domain {by_domain(margin, domains).text}"] if known else []
    text = f"{points(margin.mean)} ({'; '.join(known)})" if known else ""
    return f"**{text}**" if margin.decided else text


if __name__ == "__main__":
    for path in make(sys.argv[1:]):
        print(path)
