"""Will a run's model travel? Estimates its accuracy on unlabelled images of a new site."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Final, Literal, NamedTuple

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from feddg.data.columns import read_columns
from feddg.data.decoding import Tile
from feddg.data.pixels import as_unit
from feddg.diagnostics import Diagnostic, Progress, note, silent, warning
from feddg.errors import DataError, RunError, first_names
from feddg.evaluation.accuracy import NOT_FINITE
from feddg.federation.federation import build
from feddg.models.network import Network
from feddg.prediction.classifier import ImageClassifier, RunClassifier, count_files, image_files
from feddg.prediction.estimators import (
    LEAST_OF_A_FOLDER,
    REACH,
    Familiar,
    Head,
    LeftOutSite,
    Outputs,
    Part,
    Reference,
    Signals,
    Sums,
    agreement_with,
    images_to_label,
    labels_needed,
    left_out_sites,
    moments,
    right_chances,
    with_labels,
)
from feddg.prediction.model import Trained
from feddg.prediction.predict import BATCH_SIZE, Prediction, predict_batches, predictor_of
from feddg.readers import function
from feddg.records import TEST, EstimateRow, JsonFile, as_csv, client_name
from feddg.runs.calibration import (
    LEAST_SITES,
    REAL_CLIENTS,
    Estimate,
    apart,
    at_a_new_site,
    calibrated,
    errors_at_sites,
)
from feddg.runs.diagnostics import LEARNED_NOTHING
from feddg.runs.energy import energy
from feddg.runs.figures import some_of_each
from feddg.runs.intervals import wilson
from feddg.runs.prepare import Images, load_images
from feddg.runs.provenance import check_images
from feddg.runs.reading import Run, read_run, require_run
from feddg.runs.table import NumberTable
from feddg.storage import cache_folder, file_faults, replace_file, replace_text
from feddg.text import counted, listed, percent_sign, printable, readable

TRAVEL, HEADS = "travel.json", "travel.safetensors"
STAND_IN: Final = "first features"
"""Models without a site that only stand in for a network whose features were trained."""
MOST_OF_A_SITE: Final = 3000
"""Most training images of each site for classifiers without a site."""
MOST_FAMILIAR: Final = 500
"""Most training images of each site that images are compared with for novelty."""
Kind = Literal["domain", "client"]
Models = Literal["features", "first features", "runs", "none"]


class TravelFile(JsonFile):
    """The file ``travel.json``, which calibrates a model's estimates at new sites.

    Attributes:
        weights: a hash of the model's weights.
        reference: the model on in-domain validation images.
        sites: the sites that were left out in turn.
        kind: what a site is: ``domain`` or ``client``.
        models: the models without a site: classifiers in closed form on the model's own features
            (``features``) or on those that training began from (``first features``), or other runs
            (``runs``); ``none`` if nothing could replace the model.
    """

    weights: str
    reference: Reference
    sites: tuple[LeftOutSite, ...]
    kind: Kind
    models: Models

    def at(self, signals: Signals, images: int) -> Estimate:
        """Returns the calibrated estimate at a new site, from the estimates that all sites have."""
        at, sites = self.comparable(signals)
        truths = [site.accuracy for site in self.sites]
        return calibrated(at, sites, truths, images, correct=self.models != STAND_IN)

    def errors(self, signals: Signals) -> list[float]:
        """Returns by how much such estimates are above the truth at each site."""
        truths = [site.accuracy for site in self.sites]
        estimates = self.comparable(signals)[1]
        return errors_at_sites(estimates, truths, correct=self.models != STAND_IN)

    def comparable(self, signals: Signals) -> tuple[float, list[float]]:
        """Returns the mean estimate at a new site and at the others, from those that all have."""
        known = [signals.estimates, *(site.signals.estimates for site in self.sites)]
        names = [name for name in signals.estimates if all(name in one for one in known)]
        at, *sites = (fmean(estimates[name] for name in names) for estimates in known)
        return at, sites


def watch_middle(network: Network, take: Callable[[Tensor], None]) -> None:
    """Passes moments of a network's middle features on, ``(B, m)`` for every batch from now on.

    They are the inputs of its last stage but one; a network without stages passes on nothing.
    """
    for stage in network.stages[-2:-1]:
        stage.register_forward_pre_hook(lambda _, given: take(moments(given[0].float()).cpu()))


class Recorder(RunClassifier):
    """A run's model that records its answers for estimates.

    Attributes:
        others: classifiers that its answers are compared with.
        familiar: what its middle layers see in the sites' images; None before it is known.
        batch_size: images per forward pass.
    """

    def __init__(
        self, run: Path, device: str, which: str | None, batch_size: int = BATCH_SIZE
    ) -> None:
        super().__init__(run, None, device, which)
        self.batch_size = batch_size
        self.others: Sequence[Head] = ()
        self.familiar: Familiar | None = None
        self._seen: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._middle: Tensor | None = None
        watch_middle(self.trained.network, self._look)

    def _look(self, maps: Tensor) -> None:
        self._middle = maps

    def _see(self, images: Tensor) -> Tensor:
        """Returns the logits of images in [0, 1], and records what estimates need.

        Raises:
            DataError: some are not finite.
        """
        network = self.trained.network
        with torch.inference_mode():
            features = network.features(images).float()
            middle = features if self._middle is None else self._middle
            outputs = network.classifier(features) if self._own is network else self._own(images)
            logits: Tensor = outputs.float().cpu()
        if not bool(logits.isfinite().all()):
            raise DataError(NOT_FINITE.format("some images"))
        agreement = agreement_with(logits.argmax(1), features.cpu().double(), self.others)
        self._seen.append((logits, middle.cpu(), agreement))
        return logits

    def answer(self, pixels: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Maps ``(B, size, size, 3)`` uint8 to probabilities ``(B, C)`` and energies ``(B,)``."""
        logits = self._see(self.inputs(pixels))
        return logits.softmax(1).numpy(), energy(logits).numpy()

    def taken(self) -> Outputs:
        """Returns what was recorded since the last call, of at least one image."""
        logits, maps, agreement = zip(*self._seen)
        self._seen = []
        return Outputs(
            torch.cat(logits).double().numpy(),
            None if agreement[0] is None else torch.cat(agreement).numpy(),
            torch.cat(maps).numpy(),
        )

    def batches(self, images: Images, rows: numpy.ndarray) -> Iterator[Tensor]:
        """Yields some rows of a run's images, in [0, 1]."""
        for part in torch.from_numpy(rows).split(self.batch_size):
            yield as_unit(images.pixels.gather(part, self.device))

    def outputs(self, images: Images, rows: numpy.ndarray) -> Outputs:
        """Returns the outputs for some rows of a run's images."""
        for part in self.batches(images, rows):
            self._see(part)
        return self.taken()

    def reference(self, images: Images, rows: numpy.ndarray) -> Reference:
        """Measures the model on some rows of its run's validation images."""
        return Reference.of(self.outputs(images, rows), images.table.labels[rows])


def calibrate(
    run: Path,
    model: Recorder,
    *,
    beside: Sequence[Path | str] = (),
    cache: Path | None = None,
    progress: Progress = silent,
) -> TravelFile:
    """Leaves each of a run's sites out in turn, and stores the results in the run's folder.

    It takes one pass over in-domain validation images and at most 3000 training images per site. A
    site is a domain or, if there is only one, a client that really holds its images. The models
    without a site are classifiers in closed form on features that have not seen its images: the
    run's, if these were not trained, else the pretrained ones that training began from. For a
    network trained from scratch, only other runs can serve.

    Args:
        run: the folder.
        model: its model; it receives the classifiers to compare its answers with.
        beside: similar runs that each held out another domain; then these are the models.
        cache: folder of decoded pixels; the user's cache by default.
        progress: is told how far it is.

    Raises:
        RunError: the images are not the run's, none are for in-domain validation, or a run beside
            it has another method or other classes.
        DataError: the images are not here.
        WeightsError: the weights that training began from are not here.
    """
    cache = cache_folder(cache)
    images = _images(run, model.trained, cache, progress)
    fixed_features = not trains_features(model.trained)
    kind, names, numbers = _sites(images, model.trained)
    trained, validated = _staying(images, run)
    models: Models = "none"
    sites: list[LeftOutSite] = []
    model.others = []
    if beside:
        models, kind = "runs", "domain"
        for other in beside:
            sites += _held_out(Path(other), model, cache, progress)
        twice = [name for name, count in Counter(s.site for s in sites).items() if count > 1]
        if twice:
            raise RunError(f"several of --beside hold out {twice[0]}; name one for each domain")
    elif fixed_features or model.trained.experiment.model.weights is not None:
        models = "features" if fixed_features else "first features"
        rows = numpy.concatenate([images.splits.train, images.splits.id_val])
        count, seed = len(images.splits.train), model.trained.experiment.seed
        chosen = some_of_each(numbers, trained, MOST_OF_A_SITE, seed, "travel")
        train, validation = (
            _part(model, images, rows[own_rows], numbers[own_rows], progress)
            for own_rows in (chosen, count + validated)
        )
        sums = Sums(train, len(images.table.class_names))
        sites += left_out_sites(sums, train, validation, names, agree=fixed_features)
        model.others = sums.others() if fixed_features else []
    reference = model.reference(images, images.splits.id_val[validated])
    model.familiar = _familiar(model, images, numbers, trained)
    calibration = TravelFile(
        weights=model.weights,
        reference=reference,
        sites=tuple(sites),
        kind=kind,
        models=models if sites else "none",
    )
    arrays = model.familiar.tensors()
    if model.others:
        arrays["weight"], arrays["bias"] = map(torch.stack, zip(*model.others))
    with file_faults(RunError, f"Cannot write {run / TRAVEL}"):
        replace_file(run / HEADS, lambda aside: save_file(arrays, aside))
        replace_text(run / TRAVEL, calibration.to_text())
    return calibration


def _images(run: Path, trained: Trained, cache: Path, progress: Progress) -> Images:
    check_images(run, trained.experiment, cache)
    images = load_images(trained.experiment, cache, progress)
    if not len(images.splits.id_val):
        raise RunError(
            f"{run} has no in-domain validation images to compare with: train with data.id_val "
            "above 0"
        )
    return images


def _part(
    model: Recorder, images: Images, rows: numpy.ndarray, sites: numpy.ndarray, progress: Progress
) -> Part:
    """Returns some rows with features that the run did not train."""
    network, classes = model.trained.network, len(images.table.class_names)
    if trains_features(model.trained):
        network = build(model.trained.experiment, classes)[1].to(model.device).eval()
    features: list[Tensor] = []
    with torch.inference_mode():
        for batch in model.batches(images, rows):
            progress("leaving sites out", len(features) * model.batch_size, len(rows))
            features.append(network.features(batch).float().cpu())
    labels = torch.from_numpy(images.table.labels[rows])
    return Part(torch.cat(features), labels, torch.from_numpy(sites))


def _owners(images: Images) -> numpy.ndarray:
    """Returns the client of each training and validation image; -1 if it is nobody's."""
    return numpy.concatenate([images.owners("train"), images.owners("id_val")])


def _staying(images: Images, run: Path) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Returns the places of training and validation images of clients that did not withdraw."""
    stays = ~numpy.isin(_owners(images), read_run(run).forgotten)
    count = len(images.splits.train)
    return numpy.flatnonzero(stays[:count]), numpy.flatnonzero(stays[count:])


def _familiar(
    model: Recorder, images: Images, numbers: numpy.ndarray, trained: numpy.ndarray
) -> Familiar:
    """Returns what the model sees in training images of each site."""
    rows, seed = images.splits.train, model.trained.experiment.seed
    chosen = some_of_each(numbers, trained, MOST_FAMILIAR, seed, "familiar")
    # A few images do not say what a site looks like.
    many = numpy.bincount(numbers[chosen]) >= LEAST_OF_A_FOLDER
    chosen = chosen[many[numbers[chosen]]] if many.any() else chosen
    maps = model.outputs(images, rows[chosen]).maps
    return Familiar.of(numpy.array(maps), numbers[chosen], images.table.labels[rows[chosen]])


def _held_out(run: Path, like: Recorder, cache: Path, progress: Progress) -> Iterator[LeftOutSite]:
    """Yields the domains that a run held out, each evaluated with the run's model."""
    require_run(run)
    model = Recorder(run, str(like.device), None, like.batch_size)
    method = model.trained.experiment.method.name
    if method != like.trained.experiment.method.name or model.class_names != like.class_names:
        raise RunError(f"{run} has another method or other classes; name runs like this one")
    images = _images(run, model.trained, cache, progress)
    table, rows = images.table, images.splits.test
    if not len(rows):
        raise RunError(f"{run} holds out no domain; name runs that do")
    reference = model.reference(images, images.splits.id_val[_staying(images, run)[1]])
    for domain in numpy.unique(table.domains[rows]).tolist():
        of_domain, name = rows[table.domains[rows] == domain], table.domain_names[domain]
        progress(f"looking at {name}", 0, len(of_domain))
        outputs = model.outputs(images, of_domain)
        yield LeftOutSite.of(name, reference, outputs, table.labels[of_domain])


def _sites(images: Images, trained: Trained) -> tuple[Kind, list[str], numpy.ndarray]:
    """Returns the kind of sites, their names, and each training and validation image's site."""
    splits, table = images.splits, images.table
    domains = table.domains[numpy.concatenate([splits.train, splits.id_val])]
    several = len(numpy.unique(domains[: len(splits.train)])) > 1
    if several or trained.experiment.clients.partition not in REAL_CLIENTS:
        return "domain", list(table.domain_names), domains
    return "client", [client_name(client) for client in range(len(images))], _owners(images)


def trains_features(trained: Trained) -> bool:
    """Whether the classifier's input features were trained."""
    names = [name for name, _ in trained.network.named_parameters()]
    features = {name for name in names if name.startswith(("featurizer.", "embedding."))}
    return not features <= trained.network.frozen


class NewSite(NamedTuple):
    """What is known of a model's accuracy at one more site; its text is a sentence.

    Attributes:
        accuracies: in [0, 1] at sites that took no part, by name; at least one.
    """

    accuracies: dict[str, float]

    @property
    def estimate(self) -> Estimate | None:
        """The expected accuracy; None from fewer than three sites."""
        shares = [*self.accuracies.values()]
        return at_a_new_site(shares) if len(shares) >= LEAST_SITES else None

    def __str__(self) -> str:
        count = len(self.accuracies)
        if self.estimate is not None:
            return f"{self.estimate}, judging by {counted(count, 'site')} that took no part."
        sites = [
            f"{percent_sign(share)} at {readable(site)}" for site, share in self.accuracies.items()
        ]
        rest = "one site says nothing of another" if count == 1 else "two say little of a third"
        return f"{listed(sites)}, which took no part; {rest}."


def new_site(run: Run, model: NumberTable | None = None) -> NewSite | None:
    """Returns what sites that took no part tell of one more.

    A site is one that the model, or one like it, had no part of: a domain that the run held out for
    testing, one that :func:`calibrate` left out of a classifier on the same features or of another
    run, or a client that a closed-form method left out during training. What only stands in for the
    model, such as the classifier that training starts from, says nothing of it. Clients count only
    if they are :func:`apart`. None if there are no sites.

    Args:
        run: the run.
        model: the numbers of the model, if it is not the run's default one.

    Raises:
        RunError: a stored file is damaged.
    """
    kept = TravelFile.read(run.folder / TRAVEL)
    sites = kept.sites if kept is not None and kept.models != STAND_IN else ()
    accuracies = {site.site: site.accuracy for site in sites}
    if not accuracies:
        measured = [row.left_out for row in run.rounds if row.left_out]
        ids, left_out = clients_apart(run), (measured or [{}])[-1]
        accuracies |= {run.client_name(id): share for id, share in left_out.items() if id in ids}
    accuracies |= (run.result if model is None else model).where(split=TEST).values()
    return NewSite(accuracies) if accuracies else None


def clients_apart(run: Run) -> set[int]:
    """Returns the clients of a run that are sites of their own, see :func:`apart`."""
    return apart(run.clients, (run.settings.get("clients") or {}).get("partition"))


def expected_elsewhere(run: Run) -> list[EstimateRow]:
    """Returns what a run expects where it has no labels, if it rests on sites enough."""
    most = len(clients_apart(run))
    return [row for row in run.estimates if LEAST_SITES <= row.sites <= most]


def read_calibration(run: Path, model: Recorder) -> TravelFile | None:
    """Returns what :func:`calibrate` stored for a model, which gets its arrays; None if nothing.

    Raises:
        RunError: it is damaged.
    """
    calibration = TravelFile.read(run / TRAVEL)
    if calibration is None or calibration.weights != model.weights or not (run / HEADS).is_file():
        return None
    arrays = load_file(run / HEADS)
    model.familiar = Familiar.of_tensors(arrays)
    model.others = list(zip(arrays["weight"], arrays["bias"])) if "weight" in arrays else []
    return calibration


# The answer.


@dataclass(frozen=True)
class ImageRisk:
    """The estimate for one answer.

    Attributes:
        file: as it was named or found.
        label: the most probable class.
        risk: the probability that it is wrong, in [0, 1]; None without an estimate.
        unlike_training: whether its energy is above that of 95 % of the validation images.
        chosen: whether it was chosen to be labelled.
    """

    file: str
    label: str
    risk: float | None
    unlike_training: bool
    chosen: bool = False


@dataclass(frozen=True)
class ClassExpectation:
    """The answers of one class; how many are right is known only with labels of some of them.

    Attributes:
        name: of the class.
        answers: number of images predicted as it.
        labels: how many of them have a label.
        right: the share of right ones among these, in [0, 1]; None without labels.
        low: the lower end of its 95 % interval (Wilson); None without labels.
        high: the upper end.
    """

    name: str
    answers: int
    labels: int = 0
    right: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Travel:
    """The estimated accuracy of a run's model on a folder's images.

    Attributes:
        expected: the accuracy, with the interval that contains it about nine times in ten; None if
            the images are unlike all of training, and none has a label.
        without_labels: the same, without using labels.
        labels: number of images with labels.
        needed: about how many labels bring the interval to five points on either side.
        calibration: the calibration of the estimate.
        signals: the images' signals.
        classes: the answers by class, the most frequent first.
        images: the riskiest first, or the least confident.
        failed: files that could not be used.
        diagnostics: the basis of the estimate in sentences; one of them is the advice.
        model: the model that gave the answers.
    """

    expected: Estimate | None
    without_labels: Estimate | None
    labels: int
    needed: int
    calibration: TravelFile
    signals: Signals
    classes: list[ClassExpectation]
    images: list[ImageRisk]
    failed: int
    diagnostics: list[Diagnostic]
    model: ImageClassifier

    @property
    def advice(self) -> Diagnostic:
        """What to do, in one sentence."""
        return self.diagnostics[0]

    def fields(self) -> dict[str, object]:
        """Returns the result ready for JSON."""
        nothing = dict.fromkeys(Estimate._fields)
        without = self.without_labels
        return {
            **(self.expected._asdict() if self.expected else nothing),
            "advice": self.advice.text,
            "errors_at_sites": self.errors,
            "without_labels": without._asdict() if without else None,
            "labels": self.labels,
            "needed": self.needed,
            "sites": [site.model_dump() for site in self.calibration.sites],
            "signals": self.signals.model_dump(),
            "classes": [asdict(row) for row in self.classes],
            "images": [asdict(image) for image in self.images],
            "failed": self.failed,
            "diagnostics": [asdict(diagnostic) for diagnostic in self.diagnostics],
        }

    @property
    def errors(self) -> list[float]:
        """By how much such estimates without labels are above the truth at each left-out site."""
        return self.calibration.errors(self.signals)

    @property
    def expectation(self) -> str:
        """The estimate in words, with what it holds for and how far off it was; empty without."""
        if self.expected is None:
            return ""
        if self.labels:
            return f"Expected accuracy on these images: {self.expected}."
        classes = first_names([printable(name) for name in self.model.class_names])
        said = f"Expected accuracy on these images, if they show the model's classes ({classes}): "
        return f"{said}{self.expected}.{_error_in_words(self.errors)}"

    def __str__(self) -> str:
        return " ".join(filter(None, [self.expectation, *map(str, self.diagnostics)]))


def travel(
    run: Path | str,
    images: Path | str | Sequence[Path | str],
    *,
    html: Path | None = None,
    labels: Path | str | None = None,
    choose: int = 0,
    beside: Sequence[Path | str] = (),
    which: str | None = None,
    device: str = "auto",
    batch_size: int = BATCH_SIZE,
    cache: Path | None = None,
    progress: Progress = silent,
) -> Travel:
    """Estimates the accuracy of a run's model on unlabelled images of a new site.

    >>> feddg.travel("runs/...", "new_site/").expected

    The first call takes one pass over the run's own images, which must be available: each site is
    left out in turn, and the results are stored as ``travel.json``.

    Args:
        run: the run folder.
        images: files, folders, globs, all of one site.
        html: also write a page of thumbnails to this file, riskiest images first.
        labels: a CSV file with the columns ``file`` and ``label``; rows without a label do not
            count. The labelled images must have been drawn at random, as with ``choose``.
        choose: draw this many images to be labelled, and write their names into ``labels``.
        beside: similar runs that each held out another domain (``hold_out="lodo"``): better than
            classifiers in closed form if features were trained, and the only source if they were
            trained from scratch.
        which: the model of a selection rule, see :func:`feddg.prediction.model.load_model`.
        device: ``cpu``, ``cuda`` or ``auto``.
        batch_size: images per forward pass.
        cache: folder of decoded pixels; the user's cache by default.
        progress: is told how far it is.

    Raises:
        RunError: the folder holds no model, no validation images, or not the run's images.
        DataError: there is no image, the labels do not fit, or rows to label share a name.
    """
    path, named = Path(run), [images] if isinstance(images, str | Path) else list(images)
    require_run(path)
    if choose and (labels is None or Path(labels).exists()):
        fault = "--choose needs --labels" if labels is None else f"{labels} exists"
        raise DataError(f"{fault}; name a new file for the images to label")
    total = count_files(named)  # raises where there are none, before anything that takes time
    model = Recorder(path, device, which, batch_size)
    kept = None if beside else read_calibration(path, model)
    kept = kept or calibrate(path, model, beside=beside, cache=cache, progress=progress)
    rows, failed = _answers(model, named, total, progress)
    outputs, files = model.taken(), [row.file for row in rows]
    twice = [name for name, count in Counter(files).items() if count > 1]
    if labels is not None and twice:  # rows of tables of features have the names that these say
        raise DataError(f"several rows are called {twice[0]}: rename them, to tell labels apart")
    signals = Signals.of(kept.reference, outputs, model.familiar)
    whole = {Tile.named(file).file for file in files}  # tiles of an image are no further ones
    without = kept.at(signals, len(whole))
    confidence = outputs.confidence(kept.reference.temperature)
    chances = right_chances(confidence, without.value)
    expected, labelled, needed = without, 0, labels_needed(without, chances)
    chosen = images_to_label(confidence, choose)
    places, right = numpy.zeros(0, int), numpy.zeros(0, bool)
    if choose:
        to_label = [[files[place], ""] for place in numpy.sort(chosen).tolist()]
        with file_faults(DataError, f"cannot write {labels}"):
            replace_text(Path(labels or ""), as_csv([["file", "label"], *to_label]))
    elif labels:
        places, right = _labelled(Path(labels), files, outputs.predicted, model.class_names)
        expected = with_labels(without, chances, places, right)
        labelled = len(places) if len(places) > 1 else 0  # a single one is not used
        chances = right_chances(confidence, expected.value)
    useless = bool(LEARNED_NOTHING & {diagnostic.code for diagnostic in model.diagnostics})
    advice = list(_diagnostics(kept, signals, expected, labelled, needed, len(files), useless))
    refused = advice[0].code == FOREIGN or (useless and not labelled)
    unlike = outputs.energy > kept.reference.unlike
    risks = [
        ImageRisk(
            rows[place].file,
            rows[place].label or "",
            None if refused else float(1 - chances[place]),
            bool(unlike[place]),
            place in chosen,
        )
        for place in numpy.argsort(confidence if refused else chances, kind="stable").tolist()
    ]
    classes = list(_classes(model.class_names, outputs.predicted, places, right))
    told: tuple[Estimate | None, Estimate | None] = (None, None) if refused else (expected, without)
    answer = Travel(*told, labelled, needed, kept, signals, classes, risks, failed, advice, model)
    if html is not None:
        function("write_travel_page")(answer, html, run, images)
    return answer


def _answers(
    model: Recorder, named: Sequence[Path | str], total: int, progress: Progress
) -> tuple[list[Prediction], int]:
    """Returns the answers for all usable images, and the number of unusable files."""
    rows: list[Prediction] = []
    failed = done = 0
    predictor = predictor_of(model, named, model.batch_size)
    for batch in predict_batches(predictor, dict.fromkeys(image_files(named))):
        for _, predictions in batch:
            rows += [row for row in predictions if row.reason is None]
            failed += all(row.reason is not None for row in predictions)
        done += len(batch)
        progress("looking at images", done, total)
    if not rows:
        raise DataError(f"no image can be used: {predictions[0].reason}")
    return rows, failed


def _classes(
    names: Sequence[str], predicted: numpy.ndarray, labelled: numpy.ndarray, right: numpy.ndarray
) -> Iterator[ClassExpectation]:
    counts = numpy.bincount(predicted, minlength=len(names))
    for number in numpy.argsort(-counts, kind="stable").tolist():
        correct = right[predicted[labelled] == number]
        known = wilson(float(correct.mean()), len(correct)) if len(correct) else ()
        if counts[number]:
            yield ClassExpectation(names[number], int(counts[number]), len(correct), *known)


def _error_in_words(errors: Sequence[float]) -> str:
    """Returns how far estimates were off at left-out sites, if most were off the same way."""
    if not errors or abs(math.fsum(errors)) <= REACH * len(errors):
        return ""
    way = "high" if math.fsum(errors) > 0 else "low"
    points = sorted(round(100 * (error if way == "high" else -error)) for error in errors)
    ends = [str(point).replace("-", "\N{MINUS SIGN}") for point in dict.fromkeys(points)]
    far = listed(ends) if len(ends) < LEAST_SITES else f"{ends[0]} to {ends[-1]}"
    return f" At the sites left out such an estimate was {far} points too {way}."


FOREIGN: Final = "unlike-all-sites"
"""Code of the advice to label some images, because they differ too much for an estimate."""
USELESS: Final = "useless-model"
UNLIKE: Final = "These images look unlike anything the model was trained on"
MEASURED: Final = "docs/benchmarks.md says how often such intervals held the truth."


def _diagnostics(
    calibration: TravelFile,
    signals: Signals,
    expected: Estimate,
    labels: int,
    needed: int,
    images: int,
    useless: bool = False,
) -> Iterator[Diagnostic]:
    """Reports the advice, then the basis of the estimate; for foreign images the advice alone.

    So it is for a model that has learned nothing of use at the domains held out.
    """
    if signals.foreign and not labels and not useless:
        ratio = math.exp((signals.novelty or 0.0) - (signals.limit or 0.0))
        first = min(50, images)
        yield warning(
            FOREIGN,
            f"{UNLIKE}: {ratio:.2f} times the distance within which 95 % of new sites with the "
            "same classes lie. So no accuracy is estimated. Images alone do not tell whether this "
            "is a new style or other objects.",
            f"If they show the same classes, label {first} of them: --choose {first} --labels FILE "
            "draws them at random.",
        )
        return
    reference, sites = calibration.reference, counted(len(calibration.sites), calibration.kind)
    enough = len(calibration.sites) >= LEAST_SITES
    if useless:
        text = "The model failed where it was tested"
        text += "." if labels else ", so no accuracy is estimated elsewhere."
        label = "" if labels else ", or label 50 of these images (--choose 50 --labels FILE)"
        yield warning(USELESS, text, f"Train a better one{label}.")
        if not labels:
            return
    elif labels >= images or expected.reach <= REACH or expected.low >= reference.accuracy - REACH:
        yield note("travels", f"Use it, if {expected.low:.0%} to {expected.high:.0%} is enough.")
    else:
        more = max(needed - labels, 10) if labels else needed
        count = counted(min(more, images - labels), "more image" if labels else "image")
        yield note(
            "label-first",
            f"Label about {count} first: that brings the interval to {100 * REACH:.0f} points on "
            "either side.",
        )
    yield note(
        "travel-rests-on",
        f"It rests on {_LEFT_OUT[calibration.models].format(sites=sites)}, and on "
        f"{counted(reference.images, 'in-domain validation image')}, of which the model labels "
        f"{reference.accuracy:.0%} correctly"
        + (f", and on {counted(labels, 'label')}." if labels else ".")
        + (f" {MEASURED}" if enough else ""),
    )
    if not enough:
        what = f"Only {sites} left out" if calibration.sites else "Nothing"
        yield warning(
            "travel-no-sites",
            f"{what} can tell how the model does at a site it has not seen: such estimates are "
            "assumed to be ten points off.",
            "Name runs that each held another domain out (--beside), or label some images.",
        )


_LEFT_OUT: Final = {
    "features": "{sites} that trained, each left out in turn of a classifier on the same features",
    "first features": "{sites} that trained, each left out in turn of a classifier on the "
    "pretrained features, standing in for this model",
    "runs": "{sites} that runs like it held out",
    "none": "no site",
}


# Labels, as a CSV file.


def _labelled(
    path: Path, files: Sequence[str], predicted: numpy.ndarray, class_names: Sequence[str]
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Returns which images have a label, and whether the model is right there."""
    place = {name: number for number, name in enumerate(files)}
    right: dict[int, bool] = {}
    table = read_columns(path, ("file", "label"))
    for index, (name, label) in enumerate(zip(table["file"], table["label"])):
        if not label:
            continue
        if name not in place:
            raise DataError(f"{table.row(index)}: {name} is not among the named images")
        if label not in class_names:
            raise DataError(
                f"{table.row(index)}: the model knows no class {label!r}; its classes are "
                f"{', '.join(class_names)}"
            )
        if place[name] in right:
            raise DataError(f"{table.row(index)}: {name} appears twice")
        right[place[name]] = class_names[predicted[place[name]]] == label
    return numpy.array([*right], int), numpy.array([*right.values()], bool)
