"""What left the sites, what attacks made of it, and what it gives away."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from feddg.records import (
    AttackRow,
    DifferenceRow,
    InversionRow,
    LayoutRow,
    MembershipRow,
    MessageRow,
    ReconstructionRow,
)
from feddg.report.blocks import Block, Cell, Chart, Code, Column, Fold, Prose, Section, Table
from feddg.report.charts import HELD_OUT_COLOURS, TRAINING_COLOURS, chart_of, line_of
from feddg.report.text import MISSING, counted, listed, number, readable, size
from feddg.runs.reading import LedgerRecord, RunRecord

PURPOSES = {
    "describe": "Description of the site's data, once before training",
    "agree": "What the server made of the descriptions",
    "train": "Model to train on",
    "update": "Trained model",
}
DIRECTIONS = {
    "up": "site\N{NO-BREAK SPACE}→\N{NO-BREAK SPACE}server",
    "down": "server\N{NO-BREAK SPACE}→\N{NO-BREAK SPACE}site",
}
MOST_LAYOUTS = 4


def ledger_table(ledger: LedgerRecord) -> Table:
    """Every kind of message: what it holds, how large it is, how often it was sent."""
    headings = ("Message", "Direction", "What is in it")
    columns = [Column(heading, numeric=False) for heading in headings]
    columns += [Column("Size of one"), Column("Sent"), Column("Sites"), Column("Total")]
    rows = [
        _purpose_row(ledger, purpose, direction, messages)
        for (purpose, direction), messages in messages_by_purpose(ledger).items()
    ]
    total = sum(message.bytes for message in ledger.messages)
    rows.append(
        [
            *(Cell(text) for text in ("All messages", "", "", "")),
            Cell(number(len(ledger.messages))),
            Cell(number(len({message.client for message in ledger.messages}))),
            Cell(size(total), strong=True),
        ]
    )
    return Table(
        columns, rows, "Every message of the run is counted here; 1 MB is 1,000,000 bytes."
    )


def messages_by_purpose(ledger: LedgerRecord) -> dict[tuple[str, str], list[MessageRow]]:
    """The messages by (purpose, direction), in the order of first appearance."""
    groups: dict[tuple[str, str], list[MessageRow]] = {}
    for message in ledger.messages:
        groups.setdefault((message.purpose, message.direction), []).append(message)
    return groups


def _purpose_row(
    ledger: LedgerRecord, purpose: str, direction: str, messages: Sequence[MessageRow]
) -> list[Cell]:
    sizes = [message.bytes for message in messages]
    layouts = [
        ledger.layouts[name]
        for name in dict.fromkeys(message.layout for message in messages)
        if name in ledger.layouts
    ]
    return [
        Cell(purpose_text(purpose)),
        Cell(DIRECTIONS.get(direction, direction)),
        _content_cell(layouts),
        Cell(size_range(sizes)),
        Cell(f"{number(len(messages))} ×"),
        Cell(number(len({message.client for message in messages}))),
        Cell(size(sum(sizes))),
    ]


def purpose_text(purpose: str) -> str:
    """What a message is for, in words."""
    kind, _, name = purpose.partition(":")
    if kind in ("ask", "answer") and name:
        return f"{'Question' if kind == 'ask' else 'Answer'}: {readable(name)}"
    return PURPOSES.get(purpose, readable(purpose))


def size_range(sizes: Sequence[int]) -> str:
    """``44.8 MB``, or ``1.2 kB to 3.4 kB`` when messages differ in size."""
    lowest, highest = size(min(sizes)), size(max(sizes))
    return lowest if lowest == highest else f"{lowest} to {highest}"


def _content_cell(layouts: Sequence[LayoutRow]) -> Cell:
    if not layouts:
        return Cell(MISSING)
    items: list[str] = []
    for number_, layout in enumerate(layouts[:MOST_LAYOUTS], start=1):
        items += [f"Form {number_} of {len(layouts)}:"] if len(layouts) > 1 else []
        items += _layout_items(layout)
    if len(layouts) > MOST_LAYOUTS:
        items.append(f"and {len(layouts) - MOST_LAYOUTS} more forms, which differ in shapes")
    return Cell(_content_text(layouts), items=tuple(items))


def _content_text(layouts: Sequence[LayoutRow]) -> str:
    if len(layouts) > 1:
        return f"{len(layouts)} forms"
    layout = layouts[0]
    parts = [counted(len(layout.tensors), "tensor")] if layout.tensors else []
    parts += [counted(len(layout.scalars), "number")] if layout.scalars else []
    return " and ".join(parts) or "nothing but the request"


def _layout_items(layout: LayoutRow) -> list[str]:
    items = [
        f"{tensor.name} ({_shape(tensor.shape)} {tensor.dtype}, {size(tensor.bytes)})"
        for tensor in layout.tensors
    ]
    return items + [f"{name} (a number)" for name in layout.scalars]


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(str(length) for length in shape) or "1"


def ledger_sentences(ledger: LedgerRecord) -> str:
    """What left each site, in plain words."""
    sent: dict[int, int] = {}
    for message in ledger.messages:
        if message.direction == "up":
            sent[message.client] = sent.get(message.client, 0) + message.bytes
    if not sent:
        return "No site has sent anything yet."
    parts = [
        _sent_phrase(purpose, size_range([message.bytes for message in messages]))
        for (purpose, direction), messages in messages_by_purpose(ledger).items()
        if direction == "up"
    ]
    return (
        f"Each site sent {listed(parts)}. Over the whole run that came to at most "
        f"{size(max(sent.values()))} from one site, and to {size(sum(sent.values()))} from "
        f"{counted(len(sent), 'site')} together. The table lists everything that crossed a site's "
        "border, tensor by tensor."
    )


def _sent_phrase(purpose: str, amount: str) -> str:
    if purpose == "describe":
        return f"a description of its data ({amount}) once before training"
    if purpose == "update":
        return f"its trained model ({amount}) in every round it took part in"
    return f"“{purpose_text(purpose)}” ({amount} each time)"


# What attacks on a run found, as tables.


FED_WORDS = {
    "sent": "what was sent",
    "sample": "each image's own",
    "unrelated": "an unrelated image's (chance)",
}
READERS = {"server": "the server", "client": "another client"}
CHANCE = 0.5
TOO_WIDE = 0.3
"""An interval of ranks or of AUC from which nothing can be told."""


def attack_tables(rows: Sequence[AttackRow]) -> list[Table]:
    """A table for each kind of attack that was made."""
    reconstructions = [row for row in rows if isinstance(row, ReconstructionRow)]
    differences = [row for row in rows if isinstance(row, DifferenceRow)]
    inversions = [row for row in rows if isinstance(row, InversionRow)]
    members = [row for row in rows if isinstance(row, MembershipRow)]
    tables = [
        _reconstructions(reconstructions) if reconstructions else None,
        _differences(differences) if differences else None,
        _inversions(inversions) if inversions else None,
        _memberships(members) if members else None,
    ]
    return [table for table in tables if table is not None]


def _reconstructions(rows: Sequence[ReconstructionRow]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row.scores))
    columns = [Column(name, numeric=False) for name in ("Read", "By", "Drawn from", "Domain")]
    columns += [Column("Images"), Column("PSNR", "dB"), Column("SSIM")]
    columns += [Column(name) for name in names]
    columns += [Column("Rank", "0.5 is chance"), Column("Found first", "chance")]
    cells = [
        [
            *(Cell(text) for text in (row.entry, READERS[row.attacker], FED_WORDS[row.fed])),
            Cell(row.domain),
            Cell(number(row.images)),
            Cell(_short(row.psnr, 1)),
            Cell(_short(row.ssim, 3)),
            *(Cell(_short(row.scores.get(name), 3)) for name in names),
            Cell(_with_interval(row.rank, row.rank_low, row.rank_high)),
            Cell(f"{_short(row.first, 2)} ({_short(row.first_chance, 2)})"),
        ]
        for row in rows
    ]
    return Table(
        columns,
        cells,
        "Images drawn again from what was sent beside weights. Higher PSNR and SSIM, and lower "
        "distances, mean more alike. Rank: share of the domain's other images that are nearer to "
        "the drawn one than the true image, with its 95 % interval over clients. A name in "
        "brackets is the network that judged; FID, KID, IS and LPIPS stand for the published ones.",
    )


def _differences(rows: Sequence[DifferenceRow]) -> Table:
    columns = [Column("Read", numeric=False), Column("By", numeric=False)]
    columns += [Column("Metric", numeric=False), Column("Image's own minus sent"), Column("Images")]
    cells = [
        [
            Cell(row.entry),
            Cell(READERS[row.attacker]),
            Cell(row.metric),
            Cell(_with_interval(row.mean, row.low, row.high, 3)),
            Cell(number(row.images)),
        ]
        for row in rows
    ]
    return Table(
        columns,
        cells,
        "How much more an image's own vector would have given away than what was sent, on the same "
        "true images: mean over clients with its 95 % interval. Where the interval of rank lies "
        "below 0, what was sent hides images better than their own vectors would.",
    )


def _inversions(rows: Sequence[InversionRow]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row.scores))
    columns = [Column("Images behind an update"), Column("Step", numeric=False), Column("Images")]
    columns += [Column("PSNR", "dB"), Column("of another update", "chance"), Column("SSIM")]
    columns += [Column(name) for name in names] + [Column("Rank", "0.5 is chance")]
    cells = [
        [
            Cell(number(row.batch_size)),
            Cell("the run's optimizer" if row.optimizer == "own" else "plain SGD"),
            Cell(number(row.images)),
            Cell(_short(row.psnr, 1)),
            Cell(_short(row.unrelated_psnr, 1)),
            Cell(_short(row.ssim, 3)),
            *(Cell(_short(row.scores.get(name), 3)) for name in names),
            Cell(_with_interval(row.rank, row.rank_low, row.rank_high)),
        ]
        for row in sorted(rows, key=lambda row: (row.optimizer, row.batch_size))
    ]
    return Table(
        columns,
        cells,
        "Images searched for in single clients' updates (gradient inversion): one step on the "
        "whole batch, labels known, no augmentation, which favours the attacker.",
    )


def _memberships(rows: Sequence[MembershipRow]) -> Table:
    columns = [Column("Read", numeric=False), Column("Attack", numeric=False)]
    columns += [Column("AUC", "0.5 is chance"), Column("Found at 1 % false alarms", "chance: 1 %")]
    columns += [Column("Clients"), Column("Members"), Column("Others")]
    cells = [
        [
            Cell(row.entry),
            Cell(row.attack),
            Cell(_with_interval(row.auc, row.low, row.high)),
            Cell(f"{100 * row.early:.1f} %"),
            *(Cell(number(count)) for count in (row.clients, row.members, row.others)),
        ]
        for row in rows
    ]
    return Table(
        columns,
        cells,
        "Whether what a client sends tells that an image was its own: area under the ROC curve, "
        "mean over clients with its 95 % interval.",
    )


def roc_chart(rows: Sequence[AttackRow]) -> Chart | None:
    """The ROC curves of the membership attacks above the line of chance; None without any."""
    found = [row for row in rows if isinstance(row, MembershipRow) and row.curve]
    if not found:
        return None
    colours = cycle((*HELD_OUT_COLOURS, *TRAINING_COLOURS))
    lines = [
        line_of(row.curve, f"{row.entry}, {row.attack}", colour)
        for row, colour in zip(found, colours)
    ]
    lines.append(line_of(((0, 0), (1, 1)), "chance", "#888888", width=1))
    layout = {
        "showlegend": True,
        "xaxis": {"title": {"text": "others taken for members"}, "range": [0, 1]},
        "yaxis": {"title": {"text": "members found"}, "range": [0, 1]},
    }
    caption = (
        "Membership: share of a client's own images that were found, against the share of others "
        "taken for them. On the line of chance nothing is told."
    )
    return chart_of(lines, layout, 360 + 12 * len(lines), caption)


def learned(rows: Sequence[AttackRow], key: str) -> str:
    """What attacks learned from one kind of message, in a few words; empty if none was made.

    Args:
        rows: of all attacks.
        key: ``purpose/name`` of the entry, or ``update/weights``.
    """
    return "; ".join(_findings(rows, key))


def _findings(rows: Sequence[AttackRow], key: str) -> Iterator[str]:
    for row in rows:
        if isinstance(row, ReconstructionRow) and row.entry == key:
            if row.fed == "sent" and row.domain == "all":
                verdict = _against_chance(row.rank_low, row.rank_high)
                yield (
                    f"images drawn by {READERS[row.attacker]} point {verdict} "
                    f"(rank {_with_interval(row.rank, row.rank_low, row.rank_high)}; 0.5 is chance)"
                )
        elif isinstance(row, InversionRow) and key == "update/weights":
            yield (
                f"images behind updates of {row.batch_size} found at {_short(row.psnr, 1)} dB "
                f"({_short(row.unrelated_psnr, 1)} dB is chance)"
            )
        elif isinstance(row, MembershipRow) and row.entry == key:
            verdict = "told" if row.low > CHANCE else "not told for certain"
            yield (
                f"membership {verdict} by {row.attack} "
                f"(AUC {_with_interval(row.auc, row.low, row.high)}; 0.5 is chance)"
            )


def _against_chance(low: float, high: float) -> str:
    if high < CHANCE:
        return "to the true ones"
    if not high - low < TOO_WIDE:
        return "nowhere that could be told from so few clients"
    return "to the true ones no better than chance, as far as could be told"


def _with_interval(mean: float, low: float, high: float, digits: int = 2) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return _short(mean, digits)
    return f"{_short(mean, digits)} [{_short(low, digits)}, {_short(high, digits)}]"


def _short(value: float | None, digits: int) -> str:
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:.{digits}f}"


# What left the sites, and what it gives away: for a person who has to answer for it.


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
    bound = (
        "Differential privacy bounds what anybody can learn from some of it (column Epsilon)."
        if guaranteed
        else "Differential privacy was not used, so nothing bounds what somebody with more means "
        "could learn."
    )
    return (
        f"For a data-protection record: images stayed where they were; each of {sites} sent "
        f"{things or 'counts'}. {_tried(attacks)} {bound}"
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
