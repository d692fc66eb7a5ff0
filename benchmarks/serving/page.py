"""Makes a page of results from the CSV file of a campaign; with a plan, the page of its table.

    python benchmarks/serving/page.py RESULTS.csv [MORE.csv ...] PAGE.md
        [--plan PLAN.yaml] [--tuning tuning.json] [--leave-out METHOD ...]

Everything between the page's two marks is made anew; what stands around it is kept.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from feddg.comparison.plan import load_plan
from feddg.comparison.results import KeptResults, TuningFile
from feddg.errors import RunError
from feddg.report.results_page import remade, search_table, tables

__all__ = ["read", "remade", "search_table", "tables"]


def read(files: Sequence[Path], leave_out: Sequence[str] = ()) -> KeptResults:
    """Returns the results of all files, in their order, without those of some methods.

    Raises:
        RunError: a file is damaged, or holds nothing of a method that is to be left out.
    """
    results = [result for file in files for result in KeptResults.read(file).results]
    for method in set(leave_out) - {result.method for result in results}:
        raise RunError(f"No result is of {method}, which is to be left out.")
    return KeptResults(files[0], [result for result in results if result.method not in leave_out])


def main() -> None:
    """Rewrites the page named last from the results named before it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="CSV files of `feddg compare --kept`")
    parser.add_argument("page", type=Path, help="Markdown page with the two marks")
    parser.add_argument("--plan", type=Path, help="the plan that the results were run for")
    parser.add_argument("--tuning", type=Path, help="tuning.json of the comparison's folder")
    parser.add_argument("--leave-out", metavar="METHOD", nargs="+", default=[], help="by label")
    said = parser.parse_args()
    plan = load_plan(said.plan) if said.plan else None
    tuning = TuningFile.read(said.tuning) if said.tuning else None
    text = remade(said.page.read_text("utf-8"), read(said.results, said.leave_out), plan, tuning)
    said.page.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
