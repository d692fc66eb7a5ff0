"""A page's tables as Markdown, CSV and LaTeX: the same cells, in other clothes."""

import csv
import io
import itertools
import re
from collections.abc import Iterator, Sequence

from feddg.comparison.results import Results
from feddg.evaluation.metrics import METRICS
from feddg.records import SPLITS, as_cell
from feddg.report.blocks import Block, Cell, Column, Fold, Page, Section, Table
from feddg.runs.reading import AGGREGATES, SELECTION_RULES

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "–": "--",
    "×": r"$\times$",
    "\N{NO-BREAK SPACE}": "~",
    "\N{NARROW NO-BREAK SPACE}": r"\,",
}


def page_tables(page: Page) -> Iterator[tuple[str, Table]]:
    """Yields every table of a page with a name that says where it stands: ``accuracy``."""
    seen: dict[str, int] = {}
    for section in page.sections:
        for words, table in _tables(section.blocks, section.title):
            name = re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")
            seen[name] = seen.get(name, 0) + 1
            yield (name if seen[name] == 1 else f"{name}_{seen[name]}"), table


def _tables(blocks: Sequence[Block], words: str) -> Iterator[tuple[str, Table]]:
    for block in blocks:
        if isinstance(block, Table):
            yield words, block
        elif isinstance(block, Fold | Section):
            yield from _tables(block.blocks, f"{words} {block.title}")


def to_markdown(table: Table) -> str:
    """Returns a table as GitHub Markdown, its caption below."""
    heads = [_markdown(_heading(column)) for column in table.columns]
    rule = ["---:" if column.numeric else ":---" for column in table.columns]
    rows = [
        [f"**{_markdown(cell.text)}**" if cell.strong else _markdown(cell.text) for cell in row]
        for row in table.rows
    ]
    lines = ["| " + " | ".join(row) + " |" for row in (heads, rule, *rows)]
    caption = f"\n\n{table.caption}" if table.caption else ""
    return "\n".join(lines) + caption + "\n"


def _markdown(text: str) -> str:
    return re.sub(r"([\\|*_`<>])", r"\\\1", text.replace("\n", " "))


def _heading(column: Column) -> str:
    return f"{column.heading} ({column.note})" if column.note else column.heading


def to_csv(table: Table) -> str:
    """Returns a table as CSV, texts as they are shown."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([as_cell(_heading(column)) for column in table.columns])
    writer.writerows([[_plain(cell) for cell in row] for row in table.rows])
    return out.getvalue()


def _plain(cell: Cell) -> str:
    text = cell.text.replace("\N{NO-BREAK SPACE}", " ").replace("\N{NARROW NO-BREAK SPACE}", "")
    return "" if text == "–" else str(as_cell(text))


def to_latex(table: Table) -> str:
    """Returns a table as a LaTeX ``table`` environment; needs the package ``booktabs``."""
    form = "".join("r" if column.numeric else "l" for column in table.columns)
    heads = " & ".join(_latex(_heading(column)) for column in table.columns)
    rows = [" & ".join(map(_latex_cell, row)) + r" \\" for row in table.rows]
    caption = [rf"\caption{{{_latex(table.caption)}}}"] if table.caption else []
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\begin{{tabular}}{{{form}}}",
        r"\toprule",
        heads + r" \\",
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
        *caption,
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex_cell(cell: Cell) -> str:
    text = _latex(cell.text)
    return rf"\textbf{{{text}}}" if cell.strong else text


def _latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text.replace("\n", " "))


def results_csv(results: Results) -> str:
    """Returns every number of a comparison as CSV: one row per run, selection rule and split."""
    axes = list(dict.fromkeys(a for r in results.results for a in r.place.conditions))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heads = ["method", "column", "held_out_test", *axes, "seed", "rule", "round", "split"]
    numbers = _numbers(results)
    writer.writerow(map(as_cell, [*heads, "accuracy", "folder", *map("_".join, numbers)]))
    for result in results.results:
        place = result.place
        conditions = [place.conditions.get(axis, "") for axis in axes]
        first = [place.method, results.column(place), place.scenario, *conditions, place.seed]
        for rule in SELECTION_RULES.values():
            round_ = result.rounds[rule.name]
            for split in SPLITS:
                accuracy = result.accuracy(rule, split)
                if accuracy is not None:
                    last = [rule.name, round_, split, repr(accuracy), result.run.folder.name]
                    found = result.run.evaluations.of(rule.weights)
                    more = [found.value(round_, split, *number) for number in numbers]
                    told = ["" if value is None else repr(value) for value in more]
                    writer.writerow(map(as_cell, [*first, *last, *told]))
    return out.getvalue()


def _numbers(results: Results) -> list[tuple[str, str]]:
    """Every metric of the runs with every aggregate over domains, as columns."""
    runs = [result.run.evaluations for result in results.results]
    known = {name for run in runs for split in SPLITS for name in run.metrics(split)}
    metrics = [name for name in METRICS if name in known] + sorted(known - METRICS.keys())
    return list(itertools.product(metrics, AGGREGATES))
