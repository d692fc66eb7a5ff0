"""The run folder: all files of a run, with its checkpoint and stored models."""

import json
import math
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from filelock import FileLock, Timeout
from pydantic import ConfigDict, Field, NonNegativeInt
from pydantic_core import to_json
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from feddg.clients.threads import share_of_process
from feddg.errors import RunError
from feddg.experiment import Experiment, load_stored
from feddg.federation.averages import MEANS, prefix_of
from feddg.messages import Message, Scalar, Weights, under
from feddg.methods.base import State
from feddg.records import (
    LAST,
    OPENED_SUMS,
    PRIVACY,
    Details,
    JsonFile,
    NumberRow,
    Row,
)
from feddg.runs.reading import (
    ADAPTED,
    DETAILS,
    EXPERIMENT,
    LEDGER,
    METRICS_FILE,
    ROUNDS_FILE,
    read_rows,
    read_run,
)
from feddg.runs.table import FINAL, SELECTION_RULES, NumberTable, SelectionRule
from feddg.settings import EvaluateSettings
from feddg.storage import (
    append_text,
    checksum,
    file_faults,
    is_file,
    private_folder,
    replace_bytes,
    replace_file,
    set_aside,
    sweep_asides,
)

SNAPSHOTS, FIGURES, MODELS = "snapshots", "figures", "models"
CHECKPOINTS, NEWEST = "checkpoint", "checkpoint.json"
DROPPED = "weights-dropped"
"""A marker file for a run whose weights were deleted when it was complete."""

# The checkpoint: a run after its last completed round.
#
# ``checkpoint.json`` is its index: it names the files of the server's state, of what clients
# remember and of kept models, with their checksums. New files are written beside those it names,
# then the index is renamed into place: a process killed at any moment leaves one whole checkpoint.


_FileName = Annotated[str, Field(pattern=r"^[a-z0-9_-]+\.safetensors$")]
START = "start"
"""Name in the index of the weights from which training of the whole network started."""


@dataclass
class Checkpoint:
    """The state of a run after a round: the server's state and the clients' memory.

    Attributes:
        state: the server's state.
        memories: the clients' memory, by id.
        models: files in ``models/`` by the rule that chose them.
    """

    state: State
    memories: dict[int, Weights]
    models: Mapping[str, str] = field(default_factory=dict)


class CheckpointIndex(JsonFile):
    """The index of a checkpoint's files.

    Attributes:
        round: the last completed round; 0 after the setup.
        rounds: the planned number of rounds.
        state: file of the server's state.
        context: scalars of the shared context; None if there is none.
        memories: files of the clients' memory, by client id.
        models: files in ``models/``, by the rule that chose them.
        experiment: the experiment's id.
        checksums: CRC-32 of every file, by name; names of models begin with ``models/``.
        checksum: CRC-32 of this index without this field.
    """

    model_config = ConfigDict(ser_json_inf_nan="constants")

    round: NonNegativeInt
    rounds: NonNegativeInt = 0
    state: _FileName
    context: dict[str, Scalar] | None
    memories: dict[NonNegativeInt, _FileName]
    models: dict[str, _FileName] = Field(default_factory=dict)
    experiment: str
    checksums: dict[str, int]
    checksum: int = 0

    def own_checksum(self) -> int:
        """Returns the checksum of the index without its checksum field."""
        return zlib.crc32(self.model_dump_json(exclude={"checksum"}).encode())


def read_index(folder: Path) -> CheckpointIndex:
    """Returns the index of a run folder's checkpoint.

    Raises:
        RunError: there is no index, or it is damaged.
    """
    path = folder / CHECKPOINTS / NEWEST
    index = CheckpointIndex.read(path)
    if index is None:
        raise RunError(f"{folder} holds no whole checkpoint: there is no {path}.")
    if index.checksum != index.own_checksum():
        raise RunError(f"{path} is damaged: its checksum is another one.")
    return index


def read_tensors(folder: Path, index: CheckpointIndex, name: str, prefix: str = "") -> Weights:
    """Returns tensors from a file of a checkpoint, in the order in which they were written.

    The order matters: the last bits of sums over them depend on it, and a resumed run must give the
    same bits.

    Args:
        folder: the run's folder.
        index: the index with files and checksums.
        name: the file's name in the checksums.
        prefix: of the wanted tensors; removed from the returned names.

    Raises:
        RunError: the file is missing or damaged.
    """
    path = _place(folder, name)
    with file_faults(RunError, f"{path} is damaged", SafetensorError, ValueError, KeyError):
        if not is_file(path):
            if is_file(folder / CHECKPOINTS / DROPPED):
                raise RunError(
                    f"{folder} keeps no weights: they were deleted when it was complete "
                    "(--drop-weights). Run its experiment.yaml in another folder"
                )
            raise RunError(f"{path} is missing.")
        if checksum(path) != index.checksums.get(name):
            raise RunError(f"{path} is damaged: its checksum is another one.")
        with safe_open(path, framework="pt") as file:
            order = json.loads((file.metadata() or {}).get("order", "null")) or list(file.keys())
            wanted = [key for key in order if key.startswith(prefix)]
            return {key.removeprefix(prefix): file.get_tensor(key).clone() for key in wanted}


def _place(folder: Path, name: str) -> Path:
    """Returns the path of a checkpoint's file from its name in the checksums."""
    return folder / name if name.startswith(f"{MODELS}/") else folder / CHECKPOINTS / name


def _weights_files(folder: Path) -> set[Path]:
    return {
        file for name in (CHECKPOINTS, MODELS) for file in (folder / name).glob("*.safetensors")
    }


def checkpoint_memories(folder: Path) -> dict[int, Weights]:
    """Returns the clients' memory in a run folder's checkpoint, by id; changes nothing.

    It is empty if clients have no memory, or store it at their sites.

    Raises:
        RunError: there is no complete checkpoint.
    """
    index = read_index(folder)
    return {id: read_tensors(folder, index, name) for id, name in index.memories.items()}


class RunFolder:
    """A run folder opened for writing by one process at a time.

    Args:
        path: the folder; created if missing.

    Raises:
        RunError: it cannot be written, or another process is writing to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with file_faults(RunError, f"cannot write {path}"):
            self._is_new = not path.exists()
            private_folder(path / CHECKPOINTS)
            self._lock = FileLock(path / ".lock", timeout=0)
            try:
                self._lock.acquire()
            except Timeout:
                raise RunError(
                    f"{path} is being written by another process; wait for it to end"
                ) from None
        for folder in (path, path / FIGURES):  # where pages and pictures may be written meanwhile
            sweep_asides(folder)
        for name in (CHECKPOINTS, SNAPSHOTS, MODELS):
            sweep_asides(path / name, older_than=0)
        self._experiment = ""
        self._index: CheckpointIndex | None = None
        # Threads of PyTorch's that waited there would take time from training.
        self._writer = ThreadPoolExecutor(1, initializer=partial(share_of_process, 1))
        self._being_written: Future[None] | None = None

    def remove_unstarted(self) -> None:
        """Removes the folder of a run that failed before its first round.

        It is kept if it was there before, has a checkpoint, or records a noised release or an
        opened sum.
        """
        lasting = (f"{CHECKPOINTS}/{NEWEST}", PRIVACY, OPENED_SUMS)
        if self._is_new and not any((self.path / name).is_file() for name in lasting):
            shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Lets other processes write to the folder again."""
        self._writer.shutdown()
        self._lock.release()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The experiment

    def keep_experiment(self, experiment: Experiment) -> None:
        """Writes the experiment, or checks that the stored one is the same.

        Raises:
            RunError: the folder holds a different experiment.
        """
        file = self.path / EXPERIMENT
        self._experiment = experiment.id
        if is_file(file):
            stored = load_stored(file)
            if stored.id != experiment.id:
                raise RunError(
                    f"{self.path} already holds a different experiment "
                    f"({stored.id}, not {experiment.id}); choose another --out or --name, "
                    "or delete the folder"
                )
            return
        self.replace(EXPERIMENT, experiment.to_yaml())

    # Whole files

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Yields the path for a file or folder of the run, for writing inside the block.

        Raises:
            RunError: it cannot be written.
        """
        path = self.path / name
        with file_faults(RunError, f"cannot write {path}", SafetensorError):
            yield path

    def replace(self, name: str, content: str | bytes) -> None:
        """Replaces a whole file: after a crash it has either the old or the new content."""
        with self.writing(name) as path:
            replace_bytes(path, content.encode() if isinstance(content, str) else content)

    def write_json(self, name: str, content: JsonFile | dict[str, object]) -> None:
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
        copies = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        with self.writing(name) as path:
            replace_file(path, lambda aside: save_file(copies, aside, metadata))

    # Records

    def append(self, name: str, rows: Iterable[Row]) -> None:
        """Appends rows to a JSON-lines file and waits until they are on disk."""
        text = _lines(rows)
        if text:
            with self.writing(name) as path:
                append_text(path, text)

    def replace_rows(self, name: str, rows: Iterable[Row]) -> None:
        """Replaces a JSON-lines file."""
        self.replace(name, _lines(rows))

    def cut_records(self, last_round: int, *, keep_ledger: bool = False) -> set[str]:
        """Removes rows of rounds after ``last_round`` (-1 for all); returns the ledger's layouts.

        ``keep_ledger`` keeps the ledger's rows, because messages over a network were sent even if
        their round failed.
        """
        layouts = set[str]()
        for name in (ROUNDS_FILE, METRICS_FILE, LEDGER):
            # As they are: what another version of this program wrote is kept whole.
            last = math.inf if keep_ledger and name == LEDGER else last_round
            rows = read_rows(self.path / name) if last >= 0 else []
            rows = [row for row in rows if _round_of(row, self.path / name) <= last]
            layouts |= {str(row.get("id")) for row in rows if row.get("kind") == "layout"}
            lines = (to_json(row, inf_nan_mode="null").decode() + "\n" for row in rows)
            self.replace(name, "".join(lines))
        return layouts

    # Checkpoints

    def save_checkpoint(
        self,
        state: State,
        memories: dict[int, Weights],
        changed: set[int],
        models: Mapping[str, str] = MappingProxyType({}),
        *,
        beside: bool = False,
    ) -> None:
        """Writes a checkpoint after a round; the previous one is kept until it is complete.

        Args:
            state: the server's state, whose tensors do not change any more.
            memories: the clients' memory, by id.
            changed: ids of clients whose memory differs from the previous checkpoint.
            models: files in ``models/`` to keep, by the rule that chose them; others are removed.
            beside: whether the run continues meanwhile, see :meth:`finish_writing`.
        """
        self.finish_writing()
        snapshot = replace(state, weights=dict(state.weights), extras=dict(state.extras))
        parts = {id: dict(memories[id]) for id in sorted(changed)}
        work = partial(self._write_checkpoint, snapshot, parts, dict(models))
        if beside:
            self._being_written = self._writer.submit(work)
        else:
            work()

    def remove_derived(self) -> None:
        """Deletes what was made of earlier rounds' model."""
        details = Details.read(self.path / DETAILS)
        if details is not None and details.round != read_run(self.path).rounds_done:
            (self.path / DETAILS).unlink()
        for pattern in (ADAPTED, "travel.*", "predictions*.parquet", f"{SNAPSHOTS}/*"):
            for file in self.path.glob(pattern):
                with file_faults(RunError, f"Cannot delete {file}"):
                    file.unlink()
        self.rename_card()

    def rename_card(self) -> None:
        """Renames the model's card, if there is one: it no longer holds, but people edit it."""
        if (card := self.path / "model_card.md").exists():
            set_aside(card)

    def finish_writing(self) -> None:
        """Waits until the last checkpoint is written; raises the error if that failed."""
        pending, self._being_written = self._being_written, None
        if pending is not None:
            pending.result()

    def _write_checkpoint(
        self, state: State, memories: dict[int, Weights], models: dict[str, str]
    ) -> None:
        context = (state.context or Message()).tensors
        parts = {"weights": state.weights, "extras": state.extras, "context": context}
        name = f"state-{state.round}.safetensors"
        files = dict(self._index.memories) if self._index else {}
        written = {name: {f"{part}/{n}": t for part, own in parts.items() for n, t in own.items()}}
        for id in memories:
            files[id] = f"memory-{id}-{state.round}.safetensors"
            written[files[id]] = memories[id]
        for file, tensors in written.items():
            order = {"order": json.dumps(list(tensors))}
            self.write_tensors(f"{CHECKPOINTS}/{file}", tensors, order)
        names = {name, *files.values(), *(f"{MODELS}/{file}" for file in models.values())}
        known = self._index.checksums if self._index else {}
        checksums = {file: known[file] for file in names & known.keys() - written.keys()}
        with self.writing(f"{CHECKPOINTS}/{NEWEST}"):
            checksums |= {n: checksum(_place(self.path, n)) for n in names - checksums.keys()}
        index = CheckpointIndex(
            round=state.round,
            rounds=state.rounds,
            state=name,
            context=None if state.context is None else state.context.scalars,
            memories=files,
            models=models,
            experiment=self._experiment,
            checksums=dict(sorted(checksums.items())),
        )
        index = index.model_copy(update={"checksum": index.own_checksum()})
        self.write_json(f"{CHECKPOINTS}/{NEWEST}", index)
        self._take(index)

    def _take(self, index: CheckpointIndex) -> None:
        """Continues from a checkpoint; removes files that it does not list."""
        self._index = index
        listed = {_place(self.path, name) for name in index.checksums}
        for left in _weights_files(self.path) - listed:
            with suppress(OSError):
                left.unlink()

    def load_checkpoint(self) -> Checkpoint | None:
        """Returns the checkpoint, or None if none was written.

        Raises:
            RunError: it is damaged, or of another experiment.
        """
        if not is_file(self.path / CHECKPOINTS / NEWEST):
            return None
        try:
            index = read_index(self.path)
            tensors = read_tensors(self.path, index, index.state)
            memories = {id: read_tensors(self.path, index, n) for id, n in index.memories.items()}
        except RunError as error:
            if is_file(self.path / CHECKPOINTS / DROPPED):
                raise
            raise RunError(
                f"{error} The run cannot continue without it; delete {self.path} to start again."
            ) from None
        if self._experiment and self._experiment != index.experiment:
            raise RunError(
                f"{self.path / EXPERIMENT} says experiment {self._experiment}, but the checkpoint "
                f"is of {index.experiment}: one of them was changed. Put it back, or run it in "
                "another folder."
            )
        self._take(index)
        context, whole = index.context, Message(tensors)
        state = State(
            under("weights/", whole).tensors,
            under("extras/", whole).tensors,
            None if context is None else Message(under("context/", whole).tensors, context),
            index.round,
            index.rounds,
        )
        return Checkpoint(state, memories, index.models)


def _round_of(row: dict[str, object], path: Path) -> int:
    round = row.get("round", 0)
    if isinstance(round, int):
        return round
    raise RunError(f"{path} is damaged: 'round' is {round!r}, not a whole number.")


def _lines(rows: Iterable[Row]) -> str:
    return "".join(row.to_json() + "\n" for row in rows)


# The models that a run folder keeps: the best by each rule, and how any of them is found again.
#
# The last round's weights and the means over rounds are in the checkpoint. What else counts lies
# in ``models/``, one safetensors file per chosen round, however many rules choose it. A file is
# written before the checkpoint that names it, and removed after one that does not: a process
# killed at any moment leaves what its last whole checkpoint knows.


class KeptModels:
    """Stores the models that selection rules choose during a run.

    Args:
        folder: the run's folder.
        files: files of the checkpoint, by rule.
        rows: evaluations so far.
        chosen: the metric that chooses a round.
        start: the round after which training of the whole network starts, if WiSE-FT needs its
            starting weights.
    """

    def __init__(
        self,
        folder: RunFolder,
        files: Mapping[str, str],
        rows: Sequence[NumberRow],
        chosen: EvaluateSettings,
        start: int | None = None,
    ) -> None:
        self.folder, self._rows, self._chosen = folder, list(rows), chosen
        self._start = start
        self.files = dict(files)

    def take_in(self, state: State, rows: Sequence[NumberRow]) -> Mapping[str, str]:
        """Stores a completed round's model if a rule chooses it, or WiSE-FT starts from it.

        Args:
            state: the round's state.
            rows: the round's numbers.

        Returns:
            All stored files, by rule, for the checkpoint.
        """
        if state.round == self._start:
            self.keep(START, f"round-{state.round}.safetensors", state.weights)
        if rows:
            self._rows += rows
            table = NumberTable(self._rows, self._chosen.select_by, self._chosen.select_over)
            for rule in SELECTION_RULES.values():
                if rule.weights == LAST and rule.name != FINAL.name:
                    self._choose(rule.name, rule.of(table).round, state)
        return self.files

    def _choose(self, name: str, round: int | None, state: State) -> None:
        file = f"round-{round}.safetensors"
        if round == state.round:
            self.keep(name, file, state.weights)
        elif file in self.files.values():
            self.files[name] = file
        else:  # its file is not kept, or no round is chosen
            self.files.pop(name, None)

    def keep(self, name: str, file: str, weights: Weights) -> None:
        """Writes weights to a file and adds it to the next checkpoint."""
        self.folder.finish_writing()  # which removes the files that it does not name
        if file not in self.files.values():
            self.folder.write_tensors(f"{MODELS}/{file}", weights)
        self.files[name] = file

    def read(self, name: str) -> Weights:
        """Returns the weights of a stored model."""
        self.folder.finish_writing()
        folder = self.folder.path
        return read_tensors(folder, read_index(folder), f"{MODELS}/{self.files[name]}")


def drop_weights(folder: Path) -> None:
    """Deletes the weights of a complete run, checkpoints and stored models; its numbers stay.

    Raises:
        RunError: a file cannot be deleted.
    """
    with file_faults(RunError, f"Cannot delete the weights of {folder}"):
        (folder / CHECKPOINTS / DROPPED).touch()
        for file in _weights_files(folder):
            file.unlink(missing_ok=True)


def kept_weights(folder: Path, *rules: SelectionRule) -> tuple[SelectionRule, Weights, int]:
    """Returns the weights of the first rule whose model a run has stored; changes nothing.

    Args:
        folder: the run's folder.
        rules: at least one.

    Returns:
        The rule, its weights, and the round they are from.

    Raises:
        RunError: there is no checkpoint, or no model by these rules; says what the last one takes.
    """
    index = read_index(folder)
    for rule in rules:
        weights = _weights_of(folder, index, rule)
        if not weights:
            continue
        chosen = None
        if rule.name != FINAL.name and rule.weights not in MEANS:
            chosen = rule.of(read_run(folder).table).round
        return rule, weights, index.round if chosen is None else chosen
    rule = rules[-1]
    raise RunError(f"{folder} has no {rule.name!r} model, which takes {rule.needs}")


def _weights_of(folder: Path, index: CheckpointIndex, rule: SelectionRule) -> Weights:
    """Returns the weights of a rule's model; empty if the run has not stored it."""
    if rule.weights in MEANS:
        # Until a mean begins there is none; of the entries that are not averaged the last count.
        mean = read_tensors(folder, index, index.state, f"extras/{prefix_of(rule.weights)}")
        return mean and read_tensors(folder, index, index.state, "weights/") | mean
    if rule.name == FINAL.name:
        return read_tensors(folder, index, index.state, "weights/")
    file = index.models.get(rule.name)
    return {} if file is None else read_tensors(folder, index, f"{MODELS}/{file}")
