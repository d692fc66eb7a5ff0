"""Commands about methods and test-time adaptations, and what a finished run is worth under them."""

from pathlib import Path
from typing import Annotated

import typer

from feddg.cli.common import JsonOption, PredictionsOption, print_json

app = typer.Typer()


@app.command()
def methods(as_json: JsonOption = False) -> None:
    """List the methods: names, aliases, one line each."""
    from feddg.methods.base import methods as all_methods

    known = all_methods()
    if as_json:
        rows = [
            {
                "name": name,
                "title": method.title,
                "aliases": list(method.aliases),
                "summary": method.summary,
                "settings": method.Settings.model_json_schema().get("properties", {}),
            }
            for name, method in known.items()
        ]
        print_json(rows)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "aliases", "method", "in one line", box=None, pad_edge=False)
    for name, method in known.items():
        aliases = ", ".join(method.aliases)
        table.add_row(f"[bold]{name}[/]", aliases, method.title, method.summary)
    Console().print(table)


@app.command()
def evaluate(
    folder: Annotated[Path, typer.Argument(help="the run folder")],
    adapt: Annotated[
        list[str] | None,
        typer.Option(help="`feddg adaptations`, or fixed:alpha=0.3; all by default"),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="images per batch")] = 64,
    personal: Annotated[
        bool, typer.Option("--personal", help="each client's domain under its own statistics")
    ] = False,
    alphas: Annotated[
        bool, typer.Option("--alphas", help="write how far each layer adapts to each image")
    ] = False,
    which: Annotated[
        str | None,
        typer.Option(
            help="the model: final, tail, ema, best_in_domain, best_held_out, interpolated; by "
            "default what the run serves"
        ),
    ] = None,
    predictions: PredictionsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure a run's model under test-time adaptations; kept in its adaptation.jsonl.

    With --predictions alone, only what the model makes of every image is written.
    """
    if predictions:
        from feddg.prediction.evaluate import write_image_results

        written = write_image_results(folder, which=which, batch_size=batch_size)
        typer.echo(f"predictions: {written.resolve()}", err=as_json)
        if adapt is None and not personal and not alphas:
            return
    from feddg.prediction.evaluate import evaluate_run

    found = evaluate_run(
        folder, adapt, batch_size=batch_size, personal=personal, alphas=alphas, which=which
    )
    if as_json:
        print_json([score.model_dump() for score in found.scores])
        return
    from rich.console import Console

    from feddg.cli.tables import adaptation_table
    from feddg.report import write_report

    Console().print(adaptation_table(found))
    for reason in found.refused.values():
        typer.echo(reason)
    typer.echo(f"report: {write_report([folder], folder / 'report.html').resolve()}")


@app.command()
def adaptations() -> None:
    """List the test-time adaptations: what each needs, what it changes, what it costs."""
    from rich.console import Console
    from rich.table import Table

    from feddg.evaluation.adaptation import ADAPTATIONS

    table = Table("name", "in one line", "needs", "remembers", "beside one forward pass", box=None)
    for name, kind in ADAPTATIONS.items():
        table.add_row(f"[bold]{name}[/]", kind.summary, kind.needs, kind.changes, kind.cost)
    Console().print(table)
