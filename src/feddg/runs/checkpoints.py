"""The checkpoint: a run after its last completed round.

``checkpoint.json`` is its index: it names the files of the server's state and of what clients
remember, with their checksums. New files are written beside those it names, then the index is
renamed into place: a process killed at any moment leaves one whole checkpoint.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, NonNegativeInt
from safetensors import SafetensorError, safe_open

from feddg.errors import RunError
from feddg.messages import Message, Weights
from feddg.methods.base import State
from feddg.records import JsonFile
from feddg.storage import checksum, is_file, why

CHECKPOINTS, NEWEST = "checkpoint", "checkpoint.json"
DROPPED = "weights-dropped"
"""A file beside the index of a run whose weights were deleted when it was complete."""

MODEL_KEY = "models/"
"""What the checksums' names of kept models begin with."""
_ORDER = "order"
_FileName = Annotated[str, Field(pattern=r"^[a-z0-9-]+\.safetensors$")]


@dataclass
class Checkpoint:
    """A run after some round: the server's state and what clients remember.

    Attributes:
        state: the server's.
        memories: by client.
        models: files in ``models/`` by the rule that chose them.
    """

    state: State
    memories: dict[int, Weights]
    models: Mapping[str, str] = field(default_factory=dict)


class CheckpointIndex(JsonFile):
    """What a checkpoint consists of.

    Attributes:
        round: the last completed round, 0 after the setup.
        rounds: the rounds planned.
        state: file of the server's state.
        agreed: scalars of what the setup agreed on; None where it agreed on nothing.
        memories: files of what clients remember, by the client's id.
        models: files in ``models/``, by the rule that chose them.
        experiment: the experiment's id.
        checksums: CRC-32 of every file, by name.
        checksum: CRC-32 of this index without it.
    """

    model_config = ConfigDict(ser_json_inf_nan="constants")

    round: NonNegativeInt
    rounds: NonNegativeInt = 0
    state: _FileName
    agreed: dict[str, Any] | None
    memories: dict[NonNegativeInt, _FileName]
    models: dict[str, _FileName] = Field(default_factory=dict)
    experiment: str
    checksums: dict[str, int]
    checksum: int = 0

    @property
    def files(self) -> set[str]:
        """Names of all its files."""
        return {self.state, *self.memories.values()}

    def sealed(self) -> Self:
        """Returns the index with its own checksum."""
        return self.model_copy(update={"checksum": self._own_checksum()})

    @classmethod
    def read_whole(cls, path: Path) -> Self:
        """Reads an index and compares it with its checksum.

        Raises:
            RunError: it is missing or damaged.
        """
        index = cls.read(path)
        if index is None:
            raise RunError(f"{path} is missing.")
        if index.checksum != index._own_checksum():
            raise RunError(f"{path} is damaged: its checksum is another one.")
        return index

    def load(self, folder: Path, names: Iterable[str]) -> dict[str, Weights]:
        """Returns the tensors of some of its files, compared with their checksums.

        Raises:
            RunError: a file is missing or damaged.
        """
        return {name: self._checked(folder / name, _read_copies) for name in names}

    def load_model(self, folder: Path, file: str) -> Weights:
        """Returns the weights of a kept model in ``folder``.

        Raises:
            RunError: the file is missing or damaged.
        """
        return self._checked(folder / file, _read_copies, f"{MODEL_KEY}{file}")

    def load_part(self, folder: Path, prefix: str) -> Weights:
        """Returns the tensors of the state under a prefix such as ``weights/``, without it.

        Raises:
            RunError: the file is missing or damaged.
        """
        return self._checked(folder / self.state, lambda path: _read_part(path, prefix))

    def _checked(
        self, path: Path, read: Callable[[Path], Weights], key: str | None = None
    ) -> Weights:
        try:
            if not is_file(path):
                if is_file(path.parent.parent / CHECKPOINTS / DROPPED):
                    raise RunError(
                        f"{path.parent.parent} keeps no weights: they were deleted when it was "
                        "complete (--drop-weights). Run its experiment.yaml in another folder"
                    )
                raise RunError(f"{path} is missing.")
            if checksum(path) != self.checksums.get(key or path.name):
                raise RunError(f"{path} is damaged: its checksum is another one.")
            return read(path)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise RunError(f"{path} is damaged: {why(error)}.") from None

    def _own_checksum(self) -> int:
        return zlib.crc32(self.model_dump_json(exclude={"checksum"}).encode())


class Checkpoints:
    """The checkpoint of a run folder, open for writing.

    Args:
        folder: where it is.
        write_tensors: writes a file of tensors with metadata, by its name.
        write_index: writes an index, by its name.
        models: folder of the models that rules chose.
    """

    def __init__(
        self,
        folder: Path,
        write_tensors: Callable[[str, Weights, dict[str, str]], None],
        write_index: Callable[[str, JsonFile], None],
        models: Path,
    ) -> None:
        self._folder, self._models = folder, models
        self._write_tensors, self._write_index = write_tensors, write_index
        self._index: CheckpointIndex | None = None

    @property
    def models(self) -> set[str]:
        """Names of the model files that it needs."""
        return set(self._index.models.values()) if self._index else set()

    def save(
        self,
        state: State,
        memories: dict[int, Weights],
        changed: set[int],
        experiment: str,
        models: Mapping[str, str],
    ) -> None:
        """Writes the state after a round; the one before stays until this one is whole.

        Args:
            state: the server's state.
            memories: what clients remember.
            changed: clients whose memory differs from the previous checkpoint.
            experiment: the experiment's id.
            models: files in ``models/`` that count now, by the rule that chose them.
        """
        before = self._index
        files = dict(before.memories) if before else {}
        sums = dict(before.checksums) if before else {}
        for id in sorted(changed):
            files[id] = f"memory-{id}-{state.round}.safetensors"
            self._write_tensors(files[id], memories[id], _in_order(memories[id]))
        name = f"state-{state.round}.safetensors"
        tensors = _tensors(state)
        self._write_tensors(name, tensors, _in_order(tensors))
        new = {name, *(files[id] for id in changed)}
        present = {name, *files.values()}
        for file in present:
            if file in new or file not in sums:
                sums[file] = checksum(self._folder / file)
        for file in models.values():
            key = f"{MODEL_KEY}{file}"
            present.add(key)
            if key not in sums:
                sums[key] = checksum(self._models / file)
        index = CheckpointIndex(
            round=state.round,
            rounds=state.rounds,
            state=name,
            agreed=None if state.agreed is None else state.agreed.scalars,
            memories=files,
            models=dict(models),
            experiment=experiment,
            checksums={file: sums[file] for file in sorted(present)},
        ).sealed()
        self._write_index(NEWEST, index)
        self._index = index
        for left in self._folder.iterdir():
            if left.name not in {NEWEST, *index.files}:
                with suppress(OSError):
                    left.unlink()

    def load(self) -> Checkpoint | None:
        """Returns the checkpoint, or None if none was ever written.

        Raises:
            RunError: it is damaged.
        """
        path = self._folder / NEWEST
        try:
            if not is_file(path):
                return None
            index = CheckpointIndex.read_whole(path)
            checkpoint = self._loaded(index)
        except RunError as error:
            if is_file(self._folder / DROPPED):
                raise
            raise RunError(
                f"{error} The run cannot go on without it; delete {self._folder.parent} to start "
                "again."
            ) from None
        self._index = index
        return checkpoint

    def _loaded(self, index: CheckpointIndex) -> Checkpoint:
        tensors = index.load(self._folder, index.files)
        memories = {id: tensors[name] for id, name in index.memories.items()}
        parts = tensors[index.state]
        agreed = None
        if index.agreed is not None:
            agreed = Message(_under("agreed/", parts), index.agreed)
        weights, extras = _under("weights/", parts), _under("extras/", parts)
        state = State(weights, extras, agreed, index.round, index.rounds)
        return Checkpoint(state, memories, index.models)


def newest_index(folder: Path) -> CheckpointIndex:
    """Returns the index of a run folder's checkpoint; only reads.

    Raises:
        RunError: there is none, or it is damaged.
    """
    path = folder / CHECKPOINTS / NEWEST
    if not is_file(path):
        raise RunError(f"{folder} holds no whole checkpoint: there is no {path}.")
    return CheckpointIndex.read_whole(path)


def checkpoint_weights(folder: Path, prefix: str = "weights/") -> Weights:
    """Returns the global weights in a run folder's checkpoint; only reads.

    Args:
        folder: the run's.
        prefix: of other tensors of the checkpoint, which are returned by the rest of their names.

    Raises:
        RunError: there is no whole checkpoint.
    """
    return newest_index(folder).load_part(folder / CHECKPOINTS, prefix)


def checkpoint_memories(folder: Path) -> dict[int, Weights]:
    """Returns what clients remember in a run folder's checkpoint, by id; only reads.

    It is empty where clients remember nothing, or keep it to themselves on a network.

    Raises:
        RunError: there is no whole checkpoint.
    """
    index = newest_index(folder)
    tensors = index.load(folder / CHECKPOINTS, index.memories.values())
    return {id: tensors[name] for id, name in index.memories.items()}


def _tensors(state: State) -> Weights:
    agreed = (state.agreed or Message()).tensors
    parts = {"weights": state.weights, "extras": state.extras, "agreed": agreed}
    return {f"{part}/{key}": tensor for part, own in parts.items() for key, tensor in own.items()}


def _under(prefix: str, tensors: Weights) -> Weights:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _in_order(tensors: Weights) -> dict[str, str]:
    """Returns the metadata that keeps the names in order, which the format itself does not."""
    return {_ORDER: json.dumps(list(tensors))}


def _read_copies(path: Path) -> Weights:
    """Reads tensors in the order in which they were written, into memory of their own.

    The last bits of a sum over all of them depend on the order, and a run that goes on is to end in
    the bits that it would have ended in.
    """
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        order = json.loads((file.metadata() or {}).get(_ORDER, "null")) or names
        if sorted(order) != sorted(names):
            raise ValueError("it holds other tensors than it says")
        return {name: file.get_tensor(name).clone() for name in order}


def _read_part(path: Path, prefix: str) -> Weights:
    with safe_open(path, framework="pt") as file:
        names = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118
        return {key.removeprefix(prefix): file.get_tensor(key) for key in names}
