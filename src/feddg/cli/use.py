"""Commands about trained models: predict, travel, export, serve, evaluate, attack, style."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from feddg import api
from feddg.cli.common import (
    AdaptOption,
    BatchOption,
    DeviceOption,
    JsonOption,
    PredictionsOption,
    QuietOption,
    WhichOption,
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
PrecisionOption = Annotated[
    str, typer.Option(help="float32, bfloat16, or auto: bfloat16 where the device is fast at it")
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="refuse a model about which there is a warning")
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
    batch_size: BatchOption = 64,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "float32",
    strict: StrictOption = False,
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
            run,
            images,
            out,
            html=html,
            adapt=adapt,
            which=which,
            probabilities=probabilities,
            device=device,
            precision=precision,
            batch_size=batch_size,
            strict=strict,
            progress=progress,
            on_bad=bad,
        )
    if done.continued:
        typer.echo(f"continued: {done.continued} images were done before")
    what = "images" if done.classifier.description.features is None else "tables"
    typer.echo(f"{done.files - done.failed} of {done.files} {what} labelled: {done.out}")
    if done.unlike is None:
        typer.echo("no out-of-distribution score: the run keeps no energy threshold for this model")
    else:
        typer.echo(f"unlike anything seen in training: {done.unlike}")
    if run.is_dir():
        typer.echo(f"how many are right, without labels: feddg travel {run} {' '.join(images)}")
    if html is not None:
        typer.echo(f"page, the most doubtful images first: {html}")
    show_warnings(done.classifier.diagnostics)
    if done.failed == done.files:
        raise typer.Exit(1)


@app.command()
def travel(
    run: RunArgument,
    images: Annotated[list[str], typer.Argument(help="images, folders, globs: all of one site")],
    labels: Annotated[
        Path | None, typer.Option(help="a CSV file, `file,label`, of images that were labelled")
    ] = None,
    choose: Annotated[
        int, typer.Option(min=0, help="images to label: their names are written to --labels")
    ] = 0,
    beside: Annotated[
        list[Path] | None,
        typer.Option(help="a run like it that held another domain out; may be repeated"),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="a page of thumbnails, the riskiest first")
    ] = None,
    which: WhichOption = None,
    batch_size: BatchOption = 64,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Estimate a run's accuracy on images without labels.

    With a 90 % interval. The first time it leaves each of the run's sites out in turn, which takes
    one pass over the run's own images; what comes of it is kept in the run's travel.json.
    """
    from feddg.cli.progress import working

    with working(quiet or as_json) as progress:
        found = api.travel(
            run,
            images,
            labels=labels,
            choose=choose,
            beside=beside or (),
            html=html,
            which=which,
            batch_size=batch_size,
            device=device,
            progress=progress,
        )
    if as_json:
        print_json(found.fields())
        return
    from feddg.cli.output import print_travel

    print_travel(found)
    if choose:
        typer.echo(f"images to label: {labels}; fill in its column, then leave out --choose")
    if html is not None:
        typer.echo(f"page, the riskiest images first: {html}")
    show_warnings(found.model.diagnostics)


@app.command()
def export(
    run: RunArgument,
    onnx: Annotated[Path | None, typer.Option(help="write ONNX (extra `export`)")] = None,
    torch: Annotated[Path | None, typer.Option(help="write a torch.export program, .pt2")] = None,
    safetensors: Annotated[Path | None, typer.Option(help="write the weights alone")] = None,
    hub: Annotated[
        Path | None, typer.Option(help="write a folder for `hf upload owner/name FOLDER`")
    ] = None,
    adapt: AdaptOption = None,
    which: WhichOption = None,
    floats: Annotated[
        bool, typer.Option("--float-input", help="images in [0, 1] instead of 0..255")
    ] = False,
    strict: StrictOption = False,
) -> None:
    """Write a run's model as a file that works without feddg.

    A model card stands beside it.
    """
    named = [("onnx", onnx), ("torch", torch), ("safetensors", safetensors), ("hub", hub)]
    format, path = api.one_format(named)
    if format == "hub":
        done = api.save_model(run, path, adapt=adapt, which=which, strict=strict)
    else:
        done = api.export_run(
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


@app.command()
def serve(
    run: ModelArgument,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for a free one")] = 8000,
    host: Annotated[str, typer.Option(help="the address to listen on")] = "127.0.0.1",
    allow_network: Annotated[
        bool, typer.Option("--allow-network", help="let other machines reach it")
    ] = False,
    known_as: Annotated[
        list[str] | None,
        typer.Option(help="a name by which it is reached from elsewhere; may be repeated"),
    ] = None,
    adapt: AdaptOption = None,
    which: WhichOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "float32",
    request_megabytes: Annotated[float, typer.Option(help="largest request")] = 32.0,
    megapixels: Annotated[float, typer.Option(help="largest image, in million pixels")] = 50.0,
    at_once: Annotated[int, typer.Option(help="requests answered at once")] = 8,
    waiting: Annotated[int, typer.Option(help="requests that may wait")] = 256,
    strict: StrictOption = False,
) -> None:
    """Label images on a page in the browser, and for programs.

    On this machine; no image is kept.
    """

    def ready(address: str, classifier: "ImageClassifier") -> None:
        show_warnings(classifier.diagnostics)
        if not api.is_loopback(host):
            typer.echo("warning: other machines reach this server without a password", err=True)
        typer.echo(f"{classifier.result}\nserving {run} at {address} (Ctrl-C ends it)")

    api.serve(
        run,
        host=host,
        port=port,
        adapt=adapt,
        which=which,
        device=device,
        precision=precision,
        limits={
            "request_megabytes": request_megabytes,
            "megapixels": megapixels,
            "at_once": at_once,
            "waiting": waiting,
        },
        known_as=known_as or (),
        allow_network=allow_network,
        strict=strict,
        ready=ready,
    )


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
    for method in api.listed_methods():
        aliases = ", ".join(method.aliases)
        table.add_row(f"[bold]{method.name}[/]", aliases, method.title, method.summary)
    Console().print(table)


@app.command()
def evaluate(
    folder: Annotated[Path, typer.Argument(help="the run folder")],
    adapt: Annotated[
        list[str] | None,
        typer.Option(help="`feddg adaptations`, or fixed:alpha=0.3; all by default"),
    ] = None,
    batch_size: BatchOption = 64,
    personal: Annotated[
        bool, typer.Option("--personal", help="each client's domain under its own statistics")
    ] = False,
    which: WhichOption = None,
    predictions: PredictionsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure a run's model under test-time adaptations.

    The results are kept in the run's adaptation.jsonl. With --predictions alone, only what the
    model makes of every image is written.
    """
    if predictions:
        written = api.write_image_results(folder, which=which, batch_size=batch_size)
        typer.echo(f"predictions: {written.resolve()}", err=as_json)
        if adapt is None and not personal:
            return
    found = api.evaluate(
        folder,
        adapt,
        batch_size=batch_size,
        personal=personal,
        which=which,
        report=not as_json,
    )
    if as_json:
        print_json([score.model_dump() for score in found.scores])
        return
    from rich.console import Console

    from feddg.cli.output import adaptation_table

    Console().print(adaptation_table(found))
    for reason in found.refused.values():
        typer.echo(reason)
    typer.echo(f"report: {(folder / 'report.html').resolve()}")


@app.command()
def adaptations() -> None:
    """List the adaptations: what each needs, changes and costs."""
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "in one line", "needs", "remembers", "beside one forward pass", box=None)
    for kind in api.listed_adaptations():
        table.add_row(f"[bold]{kind.name}[/]", kind.summary, kind.needs, kind.changes, kind.cost)
    Console().print(table)


privacy_app = typer.Typer(no_args_is_help=True, suggest_commands=False)


@privacy_app.callback()
def privacy() -> None:
    """Attack a finished run: what do its messages give away?"""


@privacy_app.command("attack")
def attack(
    folder: Annotated[Path, typer.Argument(help="the run folder")],
    kind: Annotated[
        str,
        typer.Option(
            help="server: what the server (or whoever reads its messages) draws from styles, "
            "spectra, prototypes; client: what a malicious client draws from what it receives; "
            "update: gradient inversion of single updates; membership: whose images they were"
        ),
    ],
    public: Annotated[
        list[Path] | None,
        typer.Option(help="server: folder(s) of images that the attacker learns on"),
    ] = None,
    entry: Annotated[
        str | None,
        typer.Option(help="what is read, as statistics/style; `statistics`: of normalisation"),
    ] = None,
    client: Annotated[
        int | None, typer.Option(help="client: the malicious one; that with most images")
    ] = None,
    most_public: Annotated[int, typer.Option(min=16, help="images the attacker learns on")] = 1000,
    targets: Annotated[int, typer.Option(min=2, help="true images to compare with")] = 64,
    steps: Annotated[
        int, typer.Option(min=0, help="of the generator; 0: the linear attack alone")
    ] = 300,
    batch_sizes: Annotated[
        str, typer.Option(help="update: images behind an update, as 1,4,32")
    ] = "1,4",
    updates: Annotated[int, typer.Option(min=1, help="update: how many of each size")] = 4,
    iterations: Annotated[int, typer.Option(min=1, help="update: steps of the search")] = 300,
    optimizer: Annotated[
        str, typer.Option(help="update: the client's step, by the run's own optimizer or by sgd")
    ] = "own",
    clients: Annotated[int, typer.Option(min=1, help="membership: clients attacked")] = 8,
    shadows: Annotated[int, typer.Option(min=0, help="membership: shadow clients for each")] = 4,
    seed: Annotated[int, typer.Option(help="of everything that the attack draws")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Attack a finished run; rows are kept in its attacks.jsonl, pictures in its figures."""
    from feddg.cli.output import print_attack
    from feddg.cli.progress import working

    with working(quiet=as_json) as progress:
        rows = api.attack(
            folder,
            kind,
            report=not as_json,
            progress=progress,
            clients=clients,
            shadows=shadows,
            public=tuple(public or ()),
            entry=entry,
            client=client,
            most_public=most_public,
            targets=targets,
            steps=steps,
            batch_sizes=whole_numbers("--batch-sizes", batch_sizes),
            updates=updates,
            iterations=iterations,
            optimizer=optimizer,
            seed=seed,
        )
    if as_json:
        print_json([row.model_dump() for row in rows])
        return
    print_attack(rows)
    typer.echo(f"report: {(folder / 'report.html').resolve()}")
