"""Commands that use a trained model: predict, travel, export, evaluate, adaptations."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from feddg.errors import RunError
from feddg.options import (
    JsonOption,
    ModelArgument,
    OptionsCommand,
    QuietOption,
    options_of,
    print_json,
    resumable,
    show_warnings,
)

app = typer.Typer()
NEEDS = ()
FUNCTIONS = {
    "evaluate": "evaluate decide write_image_results write_missing_results",
    "export": "export_run save_model ensure_card",
    "model": "load_model",
    "model_file": "write_model",
    "predict": "predict predict_files",
    "travel": "travel",
    "validation": "validate",
}
PANEL = "Use a model"
RunArgument = Annotated[Path, typer.Argument(help="the run folder")]
AT_LEAST_1 = (1, None)
BETWEEN_0_AND_1 = (0, 1)


@app.command(cls=OptionsCommand, rich_help_panel=PANEL)
@options_of(
    "feddg.prediction.predict:predict_files",
    "html adapt which probabilities decision threshold batch_size device precision strict",
    batch_size=AT_LEAST_1,
    threshold=BETWEEN_0_AND_1,
)
def predict(
    options: dict[str, Any],
    run: ModelArgument,
    images: Annotated[list[str], typer.Argument(help="files, folders (at any depth), globs")],
    out: Annotated[Path, typer.Option(help="table to write, .csv or .jsonl")],
    quiet: QuietOption = False,
) -> None:
    """Label images with a run's model.

    After Ctrl-C the same command continues.
    """
    from feddg.prediction.predict import predict_files
    from feddg.progress import working

    with resumable(), working(quiet) as progress:
        done = predict_files(run, images, out, progress=progress, **options)
    for row in done.faults:
        typer.echo(f"unusable: {row.file}: {row.reason}", err=True)
    if done.continued:
        typer.echo(f"continued: {done.continued} images were done before")
    what = "images" if done.classifier.description.features is None else "tables"
    typer.echo(f"{done.files - done.failed} of {done.files} {what} labelled: {done.out}")
    if done.unlike is not None:
        typer.echo(f"unlike anything seen in training: {done.unlike}")
    # A shared model and a deployment's run have no images here to compare with.
    if (run / "experiment.yaml").is_file() and not (run / "deployment.json").is_file():
        named = images if len(images) < 4 else [*images[:3], "..."]
        words = shlex.join(["feddg", "travel", str(run), *named])
        typer.echo(f"how many are right, without labels: {words}")
    if "html" in options:
        typer.echo(f"page, the most doubtful images first: {options['html']}")
    show_warnings(done.classifier.diagnostics)
    if done.failed == done.files:
        raise typer.Exit(1)


@app.command(cls=OptionsCommand, rich_help_panel=PANEL)
@options_of(
    "feddg.prediction.travel:travel",
    "html labels choose beside which batch_size device",
    choose=(0, None),
    batch_size=AT_LEAST_1,
)
def travel(
    options: dict[str, Any],
    run: RunArgument,
    images: Annotated[list[str], typer.Argument(help="files, folders, globs, all of one site")],
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Estimate a model's accuracy on a new site's images without labels.

    Gives a 90 % interval and advice. The first call leaves out each of the run's sites in turn,
    which takes one pass over the run's own images; the result is kept in the run's travel.json.
    """
    from feddg.prediction import travel as estimates
    from feddg.progress import working

    with working(quiet or as_json) as progress:
        result = estimates.travel(run, images, progress=progress, **options)
    if as_json:
        print_json(result.fields())
        return
    from feddg.report.terminal import print_travel

    print_travel(result)
    if options["choose"]:
        labels = options["labels"]
        typer.echo(f"images to label: {labels}; fill in its column, then leave out --choose")
    if "html" in options:
        typer.echo(f"page, the riskiest images first: {options['html']}")
    show_warnings(result.model.diagnostics)


@app.command(cls=OptionsCommand, rich_help_panel=PANEL)
@options_of("feddg.prediction.export:export_run", "adapt which strict")
def export(
    options: dict[str, Any],
    run: RunArgument,
    onnx: Annotated[Path | None, typer.Option(help="write ONNX (extra `export`)")] = None,
    torch: Annotated[Path | None, typer.Option(help="write a torch.export program, .pt2")] = None,
    safetensors: Annotated[Path | None, typer.Option(help="write only the weights")] = None,
    hub: Annotated[
        Path | None, typer.Option(help="write a folder for `hf upload owner/name FOLDER`")
    ] = None,
) -> None:
    """Export a run's model to a file that works without feddg.

    A model card is written beside it.
    """
    from feddg.prediction.export import export_run, save_model

    named = [("onnx", onnx), ("torch", torch), ("safetensors", safetensors), ("hub", hub)]
    targets: list[Any] = [(format, path) for format, path in named if path is not None]
    if len(targets) != 1:
        raise RunError("name one: --onnx FILE, --torch FILE, --safetensors FILE or --hub FOLDER")
    ((format, path),) = targets
    if format == "hub":
        done = save_model(run, path, **options)
    else:
        done = export_run(run, path, format, **options)
    if done.checked:
        typer.echo(
            f"checked on {done.checked} images: labels are the run's, probabilities within "
            f"{done.difference:.1e}"
        )
    typer.echo(f"model: {done.path}")
    typer.echo(f"model card: {done.card}")
    show_warnings(done.description.diagnostics)


@app.command(cls=OptionsCommand, rich_help_panel=PANEL)
@options_of(
    "feddg.prediction.evaluate:decide_run",
    "decision specificity sensitivity prevalence",
    into="about",
    specificity=BETWEEN_0_AND_1,
    sensitivity=BETWEEN_0_AND_1,
    prevalence=BETWEEN_0_AND_1,
)
@options_of(
    "feddg.prediction.evaluate:evaluate_run",
    "which batch_size device personal",
    batch_size=AT_LEAST_1,
)
def evaluate(
    options: dict[str, Any],
    about: dict[str, Any],
    folder: Annotated[Path, typer.Argument(help="the run folder")],
    adapt: Annotated[
        list[str] | None,
        typer.Option(help="one of `feddg adaptations`, as fixed:alpha=0.3; all by default"),
    ] = None,
    predictions: Annotated[
        bool, typer.Option("--predictions", help="write the prediction for every image")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure a run's model under test-time adaptations.

    The results are kept in the run's adaptation.jsonl. With --predictions alone, only the
    prediction for every image is written. With --decision (or, for the run's own decision, with
    --specificity, --sensitivity or --prevalence), the decision about a class is measured and kept
    in details.json.
    """
    from feddg.prediction import evaluate as measured

    of_model = {name: value for name, value in options.items() if name != "personal"}
    if about:
        details = measured.decide(folder, **about, **of_model)
        if as_json:
            print_json(details.model_dump())
        else:
            from feddg.report.terminal import print_details

            print_details(details)
            typer.echo(f"report: {(folder / 'report.html').resolve()}")
    if predictions:
        written = measured.write_image_results(folder, **of_model)
        typer.echo(f"predictions: {written.resolve()}", err=as_json)
    if (about or predictions) and adapt is None and not options["personal"]:
        return
    result = measured.evaluate(folder, adapt, **options)
    if as_json:
        print_json([score.model_dump() for score in result.scores])
        return
    if result.scores:
        from feddg.report.run_page import adaptation_table
        from feddg.report.terminal import print_tables

        print_tables(adaptation_table(result.scores))
    for reason in result.refused.values():
        typer.echo(reason)
    typer.echo(f"report: {(folder / 'report.html').resolve()}")


@app.command(rich_help_panel="Look around")
def adaptations() -> None:
    """List the test-time adaptations, and what each needs and costs."""
    from rich.console import Console
    from rich.table import Table

    from feddg.prediction.adaptation import ADAPTATIONS

    table = Table("name", "in one line", "needs", "remembers", "beside one forward pass", box=None)
    for kind in ADAPTATIONS.values():
        table.add_row(f"[bold]{kind.name}[/]", kind.summary, kind.needs, kind.changes, kind.cost)
    Console().print(table)
