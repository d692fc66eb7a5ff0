"""The page of several runs side by side."""

from collections.abc import Callable, Sequence

from feddg.report import charts
from feddg.report.accuracy_section import held_out_accuracy, results_of_runs
from feddg.report.blocks import Block, Fact, Facts, Fold, Page, Prose, Section
from feddg.report.cost_section import cost_of_runs
from feddg.report.settings_section import differing_settings
from feddg.report.single_page import (
    key_facts,
    notices,
    pictures_section,
    result_sentence,
    run_sections,
    status_text,
    tested_on,
)
from feddg.report.wording import counted, listed, percent, percent_sign, spelled
from feddg.rows import TEST
from feddg.runs.reading import RunRecord
from feddg.runs.selection_rules import FINAL

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
        tags=[counted(len(runs), "run")],
        opening=[*_cautions(runs, labels), _accuracy_facts(runs, labels)],
        sections=[section for section in sections if section is not None],
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
    return f"{who}{tested_on(runs[0])}" if _same_test_domains(runs) else who


def _same_test_domains(runs: Sequence[RunRecord]) -> bool:
    return len({tuple(sorted(run.held_out(TEST))) for run in runs}) == 1


def _comparison_sentence(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    """Who did better and by how much, for as much as single runs can tell."""
    scores = [held_out_accuracy(run, FINAL) for run in runs]
    known = [(score, label) for score, label in zip(scores, labels) if score is not None]
    if len(known) < 2 or not _same_test_domains(runs):
        return "The runs side by side."
    ranked = sorted(known, key=lambda pair: -pair[0])
    (best, first), (next_best, second) = ranked[:2]
    if percent(best) == percent(next_best):
        return f"In the final round {first} and {second} recognise {percent_sign(best)} alike."
    return (
        f"In the final round {first} recognised {percent_sign(best)} of the held-out images, "
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
    return cautions


def _accuracy_facts(runs: Sequence[RunRecord], labels: Sequence[str]) -> Facts:
    return Facts(
        [
            Fact(
                label,
                percent_sign(held_out_accuracy(run, FINAL)),
                "held-out test accuracy, final round",
            )
            for run, label in zip(runs, labels)
        ]
    )


def _results_section(runs: Sequence[RunRecord], labels: Sequence[str]) -> Section:
    blocks: list[Block] = [results_of_runs(runs, labels)]
    if any(run.evaluations.rounds for run in runs):
        blocks.insert(0, charts.held_out_accuracy_of_runs(runs, labels))
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
