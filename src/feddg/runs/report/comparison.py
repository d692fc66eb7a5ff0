"""The tables and the page of a comparison."""

import json
from pathlib import Path

from feddg.runs.records import is_run
from feddg.runs.report.page import write_report


def write_comparison(folder: Path) -> Path:
    """Writes ``report.html`` about the runs of a comparison's folder; returns its path."""
    cells = json.loads((folder / "comparison.json").read_text("utf-8"))["cells"]
    runs = [folder / name for name in dict.fromkeys(cell["folder"] for cell in cells)]
    return write_report([run for run in runs if is_run(run)], folder / "report.html")
