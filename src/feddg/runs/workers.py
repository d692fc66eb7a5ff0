"""Processes of this machine that work on one run together."""

import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from feddg.clients.threads import threads, threads_per_job
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
from feddg.runs.processes import Child, child, death, end, with_parent
from feddg.storage import cache_folder

RUN, END = "run", "end"
PATIENCE = timedelta(days=30)
"""How long a process waits for another that is alive; a client may train for days."""

log = logging.getLogger("feddg")


def placed(experiment: Experiment, workers: int | None) -> tuple[Experiment, int]:
    """Returns an experiment on the devices it asks for, and how many processes work on it.

    Args:
        experiment: its device may be ``all``.
        workers: how many; by default one, or one for each GPU of ``all``.

    Raises:
        ExperimentError: there are too few GPUs for that.
    """
    if experiment.device == "all":
        experiment = experiment.model_copy(update={"device": "cuda"})
        workers = workers or torch.cuda.device_count()
        if not workers:
            raise ExperimentError("device all: there is no GPU here; say --workers N for CPUs")
    return experiment, workers or 1


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
    with ExitStack() as ending:

        def prepare(experiment: Experiment, *rest: Any) -> Federation:
            devices_of(experiment, workers)  # a mistake is to be told before anybody starts
            channel = ending.enter_context(started(workers, cache))
            return prepared_by(channel, experiment, *rest)

        yield prepare


@contextmanager
def started(workers: int, cache: Path) -> Iterator[Channel]:
    """Starts workers on this machine, each with its share of the cores, and ends them."""
    if not dist.is_available():
        raise ExperimentError(
            "workers need torch.distributed, which this PyTorch was built without"
        )
    if dist.is_initialized():
        raise RunError("this process is in a group of torch.distributed already: leave it first")
    if loopback := {"linux": "lo", "darwin": "lo0"}.get(sys.platform):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # which the workers inherit
    count, cached = threads_per_job(workers), {"FEDDG_CACHE": str(cache.resolve())}
    folder = tempfile.mkdtemp(prefix="feddg-")
    store = os.path.join(folder, "store")
    children = dict[int, Child]()

    def watch() -> None:
        ended = {rank: one.poll() for rank, one in children.items()}
        # Those whose connection broke end, too, with status 0: the one that broke it is named.
        for rank, status in sorted(ended.items(), key=lambda one: one[1] in (None, 0)):
            if status is not None:
                raise WorkerLost(f"worker {rank} is lost: {death(status)}")

    channel = Channel(watch)
    try:
        for rank in range(1, workers):
            words = (store, str(rank), str(workers))
            children[rank] = child("feddg.runs.workers", *words, threads=count, environment=cached)
        with threads(count):
            channel.join(partial(_group, store, 0, workers))
            yield channel
            channel.tell(Message({}, {"job": END}))
    finally:
        for one in children.values():  # they keep nothing that could be lost
            one.kill()
        end(children.values(), 0)
        channel.leave()
        shutil.rmtree(folder, ignore_errors=True)


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


def devices_of(experiment: Experiment, processes: int) -> list[torch.device]:
    """Returns the devices of the processes of a run.

    Args:
        experiment: its device is a kind: ``auto``, ``cpu``, ``cuda``.
        processes: how many there are.

    Raises:
        ExperimentError: there are too few.
    """
    device = choose_device(experiment.device)
    if device.type != "cuda":
        return [device] * processes
    count = torch.cuda.device_count()
    if device.index is not None:
        raise ExperimentError(f"device {device} is a single one: with workers say cuda, or cpu")
    if count < processes:
        raise ExperimentError(
            f"{processes} workers, and this machine has {count} GPUs, one for each worker: "
            f"--workers {count}, or --device cpu"
        )
    return [torch.device("cuda", number) for number in range(processes)]


def prepared_by(
    channel: Channel, experiment: Experiment, cache: Path, progress: Progress
) -> Federation:
    """Prepares a run at process 0, then at the workers, so that images are decoded once."""
    own, clients = _on_device(channel, experiment), partial(WorkerTransport, channel)
    found = in_process(own, cache, progress, in_process=clients)
    settings = json.dumps(experiment.model_dump(mode="json"))
    channel.tell(Message({}, {"job": RUN, "experiment": settings}))
    ready = {rank: channel.receive(rank).scalars for rank in range(1, channel.size)}
    for rank, about in ready.items():
        _require_alike(rank, about, _about(found))
    assert found.evaluation is not None
    given = {
        field.name: getattr(found.evaluation, field.name)
        for field in fields(Evaluation)
        if field.init
    }
    found.evaluation = WorkerEvaluation(**given, channel=channel, network=found.network)
    return found


def _on_device(channel: Channel, experiment: Experiment) -> Experiment:
    channel.device = devices_of(experiment, channel.size)[channel.rank]
    if channel.device.type == "cuda":
        torch.cuda.set_device(channel.device)
    return experiment.model_copy(update={"device": str(channel.device)})


def _about(found: Federation) -> dict[str, str]:
    """What must be equal in all processes to get the same numbers as with one."""
    contents = found.clients.contents
    worker, on_gpu = found.worker, found.worker.device.type == "cuda"
    computing = worker.threads or torch.get_num_threads()
    return {
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
                f"worker {rank} has another {what} ({theirs[what]}) than process 0 ({value}): bits "
                "would depend on who trains whom"
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
                channel.send(0, Message({}, {FAILED: in_words(error)}))
                channel.flush()
                break
    except WorkerLost:  # process 0 is gone, and says why
        pass
    channel.leave()


def _prepared(channel: Channel, job: Message, cache: Path) -> Federation:
    experiment = Experiment(**json.loads(str(job.scalars["experiment"])))
    experiment = _on_device(channel, experiment)
    found = federation_of(experiment, load_images(experiment, cache, silent), cache)
    channel.send(0, Message({}, dict(_about(found))))
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


def main() -> None:
    """Works for the process that started this one, and ends with it."""
    store, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    clean = partial(shutil.rmtree, Path(store).parent, ignore_errors=True)
    with_parent(lambda: (clean(), os._exit(1)))
    try:
        channel = Channel()
        channel.join(partial(_group, store, rank, size))
        serve(channel, cache_folder())
    finally:
        clean()


if __name__ == "__main__":
    main()
