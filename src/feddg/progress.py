"""Plans of runs, and their progress: bars on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from feddg.comparison.plan import DATA
from feddg.comparison.pool import ROUNDS, Outcome, Reporter, Watcher
from feddg.experiment import DEFAULT
from feddg.runs.inspection import print_clients, print_diagnostic
from feddg.text import counted, duration, print_line, short, value_text
from feddg.views import in_notebook

if TYPE_CHECKING:
    from feddg.comparison.compare import Comparison
    from feddg.runs.beforehand import Preview

SILENCE_SECONDS = 30.0
"""Without bars, a line is printed at least this often."""
LEAST_WORK = 0.02
"""What must be done, of a run for example, before it is said how long the rest will take."""


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


class Display(Watcher):
    """Shows how far work is: a bar for each run, and one for all runs of a comparison.

    Where bars cannot be drawn: a line for each run that ends, and one after a long silence; of a
    run outside a comparison, one for each evaluation.

    Args:
        quiet: whether only the plan of a comparison is shown.
        lines: whether lines are printed in a terminal, too.
        console: where to show it; standard error, or a notebook's cell, by default.
        clock: returns seconds since some moment.
    """

    def __init__(
        self,
        quiet: bool = False,
        lines: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._clock, self._last = console or _console(), clock, clock()
        self._quiet = quiet
        self._lines = lines or not (self._console.is_terminal or self._console.is_jupyter)
        self._begin()

    def _begin(self) -> None:
        """Makes new bars: old ones, started again, would erase what was printed below them."""
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),  # it names domains
            BarColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=self._console,
            get_time=self._clock,
            disable=self._quiet or self._lines,
            transient=True,
        )
        self._bars: dict[Path | None, TaskID] = {}  # by the run's folder, None for all runs

    def planned(self, comparison: "Comparison") -> None:
        """Prints what a comparison will do."""
        print_plan(self._console, comparison)

    def start(self, total: int, done: int) -> None:
        """Shows the bar of all runs."""
        self._begin()
        self._total, self._done = total, done
        self._count_runs()

    def news(self, folder: Path, news: Mapping[str, Any]) -> None:
        """Moves the bar of a run; see :class:`feddg.comparison.pool.Reporter`."""
        line, alone = self._move(folder, **news), None not in self._bars
        if not alone:
            line = f"{self._count_runs()}; {line}"
        silent = self._clock() - self._last >= SILENCE_SECONDS
        if self._lines and (silent or (alone and "scores" in news)):
            self._say(line)

    def ended(self, outcome: Outcome) -> None:
        """Removes the bar of a run; prints a line if there are no bars, or if it failed."""
        folder = outcome.cell.folder
        if folder in self._bars:
            self._progress.remove_task(self._bars.pop(folder))
        self._done += outcome.status == "completed"
        line = f"{self._count_runs()}; {folder.name} {outcome.status}"
        if outcome.status == "failed" or self._lines:
            self._say(f"{line}: {outcome.error}" if outcome.error else line)

    def end(self) -> None:
        """Removes all bars."""
        self._progress.stop()

    def _say(self, text: str) -> None:
        self._last = self._clock()
        if not self._quiet:
            print_line(self._console, text)

    def _count_runs(self) -> str:
        """Moves the bar of all runs, each of which counts as far as its rounds are done."""
        bars = self._progress.tasks
        under_way = sum(bar.percentage for bar in bars if bar.fields["what"] == ROUNDS) / 100
        return self._move(None, "runs", self._done, self._total, under_way=under_way)

    def _move(
        self,
        folder: Path | None,
        what: str,
        done: float,
        of: int,
        scores: str | None = None,
        under_way: float = 0.0,
    ) -> str:
        """Moves a bar, or begins it anew if it counts something else now; returns its text."""
        self._progress.start()
        if folder not in self._bars:
            self._bars[folder] = self._progress.add_task("", what="", scores="", note="")
        bar = next(bar for bar in self._progress.tasks if bar.id == self._bars[folder])
        now = done + under_way
        if bar.fields["what"] != what:
            fields = bar.fields | {"what": what, "first": now}
            self._progress.reset(bar.id, **fields)
        if scores is not None:
            bar.fields["scores"] = scores
        name = f"{folder.name}, " if folder and folder.name else ""
        text = f"{name}{what}: {round(done, 1):.12g} of {of or '?'}"
        work, left = now - bar.fields["first"], ""
        if work >= LEAST_WORK and of - now >= LEAST_WORK:
            seconds = (bar.elapsed or 0.0) / work * (of - now)
            left = f"about {duration(seconds)} left"
        note = "; ".join(filter(None, [bar.fields["scores"], left]))
        self._progress.update(bar.id, completed=now, total=of, description=text, note=note)
        return "; ".join(filter(None, [text, note]))


class OneRun(Reporter):
    """Shows a run that runs alone.

    Args:
        display: where it is shown.
    """

    def __init__(self, display: Display) -> None:
        super().__init__(partial(display.news, Path()))
        self._display = display

    def end(self, status: str) -> None:
        """Removes the bars."""
        self._display.end()


def notebook_observer() -> OneRun | None:
    """Returns the observer that shows a run in a notebook, None elsewhere."""
    return OneRun(Display()) if in_notebook() else None


def notebook_watcher() -> Display | None:
    """Returns the watcher that shows many runs in a notebook; see :func:`notebook_observer`."""
    return Display() if in_notebook() else None


def _console() -> Console:
    """Returns standard error, or a notebook's cell, where bars need ipywidgets."""
    if in_notebook():
        # Jupyter says FORCE_COLOR, but a cell keeps whatever would move a terminal's cursor.
        return Console(force_jupyter=find_spec("ipywidgets") is not None, force_terminal=False)
    return Console(stderr=True)


@contextmanager
def working(quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function to report progress with, shown on standard error."""
    shown = OneRun(Display(quiet))
    try:
        yield shown.work
    finally:
        shown.end("completed")
