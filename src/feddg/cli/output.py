"""Terminal output before a run (its plan) and after it (tables of results)."""

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.filesize import decimal
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from feddg.api import Preview
from feddg.comparison.compare import Comparison, why_hopeless
from feddg.comparison.trials import TRIALS
from feddg.data.partition import in_words
from feddg.diagnostics import Diagnostic
from feddg.experiment import DEFAULT, Origin
from feddg.prediction.travel import Travel
from feddg.records import AdaptationRow, AttackRow, Details
from feddg.report import blocks
from feddg.report.details import decision_section, subgroups_section
from feddg.report.leaks import attack_tables
from feddg.report.predictions_page import sites_table
from feddg.report.run_page import adaptation_table
from feddg.report.tables import about_best, about_results, lead_of, main_tables
from feddg.runs.beforehand import Forecast
from feddg.runs.inspection import STYLES, client_data_table, print_diagnostic, skew_between
from feddg.text import counted, print_line, short, value_text

MOST_NOTES = 3
"""Most notes printed below a comparison's result; its page has all."""


def print_plan(console: Console, comparison: Comparison) -> None:
    """Prints what a comparison will do."""
    plan, cells, missing = comparison.plan, comparison.cells, comparison.missing
    folders, started = comparison.folders, comparison.started
    complete = len(folders) - len(missing)
    table = Table(title=escape(plan.title or plan.name), show_header=False, box=None)
    axes = {"methods": [cell.method for cell in cells], "held out": [c.held_out for c in cells]}
    for name in dict.fromkeys(name for cell in cells for name in cell.conditions):
        axes[name] = [cell.conditions[name] for cell in cells]
    axes["seeds"] = [str(cell.seed) for cell in cells]
    if plan.budgets:
        axes["images seen"] = [short(budget) for budget in plan.budgets]
    for name, values in axes.items():
        distinct = list(dict.fromkeys(values))
        table.add_row(escape(name), str(len(distinct)), escape(", ".join(distinct)))
    console.print(table)
    shared = f" ({len(cells)} cells share them)" if len(cells) > len(folders) else ""
    print_line(
        console,
        f"{counted(len(folders), 'run')}{shared}: {complete} complete, {started} to "
        f"continue, {len(missing) - started} to start; in {comparison.folder}",
    )


def print_table(console: Console, table: blocks.Table) -> None:
    """Prints a report's table; columns that do not fit the width follow beside the first again."""
    wide = console.options.update(max_width=1 << 16)
    parts = [[0]]
    for place in range(1, len(table.columns)):
        measured = Measurement.get(console, wide, as_rich(table, [*parts[-1], place]))
        if measured.maximum > console.width and len(parts[-1]) > 1:
            parts.append([0])
        parts[-1].append(place)
    for places in parts:
        console.print(as_rich(table, places))
    if table.caption:
        console.print(table.caption, markup=False, highlight=False)


def as_rich(table: blocks.Table, places: Sequence[int]) -> Table:
    """Returns some columns of a report's table for the terminal."""
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in (table.columns[place] for place in places):
        heading = f"{column.heading}\n{column.note}" if column.note else column.heading
        side: JustifyMethod = "right" if column.numeric else "left"
        shown.add_column(escape(heading), justify=side, overflow="fold")
    for row in table.rows:
        texts = [(escape(row[place].text), row[place].strong) for place in places]
        shown.add_row(*(f"[bold]{text}[/]" if strong else text for text, strong in texts))
    return shown


def print_comparison(done: Comparison, *, explained: bool = False) -> None:
    """Prints where a comparison's results are, and which runs failed.

    Args:
        done: the comparison.
        explained: whether to say what the best method does.
    """
    console = Console()
    results = done.results.at_largest
    for table in main_tables(done.results, brief=True):
        print_table(console, table)
    if results.rows:
        print_line(console, lead_of(done.results))
    if explained and (found := about_best(results)):
        print_line(console, ": ".join(found))
    known = about_results(results)
    for one in known[:MOST_NOTES]:
        print_diagnostic(console, one)
    if (further := len(known) - MOST_NOTES) > 0:
        print_line(console, f"{counted(further, 'more note')} in the report")
    for outcome in done.failures:
        name = outcome.cell.folder.name
        print_line(console, f"{outcome.status}: {name}: {outcome.error or ''}")
    print_line(console, f"folder: {done.folder}")
    print_line(console, f"report: {done.report.resolve()}")


def print_missing(done: Comparison) -> None:
    """Prints what prevents a comparison that was not run, and what its next step would be."""
    console = Console(stderr=True)
    if (hopeless := why_hopeless(done)) is not None:
        print_line(console, f"as things are, no run could start: {hopeless}")
    if done.missing and done.folder.name == TRIALS:
        print_line(console, "the table's runs follow, with the values that are picked")


def print_attack(rows: Sequence[AttackRow]) -> None:
    """Prints the tables of an attack."""
    for table in attack_tables(rows):
        print_table(Console(), table)


def print_adaptations(scores: Sequence[AdaptationRow]) -> None:
    """Prints accuracies under test-time adaptations."""
    print_table(Console(), adaptation_table(scores))


def print_details(found: Details) -> None:
    """Prints a decision and the accuracy by subgroup."""
    console = Console()
    for section in filter(None, (decision_section(found), subgroups_section(found))):
        for block in section.blocks:
            if isinstance(block, blocks.Table):
                print_table(console, block)
            elif isinstance(block, blocks.Prose):
                print_line(console, block.text)


def print_travel(found: Travel) -> None:
    """Prints the expected accuracy of a model at a new site, and its basis."""
    console = Console()
    if found.expected is not None:
        if found.calibration.sites:
            print_table(console, sites_table(found))
        print_line(console, found.expectation)
    for one in found.diagnostics:
        print_line(console, str(one))


# What ``feddg run --dry-run`` shows: every setting and where it comes from, and what it takes.


def show_preview(found: Preview) -> None:
    """Prints a complete experiment, and its expected cost."""
    console = Console()
    console.print(_settings_table(found.settings))
    print_line(console, f"run folder: {found.folder} ({found.state})")
    _print_forecast(console, found.forecast)


def _settings_table(found: Mapping[str, Origin]) -> Table:
    table = Table("setting", "value", "where from", box=None, pad_edge=False)
    for path, setting in found.items():
        style = "dim" if setting.source == DEFAULT else None
        table.add_row(path, escape(value_text(setting.value)), escape(setting.source), style=style)
    return table


def _print_forecast(console: Console, found: Forecast) -> None:
    roles = ", ".join(f"{role} {count}" for role, count in found.splits.items() if count)
    print_line(console, f"images: {roles}")
    console.print(client_data_table(found.clients))
    for line in in_words(skew_between(found.clients)):
        print_line(console, line)
    for one in found.diagnostics:
        print_diagnostic(console, one)
    print_line(
        console,
        f"memory: {found.weights:,} weights, {decimal(found.weight_bytes)} with gradients and "
        f"optimizer; {decimal(found.pixel_bytes)} of decoded images in the cache",
    )


# What ``feddg deploy check`` shows: what each check found, and what to do.


def checks_table(found: Sequence[Diagnostic]) -> Table:
    """Returns the results of checks as a table, one row each."""
    table = Table("", "check", "found", "what to do")
    for one in found:
        passed = one.severity == "note"
        style, word = ("green", "ok") if passed else (STYLES[one.severity], one.severity)
        texts = (escape(text) for text in (one.short, one.text, one.advice))
        table.add_row(f"[{style}]{word}[/]", *texts)
    return table
