"""The files of kept results that a comparison goes by: its own, other plans', nothing outdated."""

import logging
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from feddg.comparing.cells import PlannedCell
from feddg.comparing.kept_results import KeptResult, KeptResults, place_of
from feddg.comparing.made_with import are_the_same, others, would_be_made_with
from feddg.errors import ExperimentError, RunError
from feddg.experiment import Experiment
from feddg.runs.provenance import ImagesNow
from feddg.storage import is_file

log = logging.getLogger("feddg")


def kept_files(
    kept: Path | None, known: Sequence[Path] = ()
) -> tuple[KeptResults | None, list[KeptResults]]:
    """Reads a table's own file of kept results, and those of other plans.

    Raises:
        ExperimentError: results are known, and there is no file to copy them into.
        RunError: a file is damaged, or one of known results is not there.
    """
    if known and kept is None:
        raise ExperimentError(
            "known results are copied into the table's own file: name that, too (--kept FILE)"
        )
    for path in known:
        if not is_file(path):
            raise RunError(f"There is no file of known results {path}.")
    own = KeptResults.read(kept) if kept is not None else None
    return own, [KeptResults.read(path) for path in known]


@dataclass(frozen=True)
class Asked:
    """An experiment whose result is asked for: of many files, so its hash is computed once.

    Attributes:
        experiment: what is or would be run.
        hash: that of its results.
        places: where the results of its cells stand.
    """

    experiment: Experiment
    hash: str
    places: Set[Hashable]


def asked_for(cells: Sequence[PlannedCell]) -> dict[str, Asked]:
    """Returns what cells ask for, by the experiments' ids."""
    of: dict[str, list[PlannedCell]] = {}
    for cell in cells:
        of.setdefault(cell.experiment.id, []).append(cell)
    return {
        id: Asked(own[0].experiment, own[0].experiment.portable_id, set(map(place_of, own)))
        for id, own in of.items()
    }


def results_of(
    file: KeptResults,
    asked: Mapping[str, Asked],
    now: ImagesNow,
    *,
    own: bool = True,
    again: bool = False,
) -> dict[str, KeptResult]:
    """Returns the results of experiments that a file has, by the experiments' ids.

    A result is an experiment's where the settings are the same and so is what is in its images and
    files, wherever they lie. Where that is not known of both sides - nobody wrote it down, or
    images are not here - it is one in the same place of the table, or of the same paths. It
    is outdated where it would be one, and what is in them is something else now.

    Args:
        file: the file.
        asked: what is asked for, by the experiments' ids.
        now: tells the images.
        own: whether it is the table's own file, which outdated results are not to stay in; another
            table's is read only, and they are passed over with a warning.
        again: whether to leave outdated results out of the file.

    Raises:
        RunError: some of the table's own are outdated, and ``again`` is not said.
    """
    rows: dict[str, list[KeptResult]] = {}
    for result in file.results:
        rows.setdefault(result.experiment, []).append(result)
    found: dict[str, KeptResult] = {}
    changed: list[tuple[KeptResult, list[str]]] = []
    silent = 0
    for id, one in asked.items():
        candidates = rows.get(one.hash)
        if not candidates:
            continue
        today = would_be_made_with(one.experiment, now)
        for result in candidates:
            meant = result.experiment == id or result.place in one.places
            if are_the_same(result.made_with, today):
                found.setdefault(id, result)
            elif meant and (names := others(result.made_with, today)):
                changed.append((result, names))
            elif meant:
                found.setdefault(id, result)
                silent += not result.made_with
    if silent:
        log.warning(
            "%s does not say of %d of its results which images and files they were made with; they "
            "are taken to be the same",
            file.path,
            silent,
        )
    if changed and not again:
        first, names = changed[0]
        said = (
            f"{file.path}: {len(changed)} of its results came from other files than are there now "
            f"({', '.join(sorted(names))} of {first.method}, {first.column}, seed {first.seed}); "
        )
        if own:
            raise RunError(f"{said}put them back, or --again runs anew and replaces them")
        log.warning("%sthey are not taken", said)
    if own:
        file.leave_out([result for result, _ in changed])
    return found
