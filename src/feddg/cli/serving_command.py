"""``feddg serve``: a model behind a page and an interface, on this machine."""

from typing import Annotated

import typer

from feddg.cli.predicting import AdaptOption, ModelArgument, StrictOption, WhichOption, say_cautions

app = typer.Typer()


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
    device: Annotated[str, typer.Option(help="cpu, cuda or auto")] = "auto",
    request_megabytes: Annotated[float, typer.Option(help="largest request")] = 32.0,
    megapixels: Annotated[float, typer.Option(help="largest image, in million pixels")] = 50.0,
    at_once: Annotated[int, typer.Option(help="requests answered at once")] = 8,
    waiting: Annotated[int, typer.Option(help="requests that may wait")] = 256,
    strict: StrictOption = False,
) -> None:
    """Label images on a page in the browser, and for programs; on this machine, keeping none."""
    from pydantic import ValidationError

    from feddg.errors import RunError
    from feddg.prediction.classifier import ImageClassifier
    from feddg.serving.server import ServeLimits, is_loopback
    from feddg.serving.server import serve as serve_model

    fields = {
        "request_megabytes": request_megabytes,
        "megapixels": megapixels,
        "at_once": at_once,
        "waiting": waiting,
    }
    try:
        limits = ServeLimits.model_validate(fields)
    except ValidationError as error:
        fault = error.errors()[0]
        flag = str(fault["loc"][0]).replace("_", "-")
        raise RunError(f"--{flag}: {fault['msg']}") from None

    def ready(address: str, classifier: ImageClassifier) -> None:
        say_cautions(classifier.cautions)
        if not is_loopback(host):
            typer.echo("warning: other machines reach this server without a password", err=True)
        typer.echo(f"{classifier.result}\nserving {run} at {address} (Ctrl-C ends it)")

    serve_model(
        run,
        host=host,
        port=port,
        adapt=adapt,
        which=which,
        device=device,
        limits=limits,
        known_as=known_as or (),
        allow_network=allow_network,
        strict=strict,
        ready=ready,
    )
