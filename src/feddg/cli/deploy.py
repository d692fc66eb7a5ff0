"""``feddg deploy``: the same federation across a network."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from feddg import api
from feddg.cli.common import (
    DeviceOption,
    DomainOption,
    JsonOption,
    OutOption,
    WhichOption,
    print_json,
)
from feddg.cli.use import ModelArgument, show_warnings

app = typer.Typer(
    help="Run the federation across a network.", no_args_is_help=True, suggest_commands=False
)


@app.command("init")
def deploy_init(
    folder: Annotated[Path, typer.Argument(help="folder for the Flower app; must not hold one")],
    experiment: Annotated[Path, typer.Option(help="experiment file (YAML)")],
    site: Annotated[list[str], typer.Option(help="A site's name; once per site, in order")],
    address: Annotated[
        str, typer.Option(help="HOST:PORT at which sites reach the coordinator's proxy")
    ] = "127.0.0.1:8000",
    superlink_port: Annotated[
        int, typer.Option(help="of the SuperLink behind it, on loopback; 0: the proxy's + 1")
    ] = 0,
    test: Annotated[str, typer.Option(help="the coordinator's test folder, or digits:DOMAIN")] = "",
    min_sites: Annotated[int, typer.Option(min=0, help="sites needed; 0 for all")] = 0,
    evaluation_site: Annotated[
        list[str] | None, typer.Option(help="A site that never trains and reports the accuracy")
    ] = None,
    class_name: Annotated[
        list[str] | None,
        typer.Option(help="A class that sites must have, once per class; by default the test's"),
    ] = None,
    out: OutOption = Path("runs"),
) -> None:
    """Write the app of a federation, its proxy and services, scripts for keys, and start lines."""
    api.deploy(
        folder,
        experiment,
        site,
        address=address,
        superlink_port=superlink_port,
        out=out,
        test=test,
        min_sites=min_sites,
        evaluation_sites=evaluation_site or [],
        classes=class_name or (),
    )
    typer.echo(f"written to {folder}; how to start it: {folder / 'START.md'}")


DeploymentArgument = Annotated[Path, typer.Argument(help="what `feddg deploy init` wrote")]


@app.command("sign")
def deploy_sign(
    folder: DeploymentArgument = Path(),
    key: Annotated[
        Path | None, typer.Option(help="the signing key; by default keys/signing")
    ] = None,
) -> None:
    """Sign a federation's app: sites run no other."""
    signed = api.sign_app(folder, key)
    typer.echo(f"signed {signed.digest[:16]} with {signed.key_id}")


@app.command("register")
def deploy_register(
    folder: DeploymentArgument,
    site: Annotated[str, typer.Argument(help="its name")],
    key: Annotated[Path, typer.Argument(help="its public key, NAME.pub")],
) -> None:
    """Register a site's key, under a name that no other key has."""
    api.register_site(folder, site, key)
    typer.echo(f"{site} is registered; reload the proxy: nginx -p proxy/ -c nginx.conf -s reload")


@app.command("run")
def deploy_run(
    folder: DeploymentArgument = Path(),
    stream: Annotated[bool, typer.Option(help="show the log until the run ends")] = False,
) -> None:
    """Start the signed app, or go on with its run."""
    typer.echo(f"run {api.run_signed(folder, stream=stream)}; its log: flwr log RUN feddg")


@app.command("check")
def deploy_check(
    folder: Annotated[Path, typer.Argument(help="what the coordinator sent, with the key in it")],
    images: Annotated[str, typer.Option(help="root/domain/class/*, or root/class/* (--domain)")],
    domain: DomainOption = None,
    cache: Annotated[Path | None, typer.Option(help="the site's cache folder")] = None,
    device: DeviceOption = "auto",
    offline: Annotated[
        bool, typer.Option("--offline", help="leave out keys, versions and the connection")
    ] = False,
    json: JsonOption = False,
) -> None:
    """At a site, before it joins: go or no-go for images, machine, keys and connection."""
    from rich.console import Console

    from feddg.cli.output import checks_table

    site, found = api.check_site(
        folder, images, domain, cache=cache, device=device, offline=offline
    )
    if json:
        print_json([asdict(one) for one in found])
    else:
        Console().print(checks_table(found))
    if any(one.severity == "error" for one in found):
        typer.echo(f"error: {site} should not join yet", err=True)
        raise typer.Exit(1)
    if not json:
        unseen = "'s images and machine will do; keys, versions and connection were left out"
        typer.echo(f"ok: {site}{unseen if offline else ' can join'}")


@app.command("validate")
def deploy_validate(
    model: ModelArgument,
    images: Annotated[Path, typer.Argument(help="root/domain/class/*, or root/class/* (--domain)")],
    out: Annotated[Path, typer.Option(help="what is handed back, JSON")],
    domain: DomainOption = None,
    hide_below: Annotated[
        int, typer.Option(min=0, help="hide counts below this, and whatever would reveal them")
    ] = 0,
    which: WhichOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Measure a model on the images of a site that takes no part: counts leave it, nothing else."""
    found = api.validate(
        model, images, out, domain=domain, hide_below=hide_below, which=which, device=device
    )
    show_warnings(found.diagnostics)
    for row in found.domains:
        share = "hidden" if row.accuracy is None else f"{row.accuracy:.1%}"
        between = "" if row.interval is None else " (95 %: {:.1%} to {:.1%})".format(*row.interval)
        typer.echo(f"{row.domain}: {share}{between} of {row.images} images right")
    exact = "" if hide_below > 1 else "; its counts are exact: --hide-below 5 hides small ones"
    typer.echo(f"{out} holds counts, nothing about single images and no file names{exact}")
