"""Files besides the images that an experiment names, and a run reads again when it goes on.

A table of splits, a codec's weights: with another content under the same name, a run that goes on
would be another run. Pretrained weights are none of them: after the start they are the server's.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from feddg.data.fingerprint import hash_file
from feddg.experiment import Experiment
from feddg.methods.composition import build_method
from feddg.storage import Stamp, stamp


def named_files(experiment: Experiment) -> dict[str, str]:
    """Returns the hashes of the files that an experiment names, by its field, dotted.

    A file that is not there, or cannot be read, is left out: whoever needs it says so.
    """
    return methods_files(experiment) | _hashes({"data.split_file": experiment.data.split_file})


def methods_files(experiment: Experiment) -> dict[str, str]:
    """Returns the hashes of those that the method's settings name: every client reads them."""
    settings = build_method(experiment.method.name, experiment.method.settings).settings
    return _hashes({f"method.{name}": value for name, value in settings})


def _hashes(values: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for field, path in values.items():
        if isinstance(path, Path) and (now := stamp(path)) is not None:
            with suppress(OSError):
                found[field] = _hash(path, now)
    return found


@lru_cache(maxsize=64)
def _hash(path: Path, now: Stamp) -> str:
    return hash_file(path)
