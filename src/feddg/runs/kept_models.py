"""The models that a run folder keeps: the best by each rule, and how any of them is found again.

The last round's weights and the means over rounds are in the checkpoint. What else counts lies in
``models/``, one safetensors file per chosen round, however many rules choose it. A file is written
before the checkpoint that names it, and removed after one that does not: a process killed at any
moment leaves what its last whole checkpoint knows.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from feddg.errors import RunError
from feddg.experiment import Experiment, load_stored
from feddg.federation.averages import MEANS, Means, prefix_of
from feddg.messages import Weights
from feddg.methods.base import Method, State
from feddg.models.network import Network
from feddg.records import ID_VAL, INTERPOLATED, LAST, VAL, EvaluationRow, MetricsRow
from feddg.runs.checkpoints import CHECKPOINTS, DROPPED, checkpoint_weights, newest_index
from feddg.runs.evaluations import Evaluations
from feddg.runs.folder import EXPERIMENT, MODELS, RunFolder
from feddg.runs.reading import RunRecord, read_run
from feddg.runs.selection_rules import FINAL, SELECTION_RULES, SelectionRule, find_rule
from feddg.settings import EvaluateSettings
from feddg.storage import why

log = logging.getLogger("feddg")
START = "start"
"""What the index calls the weights that the training of the whole network started from."""


class KeptModels:
    """Writes the models that rules choose, as a run goes on.

    Args:
        folder: the run's.
        files: by rule, the files that the checkpoint names.
        rows: the evaluations so far.
        chosen: by what a round is chosen.
    """

    def __init__(
        self,
        folder: RunFolder,
        files: Mapping[str, str],
        rows: Sequence[EvaluationRow],
        chosen: EvaluateSettings,
    ) -> None:
        self._folder, self._rows, self._chosen = folder, list(rows), chosen
        self.files = dict(files)
        self._warned: set[str] = set()

    def take_in(self, state: State, rows: Sequence[MetricsRow]) -> Mapping[str, str]:
        """Keeps the model of a completed round if a rule chooses it.

        Args:
            state: that of the round.
            rows: the round's.

        Returns:
            All files that are kept now, by rule; for the checkpoint.
        """
        new = [row for row in rows if isinstance(row, EvaluationRow)]
        if new:
            self._rows += new
            evaluations = Evaluations(
                self._rows,
                select_by=self._chosen.select_by,
                select_over=self._chosen.select_over,
            )
            self._warn_of_no_choice(evaluations)
            for rule in SELECTION_RULES.values():
                if rule.weights == LAST and rule.model != FINAL.model:
                    self._choose(rule.model, rule.choose(evaluations), state)
        return self.files

    def _warn_of_no_choice(self, evaluations: Evaluations) -> None:
        """Says once of each split of validation that its metric is not defined for its images."""
        last = evaluations.rounds[-1] if evaluations.rounds else None
        for split in {ID_VAL, VAL} - self._warned:
            if last is None or evaluations.accuracy(last, split) is None:
                continue
            if evaluations.preference(last, split) is None:
                self._warned.add(split)
                log.warning(
                    "%s is not defined for every domain of %s after round %d, as where all images "
                    "are of one class; no round is chosen by it then (evaluate.select_by).",
                    self._chosen.select_by,
                    split,
                    last,
                )

    def _choose(self, name: str, round: int | None, state: State) -> None:
        file = f"round-{round}.safetensors"
        if round == state.round:
            self.keep(name, file, state.weights)
        elif file in self.files.values():
            self.files[name] = file
        else:  # its file is not kept, or no round is chosen
            self.files.pop(name, None)

    def keep(self, name: str, file: str, weights: Weights) -> None:
        """Writes weights to a file and has the next checkpoint name it."""
        if file not in self.files.values():
            self._folder.write_tensors(f"{MODELS}/{file}", weights)
        self.files[name] = file

    def read(self, name: str) -> Weights:
        """Returns the weights of a kept model."""
        return _read(self._folder.path, self.files[name])

    def drop(self, name: str) -> None:
        """Has the next checkpoint forget a model."""
        self.files.pop(name, None)


def means_of(experiment: Experiment, method: Method, network: Network) -> Means:
    """Returns what keeps the means over rounds that an experiment serves or measures."""
    serve, kept = experiment.server.serve, experiment.evaluate.averages != "never"
    wanted = [mean for mean in MEANS if kept or mean == serve]
    return Means(method, network, experiment.server, wanted)


def drop_weights(folder: Path) -> None:
    """Deletes the weights of a complete run: checkpoints and kept models. Its numbers stay.

    Raises:
        RunError: a file cannot be deleted.
    """
    checkpoints = folder / CHECKPOINTS
    try:
        (checkpoints / DROPPED).touch()
        for place in (checkpoints, folder / MODELS):
            for file in place.glob("*.safetensors"):
                file.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"Cannot delete the weights of {folder}: {why(error)}.") from None


# Finding a model again


def served_rule(folder: Path) -> SelectionRule:
    """Returns the rule whose model a run serves: what ``server`` in its experiment says."""
    if INTERPOLATED in _files(folder):
        return find_rule(INTERPOLATED)
    serve = load_stored(folder / EXPERIMENT).server.serve
    # Until the tail begins, the last weights are served in its place.
    return FINAL if serve == LAST or not _mean(folder, serve) else find_rule(serve)


def kept_weights(folder: Path, rule: SelectionRule) -> tuple[Weights, int]:
    """Returns the weights that a rule chooses of a run, and the round they are from; only reads.

    Raises:
        RunError: there is no checkpoint, or no model by this rule; says why.
    """
    if rule.model == FINAL.model:
        return checkpoint_weights(folder), _round(folder)
    if rule.weights in MEANS:
        mean = _mean(folder, rule.weights)
        if not mean:
            raise RunError(_no_mean(folder, rule))
        return checkpoint_weights(folder) | mean, _round(folder)
    files = _files(folder)
    if rule.model not in files:
        raise RunError(_no_model(read_run(folder), rule))
    round = rule.choose(read_run(folder).evaluations)
    return _read(folder, files[rule.model]), _round(folder) if round is None else round


def _no_mean(folder: Path, rule: SelectionRule) -> str:
    experiment = load_stored(folder / EXPERIMENT)
    kept = experiment.evaluate.averages != "never" or experiment.server.serve == rule.weights
    if not kept:
        return f"{folder} keeps no {rule.model!r} model: its evaluate.averages is never"
    return (
        f"{folder} keeps no {rule.model!r} model after round {_round(folder)} of "
        f"{experiment.train.rounds}: the mean has not begun"
    )


def _no_model(run: RunRecord, rule: SelectionRule) -> str:
    start = f"{run.folder} has no {rule.model!r} model: "
    if rule.weights == INTERPOLATED:
        return start + "that takes server.interpolate, and the run's last round"
    round = rule.choose(run.evaluations)
    if round is not None:
        return start + f"the rule chooses round {round}, whose weights this run did not keep"
    needed = {
        ID_VAL: "no in-domain validation images were measured (data.id_val sets some aside)",
        VAL: "no held-out validation domain was measured (hold_out.val names one)",
    }
    return start + needed.get(rule.split or "", "the rule chooses no round yet")


def _mean(folder: Path, mean: str) -> Weights:
    return checkpoint_weights(folder, f"extras/{prefix_of(mean)}")


def _round(folder: Path) -> int:
    return newest_index(folder).round


def _files(folder: Path) -> dict[str, str]:
    return dict(newest_index(folder).models)


def _read(folder: Path, file: str) -> Weights:
    return newest_index(folder).load_model(folder / MODELS, file)
