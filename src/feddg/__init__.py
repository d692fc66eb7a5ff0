"""feddg: federated domain generalization.

Several sites train one image classifier together without sharing their images, and the model must
work at a new site with another kind of images.

    >>> import feddg
    >>> feddg.run(data="emoji", hold_out="mono").accuracy
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feddg import methods as methods
    from feddg.api import compare as compare
    from feddg.api import resume as resume
    from feddg.api import run as run
    from feddg.api import travel as travel
    from feddg.experiment import Experiment as Experiment
    from feddg.experiment import load_experiment as load_experiment
    from feddg.methods.base import Method as Method
    from feddg.methods.base import MethodSettings as MethodSettings
    from feddg.methods.base import RoundHook as RoundHook
    from feddg.methods.base import register as register
    from feddg.models.task import Task as Task
    from feddg.prediction.predict import predict as predict
    from feddg.runs.model import load_model as load_model
    from feddg.runs.reading import Run as Run
    from feddg.simple import Federation as Federation

    __version__: str

_HOME = {
    "Experiment": "feddg.experiment",
    "Federation": "feddg.simple",
    "Method": "feddg.methods.base",
    "MethodSettings": "feddg.methods.base",
    "RoundHook": "feddg.methods.base",
    "Run": "feddg.runs.reading",
    "Task": "feddg.models.task",
    "compare": "feddg.api",
    "load_experiment": "feddg.experiment",
    "load_model": "feddg.runs.model",
    "predict": "feddg.prediction.predict",
    "register": "feddg.methods.base",
    "resume": "feddg.api",
    "run": "feddg.api",
    "travel": "feddg.api",
}
HIGHER = {
    "model": "feddg.runs.model",
    "notebook": "feddg.report.notebook",
    "predict": "feddg.prediction.predict",
    "progress": "feddg.cli.progress",
    "report": "feddg.report.page",
}
"""Where what :mod:`feddg.views` asks for is."""
__all__ = [*sorted(_HOME), "__version__"]


def __getattr__(name: str) -> Any:
    # Importing torch takes seconds, and metadata a sixth of `feddg --help`: it must not wait.
    if name == "__version__":
        metadata = import_module("importlib.metadata")
        try:
            return metadata.version("feddg")
        except metadata.PackageNotFoundError:
            return "0"  # a source tree that was never installed
    if name == "methods":
        return import_module("feddg.methods")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'feddg' has no attribute {name!r}")
