"""Slurm, by submitit: every run is a job of an array; this program waits for them."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from feddg.comparing.launcher import Launcher, register_launcher
from feddg.comparing.pool import Outcome, Task
from feddg.comparing.process import answer_to
from feddg.errors import ExperimentError

SECONDS_BETWEEN_LOOKS = 2.0


@register_launcher
class SlurmLauncher(Launcher):
    """Runs as jobs of a Slurm array, at most ``jobs`` at a time.

    A job is the name of a function of this package and a line of JSON, which submitit keeps, as a
    pickle, in the comparison's ``logs`` folder: nobody else may write there.
    """

    name = "slurm"
    summary = "jobs of a Slurm cluster"
    options: ClassVar[dict[str, str]] = {
        "partition": "Slurm's partition",
        "minutes": "limit of a run; it continues when the comparison is started again; 1440",
        "cpus": "cores of a run; 1 if not said",
        "memory_gb": "memory of a run; 8 if not said",
        "gpus": "GPUs of a run; none if not said",
        "cluster": "slurm; local runs the same jobs on this machine, to try it",
    }

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """See :meth:`Launcher.run`."""
        try:
            import submitit
        except ImportError:
            raise ExperimentError(
                "the launcher 'slurm' needs submitit: pip install 'feddg[slurm]'"
            ) from None
        said, cpus = self.said, _whole(self.said, "cpus", 1)
        cluster = said.get("cluster", "slurm")
        try:
            executor = submitit.AutoExecutor(self.logs / "jobs", cluster=cluster)
        except (RuntimeError, ValueError) as error:
            raise ExperimentError(f"launcher 'slurm': {error}") from None
        executor.update_parameters(
            name="feddg",
            timeout_min=_whole(said, "minutes", 1440),
            cpus_per_task=cpus,
            mem_gb=_whole(said, "memory_gb", 8),
            gpus_per_node=_whole(said, "gpus", 0) or None,
        )
        if cluster == "slurm":
            executor.update_parameters(slurm_array_parallelism=max(1, self.jobs))
            if "partition" in said:
                executor.update_parameters(slurm_partition=said["partition"])
        # The local executor has no queue: it is given as many as may go at once.
        at_once = len(tasks) if cluster == "slurm" else max(1, self.jobs)
        waiting, going = list(tasks), list[tuple[Any, Task]]()
        try:
            while waiting or going:
                started, waiting = waiting[: at_once - len(going)], waiting[at_once - len(going) :]
                if started:
                    lines = [self.job(task, cpus).to_line() for task in started]
                    going += zip(executor.map_array(answer_to, lines), started)
                done = [(job, task) for job, task in going if job.done()]
                for job, task in done:
                    going.remove((job, task))
                    yield self.outcome(task, _answer(job))
                if not done:
                    time.sleep(SECONDS_BETWEEN_LOOKS)
        finally:
            for job, _ in going:
                job.cancel(check=False)


def _answer(job: Any) -> dict[str, str]:
    """What a job returned, or why it did not."""
    error = job.exception()
    if error is None:
        answer: dict[str, str] = job.result()
        return answer
    said = str(error).strip().splitlines() or [type(error).__name__]
    return {"ended": "failed", "error": f"job {job.job_id} died: {said[0]}"}


def _whole(said: Any, name: str, default: int) -> int:
    try:
        value = int(said.get(name, default))
    except ValueError:
        value = -1
    if value < 0:
        raise ExperimentError(
            f"launcher 'slurm', option {name!r}: a whole number, not {said[name]!r}"
        )
    return value
