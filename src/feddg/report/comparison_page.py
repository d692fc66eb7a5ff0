"""The page of a comparison: tables of means and margins, and curves of many runs."""

from dataclasses import replace
from statistics import fmean

from feddg.comparison.results import Results, differing
from feddg.evaluation.metrics import OF_A_DECISION
from feddg.records import ID_TEST, VAL
from feddg.report import charts, tables
from feddg.report.blocks import Block, Fold, Page, Prose, Section, Table, section_of
from feddg.report.run_page import cost_of, notices_of, on_data
from feddg.report.text import AGGREGATE_WORDS, spelled, split_heading, table_from
from feddg.runs.reading import Run, flatten
from feddg.runs.table import in_order
from feddg.text import counted, listed, readable, short

MOST_NAMED = 4
MOST_COLUMNS = 6


def comparison_page(results: Results) -> Page:
    """Returns the page of a comparison, at the largest budget and by budget if there are any."""
    every, results = results, results.at_largest
    rule = results.default_rule
    accuracies, is_fit = results.values(rule), results.no_method_fit is None
    base = "fedavg" if "fedavg" in accuracies else next(iter(accuracies), "")
    margins = tables.margin_table(results, rule)
    sections = [
        _accuracy_section(results),
        _budget_section(every),
        section_of("Decision", _decision_table(results, base)),
        section_of("Metrics", _metrics_table(results), folded=True),
        section_of(
            "Margins",
            margins,
            charts.margin_plot(results, base) if margins and is_fit else None,
            folded=not is_fit,
        ),
        _forest_section(results, base),
        Section("Which round counts", [tables.rules_table(results)], folded=True),
        *(
            section_of(f"By {readable(axis)}", charts.axis_curves(results, axis))
            for axis in results.axes
        ),
        section_of("What differs", _differing_settings(results), folded=True),
        tables.tuning_section(results.tuning),
        section_of(
            "Cost",
            _cost_table(results),
            charts.accuracy_against(results, "bytes"),
            charts.accuracy_against(results, "seconds"),
            folded=True,
        ),
        Section("Runs", [table_from("runs", results=results)], folded=True),
    ]
    verdict = tables.conclusion(results)
    known = tables.about_results(every)
    notices = notices_of(known)
    if not is_fit:
        also = [Fold("Also to know", [Prose(str(note)) for note in known])] if known else []
        notices = [Prose(verdict.advice, notice=True), *also]
    runs = counted(len({row.of_run for row in results.rows}), "run")
    return Page(
        title=_title(results),
        lead=f"{tables.budget_words(every)}{verdict.text}",
        tags=[
            *([results.name] if results.title == results.name != runs else []),
            runs,
            counted(len(results.methods), "method"),
            counted(len(results.seeds), "seed"),
        ],
        opening=[*notices, Prose(tables.model_sentence(results))],
        sections=[section for section in sections if section is not None],
    )


def _title(results: Results) -> str:
    """Returns the title of the plan, or the methods, with data set and test domain if missing."""
    has_title = results.title != results.name
    methods = [spelled(method) for method in results.methods]
    who = listed(methods) if len(methods) <= MOST_NAMED else counted(len(methods), "method")
    title = results.title if has_title else who
    where = on_data(results.runs())
    title += "" if where.removeprefix(" on ").lower() in title.lower() else where
    held_out = {row.held_out for row in results.rows}
    if has_title or len(held_out) != 1:
        return title
    return f"{title}, tested on {readable(listed(held_out.pop().split('+')))}"


def _accuracy_section(results: Results) -> Section | None:
    rule = results.default_rule
    blocks: list[Block] = [tables.accuracy_table(results, rule)]
    if len(results.columns) > MOST_COLUMNS and len(results.axes) > 1:
        axes = [a for a in results.axes if len(results.columns_by(a)) < len(results.columns)]
        by_axis = [tables.accuracy_table(results, rule, axis=axis) for axis in axes]
        blocks = [*by_axis, Fold("Every column", blocks)]
    others = [
        Fold(f"{split_heading(s)}, {rule.title.lower()}", [tables.accuracy_table(results, rule, s)])
        for s in (VAL, ID_TEST)
        if results.values(rule, split=s)
    ]
    return section_of("Accuracy", *blocks, charts.learning_curves(results), *others)


def _forest_section(results: Results, base: str) -> Section | None:
    """Returns each method's margin by domain, of a plan over several data sets; the best open."""
    margins = results.margins(results.default_rule, base) if results.collections else {}
    if not margins:
        return None
    order = sorted(margins, key=lambda name: -margins[name].mean)
    plots = [(name, charts.forest_plot(results, name, base, margins[name])) for name in order]
    (_, first), *others = plots
    folds = [Fold(f"{spelled(method)} beside {spelled(base)}", [plot]) for method, plot in others]
    return Section("By domain", [first, *folds])


def _budget_section(results: Results) -> Section | None:
    """Returns accuracy by training images, and the leader at every budget, of a plan with some."""
    folds = []
    for budget in results.budgets:
        part = replace(results.at(budget), question="")
        blocks = [
            Prose(tables.conclusion(part).text),
            tables.accuracy_table(part, results.default_rule) if len(part.columns) > 1 else None,
            tables.margin_table(part, results.default_rule),
        ]
        folds.append(Fold(f"{short(budget)} images", [one for one in blocks if one is not None]))
    picture = charts.accuracy_against(results.at_largest, "images")
    return section_of("By images seen", tables.budget_table(results), picture, *folds)


def _decision_table(results: Results, base: str) -> Table | None:
    """Returns the decision's metrics on held-out domains, with paired differences to one method."""
    rule = results.default_rule
    values = {name: results.values(rule, name) for name in OF_A_DECISION}
    measured = {
        name: tables.mean_percents(results, methods, rule)
        for name, methods in values.items()
        if methods
    }
    if not measured:
        return None
    margins = {name: results.margins(rule, base, name) for name in values}
    return table_from(
        "decisions",
        methods=results.methods,
        measured=measured,
        base=base,
        margins=margins,
        interval=tables.interval_text,
    )


def _metrics_table(results: Results) -> Table | None:
    """Returns every metric of every method on held-out test domains, as means over seeds."""
    names = in_order(name for run in results.runs() for name in run.table.metrics)
    if len(names) < 2:
        return None
    methods, aggregates, rule = results.methods, AGGREGATE_WORDS, results.default_rule
    means = {
        (name, over): tables.mean_percents(results, results.values(rule, name, over=over), rule)
        for name in names
        for over in aggregates
    }
    return table_from(
        "all_metrics", methods=methods, names=names, aggregates=aggregates, means=means
    )


def _differing_settings(results: Results) -> Table | None:
    """Returns the settings in which runs differ; None if there are too many runs for a table."""
    named = {row.run.folder: (spelled(row.method), row.run) for row in results.rows if row.run}
    if not 1 < len(named) <= MOST_COLUMNS:
        return None
    labels, runs = zip(*named.values())
    if len(set(labels)) < len(labels):
        labels = tuple(run.folder.name for run in runs)
    flat = [flatten(run.settings) for run in runs]
    names = [name for name in differing(flat) if name != "name"]
    return table_from("settings", names=names, runs=list(zip(labels, flat))) if names else None


def _cost_table(results: Results) -> Table | None:
    """Returns the mean cost of each method's runs; None without runs."""
    costs = {m: [_taken(run) for run in runs] for m in results.methods if (runs := results.runs(m))}
    means = {method: [*map(fmean, zip(*parts))] for method, parts in costs.items()}
    return table_from("costs", costs=means) if means else None


def _taken(run: Run) -> list[float]:
    cost = cost_of(run)
    rounds = max(1, cost.rounds)  # as its seconds, of the whole run, not up to a budget
    return [
        cost.seconds["total"],
        cost.seconds.get("train", 0.0) / rounds,
        cost.seconds.get("aggregate", 0.0) / rounds,
        cost.seconds.get("setup", 0.0),
        cost.images_per_second,
        cost.bytes.get("up_per_client_round", 0),
        cost.bytes.get("setup_up_per_client", 0),
        cost.peak_memory_bytes or 0,
    ]
