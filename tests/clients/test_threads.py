"""The policy for threads: how many, for whom, and how many clients at once."""

import pytest
import torch
from torch import nn

from feddg.clients import threads as policy
from feddg.clients import threads as room_for_turns
from feddg.clients.threads import (
    COPIES,
    MOST_AT_ONCE,
    MOST_LARGE_AT_ONCE,
    PASSES,
    SMALL,
    clients_at_once,
    large_clients_at_once,
    machine_memory,
    share_of_client,
    side_by_side,
    threads,
    threads_for,
    training_memory,
)
from feddg.models.backbones import build_network

CPU = torch.device("cpu")


@pytest.mark.parametrize(("numbers", "expected"), [(SMALL, 1), (SMALL + 1, None)])
def test_a_small_network_on_a_cpu_is_trained_by_one_thread(numbers, expected):
    network = nn.ParameterList([torch.empty(numbers, device="meta")])
    assert threads_for(network, CPU) == expected
    assert threads_for(network, torch.device("cuda")) is None


def test_clients_at_once_fill_the_process(subtests):
    for process, each, clients in [
        (1, 1, 1),
        (4, 1, 4),
        (32, 1, MOST_AT_ONCE),
        (4, 2, 2),
        (1, 2, 1),
    ]:
        with (
            subtests.test(process=process, each=each, clients=clients),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            monkeypatch.setattr(torch, "get_num_threads", lambda: process)
            assert clients_at_once(each) == clients


GB = 2**30


def test_large_clients_fill_the_threads_or_take_turns(subtests):
    for process, per_round, each, clients in [
        (4, 20, GB, 4),
        (4, 4, GB, 4),
        (4, 3, GB, 1),  # too few to fill the threads
        (4, 20, 2 * GB, 4),  # just half of the memory
        (4, 20, 2 * GB + 1, 1),
        (1, 20, GB, 1),
        (64, 100, GB // 16, MOST_LARGE_AT_ONCE),
    ]:
        with (
            subtests.test(process=process, per_round=per_round, each=each, clients=clients),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            monkeypatch.setattr(torch, "get_num_threads", lambda: process)
            monkeypatch.setattr(policy, "available_cores", lambda: process)
            monkeypatch.setattr(policy, "machine_memory", lambda: 16 * GB)
            assert large_clients_at_once(CPU, per_round, lambda: each) == clients
            assert large_clients_at_once(torch.device("cuda"), per_round, lambda: each) == 1


def test_a_process_with_half_of_the_cores_fills_a_quarter_of_the_memory(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(policy, "available_cores", lambda: 8)
    monkeypatch.setattr(policy, "machine_memory", lambda: 16 * GB)
    assert large_clients_at_once(CPU, 20, lambda: GB) == 4
    assert large_clients_at_once(CPU, 20, lambda: GB + 1) == 1


def test_where_memory_cannot_be_told_large_clients_take_turns(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(policy, "machine_memory", lambda: None)
    assert large_clients_at_once(CPU, 20, lambda: 1) == 1


def test_the_last_few_of_a_large_network_are_left_over(subtests):
    for clients, at_once, each, together in [
        (20, 4, None, 20),
        (7, 4, None, 4),
        (3, 4, None, 0),
        (7, 4, 1, 7),
        (7, 1, None, 0),
    ]:
        with subtests.test(clients=clients, at_once=at_once, each=each, together=together):
            assert side_by_side(clients, at_once, each) == together


def test_clients_share_the_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert [share_of_client(n) for n in (1, 4, 16, 128)] == [64, 16, 4, 1]


def test_a_block_has_its_threads_and_gives_them_back_after_a_fault():
    before = torch.get_num_threads()

    def fail():
        assert torch.get_num_threads() == before + 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), threads(before + 1):
        fail()
    assert torch.get_num_threads() == before


# How much memory a client's turn takes: counted by hand, and never by touching the network.


class TwoMaps(nn.Module):
    """Keeps its input's square and the square's; nothing else has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 5))

    def forward(self, images):
        pixels = images.mean((2, 3))  # (B, 3): kept by the product below
        return (pixels @ self.weight).exp()  # (B, 5): exp keeps its result


def test_weights_and_maps_are_counted():
    found = training_memory(TwoMaps(), (3, 8, 8), batch_size=10)
    weights, maps = 3 * 5 * 4, (3 + 5) * 4
    assert found == COPIES * weights + PASSES * 10 * maps


def test_it_grows_with_images_and_their_size_and_changes_no_number():
    network = build_network("resnet18", 3, weights=None)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    small, more, larger = (
        training_memory(network, (3, side, side), batch)
        for side, batch in ((32, 2), (32, 8), (64, 2))
    )
    weights = COPIES * sum(parameter.nbytes for parameter in network.parameters())
    assert (more - weights) == 4 * (small - weights)
    assert 3.5 < (larger - weights) / (small - weights) < 4.5
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_a_container_may_have_less_than_its_machine(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(room_for_turns, "LIMITS", (tmp_path / "none", limit))
    limit.write_text("max\n")
    whole = machine_memory()
    limit.write_text("1000000\n")
    assert machine_memory() == 1_000_000
    assert whole is None or whole > 1_000_000
