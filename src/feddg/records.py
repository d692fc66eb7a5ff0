"""What a run writes down: one class for each kind of row, which both writes it and reads it.

Fields and kinds of rows that this version does not know are left out on reading. The files are
lines of JSON (``metrics.jsonl``, ``ledger.jsonl``), or one JSON object.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Generic, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    computed_field,
)

from feddg.diagnostics import Diagnostic
from feddg.errors import RunError
from feddg.storage import is_file, read_text

T = TypeVar("T")


class Row(BaseModel):
    """One row of a file, or a part of one.

    Attributes:
        identity: names of the fields that say what a row is about; a later row replaces an earlier
            one about the same.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)
    identity: ClassVar[tuple[str, ...]] = ()

    @property
    def key(self) -> tuple[int | str, ...]:
        """What the row is about."""
        return tuple(getattr(self, name) for name in self.identity)

    def to_json(self) -> str:
        """Returns the row as one line of JSON; what is None is left out."""
        return self.model_dump_json(exclude_none=True)


class JsonFile(Row):
    """A file that is one JSON object."""

    def to_text(self) -> str:
        """Returns the content of the file."""
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Reads a file; None if there is no such file.

        Raises:
            RunError: it is damaged; names the file and the field.
        """
        if not is_file(path):
            return None
        try:
            return cls.model_validate_json(read_text(path))
        except ValidationError as error:
            fault = error.errors()[0]
            raise RunError(f"{path} is damaged: {_fault_at(fault['loc'], fault)}.") from None


class RowFile(Generic[T]):
    """A kind of file of JSON lines, by what its rows are.

    Args:
        row: the row's class, or a union told apart by ``kind``.
    """

    def __init__(self, row: Any, *, tagged: bool = False) -> None:
        self._rows: TypeAdapter[list[T]] = TypeAdapter(list[row])
        self._tagged = tagged

    def read(self, path: Path) -> list[T]:
        """Reads a file; none if there is no such file.

        A last line that was cut off by a crash, and rows of kinds that only another version knows,
        are left out.

        Raises:
            RunError: a row is damaged; names the file, the row and the field.
        """
        if not is_file(path):
            return []
        text = read_text(path)
        try:  # all at once: faster than line by line
            return self._rows.validate_json("[" + text.removesuffix("\n").replace("\n", ",") + "]")
        except ValidationError:
            return list(self._one_by_one(path, numbered_lines(text)))

    def parse(self, text: str) -> list[T]:
        """Reads rows from a JSON array.

        Raises:
            ValueError: it holds none; says what is wrong in one line.
        """
        try:
            return self._rows.validate_json(text)
        except ValidationError as error:
            raise ValueError(self._fault(error)) from None

    def to_text(self, rows: list[T]) -> str:
        """Returns rows as a JSON array."""
        return self._rows.dump_json(rows, exclude_none=True).decode()

    def _one_by_one(self, path: Path, lines: list[tuple[int, str]]) -> Iterator[T]:
        for number, line in lines:
            try:
                yield from self._rows.validate_json(f"[{line}]")
            except ValidationError as error:
                kind = error.errors()[0]["type"]
                cut_off = kind == "json_invalid" and number == lines[-1][0]
                if cut_off or kind == "union_tag_invalid":
                    continue
                fault = self._fault(error)
                raise RunError(f"{path} is damaged in row {number}: {fault}.") from None

    def _fault(self, error: ValidationError) -> str:
        fault = error.errors()[0]
        # Before the field's name come the row's place and, in a union, its kind.
        return _fault_at(fault["loc"][2 if self._tagged else 1 :], fault)


def _fault_at(place: tuple[int | str, ...], fault: Any) -> str:
    field = ".".join(str(part) for part in place)
    if fault["type"] == "missing":
        return f"it lacks {field!r}"
    if fault["type"] == "union_tag_not_found":
        return "it lacks 'kind'"
    message = str(fault["msg"])
    return f"{field!r}: {message}" if field else message


def numbered_lines(text: str) -> list[tuple[int, str]]:
    """Returns the lines that hold something, with their numbers, from 1."""
    lines = enumerate(text.split("\n"), start=1)
    return [(number, line) for number, line in lines if line.strip(" \r\0")]


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
"""Weights of the last round; means over rounds; mixed with the starting point."""
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A float; ``null`` stands for one that is not finite, which JSON cannot hold."""
Unbounded = Annotated[float, BeforeValidator(lambda value: math.inf if value is None else value)]
"""A float above 0; ``null`` stands for infinity."""
Direction = Literal["up", "down"]
Groups = dict[str, tuple[tuple[int, ...], ...]]
"""By what clients were grouped, and the ids of each group's clients."""


def client_name(id: int) -> str:
    """Returns what a client without a name of its own is called, everywhere."""
    return f"client-{id}"


# metrics.jsonl


class SetupRow(Row):
    """The exchange before round 1.

    Attributes:
        seconds: its wall time.
        groups: how the method grouped the clients, if it did.
        left_out: accuracy at clients, by id, of the classifier that training starts from without
            them, where it is solved for.
    """

    kind: Literal["setup"] = "setup"
    round: int = 0
    seconds: Number = 0.0
    groups: Groups = Field(default_factory=dict)
    left_out: dict[int, Number] = Field(default_factory=dict)


class RefusedUpdate(Row):
    """An update the server did not use."""

    client: int
    reason: str


class RoundRow(Row):
    """One round of training: who took part, and what it cost.

    Attributes:
        round: 1 for the first.
        clients: ids of the clients asked to train, ascending.
        refused: updates that were not used, with the reason.
        terms: mean of each loss term over the used updates, weighted by examples.
        examples: training images behind the used updates.
        images: images of the used updates' training steps, each once a step however often a method
            passes it through the network.
        passes: images through clients' networks, each as often as it passed; 0 where nobody
            counted: sites do not tell.
        seconds: wall time by activity: ``train`` (spent in clients), ``aggregate`` (the rest of the
            round), ``evaluate``.
        bytes_up: sent by the clients in this round.
        bytes_down: sent to the clients in this round.
        left_out: accuracy at clients, by id, of a model that never saw them, where the method
            measures it.
    """

    identity: ClassVar = ("round",)
    kind: Literal["round"] = "round"
    round: int
    clients: list[int]
    refused: tuple[RefusedUpdate, ...] = ()
    terms: dict[str, Number] = Field(default_factory=dict)
    examples: int = 0
    images: int = 0
    forwards: int = 0
    seconds: dict[str, Number] = Field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    left_out: dict[int, Number] = Field(default_factory=dict)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def images_per_second(self) -> float:
        """Images per second of training; 0 when nothing was trained."""
        training = self.seconds.get("train", 0.0)
        return self.images / training if training else 0.0

    def took(self, **seconds: float) -> Self:
        """Returns the row with the time of further activities."""
        return self.model_copy(update={"seconds": self.seconds | seconds})


class EvaluationRow(Row):
    """How the global model did on one domain of one split after one round.

    Attributes:
        round: the round just finished; 0 is before training.
        split: one of ``SPLITS``.
        domain: name of the domain.
        accuracy: share of images classified correctly, in [0, 1].
        loss: mean cross-entropy over the images.
        examples: number of images.
        metrics: further numbers by name; see :mod:`feddg.evaluation.metrics`.
        confusion: ``confusion[true][predicted]`` counts, or None when not recorded.
        weights: which weights were measured: those of the ``last`` round, the mean over rounds
            called ``swa`` or ``ema``, or the ``wise_ft`` ones.
    """

    identity: ClassVar = ("round", "split", "domain", "weights")
    kind: Literal["evaluation"] = "evaluation"
    round: int
    split: str
    domain: str
    accuracy: Number
    loss: Number = math.nan
    examples: int
    metrics: dict[str, Number] = Field(default_factory=dict)
    confusion: list[list[int]] | None = None
    weights: str = LAST

    def metric(self, name: str) -> float | None:
        """Returns a metric by name, or None where it was not measured."""
        return self.accuracy if name == "accuracy" else self.metrics.get(name)

    @property
    def support(self) -> list[int] | None:
        """Images of each class, or None where who was taken for whom was not recorded."""
        if self.confusion is None:
            return None
        counts = [sum(row) for row in self.confusion]
        # Several models' predictions of the same images are counted together.
        models = max(1, sum(counts) // max(1, self.examples))
        return [count // models for count in counts]


class EstimateRow(Row):
    """How good a round's model is thought to be at a site, from no label of it.

    Attributes:
        round: the round just finished.
        site: its domain, or its name where it has no labels.
        images: of it.
        confidence: mean largest probability there, in [0, 1].
        value: the accuracy that is expected, in [0, 1].
        low: the lower end of the interval that holds it nine times out of ten.
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


# ledger.jsonl


class TensorEntry(Row):
    """One tensor of a message layout."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class LayoutRow(Row):
    """What a message consists of; many messages share one layout."""

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
    """What a client sent, or failed to send, and why it was not used."""

    kind: Literal["refusal"] = "refusal"
    round: int
    client: int
    reason: str


# privacy.jsonl


class PrivacyRow(Row):
    """A release under differential privacy, and what all of its kind have cost so far.

    It is written before the release is made, and never taken back: what was noised may have been
    seen, whatever became of its round.

    Attributes:
        message: the kind of message, as the ledger's purposes: ``update``, ``client_statistics``.
        round: the round it belongs to; 0 before the first.
        clients: whose data is in it.
        unit: what is hidden: that a ``client`` took part with what it has, or an ``image``.
        noised_at: where the noise is added: ``server`` (which is trusted), or ``client``.
        noise: deviation of the noise over the sensitivity; 0 for none.
        rate: with which probability each client took part, where nobody can know who did; 1 where
            that is known.
        epsilon: spent on messages of this kind and unit, this one included; infinite without noise.
        delta: at which.
        budget: the epsilon that may be spent on them, or None for any.
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
    """A round whose sum of masked updates was opened, for all tries of it.

    It is written before the sum is opened, and never taken back.

    Attributes:
        round: the round, from 1.
        clients: whose updates are in the sum, ascending.
    """

    identity: ClassVar = ("round",)
    round: int
    clients: list[int]


# adaptation.jsonl and traffic.jsonl


class AdaptationRow(Row):
    """One domain of one split under one test-time adaptation.

    Attributes:
        adaptation: as it was asked for; or ``own statistics``.
        round: the round whose model was evaluated.
        batch_size: images per batch.
        split: one of ``SPLITS``.
        domain: domain name.
        accuracy: in [0, 1].
        examples: images.
        client: whose own statistics, or None.
        which: the model's selection rule, as ``load_model`` takes it.
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
    """A message over a network that was answered, and what it cost.

    Attributes:
        at: when it was sent, seconds since 1970.
        kind: what it asked for: ``train``, ``query.register``, ...
        round: the round it belongs to.
        site: the site's name, or its node while it has none.
        bytes_down: to the site, as Flower counts them.
        bytes_up: from the site.
        seconds: from sending to fetching the reply.
        busy: of these, in our code at the site.
        train: of these, in training; the rest is Flower's: starting a process, looking into
            mailboxes, carrying bytes.
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


# clients.json


class ClientRow(Row):
    """What one client holds: its number of images per domain and per class."""

    id: int
    name: str = Field(default_factory=lambda known: client_name(known["id"]))
    domains: list[int]
    classes: list[int]


class BadImageRow(Row):
    """An image file that could not be read, and why."""

    path: str
    reason: str


class ClientsTable(JsonFile):
    """Who holds what: ``clients.json``.

    Attributes:
        domains: names of the domains that the clients' counts refer to.
        classes: names of the classes.
        clients: by id.
        bad_images: the files left out.
    """

    domains: list[str]
    classes: list[str]
    clients: list[ClientRow]
    bad_images: list[BadImageRow] = Field(default_factory=list)


# attacks.jsonl


class ReconstructionRow(Row):
    """Images drawn again from what clients send, compared with the true ones; of one domain.

    Attributes:
        attacker: who drew them: the ``server`` (or whoever reads its mail), or a ``client``.
        entry: what was read, as ``purpose/name`` of the ledger.
        fed: what the generator was fed: the entry as ``sent``; the same entry of each image by
            itself, a ``sample``; or that of an ``unrelated`` image, which is the chance line.
        domain: of the true images.
        images: pairs of a true image and its reconstruction; both sides count the same.
        clients: clients that these images belong to.
        psnr: mean over pairs, dB.
        ssim: mean over pairs.
        scores: further metrics by name; a name says which network judged.
        rank: mean share of the domain's other images that are nearer to the reconstruction than
            the true one; 0.5 is chance, 0 is always found.
        rank_low: lower end of its 95 % interval over clients.
        rank_high: upper end.
        first: share of the true images that are nearest of all.
        first_chance: what chance would give.
        public: images that the generator was trained on.
        seed: the attack's.
    """

    identity: ClassVar = ("attacker", "entry", "fed", "domain")
    kind: Literal["reconstruction"] = "reconstruction"
    attacker: Literal["server", "client"]
    entry: str
    fed: Literal["sent", "sample", "unrelated"]
    domain: str
    images: int
    clients: int
    psnr: Number
    ssim: Number
    scores: dict[str, Number] = Field(default_factory=dict)
    rank: Number = math.nan
    rank_low: Number = math.nan
    rank_high: Number = math.nan
    first: Number = math.nan
    first_chance: Number = math.nan
    public: int = 0
    seed: int = 0


class DifferenceRow(Row):
    """How much more each image's own entry gives away than the entry that was sent.

    Attributes:
        attacker: as in :class:`ReconstructionRow`.
        entry: what was read.
        metric: ``psnr``, ``ssim``, ``rank`` or a score.
        mean: mean over clients of (sample minus sent), on the same true images.
        low: lower end of its 95 % interval over clients.
        high: upper end.
        clients: how many there were.
        images: true images.
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


class InversionRow(Row):
    """Images drawn again from single clients' updates, by the number of images behind each.

    Attributes:
        optimizer: what the client's one step was taken by: the run's ``own``, or plain ``sgd``.
        batch_size: images behind an update.
        images: true images, in all updates together.
        updates: how many updates were attacked.
        iterations: steps of the search.
        psnr: mean over pairs, dB.
        ssim: mean over pairs.
        unrelated_psnr: the same for the images of another update: the chance line.
        scores: further metrics by name.
        rank: as in :class:`ReconstructionRow`, among all images of the attack.
        rank_low: lower end of its 95 % interval over updates.
        rank_high: upper end.
        cosine: mean cosine between the update and the one of the images found.
        seed: the attack's.
    """

    identity: ClassVar = ("optimizer", "batch_size")
    kind: Literal["inversion"] = "inversion"
    optimizer: Literal["own", "sgd"]
    batch_size: int
    images: int
    updates: int
    iterations: int
    psnr: Number
    ssim: Number
    unrelated_psnr: Number = math.nan
    scores: dict[str, Number] = Field(default_factory=dict)
    rank: Number = math.nan
    rank_low: Number = math.nan
    rank_high: Number = math.nan
    cosine: Number = math.nan
    seed: int = 0


class MembershipRow(Row):
    """Whether what a client sends tells that an image was its own.

    Attributes:
        entry: what was read: ``update/weights``, or an entry as in :class:`ReconstructionRow`.
        attack: ``threshold`` of a loss or a distance; ``shadow``, trained on clients like it.
        clients: clients attacked.
        members: their images that were asked about.
        others: images of the same domains that were not theirs.
        auc: mean over clients of the area under the ROC curve; 0.5 is chance.
        low: lower end of its 95 % interval over clients.
        high: upper end.
        early: share of members found while 1 % of the others are taken for members; chance: 0.01.
        curve: points of the mean ROC curve: false and true positive rate.
        others_from: where the other images come from.
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
    others_from: str = ""
    seed: int = 0


# summary.json


class EnergyThreshold(Row):
    """Above which energy an image is unlike those of training; of one model.

    Attributes:
        threshold: the energy, see :mod:`feddg.evaluation.accuracy`.
        inside: share of the in-domain validation images at or below it.
        images: how many of them there were.
    """

    threshold: float
    inside: float
    images: int


class SummaryFile(JsonFile):
    """How a run ended and what it took: ``summary.json``.

    Beside the fields it holds, under the name of each selection rule, the round that the rule
    chooses with its scores by split and domain, or None where the rule finds none.

    Attributes:
        status: ``completed``, ``interrupted`` or ``failed``.
        rounds: rounds trained.
        seconds: wall time by activity, and ``total``.
        images_per_second: of training.
        bytes: sent per client in the setup, per client and round, and in ``total``.
        error: why the run failed, if it did.
        peak_memory_bytes: largest resident memory of the process.
        diagnostics: what the run said of its images, settings and result.
    """

    model_config = ConfigDict(extra="allow")

    status: str
    rounds: int = 0
    seconds: dict[str, Number] = Field(default_factory=dict)
    images_per_second: Number = 0.0
    bytes: dict[str, int | float] = Field(default_factory=dict)
    error: str | None = None
    peak_memory_bytes: int | None = None
    diagnostics: list[Diagnostic] = Field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        """Returns what the file holds under ``name``."""
        return dict(self)[name]


MetricsRow = SetupRow | RoundRow | EvaluationRow | EstimateRow
LedgerRow = LayoutRow | MessageRow | RefusalRow
AttackRow = ReconstructionRow | DifferenceRow | InversionRow | MembershipRow
METRICS_ROWS = RowFile[MetricsRow](Annotated[MetricsRow, Field(discriminator="kind")], tagged=True)
LEDGER_ROWS = RowFile[LedgerRow](Annotated[LedgerRow, Field(discriminator="kind")], tagged=True)
EVALUATION_ROWS = RowFile[EvaluationRow](EvaluationRow)
ADAPTATION_ROWS = RowFile[AdaptationRow](AdaptationRow)
PRIVACY_ROWS = RowFile[PrivacyRow](PrivacyRow)
OPENED_SUM_ROWS = RowFile[OpenedSumRow](OpenedSumRow)
TRAFFIC_ROWS = RowFile[TrafficRow](TrafficRow)
ATTACK_ROWS = RowFile[AttackRow](Annotated[AttackRow, Field(discriminator="kind")], tagged=True)


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
    """Returns what to write for a value: itself, or a text that is no formula."""
    if not isinstance(value, str) or not _BEGINS_FORMULA.match(value) or _NUMBER.fullmatch(value):
        return value
    return f"'{value}"


def from_cell(text: str) -> str:
    """Returns the text that :func:`as_cell` wrote as ``text``."""
    return text[1:] if text[:1] == "'" and _BEGINS_FORMULA.match(text[1:]) else text
