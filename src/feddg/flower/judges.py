"""Held-out evaluation where the images are: at sites that never train."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy

from feddg.evaluation.accuracy import Score
from feddg.evaluation.metrics import Predictions, measure
from feddg.federation.server import Server
from feddg.flower.grid_transport import FlowerTransport
from feddg.messages import Broadcast, Message, Refusal, Weights
from feddg.rows import EVALUATION_ROWS, TEST, EvaluationRow

log = logging.getLogger("feddg")


class JudgeScores:
    """Asks the transport's judges for the accuracy of the server's model; they send counts only.

    Args:
        transport: knows who only evaluates.
    """

    def __init__(self, transport: FlowerTransport) -> None:
        self._transport = transport

    def __call__(
        self, server: Server, weights: Weights, scores: Sequence[Score]
    ) -> Sequence[Score]:
        """Returns the scores of weights of this round; a judge that fails is logged and left out.

        A domain that somebody else measured, too, gets its site's name; ``scores`` are from before.
        """
        transport, state = self._transport, server.state
        if not transport.judges:
            return []
        broadcast = Broadcast(state.round, weights)
        found: list[Score] = []
        taken = {score.domain for score in scores}
        for id, reply in transport.evaluate(broadcast):
            told = self._scores(server, id, reply) if isinstance(reply, Message) else reply
            if isinstance(told, Refusal):
                server.ledger.refusal(state.round, id, told.reason)
                log.warning("round %d: no evaluation by %s", state.round, told.reason)
            else:
                found += _told_apart(taken, told, transport.sites[id])
                taken |= {score.domain for score in found}
        return found

    def _scores(self, server: Server, id: int, reply: Message) -> list[Score] | Refusal:
        try:
            rows = EVALUATION_ROWS.parse(str(reply.scalars["scores"]))
            return [_score(row) for row in rows]
        except (KeyError, ValueError) as error:
            return Refusal(id, f"{self._transport.sites[id]}: its scores cannot be read ({error})")


def _score(row: EvaluationRow) -> Score:
    if row.confusion is None:
        raise ValueError("no images were counted")
    confusion = numpy.array(row.confusion, dtype=numpy.int64)
    correct, examples = int(confusion.trace()), int(confusion.sum())
    if examples < 1 or (confusion < 0).any():
        raise ValueError("no images were counted")
    metrics = measure(Predictions(confusion))
    return Score(TEST, row.domain, correct, examples, row.loss, confusion, metrics)


def _told_apart(taken: set[str], new: list[Score], site: str) -> list[Score]:
    return [
        replace(score, domain=f"{score.domain} at {site}") if score.domain in taken else score
        for score in new
    ]
