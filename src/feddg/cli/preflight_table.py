"""What ``feddg deploy check`` shows: each check with its verdict, and what to do."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from feddg.deploy.preflight import Check, Verdict

STYLES = {Verdict.GO: "green", Verdict.LOOK: "yellow", Verdict.NO_GO: "bold red"}


def checks_table(found: Sequence[Check]) -> Table:
    """Returns checks as a table, one row each."""
    table = Table("", "check", "found", "what to do")
    for check in found:
        style = STYLES[check.verdict]
        said = (escape(text) for text in (check.what, check.found, check.remedy))
        table.add_row(f"[{style}]{check.verdict.value}[/]", *said)
    return table
