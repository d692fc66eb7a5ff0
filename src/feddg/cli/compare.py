"""Commands about many runs: ``compare``, ``report`` and ``paired``."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from feddg.cli.common import (
    AgainOption,
    DryRunOption,
    ExperimentCommand,
    JsonOption,
    PredictionsOption,
    QuietOption,
    TrackOption,
    named,
    print_json,
    takes,
    track,
)
from feddg.cli.common import seeds as read_seeds
from feddg.errors import ExperimentError, RunError

app = typer.Typer()


@app.command(cls=ExperimentCommand)
@takes(
    "method",
    "data",
    "hold_out",
    "clients",
    "train",
    "server",
    "model",
    "evaluate",
    "preset",
    several=True,
)
def compare(
    said: dict[str, Any],
    axes: dict[str, Any],
    plan: Annotated[Path | None, typer.Argument(help="plan file (YAML)")] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="how many (3: seeds 0, 1, 2), or which: 7,8,9; 7, is seed 7 alone"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder of the runs; comparisons/NAME if not said")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="processes at once")] = 1,
    dry_run: DryRunOption = False,
    tracked: TrackOption = None,
    again: AgainOption = False,
    predictions: PredictionsOption = False,
    launcher: Annotated[
        str, typer.Option(help="where runs go: local, ray, slurm; docs/compare.md")
    ] = "local",
    launcher_option: Annotated[
        list[str] | None, typer.Option(help="what the launcher takes, as partition=gpu")
    ] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(
            help="CSV file of results: what it has is not run again, what ends is added "
            "(repeatable: further ones are read only)"
        ),
    ] = None,
    drop_weights: Annotated[
        bool,
        typer.Option(
            "--drop-weights", help="delete each run's weights once it is complete: numbers stay"
        ),
    ] = False,
    quiet: QuietOption = False,
) -> None:
    """Compare methods over scenarios and seeds: run what is missing, write tables and a report.

    Stop it at any moment and call it again: complete runs are kept, interrupted ones continue.
    """
    from rich.console import Console

    from feddg.cli.output import ManyBars, print_comparison, print_work
    from feddg.cli.run import plan_with_weights_at_hand
    from feddg.comparison.compare import (
        Work,
        carry_out_work,
        fixed_plan,
        prepare_work,
        why_hopeless,
    )
    from feddg.comparison.plan import load_plan
    from feddg.comparison.pool import Watcher
    from feddg.comparison.results import results_files
    from feddg.comparison.tuning import picked, prepare_trials

    track(tracked)
    if drop_weights and predictions:
        raise ExperimentError("--predictions needs the weights that --drop-weights deletes")
    if seeds is not None:
        axes["seeds"] = read_seeds(seeds)
    base = load_plan(plan).model_dump() if plan else {}
    whole, folder = fixed_plan(load_plan(base | axes), out, said)
    whole = plan_with_weights_at_hand(whole)
    files = results_files(results or ())  # a fault in them is not to be found after tuning
    console = Console(stderr=True)

    def watcher() -> Watcher:
        return Watcher() if quiet else ManyBars(console)

    def show(work: Work) -> None:
        print_work(console, work, jobs)
        if dry_run and (hopeless := why_hopeless(work)) is not None:
            note = f"as things are, no run could start: {hopeless}"
            console.print(note, markup=False, highlight=False, soft_wrap=True)

    where: dict[str, Any] = {
        "launcher": launcher,
        "launcher_options": dict(named(option) for option in launcher_option or ()),
    }
    try:
        trials = prepare_trials(
            whole, folder, again=again, results=files, drop_weights=drop_weights
        )
        chosen = whole
        if trials is not None:
            show(trials)
            if dry_run and trials.missing:
                console.print("the table's runs follow, with the values that are picked")
                return
            if not dry_run:
                tried = carry_out_work(trials, jobs=jobs, watcher=watcher(), **where)
                tried.require_results()
            chosen = picked(whole, trials, files, write=not dry_run)
        work = prepare_work(
            chosen,
            folder,
            again=again,
            results=files,
            said=whole,
            drop_weights=drop_weights,
        )
        show(work)
        if dry_run:
            return
        if predictions:
            from feddg.prediction.predict import parquet

            parquet("leave out --predictions")  # says now what would else be said at the end
        done = carry_out_work(work, jobs=jobs, watcher=watcher(), **where)
        from feddg.report import write_comparison

        if predictions:
            from feddg.prediction.evaluate import write_missing_results

            for reason in write_missing_results(work.folders.values()):
                console.print(f"note: {reason}", markup=False, highlight=False, soft_wrap=True)

        write_comparison(work.out)
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    done.require_results()
    print_comparison(done)
    if done.failures:
        raise typer.Exit(1)


@app.command()
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="a run folder, several, or one of `feddg compare`; or its --results file alone, "
            "for tables in Markdown"
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="the page to write")] = None,
    tables: Annotated[
        Path | None, typer.Option(help="also write its tables here: Markdown, CSV, LaTeX")
    ] = None,
    analyses: Annotated[
        bool,
        typer.Option(
            "--analyses", help="first look into the run: t-SNE, loss landscape, grey levels"
        ),
    ] = False,
    beside: Annotated[
        Path | None, typer.Option(help="a run whose model stands in the loss landscape")
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Write the HTML page of one run, or a comparison of several."""
    from feddg.report import page_about, write_page, write_tables

    if len(folders) == 1 and os.path.isfile(folders[0]) and (out is None or out.suffix != ".html"):
        _report_in_markdown(folders[0], out, others=bool(tables or analyses or beside))
        return
    if analyses or beside:
        from feddg.cli.output import working
        from feddg.runs.analyses import analyse

        with working(quiet) as progress:
            for folder in folders:
                analyse(folder, beside=beside, progress=progress)
    page = page_about(folders)
    path = out or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    if tables is not None:
        write_tables(page, tables)
    typer.echo(write_page(page, path))


def _report_in_markdown(file: Path, out: Path | None, others: bool) -> None:
    """Shows a results file as Markdown, or writes it."""
    from feddg.comparison.results import Results
    from feddg.report.results_page import tables, write_results_page

    if others:
        raise RunError(f"{file} is a results file: of the options, only --out is for it")
    if out is None:
        typer.echo(tables(Results.read(file)))
        return
    write_results_page(file, out)
    typer.echo(out)


# ``feddg paired``: two runs, image by image.


@app.command()
def paired(
    first: Annotated[Path, typer.Argument(help="a run's folder")],
    second: Annotated[Path, typer.Argument(help="another's, measured on the same images")],
    split: Annotated[str, typer.Option(help="test, val, id_val or id_test")] = "test",
    which: Annotated[
        str | None,
        typer.Option(help="the model, as in `feddg evaluate`; by default what it serves"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two runs image by image: McNemar's test and the paired bootstrap.

    Both need their results by image: `feddg evaluate RUN --predictions`.
    """
    from feddg.errors import RunError
    from feddg.prediction.evaluate import compare_images, read_image_results
    from feddg.records import SPLITS

    if split not in SPLITS:
        raise RunError(f"unknown split {split!r}; there are: {', '.join(SPLITS)}")
    one, other = (read_image_results(folder, which) for folder in (first, second))
    found = compare_images(one, other, split)
    if as_json:
        print_json(asdict(found))
        return
    from rich.console import Console

    from feddg.cli.output import as_rich
    from feddg.report.comparison_page import mcnemar_words, paired_table

    console = Console()
    console.print(as_rich(paired_table(found, first.name, second.name)))
    console.print(mcnemar_words(found), markup=False, highlight=False, soft_wrap=True)
