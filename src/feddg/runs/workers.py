"""Processes that work on one run together: started on this machine, or by torchrun on any."""

import atexit
import json
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from feddg.clients.threads import environment_of_job, threads, threads_per_job
from feddg.data.decoding import hash_of
from feddg.diagnostics import Progress, silent
from feddg.errors import ExperimentError, FeddgError, RunError, WorkerLost, in_words
from feddg.evaluation.accuracy import Evaluation
from feddg.experiment import Experiment
from feddg.federation.federation import Federation
from feddg.federation.inprocess import InProcess
from feddg.federation.workers import (
    FAILED,
    PREDICT,
    Channel,
    WorkerEvaluation,
    WorkerTransport,
    share_of_batches,
    work_on,
)
from feddg.messages import Message, under
from feddg.models.precision import choose_device
from feddg.runs.prepare import Prepare, federation_of, in_process, load_images
from feddg.storage import cache_folder
from feddg.text import death

RUN, END = "run", "end"
PATIENCE = timedelta(days=30)
"""How long a process waits for another that is alive; a client may train for days."""
SECONDS_TO_END = 10

log = logging.getLogger("feddg")


def started_by_torchrun() -> bool:
    """Whether this process is one of several that torchrun started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1


def placed(experiment: Experiment, workers: int | None) -> tuple[Experiment, int]:
    """Returns an experiment on the devices it asks for, and how many processes work on it.

    Args:
        experiment: its device may be ``all``.
        workers: how many; by default one, or one for each GPU of ``all``.

    Raises:
        ExperimentError: there are too few GPUs for that, or torchrun says another number.
    """
    if experiment.device == "all":
        experiment = experiment.model_copy(update={"device": "cuda"})
        workers = workers or torch.cuda.device_count()
        if not workers:
            raise ExperimentError("device all: there is no GPU here; say --workers N for CPUs")
    return experiment, number_of_workers(workers)


def number_of_workers(asked: int | None) -> int:
    """Returns the number of processes of a run: as requested, or as started by torchrun.

    Raises:
        ExperimentError: the two contradict each other.
    """
    if not started_by_torchrun():
        return asked or 1
    started = int(os.environ["WORLD_SIZE"])
    if asked not in (None, started):
        raise ExperimentError(f"torchrun started {started} workers: leave out --workers {asked}")
    return started


@contextmanager
def together(workers: int, cache: Path) -> Iterator[Prepare]:
    """Yields the function that prepares a run with several processes.

    Args:
        workers: how many there are, this process one of them.
        cache: folder for decoded pixels.

    Raises:
        WorkerLost: one of them died.
    """
    if workers == 1:
        yield in_process
        return
    if _of_torchrun is not None:
        try:
            yield partial(prepared_by, _of_torchrun)
        except (KeyboardInterrupt, WorkerLost):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what there is to say is said
            atexit.unregister(_end_torchrun)
            atexit.register(_of_torchrun.leave)
            raise
        return
    with ExitStack() as ending:

        def prepare(experiment: Experiment, *rest: Any) -> Federation:
            devices_of(experiment, workers)  # a mistake is to be told before anybody starts
            channel = ending.enter_context(started(workers, cache))
            return prepared_by(channel, experiment, *rest)

        yield prepare


@contextmanager
def started(workers: int, cache: Path) -> Iterator[Channel]:
    """Starts workers on this machine, each with its share of the cores; ends them with the block.

    They are detached from the terminal, so Ctrl-C reaches only this process. They end when their
    standard input does, so when this process dies, however it dies.
    """
    if not dist.is_available():
        raise ExperimentError(
            "workers need torch.distributed, which this PyTorch was built without"
        )
    if dist.is_initialized():
        raise RunError("this process is in a group of torch.distributed already: leave it first")
    count = threads_per_job(workers)
    environment = environment_of_job(count) | {"FEDDG_CACHE": str(cache.resolve())}
    environment |= _loopback()
    folder = tempfile.mkdtemp(prefix="feddg-")
    store = os.path.join(folder, "store")
    children = dict[int, subprocess.Popen[bytes]]()

    def watch() -> None:
        ended = {rank: child.poll() for rank, child in children.items()}
        # Those whose connection broke end, too, with status 0: the one that broke it is named.
        for rank, status in sorted(ended.items(), key=lambda one: one[1] in (None, 0)):
            if status is not None:
                raise WorkerLost(f"worker {rank} is lost: {death(status)}")

    channel = Channel(watch)
    try:
        for rank in range(1, workers):
            command = [sys.executable, "-m", "feddg.runs.workers", store, str(rank), str(workers)]
            children[rank] = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, start_new_session=True
            )
        with threads(count):
            with _environment(_loopback()):
                channel.join(partial(_group, store, 0, workers))
            yield channel
            channel.tell(Message({}, {"job": END}))
            for child in children.values():
                with suppress(subprocess.TimeoutExpired):
                    child.wait(SECONDS_TO_END)
    finally:
        for child in children.values():  # they keep nothing that could be lost
            child.kill()
            child.communicate()
        channel.leave()
        shutil.rmtree(folder, ignore_errors=True)


def _loopback() -> dict[str, str]:
    """Returns the environment that keeps processes of this machine on the loopback interface."""
    names = {"linux": "lo", "darwin": "lo0"}
    return {"GLOO_SOCKET_IFNAME": names[sys.platform]} if sys.platform in names else {}


@contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _group(store: str, rank: int, size: int) -> dict[str, Any]:
    """Returns how to join, once all are there; PyTorch's own wait holds up every thread."""
    files = [Path(f"{store}.{number}") for number in range(size)]
    files[rank].touch()
    while not all(file.exists() for file in files):
        time.sleep(0.05)
    options = {"init_method": Path(store).as_uri(), "rank": rank, "world_size": size}
    return options | {"backend": _backend(), "timeout": PATIENCE}


def _backend() -> str:
    on_gpus = torch.cuda.is_available() and dist.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if on_gpus else "gloo"


_of_torchrun: Channel | None = None


def join_torchrun(cache: Path) -> None:
    """Joins the processes started by torchrun, if any.

    Only process 0 returns: the others work for it until it ends, and end here.

    Args:
        cache: folder for decoded pixels.
    """
    global _of_torchrun
    if _of_torchrun is not None or not started_by_torchrun():
        return
    channel = _of_torchrun = Channel()
    channel.join(lambda: {"backend": _backend(), "timeout": PATIENCE})
    if channel.rank:
        serve(channel, cache)
        sys.exit()
    signal.signal(signal.SIGTERM, _told_to_end)
    atexit.register(_end_torchrun)


def _end_torchrun() -> None:
    assert _of_torchrun is not None
    with suppress(WorkerLost):
        _of_torchrun.tell(Message({}, {"job": END}))
    _of_torchrun.leave()


def _told_to_end(*_: object) -> None:
    raise WorkerLost("a worker is lost, and torchrun, which says which, ends the others")


def devices_of(experiment: Experiment, here: int) -> list[torch.device]:
    """Returns the devices of this machine's processes.

    Args:
        experiment: its device is a kind: ``auto``, ``cpu``, ``cuda``.
        here: how many processes there are.

    Raises:
        ExperimentError: there are too few.
    """
    device = choose_device(experiment.device)
    if device.type != "cuda":
        return [device] * here
    count = torch.cuda.device_count()
    if device.index is not None:
        raise ExperimentError(f"device {device} is a single one: with workers say cuda, or cpu")
    if count < here:
        raise ExperimentError(
            f"{here} workers, and this machine has {count} GPUs, one for each worker: "
            f"--workers {count}, or --device cpu"
        )
    return [torch.device("cuda", number) for number in range(here)]


def prepared_by(
    channel: Channel,
    experiment: Experiment,
    cache: Path,
    progress: Progress,
) -> Federation:
    """Prepares a run at process 0, then at the workers, so images are decoded once per machine."""
    size, here = channel.size, _processes_here(channel)
    own = _on_device(channel, experiment)
    clients = partial(WorkerTransport, channel)
    found = in_process(own, cache, progress, in_process=clients)
    settings = json.dumps(experiment.model_dump(mode="json"))
    channel.tell(Message({}, {"job": RUN, "experiment": settings}))
    first = range(here, size, here)  # of their machines
    others = [rank for rank in range(1, size) if rank not in first]
    ready = {rank: channel.receive(rank).scalars for rank in first}
    for rank in others:
        channel.send(rank, Message({}, {"decoded": True}))
    channel.flush()
    ready |= {rank: channel.receive(rank).scalars for rank in others}
    for rank, about in ready.items():
        _require_alike(rank, about, _about(found))
    assert found.evaluation is not None
    given = {field.name: getattr(found.evaluation, field.name) for field in fields(Evaluation)}
    found.evaluation = WorkerEvaluation(**given, channel=channel, network=found.network)
    return found


def _processes_here(channel: Channel) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", channel.size))


def _on_device(channel: Channel, experiment: Experiment) -> Experiment:
    here = _processes_here(channel)
    channel.device = devices_of(experiment, here)[channel.rank % here]
    if channel.device.type == "cuda":
        torch.cuda.set_device(channel.device)
    return experiment.model_copy(update={"device": str(channel.device)})


def _about(found: Federation) -> dict[str, str]:
    """What must be equal in all processes to get the same numbers as with one."""
    contents = found.clients.contents
    worker, on_gpu = found.worker, found.worker.device.type == "cuda"
    computing = worker.threads or torch.get_num_threads()
    return {
        "feddg": version("feddg"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(worker.device) if on_gpu else worker.device.type,
        "precision": type(worker.autocast()).__name__,
        "number of threads": "" if on_gpu else str(computing),
        "images": hash_of(
            [contents.fingerprint() if contents else "", found.clients.held.model_dump_json()]
        ),
    }


def _require_alike(rank: int, theirs: dict[str, Any], own: dict[str, str]) -> None:
    for what, value in own.items():
        if theirs[what] != value:
            raise RunError(
                f"worker {rank} on {theirs['machine']} has another {what} ({theirs[what]}) than "
                f"process 0 ({value}): bits would depend on who trains whom"
            )


def serve(channel: Channel, cache: Path) -> None:
    """Carries out process 0's jobs until it ends."""
    log.setLevel(logging.ERROR)  # process 0 says it all
    found: Federation | None = None
    try:
        while (job := channel.hear()).scalars["job"] != END:
            try:
                if job.scalars["job"] == RUN:
                    found = _prepared(channel, job, cache)
                elif found is not None:
                    _work(channel, found, job)
            except WorkerLost:
                raise
            except Exception as error:
                if not isinstance(error, FeddgError):
                    log.exception("worker %d", channel.rank)
                channel.send(0, Message({}, {FAILED: f"{platform.node()}: {in_words(error)}"}))
                channel.flush()
                break
    except WorkerLost:  # process 0 is gone, and says why
        pass
    channel.leave()


def _prepared(channel: Channel, job: Message, cache: Path) -> Federation:
    experiment = Experiment(**json.loads(str(job.scalars["experiment"])))
    experiment = _on_device(channel, experiment)
    if channel.rank % _processes_here(channel):  # another one decodes this machine's images
        channel.receive(0)
    found = federation_of(experiment, load_images(experiment, cache, silent), cache)
    channel.send(0, Message({}, {**_about(found), "machine": platform.node()}))
    channel.flush()
    return found


def _work(channel: Channel, found: Federation, job: Message) -> None:
    assert isinstance(found.transport, InProcess)
    if job.scalars["job"] != PREDICT:
        work_on(job, found.transport, channel)
        return
    assert found.evaluation is not None
    named = json.loads(str(job.scalars["splits"]))
    splits = {name: found.evaluation.splits[name] for name in named}
    model = found.predictor(under("weights/", job).tensors)
    evaluation = replace(found.evaluation, splits=splits)
    logits = [torch.empty(0, evaluation.classes)]
    logits += share_of_batches(evaluation, model, channel.rank, channel.size)
    channel.send(0, Message({"logits": torch.cat(logits)}))
    channel.flush()


def _end_with_parent(store: str) -> None:
    while os.read(0, 1):
        pass
    shutil.rmtree(Path(store).parent, ignore_errors=True)
    os._exit(1)


def main() -> None:
    """Works for the process that started this one, and ends with it."""
    store, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    threading.Thread(target=_end_with_parent, args=[store], daemon=True).start()
    try:
        channel = Channel()
        channel.join(partial(_group, store, rank, size))
        serve(channel, cache_folder())
    finally:
        shutil.rmtree(Path(store).parent, ignore_errors=True)


if __name__ == "__main__":
    main()
