"""Carries out a plan: runs what is missing, continues what was interrupted, keeps what ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from feddg.comparing.forecast import forecast
from feddg.comparing.launcher import LAUNCHERS
from feddg.comparing.pool import LOG_FOLDER, Outcome, Watcher, run_here
from feddg.comparing.work import Work
from feddg.data.decoding import Reading
from feddg.errors import FeddgError, RunError
from feddg.experiment import Experiment
from feddg.runs.prepare import Progress, cache_folder, first_names, load_table
from feddg.settings import TORCHVISIONS
from feddg.storage import is_file
from feddg.views import Shown


@dataclass(frozen=True)
class Comparison(Shown):
    """A plan carried out, as far as it went.

    Attributes:
        work: the plan's cells and their run folders.
        outcomes: how the runs of this call ended.
    """

    work: Work
    outcomes: Sequence[Outcome]

    @property
    def failures(self) -> list[Outcome]:
        """The runs of this call that did not complete."""
        return [outcome for outcome in self.outcomes if outcome.status != "completed"]

    @property
    def remarks(self) -> list[str]:
        """Which runs failed, a line for each reason."""
        reasons: dict[str, list[str]] = {}
        for one in self.failures:
            reasons.setdefault(one.error or one.status, []).append(one.task.folder.name)
        of = len(self.work.folders)
        return [
            f"{len(runs)} of {of} runs failed ({first_names(runs, 5)}): {reason}"
            for reason, runs in reasons.items()
        ]

    def require_results(self) -> None:
        """Makes sure that there is anything to compare.

        Raises:
            RunError: every run of the plan failed; says why the first did.
        """
        failed = self.failures
        if not failed or len(failed) < len(self.work.folders):
            return
        first, others = self.remarks[0], len(self.remarks) - 1
        more = f" ({others} other reasons: see summary.json of each)" if others else ""
        raise RunError(f"nothing to compare in {self.folder}: {first}{more}")

    @property
    def folder(self) -> Path:
        """The folder of the runs and tables."""
        return self.work.out

    @property
    def report(self) -> Path:
        """The HTML page."""
        return self.folder / "report.html"


def why_hopeless(work: Work) -> FeddgError | None:
    """Returns what would end every run: no such images, domain or weights; None if none would.

    Where a single run can start, or is complete, the others' failures are theirs alone.
    """
    if not work.missing or len(work.missing) < len(work.folders):
        return None
    reasons: dict[str, FeddgError] = {}
    gone: set[str] = set()
    for task in work.missing:
        one = task.experiment
        kind = repr((one.method, one.data, one.hold_out, one.clients, one.model))
        weights = one.model.weights or ""
        if kind in reasons or weights in gone:
            continue
        try:
            forecast(one)
        except FeddgError as error:
            reasons[kind] = error
            if weights not in ("", TORCHVISIONS) and not is_file(Path(weights)):
                gone.add(weights)  # nothing else about a run would help: hundreds need no look
        else:
            return None
    return next(iter(reasons.values()))


def carry_out_work(
    work: Work,
    *,
    jobs: int = 0,
    cache: Path | None = None,
    watcher: Watcher | None = None,
    launcher: str = "local",
    launcher_options: Mapping[str, str] | None = None,
) -> Comparison:
    """Carries out what is missing; complete runs stay, interrupted ones continue.

    One run that fails does not stop the others.

    Args:
        work: what the plan comes to.
        jobs: processes that run at once, each with its share of the cores; 0 runs everything in
            this process, where methods and sources registered by the caller are known.
        cache: folder for decoded pixels and twins; the user's cache by default.
        watcher: is told what happens.
        launcher: where runs go, with ``jobs`` above 0; see :mod:`feddg.comparing.launcher`.
        launcher_options: what the launcher itself takes.

    Raises:
        ExperimentError: there is no such launcher, or it cannot be used.
        FeddgError: not one of the runs can start, or what is to be kept of them has no place;
            nothing is written then.
    """
    if (reason := why_hopeless(work)) is not None:
        raise reason
    watching, cached = watcher or Watcher(), cache or cache_folder()
    chosen = LAUNCHERS.find(launcher)
    if work.kept is not None:
        work.kept.require_place()
    work.write()
    outcomes: list[Outcome] = []
    for experiment in work.folders:
        work.keep(experiment)
    watching.start(len(work.folders), len(work.folders) - len(work.missing), max(1, jobs))
    try:
        if jobs > 1:
            _decode_once([task.experiment for task in work.missing], cached)
        if jobs:
            logs = work.out / LOG_FOLDER
            engine = chosen(jobs, cached, logs, watching, launcher_options or {})
            ended = engine.run(work.missing)
        else:
            ended = run_here(work.missing, cached, watching)
        for outcome in ended:
            outcomes.append(outcome)
            work.keep(outcome.task.experiment.id)
    finally:
        watching.end()
    return Comparison(work, outcomes)


def _decode_once(experiments: Sequence[Experiment], cache: Path) -> None:
    """Fills the shared pixel cache before several processes would each do so."""
    seen: set[str] = set()
    silent: Progress = lambda what, done, total: None  # noqa: E731
    for experiment in experiments:
        data = experiment.data
        if data.root is None:
            continue  # drawn, not decoded: there is no cache that processes could share
        images = (data.source, data.root, data.options, data.leave_out)
        key = repr((*images, data.image_size, data.resize, Reading.of(data)))
        if key in seen:
            continue
        seen.add(key)
        try:
            load_table(experiment, cache, silent)
        except FeddgError:
            continue  # each run that needs it says what is wrong
