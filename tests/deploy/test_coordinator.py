"""What a coordinator says of its sites is so: who trained, on what, and whose numbers are whose."""

import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace

import numpy
import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra")

from PIL import Image

import feddg
from feddg.clients.sampling import drawn_clients
from feddg.deploy import client_app, server_app
from feddg.deploy.preflight import check_site
from feddg.deploy.server_app import Sites, read_scores
from feddg.deploy.setup import write_app
from feddg.deploy.transport import DeploymentFile, FlowerTransport, NodeRegistry, Policy
from feddg.deploy.wire import Registration
from feddg.errors import ExperimentError, NotEnoughUpdates, RunError
from feddg.federation.inprocess import InProcess
from feddg.federation.transport import Ledger
from feddg.messages import Broadcast, Message, Refusal
from feddg.records import DOMAIN_SCORES, ClientsTable, DomainScore, RefusedUpdate, RoundRow
from feddg.report.run_page import result_sentence
from feddg.runs.diagnostics import result_sentence_of
from feddg.runs.reading import read_run
from federations import same
from flower_grid import SITES, SMALL, Deployment, LocalGrid, experiment, ledger, weights


@pytest.fixture(autouse=True)
def told(caplog):
    caplog.set_level(logging.INFO, logger="feddg")


def known(sites, classes=()):
    return DeploymentFile(run="run-1", sites=list(sites), classes=list(classes), domains=[])


def pictures(folder, count=6):
    folder.mkdir(parents=True)
    for number in range(count):
        pixels = numpy.random.default_rng(number).integers(0, 255, (8, 8, 3), numpy.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def test_a_site_without_labels_does_not_train(tmp_path, caplog):
    deployment = Deployment(tmp_path, experiment(), **{"min-sites": 2})
    nodes = deployment.nodes
    nodes["photo"] |= {"images": str(pictures(tmp_path / "images")), "labels": False}
    deployment.grid = LocalGrid(nodes, client_app.app, deployment.config)
    deployment.start()
    assert ("photo", "train") not in deployment.grid.received
    assert "'photo' and has no labels (labels=false), and only evaluates" in caplog.text
    table = json.loads((deployment.path / "clients.json").read_text())
    assert table["classes"] == list("0123456789")


def test_no_site_trains_on_a_domain_that_the_coordinator_tests(tmp_path):
    deployment = Deployment(tmp_path, experiment(), test="digits:photo")
    with pytest.raises(RunError, match="would train on 'photo', which this run holds out"):
        deployment.start()


def test_a_late_site_is_counted_with_what_it_holds(tmp_path, monkeypatch):
    deployment = Deployment(tmp_path, experiment(), **{"min-sites": 2})
    deployment.grid.offline = {"photo"}
    told = server_app.LogLines.round

    def row(self, record):
        deployment.grid.offline = set()
        told(self, record)

    monkeypatch.setattr(server_app.LogLines, "round", row)
    deployment.start()
    assert ("photo", "train") in deployment.grid.received
    table = ClientsTable.read(deployment.path / "clients.json")
    assert table.domains == ["ink", "chalk", "photo"]
    joined = json.loads((deployment.path / "deployment.json").read_text())["images"]
    assert {row.name: sum(row.domains) for row in table.clients} == joined
    assert sum(table.clients[2].classes) == joined["photo"] > 0


def test_what_a_site_holds_stays_known_while_it_is_not_back(tmp_path, monkeypatch):
    chosen = experiment(train={**SMALL["train"], "rounds": 3})
    deployment = Deployment(tmp_path, chosen, **{"min-sites": 1})
    trained, said = [], server_app.LogLines.round

    def fail(site, message):
        trained.extend([site] * (message.metadata.message_type == "train"))
        return len(trained) > len(SITES)  # from round 2 on

    deployment.grid.fail = fail
    with pytest.raises(NotEnoughUpdates):
        deployment.start()
    before = ClientsTable.read(deployment.path / "clients.json")
    assert all(sum(row.classes) for row in before.clients)
    grid = deployment.grid = LocalGrid(deployment.nodes, client_app.app, deployment.config)
    grid.offline = {"chalk", "photo"}

    def come_back(self, record):
        grid.offline = {"photo"}
        said(self, record)

    monkeypatch.setattr(server_app.LogLines, "round", come_back)
    deployment.start()
    assert ("chalk", "train") in grid.received
    assert ClientsTable.read(deployment.path / "clients.json") == before


class Judges:
    """Two evaluation sites with images of one domain; some are away."""

    evaluation_sites, sites = (2, 3), ("north", "south", "clinic", "practice")

    def __init__(self, *away: int) -> None:
        held = SimpleNamespace(domains={"sketch": 10}, classes={"a": 5, "b": 5})
        self.registry = SimpleNamespace(registrations={2: held, 3: held})
        self.ledger = SimpleNamespace(refusal=lambda *_: None)
        self.away = away

    def evaluate(self, broadcast: Broadcast) -> Iterator[tuple[int, Message | Refusal]]:
        for id, table in ((2, [[5, 0], [0, 5]]), (3, [[1, 4], [4, 1]])):
            rows = [DomainScore(domain="sketch", loss=0.5, confusion=table)]
            answer = Message({}, {"scores": DOMAIN_SCORES.to_text(rows)})
            yield id, Refusal(id, "is away") if id in self.away else answer


def test_a_column_is_always_of_the_same_site():
    def columns(*away):
        judges = Judges(*away)
        sites = Sites(judges)
        sites.held = ClientsTable(domains=["ink"], classes=["a", "b"], clients=[])
        found = sites.scores_elsewhere(judges, Broadcast(1, {}), [])
        return {score.domain: score.accuracy for score in found}

    assert columns() == {"sketch at clinic": 1.0, "sketch at practice": 0.2}
    assert columns(2) == {"sketch at practice": 0.2}


def test_what_an_attempt_left_that_did_not_count_is_forgotten(tmp_path, monkeypatch):
    """One client trains in the first attempt of round 1, not in the second, and in round 2."""
    for seed in range(400):
        draws = drawn_clients(range(3), 2, seed, 1), drawn_clients(range(3), 2, seed, 1, 1)
        left = set(draws[0]) - set(draws[1])
        if left and left < set(drawn_clients(range(3), 2, seed, 2)):
            break
    (fails,) = set(draws[0]) - left
    chosen = experiment(
        method="fedbn",
        seed=seed,
        clients={"number": 3, "partition": "domain", "per_round": 2},
        server={"min_updates": 2},
    )
    deployment, failed = Deployment(tmp_path / "flower", chosen), []

    def fail(site, message):
        dies = site == SITES[fails] and message.metadata.message_type == "train" and not failed
        failed.extend([site] * dies)
        return dies

    deployment.grid.fail = fail
    found, ordinary, tried = deployment.start(), InProcess.train, []
    assert failed

    def at_once(self, clients, broadcast):
        if tried:
            yield from ordinary(self, clients, broadcast)
            return
        tried.append(clients)
        yield from ordinary(self, [id for id in clients if id != fails], broadcast)
        yield Refusal(fails, "died")

    monkeypatch.setattr(InProcess, "train", at_once)
    run = feddg.run(chosen, tmp_path / "here", cache=tmp_path / "cache", report=False)
    assert same(found, weights(run.folder))


class Returning(LocalGrid):
    """Nodes that all have come again when ``came`` changes."""

    came = "1"

    def get_nodes(self):
        nodes = super().get_nodes()
        for node in nodes:
            node.last_activated_at = self.came
        return nodes


def test_a_site_that_comes_back_mended_is_asked_again():
    nodes = {name: {"images": f"digits:{name}", "device": "cpu"} for name in SITES}
    config = {"experiment": experiment().to_yaml(), "sites": ",".join(SITES)}
    grid = Returning(nodes, client_app.app, config)
    broken = ["ink"]
    grid.fail = lambda site, message: site in broken
    transport = FlowerTransport(grid, known(SITES), Policy(1, 0.01, 0.2, 0.001), keys={})
    transport.ledger = Ledger(lambda row: None)
    for _ in range(2):
        transport.registry.online(0)
    assert grid.received.count(("ink", "query.register")) == 1
    broken.clear()
    grid.came = "2"
    for _ in range(2):
        online = transport.registry.online(1)
    assert online == {0, 1, 2}


@pytest.mark.parametrize("now", [{"domain": "chalk"}, {"site": "photo"}], ids=str)
def test_a_site_that_comes_back_as_another_is_left_out(tmp_path, caplog, now):
    """Its cache is new, so that it does not know itself what it was."""
    nodes = {}
    for name in SITES[:2]:
        for label in "ab":
            pictures(tmp_path / name / label)
        images = {"images": str(tmp_path / name), "domain": name}
        nodes[name] = {**images, "device": "cpu", "cache": str(tmp_path / f"cache {name}")}
    chosen = experiment(data={**SMALL["data"], "source": "folder"})
    grid = Returning(nodes, client_app.app, {"experiment": chosen.to_yaml()})
    transport = FlowerTransport(grid, known(SITES), Policy(1, 0.01, 0.2, 0.001), keys={})
    transport.ledger = Ledger(lambda row: None)
    assert transport.registry.online(0) == {0, 1}
    (node,) = (id for id, name in grid.nodes.items() if name == "ink")
    grid.contexts[node].node_config |= {**now, "cache": str(tmp_path / "new")}
    grid.came = "2"
    assert transport.registry.online(1) == {1}
    assert "left out" in caplog.text


def test_a_draw_of_nobody_waits_for_nobody(caplog):
    grid = LocalGrid({name: {} for name in SITES})
    transport = FlowerTransport(grid, known(SITES), Policy(3, wait=60.0))
    assert list(transport.train([], Broadcast(1, {}))) == []
    assert "goes on without" not in caplog.text


def test_an_evaluation_site_does_not_name_the_trainers_columns(tmp_path, caplog):
    def table(site, first):
        rows = numpy.random.default_rng(0).normal(size=(12, 3))
        names = [f"{first}{number}" for number in range(3)]
        lines = [",".join([*names, "label", "domain"])]
        lines += [
            ",".join([*(f"{value:.4f}" for value in row), "ab"[place % 2], site])
            for place, row in enumerate(rows)
        ]
        file = tmp_path / f"{site}.csv"
        file.write_text("\n".join(lines))
        return {"images": str(file), "cache": str(tmp_path / site), "device": "cpu"}

    data = {"source": "features", "features": 3, "id_val": 0.0, "id_test": 0.0}
    model = {"backbone": "features", "weights": None}
    chosen = experiment(data=data, hold_out="rome", model=model)
    more = {"evaluation-sites": "judge", "test": "", "min-sites": 3}
    deployment = Deployment(tmp_path, chosen, **more)
    nodes = {name: table(name, "f") for name in SITES} | {"judge": table("judge", "g")}
    # The grid gives the last one the lowest id: it is asked first.
    deployment.grid = LocalGrid(nodes, client_app.app, deployment.config)
    deployment.start()
    assert {site for site, kind in deployment.grid.received if kind == "train"} == set(SITES)
    assert "left out: site judge lacks 'f0', 'f1', 'f2' and has 'g0'" in caplog.text
    assert ("judge", "query.evaluate") not in deployment.grid.received


def test_a_test_folder_is_found_from_wherever_the_superlink_starts(tmp_path, monkeypatch):
    pictures(tmp_path / "mine" / "sketch" / "a")
    pictures(tmp_path / "mine" / "sketch" / "b")
    monkeypatch.chdir(tmp_path)
    chosen = experiment(data={**SMALL["data"], "source": "folder"})
    write_app(tmp_path / "app", chosen, SITES, test="mine")
    assert f'test = "{tmp_path / "mine"}"' in (tmp_path / "app" / "pyproject.toml").read_text()


def test_a_site_without_labels_is_checked_before_it_joins(tmp_path):
    chosen = experiment(data={**SMALL["data"], "source": "folder"})
    app = tmp_path / "app"
    write_app(app, chosen, SITES, evaluation_sites=["clinic"], classes=["a", "b"])
    images = str(pictures(tmp_path / "flat"))
    options = {"cache": tmp_path / "cache", "device": "cpu", "offline": True, "unlabelled": True}
    _, checks = check_site(app / "sites" / "clinic", images, **options)
    assert {"images", "speed"} <= {check.code for check in checks}
    assert not [check for check in checks if check.severity == "error"]
    _, checks = check_site(app / "sites" / "ink", images, **options)
    assert ["has no labels" in check.text for check in checks] == [True]


def test_the_page_names_what_was_measured_and_calls_no_trained_domain_unseen(tmp_path, caplog):
    more = {"test": "", "evaluation-sites": "judge"}
    deployment = Deployment(tmp_path, experiment(), **more)
    nodes = {"images": "digits:ink", "cache": str(tmp_path / "judge"), "device": "cpu"}
    deployment.grid.connect("judge", nodes)
    deployment.start()
    run = read_run(deployment.path)
    assert run.held_out("test") == ["ink"]
    assert "does nothing" not in caplog.text  # of what presets say
    said = result_sentence(run)
    assert "of the images of ink." in said
    assert "which no client trained on" not in said
    assert "nobody trained on" not in result_sentence_of(run.folder, "final", 2)
    codes = [found.code for found in run.summary.diagnostics]
    assert codes.count("evaluated-and-trained") == 1
    assert caplog.text.count("judge measures ink, which sites train on") == 1


def test_what_clients_sent_is_counted_without_judges_and_nodes_that_are_no_sites(tmp_path):
    more = {"test": "", "evaluation-sites": "judge"}
    deployment = Deployment(tmp_path, experiment(), **more)
    for name, shown in (("judge", "sketch"), ("stranger", "photo")):
        node = {"images": f"digits:{shown}", "cache": str(tmp_path / name), "device": "cpu"}
        deployment.grid.connect(name, node)
    deployment.start()
    run, crossed = read_run(deployment.path), ledger(deployment.path)
    told = [client for _, way, client, kind, _ in crossed if (way, kind) == ("up", "register")]
    assert sorted(told) == [-1, 0, 1, 2, 3]
    sent = {m.purpose: m.bytes for m in run.ledger.messages if m.direction == "up"}
    assert run.summary.bytes["up_per_client_round"] == pytest.approx(sent["update"], rel=0.01)
    total = sum(m.bytes for m in run.ledger.messages)
    assert run.summary.bytes["total"] == total
    before = [m for m in run.ledger.messages if not m.round and m.purpose == "register"]
    assert run.setup.bytes == sum(m.bytes for m in before)
    assert "from 4 sites together" in run.report.read_text()


def test_validation_domains_are_those_of_one_process(tmp_path, subtests):
    held_out = {"val": "chalk", "test": "sketch"}
    chosen = experiment(hold_out=held_out, clients={"number": 2, "partition": "domain"})
    here = feddg.run(chosen, tmp_path / "here", cache=tmp_path / "cache", report=False)

    def numbers(table):
        return [(row.key, row.value) for row in table if row.metric == "accuracy"]

    for judged, tested in (("chalk", "sketch"), ("sketch", "chalk")):
        with subtests.test(judged=judged):
            more = {"sites": "ink,photo", "evaluation-sites": "judge", "test": f"digits:{tested}"}
            deployment = Deployment(tmp_path / judged, chosen, **more)
            nodes = {name: deployment.nodes[name] for name in ("ink", "photo")}
            nodes["judge"] = {"images": f"digits:{judged}", "cache": str(tmp_path / "judge")}
            deployment.grid = LocalGrid(nodes, client_app.app, deployment.config)
            deployment.start()
            there = numbers(read_run(deployment.path).table)
            assert sorted(there) == sorted(numbers(here.table))
            assert {key[2] for key, _ in there} == {"val", "test"}


def test_the_log_counts_sites_that_a_round_was_done_again_without(caplog):
    refused = [RefusedUpdate(client=id, reason="broke it") for id in (2, 3)]
    row = RoundRow(round=1, clients=[0, 1, 3], refused=refused)
    server_app.LogLines().round(row)
    assert "round 1: 2 of 4 sites" in caplog.text


def test_more_sites_than_there_are_cannot_be_waited_for(tmp_path):
    deployment = Deployment(tmp_path, experiment(), **{"min-sites": 9})
    with pytest.raises(ExperimentError, match=r"min-sites is 9; there are \d sites"):
        deployment.start()


def test_a_late_site_with_a_class_of_its_own_is_told_so():
    """It would refuse every round, and the coordinator would never learn why."""
    registry = NodeRegistry(None, known(["a", "b"], ["cat", "dog"]), (), None, ())
    for own, strange in (('{"cat": 2, "fox": 1}', "fox"), ('{"targets": 3}', "targets")):
        held = {"classes": own, "domains": '{"b": 3}', "files": "{}"}
        words = f"has the class {strange!r}, and this run has cat, dog"
        assert words in registry._objection(1, Registration.model_validate(held))


def test_patients_of_an_evaluation_site_are_counted_as_in_one_process():
    row = DomainScore(domain="ink", confusion=[[6, 2], [0, 4]], groups=3, independent=4.5)
    (score,) = read_scores(scores_of(row), 2, {"ink": 12}, None)
    (accuracy, *_) = score.rows(1)
    assert (accuracy.groups, accuracy.independent, accuracy.effective) == (3, 4.5, 4.5)
    for wrong in ({"groups": 13}, {"independent": 99.0}, {"groups": None}):
        with pytest.raises(ValueError, match="groups of images are no numbers"):
            read_scores(scores_of(row.model_copy(update=wrong)), 2, {"ink": 12}, None)


def scores_of(row):
    return Message({}, {"scores": DOMAIN_SCORES.to_text([row])})


def test_what_counted_of_a_site_is_known_after_a_restart_too(tmp_path):
    """What a site filed in a round that did not count with it is not gone on from."""
    config = {"experiment": experiment().to_yaml(), "sites": ",".join(SITES)}
    nodes = {name: {"images": f"digits:{name}", "device": "cpu"} for name in SITES}

    def transport():
        grid = LocalGrid(nodes, client_app.app, config)
        return FlowerTransport(grid, known(SITES), Policy(1, 0.01, 0.2, 0.001), keys={})

    before, after = transport(), transport()
    before._counted = {0: 3, 1: 1}
    after.memories = before.memories
    assert after._counted == {0: 3, 1: 1}
    deployment = Deployment(tmp_path, experiment(method="fedbn"))
    deployment.start()
    index = json.loads((deployment.path / "checkpoint/checkpoint.json").read_text())
    assert sorted(map(int, index["memories"])) == [0, 1, 2]
