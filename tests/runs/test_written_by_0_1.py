"""A run folder that version 0.1 wrote: PARDON on digits, two rounds, two adaptations."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from feddg.api import resume, run
from feddg.experiment import load_experiment
from feddg.report import write_report
from feddg.rows import client_name
from feddg.runs.adapted import read_adapted
from feddg.runs.model import load_model
from feddg.runs.reading import read_run

WRITTEN = Path(__file__).parent / "written_by_0_1"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy to work on, under the name that its experiment gives it."""
    return Path(
        shutil.copytree(WRITTEN, tmp_path / load_experiment(WRITTEN / "experiment.yaml").label)
    )


def whole(name: str) -> dict:
    """A JSON file as it stands there."""
    return json.loads((WRITTEN / name).read_text())


def lines(name: str, kind: str | None = None) -> list[dict]:
    """The rows of a file as they stand there."""
    rows = [json.loads(line) for line in (WRITTEN / name).read_text().splitlines()]
    return [row for row in rows if kind in (None, row.get("kind"))]


def holds(new: object, old: object) -> bool:
    """Whether all that stood in an old file stands in the new one, which may say more."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() <= new.keys() and all(holds(new[key], old[key]) for key in old)
    return new == old


def test_every_row_is_read_in_full():
    record = read_run(WRITTEN)
    parts = {
        "round": record.metrics.rounds,
        "evaluation": record.metrics.evaluations,
        "message": record.ledger.messages,
        "layout": list(record.ledger.layouts.values()),
    }
    files = {"round": "metrics", "evaluation": "metrics", "message": "ledger", "layout": "ledger"}
    for kind, rows in parts.items():
        found = [json.loads(row.to_json()) for row in rows]
        younger = {"weights": "last", "metrics": {}, "passes": 0}
        found = [{k: v for k, v in row.items() if younger.get(k) != v} for row in found]
        assert found == lines(f"{files[kind]}.jsonl", kind), kind
        assert found
    adapted = [row.model_dump(exclude={"which"}) for row in read_adapted(WRITTEN)]
    assert {row.which for row in read_adapted(WRITTEN)} == {"final"}
    assert {row.weights for row in record.metrics.evaluations} == {"last"}
    assert adapted == lines("adaptation.jsonl")
    (setup,) = lines("metrics.jsonl", "setup")
    assert record.metrics.setup.seconds == setup["seconds"]
    assert record.metrics.setup.groups == {}
    assert sum(len(rows) for rows in parts.values()) + 1 == len(
        lines("metrics.jsonl") + lines("ledger.jsonl")
    )


def test_the_whole_files_are_read_in_full():
    record = read_run(WRITTEN)
    assert json.loads(record.clients.to_text()) == json.loads(
        (WRITTEN / "clients.json").read_text()
    )
    assert json.loads(record.summary.to_text()) == json.loads(
        (WRITTEN / "summary.json").read_text()
    )
    assert record.clients.clients[1].name == "client 1"  # as it was called then
    assert client_name(1) == "client-1"
    assert record.summary["final"]["test"]["accuracy"] == record.evaluations.accuracy(2, "test")
    assert (record.status, record.rounds_done, record.method) == ("completed", 2, "pardon")
    assert record.environment["feddg"] == "0.1.0"
    assert [path.name for path, _ in record.pictures()] == ["styles.png"]


def test_a_page_is_written_from_it(folder):
    page = write_report([folder], folder / "report.html").read_text()
    accuracy = lines("metrics.jsonl", "evaluation")[-6]["accuracy"]
    assert f"{100 * accuracy:.1f}" in page
    for words in ("PARDON", "What left the sites", "client 2", "iabn", "completed, 2 rounds"):
        assert words in page, words


def test_its_model_can_be_used(folder):
    model = load_model(folder)
    assert model.class_names == tuple("0123456789")
    state = load_file(folder / "checkpoint" / "state-2.safetensors")
    weights = state["weights/classifier.weight"]
    assert any(torch.equal(own, weights) for own in model.state_dict().values())
    assert model(torch.rand(2, 3, 16, 16)).shape == (2, 10)


def test_it_is_complete_and_is_not_run_again(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("feddg.runs.prepared.load_images", lambda *_: pytest.fail("ran again"))
    before = {path: path.read_bytes() for path in folder.glob("*.json*")}
    again = run(load_experiment(folder / "experiment.yaml"), tmp_path)
    assert again.folder == folder
    assert resume(folder).record.status == "completed"
    assert {path: path.read_bytes() for path in folder.glob("*.json*")} == before


def test_it_is_gone_on_with_where_it_stopped(folder, tmp_path):
    (folder / "summary.json").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "round", "round": 3, "clients": [0], "terms": {"a": NaN}}\n{"kind"')
    done = resume(folder, cache=tmp_path / "cache")
    assert done.record.status == "completed"
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert [json.loads(line) for line in (folder / name).read_text().splitlines()] == lines(
            name
        )
    before = whole("summary.json")
    for rule in ("final", "best_by_id_val", "best_by_val", "bytes", "rounds"):
        assert holds(done.record.summary[rule], before[rule]), rule
