"""Checkpoints: a run after a round, each file with a checksum; the last few are kept.

``checkpoint.json`` is the index of the newest, ``checkpoint-ROUND.json`` of each that is kept. An
index names the files of the server's state and of what clients remember, with their checksums. A
damaged checkpoint is found when it is read; the one before it takes its place, and that is said.
"""

import json
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, NonNegativeInt
from safetensors import SafetensorError, safe_open

from feddg.errors import RunError
from feddg.files import checksum, is_file, why
from feddg.messages import Message, Weights
from feddg.methods.base import State
from feddg.row_files import JsonFile

log = logging.getLogger("feddg")

CHECKPOINTS, NEWEST = "checkpoint", "checkpoint.json"
DROPPED = "weights-dropped"
"""A file beside the indexes of a run whose weights were deleted when it was complete."""
EARLIER_KEPT = 2
"""Checkpoints kept beside the newest."""
EARLIER_BYTES = 4 * 2**30
"""Most disk space that they may take; where a checkpoint is larger, fewer are kept, or none."""

MODEL_KEY = "models/"
"""What the checksums' names of kept models begin with."""
_ORDER = "order"
_INDEX = re.compile(r"checkpoint-(\d+)\.json")
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
    """The checkpoints of a run folder, open for writing.

    Args:
        folder: where they are.
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
        self._kept: list[CheckpointIndex] = []

    @property
    def models(self) -> set[str]:
        """Names of the model files that a kept checkpoint needs."""
        return {file for index in self._kept for file in index.models.values()}

    def save(
        self,
        state: State,
        memories: dict[int, Weights],
        changed: set[int],
        experiment: str,
        models: Mapping[str, str],
    ) -> None:
        """Writes the state after a round; the ones before stay until this one is whole.

        Args:
            state: the server's state.
            memories: what clients remember.
            changed: clients whose memory differs from the previous checkpoint.
            experiment: the experiment's id.
            models: files in ``models/`` that count now, by the rule that chose them.
        """
        before = self._kept[0] if self._kept else None
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
            # One of this very round may have been written before, in a round that did not count.
            if key not in sums or file == f"round-{state.round}.safetensors":
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
        self._write_index(f"checkpoint-{state.round}.json", index)
        self._write_index(NEWEST, index)
        earlier = [kept for kept in self._kept if kept.round < state.round]
        self._kept = [index, *self._affordable(index, earlier[:EARLIER_KEPT])]
        self._sweep()

    def load(self) -> Checkpoint | None:
        """Returns the last whole checkpoint, or None if none was ever written.

        Where a newer one is damaged, that is logged in one line.

        Raises:
            RunError: all are damaged.
        """
        faults: list[str] = []
        known = [index for path in self._paths() if (index := _readable(path, faults))]
        for place, index in enumerate(known):
            try:
                checkpoint = self._loaded(index)
            except RunError as error:
                faults += [str(error)]
                continue
            # The newest has two index files, and counts once.
            self._kept = list({kept.round: kept for kept in reversed(known[place:])}.values())[::-1]
            if faults:
                log.warning("%s Going on from the checkpoint of round %d.", faults[0], index.round)
            return checkpoint
        if faults:
            raise RunError(
                f"{faults[0]} There is no other checkpoint in {self._folder}; delete the run's "
                "folder to start again."
            )
        return None

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

    def _paths(self) -> list[Path]:
        """Index files, newest first; the newest has two."""
        rounds = sorted(_rounds(self._folder), reverse=True)
        paths = [self._folder / f"checkpoint-{round}.json" for round in rounds]
        newest = self._folder / NEWEST
        return [newest, *paths] if paths or is_file(newest) else []

    def _affordable(
        self, newest: CheckpointIndex, earlier: Sequence[CheckpointIndex]
    ) -> Sequence[CheckpointIndex]:
        seen, size = newest.files, 0
        for count, index in enumerate(earlier):
            for name in index.files - seen:
                with suppress(OSError):
                    size += (self._folder / name).stat().st_size
            seen = seen | index.files
            if size > EARLIER_BYTES:
                return earlier[:count]
        return earlier

    def _sweep(self) -> None:
        keep = {NEWEST}.union(*(index.files for index in self._kept))
        keep |= {f"checkpoint-{index.round}.json" for index in self._kept}
        for file in self._folder.iterdir():
            if file.name not in keep:
                with suppress(OSError):
                    file.unlink()


def newest_index(folder: Path) -> CheckpointIndex:
    """Returns the index of a run folder's newest checkpoint; only reads.

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


def _readable(path: Path, faults: list[str]) -> CheckpointIndex | None:
    try:
        return CheckpointIndex.read_whole(path)
    except RunError as error:
        faults.append(str(error))
        return None


def _rounds(folder: Path) -> set[int]:
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise RunError(f"Cannot read {folder}: {why(error)}.") from None
    return {int(found[1]) for name in names if (found := _INDEX.fullmatch(name))}


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
