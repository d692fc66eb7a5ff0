"""The parts of a run for any transport, and the evaluation after a round."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from feddg.clients.client import Worker
from feddg.data.fingerprint import ImagesFile
from feddg.data.pixels import ArrayPixels
from feddg.diagnostics import Diagnostic, emit
from feddg.errors import ExperimentError
from feddg.evaluation.accuracy import Evaluation, Score, mean_score
from feddg.evaluation.travel import calibrated
from feddg.experiment import Experiment
from feddg.federation.averages import MEANS, averaged, rounds_in, wise_ft
from feddg.federation.inprocess import InProcess
from feddg.federation.local_training import load_weights
from feddg.federation.server import Server
from feddg.federation.transport import Transport
from feddg.messages import Broadcast, Weights
from feddg.methods.base import (
    Method,
    Round,
    RoundHook,
    State,
    has_global_model,
    local_names,
)
from feddg.methods.composition import build_method
from feddg.models.backbones import require_weights
from feddg.models.network import Network
from feddg.privacy.building import NO_DEFENCES, Defences
from feddg.records import (
    ID_VAL,
    LAST,
    TEST,
    UNLABELLED,
    WISE_FT,
    ClientsTable,
    EstimateRow,
    EvaluationRow,
)
from feddg.runs.diagnostics import about_domains
from feddg.runs.figures import draw_figures
from feddg.runs.folder import MODELS, START, KeptModels, RunFolder
from feddg.runs.observer import Observer
from feddg.runs.prepare import (
    Images,
    Progress,
    build,
    build_evaluation,
    build_workers,
    clients_table,
    defences_for,
    load_images,
    near_copy_diagnostics,
)

Elsewhere = Callable[[Server, Broadcast, Sequence[Score]], Sequence[Score]]
"""Evaluates a round's weights where the images are; receives the scores so far."""


@dataclass(frozen=True)
class RunContext:
    """All parts of a run; the transport knows where the clients are.

    Attributes:
        method: the method to run.
        worker: the network, on its device.
        transport: the transport of messages.
        evaluation: evaluation of the global model here, if there are images.
        clients: the clients' data, for ``clients.json``.
        elsewhere: evaluates the global model where the images are.
        draw: draws the report's figures once there is a shared context.
        defences: the defences that updates pass through.
        remote: whether clients are on other machines; messages to them stay in the ledger even if
            their round fails.
        contents: the training and test images, if they are here.
        workers: number of processes that share the clients.
    """

    method: Method
    worker: Worker
    transport: Transport
    evaluation: Evaluation | None
    clients: ClientsTable
    elsewhere: Elsewhere = lambda server, broadcast, scores: ()
    draw: Callable[[Path, State], None] = lambda folder, state: None
    defences: Defences = NO_DEFENCES
    remote: bool = False
    contents: ImagesFile | None = None
    workers: int = 1


Prepare = Callable[[Experiment, Path, Progress, dict[int, Weights]], RunContext]
"""Prepares a run from the experiment, the cache folder and the memories of a checkpoint."""


def in_process(
    experiment: Experiment,
    cache: Path,
    progress: Progress,
    memories: dict[int, Weights],
    *,
    clients: Callable[..., InProcess] = InProcess,
) -> RunContext:
    """Prepares a run whose clients train in this process, or by ``clients`` in several."""
    method = build_method(experiment.method.name, experiment.method.settings)
    method.check(experiment)
    method.read_files()
    require_weights(experiment.model.backbone, experiment.model.weights)
    images = load_images(experiment, cache, progress)
    if isinstance(images.pixels, ArrayPixels):  # others would be decoded once more
        emit(*near_copy_diagnostics(experiment, images))
    return context_of(experiment, images, cache, memories, clients)


def context_of(
    experiment: Experiment,
    images: Images,
    cache: Path,
    memories: dict[int, Weights],
    clients: Callable[..., InProcess] = InProcess,
) -> RunContext:
    """Returns what a run works with, of its images."""
    method, network = build(experiment, len(images.table.class_names))
    emit(*method.diagnostics(experiment))
    experiment = images.trained_by(experiment)
    defences = defences_for(experiment, method, network)
    workers = build_workers(experiment, network, cache, defences)
    worker = workers[0]

    def draw(folder: Path, state: State) -> None:
        draw_figures(folder, images, method, state, experiment.seed)

    return RunContext(
        method,
        worker,
        clients(method, workers, len(images.partition), images.examples, memories, defences),
        build_evaluation(experiment, images, worker),
        clients_table(images),
        draw=draw if experiment.evaluate.pictures else lambda folder, state: None,
        defences=defences,
        contents=images.contents,
    )


# WiSE-FT at the end of a run: averaged weights mixed with those that training started from.
#
# Wortsman et al., "Robust Fine-Tuning of Zero-Shot Models" (CVPR 2022), mix the fine-tuned weights
# with those before: the mixture keeps what the pretrained network knew of other domains. Training
# of the whole network starts after ``train.head_rounds``; with none of them from the initial
# network, whose classifier knows nothing yet.


log = logging.getLogger("feddg")

SHARES = tuple(tenth / 10 for tenth in range(1, 11))
"""Shares of the averaged weights that ``auto`` tries."""


class WiseFT:
    """Computes and stores a run's WiSE-FT weights; the run has stored the starting weights.

    Args:
        experiment: the experiment.
        method: the method.
        network: used to try the shares.
        evaluation: the images on which ``auto`` chooses.
        folder: the run's folder.
        models: the models that the run stores.

    Raises:
        ExperimentError: a share must be chosen, but there are no validation images.
    """

    def __init__(
        self,
        experiment: Experiment,
        method: Method,
        network: Network,
        evaluation: Evaluation | None,
        folder: RunFolder,
        models: KeptModels,
    ) -> None:
        self._settings = experiment.server
        self._method, self._network, self._evaluation = method, network, evaluation
        self._folder, self._models = folder, models
        if self._settings.wise_ft == "auto" and (
            evaluation is None or ID_VAL not in evaluation.splits
        ):
            raise ExperimentError(
                "server.wise_ft: auto chooses on in-domain validation images, and there are "
                "none here; set data.id_val above 0, or say a share such as 0.5"
            )
        if experiment.model.weights is None:
            emit(
                Diagnostic(
                    "wise-ft-from-random-weights",
                    "warning",
                    "server.wise_ft mixes in the weights that training started from, and "
                    "these are random.",
                    "Choose pretrained weights (model.weights), or leave server.wise_ft away.",
                )
            )

    def finish(self, state: State) -> Weights:
        """Stores and returns the interpolated weights after the last round."""
        start, end = self._models.read(START), averaged(state, self._settings.averaging)
        local = local_names(self._method, self._network)
        tried: dict[float, float] = {}
        if self._settings.wise_ft == "auto":
            tried = {s: self._accuracy(wise_ft(start, end, s, local)) for s in SHARES}
            share = max(SHARES, key=lambda s: (tried[s], s))
        else:
            share = float(self._settings.wise_ft)
        weights = wise_ft(start, end, share, local)
        self._models.keep(WISE_FT, f"{WISE_FT}.safetensors", weights)
        self._models.drop(START)
        content = {"share": share, "in_domain_validation": {str(s): a for s, a in tried.items()}}
        self._folder.replace(f"{MODELS}/wise_ft.json", json.dumps(content, indent=1) + "\n")
        log.info("WiSE-FT: %g of the averaged weights", share)
        return weights

    def _accuracy(self, weights: Weights) -> float:
        """Returns the in-domain validation accuracy, mean over domains; uses no other split."""
        assert self._evaluation is not None
        in_domain = {ID_VAL: self._evaluation.splits[ID_VAL]}
        evaluation = replace(self._evaluation, splits=in_domain)
        scores = evaluation.scores(predictor(self._method, self._network, weights))
        return sum(score.accuracy for score in scores) / len(scores)


# Which weights are measured after a round, and the measuring: the global model or clients' own.


def predictor(method: Method, network: Network, weights: Weights) -> nn.Module:
    """Returns a global model as a predictor, on the network that clients also use."""
    load_weights(network, weights)
    return method.predictor(network)


def measured(
    evaluation: Evaluation, server: Server, network: Network, weights: Weights
) -> list[Score]:
    """Returns the scores of the global model, or their mean over clients without a shared model.

    For a client that has not trained yet, the starting weights count.
    """
    method = server.method
    if has_global_model(method, network):
        return evaluation.scores(predictor(method, network, weights))
    memories, ids = server.transport.memories, server.transport.clients
    local = local_names(method, network)
    waiting = sum(id not in memories for id in ids)
    found: list[list[Score]] = []
    if waiting:
        found += [evaluation.scores(predictor(method, network, weights))] * waiting
    for id in ids:
        if id in memories:
            own = {name: tensor for name, tensor in memories[id].items() if name in local}
            found.append(evaluation.scores(predictor(method, network, own)))
    return [mean_score(scores) for scores in zip(*found, strict=True)]


class Measurer(RoundHook):
    """Evaluates the weights of rounds.

    Args:
        experiment: tells which averages are evaluated, and when.
        network: loaded with the weights in turn.
        evaluation: the images here, if any.
        elsewhere: evaluates on images at other places.
        wise_ft: interpolates the final and the starting weights, if requested.
        observer: gets the scores.
        images: number of training images so far, of all clients together.

    Attributes:
        server: the server of the rounds.
    """

    server: Server

    def __init__(
        self,
        experiment: Experiment,
        network: Network,
        evaluation: Evaluation | None,
        elsewhere: Elsewhere,
        wise_ft: WiseFT | None,
        observer: Observer,
        images: int = 0,
    ) -> None:
        self._experiment, self._network, self._images = experiment, network, images
        self._evaluation, self._elsewhere = evaluation, elsewhere
        self._wise_ft, self._observer = wise_ft, observer
        self._at_chance: dict[str, Diagnostic] = {}
        self._estimates: list[EstimateRow] = []

    def completed(self, state: State, round: Round) -> State:
        """Evaluates the round's model if it is due."""
        started = time.perf_counter()
        evaluate, before = self._experiment.evaluate, self._images
        self._images += round.images
        if evaluate.budgets:
            due = any(before < budget <= self._images for budget in evaluate.budgets)
        else:
            due = evaluate.after(state.round, state.rounds)
        if due or self.server.is_last(state):
            round.evaluations, round.estimates = self.rows(state), self._estimates
            found = about_domains(round.evaluations)
            emit(*(one for name, one in found.items() if name not in self._at_chance))
            self._at_chance |= found
        round.evaluating = time.perf_counter() - started
        return state

    def rows(self, state: State) -> list[EvaluationRow]:
        """Evaluates the weights of a state, and further weights if requested."""
        last = self.server.is_last(state)
        counted = last or bool(self._experiment.evaluate.budgets)
        rows: list[EvaluationRow] = []
        for name, weights in self._due(state, last).items():
            scores: list[Score] = []
            if self._evaluation is not None:
                scores += measured(self._evaluation, self.server, self._network, weights)
            scores += self._elsewhere(self.server, Broadcast(state.round, weights), scores)
            if name == LAST:
                self._estimates = list(self._expected(state, scores))
            scores = [score for score in scores if score.split != UNLABELLED]
            if scores and name == LAST:
                self._observer.scores(state.round, scores)
            rows += [
                score.row(state.round, with_confusion=counted, weights=name) for score in scores
            ]
        return rows

    def _expected(self, state: State, scores: Sequence[Score]) -> Iterator[EstimateRow]:
        """Yields what to expect where nobody trained, from confidence there and at sites left out.

        Of a method that left its clients out: their accuracies and confidences say how far one is
        from the other. No label is looked at.
        """
        method = self.server.method
        accuracies, confidences = method.left_out(state), method.left_out_confidence(state)
        ids = sorted(confidences)
        for score in scores if ids else ():
            if score.split in (TEST, UNLABELLED) and math.isfinite(score.confidence):
                own, true = [confidences[id] for id in ids], [accuracies[id] for id in ids]
                found = calibrated(score.confidence, own, true, score.examples)
                log.info(
                    "round %d: %s, without its labels: expected %.0f %%, %.0f to %.0f",
                    *(state.round, score.domain, *(100 * end for end in found)),
                )
                yield EstimateRow(
                    round=state.round,
                    site=score.domain,
                    images=score.examples,
                    confidence=score.confidence,
                    **found._asdict(),
                    sites=len(ids),
                )

    def _due(self, state: State, last: bool) -> dict[str, Weights]:
        """Returns the weights to evaluate in a round, by name."""
        evaluate = self._experiment.evaluate
        every = evaluate.averages == "every" or bool(evaluate.budgets)
        due = evaluate.averages != "never" and (last or every)
        found = {LAST: state.weights}
        if not has_global_model(self.server.method, self._network):
            return found
        for mean in MEANS:
            wanted = due or mean == self._experiment.server.averaging
            if wanted and rounds_in(state, mean):
                found[mean] = averaged(state, mean)
        if last and self._wise_ft is not None:
            found[WISE_FT] = self._wise_ft.finish(state)
        return found
