"""The evaluation after a round, and the weights that WiSE-FT mixes after the last."""

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from feddg.errors import ExperimentError
from feddg.evaluation.accuracy import Outputs, Score
from feddg.federation.averages import MEANS, averaged, rounds_in, wise_ft
from feddg.federation.federation import Federation
from feddg.messages import Broadcast, Weights
from feddg.methods.base import Round, RoundHook, State, has_global_model, local_names
from feddg.records import ID_VAL, LAST, TEST, UNLABELLED, WISE_FT, EstimateRow, MetricRow
from feddg.runs.calibration import LEAST_SITES, apart, calibrated
from feddg.runs.folder import MODELS, START, KeptModels
from feddg.runs.observer import Observer

# WiSE-FT at the end of a run: averaged weights mixed with those that training started from.
#
# Wortsman et al., "Robust Fine-Tuning of Zero-Shot Models" (CVPR 2022), mix the fine-tuned weights
# with those before: the mixture keeps what the pretrained network knew of other domains. Training
# of the whole network starts after ``train.head_rounds``; with none of them from the initial
# network, whose classifier knows nothing yet.


log = logging.getLogger("feddg")

SHARES = tuple(tenth / 10 for tenth in range(1, 11))
"""Shares of the averaged weights that ``auto`` tries."""


class Evaluate(RoundHook):
    """Evaluates the weights of rounds, and mixes WiSE-FT's after the last.

    Args:
        federation: what is evaluated; its settings tell which averages, and when.
        models: the models that the run stores, with the weights that WiSE-FT starts from.
        observer: gets the scores.
        images: number of training images so far, of all clients together.

    Attributes:
        outputs: of the model that the run ends with; none before the last round.

    Raises:
        ExperimentError: WiSE-FT must choose a share, but there are no validation images.
    """

    def __init__(
        self, federation: Federation, models: KeptModels, observer: Observer, images: int
    ) -> None:
        self._federation, self._models = federation, models
        self._observer, self._images = observer, images
        evaluation, wise_ft = federation.evaluation, federation.settings.server.wise_ft
        if wise_ft == "auto" and (evaluation is None or ID_VAL not in evaluation.splits):
            raise ExperimentError(
                "server.wise_ft: auto chooses on in-domain validation images, and there are none "
                "here; set data.id_val above 0 (a data set's own split needs val rows, or "
                "data.own_split: false), or choose a share such as 0.5"
            )
        self._estimates: list[EstimateRow] = []
        self.outputs: list[Outputs] = []

    def completed(self, state: State, round: Round) -> State:
        """Evaluates the round's model if it is due."""
        started = time.perf_counter()
        evaluate, before = self._federation.settings.evaluate, self._images
        self._images += round.images
        if evaluate.budgets:
            due = any(before < budget <= self._images for budget in evaluate.budgets)
        else:
            due = evaluate.after(state.round, state.rounds)
        if due or self._federation.server.is_last(state):
            round.evaluations, round.estimates = self.rows(state), self._estimates
        round.evaluating = time.perf_counter() - started
        return state

    def rows(self, state: State) -> list[MetricRow]:
        """Evaluates the weights of a state, and further weights if requested."""
        last = self._federation.server.is_last(state)
        federation, evaluation = self._federation, self._federation.evaluation
        counted = last or bool(federation.settings.evaluate.budgets)
        rows: list[MetricRow] = []
        of_last: list[Score] = []
        due = self._due(state, last)
        for name, weights in due.items():
            if name in MEANS and rounds_in(state, name) == 1:
                scores = of_last  # the mean of this round's weights alone
            else:
                scores = []
                if evaluation is not None:
                    chosen = self.outputs if last and name == self._chosen(state, due) else None
                    scores += federation.scores(evaluation, weights, chosen)
                sent = Broadcast(state.round, weights)
                scores += federation.clients.scores_elsewhere(federation.server, sent, scores)
            if name == LAST:
                self._estimates = list(self._expected(state, scores))
                of_last = scores
            scores = [score for score in scores if score.split != UNLABELLED]
            if scores and name == LAST:
                self._observer.scores(state.round, scores)
            for score in scores:
                rows += score.rows(state.round, with_confusion=counted, weights=name)
        return rows

    def _chosen(self, state: State, due: Mapping[str, Weights]) -> str:
        """Returns which of the weights due the run ends with."""
        mean = self._federation.settings.server.averaging
        if WISE_FT in due:
            return WISE_FT
        return mean if mean in due and rounds_in(state, mean) > 1 else LAST

    def _expected(self, state: State, scores: Sequence[Score]) -> Iterator[EstimateRow]:
        """Yields what to expect where nobody trained, from confidence there and at sites left out.

        Of a method that left its clients out: their accuracies and confidences say how far one is
        from the other. No label is looked at. Only clients that are sites of their own count, and
        at least three of them.
        """
        method, federation = self._federation.method, self._federation
        sites = apart(federation.clients.held, federation.settings.clients.partition)
        known = [both for id, both in method.left_out(state).items() if id in sites]
        if len(known) < LEAST_SITES:
            return
        true, signals = zip(*known)
        for score in scores:
            if score.split in (TEST, UNLABELLED) and math.isfinite(score.confidence):
                counted = score.counted[0] or score.examples  # groups, of which labels say nothing
                estimate = calibrated(score.confidence, signals, true, counted)
                yield EstimateRow(
                    round=state.round,
                    site=score.domain,
                    images=score.examples,
                    confidence=score.confidence,
                    **estimate._asdict(),
                    sites=len(known),
                )

    def _due(self, state: State, last: bool) -> dict[str, Weights]:
        """Returns the weights to evaluate in a round, by name."""
        settings = self._federation.settings
        evaluate = settings.evaluate
        every = evaluate.averages == "every" or bool(evaluate.budgets)
        due = evaluate.averages != "never" and (last or every)
        weights = {LAST: state.weights}
        if not has_global_model(self._federation.method, self._federation.network):
            return weights
        for mean in MEANS:
            wanted = due or mean == settings.server.averaging
            if wanted and rounds_in(state, mean):
                weights[mean] = averaged(state, mean)
        if last and settings.server.wise_ft != "none":
            weights[WISE_FT] = self._mixed(state)
        return weights

    def _mixed(self, state: State) -> Weights:
        """Stores and returns WiSE-FT's weights after the last round."""
        settings = self._federation.settings.server
        start, end = self._models.read(START), averaged(state, settings.averaging)
        local = local_names(self._federation.method, self._federation.network)
        tried: dict[float, float] = {}
        if settings.wise_ft == "auto":
            tried = {s: self._id_val_accuracy(wise_ft(start, end, s, local)) for s in SHARES}
            share = max(SHARES, key=lambda s: (tried[s], s))
        else:
            share = float(settings.wise_ft)
        weights = wise_ft(start, end, share, local)
        self._models.keep(WISE_FT, f"{WISE_FT}.safetensors", weights)
        self._models.files.pop(START, None)  # not in the next checkpoint
        content = {"share": share, "in_domain_validation": {str(s): a for s, a in tried.items()}}
        self._models.folder.write_json(f"{MODELS}/wise_ft.json", content)
        log.info("WiSE-FT: %g of the averaged weights", share)
        return weights

    def _id_val_accuracy(self, weights: Weights) -> float:
        """Returns the mean over domains; uses no other split."""
        evaluation = self._federation.evaluation
        assert evaluation is not None
        evaluation = replace(evaluation, splits={ID_VAL: evaluation.splits[ID_VAL]})
        scores = evaluation.scores(self._federation.predictor(weights))
        return sum(score.accuracy for score in scores) / len(scores)
