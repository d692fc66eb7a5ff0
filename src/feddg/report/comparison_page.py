"""The page of a comparison: many runs as tables of means, margins, ranks and curves."""

from collections.abc import Sequence

from feddg.comparing.intervals import (
    average_over_columns,
    best_other,
    paired_margin,
)
from feddg.comparing.results import Results
from feddg.report import many_charts as charts
from feddg.report import many_tables as tables
from feddg.report.blocks import (
    Block,
    Cell,
    Column,
    Fact,
    Facts,
    Fold,
    Page,
    Prose,
    Section,
    Table,
)
from feddg.report.wording import counted, listed, percent, percent_sign, readable, spelled
from feddg.rows import ID_TEST, SPLITS, VAL
from feddg.runs.selection_rules import FINAL, SELECTION_RULES

MOST_FACTS = 8
MOST_COLUMNS = 6


def results_page(results: Results) -> Page:
    """The page of a comparison."""
    sections = [
        _accuracy_section(results),
        _margin_section(results),
        _rules_section(results),
        *_axis_sections(results),
        _paper_section(results),
        _cost_section(results),
        _runs_section(results),
    ]
    return Page(
        title=results.title,
        lead=_lead(results),
        tags=[
            counted(len({result.run.folder for result in results.results}), "run"),
            counted(len(results.methods), "method"),
            counted(len(results.seeds), "seed"),
        ],
        opening=[*_cautions(results), *_facts(results)],
        sections=[section for section in sections if section is not None],
    )


def _lead(results: Results) -> str:
    accuracies = results.accuracies(FINAL)
    averages = {
        method: average.mean
        for method, values in accuracies.items()
        if (average := average_over_columns(values, results.columns)) is not None
    }
    question = f"{results.question} " if results.question else ""
    if not averages:
        return f"{question}No method has a result in every column yet."
    best = max(averages, key=lambda method: averages[method])
    over = "" if len(results.columns) == 1 else f", averaged over {len(results.columns)} columns"
    text = (
        f"{question}{spelled(best)} recognised {percent_sign(averages[best])} of the held-out test "
        f"images after the final round{over}"
    )
    other = best_other(best, accuracies)
    margin = paired_margin(accuracies[best], accuracies[other]) if other else None
    if other is None or margin is None:
        return f"{text}."
    text += f", {percent(margin.mean)} points more than {spelled(other)}"
    if margin.low is None:
        return f"{text}; from one pair of runs, nothing follows."
    verdict = (
        "The difference is larger than chance between these runs explains."
        if margin.decided
        else "These runs do not decide which of the two is better."
    )
    return f"{text} (95 % interval {tables.interval_text(margin)}). {verdict}"


def _cautions(results: Results) -> list[Prose]:
    if not results.open:
        return []
    shown = [f"{name} ({state})" for name, state in results.open[:5]]
    more = f" and {len(results.open) - 5} more" if len(results.open) > 5 else ""
    text = f"Not complete, and left out: {listed(shown) if not more else ', '.join(shown)}{more}."
    return [Prose(text, notice=True)]


def _facts(results: Results) -> list[Facts]:
    accuracies = results.accuracies(FINAL)
    facts = [
        Fact(
            spelled(method),
            tables.spread_text(average_over_columns(accuracies[method], results.columns)),
            "held-out test, final round, %",
        )
        for method in results.methods
        if method in accuracies
    ]
    return [Facts(facts)] if len(facts) <= MOST_FACTS else []


def _accuracy_section(results: Results) -> Section:
    blocks: list[Block] = [tables.accuracy_table(results, FINAL)]
    if len(results.columns) > MOST_COLUMNS and len(results.axes) > 1:
        by_axis = [tables.accuracy_table(results, FINAL, axis=axis) for axis in results.axes]
        blocks = [*by_axis, Fold("Every column", blocks)]
    if (chart := charts.learning_curves(results)) is not None:
        blocks.append(chart)
    for split, title in ((VAL, "Held-out validation"), (ID_TEST, "In-domain test")):
        if results.accuracies(FINAL, split):
            blocks.append(
                Fold(f"{title}, final round", [tables.accuracy_table(results, FINAL, split)])
            )
    return Section("Accuracy", blocks)


def _margin_section(results: Results) -> Section | None:
    accuracies = results.accuracies(FINAL)
    table = tables.margin_table(results)
    if table is None:
        return None
    base = "fedavg" if "fedavg" in accuracies else next(iter(accuracies))
    found = [table, charts.margin_plot(accuracies, base), charts.rank_plot(accuracies)]
    return Section("Margins and ranks", [block for block in found if block is not None])


def _rules_section(results: Results) -> Section:
    blocks: list[Block] = [tables.rules_table(results)]
    for rule in list(SELECTION_RULES.values())[1:]:
        if results.accuracies(rule):
            blocks.append(
                Fold(f"{rule.name}, every column", [tables.accuracy_table(results, rule)])
            )
    return Section("Which round counts", blocks)


def _axis_sections(results: Results) -> list[Section]:
    found = [(axis, charts.axis_curves(results, axis)) for axis in results.axes]
    return [Section(f"By {readable(axis)}", [chart]) for axis, chart in found if chart is not None]


def _paper_section(results: Results) -> Section | None:
    if not results.paper and not results.differences:
        return None
    found = [tables.paper_table(results, split) for split in SPLITS]
    blocks: list[Block] = [table for table in found if table is not None]
    if results.differences:
        blocks.append(_list("How this setting differs from the paper's", results.differences))
    notes: Sequence[str] = (results.paper or {}).get("notes") or ()
    if notes:
        blocks.append(_list("About the paper's numbers", notes))
    return Section("Beside the paper", blocks)


def _list(heading: str, texts: Sequence[str]) -> Table:
    return Table([Column(heading, numeric=False)], [[Cell(text)] for text in texts])


def _cost_section(results: Results) -> Section | None:
    if not results.results:
        return None
    found = [charts.accuracy_against(results, what) for what in ("bytes", "seconds")]
    blocks = [chart for chart in found if chart is not None]
    return Section("Cost", [tables.cost_table(results), *blocks])


def _runs_section(results: Results) -> Section:
    rows = [
        [
            Cell(spelled(result.place.method)),
            Cell(readable(results.column(result.place))),
            Cell(str(result.place.seed)),
            Cell(percent(result.accuracy(FINAL)), strong=True),
            Cell(result.run.folder.name),
        ]
        for result in results.results
    ]
    heads = [
        Column("Method", numeric=False),
        Column("Column", numeric=False),
        Column("Seed"),
        Column("Test", "final round"),
        Column("Folder", numeric=False),
    ]
    return Section("Runs", [Fold(counted(len(rows), "run"), [Table(heads, rows)])])
