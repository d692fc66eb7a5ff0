"""What programs and the command line call: runs and comparisons.

Imports happen inside the functions, so that ``feddg --help`` is fast and a run does not load what
only pages need.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddg.diagnostics import collected, emit, logged_once
from feddg.errors import ExperimentError, need
from feddg.readers import find, function

if TYPE_CHECKING:
    from feddg.comparison.compare import Comparison
    from feddg.comparison.plan import Plan
    from feddg.comparison.pool import Watcher
    from feddg.experiment import Experiment
    from feddg.runs.observer import Observer
    from feddg.runs.reading import Run


@collected()
def run(
    experiment: "Experiment | Path | str | None" = None,
    out: Path | str = "runs",
    *,
    observer: "Observer | None" = None,
    cache: Path | str | None = None,
    report: bool = True,
    snapshots: Collection[int] = (),
    again: bool = False,
    predictions: bool = False,
    workers: int | None = None,
    **fields: Any,
) -> "Run":
    """Runs an experiment, continues it, or returns it if it is complete.

    >>> feddg.run(method="pardon", data="digits", hold_out="sketch", rounds=20).accuracy

    The run's folder is ``out / experiment.label``. A completed experiment is not run again; an
    interrupted one continues from its last completed round, with the same numbers as if it had
    never stopped. Its images must not have changed. If no weights are specified and ImageNet
    weights cannot be downloaded, a small network is trained from scratch, with a line in the log.

    Args:
        experiment: the experiment, or its file; ``fields`` override its values.
        out: parent of the run folder.
        observer: gets the progress; in a notebook, progress bars by default.
        cache: folder for decoded pixels and stylized copies; the user's cache by default.
        report: whether to write ``report.html`` and ``model_card.md`` at the end.
        snapshots: rounds whose global weights are stored, in the run's ``snapshots``.
        again: whether to start a new run beside the old one if its images have changed.
        predictions: whether to store the prediction of every image, see
            :func:`feddg.prediction.evaluate.write_image_results`.
        workers: number of processes that share the clients and the cores, including this one; by
            default 1, or one per GPU for ``device="all"``. Results are those of one process. Where
            torchrun or srun has started several, they are the workers: only the first returns.
        **fields: fields of the experiment, as in :class:`feddg.experiment.Experiment`.

    Raises:
        FeddgError: the experiment cannot be run; earlier results are kept.
    """
    from feddg.experiment import load_experiment
    from feddg.progress import notebook_observer
    from feddg.runs import execute
    from feddg.runs.beforehand import with_weights_at_hand
    from feddg.runs.prepare import cache_folder
    from feddg.runs.provenance import ImagesNow, find_folder
    from feddg.runs.workers import joined, placed, together

    cached = cache_folder(cache)
    others = joined(cached, workers)
    if predictions:
        need("parquet", "Parquet", otherwise="leave out predictions")
    asked = load_experiment(experiment, fields)
    device, number = placed(asked.device, others.size if others else workers)
    chosen = with_weights_at_hand(asked.model_copy(update={"device": device}))
    folder = find_folder(chosen, out, ImagesNow(cached), again=again)
    if odd := [round for round in snapshots if not 0 <= round <= chosen.train.rounds]:
        raise ExperimentError(
            f"snapshots: there is no round {odd[0]}; the run has {chosen.train.rounds}"
        )
    with together(number, others) as prepare:
        done = execute.carry_out(
            folder,
            chosen,
            observer=observer or notebook_observer(),
            cache=cached,
            prepare=prepare,
            snapshots=snapshots,
        )
        if predictions:
            function("write_image_results")(done.folder, cache=cached)
        if report:
            _ensure_page(done.folder)
    return done


def resume(
    folder: Path | str,
    *,
    observer: "Observer | None" = None,
    device: str | None = None,
    cache: Path | str | None = None,
    workers: int | None = None,
) -> "Run":
    """Continues the run in ``folder`` from its last completed round, and writes its page.

    Args:
        folder: the run's.
        observer: is told what happens.
        device: ``cpu``, ``cuda``, ``all`` or ``auto``; the run's by default.
        cache: see :func:`run`.
        workers: see :func:`run`; another number than before does not matter.

    Raises:
        RunError: the folder is not a run folder.
    """
    from feddg.progress import notebook_observer
    from feddg.runs import execute
    from feddg.runs.prepare import cache_folder
    from feddg.runs.workers import joined, placed, together

    cached = cache_folder(cache)
    others = joined(cached, workers)
    device, number = placed(device, others.size if others else workers)
    chosen = execute.experiment_of(Path(folder), cached)
    if device is not None:
        chosen = chosen.model_copy(update={"device": device})
    with together(number, others) as prepare:
        done = execute.carry_out(
            Path(folder),
            chosen,
            observer=observer or notebook_observer(),
            cache=cached,
            prepare=prepare,
        )
        _ensure_page(done.folder)
    return done


def _ensure_page(folder: Path) -> None:
    """Writes a run's page and model card if they do not exist and a package can write them."""
    if (ensure := find("ensure_report")) is not None:
        ensure(folder)


@logged_once()
def compare(
    plan: "Plan | Path | str | Mapping[str, Any] | list[Any] | tuple[Any, ...] | None" = None,
    out: Path | str | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    jobs: int | None = 0,
    cache: Path | str | None = None,
    watcher: "Watcher | None" = None,
    report: bool = True,
    again: bool = False,
    results: Path | str | Sequence[Path | str] = (),
    predictions: bool = False,
    drop_weights: bool = False,
    launcher: str = "local",
    launcher_options: Mapping[str, str] | None = None,
    dry_run: bool = False,
    **fields: Any,
) -> "Comparison":
    """Runs a plan and writes its tables.

    >>> feddg.compare(["fedavg", "pardon"], data="digits", hold_out="lodo", seeds=3)

    Complete runs are not repeated, interrupted ones continue, and a failed one does not stop the
    others. After Ctrl-C, call it again. If no weights are specified and ImageNet weights cannot be
    downloaded, all train from scratch, as in :func:`run`.

    Args:
        plan: methods; or a plan, its file, or its fields: ``{"base": {"data": "digits"},
            "hold_out": "lodo", "methods": ["fedavg", "pardon"], "seeds": 3}``.
        out: the folder of the runs; ``comparisons/NAME`` by default.
        overrides: experiment fields that override everything in the plan.
        jobs: number of processes at once, each with its share of the cores; 0 runs everything in
            this process, where the caller's registered methods and sources are known; None for as
            many as suit the GPUs, or one.
        cache: folder for decoded pixels and stylized copies; the user's cache by default.
        watcher: gets the progress; in a notebook, progress bars by default.
        report: whether to write tables, ``report.html`` and each run's model card.
        again: whether to repeat runs whose images have changed, beside the old ones.
        results: CSV files of results. Runs found in them are not repeated; rows of the other files
            and of every run that completes are added to the first. Results of ``tune`` trials are
            in a file beside it.
        predictions: whether every run stores the prediction of every image; a run that cannot gives
            a warning.
        drop_weights: delete a run's weights once it is complete; it then has no model card and no
            stored predictions.
        launcher: where runs are executed: ``local``, if ``jobs`` is above 0; or ``slurm``, one at a
            time if ``jobs`` does not say more.
        launcher_options: options of the launcher; for ``local``, ``{"reuse": "yes"}`` executes
            several runs per process, which is faster if runs take seconds.
        dry_run: whether to return what would be run, without running it; with a ``tune`` section
            whose trials are not complete, the trials.
        **fields: fields of the plan (``hold_out``, ``seeds``, ``clients``, ...), which replace the
            plan's, and of the experiment (``data``, ``rounds``, ...), which override everything in
            it. ``data=["emoji", "digits"]`` is a plan over several data sets.

    Raises:
        FeddgError: the plan is invalid, or every run failed (with the reason of the first); results
            are kept. If only some runs fail, they are logged and listed.
    """
    from feddg.comparison.compare import carry_out_comparison, prepare_comparison
    from feddg.comparison.plan import expand_plan, load_plan, plan_with_weights_at_hand
    from feddg.comparison.pool import Watcher, default_jobs
    from feddg.comparison.results_file import results_files
    from feddg.comparison.trials import picked, prepare_trials
    from feddg.experiment import expand
    from feddg.progress import notebook_watcher
    from feddg.runs.execute import is_complete
    from feddg.runs.workers import alone
    from feddg.settings import merge
    from feddg.storage import cache_folder

    alone("a comparison")
    if drop_weights and predictions:
        raise ExperimentError("--predictions needs the weights that --drop-weights deletes")
    axes, given = _split_fields(fields)
    if isinstance(plan, list | tuple):
        axes, plan = {"methods": plan, **axes}, None
    whole = load_plan(plan or {})
    whole = whole.saying(axes)
    whole = plan_with_weights_at_hand(
        whole.fixed(merge(expand(given), expand(dict(overrides or {}))))
    )
    folder = Path(out or Path("comparisons") / whole.name)
    cached = cache_folder(cache)
    files = results_files(results)  # a fault in them is not to be found after tuning
    if files and files[0].resolve() == (folder / "results.csv").resolve():
        raise ExperimentError(
            f"--results {files[0]}: the comparison writes its own numbers there; name another file"
        )
    if predictions:
        need("parquet", "Parquet", otherwise="leave out predictions")
    watcher = watcher or notebook_watcher() or Watcher()
    if jobs is None:
        cells = expand_plan(whole) if launcher == "local" else []
        jobs = default_jobs([cell.experiment for cell in cells])
    lookup: dict[str, Any] = {"again": again, "results": files}
    lookup |= {"cache": cached, "drop_weights": drop_weights}
    execution: dict[str, Any] = {"jobs": jobs, "cache": cached, "watcher": watcher}
    execution |= {"launcher": launcher, "launcher_options": launcher_options}
    chosen, trials = whole, prepare_trials(whole, folder, **lookup)
    if trials is not None:
        watcher.planned(trials)
        if dry_run and trials.missing:
            return trials
        if not dry_run:
            carry_out_comparison(trials, **execution).require_results()
            emit(*trials.diagnostics)
        chosen = picked(whole, trials, files, write=not dry_run)
    done = prepare_comparison(whole, folder, cells=expand_plan(chosen), **lookup)
    watcher.planned(done)
    if dry_run:
        return done
    carry_out_comparison(done, **execution)
    if predictions:
        emit(*function("write_missing_results")(done.folders, cache=cached))
    if report and (write := find("write_comparison")) is not None:
        write(done.folder)
        for folder in () if drop_weights else filter(is_complete, done.folders):
            function("ensure_card")(folder)
    done.require_results()
    emit(*done.diagnostics)
    return done


def demo(
    out: Path | str = "runs",
    *,
    overrides: Mapping[str, Any] | None = None,
    jobs: int | None = None,
    watcher: "Watcher | None" = None,
    **fields: Any,
) -> "Comparison":
    """Compares training alone and together on emoji, each style unseen once, in ``out / "demo"``.

    Args:
        out: parent of the folder.
        overrides: experiment fields that override the demo's.
        jobs: number of runs at once; by default the number of cores.
        watcher: gets the progress.
        **fields: fields of the demo's plan, as in :func:`compare`.
    """
    from feddg.comparison.plan import demo_plan, jobs_of_demo
    from feddg.settings import merge

    axes, given = _split_fields(fields)
    plan = demo_plan(axes, merge(given, overrides or {}))
    return compare(
        plan,
        Path(out) / "demo",
        jobs=jobs_of_demo(plan, jobs),
        watcher=watcher,
        launcher_options={"reuse": "yes"},
    )


def _split_fields(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits fields into those of a plan and those of its experiments."""
    from feddg.comparison.plan import PROTOCOLS, Plan

    whole_clients = {"clients"} if isinstance(fields.get("clients"), Mapping) else set()
    one_data_set = set() if isinstance(fields.get("data"), list | tuple) else {"data"}
    names = Plan.model_fields.keys() - whole_clients - one_data_set
    axes = {name: value for name, value in fields.items() if name in names}
    given = {name: value for name, value in fields.items() if name not in names}
    hold_out = axes.get("hold_out")
    if isinstance(hold_out, str) and hold_out not in PROTOCOLS:
        axes["hold_out"] = [hold_out]
    return ({"seeds": (given.pop("seed"),)} if "seed" in given else {}) | axes, given
