"""Draws docs/results/fourteen.png: each method beside plain averaging, domain by domain.

    python benchmarks/methods/picture.py

A panel is a method, a row a domain: how many points ahead the method is on it, unseen, by the last
model. Below stand the means over all domains and over data sets with their 95 % intervals. What
lies further out than a panel reaches is an arrow at its edge.
"""

import math
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from feddg.runs.table import FINAL
from feddg.settings import grouped
from feddg.text import readable

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(BENCHMARKS))
from tables import fourteen_domains  # noqa: E402

RESULTS = BENCHMARKS.parent / "docs" / "results"
BASE = "FedAvg"
REACH = (-22, 12)
"""The points that a panel shows."""


def mark(axis: plt.Axes, points: float, place: int, **style: object) -> None:
    """Draws a number, or an arrow at the panel's edge."""
    low, high = REACH
    shown = min(max(points, low + 0.6), high - 0.6)
    marker = "o" if shown == points else "<" if points < low else ">"
    axis.plot(shown, place, marker, **style)


def main() -> None:
    """Draws the picture."""
    results = fourteen_domains()
    margins = results.margins(FINAL, BASE)
    order = sorted(margins, key=lambda method: -margins[method].mean)
    domains = list(results.collections)
    rows = [*domains, "all domains", "all data sets"]
    names = [readable(row.partition(", ")[2] or row) for row in rows]
    sets = grouped((name, place) for place, name in enumerate(results.collections.values()))
    figure, panels = plt.subplots(2, -(-len(order) // 2), figsize=(10, 7), sharex=True, sharey=True)
    for axis in panels.flat[len(order) :]:
        axis.axis("off")
    for axis, method in zip(panels.flat, order):
        margin = margins[method]
        for own in list(sets.values())[::2]:
            axis.axhspan(min(own) - 0.5, max(own) + 0.5, color="#f1f3f4", lw=0)
        for place, domain in enumerate(domains):
            if domain in margin.by_domain:
                mark(axis, 100 * margin.by_domain[domain], place, color="#6f8f9f", ms=4)
        for place, interval in enumerate((margin.domains, margin.collections), len(domains)):
            reach = 100 * (interval.reach or math.nan)
            axis.errorbar(100 * interval.mean, place, xerr=reach, fmt="D", color="#20343f", ms=4)
        axis.axvline(0, color="#999999", lw=0.8)
        axis.axhline(len(domains) - 0.5, color="#bbbbbb", lw=0.8)
        axis.set_title(f"{method}: {100 * margin.mean:+.1f}", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.set_xlim(REACH)
    panels[0][0].set_yticks(range(len(rows)), names)
    panels[0][0].set_ylim(len(rows) - 0.4, -0.6)
    for axis in panels[:, 0]:
        for name, own in sets.items():
            middle = sum(own) / len(own)
            turned = {"rotation": 90, "ha": "center", "va": "center", "fontsize": 8}
            axis.text(-0.62, middle, name, transform=axis.get_yaxis_transform(), **turned)
    figure.supxlabel(f"points ahead of {BASE} on the unseen domain", fontsize=9)
    figure.tight_layout(rect=(0.03, 0, 1, 1))
    figure.savefig(RESULTS / "fourteen.png", dpi=110)


if __name__ == "__main__":
    main()
