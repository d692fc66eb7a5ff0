"""A real SuperLink and SuperNodes on this machine. Minutes; run with -m slow."""

import base64
import json
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra")

sys.path.insert(0, str(Path(__file__).parent))

from feddg.api import run
from feddg.deploy.keys import public_key
from feddg.experiment import Experiment
from feddg.runs.reading import read_rows, read_run
from federations import same
from flower_grid import SITES, SMALL, refusals, weights
from loopback import BIN, Loopback, has_nginx

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_nginx(), reason="nginx is not installed"),
]


@pytest.fixture
def deploy(tmp_path):
    """Starts deployments, and ends their processes."""
    started = []

    def start(method, rounds, sites=SITES, evaluation_sites=(), server=None, **config):
        train = {**SMALL["train"], "rounds": rounds, "local_steps": 5}
        clients = {**SMALL["clients"], "number": len(sites)}
        # In-process, domains of no site are held out.
        held = ["sketch", *(site for site in SITES if site not in sites)]
        fields = {**SMALL, "method": method, "train": train, "clients": clients, "hold_out": held}
        chosen = Experiment(**{**fields, "server": server or {}})
        loopback = Loopback(tmp_path, chosen, sites, evaluation_sites=evaluation_sites, **config)
        started.append(loopback)
        loopback.start_link()
        for site in (*sites, *evaluation_sites):
            loopback.register(site)
            loopback.start_node(site)
        return chosen, loopback

    yield start
    for loopback in started:
        loopback.stop()
        # TLS, keys and proxy lie between all of them: whatever a site got or gave went this way.
        for path in ("activate-node", "pull-messages", "push-messages"):
            assert loopback.let_through(f"/v1/fleet/{path}"), path


def await_round(loopback, round, seconds=600):
    """Waits until a round is on disk."""
    index = loopback.path / "checkpoint" / "checkpoint.json"
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if index.is_file() and json.loads(index.read_text())["round"] >= round:
            return
        time.sleep(0.2)
    raise AssertionError(loopback.log("superlink")[-5000:])


def test_pardon_over_tls_gives_the_bits_of_the_in_process_transport(deploy, tmp_path):
    chosen, loopback = deploy("pardon", 3)
    loopback.make_key("stranger")
    stranger = loopback.start_node("stranger")
    status = loopback.finish(loopback.run())
    assert status == "finished:completed", loopback.log("superlink")[-5000:]
    stranger.wait(60)
    assert "SuperNode ID" not in loopback.log("stranger")
    expected = run(chosen, tmp_path / "in-process", cache=tmp_path / "cache", report=False)
    assert same(weights(loopback.path), weights(expected.folder))
    assert read_run(loopback.path).status == "completed"


def test_a_killed_site_is_missed_and_takes_part_again(deploy):
    _, loopback = deploy("fedbn", 6, **{"min-sites": 2})
    started = loopback.run()
    await_round(loopback, 1)
    loopback.kill("photo")
    await_round(loopback, 2)
    loopback.serve_node("photo")
    assert loopback.finish(started) == "finished:completed"
    assert {client for _, client, _ in refusals(loopback)} == {2}
    rows = [row for row in read_rows(loopback.path / "rounds.jsonl") if row["kind"] == "round"]
    assert not rows[-1]["refused"]


def test_all_sites_killed_fails_the_run_and_the_same_line_finishes_it(deploy, tmp_path):
    chosen, loopback = deploy("fedbn", 3, **{"wait-seconds": 60.0})
    started = loopback.run()
    await_round(loopback, 1)
    for site in SITES:
        loopback.kill(site)
    assert loopback.finish(started) == "finished:failed"
    assert read_run(loopback.path).status == "failed"
    for site in SITES:
        loopback.serve_node(site)
    loopback.configure(**{"wait-seconds": 300.0})
    assert loopback.finish(loopback.run()) == "finished:completed"
    expected = run(chosen, tmp_path / "in-process", cache=tmp_path / "cache", report=False)
    assert same(weights(loopback.path), weights(expected.folder))


def test_strangers_kills_and_a_coordinators_restart_change_no_bit(deploy, tmp_path):
    """Three sites behind the proxy, one that evaluates; a site and the coordinator are killed."""
    both, again = SITES[:2], {"min_updates": 2, "attempts": 3}
    chosen, loopback = deploy("fedbn", 4, both, ("sketch",), again, **{"round-deadline": 120.0})
    thief = loopback.make_key("thief")
    # The coordinator's slip: Flower itself registers a second key under a name.
    loopback.call(BIN / "flwr", "supernode", "register", f"{thief}.pub", "feddg", "--name", "ink")
    let_through = loopback.app / "proxy" / "sites.map"
    kept = let_through.read_text()
    loopback.feddg("deploy", "register", ".", "chalk", str(loopback.folder / "chalk-key.pub"))
    assert let_through.read_text() == kept
    let_through.write_text(kept + f'"{proxy_key(thief)}" thief;\n')
    loopback.reload()
    loopback.start_node("thief", site="ink", images="digits:ink")
    loopback.make_key("stranger")
    stranger = loopback.start_node("stranger", images="digits:ink")

    loopback.run()
    await_round(loopback, 1)
    assert stranger.poll() is not None
    assert "SuperNode ID" not in loopback.log("stranger")
    loopback.kill("chalk")
    loopback.serve_node("chalk")
    await_round(loopback, 2)
    loopback.kill("superlink")
    loopback.start_link()
    ended = loopback.run()
    assert loopback.finish(ended) == "finished:completed", loopback.log("superlink")[-5000:]

    said = loopback.call(BIN / "flwr", "log", ended, "feddg", "--show")
    assert "but the name belongs to the key SHA256:" in said
    expected = run(chosen, tmp_path / "in-process", cache=tmp_path / "cache", report=False)
    assert same(weights(loopback.path), weights(expected.folder))
    rows = read_rows(loopback.path / "metrics.jsonl")
    assert {row["domain"] for row in rows} == {"sketch", "sketch at sketch"}
    judged = [row | {"domain": "sketch"} for row in rows if row["domain"] != "sketch"]
    # Its counts are the coordinator's own; what needs every prediction it cannot say.
    known = {row["metric"] for row in judged}
    own = [row for row in rows if row["domain"] == "sketch" and row["metric"] in known]
    assert judged == own


def proxy_key(key):
    return base64.b64encode(public_key(Path(f"{key}.pub"))).decode("ascii")
