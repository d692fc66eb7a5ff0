"""Commands about trained models: predict, travel, export, serve, evaluate, attack, style."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from feddg import api
from feddg.cli.common import (
    JsonOption,
    OptionsCommand,
    QuietOption,
    options_of,
    print_json,
    resumable,
    whole_numbers,
)

if TYPE_CHECKING:
    from feddg.diagnostics import Diagnostic
    from feddg.prediction.classifier import ImageClassifier

app = typer.Typer()

RunArgument = Annotated[Path, typer.Argument(help="the run folder")]
ModelArgument = Annotated[
    Path,
    typer.Argument(
        help="the run folder, what `feddg export` wrote (ONNX, a folder), or hf:owner/name@revision"
    ),
]
AT_LEAST_1 = (1, None)
AT_LEAST_0 = (0, None)
BETWEEN_0_AND_1 = (0, 1)


@app.command(cls=OptionsCommand)
@options_of(
    "feddg.prediction.predict:predict_files",
    "adapt which probabilities decision threshold batch_size device precision strict",
    batch_size=AT_LEAST_1,
    threshold=BETWEEN_0_AND_1,
)
def predict(
    options: dict[str, Any],
    run: ModelArgument,
    images: Annotated[list[str], typer.Argument(help="images, folders (all below), globs")],
    out: Annotated[Path, typer.Option(help="the table: ends in .csv or .jsonl")],
    html: Annotated[
        Path | None, typer.Option(help="a page of thumbnails, the most doubtful first")
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Label image files with a run's model.

    After Ctrl-C the same command goes on.
    """
    from feddg.cli.progress import working

    def bad(line: str) -> None:
        typer.echo(f"unusable: {line}", err=True)

    with resumable(), working(quiet) as progress:
        done = api.predict_files(
            run, images, out, html=html, progress=progress, on_bad=bad, **options
        )
    if done.continued:
        typer.echo(f"continued: {done.continued} images were done before")
    what = "images" if done.classifier.description.features is None else "tables"
    typer.echo(f"{done.files - done.failed} of {done.files} {what} labelled: {done.out}")
    if done.unlike is None:
        typer.echo("no out-of-distribution score: the run keeps no energy threshold for this model")
    else:
        typer.echo(f"unlike anything seen in training: {done.unlike}")
    if (run / "experiment.yaml").is_file():  # a shared model has no images to compare with
        named = images if len(images) < 4 else [*images[:3], "..."]
        words = shlex.join(["feddg", "travel", str(run), *named])
        typer.echo(f"how many are right, without labels: {words}")
    if html is not None:
        typer.echo(f"page, the most doubtful images first: {html}")
    show_warnings(done.classifier.diagnostics)
    if done.failed == done.files:
        raise typer.Exit(1)


@app.command(cls=OptionsCommand)
@options_of(
    "feddg.prediction.travel:travel",
    "labels choose beside which batch_size device",
    choose=AT_LEAST_0,
    batch_size=AT_LEAST_1,
)
def travel(
    options: dict[str, Any],
    run: RunArgument,
    images: Annotated[list[str], typer.Argument(help="images, folders, globs: all of one site")],
    html: Annotated[
        Path | None, typer.Option(help="a page of thumbnails, the riskiest first")
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Estimate a run's accuracy on images without labels.

    With a 90 % interval. The first time it leaves each of the run's sites out in turn, which takes
    one pass over the run's own images; what comes of it is kept in the run's travel.json.
    """
    from feddg.cli.progress import working

    with working(quiet or as_json) as progress:
        found = api.travel(run, images, html=html, progress=progress, **options)
    if as_json:
        print_json(found.fields())
        return
    from feddg.cli.output import print_travel

    print_travel(found)
    if options["choose"]:
        labels = options["labels"]
        typer.echo(f"images to label: {labels}; fill in its column, then leave out --choose")
    if html is not None:
        typer.echo(f"page, the riskiest images first: {html}")
    show_warnings(found.model.diagnostics)


@app.command(cls=OptionsCommand)
@options_of("feddg.prediction.export:export_run", "adapt which strict")
def export(
    options: dict[str, Any],
    run: RunArgument,
    onnx: Annotated[Path | None, typer.Option(help="write ONNX (extra `export`)")] = None,
    torch: Annotated[Path | None, typer.Option(help="write a torch.export program, .pt2")] = None,
    safetensors: Annotated[Path | None, typer.Option(help="write the weights alone")] = None,
    hub: Annotated[
        Path | None, typer.Option(help="write a folder for `hf upload owner/name FOLDER`")
    ] = None,
) -> None:
    """Write a run's model as a file that works without feddg.

    A model card stands beside it.
    """
    named = [("onnx", onnx), ("torch", torch), ("safetensors", safetensors), ("hub", hub)]
    format, path = api.one_format(named)
    if format == "hub":
        done = api.save_model(run, path, **options)
    else:
        done = api.export_run(run, path, format, **options)
    if done.checked:
        typer.echo(
            f"checked on {done.checked} images: labels are the run's, probabilities within "
            f"{done.difference:.1e}"
        )
    typer.echo(f"model: {done.path}")
    typer.echo(f"model card: {done.card}")
    show_warnings(done.diagnostics)


def show_warnings(found: "Sequence[Diagnostic]") -> None:
    """Prints the warnings about a model conspicuously."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    if found:
        text = Text("\n".join(map(str, found)))
        panel = Panel(text, title="DO NOT RELY ON THIS MODEL", border_style="bold red")
        Console(stderr=True).print(panel)


@app.command(cls=OptionsCommand)
@options_of(
    "feddg.serving.application:ServeLimits",
    "request_megabytes megapixels at_once waiting",
    into="limits",
)
@options_of(
    "feddg.serving.server:serve",
    "port host allow_network known_as adapt which device precision strict",
    port=(0, 65535),
)
def serve(options: dict[str, Any], limits: dict[str, Any], run: ModelArgument) -> None:
    """Label images on a page in the browser, and for programs.

    On this machine; no image is kept.
    """

    def ready(address: str, classifier: "ImageClassifier") -> None:
        show_warnings(classifier.diagnostics)
        if not api.is_loopback(options["host"]):
            typer.echo("warning: other machines reach this server without a password", err=True)
        typer.echo(f"{classifier.result}\nserving {run} at {address} (Ctrl-C ends it)")

    api.serve(run, limits=limits, ready=ready, **options)


@app.command()
def methods(as_json: JsonOption = False) -> None:
    """List the methods: names, aliases, one line each."""
    if as_json:
        rows = [
            {
                "name": name,
                "title": method.title,
                "aliases": list(method.aliases),
                "summary": method.summary,
                "settings": method.Settings.model_json_schema().get("properties", {}),
            }
            for name, method in api.methods().items()
        ]
        print_json(rows)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "aliases", "method", "in one line", box=None, pad_edge=False)
    for method in api.methods().values():
        aliases = ", ".join(method.aliases)
        table.add_row(f"[bold]{method.name}[/]", aliases, method.title, method.summary)
    Console().print(table)


@app.command(cls=OptionsCommand)
@options_of(
    "feddg.prediction.evaluate:decide_run",
    "decision specificity sensitivity prevalence",
    into="about",
    specificity=BETWEEN_0_AND_1,
    sensitivity=BETWEEN_0_AND_1,
    prevalence=BETWEEN_0_AND_1,
)
@options_of(
    "feddg.prediction.evaluate:evaluate_run", "which batch_size personal", batch_size=AT_LEAST_1
)
def evaluate(
    options: dict[str, Any],
    about: dict[str, Any],
    folder: Annotated[Path, typer.Argument(help="the run folder")],
    adapt: Annotated[
        list[str] | None,
        typer.Option(help="`feddg adaptations`, or fixed:alpha=0.3; all by default"),
    ] = None,
    predictions: Annotated[
        bool, typer.Option("--predictions", help="write what is predicted of every image")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure a run's model under test-time adaptations.

    The results are kept in the run's adaptation.jsonl. With --predictions alone, only what the
    model makes of every image is written; with --decision alone, what it decides about a class is
    measured and kept in details.json.
    """
    of_model = {name: value for name, value in options.items() if name != "personal"}
    if "decision" in about:
        details = api.decide(folder, report=not as_json, **about, **of_model)
        if as_json:
            print_json(details.model_dump())
        else:
            from feddg.cli.output import print_details

            print_details(details)
            typer.echo(f"report: {(folder / 'report.html').resolve()}")
        if adapt is None and not options["personal"] and not predictions:
            return
    if predictions:
        written = api.write_image_results(folder, **of_model)
        typer.echo(f"predictions: {written.resolve()}", err=as_json)
        if adapt is None and not options["personal"]:
            return
    found = api.evaluate(folder, adapt, report=not as_json, **options)
    if as_json:
        print_json([score.model_dump() for score in found.scores])
        return
    if found.scores:
        from feddg.cli.output import print_adaptations

        print_adaptations(found.scores)
    for reason in found.refused.values():
        typer.echo(reason)
    typer.echo(f"report: {(folder / 'report.html').resolve()}")


@app.command()
def adaptations() -> None:
    """List the adaptations: what each needs, changes and costs."""
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "in one line", "needs", "remembers", "beside one forward pass", box=None)
    for kind in api.ADAPTATIONS.values():
        table.add_row(f"[bold]{kind.name}[/]", kind.summary, kind.needs, kind.changes, kind.cost)
    Console().print(table)


privacy_app = typer.Typer(no_args_is_help=True, suggest_commands=False)


@privacy_app.callback()
def privacy() -> None:
    """Attack a finished run: what do its messages give away?"""


@privacy_app.command("attack", cls=OptionsCommand)
@options_of("feddg.attacks.senders:MembershipEffort", "clients shadows", into="effort")
@options_of(
    "feddg.attacks.attack:AttackSettings",
    "public entry client most_public targets steps updates iterations optimizer seed",
)
def attack(
    options: dict[str, Any],
    effort: dict[str, Any],
    folder: Annotated[Path, typer.Argument(help="the run folder")],
    kind: Annotated[
        str,
        typer.Option(
            help="server: what the server (or whoever reads its messages) draws from styles, "
            "spectra, prototypes; client: what a malicious client draws from what it receives; "
            "update: gradient inversion of single updates; membership: whose images they were"
        ),
    ],
    batch_sizes: Annotated[
        str, typer.Option(help="update: images behind an update, as 1,4,32")
    ] = "1,4",
    as_json: JsonOption = False,
) -> None:
    """Attack a finished run: what do its messages give away?

    The results are kept in its attacks.jsonl, pictures in its figures.
    """
    from feddg.cli.output import print_attack
    from feddg.cli.progress import working

    options["batch_sizes"] = whole_numbers("--batch-sizes", batch_sizes)
    with working(quiet=as_json) as progress:
        rows = api.attack(folder, kind, report=not as_json, progress=progress, **options, **effort)
    if as_json:
        print_json([row.model_dump() for row in rows])
        return
    print_attack(rows)
    typer.echo(f"report: {(folder / 'report.html').resolve()}")
