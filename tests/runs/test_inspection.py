"""The picture of who holds what."""

import io

import numpy
from rich.console import Console

import published_trees
from feddg.diagnostics import silent
from feddg.experiment import Experiment
from feddg.records import ClientRow, ClientsTable
from feddg.runs.inspection import (
    MOST_MARKS,
    client_data_table,
    inspect_data,
    inspect_experiment,
)


def shown(clients: ClientsTable) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(client_data_table(clients))
    return console.export_text()


def test_marks_say_which_share_of_a_client_is_of_which_domain_and_class():
    clients = [
        ClientRow(id=0, domains=[8, 0, 0], classes=[4, 4]),
        ClientRow(id=1, domains=[1, 0, 3], classes=[0, 4]),
        ClientRow(id=2, domains=[0, 0, 0], classes=[0, 0]),
    ]
    lines = shown(ClientsTable(domains=["a", "none", "[b]"], classes=["x", "y"], clients=clients))
    assert "domains (2)" in lines, "a domain that nobody holds is left out"
    rows = [[cell.strip() for cell in line.split("│")] for line in lines.splitlines()]
    found = {row[1]: row[2:6] for row in rows if len(row) > 5}
    assert found["client-0"] == ["8", "a 100%", "█", "▒▒"]
    assert found["client-1"] == ["4", "[b] 75%", "░▓", "█"]
    assert found["client-2"] == ["0", "-", "", ""]


def test_thousands_of_clients_and_hundreds_of_domains_stay_one_screen():
    random = numpy.random.default_rng(0)
    clients = [
        ClientRow(id=id, domains=random.integers(0, 3, 300).tolist(), classes=[1, 1])
        for id in range(1000)
    ]
    text = shown(ClientsTable(domains=list("d" * 300), classes=["x", "y"], clients=clients))
    assert len(text.splitlines()) < 30
    assert "client-999" in text
    assert max(map(len, text.splitlines())) < 80 + MOST_MARKS


def test_groups_on_both_sides_are_named_before_a_run(tmp_path):
    rows = [f"{'xy'[n % 2]},{'abc'[n % 3]},P{n // 4},{n}.5,{n * 7 % 11}.25" for n in range(48)]
    (tmp_path / "t.csv").write_text("\n".join(["label,domain,group,f0,f1", *rows]))
    data = {"source": "features", "root": tmp_path / "t.csv"}
    found = inspect_experiment(Experiment(data=data, hold_out="c", clients=2), silent)
    assert "groups-on-both-sides" in {one["code"] for one in found["diagnostics"]}


def test_a_loader_that_warns_is_heard_once(tmp_path, caplog):
    data = {"source": "vlcs", "root": published_trees.vlcs_folders(tmp_path), "image_size": 8}
    inspect_data(tmp_path / "c.json", data=data, hold_out="SUN09", clients=2)
    said = [record.getMessage() for record in caplog.records]
    assert any("VLCS has" in text for text in said)
    assert len(said) == len({*said})
