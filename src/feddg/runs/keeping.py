"""What a completed round leaves on disk: its rows, then the checkpoint that makes it count."""

from collections.abc import Collection, Sequence

from feddg.federation.transport import Transport
from feddg.methods.base import State
from feddg.records import LedgerRow, MetricsRow
from feddg.runs.folder import LEDGER, METRICS, SNAPSHOTS, RunFolder
from feddg.runs.kept_models import KeptModels


class Records:
    """Writes a completed round: its rows first, then the checkpoint that makes it count."""

    def __init__(
        self,
        folder: RunFolder,
        transport: Transport,
        models: KeptModels,
        snapshots: Collection[int] = (),
    ) -> None:
        self._folder, self._transport, self._snapshots = folder, transport, snapshots
        self.models = models
        self._ledger_rows: list[LedgerRow] = []

    def entered(self, row: LedgerRow) -> None:
        """Keeps a row of the ledger until its round counts."""
        self._ledger_rows.append(row)

    def carried(self, row: LedgerRow) -> None:
        """Writes a row of the ledger at once: what has left for another machine has left."""
        self._folder.append(LEDGER, [row])

    def keep(self, state: State, rows: Sequence[MetricsRow]) -> None:
        """Writes metrics, ledger and checkpoint of the round in ``state``."""
        self._folder.append(METRICS, rows)
        self._folder.append(LEDGER, self._ledger_rows)
        self._ledger_rows.clear()
        if state.round in self._snapshots:
            name = f"{SNAPSHOTS}/round-{state.round}.safetensors"
            self._folder.write_tensors(name, state.weights)
        files = self.models.take_in(state, rows)
        memories, changed = self._transport.memories, self._transport.remembered
        self._folder.save_checkpoint(state, memories, changed, files)
        self._transport.remembered.clear()
