"""What the pages about reference lines hold: a table and a CSV file, from a comparison.

    feddg compare benchmarks/reference_lines/digits.yaml --out runs/reference-lines
    python benchmarks/reference_lines/table.py runs/reference-lines docs/results/data/NAME.csv

    feddg compare benchmarks/reference_lines/pacs_short.yaml ... --kept NAME.csv
    python benchmarks/reference_lines/table.py NAME.csv

Prints the table in Markdown: held-out test accuracy by column, its average where every column was
run, and in-domain test accuracy, in percent, mean and standard deviation over seeds. Of a folder a
CSV file with a row for every run is written; a file of kept results is read, and may lack some.
"""

import argparse
import csv
import statistics
from dataclasses import dataclass
from pathlib import Path

from feddg.comparison.results import KeptResults, Result, Results, read_comparison
from feddg.records import ID_TEST, TEST
from feddg.runs.reading import FINAL

NUMBERS = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "calibration_error")
NOT_RUN = "not run"


@dataclass(frozen=True)
class Line:
    """A run: its method, column and seed, and two accuracies from 0 to 1."""

    method: str
    column: str
    seed: int
    held_out: float
    inside: float


def cells(result: Result) -> list[float | None]:
    """Every number of a run's final round: held-out test, then in-domain test."""
    found, last = result.run.evaluations, result.rounds[FINAL.name]
    return [found.value(last, split, name) for split in (TEST, ID_TEST) for name in NUMBERS]


def spread(values: list[float]) -> str:
    """Mean and deviation in percent; no deviation of one value."""
    if not values:
        return NOT_RUN
    mean = f"{100 * statistics.mean(values):.1f}"
    return f"{mean} ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else mean


def write(results: Results, path: Path) -> None:
    """Writes every number of every run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        heads = [f"{split}_{name}" for split in (TEST, ID_TEST) for name in NUMBERS]
        writer.writerow(["method", "column", "seed", *heads])
        for one in results.results:
            place = one.place
            told = ["" if value is None else f"{value:.6f}" for value in cells(one)]
            writer.writerow([place.method, results.column(place), place.seed, *told])


def lines_of(source: Path, target: Path | None) -> list[Line]:
    """Returns the runs of a comparison's folder, or of a file of kept results."""
    if source.is_file():
        return [
            Line(
                one.method,
                one.column,
                one.seed,
                one.accuracy() or 0.0,
                one.accuracy(split=ID_TEST) or 0.0,
            )
            for one in KeptResults.read(source).results
        ]
    results = read_comparison(source)
    if target is not None:
        write(results, target)
    return [
        Line(
            one.place.method,
            results.column(one.place),
            one.place.seed,
            one.accuracy(FINAL) or 0.0,
            one.accuracy(FINAL, ID_TEST) or 0.0,
        )
        for one in results.results
    ]


def row_of(own: list[Line], columns: list[str]) -> list[str]:
    """Returns the cells of a method: columns, their average, in-domain test.

    The last two are over the seeds that have every column.
    """
    by_column = [[one.held_out for one in own if one.column == column] for column in columns]
    seeds = [
        seed
        for seed in sorted({one.seed for one in own})
        if {one.column for one in own if one.seed == seed} == set(columns)
    ]
    average = [statistics.mean(one.held_out for one in own if one.seed == seed) for seed in seeds]
    inside = [statistics.mean(one.inside for one in own if one.seed == seed) for seed in seeds]
    return [*map(spread, by_column), f"**{spread(average)}**", spread(inside)]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("csv", type=Path, nargs="?")
    options = parser.parse_args()
    lines = lines_of(options.source, options.csv)
    columns = list(dict.fromkeys(one.column for one in lines))
    print(f"| method | {' | '.join(columns)} | average | in-domain test |")
    print("|---" * (len(columns) + 3) + "|")
    for method in dict.fromkeys(one.method for one in lines):
        row = row_of([one for one in lines if one.method == method], columns)
        print(f"| {method} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
