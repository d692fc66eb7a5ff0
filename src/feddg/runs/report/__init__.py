"""Reports: one self-contained HTML page about one run or several."""

from feddg.runs.report.comparison import write_comparison
from feddg.runs.report.page import write_report

__all__ = ["write_comparison", "write_report"]
