"""What a person sees while a run goes on: progress bars, a table at the end."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from feddg.comparing.compare import Comparison, Work
from feddg.comparing.pool import Outcome, Task, Watcher
from feddg.comparing.results import read_comparison
from feddg.evaluation.accuracy import Score
from feddg.experiment import Experiment
from feddg.messages import Refusal, Update
from feddg.report import blocks
from feddg.report.many_tables import accuracy_table, margin_table
from feddg.report.wording import counted, duration
from feddg.rows import SPLITS, RoundRow
from feddg.runs.observer import Observer
from feddg.runs.reading import RunRecord, read_run
from feddg.runs.selection_rules import FINAL
from feddg.studies.evaluate import Adaptations

SPLIT_WORDS = {
    "test": "held-out test",
    "val": "held-out validation",
    "id_val": "in-domain validation",
    "id_test": "in-domain test",
}
SHORT_SPLIT_WORDS = {"test": "test", "val": "val", "id_val": "seen, val", "id_test": "seen, test"}
NOTE = TextColumn("{task.fields[note]}")


def _bars(console: Console, *more: ProgressColumn) -> Progress:
    """Bars with what is done and how much there is; silent when the console is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        *more,
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


class Bars(Observer):
    """Rich progress: preparation, rounds with clients, images per second and time left.

    Silent when the console is not a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._progress = _bars(console, TimeRemainingColumn(compact=True), NOTE)
        self._tasks: dict[str, TaskID] = {}
        self._images, self._seconds, self._scores = 0, 0.0, ""
        self._per_round = 1
        self._label = ""

    def start(self, experiment: Experiment, first_round: int) -> None:
        """Shows the rounds."""
        self._per_round = experiment.clients.per_round or experiment.clients.number
        self._label = experiment.method.name
        self._show("rounds", first_round - 1, experiment.train.rounds, f"{self._label}: rounds")

    def work(self, what: str, done: int, total: int) -> None:
        """Shows preparation."""
        self._show(what, done, total, what)

    def client(self, round: int, reply: Update | Refusal) -> None:
        """Moves the bar by one client's share of a round."""
        if isinstance(reply, Update):
            self._images += reply.images
            self._seconds += reply.seconds
        task = self._tasks["rounds"]
        completed = self._progress.tasks[self._progress.task_ids.index(task)].completed
        ceiling = round - 0.001
        self._progress.update(
            task, completed=min(ceiling, completed + 1 / self._per_round), note=self._note()
        )

    def round(self, row: RoundRow) -> None:
        """Moves the bar to the end of a round."""
        self._progress.update(self._tasks["rounds"], completed=row.round, note=self._note())

    def scores(self, round: int, scores: Sequence[Score]) -> None:
        """Shows the newest held-out accuracies."""
        held = [score for score in scores if score.split in ("test", "val")]
        self._scores = "  ".join(f"{score.domain} {score.accuracy:.1%}" for score in held)

    def end(self, status: str) -> None:
        """Takes the bars away."""
        self._progress.stop()

    def _note(self) -> str:
        speed = f"{self._images / self._seconds:.0f} images/s" if self._seconds else ""
        return f"{speed}  {self._scores}"

    def _show(self, name: str, done: int, total: int, text: str) -> None:
        self._progress.start()
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(text, total=total, note="")
        self._progress.update(
            self._tasks[name], completed=done, visible=name == "rounds" or done < total
        )


class ManyBars(Watcher):
    """One display for many runs: how many are done, and a bar for each that goes on.

    On a console that is no terminal, one line per run that ends.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = _bars(console, TimeElapsedColumn(), NOTE)
        self._tasks: dict[Path, TaskID] = {}
        self._shares: dict[Path, float] = {}
        self._total = self._before = self._ended = 0
        self._started = time.perf_counter()

    def start(self, total: int, done: int, jobs: int) -> None:
        """Shows the bar of all runs."""
        self._total, self._before = total, done
        self._progress.start()
        self._all = self._progress.add_task("runs", total=total, completed=done, note="")

    def news(self, task: Task, facts: Mapping[str, Any]) -> None:
        """Moves the bar of a run."""
        name = task.folder.name
        if task.folder not in self._tasks:
            self._tasks[task.folder] = self._progress.add_task(name, total=None, note="")
        bar = self._tasks[task.folder]
        if "of" in facts:
            self._progress.update(bar, total=facts["of"])
        if "rounds" in facts:
            total = self._progress.tasks[self._progress.task_ids.index(bar)].total
            self._shares[task.folder] = facts["rounds"] / total if total else 0.0
            self._progress.update(bar, completed=facts["rounds"])
        for note in ("work", "scores"):
            if note in facts:
                self._progress.update(bar, note=facts[note])
        self._progress.update(self._all, note=self._left())

    def ended(self, outcome: Outcome) -> None:
        """Takes the bar of a run away; says so where there are no bars, or if it failed."""
        folder = outcome.task.folder
        self._shares.pop(folder, None)
        if folder in self._tasks:
            self._progress.remove_task(self._tasks.pop(folder))
        if outcome.status == "completed":
            self._ended += 1
        done = self._before + self._ended
        self._progress.update(self._all, completed=done, note=self._left())
        if outcome.status == "failed" or not self._console.is_terminal:
            reason = f": {outcome.error}" if outcome.error else ""
            text = f"{done}/{self._total}  {folder.name} {outcome.status}{reason}"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def end(self) -> None:
        """Takes the display away."""
        self._progress.stop()

    def _left(self) -> str:
        """Time left, from what this call has done so far."""
        work = self._ended + sum(self._shares.values())
        left = self._total - self._before - work
        if work < 0.02:
            return ""
        seconds = (time.perf_counter() - self._started) / work * left
        return f"about {duration(seconds)} left"


@contextmanager
def working(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Shows a bar for whatever work reports to the function that this gives."""
    bar = _bars(console)
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=total)
        bar.update(tasks[what], completed=done, total=total)

    with bar:
        yield report


class Lines(Observer):
    """One plain line per evaluated round, for logs; used when asked for."""

    def __init__(self, console: Console) -> None:
        self._console, self._started = console, time.perf_counter()

    def scores(self, round: int, scores: Sequence[Score]) -> None:
        """Prints the accuracies."""
        text = "  ".join(f"{s.split}/{s.domain} {s.accuracy:.3f}" for s in scores)
        self._console.print(
            f"round {round:3d}  {time.perf_counter() - self._started:6.0f} s  {text}"
        )


def results_table(folders: Sequence[Path]) -> Table:
    """Returns the final accuracies of runs, one column per run, one row per split and domain."""
    records = [read_run(folder) for folder in folders]
    table = Table(title="accuracy after the final round")
    table.add_column("split")
    table.add_column("domain")
    for record in records:
        table.add_column(record.method, justify="right")
    for split, domain in _rows(records):
        cells = [_accuracy(record, split, domain) for record in records]
        style = "bold" if split == "test" else None
        table.add_row(SPLIT_WORDS[split], domain, *cells, style=style)
    return table


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


def _accuracy(record: RunRecord, split: str, domain: str) -> str:
    rounds = record.evaluations.rounds
    found = record.evaluations.get(rounds[-1], split, domain) if rounds else None
    return f"{found.accuracy:.1%}" if found else "-"


def print_work(console: Console, work: Work, jobs: int, measure: bool) -> None:
    """Prints what a comparison will do, and about how long it will take."""
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
    if work.missing and measure:
        console.print(_estimate_text(work, jobs), highlight=False)


def _estimate_text(work: Work, jobs: int) -> str:
    from feddg.clients.threads import threads, threads_per_job
    from feddg.comparing.estimate import estimate

    with threads(threads_per_job(jobs)):
        found = estimate([task.experiment for task in work.missing], complete_runs(work), jobs)
    if not found.known and not found.measured:
        return "time: unknown (nothing like it has run here, and it could not be measured)"
    sources = [
        f"{found.known} from finished runs" if found.known else "",
        f"{found.measured} from a few batches measured just now" if found.measured else "",
        f"{found.unknown} not known and left out" if found.unknown else "",
    ]
    reasons = "; ".join(source for source in sources if source)
    return f"time: {duration(found.low)} to {duration(found.high)} ({reasons})"


def complete_runs(work: Work) -> list[RunRecord]:
    """Returns the records of a comparison's complete runs."""
    missing = {task.folder for task in work.missing}
    return [read_run(folder) for folder in work.folders.values() if folder not in missing]


def as_rich(table: blocks.Table) -> Table:
    """Returns a report's table for the terminal."""
    shown = Table(caption=table.caption, caption_justify="left")
    for column in table.columns:
        heading = f"{column.heading}\n{column.note}" if column.note else column.heading
        shown.add_column(escape(heading), justify="right" if column.numeric else "left")
    for row in table.rows:
        shown.add_row(*(f"[bold]{escape(c.text)}[/]" if c.strong else escape(c.text) for c in row))
    return shown


def print_comparison(done: Comparison) -> None:
    """Prints where a comparison's results are, and which runs failed."""
    console = Console()
    results = read_comparison(done.folder)
    if results.results:
        console.print(as_rich(accuracy_table(results, FINAL)))
        margins = margin_table(results)
        if margins is not None:
            console.print(as_rich(margins))
    for outcome in done.failures:
        console.print(
            f"{outcome.status}: {outcome.task.folder.name}: {outcome.error or ''}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"folder: {done.folder}", highlight=False, soft_wrap=True)
    console.print(f"report: {done.report.resolve()}", highlight=False, soft_wrap=True)
