"""What a result was made with: its images and the files that its experiment names, as hashes.

An experiment's hash knows the names of files and not what is in them. A kept result may be met by
a folder that has changed since, or by another machine's, where the same files lie elsewhere.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from feddg.data.fingerprint import ImagesFile
from feddg.errors import DataError
from feddg.experiment import Experiment
from feddg.models.backbones import weights_digest
from feddg.runs.provenance import IMAGES, ImagesNow, named_files
from feddg.runs.reading import RunRecord
from feddg.settings import TORCHVISIONS
from feddg.storage import Stamp, stamp

_IMAGES, _WEIGHTS = "images", "model.weights"


def made_with(run: RunRecord) -> dict[str, str]:
    """Returns the hashes that a finished run wrote down: of its images, and by field of files.

    Raises:
        RunError: a file of the run is damaged.
    """
    images = ImagesFile.read(run.folder / IMAGES)
    found = {} if images is None else {_IMAGES: images.fingerprint()} | images.files
    weights = run.environment.get("weights")
    digest = weights.get("sha256") if isinstance(weights, dict) else None
    return found | ({_WEIGHTS: str(digest)} if digest else {})


def would_be_made_with(experiment: Experiment, now: ImagesNow) -> dict[str, str]:
    """Returns the same of a run that would begin now, without what is not there any more."""
    found = named_files(experiment)
    with suppress(DataError):  # whoever runs something will say so
        found[_IMAGES] = now.fingerprint(experiment)
    weights = experiment.model.weights
    if weights == TORCHVISIONS:
        found[_WEIGHTS] = weights
    elif weights is not None and (seen := stamp(Path(weights))) is not None:
        found[_WEIGHTS] = _digest(weights, seen)
    return found


def others(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns what has another content now; what is known of one side only is not compared."""
    return [name for name in before.keys() & now.keys() if before[name] != now[name]]


def are_the_same(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Whether something is known of both sides, and all that is known of one is the other's."""
    return bool(before) and before == now


@lru_cache(maxsize=16)
def _digest(weights: str, seen: Stamp) -> str:
    return str(weights_digest(weights))
