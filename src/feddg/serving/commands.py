"""The command that serves a model: ``feddg serve``."""

from typing import TYPE_CHECKING, Any

import typer

from feddg.options import ModelArgument, OptionsCommand, options_of, show_warnings
from feddg.readers import function

if TYPE_CHECKING:
    from feddg.prediction.classifier import ImageClassifier

app = typer.Typer()
NEEDS = ("serve", "serving")
FUNCTIONS = {"server": "serve"}


@app.command(cls=OptionsCommand, rich_help_panel="Use a model")
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
    """Serve a page that labels images, and an HTTP interface for programs.

    Only this machine can reach it, unless you allow others. No image is kept.
    """

    def ready(address: str, classifier: "ImageClassifier") -> None:
        from feddg.serving.server import is_loopback

        show_warnings(classifier.diagnostics)
        if not is_loopback(options["host"]):
            typer.echo("warning: other machines reach this server without a password", err=True)
        typer.echo(f"{classifier.result}\nserving {run} at {address} (Ctrl-C ends it)")

    function("serve")(run, limits=limits, ready=ready, **options)
