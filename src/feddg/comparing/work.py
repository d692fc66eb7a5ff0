"""What a plan comes to in a folder: which runs are complete, begun, kept elsewhere or missing."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from feddg.comparing.cells import PlannedCell, distinct, expand_plan
from feddg.comparing.kept_results import KeptResult, KeptResults
from feddg.comparing.known_results import asked_for, kept_files, results_of
from feddg.comparing.plan import Plan, load_plan
from feddg.comparing.pool import Task
from feddg.comparing.results import COMPARISON
from feddg.errors import RunError
from feddg.runs.execute import is_complete
from feddg.runs.folder import EXPERIMENT, drop_weights
from feddg.runs.prepare import cache_folder
from feddg.runs.provenance import ImagesNow, find_folder
from feddg.runs.reading import read_run
from feddg.storage import entries, is_file, replace_text, why


@dataclass(frozen=True)
class Work:
    """What a plan comes to in a folder.

    Attributes:
        plan: the plan.
        out: the folder of its runs.
        cells: all cells.
        folders: the run folder of every distinct experiment, by its id.
        missing: experiments without a complete run, in the order they will be run.
        kept: the file that keeps results beyond their folders; its runs are not missing.
        results: what is kept of experiments, by their id, there or in files of other tables; their
            runs are not missing either, and are copied into ``kept``.
        drop_weights: whether a run's weights are deleted once it is complete.
    """

    plan: Plan
    out: Path
    cells: Sequence[PlannedCell]
    folders: Mapping[str, Path]
    missing: Sequence[Task]
    kept: KeptResults | None = None
    results: Mapping[str, KeptResult] = field(default_factory=dict)
    drop_weights: bool = False

    @property
    def started(self) -> int:
        """How many of the missing runs will be continued."""
        checkpoints = (task.folder / "checkpoint" / "checkpoint.json" for task in self.missing)
        return sum(file.is_file() for file in checkpoints)

    def keep(self, experiment: str) -> None:
        """Keeps of the run of an experiment what is to be kept, if it is complete.

        It is added to the kept results, where there are some, and may lose its weights. Of a run
        that stands in another table, its row there is what is kept.
        """
        folder = self.folders[experiment]
        complete = is_complete(folder)
        if self.kept is not None:
            own = [cell for cell in self.cells if cell.experiment.id == experiment]
            lacking = self.kept.lacking(own)
            if lacking and (row := self.row(experiment)) is not None:
                self.kept.copy(lacking, row)
            elif lacking and complete:
                self.kept.add(lacking, read_run(folder))
        if complete and self.drop_weights:
            drop_weights(folder)

    def row(self, experiment: str) -> KeptResult | None:
        """What is kept of an experiment, in whatever table."""
        return self.results.get(experiment)

    def _is_elsewhere(self, experiment: str) -> bool:
        """Whether a row of kept results is all there is of an experiment."""
        return self.row(experiment) is not None and not is_complete(self.folders[experiment])

    def write(self) -> None:
        """Writes which run belongs to which cell, for reports."""
        plan = self.plan
        content = {
            "name": plan.name,
            "title": plan.title,
            "question": plan.question,
            "differences": plan.differences,
            "paper": plan.paper and plan.paper.model_dump(mode="json"),
            "cells": [
                {
                    "method": cell.method,
                    "scenario": cell.scenario,
                    "conditions": dict(cell.conditions),
                    "seed": cell.seed,
                    "folder": self.folders[cell.experiment.id].name,
                }
                | ({"kept": True} if self._is_elsewhere(cell.experiment.id) else {})
                for cell in self.cells
            ],
        }
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        try:
            replace_text(self.out / COMPARISON, text)
            replace_text(self.out / "plan.yaml", plan.to_yaml())
        except OSError as error:
            raise RunError(f"Cannot write into {self.out}: {why(error)}.") from None


def fixed_plan(
    plan: Plan | Path | str | Mapping[str, Any],
    out: Path | str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Plan, Path]:
    """Returns a plan with fields that win over everything it says, and its folder.

    Args:
        plan: a plan, its file, or its fields.
        out: the folder of the runs; ``comparisons/NAME`` by default.
        overrides: experiment fields that win over everything the plan says.

    Raises:
        ExperimentError: the plan is invalid.
    """
    fixed = load_plan(plan).fixed(overrides or {})
    return fixed, Path(out) if out is not None else Path("comparisons") / fixed.name


def prepare_work(
    plan: Plan | Path | str | Mapping[str, Any],
    out: Path | str | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    again: bool = False,
    cache: Path | None = None,
    kept: Path | None = None,
    known: Sequence[Path] = (),
    said: Plan | None = None,
    drop_weights: bool = False,
) -> Work:
    """Expands a plan and looks up what of it has been done.

    Args:
        plan: a plan, its file, or its fields; what it would try first has been tried.
        out: the folder of the runs; ``comparisons/NAME`` by default.
        overrides: experiment fields that win over everything the plan says.
        again: whether to start runs anew, beside the old ones, whose images were others; kept
            results of other images are replaced.
        cache: where hashes of images are remembered; the user's cache by default.
        kept: a CSV file of results; what it has is not run, what is complete is added to it.
        known: such files of other plans; what they have is not run either, and is copied to it.
        said: the plan as it stands in the folder, where ``plan`` has picked values in it.
        drop_weights: whether a run's weights are deleted once it is complete.

    Raises:
        ExperimentError: the plan holds an invalid experiment, or there is ``known`` and no
            ``kept``.
        RunError: images changed since a run began or was kept, or a file of results is damaged or
            not there.
    """
    fixed, folder = fixed_plan(plan, out, overrides)
    own, others = kept_files(kept, known)
    work = work_on(
        said or fixed, expand_plan(fixed), folder, again=again, cache=cache, kept=own, known=others
    )
    return replace(work, drop_weights=drop_weights)


def work_on(
    plan: Plan,
    cells: Sequence[PlannedCell],
    folder: Path,
    *,
    again: bool = False,
    cache: Path | None = None,
    kept: KeptResults | None = None,
    known: Sequence[KeptResults] = (),
) -> Work:
    """Looks up what of the cells of a plan has been done; see :func:`prepare_work`."""
    present = _present(folder)
    now = ImagesNow(cache or cache_folder())
    files = [kept, *known] if kept is not None else []
    results: dict[str, KeptResult] = {}
    asked = asked_for(cells) if files else {}
    for file in files:
        results = results_of(file, asked, now, own=file is kept, again=again) | results
    folders: dict[str, Path] = {}
    missing: list[Task] = []
    for experiment in distinct(cells):
        path = find_folder(experiment, folder, now, again=again, begun=present.get(experiment.id))
        folders[experiment.id] = path
        if experiment.id not in results and not is_complete(path):
            missing.append(Task(experiment, path))
    return Work(plan, folder, cells, folders, missing, kept, results)


def _present(out: Path) -> dict[str, Path]:
    """Run folders by the id at the end of their names, whatever stands before it."""
    if not out.is_dir():
        return {}
    return {
        path.name.rpartition("-")[2]: path
        for path in (out / entry.name for entry in entries(out, RunError))
        if is_file(path / EXPERIMENT)
    }
