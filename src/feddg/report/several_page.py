"""The page of several runs side by side."""

from collections.abc import Callable, Sequence

from feddg.report.accuracy_section import held_out_accuracy, results_of_runs
from feddg.report.blocks import Block, Fact, Facts, Fold, Page, Prose, Section
from feddg.report.cost_section import cost_of_runs
from feddg.report.finding_words import finding_sentence, interval_words, remark_words
from feddg.report.glossary import glossary
from feddg.report.headline import (
    data_tags,
    finding_sentences,
    found_in,
    key_facts,
    notices,
    on_data,
    result_sentence,
    standing_of,
    status_text,
    tested_on,
)
from feddg.report.round_charts import held_out_accuracy_of_runs
from feddg.report.settings_section import differing_settings
from feddg.report.single_page import pictures_section, run_sections
from feddg.report.wording import counted, listed, percent, percent_sign, spelled
from feddg.rows import TEST
from feddg.runs.findings import Finding, movement, unsteady
from feddg.runs.reading import RunRecord, served_by_all

MOST_NAMED = 4
FEW_SETTINGS = 10


def comparison_page(runs: Sequence[RunRecord]) -> Page:
    """Several runs: their results and costs side by side, then each run in full."""
    labels = run_labels(runs)
    sections = [
        _results_section(runs, labels),
        pictures_section(*runs),
        Section("Cost", [cost_of_runs(runs, labels)]),
        _settings_section(runs, labels),
        _runs_section(runs, labels),
    ]
    return Page(
        title=_title(runs, labels),
        lead=_comparison_sentence(runs, labels),
        tags=[counted(len(runs), "run"), *data_tags(runs)],
        opening=[*_cautions(runs, labels), _accuracy_facts(runs, labels)],
        sections=[*(section for section in sections if section is not None), glossary()],
    )


def run_labels(runs: Sequence[RunRecord]) -> list[str]:
    """The shortest names that tell the runs apart: method, experiment name, folder, or number."""
    choices: tuple[Callable[[RunRecord], str], ...] = (
        lambda run: spelled(run.method),
        lambda run: run.name,
        lambda run: run.folder.name,
    )
    for choice in choices:
        labels = [choice(run) for run in runs]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{spelled(run.method)} ({number})" for number, run in enumerate(runs, start=1)]


def _title(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    who = " against ".join(labels) if len(labels) <= 2 else listed(labels)
    who = who if len(labels) <= MOST_NAMED else counted(len(labels), "run")
    where = on_data(runs)
    return f"{who}{where}{tested_on(runs[0])}" if _same_test_domains(runs) else f"{who}{where}"


def _same_test_domains(runs: Sequence[RunRecord]) -> bool:
    return len({tuple(sorted(run.held_out(TEST))) for run in runs}) == 1


def _comparison_sentence(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    """Who did better and by how much, for as much as single runs can tell."""
    rule = served_by_all(runs)
    scores = [held_out_accuracy(run, rule) for run in runs]
    # What speaks against a number stands right behind the name it belongs to.
    remarks = (remark_words(found_in(run)) for run in runs)
    named = [f"{label}{remark}" for label, remark in zip(labels, remarks)]
    known = [(score, label) for score, label in zip(scores, named) if score is not None]
    if len(known) < 2 or not _same_test_domains(runs):
        return "The runs side by side."
    ranked = sorted(known, key=lambda pair: -pair[0])
    (best, first), (next_best, second) = ranked[:2]
    if percent(best) == percent(next_best):
        return f"{first} and {second} recognise {percent_sign(best)} alike, {rule.when}."
    return (
        f"{first} recognised {percent_sign(best)} of the held-out images {rule.when}, "
        f"{percent(best - next_best)} points more than {second} ({percent_sign(next_best)}). These "
        "are single runs: repeat them with other seeds before trusting a small difference."
    )


def _cautions(runs: Sequence[RunRecord], labels: Sequence[str]) -> list[Prose]:
    cautions = []
    if not _same_test_domains(runs):
        text = "These runs hold out different domains, so their accuracies do not compare directly."
        cautions.append(Prose(text, notice=True))
    open_runs = [
        f"{label} ({status_text(run)}{f': {run.error}' if run.error else ''})"
        for run, label in zip(runs, labels)
        if run.status != "completed"
    ]
    if open_runs:
        text = (
            f"Not completed: {listed(open_runs)}. Their “final round” is the last one evaluated "
            "so far."
        )
        cautions.append(Prose(text, notice=True))
    for run, label in zip(runs, labels):
        sentences = finding_sentences(run)
        cautions += [Prose(f"{label}: {sentence}", notice=True) for sentence in sentences]
    if (finding := _unsteady(runs)) is not None:
        cautions.append(Prose(finding_sentence(finding), notice=True))
    return cautions


def _unsteady(runs: Sequence[RunRecord]) -> Finding | None:
    """Whether rounds move more than the two best runs differ."""
    scored = [
        (score, run)
        for run in runs
        if (score := held_out_accuracy(run, served_by_all(runs))) is not None
    ]
    best = sorted(scored, key=lambda pair: -pair[0])[:2]
    moved = [move for _, run in best if (move := movement(run.evaluations)) is not None]
    if len(best) < 2 or len(moved) < 2 or not _same_test_domains(runs):
        return None
    return unsteady(sum(moved) / 2, best[0][0] - best[1][0])


def _accuracy_facts(runs: Sequence[RunRecord], labels: Sequence[str]) -> Facts:
    return Facts(
        [
            Fact(
                label,
                percent_sign(held_out_accuracy(run, run.served)),
                _accuracy_note(run),
            )
            for run, label in zip(runs, labels)
        ]
    )


def _accuracy_note(run: RunRecord) -> str:
    at = standing_of(run)
    note = f"held-out test accuracy, {run.served.name.lower()}"
    if at is None:
        return note
    balanced = f"; balanced {percent_sign(at.balanced)}" if at.balanced is not None else ""
    return f"{note}; 95 % interval {interval_words(at.accuracy)}{balanced}"


def _results_section(runs: Sequence[RunRecord], labels: Sequence[str]) -> Section:
    blocks: list[Block] = [results_of_runs(runs, labels)]
    if any(run.evaluations.rounds for run in runs):
        blocks.insert(0, held_out_accuracy_of_runs(runs, labels))
    return Section("Accuracy", blocks)


def _settings_section(runs: Sequence[RunRecord], labels: Sequence[str]) -> Section:
    table = differing_settings(runs, labels)
    if table is None:
        return Section("What differs", [Prose("The runs were made with the same settings.")])
    few = len(table.rows) <= FEW_SETTINGS
    title = f"{len(table.rows)} settings"
    return Section("What differs", [table if few else Fold(title, [table])])


def _runs_section(runs: Sequence[RunRecord], labels: Sequence[str]) -> Section:
    folds = [
        Fold(f"{label}: {status_text(run)}", _whole_run(run)) for run, label in zip(runs, labels)
    ]
    return Section("Each run in full", folds)


def _whole_run(run: RunRecord) -> list[Block]:
    opening: list[Block] = [Prose(result_sentence(run)), *notices(run), key_facts(run)]
    return [*opening, *run_sections(run, with_pictures=False)]
