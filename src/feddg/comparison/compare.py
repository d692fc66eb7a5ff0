"""Carries out a plan: runs what is missing, continues what was interrupted, keeps what ends."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddg.comparison.estimate import forecast
from feddg.comparison.plan import Cell, Plan, distinct, expand_plan, load_plan
from feddg.comparison.pool import LAUNCHERS, LOG_FOLDER, Outcome, Task, Watcher, run_here
from feddg.comparison.results import (
    COMPARISON,
    ComparisonFile,
    ResultRow,
    Results,
    add_rows,
    changing,
    find_rows,
    read_comparison,
    read_results,
    results_files,
    row_of,
)
from feddg.data.decoding import Reading
from feddg.diagnostics import Diagnostic
from feddg.errors import FeddgError, RunError, first_names
from feddg.experiment import Experiment
from feddg.runs.execute import is_complete
from feddg.runs.folder import EXPERIMENT, drop_weights
from feddg.runs.prepare import Progress, cache_folder, load_table
from feddg.runs.provenance import ImagesNow, find_folder
from feddg.runs.reading import read_run
from feddg.settings import IMAGENET
from feddg.storage import entries, is_file, replace_text, why
from feddg.views import Shown

if TYPE_CHECKING:
    from pandas import DataFrame

# What a plan comes to in a folder: which runs are complete, begun, in a results file or missing.


@dataclass(frozen=True)
class Work:
    """What a plan comes to in a folder.

    Attributes:
        plan: the plan.
        out: the folder of its runs.
        cells: all cells.
        folders: the run folder of every distinct experiment, by its id.
        missing: experiments without a complete run, in the order they will be run.
        file: the results file that rows are added to.
        rows: of results files, by the experiments' ids; their runs are not missing.
        outdated: rows of ``file`` that it loses when something is added.
        drop_weights: whether a run's weights are deleted once it is complete.
    """

    plan: Plan
    out: Path
    cells: Sequence[Cell]
    folders: Mapping[str, Path]
    missing: Sequence[Task]
    file: Path | None = None
    rows: Mapping[str, ResultRow] = field(default_factory=dict)
    outdated: Sequence[ResultRow] = ()
    drop_weights: bool = False

    @property
    def started(self) -> int:
        """How many of the missing runs will be continued."""
        checkpoints = (task.folder / "checkpoint" / "checkpoint.json" for task in self.missing)
        return sum(file.is_file() for file in checkpoints)

    def keep(self, experiments: Iterable[str]) -> None:
        """Adds the rows of experiments to the results file: of complete runs, or of other files.

        Complete runs lose their weights where that is asked for. Of a run that stands in another
        table's file, its row there is what is added.

        Raises:
            RunError: the file cannot be written.
        """
        ids = set(experiments)
        complete = {id for id in ids if is_complete(self.folders[id])}
        if self.file is not None:
            there = {row.key for row in read_results(self.file) if row not in self.outdated}
            lacking = [
                cell
                for cell in self.cells
                if cell.experiment.id in ids and ResultRow.of(cell).key not in there
            ]
            rows = [row for cell in lacking if (row := self._row(cell, complete)) is not None]
            if rows:
                add_rows(self.file, rows, self.outdated)
        for id in complete if self.drop_weights else ():
            drop_weights(self.folders[id])

    def _row(self, cell: Cell, complete: Collection[str]) -> ResultRow | None:
        """A cell's row: as some results file has it, or of its run."""
        id = cell.experiment.id
        if (row := self.rows.get(id)) is not None:
            names = ("machine", "version", "hashes", "numbers")
            return ResultRow.of(cell, **{name: getattr(row, name) for name in names})
        return row_of(cell, read_run(self.folders[id])) if id in complete else None

    def write(self) -> None:
        """Writes which run belongs to which cell, and what is known of it, for reports."""
        plan = self.plan
        cells = [
            (self._row(cell, ()) or ResultRow.of(cell)).model_copy(
                update={"folder": self.folders[cell.experiment.id].name}
            )
            for cell in self.cells
        ]
        content = ComparisonFile(
            name=plan.name,
            title=plan.title,
            question=plan.question,
            differences=list(plan.differences),
            paper=plan.paper and plan.paper.model_dump(mode="json"),
            cells=cells,
        )
        text = content.model_dump_json(indent=1, exclude_defaults=True) + "\n"
        try:
            replace_text(self.out / COMPARISON, text)
            replace_text(self.out / "plan.yaml", plan.to_yaml())
        except OSError as error:
            raise RunError(f"Cannot write into {self.out}: {why(error)}.") from None


def fixed_plan(
    plan: Plan | Path | str | Mapping[str, Any],
    out: Path | str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Plan, Path]:
    """Returns a plan with fields that win over everything it says, and its folder.

    Args:
        plan: a plan, its file, or its fields.
        out: the folder of the runs; ``comparisons/NAME`` by default.
        overrides: experiment fields that win over everything the plan says.

    Raises:
        ExperimentError: the plan is invalid.
    """
    fixed = load_plan(plan).fixed(overrides or {})
    return fixed, Path(out) if out is not None else Path("comparisons") / fixed.name


def prepare_work(
    plan: Plan | Path | str | Mapping[str, Any],
    out: Path | str | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    again: bool = False,
    cache: Path | None = None,
    results: Path | Sequence[Path] = (),
    cells: Sequence[Cell] | None = None,
    drop_weights: bool = False,
) -> Work:
    """Expands a plan and looks up what of it has been done.

    Args:
        plan: a plan, its file, or its fields.
        out: the folder of the runs; ``comparisons/NAME`` by default.
        overrides: experiment fields that win over everything the plan says.
        again: whether to start runs anew, beside the old ones, whose images were others; rows of
            the results file of other images are replaced.
        cache: where hashes of images are remembered; the user's cache by default.
        results: results files; what one of them has is not run, and is copied to the first, which
            what is complete is added to.
        cells: what is run instead of the plan's own cells: trials, or with values picked in them.
        drop_weights: whether a run's weights are deleted once it is complete.

    Raises:
        ExperimentError: the plan holds an invalid experiment.
        RunError: images changed since a run began or its row was written, or a results file is
            damaged or not there.
    """
    fixed, folder = fixed_plan(plan, out, overrides)
    files = results_files(results)
    cells = expand_plan(fixed) if cells is None else cells
    present = _present(folder)
    now = ImagesNow(cache or cache_folder())
    rows: dict[str, ResultRow] = {}
    outdated: list[ResultRow] = []
    for file in files:
        found, changed = find_rows(file, cells, now, own=file == files[0], again=again)
        rows, outdated = found | rows, outdated + changed
    folders: dict[str, Path] = {}
    missing: list[Task] = []
    for experiment in distinct(cells):
        path = find_folder(experiment, folder, now, again=again, begun=present.get(experiment.id))
        folders[experiment.id] = path
        if experiment.id not in rows and not is_complete(path):
            missing.append(Task(experiment, path))
    own = files[0] if files else None
    return Work(fixed, folder, cells, folders, missing, own, rows, outdated, drop_weights)


def _present(out: Path) -> dict[str, Path]:
    """Run folders by the id at the end of their names, whatever stands before it."""
    if not out.is_dir():
        return {}
    return {
        path.name.rpartition("-")[2]: path
        for path in (out / entry.name for entry in entries(out, RunError))
        if is_file(path / EXPERIMENT)
    }


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
    def diagnostics(self) -> list[Diagnostic]:
        """Which runs failed, one for each reason."""
        reasons: dict[str, list[str]] = {}
        for one in self.failures:
            reasons.setdefault(one.error or one.status, []).append(one.task.folder.name)
        of = len(self.work.folders)
        return [
            Diagnostic(
                "runs-failed",
                "warning",
                f"{len(runs)} of {of} runs failed ({first_names(runs, 5)}): {reason}",
            )
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
        first, *others = self.diagnostics
        more = f" ({len(others)} other reasons: see summary.json of each)" if others else ""
        raise RunError(f"nothing to compare in {self.folder}: {first}{more}")

    @property
    def folder(self) -> Path:
        """The folder of the runs and tables."""
        return self.work.out

    @property
    def report(self) -> Path:
        """The HTML page."""
        return self.folder / "report.html"

    @cached_property
    def results(self) -> Results:
        """What is complete, as tables are made from it."""
        return read_comparison(self.folder)

    def frame(self) -> "DataFrame":
        """Returns every number as a tidy table; see :meth:`Results.frame`."""
        return self.results.frame()


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
            if weights not in ("", IMAGENET) and not is_file(Path(weights)):
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
        cache: folder for decoded pixels and stylized copies; the user's cache by default.
        watcher: is told what happens.
        launcher: where runs go, with ``jobs`` above 0; see :mod:`feddg.comparison.pool`.
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
    if work.file is not None:
        with changing(work.file):  # it can be written: said before hours of runs
            pass
    work.write()
    outcomes: list[Outcome] = []
    work.keep(work.folders)
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
            work.keep([outcome.task.experiment.id])
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
