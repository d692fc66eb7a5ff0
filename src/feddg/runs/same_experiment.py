"""Whether a run's folder still says the experiment that its name and its checkpoint say."""

import re
from pathlib import Path

from feddg.errors import RunError
from feddg.experiment import Experiment
from feddg.runs.checkpoints import CHECKPOINTS, NEWEST, CheckpointIndex
from feddg.runs.folder import EXPERIMENT


def check_identity(folder: Path, experiment: Experiment) -> None:
    """Compares the experiment in a folder with the ids in the folder's name and checkpoint.

    Args:
        folder: the run's; a name that ends in no id says nothing.
        experiment: as it is read from the folder.

    Raises:
        RunError: somebody changed the one or the other, or ids were other ones when it was begun.
    """
    named = re.search(r"-([0-9a-f]{8})(\.\d+)?$", folder.resolve().name)
    found = {"name": named and named[1], "checkpoint": _trained(folder)}
    for where, id in found.items():
        if id and id != experiment.id:
            raise RunError(
                f"{folder / EXPERIMENT} says experiment {experiment.id}, but the folder's {where} "
                f"is of {id}: one of them was changed, or another version of feddg began it. Put "
                f"it back; otherwise `feddg run {EXPERIMENT}` makes a folder of its own"
            )


def _trained(folder: Path) -> str | None:
    try:
        index = CheckpointIndex.read(folder / CHECKPOINTS / NEWEST)
    except RunError:  # it is damaged; that is said when it is loaded
        return None
    return index.experiment if index else None
