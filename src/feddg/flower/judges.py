"""Held-out evaluation where the images are: at sites that never train."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy

from feddg.evaluation.accuracy import Score
from feddg.evaluation.metrics import Predictions, measure
from feddg.federation.server import Server
from feddg.flower.grid_transport import FlowerTransport
from feddg.flower.replies import MOST_IMAGES
from feddg.messages import Broadcast, Message, Refusal, Weights, plain_text
from feddg.records import EVALUATION_ROWS, TEST, EvaluationRow

log = logging.getLogger("feddg")


class JudgeScores:
    """Asks the transport's judges for the accuracy of the server's model; they send counts only.

    Args:
        transport: knows who only evaluates.
        classes: how many the federation has.
    """

    def __init__(self, transport: FlowerTransport, classes: int) -> None:
        self._transport, self._classes = transport, classes

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
        introduction = self._transport.introductions.get(id)
        held = introduction.domains if introduction is not None else {}
        try:
            return read_scores(reply, self._classes, held)
        except ValueError as error:
            said = plain_text(error, 200)
            return Refusal(id, f"{self._transport.sites[id]}: its scores cannot be used ({said})")


def read_scores(reply: Message, classes: int, held: Mapping[str, int]) -> list[Score]:
    """Returns a judge's checked scores, one for each domain that it counted.

    Args:
        reply: what it sent.
        classes: how many the federation has.
        held: how many images of each domain it introduced itself with.

    Raises:
        ValueError: they are not what it can have counted; says why.
    """
    if reply.tensors or reply.scalars.keys() != {"scores"}:
        raise ValueError("it sent something else, or more")
    rows = EVALUATION_ROWS.parse(str(reply.scalars["scores"]))
    if len({row.domain for row in rows}) < len(rows):
        raise ValueError("it counted a domain twice")
    return [_score(row, classes, held) for row in rows]


def _score(row: EvaluationRow, classes: int, held: Mapping[str, int]) -> Score:
    table = row.confusion
    if table is None or len(table) != classes or any(len(line) != classes for line in table):
        raise ValueError(f"its table is not one of {classes} classes")
    if any(not 0 <= count <= MOST_IMAGES for line in table for count in line):
        raise ValueError("its counts are no numbers of images")
    examples, introduced = sum(map(sum, table)), held.get(row.domain, 0)
    if examples != introduced or not examples:
        shown = plain_text(row.domain, 40)
        raise ValueError(
            f"it counted {examples} images of {shown!r}, but introduced itself with {introduced}"
        )
    confusion = numpy.array(table, dtype=numpy.int64)
    loss = row.loss if math.isfinite(row.loss) else math.nan
    metrics = measure(Predictions(confusion))
    return Score(TEST, row.domain, int(confusion.trace()), examples, loss, confusion, metrics)


def _told_apart(taken: set[str], new: list[Score], site: str) -> list[Score]:
    return [
        replace(score, domain=f"{score.domain} at {site}") if score.domain in taken else score
        for score in new
    ]
