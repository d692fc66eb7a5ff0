"""`feddg deploy` from the command line."""

import tomllib

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra")

import pytest
from typer.testing import CliRunner

from feddg.cli import app
from feddg.deploy.site import read_experiment


def test_deploy_init_from_the_command_line(tmp_path):

    (tmp_path / "e.yaml").write_text("{data: digits, method: pardon, hold_out: sketch}")
    arguments = ["--experiment", str(tmp_path / "e.yaml"), "--site", "ink", "--site", "photo"]
    done = CliRunner().invoke(app, ["deploy", "init", str(tmp_path / "app"), *arguments])
    assert done.exit_code == 0, done.output
    project = tomllib.loads((tmp_path / "app/pyproject.toml").read_text())
    experiment = read_experiment(project["tool"]["flwr"]["app"]["config"])
    assert experiment.method.name == "pardon"
    assert (experiment.clients.number, experiment.clients.partition) == (2, "domain")
    assert experiment.data.id_val == experiment.data.id_test == 0
