"""Reads run folders as typed records."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ConfigDict

from feddg.diagnostics import emit, warning
from feddg.errors import ExperimentError, RunError
from feddg.experiment import Experiment, load_stored
from feddg.methods.composition import method_class
from feddg.readers import function
from feddg.records import (
    ADAPTATION_ROWS,
    ATTACK_ROWS,
    LEDGER_ROWS,
    METRIC_ROWS,
    PRIVACY_ROWS,
    ROUND_ROWS,
    TEST,
    AdaptationRow,
    AttackRow,
    ClientsTable,
    Details,
    EstimateRow,
    JsonFile,
    LayoutRow,
    LedgerRow,
    MessageRow,
    PrivacyRow,
    RoundRecord,
    RoundRow,
    RowFile,
    SetupRow,
    SummaryFile,
    client_name,
)
from feddg.runs.table import AGGREGATES, FINAL, NumberTable, SelectionRule, rules_asked
from feddg.settings import leaves
from feddg.storage import is_file, parse_fields, read_text
from feddg.text import command, value_text
from feddg.views import Shown

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch import nn

EXPERIMENT: Final = "experiment.yaml"
SUMMARY: Final = "summary.json"
METRICS_FILE, ROUNDS_FILE = "metrics.jsonl", "rounds.jsonl"
LEDGER, CLIENTS = "ledger.jsonl", "clients.json"
ENVIRONMENT, DETAILS = "environment.json", "details.json"
WHOLE_FILES = (CLIENTS, ENVIRONMENT, METRICS_FILE, ROUNDS_FILE, LEDGER)
"""Files that a run writes, besides its summary, by the end of its last round."""
DEPLOYMENT: Final = "deployment.json"
"""The file by which a deployment's run is known, whose clients' images are elsewhere."""
CAPTIONS: Final = "captions.json"
MISTAKE = "mistake-"
"""Start of the names of pictures that show a mistake each."""
ATTACKS: Final = "attacks.jsonl"
_PLAIN_ROWS = RowFile[dict[str, Any]](dict[str, Any])
ADAPTED = "adaptation.jsonl"
OWN = "own statistics"


class LedgerRecord:
    """All messages of a run, and their layouts by id."""

    def __init__(self, rows: Iterable[LedgerRow]) -> None:
        rows = list(rows)
        self.layouts = {row.id: row for row in rows if isinstance(row, LayoutRow)}
        self.messages = [row for row in rows if isinstance(row, MessageRow)]


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
        return _read_fields(self.folder / ENVIRONMENT)

    @cached_property
    def summary(self) -> SummaryFile | None:
        """The summary, or None if the run has not ended."""
        return SummaryFile.read(self.folder / SUMMARY)

    @cached_property
    def clients(self) -> ClientsTable | None:
        """The clients' data, or None if the run stopped before images were partitioned."""
        return ClientsTable.read(self.folder / CLIENTS)

    @cached_property
    def remaining(self) -> ClientsTable | None:
        """The clients' data without those that were taken out of the model."""
        table, gone = self.clients, self.forgotten
        if table is None or not gone:
            return table
        return table.model_copy(update={"clients": [c for c in table.clients if c.id not in gone]})

    @cached_property
    def details(self) -> Details:
        """What the final model gives by decision and subgroup; empty if not asked for."""
        return Details.read(self.folder / DETAILS) or Details()

    @cached_property
    def _measured(self) -> NumberTable:
        """Everything in ``metrics.jsonl``; a row written again replaces the earlier one."""
        settings = self.settings.get("evaluate") or {}
        by, over = str(settings.get("select_by") or "accuracy"), str(settings.get("select_over"))
        rows = {row.key: row for row in METRIC_ROWS.read(self.folder / METRICS_FILE)}
        return NumberTable(rows.values(), by, over if over in AGGREGATES else "domain_mean")

    @cached_property
    def table(self) -> NumberTable:
        """All numbers that were measured, of complete rounds: a number a row.

        Of a model that a client was taken out of, without what it was before.
        """
        last = self.rounds_done if self.setup else -1  # a round's numbers are written before it
        first = max((row.round for row in self.rounds if row.forgotten), default=0)
        return self._measured.between(first, last)

    @cached_property
    def result(self) -> NumberTable:
        """The numbers of the run's default model; none before any evaluation."""
        return self.default_rule.of(self.table)

    @cached_property
    def default_rule(self) -> SelectionRule:
        """The rule of the run's default model, among those that were evaluated."""
        asked = rules_asked(self.settings.get("server") or {})
        return next((rule for rule in asked if rule.of(self.table)), FINAL)

    @cached_property
    def _records(self) -> list[RoundRecord]:
        """Everything in ``rounds.jsonl``; a row written again replaces the earlier one."""
        rows = ROUND_ROWS.read(self.folder / ROUNDS_FILE)
        return [*{(row.kind, row.key): row for row in rows}.values()]

    @property
    def setup(self) -> SetupRow | None:
        """The exchange before round 1, or None if it has not ended yet."""
        return next((row for row in self._records if isinstance(row, SetupRow)), None)

    @cached_property
    def rounds(self) -> list[RoundRow]:
        """The rounds, ascending: who took part, and what they took."""
        rows = (row for row in self._records if isinstance(row, RoundRow))
        return sorted(rows, key=lambda row: row.round)

    @property
    def estimates(self) -> list[EstimateRow]:
        """What was expected without labels after the last round that was measured."""
        rows = [row for row in self._records if isinstance(row, EstimateRow)]
        return [row for row in rows if row.round == rows[-1].round]

    def at(self, images: int) -> "Run | None":
        """Returns the run as if it had ended when so many training images were used.

        A run with fewer images is returned as it ended. Returns None for a one-round method that
        uses more, because it has no model before.

        Args:
            images: training images of all clients together.
        """
        seen, last = 0, 0
        for row in self.rounds:
            seen, last = seen + row.images, row.round
            if seen >= images:
                break
        if self.has_one_round and seen > images:
            return None
        ended = replace(self)
        vars(ended).update(  # the cached properties that would look at all rounds, or read again
            {name: getattr(self, name) for name in ("settings", "environment", "summary", "damage")}
            | {"_measured": self._measured.between(0, last)}
            | {"_records": [row for row in self._records if row.round <= last]}
            | {"ended_early": self.ended_early and seen < images}
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
        """Everything in ``ledger.jsonl``; warns if messages of rounds are missing."""
        ledger = LedgerRecord(LEDGER_ROWS.read(self.folder / LEDGER))
        # What failed attempts sent, or came late, is listed and not counted in a round.
        listed = sum(message.bytes for message in ledger.messages if message.round)
        sent = sum(row.bytes_up + row.bytes_down for row in self.rounds)
        if listed < sent and self.summary:  # while a run goes on, its last round may be under way
            text = f"{self.folder / LEDGER} lists {listed:,} of the {sent:,} bytes of its rounds."
            emit(warning("messages-missing", text))
        return ledger

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

    @property
    def accuracy(self) -> float | None:
        """The held-out accuracy for headlines, in [0, 1]; None if no domain is held out.

        It is the mean over the test domains, of the run's default model.
        """
        return self.result.value(TEST)

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
        """Returns :attr:`table` as a pandas table, a number a row.

        Columns: ``round``, ``weights``, ``split``, ``domain``, ``metric``, ``value`` (shares from 0
        to 1), and what training had taken by the end of the round: ``images`` (of training steps,
        each once a step), ``bytes`` (by and to all clients, with those before round 1), and
        ``seconds`` (of the time before round 1, of training and of aggregation).
        """
        return self.table.frame()

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
        for name in WHOLE_FILES:
            if not is_file(self.folder / name):
                return f"{name} is missing"
        wanted = self.summary.rounds if self.ended_early else self.rounds_planned or 0
        if len(self.rounds) < wanted:
            return f"{ROUNDS_FILE} has {len(self.rounds)} of {wanted} rounds"
        for said in self.summary.numbers:  # of rules that can only have taken rows as they are
            if said.over == "domain_mean" and said.rule in (FINAL.name, said.weights):
                table = self.table.where(round=said.round, weights=said.weights)
                own = table.value(said.split, said.metric)
                if own is None or not (math.isclose(own, said.value) or math.isnan(own)):
                    return f"{METRICS_FILE} lacks numbers that {SUMMARY} has"
        return None

    @cached_property
    def ended_early(self) -> bool:
        """Whether its privacy budget was spent before it had all rounds or images asked for."""
        found = self.summary.diagnostics if self.summary else ()
        return any(one.code == "budget-spent" for one in found)

    @property
    def rounds_planned(self) -> int | None:
        """The number of rounds the experiment asks for."""
        rounds = (self.settings.get("train") or {}).get("rounds")
        return int(rounds) if rounds is not None else None

    @property
    def rounds_done(self) -> int:
        """The number of rounds trained so far."""
        return max((row.round for row in self.rounds), default=0)

    @property
    def contributors(self) -> list[int]:
        """The ids of the clients with a part in the model, ascending; without forgotten ones."""
        used = {
            id
            for row in self.rounds
            for id in {*row.clients} - {refused.client for refused in row.refused}
            if not row.forgotten
        }
        return sorted(used - {*self.forgotten})

    @property
    def forgotten(self) -> list[int]:
        """The ids of the clients that were taken out of the model, in this order."""
        return [id for row in self.rounds for id in row.forgotten]

    def client_name(self, id: int) -> str:
        """Returns a client's name."""
        return self._client_names.get(id) or client_name(id)

    @cached_property
    def _client_names(self) -> dict[int, str]:
        return {client.id: client.name for client in self.clients.clients} if self.clients else {}

    def held_out(self, split: str) -> list[str]:
        """Returns the domains evaluated as a split (``test``, ``val``); before that, as planned."""
        hold_out = self.settings.get("hold_out")
        planned = hold_out.get(split) if isinstance(hold_out, dict) else None
        names = [planned] if isinstance(planned, str) else [str(name) for name in planned or ()]
        measured = self.table.where(split=split).domains
        return sorted(measured, key=lambda n: names.index(n) if n in names else len(names)) or names

    def trained_on(self, domain: str) -> bool:
        """Whether clients hold images of an evaluated domain: a deployment's sites may."""
        table = self.remaining
        counts = zip(table.domains, zip(*(one.domains for one in table.clients))) if table else ()
        held = [name for name, images in counts if any(images)]
        # Where several sites measure a domain, its name has theirs behind it.
        return any(f"{domain} at ".startswith(f"{name} at ") for name in held)

    def pictures(self) -> list[tuple[Path, str]]:
        """The pictures of the run with their captions, in the order of the captions file."""
        folder = self.folder / "figures"
        pictures = ((folder / name, text) for name, text in read_captions(folder).items())
        return [(file, text) for file, text in pictures if file.is_file()]


def read_captions(folder: Path) -> dict[str, str]:
    """Returns the captions of the pictures in a folder by file name, in order."""
    return {name: str(caption) for name, caption in _read_fields(folder / CAPTIONS).items()}


def going_on(folder: Path) -> str:
    """Returns the command that continues a run; a deployment's is given in its app's folder."""
    of_sites = is_file(folder / DEPLOYMENT)
    return command("deploy", "run") if of_sites else command("resume", str(folder))


def is_run(folder: Path) -> bool:
    """Returns whether a folder is a run folder."""
    return is_file(folder / EXPERIMENT)


def read_run(folder: Path | str) -> Run:
    """Opens a run folder.

    Args:
        folder: the run's folder, finished or not.

    Returns:
        The run; parts are read on first use.

    Raises:
        RunError: the folder does not exist or is not a run folder. Reading a part raises it too, if
            a file is damaged anywhere but at its very end.
    """
    require_run(path := Path(folder))
    return Run(path)


def require_run(folder: Path) -> None:
    """Raises RunError, with advice, if a folder is not a run folder."""
    if is_run(folder):
        return
    if not folder.is_dir():
        raise RunError(f"There is no run folder {folder}. Check the path.")
    raise RunError(
        f"{folder} holds no run: there is no {EXPERIMENT} in it. Name a folder that `feddg run` "
        "wrote."
    )


def flatten(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns nested settings by dotted name, their values as text."""
    return {name: value_text(value) for name, value in leaves(settings).items() if value != {}}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads a file of JSON lines without a schema; see :meth:`RowFile.read`."""
    return _PLAIN_ROWS.read(path)


class _Fields(JsonFile):
    model_config = ConfigDict(extra="allow")


def _read_fields(path: Path) -> dict[str, Any]:
    """Reads a file of any fields; returns none if it does not exist."""
    return (_Fields.read(path) or _Fields()).model_extra or {}


def read_adapted(folder: Path) -> list[AdaptationRow]:
    """Returns the scores with adaptations in a run's folder."""
    return ADAPTATION_ROWS.read(folder / ADAPTED)
