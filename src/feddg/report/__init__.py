"""Reports: one self-contained HTML page about one or several runs, and its tables as files."""

from feddg.report.page import (
    ensure_report,
    page_about,
    tables_of,
    write_between_marks,
    write_comparison,
    write_page,
    write_report,
    write_tables,
)

__all__ = [
    "ensure_report",
    "page_about",
    "tables_of",
    "write_between_marks",
    "write_comparison",
    "write_page",
    "write_report",
    "write_tables",
]
