"""Makes the pages of the papers' tables, and the page that lists them, from plans and CSV files.

    python benchmarks/papers/pages.py [NAME ...]

For a table NAME, the plan is ``benchmarks/papers/short/NAME.yaml``, the page
``docs/results/papers/NAME.md``, and the results, from ``feddg compare PLAN --results CSV``, are
``docs/results/data/papers/NAME.csv``, with ``NAME.tuning.json`` beside it where values were tuned.
A table of which no cell is run has a page, too, which says so, beside the paper's numbers.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from feddg.comparison.plan import Plan, load_plan
from feddg.comparison.results import Results, TuningFile
from feddg.report.results_page import BEGIN, END, between_marks, cells_run, remade

ROOT = Path(__file__).resolve().parents[2]
PLANS = Path("benchmarks/papers/short")
DATA = Path("docs/results/data/papers")
PAGES = Path("docs/results/papers")
INDEX = Path("docs/results/papers.md")


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
        "The first command runs what is missing, the second makes this page from the file. "
        f"[All tables](../papers.md).\n\n{BEGIN}\n\n{END}\n"
    )


def listing(names: Sequence[str], root: Path = ROOT) -> str:
    """The list of all tables: cells run, and the page, which has the plan's name."""
    lines = ["| table | cells run | page |", "| :--- | ---: | :--- |"]
    for name in names:
        plan = load_plan(root / PLANS / f"{name}.yaml")
        table = results_of(name, plan, root)
        title = (plan.title or name).removesuffix(", shortened")
        lines.append(f"| {title} | {cells_run(table)} | [{name}](papers/{name}.md) |")
    return "\n".join(lines)


if __name__ == "__main__":
    for path in make(sys.argv[1:]):
        print(path)
