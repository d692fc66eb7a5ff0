"""Writes reports: run folders to one self-contained HTML file, and its tables as files.

plotly.js is part of the page, gzipped and in base64 (2 MB instead of 5); the browser unpacks it
with ``DecompressionStream``. A browser older than 2023 shows a note instead of each chart, and all
tables. The page's own content security policy forbids any request.
"""

import base64
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from feddg.comparison.results import COMPARISON, Results, read_comparison, results_of
from feddg.comparison.results_file import to_text
from feddg.errors import RunError
from feddg.report.blocks import Fold, Page, Prose, data_uri, template_named, write_file
from feddg.report.comparison_page import comparison_page
from feddg.report.run_page import run_page
from feddg.report.tables import as_markdown, margins_csv, page_tables, to_csv, to_latex, to_markdown
from feddg.runs.reading import read_run
from feddg.storage import read_text

BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"
"""Everything between these marks of a Markdown file is generated."""


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Writes one self-contained HTML page about one or several runs.

    Args:
        folders: Run folders, finished or not; or a single folder of ``feddg compare``, or its
            results file. One run gives its page; several give a comparison of the complete ones.
        out: The file to write; its folder is created if needed, an existing file is replaced.

    Returns:
        ``out``.

    Raises:
        RunError: there is no folder to report on, one is damaged or not a run folder, or the page
            cannot be written.
    """
    return write_page(page_about(folders), out)


def report(
    folders: Sequence[Path], out: Path | None = None, *, tables: Path | None = None
) -> Path | str:
    """Writes the page of a run, several runs, a comparison, or a results file; returns its path.

    Args:
        folders: a run folder, several of them, a folder of ``feddg compare``, or a results file.
        out: the page to write; by default ``report.html`` in the folder, or in this one for several
            runs. For a results file Markdown, or HTML if its name ends in ``.html``; without it,
            its tables are printed as Markdown.
        tables: folder for the page's tables as Markdown, CSV and LaTeX; none by default.

    Raises:
        RunError: see :func:`write_report`.
    """
    page = page_about(folders)
    if tables is not None:
        write_tables(page, tables)
    of_file = len(folders) == 1 and folders[0].is_file()
    if of_file and out is None:
        return tables_of(page)
    if of_file and out is not None and out.suffix != ".html":
        write_between_marks(out, page)
        return out
    default = folders[0] / "report.html" if len(folders) == 1 else Path("report.html")
    return write_page(page, out or default)


def ensure_report(run: Path) -> Path:
    """Writes a run's ``report.html``, and a complete one's ``model_card.md``, if missing.

    Returns:
        The path of ``report.html``.
    """
    from feddg.prediction.export import ensure_card

    if read_run(run).status == "completed":
        ensure_card(run)
    page = run / "report.html"
    return page if page.is_file() else write_report([run], page)


def write_page(page: Page, out: Path) -> Path:
    """Writes a page as HTML; returns its path.

    Raises:
        RunError: it cannot be written.
    """
    return write_file(out, render(page))


def page_about(folders: Sequence[Path]) -> Page:
    """Returns the page about one or several runs; see :func:`write_report`."""
    if not folders:
        raise RunError("There is no run to report on. Name at least one run folder.")
    if len(folders) > 1:
        return comparison_page(results_of(folders))
    (folder,) = folders
    if (folder / COMPARISON).is_file():
        return comparison_page(read_comparison(folder))
    return comparison_page(Results.read(folder)) if folder.is_file() else run_page(read_run(folder))


def write_comparison(folder: Path) -> Path:
    """Writes the report, ``*.csv`` and ``tables/`` into a folder of ``feddg compare``.

    Returns:
        The path of ``report.html``.

    Raises:
        RunError: the folder contains no comparison, or cannot be written.
    """
    results = read_comparison(folder)
    page = comparison_page(results)
    write_file(folder / "results.csv", to_text(results.rows))
    write_file(folder / "margins.csv", margins_csv(results))
    write_tables(page, folder / "tables")
    for old in (folder / "tables").glob("*.tex"):  # of an earlier comparison in this folder
        files = [old.with_suffix(suffix) for suffix in (".md", ".csv", ".tex")]
        if old.stem not in dict(page_tables(page)) and all(file.is_file() for file in files):
            for file in files:
                file.unlink()
    return write_page(page, folder / "report.html")


def write_tables(page: Page, folder: Path) -> None:
    """Writes every table of a page as Markdown, CSV and LaTeX, and all of them to ``tables.md``."""
    for name, table in page_tables(page):
        for suffix, text in (("md", to_markdown), ("csv", to_csv), ("tex", to_latex)):
            write_file(folder / f"{name}.{suffix}", text(table))
    write_file(folder / "tables.md", f"# {as_markdown(page.title)}\n\n{tables_of(page)}")


def tables_of(page: Page) -> str:
    """Returns a page's lead, the notes below it and all of its tables as Markdown."""
    below = [(one.blocks if isinstance(one, Fold) else [one]) for one in page.opening]
    notes = [one.text for of_one in below for one in of_one if isinstance(one, Prose)]
    parts = [f"{as_markdown(text)}\n" for text in (page.lead, *notes)]
    for name, table in page_tables(page):
        parts.append(f"## {name.replace('_', ' ').capitalize()}\n\n{to_markdown(table)}")
    return "\n".join(parts)


def write_between_marks(path: Path, page: Page) -> None:
    """Writes a page's tables as Markdown, between the marks of a file or to a new one.

    Args:
        path: the file; text outside its marks is kept.
        page: the page.

    Raises:
        RunError: the file exists but has no marks, or cannot be written.
    """
    new = f"# {page.title}\n\n{BEGIN}\n{END}\n"
    text = read_text(path, errors="strict") if path.exists() else new
    try:
        whole = between_marks(text, tables_of(page).strip())
    except RunError as error:
        raise RunError(
            f"{path} already exists and is not overwritten: {error}. Put them in for the tables, "
            "or name another file with --out"
        ) from None
    write_file(path, whole)


def between_marks(text: str, made: str, begin: str = BEGIN, end: str = END) -> str:
    """Returns a text with what stands between two of its marks replaced.

    Raises:
        RunError: a mark is missing.
    """
    before, begun, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise RunError(f"it needs the marks {begin} and {end}, in this order")
    return f"{before}{begin}\n\n{made}\n\n{end}{after}"


def render(page: Page) -> str:
    """Returns a page as HTML; all text is escaped."""
    return template_named("page.html.j2").render(
        page=page, plotly=_packed_plotly(), data_uri=data_uri
    )


@lru_cache(maxsize=1)
def _packed_plotly() -> str:
    """Returns plotly.js as base64 of gzip; always the same bytes."""
    packed = files("feddg.report").joinpath("templates", "plotly.min.js.gz").read_bytes()
    return base64.b64encode(packed).decode()
