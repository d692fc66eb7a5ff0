"""One run in a process of its own: ``python -m feddg.comparison.process``.

A line of its input is a job, see :func:`answer_to`; the end of its input tells it to stop. It
answers on its output, one JSON object per line: what it is doing, and in the end how it went. A
process of its own gives each run its own peak memory, and takes nothing down when it dies. Where
runs are so short that starting processes would be most of the work, further jobs follow as further
lines.
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
    """Tells in few words what happens.

    Args:
        tell: is given news by name: ``rounds`` done (with a share of the one going on), ``of`` how
            many, ``work`` before training, ``scores``, how it ``ended``, the ``error``.
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
        """Tells news."""
        self._tell(news)


def main() -> int:
    """Carries out the jobs on standard input; returns the exit status."""
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
    """Carries out a job, and returns how it ended.

    Args:
        line: JSON with the run's ``folder``, its complete ``experiment``, the folder for decoded
            pixels (``cache``), the ``threads`` for tensor operations, and the ``device``, which
            is no part of an experiment's identity; none for the experiment's.
        observer: is told what happens.

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
