"""Draws accuracy against images seen in training, and the lead over plain averaging.

python benchmarks/methods/picture.py docs/results/data/budget_pacs.csv docs/results/budget_pacs.png
"""

import sys
from pathlib import Path

from matplotlib import pyplot

from feddg.comparison.results import Results
from feddg.comparison.statistics import average_over_columns
from feddg.report.text import spelled
from feddg.runs.reading import EMA_MEAN


def drawn(results: Results, file: Path) -> None:
    """Draws a line for each method; bars are 95 % intervals of the lead over domains."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    found = {budget: results.at(budget).accuracies(EMA_MEAN) for budget in results.budgets}
    margins = {b: results.at(b).margins(EMA_MEAN, "fedavg") for b in results.budgets}
    have = [{column for column, _ in own} for values in found.values() for own in values.values()]
    columns = sorted(set.intersection(*have))
    methods = sorted(results.methods, key=lambda method: method != "fedavg")
    for place, method in enumerate(methods):
        own = [(budget, values) for budget, values in found.items() if values.get(method)]
        means = [average_over_columns(values[method], columns) for _, values in own]
        at = [budget / 1000 * 1.02**place for budget, _ in own]
        left.plot(at, [100 * mean.mean for mean in means if mean], "o-", label=spelled(method))
        if method == "fedavg":
            right.axhline(0, color="C0")
            continue
        leads = [margins[budget][method] for budget, _ in own]
        reach = [100 * (lead.domains.reach or 0.0) for lead in leads]
        right.errorbar(
            at, [100 * lead.mean for lead in leads], reach, fmt="o-", capsize=3, color=f"C{place}"
        )
    left.set(ylabel="accuracy on the unseen domain, %")
    right.set(ylabel="points above FedAvg")
    for axes in (left, right):
        axes.set(xlabel="images seen in training, thousands", xscale="log")
        axes.set_xticks([budget / 1000 for budget in found], [f"{b // 1000}" for b in found])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.legend(fontsize=7, loc="upper left")
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    drawn(Results.read(Path(sys.argv[1])), Path(sys.argv[2]))
