"""Secure aggregation over Flower: the plain aggregate, dead sites, nothing single on record."""

import sys
import time
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="Flower is an optional extra")

sys.path.insert(0, str(Path(__file__).parent))

from feddg.api import run
from feddg.deploy import client_app
from feddg.deploy.wire import Payload
from feddg.errors import NotEnoughUpdates
from feddg.experiment import Experiment
from feddg.privacy.secure_aggregation import MASKED, SecureAggregation
from feddg.runs.reading import read_run
from flower_grid import SMALL, Deployment, LocalGrid, ledger, refusals, weights
from loopback import Loopback, has_nginx

SITES = {"ink": "ink", "chalk": "chalk", "photo": "photo", "pen": "ink"}
"""Sites, and whose digits they have."""
FIELDS = {
    **SMALL,
    "clients": {"number": 4, "partition": "domain"},
    "model": {"backbone": "cnn_gn", "weights": None, "normalization": "frozen"},
    "train": {"rounds": 2, "local_steps": 2, "batch_size": 16},
}
DEFENCES = {"defences": ["secure_aggregation"]}


class FourSites(Deployment):
    """A deployment of four sites; two have the same domain."""

    def __init__(self, folder, **change):
        super().__init__(folder, Experiment(**{**FIELDS, **change}))
        self.config["sites"] = ",".join(SITES)
        self.nodes = {
            name: {"images": f"digits:{of}", "cache": str(folder / name), "device": "cpu"}
            for name, of in SITES.items()
        }
        self.grid = LocalGrid(self.nodes, client_app.app, self.config)
        self.heard = []
        original = self.grid.pull_messages

        def pulled(ids):
            found = list(original(ids))
            self.heard += [m.content for m in found if not m.has_error()]
            return found

        self.grid.pull_messages = pulled

    def records(self):
        """All bytes that the server was sent, and all that it keeps."""
        sent = b"".join(
            array.data
            for content in self.heard
            for record in content.array_records.values()
            for array in record.values()
        )
        kept = [f.read_bytes() for f in self.path.rglob("*") if f.is_file()]
        return sent, b"".join(kept)


def noted(monkeypatch):
    """Notes every update before it is masked, or leaves unmasked."""
    from feddg.privacy.building import Defences

    single, original = [], Defences.protect

    def protect(self, update, *more):
        single.append(update.keep())
        return original(self, update, *more)

    monkeypatch.setattr(Defences, "protect", protect)
    return single


def content_of(updates):
    """The bytes of every float tensor that was trained, by update."""
    return [
        t.numpy().tobytes()
        for update in updates
        for name, t in update.weights.items()
        if t.is_floating_point() and t.numel() >= 100
    ]


def pieces(content):
    """Stretches that stay in one piece: a data base cuts what is longer than a page of 4 kB."""
    return [content[at : at + 256] for at in range(0, len(content) - 255, 1024)]


def close(one, other):
    for name, tensor in other.items():
        torch.testing.assert_close(one[name], tensor, rtol=1e-5, atol=2**-25)


class Sums:
    """A plain deployment and one under secure aggregation, and what was in them unseen."""

    def __init__(self, folder, monkeypatch):
        self.plain_updates = noted(monkeypatch)
        self.plain = FourSites(folder / "plain")
        self.plain_weights = self.plain.start()
        monkeypatch.undo()
        self.updates = noted(monkeypatch)
        self.memories, original = [], SecureAggregation.mask

        def mask(defence, update, *more):
            self.memories.append(sorted(more[-1]))
            return original(defence, update, *more)

        monkeypatch.setattr(SecureAggregation, "mask", mask)
        self.folder = folder / "hidden"
        self.hidden = FourSites(self.folder, **DEFENCES)
        self.hidden_weights = self.hidden.start()


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Sums(tmp_path_factory.mktemp("sums"), monkeypatch)


def test_the_plain_aggregate_and_no_single_update_on_record(sums):
    sent, _ = sums.plain.records()
    assert all(content in sent for content in content_of(sums.plain_updates))  # without masks
    close(sums.hidden_weights, sums.plain_weights)
    sent, kept = sums.hidden.records()
    updates = content_of(sums.updates)
    assert len(updates) >= 4 * 2 * 3
    assert not any(content in sent or content in kept for content in updates)
    replies = [Payload.from_records(content) for content in sums.hidden.heard]
    vectors = [
        part.tensors[MASKED] for r in replies for part in r.parts.values() if MASKED in part.tensors
    ]
    assert len(vectors) == 8
    for vector in vectors:
        share = vector.numpy().view(numpy.uint64).astype(float) / 2**64
        assert abs(share.mean() - 0.5) < 6 * (12 * len(share)) ** -0.5


def test_the_ledger_is_the_in_process_one(sums):
    purposes = {(way, purpose) for _, way, _, purpose, _ in ledger(sums.hidden.path)}
    for step in ("keys", "shares", "check", "unmask"):
        assert ("down", f"ask:secure_aggregation:{step}") in purposes
        assert ("up", f"answer:secure_aggregation:{step}") in purposes
    assert read_run(sums.hidden.path).status == "completed"


def test_a_sites_secrets_are_gone_after_the_round(sums):
    for site in SITES:
        files = list((sums.folder / site).rglob("secrets.safetensors"))
        assert len(files) == 1
        assert files[0].stat().st_mode & 0o077 == 0
        assert set(load_file(files[0])) == {"round"}


def test_a_site_restarted_between_questions_goes_on(sums):
    # Every message meets a fresh process: what a site knows is what it has on disk.
    within = {"ids", "keys", "kept", "own", "round", "seed", "checked", "pairs"}
    assert set(sums.memories[0]) == within


@pytest.mark.parametrize("at", ["train", "query.ask"])
def test_a_site_that_dies_in_the_middle_is_survived(tmp_path, at):
    hidden, plain = (
        FourSites(tmp_path / name, **more) for name, more in (("h", DEFENCES), ("p", {}))
    )
    asked = []

    def dies(site, message):
        kind = message.metadata.message_type
        if site == "photo" and kind == "query.ask":
            asked.append(kind)
        # Of the questions of a round it answers all but the last.
        return site == "photo" and kind == at and (at == "train" or len(asked) % 4 == 0)

    hidden.grid.fail = dies
    if at == "train":
        plain.grid.fail = dies
    close(hidden.start(), plain.start())
    assert {(round, client) for round, client, _ in refusals(hidden)} == {(1, 2), (2, 2)}


# Real SuperNodes


def secrets_of(loopback, site):
    found = list((loopback.folder / f"cache-{site}").rglob("secrets.safetensors"))
    try:
        return load_file(found[0]) if found else {}
    except Exception:  # it is being written
        return {}


@pytest.mark.slow
@pytest.mark.skipif(not has_nginx(), reason="nginx is not installed")
def test_over_real_supernodes_a_site_is_killed_mid_round(tmp_path, monkeypatch):
    """The run ends well, the aggregate is that of those left, and no file holds one's update."""
    train = {"rounds": 2, "local_steps": 2, "batch_size": 16}
    chosen = Experiment(**{**FIELDS, **DEFENCES, "train": train})
    images = {name: f"digits:{of}" for name, of in SITES.items()}
    config = {"min-sites": 3, "round-deadline": 240.0}
    loopback = Loopback(tmp_path, chosen, tuple(SITES), images=images, **config)
    try:
        loopback.start_link()
        for site in SITES:
            loopback.register(site)
            loopback.start_node(site)
        started = loopback.run()
        until = time.monotonic() + 600
        while "seed" not in secrets_of(loopback, "photo") and time.monotonic() < until:
            time.sleep(0.05)
        loopback.kill("photo")  # it has shared its secrets, and has not sent its update
        assert loopback.finish(started) == "finished:completed", loopback.log("superlink")[-5000:]
        assert {client for _, client, _ in refusals(loopback)} == {2}
        rounds = {round for round, _, _ in refusals(loopback)}
        single = noted(monkeypatch)
        plain = FourSites(tmp_path / "plain")
        plain.grid.fail = lambda site, message: (
            site == "photo"
            and message.metadata.message_type == "train"
            and int(Payload.from_records(message.content).fields["round"]) in rounds
        )
        close(weights(loopback.path), plain.start())
        kept = [f for f in (loopback.app, loopback.path) for f in f.rglob("*") if f.is_file()]
        assert any(file.name.startswith("superlink.db") for file in kept)
        records = b"".join(file.read_bytes() for file in kept)
        sums = [t.numpy().tobytes() for t in weights(loopback.path).values() if t.numel() >= 100]
        assert all(p in records for content in sums for p in pieces(content))  # it would be found
        assert not any(p in records for content in content_of(single) for p in pieces(content))
    finally:
        loopback.stop()


def test_in_process_and_flower_give_the_same_sum(tmp_path):
    fields = {**FIELDS, **DEFENCES, "clients": {"number": 3, "partition": "domain"}}
    chosen = Experiment(**fields)
    deployment = Deployment(tmp_path, chosen)
    expected = run(chosen, tmp_path / "in-process", cache=tmp_path / "cache", report=False)
    found, wanted = deployment.start(), weights(expected.folder)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_sums_that_no_seed_changes_are_opened_for_one_set_of_sites_alone(tmp_path):
    """With and without a site, they would be two sums whose difference is that site's own."""
    names, rng = ("graz", "lyon", "oslo", "bern"), numpy.random.default_rng(0)
    nodes = {}
    for name in names:
        rows = [
            f"{a:.3f},{b:.3f},{'xy'[n % 2]},{name}"
            for n, (a, b) in enumerate(rng.normal(size=(12, 2)))
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(["f0,f1,label,domain", *rows]))
        images, cache = str(tmp_path / f"{name}.csv"), str(tmp_path / name)
        nodes[name] = {"images": images, "cache": cache, "device": "cpu"}

    def start(seed, away=()):
        chosen = Experiment(
            data={"source": "features", "features": 2, "id_val": 0.0, "id_test": 0.0},
            hold_out="rome",
            seed=seed,
            method="ridge",
            clients={"number": 4, "partition": "domain"},
            train={"rounds": 1, "batch_size": 8},
            device="cpu",
            defences=["secure_aggregation"],
        )
        config = {"min-sites": 3, "test": "", "sites": ",".join(names)}
        deployment = Deployment(tmp_path, chosen, **config)
        deployment.grid = LocalGrid(nodes, client_app.app, deployment.config)
        deployment.grid.offline = set(away)
        deployment.start()
        return deployment

    start(0)
    with pytest.raises(NotEnoughUpdates, match="for the same clients only"):
        start(1, away=["bern"])
    assert read_run(start(2).path).rounds_done == 1
