"""Reports: one self-contained HTML page about one run or many, and its tables as files."""

from feddg.runs.report.page import write_comparison, write_report, write_tables

__all__ = ["write_comparison", "write_report", "write_tables"]
