"""Processes that work on one run together: of this machine, or those of torchrun or srun."""

import atexit
import json
import logging
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from feddg.clients.threads import share_of_process, threads
from feddg.diagnostics import Progress, silent
from feddg.errors import ExperimentError, FeddgError, RunError, WorkerLost, in_words
from feddg.experiment import Experiment
from feddg.federation.federation import Federation
from feddg.federation.inprocess import InProcess
from feddg.messages import Message, under
from feddg.models.precision import choose_device
from feddg.runs.channel import (
    FAILED,
    MINUTES_TO_JOIN,
    PREDICT,
    SECONDS_TO_LEAVE,
    Channel,
    WorkerEvaluation,
    WorkerTransport,
    share_of_batches,
    work_on,
)
from feddg.runs.prepare import Prepare, federation_of, images_of, in_process, load_images
from feddg.runs.processes import Child, child, death, end, threads_per_job, with_parent
from feddg.storage import cache_folder, hash_of

RUN, END = "run", "end"
PATIENCE = timedelta(days=30)
"""How long a process waits for another that is alive; a client may train for days."""

log = logging.getLogger("feddg")


def placed(device: str | None, workers: int | None) -> tuple[str | None, int]:
    """Returns the device of a run's processes, and how many there are.

    Args:
        device: as asked for; may be ``all``.
        workers: how many; by default one, or one for each GPU of ``all``.

    Raises:
        ExperimentError: there are too few GPUs for that.
    """
    if device == "all":
        device = "cuda"
        workers = workers or torch.cuda.device_count()
        if not workers:
            raise ExperimentError("device all: there is no GPU here; use --workers N for CPUs")
    return device, workers or 1


@contextmanager
def together(workers: int, launched: Channel | None = None) -> Iterator[Prepare]:
    """Yields the function that prepares a run with several processes.

    Args:
        workers: how many there are, this process one of them.
        launched: to the processes that are there already, see :func:`joined`.

    Raises:
        WorkerLost: one of them died.
    """
    if launched is not None:
        yield partial(prepared_by, launched)
        return
    if workers == 1:
        yield in_process
        return
    with ExitStack() as ending:

        def prepare(experiment: Experiment, cache: Path, progress: Progress) -> Federation:
            devices = devices_of(experiment, workers)  # a mistake is told before anybody starts
            apart = len(set(devices)) == workers and devices[0].type == "cuda"
            channel = ending.enter_context(started(workers, cache, _backend(apart=apart)))
            return prepared_by(channel, experiment, cache, progress)

        yield prepare


def _launch() -> tuple[int, int, int, int] | None:
    """Returns this process's rank, their number, and both on its machine, as torchrun or srun say.

    None if neither has started several. ``MASTER_ADDR`` tells a run of all tasks of a Slurm step
    from a run by each.
    """
    given = os.environ
    if not ("MASTER_ADDR" in given and "MASTER_PORT" in given):
        return None
    if "RANK" in given:
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    else:
        tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in given else "SLURM_NTASKS"
        names = ["SLURM_PROCID", tasks, "SLURM_LOCALID", "SLURM_TASKS_PER_NODE"]
    # As in SLURM_TASKS_PER_NODE=4(x2).
    numbers = [re.sub(r"\(.*|,.*", "", given.get(name, by)) for name, by in zip(names, "0101")]
    rank, size, local, here = map(int, numbers)
    return (rank, size, local, here) if size > 1 else None


def alone(what: str) -> None:
    """Refuses what several processes of torchrun or srun would do at once.

    Raises:
        ExperimentError: they have started this one.
    """
    if _launch() is not None:
        raise ExperimentError(f"torchrun and srun can start a run, not {what}: start it once")


_joined: Channel | None = None


def joined(cache: Path, workers: int | None = None) -> Channel | None:
    """Returns the channel to the processes of torchrun or srun; None if there are none.

    Only in process 0: all others work for it here, without a word, and exit when it ends.

    Args:
        cache: folder for decoded pixels.
        workers: how many were asked for besides.

    Raises:
        ExperimentError: there are as many workers as were started, no others.
        RunError: some did not come.
    """
    global _joined
    place = None if dist.is_available() and dist.is_initialized() else _launch()
    if _joined is None and place is not None:
        rank, size, *local = place
        channel = Channel()
        channel.rank = rank
        if "OMP_NUM_THREADS" not in os.environ:
            share_of_process(threads_per_job(local[1]))
        if local[1] == size:
            _on_loopback()
        with suppress(ValueError):  # not in the main thread
            # Process 0 says how to go on, also where it is told to end since another has died.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if rank else signal.default_int_handler)
            signal.signal(signal.SIGINT, signal.SIG_DFL if rank else signal.default_int_handler)
        try:
            channel.join(partial(_meeting, channel, rank, size, local[0]))
        except (FeddgError, RuntimeError) as error:
            if rank:  # process 0 says it
                sys.exit(1)
            where = "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
            raise RunError(f"{size} processes could not meet at {where}: {error}") from None
        channel.local = local[0], local[1]
        if rank:
            sys.exit(0 if serve(channel, cache) else 1)
        atexit.register(_dismiss, channel)
        _joined = channel
    if _joined is not None and workers is not None:
        raise ExperimentError(
            f"--workers {workers}: torchrun or srun has started {_joined.size} processes; leave it "
            "out"
        )
    return _joined


def _meeting(channel: Channel, rank: int, size: int, local: int) -> dict[str, object]:
    """Returns how to join where torchrun or srun says; NCCL serves if no GPU is shared."""
    from torch.distributed.rendezvous import rendezvous

    late = timedelta(minutes=MINUTES_TO_JOIN)
    channel.store, _, _ = next(rendezvous("env://", rank, size, timeout=late))
    count = torch.cuda.device_count()
    gpu = str(torch.cuda.get_device_properties(local % count).uuid) if count else ""
    channel.store.set(f"feddg/gpu/{rank}", gpu)
    gpus = {channel.store.get(f"feddg/gpu/{number}") for number in range(size)}
    options = {"store": channel.store, "rank": rank, "world_size": size, "timeout": PATIENCE}
    return options | {"backend": _backend(apart=len(gpus - {b""}) == size)}


def _dismiss(channel: Channel) -> None:
    with suppress(FeddgError, RuntimeError):
        if not channel.expected:  # or they find nobody there when they have done their part
            channel.tell(Message({}, {"job": END}))
    channel.leave()


def _on_loopback() -> None:
    if loopback := {"linux": "lo", "darwin": "lo0"}.get(sys.platform):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # which workers inherit


@contextmanager
def started(workers: int, cache: Path, backend: str = "gloo") -> Iterator[Channel]:
    """Starts workers on this machine, each with its share of the cores, and ends them."""
    if dist.is_initialized():
        raise RunError("this process is in a group of torch.distributed already: leave it first")
    _on_loopback()
    count, cached = threads_per_job(workers), {"FEDDG_CACHE": str(cache.resolve())}
    folder = tempfile.mkdtemp(prefix="feddg-")
    store = os.path.join(folder, "store")
    children = dict[int, Child]()

    def watch() -> None:
        ended = {rank: worker.poll() for rank, worker in children.items()}
        # Those whose connection broke end, too, with status 0: the one that broke it is named.
        for rank, status in sorted(ended.items(), key=lambda item: item[1] in (None, 0)):
            if status is not None:
                raise WorkerLost(f"worker {rank} is lost: {death(status)}")

    channel = Channel(watch)
    try:
        for rank in range(1, workers):
            words = (store, str(rank), str(workers), backend)
            children[rank] = child("feddg.runs.workers", *words, threads=count, environment=cached)
        with threads(count):
            channel.join(partial(_group, store, 0, workers, backend))
            yield channel
            channel.tell(Message({}, {"job": END}))
            if channel.direct:  # NCCL wants all to leave
                channel.leave()
                end(children.values(), SECONDS_TO_LEAVE)
    finally:
        for process in children.values():  # they keep nothing that could be lost
            process.kill()
        end(children.values(), 0)
        channel.leave()
        shutil.rmtree(folder, ignore_errors=True)


def _group(store: str, rank: int, size: int, backend: str) -> dict[str, object]:
    """Returns how to join, once all are there; PyTorch's own wait holds up every thread."""
    files = [Path(f"{store}.{number}") for number in range(size)]
    files[rank].touch()
    while not all(file.exists() for file in files):
        time.sleep(0.05)
    options = {"init_method": Path(store).as_uri(), "rank": rank, "world_size": size}
    return options | {"backend": backend, "timeout": PATIENCE}


def _backend(*, apart: bool) -> str:
    """NCCL needs a GPU for each process."""
    return "cpu:gloo,cuda:nccl" if apart and dist.is_nccl_available() else "gloo"


def devices_of(experiment: Experiment, processes: int) -> list[torch.device]:
    """Returns the devices of the processes of a machine: its GPUs in turn, or all on one.

    Args:
        experiment: its device is a kind: ``auto``, ``cpu``, ``cuda``; or a single one.
        processes: how many there are.
    """
    name, count = experiment.device, torch.cuda.device_count()
    # Of several GPUs none is tried yet: every process would begin on the first one.
    if not count or name not in ("auto", "cuda"):
        return [choose_device(name)] * processes
    return [torch.device("cuda", number % count) for number in range(processes)]


def prepared_by(
    channel: Channel, experiment: Experiment, cache: Path, progress: Progress
) -> Federation:
    """Prepares a run at process 0, then at the workers, so that images are decoded once."""
    on_device, clients = _on_device(channel, experiment), partial(WorkerTransport, channel)
    federation = in_process(on_device, cache, progress, transport=clients)
    settings = json.dumps(experiment.model_dump(mode="json"))
    channel.tell(Message({}, {"job": RUN, "experiment": settings}))
    ready = {rank: channel.receive(rank).scalars for rank in range(1, channel.size)}
    ours = _about(federation)
    for rank, theirs in ready.items():
        for what, value in ours.items():
            if theirs[what] != value:
                raise RunError(
                    f"worker {rank} has another {what} ({theirs[what]}) than process 0 ({value}): "
                    "bits would depend on who trains whom"
                )
    here = federation.evaluation
    assert here is not None
    given = {field.name: getattr(here, field.name) for field in fields(here) if field.init}
    federation.evaluation = WorkerEvaluation(**given, channel=channel, network=federation.network)
    return federation


def _on_device(channel: Channel, experiment: Experiment) -> Experiment:
    place, here = channel.local
    channel.device = devices_of(experiment, here)[place]
    if torch.device(experiment.device if experiment.device != "auto" else "cuda").index is not None:
        channel.direct = False
    if channel.device.type == "cuda":
        torch.cuda.set_device(channel.device)
    return experiment.model_copy(update={"device": str(channel.device)})


def _about(federation: Federation) -> dict[str, str]:
    """What must be equal in all processes to get the same numbers as with one."""
    images = images_of(federation)
    worker, on_gpu = federation.worker, federation.worker.device.type == "cuda"
    computing = worker.threads or torch.get_num_threads()
    return {
        "device": torch.cuda.get_device_name(worker.device) if on_gpu else worker.device.type,
        "precision": type(worker.autocast()).__name__,
        "number of threads": "" if on_gpu else str(computing),
        "images": hash_of([images.contents.fingerprint(), images.held.model_dump_json()]),
    }


def serve(channel: Channel, cache: Path) -> bool:
    """Carries out process 0's jobs until it ends; returns whether it said so."""
    log.setLevel(logging.ERROR)  # process 0 says it all
    federation: Federation | None = None
    try:
        while (job := channel.hear()).scalars["job"] != END:
            try:
                if job.scalars["job"] == RUN:
                    federation = _prepared(channel, job, cache)
                elif federation is not None:
                    _work(channel, federation, job)
            except WorkerLost:
                raise
            except Exception as error:
                if not isinstance(error, FeddgError):
                    log.exception("worker %d", channel.rank)
                channel.send(0, Message({}, {FAILED: in_words(error)}))
                channel.flush()
                return False
        return True
    except WorkerLost:  # process 0 is gone, and says why
        return False
    finally:
        channel.leave()


def _prepared(channel: Channel, job: Message, cache: Path) -> Federation:
    experiment = Experiment(**json.loads(str(job.scalars["experiment"])))
    experiment = _on_device(channel, experiment)
    with _in_turn(channel, hash_of([str(job.scalars["experiment"])])):
        images = load_images(experiment, cache, silent)
    federation = federation_of(experiment, images, cache)
    channel.send(0, Message({}, dict(_about(federation))))
    channel.flush()
    return federation


@contextmanager
def _in_turn(channel: Channel, run: str) -> Iterator[None]:
    """Holds up the others of a machine until its first process has decoded the images."""
    if channel.store is None:  # process 0 has decoded them
        yield
        return
    here = f"feddg/{run}/{platform.node()}"
    if channel.store.add(f"{here}/came", 1) > 1:
        channel.store.wait([f"{here}/done"], PATIENCE)
    try:
        yield
    finally:  # where it failed, the others say so, too: process 0 hears them one by one
        channel.store.set(f"{here}/done", "")


def _work(channel: Channel, federation: Federation, job: Message) -> None:
    assert isinstance(federation.transport, InProcess)
    if job.scalars["job"] != PREDICT:
        work_on(job, federation.transport, channel)
        return
    assert federation.evaluation is not None
    named = json.loads(str(job.scalars["splits"]))
    splits = {name: federation.evaluation.splits[name] for name in named}
    model = federation.predictor(under("weights/", job).tensors)
    evaluation = replace(federation.evaluation, splits=splits)
    logits = [torch.empty(0, evaluation.classes)]
    logits += share_of_batches(evaluation, model, channel.rank, channel.size)
    channel.send(0, Message({"logits": torch.cat(logits)}))
    channel.flush()


def main() -> None:
    """Works for the process that started this one, and ends with it."""
    store, rank, size, backend = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    with_parent(lambda: os._exit(1))
    channel = Channel()
    channel.join(partial(_group, store, rank, size, backend))
    serve(channel, cache_folder())


if __name__ == "__main__":
    main()
