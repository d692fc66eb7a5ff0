"""The run folder: everything about one run on disk, written so that nothing computed is lost.

Every file is either replaced whole (written aside, then renamed) or appended to and cut back, on
resume, to what the checkpoint knows. A process killed at any moment leaves a folder that can be
continued.
"""

import errno
import json
import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic_core import to_json
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from feddg.errors import RunError
from feddg.experiment import Experiment, load_stored
from feddg.files import replace_bytes, replace_file, sync
from feddg.messages import Message, Weights
from feddg.methods.base import State
from feddg.row_files import JsonFile, Row
from feddg.runs.reading import read_rows

EXPERIMENT, SUMMARY = "experiment.yaml", "summary.json"
SNAPSHOTS = "snapshots"
MODELS = "models"
METRICS, LEDGER = "metrics.jsonl", "ledger.jsonl"


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


class RunFolder:
    """One run's folder, open for writing; one process at a time.

    Args:
        path: the folder; made if absent.

    Raises:
        RunError: it cannot be written, or another process is writing to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: set[Path] = set()
        try:
            self._is_new = not path.exists() or not any(path.iterdir())
            (path / "checkpoint").mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(path / ".lock", timeout=0)
            self._lock.acquire()
        except Timeout:
            raise RunError(
                f"{path} is being written by another process; wait for it to end"
            ) from None
        except OSError as error:
            raise self._unwritable(path, error) from None
        self._memory_files: dict[int, str] = {}

    def remove_unstarted(self) -> None:
        """Removes the folder of a run that failed before its first round, if nobody else was here.

        It stays where there was something in it before, where a checkpoint can be continued, and
        where it holds any file that this run did not write.
        """
        if not self._is_new or (self.path / "checkpoint" / "checkpoint.json").is_file():
            return
        curves = (self.path / "events").glob("events.out.tfevents.*")
        files = {*self._written, *curves, self.path / ".lock"}
        folders = {self.path / "checkpoint", *(file.parent for file in files)} - {self.path}
        if not set(self.path.rglob("*")) <= files | folders:
            return
        with suppress(OSError):  # somebody may have put something there just now
            for file in files:
                file.unlink(missing_ok=True)
            for folder in (*sorted(folders, reverse=True), self.path):
                if folder.is_dir():
                    folder.rmdir()

    def close(self) -> None:
        """Lets other processes write to the folder."""
        self._lock.release()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The experiment

    def keep_experiment(self, experiment: Experiment) -> None:
        """Writes the experiment, or checks that the folder's is the same one.

        Raises:
            RunError: the folder holds a different experiment.
        """
        file = self.path / EXPERIMENT
        if file.is_file():
            found = load_stored(file)
            if found.id != experiment.id:
                raise RunError(
                    f"{self.path} already holds a different experiment "
                    f"({found.id}, not {experiment.id}); choose another --out or --name, "
                    "or delete the folder"
                )
            return
        self.replace(EXPERIMENT, experiment.to_yaml())

    # Whole files

    def replace(self, name: str, content: str | bytes) -> None:
        """Replaces a file whole: after a crash it holds the old content or the new."""
        data = content.encode() if isinstance(content, str) else content
        self._written.add(self.path / name)
        try:
            replace_bytes(self.path / name, data)
        except OSError as error:
            raise self._unwritable(self.path / name, error) from None

    def write_json(self, name: str, content: JsonFile | dict[str, Any]) -> None:
        """Replaces a JSON file."""
        if isinstance(content, JsonFile):
            text = content.to_text()
        else:
            text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        self.replace(name, text)

    def write_tensors(
        self, name: str, tensors: Weights, metadata: dict[str, str] | None = None
    ) -> None:
        """Replaces a safetensors file."""
        self._written.add(self.path / name)
        own = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        try:
            replace_file(self.path / name, lambda aside: save_file(own, aside, metadata))
        except (OSError, SafetensorError) as error:
            raise self._unwritable(self.path / name, error) from None

    # Records

    def append(self, name: str, rows: Iterable[Row]) -> None:
        """Appends rows to a JSON-lines file and waits until they are on disk."""
        text = _lines(rows)
        if not text:
            return
        self._written.add(self.path / name)
        try:
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.write(text)
                sync(file)
        except OSError as error:
            raise self._unwritable(self.path / name, error) from None

    def replace_rows(self, name: str, rows: Iterable[Row]) -> None:
        """Replaces a JSON-lines file."""
        self.replace(name, _lines(rows))

    def cut_records(self, last_round: int, *, keep_ledger: bool = False) -> set[str]:
        """Drops rows of rounds after ``last_round`` (all for -1); returns the ledger's layouts.

        ``keep_ledger`` keeps the ledger's: messages that crossed a network did so, whatever became
        of their round.
        """
        layouts: set[str] = set()
        for name in (METRICS, LEDGER):
            # As they are: what another version of this program wrote is kept whole.
            last = math.inf if keep_ledger and name == LEDGER else last_round
            rows = read_rows(self.path / name) if last >= 0 else []
            kept = [row for row in rows if row.get("round", 0) <= last]
            layouts |= {row["id"] for row in kept if row.get("kind") == "layout"}
            lines = (to_json(row, inf_nan_mode="null").decode() + "\n" for row in kept)
            self.replace(name, "".join(lines))
        return layouts

    # Checkpoints

    def save_checkpoint(
        self,
        state: State,
        memories: dict[int, Weights],
        changed: set[int],
        models: Mapping[str, str] | None = None,
    ) -> None:
        """Writes the state after a round; the previous checkpoint stays until this one is whole.

        Args:
            state: the server's state.
            memories: what clients remember.
            changed: clients whose memory differs from the previous checkpoint.
            models: the files in ``models/`` that count now, by the rule that chose them; others
                are removed once the checkpoint is whole.
        """
        files = dict(self._memory_files)
        for id in sorted(changed):
            files[id] = f"memory-{id}-{state.round}.safetensors"
            self.write_tensors(f"checkpoint/{files[id]}", memories[id])
        name = f"state-{state.round}.safetensors"
        agreed = state.agreed
        tensors = {f"weights/{key}": tensor for key, tensor in state.weights.items()}
        tensors |= {f"extras/{key}": tensor for key, tensor in state.extras.items()}
        tensors |= {
            f"agreed/{key}": tensor for key, tensor in (agreed or Message()).tensors.items()
        }
        self.write_tensors(f"checkpoint/{name}", tensors)
        scalars = None if agreed is None else agreed.scalars
        content = {"round": state.round, "rounds": state.rounds, "state": name}
        content |= {"agreed": scalars, "memories": files, "models": dict(models or {})}
        self.write_json("checkpoint/checkpoint.json", content)
        self._memory_files = files
        self._sweep("checkpoint", {name, "checkpoint.json", *files.values()})
        self._sweep(MODELS, (models or {}).values(), "*.safetensors")

    def load_checkpoint(self) -> Checkpoint | None:
        """Returns the last whole checkpoint, or None if there is none yet.

        Raises:
            RunError: a file of the checkpoint is missing or damaged.
        """
        index = self.path / "checkpoint" / "checkpoint.json"
        if not index.is_file():
            return None
        try:
            content = json.loads(index.read_text(encoding="utf-8"))
            tensors = load_file(index.parent / content["state"])
            self._memory_files = {int(id): name for id, name in content["memories"].items()}
            memories = {
                id: load_file(index.parent / name) for id, name in self._memory_files.items()
            }
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise RunError(
                f"the checkpoint in {self.path} is damaged ({error}); delete the folder"
            ) from None
        agreed = None
        if content["agreed"] is not None:
            agreed = Message(_under("agreed/", tensors), content["agreed"])
        state = State(
            _under("weights/", tensors),
            _under("extras/", tensors),
            agreed,
            content["round"],
            content.get("rounds", 0),
        )
        return Checkpoint(state, memories, content.get("models", {}))

    def _sweep(self, folder: str, keep: Collection[str], pattern: str = "*") -> None:
        for file in (self.path / folder).glob(pattern):
            if file.name not in keep:
                with suppress(OSError):
                    file.unlink()

    def _unwritable(self, path: Path, error: Exception) -> RunError:
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        full = full or "No space left" in str(error)
        remedy = "free some space" if full else "check the path and its permissions"
        what = "the disk is full" if full else str(error)
        return RunError(
            f"cannot write {path}: {what}; {remedy}, then `feddg resume {self.path}` goes on "
            "from the last completed round"
        )


def _lines(rows: Iterable[Row]) -> str:
    return "".join(row.to_json() + "\n" for row in rows)


def _under(prefix: str, tensors: Weights) -> Weights:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def checkpoint_index(folder: Path) -> dict[str, Any]:
    """Returns what a run folder's checkpoint says of itself: ``checkpoint.json``; only reads.

    Raises:
        RunError: there is no whole checkpoint.
    """
    try:
        text = (folder / "checkpoint" / "checkpoint.json").read_text(encoding="utf-8")
        content: dict[str, Any] = json.loads(text)
        return content
    except (OSError, ValueError) as error:
        raise _no_checkpoint(folder, error) from None


def checkpoint_weights(folder: Path, prefix: str = "weights/") -> Weights:
    """Returns the global weights in a run folder's checkpoint; only reads.

    Args:
        folder: the run's.
        prefix: of other tensors of the checkpoint, which are returned by the rest of their names.

    Raises:
        RunError: there is no whole checkpoint.
    """
    index = checkpoint_index(folder)
    try:
        path = folder / "checkpoint" / index["state"]
        with safe_open(path, framework="pt") as file:
            names = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118
            return {key.removeprefix(prefix): file.get_tensor(key) for key in names}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _no_checkpoint(folder, error) from None


def checkpoint_memories(folder: Path) -> dict[int, Weights]:
    """Returns what clients remember in a run folder's checkpoint, by id; only reads.

    It is empty where clients remember nothing, or keep it to themselves on a network.

    Raises:
        RunError: there is no whole checkpoint.
    """
    files = checkpoint_index(folder).get("memories", {})
    try:
        return {int(id): load_file(folder / "checkpoint" / name) for id, name in files.items()}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _no_checkpoint(folder, error) from None


def _no_checkpoint(folder: Path, error: Exception) -> RunError:
    return RunError(f"{folder} holds no whole checkpoint ({error})")
