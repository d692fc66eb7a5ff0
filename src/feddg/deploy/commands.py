"""The commands of a deployment: ``feddg deploy``, the same federation across a network."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from feddg.options import (
    JsonOption,
    ModelArgument,
    OptionsCommand,
    options_of,
    print_json,
    show_warnings,
)
from feddg.readers import function

app = typer.Typer(
    name="deploy",
    help="Run a federation across a network.",
    no_args_is_help=True,
    suggest_commands=False,
    rich_help_panel="Between sites",
)
NEEDS = ("flower", "a federation across a network")
FUNCTIONS = {
    "keys": "register_site run_signed sign_app",
    "preflight": "check_site",
    "setup": "write_app",
}


@app.command("init", cls=OptionsCommand)
@options_of(
    "feddg.deploy.setup:write_app",
    "address superlink_port out test min_sites evaluation_sites=evaluation_site classes=class_name",
    min_sites=(0, None),
)
def deploy_init(
    options: dict[str, Any],
    folder: Annotated[Path, typer.Argument(help="folder for the Flower app; holds none yet")],
    experiment: Annotated[Path, typer.Option(help="experiment file (YAML)")],
    site: Annotated[list[str], typer.Option(help="a site's name; once for each site, in order")],
) -> None:
    """Write a federation's Flower app, and everything its sites need.

    That includes a proxy, services, scripts that make keys, and the commands to type.
    """
    function("write_app")(folder, experiment, site, **options)
    typer.echo(f"written to {folder}; how to start it: {folder / 'START.md'}")


DeploymentArgument = Annotated[Path, typer.Argument(help="folder that `feddg deploy init` wrote")]


@app.command("sign")
def deploy_sign(
    folder: DeploymentArgument = Path(),
    key: Annotated[
        Path | None, typer.Option(help="the signing key; by default keys/signing")
    ] = None,
) -> None:
    """Sign the Flower app; sites run only signed apps."""
    signed = function("sign_app")(folder, key)
    typer.echo(f"signed {signed.hash_str[:16]} with {next(iter(signed.verifications))}")


@app.command("register")
def deploy_register(
    folder: DeploymentArgument,
    site: Annotated[str, typer.Argument(help="the site's name")],
    key: Annotated[Path, typer.Argument(help="the site's public key, NAME.pub")],
) -> None:
    """Register a site's public key under the site's name."""
    function("register_site")(folder, site, key)
    proxy = shlex.quote(f"{(folder / 'proxy').resolve()}/")
    reload = f"nginx -e stderr -p {proxy} -c nginx.conf -s reload"
    typer.echo(f"{site} is registered; reload the proxy: {reload}")


@app.command("run")
def deploy_run(
    folder: DeploymentArgument = Path(),
    stream: Annotated[bool, typer.Option(help="show the log until the run ends")] = False,
) -> None:
    """Start the signed app, or continue its run."""
    number = function("run_signed")(folder, stream=stream)
    home = shlex.quote(str((folder / "flower-home").resolve()))
    typer.echo(f"run {number}; its log: FLWR_HOME={home} flwr log {number} feddg")


@app.command("check", cls=OptionsCommand)
@options_of("feddg.deploy.preflight:check_site", "domain cache device offline unlabelled")
def deploy_check(
    options: dict[str, Any],
    folder: Annotated[Path, typer.Argument(help="the coordinator's files, with the site's key")],
    images: Annotated[str, typer.Option(help="root/domain/class/*, or root/class/* (--domain)")],
    json: JsonOption = False,
) -> None:
    """Check whether a site is ready to join: run this at the site.

    Looks at images, machine, keys and connection.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from feddg.progress import working
    from feddg.runs.inspection import STYLES

    with working(json) as progress:
        site, checks = function("check_site")(folder, images, progress=progress, **options)
    if json:
        print_json([asdict(check) for check in checks])
    else:
        table = Table("", "check", "found", "what to do")
        for check in checks:
            passed = check.severity == "note"
            style, word = ("green", "ok") if passed else (STYLES[check.severity], check.severity)
            texts = (escape(text) for text in (check.short, check.text, check.advice))
            table.add_row(f"[{style}]{word}[/]", *texts)
        Console().print(table)
    if any(check.severity == "error" for check in checks):
        typer.echo(f"error: {site} should not join yet", err=True)
        raise typer.Exit(1)
    if not json:
        unseen = "'s images and machine are fine; keys, versions and connection were not checked"
        typer.echo(f"ok: {site}{unseen if options['offline'] else ' can join'}")


@app.command("validate", cls=OptionsCommand)
@options_of(
    "feddg.prediction.validation:validate",
    "domain hide_below group_by which device",
    hide_below=(0, None),
)
def deploy_validate(
    options: dict[str, Any],
    model: ModelArgument,
    images: Annotated[Path, typer.Argument(help="root/domain/class/*, or root/class/* (--domain)")],
    out: Annotated[Path, typer.Option(help="JSON file with the results, to be handed back")],
) -> None:
    """Evaluate a model at a site outside the federation.

    The file that it writes holds counts, and nothing about single images.
    """
    from feddg.prediction import validation

    validated = validation.validate(model, images, out=out, **options)
    show_warnings(validated.diagnostics)
    if validated.adaptation is not None:
        typer.echo(f"test-time adaptation of the file: {validated.adaptation}")
    for row in validated.domains:
        share = "hidden" if row.accuracy is None else f"{row.accuracy:.1%}"
        between = "" if row.interval is None else " (95 %: {:.1%} to {:.1%})".format(*row.interval)
        typer.echo(f"{row.domain}: {share}{between} of {row.images} images right")
    hidden = options["hide_below"] > 1
    exact = "" if hidden else "; its counts are exact: --hide-below 5 hides small ones"
    typer.echo(f"{out} holds counts, nothing about single images and no file names{exact}")
