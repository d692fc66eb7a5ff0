"""Tracking: TensorBoard event files in the run folder."""

import time
from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from feddg.evaluation.accuracy import Score
from feddg.federation.server import RoundRecord
from feddg.runs.observer import Observer


class TensorBoard(Observer):
    """Writes accuracies and loss terms as event files for ``tensorboard --logdir``.

    Args:
        folder: the run folder; events go to its ``events`` folder.
    """

    def __init__(self, folder: Path) -> None:
        self._writer = EventFileWriter(str(folder / "events"))

    def round(self, record: RoundRecord) -> None:
        """Writes the mean loss terms of a round."""
        self._write(record.round, {f"loss/{name}": value for name, value in record.terms.items()})

    def scores(self, round: int, scores: Sequence[Score]) -> None:
        """Writes the accuracy of every split and domain."""
        self._write(round, {f"{score.split}/{score.domain}": score.accuracy for score in scores})

    def end(self, status: str) -> None:
        """Closes the file."""
        self._writer.close()

    def _write(self, step: int, values: dict[str, float]) -> None:
        entries = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=entries))
        self._writer.add_event(event)
        self._writer.flush()
