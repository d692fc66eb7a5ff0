"""Errors that a user can fix.

Every error caused by user input is one of these; the command line prints its message without a
traceback.
"""

import difflib
import re
import reprlib
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

EXTRAS = {
    "attacks": ("torchmetrics", "sklearn"),
    "dicom": ("pydicom",),
    "export": ("onnx", "onnxruntime", "onnxscript"),
    "flower": ("flwr", "httpx"),
    "heic": ("pillow_heif",),
    "huggingface": ("datasets",),
    "lora": ("peft",),
    "parquet": ("pyarrow",),
    "privacy": ("dp_accounting",),
    "secure": ("cryptography",),
    "serve": ("fastapi", "python_multipart", "uvicorn"),
    "slurm": ("submitit",),
    "tensorboard": ("tensorboard",),
    "tiff": ("tifffile", "imagecodecs"),
    "wandb": ("wandb",),
}
"""The modules that each extra of the package brings; ``pyproject.toml`` has their versions."""


class FeddgError(Exception):
    """A mistake or fault that a user can fix; its message names the cause and what to do."""


class DataError(FeddgError):
    """Raised for images, folders, splits or partitions that cannot be used with the settings."""


class ExperimentError(FeddgError):
    """Raised for settings that contradict each other or are out of range."""


class WeightsError(FeddgError):
    """Raised for a weights file that is missing, unreadable or of the wrong shape."""


class RunError(FeddgError):
    """Raised for a run folder that cannot be written, read or continued."""


class AdaptationError(FeddgError):
    """Raised for a test-time adaptation that is unknown or does not suit a model."""


class WorkerLost(RunError):
    """A process that a run is worked on by is gone; the run goes on when it is resumed."""

    def __str__(self) -> str:
        how = "the same command or call goes on from the last completed round"
        return f"{super().__str__()}; {how}, with any number of workers"


class NotEnoughUpdates(RunError):
    """Raised for a round with too few good updates; it is tried again with other clients."""


class TrainingDiverged(NotEnoughUpdates):
    """Raised for such a round if numbers of a client's training ran away."""


class BudgetSpent(RunError):
    """Raised before a release that would exceed the privacy budget; the run then ends."""


class ClientError(FeddgError):
    """Raised if a client cannot take part in this round; the round may continue without it."""


class Diverged(ClientError):
    """Raised if numbers of a client's training ran away; a lower learning rate may help."""


class MissingPackage(FeddgError):
    """Raised, before anything is computed, for a package that an extra of feddg brings."""


def is_installed(module: str) -> bool:
    """Whether a package can be imported; it is not imported here."""
    return sys.modules[module] is not None if module in sys.modules else bool(find_spec(module))


def need(extra: str, what: str, modules: Sequence[str] = (), otherwise: str = "") -> None:
    """Requires what an extra brings, before it is imported.

    Args:
        extra: the extra.
        what: what needs it, such as ``serving``; the subject of the message.
        modules: those that are needed; all of the extra by default.
        otherwise: what to do without it.

    Raises:
        MissingPackage: a module is missing; the message has the command that installs it.
    """
    for module in modules or EXTRAS[extra]:
        if not is_installed(module):
            raise MissingPackage(
                f"{what} needs the package {module}: pip install 'feddg[{extra}]'"
                f"{otherwise and f'; or {otherwise}'}"
            )


def in_words(error: BaseException) -> str:
    """Returns an error in one line: a FeddgError's message, for others also the place.

    The place is the innermost line in the caller's own code; empty if only this package and
    libraries are involved.
    """
    if isinstance(error, FeddgError):
        return str(error)
    text = " ".join(f"{type(error).__name__}: {error}".split())
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_own(frame.filename)]
    if not own:
        return text
    return f"{text} ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})"


def _is_own(file: str) -> bool:
    """Whether code is neither this package's nor a library's, nor made by one as it ran."""
    paths = sysconfig.get_paths()
    libraries = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders = [*libraries, str(Path(__file__).parent)]
    return not (file.startswith("<") or any(Path(file).is_relative_to(one) for one in folders))


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns ``" (did you mean 'x'?)"`` for the closest known word, or an empty text."""
    names = list(known)
    initials = "".join(part[:1] for part in re.split(r"[_\W]", word.lower()))  # learning_rate: lr
    alike = [name for name in names if len(initials) > 1 and name.lower() == initials]
    matches = alike or difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def field_fault(error: "ValidationError", fields: Mapping[str, Any] | None = None) -> str:
    """Returns a schema's first error in one line: ``lr: must be above 0 (got -1)``.

    Args:
        error: the error from pydantic.
        fields: pydantic's fields by name; for an unknown field the message then names the nearest
            and all beside it.
    """
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        *parents, name = map(str, fault["loc"])
        known: Any = fields
        for parent in parents:
            field = (known or {}).get(parent)
            known = getattr(getattr(field, "annotation", None), "model_fields", None)
        there_are = "" if known is None else f"; there are: {', '.join(known) or 'none'}"
        return f"unknown field {where!r}{nearest(name, known or ())}{there_are}"
    message = fault["msg"].removeprefix("Value error, ")
    # What a check of several fields was given is all of them: that tells nobody anything.
    got = "" if isinstance(fault["input"], Mapping) else f" (got {reprlib.repr(fault['input'])})"
    return f"{where}: {message}{got}" if where else f"{message}{got}"


@contextmanager
def schema_faults(
    kind: type[FeddgError], before: str = "", fields: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Turns pydantic's error in its block into one of ours, in one line; see :func:`field_fault`.

    Args:
        kind: the error to raise.
        before: what stands before the fault.
        fields: see :func:`field_fault`.
    """
    from pydantic import ValidationError

    try:
        yield
    except ValidationError as error:
        raise kind(f"{before}{field_fault(error, fields)}") from None


def first_names(names: Sequence[str], most: int = 5) -> str:
    """Returns ``a, b, c``; of more than ``most`` names the first, and the number of others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
