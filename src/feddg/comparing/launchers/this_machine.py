"""This machine: each run in a process of its own, with its share of the cores or its GPU."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from feddg.comparing.launcher import Launcher, register_launcher
from feddg.comparing.pool import Outcome, Processes, Task
from feddg.errors import ExperimentError


@register_launcher
class LocalLauncher(Launcher):
    """See :class:`feddg.comparing.pool.Processes`."""

    name = "local"
    summary = "processes on this machine"
    options: ClassVar[dict[str, str]] = {
        "reuse": "yes: a process carries out several runs, which saves some seconds for each; no, "
        "if not said: each run has its own, and its own peak memory"
    }

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """See :meth:`Launcher.run`."""
        reuse = self.said.get("reuse", "no")
        if reuse not in ("yes", "no"):
            raise ExperimentError(f"launcher 'local': reuse must be yes or no (got {reuse!r})")
        processes = Processes(self.jobs, self.cache, self.logs, self.watcher, reuse=reuse == "yes")
        return processes.run(tasks)
