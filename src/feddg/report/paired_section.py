"""Runs image by image, where their results were kept: who is right where the other is not."""

import json
from collections.abc import Iterator

from feddg.comparison.results import Result, Results
from feddg.errors import FeddgError
from feddg.prediction.evaluate import (
    FEW_DISCORDANT,
    McNemar,
    PairedRuns,
    compare_images,
    read_image_results,
    results_file,
)
from feddg.records import TEST
from feddg.report.blocks import Block, Cell, Column, Prose, Section, Table
from feddg.report.metric_words import AGGREGATE_WORDS, metric_title
from feddg.report.wording import MISSING, counted, number, percent, spelled
from feddg.storage import is_file

MOST_PAIRS = 60
DRAWS = 500


def paired_table(found: PairedRuns, first: str, second: str) -> Table:
    """Metrics of two runs on the same images, and their differences with intervals."""
    rows = [
        [
            Cell(metric_title(d.metric)),
            Cell(AGGREGATE_WORDS[d.aggregate]),
            Cell(percent(d.first)),
            Cell(percent(d.second)),
            Cell(f"{100 * d.difference:+.1f}", strong=d.low > 0 or d.high < 0),
            Cell(f"{100 * d.low:+.1f} to {100 * d.high:+.1f}"),
        ]
        for d in found.differences
    ]
    heads = [Column("Metric", numeric=False), Column("Over domains", numeric=False)]
    heads += [Column(first, "%"), Column(second, "%"), Column("Difference", "points")]
    heads += [Column("95 % interval", "paired bootstrap")]
    caption = (
        f"{counted(found.images, 'image')} of {', '.join(found.domains[:6])}. Images are drawn "
        "anew within each domain, the same for both. It is about these two models; what other "
        "seeds would give it does not know."
    )
    return Table(heads, rows, caption)


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
    rows, failed = [], 0
    for one, other in pairs[:MOST_PAIRS]:
        try:
            found = _compared(one, other)
        except FeddgError:  # other images, or PyArrow is not here: no number is better than a wrong
            failed += 1
            continue
        rows.append(_row(results, one, other, found))
    heads = [
        Column("Method", numeric=False),
        Column("Column", numeric=False),
        Column("Seed"),
        Column("Difference", f"points to {spelled(base)}"),
        Column("95 % interval", "paired bootstrap"),
        Column("Only it", "right"),
        Column(f"Only {spelled(base)}", "right"),
        Column("McNemar", "p, exact"),
    ]
    caption = (
        "Accuracy on held-out test images, pooled, of the model that each run serves. One row "
        "compares two models on the same images; whether it holds for other seeds, the rows of "
        "other seeds say. Many rows are many tests: some p below 0.05 come by chance."
    )
    blocks: list[Block] = [Table(heads, rows, caption)] if rows else []
    if failed:
        blocks.append(Prose(f"{counted(failed, 'pair')} could not be compared image by image."))
    if len(pairs) > MOST_PAIRS:
        blocks.append(Prose(f"The first {MOST_PAIRS} of {number(len(pairs))} pairs."))
    return Section("Image by image", blocks)


def _pairs(results: Results, base: str, others: list[str]) -> Iterator[tuple[Result, Result]]:
    kept = [r for r in results.results if is_file(results_file(r.run.folder))]
    places = {(r.place.method, _where(r)): r for r in kept}
    for method in others:
        for one in kept:
            other = places.get((base, _where(one)))
            if one.place.method == method and other is not None:
                yield one, other


def _where(result: Result) -> str:
    place = result.place
    return json.dumps([place.scenario, dict(place.conditions), place.seed], sort_keys=True)


def _compared(one: Result, other: Result) -> PairedRuns:
    runs = [read_image_results(result.run.folder) for result in (one, other)]
    return compare_images(runs[0], runs[1], TEST, draws=DRAWS)


def _row(results: Results, one: Result, other: Result, found: PairedRuns) -> list[Cell]:
    pooled = next(d for d in found.differences if (d.metric, d.aggregate) == ("accuracy", "pooled"))
    test: McNemar = found.mcnemar
    decided = pooled.low > 0 or pooled.high < 0
    return [
        Cell(spelled(one.place.method)),
        Cell(results.column(one.place) or MISSING),
        Cell(str(one.place.seed)),
        Cell(f"{100 * pooled.difference:+.1f}", strong=decided),
        Cell(f"{100 * pooled.low:+.1f} to {100 * pooled.high:+.1f}"),
        Cell(number(test.only_first)),
        Cell(number(test.only_second)),
        Cell(p_text(test.exact)),
    ]
