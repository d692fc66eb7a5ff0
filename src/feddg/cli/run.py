"""Commands about experiments: demo, run, compare, resume, forget, methods."""

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from feddg import api
from feddg.diagnostics import logged_once
from feddg.errors import ExperimentError
from feddg.options import (
    DryRunOption,
    ExperimentCommand,
    JsonOption,
    OptionsCommand,
    QuietOption,
    TrackOption,
    VerboseOption,
    launcher_options,
    options_of,
    print_json,
    resumable,
    show,
    takes,
    track,
    whole_numbers,
)
from feddg.options import seeds as read_seeds

app = typer.Typer()
PLAN = "plan file (YAML), or a table of a paper, such as pardon/table1_pacs"
SeedsOption = Annotated[
    str | None,
    typer.Option(help="how many (3: seeds 0, 1, 2), or which: 7,8,9 (7, for seed 7 alone)"),
]


@app.command(cls=ExperimentCommand, rich_help_panel="Start")
@takes("method hold_out train.rounds", several=True)
@options_of("feddg.api:demo", "out jobs", jobs=(1, None))
def demo(
    options: dict[str, Any],
    overrides: dict[str, Any],
    axes: dict[str, Any],
    seeds: SeedsOption = None,
    quiet: QuietOption = False,
) -> None:
    """Compare training alone with training together: offline, two minutes.

    On emoji in four styles, each of which is held out once.
    """
    from feddg.progress import Display

    if seeds is not None:
        axes["seeds"] = read_seeds(seeds)
    with resumable():
        done = api.demo(overrides=overrides, watcher=Display(quiet), **options, **axes)
    show("print_comparison", done)
    if done.failures:
        raise typer.Exit(1)


@app.command(cls=ExperimentCommand, rich_help_panel="Start")
@takes()
@options_of("feddg.api:run", "out workers again predictions", workers=(1, None))
def run(
    options: dict[str, Any],
    overrides: dict[str, Any],
    experiment: Annotated[Path | None, typer.Argument(help="experiment file (YAML)")] = None,
    snapshots: Annotated[
        str | None,
        typer.Option(help="rounds whose models are kept in the run's folder `snapshots`: 1,10,50"),
    ] = None,
    tracked: TrackOption = None,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Run an experiment: from a file, from flags, or both.

    Everything about the run is kept in its folder. The same experiment is never run twice: if it
    is complete, its results are shown; if it was interrupted, it continues.
    """
    kept = whole_numbers("--snapshots", snapshots) if snapshots else []
    for name in overrides.keys() & inspect.signature(api.run).parameters.keys():
        raise ExperimentError(f"--set {name}: an experiment has no such field; use the option")
    if dry_run:
        from feddg.progress import show_preview
        from feddg.runs.beforehand import preview

        show_preview(preview(experiment, options["out"], again=options["again"], **overrides))
        return
    track(tracked)
    from feddg.progress import Display, OneRun

    with resumable():
        watching = OneRun(Display(quiet, verbose))
        done = api.run(experiment, observer=watching, snapshots=kept, **options, **overrides)
    show("print_results", done)


@app.command(cls=ExperimentCommand, rich_help_panel="Start")
@takes("method data hold_out clients train server model evaluate preset", several=True)
@options_of("feddg.api:compare", "out again results predictions drop_weights launcher")
def compare(
    options: dict[str, Any],
    overrides: dict[str, Any],
    axes: dict[str, Any],
    plan: Annotated[Path | None, typer.Argument(help=PLAN)] = None,
    seeds: SeedsOption = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="runs at once; by default several on a GPU, else 1")
    ] = None,
    dry_run: DryRunOption = False,
    tracked: TrackOption = None,
    launcher_option: Annotated[
        list[str] | None, typer.Option(help="an option of the launcher: partition=gpu")
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Compare methods over held-out domains and seeds, and write a report.

    You can stop it and give the same command again: complete runs are kept, interrupted ones
    continue.
    """
    from feddg.progress import Display, print_missing

    track(tracked)
    if seeds is not None:
        axes["seeds"] = read_seeds(seeds)
    with logged_once(), resumable():
        done = api.compare(
            plan,
            overrides=overrides,
            jobs=jobs,
            watcher=Display(quiet),
            launcher_options=launcher_options(launcher_option or ()),
            dry_run=dry_run,
            **options,
            **axes,
        )
        if dry_run:
            print_missing(done)
            return
    show("print_comparison", done)
    if done.failures:
        raise typer.Exit(1)


@app.command(cls=OptionsCommand, rich_help_panel="Further")
@options_of("feddg.api:resume", "workers device", workers=(1, None))
def resume(
    options: dict[str, Any],
    folder: Annotated[Path, typer.Argument(help="the run folder")],
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Continue an interrupted run after the last completed round."""
    from feddg.progress import Display, OneRun

    with resumable():
        done = api.resume(folder, observer=OneRun(Display(quiet, verbose)), **options)
    show("print_results", done)


@app.command(rich_help_panel="Further")
def forget(
    folder: Annotated[Path, typer.Argument(help="the run folder")],
    client: Annotated[int, typer.Option(help="id of the site that withdraws")],
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Remove a site's data from the model of a complete run.

    This is exact, and possible only for a classifier in closed form (ridge), not for a network
    that was trained.
    """
    from feddg.progress import Display, OneRun
    from feddg.runs.execute import forget as forgotten

    done = forgotten(folder, client, observer=OneRun(Display(quiet, verbose)))
    typer.echo(f"client {client} no longer has a part in this model")
    show("print_results", done)


@app.command(rich_help_panel="Look around")
def methods(as_json: JsonOption = False) -> None:
    """List the methods, with a line about each."""
    from feddg.methods import base

    if as_json:
        rows = [
            {
                "name": name,
                "title": method.title,
                "aliases": list(method.aliases),
                "summary": method.summary,
                "settings": method.Settings.model_json_schema().get("properties", {}),
            }
            for name, method in base.methods().items()
        ]
        print_json(rows)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "aliases", "method", "in one line", box=None, pad_edge=False)
    for method in base.methods().values():
        aliases = ", ".join(method.aliases)
        table.add_row(f"[bold]{method.name}[/]", aliases, method.title, method.summary)
    Console().print(table)
