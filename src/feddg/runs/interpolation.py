"""The end of a run that interpolates: served weights mixed with those that training started from.

Wortsman et al., "Robust Fine-Tuning of Zero-Shot Models" (CVPR 2022), mix the fine-tuned weights
with those before: the mixture keeps what the pretrained network knew of other domains. Training of
the whole network starts after ``train.head_rounds``; with none of them from the initial network,
whose classifier knows nothing yet.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace

from feddg.errors import ExperimentError
from feddg.evaluation.accuracy import Evaluation
from feddg.experiment import Experiment
from feddg.federation.averages import interpolated, served
from feddg.federation.local_training import load_weights
from feddg.messages import Weights
from feddg.methods.base import Method, State, local_names
from feddg.models.network import Network
from feddg.records import ID_VAL, INTERPOLATED
from feddg.runs.folder import MODELS, RunFolder
from feddg.runs.kept_models import START, KeptModels

log = logging.getLogger("feddg")

SHARES = tuple(tenth / 10 for tenth in range(1, 11))
"""Shares of the served weights among which ``auto`` chooses."""


def _require_validation(experiment: Experiment, evaluation: Evaluation | None) -> None:
    """Raises ExperimentError where a share is to be chosen on images that nobody set aside."""
    splits = evaluation.splits if evaluation is not None else {}
    if experiment.server.interpolate == "auto" and ID_VAL not in splits:
        raise ExperimentError(
            "server.interpolate: auto chooses on in-domain validation images, and there are none "
            "here; set data.id_val above 0, or say a share such as 0.5"
        )


class Interpolation:
    """Makes the interpolated weights of a run, and keeps them.

    Args:
        experiment: what is run.
        method: whose weights they are.
        network: tries the shares.
        evaluation: what ``auto`` chooses on.
    """

    def __init__(
        self,
        experiment: Experiment,
        method: Method,
        network: Network,
        evaluation: Evaluation | None,
    ) -> None:
        _require_validation(experiment, evaluation)
        if experiment.server.interpolate != "none" and experiment.model.weights is None:
            log.warning(
                "server.interpolate mixes in the weights that training started from, and these "
                "are random: interpolation is for pretrained networks (model.weights)"
            )
        self._settings, self._first = experiment.server, experiment.train.head_rounds
        self._method, self._network, self._evaluation = method, network, evaluation

    def note(self, state: State, kept: KeptModels) -> None:
        """Keeps the weights that training of the whole network starts from, when it does."""
        if self._settings.interpolate != "none" and state.round == self._first:
            kept.keep(START, f"round-{state.round}.safetensors", state.weights)

    def finish(self, state: State, folder: RunFolder, kept: KeptModels) -> Weights | None:
        """Returns the interpolated weights after the last round, kept; None if none are wanted."""
        if self._settings.interpolate == "none":
            return None
        start, end = kept.read(START), served(state, self._settings.serve)
        local = local_names(self._method, self._network)
        tried: dict[float, float] = {}
        if self._settings.interpolate == "auto":
            tried = {s: self._accuracy(interpolated(start, end, s, local)) for s in SHARES}
            share = max(SHARES, key=lambda s: (tried[s], s))
        else:
            share = float(self._settings.interpolate)
        weights = interpolated(start, end, share, local)
        kept.keep(INTERPOLATED, f"{INTERPOLATED}.safetensors", weights)
        kept.drop(START)
        _write(folder, share, tried)
        return weights

    def _accuracy(self, weights: Weights) -> float:
        """Returns the in-domain validation accuracy, mean over domains; no other split is seen."""
        assert self._evaluation is not None
        splits = {ID_VAL: self._evaluation.splits[ID_VAL]}
        load_weights(self._network, weights)
        scores = replace(self._evaluation, splits=splits).scores(
            self._method.predictor(self._network)
        )
        return sum(score.accuracy for score in scores) / len(scores)


def _write(folder: RunFolder, share: float, tried: Mapping[float, float]) -> None:
    content = {"share": share, "in_domain_validation": {str(s): a for s, a in tried.items()}}
    folder.replace(f"{MODELS}/interpolation.json", json.dumps(content, indent=1) + "\n")
    log.info("interpolated: %g of the served weights", share)
