"""The files of kept results that a comparison goes by: its own, other plans', nothing outdated."""

import logging
from collections.abc import Sequence
from pathlib import Path

from feddg.comparing.kept_results import KeptResults
from feddg.comparing.made_with import others, would_be_made_with
from feddg.errors import ExperimentError, RunError
from feddg.experiment import Experiment
from feddg.files import is_file
from feddg.runs.same_images import ImagesNow

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


def leave_out_outdated(
    file: KeptResults, experiments: Sequence[Experiment], now: ImagesNow, *, again: bool
) -> None:
    """Leaves out the results of these experiments whose images and files have changed since.

    Raises:
        RunError: there are some, and ``again`` is not said.
    """
    rows = file.experiments
    known = {e.id: would_be_made_with(e, now) for e in experiments if e.id in rows}
    own = [result for result in file.results if result.experiment in known]
    changed = [(r, names) for r in own if (names := others(r.made_with, known[r.experiment]))]
    silent = sum(not result.made_with for result in own)
    if silent:
        log.warning(
            "%s does not say of %d of its results which images and files they were made with (an "
            "earlier version wrote it); they are taken to be the same",
            file.path,
            silent,
        )
    if changed and not again:
        first, names = changed[0]
        raise RunError(
            f"{file.path}: {len(changed)} of its results came from other files than are there now "
            f"({', '.join(sorted(names))} of {first.method}, {first.column}, seed {first.seed}); "
            "put them back, or --again runs anew and replaces them"
        )
    file.leave_out([result for result, _ in changed])
