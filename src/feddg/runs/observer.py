"""What a run tells whoever watches it; the command line's progress bars and TensorBoard listen."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from feddg.diagnostics import Diagnostic
from feddg.evaluation.accuracy import Score
from feddg.experiment import Experiment
from feddg.messages import Refusal, Update
from feddg.methods.base import Round, RoundHook, State
from feddg.records import RoundRow


class Observer:
    """Listens to a run; every method may be left as it is here, silent."""

    def start(self, experiment: Experiment, first_round: int) -> None:
        """The run begins; ``first_round`` is above 1 when it continues."""

    def diagnostic(self, found: Diagnostic) -> None:
        """What a defence guarantees, before anything is sent."""

    def work(self, what: str, done: int, total: int) -> None:
        """Preparation goes on: decoding images, collecting clients' statistics."""

    def client(self, round: int, reply: Update | Refusal) -> None:
        """A client finished its part of a round."""

    def round(self, row: RoundRow) -> None:
        """A round was aggregated."""

    def scores(self, round: int, scores: Sequence[Score]) -> None:
        """The global model was evaluated."""

    def end(self, status: str) -> None:
        """The run ended: ``completed``, ``interrupted`` or ``failed``."""


EVENTS = tuple(name for name in vars(Observer) if not name.startswith("_"))
"""Names of an observer's methods."""


class Relay(Observer):
    """Has every event at one method, with the event's name and content."""

    def __init__(self) -> None:
        for event in EVENTS:
            setattr(self, event, partial(self.on_event, event))

    def on_event(self, event: str, *content: Any) -> None:
        """An event of :data:`EVENTS` happened."""
        raise NotImplementedError


class Together(Relay):
    """Passes everything on to several observers."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        super().__init__()
        self.observers = observers

    def on_event(self, event: str, *content: Any) -> None:
        """See :class:`Relay`."""
        for observer in self.observers:
            getattr(observer, event)(*content)


class Progress(RoundHook):
    """Tells an observer what happens in a round."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def received(self, update: Update, round: Round) -> Update:
        """See :meth:`Observer.client`."""
        self._observer.client(round.number, update)
        return update

    def refused(self, refusal: Refusal, round: Round) -> None:
        """See :meth:`Observer.client`."""
        self._observer.client(round.number, refusal)

    def completed(self, state: State, round: Round) -> State:
        """See :meth:`Observer.round`: it does not count yet."""
        self._observer.round(round.row)
        return state
