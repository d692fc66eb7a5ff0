"""Many runs: in this process, in processes of their own, or under Slurm."""

import _thread
import functools
import json
import logging
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean
from typing import Any, ClassVar, Literal

from pydantic import Field

from feddg.clients.threads import (
    SHARE_OF_MEMORY,
    available_cores,
    share_of_process,
    training_memory,
)
from feddg.comparison.plan import Cell
from feddg.diagnostics import logged_once
from feddg.errors import ExperimentError, FeddgError, in_words, need, schema_faults
from feddg.evaluation.accuracy import Score
from feddg.experiment import Experiment
from feddg.federation.federation import build
from feddg.messages import Refusal, Update
from feddg.records import ID_VAL, TEST, VAL, RoundRow
from feddg.registry import Registry
from feddg.runs.execute import carry_out
from feddg.runs.observer import Observer
from feddg.runs.processes import Child, child, death, end, threads_per_job, with_parent
from feddg.settings import Settings

LOG_FOLDER = "logs"
ROUNDS = "rounds"
STOP_SECONDS = 60

log = logging.getLogger("feddg")
SECONDS_BETWEEN_LOOKS = 2.0
MOST_LIMITS = 20
"""How often a run may reach its time limit; a run that completes no round would never end."""
MOST_ON_A_GPU = 8
"""Processes that share a GPU well: measured on an H100, eight train 4.2 times what one does."""
BESIDE = 2**30
"""Bytes on a GPU, besides what training needs, of a process that uses it."""


@dataclass(frozen=True)
class Outcome:
    """How a cell's run ended: ``completed``, ``failed`` with the reason, or ``interrupted``."""

    cell: Cell
    status: str
    error: str | None = None


class Watcher:
    """Watches the progress of many runs; its methods do nothing by default."""

    def planned(self, comparison: Any) -> None:
        """A plan's contents, before any of it is run.

        If the plan has a ``tune`` section, the trials come first, then the table.
        """

    def start(self, total: int, done: int) -> None:
        """The others begin: ``done`` of ``total`` runs were complete."""

    def news(self, folder: Path, news: Mapping[str, Any]) -> None:
        """The run in ``folder`` reported something: see :class:`Reporter`."""

    def ended(self, outcome: Outcome) -> None:
        """A run ended."""

    def end(self) -> None:
        """All work has ended."""


class Reporter(Observer):
    """Reports the progress of a run in short messages.

    Args:
        tell: called with values by name: ``what`` is counted (:data:`ROUNDS`, or what comes before
            them), how much is ``done`` (a fraction for the current round), ``of`` how much (0 if
            nobody knows), and ``scores`` once the model is evaluated (none as the rounds begin).
    """

    def __init__(self, tell: Callable[[Mapping[str, Any]], None]) -> None:
        self._tell = tell
        self._done, self._rounds, self._clients = 0.0, 0, 1
        self._told: tuple[str, int] | None = None

    def start(self, experiment: Experiment, first_round: int) -> None:
        """See :class:`Observer`."""
        self._rounds = experiment.train.rounds
        self._clients = experiment.clients.per_round or experiment.clients.number
        self._go_on(first_round - 1.0, scores="")

    def work(self, what: str, done: int, total: int) -> None:
        """See :class:`Observer`."""
        step = (what, 1000 * done // (total or 1))
        if step != self._told:  # a pipe, or a display, need not hear of every image
            self._told = step
            self._tell({"what": what, "done": done, "of": total})

    def client(self, round: int, reply: Update | Refusal) -> None:
        """See :class:`Observer`."""
        self._go_on(min(round - 0.001, self._done + 1 / self._clients))

    def round(self, row: RoundRow) -> None:
        """See :class:`Observer`."""
        self._go_on(float(row.round))

    def scores(self, round: int, scores: Sequence[Score]) -> None:
        """See :class:`Observer`."""
        texts = [f"{s.domain} {s.accuracy:.1%}" for s in scores if s.split in (TEST, VAL)]
        if inside := [score.accuracy for score in scores if score.split == ID_VAL]:
            texts.append(f"in-domain {fmean(inside):.1%}")
        self._go_on(self._done, scores=f"round {round}: {', '.join(texts)}")

    def _go_on(self, done: float, **more: str) -> None:
        self._done = done
        self._tell({"what": ROUNDS, "done": done, "of": self._rounds, **more})


def run_here(cells: Sequence[Cell], cache: Path, watcher: Watcher) -> Generator[Outcome]:
    """Carries out the runs of cells in this process; a failed run does not stop the others.

    Yields:
        How each ended. KeyboardInterrupt is passed on; the run's folder can be continued.
    """
    with logged_once():
        for cell in cells:
            told = Reporter(functools.partial(watcher.news, cell.folder))
            outcome = Outcome(cell, "completed")
            try:
                carry_out(
                    cell.folder, cell.experiment, observer=told, cache=cache, keep_unstarted=True
                )
            except Exception as error:
                log.debug("run %s", cell.folder, exc_info=True)
                outcome = Outcome(cell, "failed", in_words(error))
            watcher.ended(outcome)
            yield outcome


# Launchers: what carries a comparison's runs out, on this machine or on others.
#
# A launcher is one registered class in one file. Ours are in :mod:`feddg.comparison.pool`;
# another package adds one with :func:`register_launcher`, or through an entry point of the group
# ``feddg.launchers``. Whatever it is, runs are the same: each writes its own folder, continues
# where it was interrupted, and one that fails stops nobody. So the folder of the comparison, the
# images and the cache must be on a file system that all machines share.


class Launcher(ABC):
    """Carries runs out.

    Args:
        jobs: how many at a time.
        cache: folder for decoded pixels and stylized copies.
        logs: folder for what the runs print.
        watcher: is told what happens.
        options: the launcher's own options.

    Attributes:
        name: the name that selects it.
        Settings: the class of its options.
        settings: its options.

    Raises:
        ExperimentError: an option is unknown, or has a wrong value.
    """

    name: ClassVar[str]
    Settings: ClassVar[type[Settings]] = Settings

    def __init__(
        self, jobs: int, cache: Path, logs: Path, watcher: Watcher, options: Mapping[str, Any]
    ) -> None:
        self.jobs, self.cache, self.logs, self.watcher = jobs, cache, logs, watcher
        fields = self.Settings.model_fields
        with schema_faults(ExperimentError, f"launcher {self.name!r}: ", fields):
            self.settings: Any = self.Settings(**options)

    @abstractmethod
    def run(self, cells: Sequence[Cell]) -> Generator[Outcome]:
        """Carries out the runs of cells; closing the iterator stops those still running.

        Yields:
            How each ended, in the order of ending.
        """

    def job(self, cell: Cell, threads: int, device: str | None = None) -> str:
        """Returns a cell as a line for :func:`answer_to`, which a worker on any machine can run."""
        job = {
            "folder": str(cell.folder.resolve()),
            "experiment": cell.experiment.model_dump(mode="json"),
            "cache": str(self.cache.resolve()),
            "threads": threads,
            "device": device,
        }
        return json.dumps(job) + "\n"

    def outcome(self, cell: Cell, answer: Mapping[str, str]) -> Outcome:
        """Returns the outcome in a worker's answer, and tells the watcher."""
        outcome = Outcome(cell, answer["ended"], answer.get("error"))
        self.watcher.ended(outcome)
        return outcome


LAUNCHERS: Registry[type[Launcher]] = Registry(
    "launcher", "feddg.comparison.pool", group="feddg.launchers", error=ExperimentError
)


register_launcher = LAUNCHERS.register
"""Class decorator that registers a launcher under its name."""


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


class LocalSettings(Settings):
    """Options of the launcher ``local``."""

    reuse: bool = Field(
        False,
        description="a process carries out several runs, which saves some seconds for each; "
        "otherwise each run has its own, and its own peak memory",
    )


@register_launcher
class LocalLauncher(Launcher):
    """Runs in processes of this machine, several at a time.

    Ctrl-C reaches only this process, which then asks them to stop; their runs can be continued.
    They also stop by themselves when this process dies. So each run has its own peak memory and
    cannot crash the others.
    """

    name = "local"
    Settings = LocalSettings

    def run(self, cells: Sequence[Cell]) -> Generator[Outcome]:
        """See :meth:`Launcher.run`."""
        self._threads, self._devices = threads_per_job(self.jobs), _devices()
        self._free = list(range(self.jobs))
        self._alive = dict[int, Child]()
        self._lock, self._stopped = threading.Lock(), False
        self.logs.mkdir(parents=True, exist_ok=True)
        pool = ThreadPoolExecutor(self.jobs)
        waiting = {pool.submit(self._carry_out, cell): cell for cell in cells}
        try:
            for answer in as_completed(waiting):
                yield self.outcome(waiting[answer], answer.result())
        finally:
            with self._lock:
                self._stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            end([*self._alive.values()], STOP_SECONDS)
            pool.shutdown()

    def _carry_out(self, cell: Cell) -> Mapping[str, str]:
        """Carries out a run in a process, and returns how it ended."""
        with self._lock:
            if self._stopped:
                return {"ended": "interrupted"}
            place = self._free.pop()
            name = f"process{place + 1}" if self.settings.reuse else cell.folder.name
            log_file = self.logs / f"{name}.log"
            with log_file.open("a", encoding="utf-8") as log_to:
                process = self._alive.get(place) or child(
                    "feddg.comparison.pool",
                    threads=self._threads,
                    stdout=subprocess.PIPE,
                    stderr=log_to,
                )
            self._alive[place] = process
        spread = self._devices and cell.experiment.device == "auto"
        device = self._devices[place % len(self._devices)] if spread else None
        answer = self._followed(process, cell, self.job(cell, self._threads, device))
        if answer is None:
            reason = f"{death(process.wait())}; see {log_file}"
            answer = {"ended": "failed", "error": reason}
        if answer["ended"] != "completed" or not self.settings.reuse:
            end([process], STOP_SECONDS)
            del self._alive[place]
            with suppress(FileNotFoundError):  # another comparison's, in the same folder
                if log_file.stat().st_size == 0:
                    log_file.unlink()
        self._free.append(place)
        return answer

    def _followed(self, process: Child, cell: Cell, job: str) -> Mapping[str, str] | None:
        """Gives a process a run, and reads its reports until the run ends; None if it dies."""
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError, ValueError):  # it died at once, or is stopped: its output ends
            process.stdin.write(job)
            process.stdin.flush()
        for line in process.stdout:
            news: dict[str, Any] = json.loads(line)
            if "ended" in news:
                return news
            self.watcher.news(cell.folder, news)
        return None


def default_jobs(experiments: Sequence[Experiment]) -> int:
    """Returns how many runs go at once on this machine if nobody says: one, unless it has GPUs."""
    import torch

    gpus, devices = torch.cuda.device_count(), {run.device for run in experiments}
    if not gpus or not devices or not devices <= {"auto", "cuda"}:
        return 1
    needs = dict[str, int]()
    for experiment in experiments:
        shape, batch = experiment.data.shape, experiment.train.batch_size
        if (kind := repr((experiment.model, shape, batch))) not in needs:
            try:
                _, network = build(experiment, 2)
                needs[kind] = training_memory(network, shape, batch)
            except (FeddgError, RuntimeError):  # says so when it runs, or reads no images
                needs[kind] = 0
    memory = torch.cuda.get_device_properties(0).total_memory
    room = int(memory * SHARE_OF_MEMORY) // (BESIDE + max(needs.values()))
    gpus = gpus if devices == {"auto"} else 1
    most = min(available_cores(), gpus * min(MOST_ON_A_GPU, room))
    return min(max(1, most), len(experiments))


def _devices() -> list[str]:
    """One name per GPU, if there are several to spread the runs over."""
    import torch

    count = torch.cuda.device_count()
    return [f"cuda:{i}" for i in range(count)] if count > 1 else []


def main() -> None:
    """In a child: executes the jobs on standard input, and writes reports on standard output.

    Each line of the input is a job, see :func:`answer_to`. Each line of the output is a JSON object
    with the progress or, at the end of a job, the outcome.
    """
    # A comparison in the background may ignore this signal, and its children with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    lines, at_work = SimpleQueue[str](), threading.Event()

    def stop() -> None:
        lines.put("")
        if at_work.is_set():
            _thread.interrupt_main()

    with_parent(stop, lines.put)
    # Whatever a library prints must not end up among the answers.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(news: Mapping[str, object]) -> None:
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


class _Job:
    """A job for submitit; queued again at its time limit or when preempted."""

    def __call__(self, line: str) -> dict[str, str]:
        return answer_to(line)

    def checkpoint(self, line: str) -> object:
        """Returns the next submission: the same job, which continues after the last round."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, line)


class SlurmSettings(Settings):
    """Options of the launcher ``slurm``."""

    partition: str | None = Field(None, description="Slurm's partition")
    minutes: int = Field(1440, ge=1, description="limit of a job; its run goes on in another")
    cpus: int = Field(1, ge=1, description="cores of a run")
    memory_gb: int = Field(8, ge=1, description="memory of a run")
    gpus: int = Field(0, ge=0, description="GPUs of a run")
    cluster: Literal["slurm", "local"] = Field(
        "slurm", description="local runs the same jobs on this machine, to try it"
    )


@register_launcher
class SlurmLauncher(Launcher):
    """Runs as jobs of a Slurm array, at most ``jobs`` at a time.

    A job that reaches its time limit is queued again, and its run continues.

    submitit stores a job, the name of a class of this package and a line of JSON, as a pickle in
    the comparison's ``logs`` folder, so nobody else may write there.
    """

    name = "slurm"
    Settings = SlurmSettings

    def run(self, cells: Sequence[Cell]) -> Generator[Outcome]:
        """See :meth:`Launcher.run`."""
        need("slurm", "the launcher 'slurm'")
        import submitit

        asked: SlurmSettings = self.settings
        try:
            executor = submitit.AutoExecutor(
                self.logs / "jobs",
                cluster=asked.cluster,
                slurm_max_num_timeout=MOST_LIMITS,
                local_max_num_timeout=MOST_LIMITS,
            )
        except (RuntimeError, ValueError) as error:
            raise ExperimentError(f"launcher 'slurm': {error}") from None
        executor.update_parameters(
            name="feddg",
            timeout_min=asked.minutes,
            cpus_per_task=asked.cpus,
            mem_gb=asked.memory_gb,
            gpus_per_node=asked.gpus or None,
        )
        if asked.cluster == "slurm":
            executor.update_parameters(slurm_array_parallelism=self.jobs)
            if asked.partition is not None:
                executor.update_parameters(slurm_partition=asked.partition)
        # The local executor has no queue: it is given as many as may go at once.
        at_once = len(cells) if asked.cluster == "slurm" else self.jobs
        waiting, going = list(cells), list[tuple[Any, Cell]]()
        try:
            while waiting or going:
                started, waiting = waiting[: at_once - len(going)], waiting[at_once - len(going) :]
                if started:
                    lines = [self.job(cell, asked.cpus) for cell in started]
                    try:
                        going += zip(executor.map_array(_Job(), lines), started)
                    except (RuntimeError, OSError) as error:
                        said = " ".join(str(error).split())
                        raise ExperimentError(f"launcher 'slurm': {said}") from None
                done = [(job, cell) for job, cell in going if job.done()]
                for job, cell in done:
                    going.remove((job, cell))
                    yield self.outcome(cell, _answer(job))
                if not done:
                    time.sleep(SECONDS_BETWEEN_LOOKS)
        finally:
            for job, _ in going:
                job.cancel(check=False)


def _answer(job: Any) -> dict[str, str]:
    """The answer that a job returned, or why there is none."""
    error = job.exception()
    if error is None:
        return job.result()
    # Slurm's state; or, of an exception in the job, the last line of its trace.
    text = str(error)
    found = re.search(r"\(state: (.*?)\)", text) or re.search(r"(?s:.*)\n(.+)\n+-{5,}\n", text)
    reason = found[1] if found else in_words(error)
    fault = f"its job ended without a result ({reason}); see the logs in {job.paths.folder}"
    return {"ended": "failed", "error": fault}


if __name__ == "__main__":
    main()
