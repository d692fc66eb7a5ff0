"""What the pages about reference lines hold: a table and a CSV file, from a finished comparison.

    feddg compare benchmarks/reference_lines/digits.yaml --out runs/reference-lines
    python benchmarks/reference_lines/table.py runs/reference-lines docs/results/data/NAME.csv

Writes a row for every run and prints the table in Markdown: held-out test accuracy by column, its
average, and in-domain test accuracy, in percent, mean and standard deviation over seeds.
"""

import argparse
import csv
import statistics
from pathlib import Path

from feddg.comparing.results import Result, read_comparison
from feddg.rows import ID_TEST, TEST
from feddg.runs.selection_rules import FINAL

NUMBERS = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "calibration_error")


def cells(result: Result) -> list[float | None]:
    """Every number of a run's final round: held-out test, then in-domain test."""
    found, last = result.run.evaluations, result.rounds[FINAL.name]
    return [found.value(last, split, name) for split in (TEST, ID_TEST) for name in NUMBERS]


def spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):.1f} ± {100 * deviation:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("comparison", type=Path)
    parser.add_argument("csv", type=Path)
    options = parser.parse_args()
    results = read_comparison(options.comparison)
    columns = list(dict.fromkeys(results.column(one.place) for one in results.results))
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    with options.csv.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        heads = [f"{split}_{name}" for split in (TEST, ID_TEST) for name in NUMBERS]
        writer.writerow(["method", "column", "seed", *heads])
        for one in results.results:
            place = one.place
            told = ["" if value is None else f"{value:.6f}" for value in cells(one)]
            writer.writerow([place.method, results.column(place), place.seed, *told])
    print(f"| method | {' | '.join(columns)} | average | in-domain test |")
    print("|---" * (len(columns) + 3) + "|")
    for method in results.methods:
        own = list(results.of(method))
        by_column = [
            [one.accuracy(FINAL) or 0.0 for one in own if results.column(one.place) == column]
            for column in columns
        ]
        seeds = sorted({one.place.seed for one in own})
        average = [
            statistics.mean(one.accuracy(FINAL) or 0.0 for one in own if one.place.seed == seed)
            for seed in seeds
        ]
        inside = [
            statistics.mean(
                one.accuracy(FINAL, ID_TEST) or 0.0 for one in own if one.place.seed == seed
            )
            for seed in seeds
        ]
        row = [method, *map(spread, by_column), f"**{spread(average)}**", spread(inside)]
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
