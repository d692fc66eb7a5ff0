"""The unmodified ServerApp and ClientApp over an in-process grid: the same bits as in-process."""

import json

import pytest
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="Flower is an optional extra")

from flwr.app import Context, RecordDict

from feddg.errors import FeddgError, RunError
from feddg.experiment import Experiment
from feddg.federation.server import NotEnoughUpdates
from feddg.flower import client_app, server_app
from feddg.flower.server_app import coordinate
from feddg.runs.execute import run
from feddg.runs.folder import read_rows
from feddg.runs.records import read_run
from federations import same
from flower_grid import LocalGrid

SITES = ("ink", "chalk", "photo")
SMALL = {
    "data": {"source": "digits", "image_size": 16, "id_val": 0.0, "id_test": 0.0},
    "hold_out": "sketch",
    "clients": {"number": 3, "partition": "domain"},
    "train": {"rounds": 2, "local_epochs": 1, "batch_size": 64},
    "device": "cpu",
    "precision": "float32",
}


def experiment(**change) -> Experiment:
    return Experiment(**{**SMALL, **change})


class Deployment:
    """Three sites with one domain of digits each, and their coordinator."""

    def __init__(self, folder, chosen: Experiment, **config) -> None:
        self.folder, self.chosen = folder, chosen
        self.path = folder / "runs" / chosen.label
        self.config = {
            "experiment": chosen.to_yaml(),
            "sites": ",".join(SITES),
            "out": str(folder / "runs"),
            "test": "digits:sketch",
            "cache": str(folder / "coordinator"),
            "poll-seconds": 0.001,
            "wait-seconds": 0.01,
            **config,
        }
        nodes = {
            name: {"images": f"digits:{name}", "cache": str(folder / name), "device": "cpu"}
            for name in SITES
        }
        self.nodes = nodes
        self.grid = LocalGrid(client_app.app, nodes, self.config)

    def start(self):
        """Starts the ServerApp as Flower does."""
        server_app.app(self.grid, Context(1, 1, {}, RecordDict(), self.config))
        return self.weights()

    def weights(self):
        return weights(self.path)


def weights(path):
    index = json.loads((path / "checkpoint/checkpoint.json").read_text())
    tensors = load_file(path / "checkpoint" / index["state"])
    return {name: tensor for name, tensor in tensors.items() if name.startswith("weights/")}


@pytest.mark.parametrize("method", ["fedavg", "pardon", "fedbn"])
def test_flower_gives_the_bits_of_the_in_process_transport(method, tmp_path):
    chosen = experiment(method=method)
    expected = run(chosen, tmp_path / "in-process", cache=tmp_path / "cache", report=False)
    deployment = Deployment(tmp_path, chosen)
    assert same(deployment.start(), weights(expected.folder))
    found, plain = read_run(deployment.path), expected.record
    assert found.status == "completed"
    both = [record.evaluations.get(2, "test", "sketch") for record in (found, plain)]
    assert both[0] == both[1]
    assert (deployment.path / "report.html").is_file()
    # The ledger tells what crossed: the same messages, and the introductions before them.
    rows = [read_rows(path / "ledger.jsonl") for path in (deployment.path, expected.folder)]
    sent = [[row for row in part if row["kind"] == "message"] for part in rows]
    assert [row for row in sent[0] if row["purpose"] != "introduce"] == sent[1]
    assert sum(row["purpose"] == "introduce" for row in sent[0]) == 3
