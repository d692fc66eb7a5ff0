"""Carries out an experiment: setup, rounds, evaluation, records, checkpoints."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy
import torch
from pydantic import Field
from torch import Tensor, nn

from feddg.data.data_set import find_augmentation
from feddg.diagnostics import Diagnostic, Progress, collected, emit, noted, warn
from feddg.errors import FeddgError, RunError, TrainingDiverged, first_names, in_words, need
from feddg.evaluation.accuracy import Outputs
from feddg.experiment import Experiment, load_stored
from feddg.federation.federation import Federation
from feddg.federation.transport import Ledger
from feddg.methods.base import Method, Round, RoundHook, State, has_global_model, title_of
from feddg.methods.composition import build_method
from feddg.models.precision import as_usual
from feddg.models.trained import fingerprint
from feddg.privacy.building import require_packages
from feddg.readers import with_page
from feddg.records import (
    ID_VAL,
    WISE_FT,
    EnergyThreshold,
    JsonFile,
    LedgerRow,
    MetricRow,
    RoundRecord,
    RoundRow,
    SetupRow,
)
from feddg.runs.details import write_details
from feddg.runs.diagnostics import about_divergence, about_end, about_support
from feddg.runs.energy import energy, energy_threshold
from feddg.runs.evaluate import Evaluate
from feddg.runs.figures import draw_figures, draw_unseen
from feddg.runs.folder import FIGURES, SNAPSHOTS, KeptModels, RunFolder
from feddg.runs.observer import Observer, Together, chosen_trackers
from feddg.runs.prepare import (
    Images,
    Prepare,
    build_evaluation,
    environment,
    federation_of,
    give_memory_back,
    images_of,
    in_process,
    load_images,
)
from feddg.runs.provenance import IMAGES, check_images
from feddg.runs.reading import (
    CLIENTS,
    DEPLOYMENT,
    ENVIRONMENT,
    EXPERIMENT,
    LEDGER,
    METRICS_FILE,
    ROUNDS_FILE,
    SUMMARY,
    WHOLE_FILES,
    Run,
    read_run,
    require_run,
)
from feddg.runs.summary import summarize
from feddg.storage import cache_folder, is_file

log = logging.getLogger("feddg")
OOD_SCORE = "ood_score.json"
SAME = ("precision", "torch", "device")
"""What of the environment numbers depend on most."""


class Records(RoundHook):
    """Writes a completed round: its rows first, then the checkpoint that makes it count.

    Args:
        federation: what is run.
        folder: the run's.
        models: the stored models.
        snapshots: rounds whose weights are kept.
        evaluate: evaluates the model that training starts from.
        so_far: what was recorded before, of a run that goes on.

    Attributes:
        models: the stored models.
        ledger_rows: rows of the current round, until it counts.
    """

    def __init__(
        self,
        federation: Federation,
        folder: RunFolder,
        models: KeptModels,
        snapshots: Collection[int],
        evaluate: Evaluate,
        so_far: Run,
    ) -> None:
        self._federation, self._folder, self.models = federation, folder, models
        setup, rounds = so_far.setup or SetupRow(), so_far.rounds
        self._spent = {"images": 0, "bytes": setup.bytes, "seconds": setup.seconds}
        for row in rounds:
            self._add(row)
        self._snapshots, self._evaluate = snapshots, evaluate
        # Where sites remember rounds or what is sent costs privacy, none may be done twice: not
        # even after a crash while a checkpoint was under way, during the next round.
        self._beside = not federation.remote and not federation.defences.defences
        self.ledger_rows: list[LedgerRow] = []

    def carried(self, row: LedgerRow) -> None:
        """Writes a row of the ledger at once, because a message over a network cannot be undone."""
        self._folder.append(LEDGER, [row])

    def begun(self, state: State, round: Round) -> None:
        """Writes what came of the setup, pictures of it if the images are here, and scores."""
        give_memory_back()
        ledger = self._federation.ledger
        row = SetupRow(
            seconds=round.seconds,
            bytes=sum(ledger.bytes.values()) if ledger else 0,
            groups=round.groups,
            left_out=round.left_out,
        )
        self._spent |= {"bytes": row.bytes, "seconds": row.seconds}
        images, settings = self._federation.clients, self._federation.settings
        if settings.evaluate.pictures and isinstance(images, Images):
            # Before the checkpoint: a run that goes on from it draws none.
            with self._folder.writing(FIGURES) as figures:
                draw_figures(figures, images, self._federation.method, state, settings.seed)
        self.keep(state, [row], self._evaluate.rows(state))

    def completed(self, state: State, round: Round) -> State:
        """Makes the round count."""
        row = round.row.took(evaluate=round.evaluating)
        self._add(row)
        self.keep(state, [row, *round.estimates], round.evaluations)
        return state

    def _add(self, row: RoundRow) -> None:
        """Adds what a round took."""
        self._spent["images"] += row.images
        self._spent["bytes"] += row.bytes_up + row.bytes_down
        self._spent["seconds"] += sum(v for name, v in row.seconds.items() if name != "evaluate")

    def keep(self, state: State, records: Sequence[RoundRecord], rows: Sequence[MetricRow]) -> None:
        """Writes numbers, records, ledger and checkpoint of the round in ``state``, in this order.

        So a round that has a record has all its numbers.
        """
        rows = [row.model_copy(update=self._spent) for row in rows]
        self._folder.append(METRICS_FILE, rows)
        self._folder.append(ROUNDS_FILE, records)
        self._folder.append(LEDGER, self.ledger_rows)
        self.ledger_rows.clear()
        if state.round in self._snapshots:
            name = f"{SNAPSHOTS}/round-{state.round}.safetensors"
            self._folder.write_tensors(name, state.weights)
        files = self.models.take_in(state, rows)
        transport = self._federation.transport
        memories, changed = transport.memories, transport.remembered
        self._folder.save_checkpoint(state, memories, changed, files, beside=self._beside)
        transport.remembered.clear()


# The out-of-distribution score of a run's model: the energy above which an image is unlike
# training.
#
# ``ood_score.json`` keeps a threshold for each model by the fingerprint of its weights, so
# that no model is ever served with another one's.


class EnergyThresholds(JsonFile):
    """The file of thresholds, by the fingerprint of the measured weights."""

    models: dict[str, EnergyThreshold] = Field(default_factory=dict)


def write_energy_threshold(folder: RunFolder, model: nn.Module, logits: Tensor) -> None:
    """Measures the threshold on the in-domain validation images and stores it in the folder.

    Nothing is stored without such images, or if the model returns log-probabilities.

    Args:
        folder: the run's folder.
        model: predicts as the run's method does.
        logits: its ``(n, classes)`` for these images.
    """
    threshold = energy_threshold(energy(logits))
    if threshold is None:
        return
    before = EnergyThresholds.read(folder.path / OOD_SCORE) or EnergyThresholds()
    row = EnergyThreshold(threshold=threshold, images=len(logits))
    folder.write_json(OOD_SCORE, EnergyThresholds(models=before.models | {fingerprint(model): row}))


def read_energy_threshold(folder: Path, model: nn.Module) -> EnergyThreshold | None:
    """Returns the threshold of a model, or None if the folder has none for its weights.

    Raises:
        RunError: the file is damaged.
    """
    thresholds = EnergyThresholds.read(folder / OOD_SCORE)
    return None if thresholds is None else thresholds.models.get(fingerprint(model))


def experiment_of(folder: Path, cache: Path | None) -> Experiment:
    """Returns the experiment of a run that is to go on here.

    Raises:
        RunError: the folder holds no run, or a deployment's; its experiment was changed, or its
            images are not those it began with.
    """
    require_run(folder)
    _refuse_deployment(folder)
    experiment = load_stored(folder / EXPERIMENT)
    check_images(folder, experiment, cache)
    return experiment


def _refuse_deployment(path: Path) -> None:
    """Refuses the run of a deployment, whose clients' images are elsewhere."""
    if is_file(path / DEPLOYMENT):
        raise RunError(
            f"{path} is a deployment's run, whose images are at the sites: continue it with `feddg "
            "deploy run` in the app's folder"
        )


def load_finished_run(folder: Path, cache: Path, progress: Progress) -> Federation:
    """Returns a run's federation as it was after its last round, to look into it.

    Raises:
        FeddgError: the folder has no completed round, or the images have changed since the run.
    """
    require_run(folder)
    experiment = load_stored(folder / EXPERIMENT)
    with RunFolder(folder) as opened:
        checkpoint = opened.load_checkpoint()
    if checkpoint is None:
        raise RunError(f"{folder} has no completed round to look into")
    check_images(folder, experiment, cache)
    federation = federation_of(experiment, load_images(experiment, cache, progress), cache)
    return federation.resume(checkpoint.state, checkpoint.memories)


def carry_out(
    path: Path,
    experiment: Experiment,
    *,
    observer: Observer | None = None,
    cache: Path | None = None,
    prepare: Prepare = in_process,
    snapshots: Collection[int] = (),
    keep_unstarted: bool = False,
    of_sites: bool = False,
) -> Run:
    """Carries out an experiment in the folder ``path``, with clients from ``prepare``.

    A folder made for a run that fails before its first round is removed again, unless
    ``keep_unstarted``, which a comparison's page needs to report the reason. A deployment's run is
    gone on with ``of_sites`` only. See :func:`feddg.api.run` for the other arguments and errors.
    """
    with RunFolder(path) as folder:
        folder.keep_experiment(experiment)
        complete = is_complete(path)
        if not complete:
            if not of_sites:
                _refuse_deployment(path)
            (path / "report.html").unlink(missing_ok=True)  # of an earlier state
            work = partial(_run, experiment, folder, cache_folder(cache), prepare, snapshots)
            try:
                require_installed(experiment)
                _execute(folder, observer or Observer(), work)
            except Exception:
                if not keep_unstarted:
                    folder.remove_unstarted()
                raise
    kept = {file.stem for file in (path / SNAPSHOTS).glob("round-*.safetensors")}
    if gone := [str(round) for round in sorted(snapshots) if f"round-{round}" not in kept]:
        warn(
            "snapshots-missed",
            f"{path} keeps no model of round {first_names(gone)}: one is kept while the run trains "
            "(--snapshots).",
            "Run the experiment in another folder (--out).",
        )
    return Run(path, complete)


@with_page
def forget(
    folder: Path | str,
    client: int,
    *,
    observer: Observer | None = None,
    cache: Path | None = None,
    prepare: Prepare = in_process,
) -> Run:
    """Takes a site that withdraws out of a finished run's model, or refuses to.

    A classifier in closed form (``ridge``) is a function of sums: the site is asked for its own
    once more, they are subtracted, and the classifier is solved again, with a penalty chosen among
    the others. It is the model of a federation in which the site never took part, up to rounding,
    and the site's images no longer choose thresholds or count in accuracies. A network that was
    trained step by step has no such sums. What was made of the model before (adaptations, estimates
    for new sites, predictions, snapshots) is deleted from the folder; its page is written anew.

    Args:
        folder: the run's folder.
        client: the site's id.
        observer: gets the progress.
        cache: folder of decoded pixels; the user's cache by default.
        prepare: puts the federation together; by default with all clients in this process.

    Raises:
        RunError: the run is not complete, the site has no part in its model, or cannot be
            forgotten (its images were drawn anew in every round, say); the message says why.
    """
    path = Path(folder)
    require_run(path)
    if prepare is in_process:
        _refuse_deployment(path)
    run, experiment = read_run(path), load_stored(path / EXPERIMENT)
    if not is_complete(path):
        raise RunError(f"{path} is not complete: finish it first (`feddg resume {path}`)")
    taken_part = run.contributors
    if client not in taken_part:
        names = first_names([str(id) for id in taken_part], 12)
        raise RunError(f"client {client} has no part in the model of {path}; these have: {names}")
    method = build_method(experiment.method.name, experiment.method.settings)
    begin_again = f"Leave out the images of client {client} and run again."
    if type(method).without is Method.without:
        first = min(row.round for row in run.rounds if client in row.clients)
        raise RunError(
            f"{path} was trained step by step from round {first} on with "
            f"client {client}, and its network cannot forget this. {begin_again}"
        )
    private = experiment.privacy
    if experiment.defences or private.noised or private.record_epsilon is not None:
        raise RunError(
            f"the sums of single clients of {path} are masked, noised or changed by a defence, so "
            f"that none can be taken out. {begin_again}"
        )
    varied = find_augmentation(experiment.train.augmentation)
    varies = (varied.moves or varied.recolors) and experiment.data.features is None
    if type(method).loss is not Method.loss or varies:
        raise RunError(
            f"the sums of {path} are of images that {method.name} or train.augmentation changes "
            f"anew in every round, so that they cannot be made once more. {begin_again}"
        )
    if prepare is in_process:
        check_images(path, experiment, cache)
    others = [id for id in taken_part if id != client]
    with RunFolder(path) as opened:
        opened.keep_experiment(experiment)
        work = partial(_run, experiment, opened, cache_folder(cache), prepare, ())
        before = (path / SUMMARY).read_bytes()
        (path / SUMMARY).unlink()  # whoever is killed from here on can be gone on with
        try:
            _execute(opened, observer or Observer(), partial(work, forget=(client, others)))
        finally:
            if client in read_run(path).forgotten:
                opened.remove_derived()
            else:  # the run is as complete as before
                opened.replace(SUMMARY, before)
    return Run(path)


def require_installed(experiment: Experiment) -> None:
    """Raises MissingPackage, before an image is read, for what an experiment asks for."""
    chosen_trackers()
    require_packages(experiment.privacy, experiment.defences)
    if experiment.train.trainable == "lora":
        need("lora", "train.trainable: lora")


def is_complete(folder: Path) -> bool:
    """Whether the run in ``folder`` ended with its last round.

    Raises:
        RunError: it did, and is damaged; names the file.
    """
    if not is_file(folder / SUMMARY):
        return False
    run = read_run(folder)
    if run.damage:
        raise RunError(" ".join(map(str, about_end(run))))
    return run.status == "completed"


def _execute(
    folder: RunFolder, observer: Observer, work: Callable[[Together, dict[str, float]], None]
) -> None:
    """Runs to the end, or records why it failed."""
    seconds: dict[str, float] = {}
    everyone, diagnostics = Together(observer), list[Diagnostic]()

    def end(status: str, error: str | None) -> None:
        everyone.end(status)
        record = read_run(folder.path)
        folder.write_json(SUMMARY, summarize(record, status, error, seconds, diagnostics))

    try:
        with as_usual(), timed(seconds, "total"), collected() as diagnostics, _enough_memory():
            work(everyone, seconds)
    except KeyboardInterrupt:
        end("interrupted", None)
        raise
    except BaseException as error:
        if isinstance(error, TrainingDiverged):
            diagnostics.append(about_divergence())
        kind = f"{type(error).__name__}: " if isinstance(error, FeddgError) else ""
        end("failed", kind + in_words(error))
        raise
    give_memory_back()
    end("completed", None)


@contextmanager
def _enough_memory() -> Iterator[None]:
    """Says what to do where its block needs more than a GPU's memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"{str(error).splitlines()[0].split(' GPU ')[0]} Lower train.batch_size, "
            "evaluate.batch_size or data.image_size, have fewer processes share the GPU (--jobs, "
            "--workers), or use --device cpu"
        ) from error


def _run(
    experiment: Experiment,
    folder: RunFolder,
    cache: Path,
    prepare: Prepare,
    snapshots: Collection[int],
    observer: Together,
    seconds: dict[str, float],
    forget: tuple[int, Sequence[int]] | None = None,
) -> None:
    checkpoint = folder.load_checkpoint()
    done = checkpoint.state.round if checkpoint else 0
    if checkpoint is None:  # what an earlier attempt said may be of images that are gone
        (folder.path / SUMMARY).unlink(missing_ok=True)
    with timed(seconds, "prepare"):
        federation = prepare(experiment, cache, observer.work)
    defences = federation.defences
    gone = [name for name in WHOLE_FILES if not is_file(folder.path / name)]
    if checkpoint is not None and gone:
        what = " and ".join(gone)
        warn("files-missing", f"{what} of {folder.path} was gone, and is written anew.")
    layouts = folder.cut_records(done if checkpoint else -1, keep_ledger=federation.remote)
    so_far = read_run(folder.path)
    if so_far.forgotten and forget is None:
        folder.remove_derived()  # a site was being taken out
    withdrawn = [*so_far.forgotten, *(() if forget is None else forget[:1])]
    if withdrawn and not federation.remote:
        federation.evaluation = build_evaluation(
            experiment, images_of(federation), federation.worker, withdrawn
        )
    evaluation = federation.evaluation
    if checkpoint is not None:
        _compare_machines(so_far.environment, environment(experiment, federation))
    models = KeptModels(
        folder,
        checkpoint.models if checkpoint and forget is None else {},
        so_far.table.rows if forget is None else (),
        experiment.evaluate,
        experiment.train.head_rounds if experiment.server.wise_ft != "none" else None,
    )
    for defence in defences.defences:
        defence.keep_in(folder)
    support = evaluation.support() if evaluation is not None else ()
    thin = about_support(support, federation.clients.held.classes)
    # Whoever resumes a run was told when it began.
    say = emit if checkpoint is None else noted
    say(*thin, *defences.diagnostics)
    observer.optional |= {name: made(folder.path) for name, made in chosen_trackers().items()}
    # With the number of clients that the images say.
    observer.start(experiment.model_copy(update={"clients": federation.settings.clients}), done + 1)
    images = sum(row.images for row in so_far.rounds if row.round <= done)
    evaluate = Evaluate(federation, models, observer, images)
    writer = Records(federation, folder, models, snapshots, evaluate, so_far)
    enter = writer.carried if federation.remote else writer.ledger_rows.append
    federation.ledger = Ledger(enter, layouts)
    federation.hooks += [observer, evaluate, writer]
    if checkpoint is None or not is_file(folder.path / ENVIRONMENT):
        folder.write_json(ENVIRONMENT, environment(experiment, federation))
    if checkpoint is None or not is_file(folder.path / CLIENTS):
        folder.write_json(CLIENTS, federation.clients.held)
    if checkpoint is None:
        if federation.clients.contents is not None:
            folder.write_json(IMAGES, federation.clients.contents)
    else:
        federation.resume(checkpoint.state, checkpoint.memories)
    try:
        if forget is None:
            federation.fit(progress=observer.work)
            state = federation.server.state
            if state.round < state.rounds and not evaluate.outputs and WISE_FT not in models.files:
                # A budget ended it after a round that was measured as one among others.
                writer.keep(state, (), evaluate.rows(state))
        else:
            federation.server.forget(*forget)
    finally:
        folder.finish_writing()  # of a run that is interrupted, too
    if evaluation is not None and evaluation.splits:
        _last_figures(federation, folder, models, evaluate.outputs)


def _compare_machines(before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Warns if a run goes on where numbers come out otherwise than where it began."""
    for name in SAME:
        began, goes_on = (str(machine.get(name, "")).split(":")[0] for machine in (before, now))
        if began and began != goes_on:
            warn(
                "another-machine",
                f"The run began with {name} {began} and goes on with {goes_on}: it does not end "
                "with the numbers of one that never stopped.",
            )


def _last_figures(
    federation: Federation, folder: RunFolder, models: KeptModels, outputs: list[Outputs]
) -> None:
    """Writes the results about the final model, from its outputs if it was just evaluated.

    Thresholds are for its answers in float32, see :meth:`Evaluation.in_float32`.
    """
    evaluation, settings = federation.evaluation, federation.settings
    assert evaluation is not None
    if not has_global_model(federation.method, federation.network):
        if evaluation.decision is not None or evaluation.subgroups:
            warn(
                "no-shared-model",
                f"{title_of(federation.method.name)} has a model for each client and none that all "
                "share: nothing is told by decision or subgroup.",
            )
        return
    weights = models.read(WISE_FT) if WISE_FT in models.files else federation.weights
    model = federation.predictor(weights)
    if not outputs:
        evaluation.scores(model, outputs)

    detailed = evaluation.decision is not None or bool(evaluation.subgroups)
    inside = evaluation.splits.get(ID_VAL, numpy.empty(0, numpy.int64))
    exact = outputs
    if evaluation.autocast is not nullcontext:
        splits = evaluation.splits if detailed else {ID_VAL: inside} if len(inside) else {}
        alone = replace(evaluation.in_float32(), splits=splits, decision=None)
        alone.scores(model, exact := [])
    if detailed:
        run = read_run(folder.path)
        write_details(folder, evaluation, exact, run.default_rule.name, run.result.round)
    if len(inside):
        write_energy_threshold(folder, model, _logits(exact, inside))
    if settings.evaluate.pictures:
        classes = tuple(federation.clients.held.classes)
        with folder.writing(FIGURES) as figures:
            draw_unseen(figures, evaluation, partial(_logits, outputs), classes, settings.seed)


def _logits(outputs: Sequence[Outputs], rows: numpy.ndarray) -> Tensor:
    """Returns what a model gives for some rows."""
    seen, values = (numpy.concatenate(parts) for parts in zip(*outputs))
    order = numpy.argsort(seen)
    return torch.from_numpy(values[order[numpy.searchsorted(seen, rows, sorter=order)]])


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Notes the time of its block in ``seconds`` under ``name``."""
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = time.perf_counter() - started
