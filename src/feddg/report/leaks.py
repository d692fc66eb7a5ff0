"""The report's section on privacy: what left the sites, and what attacks found in it."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from feddg.errors import ExperimentError
from feddg.methods.composition import method_class
from feddg.records import (
    AttackRow,
    DifferenceRow,
    InversionRow,
    LayoutRow,
    MembershipRow,
    MessageRow,
    ReconstructionRow,
    Row,
)
from feddg.report.blocks import Block, Code, Fold, Prose, Section, Table
from feddg.report.charts import roc_chart
from feddg.report.text import sentence, table_from
from feddg.runs.reading import LEDGER, LedgerRecord, Run
from feddg.settings import grouped
from feddg.text import command, size

WEIGHTS = "weights"
STATISTICS = ("running_mean", "running_var")
COUNTS = "counts and means of losses"
SUMS = ("classifier.gram", "classifier.cross")
OWN_NAMES = {
    WEIGHTS: "the network's weights",
    "statistics": "normalisation statistics",
    "sums": "sums over its features, which the classifier is solved from",
}
LOGS = ("terms/", "examples", "images", "seconds")
CHANCE = 0.5
TOO_WIDE = 0.3
"""Intervals of ranks or AUC wider than this allow no conclusion."""


class _Entry(NamedTuple):
    """A kind of data that left the sites: a name in messages of one purpose.

    Attributes:
        purpose: purpose of the messages.
        name: name of the entry in them.
        passed_on: whether the server sent each client's value on to all clients.
        numbers: the largest number of values that one client sent in a message.
        times: the largest number of times that one client sent it.
        sites: how many clients sent it.
    """

    purpose: str
    name: str
    passed_on: bool
    numbers: int
    times: int
    sites: int

    @property
    def key(self) -> str:
        """``purpose/name``, as attacks name it."""
        return f"{self.purpose}/{self.name}"


def leaks_section(run: Run) -> Section | None:
    """Returns the section, or None if nothing was sent."""
    if not run.ledger.messages:
        return None
    attacks, entries = run.attacks, list(_entries(run.ledger))
    blocks: list[Block] = [
        Prose(_ledger_sentences(run.ledger)),
        table_from(
            "entries",
            entries=entries,
            names=OWN_NAMES,
            epsilon=lambda entry: _epsilon(run, entry),
            found=lambda entry: list(_findings(attacks, entry.key)),
        ),
        Prose(
            sentence("bounded", anything=any(_epsilon(run, entry) for entry in entries)),
            notice=True,
        ),
    ]
    if tables := attack_tables(attacks):
        found = [*tables, roc_chart(_rows(attacks, MembershipRow))]
        blocks.append(Fold("What the attacks found, in numbers", [*filter(None, found)]))
    else:
        described = [entry for entry in entries if entry.purpose == "statistics"]
        shares = any(entry.name not in {*OWN_NAMES, COUNTS} for entry in described)
        kind = ("server", "--public", "FOLDER_OF_PHOTOGRAPHS") if shares else ("membership",)
        blocks.append(Prose("No attack has been tried on this run. To try one:"))
        blocks.append(Code(command("privacy", "attack", str(run.folder), "--kind", *kind)))
    return Section("What left the sites, and what it gives away", blocks, folded=True)


def _entries(ledger: LedgerRecord) -> Iterator[_Entry]:
    """Yields everything that left a site, in order of first appearance."""
    contents = {id: _content(layout) for id, layout in ledger.layouts.items()}
    sent = grouped(
        ((_purpose(message), name), (message.client, count))
        for message in ledger.messages
        if message.direction == "up" and message.client >= 0  # others are no sites
        for name, count in contents.get(message.layout, {}).items()
    )
    passed_on = {("statistics", name) for name in _passed_on(ledger)}
    for key, parts in sent.items():
        clients, numbers = zip(*parts)
        times = Counter(clients)
        yield _Entry(*key, key in passed_on, max(numbers), max(times.values()), len(times))


def _content(layout: LayoutRow) -> dict[str, int]:
    """Returns how many values each entry of a message holds, without log information."""
    counts = Counter[str]()
    names = {tensor.name for tensor in layout.tensors}
    for tensor in layout.tensors:
        name = tensor.name
        prefix, _, entry = name.partition("/")
        if name.startswith("weights/"):
            kinds = {"statistics": STATISTICS, "sums": SUMS}
            name = next((kind for kind, ends in kinds.items() if name.endswith(ends)), WEIGHTS)
        elif f"weights/{entry}" in names:  # one for each of the network's, as SCAFFOLD's
            name = f"{prefix}/*"
        counts[name] += math.prod(tensor.shape)
    if any(name == "examples" or not name.startswith(LOGS) for name in layout.scalars):
        counts[COUNTS] = len(layout.scalars)
    return counts


def _passed_on(ledger: LedgerRecord) -> Iterator[str]:
    """Yields names of which the setup sent every client the rows of all clients."""

    def shapes(direction: str, purpose: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        for message in ledger.messages:
            layout = ledger.layouts.get(message.layout)
            if layout is not None and (message.direction, message.purpose) == (direction, purpose):
                yield from ((tensor.name, tuple(tensor.shape)) for tensor in layout.tensors)

    sent = dict(shapes("up", "statistics"))
    for name, shape in shapes("down", "context"):
        if name in sent and len(shape) == len(sent[name]) and shape[0] > sent[name][0]:
            yield name


def _epsilon(run: Run, entry: _Entry) -> str:
    """Returns the epsilon of what was sent in the run's account; empty without noise."""
    return "; ".join(
        f"{row.epsilon:.3g} at {row.delta:g}, per {row.unit}, noised at the {row.noised_at}"
        for row in run.privacy.values()
        if row.message == entry.purpose and _is_noised(run, entry)
    )


def _is_noised(run: Run, entry: _Entry) -> bool:
    """Whether an entry of a message that has noise has it; of statistics only styles do."""
    if entry.purpose != "statistics":
        return True
    try:
        return entry.key in method_class(run.method).noises
    except ExperimentError:  # of a package that is not here
        return True


R = TypeVar("R", bound=Row)


def _rows(rows: Sequence[AttackRow], kind: type[R]) -> list[R]:
    return [row for row in rows if isinstance(row, kind)]


def attack_tables(rows: Sequence[AttackRow]) -> list[Table]:
    """Returns a table for each kind of attack that was run."""
    drawn, inverted = _rows(rows, ReconstructionRow), _rows(rows, InversionRow)
    tables = [
        table_from("reconstructions", rows=drawn, scores=_scores(drawn)),
        table_from("differences", rows=_rows(rows, DifferenceRow)),
        table_from("inversions", rows=inverted, scores=_scores(inverted)),
        table_from("memberships", rows=_rows(rows, MembershipRow)),
    ]
    return [table for table in tables if table.rows]


def _scores(rows: Sequence[ReconstructionRow] | Sequence[InversionRow]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.scores))


def _findings(rows: Sequence[AttackRow], key: str) -> Iterator[str]:
    """Yields what attacks learned from one kind of message, ``purpose/name``, in short phrases."""
    for row in rows:
        if isinstance(row, ReconstructionRow) and row.entry == key:
            if row.fed == "sent" and row.domain == "all":
                where = _against_chance(row.rank_low, row.rank_high)
                yield sentence("drawn", row=row, where=where)
        elif isinstance(row, InversionRow) and key == f"update/{WEIGHTS}":
            yield sentence("inverted", row=row)
        elif isinstance(row, MembershipRow) and row.entry == key:
            yield sentence("member", row=row, told=row.low > CHANCE)


def _against_chance(low: float, high: float) -> str:
    if high < CHANCE:
        return "to the true ones"
    if not high - low < TOO_WIDE:
        return "nowhere that could be told from so few clients"
    return "to the true ones no better than chance, as far as could be told"


def _purpose(message: MessageRow) -> str:
    """Returns a message's purpose; what a classifier is solved from describes the site's data."""
    before = message.round == 0 and message.purpose == "update"
    return "statistics" if before else message.purpose


def _ledger_sentences(ledger: LedgerRecord) -> str:
    """Returns what left each site, in plain words; nodes that are no sites sent nothing of one."""
    up = [one for one in ledger.messages if one.direction == "up" and one.client >= 0]
    if not up:
        return "No site has sent anything yet."
    sent = [sum(own) for own in grouped((one.client, one.bytes) for one in up).values()]
    sizes = grouped((_purpose(one), one.bytes) for one in up)
    kinds = [
        sentence("kind_sent", purpose=purpose, least=size(min(values)), most=size(max(values)))
        for purpose, values in sizes.items()
    ]
    return sentence(
        "sent",
        kinds=kinds,
        most=max(sent),
        total=sum(sent),
        sites=len(sent),
        file=LEDGER,
    )
