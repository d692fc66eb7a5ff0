"""What left each site: the ledger as a table and in plain words."""

from collections.abc import Sequence

from feddg.records import LayoutRow, MessageRow
from feddg.report.blocks import Cell, Column, Table
from feddg.report.wording import MISSING, counted, listed, number, readable, size
from feddg.runs.reading import LedgerRecord

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
