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

from feddg.comparison.results import COMPARISON, Results, read_comparison, results_of
from feddg.errors import RunError
from feddg.report.blocks import Page, data_uri, template_named, write_file
from feddg.report.comparison_page import comparison_page
from feddg.report.run_page import run_page
from feddg.report.tables import page_tables, results_csv, to_csv, to_latex, to_markdown
from feddg.runs.reading import read_run


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
    return write_file(out, render(page))


def page_about(folders: Sequence[Path]) -> Page:
    """The page about one run or several; see :func:`write_report`."""
    if not folders:
        raise RunError("There is no run to report on. Name at least one run folder.")
    if len(folders) > 1:
        return comparison_page(results_of(folders))
    (folder,) = folders
    if (folder / COMPARISON).is_file():
        return comparison_page(read_comparison(folder))
    return comparison_page(Results.read(folder)) if folder.is_file() else run_page(read_run(folder))


def write_comparison(folder: Path) -> Path:
    """Writes ``report.html``, ``results.csv`` and ``tables/`` into a folder of ``feddg compare``.

    Returns:
        The page.

    Raises:
        RunError: the folder holds no comparison, or cannot be written.
    """
    results = read_comparison(folder)
    page = comparison_page(results)
    write_file(folder / "results.csv", results_csv(results))
    write_tables(page, folder / "tables")
    return write_page(page, folder / "report.html")


def write_tables(page: Page, folder: Path) -> list[Path]:
    """Writes every table of a page as Markdown, CSV and LaTeX.

    Returns:
        The files; all tables together are in ``tables.md``.
    """
    files, whole = [], [f"# {page.title}\n\n{page.lead}\n"]
    for name, table in page_tables(page):
        for suffix, text in (("md", to_markdown), ("csv", to_csv), ("tex", to_latex)):
            files.append(write_file(folder / f"{name}.{suffix}", text(table)))
        whole.append(f"## {name.replace('_', ' ').capitalize()}\n\n{to_markdown(table)}")
    return [*files, write_file(folder / "tables.md", "\n".join(whole))]


def render(page: Page) -> str:
    """A page as HTML; every text in it is escaped."""
    return template_named("page.html.j2").render(
        page=page, plotly=_packed_plotly(), data_uri=data_uri
    )


@lru_cache(maxsize=1)
def _packed_plotly() -> str:
    """plotly.js as base64 of gzip; the same bytes every time."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
