"""`compare` runs what is missing, once; it survives failing runs, interruptions and kills."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner

from feddg.api import compare
from feddg.cli import app, main
from feddg.clients.threads import threads
from feddg.comparison import compare as compare_module
from feddg.comparison.compare import prepare_comparison, why_hopeless
from feddg.comparison.pool import ROUNDS, Watcher
from feddg.errors import ExperimentError, FeddgError, RunError
from feddg.methods.base import METHODS
from feddg.prediction.model import load_model
from feddg.report.page import write_comparison
from feddg.runs.beforehand import forecast
from feddg.runs.folder import kept_weights
from feddg.runs.processes import threads_per_job
from feddg.runs.reading import read_rows, read_run
from feddg.runs.table import FINAL
from published_trees import pacs

BASE = {
    "data": {"source": "digits", "image_size": 8},
    "clients": {"number": 3},
    "train": {"rounds": 2, "local_steps": 2, "batch_size": 32},
    "evaluate": {"averages": "never"},
}
BROKEN = {
    "label": "broken",
    "name": "fedavg",
    "experiment": {"model": {"backbone": "resnet18", "weights": "/nowhere.pth"}},
}
PLAN = {"name": "mine", "base": BASE, "methods": ["fedavg", "fedprox"], "hold_out": ["sketch"]}


class Notes(Watcher):
    """Writes down what it is told; interrupts when it hears of a round of ``stop_at``."""

    def __init__(self, stop_at=None):
        self.stop_at, self.ends, self.counts, self.rounds = stop_at, [], None, []

    def start(self, total, done):
        self.counts = (total, done)

    def news(self, folder, facts):
        if facts["what"] == ROUNDS:
            self.rounds.append((folder.name.split("-")[0], facts["done"]))
            if self.rounds[-1] == self.stop_at:
                raise KeyboardInterrupt

    def ended(self, outcome):
        self.ends.append((outcome.cell.experiment.method.name, outcome.status))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Both runs of the plan, complete; whoever changes something takes a copy."""
    folder = tmp_path_factory.mktemp("trained")
    return compare(PLAN, folder / "out", cache=folder / "cache", report=False)


@pytest.fixture
def run_plan(tmp_path):
    def run(plan=PLAN, jobs=0, watcher=None, **more):
        notes = watcher or Notes()
        done = compare(
            plan,
            tmp_path / "out",
            jobs=jobs,
            cache=tmp_path / "cache",
            watcher=notes,
            report=False,
            **more,
        )
        return done, notes

    return run


def test_a_folder_of_the_wrong_size_is_named_once_for_the_whole_plan(tmp_path, caplog):
    root = pacs(tmp_path / "pacs")
    fields = {"data": "pacs", "root": str(root), "hold_out": "lodo", "budgets": [30]}
    done = compare(["fedavg", "irm"], out=tmp_path / "out", dry_run=True, **fields)
    assert len(done.missing) == 8
    said = [r.getMessage() for r in caplog.records if "PACS has" in r.getMessage()]
    assert len(said) == len(set(said)) == 4  # one for each domain


def contents(folder):
    return {
        path.relative_to(folder): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("metrics.jsonl")
    }


def test_an_interrupted_comparison_goes_on_and_runs_nothing_twice(run_plan, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_plan(watcher=Notes(stop_at=("fedprox", 1.0)))
    before = contents(tmp_path / "out")
    done, notes = run_plan()
    assert notes.counts == (2, 1)
    assert notes.ends == [("fedprox", "completed")]
    assert "fedavg" not in [method for method, _ in notes.rounds]
    (fedavg,) = (path for path in before if "fedavg" in str(path))
    assert contents(tmp_path / "out")[fedavg] == before[fedavg]
    for folder in done.folders:
        rounds = [r["round"] for r in read_rows(folder / "rounds.jsonl") if r["kind"] == "round"]
        assert rounds == [1, 2]
    again, notes = run_plan()
    assert (notes.counts, notes.ends, again.outcomes) == ((2, 2), [], [])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"methods": [BROKEN, "fedprox"]}, "/nowhere.pth does not exist"),
        ({"methods": ["fedavg"], "hold_out": ["scetch", "sketch"]}, "no domain 'scetch'"),
    ],
)
def test_a_failing_run_stops_nobody_and_is_tried_again(run_plan, changes, reason):
    plan = PLAN | changes
    done, notes = run_plan(plan)
    assert [status for _, status in notes.ends] == ["failed", "completed"]
    assert reason in done.failures[0].error
    done, notes = run_plan(plan)
    assert notes.counts == (2, 1)
    assert len(done.failures) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"data": {"source": "folder", "root": "/nowhere"}}, "/nowhere does not exist"),
        ({"model": {"backbone": "resnet18", "weights": "/nowhere.pth"}}, "nowhere.pth does not"),
        ({"hold_out": ["scetch", "inc"]}, "no domain 'scetch'"),
        ({"methods": [{"name": "pardon", "codec": "vgg19"}]}, "codec 'vgg19' needs"),
    ],
)
def test_what_would_end_every_run_is_said_once_and_nothing_is_begun(
    run_plan, tmp_path, change, reason
):
    of_plan = {key: change.pop(key) for key in ("hold_out", "methods") if key in change}
    plan = PLAN | of_plan | {"base": BASE | change}
    with pytest.raises(FeddgError, match=reason) as raised:
        run_plan(plan, jobs=2)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    arguments = ["compare", f"{tmp_path / 'plan.yaml'}", "--out", f"{tmp_path / 'out'}"]
    result = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert result.exit_code == 0
    assert re.search(f"as things are, no run could start: .*{reason}", result.output)
    assert not (tmp_path / "out").exists()


CRASHING = """
import torch
from feddg.methods.base import Method
from feddg.methods.base import register

class Penalty(torch.nn.Module):
    def forward(self, images):
        raise RuntimeError("sizes 3 and 4\\n  do not match")

@register
class Crashing(Method):
    name = "crashing"

    def loss(self, client, batch):
        return super().loss(client, batch) | {"penalty": Penalty()(batch.images)}
"""
"""A user's method whose loss raises in its line 8, below torch."""


@pytest.fixture
def crashing(tmp_path, monkeypatch):
    """Installs the method; returns where it crashes, as it is to be said."""
    site = tmp_path / "site"
    (site / "theirs-1.0.dist-info").mkdir(parents=True)
    (site / "theirs_feddg.py").write_text(CRASHING)
    (site / "theirs-1.0.dist-info/METADATA").write_text("Name: theirs\nVersion: 1.0\n")
    entry = "[feddg.methods]\ncrashing = theirs_feddg:Crashing\n"
    (site / "theirs-1.0.dist-info/entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "theirs_feddg", raising=False)
    importlib.import_module("theirs_feddg")
    place = f"{site / 'theirs_feddg.py'}, line 8, in forward"
    yield f"RuntimeError: sizes 3 and 4 do not match ({place})"
    METHODS._found.pop("crashing", None)


def test_a_method_that_crashes_beside_others_is_named(run_plan, crashing, caplog):
    done, notes = run_plan(PLAN | {"methods": ["crashing", "fedavg"]})
    assert sorted(notes.ends) == [("crashing", "failed"), ("fedavg", "completed")]
    assert done.failures[0].error == crashing
    (warning,) = [one.getMessage() for one in caplog.records if "runs failed" in one.getMessage()]
    assert warning == f"1 of 2 runs failed ({done.failures[0].cell.folder.name}): {crashing}"


@pytest.mark.usefixtures("runs_here")
def test_the_command_line_says_where_a_method_crashed(crashing, tmp_path, monkeypatch, capsys):
    plan, out = tmp_path / "plan.yaml", tmp_path / "out"
    plan.write_text(yaml.safe_dump(PLAN | {"methods": ["crashing"]}))
    command = ["feddg", "compare", str(plan), "--out", str(out), "-q"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    found = capsys.readouterr()
    (line,) = [line for line in found.err.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: nothing to compare in {out}: 1 of 1 runs failed (")
    assert line.endswith(crashing)
    (summary,) = out.glob("*/summary.json")
    assert crashing in json.loads(summary.read_text())["error"]
    assert "accuracy" not in found.out
    assert (out / "report.html").is_file()


def test_weights_that_are_missing_or_do_not_fit_are_looked_for_once(tmp_path, monkeypatch):
    looked = []
    monkeypatch.setattr(
        compare_module,
        "forecast",
        lambda one, cache: looked.append(one) or forecast(one, cache),
    )
    other = tmp_path / "other.safetensors"
    save_file({"another.network": torch.zeros(1)}, other)
    for number, (file, fault) in enumerate(
        (("/nowhere.pth", "/nowhere.pth does not exist"), (str(other), "another.network"))
    ):
        looked.clear()
        fields = {"model": {"weights": file}}
        methods = [{"name": name, "experiment": fields} for name in ("fedavg", "fedprox", "pardon")]
        work = prepare_comparison(PLAN | {"methods": methods}, tmp_path / f"out{number}")
        assert fault in str(why_hopeless(work))
        assert len(looked) == 1
        work = prepare_comparison(
            PLAN | {"methods": [*methods, "mixstyle"]}, tmp_path / f"out{number}"
        )
        assert why_hopeless(work) is None  # the last one has no need of them
        assert len(looked) == 3


def test_a_plan_with_one_data_set_that_is_not_there_starts_nothing(tmp_path):
    plan = PLAN | {"data": ["emoji", {"name": "mine", "source": "folder", "root": "nowhere"}]}
    plan |= {"base": {k: v for k, v in PLAN["base"].items() if k != "data"}, "hold_out": "lodo"}
    plan["data"][1]["hold_out"] = ["a"]
    work = prepare_comparison(plan, tmp_path / "out")
    with pytest.raises(FeddgError, match="nowhere"):
        compare_module.carry_out_comparison(work)
    assert not [*(tmp_path / "out").glob("*/metrics.jsonl")]


def test_threads_are_shared_out(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("feddg.runs.processes.available_cores", lambda: 8)
    assert [threads_per_job(jobs) for jobs in (1, 3, 8, 20)] == [8, 2, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads_per_job(2) == 1


def test_processes_give_the_same_numbers_and_say_where_one_crashed(run_plan, crashing, tmp_path):
    plan = PLAN | {"methods": ["crashing", "fedavg"]}
    done, notes = run_plan(plan, jobs=2)
    assert sorted(notes.ends) == [("crashing", "failed"), ("fedavg", "completed")]
    assert done.failures[0].error == crashing
    # Sums over another number of threads round differently.
    with threads(threads_per_job(2)):
        here = compare(plan, tmp_path / "here", cache=tmp_path / "cache", report=False)
    found = [
        [*read_run(out.folder / name).frame().query("metric == 'accuracy'")["value"]]
        for out in (done, here)
        for name in (out.missing[1].folder.name,)
    ]
    assert found[0] == pytest.approx(found[1])


# --- the command line, killed ---------------------------------------------------------------------


def start(plan, out, tmp_path, *flags):
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(plan))
    return subprocess.Popen(
        [sys.executable, "-m", "feddg", "compare", str(file), "--out", str(out), *flags],
        env=os.environ | {"FEDDG_CACHE": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Tests that run in the background would hand on that Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def wait_for(condition, process, seconds=900):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def begun(out):
    """Folders of runs with a completed round."""
    folders = [path.parent for path in out.glob("*/metrics.jsonl")]
    return [folder for folder in folders if read_run(folder).rounds_done > 0]


LONG = PLAN | {"base": BASE | {"train": BASE["train"] | {"rounds": 60}}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_comparison_ends_its_processes_and_goes_on(tmp_path, kind):
    out = tmp_path / "out"
    process = start(LONG, out, tmp_path, "--jobs", "2")
    wait_for(lambda: len(begun(out)) == 2, process)
    process.send_signal(kind)
    shown, _ = process.communicate(timeout=900)
    if kind == signal.SIGINT:
        assert process.returncode == 130, shown
        assert "the same command goes on" in shown
    folders = [path.parent for path in out.glob("*/experiment.yaml")]
    deadline = time.monotonic() + 900
    while any(read_run(folder).summary is None for folder in folders):
        assert time.monotonic() < deadline, "a process outlived its comparison"
        time.sleep(0.1)
    done = [read_run(folder).rounds_done for folder in folders]
    assert all(0 < rounds < 60 for rounds in done)
    process = start(LONG, out, tmp_path, "--jobs", "2")
    shown, _ = process.communicate(timeout=900)
    assert process.returncode == 0, shown
    assert "2 to continue" in shown
    for folder in folders:
        rounds = [r["round"] for r in read_rows(folder / "rounds.jsonl") if r["kind"] == "round"]
        assert rounds == list(range(1, 61))
    assert (out / "report.html").is_file()


@pytest.mark.slow
def test_a_process_that_dies_is_a_failed_run(tmp_path):
    out = tmp_path / "out"
    process = start(LONG, out, tmp_path)
    wait_for(lambda: begun(out), process)
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "feddg.comparison.pool"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    os.kill(int(children[0]), signal.SIGKILL)
    shown, _ = process.communicate(timeout=900)
    assert process.returncode == 1
    assert "its process was killed, perhaps for want of memory" in shown
    assert "runs: 1 of 2" in shown


def test_weights_that_are_dropped_leave_every_number(trained, run_plan, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(trained.folder, out)
    assert list(out.rglob("*.safetensors"))
    before, numbers = contents(out), [read_run(folder).summary for folder in out.glob("fed*")]
    done, notes = run_plan(drop_weights=True)
    assert notes.ends == []  # nothing is run again
    assert not list(out.rglob("*.safetensors"))
    assert contents(out) == before
    assert [read_run(folder).summary for folder in out.glob("fed*")] == numbers
    page = write_comparison(out).read_text()
    assert "FedProx" in page
    assert "left out" not in page
    for read in (load_model, lambda folder: kept_weights(folder, FINAL)):
        with pytest.raises(RunError, match=r"keeps no weights.*--drop-weights.*experiment\.yaml"):
            read(done.cells[0].folder)
    assert run_plan(drop_weights=True)[1].counts == (2, 2)


def test_predictions_need_the_weights_that_would_be_dropped(tmp_path):
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(PLAN))
    command = ["compare", str(tmp_path / "plan.yaml"), "--drop-weights", "--predictions"]
    shown = CliRunner().invoke(app, command)
    assert isinstance(shown.exception, ExperimentError)
    assert "--predictions needs the weights" in str(shown.exception)
