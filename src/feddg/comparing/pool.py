"""Many runs, in this process one after another or in several processes of their own."""

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import IO, Any

from feddg.clients.threads import environment_of_job, threads_per_job
from feddg.comparing.process import Job, Reporter
from feddg.errors import in_words
from feddg.experiment import Experiment
from feddg.runs.execute import carry_out

LOG_FOLDER = "logs"
STOP_SECONDS = 60

log = logging.getLogger("feddg")


@dataclass(frozen=True)
class Task:
    """An experiment and the folder its run goes to."""

    experiment: Experiment
    folder: Path


@dataclass(frozen=True)
class Outcome:
    """How a task ended: ``completed``, ``failed`` with the reason, or ``interrupted``."""

    task: Task
    status: str
    error: str | None = None


class Watcher:
    """Is told how many runs go; every method may be left as it is here, silent."""

    def start(self, total: int, done: int, jobs: int) -> None:
        """``done`` of ``total`` runs were complete beforehand; ``jobs`` will go at once."""

    def news(self, task: Task, facts: Mapping[str, Any]) -> None:
        """A run said something: see :class:`feddg.comparing.process.Reporter`."""

    def ended(self, outcome: Outcome) -> None:
        """A run ended."""

    def end(self) -> None:
        """Nothing goes on any more."""


def run_here(tasks: Sequence[Task], cache: Path, watcher: Watcher) -> Iterator[Outcome]:
    """Carries tasks out in this process; one that fails does not stop the others.

    Yields:
        How each ended. KeyboardInterrupt goes through, with the run's folder left to be continued.
    """
    for task in tasks:
        outcome = _run_here(task, cache, watcher)
        watcher.ended(outcome)
        yield outcome


def _run_here(task: Task, cache: Path, watcher: Watcher) -> Outcome:
    try:
        reporter = Reporter(lambda facts: watcher.news(task, facts))
        carry_out(task.folder, task.experiment, observer=reporter, cache=cache, keep_unstarted=True)
    except Exception as error:
        log.debug("run %s", task.folder, exc_info=True)
        return Outcome(task, "failed", in_words(error))
    return Outcome(task, "completed")


class Processes:
    """Carries tasks out, each in a process of its own, several at a time.

    The processes are apart from this one's terminal, so Ctrl-C reaches this process alone, which
    then asks them to stop: each ends with its run ready to be continued. They also stop by
    themselves when this process dies.

    Args:
        jobs: how many at a time.
        cache: folder for decoded pixels and twins.
        logs: folder for what the processes print.
        watcher: is told what happens.
        reuse: whether a process carries out several tasks, one after another: no start for each,
            but the peak memory that a run notes is that of all before it, too.
    """

    def __init__(
        self, jobs: int, cache: Path, logs: Path, watcher: Watcher, *, reuse: bool = False
    ) -> None:
        self._jobs, self._cache, self._logs, self._watcher = jobs, cache, logs, watcher
        self._reuse = reuse
        self._idle: dict[int, subprocess.Popen[str]] = {}
        self._threads = threads_per_job(jobs)
        self._devices = _devices()
        self._lock = threading.Lock()
        self._alive: set[subprocess.Popen[str]] = set()
        self._stopping = False

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Carries out the tasks.

        Yields:
            How each ended, in the order of ending.
        """
        waiting = list(reversed(tasks))
        ended: Queue[Outcome] = Queue()

        def work(place: int) -> None:
            while True:
                with self._lock:
                    if self._stopping or not waiting:
                        return
                    task = waiting.pop()
                ended.put(self._carry_out(task, place))

        threads = [
            threading.Thread(target=work, args=(place,), daemon=True)
            for place in range(min(self._jobs, len(tasks)))
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in tasks:
                outcome = ended.get()
                self._watcher.ended(outcome)
                yield outcome
        finally:
            self._stop()
            for thread in threads:
                thread.join()

    def _carry_out(self, task: Task, place: int) -> Outcome:
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            name = f"process{place + 1}" if self._reuse else task.folder.name
            log_file = self._logs / f"{name}.log"
            with log_file.open("a" if self._reuse else "w", encoding="utf-8") as log_to:
                outcome = self._follow(task, place, log_to)
        except OSError as error:
            return Outcome(task, "failed", f"its process could not be started: {error}")
        if log_file.stat().st_size == 0 and not self._reuse:
            log_file.unlink()
        return outcome

    def _follow(self, task: Task, place: int, log_to: IO[str]) -> Outcome:
        process = self._idle.pop(place, None) or self._start(log_to)
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # it died at once; its exit status tells
            process.stdin.write(self._job(task, place).to_line())
            process.stdin.flush()
        last: Mapping[str, Any] = {}
        for line in process.stdout:
            last = json.loads(line)
            self._watcher.news(task, last)
            if self._reuse and last.get("ended") in ("completed", "failed"):
                self._idle[place] = process
                return Outcome(task, last["ended"], last.get("error"))
        with process:
            process.wait()
        with self._lock:
            self._alive.discard(process)
        if "ended" in last:
            return Outcome(task, last["ended"], last.get("error"))
        return Outcome(task, "failed", f"{_death(process.returncode)}; see {log_to.name}")

    def _job(self, task: Task, place: int) -> Job:
        device = self._devices[place % len(self._devices)] if self._devices else None
        return Job(
            str(task.folder),
            task.experiment.model_dump(mode="json"),
            str(self._cache),
            self._threads,
            device if task.experiment.device == "auto" else None,
            self._reuse,
        )

    def _start(self, log_to: IO[str]) -> "subprocess.Popen[str]":
        with self._lock:
            process = subprocess.Popen(
                [sys.executable, "-m", "feddg.comparing.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_to,
                text=True,
                encoding="utf-8",
                env=environment_of_job(self._threads),
                start_new_session=True,
            )
            self._alive.add(process)
        return process

    def _stop(self) -> None:
        with self._lock:
            self._stopping = True
            alive = list(self._alive)
        for process in alive:
            with suppress(OSError):
                if process.stdin is not None:
                    process.stdin.close()
        for process in alive:
            try:
                process.wait(STOP_SECONDS)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                process.kill()
            if process in self._idle.values() and process.stdout is not None:
                process.stdout.close()  # that of others is closed by who follows it


def _devices() -> list[str]:
    """One name per GPU, when there are several to spread the runs over."""
    import torch

    count = torch.cuda.device_count()
    return [f"cuda:{i}" for i in range(count)] if count > 1 else []


def _death(status: int) -> str:
    if status == -9:
        return "its process was killed, perhaps for want of memory"
    return f"its process died ({'signal' if status < 0 else 'status'} {abs(status)})"
