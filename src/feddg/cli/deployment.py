"""``feddg deploy``: the same federation across a network."""

from pathlib import Path
from typing import Annotated, Any

import typer

from feddg.cli.common import OutOption, show_results
from feddg.cli.flags import ExperimentCommand, takes

app = typer.Typer(help="The same federation across a network.", no_args_is_help=True)


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
    out: OutOption = Path("runs"),
) -> None:
    """Write the app of a federation, its proxy and services, scripts for keys, and start lines."""
    from feddg.experiment import load_experiment
    from feddg.flower.app_folder import deployment_fields, write_app

    chosen = load_experiment(experiment, deployment_fields(site))
    write_app(
        folder,
        chosen,
        site,
        address=address,
        superlink_port=superlink_port,
        out=out,
        test=test,
        min_sites=min_sites,
        judges=evaluation_site or [],
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
    from feddg.flower.signing import sign_app

    signed = sign_app(folder, key)
    typer.echo(f"signed {signed.digest[:16]} with {signed.key_id}")


@app.command("register")
def deploy_register(
    folder: DeploymentArgument,
    site: Annotated[str, typer.Argument(help="its name")],
    key: Annotated[Path, typer.Argument(help="its public key, NAME.pub")],
) -> None:
    """Register a site's key, under a name that no other key has."""
    from feddg.flower.control import register_site

    register_site(folder, site, key)
    typer.echo(f"{site} is registered; reload the proxy: nginx -p proxy/ -c nginx.conf -s reload")


@app.command("run")
def deploy_run(
    folder: DeploymentArgument = Path(),
    stream: Annotated[bool, typer.Option(help="show the log until the run ends")] = False,
) -> None:
    """Start the signed app, or go on with its run."""
    from feddg.flower.control import run_signed

    typer.echo(f"run {run_signed(folder, stream=stream)}; its log: flwr log RUN feddg")


@app.command("simulate", cls=ExperimentCommand)
@takes()
def deploy_simulate(
    said: dict[str, Any],
    experiment: Annotated[Path | None, typer.Argument(help="experiment file (YAML)")] = None,
    out: OutOption = Path("runs"),
    cpus: Annotated[int, typer.Option(min=1, help="cores per client")] = 1,
    gpus: Annotated[float, typer.Option(min=0, help="share of a GPU per client")] = 0.0,
) -> None:
    """Run an experiment over Flower's simulation (Ray), clients side by side."""
    from feddg.cli.progress import observer
    from feddg.experiment import load_experiment
    from feddg.flower.simulation import simulate

    chosen, watching = load_experiment(experiment, said), observer(verbose=True)
    done = simulate(chosen, out, observer=watching, cpus=cpus, gpus=gpus)
    show_results([done.folder], done.report)
