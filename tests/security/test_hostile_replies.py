"""Every lie of a site is refused by its name, and the others go on as if it had not been there."""

import copy
import json
import tracemalloc
from functools import partial
from typing import ClassVar

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is an optional extra")

from flwr.app import Array, ConfigRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from feddg.deploy import server_app
from feddg.deploy.transport import DeploymentFile
from feddg.deploy.wire import TRAIN, Payload
from feddg.runs.inspection import skew_between
from feddg.runs.reading import read_rows
from federations import same
from hostile_grid import HostileFederation, HostileGrid
from hostile_replies import ENVELOPE, LIES, dropped, field

CASES = [
    *((kind, name) for kind, lies in LIES.items() for name in lies),
    *(("train", name) for name in ENVELOPE),
    *(
        (kind, name)
        for kind in ("query.register", "query.statistics")
        for name in list(ENVELOPE)[:3]
    ),
]
"""Envelopes are read alike, whatever is in them."""
METHOD = {"query.statistics": "pardon"}


def lie(kind, name):
    return {**ENVELOPE, **LIES[kind]}[name]


class Grid(HostileGrid):
    """In the first round of FedAvg a site's honest update is always the same: it is made once."""

    made: ClassVar[dict[int, Payload]] = {}

    def _honest(self, kind, site, asked):
        if (kind, asked.fields.get("round"), self.small.method.name) != (TRAIN, 1, "fedavg"):
            return super()._honest(kind, site, asked)
        if site not in self.made:
            self.made[site] = copy.deepcopy(super()._honest(kind, site, asked))
        return self.made[site]


Federation = partial(HostileFederation, grid=Grid)
_expected = {}


def without_site_0(method):
    """The weights after a round in which site 0 refused of itself."""
    if method not in _expected:
        fine = HostileFederation(method)
        quiet = RecordDict({"fields": ConfigRecord({"parts": "", "refusal": "not today"})})
        for kind in ("train", "query.statistics"):
            fine.lie(0, kind, lambda honest: quiet)
        _expected[method] = fine.run().state.weights
    return _expected[method]


@pytest.mark.parametrize("kind", LIES)
def test_lies_are_refused_by_name_and_the_round_goes_on(kind, subtests, caplog):
    method = METHOD.get(kind, "fedavg")
    for name in (name for of, name in CASES if of == kind):
        with subtests.test(name):
            caplog.clear()
            federation = Federation(method)
            federation.lie(0, kind, lie(kind, name))
            if kind == "query.statistics":  # who cannot describe itself may still train well
                quiet = RecordDict({"fields": ConfigRecord({"parts": "", "refusal": "not today"})})
                federation.lie(0, "train", lambda honest: quiet)
            server = federation.run()
            assert server.state.round == 1
            assert same(server.state.weights, without_site_0(method))
            assert {client for client, _ in federation.refusals} == {0}
            for record in (r for r in caplog.records if r.levelname != "INFO"):
                said = record.getMessage()
                assert said.isprintable()
                assert len(said) < 2000
                assert "site-0" in said or "node 100" in said or "client 0" in said


def test_a_site_has_worked_no_longer_than_it_was_waited_for(tmp_path):
    federation = Federation()
    federation.transport._mailbox._traffic = tmp_path / "traffic.jsonl"

    federation.lie(0, "train", lambda honest: field("busy", 1e9)(field("seconds", 1e9)(honest)))
    federation.run()
    rows = read_rows(tmp_path / "traffic.jsonl")
    assert all(max(row["train"], row["busy"]) <= row["seconds"] < 1e3 for row in rows)
    assert federation.row.seconds["train"] < 1e3
    assert not federation.refusals


@pytest.mark.parametrize("term", [1e308, -1e308])
def test_a_loss_term_beyond_all_others_is_refused_not_averaged(term):
    federation = Federation()
    federation.lie(0, "train", field("terms/cross_entropy", term))
    federation.run()
    assert [client for client, _ in federation.refusals] == [0]
    assert abs(federation.row.terms["cross_entropy"]) < 1e3


def test_an_update_of_scaffold_without_one_control_is_refused_by_its_name():
    federation = Federation("scaffold")
    federation.lie(0, "train", dropped("extras"))
    federation.run()
    ((client, reason),) = federation.refusals
    assert client == 0
    assert "lacks 'scaffold/" in reason


@pytest.mark.parametrize("length", [1e4, 1e5, 1e6, 1e20])
def test_an_update_far_longer_than_the_others_is_refused(length):
    federation = Federation()
    federation.run()  # so that the median of a round is known

    def far(records):
        record = records.array_records["weights"]
        for key, old in list(record.items()):
            values = old.numpy()
            if values.dtype.kind == "f":
                record[key] = Array(values + values.dtype.type(length))
        return records

    federation.lie(0, "train", far)
    federation.server.round()
    assert {client for client, _ in federation.refusals} == {0}
    assert "moved the weights by" in federation.refusals[-1][1]
    assert all(torch.isfinite(t).all() for t in federation.server.state.weights.values())
    assert federation.server.state.round == 2


def test_a_site_that_always_asks_again_is_given_up():
    federation = Federation("pardon")
    asked = RecordDict({"fields": ConfigRecord({"parts": "", "missing": "context"})})
    federation.lie(0, "train", lambda honest: asked)
    federation.run()
    assert federation.grid.kinds.count("train") == 4 + 2
    assert [client for client, _ in federation.refusals] == [0]
    assert "did not receive the shared context" in federation.refusals[0][1]


def test_a_site_that_comes_back_with_other_images_is_left_out(caplog):
    federation = Federation()
    federation.run()
    federation.transport.registry.asked.clear()
    more = '{"a": 4000}'
    changed = {"registration/classes": more, "registration/domains": '{"domain 0": 4000}'}

    def register(records):
        for key, value in changed.items():
            records.config_records["fields"][key] = value
        return records

    federation.lie(0, "query.register", register)
    federation.transport.registry.online(1)
    assert "4000 images, but it joined this run with 4" in caplog.text
    assert federation.transport.registered[0] == 4


def test_a_site_that_comes_back_with_other_domains_is_left_out(caplog):
    federation = Federation()
    federation.run()
    federation.transport.registry.asked.clear()

    def register(records):
        records.config_records["fields"]["registration/domains"] = '{"elsewhere": 4}'
        return records

    federation.lie(0, "query.register", register)
    federation.transport.registry.online(1)
    assert "other classes or domains" in caplog.text


@pytest.mark.parametrize("what", ["classes", "domains"])
def test_sites_cannot_name_ever_more_together(what, caplog):
    federation = Federation()

    def naming(site):
        def register(records):
            names = {f"{what} {number} of {site}": 1 for number in range(1500)}
            for key in ("classes", "domains"):
                own = names if key == what else {"a": 1500}
                records.config_records["fields"][f"registration/{key}"] = json.dumps(own)
            return records

        return register

    federation.lie(0, "query.register", naming(0))
    federation.lie(1, "query.register", naming(1))
    found = federation.transport.gather(1)
    assert sorted(found) == [0, 2, 3]
    assert len(set().union(*(getattr(one, what) for one in found.values()))) <= 2000
    assert f"'site-1' and names 1500 {what}, too many with those of the other" in caplog.text


@pytest.mark.parametrize("name", ["an entry with an endless name", "an array with an endless name"])
def test_the_ledger_keeps_no_endless_name(name):
    federation = Federation()
    federation.lie(0, "train", lie("train", name))
    federation.run()
    layouts = [row for row in federation.rows if row.kind == "layout"]
    assert max(len(row.to_json()) for row in layouts) < 10_000


def test_a_claim_of_images_costs_no_memory():
    federation = Federation()
    claim = json.dumps({"a": 10**8})

    def register(records):
        records.config_records["fields"]["registration/classes"] = claim
        records.config_records["fields"]["registration/domains"] = claim
        return records

    federation.lie(0, "query.register", register)
    tracemalloc.start()
    found = federation.transport.gather(1)
    sites, domains = list(federation.transport.sites), ["a", "domain 1"]
    known = DeploymentFile(run="run-1", sites=sites, classes=["a"], domains=domains)
    table = server_app._clients_table(known, found, None)
    far = skew_between(table)  # as the report has it
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert far.largest == federation.transport.registered[0] == 10**8
    assert peak < 5 * 10**6


VALUES = some.one_of(
    some.integers(-(2**63), 2**63 - 1),
    some.floats(),
    some.text(max_size=200),
    some.booleans(),
    some.binary(max_size=50),
    some.lists(some.integers(-5, 5), max_size=4),
)
KEYS = some.one_of(
    some.sampled_from(["parts", "examples", "seconds", "images", "busy", "missing", "terms/a"]),
    some.text(min_size=1, max_size=20),
)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(some.dictionaries(KEYS, VALUES, max_size=6))
def test_whatever_the_fields_say_the_run_goes_on(entries):
    federation = Federation()

    def change(records):
        for key, value in entries.items():
            records.config_records["fields"][key] = value
        return records

    federation.lie(0, "train", change)
    server = federation.run()
    assert server.state.round == 1
    assert all(torch.isfinite(t).all() for t in server.state.weights.values())
    accepted = not federation.refusals
    assert accepted or {client for client, _ in federation.refusals} == {0}
