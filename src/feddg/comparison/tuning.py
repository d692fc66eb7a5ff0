"""Tuning before a comparison: each method's values are picked on in-domain validation, then fixed.

A plan's ``tune`` section names fields and values. Every combination is tried for every method and
everything that the plan's columns hold out, and the one that does best on in-domain validation, by
what chooses rounds (``evaluate.select_by`` and ``select_over``), is the method's where this is held
out. These domains are not among the images of its trials at all: they never open them
(``data.leave_out``). Each choice is of its own trials alone, for the domain held out in one column
is trained on in the others.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from feddg.comparison.compare import Work, prepare_work
from feddg.comparison.plan import (
    Cell,
    Combination,
    Plan,
    table_cells,
    trials_of,
    with_values,
)
from feddg.comparison.results import (
    TUNING,
    TriedRow,
    TuningFile,
    changing,
    constant_name,
    find_rows,
    measured_numbers,
    results_files,
    rounded,
    score_name,
)
from feddg.diagnostics import emit
from feddg.errors import RunError
from feddg.runs.execute import is_complete
from feddg.runs.prepare import cache_folder
from feddg.runs.provenance import ImagesNow
from feddg.runs.reading import SELECTION_RULES, SelectionRule, preferred, read_run
from feddg.storage import is_file, replace_text

TRIALS = "tuning"


def prepare_trials(
    plan: Plan,
    out: Path,
    cache: Path | None = None,
    *,
    again: bool = False,
    results: Path | Sequence[Path] = (),
    drop_weights: bool = False,
) -> Work | None:
    """Returns what there is to try before a plan's table is run; None without a ``tune`` section.

    Args:
        plan: the plan.
        out: the folder of the comparison; trials go into a folder inside it.
        cache: where hashes of images are remembered; the user's cache by default.
        again: whether to start trials anew whose images were others.
        results: the table's results files; beside each stands that of its trials
            (``NAME.trials.csv``), and what these have is not tried again.
        drop_weights: whether a trial's weights are deleted once it is complete.

    Raises:
        ExperimentError: a field is unknown, or a trial is no valid experiment.
        RunError: images changed since a trial or a run of the table, or a file is damaged.
    """
    cells = [cell for cells in trials_of(plan).values() for cell in cells]
    if not cells:
        return None
    files = results_files(results)
    if files:  # a fault in the table's files is not to be found after the trials
        TuningFile.read(files[0].with_suffix(f".{TUNING}"))
        find_rows(files[0], table_cells(plan), ImagesNow(cache or cache_folder()), again=again)
    trials = [file.with_suffix(".trials.csv") for file in files]
    trials = [file for file in trials if file == trials[0] or is_file(file)]
    trying = plan.model_copy(update={"name": f"{plan.name}, tuning", "title": None})
    options: dict[str, Any] = {"again": again, "cache": cache, "drop_weights": drop_weights}
    return prepare_work(trying, out / TRIALS, cells=cells, results=trials, **options)


def picked(
    plan: Plan, work: Work, results: Path | Sequence[Path] = (), *, write: bool = True
) -> Plan:
    """Returns the plan with the values that did best in its trials, and writes ``tuning.json``.

    Args:
        plan: the plan.
        work: its trials, carried out.
        results: results files; beside the first, ``NAME.tuning.json`` is written, too, with what it
            says of other columns.
        write: whether to write at all.

    Raises:
        RunError: no value of a method could be measured, or a file cannot be written.
    """
    assert plan.tune is not None
    rule = SELECTION_RULES.find(plan.tune.rule)
    tried = {
        combination: _tried(combination, cells, work, rule)
        for combination, cells in trials_of(plan).items()
    }
    best = _best(tried)
    rows = [row.model_copy(update={"picked": one in best}) for one, row in tried.items()]
    settings = plan.tune
    file = TuningFile(
        rule=settings.rule, rounds=settings.rounds, seeds=settings.seeds, tried=tuple(rows)
    )
    if write:
        with changing(work.out.parent / TUNING):
            replace_text(work.out.parent / TUNING, file.to_text())
    for first in results_files(results)[:1] if write else ():
        beside = first.with_suffix(f".{TUNING}")
        with changing(beside):
            replace_text(beside, file.after(TuningFile.read(beside)).to_text())
    emit(*file.diagnostics())
    return with_values(plan, best)


def _tried(
    combination: Combination, cells: Sequence[Cell], work: Work, rule: SelectionRule
) -> TriedRow:
    """What the trials of a combination reached; not picked yet."""
    evaluate = cells[0].experiment.evaluate
    name = score_name(rule, evaluate.select_by, evaluate.select_over)
    numbers = [_numbers(cell, work) for cell in cells]
    scores = [one[name] for one in numbers if name in one]
    constant = [bool(one[key]) for one in numbers if (key := constant_name(rule)) in one]
    return TriedRow(
        method=combination.method,
        held_out=combination.held_out,
        values=dict(combination.values),
        metric=evaluate.select_by,
        over=evaluate.select_over,
        score=math.fsum(scores) / len(scores) if len(scores) == len(cells) else None,
        trials=len(cells),
        constant=sum(constant) if len(constant) == len(cells) else None,
        picked=False,
    )


def _numbers(cell: Cell, work: Work) -> Mapping[str, float]:
    """The numbers of a trial; none if it is not complete."""
    if (row := work.rows.get(cell.experiment.id)) is not None:
        return row.numbers
    folder = work.folders[cell.experiment.id]
    return rounded(measured_numbers(read_run(folder))) if is_complete(folder) else {}


def _best(tried: Mapping[Combination, TriedRow]) -> list[Combination]:
    """The combination with the best score of each method and hold-out; of equal ones the first."""
    groups: dict[tuple[str, str], list[Combination]] = {}
    for combination, row in tried.items():
        group = groups.setdefault((row.method, row.held_out), [])
        if row.score is not None and not math.isnan(row.score):
            group.append(combination)
    for (method, held_out), group in groups.items():
        if not group:
            raise RunError(
                f"tune: in every combination of values for {method} a trial failed, or has no "
                f"value of what picks (evaluate.select_by), where {held_out} is held out; see above"
            )

    def goodness(combination: Combination) -> float:
        row = tried[combination]
        return preferred(row.score or 0.0, row.metric)

    return [max(group, key=goodness) for group in groups.values()]
