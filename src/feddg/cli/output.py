"""What a person sees: progress, tables of results, and what a run would do."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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

from feddg.api import Preview
from feddg.comparison.compare import Comparison, Work, why_hopeless
from feddg.comparison.estimate import Forecast, estimate
from feddg.comparison.pool import Outcome, Task, Watcher
from feddg.comparison.tuning import TRIALS
from feddg.data.partition import in_words
from feddg.diagnostics import Diagnostic
from feddg.evaluation.accuracy import Score
from feddg.experiment import DEFAULT, Experiment, Origin
from feddg.messages import Refusal, Update
from feddg.prediction.evaluate import Adaptations, PairedRuns
from feddg.records import SPLITS, AttackRow, EvaluationRow, RoundRow
from feddg.report.text import counted, duration, interval_words, spelled, warning_words
from feddg.runs.diagnostics import about_result, accuracy_interval, measured
from feddg.runs.execute import is_complete
from feddg.runs.inspection import STYLES, holdings_table, print_diagnostic, skew_between
from feddg.runs.observer import Observer
from feddg.runs.reading import RunRecord, read_run

if TYPE_CHECKING:
    from feddg.report import blocks

# Pages need plotly: a run that begins must not wait for it.

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
        warnings = warning_words(about_result(record))
        name = escape(f"{record.method}{rule}{f' ({warnings})' if warnings else ''}")
        table.add_column(f"{name}\n(95 % interval)\nbalanced", justify="right")
    for split, domain in _rows(records):
        rows = [_last_row(record, split, domain) for record in records]
        largest = next((_share(row, "largest_class_share") for row in rows if row), "-")
        cells = [_accuracy(row) for row in rows]
        style = "bold" if split == "test" else None
        table.add_row(SPLIT_WORDS[split], domain, largest, *cells, style=style)
    return table


def print_about_results(console: Console, folders: Sequence[Path]) -> None:
    """Prints what speaks against the accuracies of runs, a line each."""
    for run in map(read_run, folders):
        name = f"{spelled(run.method)}: " if len(folders) > 1 else ""
        for one in about_result(run):
            print_diagnostic(console, replace(one, text=f"{name}{one.text}"))


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
    axes = {"methods": [cell.method for cell in cells], "held out": [c.held_out for c in cells]}
    for name in dict.fromkeys(name for cell in cells for name in cell.conditions):
        axes[name] = [cell.conditions[name] for cell in cells]
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


def as_rich(table: "blocks.Table") -> Table:
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
    from feddg.report.tables import (
        about_best,
        about_results,
        accuracy_table,
        conclusion,
        margin_table,
    )

    console = Console()
    results = done.results
    if results.rows:
        console.print(as_rich(accuracy_table(results, results.served)))
        margins = margin_table(results, results.served)
        if margins is not None:
            console.print(as_rich(margins))
        print_line(console, conclusion(results).text)
        found = about_best(results) if explained else None
        if found is not None:
            console.print(f"{found[0]}: {found[1]}", markup=False, highlight=False)
    for one in about_results(results):
        print_diagnostic(console, one)
    for outcome in done.failures:
        console.print(
            f"{outcome.status}: {outcome.task.folder.name}: {outcome.error or ''}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"folder: {done.folder}", highlight=False, soft_wrap=True)
    console.print(f"report: {done.report.resolve()}", highlight=False, soft_wrap=True)


def print_missing(done: Comparison) -> None:
    """Prints of a comparison that was not run what speaks against it, and what would follow."""
    console = Console(stderr=True)
    if (hopeless := why_hopeless(done.work)) is not None:
        print_line(console, f"as things are, no run could start: {hopeless}")
    if done.work.missing and done.work.out.name == TRIALS:
        print_line(console, "the table's runs follow, with the values that are picked")


def print_paired(found: PairedRuns, first: str, second: str) -> None:
    """Prints how two runs called ``first`` and ``second`` differ image by image."""
    from feddg.report.comparison_page import mcnemar_words, paired_table

    console = Console()
    console.print(as_rich(paired_table(found, first, second)))
    print_line(console, mcnemar_words(found))


def print_attack(rows: Sequence[AttackRow]) -> None:
    """Prints the tables of an attack."""
    from feddg.report.leaks import attack_tables

    for table in attack_tables(rows):
        Console().print(as_rich(table))


# What a person sees while a run goes on: bars on a terminal, a line now and then elsewhere.


SILENCE_SECONDS = 30.0
"""Without a terminal, nothing goes on for longer than this without a line."""
Clock = Callable[[], float]
NOTE = TextColumn("{task.fields[note]}")


def _bars(console: Console, *more: ProgressColumn) -> Progress:
    """Bars with what is done and how much there is; silent when the console is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),  # of what, a bar may not know yet
        *more,
        console=console,
        disable=not (console.is_terminal or console.is_jupyter),
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

    def diagnostic(self, found: Diagnostic) -> None:
        """Prints it."""
        print_diagnostic(self._progress.console, found)

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


class PlannedWork(Watcher):
    """Says what a comparison will do, and nothing of how it goes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def planned(self, work: Work, jobs: int) -> None:
        """Prints it."""
        print_work(self._console, work, max(1, jobs))


class ManyBars(PlannedWork):
    """One display for many runs: how many are done, and a bar for each that goes on.

    On a console that is no terminal, one line per run that ends, and one after a long silence.
    """

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        super().__init__(console)
        self._clock, self._last = clock, clock()
        self.start(0, 0, 0)
        self.end()

    def start(self, total: int, done: int, jobs: int) -> None:
        """Shows the bar of all runs."""
        self._progress = _bars(self._console, TimeElapsedColumn(), NOTE)
        self._tasks: dict[Path, TaskID] = {}
        self._shares: dict[Path, float] = {}
        self._total, self._before, self._ended = total, done, 0
        self._started = time.perf_counter()
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
        if not self._console.is_terminal and self._clock() - self._last >= SILENCE_SECONDS:
            self._say(f"{self._before + self._ended}/{self._total}  {self._going_on(task)}")

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
            self._say(f"{done}/{self._total}  {folder.name} {outcome.status}{reason}")

    def end(self) -> None:
        """Takes the display away."""
        self._progress.stop()

    def _say(self, text: str) -> None:
        self._last = self._clock()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _going_on(self, task: Task) -> str:
        bar = self._progress.tasks[self._progress.task_ids.index(self._tasks[task.folder])]
        rounds = f"{bar.completed:.0f} of {bar.total:.0f} rounds" if bar.total else "preparing"
        left = self._left()
        return f"{task.folder.name}: {rounds}{left and f'; {left}'}"

    def _left(self) -> str:
        """Time left, from what this call has done so far."""
        work = self._ended + sum(self._shares.values())
        left = self._total - self._before - work
        if work < 0.02:
            return ""
        seconds = (time.perf_counter() - self._started) / work * left
        return f"about {duration(seconds)} left"


class Lines(Observer):
    """Plain lines for logs: one per evaluated round, and one whenever it was silent for long.

    Args:
        console: where to.
        clock: seconds since some moment.
    """

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._started = self._last = clock()
        self._rounds, self._clients, self._done, self._round = 0, 0, 0, 0
        self._first = 0

    def start(self, experiment: Experiment, first_round: int) -> None:
        """Says what is run."""
        clients = experiment.clients
        self._rounds, self._round = experiment.train.rounds, first_round
        self._first = first_round
        self._clients = min(clients.per_round or clients.number, clients.number)
        begun = "" if first_round == 1 else f", from round {first_round} on"
        self._say(f"{experiment.method.name}: {self._rounds} rounds{begun}")

    def work(self, what: str, done: int, total: int) -> None:
        """Says how far preparation is."""
        self._say_at_times(f"{what}: {done} of {total}")

    def client(self, round: int, reply: Update | Refusal) -> None:
        """Says how far the round is."""
        self._done = self._done + 1 if round == self._round else 1
        self._round = round
        clients = f"{self._done} of {self._clients} clients"
        self._say_at_times(f"round {round} of {self._rounds}: {clients}")

    def round(self, row: RoundRow) -> None:
        """Says that a round was fused; of the first, how long the others will take like it."""
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
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def observer(quiet: bool = False, verbose: bool = False) -> Observer:
    """Returns what shows a run on standard error: nothing, bars on a terminal, or lines."""
    console = Console(stderr=True)
    if quiet:
        return Observer()
    return Bars(console) if console.is_terminal and not verbose else Lines(console)


def watcher(quiet: bool = False) -> Watcher:
    """Returns what shows many runs on standard error; their plan alone if it is to be quiet."""
    console = Console(stderr=True)
    return PlannedWork(console) if quiet else ManyBars(console)


def notebook_observer() -> Observer:
    """Returns what shows a run in a notebook: bars, or lines where it has no widgets."""
    console = _notebook_console()
    return Bars(console) if console.is_jupyter else Lines(console)


def notebook_watcher() -> Watcher:
    """Returns what shows many runs in a notebook; see :func:`notebook_observer`."""
    return ManyBars(_notebook_console())


def _notebook_console() -> Console:
    """Rich draws bars in a notebook by ipywidgets only."""
    return Console(force_jupyter=find_spec("ipywidgets") is not None)


@contextmanager
def working(quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Shows on standard error whatever work reports to the function that this gives."""
    shown = observer(quiet)
    try:
        yield shown.work
    finally:
        shown.end("completed")


# What ``feddg run --dry-run`` shows: every setting and where it comes from, and what it takes.


def show_preview(found: Preview) -> None:
    """Prints an experiment completely, and what it would take."""
    console = Console()
    console.print(_settings_table(found.settings))
    print_line(console, f"run folder: {found.folder} ({found.state})")
    _print_forecast(console, found.forecast)


def print_line(console: Console, text: str) -> None:
    """Prints a line as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _settings_table(found: Mapping[str, Origin]) -> Table:
    table = Table("setting", "value", "where from", box=None, pad_edge=False)
    for path, setting in found.items():
        style = "dim" if setting.source == DEFAULT else None
        table.add_row(path, escape(_text(setting.value)), escape(setting.source), style=style)
    return table


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None or value == {} else str(value)


def _print_forecast(console: Console, found: Forecast) -> None:
    roles = ", ".join(f"{role} {count}" for role, count in found.splits.items() if count)
    print_line(console, f"images: {roles}")
    console.print(holdings_table(found.clients))
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
    """Returns what checks found as a table, one row each."""
    table = Table("", "check", "found", "what to do")
    for one in found:
        passed = one.severity == "note"
        style, word = ("green", "ok") if passed else (STYLES[one.severity], one.severity)
        texts = (escape(text) for text in (one.short, one.text, one.advice))
        table.add_row(f"[{style}]{word}[/]", *texts)
    return table
