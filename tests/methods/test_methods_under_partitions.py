"""Every rule that deals images out can be trained under; every method, with clients of two domains.

Of a rule a method sees nothing but what its clients hold. Clients of one image, of one class and
without a class are feddg.testing's odd clients.
"""

from dataclasses import dataclass, field

import numpy
import pytest
import torch

from feddg.clients.client import Examples
from feddg.data.partition import PARTITIONS, partition
from feddg.methods.base import methods
from feddg.methods.composition import build_method, method_class
from feddg.settings import TrainSettings
from federations import CLASSES, SmallFederation

NAMES = tuple(methods())
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


def partitioned(method: str, owned: list[numpy.ndarray]) -> Dealt:
    wanted = method_class(method).presets.get("*", {}).get("train", {})
    train = TrainSettings(**{"rounds": 1, "batch_size": 4} | wanted | {"local_steps": 1})
    sizes = tuple(len(rows) for rows in owned)
    return Dealt(build_method(method, {}), sizes=sizes, train=train, owned=owned)


def test_every_rule_is_tried():
    assert set(PARTITIONS) == OPTIONS.keys()


def test_natural_clients_are_as_odd_as_they_should_be():
    found = partition(DOMAINS, LABELS, 9, seed=0, scheme="client", holders=HOLDERS)
    held = sorted((len(rows), len(set(LABELS[rows].tolist()))) for rows in found.rows)
    assert held == [(1, 1), (8, 1), (15, 2)]


@pytest.mark.parametrize(
    ("method", "rule"),
    [("fedavg", rule) for rule in OPTIONS]
    + [(name, "heterogeneous") for name in NAMES if name != "fedavg"],
)
def test_a_round_under_a_rule(method, rule):
    found = partition(DOMAINS, LABELS, 3, seed=1, scheme=rule, holders=HOLDERS, **OPTIONS[rule])
    small = partitioned(method, found.rows)
    small.run(1)
    replies = [reply for reply in small.replies if hasattr(reply, "terms")]
    refused = [reply for reply in small.replies if not hasattr(reply, "terms")]
    assert not refused
    assert len(replies) == 3
    assert all(reply.forwards >= reply.images > 0 for reply in replies)
    state = small.server.state
    assert state.round == 1
    for name, tensor in (*state.weights.items(), *state.extras.items()):
        assert torch.isfinite(tensor).all(), name
