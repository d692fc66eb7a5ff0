"""The commands of the privacy lab: ``feddg privacy attack``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from feddg.errors import ExperimentError, schema_faults
from feddg.options import JsonOption, OptionsCommand, options_of, print_json, whole_numbers

app = typer.Typer(
    name="privacy", no_args_is_help=True, suggest_commands=False, rich_help_panel="Look around"
)
NEEDS = ()
FUNCTIONS = {"attack": "attack"}


@app.callback()
def privacy() -> None:
    """Find out what a run's messages reveal."""


@app.command("attack", cls=OptionsCommand)
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
            help="server: reconstruct images from styles, spectra, prototypes sent to the server; "
            "client: from what a malicious client receives; update: by gradient inversion of "
            "single updates; membership: find out whether an image was a client's"
        ),
    ],
    batch_sizes: Annotated[
        str, typer.Option(help="update: numbers of images behind an update: 1,4,32")
    ] = "1,4",
    as_json: JsonOption = False,
) -> None:
    """Attack a complete run, to see what its messages reveal.

    The results are kept in the run's attacks.jsonl, pictures in its folder figures.
    """
    from feddg.attacks.attack import AttackSettings, attack_run
    from feddg.attacks.attack import attack as attack_and_show
    from feddg.attacks.senders import MembershipEffort
    from feddg.progress import working

    sizes = whole_numbers("--batch-sizes", batch_sizes)
    with schema_faults(ExperimentError):
        membership = MembershipEffort(**effort)
        settings = AttackSettings(batch_sizes=sizes, membership=membership, **options)
    with working(quiet=as_json) as progress:
        carry_out = attack_run if as_json else attack_and_show
        rows = carry_out(folder, kind, settings, progress=progress)
    if as_json:
        print_json([row.model_dump() for row in rows])
        return
    from feddg.report.leaks import attack_tables
    from feddg.report.terminal import print_tables

    print_tables(*attack_tables(rows))
    typer.echo(f"report: {(folder / 'report.html').resolve()}")
