"""Tuning before a comparison: chooses each method's values on in-domain validation.

A plan's ``tune`` section names fields and values. Every combination is tried for every method and
every set of held-out domains in the columns. The best one on in-domain validation, by the criterion
for rounds (``evaluate.select_by`` and ``select_over``), is used in these columns. Trials never open
the images of the held-out domains (``data.leave_out``). Each set of held-out domains has its own
trials, because a domain held out in one column is trained on in others.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from feddg.comparison.compare import Comparison, prepare_comparison
from feddg.comparison.plan import Cell, Plan, combinations, table_cells, trials_of, with_values
from feddg.comparison.results_file import changing, find_rows
from feddg.comparison.tuning import TUNING, TriedRow, TuningFile
from feddg.diagnostics import emit
from feddg.errors import RunError
from feddg.records import CONSTANT, ID_VAL
from feddg.runs.prepare import cache_folder
from feddg.runs.provenance import ImagesNow
from feddg.runs.table import SELECTION_RULES, SelectionRule, preferred
from feddg.settings import grouped
from feddg.storage import is_file, replace_text

TRIALS = "tuning"


def prepare_trials(
    plan: Plan,
    out: Path,
    cache: Path | None = None,
    *,
    again: bool = False,
    results: Sequence[Path] = (),
    drop_weights: bool = False,
) -> Comparison | None:
    """Returns the trials to run before a plan's table; None without a ``tune`` section.

    Args:
        plan: the plan.
        out: the folder of the comparison; trials go into a folder inside it.
        cache: where image hashes are stored; the user's cache by default.
        again: whether to repeat trials whose images have changed.
        results: the table's results files. Beside each is the file of its trials
            (``NAME.trials.csv``); trials found there are not repeated.
        drop_weights: whether a trial's weights are deleted once it is complete.

    Raises:
        ExperimentError: a field is unknown, or a trial is not a valid experiment.
        RunError: images have changed since a trial or run, or a file is damaged.
    """
    cells = trials_of(plan)
    if not cells:
        return None
    if results:  # a fault in the table's files is not to be found after the trials
        TuningFile.read(results[0].with_suffix(f".{TUNING}"))
        find_rows(results[0], table_cells(plan), ImagesNow(cache_folder(cache)), again=again)
    trials = [file.with_suffix(".trials.csv") for file in results]
    return prepare_comparison(
        plan.model_copy(update={"name": f"{plan.name}, tuning", "title": None, "budgets": ()}),
        out / TRIALS,
        cells=cells,
        results=[file for file in trials if file == trials[0] or is_file(file)],
        again=again,
        cache=cache,
        drop_weights=drop_weights,
    )


def picked(
    plan: Plan, trials: Comparison, results: Sequence[Path] = (), *, write: bool = True
) -> Plan:
    """Returns the plan with the best values of its trials, and writes ``tuning.json``.

    Args:
        plan: the plan.
        trials: its completed trials.
        results: results files; ``NAME.tuning.json`` is also written beside the first, merged with
            choices for other columns.
        write: whether to write files.

    Raises:
        RunError: no value of a method could be measured, or a file cannot be written.
    """
    tune = plan.tune
    assert tune is not None
    rule = SELECTION_RULES.find(tune.rule)
    pairs = [(_tried(cells, trials, rule), cells[0]) for cells in combinations(trials.cells)]
    groups = grouped(((row.method, row.held_out), (row, cell)) for row, cell in pairs)
    best = [_best(tried) for tried in groups.values()]
    rows = [
        row.model_copy(update={"picked": cell in best})
        for tried in groups.values()
        for row, cell in tried
    ]
    file = TuningFile(rule=tune.rule, rounds=tune.rounds, seeds=tune.seeds, tried=tuple(rows))
    own, beside = trials.folder.parent / TUNING, [f.with_suffix(f".{TUNING}") for f in results[:1]]
    for path in [own, *beside] if write else ():
        with changing(path):
            earlier = None if path == own else TuningFile.read(path)
            replace_text(path, file.after(earlier).to_text())
    emit(*file.diagnostics())
    return with_values(plan, best)


def _tried(cells: Sequence[Cell], trials: Comparison, rule: SelectionRule) -> TriedRow:
    """Returns the result of all trials of the same values, not marked as chosen."""
    evaluate, privacy = cells[0].experiment.evaluate, cells[0].experiment.privacy
    over = evaluate.select_over
    tables = [row.table.where(rule=rule.name) for cell in cells for row in trials.rows_of(cell)]
    of = {"split": ID_VAL, "over": over, "metric": evaluate.select_by}
    scores = [number.value for table in tables for number in table.where(**of)]
    constant = [bool(flag.value) for table in tables for flag in table.where(metric=CONSTANT)]
    return TriedRow(
        method=cells[0].method,
        held_out=cells[0].column,
        values={name: text for name, _, text in cells[0].tried},
        metric=evaluate.select_by,
        over=over,
        score=math.fsum(scores) / len(scores) if len(scores) == len(cells) else None,
        trials=len(cells),
        constant=sum(constant) if len(constant) == len(cells) else None,
        picked=False,
        epsilons={f"privacy.{n}": value for n, value in privacy if n.endswith("epsilon") and value},
    )


def _best(tried: Sequence[tuple[TriedRow, Cell]]) -> Cell:
    """Returns a trial of the values with the best score; the first of equal ones."""
    measured = [
        (preferred(row.score, row.metric), cell)
        for row, cell in tried
        if row.score is not None and not math.isnan(row.score)
    ]
    if not measured:
        row = tried[0][0]
        raise RunError(
            f"tune: in every combination of values for {row.method} a trial failed, or has no "
            f"value of what picks (evaluate.select_by), where {row.held_out} is held out; see above"
        )
    return max(measured, key=lambda pair: pair[0])[1]
