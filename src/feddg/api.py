"""What a program calls: carry out experiments and plans, and write the pages about them."""

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddg.diagnostics import emit
from feddg.experiment import Experiment
from feddg.runs import execute
from feddg.runs.execute import Run
from feddg.runs.observer import Observer
from feddg.runs.provenance import ImagesNow, find_folder
from feddg.storage import cache_folder
from feddg.views import notebook_observer, notebook_watcher

if TYPE_CHECKING:
    from feddg.comparison.compare import Comparison
    from feddg.comparison.plan import Plan
    from feddg.comparison.pool import Watcher

log = logging.getLogger("feddg")

# Pages need plotly, comparisons SciPy: a run that begins must not wait for them.


def run(
    experiment: Experiment,
    out: Path | str = "runs",
    *,
    observer: Observer | None = None,
    cache: Path | None = None,
    report: bool = True,
    snapshots: Collection[int] = (),
    again: bool = False,
    predictions: bool = False,
) -> Run:
    """Carries out an experiment, or goes on with it, or finds it done.

    The run's folder is ``out / experiment.label``. A completed experiment is not run again; an
    interrupted one continues from its last completed round, with the same numbers as if it had
    never stopped. Its images must be those it was begun with.

    Args:
        experiment: what to run.
        out: the run folder's parent.
        observer: is told what happens; in a notebook, bars show it by default.
        cache: folder for decoded pixels and twins; the user's cache by default.
        report: whether to write ``report.html`` and ``model_card.md`` at the end.
        snapshots: rounds whose global weights are kept, for ``feddg report --analyses``.
        again: whether to start anew, beside the old run, where its images were others.
        predictions: whether to keep what is predicted of every image, see
            :func:`feddg.prediction.evaluate.write_image_results`.

    Raises:
        FeddgError: the experiment cannot be carried out; what was computed is kept.
    """
    folder = find_folder(experiment, out, ImagesNow(cache or cache_folder()), again=again)
    return run_in(
        folder,
        experiment,
        observer=observer,
        cache=cache,
        report=report,
        snapshots=snapshots,
        predictions=predictions,
    )


def run_in(
    folder: Path,
    experiment: Experiment,
    *,
    observer: Observer | None = None,
    cache: Path | None = None,
    report: bool = True,
    snapshots: Collection[int] = (),
    predictions: bool = False,
) -> Run:
    """Carries out an experiment in a folder that :func:`feddg.runs.provenance.find_folder` found.

    See :func:`run` for the arguments and errors.
    """
    if predictions:
        from feddg.prediction.predict import parquet

        parquet("leave out predictions")  # says now what would else be said at the end
    done = execute.carry_out(
        folder,
        experiment,
        observer=observer or notebook_observer(),
        cache=cache,
        snapshots=snapshots,
    )
    if predictions:
        from feddg.prediction.evaluate import write_image_results

        write_image_results(done.folder, cache=cache)
    if report:
        from feddg.report import ensure_report

        ensure_report(done.folder)
    return done


def resume(
    folder: Path | str, *, observer: Observer | None = None, cache: Path | None = None
) -> Run:
    """Continues the run in ``folder`` from its last completed round, and writes its page.

    Raises:
        RunError: the folder holds no run.
    """
    done = execute.resume(folder, observer=observer or notebook_observer(), cache=cache)
    from feddg.report import ensure_report

    ensure_report(done.folder)
    return done


def compare(
    plan: "Plan | Path | str | Mapping[str, Any]",
    out: Path | str | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    jobs: int = 0,
    cache: Path | None = None,
    watcher: "Watcher | None" = None,
    report: bool = True,
    again: bool = False,
    results: Path | Sequence[Path] = (),
    predictions: bool = False,
    drop_weights: bool = False,
    launcher_options: Mapping[str, str] | None = None,
) -> "Comparison":
    """Carries out a plan and writes its tables.

    Complete runs are not run again, interrupted ones continue, and one that fails does not stop
    the others. After Ctrl-C, call it again.

    Args:
        plan: a plan, its file, or its fields: ``{"base": {"data": "digits"}, "hold_out": "lodo",
            "methods": ["fedavg", "pardon"], "seeds": 3}``.
        out: the folder of the runs; ``comparisons/NAME`` by default.
        overrides: experiment fields that win over everything the plan says.
        jobs: processes that run at once, each with its share of the cores; 0 runs everything in
            this process, where methods and sources registered by the caller are known.
        cache: folder for decoded pixels and twins; the user's cache by default.
        watcher: is told what happens; in a notebook, bars show it by default.
        report: whether to write tables, ``report.html`` and each run's model card.
        again: whether to start runs anew, beside the old ones, whose images were others.
        results: CSV files of results; what one of them has is not run again, and is copied to the
            first, which a row is added to for every run that ends. What a ``tune`` section tries is
            beside it.
        predictions: whether every run keeps what it predicts of every image; a run that cannot is
            warned of.
        drop_weights: whether a run's weights are deleted once it is complete; it gets no model
            card then, and keeps no predictions.
        launcher_options: with ``jobs`` above 0, ``{"reuse": "yes"}`` for processes that carry out
            several runs each: quicker where runs take seconds.

    Raises:
        FeddgError: the plan is invalid, or every run failed: it says why the first did, and what
            was computed is kept. Where some ran, the others' failures are logged and listed.
    """
    from feddg.comparison.compare import carry_out_work, fixed_plan, prepare_work
    from feddg.comparison.results import results_files
    from feddg.comparison.tuning import tune

    watcher = watcher or notebook_watcher()
    files = results_files(results)  # a fault in them is not to be found after tuning
    whole, folder = fixed_plan(plan, out, overrides)
    tuned = tune(
        whole,
        folder,
        jobs=jobs,
        cache=cache,
        watcher=watcher,
        again=again,
        results=files,
        drop_weights=drop_weights,
    )
    work = prepare_work(
        tuned,
        folder,
        again=again,
        cache=cache,
        results=files,
        said=whole,
        drop_weights=drop_weights,
    )
    done = carry_out_work(
        work, jobs=jobs, cache=cache, watcher=watcher, launcher_options=launcher_options
    )
    if predictions:
        from feddg.prediction.evaluate import write_missing_results

        for reason in write_missing_results(work.folders.values(), cache=cache):
            log.warning("%s", reason)
    if report:
        from feddg.prediction.export import ensure_card
        from feddg.report import write_comparison

        write_comparison(work.out)
        for folder in () if drop_weights else filter(execute.is_complete, work.folders.values()):
            ensure_card(folder)
    done.require_results()
    emit(*done.diagnostics)
    return done
