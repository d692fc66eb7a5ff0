"""What a person sees while a run goes on: progress bars, a table at the end."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from feddg.evaluation.accuracy import Score
from feddg.experiment import Experiment
from feddg.federation.server import RoundRecord
from feddg.messages import Refusal, Update
from feddg.runs.observer import Observer
from feddg.runs.records import SPLITS, RunRecord, read_run

SPLIT_WORDS = {
    "test": "held-out test",
    "val": "held-out validation",
    "id_val": "in-domain validation",
    "id_test": "in-domain test",
}


class Bars(Observer):
    """Rich progress: preparation, rounds with clients, images per second and time left.

    Silent when the console is not a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
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

    def round(self, record: RoundRecord) -> None:
        """Moves the bar to the end of a round."""
        self._progress.update(self._tasks["rounds"], completed=record.round, note=self._note())

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


def _rows(records: Sequence[RunRecord]) -> list[tuple[str, str]]:
    pairs = [(s, d) for s in SPLITS for record in records for d in record.evaluations.domains(s)]
    return list(dict.fromkeys(pairs))


def _accuracy(record: RunRecord, split: str, domain: str) -> str:
    rounds = record.evaluations.rounds
    found = record.evaluations.get(rounds[-1], split, domain) if rounds else None
    return f"{found.accuracy:.1%}" if found else "-"
