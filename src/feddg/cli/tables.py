"""What a person reads at the end: tables of results, and what a comparison will do."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from feddg.comparison.compare import Comparison, Work
from feddg.comparison.estimate import estimate
from feddg.comparison.results import read_comparison
from feddg.prediction.evaluate import Adaptations
from feddg.records import SPLITS, EvaluationRow
from feddg.report import blocks
from feddg.report.sections import finding_sentences, found_in
from feddg.report.tables import (
    about_best,
    accuracy_table,
    elsewhere_words,
    margin_table,
    verdict_words,
    warnings_about,
)
from feddg.report.text import counted, duration, interval_words, remark_words, spelled
from feddg.runs.execute import is_complete
from feddg.runs.findings import accuracy_interval, measured
from feddg.runs.reading import RunRecord, read_run

SPLIT_WORDS = {
    "test": "held-out test",
    "val": "held-out validation",
    "id_val": "in-domain validation",
    "id_test": "in-domain test",
}
SHORT_SPLIT_WORDS = {"test": "test", "val": "val", "id_val": "seen, val", "id_test": "seen, test"}


def results_table(folders: Sequence[Path]) -> Table:
    """Returns the final accuracies of runs, one column per run, one row per split and domain.

    Beside every accuracy: its 95 % interval, balanced accuracy, and the share of the largest class.
    """
    records = [read_run(folder) for folder in folders]
    rules = dict.fromkeys(record.served.name.lower() for record in records)
    table = Table(title=f"accuracy, {' and '.join(rules)}")
    table.add_column("split")
    table.add_column("domain")
    table.add_column("largest\nclass", justify="right")
    for record in records:
        rule = f" ({record.served.name.lower()})" if len(rules) > 1 else ""
        name = escape(f"{record.method}{rule}{remark_words(found_in(record))}")
        table.add_column(f"{name}\n(95 % interval)\nbalanced", justify="right")
    for split, domain in _rows(records):
        rows = [_last_row(record, split, domain) for record in records]
        largest = next((_share(row, "largest_class_share") for row in rows if row), "-")
        cells = [_accuracy(row) for row in rows]
        style = "bold" if split == "test" else None
        table.add_row(SPLIT_WORDS[split], domain, largest, *cells, style=style)
    return table


def findings_text(folders: Sequence[Path]) -> str:
    """Returns what speaks against the accuracies of runs, a line each; empty where nothing does."""
    several = len(folders) > 1
    lines = []
    for run in map(read_run, folders):
        name = f"{spelled(run.method)}: " if several else ""
        lines += [f"note: {name}{sentence}" for sentence in finding_sentences(run)]
    return "\n".join(lines)


def adaptation_table(found: Adaptations) -> Table:
    """Returns accuracies under each adaptation, one column per split and domain."""
    measured = dict.fromkeys((s.split, s.domain) for s in found.scores)
    columns = sorted(measured, key=lambda column: list(SPLIT_WORDS).index(column[0]))
    table = Table(title="accuracy under test-time adaptation")
    table.add_column("adaptation", no_wrap=True)
    for split, domain in columns:
        table.add_column(f"{domain}\n{SHORT_SPLIT_WORDS[split]}", justify="right")
    for name in dict.fromkeys(score.adaptation for score in found.scores):
        cells = [_mean_accuracy(found, name, *column) for column in columns]
        table.add_row(name, *cells)
    return table


def _mean_accuracy(found: Adaptations, name: str, split: str, domain: str) -> str:
    """The accuracy; the mean over clients where it was measured for each."""
    wanted = (name, split, domain)
    own = [s.accuracy for s in found.scores if (s.adaptation, s.split, s.domain) == wanted]
    return f"{sum(own) / len(own):.1%}" if own else "-"


def _rows(records: Sequence[RunRecord]) -> list[tuple[str, str]]:
    pairs = [(s, d) for s in SPLITS for record in records for d in record.evaluations.domains(s)]
    return list(dict.fromkeys(pairs))


def _last_row(record: RunRecord, split: str, domain: str) -> EvaluationRow | None:
    evaluations = record.evaluations.of(record.served.weights)
    round_ = record.served.choose(record.evaluations)
    return evaluations.get(round_, split, domain) if round_ is not None else None


def _accuracy(row: EvaluationRow | None) -> str:
    """Accuracy; below it, its interval and the balanced accuracy."""
    if row is None:
        return "-"
    interval = interval_words(accuracy_interval([row]))
    return f"{row.accuracy:.1%}\n({interval})\n{_share(row, 'balanced_accuracy')}"


def _share(row: EvaluationRow, name: str) -> str:
    value = measured(row, name)
    return "-" if value is None else f"{value:.1%}"


def print_work(console: Console, work: Work, jobs: int) -> None:
    """Prints what a comparison will do, and how long, where runs like its own are finished."""
    plan, cells = work.plan, work.cells
    table = Table(title=plan.title or plan.name, show_header=False, box=None)
    axes = {"methods": [cell.method for cell in cells], "held out": [c.scenario for c in cells]}
    for name in dict.fromkeys(name for cell in cells for name, _ in cell.conditions):
        axes[name] = [dict(cell.conditions)[name] for cell in cells]
    axes["seeds"] = [str(cell.seed) for cell in cells]
    for name, values in axes.items():
        distinct = list(dict.fromkeys(values))
        table.add_row(name, str(len(distinct)), ", ".join(distinct))
    console.print(table)
    complete = len(work.folders) - len(work.missing)
    shared = f" ({len(cells)} cells share them)" if len(cells) > len(work.folders) else ""
    console.print(
        f"{counted(len(work.folders), 'run')}{shared}: {complete} complete, {work.started} to "
        f"continue, {len(work.missing) - work.started} to start; in {work.out}",
        highlight=False,
    )
    found = estimate([task.experiment for task in work.missing], _complete_runs(work), jobs)
    if found.known:
        rest = f"; {found.unknown} of other kinds left out" if found.unknown else ""
        said = (
            f"time: about {duration(found.seconds)}, as finished runs of the same kind took{rest}"
        )
        console.print(said, highlight=False)


def _complete_runs(work: Work) -> list[RunRecord]:
    missing = {task.folder for task in work.missing}
    found = (folder for folder in work.folders.values() if folder not in missing)
    return [read_run(folder) for folder in found if is_complete(folder)]  # some are only kept


def as_rich(table: blocks.Table) -> Table:
    """Returns a report's table for the terminal."""
    shown = Table(caption=table.caption, caption_justify="left")
    for column in table.columns:
        heading = f"{column.heading}\n{column.note}" if column.note else column.heading
        shown.add_column(escape(heading), justify="right" if column.numeric else "left")
    for row in table.rows:
        shown.add_row(*(f"[bold]{escape(c.text)}[/]" if c.strong else escape(c.text) for c in row))
    return shown


def print_comparison(done: Comparison, *, explained: bool = False) -> None:
    """Prints where a comparison's results are, and which runs failed.

    Args:
        done: the comparison.
        explained: whether to say what the best method does.
    """
    console = Console()
    results = read_comparison(done.folder)
    if results.results:
        console.print(as_rich(accuracy_table(results, results.served)))
        margins = margin_table(results, results.served)
        if margins is not None:
            console.print(as_rich(margins))
        console.print(verdict_words(results), markup=False, highlight=False)
        for warning in warnings_about(results):
            console.print(f"note: {warning}", markup=False, highlight=False)
        found = about_best(results) if explained else None
        if found is not None:
            console.print(f"{found[0]}: {found[1]}", markup=False, highlight=False)
    elsewhere = elsewhere_words(results)
    if elsewhere is not None:
        console.print(f"note: {elsewhere}", markup=False, highlight=False)
    for outcome in done.failures:
        console.print(
            f"{outcome.status}: {outcome.task.folder.name}: {outcome.error or ''}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"folder: {done.folder}", highlight=False, soft_wrap=True)
    console.print(f"report: {done.report.resolve()}", highlight=False, soft_wrap=True)
