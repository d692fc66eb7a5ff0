"""Makes the page of all of the papers' tables, and a longer one of each, from plans and CSV files.

    python benchmarks/papers/pages.py [NAME ...]

For a table NAME, the plan is ``benchmarks/papers/short/NAME.yaml``, and the results, from
``feddg compare PLAN --results CSV``, are ``docs/results/data/papers/NAME.csv``, with
``NAME.tuning.json`` beside it where values were tuned. ``docs/results/papers.md`` has a short table
of each; ``runs/papers/NAME.md`` every selection rule, margin, and the cells that are not run.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from feddg.comparison.plan import Plan, load_plan
from feddg.comparison.results import Results, TuningFile
from feddg.comparison.statistics import Margin, average_over_columns
from feddg.records import TEST
from feddg.report.results_page import BEGIN, END, REFERENCE, between_marks, cells_run, remade
from feddg.report.tables import interval_text, mark, points, spread_text
from feddg.report.text import spelled
from feddg.runs.reading import FINAL, SWA_MEAN
from feddg.text import readable

ROOT = Path(__file__).resolve().parents[2]
PLANS = Path("benchmarks/papers/short")
DATA = Path("docs/results/data/papers")
PAGES = Path("runs/papers")
INDEX = Path("docs/results/papers.md")
LEADS = ("minus FedAvg, final", "minus FedAvg, SWA")


def make(names: Sequence[str] = (), root: Path = ROOT) -> list[Path]:
    """Writes the pages of these tables, all by default, and the list; returns what was written."""
    written = []
    for name in tables(names, root):
        plan = load_plan(root / PLANS / f"{name}.yaml")
        path = root / PAGES / f"{name}.md"
        page = path.read_text("utf-8") if path.is_file() else new_page(name, plan)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(remade(page, results_of(name, plan, root), tuning_of(name, root)), "utf-8")
        written.append(path)
    index = root / INDEX
    list_of_all = listing(tables((), root), root)
    index.write_text(between_marks(index.read_text("utf-8"), list_of_all), "utf-8")
    return [*written, index]


def tables(names: Sequence[str] = (), root: Path = ROOT) -> list[str]:
    """Returns the names of these tables, all by default.

    Raises:
        SystemExit: there is no such table.
    """
    every = sorted(path.stem for path in (root / PLANS).glob("*.yaml"))
    if unknown := set(names) - set(every):
        raise SystemExit(f"no plan {', '.join(sorted(unknown))}; there are: {', '.join(every)}")
    return list(names) or every


def results_of(name: str, plan: Plan, root: Path = ROOT) -> Results:
    """The results of a table; none yet where there is no file."""
    return Results.read(root / DATA / f"{name}.csv", plan)


def tuning_of(name: str, root: Path = ROOT) -> TuningFile | None:
    """What was tried before a table was run; None where nothing was, or it was not kept."""
    return TuningFile.read(root / DATA / f"{name}.tuning.json")


def new_page(name: str, plan: Plan) -> str:
    """The frame of a page: what stands around its tables."""
    return (
        f"# {plan.title}\n\n"
        f"    feddg compare {PLANS}/{name}.yaml --results {DATA}/{name}.csv\n"
        f"    python benchmarks/papers/pages.py {name}\n\n"
        "The first command runs what is missing, the second makes this page from the file."
        f"\n\n{BEGIN}\n\n{END}\n"
    )


def listing(names: Sequence[str], root: Path = ROOT) -> str:
    """Every table: how much of it is run on how many images, and the columns with a run."""
    parts = []
    for name in names:
        plan = load_plan(root / PLANS / f"{name}.yaml")
        results = results_of(name, plan, root)
        title = (plan.title or name).removesuffix(", shortened")
        budget = f"; seeds: {len(results.seeds_run)}" if results.rows else ""
        images, rounds = results.mean(REFERENCE, "images"), plan.base["train"].get("rounds")
        if images and rounds:
            budget += f"; images seen: {images * rounds / 1000:.0f}k"
        parts.append(f"### {title}\n\n`{name}`: {cells_run(results)} cells run{budget}.")
        if results.rows:
            parts.append(short_table(results))
    return "\n\n".join(parts)


def short_table(results: Results) -> str:
    """Accuracy of the last model, of the averaged weights and in the paper; leads over FedAvg."""
    final, swa = results.accuracies(FINAL), results.accuracies(SWA_MEAN)
    constant = results.no_better_than_constant()
    printed = (results.paper or {}).get("values", {}).get(TEST, {})
    methods = [method for method in results.methods if method in final]
    others = [method for method in methods if method != REFERENCE] or methods
    measured = {column for method in others for column, _ in final[method]}
    run = [column for column in results.columns if column in measured]
    leads = [results.margins(rule, REFERENCE) for rule in (FINAL, SWA_MEAN)]
    leads = [own for own in leads if any(map(with_intervals, own.values()))]

    def cells(method: str) -> list[str]:
        found = [spelled(method) + mark(constant.get(method, ()), results.columns)]
        for column in run:
            ours = [average_over_columns(own[method], [column]) for own in (final, swa)]
            paper = printed.get(method, {}).get(column)
            found.append(
                " / ".join([*(spread_text(one) if one else "-" for one in ours)])
                + (f" / {paper:.1f}" if paper is not None else "")
            )
        for own in leads:
            found.append(with_intervals(own.get(method)))
        return found

    head = ["method", *map(readable, run), *(LEADS if leads else ())]
    head_line, *lines = (f"| {' | '.join(line)} |" for line in (head, *map(cells, methods)))
    return "\n".join([head_line, f"|{'---|' * len(head)}", *lines])


def with_intervals(margin: Margin | None) -> str:
    """A lead with the intervals that can be claimed; empty without any."""
    if margin is None:
        return ""
    over = (("domains", margin.domains), ("seeds", margin.seeds))
    known = [f"{of} {interval_text(one, of)}" for of, one in over if one.reach is not None]
    return f"{points(margin.mean)} ({'; '.join(known)})" if known else ""


if __name__ == "__main__":
    for path in make(sys.argv[1:]):
        print(path)
