"""Every metric by domain, with the images behind it; and over domains, counted in two ways."""

import math
from collections.abc import Iterator, Sequence

from feddg.comparison.results import Results
from feddg.evaluation.accuracy import FEW
from feddg.evaluation.metrics import METRICS
from feddg.records import SPLITS, TEST
from feddg.report.accuracy_section import MOST_DOMAINS, SPLIT_HEADINGS
from feddg.report.blocks import Block, Cell, Column, Prose, Section, Table
from feddg.report.metric_words import AGGREGATE_WORDS, metric_title
from feddg.report.wording import MISSING, number, percent, readable, spelled
from feddg.runs.reading import FINAL, Evaluations, RunRecord


def metrics_section(run: RunRecord) -> Section | None:
    """Every metric of the final round's model; None where only accuracies were written."""
    evaluations = run.evaluations
    names = _names([evaluations])
    if len(names) < 2:
        return None
    rows = [
        [Cell(SPLIT_HEADINGS[split]), *row]
        for split in SPLITS
        for row in _split_rows(evaluations, split, names, _class_names(run))
    ]
    columns = [Column("Split", numeric=False), Column("Domain", numeric=False), Column("Images")]
    columns += [Column(metric_title(name)) for name in names]
    columns += [Column("Smallest class", "images", numeric=False)]
    blocks: list[Block] = [Table(columns, rows, _caption(), grouped=True)]
    if (warning := _few_images(run)) is not None:
        blocks.insert(0, Prose(warning, notice=True))
    return Section("Metrics", blocks)


def compared_metrics(results: Results) -> Table | None:
    """Every metric of every method on held-out test domains, final round, means over runs."""
    runs = [result.run.evaluations for result in results.results]
    names = _names(runs)
    if len(names) < 2:
        return None
    rows = [
        [
            Cell(spelled(method)),
            Cell(words),
            *(Cell(percent(_over_runs(results, method, name, aggregate))) for name in names),
        ]
        for method in results.methods
        for aggregate, words in AGGREGATE_WORDS.items()
    ]
    heads = [Column("Method", numeric=False), Column("Over domains", numeric=False)]
    heads += [Column(metric_title(name)) for name in names]
    caption = (
        "Held-out test domains after the final round, percent, mean over all runs of a method "
        f"that have the number. {_caption()}"
    )
    return Table(heads, rows, caption, grouped=True)


def _over_runs(results: Results, method: str, metric: str, aggregate: str) -> float | None:
    found = [
        result.run.evaluations.value(result.rounds[FINAL.name], TEST, metric, aggregate)
        for result in results.of(method)
    ]
    known = [value for value in found if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(found) else None


def _names(evaluations: Sequence[Evaluations]) -> list[str]:
    known = {name for one in evaluations for split in SPLITS for name in one.metrics(split)}
    return [name for name in METRICS if name in known] + sorted(known - METRICS.keys())


def _class_names(run: RunRecord) -> Sequence[str]:
    return run.clients.classes if run.clients is not None else ()


def _split_rows(
    evaluations: Evaluations, split: str, names: Sequence[str], classes: Sequence[str]
) -> Iterator[list[Cell]]:
    last = evaluations.rounds[-1]
    measured = evaluations.at(last, split)
    if len(measured) > 1:
        images = number(sum(row.examples for row in measured))
        for aggregate, words in AGGREGATE_WORDS.items():
            values = [evaluations.value(last, split, name, aggregate) for name in names]
            shown = [Cell(percent(value), strong=split == TEST) for value in values]
            yield [Cell(f"{words} ({len(measured)})"), Cell(images), *shown, Cell("")]
    for row in measured if len(measured) <= MOST_DOMAINS else []:
        values = [row.metric(name) for name in names]
        support = evaluations.support(split, row.domain)
        yield [
            Cell(readable(row.domain)),
            Cell(number(row.examples)),
            *(Cell(percent(value)) for value in values),
            Cell(_smallest(support, classes)),
        ]


def _smallest(support: Sequence[int] | None, classes: Sequence[str]) -> str:
    """The class with the fewest images, and how many have none."""
    if not support:
        return MISSING
    seen = [(count, index) for index, count in enumerate(support) if count]
    absent = len(support) - len(seen)
    parts = []
    if seen:
        count, index = min(seen)
        name = readable(classes[index]) if index < len(classes) else str(index)
        parts.append(f"{name}: {number(count)}")
    if absent:
        parts.append(f"{number(absent)} of {number(len(support))} classes without any")
    return "; ".join(parts)


def _few_images(run: RunRecord) -> str | None:
    """Says which test domains have classes with few images or none."""
    told = []
    last = run.evaluations.rounds[-1]
    for row in run.evaluations.at(last, TEST):
        support = run.evaluations.support(TEST, row.domain) or []
        thin = sum(count < FEW for count in support)
        if thin:
            told.append(f"{readable(row.domain)} ({number(thin)} of {number(len(support))})")
    if not told:
        return None
    more = f" and {len(told) - 3} more domains" if len(told) > 3 else ""
    return (
        f"Some classes have fewer than {FEW} held-out test images or none: "
        f"{', '.join(told[:3])}{more}. Balanced accuracy, macro-F1 and AUROC move by much with "
        "single images there, and leave out classes without images."
    )


def _caption() -> str:
    return (
        "Percent. Mean of domains counts each domain once, pooled counts each image once; which "
        "one a paper prints can change who wins. AUROC and ECE (expected calibration error, lower "
        "is better) need probabilities of all images together and are not pooled."
    )
