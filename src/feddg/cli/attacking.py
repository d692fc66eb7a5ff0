"""``feddg privacy``: what can be learned of images from what left the sites."""

from pathlib import Path
from typing import Annotated

import typer

from feddg.cli.common import JsonOption, print_json
from feddg.cli.parsing import whole_numbers

app = typer.Typer(
    help="Attack a finished run: what does what left the sites give away?",
    no_args_is_help=True,
    suggest_commands=False,
)


@app.callback()
def privacy() -> None:
    """Attack a finished run: what does what left the sites give away?"""


@app.command("attack")
def attack(
    folder: Annotated[Path, typer.Argument(help="the run folder")],
    kind: Annotated[
        str,
        typer.Option(
            help="server: what the server (or a thief of its mail) draws from styles, spectra, "
            "prototypes; client: what a malicious client draws from what it receives; update: "
            "gradient inversion of single updates; membership: whose images they were"
        ),
    ],
    public: Annotated[
        list[Path] | None,
        typer.Option(help="server: folder(s) of images that the attacker learns on"),
    ] = None,
    entry: Annotated[
        str | None,
        typer.Option(help="what is read, as describe/style; `statistics`: of normalisation"),
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
    extractor: Annotated[
        str,
        typer.Option(
            help="who judges: compact, BACKBONE=FILE, or inception=FILE, FID's published weights"
        ),
    ] = "compact",
    lpips: Annotated[
        str | None, typer.Option(help="LPIPS with its trunk: alex=FILE, vgg=FILE, squeeze=FILE")
    ] = None,
    seed: Annotated[int, typer.Option(help="of everything that the attack draws")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Attack a finished run; rows are kept in its attacks.jsonl, pictures in its figures."""
    from feddg.attacks.attack import AttackSettings, attack_run
    from feddg.attacks.senders import MembershipEffort
    from feddg.cli.progress import working

    settings = AttackSettings(
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
        membership=MembershipEffort(clients=clients, shadows=shadows),
        extractor=extractor,
        lpips=lpips,
        seed=seed,
    )
    with working(quiet=as_json) as progress:
        rows = attack_run(folder, kind, settings, progress=progress)
    if as_json:
        print_json([row.model_dump() for row in rows])
        return
    from rich.console import Console

    from feddg.cli.tables import as_rich
    from feddg.report import write_report
    from feddg.report.leaks import attack_tables

    for table in attack_tables(rows):
        Console().print(as_rich(table))
    typer.echo(f"report: {write_report([folder], folder / 'report.html').resolve()}")
