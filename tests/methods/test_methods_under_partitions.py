"""Every rule that deals images out can be trained under.

Of a rule a method sees nothing but what its clients hold: clients of several domains, of one image,
of one class and without a class are feddg.testing's.
"""

from dataclasses import dataclass, field

import numpy
import torch

from feddg.clients.client import Examples
from feddg.data.partition import PARTITIONS
from feddg.methods.composition import build_method
from feddg.settings import TrainSettings
from federations import CLASSES, SmallFederation
from partitions import partition

OPTIONS = {
    "heterogeneous": {"heterogeneity": 0.5},
    "domain": {},
    "iid": {},
    "dirichlet": {"alpha": 0.3},
    "class_dirichlet": {"alpha": 0.3},
    "shards": {"shards": 2},
    "quantity": {"quantity_alpha": 0.5},
    "client": {},
}
IMAGES = 24
DOMAINS = numpy.arange(IMAGES) // CLASSES % 2
LABELS = numpy.arange(IMAGES) % CLASSES  # as the images of a small federation are coloured
HOLDERS = numpy.where(LABELS == 0, "one class", "the rest")
HOLDERS[1] = "one image"


@dataclass
class Dealt(SmallFederation):
    """A small federation whose clients hold what a rule gave them."""

    owned: list[numpy.ndarray] = field(default_factory=list)

    def examples(self, client: int) -> Examples:
        """The images of a client, of whatever domains they are."""
        rows = torch.from_numpy(self.owned[client])
        domains = torch.from_numpy(DOMAINS)[rows]
        return Examples(self.pixels, rows, self.labels[rows], domains, CLASSES, f"dealt-{client}")


def test_natural_clients_are_as_odd_as_they_should_be():
    found = partition(DOMAINS, LABELS, 9, seed=0, scheme="client", holders=HOLDERS)
    held = sorted((len(rows), len(set(LABELS[rows].tolist()))) for rows in found.rows)
    assert held == [(1, 1), (8, 1), (15, 2)]


def test_a_round_under_a_rule(subtests):
    for rule in PARTITIONS:
        found = partition(DOMAINS, LABELS, 3, seed=1, scheme=rule, holders=HOLDERS, **OPTIONS[rule])
        sizes = tuple(len(rows) for rows in found.rows)
        train = TrainSettings(rounds=1, batch_size=4, local_steps=1)
        with subtests.test(rule):
            small = Dealt(build_method("fedavg", {}), sizes=sizes, train=train, owned=found.rows)
            small.run(1)
            assert len([reply for reply in small.replies if hasattr(reply, "terms")]) == 3
            assert all(reply.images > 0 for reply in small.replies)
            assert small.server.state.round == 1
            assert all(
                torch.isfinite(tensor).all() for tensor in small.server.state.weights.values()
            )
