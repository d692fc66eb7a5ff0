"""A real SuperLink and SuperNodes on this machine. Minutes; run with -m slow."""

import json
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra")

sys.path.insert(0, str(Path(__file__).parent))

from loopback import Loopback
from test_inprocess_grid import refusals

from feddg.api import run
from feddg.experiment import Experiment
from feddg.runs.reading import read_rows, read_run
from federations import same
from flower_grid import SITES, SMALL, weights

pytestmark = pytest.mark.slow


@pytest.fixture
def deploy(tmp_path):
    """Starts deployments, and ends their processes."""
    started = []

    def start(method, rounds, **config):
        train = {**SMALL["train"], "rounds": rounds, "local_steps": 5}
        chosen = Experiment(**{**SMALL, "method": method, "train": train})
        loopback = Loopback(tmp_path, chosen, SITES, **config)
        started.append(loopback)
        loopback.start_link()
        for site in SITES:
            loopback.register(site)
            loopback.start_node(site)
        return chosen, loopback

    yield start
    for loopback in started:
        loopback.stop()


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
    assert stranger.wait(60) != 0
    expected = run(chosen, tmp_path / "in-process", cache=tmp_path / "cache", report=False)
    assert same(weights(loopback.path), weights(expected.folder))
    assert read_run(loopback.path).status == "completed"
    print(read_rows(loopback.path / "metrics.jsonl"))


def test_a_killed_site_is_missed_and_takes_part_again(deploy):
    _, loopback = deploy("fedbn", 6, **{"min-sites": 2})
    started = loopback.run()
    await_round(loopback, 1)
    loopback.kill("photo")
    await_round(loopback, 2)
    loopback.start_node("photo")
    assert loopback.finish(started) == "finished:completed"
    assert {client for _, client, _ in refusals(loopback)} == {2}
    rows = [row for row in read_rows(loopback.path / "metrics.jsonl") if row["kind"] == "round"]
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
        loopback.start_node(site)
    loopback.config["wait-seconds"] = 300.0
    assert loopback.finish(loopback.run()) == "finished:completed"
    expected = run(chosen, tmp_path / "in-process", cache=tmp_path / "cache", report=False)
    assert same(weights(loopback.path), weights(expected.folder))
