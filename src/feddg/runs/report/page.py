"""From run folders to one HTML file that needs nothing else.

plotly.js travels inside the page, gzipped and written in base64 (2 MB instead of 5); the browser
unpacks it with ``DecompressionStream``. A browser older than 2023 says in place of each chart that
it cannot draw it; every table is there all the same. The page's own content security policy
forbids any request.
"""

import base64
import gzip
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from feddg.errors import RunError
from feddg.runs.records import read_run
from feddg.runs.report.blocks import Page
from feddg.runs.report.charts import TEMPLATE
from feddg.runs.report.pictures import data_uri
from feddg.runs.report.several import comparison_page
from feddg.runs.report.single import run_page


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Writes one self-contained HTML page about one run, or about several side by side.

    Args:
        folders: Run folders, finished or not; one gives the page of that run, more a comparison.
        out: The file to write; its folder is made if needed, an older file is replaced.

    Returns:
        ``out``.

    Raises:
        RunError: If there is no folder to report on, one is not a run folder or damaged, or the
            page cannot be written.
    """
    if not folders:
        raise RunError("There is no run to report on. Name at least one run folder.")
    runs = [read_run(folder) for folder in folders]
    page = run_page(runs[0]) if len(runs) == 1 else comparison_page(runs)
    _write(out, render(page))
    return out


def render(page: Page) -> str:
    """A page as HTML; every text in it is escaped."""
    templates = Environment(
        loader=PackageLoader("feddg.runs.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = templates.get_template("page.html.j2")
    return template.render(
        page=page, plotly=_packed_plotly(), chart_template=TEMPLATE, data_uri=data_uri
    )


@lru_cache(maxsize=1)
def _packed_plotly() -> str:
    """plotly.js as base64 of gzip; the same bytes every time."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def _write(out: Path, text: str) -> None:
    """Write beside the target first, so that a fault leaves an older report whole."""
    unfinished = out.with_name(f".{out.name}.unfinished")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, out)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise RunError(f"Cannot write the report {out}: {error.strerror}.") from error
