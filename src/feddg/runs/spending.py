"""What a run has released, kept in its folder: its account of noised ones, its opened sums."""

import logging

from feddg.errors import BudgetSpent, RunError
from feddg.federation.masked_rounds import OpenedSums
from feddg.federation.server import Server
from feddg.privacy.accounting import Account
from feddg.privacy.building import Guards
from feddg.records import OPENED_SUM_ROWS, PRIVACY_ROWS, RoundRow
from feddg.runs.folder import OPENED_SUMS, PRIVACY, RunFolder

log = logging.getLogger("feddg")


def open_account(folder: RunFolder, guards: Guards, rounds: int) -> Account:
    """Returns the account of a run, which goes on from the rows in its folder.

    Args:
        folder: the run's.
        guards: what happens to updates on their way.
        rounds: how many the checkpoint has.

    Raises:
        RunError: what was spent on a round is not known any more, or a row was changed.
    """
    rows = PRIVACY_ROWS.read(folder.path / PRIVACY)
    if rows:
        folder.replace_rows(PRIVACY, rows)  # without a line that was cut off
    account = Account(write=lambda row: folder.append(PRIVACY, [row]))
    missing = set(range(1, rounds + 1)) - {row.round for row in rows if row.message == "update"}
    if guards.noised and missing:
        raise RunError(
            f"{folder.path / PRIVACY} lacks round {min(missing)}: what was spent on it is not "
            "known, so nothing more can be promised; put the file back, or begin a new run"
        )
    for number, row in enumerate(rows, start=1):
        if account.contradicts(row):
            raise RunError(
                f"{folder.path / PRIVACY}, row {number}, says epsilon {row.epsilon:.4g}, and that "
                "is not what its noise and the rows before it cost: the file was changed. Put it "
                "back, or begin a new run"
            )
        account.enter(row)
    return account


def opened_sums(folder: RunFolder) -> OpenedSums:
    """Returns whose masked sums a run has opened, going on from the rows in its folder."""
    rows = OPENED_SUM_ROWS.read(folder.path / OPENED_SUMS)
    if rows:
        folder.replace_rows(OPENED_SUMS, rows)  # without a line that was cut off
    return OpenedSums(rows, lambda row: folder.append(OPENED_SUMS, [row]))


def next_round(server: Server) -> RoundRow | None:
    """Runs a round; None after the last, and where another would cost more than may be spent.

    Nothing is released of the round that there is not.
    """
    state = server.state
    if state.round == state.rounds:
        return None
    try:
        if server.affordable:
            return server.round()
    except BudgetSpent as error:
        log.warning("%s", error)
    log.warning(
        "the run ends after round %d of %d: another one would cost more than privacy.epsilon",
        *(state.round, state.rounds),
    )
    return None
