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
from dataclasses import dataclass, replace
from pathlib import Path

from feddg.comparison.compare import Work, work_on
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
    trials_beside,
    tuning_beside,
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
        TuningFile.read(tuning_beside(files[0]))
        find_rows(files[0], table_cells(plan), ImagesNow(cache or cache_folder()), again=again)
    trials = [trials_beside(file) for file in files]
    trials = [file for file in trials if file == trials[0] or is_file(file)]
    trying = plan.model_copy(update={"name": f"{plan.name}, tuning", "title": None})
    files = results_files(trials)
    work = work_on(trying, cells, out / TRIALS, again=again, cache=cache, files=files)
    return replace(work, drop_weights=drop_weights)


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
    found = {
        combination: _measured(cells, work, SELECTION_RULES.find(plan.tune.rule))
        for combination, cells in trials_of(plan).items()
    }
    best = _best(found)
    rows = [
        TriedRow(
            method=combination.method,
            held_out=combination.held_out,
            values=dict(combination.values),
            metric=scores.metric,
            over=scores.over,
            score=scores.mean,
            trials=len(scores.values),
            constant=scores.constant,
            picked=combination in best,
        )
        for combination, scores in found.items()
    ]
    settings = plan.tune
    file = TuningFile(
        rule=settings.rule, rounds=settings.rounds, seeds=settings.seeds, tried=tuple(rows)
    )
    if write:
        with changing(work.out.parent / TUNING):
            replace_text(work.out.parent / TUNING, file.to_text())
    for first in results_files(results)[:1] if write else ():
        beside = tuning_beside(first)
        with changing(beside):
            replace_text(beside, file.after(TuningFile.read(beside)).to_text())
    emit(*file.diagnostics())
    return with_values(plan, best)


@dataclass(frozen=True)
class _Scores:
    """What the trials of a combination reached.

    Attributes:
        values: the metric on in-domain validation, by trial; None where there is none.
        metric: its name.
        over: how the domains became one number.
        constant: in how many trials the model is no better than a constant one; None where this is
            not on record.
    """

    values: Sequence[float | None]
    metric: str
    over: str
    constant: int | None

    @property
    def mean(self) -> float | None:
        """The mean over the trials; None unless all have a value."""
        known = [value for value in self.values if value is not None]
        return math.fsum(known) / len(known) if len(known) == len(self.values) else None


def _measured(cells: Sequence[Cell], work: Work, rule: SelectionRule) -> _Scores:
    """What the trials of one combination reached."""
    evaluate = cells[0].experiment.evaluate
    name = score_name(rule, evaluate.select_by, evaluate.select_over)
    numbers = [_numbers(cell, work) for cell in cells]
    found = [one[key] for one in numbers if (key := constant_name(rule)) in one]
    return _Scores(
        values=[one.get(name) for one in numbers],
        metric=evaluate.select_by,
        over=evaluate.select_over,
        constant=sum(map(bool, found)) if len(found) == len(numbers) else None,
    )


def _numbers(cell: Cell, work: Work) -> Mapping[str, float]:
    """The numbers of a trial; none if it is not complete."""
    if (row := work.known.get(cell.experiment.id)) is not None:
        return row.numbers
    folder = work.folders[cell.experiment.id]
    return rounded(measured_numbers(read_run(folder))) if is_complete(folder) else {}


def _best(found: Mapping[Combination, _Scores]) -> list[Combination]:
    """The combination with the best mean of each method and hold-out; of equal ones the first."""
    best: dict[tuple[str, str], tuple[float, Combination | None]] = {}
    for combination, scores in found.items():
        mean, key = scores.mean, (combination.method, combination.held_out)
        good = -math.inf if mean is None else preferred(mean, scores.metric)
        if good > best.get(key, (-math.inf, None))[0]:
            best[key] = (good, combination)
        best.setdefault(key, (-math.inf, None))
    for (method, held_out), (_, picked_one) in best.items():
        if picked_one is None:
            raise RunError(
                f"tune: in every combination of values for {method} a trial failed, or has no "
                f"value of what picks (evaluate.select_by), where {held_out} is held out; see above"
            )
    return [combination for _, combination in best.values() if combination is not None]
