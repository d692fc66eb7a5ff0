"""``feddg paired``: two runs, image by image."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from feddg.cli.common import JsonOption, print_json

app = typer.Typer()


@app.command()
def paired(
    first: Annotated[Path, typer.Argument(help="a run's folder")],
    second: Annotated[Path, typer.Argument(help="another's, measured on the same images")],
    split: Annotated[str, typer.Option(help="test, val, id_val or id_test")] = "test",
    which: Annotated[
        str | None,
        typer.Option(help="the model, as in `feddg evaluate`; by default what it serves"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two runs image by image: McNemar's test and the paired bootstrap.

    Both need their results by image: `feddg evaluate RUN --predictions`.
    """
    from feddg.errors import RunError
    from feddg.prediction.evaluate import compare_images, read_image_results
    from feddg.records import SPLITS

    if split not in SPLITS:
        raise RunError(f"unknown split {split!r}; there are: {', '.join(SPLITS)}")
    one, other = (read_image_results(folder, which) for folder in (first, second))
    found = compare_images(one, other, split)
    if as_json:
        print_json(asdict(found))
        return
    from rich.console import Console

    from feddg.cli.tables import as_rich
    from feddg.report.comparison_page import mcnemar_words, paired_table

    console = Console()
    console.print(as_rich(paired_table(found, first.name, second.name)))
    console.print(mcnemar_words(found), markup=False, highlight=False, soft_wrap=True)
