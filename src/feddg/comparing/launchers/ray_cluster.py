"""A Ray cluster: runs are handed to its nodes, as many at a time as asked for."""

import os
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from feddg.comparing.launcher import Launcher, register_launcher
from feddg.comparing.pool import Outcome, Task
from feddg.comparing.process import answer_to
from feddg.errors import ExperimentError


@register_launcher
class RayLauncher(Launcher):
    """Runs on the nodes of a Ray cluster (``ray start``), or on a cluster of this machine alone.

    What is sent to a node is the name of a function of this package and a line of JSON; Ray itself
    uses pickle between its processes, so the cluster must be one's own.
    """

    name = "ray"
    summary = "the nodes of a Ray cluster"
    options: ClassVar[dict[str, str]] = {
        "address": "of the cluster; RAY_ADDRESS, else a cluster of this machine alone",
        "cpus": "cores that each run takes; 1 if not said",
        "gpus": "GPUs that each run takes, a share as 0.25 too; 0 if not said",
    }

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """See :meth:`Launcher.run`."""
        try:
            import ray
        except ImportError:
            raise ExperimentError(
                "the launcher 'ray' needs Ray: pip install 'feddg[ray]'"
            ) from None
        cpus, gpus = _number(self.said, "cpus", 1.0), _number(self.said, "gpus", 0.0)
        begun = not ray.is_initialized()
        if begun:
            address = self.said.get("address") or os.environ.get("RAY_ADDRESS")
            try:
                ray.init(address=address, log_to_driver=False, include_dashboard=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                where = address or "this machine"
                raise ExperimentError(f"Ray at {where} cannot be reached: {error}") from None
        work: Any = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(answer_to)
        waiting, going = list(tasks), dict[Any, Task]()
        try:
            while waiting or going:
                while waiting and len(going) < self.jobs:
                    task = waiting.pop(0)
                    line = self.job(task, max(1, int(cpus))).to_line()
                    going[work.remote(line)] = task
                (ready,), _ = ray.wait(list(going), num_returns=1)
                task = going.pop(ready)
                try:
                    answer = ray.get(ready)
                except ray.exceptions.RayError as error:
                    said = str(error).strip().splitlines()
                    answer = {"ended": "failed", "error": f"its node failed: {said[-1]}"}
                yield self.outcome(task, answer)
        finally:
            for ref in going:
                ray.cancel(ref)
            if begun:
                ray.shutdown()


def _number(said: Any, name: str, default: float) -> float:
    try:
        value = float(said.get(name, default))
    except ValueError:
        value = -1.0
    if not 0 <= value <= 10**6:
        raise ExperimentError(f"launcher 'ray', option {name!r}: a number, not {said[name]!r}")
    return value
