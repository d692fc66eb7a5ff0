"""Accuracy of one run by split and domain."""

from collections.abc import Iterator, Mapping, Sequence

from feddg.records import ID_TEST, ID_VAL, SPLITS, TEST, VAL, EvaluationRow
from feddg.report.blocks import Cell, Column, Table
from feddg.report.finding_words import interval_words
from feddg.report.wording import MISSING, number, percent, readable
from feddg.runs.findings import accuracy_interval, mean_measured
from feddg.runs.reading import Evaluations, RunRecord, SelectionRule, rules_for

SPLIT_HEADINGS = {
    TEST: "Held-out test",
    VAL: "Held-out validation",
    ID_VAL: "In-domain validation",
    ID_TEST: "In-domain test",
}
MOST_DOMAINS = 12
Chosen = Mapping[SelectionRule, int | None]
"""The round that each rule chooses."""


def final_table(run: RunRecord, every_domain: bool = False) -> Table:
    """Accuracy by split and domain under each selection rule.

    Args:
        run: The run.
        every_domain: Show all domains of a split even when there are very many; otherwise a long
            list is cut to its mean, lowest and highest.
    """
    evaluations = run.evaluations
    chosen = {rule: rule.choose(evaluations) for rule in rules_for([evaluations])}
    columns = [Column("Split", numeric=False), Column("Domain", numeric=False), Column("Images")]
    columns += [Column(rule.name, _round_note(rule, round_)) for rule, round_ in chosen.items()]
    columns += [Column(heading, "final round") for heading in ("95 % interval", "Balanced")]
    columns.append(Column("Largest class", "of the images"))
    rows: list[list[Cell]] = []
    for split in SPLITS:
        part = _split_rows(evaluations, split, chosen, every_domain)
        rows += [[Cell(SPLIT_HEADINGS[split]), *row] for row in part]
    caption = (
        "Accuracy in percent. Each column named after a rule shows one and the same model, chosen "
        "by that rule; the underlined number made the choice. The test split never chooses. The "
        "interval is that of the final round's accuracy (Wilson), the balanced accuracy is the "
        "mean over classes, and the share of the largest class is what a constant model reaches."
    )
    return Table(columns, rows, caption, grouped=True)


def _round_note(rule: SelectionRule, round_: int | None) -> str:
    if round_ is None:
        return "no validation domain" if rule.split == VAL else "not evaluated"
    return f"round {round_}"


def _split_rows(
    evaluations: Evaluations, split: str, chosen: Chosen, every_domain: bool
) -> Iterator[list[Cell]]:
    domains = evaluations.domains(split)
    if len(domains) > 1:
        yield _mean_row(evaluations, split, chosen)
    names = {domain: readable(domain) for domain in domains}
    if len(domains) > MOST_DOMAINS and not every_domain:
        names = _extremes(evaluations, split)
    for domain, name in names.items():
        yield _domain_row(evaluations, split, domain, name, chosen, alone=len(domains) == 1)


def _mean_row(evaluations: Evaluations, split: str, chosen: Chosen) -> list[Cell]:
    last = evaluations.rounds[-1]
    domains, images = (
        evaluations.domains(split),
        sum(r.examples for r in evaluations.at(last, split)),
    )
    cells = [
        Cell(percent(rule.measure(evaluations, round_, split)), split == TEST, rule.split == split)
        for rule, round_ in chosen.items()
    ]
    beside = _beside_cells(evaluations.at(last, split))
    return [Cell(f"mean of {len(domains)} domains"), Cell(number(images)), *cells, *beside]


def _beside_cells(rows: Sequence[EvaluationRow]) -> list[Cell]:
    """What the final round's accuracy must be read beside: interval, balanced, largest class."""
    names = ("balanced_accuracy", "largest_class_share")
    beside = (percent(mean_measured(rows, name)) for name in names)
    return [Cell(interval_words(accuracy_interval(rows)) or MISSING), *map(Cell, beside)]


def _domain_row(
    evaluations: Evaluations,
    split: str,
    domain: str,
    name: str,
    chosen: Chosen,
    alone: bool,
) -> list[Cell]:
    found = [
        None if round_ is None else evaluations.of(rule.weights).get(round_, split, domain)
        for rule, round_ in chosen.items()
    ]
    images = next((row.examples for row in found if row), None)
    cells = [
        Cell(
            percent(row.accuracy if row else None),
            strong=alone and split == TEST,
            chose=alone and rule.split == split,
        )
        for rule, row in zip(chosen, found)
    ]
    last = evaluations.get(evaluations.rounds[-1], split, domain)
    return [Cell(name), Cell(number(images)), *cells, *_beside_cells([last] if last else [])]


def _extremes(evaluations: Evaluations, split: str) -> dict[str, str]:
    """The domains with the lowest and the highest accuracy in the last round, with their names."""
    rows = sorted(evaluations.at(evaluations.rounds[-1], split), key=lambda row: row.accuracy)
    if not rows:
        return {}
    lowest, highest = rows[0].domain, rows[-1].domain
    return {lowest: f"lowest: {readable(lowest)}", highest: f"highest: {readable(highest)}"}


def has_long_splits(evaluations: Evaluations) -> bool:
    """Whether ``final_table`` leaves domains out unless asked for all."""
    return any(len(evaluations.domains(split)) > MOST_DOMAINS for split in SPLITS)


def held_out_accuracy(run: RunRecord, rule: SelectionRule) -> float | None:
    """Held-out test accuracy (mean over domains) of the round that a rule chooses."""
    return rule.measure(run.evaluations, rule.choose(run.evaluations), TEST)


def rounds_text(run: RunRecord) -> str:
    """``50``, or ``17 of 50`` when not all rounds have been done."""
    done, planned = run.rounds_done, run.rounds_planned
    return str(done) if planned in (None, done) else f"{done} of {planned}"
