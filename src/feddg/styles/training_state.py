"""What an interrupted training goes on from: weights, moments of Adam, and the loss curve."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from feddg.errors import DataError
from feddg.storage import replace_bytes

CURVE_STEP = 25
"""Steps averaged into one row of the loss curve."""

_ADAM = ("step", "exp_avg", "exp_avg_sq")


@dataclass
class Trainee:
    """A network in training with its optimizer; of one that is frozen, nothing changes."""

    module: nn.Module
    optimizer: torch.optim.Adam

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Returns all that must be kept, under names that begin with ``prefix``."""
        found = {f"{prefix}.weight.{key}": t for key, t in self.module.state_dict().items()}
        for index, kept in self.optimizer.state_dict()["state"].items():
            found |= {f"{prefix}.adam.{index}.{name}": kept[name] for name in _ADAM}
        return found

    def restore(self, prefix: str, tensors: dict[str, Tensor]) -> None:
        """Takes back what :meth:`tensors` returned.

        Raises:
            KeyError: something is missing.
            RuntimeError: something does not fit.
        """
        keys = self.module.state_dict()
        self.module.load_state_dict({key: tensors[f"{prefix}.weight.{key}"] for key in keys})
        state = self.optimizer.state_dict()
        count = len(state["param_groups"][0]["params"])
        state["state"] = {
            index: {name: tensors[f"{prefix}.adam.{index}.{name}"] for name in _ADAM}
            for index in range(count)
            if f"{prefix}.adam.{index}.step" in tensors
        }
        self.optimizer.load_state_dict(state)


@dataclass
class TrainingState:
    """A training in the making.

    Attributes:
        trainees: the networks in training by name.
        curve: the loss terms of every step so far.
    """

    trainees: dict[str, Trainee]
    curve: list[list[float]]

    @property
    def step(self) -> int:
        """Steps taken."""
        return len(self.curve)

    def recent(self, terms: tuple[str, ...], end: int | None = None) -> dict[str, float]:
        """Returns the mean of each term over the last :data:`CURVE_STEP` steps before ``end``."""
        rows = self.curve[:end][-CURVE_STEP:]
        return {term: sum(column) / len(rows) for term, column in zip(terms, zip(*rows))}


def continue_from(out: Path, recipe: dict[str, Any], state: TrainingState) -> None:
    """Brings a new training to where the one in ``out`` was left, if there is one.

    Raises:
        DataError: ``out`` holds a training by another recipe, or a damaged file.
    """
    path = out / "state.safetensors"
    if not path.exists():
        return
    found, tensors = _read(path)
    if found != recipe:
        different = ", ".join(key for key in recipe if found.get(key) != recipe[key])
        raise DataError(
            f"{out} holds a training with other settings ({different}); "
            "choose another folder or delete it"
        )
    try:
        for name, trainee in state.trainees.items():
            trainee.restore(name, tensors)
        state.curve = tensors["curve"].tolist()
    except (KeyError, RuntimeError) as error:
        raise _damaged(path, error) from error


def save(out: Path, recipe: dict[str, Any], state: TrainingState, terms: tuple[str, ...]) -> None:
    """Writes state and curve, each replacing the last one whole."""
    tensors = {"curve": torch.tensor(state.curve, dtype=torch.float64)}
    for name, trainee in state.trainees.items():
        tensors |= trainee.tensors(name)
    write_tensors(out / "state.safetensors", tensors, {"recipe": json.dumps(recipe)})
    ends = range(CURVE_STEP, state.step + 1, CURVE_STEP)
    with (out / "loss.csv").open("w", newline="") as file:
        rows = [[end, *state.recent(terms, end).values()] for end in ends]
        csv.writer(file).writerows([["step", *terms], *rows])


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Replaces a weights file whole: an interruption leaves the old one."""
    whole = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
    replace_bytes(path, safetensors.torch.save(whole, metadata=metadata))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safetensors.safe_open(path, "pt") as file:
            recipe = json.loads(file.metadata()["recipe"])
            return recipe, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: not the state of a training ({error}); delete it")
