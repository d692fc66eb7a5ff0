"""Makes a page of results from the CSV file of a campaign; with a plan, the page of its table.

    python benchmarks/serving/page.py RESULTS.csv [MORE.csv ...] PAGE.md
        [--plan PLAN.yaml] [--tuning tuning.json] [--leave-out METHOD ...]

Everything between the page's two marks is made anew; what stands around it is kept.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from feddg.comparison.plan import Plan, load_plan
from feddg.comparison.results import Results, TuningFile, read_results
from feddg.errors import RunError
from feddg.report.results_page import remade, search_table, tables

__all__ = ["read", "remade", "search_table", "tables"]


def read(files: Sequence[Path], leave_out: Sequence[str] = (), plan: Plan | None = None) -> Results:
    """Returns the results of all files, in their order, without those of some methods.

    Raises:
        RunError: a file is damaged, or holds nothing of a method that is to be left out.
    """
    rows = [row for file in files for row in read_results(file)]
    for method in set(leave_out) - {row.method for row in rows}:
        raise RunError(f"No result is of {method}, which is to be left out.")
    return Results.of_rows([row for row in rows if row.method not in leave_out], plan)


def main() -> None:
    """Rewrites the page named last from the results named before it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "results", type=Path, nargs="+", help="CSV files of `feddg compare --results`"
    )
    parser.add_argument("page", type=Path, help="Markdown page with the two marks")
    parser.add_argument("--plan", type=Path, help="the plan that the results were run for")
    parser.add_argument("--tuning", type=Path, help="tuning.json of the comparison's folder")
    parser.add_argument("--leave-out", metavar="METHOD", nargs="+", default=[], help="by label")
    options = parser.parse_args()
    plan = load_plan(options.plan) if options.plan else None
    tuning = TuningFile.read(options.tuning) if options.tuning else None
    results = read(options.results, options.leave_out, plan)
    text = remade(options.page.read_text("utf-8"), results, tuning)
    options.page.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
