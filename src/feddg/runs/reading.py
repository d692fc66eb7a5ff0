"""Run folders read back as typed records.

A record holds what a run wrote and nothing else. Its parts are read when they are first asked
for, so that going through a thousand folders for one table does not read a thousand ledgers.
A run that was interrupted, or is still going on, reads like a finished one: what it has not
written yet is ``None`` or empty, and a last line that was cut off is left out.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

from feddg.errors import RunError
from feddg.records import (
    ATTACK_ROWS,
    LEDGER_ROWS,
    METRICS_ROWS,
    PRIVACY_ROWS,
    AttackRow,
    ClientsTable,
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
from feddg.runs.evaluations import AGGREGATES, Evaluations
from feddg.runs.selection_rules import FINAL, SelectionRule, served_rule
from feddg.storage import entries, is_file, parse_fields, read_text
from feddg.views import Shown

EXPERIMENT_FILE: Final = "experiment.yaml"
CAPTIONS: Final = "captions.json"
ATTACKS: Final = "attacks.jsonl"

_PLAIN_ROWS = RowFile[dict[str, Any]](dict[str, Any])
_R = TypeVar("_R", bound=Row)


class Metrics:
    """The rows of ``metrics.jsonl``; a row written again replaces the earlier one."""

    def __init__(self, rows: Iterable[MetricsRow]) -> None:
        self._rows = {(row.kind, row.key): row for row in rows}

    def of(self, kind: type[_R]) -> list[_R]:
        """Returns the rows of one kind, in the order of writing."""
        return [row for row in self._rows.values() if isinstance(row, kind)]

    @cached_property
    def setup(self) -> SetupRow | None:
        """The exchange before round 1, or None when it has not ended yet."""
        return next(iter(self.of(SetupRow)), None)

    @cached_property
    def rounds(self) -> list[RoundRow]:
        """The rounds, ascending."""
        return sorted(self.of(RoundRow), key=lambda row: row.round)

    @cached_property
    def evaluations(self) -> list[EvaluationRow]:
        """The evaluations, in the order of writing."""
        return self.of(EvaluationRow)


class LedgerRecord:
    """Every message of a run, and by id the layouts they refer to."""

    def __init__(self, rows: Iterable[LedgerRow]) -> None:
        rows = list(rows)
        self.layouts = {row.id: row for row in rows if isinstance(row, LayoutRow)}
        self.messages = [row for row in rows if isinstance(row, MessageRow)]


@dataclass(frozen=True)
class RunRecord(Shown):
    """A run folder; each part is read from disk when it is first asked for."""

    folder: Path

    @cached_property
    def experiment(self) -> dict[str, Any]:
        """The resolved experiment, nested as in ``experiment.yaml``."""
        try:
            return parse_fields(self.experiment_text)
        except ValueError as error:
            raise RunError(f"{self.folder / EXPERIMENT_FILE} is damaged: it {error}.") from None

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Versions, machine and command; empty when not written yet."""
        return _read_optional(self.folder / "environment.json") or {}

    @cached_property
    def summary(self) -> SummaryFile | None:
        """The summary, or None while the run has not ended."""
        return SummaryFile.read(self.folder / "summary.json")

    @cached_property
    def clients(self) -> ClientsTable | None:
        """Who holds what, or None when the run stopped before the images were dealt out."""
        return ClientsTable.read(self.folder / "clients.json")

    @cached_property
    def metrics(self) -> Metrics:
        """Everything in ``metrics.jsonl``."""
        return Metrics(METRICS_ROWS.read(self.folder / "metrics.jsonl"))

    @cached_property
    def ledger(self) -> LedgerRecord:
        """Everything in ``ledger.jsonl``."""
        return LedgerRecord(LEDGER_ROWS.read(self.folder / "ledger.jsonl"))

    @cached_property
    def privacy(self) -> dict[tuple[Any, ...], PrivacyRow]:
        """What has been spent, by kind of message and unit: the last row of each.

        Empty where nothing was noised.
        """
        return {row.key: row for row in PRIVACY_ROWS.read(self.folder / "privacy.jsonl")}

    @cached_property
    def analyses(self) -> dict[str, Any] | None:
        """What ``feddg report --analyses`` found, or None where nobody asked."""
        return _read_optional(self.folder / "analyses.json")

    @cached_property
    def attacks(self) -> list[AttackRow]:
        """What ``feddg privacy attack`` found; nothing where nobody tried."""
        return ATTACK_ROWS.read(self.folder / ATTACKS)

    @cached_property
    def evaluations(self) -> Evaluations:
        """The evaluations, for look-up by round, split and domain."""
        said = self.experiment.get("evaluate") or {}
        over = str(said.get("select_over"))
        return Evaluations(
            self.metrics.evaluations,
            select_by=str(said.get("select_by") or "accuracy"),
            select_over=over if over in AGGREGATES else "domain_mean",
        )

    @cached_property
    def served(self) -> SelectionRule:
        """The rule of the model that the run serves, which headlines speak of."""
        return served_rule(self.experiment, self.evaluations)

    @cached_property
    def experiment_text(self) -> str:
        """``experiment.yaml`` as it was written."""
        return read_text(self.folder / EXPERIMENT_FILE)

    @property
    def name(self) -> str:
        """The experiment's name, or the folder's where it has none."""
        return str(self.experiment.get("name") or self.folder.name)

    @property
    def method(self) -> str:
        """The method's name as the experiment spells it."""
        method = self.experiment.get("method")
        return str(method.get("name") if isinstance(method, dict) else method)

    @property
    def status(self) -> str:
        """``completed``, ``interrupted``, ``failed``, or ``unfinished`` without a summary."""
        return self.summary.status if self.summary else "unfinished"

    @property
    def error(self) -> str | None:
        """Why the run failed, if it did."""
        return self.summary.error if self.summary else None

    @property
    def rounds_planned(self) -> int | None:
        """The number of rounds the experiment asks for."""
        rounds = (self.experiment.get("train") or {}).get("rounds")
        return int(rounds) if rounds is not None else None

    @property
    def rounds_done(self) -> int:
        """The number of rounds trained so far."""
        return max((row.round for row in self.metrics.rounds), default=0)

    def client_name(self, id: int) -> str:
        """What a client is called."""
        return self._client_names.get(id) or client_name(id)

    @cached_property
    def _client_names(self) -> dict[int, str]:
        return {client.id: client.name for client in self.clients.clients} if self.clients else {}

    def held_out(self, split: str) -> list[str]:
        """Domains held out for a split (``test`` or ``val``), as planned or as evaluated."""
        hold_out = self.experiment.get("hold_out")
        planned = hold_out.get(split) if isinstance(hold_out, dict) else None
        if isinstance(planned, str):
            return [planned]
        return [str(name) for name in planned or self.evaluations.domains(split)]

    def pictures(self) -> list[tuple[Path, str]]:
        """The pictures of the run with their captions, in the order of the captions file."""
        folder = self.folder / "figures"
        captions = read_captions(folder)
        files = sorted(path.name for path in folder.glob("*.png") if path.is_file())
        ordered = [name for name in captions if name in files]
        ordered += [name for name in files if name not in captions]
        return [(folder / name, str(captions.get(name, ""))) for name in ordered]


def read_captions(folder: Path) -> dict[str, str]:
    """Returns the captions of the pictures in a folder by file name, in their order."""
    captions = _read_optional(folder / CAPTIONS) or {}
    return {name: str(caption) for name, caption in captions.items()}


def served_by_all(runs: Iterable[RunRecord]) -> SelectionRule:
    """Returns the rule of the models that runs serve; the final round's where they differ."""
    rules = {run.served.name: run.served for run in runs}
    return next(iter(rules.values())) if len(rules) == 1 else FINAL


def is_run(folder: Path) -> bool:
    """Whether a folder is a run folder."""
    return is_file(folder / EXPERIMENT_FILE)


def read_run(folder: Path) -> RunRecord:
    """Open a run folder.

    Args:
        folder: The folder a run wrote, finished or not.

    Returns:
        Its record; parts are read on first use.

    Raises:
        RunError: If the folder does not exist or is not a run folder. Reading a part raises it
            too, where a file is damaged elsewhere than at its very end.
    """
    require_run(folder)
    return RunRecord(folder)


def require_run(folder: Path) -> None:
    """Raises RunError, with what to name instead, if a folder is no run folder."""
    if is_run(folder):
        return
    if not folder.is_dir():
        raise RunError(f"There is no run folder {folder}. Check the path.")
    inside = sum(
        (folder / entry.name / EXPERIMENT_FILE).is_file() for entry in entries(folder, RunError)
    )
    hint = (
        f"It holds {inside} run folder{'s' if inside > 1 else ''}: name one of them."
        if inside
        else "Name a folder that `feddg run` wrote."
    )
    raise RunError(f"{folder} holds no run: there is no {EXPERIMENT_FILE} in it. {hint}")


def flatten(settings: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields nested settings as dotted names with their values as text."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(settings, list):
        yield prefix, ", ".join(str(value) for value in settings) or "none"
    else:
        yield prefix, "none" if settings is None else str(settings)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads a file of JSON lines as it is, whatever its rows are; see :meth:`RowFile.read`."""
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
