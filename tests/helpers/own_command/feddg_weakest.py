"""``feddg weakest RUN``: where a run's model is weakest, from the run's folder alone."""

from pathlib import Path
from typing import Annotated

import typer

from feddg.errors import RunError
from feddg.runs.reading import read_run


def weakest(
    run: Annotated[Path, typer.Argument(help="the run folder")],
    split: Annotated[str, typer.Option(help="test, val, id_test or id_val")] = "test",
) -> None:
    """Name the domain that a run's model recognises worst."""
    table = read_run(run).frame()
    rows = table[
        (table["metric"] == "accuracy") & (table["split"] == split) & (table["weights"] == "last")
    ]
    if rows.empty:
        raise RunError(f"{run} has no accuracy on the split {split!r}")
    last = rows[rows["round"] == rows["round"].max()]
    row = last.loc[last["value"].idxmin()]
    typer.echo(f"{row['domain']}: {row['value']:.1%} of its images are right")
