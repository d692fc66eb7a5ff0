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
    from feddg.attacks.attack import attack as attack
    from feddg.experiment import Experiment as Experiment
    from feddg.experiment import load_experiment as load_experiment
    from feddg.methods.base import Method as Method
    from feddg.methods.base import MethodSettings as MethodSettings
    from feddg.methods.base import RoundHook as RoundHook
    from feddg.methods.base import register as register
    from feddg.models.task import Task as Task
    from feddg.prediction.evaluate import decide as decide
    from feddg.prediction.evaluate import evaluate as evaluate
    from feddg.prediction.export import export_run as export_run
    from feddg.prediction.model import load_model as load_model
    from feddg.prediction.predict import predict as predict
    from feddg.prediction.predict import predict_files as predict_files
    from feddg.prediction.travel import travel as travel
    from feddg.prediction.validation import validate as validate
    from feddg.runs.execute import forget as forget
    from feddg.runs.reading import Run as Run
    from feddg.serving.server import serve as serve
    from feddg.simple import Federation as Federation

    __version__: str

_HOME = {
    "api": "compare resume run",
    "experiment": "Experiment load_experiment",
    "methods.base": "Method MethodSettings RoundHook register",
    "models.task": "Task",
    "runs.execute": "forget",
    "runs.reading": "Run",
    "simple": "Federation",
}
"""Where the core's names are; :mod:`feddg.readers` finds those of packages that read runs."""
__all__ = [*" ".join(_HOME.values()).split(), "__version__", "load_model", "predict", "travel"]


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
    for module, names in _HOME.items():
        if name in names.split():
            return getattr(import_module(f"feddg.{module}"), name)
    if not name.startswith("_"):
        from feddg.readers import find

        if (found := find(name)) is not None:
            return found
    raise AttributeError(f"module 'feddg' has no attribute {name!r}")
