"""What left the sites, and what it gives away: for a person who has to answer for it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from feddg.records import AttackRow, LayoutRow, MembershipRow, ReconstructionRow
from feddg.report.attacks_section import attack_tables, learned, roc_chart
from feddg.report.blocks import Block, Cell, Code, Column, Fold, Prose, Section, Table
from feddg.report.ledger_section import ledger_sentences, ledger_table
from feddg.report.wording import counted, listed, number
from feddg.runs.reading import RunRecord

WEIGHTS = "weights"
STATISTICS = ("running_mean", "running_var")
OWN_NAMES = {WEIGHTS: "the network's weights", "statistics": "normalisation statistics"}
LOGS = ("terms/", "examples", "images", "seconds")
MOST_KINDS = 12
NO_EPSILON = "none"


@dataclass
class _Left:
    """One kind of thing that left the sites.

    Attributes:
        purpose: of the message.
        name: of the thing in it.
        numbers: the most that one client sent of it in one message.
        times: the most that one client sent it.
        clients: how many sent it.
        passed_on: whether clients were sent the same, each on its own.
    """

    purpose: str
    name: str
    numbers: int = 0
    times: int = 0
    clients: int = 0
    passed_on: bool = False

    @property
    def key(self) -> str:
        """``purpose/name``, as attacks name it."""
        return f"{self.purpose}/{self.name}"


def leaks_section(run: RunRecord) -> Section | None:
    """The section, or None where nothing was sent."""
    if not run.ledger.messages:
        return None
    attacks = run.attacks
    left = list(_kinds(run))
    blocks: list[Block] = [Prose(ledger_sentences(run.ledger)), _table(run, left, attacks)]
    blocks.append(Prose(_for_the_officer(run, left, attacks), notice=True))
    found: list[Block] = [*attack_tables(attacks)]
    if found:
        chart = roc_chart(attacks)
        found += [chart] if chart is not None else []
        blocks.append(Fold("What the attacks found, in numbers", found))
    else:
        blocks += _how_to_ask(run, left)
    blocks.append(Fold("Every message, tensor by tensor", [ledger_table(run.ledger)]))
    return Section("What left the sites, and what it gives away", blocks)


def _kinds(run: RunRecord) -> Iterator[_Left]:
    """Everything that left a site, in the order of first appearance."""
    found: dict[tuple[str, str], _Left] = {}
    times: dict[tuple[str, str, int], int] = {}
    told = _told(run)
    for message in run.ledger.messages:
        layout = run.ledger.layouts.get(message.layout)
        if message.direction != "up" or layout is None:
            continue
        for name, count in _content(layout).items():
            left = found.setdefault((message.purpose, name), _Left(message.purpose, name))
            left.numbers = max(left.numbers, count)
            own = (message.purpose, name, message.client)
            times[own] = times.get(own, 0) + 1
            left.passed_on = (message.purpose, name) in told
    for left in found.values():
        own_name = (left.purpose, left.name)
        counts = [n for (purpose, name, _), n in times.items() if (purpose, name) == own_name]
        left.times, left.clients = max(counts), len(counts)
    yield from list(found.values())[:MOST_KINDS]


def _content(layout: LayoutRow) -> dict[str, int]:
    """How many numbers of what a message holds; what a log says is no content."""
    counts: dict[str, int] = {}
    for tensor in layout.tensors:
        name = tensor.name
        if name.startswith("weights/"):
            name = "statistics" if name.endswith(STATISTICS) else WEIGHTS
        size = 1
        for length in tensor.shape:
            size *= length
        counts[name] = counts.get(name, 0) + size
    further = [name for name in layout.scalars if not name.startswith(LOGS)]
    if further or any(name == "examples" for name in layout.scalars):
        counts["counts and means of losses"] = len(layout.scalars)
    return counts


def _told(run: RunRecord) -> set[tuple[str, str]]:
    """What the setup handed to every client as it came from each: several rows of one name."""
    sent = {
        tensor.name: tensor.shape
        for message in run.ledger.messages
        if message.direction == "up" and message.purpose == "describe"
        for tensor in _tensors(run, message.layout)
    }
    return {
        ("describe", tensor.name)
        for message in run.ledger.messages
        if message.direction == "down" and message.purpose == "agree"
        for tensor in _tensors(run, message.layout)
        if tensor.name in sent
        and len(tensor.shape) == len(sent[tensor.name])
        and tensor.shape[0] > sent[tensor.name][0]
    }


def _tensors(run: RunRecord, layout: str) -> tuple[Any, ...]:
    found = run.ledger.layouts.get(layout)
    return found.tensors if found else ()


def _table(run: RunRecord, left: list[_Left], attacks: list[AttackRow]) -> Table:
    columns = [Column("What", numeric=False), Column("Message", numeric=False)]
    columns += [Column("Numbers from one site", "at most, each time"), Column("Times", "at most")]
    columns += [Column("Sites"), Column("Who saw it", numeric=False)]
    columns += [Column("Epsilon", "for delta"), Column("What an attack learned", numeric=False)]
    rows = [
        [
            Cell(OWN_NAMES.get(one.name, one.name)),
            Cell("before training" if one.purpose == "describe" else one.purpose),
            Cell(number(one.numbers)),
            Cell(number(one.times)),
            Cell(number(one.clients)),
            Cell(_readers(one)),
            Cell(_epsilon(run, one.purpose)),
            Cell(learned(attacks, one.key) or "not tried"),
        ]
        for one in left
    ]
    return Table(
        columns,
        rows,
        "Only an epsilon is a guarantee, against every attack. An attack that failed shows that "
        "this attack failed.",
    )


def _readers(left: _Left) -> str:
    if left.passed_on:
        return "the server, and every site as it came"
    return "the server; sites see what it makes of all"


def _epsilon(run: RunRecord, purpose: str) -> str:
    """What the run's account says of a kind of message."""
    spent = [row for row in run.privacy.values() if row.message == purpose]
    if not spent:
        return NO_EPSILON
    texts = [
        f"{row.epsilon:.3g} at {row.delta:g}, per {row.unit}, noised at the {row.noised_at}"
        for row in spent
    ]
    return "; ".join(texts)


def _for_the_officer(run: RunRecord, left: list[_Left], attacks: list[AttackRow]) -> str:
    things = listed([_phrase(one) for one in left if one.name != "counts and means of losses"])
    sites = counted(max(one.clients for one in left), "site")
    guaranteed = {one.purpose for one in left if _epsilon(run, one.purpose) != NO_EPSILON}
    promise = (
        "Differential privacy bounds what anybody can learn from some of it (column Epsilon)."
        if guaranteed
        else "Differential privacy was not used, so nothing bounds what somebody with more means "
        "could learn."
    )
    return (
        f"For a data-protection record: images stayed where they were; each of {sites} sent "
        f"{things or 'counts'}. {_tried(attacks)} {promise}"
    )


def _phrase(left: _Left) -> str:
    what = OWN_NAMES.get(left.name, f"“{left.name}”")
    often = "once" if left.times == 1 else f"up to {number(left.times)} times"
    return f"{what} ({number(left.numbers)} numbers, {often})"


def _tried(attacks: list[AttackRow]) -> str:
    """What attacks say in one sentence, with its limits."""
    if not attacks:
        return "No attack on what was sent has been tried on this run."
    sent = [r for r in attacks if isinstance(r, ReconstructionRow) and r.fed == "sent"]
    told = [r for r in sent if r.domain == "all" and r.rank_high < 0.5]
    members = [r for r in attacks if isinstance(r, MembershipRow) and r.low > 0.5]
    parts = []
    if sent:
        parts.append(
            f"images drawn from {listed(sorted({r.entry for r in told}))} pointed to the true ones "
            "more often than chance"
            if told
            else "it could not be told that what was drawn from it pointed to the true images"
        )
    if any(isinstance(r, MembershipRow) for r in attacks):
        parts.append(
            f"whether an image was a site's own could be told from "
            f"{listed(sorted({r.entry for r in members}))}"
            if members
            else "whether an image was a site's own could not be told for certain"
        )
    parts += [] if parts else ["images were searched for in single updates (see the table)"]
    return (
        f"In the attacks tried here, with the images and the effort stated, {listed(parts)}; a "
        "stronger attack may find more."
    )


def _how_to_ask(run: RunRecord, left: list[_Left]) -> list[Block]:
    shares = any(one.name not in OWN_NAMES for one in left if one.purpose == "describe")
    kind = "server --public FOLDER_OF_PHOTOGRAPHS" if shares else "membership"
    command = f"feddg privacy attack {run.folder} --kind {kind}"
    return [Prose("No attack has been tried on this run. To try one:"), Code(command)]
