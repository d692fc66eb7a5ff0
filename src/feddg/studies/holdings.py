"""A picture of who holds what, for the terminal."""

import numpy
from rich.markup import escape
from rich.table import Table

from feddg.data.partition import Skew, skew_of
from feddg.records import ClientsTable

SHOWN_CLIENTS, MOST_MARKS = 20, 40
SHADES = " ░▒▓█"


def skew_between(clients: ClientsTable) -> Skew:
    """Returns how unlike clients are."""
    return skew_of(_counts(clients, "domains"), _counts(clients, "classes"))


def holdings_table(clients: ClientsTable) -> Table:
    """Returns a table of clients: images, main domain, and how dark each domain and class is.

    Every mark is a domain or class (several where there are many), from blank for none of the
    client's images to full for all of them. Of many clients some are shown, from the first to the
    last.
    """
    domains, classes = _counts(clients, "domains"), _counts(clients, "classes")
    trained = numpy.flatnonzero(domains.sum(axis=0))
    domains = domains[:, trained]
    names = [clients.domains[index] for index in trained.tolist()]
    count = len(clients.clients)
    chosen = numpy.unique(numpy.linspace(0, count - 1, min(count, SHOWN_CLIENTS)).astype(int))
    some = f", {len(chosen)} of them" if len(chosen) < count else ""
    table = Table(title=f"{count} clients{some}: darker marks for larger shares of a client")
    table.add_column("client")
    table.add_column("images", justify="right")
    table.add_column("main domain")
    table.add_column(f"domains ({len(names)})", no_wrap=True)
    table.add_column(f"classes ({len(clients.classes)})", no_wrap=True)
    for index in chosen.tolist():
        own, size = domains[index], int(domains[index].sum())
        main = int(own.argmax())
        table.add_row(
            escape(clients.clients[index].name),
            f"{size:,}",
            escape(f"{names[main]} {own[main] / size:.0%}") if size else "-",
            _marks(own),
            _marks(classes[index]),
        )
    return table


def _counts(clients: ClientsTable, by: str) -> numpy.ndarray:
    return numpy.array([getattr(client, by) for client in clients.clients], dtype=numpy.int64)


def _marks(counts: numpy.ndarray) -> str:
    """One mark for each count, or for neighbours together where they are many."""
    parts = numpy.array_split(counts, min(len(counts), MOST_MARKS))
    sums = numpy.array([part.sum() for part in parts], dtype=numpy.float64)
    shares = sums / sums.sum() if sums.any() else sums
    steps = numpy.ceil(shares * (len(SHADES) - 1)).astype(int)
    return "".join(SHADES[step] for step in steps.tolist())
