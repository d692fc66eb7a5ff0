"""Executes runs in a separate process: ``python -m feddg.comparison.process``.

Each input line is a job, see :func:`answer_to`; at the end of the input it stops. Each output line
is a JSON object with the progress or, at the end, the outcome. In a separate process each run has
its own peak memory and cannot crash the others. For short runs, one process gets several jobs.
"""

import _thread
import json
import os
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from feddg.clients.threads import share_of_process
from feddg.errors import FeddgError, in_words
from feddg.evaluation.accuracy import Score
from feddg.experiment import Experiment
from feddg.messages import Refusal, Update
from feddg.records import RoundRow
from feddg.runs.execute import carry_out
from feddg.runs.observer import Observer


class Reporter(Observer):
    """Reports the progress of a run in short messages.

    Args:
        tell: called with values by name: ``rounds`` done (a fraction for the current one), ``of``
            how many, ``work`` before training, ``scores``, how it ``ended``, the ``error``.
    """

    def __init__(self, tell: Callable[[Mapping[str, Any]], None]) -> None:
        self._tell = tell
        self._done, self._clients = 0.0, 1

    def start(self, experiment: Experiment, first_round: int) -> None:
        """See :class:`Observer`."""
        self._clients = experiment.clients.per_round or experiment.clients.number
        self._done = first_round - 1.0
        self.say(rounds=self._done, of=experiment.train.rounds)

    def work(self, what: str, done: int, total: int) -> None:
        """See :class:`Observer`."""
        if done in (0, total) or done % max(1, total // 50) == 0:
            self.say(work=what if done < total else "")

    def client(self, round: int, reply: Update | Refusal) -> None:
        """See :class:`Observer`."""
        self._done = min(round - 0.001, self._done + 1 / self._clients)
        self.say(rounds=self._done)

    def round(self, row: RoundRow) -> None:
        """See :class:`Observer`."""
        self._done = float(row.round)
        self.say(rounds=self._done)

    def scores(self, round: int, scores: Sequence[Score]) -> None:
        """See :class:`Observer`."""
        held = [score for score in scores if score.split in ("test", "val")]
        self.say(scores="  ".join(f"{score.domain} {score.accuracy:.1%}" for score in held))

    def say(self, **news: Any) -> None:
        """Sends a message."""
        self._tell(news)


def main() -> int:
    """Executes the jobs on standard input; returns the exit status."""
    # A comparison in the background may ignore this signal, and its children with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    lines, at_work = SimpleQueue[str](), threading.Event()
    threading.Thread(target=_listen, args=(lines, at_work), daemon=True).start()
    # Whatever a library prints must not end up among the answers.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(news: Mapping[str, Any]) -> None:
        out.write(json.dumps(news) + "\n")
        out.flush()

    while line := lines.get():
        try:
            at_work.set()
            if not lines.empty():  # the end of the input, which came before anybody was at work
                raise KeyboardInterrupt
            answer = answer_to(line, Reporter(tell))
            at_work.clear()
        except KeyboardInterrupt:
            tell({"ended": "interrupted"})
            break
        tell(answer)
    return 0


def _listen(lines: "SimpleQueue[str]", at_work: threading.Event) -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put("")
    if at_work.is_set():
        _thread.interrupt_main()


def answer_to(line: str, observer: Observer | None = None) -> dict[str, str]:
    """Executes a job and returns how it ended.

    Args:
        line: JSON with the run's ``folder``, its complete ``experiment``, the folder for decoded
            pixels (``cache``), the ``threads`` for tensor operations, and the ``device``, which
            is no part of an experiment's identity; none for the experiment's.
        observer: gets the progress.

    Returns:
        ``ended``, and the ``error`` if there was one.
    """
    job = json.loads(line)
    folder = Path(job["folder"])
    shared = folder.parent
    if not shared.is_dir():
        fault = f"{platform.node()} sees no folder {shared}: all machines must share it, and images"
        return {"ended": "failed", "error": fault}
    share_of_process(job["threads"])
    try:
        experiment = Experiment(**job["experiment"])
        if job.get("device") is not None:
            experiment = experiment.model_copy(update={"device": job["device"]})
        carry_out(
            folder,
            experiment,
            observer=observer or Observer(),
            cache=Path(job["cache"]),
            keep_unstarted=True,
        )
    except Exception as error:
        if not isinstance(error, FeddgError):
            traceback.print_exc()
        return {"ended": "failed", "error": in_words(error)}
    return {"ended": "completed"}


if __name__ == "__main__":
    sys.exit(main())
