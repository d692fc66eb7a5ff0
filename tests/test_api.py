"""One function for each command: the lines that work."""

import webbrowser

import pytest
from PIL import Image

import feddg
from feddg.errors import WeightsError
from feddg.methods import Pardon
from feddg.runs import beforehand
from federations import same

SMALL = {"image_size": 8, "clients": 3, "local_steps": 1, "batch_size": 8}


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """An empty folder, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path / "cache"))


def test_a_run_of_fields_has_its_accuracy_table_model_and_page(monkeypatch, tmp_path):
    result = feddg.run(method="pardon", data="digits", hold_out="sketch", rounds=2, **SMALL)
    record = result
    served = ("accuracy", record.default_rule.name, "test", "domain_mean", "")
    (summed,) = [one.value for one in record.summary.numbers if one.of == served]
    assert result.accuracy == summed
    table = result.frame()
    row = table.query("round == 2 and split == 'test' and metric == 'accuracy' and weights=='last'")
    assert row["domain"].tolist() == ["sketch"]
    assert row["value"].tolist() == [result.accuracy]
    Image.new("RGB", (20, 20)).save(tmp_path / "new.png")
    (found,) = result.model.predict(tmp_path / "new.png")
    assert found.label in result.model.class_names
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    result.open()
    assert opened == [result.report.resolve().as_uri()]
    again = feddg.run(result.experiment, rounds=2)
    assert (again.folder, again.was_complete) == (result.folder, True)


def test_methods_are_compared_by_their_names_and_the_fields_of_a_plan():
    done = feddg.compare(
        ["fedavg", Pardon.name], data="digits", hold_out=["ink"], seeds=1, rounds=1, **SMALL
    )
    assert {cell.method for cell in done.cells} == {"fedavg", "pardon"}
    assert all(cell.experiment.train.rounds == 1 for cell in done.cells)
    assert set(done.frame()["method"]) == {"fedavg", "pardon"}
    seventh = feddg.compare(["fedavg"], data="digits", hold_out="ink", seed=7, dry_run=True)
    assert [cell.seed for cell in seventh.cells] == [7]
    assert seventh.missing


def test_the_same_experiment_without_network_and_weights_is_the_same_run(monkeypatch, tmp_path):
    def offline(backbone, weights):
        raise WeightsError(f"cannot download ImageNet weights for {backbone!r}")

    monkeypatch.setattr(beforehand, "require_weights", offline)
    for number, (domain, label) in enumerate((d, c) for d in "ab" for c in ("one", "two")):
        folder = tmp_path / "images" / domain / label
        folder.mkdir(parents=True)
        for i in range(6):
            Image.new("RGB", (16, 16), (40 * number, 20 * i, 99)).save(folder / f"{i}.png")
    said = {"root": tmp_path / "images", "hold_out": "b", "image_size": 16, "rounds": 1}
    made = feddg.run(feddg.Experiment(**said), tmp_path / "made", clients=2)
    fields = feddg.run(out=tmp_path / "fields", clients=2, **said)
    from typer.testing import CliRunner

    from feddg.cli import app

    flags = ["--root", "images", "--hold-out", "b", "--image-size", "16", "--rounds", "1"]
    shell = CliRunner().invoke(app, ["run", *flags, "--clients", "2", "--out", "shell", "-q"])
    assert shell.exit_code == 0, shell.output
    (folder,) = (tmp_path / "shell").iterdir()
    assert folder.name == made.folder.name == fields.folder.name
    assert made.experiment.model.weights is None
    weights = [feddg.load_model(one).state_dict() for one in (folder, made.folder, fields.folder)]
    assert same(weights[0], weights[1])
    assert same(weights[1], weights[2])
