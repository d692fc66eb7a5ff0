"""The container of the server: nobody's root, nothing to write to, reached from this machine."""

from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from feddg.cli import app

FOLDER = Path(__file__).parents[2] / "containers" / "serve"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the containers are in the checkout")


def test_the_service_has_no_more_rights_than_it_needs():
    (service,) = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"].values()
    assert service["user"] == "1000:1000"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert all(volume.endswith(":ro") for volume in service["volumes"])
    assert (
        (FOLDER / service["build"]["context"] / service["build"]["dockerfile"]).resolve().is_file()
    )


def test_the_image_starts_a_command_that_there_is_without_root():
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    assert "USER 1000:1000" in lines
    start = next(line for line in lines if line.startswith("ENTRYPOINT"))
    assert lines.index("USER 1000:1000") < lines.index(start)
    program, name, *words = yaml.safe_load(start.removeprefix("ENTRYPOINT"))
    assert (program, name) == ("feddg", "serve")
    given = get_command(app).get_command(None, "serve").make_context("serve", words).params
    assert given["option_host"] == "0.0.0.0"
    assert given["option_allow_network"]
