"""Runs on several processes: the bits of one, whatever their number, and what ends them."""

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from socket import socket
from threading import Event

import pytest
import torch
from safetensors.torch import load_file

from feddg.api import resume, run
from feddg.clients.threads import threads
from feddg.errors import DataError, ExperimentError, RunError, WorkerLost
from feddg.experiment import Experiment
from feddg.methods.base import State
from feddg.privacy import noise
from feddg.runs import workers
from feddg.runs.channel import Channel
from feddg.runs.execute import carry_out
from feddg.runs.observer import Observer
from feddg.runs.prepare import in_process
from feddg.settings import merge
from feddg.testing.device import second_device

SETTINGS = {
    "method": "fedavg",
    "data": {"source": "digits", "image_size": 8, "id_val": 0.1, "id_test": 0}
    | {"leave_out": ["photo"]},
    "hold_out": "sketch",
    "clients": {"number": 5, "per_round": 4},
    "model": {"backbone": "cnn", "weights": None},
    "train": {"rounds": 2, "local_steps": 2, "batch_size": 8},
    "evaluate": {"pictures": False, "averages": "never", "every": 2},
    "precision": "float32",
}
NO_STATISTICS = {"model": {"backbone": "cnn_gn"}}
CASES = {
    "pardon": {"method": "pardon"},
    "scaffold": {"method": "scaffold", "train": {"optimizer": "sgd"}},
    "fedbn": {"method": "fedbn"},
    "feddg-ga": {"method": "feddg-ga", "server": {"wise_ft": "auto"}},
    "afl": {"method": {"name": "afl", "settings": {"afl_over": "domains"}}},
    "ridge": {**NO_STATISTICS, "method": "ridge", "train": {"rounds": 1, "local_steps": None}},
    "ridge head": {**NO_STATISTICS, "train": {"head": "ridge"}},
    "private": {**NO_STATISTICS, "privacy": {"epsilon": 8, "delta": 1e-5}},
    "secure sums": {
        "method": "fedbn",
        "clients": {"per_round": 5},
        "defences": [{"name": "secure_aggregation"}],
    },
    "resnet": {
        "model": {"backbone": "resnet18"},
        "train": {"rounds": 1, "local_steps": 1, "batch_size": 4},
        "clients": {"per_round": 3},
    },
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """What a worker computes with: the number of threads shows in sums of larger networks."""
    with pytest.MonkeyPatch.context() as patch, threads(1):
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def left_by(folder):
    """All that a run leaves but the seconds that it took."""
    names = ("metrics.jsonl", "rounds.jsonl")
    lines = [line for name in names for line in (folder / name).read_text().splitlines()]
    rows = [json.loads(line) for line in lines]
    for row in rows:
        row.pop("seconds", None)
    files = sorted((folder / "checkpoint").glob("*.safetensors"))
    tensors = {(f.name, name): t for f in files for name, t in load_file(f).items()}
    return tensors, rows, (folder / "ledger.jsonl").read_text()


def assert_alike(one, many):
    (expected, rows, ledger), (found, found_rows, found_ledger) = left_by(one), left_by(many)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert found_rows == rows
    assert found_ledger == ledger


@pytest.fixture
def children(monkeypatch):
    """The workers that are started, in their order."""
    found = []

    class Started(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            if "feddg.runs.workers" in self.args:
                found.append(self)

    monkeypatch.setattr(subprocess, "Popen", Started)
    return found


class Interrupting(Observer):
    """Ctrl-C in the middle of a round."""

    def client(self, round, reply):
        raise KeyboardInterrupt


class Killing(Observer):
    """Kills a worker in round 2."""

    def __init__(self, children):
        self._children = children

    def round(self, row):
        if row.round == 2:  # measured and kept after this
            self._children[-1].kill()


def test_ctrl_c_or_a_dead_worker_ends_the_run_and_any_number_goes_on(cache, tmp_path, children):
    experiment = Experiment(**merge(SETTINGS, CASES["scaffold"]))
    one = carry_out(tmp_path / "one", experiment, cache=cache).folder
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "many", workers=2, observer=Interrupting(), cache=cache)
    assert [child.poll() for child in children] == [-9]
    (folder,) = (tmp_path / "many").iterdir()
    expected = (
        r"worker 1 is lost: its process was killed.*same command or call.*any number of workers"
    )
    with pytest.raises(RunError, match=expected):
        resume(folder, workers=2, observer=Killing(children), cache=cache)
    assert children[-1].poll() == -9
    assert None not in [child.poll() for child in children]  # some end by themselves before
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("failed", 1)
    assert_alike(one, resume(folder, cache=cache).folder)


def test_workers_share_the_gpus(monkeypatch):
    with pytest.raises(ExperimentError, match="no GPU here; use --workers"):
        resume("run", device="all")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    device, count = workers.placed("all", None)
    assert (device, count) == ("cuda", 2)
    experiment = Experiment(**SETTINGS, device=device)
    tried = []
    monkeypatch.setattr(
        workers, "choose_device", lambda name: tried.append(name) or torch.device(name)
    )
    gpus = [torch.device("cuda", number) for number in range(2)]
    assert workers.devices_of(experiment, 3) == [*gpus, gpus[0]]
    assert not tried  # each process would open the first one
    single = experiment.model_copy(update={"device": "cuda:1"})
    assert workers.devices_of(single, 2) == [gpus[1]] * 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert workers.devices_of(experiment, 2) == [gpus[0]] * 2


def test_the_first_of_a_machine_decodes_and_holds_up_the_others_until_it_ends():
    order, first, second = [], Channel(), Channel()
    first.store = second.store = torch.distributed.HashStore()

    def follow():
        with workers._in_turn(second, "run"):
            order.append("second")

    def decode():
        with workers._in_turn(first, "run"):
            thread.start()
            thread.join(0.2)
            order.append("first")
            raise DataError("there are no images here")

    thread = threading.Thread(target=follow)
    with pytest.raises(DataError):
        decode()
    thread.join(60)
    assert order == ["first", "second"]


def launched(arguments, **environment):
    """A command's processes as torchrun starts them, or as srun does."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *arguments], env=os.environ | own, **streams)


SCRIPT = """
import json, sys
from feddg.api import run
from feddg.testing.device import second_device

settings, out, cache = sys.argv[1:]
with second_device() as device:
    for seed in (0, 1):
        run(None, out, cache=cache, **json.loads(settings), device=device, seed=seed)
        print("ran", flush=True)
"""
"""Two runs, one after the other, on a device that is not the CPU."""


def test_two_processes_of_torchrun_leave_the_bits_of_one(cache, tmp_path):
    settings = json.dumps(merge(SETTINGS, CASES["scaffold"]))
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [str(tmp_path / "script.py"), settings, str(tmp_path / "many"), str(cache)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    many = launched([*torchrun, *words])
    said, complained = many.communicate(timeout=300)
    assert many.returncode == 0, complained
    assert said == "ran\nran\n"  # one process speaks, of both runs
    with second_device() as device:
        for seed in (0, 1):
            (folder,) = (tmp_path / "many").glob(f"*-s{seed}-*")
            experiment = Experiment(**json.loads(settings), device=device, seed=seed)
            one = carry_out(tmp_path / f"one{seed}", experiment, cache=cache).folder
            assert_alike(one, folder)


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_crash_ends_all_that_srun_started(killed, cache, tmp_path):
    experiment = Experiment(**merge(SETTINGS, {"train": {"rounds": 100_000}}))
    (tmp_path / "long.yaml").write_text(json.dumps(experiment.model_dump(mode="json")))
    words = ["-m", "feddg", "run", str(tmp_path / "long.yaml"), "--out", str(tmp_path / "runs")]
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    tasks = [
        launched(
            [*words, "--verbose"],
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "FEDDG_CACHE": str(cache)},
            **{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": "2"},
            SLURM_TASKS_PER_NODE="2",
        )
        for rank in range(2)
    ]
    while "rounds: " not in (line := tasks[0].stderr.readline()):
        assert line, "it has ended"
    tasks[killed].kill()
    said = [task.communicate(timeout=60) for task in tasks]
    if killed == 0:  # PyTorch sometimes aborts a process whose store is gone
        assert tasks[1].returncode in (1, -signal.SIGABRT)
    else:
        assert tasks[0].returncode == 1
        assert said[1] == ("", "")
        (line,) = [line for line in said[0][1].splitlines() if line.startswith("error")]
        assert "cannot be reached" in line
        assert "the same command or call goes on" in line


# Last: the processes stay in a group until the tests of this file end.


@pytest.fixture(scope="module")
def three(cache):
    """Three processes that work on one run after the other."""
    with workers.started(3, cache) as channel:
        yield partial(workers.prepared_by, channel)


RARE = {"fedbn", "afl", "ridge head"}
"""What they send a quick case sends, too: memories, answers, sums."""


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow if c in RARE else ()) for c in CASES]
)
def test_three_processes_leave_the_bits_of_one(case, three, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(noise, "add_noise", lambda tensor, deviation: tensor + deviation)
    experiment = Experiment(**merge(SETTINGS, CASES[case]))
    # Features that one of the two had computed would be there for the other.
    own = tmp_path / "cache" if "ridge" in case else cache
    one = carry_out(tmp_path / "one", experiment, cache=own).folder
    many = carry_out(tmp_path / "many", experiment, cache=cache, prepare=three).folder
    assert_alike(one, many)


def test_replies_that_nobody_takes_leave_no_trace(three, cache):
    experiment = Experiment(**merge(SETTINGS, CASES["scaffold"]))
    found = [
        prepare(experiment, cache, lambda what, done, total: None)
        for prepare in (three, in_process)
    ]
    weights = {n: t.clone() for n, t in found[0].network.state_dict().items()}
    extras = found[0].method.initial_extras(found[0].network, 5)
    state = State(weights, extras, rounds=2)
    sent = replace(found[0].method.broadcast(state), round=1)
    many, one = (each.transport for each in found)
    left = many.train([0, 1, 2, 3, 4], sent)
    next(left)
    assert set(many.memories) == {0}
    many.memories.clear()
    for mine, other in zip(many.train([1, 3], sent), one.train([1, 3], sent), strict=True):
        assert mine.client == other.client
        assert all(torch.equal(mine.weights[n], t) for n, t in other.weights.items())
    assert set(many.memories) == {1, 3}


def test_a_worker_must_be_as_process_0_is(three, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "hash_of", lambda contents: "others")
    with pytest.raises(RunError, match="worker 1 has another images"):
        carry_out(tmp_path / "run", Experiment(**SETTINGS), cache=cache, prepare=three)
    monkeypatch.undo()
    again = carry_out(tmp_path / "run", Experiment(**SETTINGS), cache=cache, prepare=three)
    assert again.status == "completed"


PARENT = """
import sys, time
from pathlib import Path
from feddg.runs import workers

def wait(*_, **options):
    print("waiting", flush=True)
    time.sleep(600)

workers.Channel.join = wait
with workers.started(2, Path(sys.argv[1])):
    pass
"""


def test_workers_end_with_their_killed_parent(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "cache")],
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert parent.stdout.readline() == b"waiting\n"
    assert list(tmp_path.glob("feddg-*"))
    parent.kill()
    parent.communicate(timeout=120)  # until all who hold the pipe are gone


def test_workers_that_do_not_come_are_not_waited_for_for_days(monkeypatch):
    monkeypatch.setattr("feddg.runs.channel.MINUTES_TO_JOIN", 0)
    monkeypatch.setattr("feddg.runs.channel.dist.init_process_group", lambda: Event().wait(9))
    with pytest.raises(WorkerLost, match="not all workers came within 0 minutes"):
        Channel().join(dict)
