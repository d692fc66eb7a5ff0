"""The records of a run: one class per kind of row, for writing and reading.

Unknown fields and kinds of rows are ignored on reading. The files are lines of JSON
(``metrics.jsonl``, ``rounds.jsonl``, ``ledger.jsonl``), or one JSON object.
"""

import csv
import io
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Generic, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from feddg.diagnostics import Diagnostic
from feddg.errors import RunError, field_fault
from feddg.storage import is_file, read_text

T = TypeVar("T")


class Row(BaseModel):
    """One row of a file, or a part of one.

    Attributes:
        identity: names of the fields that identify a row; a later row with the same values replaces
            an earlier one.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)
    identity: ClassVar[tuple[str, ...]] = ()

    @property
    def key(self) -> tuple[int | str, ...]:
        """The values of the identifying fields."""
        return tuple(getattr(self, name) for name in self.identity)

    def to_json(self) -> str:
        """Returns the row as one line of JSON, without fields that are None."""
        return self.model_dump_json(exclude_none=True)


class JsonFile(Row):
    """A file that is one JSON object."""

    def to_text(self) -> str:
        """Returns the content of the file."""
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Reads a file; returns None if it does not exist.

        Raises:
            RunError: the file is damaged; the message names the file and the field.
        """
        if not is_file(path):
            return None
        try:
            return cls.model_validate_json(read_text(path))
        except ValidationError as error:
            raise RunError(f"{path} is damaged: {field_fault(error)}.") from None


class RowFile(Generic[T]):
    """A kind of JSON-lines file, with the class of its rows.

    Args:
        row: the class of its rows, or a union distinguished by ``kind``.
    """

    def __init__(self, row: Any) -> None:
        self._rows: TypeAdapter[list[T]] = TypeAdapter(list[row])

    def read(self, path: Path) -> list[T]:
        """Reads a file; returns no rows if it does not exist.

        A last line cut off by a crash, and rows of unknown kinds, are ignored.

        Raises:
            RunError: a row is damaged; the message names the file, row and field.
        """
        if not is_file(path):
            return []
        numbered = enumerate(read_text(path).split("\n"), start=1)
        lines = [(number, line) for number, line in numbered if line.strip(" \r\0")]
        rows: list[T] = []
        for number, line in lines:
            try:
                rows += self._rows.validate_json(f"[{line}]")
            except ValidationError as error:
                kind = error.errors()[0]["type"]
                cut_off = kind == "json_invalid" and number == lines[-1][0]
                if not cut_off and kind != "union_tag_invalid":
                    fault = field_fault(error).removeprefix("0.")  # the only row of its list
                    raise RunError(f"{path} is damaged in row {number}: {fault}.") from None
        return rows

    def parse(self, text: str) -> list[T]:
        """Reads rows from a JSON array.

        Raises:
            ValueError: the text is no such array; the message says why in one line.
        """
        try:
            return self._rows.validate_json(text)
        except ValidationError as error:
            raise ValueError(field_fault(error)) from None

    def to_text(self, rows: list[T]) -> str:
        """Returns rows as a JSON array."""
        return self._rows.dump_json(rows, exclude_none=True).decode()


# The rows of a run's files: one class for each kind, which both writes it and reads it.
#
# A new row, or a new field of one, is defined here and nowhere else. The module lies at the
# bottom, below the packages that write rows, and it needs no PyTorch, so that reports open quickly.
#
# Whatever is written is valid JSON: a number that is not finite becomes ``null``, and is read as
# NaN. Fields and kinds of rows that this version does not know are left out on reading.


TEST, VAL, ID_VAL, ID_TEST = "test", "val", "id_val", "id_test"
SPLITS: Final = (TEST, VAL, ID_VAL, ID_TEST)
"""Held-out test and validation domains; in-domain validation and test images."""
UNLABELLED = "unlabelled"
"""What would be a split, of images without labels."""
LAST, SWA, EMA, WISE_FT = "last", "swa", "ema", "wise_ft"
"""Weights of the last round, averages over rounds, and interpolated weights."""


def _apart(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names) or not all(map(str.strip, names)):
        raise ValueError("a class has no name, or two have the same")
    return names


ClassNames = Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(_apart)]
"""Names of classes in the order of a model's outputs."""
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A float; ``null`` stands for a value that is not finite, which JSON cannot hold."""
Unbounded = Annotated[float, BeforeValidator(lambda value: math.inf if value is None else value)]
"""A float above 0; ``null`` stands for infinity."""
Direction = Literal["up", "down"]
Groups = dict[str, tuple[tuple[int, ...], ...]]
"""The criterion by which clients were grouped, and the ids of each group's clients."""


def client_name(id: int) -> str:
    """Returns the name of a client that has none of its own."""
    return f"client-{id}"


# rounds.jsonl


class SetupRow(Row):
    """The exchange before round 1.

    Attributes:
        seconds: wall time.
        bytes: bytes sent by and to all clients.
        groups: the groups of clients, if the method formed any.
        left_out: with a closed-form classifier as start: accuracy at each client, by id, of the one
            computed without that client.
    """

    kind: Literal["setup"] = "setup"
    round: int = 0
    seconds: Number = 0.0
    bytes: int = 0
    groups: Groups = Field(default_factory=dict)
    left_out: dict[int, Number] = Field(default_factory=dict)


class RefusedUpdate(Row):
    """An update that the server did not use."""

    client: int
    reason: str


class RoundRow(Row):
    """One round of training: clients and costs.

    Attributes:
        round: 1 for the first.
        clients: ids of the clients asked to train, ascending.
        refused: updates that were not used, with the reason.
        terms: mean of each loss term over the used updates, weighted by examples.
        examples: training images of the used updates.
        images: images of the used updates' training steps, counted once per step however often a
            method passes them through the network.
        seconds: wall time by activity: ``train`` (spent in clients), ``aggregate`` (the rest of the
            round), ``evaluate``.
        bytes_up: bytes sent by the clients in this round.
        bytes_down: bytes sent to the clients in this round.
        left_out: accuracy at each client, by id, of a model trained without it, if the method
            measures it.
        forgotten: ids of clients whose part was taken out of the model afterwards.
    """

    identity: ClassVar = ("round",)
    kind: Literal["round"] = "round"
    round: int
    clients: list[int]
    refused: tuple[RefusedUpdate, ...] = ()
    terms: dict[str, Number] = Field(default_factory=dict)
    examples: int = 0
    images: int = 0
    seconds: dict[str, Number] = Field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    left_out: dict[int, Number] = Field(default_factory=dict)
    forgotten: tuple[int, ...] = ()

    def took(self, **seconds: float) -> Self:
        """Returns the row with the times of further activities."""
        return self.model_copy(update={"seconds": self.seconds | seconds})


CONSTANT, RISING, FLUCTUATION = "constant", "rising", "fluctuation"
ENDED_EARLY = "ended_early"


class NumberRow(Row):
    """A number of a run: a row of the one long table that all tables of results are made from.

    Besides the metrics of :mod:`feddg.evaluation.metrics`, of 0 to 1, there are: ``constant`` and
    ``rising``, 1 where the model is no better on the test domains than one that always names the
    same class, and where its accuracy there was still rising at the last round, else 0 (in-domain
    validation judges, where no domain is held out); ``ended_early``, 1 of a run that spent its
    privacy budget before the last planned round, and of no other; ``fluctuation``, by how much the
    accuracy on the test domains changes from one evaluated round to the next, mean over the second
    half of the rounds; and, by round, means: ``seconds_per_round`` of training and aggregation,
    ``images_per_round`` of training steps, each once a step, ``bytes_per_round`` that a client
    sends and is sent.

    Attributes:
        rule: the selection rule that chose the round; empty if it does not matter.
        round: the round; None if it is not known, or does not matter.
        weights: the weights, as in :class:`MetricRow`; empty if they do not matter.
        split: one of ``SPLITS``; empty if it does not matter.
        domain: the domain; empty for a number of all domains of the split.
        over: how a number of all domains was made of theirs: ``domain_mean``, ``pooled``,
            ``worst_domain``.
        metric: what was measured.
        value: the number.
        images: images of training steps up to the end of the round; None if unknown, like the rest.
        bytes: bytes sent by and to all clients until then.
        seconds: time of training and aggregation until then.
        examples: number of measured images, of a number of one domain.
        groups: of an accuracy there, the number of groups of these images, if known.
        independent: likewise, as many independent images as tell as much as these groups do.
        confusion: likewise, ``confusion[true][predicted]`` counts; None if not recorded.
    """

    rule: str = ""
    round: int | None = Field(None, ge=0)
    weights: str = ""
    split: str = ""
    domain: str = ""
    over: str = ""
    metric: str = Field(min_length=1)
    value: float = Field(allow_inf_nan=False)
    images: int | None = Field(None, ge=0)
    bytes: float | None = Field(None, ge=0)
    seconds: float | None = Field(None, ge=0)
    examples: int = 0
    groups: int | None = None
    independent: float | None = None
    confusion: list[list[int]] | None = None

    @property
    def effective(self) -> float:
        """The number of images that an interval of accuracy counts with."""
        return self.examples if self.independent is None else self.independent

    @property
    def models(self) -> int:
        """How many models' predictions of the same images the confusion matrix counts together."""
        return max(1, sum(map(sum, self.confusion or ())) // max(1, self.examples))

    @property
    def support(self) -> list[int] | None:
        """The number of images of each class, or None without confusion matrix."""
        if self.confusion is None:
            return None
        models = self.models  # sums the whole matrix
        return [sum(row) // models for row in self.confusion]

    @property
    def of(self) -> tuple[str, str, str, str, str]:
        """What was measured: metric, rule, split, aggregate and domain."""
        return self.metric, self.rule, self.split, self.over, self.domain


class MetricRow(NumberRow):
    """A row of ``metrics.jsonl``: what was measured on one domain of one split after one round.

    Attributes:
        round: the round; 0 is before training.
        weights: the measured weights: those of the ``last`` round, an average over rounds
            (``swa``, ``ema``), or ``wise_ft``.
        metric: ``accuracy`` (the share of images classified correctly), ``loss`` (the mean
            cross-entropy), or another of :mod:`feddg.evaluation.metrics`.
        value: the number; NaN if it is not finite.
    """

    identity: ClassVar = ("round", "weights", "split", "domain", "metric")
    round: int = Field(ge=0)
    weights: str
    split: str
    domain: str
    value: Number
    images: int = Field(ge=0)
    bytes: float = Field(ge=0)
    seconds: Number
    examples: int

    def to_json(self) -> str:
        """Returns the row as one line of JSON."""
        return self.model_dump_json(exclude_none=True, exclude={"rule", "over"})


class EstimateRow(Row):
    """How good a round's model is thought to be at a site, from no label of it.

    Attributes:
        round: the round just finished.
        site: its domain, or its name where it has no labels.
        images: of it.
        confidence: mean largest probability there, in [0, 1].
        value: the accuracy that is expected, in [0, 1].
        low: the lower end of the interval that holds it about nine times in ten.
        high: the upper end.
        sites: how many sites that were left out it rests on.
    """

    identity: ClassVar = ("round", "site")
    kind: Literal["estimate"] = "estimate"
    round: int
    site: str
    images: int
    confidence: Number
    value: Number
    low: Number
    high: Number
    sites: int


# details.json

Ends = tuple[Number, Number, Number]
"""A share with the ends of its 95 % interval."""


class DecisionRow(Row):
    """What a decision's threshold gives on a domain of a split.

    Attributes:
        images: number of images.
        positives: how many are of the class.
        groups: number of groups, if known.
        auroc: area under the ROC curve; None, as the others, where it is not defined.
        average_precision: over all thresholds.
        sensitivity: share of the positives that are called positive.
        specificity: share of the negatives that are called negative.
        prevalence: the share of positives that the predictive values are for.
        ppv: share of positives among the images called positive.
        npv: share of negatives among the images called negative.
        reliability: mean score, share of positives with its interval, images; of each bin.
    """

    split: str
    domain: str
    images: int
    positives: int
    groups: int | None = None
    auroc: Ends | None = None
    average_precision: Ends | None = None
    sensitivity: Ends | None = None
    specificity: Ends | None = None
    prevalence: Number
    ppv: Ends | None = None
    npv: Ends | None = None
    reliability: list[tuple[Number, Number, Number, Number, int]] = Field(default_factory=list)


class DecisionTable(Row):
    """A decision about one class: its threshold, and what it gives.

    Attributes:
        of: the class.
        target: ``specificity`` or ``sensitivity``, which the threshold reaches on validation.
        reached: the least share of it.
        threshold: an image is called so from this probability on; None if validation has no image
            with, or none without, the class.
        rows: of each domain and split.
    """

    of: str
    target: str
    reached: Number
    threshold: Number | None
    rows: list[DecisionRow] = Field(default_factory=list)


class SubgroupRow(Row):
    """Accuracy on the images of a subgroup, beside all others of the same split.

    Attributes:
        split: the split.
        column: what tells subgroups apart, such as a scanner.
        value: of the column.
        images: number of images.
        groups: number of groups, if known.
        accuracy: with its interval.
        difference: accuracy minus that of all other images; None where there are none.
        p: of no difference, corrected for all subgroups of the split (Holm).
    """

    split: str
    column: str
    value: str
    images: int
    groups: int | None = None
    accuracy: Ends
    difference: Number | None = None
    p: Number | None = None


class Details(JsonFile):
    """What one of a run's models gives image by image, summed up; without an adaptation.

    Attributes:
        which: the selection rule of the model; None if there are no details.
        round: the round it is from.
        decision: about a class; None without one.
        subgroups: accuracy by subgroup.
    """

    which: str | None = None
    round: int | None = None
    decision: DecisionTable | None = None
    subgroups: list[SubgroupRow] = Field(default_factory=list)


# ledger.jsonl


class TensorEntry(Row):
    """One tensor of a message layout."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class LayoutRow(Row):
    """The structure of a message; many messages share one layout."""

    kind: Literal["layout"] = "layout"
    id: str
    tensors: tuple[TensorEntry, ...]
    scalars: tuple[str, ...] = ()


class MessageRow(Row):
    """One message between the server and a client; ``up`` leaves the client."""

    kind: Literal["message"] = "message"
    round: int
    direction: Direction
    client: int
    purpose: str
    layout: str
    bytes: int


class RefusalRow(Row):
    """A refused message or missing answer of a client, and the reason."""

    kind: Literal["refusal"] = "refusal"
    round: int
    client: int
    reason: str


# privacy.jsonl


class PrivacyRow(Row):
    """A release under differential privacy, and the cost of all of its kind so far.

    It is written before the release and never removed, because the noised values may have been seen
    even if the round failed.

    Attributes:
        message: the kind of message, as the ledger's purposes: ``update``, ``statistics``.
        round: the round it belongs to; 0 before the first.
        clients: ids of the clients whose data it contains.
        unit: what is protected: a ``client``'s participation with all its data, or an ``image``.
        noised_at: where the noise is added: ``server`` (which is trusted), or ``client``.
        noise: standard deviation of the noise over the sensitivity; 0 for none.
        rate: probability that a client took part, if participation is secret; otherwise 1.
        epsilon: cost of all messages of this kind and unit, including all rows of this release;
            infinite without noise.
        delta: the delta of epsilon.
        budget: largest allowed epsilon, or None for no limit.
    """

    identity: ClassVar = ("message", "unit")
    message: str
    round: int
    clients: list[int]
    unit: Literal["client", "image"]
    noised_at: Literal["server", "client"] = "server"
    noise: float
    rate: float = 1.0
    epsilon: Unbounded
    delta: float
    budget: float | None = None


# opened_sums.jsonl


class OpenedSumRow(Row):
    """A round whose sum of masked updates was opened, in any attempt.

    It is written before the sum is opened, and never removed.

    Attributes:
        round: the round, from 1.
        clients: ids of the clients in the sum, ascending.
    """

    identity: ClassVar = ("round",)
    round: int
    clients: list[int]


# adaptation.jsonl and traffic.jsonl


class AdaptationRow(Row):
    """The result on one domain of one split with one test-time adaptation.

    Attributes:
        adaptation: the adaptation as requested, or ``own statistics``.
        round: the round whose model was evaluated.
        batch_size: images per batch.
        split: one of ``SPLITS``.
        domain: domain name.
        accuracy: in [0, 1].
        examples: number of images.
        client: the client with its own statistics, or None.
        which: the selection rule of the model, as in ``load_model``.
    """

    identity: ClassVar = ("adaptation", "round", "batch_size", "which")
    adaptation: str
    round: int
    batch_size: int
    split: str
    domain: str
    accuracy: Number
    examples: int
    client: int | None = None
    which: str = "final"


class TrafficRow(Row):
    """An answered message over a network, with its size and times.

    Attributes:
        at: time of sending, seconds since 1970.
        kind: the kind of request: ``train``, ``query.register``, ...
        round: the round it belongs to.
        site: the site's name, or its node if it has no name yet.
        bytes_down: bytes to the site, as counted by Flower.
        bytes_up: bytes from the site.
        seconds: from sending to fetching the reply.
        busy: seconds of these in our code at the site.
        train: seconds of these in training; the rest is Flower's: starting a process, polling
            mailboxes, transferring bytes.
    """

    at: Number
    kind: str
    round: int
    site: str
    bytes_down: int
    bytes_up: int
    seconds: Number
    busy: Number
    train: Number


# What a site answers that is asked to measure a model


class DomainScore(Row):
    """What a model gives on one domain of a site's images.

    Attributes:
        domain: its name.
        loss: mean cross-entropy over the images.
        confusion: ``confusion[true][predicted]`` counts.
        groups: number of groups of images that belong together, if there are any.
        independent: number of independent images that tell as much.
    """

    domain: str
    loss: Number = math.nan
    confusion: list[list[int]]
    groups: int | None = None
    independent: float | None = None


# clients.json


class ClientRow(Row):
    """The number of a client's images by domain and class."""

    id: int
    name: str = Field(default_factory=lambda known: client_name(known["id"]))
    domains: list[int]
    classes: list[int]


class BadImageRow(Row):
    """An image file that could not be read, and why."""

    path: str
    reason: str


class ClientsTable(JsonFile):
    """The clients' data: ``clients.json``.

    Attributes:
        domains: names of the domains in the clients' counts.
        classes: names of the classes.
        clients: rows by client id.
        bad_images: skipped files.
        features: of features without images, the columns they were trained on, in order.
    """

    domains: list[str]
    classes: list[str]
    clients: list[ClientRow]
    bad_images: list[BadImageRow] = Field(default_factory=list)
    features: list[str] = Field(default_factory=list)

    def to_text(self) -> str:
        """Returns the content of the file."""
        unused = None if self.features else {"features"}
        return self.model_dump_json(indent=1, exclude=unused) + "\n"


# attacks.jsonl


class _Compared(Row):
    """Reconstructed images compared with the true ones.

    Attributes:
        images: number of pairs of a true image and its reconstruction.
        psnr: mean over pairs, dB.
        ssim: mean over pairs.
        scores: further metrics by name, which includes the network used.
        rank: mean share of the other images, of the domain or of the updates, that are nearer to
            the reconstruction than the true one; 0.5 is chance, 0 means always found.
        rank_low: lower end of its 95 % interval, over clients or updates.
        rank_high: upper end.
        seed: the attack's.
    """

    images: int
    psnr: Number
    ssim: Number
    scores: dict[str, Number] = Field(default_factory=dict)
    rank: Number = math.nan
    rank_low: Number = math.nan
    rank_high: Number = math.nan
    seed: int = 0


class ReconstructionRow(_Compared):
    """Reconstructed images compared with the true ones, for one domain.

    Attributes:
        attacker: who reconstructed: the ``server`` (or anyone who reads its messages), or a
            ``client``.
        entry: the attacked entry, as ``purpose/name`` of the ledger.
        fed: input of the generator: the entry as ``sent``; the same entry computed for each image
            (``sample``); or for an ``unrelated`` image, which gives the chance level.
        domain: domain of the true images.
        clients: number of clients that these images belong to.
        first: share of reconstructions whose true image is nearest of all.
        first_chance: that share by chance.
        public: number of images that the generator was trained on.
    """

    identity: ClassVar = ("attacker", "entry", "fed", "domain")
    kind: Literal["reconstruction"] = "reconstruction"
    attacker: Literal["server", "client"]
    entry: str
    fed: Literal["sent", "sample", "unrelated"]
    domain: str
    clients: int
    first: Number = math.nan
    first_chance: Number = math.nan
    public: int = 0


class DifferenceRow(Row):
    """How much more each image's own entry reveals than the entry that was sent.

    Attributes:
        attacker: as in :class:`ReconstructionRow`.
        entry: the attacked entry.
        metric: ``psnr``, ``ssim``, ``rank`` or a score.
        mean: mean over clients of (sample minus sent), on the same true images.
        low: lower end of its 95 % interval over clients.
        high: upper end.
        clients: number of clients.
        images: number of true images.
    """

    identity: ClassVar = ("attacker", "entry", "metric")
    kind: Literal["difference"] = "difference"
    attacker: Literal["server", "client"]
    entry: str
    metric: str
    mean: Number
    low: Number
    high: Number
    clients: int
    images: int


class InversionRow(_Compared):
    """Images reconstructed from single clients' updates, by the number of images per update.

    Attributes:
        optimizer: optimizer of the client's one step: the run's ``own``, or plain ``sgd``.
        batch_size: images per update.
        updates: number of attacked updates.
        iterations: steps of the search.
        unrelated_psnr: the PSNR with the images of another update, which gives the chance level.
        cosine: mean cosine between the update and that of the images found.
    """

    identity: ClassVar = ("optimizer", "batch_size")
    kind: Literal["inversion"] = "inversion"
    optimizer: Literal["own", "sgd"]
    batch_size: int
    updates: int
    iterations: int
    unrelated_psnr: Number = math.nan
    cosine: Number = math.nan


class MembershipRow(Row):
    """How well an image's membership can be inferred from a client's messages.

    Attributes:
        entry: the attacked entry: ``update/weights``, or an entry as in :class:`ReconstructionRow`.
        attack: ``threshold`` of a loss or distance, or ``shadow``, trained on simulated clients.
        clients: number of attacked clients.
        members: number of their own images asked about.
        others: number of other images of the same domains asked about.
        auc: mean over clients of the area under the ROC curve; 0.5 is chance.
        low: lower end of its 95 % interval over clients.
        high: upper end.
        early: true positive rate at a false positive rate of 1 %; chance is 0.01.
        curve: points of the mean ROC curve: false and true positive rate.
        seed: the attack's.
    """

    identity: ClassVar = ("entry", "attack")
    kind: Literal["membership"] = "membership"
    entry: str
    attack: Literal["threshold", "shadow"]
    clients: int
    members: int
    others: int
    auc: Number
    low: Number
    high: Number
    early: Number
    curve: tuple[tuple[Number, Number], ...] = ()
    seed: int = 0


# summary.json


class EnergyThreshold(Row):
    """The energy of a model above which an image is unlike the training images.

    Attributes:
        threshold: the energy, see :mod:`feddg.runs.energy`.
        images: number of in-domain validation images that it comes from.
    """

    threshold: float
    images: int


class SummaryFile(JsonFile):
    """How a run ended, and its costs: ``summary.json``.

    Attributes:
        status: ``completed``, ``interrupted`` or ``failed``.
        rounds: number of trained rounds.
        seconds: wall time by activity, and ``total``.
        images_per_second: images per second of training.
        bytes: sent per client in the setup, per client and round, and in ``total``.
        error: why the run failed, if it did.
        peak_memory_bytes: largest resident memory of the process.
        diagnostics: diagnostics about images, settings and result.
        numbers: of each selection rule's model, over the domains of each split; those of each
            domain are in ``metrics.jsonl``.
    """

    status: str
    rounds: int = 0
    seconds: dict[str, Number] = Field(default_factory=dict)
    images_per_second: Number = 0.0
    bytes: dict[str, int | float] = Field(default_factory=dict)
    error: str | None = None
    peak_memory_bytes: int | None = None
    diagnostics: list[Diagnostic] = Field(default_factory=list)
    numbers: list[NumberRow] = Field(default_factory=list)

    def to_text(self) -> str:
        """Returns the content of the file, a line for each number."""
        text = self.model_dump_json(indent=1, exclude={"numbers"}).removesuffix("\n}")
        lines = ",\n  ".join(row.model_dump_json(exclude_defaults=True) for row in self.numbers)
        return f'{text},\n "numbers": [\n  {lines}\n ]\n}}\n'


RoundRecord = SetupRow | RoundRow | EstimateRow
LedgerRow = LayoutRow | MessageRow | RefusalRow
AttackRow = ReconstructionRow | DifferenceRow | InversionRow | MembershipRow
METRIC_ROWS = RowFile[MetricRow](MetricRow)
ROUND_ROWS = RowFile[RoundRecord](Annotated[RoundRecord, Field(discriminator="kind")])
LEDGER_ROWS = RowFile[LedgerRow](Annotated[LedgerRow, Field(discriminator="kind")])
ADAPTATION_ROWS = RowFile[AdaptationRow](AdaptationRow)
DOMAIN_SCORES = RowFile[DomainScore](DomainScore)
PRIVACY, OPENED_SUMS = "privacy.jsonl", "opened_sums.jsonl"
"""Privacy costs, and clients whose masked sums were opened; rows are never removed."""
PRIVACY_ROWS = RowFile[PrivacyRow](PrivacyRow)
OPENED_SUM_ROWS = RowFile[OpenedSumRow](OpenedSumRow)
ATTACK_ROWS = RowFile[AttackRow](Annotated[AttackRow, Field(discriminator="kind")])


# Texts as cells of CSV files that a spreadsheet does not take for formulas.
#
# A cell that begins with ``=``, ``+``, ``-``, ``@``, a tab or a carriage return is computed when a
# spreadsheet opens the file. Names of files, domains and classes come from outside, so such a text
# gets an apostrophe before it, the spreadsheets' own mark of a text (OWASP, "CSV Injection"). So
# does one that has apostrophes before such a beginning, so that every text comes back. Numbers
# stay numbers.


_BEGINS_FORMULA = re.compile(r"'*[=+\-@\t\r]")
_NUMBER = re.compile(r"[+-]?[\d.,]+([eE][+-]?\d+)?( ?%| ± [\d.,]+)?")


def as_cell(value: object) -> object:
    """Returns a value for a spreadsheet cell: unchanged, or text that is not a formula."""
    if not isinstance(value, str) or not _BEGINS_FORMULA.match(value) or _NUMBER.fullmatch(value):
        return value
    return f"'{value}"


def as_csv(rows: Iterable[Iterable[object]]) -> str:
    """Returns rows as CSV, every cell as :func:`as_cell` has it."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(map(as_cell, row) for row in rows)
    return out.getvalue()


def from_cell(text: str) -> str:
    """Returns the original of a text written by :func:`as_cell`."""
    return text[1:] if text[:1] == "'" and _BEGINS_FORMULA.match(text[1:]) else text
