"""Carries out the plans of PARDON at the papers' own budget, and says which case of the rule holds.

    python benchmarks/own_size/campaign.py --root PACS [--out FOLDER] [--jobs 2]
    python benchmarks/own_size/campaign.py --verdict

The first command runs what the CSV files beside the others do not have, in the order of ``STAGES``;
stopped with Ctrl-C, it goes on when given again, on any machine that has the folder of runs, and
without that folder from what the CSV files have. ``weights`` holds ResNet-18 and -50, and the
quarter-width VGG-19 of AdaIN. The second command prints the rule's sentence for what has been run.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

import feddg
from feddg.comparison.results import Results
from feddg.comparison.statistics import Interval
from feddg.runs.table import NumberTable, SelectionRule, add_rule, final_round
from feddg.settings import grouped, merge

ROOT = Path(__file__).resolve().parents[2]
PLANS, DATA = ROOT / "benchmarks" / "own_size", ROOT / "docs" / "results" / "data"
LAST = 10
"""Last rounds whose models' accuracies are averaged."""
PRINTED_LEAD = 2.1
"""PARDON's lead over CCST in its Table II, points."""
MAIN = ("FedAvg", "PARDON, released", "PARDON")
REST = ("PARDON v3, released", "PARDON v3", "CCST, K = 1", "MixStyle", "DART")
STAGES: tuple[tuple[str, tuple[str, ...], list[int]], ...] = (
    ("pacs_64", MAIN, [0]),
    ("pacs_64", MAIN, [1]),
    ("pacs_64", MAIN, [2]),
    ("sketch_64_rounds", MAIN[1:], [0]),
    ("sketch_224", MAIN[:2], [0]),
    ("pacs_160", MAIN, [0]),
    ("pacs_64_default", MAIN[1:], [0]),
    ("pacs_64", REST, [0]),
    ("sketch_224", ("CCST, K = 1",), [0]),
    ("pacs_160", ("CCST, K = 1",), [0]),
    ("three_clients_160", ("FedAvg",), [0]),
    ("pacs_64", REST, [1, 2]),
    ("pacs_224_resnet50", (*MAIN, "CCST, K = 1", "FPL", "FedGMA"), [0]),
)


class MeanOfLast(SelectionRule):
    """The rule of the last ten rounds; it chooses none where one of them was not evaluated."""

    def of(self, table: NumberTable) -> NumberTable:
        """Returns the means of the numbers that each of the last ten rounds has."""
        own = table.where(weights=self.weights)
        last = own.round or 0
        rounds = range(last - LAST + 1, last + 1)
        measured = grouped(
            ((row.split, row.domain, row.metric), row) for row in own if row.round in rounds
        )
        found = NumberTable(
            rows[-1].model_copy(update={"value": fmean(row.value for row in rows)})
            for rows in measured.values()
            if len(rows) == LAST
        )
        return found if found.where(split="test") else NumberTable()


add_rule(MeanOfLast("last_ten", "Mean of the last ten rounds' accuracies", final_round))


def plan_of(name: str, methods: Sequence[str], seeds: list[int]) -> dict[str, Any]:
    """Returns a plan's fields with some of its methods and seeds."""
    fields = yaml.safe_load((PLANS / f"{name}.yaml").read_text("utf-8"))
    if "extends" in fields:
        fields = merge(plan_of(Path(fields.pop("extends")).stem, methods, seeds), fields)
    chosen = [method for method in fields["methods"] if method["label"] in methods]
    return fields | {"methods": chosen, "seeds": seeds}


def carry_out(root: Path, out: Path, jobs: int, stages: Sequence[int]) -> None:
    """Runs what is missing of each stage."""
    for number in stages:
        name, methods, seeds = STAGES[number]
        print(f"stage {number}: {name}, {', '.join(methods)}, seeds {seeds}", flush=True)
        feddg.compare(
            plan_of(name, methods, seeds),
            out / name,
            overrides={"root": str(root)},
            jobs=jobs,
            results=DATA / f"own_{name}.csv",
            report=False,
        )


def differences(
    name: str, method: str, rule: str, than: str = "FedAvg", split: str = "test"
) -> dict[str, list[float]]:
    """Points above another method of each held-out column's seeds, where both have been run."""
    results = Results.read(DATA / f"own_{name}.csv")
    found = results.values(rule, split=split)
    mine, its = found.get(method, {}), found.get(than, {})
    by_domain: dict[str, list[float]] = defaultdict(list)
    for domain, seed in sorted(mine.keys() & its.keys()):
        by_domain[domain].append(100 * (mine[domain, seed] - its[domain, seed]))
    return by_domain


def case(lead: Interval) -> str:
    """Which of the three cases of the rule holds, in its words."""
    if lead.low is None or lead.high is None:
        return "cannot be said yet"
    if lead.low > 0:
        return "is there"
    return "is not there" if lead.high < PRINTED_LEAD else "is undecided"


def verdict(name: str = "pacs_64", methods: Sequence[str] = (*MAIN[1:], *REST)) -> list[str]:
    """Returns the rule's sentences, one for each method and rule."""
    lines = []
    for method in methods:
        for rule, words in (("last_ten", "mean of the last ten rounds"), ("ema", "EMA")):
            found = differences(name, method, rule)
            if not found:
                continue
            lead = Interval.of(fmean(values) for values in found.values())
            reach = "" if lead.low is None else f" ({lead.low:+.1f} to {lead.high:+.1f})"
            each = ", ".join(
                f"{domain} {fmean(v):+.1f} of {len(v)}" for domain, v in sorted(found.items())
            )
            lines.append(
                f"{method}, {words}: {lead.mean:+.1f}{reach} over {lead.count} domains; an "
                f"advantage over FedAvg {case(lead)} ({each})"
            )
    return lines


def default() -> str:
    """Returns what the validation domains say of PARDON's default stylization."""
    found = differences("pacs_64_default", MAIN[1], "ema", MAIN[2], "val")
    lead = Interval.of(fmean(values) for values in found.values())
    if lead.low is None:
        return (
            f"The default stylization is undecided: {lead.count} validation domains have been run."
        )
    chosen = "released" if lead.low > 0 else "images"
    return (
        f"The default stylization is {chosen}: released minus default, on {lead.count} validation "
        f"domains, {lead.mean:+.1f} ({lead.low:+.1f} to {lead.high:+.1f})."
    )


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path("data/pacs"))
    parser.add_argument("--out", type=Path, default=Path("comparisons/own_size"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=range(len(STAGES)))
    parser.add_argument("--verdict", action="store_true")
    options = parser.parse_args()
    if options.verdict:
        print("\n".join([*verdict(), default()]))
    else:
        carry_out(options.root.resolve(), options.out, options.jobs, options.stages)


if __name__ == "__main__":
    main()
