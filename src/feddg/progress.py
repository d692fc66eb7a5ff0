"""Plans of runs, and their progress: bars on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from feddg.comparison.plan import DATA, Cell
from feddg.comparison.pool import Outcome, Reporter, Watcher
from feddg.evaluation.accuracy import Score
from feddg.experiment import DEFAULT, Experiment
from feddg.messages import Refusal, Update
from feddg.records import RoundRow
from feddg.runs.inspection import print_clients, print_diagnostic
from feddg.runs.observer import Observer
from feddg.text import counted, duration, print_line, short, value_text
from feddg.views import in_notebook

if TYPE_CHECKING:
    from feddg.comparison.compare import Comparison
    from feddg.runs.beforehand import Preview

SILENCE_SECONDS = 30.0
"""Without a terminal, a line is printed at least this often."""
Clock = Callable[[], float]
NOTE = TextColumn("{task.fields[note]}", markup=False)  # it names domains


def _bars(console: Console, *more: ProgressColumn) -> Progress:
    """Bars with done and total counts; silent if the console is not a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),  # of what, a bar may not know yet
        *more,
        console=console,
        disable=not (console.is_terminal or console.is_jupyter),
        transient=True,
    )


class Bars(Reporter):
    """Rich progress: preparation, rounds with clients, time left and the last accuracies.

    Silent when the console is not a terminal.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(self._show_rounds)
        self._progress = _bars(console, TimeRemainingColumn(compact=True), NOTE)
        self._tasks: dict[str, TaskID] = {}
        self._scores = ""

    def start(self, experiment: Experiment, first_round: int) -> None:
        """Shows the rounds."""
        label = f"{experiment.method.name}: rounds"
        self._show("rounds", label, total=experiment.train.rounds)
        super().start(experiment, first_round)

    def work(self, what: str, done: int, total: int) -> None:
        """Shows preparation."""
        self._show(what, what, total=total, completed=done, visible=done < total)

    def end(self, status: str) -> None:
        """Removes the bars."""
        self._progress.stop()

    def _show_rounds(self, news: Mapping[str, Any]) -> None:
        self._scores = news.get("scores", self._scores)
        done = {"completed": news["rounds"]} if "rounds" in news else {}
        self._progress.update(self._tasks["rounds"], note=self._scores, **done)

    def _show(self, name: str, text: str, **changes: Any) -> None:
        self._progress.start()
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(text, note="")
        self._progress.update(self._tasks[name], **changes)


def print_plan(console: Console, comparison: "Comparison") -> None:
    """Prints what a comparison will do."""
    plan, cells, missing = comparison.plan, comparison.cells, comparison.missing
    folders, started = comparison.folders, comparison.started
    complete = len(folders) - len(missing)
    table = Table(title=escape(plan.title or plan.name), show_header=False, box=None)
    sets = [[cell.conditions[DATA]] if DATA in cell.conditions else [] for cell in cells]
    held_out = ["/".join([*own, cell.held_out]) for own, cell in zip(sets, cells)]
    axes = {"methods": [cell.method for cell in cells], "held out": held_out}
    for name in dict.fromkeys(name for cell in cells for name in cell.conditions):
        # Of trials, a value of one method's own setting is no other method's.
        axes[name] = [cell.conditions[name] for cell in cells if name in cell.conditions]
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


def print_missing(done: "Comparison") -> None:
    """Prints what prevents a comparison that was not run, and what its next step would be."""
    from feddg.comparison.compare import why_hopeless
    from feddg.comparison.trials import TRIALS

    console = Console(stderr=True)
    if (hopeless := why_hopeless(done)) is not None:
        print_line(console, f"as things are, no run could start: {hopeless}")
    if done.missing and done.folder.name == TRIALS:
        print_line(console, "the table's runs follow, with the values that are picked")


def show_preview(found: "Preview") -> None:
    """Prints every setting of a planned run, where it comes from, and what the run takes."""
    console, figures = Console(), found.forecast
    table = Table("setting", "value", "where from", box=None, pad_edge=False)
    for path, setting in found.settings.items():
        style = "dim" if setting.source == DEFAULT else None
        table.add_row(path, escape(value_text(setting.value)), escape(setting.source), style=style)
    console.print(table)
    print_line(console, f"run folder: {found.folder} ({found.state})")
    roles = ", ".join(f"{role} {count}" for role, count in figures.splits.items() if count)
    print_line(console, f"images: {roles}")
    print_clients(console, figures.clients)
    for diagnostic in figures.diagnostics:
        print_diagnostic(console, diagnostic)
    print_line(
        console,
        f"memory: {figures.weights:,} weights, {decimal(figures.weight_bytes)} with gradients and "
        f"optimizer; {decimal(figures.pixel_bytes)} of decoded images in the cache",
    )


class PlannedRuns(Watcher):
    """Prints what a comparison will do, but not its progress."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def planned(self, comparison: "Comparison") -> None:
        """Prints it."""
        print_plan(self._console, comparison)


class ManyBars(PlannedRuns):
    """One display for many runs: how many are done, and a bar for each that is running.

    If the console is not a terminal: one line per run that ends, and one after a long silence.
    """

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        super().__init__(console)
        self._clock, self._last = clock, clock()
        self.start(0, 0)
        self.end()

    def start(self, total: int, done: int) -> None:
        """Shows the bar of all runs."""
        self._progress = _bars(self._console, TimeElapsedColumn(), NOTE)
        self._tasks: dict[Path, TaskID] = {}
        self._total, self._before, self._ended = total, done, 0
        self._started = time.perf_counter()
        self._progress.start()
        self._all = self._progress.add_task("runs", total=total, completed=done, note="")

    def news(self, cell: Cell, news: Mapping[str, Any]) -> None:
        """Moves the bar of a run."""
        name = cell.folder.name
        if cell.folder not in self._tasks:
            self._tasks[cell.folder] = self._progress.add_task(name, total=None, note="")
        shown = {"of": "total", "rounds": "completed", "work": "note", "scores": "note"}
        changes = {shown[name]: value for name, value in news.items() if name in shown}
        self._progress.update(self._tasks[cell.folder], **changes)
        self._progress.update(self._all, note=self._left())
        if not self._console.is_terminal and self._clock() - self._last >= SILENCE_SECONDS:
            self._say(f"{self._before + self._ended}/{self._total}  {self._going_on(cell)}")

    def ended(self, outcome: Outcome) -> None:
        """Removes the bar of a run; prints a line if there are no bars, or if it failed."""
        folder = outcome.cell.folder
        if folder in self._tasks:
            self._progress.remove_task(self._tasks.pop(folder))
        if outcome.status == "completed":
            self._ended += 1
        done = self._before + self._ended
        self._progress.update(self._all, completed=done, note=self._left())
        if outcome.status == "failed" or not self._console.is_terminal:
            reason = f": {outcome.error}" if outcome.error else ""
            self._say(f"{done}/{self._total}  {folder.name} {outcome.status}{reason}")

    def end(self) -> None:
        """Removes the display."""
        self._progress.stop()

    def _say(self, text: str) -> None:
        self._last = self._clock()
        print_line(self._console, text)

    def _going_on(self, cell: Cell) -> str:
        bar = self._progress.tasks[self._progress.task_ids.index(self._tasks[cell.folder])]
        rounds = f"{bar.completed:.0f} of {bar.total:.0f} rounds" if bar.total else "preparing"
        left = self._left()
        return f"{cell.folder.name}: {rounds}{left and f'; {left}'}"

    def _left(self) -> str:
        """The time left, estimated from what this call has done so far."""
        under_way = (bar.percentage for bar in self._progress.tasks if bar.id != self._all)
        work = self._ended + sum(under_way) / 100
        left = self._total - self._before - work
        if work < 0.02:
            return ""
        seconds = (time.perf_counter() - self._started) / work * left
        return f"about {duration(seconds)} left"


class Lines(Observer):
    """Plain lines for logs: one per evaluated round, and one after a long silence.

    Args:
        console: where lines are printed.
        clock: returns seconds since some moment.
    """

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._started = self._last = clock()
        self._rounds, self._clients, self._done, self._round = 0, 0, 0, 0
        self._first = 0

    def start(self, experiment: Experiment, first_round: int) -> None:
        """Prints what is run."""
        clients = experiment.clients
        self._rounds, self._round = experiment.train.rounds, first_round
        self._first = first_round
        self._clients = min(clients.per_round or clients.number, clients.number)
        begun = "" if first_round == 1 else f", from round {first_round} on"
        self._say(f"{experiment.method.name}: {counted(self._rounds, 'round')}{begun}")

    def work(self, what: str, done: int, total: int) -> None:
        """Prints the progress of the preparation."""
        self._say_at_times(f"{what}: {done} of {total}")

    def client(self, round: int, reply: Update | Refusal) -> None:
        """Prints the progress of the round."""
        self._done = self._done + 1 if round == self._round else 1
        self._round = round
        clients = f"{self._done} of {self._clients} clients"
        self._say_at_times(f"round {round} of {self._rounds}: {clients}")

    def round(self, row: RoundRow) -> None:
        """Prints that a round is complete; after the first, how long the others will take."""
        left = (self._rounds - row.round) * sum(row.seconds.values())
        if row.round == self._first and left >= SILENCE_SECONDS:
            self._say(f"round {row.round} of {self._rounds}: about {duration(left)} left")
        self._say_at_times(f"round {row.round} of {self._rounds}")

    def scores(self, round: int, scores: Sequence[Score]) -> None:
        """Prints the accuracies."""
        text = "  ".join(f"{s.split}/{s.domain} {s.accuracy:.3f}" for s in scores)
        self._say(f"round {round:3d}  {self._clock() - self._started:6.0f} s  {text}")

    def _say_at_times(self, text: str) -> None:
        now = self._clock()
        if now - self._last >= SILENCE_SECONDS:
            self._say(f"{text}, after {duration(now - self._started)}")

    def _say(self, text: str) -> None:
        self._last = self._clock()
        print_line(self._console, text)


def observer(quiet: bool = False, verbose: bool = False) -> Observer:
    """Returns the observer that shows a run: nothing, bars, or lines."""
    console = _console()
    if quiet:
        return Observer()
    bars = (console.is_terminal or console.is_jupyter) and not verbose
    return Bars(console) if bars else Lines(console)


def watcher(quiet: bool = False) -> Watcher:
    """Returns the watcher that shows many runs; only their plan if quiet."""
    console = _console()
    return PlannedRuns(console) if quiet else ManyBars(console)


def notebook_observer() -> Observer | None:
    """Returns the observer that shows a run in a notebook, None elsewhere."""
    return observer() if in_notebook() else None


def notebook_watcher() -> Watcher | None:
    """Returns the watcher that shows many runs in a notebook; see :func:`notebook_observer`."""
    return watcher() if in_notebook() else None


def _console() -> Console:
    """Returns standard error, or a notebook's cell; Rich draws its bars there with ipywidgets."""
    if in_notebook():
        return Console(force_jupyter=find_spec("ipywidgets") is not None)
    return Console(stderr=True)


@contextmanager
def working(quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function to report progress with, shown on standard error."""
    shown = observer(quiet)
    try:
        yield shown.work
    finally:
        shown.end("completed")
