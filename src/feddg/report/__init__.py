"""Reports: one self-contained HTML page about one run or many, and its tables as files."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feddg.report.page import ensure_report as ensure_report
    from feddg.report.page import page_about as page_about
    from feddg.report.page import write_comparison as write_comparison
    from feddg.report.page import write_page as write_page
    from feddg.report.page import write_report as write_report
    from feddg.report.page import write_tables as write_tables

__all__ = [
    "ensure_report",
    "page_about",
    "write_comparison",
    "write_page",
    "write_report",
    "write_tables",
]


def __getattr__(name: str) -> Any:
    # Pages need plotly; who only wants this package's words must not wait for it.
    if name in __all__:
        return getattr(import_module("feddg.report.page"), name)
    raise AttributeError(f"module 'feddg.report' has no attribute {name!r}")
