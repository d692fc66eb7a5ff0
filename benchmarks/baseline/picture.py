"""Draws docs/results/baseline.png: accuracy against images seen, by recipe.

    python benchmarks/baseline/picture.py

Solid is the unseen domain, dashed in-domain validation; of the last model.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
SEARCH = "baseline_three_clients_64"
SHOWN = ("Adam 3e-5", "Adam 3e-5, cosine", "SGD 1e-3", "SGD 3e-3", "SGD 3e-3, trained statistics")
LINES = {"test": "-", "id_val": "--"}


def main() -> None:
    """Draws the picture."""
    rows = pd.read_csv(RESULTS / "data" / f"{SEARCH}.csv").query(
        "metric == 'accuracy' and over == 'domain_mean' and rule == 'final' and split in @LINES"
    )
    columns = sorted(rows["held_out"].unique())
    figure, axes = plt.subplots(1, len(columns), figsize=(9, 3.4), sharey=True, squeeze=False)
    for axis, column in zip(axes[0], columns):
        for number, recipe in enumerate(SHOWN):
            for split, line in LINES.items():
                of_line = rows.query(
                    "held_out == @column and method == @recipe and split == @split"
                )
                label = recipe if split == "test" else None
                by_budget = of_line.set_index("budget")["value"].sort_index() * 100
                axis.plot(by_budget, line, color=f"C{number}", marker="o", ms=3, label=label)
        axis.set(title=f"{column} unseen", xlabel="images seen", ylim=(20, None))
        axis.xaxis.set_major_formatter(lambda images, _: f"{images / 1000:.0f}k")
    axes[0][0].set_ylabel("accuracy, percent")
    axes[0][-1].legend(fontsize=7, loc="lower right", title="unseen; dashed: in-domain")
    figure.tight_layout()
    figure.savefig(RESULTS / "baseline.png", dpi=110)


if __name__ == "__main__":
    main()
