"""Launchers: what carries a comparison's runs out, on this machine or on others.

A launcher is one registered class in one file. Ours are in :mod:`feddg.comparing.launchers`;
another package adds one with :func:`register_launcher`, or through an entry point of the group
``feddg.launchers``. Whatever it is, runs are the same: each writes its own folder, continues where
it was interrupted, and one that fails stops nobody. So the folder of the comparison, the images and
the cache must be on a file system that all machines share.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

from feddg.comparing.pool import Outcome, Task, Watcher
from feddg.comparing.process import Job
from feddg.errors import ExperimentError
from feddg.registry import Registry


class Launcher(ABC):
    """Carries runs out.

    Args:
        jobs: how many at a time.
        cache: folder for decoded pixels and twins.
        logs: folder for what the runs print.
        watcher: is told what happens.
        options: what the launcher itself takes.

    Attributes:
        name: what a user writes to choose it.
        summary: one line for listings.
        options: the options it takes, each with what it means.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    options: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self, jobs: int, cache: Path, logs: Path, watcher: Watcher, options: Mapping[str, str]
    ) -> None:
        self.jobs, self.cache, self.logs, self.watcher = jobs, cache, logs, watcher
        self.said = options
        for option in options:
            if option not in self.options:
                known = ", ".join(self.options) or "none"
                raise ExperimentError(
                    f"launcher {self.name!r} has no option {option!r}; it has: {known}"
                )

    @abstractmethod
    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Carries out the tasks; when the iterator is closed, it stops what still runs.

        Yields:
            How each ended, in the order of ending.
        """

    def job(self, task: Task, threads: int) -> Job:
        """Returns what a worker on any machine needs of a task."""
        experiment = task.experiment.model_dump(mode="json")
        return Job(str(task.folder.resolve()), experiment, str(self.cache.resolve()), threads)

    def outcome(self, task: Task, answer: Mapping[str, str]) -> Outcome:
        """Returns what a worker's answer says, and tells the watcher."""
        found = Outcome(task, answer["ended"], answer.get("error"))
        self.watcher.ended(found)
        return found


L = TypeVar("L", bound=type[Launcher])
LAUNCHERS: Registry[type[Launcher]] = Registry(
    "launcher", "feddg.comparing.launchers", group="feddg.launchers", error=ExperimentError
)


def register_launcher(cls: L) -> L:
    """Registers a launcher under its name, and returns it."""
    LAUNCHERS.add(cls.name, cls)
    return cls
