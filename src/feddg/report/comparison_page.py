"""The page of a comparison: many runs as tables of means, margins, ranks and curves."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from feddg.comparison.results import ResultRow, Results
from feddg.comparison.statistics import average_over_columns
from feddg.errors import FeddgError
from feddg.prediction.evaluate import (
    FEW_DISCORDANT,
    PairedDifference,
    PairedRuns,
    compare_images,
    read_image_results,
    results_file,
)
from feddg.records import ID_TEST, SPLITS, TEST, VAL
from feddg.report import charts, tables
from feddg.report.blocks import (
    Block,
    Cell,
    Column,
    Fact,
    Facts,
    Fold,
    MadeColumn,
    Page,
    Prose,
    Section,
    Table,
    glossary,
    table_of,
    text_column,
)
from feddg.report.sections import (
    compared_metrics,
    comparison_steps,
    cost_table,
    data_tags,
    differing_settings,
    on_data,
)
from feddg.report.tables import (
    about_best,
    about_results,
    best_method,
    conclusion,
    is_decided,
    tuning_section,
)
from feddg.report.text import (
    AGGREGATE_WORDS,
    MISSING,
    counted,
    listed,
    method_warnings,
    metric_title,
    number,
    percent,
    readable,
    spelled,
)
from feddg.runs.reading import SELECTION_RULES, RunRecord
from feddg.storage import is_file

# Runs image by image, where their results were kept: who is right where the other is not.


MOST_PAIRS = 60
T = TypeVar("T")
DRAWS = 500


def paired_table(found: PairedRuns, first: str, second: str) -> Table:
    """Metrics of two runs on the same images, and their differences with intervals."""
    columns: list[MadeColumn[PairedDifference]] = [
        (text_column("Metric"), lambda d: metric_title(d.metric)),
        (text_column("Over domains"), lambda d: AGGREGATE_WORDS[d.aggregate]),
        (Column(first, "%"), lambda d: percent(d.first)),
        (Column(second, "%"), lambda d: percent(d.second)),
        *_difference_columns(lambda d: d, "points"),
    ]
    caption = (
        f"{counted(found.images, 'image')} of {', '.join(found.domains[:6])}. Images are drawn "
        "anew within each domain, the same for both. It is about these two models; what other "
        "seeds would give it does not know."
    )
    return table_of(found.differences, columns, caption)


def _difference_columns(
    difference: Callable[[T], PairedDifference], note: str
) -> list[MadeColumn[T]]:
    """A difference of metrics and its interval; bold where that excludes zero."""

    def shown(thing: T) -> Cell:
        one = difference(thing)
        return Cell(f"{100 * one.difference:+.1f}", strong=one.low > 0 or one.high < 0)

    def interval(thing: T) -> str:
        one = difference(thing)
        return f"{100 * one.low:+.1f} to {100 * one.high:+.1f}"

    return [
        (Column("PairedDifference", note), shown),
        (Column("95 % interval", "paired bootstrap"), interval),
    ]


def mcnemar_words(found: PairedRuns) -> str:
    """McNemar's test in a sentence."""
    test = found.mcnemar
    rough = test.only_first + test.only_second < FEW_DISCORDANT
    return (
        f"McNemar: {number(test.only_first)} images only the first gets right, "
        f"{number(test.only_second)} only the second; p = {p_text(test.exact)} (exact), "
        f"{p_text(test.asymptotic)} (chi-squared"
        f"{'; too few images for it: go by the exact one' if rough else ''})."
    )


def p_text(value: float) -> str:
    """A p-value with as many digits as say something."""
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def paired_section(results: Results) -> Section | None:
    """Every method against the first one, image by image; None where nobody kept results."""
    base, *others = results.methods
    pairs = list(_pairs(results, base, others))
    if not pairs:
        return None
    compared: list[tuple[ResultRow, PairedRuns]] = []
    for row, one, other in pairs[:MOST_PAIRS]:
        with suppress(FeddgError):  # other images, or no PyArrow: no number is better than a wrong
            compared.append((row, _compared(one, other)))
    failed = len(pairs[:MOST_PAIRS]) - len(compared)
    columns: list[MadeColumn[tuple[ResultRow, PairedRuns]]] = [
        (text_column("Method"), lambda pair: spelled(pair[0].method)),
        (text_column("Column"), lambda pair: results.column(pair[0]) or MISSING),
        (Column("Seed"), lambda pair: str(pair[0].seed)),
        *_difference_columns(_pooled, f"points to {spelled(base)}"),
        (Column("Only it", "right"), lambda pair: number(pair[1].mcnemar.only_first)),
        (Column(f"Only {spelled(base)}", "right"), lambda p: number(p[1].mcnemar.only_second)),
        (Column("McNemar", "p, exact"), lambda pair: p_text(pair[1].mcnemar.exact)),
    ]
    caption = (
        "Accuracy on held-out test images, pooled, of the model that each run serves. One row "
        "compares two models on the same images; whether it holds for other seeds, the rows of "
        "other seeds say. Many rows are many tests: some p below 0.05 come by chance."
    )
    blocks: list[Block] = [table_of(compared, columns, caption)] if compared else []
    if failed:
        blocks.append(Prose(f"{counted(failed, 'pair')} could not be compared image by image."))
    if len(pairs) > MOST_PAIRS:
        blocks.append(Prose(f"The first {MOST_PAIRS} of {number(len(pairs))} pairs."))
    return Section("Image by image", blocks)


def _pairs(
    results: Results, base: str, others: list[str]
) -> Iterator[tuple[ResultRow, RunRecord, RunRecord]]:
    """A run of another method with its row, and the base's in the same column and seed."""
    kept = [(r, r.run) for r in results.rows if r.run and is_file(results_file(r.run.folder))]
    places = {(row.method, *row.place[1:]): run for row, run in kept}
    for method in others:
        for row, run in kept:
            other = places.get((base, *row.place[1:]))
            if row.method == method and other is not None:
                yield row, run, other


def _compared(one: RunRecord, other: RunRecord) -> PairedRuns:
    runs = [read_image_results(run.folder) for run in (one, other)]
    return compare_images(runs[0], runs[1], TEST, draws=DRAWS)


def _pooled(pair: tuple[ResultRow, PairedRuns]) -> PairedDifference:
    return next(d for d in pair[1].differences if (d.metric, d.aggregate) == ("accuracy", "pooled"))


MOST_FACTS = 8
MOST_NAMED = 4
MOST_COLUMNS = 6
FEW_SETTINGS = 10


def comparison_page(results: Results) -> Page:
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
        lead=conclusion(results).text,
        tags=[
            *([results.name] if results.title == results.name else []),
            counted(len({row.run.folder if row.run else row.key for row in results.rows}), "run"),
            counted(len(results.methods), "method"),
            counted(len(results.seeds), "seed"),
            *data_tags(results.runs()),
        ],
        opening=[
            *(Prose(str(one), notice=True) for one in about_results(results)),
            *_facts(results),
        ],
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
    where = on_data(results.runs())
    title += "" if where.removeprefix(" on ").lower() in title.lower() else where
    held_out = {row.held_out for row in results.rows}
    if own or len(held_out) != 1:
        return title
    return f"{title}, tested on {readable(listed(held_out.pop().split('+')))}"


def _facts(results: Results) -> list[Facts]:
    accuracies = results.accuracies(results.served)
    best = best_method(results) if is_decided(results) else None
    facts = [
        Fact(
            spelled(method),
            tables.spread_text(average_over_columns(accuracies[method], results.columns)),
            method_warnings(results, method) or f"held-out test, {results.served.name.lower()}, %",
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
    found = {row.run.folder: (spelled(row.method), row.run) for row in results.rows if row.run}
    if not 1 < len(found) <= MOST_COLUMNS:
        return None
    labels, runs = zip(*found.values())
    if len(set(labels)) < len(labels):
        labels = tuple(run.folder.name for run in runs)
    table = differing_settings(runs, labels)
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
    return table_of(texts, [(text_column(heading), str)])


def _cost_section(results: Results) -> Section | None:
    found = [charts.accuracy_against(results, what) for what in ("bytes", "seconds")]
    blocks = [block for block in [cost_table(results), *found] if block is not None]
    return Section("Cost", blocks) if blocks else None


def _runs_section(results: Results) -> Section:
    columns: list[MadeColumn[ResultRow]] = [
        (text_column("Method"), lambda row: spelled(row.method)),
        (text_column("Column"), lambda row: readable(results.column(row))),
        (Column("Seed"), lambda row: str(row.seed)),
        (
            Column("Test", results.served.name.lower()),
            lambda row: Cell(percent(row.accuracy(results.served)), strong=True),
        ),
        (text_column("Folder"), lambda row: row.folder),
    ]
    table = table_of(results.rows, columns)
    return Section("Runs", [Fold(counted(len(results.rows), "run"), [table])])
