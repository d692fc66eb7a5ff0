"""Clients that train side by side: same numbers, same order, nothing lost."""

import threading

import pytest
import torch

from feddg.clients.threads import threads
from feddg.errors import ClientError
from feddg.messages import Refusal, Update
from feddg.methods.baselines import FedAvg
from feddg.settings import ServerSettings, TrainSettings
from federations import federation, same

SIZES = (7, 5, 6, 4, 8)


class Watched(FedAvg):
    """Notes which threads train, how many do at once, and with how many of PyTorch's threads."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.threads: set[int] = set()
        self.met = threading.Barrier(2)

    def begin(self, client):
        self.names.add(threading.current_thread().name)
        self.threads.add(torch.get_num_threads())
        if client.id < 2:
            self.met.wait(timeout=60)  # breaks unless both are under way


class Moody(FedAvg):
    """One client always fails, in a way that depends on what is raised."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def begin(self, client):
        if client.id == 2:
            raise self.error


@pytest.mark.parametrize("at_once", [2, 3, 8])
def test_replies_keep_their_order_and_their_numbers(at_once):
    alone, together = (federation(sizes=SIZES, at_once=n) for n in (1, at_once))
    for small in (alone, together):
        small.run(2)
        assert [reply.client for reply in small.replies] == [0, 1, 2, 3, 4] * 2
    assert same(alone.server.state.weights, together.server.state.weights)


def test_clients_are_under_way_at_once_and_each_has_one_thread():
    method, before = Watched(), torch.get_num_threads()
    federation(method, sizes=SIZES, at_once=2).server.round()
    assert len(method.names) == 2
    assert method.threads == {1}
    assert torch.get_num_threads() == before


class Endless(FedAvg):
    """Client 0 fails once client 1 has stepped, which then would go on for hours."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error, self.stepped, self.steps = error, threading.Event(), 0

    def begin(self, client):
        if client.id == 0 and not self.stepped.is_set():
            assert self.stepped.wait(timeout=60)
            raise self.error

    def step(self, client, batch):
        super().step(client, batch)
        self.steps += 1
        self.stepped.set()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError("a fault")])
def test_turns_under_way_end_with_their_round(error):
    method = Endless(error)
    hours = TrainSettings(rounds=2, batch_size=4, local_steps=10_000)
    small = federation(method, sizes=(8, 8), at_once=2, train=hours)
    with pytest.raises(type(error)):
        small.server.round()
    assert 0 < method.steps < 10_000
    assert not any(worker.stopped.is_set() for worker in small.transport.workers)


class Counted(FedAvg):
    """Notes how many threads each client has."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: dict[int, int] = {}

    def begin(self, client):
        self.threads[client.id] = torch.get_num_threads()


def test_the_last_few_clients_of_a_large_network_have_all_threads_in_turn():
    with threads(4):
        method = Counted()
        small = federation(method, sizes=SIZES, at_once=2, threads=None)
        small.server.round()
        assert method.threads == {0: 2, 1: 2, 2: 2, 3: 2, 4: 4}
        assert torch.get_num_threads() == 4
    assert [reply.client for reply in small.replies] == [0, 1, 2, 3, 4]


def test_a_large_network_gives_the_numbers_of_one_thread_where_all_are_at_once():
    sizes = (7, 5, 6, 4)
    alone = federation(sizes=sizes)
    alone.run(2)
    with threads(4):
        together = federation(sizes=sizes, at_once=4, threads=None)
        together.run(2)
    assert same(alone.server.state.weights, together.server.state.weights)


def test_a_client_that_fails_is_refused_and_the_others_go_on():
    small = federation(Moody(ClientError("no mood")), sizes=SIZES, at_once=2)
    record = small.server.round()
    assert [refusal.client for refusal in record.refused] == [2]
    assert "no mood" in record.refused[0].reason
    assert [reply.client for reply in small.replies] == [0, 1, 2, 3, 4]
    assert isinstance(small.replies[2], Refusal)


def test_a_fault_of_the_program_ends_the_round_and_leaves_no_thread_behind():
    small = federation(Moody(ZeroDivisionError("a fault")), sizes=SIZES, at_once=2)
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="a fault"):
        small.server.round()
    assert threading.active_count() == before
    assert small.server.state.round == 0


def test_clients_at_once_share_the_seconds_of_their_round(monkeypatch):
    small = federation(sizes=SIZES, at_once=2)
    three_seconds = {"seconds": 3.0, "weights": small.server.state.weights}
    monkeypatch.setattr(
        "feddg.federation.inprocess.train",
        lambda client, method, defences: Update(client.id, len(client.examples), **three_seconds),
    )
    assert small.server.round().seconds["train"] == pytest.approx(5 * 3.0 / 2)


@pytest.mark.parametrize(
    ("method", "train"),
    [
        ("scaffold", {"optimizer": "sgd", "lr": 0.1}),
        ("fedavg", {"optimizer": "adam", "keep_optimizer": True}),
    ],
)
def test_a_round_that_is_done_again_begins_with_the_memory_of_before(method, train):
    server = ServerSettings(min_updates=3, attempts=2)
    train = TrainSettings(rounds=3, batch_size=4, **train)
    quiet, disturbed = (
        federation(method, sizes=(7, 5, 6), train=train, server_settings=server) for _ in range(2)
    )
    original, failing = disturbed.transport.train, [1, 2]

    def send(clients, broadcast):
        fails = broadcast.round in failing
        for reply in original(clients, broadcast):
            yield Refusal(1, "lost") if fails and reply.client == 1 else reply
        if fails:
            failing.remove(broadcast.round)

    disturbed.transport.train = send
    quiet.run(3)
    disturbed.run(3)
    assert not failing
    assert same(quiet.server.state.weights, disturbed.server.state.weights)
    memories = (quiet.transport.memories, disturbed.transport.memories)
    assert memories[0].keys() == memories[1].keys() == {0, 1, 2}
    assert all(same(memories[0][id], memories[1][id]) for id in range(3))
