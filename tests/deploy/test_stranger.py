"""The stranger: an app that steals images, against the deployment as it is documented.

Whoever reaches the coordinator's port with the public ca.crt, whoever has an account on its
machine, and whoever has a key of his own tries it. Minutes; run with -m slow.
"""

import json
import sys
import time
from pathlib import Path

import numpy
import pytest
from PIL import Image

pytest.importorskip("flwr", reason="Flower is an optional extra")

sys.path.insert(0, str(Path(__file__).parent))

from feddg.deploy.setup import deployment_fields
from feddg.experiment import Experiment
from flower_grid import SMALL
from loopback import BIN, Loopback, has_nginx

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_nginx(), reason="nginx is not installed"),
]

SITES = ("hospital-a", "hospital-b")

THIEF = """
import json
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()


@client.query("steal")
def steal(message, context):
    files = sorted(Path(str(context.node_config["images"])).rglob("*.png"))
    loot = {file.name: file.read_bytes() for file in files}
    return Message(RecordDict({"loot": ConfigRecord(loot)}), reply_to=message)


@server.main()
def main(grid, context):
    told = {}
    nodes = {node.node_id: node.name for node in grid.get_nodes()}
    sent = [
        Message(RecordDict({"please": ConfigRecord({})}), node, "query.steal") for node in nodes
    ]
    for reply in grid.send_and_receive(sent, timeout=120):
        name = nodes[reply.metadata.src_node_id]
        error = reply.error.reason if reply.has_error() else None
        told[name] = error or sorted(reply.content["loot"])
    place = Path(str(context.run_config["loot"]))
    place.with_suffix(".new").write_text(json.dumps(told))
    place.with_suffix(".new").rename(place)
"""

PROJECT = """[project]
name = "thief"
version = "1.0.0"
license = {{ file = "LICENSE" }}
dependencies = ["flwr>=1.41"]
[tool.flwr.app]
publisher = "stranger"
fab-format-version = 1
flwr-version-target = "1.41.0"
[tool.flwr.app.components]
serverapp = "thief:server"
clientapp = "thief:client"
[tool.flwr.app.config]
loot = "{loot}"
"""


@pytest.fixture
def hospitals(tmp_path):
    """Two hospitals with images, and a site that runs any app: it shows that the theft works."""
    images = {}
    for site in (*SITES, "careless"):
        file = tmp_path / "images" / site / "dog" / f"patient-{site}.png"
        file.parent.mkdir(parents=True)
        Image.fromarray(numpy.full((20, 20, 3), 90, numpy.uint8)).save(file)
        images[site] = str(tmp_path / "images" / site)
    fields = {**SMALL, **deployment_fields(SITES)}
    chosen = Experiment(**{**fields, "data": {**SMALL["data"], **fields["data"]}})
    loopback = Loopback(tmp_path, chosen, SITES, evaluation_sites=("careless",), images=images)
    loopback.start_link()
    yield loopback
    loopback.stop()


def thief(folder: Path) -> Path:
    app, loot = folder / "thief", folder / "loot.json"
    app.mkdir()
    (app / "thief.py").write_text(THIEF)
    (app / "pyproject.toml").write_text(PROJECT.format(loot=loot))
    (app / "LICENSE").write_text("none")
    return app


def connect(loopback, address):
    """The stranger's own Flower home, which points to an address."""
    home = loopback.folder / f"home-{address.rpartition(':')[2]}"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink.target]\naddress = "{address}"\n'
        f'root-certificates = "{loopback.app / "keys" / "ca.crt"}"\n'
    )
    return {**loopback.environment, "FLWR_HOME": str(home)}


def test_a_stranger_fails_at_every_door(hospitals, tmp_path):
    app, key = thief(tmp_path), hospitals.make_key("stranger")
    for site in SITES:
        hospitals.register(site)
        hospitals.serve_node(site)
    hospitals.register("careless")
    hospitals.start_node("careless", trust=False)

    # 1. With the public ca.crt at the documented port: the Control API is not there.
    outside = connect(hospitals, hospitals.address)
    for command in (
        ("supernode", "list", "target"),
        ("supernode", "register", f"{key}.pub", "target", "--name", "hospital-a"),
        ("run", app, "target"),
    ):
        done = hospitals.attempt(BIN / "flwr", *command, environment=outside)
        assert done.returncode != 0, (command, done.stdout, done.stderr)
        assert "403" in done.stdout + done.stderr
    for path in ("/health", "/docs", "/v1/control/start-run", "/v1/fleet/register-node"):
        assert hospitals.ask(hospitals.address, path) == 403

    # 2. With a key of his own, at the proxy and right at the SuperLink.
    for link in (hospitals.address, hospitals.superlink):
        process = hospitals.start_node("stranger", link=link, images="/nowhere")
        process.wait(120)
    assert hospitals.log("stranger").count("Starting Flower SuperNode") == 2
    assert "SuperNode ID" not in hospitals.log("stranger")

    # 3. From the coordinator's machine, where the Control API obeys: his app runs at the
    # coordinator, and at the one site that trusts anybody; the hospitals refuse it unsigned.
    inside, loot = connect(hospitals, hospitals.superlink), tmp_path / "loot.json"
    await_nodes(hospitals, 3)
    done = hospitals.attempt(BIN / "flwr", "run", app, "target", environment=inside)
    assert done.returncode == 0, done.stdout + done.stderr
    until = time.monotonic() + 300
    while not loot.is_file():
        assert time.monotonic() < until, hospitals.log("superlink")[-3000:]
        time.sleep(1)
    told = json.loads(loot.read_text())
    assert told["careless"] == ["patient-careless.png"]
    for site in SITES:
        assert told[site] == "The FAB could not be verified."
        assert "could not be verified" in hospitals.log(site)

    # 4. A name that is taken is not registered again.
    done = hospitals.attempt(
        sys.executable, "-m", "feddg", "deploy", "register", ".", "hospital-a", f"{key}.pub"
    )
    assert done.returncode != 0
    assert "a name belongs to a key" in done.stderr


def await_nodes(loopback, number):
    until = time.monotonic() + 120
    while time.monotonic() < until:
        shown = loopback.call(BIN / "flwr", "supernode", "list", "feddg", "--format", "json")
        nodes = json.loads(shown)["nodes"]
        if sum(node["status"] == "online" for node in nodes) >= number:
            return
        time.sleep(3)
    raise AssertionError(shown)
