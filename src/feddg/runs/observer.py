"""Events of a run for observers, such as the command line's progress bars and TensorBoard."""

import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from feddg.errors import RunError, nearest, need
from feddg.evaluation.accuracy import Score
from feddg.experiment import Experiment
from feddg.messages import Refusal, Update
from feddg.methods.base import Round, RoundHook, State
from feddg.records import RoundRow

log = logging.getLogger("feddg")
EVENTS = ("start", "work", "client", "round", "scores", "end")


class Observer(RoundHook):
    """Base class of observers: receives a run's events; the default methods do nothing.

    It is a hook of the run's rounds, and learns the rest from whoever carries the run out.
    """

    def start(self, experiment: Experiment, first_round: int) -> None:
        """The run begins; ``first_round`` is above 1 when it continues."""

    def work(self, what: str, done: int, total: int) -> None:
        """Progress of the preparation: decoding images, collecting clients' statistics."""

    def client(self, round: int, reply: Update | Refusal) -> None:
        """A client finished its part of a round."""

    def round(self, row: RoundRow) -> None:
        """A round was aggregated."""

    def scores(self, round: int, scores: Sequence[Score]) -> None:
        """The global model was evaluated."""

    def end(self, status: str) -> None:
        """The run ended: ``completed``, ``interrupted`` or ``failed``."""

    def received(self, update: Update, round: Round) -> Update:
        """See :meth:`client`."""
        self.client(round.number, update)
        return update

    def refused(self, refusal: Refusal, round: Round) -> None:
        """See :meth:`client`."""
        self.client(round.number, refusal)

    def completed(self, state: State, round: Round) -> State:
        """See :meth:`round`; the round is not checkpointed yet."""
        self.round(round.row)
        return state


class Together(Observer):
    """Passes every event on to several observers.

    Args:
        observer: an observer whose errors end the run.

    Attributes:
        optional: further observers by name; one that fails is logged once and dropped.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer, self.optional = observer, dict[str, Observer]()
        for event in EVENTS:
            setattr(self, event, partial(self._pass_on, event))

    def _pass_on(self, event: str, *content: object) -> None:
        getattr(self._observer, event)(*content)
        for name, observer in [*self.optional.items()]:
            try:
                getattr(observer, event)(*content)
            except Exception as error:
                del self.optional[name]
                log.warning("%s no longer tracks this run: %s", name, error)


# Tracking: a run's curves for TensorBoard and Weights & Biases.
#
# Each is an extra of its name (``pip install 'feddg[tensorboard]'``), chosen by ``--track
# tensorboard,wandb`` or the environment variable ``FEDDG_TRACK``. They write files in the run
# folder, and need no network unless ``WANDB_MODE=online`` asks for one. A tracker that fails is
# reported once and dropped; it never ends a run.

CHOICE = "FEDDG_TRACK"


class Tracker(Observer):
    """Base class of trackers, which write accuracies and loss terms.

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def round(self, row: RoundRow) -> None:
        """Writes the mean loss terms and the cost of a round."""
        values = {f"loss/{name}": value for name, value in row.terms.items()}
        values |= {"bytes/up": float(row.bytes_up), "bytes/down": float(row.bytes_down)}
        values |= {f"seconds/{name}": value for name, value in row.seconds.items()}
        self.write(row.round, values)

    def scores(self, round: int, scores: Sequence[Score]) -> None:
        """Writes the accuracy of every split and domain."""
        self.write(round, {f"{score.split}/{score.domain}": score.accuracy for score in scores})

    def write(self, step: int, values: dict[str, float]) -> None:
        """Writes named values of a round."""
        raise NotImplementedError


class TensorBoard(Tracker):
    """Event files for ``tensorboard --logdir``, in the run's ``events`` folder."""

    def start(self, experiment: Experiment, first_round: int) -> None:
        """Opens a file."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(self.folder / "events"))

    def end(self, status: str) -> None:
        """Closes the file."""
        self._writer.close()

    def write(self, step: int, values: dict[str, float]) -> None:
        """See :class:`Tracker`."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()


class WeightsAndBiases(Tracker):
    """A Weights & Biases run, offline in the run folder unless ``WANDB_MODE`` says otherwise."""

    def start(self, experiment: Experiment, first_round: int) -> None:
        """Opens the run; a continued one keeps its id."""
        import wandb

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "feddg"),
            name=self.folder.name,
            id=self.folder.name.rpartition("-")[2],
            resume="allow",
            dir=str(self.folder),
            config=experiment.model_dump(mode="json"),
            mode=os.environ.get("WANDB_MODE", "offline"),
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        """See :class:`Tracker`."""
        # Its own step may only grow, while a round comes in two parts.
        self._run.log({**values, "round": step})

    def end(self, status: str) -> None:
        """Closes the run."""
        self._run.finish(exit_code=0 if status == "completed" else 1)


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
"""The trackers by name, which is also that of the extra that brings their package."""


def chosen_trackers() -> dict[str, type[Tracker]]:
    """Returns the trackers named in ``FEDDG_TRACK``.

    Raises:
        RunError: a name is unknown.
        MissingPackage: a package is not installed.
    """
    names = list(filter(None, os.environ.get(CHOICE, "").replace(" ", "").split(",")))
    for name in names:
        if name not in TRACKERS:
            raise RunError(
                f"unknown tracker {name!r}{nearest(name, TRACKERS)}; there are: "
                f"{', '.join(TRACKERS)}"
            )
        need(name, f"--track {name}")
    return {name: TRACKERS[name] for name in names}
