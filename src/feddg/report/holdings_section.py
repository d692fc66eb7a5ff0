"""The section about who holds what: pictures, and a number for each kind of skew."""

from collections.abc import Sequence

import numpy

from feddg.data.partition import in_words, skew_of
from feddg.records import BadImageRow
from feddg.report.blocks import Block, Cell, Column, Fold, Prose, Section, Table
from feddg.report.client_charts import client_heat_map
from feddg.report.wording import counted, number
from feddg.runs.reading import RunRecord

MOST_LISTED = 50


def holdings_section(run: RunRecord) -> Section | None:
    """Who holds what; None where the run did not write it down."""
    clients = run.clients
    if clients is None or not clients.clients:
        return None
    sizes = sorted(sum(client.domains) for client in clients.clients)
    text = (
        f"{counted(len(sizes), 'client')} hold {counted(sum(sizes), 'training image')}: "
        f"{number(sizes[0])} the smallest, {number(sizes[len(sizes) // 2])} the median, "
        f"{number(sizes[-1])} the largest."
    )
    blocks: list[Block] = [Prose(text), client_heat_map(clients, "domains")]
    blocks.append(client_heat_map(clients, "classes"))
    if len(sizes) > 1:
        domains = numpy.array([client.domains for client in clients.clients])
        labels = numpy.array([client.classes for client in clients.clients])
        blocks += [Prose(line) for line in in_words(skew_of(domains, labels))]
    if clients.bad_images:
        blocks.append(_bad_images(clients.bad_images))
    return Section("Who holds what", blocks)


def _bad_images(images: Sequence[BadImageRow]) -> Fold:
    rows = [[Cell(image.path), Cell(image.reason)] for image in images[:MOST_LISTED]]
    columns = [Column("File", numeric=False), Column("Reason", numeric=False)]
    title = f"{counted(len(images), 'image')} could not be used"
    return Fold(title, [Table(columns, rows, cut_note(len(images)))])


def cut_note(total: int) -> str:
    """Says that only the first rows are listed, where that is so."""
    return f"The first {MOST_LISTED} of {number(total)}." if total > MOST_LISTED else ""
