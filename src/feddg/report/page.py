"""From run folders to one HTML file that needs nothing else, and to its tables as files.

plotly.js travels inside the page, gzipped and written in base64 (2 MB instead of 5); the browser
unpacks it with ``DecompressionStream``. A browser older than 2023 says in place of each chart that
it cannot draw it; every table is there all the same. The page's own content security policy
forbids any request.
"""

import base64
import gzip
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from plotly.offline import get_plotlyjs

from feddg.comparison.results import COMPARISON, Results, read_comparison, results_of
from feddg.errors import RunError
from feddg.report.blocks import Page, data_uri, template_named
from feddg.report.charts import TEMPLATE
from feddg.report.comparison_page import comparison_page
from feddg.report.run_page import run_page
from feddg.report.tables import page_tables, results_csv, to_csv, to_latex, to_markdown
from feddg.runs.reading import read_run
from feddg.storage import replace_text


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Writes one self-contained HTML page about one run, or about several.

    Args:
        folders: Run folders, finished or not; or a single folder of ``feddg compare``, or its
            results file. One run gives the page of that run; several, a comparison of those that
            are complete.
        out: The file to write; its folder is made if needed, an older file is replaced.

    Returns:
        ``out``.

    Raises:
        RunError: If there is no folder to report on, one is not a run folder or damaged, or the
            page cannot be written.
    """
    return write_page(page_about(folders), out)


def ensure_report(run: Path) -> Path:
    """Writes a complete run's ``report.html`` and ``model_card.md`` unless they are there.

    Returns:
        The first.
    """
    from feddg.prediction.export import ensure_card

    ensure_card(run)
    page = run / "report.html"
    return page if page.is_file() else write_report([run], page)


def write_page(page: Page, out: Path) -> Path:
    """Writes a page as HTML; returns ``out``.

    Raises:
        RunError: it cannot be written.
    """
    _write(out, render(page))
    return out


def page_about(folders: Sequence[Path]) -> Page:
    """The page about one run or several; see :func:`write_report`."""
    if not folders:
        raise RunError("There is no run to report on. Name at least one run folder.")
    if len(folders) == 1 and (folders[0] / COMPARISON).is_file():
        return comparison_page(read_comparison(folders[0]))
    if len(folders) == 1 and folders[0].is_file():
        return comparison_page(Results.read(folders[0]))
    if len(folders) == 1:
        return run_page(read_run(folders[0]))
    return comparison_page(results_of(folders))


def write_comparison(folder: Path) -> Path:
    """Writes ``report.html``, ``results.csv`` and ``tables/`` into a folder of ``feddg compare``.

    Returns:
        The page.

    Raises:
        RunError: the folder holds no comparison, or cannot be written.
    """
    results = read_comparison(folder)
    page = comparison_page(results)
    out = folder / "report.html"
    _write(out, render(page))
    _write(folder / "results.csv", results_csv(results))
    write_tables(page, folder / "tables")
    return out


def write_tables(page: Page, folder: Path) -> list[Path]:
    """Writes every table of a page as Markdown, CSV and LaTeX.

    Returns:
        The files; all tables together are in ``tables.md``.
    """
    files, whole = [], [f"# {page.title}\n\n{page.lead}\n"]
    for name, table in page_tables(page):
        for suffix, text in (("md", to_markdown), ("csv", to_csv), ("tex", to_latex)):
            files.append(folder / f"{name}.{suffix}")
            _write(files[-1], text(table))
        whole.append(f"## {name.replace('_', ' ').capitalize()}\n\n{to_markdown(table)}")
    files.append(folder / "tables.md")
    _write(files[-1], "\n".join(whole))
    return files


def render(page: Page) -> str:
    """A page as HTML; every text in it is escaped."""
    return template_named("page.html.j2").render(
        page=page, plotly=_packed_plotly(), chart_template=TEMPLATE, data_uri=data_uri
    )


@lru_cache(maxsize=1)
def _packed_plotly() -> str:
    """plotly.js as base64 of gzip; the same bytes every time."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def _write(out: Path, text: str) -> None:
    try:
        replace_text(out, text)
    except OSError as error:
        raise RunError(f"Cannot write the report {out}: {error.strerror}.") from error
