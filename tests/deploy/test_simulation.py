"""Simulated nodes over the in-process grid, and where Ray is installed over Flower's simulation."""

import csv
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra")

from feddg.api import run
from feddg.clients.threads import threads
from feddg.deploy.simulation import (
    SimulatedApp,
    coordinate,
    number_of_nodes,
    simulate,
)
from feddg.errors import FeddgError
from feddg.runs.reading import read_rows, read_run
from federations import same
from flower_grid import LocalGrid, experiment, ledger, weights
from published_trees import image


def five_clients(method):
    # Mixed domains, sampling and in-domain validation: what deployments do not have.
    return experiment(
        method=method,
        data={"source": "digits", "image_size": 16, "id_val": 0.1},
        clients={"number": 5, "per_round": 3, "heterogeneity": 0.5},
        train={"rounds": 2, "local_steps": 3, "batch_size": 16},
    )


HELD = {"north-1": 4, "north-2": 4, "south-1": 6, "south-2": 1, "west-1": 2, "west-2": 2}
"""Images of each class by patient; the one of south-2 is of one class."""


def natural_clients(folder: Path, method: str):
    """An experiment whose clients are who holds the images: one holds a single image."""
    rows = []
    for patient, each in HELD.items():
        for label in ("healthy", "ill")[: 1 if each == 1 else 2]:
            for number in range(each):
                path = f"scans/{patient}-{label}-{number}.png"
                image(folder / "images" / path)
                rows.append((path, label, patient.partition("-")[0], patient))
    with (folder / "images/table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "domain", "client"), *rows])
    return experiment(
        method=method,
        data={"source": "table", "root": folder / "images", "image_size": 16},
        model={"backbone": "cnn", "weights": None},
        hold_out="west",
        clients={"partition": "client"},
        train={"rounds": 2, "local_steps": 2, "batch_size": 4},
    )


@pytest.mark.parametrize("method", ["fedavg", "pardon"])
def test_simulated_nodes_hold_what_natural_clients_hold(method, tmp_path):
    chosen = natural_clients(tmp_path, method)
    expected = run(chosen, tmp_path / "in-process", cache=tmp_path / "cache", report=False)
    assert number_of_nodes(chosen, tmp_path / "cache") == 4, "of west nobody trains"
    nodes = {f"client-{id}": {"partition-id": id} for id in range(4)}
    grid = LocalGrid(SimulatedApp(chosen, tmp_path / "cache"), nodes, {})
    found = coordinate(grid, chosen, tmp_path / "runs", tmp_path / "cache")
    assert same(weights(found.folder), weights(expected.folder))
    tables = [read_run(done.folder).clients.clients for done in (found, expected)]
    assert tables[0] == tables[1]
    sizes = [sum(client.domains) for client in tables[0]]
    assert sizes == [7, 7, 10, 1], "by name; one image of a domain and class validates, one tests"


@pytest.mark.parametrize("method", ["pardon", "fedbn"])
def test_simulated_nodes_give_the_bits_of_the_in_process_run(method, tmp_path):
    chosen = five_clients(method)
    expected = run(chosen, tmp_path / "in-process", cache=tmp_path / "cache", report=False)
    nodes = {f"client-{id}": {"partition-id": id} for id in range(5)}
    grid = LocalGrid(SimulatedApp(chosen, tmp_path / "cache"), nodes, {})
    found = coordinate(grid, chosen, tmp_path / "runs", tmp_path / "cache")
    assert same(weights(found.folder), weights(expected.folder))
    crossed, entered = (ledger(done.folder) for done in (found, expected))
    asked = sorted(entry for entry in entered if entry[3] != "context")
    assert sorted(entry for entry in crossed if entry[3] != "register") == asked
    accuracies = [
        [row["accuracy"] for row in read_rows(done.folder / "metrics.jsonl") if "accuracy" in row]
        for done in (found, expected)
    ]
    assert accuracies[0] == accuracies[1]


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_remedy_is_named(tmp_path):
    with pytest.raises(FeddgError, match=r"pip install 'flwr\[simulation\]'"):
        simulate(five_clients("fedavg"), tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of Flower and Ray
@pytest.mark.skipif(find_spec("ray") is None, reason="needs flwr[simulation]")
@pytest.mark.parametrize("natural", [False, True])
def test_ray_gives_the_bits_of_the_in_process_run(natural, tmp_path):
    chosen = natural_clients(tmp_path, "fedavg") if natural else five_clients("fedbn")
    # Ray gives every actor one thread per core, here one; sums over two differ in the last bit.
    with threads(1):
        expected = run(chosen, tmp_path / "in-process", cache=tmp_path / "cache", report=False)
    found = simulate(chosen, tmp_path / "runs", cache=tmp_path / "cache")
    assert same(weights(found.folder), weights(expected.folder))
