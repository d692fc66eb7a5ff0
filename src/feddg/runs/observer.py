"""Events of a run for observers, such as the command line's progress bars and TensorBoard."""

import logging
from collections.abc import Sequence
from functools import partial

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
