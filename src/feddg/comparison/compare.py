"""Runs a plan: starts missing runs, continues interrupted ones, stores results."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from feddg.comparison.plan import Cell, Plan, distinct, expand_plan, load_plan
from feddg.comparison.pool import LAUNCHERS, LOG_FOLDER, Outcome, Watcher, run_here
from feddg.comparison.results import COMPARISON, ComparisonFile, Results, read_comparison
from feddg.comparison.results_file import (
    ResultRow,
    add_rows,
    changing,
    find_rows,
    read_results,
    rows_of,
)
from feddg.diagnostics import Diagnostic, silent, warning
from feddg.errors import FeddgError, RunError, WeightsError, first_names
from feddg.experiment import Experiment
from feddg.models.backbones import build_network
from feddg.runs.beforehand import forecast
from feddg.runs.execute import is_complete, require_installed
from feddg.runs.folder import drop_weights
from feddg.runs.prepare import cache_folder, load_table
from feddg.runs.provenance import ImagesNow, find_folder, has_begun
from feddg.runs.reading import read_run
from feddg.settings import EvaluateSettings, HoldOut, ModelSettings, grouped
from feddg.storage import file_faults, replace_text
from feddg.views import Shown

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(repr=False)
class Comparison(Shown):
    """A plan in a folder: what has been run, what is missing, and how this call's runs ended.

    Attributes:
        plan: the plan.
        folder: the folder of its runs and tables.
        cells: all cells, each with its run's folder.
        missing: one cell for every experiment without a complete run, in order of execution.
        file: the results file that rows are added to.
        rows: rows of results files, by experiment id and budget; their runs are not missing.
        outdated: rows of ``file`` that will be removed when rows are added.
        drop_weights: whether a run's weights are deleted once it is complete.
        outcomes: how this call's runs ended; empty before they are run.
    """

    plan: Plan
    folder: Path
    cells: Sequence[Cell]
    missing: Sequence[Cell]
    file: Path | None = None
    rows: Mapping[str, Mapping[int | None, ResultRow]] = field(default_factory=dict)
    outdated: Sequence[ResultRow] = ()
    drop_weights: bool = False
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def folders(self) -> list[Path]:
        """The folders of all runs, each once."""
        return list(dict.fromkeys(cell.folder for cell in self.cells))

    @property
    def started(self) -> int:
        """The number of missing runs that will be continued."""
        return sum(has_begun(cell.folder) for cell in self.missing)

    @property
    def failures(self) -> list[Outcome]:
        """The runs of this call that did not complete."""
        return [outcome for outcome in self.outcomes if outcome.status != "completed"]

    @property
    def diagnostics(self) -> list[Diagnostic]:
        """Warnings about failed runs, one for each reason."""
        failed, of = self.failures, len(self.folders)
        reasons = grouped((run.error or run.status, run.cell.folder.name) for run in failed)
        return [
            warning("runs-failed", f"{len(runs)} of {of} runs failed ({first_names(runs)}): {why}")
            for why, runs in reasons.items()
        ]

    def require_results(self) -> None:
        """Raises an error if no run of the plan has a result.

        Raises:
            RunError: every run failed; gives the first reasons.
        """
        if not self.failures or len(self.failures) < len(self.folders):
            return
        reasons = first_names([*map(str, self.diagnostics)], 2)
        raise RunError(f"nothing to compare in {self.folder}: {reasons}")

    @property
    def report(self) -> Path:
        """The path of the HTML page."""
        return self.folder / "report.html"

    @cached_property
    def results(self) -> Results:
        """The results of all complete runs."""
        return read_comparison(self.folder)

    def frame(self) -> "DataFrame":
        """Returns all numbers as a tidy table; see :meth:`Results.frame`."""
        return self.results.frame()

    def margins(self, base: str = "") -> "DataFrame":
        """Returns every method's lead with both intervals; see :meth:`Results.margin_frame`."""
        return self.results.margin_frame(base)

    def rows_of(self, cell: Cell) -> list[ResultRow]:
        """Returns a cell's rows, one per budget, from a results file or from its run."""
        if (rows := self.rows.get(cell.id)) is not None:
            names = ("machine", "version", "hashes", "numbers")
            return [
                ResultRow.of(cell, budget=budget, **{n: getattr(rows[budget], n) for n in names})
                for budget in cell.budgets or (None,)
                if budget in rows
            ]
        return rows_of(cell, read_run(cell.folder)) if is_complete(cell.folder) else []

    def keep(self, folders: Iterable[Path]) -> None:
        """Adds the rows of complete runs to the results file, and rows of other results files.

        Weights of complete runs are deleted if requested. For a run that has a row in another
        results file, that row is added.

        Raises:
            RunError: the file cannot be written.
        """
        ended = set(folders)
        if self.file is not None:
            there = {row.key for row in read_results(self.file) if row not in self.outdated}
            cells = [cell for cell in self.cells if cell.folder in ended]
            lacking = [c for c in cells if {row.key for row in ResultRow.all_of(c)} - there]
            rows = [row for c in lacking for row in self.rows_of(c) if row.key not in there]
            if rows:
                add_rows(self.file, rows, self.outdated)
        for folder in filter(is_complete, ended) if self.drop_weights else ():
            drop_weights(folder)

    def write(self) -> None:
        """Writes the file that gives reports each cell's run or row of a results file."""
        rows = []
        for cell in self.cells:
            there = self.rows_of(cell) if cell.id in self.rows else []
            placed = {row.place: row for row in [*ResultRow.all_of(cell), *there]}
            rows += [row.model_copy(update={"folder": cell.folder.name}) for row in placed.values()]
        content = ComparisonFile.of(self.plan, self.cells, rows)
        text = content.model_dump_json(indent=1, exclude_defaults=True) + "\n"
        with file_faults(RunError, f"Cannot write into {self.folder}"):
            replace_text(self.folder / COMPARISON, text)
            replace_text(self.folder / "plan.yaml", self.plan.to_yaml())


def prepare_comparison(
    plan: Plan | Path | str | Mapping[str, object],
    out: Path | str,
    *,
    again: bool = False,
    cache: Path | None = None,
    results: Sequence[Path] = (),
    cells: Sequence[Cell] | None = None,
    drop_weights: bool = False,
) -> Comparison:
    """Expands a plan and finds out which runs already exist.

    Args:
        plan: a plan, its file, or its fields.
        out: the folder for the runs.
        again: whether to repeat runs whose images have changed, beside the old ones; rows of the
            results file with other images are replaced.
        cache: where image hashes are stored; the user's cache by default.
        results: results files; runs found there are not repeated. Complete runs and rows of the
            other files are added to the first.
        cells: cells to use instead of the plan's: trials, or cells with tuned values.
        drop_weights: whether a run's weights are deleted once it is complete.

    Raises:
        ExperimentError: the plan holds an invalid experiment.
        RunError: images changed since a run began or its row was written, or a results file is
            damaged.
    """
    plan, folder = load_plan(plan), Path(out)
    cells = expand_plan(plan) if cells is None else cells
    now = ImagesNow(cache_folder(cache))
    rows: dict[str, dict[int | None, ResultRow]] = {}
    outdated: list[ResultRow] = []
    for file in results:
        kept, changed = find_rows(file, cells, now, own=file == results[0], again=again)
        rows, outdated = kept | rows, outdated + changed
    runs = {
        cell.id: find_folder(cell.experiment, folder, now, again=again) for cell in distinct(cells)
    }
    for cell in cells:
        cell.folder = runs[cell.id]
    missing = [c for c in distinct(cells) if c.id not in rows and not is_complete(c.folder)]
    target = results[0] if results else None
    return Comparison(plan, folder, cells, missing, target, rows, outdated, drop_weights)


def why_hopeless(comparison: Comparison, cache: Path | None = None) -> FeddgError | None:
    """Returns the error that would stop every run on some data (missing images, domain, weights).

    If one run on these data can start or is complete, the others fail by themselves.

    Returns:
        The error; None if there is no such data.
    """
    missing = {cell.id for cell in comparison.missing}
    on_data = grouped((repr(cell.experiment.data), cell) for cell in distinct(comparison.cells))
    for cells in on_data.values():
        if all(cell.id in missing for cell in cells) and (reason := _why_none(cells, cache)):
            return reason
    return None


def _why_none(cells: Sequence[Cell], cache: Path | None) -> FeddgError | None:
    """Returns the error that would stop all of these runs on the same data, or None."""
    reasons: dict[str, FeddgError] = {}
    gone: set[str] = set()  # networks that cannot have their weights
    for cell in cells:
        one = cell.experiment
        kind = repr((one.method, one.hold_out, one.clients, one.model))
        network = repr(one.model)
        if kind in reasons or network in gone:
            continue
        try:
            forecast(one, cache)
        except FeddgError as error:
            reasons[kind] = error
            if isinstance(error, WeightsError) and not _have_weights(one.model):
                gone.add(network)  # nothing else about a run would help: hundreds need no look
        else:
            return None
    return next(iter(reasons.values()), None)


def _have_weights(model: ModelSettings) -> bool:
    """Whether pretrained weights are there and fit, so that something else of a run is missing."""
    try:
        build_network(model.backbone, 2, weights=model.weights)
    except WeightsError:
        return False
    return True


def carry_out_comparison(
    comparison: Comparison,
    *,
    jobs: int = 0,
    cache: Path | None = None,
    watcher: Watcher | None = None,
    launcher: str = "local",
    launcher_options: Mapping[str, str] | None = None,
) -> Comparison:
    """Runs what is missing; complete runs are kept, interrupted ones continue.

    One run that fails does not stop the others.

    Args:
        comparison: the prepared comparison.
        jobs: number of processes at once, each with its share of the cores; 0 runs everything in
            this process, where the caller's registered methods and sources are available.
        cache: folder for decoded pixels and stylized copies; the user's cache by default.
        watcher: gets the progress.
        launcher: where runs are executed; ``local`` only if ``jobs`` is above 0. See
            :mod:`feddg.comparison.pool`.
        launcher_options: options of the launcher.

    Returns:
        The same comparison, with the outcomes of its runs.

    Raises:
        ExperimentError: the launcher is unknown, or cannot be used.
        MissingPackage: a run needs a package that is not installed.
        FeddgError: no run can start, or there is no room for the results; then nothing is written.
    """
    for cell in comparison.missing:
        require_installed(cell.experiment)
    watching, cached = watcher or Watcher(), cache_folder(cache)
    if (reason := why_hopeless(comparison, cached)) is not None:
        raise reason
    chosen = LAUNCHERS.find(launcher)
    if comparison.file is not None:
        with changing(comparison.file):  # a fault is to be found before hours of runs
            pass
    comparison.write()
    folders, missing = comparison.folders, comparison.missing
    comparison.keep(folders)
    watching.start(len(folders), len(folders) - len(missing))
    try:
        if jobs > 1:
            _decode_once([cell.experiment for cell in missing], cached)
        if jobs or launcher != "local":
            logs, options = comparison.folder / LOG_FOLDER, launcher_options or {}
            ended = chosen(max(1, jobs), cached, logs, watching, options).run(missing)
        else:
            ended = run_here(missing, cached, watching)
        with closing(ended):
            for outcome in ended:
                comparison.outcomes.append(outcome)
                comparison.keep([outcome.cell.folder])
    finally:
        watching.end()
    return comparison


def _decode_once(experiments: Sequence[Experiment], cache: Path) -> None:
    """Fills the shared pixel cache, so that several processes do not each decode the images."""
    no_names = {"hold_out": HoldOut(), "evaluate": EvaluateSettings()}  # which may be wrong in one
    for experiment in {repr(experiment.data): experiment for experiment in experiments}.values():
        if experiment.data.root is not None:  # what is drawn has no cache to share
            with suppress(FeddgError):  # each run that needs the images says what is wrong
                load_table(experiment.model_copy(update=no_names), cache, silent)
