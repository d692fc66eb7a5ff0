"""Launchers: the same runs wherever they go, and one line for what cannot go anywhere."""

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from feddg.comparison import pool
from feddg.comparison.compare import carry_out_comparison, prepare_comparison
from feddg.comparison.plan import expand_plan, load_plan
from feddg.comparison.pool import (
    LAUNCHERS,
    Launcher,
    Outcome,
    Watcher,
    answer_to,
    default_jobs,
    register_launcher,
    run_here,
)
from feddg.diagnostics import Diagnostic, emit
from feddg.errors import ExperimentError, RunError
from feddg.runs.execute import is_complete
from feddg.settings import Settings

PLAN = {
    "name": "mine",
    "base": {
        "data": {"source": "digits", "image_size": 8},
        "clients": {"number": 2},
        "train": {"rounds": 1, "local_steps": 2, "batch_size": 32},
        "evaluate": {"averages": "never"},
    },
    "methods": ["fedavg", "fedprox"],
    "hold_out": ["sketch"],
}
BROKEN = {
    "label": "broken",
    "name": "fedavg",
    "experiment": {"model": {"backbone": "resnet18", "weights": "/nowhere.pth"}},
}


class Notes(Watcher):
    def __init__(self):
        self.ends = []

    def ended(self, outcome: Outcome) -> None:
        self.ends.append(outcome.status)


def test_gpus_are_shared_by_as_many_runs_as_memory_and_cores_allow(monkeypatch):
    def jobs(**fields):
        cells = expand_plan(load_plan(PLAN | {"seeds": 20}).fixed(fields))
        return default_jobs([cell.experiment for cell in cells])

    monkeypatch.setattr(pool, "available_cores", lambda: 16)
    assert jobs() == 1
    for gpus, gigabytes, expected in ((1, 80, 8), (2, 80, 16), (1, 8, 3), (1, 1, 1)):
        found = SimpleNamespace(total_memory=gigabytes * 2**30)
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=gpus: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=found: found)
        assert jobs() == expected
    assert jobs(device="cpu") == 1
    found.total_memory = 16 * 2**30
    large = {"model": {"backbone": "resnet18", "weights": None}, "data": {"image_size": 224}}
    assert jobs(device="cuda") > jobs(**large, device="cuda")
    monkeypatch.setattr(pool, "available_cores", lambda: 2)
    assert jobs(device="cuda") == 2


def weights(done):
    folders = {cell.method: cell.folder for cell in done.cells}
    files = {method: list(f.glob("checkpoint/*.safetensors")) for method, f in folders.items()}
    return {method: load_file(found[0]) for method, found in files.items() if found}


def carried(folder, cache, launcher=None, options=None, plan=PLAN):
    work, notes = prepare_comparison(plan, folder, cache=cache), Notes()
    more = {"launcher": launcher, "launcher_options": options} if launcher else {}
    done = carry_out_comparison(work, jobs=2 if launcher else 0, cache=cache, watcher=notes, **more)
    return done, notes


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The plan carried out in this process."""
    folder = tmp_path_factory.mktemp("alone")
    return carried(folder / "out", folder / "cache")[0]


def require_alike(one, other, *methods):
    for method in methods or ("fedavg", "fedprox"):
        tensors, others = weights(one)[method], weights(other)[method]
        assert tensors.keys() == others.keys()
        for name, tensor in others.items():
            assert torch.equal(tensors[name], tensor), f"{method}, {name}"


def test_a_workers_answer_says_how_a_job_ended(tmp_path):
    work = prepare_comparison(PLAN | {"methods": ["fedavg", BROKEN]}, tmp_path / "out")
    (tmp_path / "out").mkdir()

    def line(cell, folder):
        experiment = cell.experiment.model_dump(mode="json")
        cache = str(tmp_path / "cache")
        return json.dumps(
            {"folder": str(folder), "experiment": experiment, "cache": cache, "threads": 1}
        )

    good, broken = work.missing
    assert answer_to(line(good, good.folder)) == {"ended": "completed"}
    found = answer_to(line(broken, broken.folder))
    assert found["ended"] == "failed"
    assert "/nowhere.pth" in found["error"]
    unseen = answer_to(line(good, tmp_path / "elsewhere" / "run"))
    assert unseen["ended"] == "failed"
    assert "all machines must share it" in unseen["error"]
    assert not (tmp_path / "elsewhere").exists()


class Tagged(Settings):
    tag: str


def test_a_launcher_that_is_named_carries_runs_out_whatever_jobs_says(tmp_path):
    asked = []

    class Elsewhere(Launcher):
        name = "elsewhere"

        def run(self, cells):
            asked.append((self.jobs, len(cells)))
            yield from ()

    register_launcher(Elsewhere)
    try:
        work = prepare_comparison(PLAN, tmp_path / "out", cache=tmp_path / "cache")
        carry_out_comparison(work, cache=tmp_path / "cache", launcher="elsewhere")
    finally:
        LAUNCHERS._found.pop("elsewhere")
    assert asked == [(1, len(work.missing))]


def test_another_packages_launcher_carries_out_the_same_runs(alone, tmp_path):
    class InThisProcess(Launcher):
        name = "one-by-one"
        Settings = Tagged

        def run(self, cells):
            assert (self.jobs, self.settings.tag) == (2, "x")
            for cell in cells:
                yield self.outcome(cell, answer_to(self.job(cell, 1)))

    register_launcher(InThisProcess)
    try:
        plan = PLAN | {"methods": ["fedavg", BROKEN]}
        done, notes = carried(
            tmp_path / "a", tmp_path / "cache", "one-by-one", {"tag": "x"}, plan=plan
        )
    finally:
        LAUNCHERS._found.pop("one-by-one")
    assert sorted(notes.ends) == ["completed", "failed"]
    assert [outcome.cell.experiment.model.backbone for outcome in done.failures] == ["resnet18"]
    require_alike(alone, done, "fedavg")


@pytest.mark.parametrize(
    ("launcher", "options", "fault"),
    [
        ("slrum", {}, "launcher"),
        ("local", {"partition": "gpu"}, "'local': unknown field 'partition'; there are: reuse"),
        ("local", {"reuse": "perhaps"}, "'local': reuse: "),
        (
            "slurm",
            {"partitoin": "gpu"},
            "unknown field 'partitoin' (did you mean 'partition'?)",
        ),
        (
            "slurm",
            {"cluster": "local", "cpus": "many"},
            "cpus: Input should be a valid integer",
        ),
        ("slurm", {"cluster": "cloud"}, "'slurm': cluster: Input should be 'slurm' or 'local'"),
        (
            "slurm",
            {"cluster": "local", "gpus": "-1"},
            "gpus: Input should be greater",
        ),
    ],
)
def test_what_no_launcher_can_do_is_said_in_one_line(tmp_path, launcher, options, fault):
    with pytest.raises(ExperimentError, match=re.escape(fault)) as caught:
        carried(tmp_path / "out", tmp_path / "cache", launcher, options)
    assert "\n" not in str(caught.value)


def test_one_process_carries_out_several_runs_and_goes_on_after_one_that_failed(alone, tmp_path):
    plan = PLAN | {"methods": [BROKEN, "fedavg", "fedprox"]}
    work, notes = prepare_comparison(plan, tmp_path / "a", cache=tmp_path / "cache"), Notes()
    done = carry_out_comparison(
        work, jobs=1, cache=tmp_path / "cache", watcher=notes, launcher_options={"reuse": "yes"}
    )
    assert notes.ends == ["failed", "completed", "completed"]
    assert "/nowhere.pth" in done.failures[0].error
    assert [log.name for log in (tmp_path / "a" / "logs").iterdir()] == ["process1.log"]
    require_alike(alone, work)


GONE = """Job 77_0 (task: 0) with path logs/jobs/77_0_0_result.pkl
has not produced any output (state: OUT_OF_MEMORY)
Error stream produced:
----------------------------------------
slurmstepd: error: Detected 1 oom_kill event
"""
RAISED = """Job (task=0) failed during processing with trace:
----------------------
Traceback (most recent call last):
  File "submission.py", line 55, in process_job
ModuleNotFoundError: No module named 'feddg'

----------------------
You can check full logs with 'job.stderr(0)' and 'job.stdout(0)'or at paths:
  - logs/jobs/77_0_0_log.err
"""


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (GONE, "OUT_OF_MEMORY"),
        (RAISED, "ModuleNotFoundError: No module named 'feddg'"),
        ("Cannot read it.", "OSError: Cannot read it."),
    ],
)
def test_why_a_job_of_slurm_died_is_one_reason_for_all_jobs_that_died_so(said, reason):
    job = SimpleNamespace(exception=lambda: OSError(said), paths=SimpleNamespace(folder="logs"))
    text = f"its job ended without a result ({reason}); see the logs in logs"
    assert pool._answer(job) == {"ended": "failed", "error": text}


def test_a_submission_that_slurm_refuses_is_said_in_one_line(tmp_path, monkeypatch):
    class Executor:
        def __init__(self, *args, **more):
            self.update_parameters = lambda **fields: None

        def map_array(self, job, lines):
            raise RuntimeError("sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: failed")

    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(AutoExecutor=Executor))
    monkeypatch.setattr(pool, "need", lambda *args: None)
    fault = "^launcher 'slurm': sbatch: error: QOSMaxSubmitJobPerUserLimit sbatch: error: failed$"
    with pytest.raises(ExperimentError, match=fault):
        carried(tmp_path / "out", tmp_path / "cache", "slurm")


def test_a_comparison_without_any_result_gives_its_reasons(tmp_path):
    work = prepare_comparison(PLAN, tmp_path / "out")
    work.outcomes[:] = [Outcome(cell, "failed", cell.method) for cell in work.cells]
    with pytest.raises(RunError, match=r": 1 of 2 runs .*: fedavg, 1 of 2 runs .*: fedprox$"):
        work.require_results()


@pytest.mark.slow
def test_jobs_of_submitit_make_the_same_runs(alone, tmp_path):
    pytest.importorskip("submitit", reason="needs the extra slurm")
    plan = PLAN | {"methods": ["fedavg", "fedprox", BROKEN]}
    done, notes = carried(
        tmp_path / "a", tmp_path / "cache", "slurm", {"cluster": "local"}, plan=plan
    )
    assert sorted(notes.ends) == ["completed", "completed", "failed"]
    assert "/nowhere.pth" in done.failures[0].error
    require_alike(alone, done)
    again, _ = carried(tmp_path / "a", tmp_path / "cache", "slurm", {"cluster": "local"})
    assert not again.outcomes


@pytest.mark.slow
def test_a_job_at_its_time_limit_is_queued_again_and_the_run_ends_whole(tmp_path):
    pytest.importorskip("submitit", reason="needs the extra slurm")
    train = {"rounds": 40, "local_steps": 1, "batch_size": 8}
    plan = PLAN | {"base": PLAN["base"] | {"train": train}, "methods": ["fedavg"]}
    work = prepare_comparison(plan, tmp_path / "a", cache=tmp_path / "cache")
    (cell,), jobs = work.missing, tmp_path / "a" / "logs" / "jobs"

    def reach_the_limit():
        while not (cell.folder / "checkpoint" / "checkpoint.json").exists():
            time.sleep(0.05)
        (controller,) = {int(file.name.split("_")[0]) for file in jobs.glob("*_log.out")}
        tasks = Path(f"/proc/{controller}/task/{controller}/children").read_text().split()
        os.kill(int(tasks[0]), signal.SIGUSR2)  # as Slurm does; 5 minutes are always over

    thread = threading.Thread(target=reach_the_limit)
    thread.start()
    options = {"cluster": "local", "minutes": "5"}
    done = carry_out_comparison(
        work, jobs=1, cache=tmp_path / "cache", launcher="slurm", launcher_options=options
    )
    thread.join()
    assert "this job is timed-out" in "".join(file.read_text() for file in jobs.glob("*_log.err"))
    assert not done.failures
    assert is_complete(cell.folder)
    alone, _ = carried(tmp_path / "alone", tmp_path / "cache", plan=plan)
    require_alike(alone, done, "fedavg")


def test_a_warning_of_every_run_of_a_comparison_is_said_once(monkeypatch, caplog):
    def carried_out(folder, experiment, **more):
        emit(Diagnostic("few", "warning", "Few images."), Diagnostic("own", "warning", folder))

    monkeypatch.setattr("feddg.comparison.pool.carry_out", carried_out)
    cells = [SimpleNamespace(folder=name, experiment=None) for name in ("first", "second")]
    assert [one.status for one in run_here(cells, Path(), Watcher())] == ["completed"] * 2
    assert [one.getMessage() for one in caplog.records] == ["Few images.", "first", "second"]
    emit(Diagnostic("few", "warning", "Few images."))
    assert caplog.records[-1].getMessage() == "Few images.", "of what comes after, too"
