"""The page of a comparison: many runs as tables of means, margins, ranks and curves."""

from collections.abc import Sequence

from feddg.comparison.results import Results
from feddg.comparison.statistics import average_over_columns
from feddg.records import ID_TEST, SPLITS, VAL
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
from feddg.report.cost_section import cost_table
from feddg.report.finding_words import alarm_words
from feddg.report.glossary import glossary
from feddg.report.headline import data_tags, on_data
from feddg.report.metrics_section import compared_metrics
from feddg.report.next_steps import comparison_steps
from feddg.report.paired_section import paired_section
from feddg.report.settings_section import differing_settings
from feddg.report.tuning_section import tuning_section
from feddg.report.verdict import (
    about_best,
    best_method,
    elsewhere_words,
    is_decided,
    verdict_words,
    warnings_about,
)
from feddg.report.wording import counted, listed, percent, readable, spelled
from feddg.runs.reading import SELECTION_RULES

MOST_FACTS = 8
MOST_NAMED = 4
MOST_COLUMNS = 6
FEW_SETTINGS = 10


def results_page(results: Results) -> Page:
    """The page of a comparison."""
    sections = [
        _accuracy_section(results),
        _best_section(results),
        _metrics_section(results),
        _margin_section(results),
        paired_section(results),
        _rules_section(results),
        *_axis_sections(results),
        _settings_section(results),
        _paper_section(results),
        tuning_section(results.tuning),
        _cost_section(results),
        _runs_section(results),
    ]
    return Page(
        title=_title(results),
        lead=verdict_words(results),
        tags=[
            *([results.name] if results.title == results.name else []),
            counted(len({result.run.folder for result in results.results}), "run"),
            counted(len(results.methods), "method"),
            counted(len(results.seeds), "seed"),
            *data_tags([result.run for result in results.results]),
        ],
        opening=[*_cautions(results), *_facts(results)],
        sections=[
            *(section for section in sections if section is not None),
            *comparison_steps(results, is_decided(results)),
            glossary(),
        ],
    )


def _title(results: Results) -> str:
    """The title its author gave, or the methods; with data set and test domain if it lacks them."""
    own = results.title != results.name
    methods = [spelled(method) for method in results.methods]
    who = listed(methods) if len(methods) <= MOST_NAMED else counted(len(methods), "method")
    title = results.title if own else who
    where = on_data([result.run for result in results.results])
    title += "" if where.removeprefix(" on ").lower() in title.lower() else where
    scenarios = {result.place.scenario for result in results.results}
    if own or len(scenarios) != 1:
        return title
    return f"{title}, tested on {readable(listed(scenarios.pop().split('+')))}"


def _cautions(results: Results) -> list[Prose]:
    cautions = [Prose(text, notice=True) for text in warnings_about(results)]
    elsewhere = elsewhere_words(results)
    if elsewhere is not None:
        cautions.insert(0, Prose(elsewhere, notice=True))
    if results.open:
        shown = [f"{name} ({state})" for name, state in results.open[:5]]
        more = f" and {len(results.open) - 5} more" if len(results.open) > 5 else ""
        text = f"Not complete, and left out: {listed(shown) if not more else ', '.join(shown)}"
        cautions.insert(0, Prose(f"{text}{more}.", notice=True))
    return cautions


def _facts(results: Results) -> list[Facts]:
    accuracies = results.accuracies(results.served)
    best = best_method(results) if is_decided(results) else None
    facts = [
        Fact(
            spelled(method),
            tables.spread_text(average_over_columns(accuracies[method], results.columns)),
            alarm_words(results, method) or f"held-out test, {results.served.name.lower()}, %",
            accent=method == best,
        )
        for method in results.methods
        if method in accuracies
    ]
    return [Facts(facts)] if len(facts) <= MOST_FACTS else []


def _accuracy_section(results: Results) -> Section:
    blocks: list[Block] = [tables.accuracy_table(results, results.served)]
    if len(results.columns) > MOST_COLUMNS and len(results.axes) > 1:
        by_axis = [
            tables.accuracy_table(results, results.served, axis=axis) for axis in results.axes
        ]
        blocks = [*by_axis, Fold("Every column", blocks)]
    if (chart := charts.learning_curves(results)) is not None:
        blocks.append(chart)
    for split, title in ((VAL, "Held-out validation"), (ID_TEST, "In-domain test")):
        if results.accuracies(results.served, split):
            blocks.append(
                Fold(
                    f"{title}, {results.served.name.lower()}",
                    [tables.accuracy_table(results, results.served, split)],
                )
            )
    return Section("Accuracy", blocks)


def _best_section(results: Results) -> Section | None:
    found = about_best(results)
    return None if found is None else Section(found[0], [Prose(found[1])])


def _metrics_section(results: Results) -> Section | None:
    table = compared_metrics(results)
    return Section("Metrics", [table]) if table is not None else None


def _margin_section(results: Results) -> Section | None:
    accuracies = results.accuracies(results.served)
    table = tables.margin_table(results, results.served)
    if table is None:
        return None
    base = "fedavg" if "fedavg" in accuracies else next(iter(accuracies))
    found = [table, charts.margin_plot(accuracies, base), charts.rank_plot(accuracies)]
    return Section("Margins and ranks", [block for block in found if block is not None])


def _rules_section(results: Results) -> Section:
    blocks: list[Block] = [tables.rules_table(results)]
    for rule in SELECTION_RULES.values():
        if rule != results.served and results.accuracies(rule):
            blocks.append(
                Fold(f"{rule.name}, every column", [tables.accuracy_table(results, rule)])
            )
    return Section("Which round counts", blocks)


def _axis_sections(results: Results) -> list[Section]:
    found = [(axis, charts.axis_curves(results, axis)) for axis in results.axes]
    return [Section(f"By {readable(axis)}", [chart]) for axis, chart in found if chart is not None]


def _settings_section(results: Results) -> Section | None:
    """The settings in which a few runs differ; None of more runs than a table has room for."""
    found = list({result.run.folder: result for result in results.results}.values())
    if not 1 < len(found) <= MOST_COLUMNS:
        return None
    labels = [spelled(result.place.method) for result in found]
    if len(set(labels)) < len(labels):
        labels = [result.run.folder.name for result in found]
    table = differing_settings([result.run for result in found], labels)
    if table is None:
        return None
    few = len(table.rows) <= FEW_SETTINGS
    blocks: list[Block] = [table if few else Fold(counted(len(table.rows), "setting"), [table])]
    return Section("What differs", blocks)


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
    return Section("Cost", [cost_table(results), *blocks])


def _runs_section(results: Results) -> Section:
    rows = [
        [
            Cell(spelled(result.place.method)),
            Cell(readable(results.column(result.place))),
            Cell(str(result.place.seed)),
            Cell(percent(result.accuracy(results.served)), strong=True),
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
