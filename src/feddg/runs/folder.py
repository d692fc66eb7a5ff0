"""The run folder: everything about one run on disk, written so that nothing computed is lost.

Every file is either replaced whole (written aside, then renamed) or appended to and cut back, on
resume, to what the checkpoint knows. A process killed at any moment leaves a folder that can be
continued.
"""

import errno
import json
import logging
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic_core import to_json
from safetensors import SafetensorError
from safetensors.torch import save_file

from feddg.errors import RunError
from feddg.experiment import Experiment, load_stored
from feddg.messages import Weights
from feddg.methods.base import State
from feddg.records import JsonFile, Row
from feddg.runs.checkpoints import (
    CHECKPOINTS,
    NEWEST,
    Checkpoint,
    Checkpoints,
)
from feddg.runs.reading import read_rows
from feddg.storage import (
    append_text,
    is_file,
    private_folder,
    replace_bytes,
    replace_file,
    sweep_asides,
    why,
)

log = logging.getLogger("feddg")

EXPERIMENT, SUMMARY = "experiment.yaml", "summary.json"
SNAPSHOTS, FIGURES, MODELS = "snapshots", "figures", "models"
METRICS, LEDGER = "metrics.jsonl", "ledger.jsonl"
PRIVACY, OPENED_SUMS = "privacy.jsonl", "opened_sums.jsonl"
"""What was spent on noised releases, and whose masked sums were opened: never cut."""


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
            self._new_parents = [parent for parent in path.parents if not parent.exists()]
            private_folder(path / CHECKPOINTS)
            self._lock = FileLock(path / ".lock", timeout=0)
            self._lock.acquire()
        except Timeout:
            raise RunError(
                f"{path} is being written by another process; wait for it to end"
            ) from None
        except OSError as error:
            raise self.unwritable(path, error) from None
        for folder in (path, *(path / name for name in (CHECKPOINTS, FIGURES, SNAPSHOTS))):
            sweep_asides(folder)
        self._experiment = ""
        self._checkpoints = Checkpoints(
            path / CHECKPOINTS,
            lambda name, *content: self.write_tensors(f"{CHECKPOINTS}/{name}", *content),
            lambda name, index: self.write_json(f"{CHECKPOINTS}/{name}", index),
            path / MODELS,
        )

    def remove_unstarted(self) -> None:
        """Removes the folder of a run that failed before its first round, if nobody else was here.

        It stays where there was something in it before, where a checkpoint can be continued, where
        something noised was released or a sum opened, and where it holds any file that this run did
        not write.
        Folders above it that were made for it go, too.
        """
        kept = [self.path / name for name in (f"{CHECKPOINTS}/{NEWEST}", PRIVACY, OPENED_SUMS)]
        if not self._is_new or any(file.is_file() for file in kept):
            return
        curves = (self.path / "events").glob("events.out.tfevents.*")
        files = {*self._written, *curves, self.path / ".lock"}
        folders = {self.path / CHECKPOINTS, *(file.parent for file in files)} - {self.path}
        if not set(self.path.rglob("*")) <= files | folders:
            return
        with suppress(OSError):  # somebody may have put something there just now
            for file in files:
                file.unlink(missing_ok=True)
            for folder in (*sorted(folders, reverse=True), self.path):
                if folder.is_dir():
                    folder.rmdir()
            for parent in self._new_parents:
                parent.rmdir()

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
        self._experiment = experiment.id
        if is_file(file):
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
            raise self.unwritable(self.path / name, error) from None

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
            raise self.unwritable(self.path / name, error) from None

    # Records

    def append(self, name: str, rows: Iterable[Row]) -> None:
        """Appends rows to a JSON-lines file and waits until they are on disk."""
        text = _lines(rows)
        if not text:
            return
        self._written.add(self.path / name)
        try:
            append_text(self.path / name, text)
        except OSError as error:
            raise self.unwritable(self.path / name, error) from None

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
            rows = read_rows(self.path / name) if last >= 0 else self._begun_again(name)
            kept = [row for row in rows if _round_of(row, self.path / name) <= last]
            layouts |= {str(row.get("id")) for row in kept if row.get("kind") == "layout"}
            self._say_missing(name, kept, last_round)
            lines = (to_json(row, inf_nan_mode="null").decode() + "\n" for row in kept)
            self.replace(name, "".join(lines))
        return layouts

    def _begun_again(self, name: str) -> list[dict[str, Any]]:
        """Says so where rounds were recorded that no checkpoint knows."""
        with suppress(RunError):  # a damaged file is dropped as well
            rows = read_rows(self.path / name) if name == METRICS else []
            if any(row.get("kind") == "round" for row in rows):
                log.warning(
                    "There is no checkpoint in %s, though rounds were recorded; it begins again",
                    self.path,
                )
        return []

    def _say_missing(self, name: str, rows: list[dict[str, Any]], last_round: int) -> None:
        """Says which of the rounds that the checkpoint knows have no row."""
        kind = "round" if name == METRICS else "message"
        found = {row.get("round") for row in rows if row.get("kind") == kind}
        missing = [round for round in range(1, last_round + 1) if round not in found]
        if missing:
            log.warning(
                "%s lacks %d of the %d rounds that the checkpoint has (%s); the run goes on, and "
                "its report will lack them, too",
                self.path / name,
                len(missing),
                last_round,
                _spans(missing),
            )

    # Checkpoints

    def save_checkpoint(
        self,
        state: State,
        memories: dict[int, Weights],
        changed: set[int],
        models: Mapping[str, str] | None = None,
    ) -> None:
        """Writes the state after a round, see :meth:`Checkpoints.save`.

        Models that it does not name are removed then.
        """
        try:
            self._checkpoints.save(state, memories, changed, self._experiment, models or {})
        except OSError as error:
            raise self.unwritable(self.path / CHECKPOINTS, error) from None
        for file in (self.path / MODELS).glob("*.safetensors"):
            if file.name not in self._checkpoints.models:
                with suppress(OSError):
                    file.unlink()

    def load_checkpoint(self) -> Checkpoint | None:
        """Returns the checkpoint, or None, see :meth:`Checkpoints.load`."""
        return self._checkpoints.load()

    def unwritable(self, path: Path, error: Exception) -> RunError:
        """Returns what to raise where a file of the run cannot be written."""
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        full = full or "No space left" in str(error)
        remedy = "free some space" if full else "check the path and its permissions"
        what = "the disk is full" if full else why(error)
        return RunError(
            f"cannot write {path}: {what}; {remedy}, then `feddg resume {self.path}` goes on "
            "from the last completed round"
        )


def _round_of(row: dict[str, Any], path: Path) -> int:
    round = row.get("round", 0)
    if isinstance(round, int):
        return round
    raise RunError(f"{path} is damaged: 'round' is {round!r}, not a whole number.")


def _spans(rounds: list[int]) -> str:
    """Returns ascending rounds as text: ``1-3, 7``."""
    spans: list[list[int]] = []
    for round in rounds:
        if spans and spans[-1][-1] == round - 1:
            spans[-1] = [spans[-1][0], round]
        else:
            spans.append([round])
    return ", ".join("-".join(map(str, span)) for span in spans)


def _lines(rows: Iterable[Row]) -> str:
    return "".join(row.to_json() + "\n" for row in rows)
