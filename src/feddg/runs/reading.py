"""Run folders read back as typed records, and the rules that choose a round from them.

A record holds what a run wrote and nothing else. Its parts are read when they are first asked
for, so that going through a thousand folders for one table does not read a thousand ledgers.
A run that was interrupted, or is still going on, reads like a finished one: what it has not
written yet is ``None`` or empty, and a last line that was cut off is left out.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml

from feddg.errors import RunError

EXPERIMENT_FILE: Final = "experiment.yaml"
TEST, VAL, ID_VAL, ID_TEST = "test", "val", "id_val", "id_test"
SPLITS: Final = (TEST, VAL, ID_VAL, ID_TEST)

_YamlLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How the global model did on one domain of one split after one round.

    Attributes:
        round: The round just finished; 0 is before training.
        split: ``test`` or ``val`` (held-out domains), ``id_val`` or ``id_test`` (domains the
            clients train on).
        domain: Name of the domain.
        accuracy: Share of images classified correctly, in [0, 1].
        loss: Mean cross-entropy over the images.
        examples: Number of images.
        confusion: ``confusion[true][predicted]`` counts, or None when not recorded.
    """

    round: int
    split: str
    domain: str
    accuracy: float
    loss: float
    examples: int
    confusion: list[list[int]] | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """An update the server did not use."""

    client: int
    reason: str


@dataclass(frozen=True, slots=True)
class Round:
    """One round of training: who took part, the mean of each loss term, and what it cost.

    Attributes:
        round: 1 for the first.
        clients: Ids of the clients asked to train.
        refused: Updates that were not used, with the reason.
        terms: Loss terms by name, averaged over the clients' examples.
        examples: Images trained on, counting repeats.
        seconds: Wall time by activity (``train``, ``aggregate``, ``evaluate``).
        images_per_second: Training throughput.
        bytes_up: Sent by the clients in this round.
        bytes_down: Sent to the clients in this round.
    """

    round: int
    clients: list[int]
    refused: tuple[Refusal, ...]
    terms: dict[str, float]
    examples: int
    seconds: dict[str, float]
    images_per_second: float
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, slots=True)
class Setup:
    """The exchange before round 1: its wall time and whatever scalars the method noted."""

    seconds: float
    groups: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Client:
    """What one client holds: its number of images per domain and per class."""

    id: int
    name: str
    domains: list[int]
    classes: list[int]


@dataclass(frozen=True, slots=True)
class Clients:
    """All clients, the names their counts refer to, and the images that could not be read."""

    domains: list[str]
    classes: list[str]
    clients: list[Client]
    bad_images: list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a message layout."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True)
class LayoutEntry:
    """What a message consists of; many messages share one layout."""

    id: str
    tensors: tuple[TensorEntry, ...]
    scalars: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MessageEntry:
    """One message between the server and a client; ``up`` leaves the client."""

    round: int
    direction: str
    client: int
    purpose: str
    layout: str
    bytes: int


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """Every message of a run, and the layouts they refer to."""

    layouts: dict[str, LayoutEntry]
    messages: list[MessageEntry]


@dataclass(frozen=True, slots=True)
class Metrics:
    """The rows of ``metrics.jsonl`` by kind; a row written again replaces the earlier one."""

    setup: Setup | None
    rounds: list[Round]
    evaluations: list[Evaluation]


class Evaluations:
    """Evaluations, looked up by round, split and domain.

    When the run stopped in the middle of an evaluation, that last round lacks domains which the
    round before it has; it is left out, because a mean over fewer domains would be a different
    quantity.
    """

    def __init__(self, rows: Iterable[Evaluation]) -> None:
        self._by_round: dict[int, dict[tuple[str, str], Evaluation]] = {}
        for row in rows:
            self._by_round.setdefault(row.round, {})[row.split, row.domain] = row
        self.rounds: list[int] = sorted(self._by_round)
        self._drop_unfinished_round()

    def _drop_unfinished_round(self) -> None:
        if len(self.rounds) < 2:
            return
        before, last = (self._by_round[round_].keys() for round_ in self.rounds[-2:])
        if not before <= last:
            self._by_round.pop(self.rounds.pop())

    def domains(self, split: str) -> list[str]:
        """Names of the domains evaluated in a split, in the order of writing."""
        names = (
            domain for rows in self._by_round.values() for part, domain in rows if part == split
        )
        return list(dict.fromkeys(names))

    def get(self, round_: int, split: str, domain: str) -> Evaluation | None:
        """The evaluation of one domain after one round, or None if there is none."""
        return self._by_round.get(round_, {}).get((split, domain))

    def at(self, round_: int, split: str) -> list[Evaluation]:
        """The evaluations of a split after one round, one per domain."""
        rows = self._by_round.get(round_, {})
        return [row for (part, _), row in rows.items() if part == split]

    def accuracy(self, round_: int | None, split: str) -> float | None:
        """Accuracy of a split after one round: the mean over its domains, each counted once."""
        rows = self.at(round_, split) if round_ is not None else []
        if not rows:
            return None
        return math.fsum(row.accuracy for row in rows) / len(rows)


# --- choosing a round ---------------------------------------------------------------------------


def final_round(evaluations: Evaluations) -> int | None:
    """The last evaluated round, or None before any evaluation."""
    return evaluations.rounds[-1] if evaluations.rounds else None


def best_in_domain(evaluations: Evaluations) -> int | None:
    """The round with the best in-domain validation accuracy (mean over domains)."""
    return _best_round(evaluations, ID_VAL)


def best_held_out(evaluations: Evaluations) -> int | None:
    """The round with the best held-out validation accuracy (mean over domains)."""
    return _best_round(evaluations, VAL)


def _best_round(evaluations: Evaluations, split: str) -> int | None:
    """The earliest of the best rounds; the untrained model stands only if nothing else does."""
    scores = {r: evaluations.accuracy(r, split) for r in evaluations.rounds}
    known = {r: score for r, score in scores.items() if score is not None and score == score}
    trained = {r: score for r, score in known.items() if r > 0} or known
    return max(trained, key=lambda r: (trained[r], -r), default=None)


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """A named way to choose the round whose model counts; none of them looks at the test split.

    Attributes:
        name: How tables call it.
        choose: From evaluations to a round, or None when the needed split was not evaluated.
        split: The split that decides, or None where the decision needs no accuracy.
    """

    name: str
    choose: Callable[[Evaluations], int | None]
    split: str | None = None


SELECTION_RULES: Final = (
    SelectionRule("Final round", final_round),
    SelectionRule("Best in-domain validation", best_in_domain, ID_VAL),
    SelectionRule("Best held-out validation", best_held_out, VAL),
)


# --- one run folder -----------------------------------------------------------------------------


@dataclass(frozen=True)
class RunRecord:
    """A run folder; each part is read from disk when it is first asked for."""

    folder: Path

    @cached_property
    def experiment(self) -> dict[str, Any]:
        """The resolved experiment, nested as in ``experiment.yaml``."""
        return _parse_mapping(self.folder / EXPERIMENT_FILE, self.experiment_text, _parse_yaml)

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Versions, machine and command; empty when not written yet."""
        return _read_optional(self.folder / "environment.json") or {}

    @cached_property
    def summary(self) -> dict[str, Any] | None:
        """The summary, or None while the run has not ended."""
        return _read_optional(self.folder / "summary.json")

    @cached_property
    def clients(self) -> Clients | None:
        """Who holds what, or None when the run stopped before the images were dealt out."""
        path = self.folder / "clients.json"
        content = _read_optional(path)
        return None if content is None else _build(path, _clients, content)

    @cached_property
    def metrics(self) -> Metrics:
        """Everything in ``metrics.jsonl``."""
        path = self.folder / "metrics.jsonl"
        return _build(path, _metrics, read_rows(path))

    @cached_property
    def ledger(self) -> LedgerRecord:
        """Everything in ``ledger.jsonl``."""
        path = self.folder / "ledger.jsonl"
        return _build(path, _ledger, read_rows(path))

    @cached_property
    def analyses(self) -> dict[str, Any] | None:
        """What ``feddg report --analyses`` found, or None where nobody asked."""
        return _read_optional(self.folder / "analyses.json")

    @cached_property
    def evaluations(self) -> Evaluations:
        """The evaluations, for look-up by round, split and domain."""
        return Evaluations(self.metrics.evaluations)

    @cached_property
    def experiment_text(self) -> str:
        """``experiment.yaml`` as it was written."""
        return _read_text(self.folder / EXPERIMENT_FILE)

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
        return str((self.summary or {}).get("status", "unfinished"))

    @property
    def error(self) -> str | None:
        """Why the run failed, if it did."""
        error = (self.summary or {}).get("error")
        return None if error is None else str(error)

    @property
    def rounds_planned(self) -> int | None:
        """The number of rounds the experiment asks for."""
        rounds = (self.experiment.get("train") or {}).get("rounds")
        return int(rounds) if rounds is not None else None

    @property
    def rounds_done(self) -> int:
        """The number of rounds trained so far."""
        return max((row.round for row in self.metrics.rounds), default=0)

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
        captions = _read_optional(folder / "captions.json") or {}
        files = sorted(path.name for path in folder.glob("*.png"))
        ordered = [name for name in captions if name in files]
        ordered += [name for name in files if name not in captions]
        return [(folder / name, str(captions.get(name, ""))) for name in ordered]


def is_run(folder: Path) -> bool:
    """Whether a folder is a run folder."""
    return (folder / EXPERIMENT_FILE).is_file()


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
    if is_run(folder):
        return RunRecord(folder)
    if not folder.is_dir():
        raise RunError(f"There is no run folder {folder}. Check the path.")
    inside = sum(is_run(path) for path in folder.iterdir())
    hint = (
        f"It holds {inside} run folder{'s' if inside > 1 else ''}: name one of them."
        if inside
        else "Name a folder that `feddg run` wrote."
    )
    raise RunError(f"{folder} is not a run folder (it has no {EXPERIMENT_FILE}). {hint}")


def flatten(settings: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields nested settings as dotted names with their values as text."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(settings, list):
        yield prefix, ", ".join(str(value) for value in settings) or "none"
    else:
        yield prefix, "none" if settings is None else str(settings)


# --- files --------------------------------------------------------------------------------------


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RunError(f"Cannot read {path}: {error.strerror}.") from error


def _parse_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_YamlLoader)


def _parse_mapping(path: Path, text: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        content = parse(text)
    except (ValueError, yaml.YAMLError) as error:
        raise RunError(f"{path} is damaged: {error}.") from error
    if not isinstance(content, dict):
        raise RunError(f"{path} is damaged: a mapping of names to values was expected.")
    return content


def _read_optional(path: Path) -> dict[str, Any] | None:
    return _parse_mapping(path, _read_text(path), json.loads) if path.is_file() else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads a JSON-lines file; a last line that was cut off by a crash is left out.

    Returns:
        Its rows; none if there is no such file.

    Raises:
        RunError: a row before the last is damaged.
    """
    if not path.is_file():
        return []
    lines = [line for line in _read_text(path).split("\n") if line.strip(" \r\0")]
    try:
        rows: list[dict[str, Any]] = json.loads("[" + ",".join(lines) + "]")
    except ValueError:
        rows = list(_parse_one_by_one(path, lines))
    return rows


def _parse_one_by_one(path: Path, lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            if number < len(lines):
                raise RunError(f"{path} is damaged in row {number}: {error}.") from error


def _build(path: Path, build: Callable[[Any], _T], content: Any) -> _T:
    try:
        return build(content)
    except KeyError as error:
        raise RunError(f"{path} is damaged: a row lacks {error}.") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{path} is damaged: {error}.") from error


# --- from JSON to records -----------------------------------------------------------------------


def _clients(content: dict[str, Any]) -> Clients:
    rows = [
        Client(
            row["id"], row.get("name", f"client-{row['id']:03d}"), row["domains"], row["classes"]
        )
        for row in content["clients"]
    ]
    domains, classes = ([str(name) for name in content[key]] for key in ("domains", "classes"))
    return Clients(domains, classes, rows, content.get("bad_images") or [])


def _metrics(rows: list[dict[str, Any]]) -> Metrics:
    setup: Setup | None = None
    rounds: dict[int, Round] = {}
    evaluations: dict[tuple[int, str, str], Evaluation] = {}
    for row in rows:
        kind = row["kind"]
        if kind == "evaluation":
            evaluation = _evaluation(row)
            evaluations[evaluation.round, evaluation.split, evaluation.domain] = evaluation
        elif kind == "round":
            rounds[row["round"]] = _round(row)
        elif kind == "setup":
            setup = Setup(row.get("seconds") or 0.0, row.get("groups") or {})
    return Metrics(setup, [rounds[key] for key in sorted(rounds)], list(evaluations.values()))


def _evaluation(row: dict[str, Any]) -> Evaluation:
    return Evaluation(
        round=row["round"],
        split=row["split"],
        domain=str(row["domain"]),
        accuracy=_number(row["accuracy"]),
        loss=_number(row.get("loss")),
        examples=row["examples"],
        confusion=row.get("confusion"),
    )


def _round(row: dict[str, Any]) -> Round:
    refused = row.get("refused") or []
    return Round(
        round=row["round"],
        clients=row["clients"],
        refused=tuple(Refusal(entry["client"], str(entry["reason"])) for entry in refused),
        terms={name: _number(value) for name, value in (row.get("terms") or {}).items()},
        examples=row.get("examples") or 0,
        seconds=row.get("seconds") or {},
        images_per_second=row.get("images_per_second") or 0.0,
        bytes_up=row.get("bytes_up") or 0,
        bytes_down=row.get("bytes_down") or 0,
    )


def _number(value: Any) -> float:
    """A number; ``null`` stands for one that is not finite, which JSON cannot hold."""
    return math.nan if value is None else float(value)


def _ledger(rows: list[dict[str, Any]]) -> LedgerRecord:
    layouts: dict[str, LayoutEntry] = {}
    messages: list[MessageEntry] = []
    for row in rows:
        if row["kind"] == "layout":
            layouts[row["id"]] = _layout(row)
        elif row["kind"] == "message":
            messages.append(
                MessageEntry(
                    row["round"],
                    row["direction"],
                    row["client"],
                    row["purpose"],
                    row["layout"],
                    row["bytes"],
                )
            )
    return LedgerRecord(layouts, messages)


def _layout(row: dict[str, Any]) -> LayoutEntry:
    tensors = tuple(
        TensorEntry(entry["name"], tuple(entry["shape"]), entry["dtype"], entry["bytes"])
        for entry in row["tensors"]
    )
    return LayoutEntry(row["id"], tensors, tuple(row.get("scalars") or ()))
