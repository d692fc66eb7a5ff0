"""What has happened in a round so far, and the row it becomes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from feddg.messages import Refusal, Update
from feddg.records import Direction, RefusedUpdate, RoundRow


@dataclass
class Tally:
    """What has happened in a round so far; see :class:`RoundRow`."""

    round: int
    clients: list[int]
    refused: list[Refusal] = field(default_factory=list)
    terms: dict[str, float] = field(default_factory=dict)
    examples: int = 0
    images: int = 0
    passes: int = 0
    training: float = 0.0

    def add(self, update: Update) -> None:
        """Adds one used update to the means and counts."""
        self.examples += update.examples
        self.images += update.images
        self.passes += update.passes
        self.training += update.seconds
        share = update.examples / self.examples
        for name, value in update.terms.items():
            before = self.terms.get(name, value)
            self.terms[name] = before + (value - before) * share

    def row(self, seconds: float, sent: Mapping[Direction, int]) -> RoundRow:
        """Returns the row of the round, which took ``seconds`` and moved bytes ``sent``."""
        return RoundRow(
            round=self.round,
            clients=self.clients,
            refused=[RefusedUpdate(client=r.client, reason=r.reason) for r in self.refused],
            terms=self.terms,
            examples=self.examples,
            images=self.images,
            passes=self.passes,
            # Sites train side by side: their seconds may add up to more than the round took.
            seconds={"train": self.training, "aggregate": max(0.0, seconds - self.training)},
            bytes_up=sent["up"],
            bytes_down=sent["down"],
        )
