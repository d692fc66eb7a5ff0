"""Which weights are measured after a round, and the measuring: the global model or clients' own."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from feddg.clients.client import Worker
from feddg.clients.threads import threads
from feddg.evaluation.accuracy import Evaluation, Score, mean_score
from feddg.experiment import Experiment
from feddg.federation.averages import MEANS, rounds_in, served
from feddg.federation.local_training import load_weights
from feddg.federation.server import Server
from feddg.messages import Weights
from feddg.methods.base import Method, has_global_model, local_names
from feddg.models.network import Network
from feddg.records import INTERPOLATED, LAST, EvaluationRow
from feddg.rng import stream
from feddg.runs.folder import RunFolder
from feddg.runs.interpolation import Interpolation
from feddg.runs.kept_models import KeptModels
from feddg.runs.observer import Observer
from feddg.runs.prepared import Elsewhere


def predictor(method: Method, network: Network, weights: Weights) -> nn.Module:
    """Returns a global model as a predictor, on the network that clients also use."""
    load_weights(network, weights)
    return method.predictor(network)


def measured(
    evaluation: Evaluation, server: Server, network: Network, weights: Weights
) -> list[Score]:
    """Returns the scores of the global model, or their mean over clients that share none.

    A client that has not trained yet counts with the weights it would start from.
    """
    method = server.method
    if has_global_model(method, network):
        return evaluation.scores(predictor(method, network, weights))
    memories = server.transport.memories
    ids = server.transport.clients
    local = local_names(method, network)
    waiting = sum(id not in memories for id in ids)
    found: list[list[Score]] = []
    if waiting:
        found += [evaluation.scores(predictor(method, network, weights))] * waiting
    for id in ids:
        if id in memories:
            own = {name: tensor for name, tensor in memories[id].items() if name in local}
            load_weights(network, own)
            found.append(evaluation.scores(method.predictor(network)))
    return [mean_score(scores) for scores in zip(*found, strict=True)]


@dataclass
class Measurer:
    """Measures the weights of the server's rounds.

    Attributes:
        experiment: says which means are measured, and when.
        network: takes the weights in turn.
        folder: the run's.
        models: the models the run keeps.
        evaluation: the images here, if any.
        elsewhere: measures where other images are.
        interpolation: mixes the final weights with those that training began from.
        observer: is told the scores.
    """

    experiment: Experiment
    network: Network
    folder: RunFolder
    models: KeptModels
    evaluation: Evaluation | None
    elsewhere: Elsewhere
    interpolation: Interpolation
    observer: Observer

    def rows(self, server: Server) -> list[EvaluationRow]:
        """Measures the weights of the server's round, and what is to be measured beside them."""
        state = server.state
        last = server.is_last
        rows: list[EvaluationRow] = []
        for name, weights in self._due(server, last).items():
            scores: list[Score] = []
            if self.evaluation is not None:
                scores += measured(self.evaluation, server, self.network, weights)
            scores += self.elsewhere(server, weights, scores)
            if scores and name == LAST:
                self.observer.scores(state.round, scores)
            rows += [score.row(state.round, with_confusion=last, weights=name) for score in scores]
        return rows

    def _due(self, server: Server, last: bool) -> dict[str, Weights]:
        """Returns the weights to be measured in a round, by name."""
        state, averages = server.state, self.experiment.evaluate.averages
        due = averages == "every" or (last and averages == "last_round")
        found = {LAST: state.weights}
        if not has_global_model(server.method, self.network):
            return found
        for mean in MEANS:
            wanted = due or mean == self.experiment.server.serve
            if wanted and rounds_in(state, mean):
                found[mean] = served(state, mean)
        mixture = self.interpolation.finish(state, self.folder, self.models) if last else None
        return found if mixture is None else found | {INTERPOLATED: mixture}


def finite_probe(
    experiment: Experiment, method: Method, worker: Worker
) -> Callable[[Weights], str | None]:
    """Returns what tries weights on images of noise before they become the global model."""
    size = experiment.data.image_size
    noise = torch.rand(2, 3, size, size, generator=stream(experiment.seed, "probe"))
    images = noise.to(worker.device).contiguous(memory_format=torch.channels_last)

    def probe(weights: Weights) -> str | None:
        model = predictor(method, worker.network, weights).eval()
        with torch.inference_mode(), threads(worker.threads), worker.autocast():
            finite = bool(torch.isfinite(model(images)).all())
        return None if finite else "the fused model's predictions are not finite"

    return probe
