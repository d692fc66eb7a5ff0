"""What the pages about reference lines hold: a table and a CSV file, from a comparison.

    feddg compare benchmarks/reference_lines/digits.yaml --out runs/reference-lines
    python benchmarks/reference_lines/table.py runs/reference-lines docs/results/data/NAME.csv

    feddg compare benchmarks/reference_lines/pacs_short.yaml ... --results NAME.csv
    python benchmarks/reference_lines/table.py NAME.csv

Prints the table in Markdown: held-out test accuracy by column, its average where every column was
run, and in-domain test accuracy, in percent, mean and standard deviation over seeds. Of a folder a
CSV file with a row for every run is written; a results file is read, and may lack some.
"""

import argparse
import itertools
from pathlib import Path

from feddg.comparison.results import Results, read_comparison
from feddg.records import ID_TEST, TEST
from feddg.report.blocks import Table
from feddg.report.tables import accuracy_columns, by_method, to_markdown
from feddg.runs.reading import FINAL

NUMBERS = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "calibration_error")


def write(results: Results, path: Path) -> None:
    """Writes every number of every run's final round: held-out test, then in-domain test."""
    found = results.frame()
    found = found[(found["rule"] == FINAL.name) & (found["over"] == "domain_mean")]
    wide = found.pivot(
        index=["method", "column", "seed"], columns=["split", "metric"], values="value"
    )
    wide = wide.reindex(columns=[*itertools.product((TEST, ID_TEST), NUMBERS)])
    wide.columns = ["_".join(column) for column in wide.columns]
    path.parent.mkdir(parents=True, exist_ok=True)
    wide.to_csv(path, float_format="%.6f", lineterminator="\n")


def table(results: Results) -> Table:
    """Returns held-out test accuracy by column and on average, and in-domain test accuracy."""
    columns = accuracy_columns(results, FINAL)
    inside = {"in-domain test": results.columns}
    columns += accuracy_columns(results, FINAL, ID_TEST, inside)
    return by_method(results.methods, columns)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("csv", type=Path, nargs="?")
    options = parser.parse_args()
    if options.source.is_file():
        results = Results.read(options.source)
    else:
        results = read_comparison(options.source)
        if options.csv is not None:
            write(results, options.csv)
    print(to_markdown(table(results)))


if __name__ == "__main__":
    main()
