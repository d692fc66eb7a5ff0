"""Messages between the processes of a run, and who trains whom."""

import os
import signal
import threading

import pytest
import torch
from torch.utils import backend_registration

from feddg.errors import WorkerLost
from feddg.messages import Message, Refusal
from feddg.runs import channel
from feddg.runs.channel import Channel, buffers_of, dealt, message_in
from feddg.testing.device import second_device

TENSORS = {
    "matrix": torch.arange(6.0).view(2, 3),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "transposed": torch.arange(6).view(2, 3).T,
    "every other": torch.arange(10)[::2],
    "expanded": torch.ones(1).expand(4),
    "number": torch.tensor(3),
    "flags": torch.tensor([True, False]),
    "halves": torch.tensor([0.5, -1.5], dtype=torch.bfloat16),
    "doubles": torch.tensor([1e-300], dtype=torch.float64),
    "nothing": torch.empty(0, 4),
}


def test_a_message_crosses_in_buffers_with_its_order_in_memory():
    scalars = {"whole": 3, "real": 0.1, "text": "naïve", "flag": True}
    sizes, here = buffers_of(Message(TENSORS, scalars))
    header, length, beyond = sizes.tolist()
    assert (length, beyond) == (len(here), 0)
    back = message_in(header, here, None)
    assert back.scalars == scalars
    assert list(back.tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        found = back.tensors[name]
        assert found.dtype == tensor.dtype, name
        assert torch.equal(found, tensor), name
    assert back.tensors["channels last"].stride() == TENSORS["channels last"].stride()


def test_what_is_on_a_device_has_a_buffer_there():
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this version of PyTorch has no back ends that are written in Python")
    with second_device() as device:
        here, there = torch.arange(3.0), torch.arange(4.0).view(2, 2).to(device)
        sizes, host, flat = buffers_of(Message({"here": here, "there": there, "more": here}))
        assert (host.device.type, flat.device.type) == ("cpu", device)
        back = message_in(int(sizes[0]), host, flat).tensors
        assert {name: t.device.type for name, t in back.items()} == {
            "here": "cpu",
            "there": device,
            "more": "cpu",
        }
        assert torch.equal(back["there"].cpu(), there.cpu())
        assert torch.equal(back["more"], here)


def test_the_longest_clients_are_dealt_out_first():
    batches = {0: 2, 1: 9, 2: 3, 3: 4, 4: 5}
    found = dealt(batches, 2, {})
    loads = [sum(batches[id] for id in found if found[id] == rank) for rank in range(2)]
    assert sorted(loads) == [11, 12]
    assert dealt({0: 1, 1: 1, 2: 1}, 4, {}) == {0: 1, 1: 2, 2: 3}  # the server's process last


def test_a_client_stays_with_its_process_within_a_round():
    found = dealt({0: 9, 1: 1, 2: 1}, 2, {1: 1, 7: 0})
    assert found == {0: 0, 1: 1, 2: 1}


def test_ctrl_c_ends_the_wait_for_another_process():
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            Channel()._patiently(threading.Event().wait)
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_death_of_any_worker_ends_the_wait_for_another():
    def watch():
        raise WorkerLost("worker 2 is lost")

    with pytest.raises(WorkerLost, match="worker 2"):
        Channel(watch)._patiently(threading.Event().wait)


def test_the_death_of_a_worker_ends_the_wait_for_what_a_gpu_receives():
    def watch():
        raise WorkerLost("worker 2 is lost")

    class Stream:  # as NCCL's: wait() returns at once, and the device stands still
        def wait(self):
            pass

        def is_completed(self):
            return False

    with pytest.raises(WorkerLost, match="worker 2"):
        Channel(watch)._end(Stream(), torch.empty(1, device="meta"))


@pytest.mark.parametrize("diverged", [False, True])
def test_a_refusal_crosses_with_whether_training_ran_away(diverged):
    refusal = Refusal(3, "its loss became infinite", diverged)
    crossed = Message.from_bytes(channel._reply(refusal, None).to_bytes())
    assert channel._result(3, "train", crossed) == (refusal, None)
