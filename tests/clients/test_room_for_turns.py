"""How much memory a client's turn takes: counted by hand, and never by touching the network."""

import torch
from torch import nn

from feddg.clients import room_for_turns
from feddg.clients.room_for_turns import COPIES, PASSES, machine_memory, memory_of_turn
from feddg.models.backbones import build_network


class TwoMaps(nn.Module):
    """Keeps its input's square and the square's; nothing else has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 5))

    def forward(self, images):
        pixels = images.mean((2, 3))  # (B, 3): kept by the product below
        return (pixels @ self.weight).exp()  # (B, 5): exp keeps its result


def test_weights_and_maps_are_counted():
    found = memory_of_turn(TwoMaps(), side=8, batch_size=10)
    weights, maps = 3 * 5 * 4, (3 + 5) * 4
    assert found == COPIES * weights + PASSES * 10 * maps


def test_it_grows_with_images_and_their_size_and_changes_nothing():
    network = build_network("resnet18", 3, weights=None)
    network.train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    small, more, larger = (
        memory_of_turn(network, side, batch) for side, batch in ((32, 2), (32, 8), (64, 2))
    )
    weights = COPIES * sum(parameter.nbytes for parameter in network.parameters())
    assert (more - weights) == 4 * (small - weights)
    assert 3.5 < (larger - weights) / (small - weights) < 4.5
    assert network.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_a_container_may_have_less_than_its_machine(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(room_for_turns, "LIMITS", (tmp_path / "none", limit))
    limit.write_text("max\n")
    whole = machine_memory()
    limit.write_text("1000000\n")
    assert machine_memory() == 1_000_000
    assert whole is None or whole > 1_000_000
