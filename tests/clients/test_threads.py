"""The policy for threads: how many, for whom, and how many clients at once."""

import pytest
import torch
from torch import nn

from feddg.clients.threads import (
    MOST_AT_ONCE,
    SMALL,
    clients_at_once,
    threads,
    threads_beside,
    threads_for,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(("numbers", "expected"), [(SMALL, 1), (SMALL + 1, None)])
def test_a_small_network_on_a_cpu_is_trained_by_one_thread(numbers, expected):
    network = nn.ParameterList([torch.empty(numbers, device="meta")])
    assert threads_for(network, CPU) == expected
    assert threads_for(network, torch.device("cuda")) is None


@pytest.mark.parametrize(
    ("process", "each", "clients"),
    [(1, 1, 1), (4, 1, 4), (4, None, 1), (32, 1, MOST_AT_ONCE), (4, 2, 2), (1, 2, 1)],
)
def test_clients_at_once_fill_the_process(monkeypatch, process, each, clients):
    monkeypatch.setattr(torch, "get_num_threads", lambda: process)
    assert clients_at_once(each) == clients


def test_a_block_has_its_threads_and_gives_them_back_after_a_fault():
    before = torch.get_num_threads()

    def fail():
        assert torch.get_num_threads() == before + 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), threads(before + 1):
        fail()
    assert torch.get_num_threads() == before


def test_whoever_waits_beside_several_clients_has_one_thread():
    with threads(3):
        with threads_beside(1):
            assert torch.get_num_threads() == 3
        with threads_beside(2):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
