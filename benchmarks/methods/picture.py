"""Draws docs/results/fourteen.png: each method beside plain averaging, domain by domain.

    python benchmarks/methods/picture.py

A panel is a method, a row a domain: how many points ahead the method is on it, unseen, by the last
model. Below stand the means over all domains and over data sets with their 95 % intervals.
"""

import math
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from feddg.runs.table import FINAL
from feddg.text import readable

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(BENCHMARKS))
from tables import fourteen_domains  # noqa: E402

RESULTS = BENCHMARKS.parent / "docs" / "results"
BASE = "FedAvg"


def main() -> None:
    """Draws the picture."""
    results = fourteen_domains()
    margins = results.margins(FINAL, BASE)
    order = sorted(margins, key=lambda method: -margins[method].mean)
    domains = list(results.collections)
    rows = [*domains, "all domains", "all data sets"]
    figure, axes = plt.subplots(
        1,
        len(order),
        figsize=(1.7 * len(order) + 1.6, 4.6),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for axis, method in zip(axes[0], order):
        margin = margins[method]
        for place, domain in enumerate(domains):
            if domain in margin.by_domain:
                axis.plot(100 * margin.by_domain[domain], place, "o", color="#6f8f9f", ms=4)
        for place, interval in enumerate((margin.domains, margin.collections), len(domains)):
            reach = 100 * (interval.reach or math.nan)
            axis.errorbar(100 * interval.mean, place, xerr=reach, fmt="D", color="#20343f", ms=5)
        axis.axvline(0, color="#999999", lw=0.8)
        axis.axhline(len(domains) - 0.5, color="#cccccc", lw=0.8)
        axis.set_title(method, fontsize=9)
        axis.tick_params(labelsize=8)
    axes[0][0].set_yticks(range(len(rows)), [readable(row.replace(", ", ": ")) for row in rows])
    axes[0][0].invert_yaxis()
    figure.supxlabel(f"points ahead of {BASE} on the unseen domain", fontsize=9)
    figure.tight_layout()
    figure.savefig(RESULTS / "fourteen.png", dpi=110)


if __name__ == "__main__":
    main()
