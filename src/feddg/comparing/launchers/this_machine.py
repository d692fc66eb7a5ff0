"""This machine: each run in a process of its own, with its share of the cores or its GPU."""

from collections.abc import Iterator, Sequence

from feddg.comparing.launcher import Launcher, register_launcher
from feddg.comparing.pool import Outcome, Processes, Task


@register_launcher
class LocalLauncher(Launcher):
    """See :class:`feddg.comparing.pool.Processes`."""

    name = "local"
    summary = "processes on this machine"

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """See :meth:`Launcher.run`."""
        return Processes(self.jobs, self.cache, self.logs, self.watcher).run(tasks)
