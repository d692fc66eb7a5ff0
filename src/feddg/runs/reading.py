"""Reads run folders as typed records; evaluations, and the rules that select a model."""

import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy

from feddg.diagnostics import Diagnostic, emit
from feddg.errors import ExperimentError, RunError
from feddg.evaluation.metrics import METRICS, Metric, Predictions, measure
from feddg.experiment import Experiment, load_stored
from feddg.methods.composition import method_class
from feddg.readers import function
from feddg.records import (
    ADAPTATION_ROWS,
    ATTACK_ROWS,
    EMA,
    ID_VAL,
    LAST,
    LEDGER_ROWS,
    METRICS_ROWS,
    PRIVACY_ROWS,
    SWA,
    TEST,
    VAL,
    WISE_FT,
    AdaptationRow,
    AttackRow,
    ClientsTable,
    Details,
    EstimateRow,
    EvaluationRow,
    LayoutRow,
    LedgerRow,
    MessageRow,
    MetricsRow,
    PrivacyRow,
    RoundRow,
    Row,
    RowFile,
    SetupRow,
    SummaryFile,
    client_name,
)
from feddg.registry import Registry
from feddg.settings import leaves
from feddg.storage import entries, is_file, parse_fields, read_text
from feddg.text import value_text
from feddg.views import Shown

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch import nn

Aggregate = Callable[[Sequence[EvaluationRow], str], float | None]
"""Aggregates a metric over the rows of a split's domains."""
EXPERIMENT: Final = "experiment.yaml"
SUMMARY: Final = "summary.json"
METRICS_FILE, LEDGER, CLIENTS = "metrics.jsonl", "ledger.jsonl", "clients.json"
ENVIRONMENT, DETAILS = "environment.json", "details.json"
_WHOLE_FILES = (CLIENTS, ENVIRONMENT, METRICS_FILE, LEDGER)
"""Files that a run writes, besides its summary, by the end of its last round."""
_FEWER_ROUNDS = {"budget-spent", "rounds-missing"}
"""Diagnostics of a run that ended with fewer rounds than planned, and recorded it."""
CAPTIONS: Final = "captions.json"
MISTAKE = "mistake-"
"""Start of the names of pictures that show a mistake each."""
ATTACKS: Final = "attacks.jsonl"
_PLAIN_ROWS = RowFile[dict[str, Any]](dict[str, Any])
ADAPTED = "adaptation.jsonl"
OWN = "own statistics"


def _values(rows: Sequence[EvaluationRow], metric: str) -> list[float] | None:
    """Returns a metric of each row, or None if one lacks it."""
    values = [value for row in rows if (value := row.metric(metric)) is not None]
    return values if values and len(values) == len(rows) else None


def _domain_mean(rows: Sequence[EvaluationRow], metric: str) -> float | None:
    values = _values(rows, metric)
    return math.fsum(values) / len(values) if values else None


def _worst_domain(rows: Sequence[EvaluationRow], metric: str) -> float | None:
    kind: Metric | None = METRICS.get(metric)
    values = _values(rows, metric)
    no_direction = kind is not None and kind.higher_is_better is None
    if no_direction or not values or any(map(math.isnan, values)):
        return None
    return min(values, key=lambda value: preferred(value, metric))


def _pooled(rows: Sequence[EvaluationRow], metric: str) -> float | None:
    images = sum(row.examples for row in rows)
    values = _values(rows, metric)
    if metric == "accuracy":
        total = math.fsum(row.accuracy * row.examples for row in rows)
        return total / images if images else None
    counts = [row.confusion for row in rows if row.confusion is not None]
    if not values or len(counts) < len(rows):
        return None
    together = numpy.sum([numpy.array(count) for count in counts], axis=0)
    return measure(Predictions(together)).get(metric)


AGGREGATES: Final[dict[str, Aggregate]] = {
    "domain_mean": _domain_mean,
    "pooled": _pooled,
    "worst_domain": _worst_domain,
}
"""How the domains of a split become one number, by name.

``domain_mean`` weights domains equally; ``pooled`` weights images equally, as if the split were one
domain; ``worst_domain`` is the worst domain's value. Other metrics than accuracy can be pooled only
if rows have a confusion matrix (the last round's do) and it suffices for them.
"""


def preferred(value: float, metric: str) -> float:
    """Returns a metric's value with the sign changed if less is better."""
    kind: Metric | None = METRICS.get(metric)
    return -value if kind is not None and kind.higher_is_better is False else value


def in_order(metrics: Iterable[str]) -> list[str]:
    """Returns the names of metrics, each once, in the order of tables."""
    found = set(metrics)
    return [name for name in METRICS if name in found] + sorted(found - METRICS.keys())


class Evaluations:
    """Evaluations, looked up by round, split and domain.

    If the run stopped during an evaluation, the incomplete last round is left out, because means
    over fewer domains are not comparable.

    They belong to one kind of weights: the last round's, unless :meth:`of` selects others.

    Args:
        rows: evaluations of any weights.
        weights: the weights to use.
        select_by: the metric that chooses a round.
        select_over: the aggregate over a split's domains for that, a name of :data:`AGGREGATES`.
    """

    def __init__(
        self,
        rows: Iterable[EvaluationRow],
        weights: str = LAST,
        *,
        select_by: str = "accuracy",
        select_over: str = "domain_mean",
    ) -> None:
        self.select_by, self.select_over = select_by, select_over
        self._rows, self.weights = list(rows), weights
        self._others: dict[str, Evaluations] = {weights: self}
        self._by_round: dict[int, dict[tuple[str, str], EvaluationRow]] = {}
        for row in self._rows:
            if row.weights == weights:
                self._by_round.setdefault(row.round, {})[row.split, row.domain] = row
        self.rounds: list[int] = sorted(self._by_round)
        if len(self.rounds) > 1:
            before, last = (self._by_round[round_].keys() for round_ in self.rounds[-2:])
            if not before <= last:  # it was not finished
                self._by_round.pop(self.rounds.pop())

    def of(self, weights: str) -> "Evaluations":
        """Returns the evaluations of other weights: ``last``, ``swa``, ``ema``, ``wise_ft``.

        Only complete rounds: those with everything that was evaluated for the last weights.
        """
        if weights not in self._others:
            found = Evaluations(
                self._rows, weights, select_by=self.select_by, select_over=self.select_over
            )
            if weights != LAST:
                whole, own = self.of(LAST)._by_round, found._by_round
                found.rounds = [
                    r for r in found.rounds if r in whole and whole[r].keys() <= own[r].keys()
                ]
                found._by_round = {r: own[r] for r in found.rounds}
            found._others = self._others
            self._others[weights] = found
        return self._others[weights]

    def domains(self, split: str) -> list[str]:
        """Returns the domains evaluated in a split, in the order of writing."""
        names = (
            domain for rows in self._by_round.values() for part, domain in rows if part == split
        )
        return list(dict.fromkeys(names))

    def get(self, round_: int, split: str, domain: str) -> EvaluationRow | None:
        """Returns the evaluation of one domain after one round, or None."""
        return self._by_round.get(round_, {}).get((split, domain))

    def at(self, round_: int, split: str) -> list[EvaluationRow]:
        """Returns the evaluations of a split after one round, one per domain."""
        rows = self._by_round.get(round_, {})
        return [row for (part, _), row in rows.items() if part == split]

    def value(
        self, round_: int | None, split: str, metric: str = "accuracy", over: str = "domain_mean"
    ) -> float | None:
        """Returns a metric of a split after one round, over its domains; None if unknown.

        Args:
            round_: the round; None for none.
            split: one of ``SPLITS``.
            metric: a name of :data:`feddg.evaluation.metrics.METRICS`.
            over: a name of :data:`AGGREGATES`.
        """
        rows = self.at(round_, split) if round_ is not None else []
        return AGGREGATES[over](rows, metric) if rows else None

    def preference(self, round_: int, split: str) -> float | None:
        """Returns the value that chooses rounds, larger being better; None if unknown.

        It is the metric ``select_by`` of the split, aggregated by ``select_over``, with its sign
        changed if less is better.
        """
        value = self.value(round_, split, self.select_by, self.select_over)
        return None if value is None or math.isnan(value) else preferred(value, self.select_by)

    def metrics(self, split: str) -> list[str]:
        """Returns the metrics of a split's evaluations, in the order of tables."""
        rows = (row for r in self.rounds for row in self.at(r, split))
        return in_order({"accuracy", *(name for row in rows for name in row.metrics)})

    def support(self, split: str, domain: str) -> list[int] | None:
        """Returns the number of images per class in a domain; None before it was recorded."""
        rows = (self.get(round_, split, domain) for round_ in reversed(self.rounds))
        return next((row.support for row in rows if row and row.support is not None), None)


# The rules that choose the model that counts; none of them looks at the test split.
#
# A rule is a function from a run's evaluations to a round, and says which weights of that round:
# those the federation trained, or a mean over rounds that it keeps beside them. A new rule is one
# definition here, or in another package under the entry-point group ``feddg.selection_rules``:
# tables, pages, plans, ``summary.json`` and ``load_model(which=...)`` find it by themselves.


@dataclass(frozen=True)
class Chosen:
    """A round that a rule chose, with its evaluations.

    Attributes:
        evaluations: those of the rule's weights.
        round: the round; None if there is none to choose from.
    """

    evaluations: Evaluations
    round: int | None

    def rows(self, split: str) -> list[EvaluationRow]:
        """Returns the evaluations of a split, one per domain."""
        return self.evaluations.at(self.round, split) if self.round is not None else []

    def value(
        self, split: str, metric: str = "accuracy", over: str = "domain_mean"
    ) -> float | None:
        """Returns a metric of a split over its domains; see :meth:`Evaluations.value`."""
        return self.evaluations.value(self.round, split, metric, over)


@dataclass(frozen=True)
class SelectionRule:
    """A named rule that selects a model.

    Attributes:
        name: its name for ``load_model``, in model files, plans and tables of numbers.
        title: its name in tables for reading.
        choose: returns the round from the evaluations of its weights, or None if the needed split
            was not evaluated.
        split: the split that decides; None if no accuracy is needed.
        weights: the weights of the chosen round, as in an evaluation's row.
        optional: whether tables omit it if no run has evaluated its weights.
        when: words for a sentence, after an accuracy.
    """

    name: str
    title: str
    choose: Callable[[Evaluations], int | None]
    split: str | None = None
    weights: str = LAST
    optional: bool = False
    when: str = ""

    def of(self, evaluations: Evaluations) -> Chosen:
        """Returns what it chooses from a run's evaluations."""
        own = evaluations.of(self.weights)
        return Chosen(own, self.choose(own))


SELECTION_RULES: Final = Registry[SelectionRule](
    "selection rule", group="feddg.selection_rules", error=RunError
)


def add_rule(rule: SelectionRule) -> SelectionRule:
    """Registers a rule under its name and title, and returns it."""
    return SELECTION_RULES.add(rule.name, rule, (rule.title,))


def rules_for(runs: Iterable[Evaluations]) -> list[SelectionRule]:
    """Returns the rules for tables of these runs, optional ones only if a run has them."""
    found = list(runs)
    return [
        rule
        for rule in SELECTION_RULES.values()
        if not rule.optional or any(rule.of(one).round is not None for one in found)
    ]


def final_round(evaluations: Evaluations) -> int | None:
    """Returns the last evaluated round, or None before any evaluation."""
    return evaluations.rounds[-1] if evaluations.rounds else None


def best_round(evaluations: Evaluations, split: str) -> int | None:
    """Returns the round with the best validation on a split (``select_by``, ``select_over``).

    The first of the best; the untrained model only if there is no other.
    """
    preferences = {r: evaluations.preference(r, split) for r in evaluations.rounds}
    scores = {r: score for r, score in preferences.items() if score is not None}
    trained = {r: score for r, score in scores.items() if r > 0} or scores
    return max(trained, key=lambda r: (trained[r], -r), default=None)


def _of_weights(weights: str, title: str, when: str) -> SelectionRule:
    """Returns the rule that selects the named weights after the last round."""
    return SelectionRule(
        weights, title, final_round, weights=weights, optional=True, when=f"by {when}"
    )


def _of_validation(name: str, split: str, of: str) -> SelectionRule:
    title, when = f"Best {of} validation", f"after the round that is best on {of} validation"
    return SelectionRule(name, title, partial(best_round, split=split), split, when=when)


FINAL: Final = add_rule(
    SelectionRule("final", "Final round", final_round, when="after the final round")
)
SWA_MEAN: Final = add_rule(
    _of_weights(SWA, "Mean of the last rounds", "the mean of the last rounds' models")
)
EMA_MEAN: Final = add_rule(
    _of_weights(EMA, "Exponential mean", "the exponential mean of the rounds' models")
)
BEST_IN_DOMAIN: Final = add_rule(_of_validation("best_in_domain", ID_VAL, "in-domain"))
BEST_HELD_OUT: Final = add_rule(_of_validation("best_held_out", VAL, "held-out"))
WISE_FT_RULE: Final = add_rule(
    _of_weights(WISE_FT, "WiSE-FT", "a mix of the final model and the one it began from")
)


def served_rules(server: Mapping[str, Any]) -> list[SelectionRule]:
    """Returns the rules of a run's default model from its ``server`` settings; see :class:`Run`."""
    names = [WISE_FT] if str(server.get("wise_ft") or "none") != "none" else []
    names += {str(server.get("averaging"))} & {SWA, EMA}
    return [*map(SELECTION_RULES.find, names), FINAL]


_R = TypeVar("_R", bound=Row)


class Metrics:
    """The rows of ``metrics.jsonl``; a row written again replaces the earlier one."""

    def __init__(self, rows: Iterable[MetricsRow]) -> None:
        self._rows = {(row.kind, row.key): row for row in rows}

    def of(self, kind: type[_R]) -> list[_R]:
        """Returns the rows of one kind, in the order of writing."""
        return [row for row in self._rows.values() if isinstance(row, kind)]

    def until(self, round: int) -> "Metrics":
        """Returns the rows up to a round."""
        return Metrics(row for row in self._rows.values() if getattr(row, "round", 0) <= round)

    @cached_property
    def setup(self) -> SetupRow | None:
        """The exchange before round 1, or None if it has not ended yet."""
        return next(iter(self.of(SetupRow)), None)

    @cached_property
    def rounds(self) -> list[RoundRow]:
        """The rounds, ascending."""
        return sorted(self.of(RoundRow), key=lambda row: row.round)

    @cached_property
    def evaluations(self) -> list[EvaluationRow]:
        """The evaluations, in the order of writing."""
        return self.of(EvaluationRow)

    @cached_property
    def estimates(self) -> list[EstimateRow]:
        """What was expected without labels after the last round that was measured."""
        found = self.of(EstimateRow)
        return [row for row in found if row.round == found[-1].round]


class LedgerRecord:
    """All messages of a run, and their layouts by id."""

    def __init__(self, rows: Iterable[LedgerRow]) -> None:
        rows = list(rows)
        self.layouts = {row.id: row for row in rows if isinstance(row, LayoutRow)}
        self.messages = [row for row in rows if isinstance(row, MessageRow)]


def short_rounds(sent: Iterable[tuple[int, int]], messages: Iterable[tuple[int, int]]) -> list[int]:
    """Returns the rounds of which a ledger has fewer bytes than were counted while they ran.

    Args:
        sent: the bytes of each round, as counted then.
        messages: round and bytes of every message in the ledger.
    """
    held, more, short = Counter[int](), 0, list[int]()
    for round, size in messages:
        held[round] += size
    for round, size in sorted(sent):
        # What a failed attempt sent, or came late, is entered and not counted in its round.
        more += held[round] - size
        if more < 0:
            short.append(round)
            more = 0
    return short


def in_spans(rounds: list[int]) -> str:
    """Returns ascending rounds as text: ``1-3, 7``."""
    spans = groupby(enumerate(rounds), lambda at: at[1] - at[0])  # which is the same in a span
    ends = [[round for _, round in own] for _, own in spans]
    return ", ".join("-".join(map(str, dict.fromkeys((own[0], own[-1])))) for own in ends)


class Spent(NamedTuple):
    """The cost of a run up to the end of a round.

    Attributes:
        images: images of the used updates' training steps, once per step.
        bytes: bytes sent by and to all clients, including before round 1.
        seconds: time before round 1, and of training and aggregation.
    """

    images: int
    bytes: float
    seconds: float


@dataclass(frozen=True, repr=False)
class Run(Shown):
    """A run; each part of its folder is read at first use.

    Attributes:
        folder: path of the run folder.
        was_complete: whether it was complete before :func:`feddg.run`, so that nothing was run.
    """

    folder: Path
    was_complete: bool = False

    @cached_property
    def experiment(self) -> Experiment:
        """The complete experiment."""
        return load_stored(self.folder / EXPERIMENT)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The complete experiment as nested values of ``experiment.yaml``, of any version."""
        try:
            return parse_fields(self.experiment_text)
        except ValueError as error:
            raise RunError(f"{self.folder / EXPERIMENT} is damaged: it {error}.") from None

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Versions, machine and command; empty if not written yet."""
        return _read_optional(self.folder / ENVIRONMENT) or {}

    @cached_property
    def summary(self) -> SummaryFile | None:
        """The summary, or None if the run has not ended."""
        return SummaryFile.read(self.folder / SUMMARY)

    @cached_property
    def clients(self) -> ClientsTable | None:
        """The clients' data, or None if the run stopped before images were partitioned."""
        return ClientsTable.read(self.folder / CLIENTS)

    @cached_property
    def details(self) -> Details:
        """What the final model gives by decision and subgroup; empty if not asked for."""
        return Details.read(self.folder / DETAILS) or Details()

    @cached_property
    def metrics(self) -> Metrics:
        """Everything in ``metrics.jsonl``."""
        return Metrics(METRICS_ROWS.read(self.folder / METRICS_FILE))

    @cached_property
    def spent(self) -> dict[int, Spent]:
        """The cost of the run up to each round, from 0, ascending."""
        rounds, setup = self.metrics.rounds, self.metrics.setup
        # What was sent before round 1 is the rest of the ledger's total.
        sent = self.summary.bytes.get("total", 0.0) if self.summary else 0.0
        sent = max(0.0, sent - sum(row.bytes_up + row.bytes_down for row in rounds))
        found = {0: Spent(0, sent, setup.seconds if setup else 0.0)}
        images, sent, seconds = found[0]
        for row in rounds:
            images += row.images
            sent += row.bytes_up + row.bytes_down
            seconds += sum(took for name, took in row.seconds.items() if name != "evaluate")
            found[row.round] = Spent(images, sent, seconds)
        return found

    def spent_by(self, round: int) -> Spent:
        """Returns the cost of the run up to a round.

        Raises:
            RunError: the round's row is missing.
        """
        if round not in self.spent:
            path = self.folder / METRICS_FILE
            raise RunError(f"{path} is damaged: it has no row of round {round}; put the file back.")
        return self.spent[round]

    def at(self, images: int) -> "Run | None":
        """Returns the run as if it had ended when so many training images were used.

        A run with fewer images is returned as it ended. Returns None for a one-round method that
        uses more, because it has no model before.

        Args:
            images: training images of all clients together, as in :attr:`spent`.
        """
        reached = (round for round, spent in self.spent.items() if spent.images >= images)
        last = next(reached, self.rounds_done)
        if self.has_one_round and self.spent_by(last).images > images:
            return None
        ended = replace(self)
        vars(ended).update(  # the cached properties that would look at all rounds, or read again
            {name: getattr(self, name) for name in ("settings", "environment", "summary", "damage")}
            | {"metrics": self.metrics.until(last)}
            | {"spent": {r: spent for r, spent in self.spent.items() if r <= last}}
        )
        return ended

    @property
    def has_one_round(self) -> bool:
        """Whether its method needs a single round only."""
        try:
            return method_class(self.method).one_round
        except ExperimentError:
            return False  # another package's, which is not here

    @cached_property
    def ledger(self) -> LedgerRecord:
        """Everything in ``ledger.jsonl``; warns of rounds that lack messages."""
        found = LedgerRecord(LEDGER_ROWS.read(self.folder / LEDGER))
        sent = ((row.round, row.bytes_up + row.bytes_down) for row in self.metrics.rounds)
        short = short_rounds(sent, ((row.round, row.bytes) for row in found.messages))
        if short and self.summary:  # while a run goes on, its last round may be under way
            text = f"{self.folder / LEDGER} lacks messages of rounds {in_spans(short)}."
            emit(Diagnostic("messages-missing", "warning", text))
        return found

    @cached_property
    def privacy(self) -> dict[tuple[Any, ...], PrivacyRow]:
        """The privacy cost so far, by kind of message and unit: the last row of each.

        Empty if nothing was noised.
        """
        return {row.key: row for row in PRIVACY_ROWS.read(self.folder / "privacy.jsonl")}

    @cached_property
    def attacks(self) -> list[AttackRow]:
        """The results of ``feddg privacy attack``; empty if not run."""
        return ATTACK_ROWS.read(self.folder / ATTACKS)

    @cached_property
    def evaluations(self) -> Evaluations:
        """The evaluations, for look-up by round, split and domain."""
        settings = self.settings.get("evaluate") or {}
        over = str(settings.get("select_over"))
        return Evaluations(
            self.metrics.evaluations,
            select_by=str(settings.get("select_by") or "accuracy"),
            select_over=over if over in AGGREGATES else "domain_mean",
        )

    @cached_property
    def served_rules(self) -> list[SelectionRule]:
        """The rules of the run's default model: the first one whose model it has is used."""
        return served_rules(self.settings.get("server") or {})

    @cached_property
    def default_rule(self) -> SelectionRule:
        """The rule of the run's default model, among those that were evaluated."""
        rules = (r for r in self.served_rules if r.of(self.evaluations).round is not None)
        return next(rules, FINAL)

    @cached_property
    def served(self) -> Chosen:
        """The run's default model with its evaluations; of no round before any evaluation."""
        return self.default_rule.of(self.evaluations)

    @property
    def accuracy(self) -> float | None:
        """The held-out accuracy for headlines, in [0, 1]; None if no domain is held out.

        It is the mean over the test domains, of the run's default model.
        """
        return self.served.value(TEST)

    @property
    def model(self) -> "nn.Module":
        """The run's default model, see :func:`feddg.load_model`.

        Its ``predict`` takes image files, folders and globs, as :func:`feddg.predict` does.
        """
        model: nn.Module = function("load_model")(self.folder)
        model.predict = partial(function("predict"), self.folder)  # type: ignore[assignment]
        return model

    @property
    def report(self) -> Path:
        """The path of the HTML page."""
        return self.folder / "report.html"

    def open(self) -> None:
        """Opens the page in a browser, after writing it if it does not exist."""
        import webbrowser

        page = function("ensure_report")(self.folder)
        webbrowser.open(page.resolve().as_uri())

    def frame(self) -> "DataFrame":
        """Returns all evaluations as one long table, a number a row.

        Columns: ``round``, ``weights``, ``split``, ``domain``, ``metric``, ``value`` (shares from 0
        to 1), and ``images``, ``bytes``, ``seconds``: the run's cost up to the end of the round,
        see :class:`Spent`.
        """
        from pandas import DataFrame  # a third of a second, and a run needs none of it

        columns = ["round", "weights", "split", "domain", "metric", "value", *Spent._fields]
        rows = [
            (row.round, row.weights, row.split, row.domain, *number, *self.spent_by(row.round))
            for row in self.metrics.evaluations
            for number in row.numbers.items()
        ]
        return DataFrame(rows, columns=columns)

    @cached_property
    def experiment_text(self) -> str:
        """The text of ``experiment.yaml``."""
        return read_text(self.folder / EXPERIMENT)

    @property
    def name(self) -> str:
        """The experiment's name, or the folder's if it has none."""
        return str(self.settings.get("name") or self.folder.name)

    @property
    def method(self) -> str:
        """The method's name as the experiment spells it."""
        method = self.settings.get("method")
        return str(method.get("name") if isinstance(method, dict) else method)

    @property
    def status(self) -> str:
        """``completed``, ``interrupted``, ``failed``, or ``unfinished`` without a summary.

        ``damaged`` if it was completed but files or rows are missing.
        """
        if self.damage:
            return "damaged"
        return self.summary.status if self.summary else "unfinished"

    @property
    def error(self) -> str | None:
        """Why the run failed, or what is damaged."""
        return self.damage or (self.summary.error if self.summary else None)

    @cached_property
    def damage(self) -> str | None:
        """What a completed run has lost; None if it is intact or was not completed."""
        if self.summary is None or self.summary.status != "completed":
            return None
        for name in _WHOLE_FILES:
            if not is_file(self.folder / name):
                return f"{name} is missing"
        for name in (name for name in _WHOLE_FILES if name.endswith(".jsonl")):
            with (self.folder / name).open("rb") as file:
                size = file.seek(0, io.SEEK_END)
                file.seek(max(0, size - 1))
                if size and file.read() != b"\n":
                    return f"the last row of {name} is cut off"
        codes = {one.code for one in self.summary.diagnostics} & _FEWER_ROUNDS
        wanted = self.summary.rounds if codes else self.rounds_planned or 0
        if self.rounds_done < wanted:
            return f"{METRICS_FILE} has {self.rounds_done} of {wanted} rounds"
        return None

    @property
    def part_evaluated(self) -> int | None:
        """The first round that is left out as evaluations of it are missing, or None."""
        rows = ((row.round, self.evaluations.of(row.weights)) for row in self.metrics.evaluations)
        return min((round for round, of in rows if round not in of.rounds), default=None)

    @property
    def rounds_planned(self) -> int | None:
        """The number of rounds the experiment asks for."""
        rounds = (self.settings.get("train") or {}).get("rounds")
        return int(rounds) if rounds is not None else None

    @property
    def rounds_done(self) -> int:
        """The number of rounds trained so far."""
        return max((row.round for row in self.metrics.rounds), default=0)

    @property
    def contributors(self) -> list[int]:
        """The ids of the clients with a part in the model, ascending; without forgotten ones."""
        rows = self.metrics.rounds
        forgotten = {id for row in rows for id in row.forgotten}
        used = {
            id
            for row in rows
            for id in {*row.clients} - {refused.client for refused in row.refused}
            if not row.forgotten
        }
        return sorted(used - forgotten)

    def first_round_of(self, client: int) -> int:
        """Returns the first round whose update of a client was asked for."""
        return min(row.round for row in self.metrics.rounds if client in row.clients)

    def client_name(self, id: int) -> str:
        """Returns a client's name."""
        return self._client_names.get(id) or client_name(id)

    @cached_property
    def _client_names(self) -> dict[int, str]:
        return {client.id: client.name for client in self.clients.clients} if self.clients else {}

    def held_out(self, split: str) -> list[str]:
        """Returns the domains held out for a split (``test``, ``val``), as planned or evaluated."""
        hold_out = self.settings.get("hold_out")
        planned = hold_out.get(split) if isinstance(hold_out, dict) else None
        if isinstance(planned, str):
            return [planned]
        return [str(name) for name in planned or self.evaluations.domains(split)]

    def pictures(self) -> list[tuple[Path, str]]:
        """The pictures of the run with their captions, in the order of the captions file."""
        folder = self.folder / "figures"
        captions = read_captions(folder)
        files = sorted(path.name for path in folder.glob("*.png") if path.is_file())
        ordered = [*(n for n in captions if n in files), *(n for n in files if n not in captions)]
        return [(folder / name, str(captions.get(name, ""))) for name in ordered]


def read_captions(folder: Path) -> dict[str, str]:
    """Returns the captions of the pictures in a folder by file name, in order."""
    captions = _read_optional(folder / CAPTIONS) or {}
    return {name: str(caption) for name, caption in captions.items()}


def is_run(folder: Path) -> bool:
    """Returns whether a folder is a run folder."""
    return is_file(folder / EXPERIMENT)


def read_run(folder: Path) -> Run:
    """Opens a run folder.

    Args:
        folder: The run's folder, finished or not.

    Returns:
        The run; parts are read on first use.

    Raises:
        RunError: the folder does not exist or is not a run folder. Reading a part raises it too, if
            a file is damaged anywhere but at its very end.
    """
    require_run(folder)
    return Run(folder)


def require_run(folder: Path) -> None:
    """Raises RunError, with advice, if a folder is not a run folder."""
    if is_run(folder):
        return
    if not folder.is_dir():
        raise RunError(f"There is no run folder {folder}. Check the path.")
    inside = sum(
        (folder / entry.name / EXPERIMENT).is_file() for entry in entries(folder, RunError)
    )
    hint = (
        f"It holds {inside} run folder{'s' if inside > 1 else ''}: name one of them."
        if inside
        else "Name a folder that `feddg run` wrote."
    )
    raise RunError(f"{folder} holds no run: there is no {EXPERIMENT} in it. {hint}")


def flatten(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns nested settings by dotted name, their values as text."""
    return {name: value_text(value) for name, value in leaves(settings).items() if value != {}}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads a file of JSON lines without a schema; see :meth:`RowFile.read`."""
    return _PLAIN_ROWS.read(path)


def _read_optional(path: Path) -> dict[str, Any] | None:
    if not is_file(path):
        return None
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {error}.") from error
    if not isinstance(content, dict):
        raise RunError(f"{path} is damaged: a mapping of names to values was expected.")
    return content


def read_adapted(folder: Path) -> list[AdaptationRow]:
    """Returns the scores with adaptations in a run's folder."""
    return ADAPTATION_ROWS.read(folder / ADAPTED)
