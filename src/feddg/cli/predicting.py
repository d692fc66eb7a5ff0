"""What a user does with a trained model: ``predict`` and ``export``."""

from pathlib import Path
from typing import Annotated

import typer

from feddg.cli.common import QuietOption

app = typer.Typer()

RunArgument = Annotated[Path, typer.Argument(help="the run folder")]
ModelArgument = Annotated[
    Path, typer.Argument(help="the run folder, or an ONNX file of `feddg export`")
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="refuse a model that is no better than a constant one")
]
AdaptOption = Annotated[
    str | None, typer.Option(help="a test-time adaptation, see `feddg adaptations`")
]
WhichOption = Annotated[
    str | None,
    typer.Option(
        help="the model: final, tail, ema, best_in_domain, best_held_out, interpolated; by "
        "default what the run serves"
    ),
]


@app.command()
def predict(
    run: ModelArgument,
    images: Annotated[list[str], typer.Argument(help="images, folders (all below), globs")],
    out: Annotated[Path, typer.Option(help="the table: ends in .csv, .jsonl or .parquet")],
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="a column for every class")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="a page of thumbnails, the most doubtful first")
    ] = None,
    adapt: AdaptOption = None,
    which: WhichOption = None,
    batch_size: Annotated[int, typer.Option(min=1, help="images per batch")] = 64,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto")] = "auto",
    strict: StrictOption = False,
    quiet: QuietOption = False,
) -> None:
    """Label image files with a run's model; after Ctrl-C the same command goes on."""
    from feddg.cli.progress import working
    from feddg.errors import DataError
    from feddg.prediction.predict import note_of, predict_files

    if html is not None and (html.is_dir() or html.resolve() == out.resolve()):
        raise DataError(f"--html {html} is a folder, or the table itself; name a file of its own")

    def bad(line: str) -> None:
        typer.echo(f"unusable: {line}", err=True)

    try:
        with working(quiet) as progress:
            done = predict_files(
                run,
                images,
                out,
                adapt=adapt,
                which=which,
                probabilities=probabilities,
                device=device,
                batch_size=batch_size,
                strict=strict,
                progress=progress,
                on_bad=bad,
            )
    except KeyboardInterrupt:
        how = "goes on where it stopped" if note_of(out).is_file() else "begins anew"
        typer.echo(f"interrupted; the same command {how}", err=True)
        raise typer.Exit(130) from None
    if done.continued:
        typer.echo(f"continued: {done.continued} images were done before")
    typer.echo(f"{done.files - done.failed} of {done.files} images labelled: {done.out}")
    if done.unlike is None:
        typer.echo("no warning light: the run keeps no energy threshold for this model")
    else:
        typer.echo(f"unlike anything seen in training: {done.unlike}")
    if html is not None:
        from feddg.prediction.predict import doubtful
        from feddg.report.predictions_page import write_predictions_page

        model = done.classifier
        page = write_predictions_page(
            doubtful(done.out),
            html,
            preparation=model.preparation,
            result=model.result,
            cautions=model.cautions,
        )
        typer.echo(f"page, the most doubtful images first: {page}")
    say_cautions(done.classifier.cautions)
    if done.failed == done.files:
        raise typer.Exit(1)


@app.command()
def export(
    run: RunArgument,
    onnx: Annotated[Path | None, typer.Option(help="write ONNX (extra `export`)")] = None,
    torch: Annotated[Path | None, typer.Option(help="write a torch.export program, .pt2")] = None,
    safetensors: Annotated[Path | None, typer.Option(help="write the weights alone")] = None,
    adapt: AdaptOption = None,
    which: WhichOption = None,
    floats: Annotated[
        bool, typer.Option("--float-input", help="images in [0, 1] instead of 0..255")
    ] = False,
    strict: StrictOption = False,
) -> None:
    """Write a run's model as a file that works without feddg, and a model card beside it."""
    from feddg.prediction.export import export_run, one_format

    chosen = one_format([("onnx", onnx), ("torch", torch), ("safetensors", safetensors)])
    format, path = chosen
    done = export_run(
        run,
        path,
        format,
        adapt=adapt,
        which=which,
        input_kind="float" if floats else "uint8",
        strict=strict,
    )
    if done.checked:
        typer.echo(
            f"checked on {done.checked} images: labels are the run's, probabilities within "
            f"{done.difference:.1e}"
        )
    typer.echo(f"model: {done.path}")
    typer.echo(f"model card: {done.card}")
    say_cautions(done.cautions)


def say_cautions(said: tuple[str, ...]) -> None:
    """Prints what must be said of a model so that it is not overlooked."""
    from rich.console import Console
    from rich.panel import Panel

    if said:
        panel = Panel("\n".join(said), title="DO NOT RELY ON THIS MODEL", border_style="bold red")
        Console(stderr=True).print(panel)
