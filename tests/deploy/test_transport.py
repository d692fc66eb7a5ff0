"""The unmodified ServerApp and ClientApp over an in-process grid: the same bits as in-process."""

import json
import math

import numpy
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

pytest.importorskip("flwr", reason="Flower is an optional extra")

from feddg.api import resume, run
from feddg.attacks.attack import attack_run
from feddg.data.data_set import load_source
from feddg.deploy import client_app, server_app
from feddg.deploy.transport import fingerprint
from feddg.errors import ExperimentError, NotEnoughUpdates, RunError
from feddg.experiment import Experiment
from feddg.federation.validation import CHANGES
from feddg.messages import Message
from feddg.prediction.evaluate import evaluate_run
from feddg.report.run_page import verdict
from feddg.runs.execute import forget
from feddg.runs.reading import read_rows, read_run
from feddg.styles.codec import load_codec
from federations import same
from flower_grid import (
    SITES,
    SMALL,
    Deployment,
    LocalGrid,
    experiment,
    ledger,
    public_key,
    refusals,
    weights,
)

# Averaged weights, schedules, head rounds and kept models, too.
LONG = {
    "train": {
        **SMALL["train"],
        "rounds": 4,
        "schedule": "cosine",
        "warmup_rounds": 1,
        "head_rounds": 1,
        "label_smoothing": 0.1,
    },
    "server": {"averaging": "swa", "wise_ft": 0.7},
}


def saved(path):
    """Weights, their averages and kept models of a run."""
    index = json.loads((path / "checkpoint/checkpoint.json").read_text())
    state = load_file(path / "checkpoint" / index["state"])
    found = {name: tensor for name, tensor in state.items() if CHANGES not in name}
    for file in index["models"].values():
        found |= {f"{file}/{n}": t for n, t in load_file(path / "models" / file).items()}
    return found


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("pardon", {}),
        ("fedbn", LONG),
        ("fedavg", {"train": {**SMALL["train"], "trainable": "head"}}),
        (
            {"name": "pardon", "stylized": "on_the_fly"},
            {"train": {**SMALL["train"], "trainable": "norm+head"}},
        ),
    ],
)
def test_flower_gives_the_bits_of_the_in_process_transport(method, change, tmp_path):
    chosen = experiment(method=method, **change)
    expected = run(chosen, tmp_path / "in-process", cache=tmp_path / "cache", report=False)
    deployment = Deployment(tmp_path, chosen)
    assert same(deployment.start(), weights(expected.folder))
    tensors = saved(deployment.path)
    assert same(tensors, saved(expected.folder))
    if change == LONG:
        assert any(name.startswith("extras/averages/swa/") for name in tensors)
        assert any(name.startswith("wise_ft.safetensors/") for name in tensors)
    found, plain = read_run(deployment.path), expected
    assert found.status == "completed"
    both = [record.frame().drop(columns=["bytes", "seconds"]) for record in (found, plain)]
    assert both[0].equals(both[1])
    assert (deployment.path / "report.html").is_file()
    crossed, entered = (ledger(path) for path in (deployment.path, expected.folder))
    # What was agreed travels with the first message that needs it.
    asked = [entry for entry in entered if entry[3] != "context"]
    assert sorted(entry for entry in crossed if entry[3] != "register") == sorted(asked)
    assert [entry[1] for entry in crossed if entry[3] == "register"] == ["down"] * 3 + ["up"] * 3


def test_sites_that_only_evaluate_measure_the_averages_too(tmp_path):
    chosen = experiment(**LONG)
    own = Deployment(tmp_path / "own", chosen)
    own.start()
    judged = Deployment(tmp_path / "judged", chosen, **{"test": "", "evaluation-sites": "sketch"})
    nodes = {"images": "digits:sketch", "cache": str(tmp_path / "judge"), "device": "cpu"}
    judged.grid.connect("sketch", nodes)
    judged.start()
    ours, theirs = (
        {
            row.key: row.value
            for row in read_run(one.path).table
            if row.metric in ("accuracy", "loss")
        }
        for one in (own, judged)
    )
    assert {key[1] for key in ours} == {"last", "swa", "ema", "wise_ft"}
    assert theirs == ours


def test_kept_moments_and_a_rate_inside_rounds_are_the_same_over_the_grid(tmp_path):
    kept = {"keep_optimizer": True, "schedule": "cosine", "schedule_by": "step"}
    written = {"augmentation": {"flip": 0.5, "shift": 1}}
    train = {"rounds": 2, "local_steps": 2, "batch_size": 16, **kept, **written}
    chosen = experiment(train=train, server={"weighting": "uniform"})
    alone = run(chosen, tmp_path / "in-process", cache=tmp_path / "cache", report=False)
    assert same(Deployment(tmp_path / "network", chosen).start(), weights(alone.folder))


def test_a_site_withdraws_over_the_grid_as_in_one_process(tmp_path):
    chosen = experiment(method="ridge", train={"batch_size": 64, "rounds": 1})
    alone = run(chosen, tmp_path / "in-process", cache=tmp_path / "cache", report=False)
    deployment = Deployment(tmp_path / "network", chosen)
    assert same(deployment.start(), weights(alone.folder))
    for name, words in (("gone", "no site"), (SITES[1], "")):
        deployment.config["forget"] = name
        if words:
            with pytest.raises(ExperimentError, match=words):
                deployment.start()
    assert same(deployment.start(), weights(forget(alone.folder, 1).folder))
    assert read_run(deployment.path).contributors == [0, 2]


def test_a_site_without_labels_says_how_many_images_it_has_and_how_sure_the_model_is(tmp_path):
    """What is expected there is what one process expects of the same images, bit for bit."""
    chosen = experiment(method="ridge", train={"batch_size": 64, "rounds": 1})
    alone = run(chosen, tmp_path / "in-process", cache=tmp_path / "cache", report=False)
    folders = tmp_path / "clinic" / "images"
    table = load_source("digits")
    for row in numpy.flatnonzero(table.domains == table.domain_id("sketch")).tolist():
        folder = folders / "of the clinic" / "day 1"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(table.images[row]).save(folder / f"{row:05}.png")
    deployment = Deployment(
        tmp_path / "network", chosen, **{"test": "", "evaluation-sites": "clinic"}
    )
    own = {"images": str(folders), "cache": str(tmp_path / "clinic-cache"), "device": "cpu"}
    deployment.grid.connect("clinic", own | {"labels": False})
    deployment.start()
    (here,), (there,) = (one.estimates for one in (alone, read_run(deployment.path)))
    assert (here.site, there.site) == ("sketch", "clinic")
    assert there.model_copy(update={"site": "sketch"}) == here
    (measured,) = alone.result.where(split="test", metric="accuracy")
    assert (here.sites, here.images) == (3, measured.examples)
    assert here.low <= measured.value <= here.high
    # Two numbers came back, and nothing tells a class or a folder's name.
    assert not read_run(deployment.path).table
    answers = [entry[4] for entry in ledger(deployment.path) if entry[3] == "scores"]
    assert set(answers) == {("confidence", "images")}
    text = (deployment.path / "ledger.jsonl").read_text()
    assert "day 1" not in text
    assert "of the clinic" not in text
    assert dict(verdict(read_run(deployment.path)))["At clinic"].endswith(
        "images without labels show the model's classes."
    )


def test_what_a_site_without_labels_cannot_have_measured_is_refused(subtests):
    for scalars, message in [
        ({"images": 400, "confidence": 1.5}, "confidence is none"),
        ({"images": 400, "confidence": math.nan}, "confidence is none"),
        ({"images": 400, "confidence": True}, "confidence is none"),
        ({"images": 399, "confidence": 0.5}, "other images"),
        ({"images": 400.0, "confidence": 0.5}, "other images"),
    ]:
        with subtests.test(message=message), pytest.raises(ValueError, match=message):
            server_app.read_unlabelled(Message({}, scalars), "clinic", {"clinic": 400})


@pytest.fixture
def deploy(tmp_path):
    """Makes a quick deployment."""

    def make(method="fedavg", server=None, **config):
        evaluate = {"averages": "never"}
        chosen = experiment(method=method, server=server or {}, evaluate=evaluate)
        return Deployment(tmp_path, chosen, **config)

    return make


def test_a_site_that_dies_is_refused_by_name_and_the_round_goes_on(deploy):
    deployment = deploy()
    deployment.grid.fail = lambda site, message: (
        site == "chalk" and message.metadata.message_type == "train"
    )
    deployment.start()
    assert refusals(deployment) == [
        (1, 1, "chalk: the process died"),
        (2, 1, "chalk: the process died"),
    ]


def test_a_straggler_is_dropped_at_the_deadline(deploy):
    deployment = deploy(**{"round-deadline": 1.0})
    deployment.grid.silent = {"photo"}
    deployment.start()
    first, second = (reason for _, _, reason in refusals(deployment))
    assert first == "photo: no reply within 1 s"
    assert second.startswith("photo: no reply yet"), "not 1 s again"


def test_too_few_sites_at_the_start_fail_the_run_naming_the_missing(deploy):
    deployment = deploy()
    deployment.grid.offline = {"ink", "photo"}
    with pytest.raises(RunError, match=r"1 of 3 sites .* missing: ink, photo"):
        deployment.start()
    assert not deployment.path.exists()  # nothing was computed that could be lost


def test_a_late_joiner_is_sent_what_was_agreed(deploy, monkeypatch):
    deployment = deploy("pardon", **{"min-sites": 2})
    grid = deployment.grid
    grid.offline = {"photo"}
    original = server_app.LogLines.round

    def connect_after_round_1(self, record):
        grid.offline = set()
        original(self, record)

    monkeypatch.setattr(server_app.LogLines, "round", connect_after_round_1)
    deployment.start()
    assert {row[:2] for row in refusals(deployment)} == {(1, 2), (0, 2)}
    trained = [entry for entry in grid.received if entry == ("photo", "train")]
    assert len(trained) == 1
    last = next(m for m in reversed(grid.sent) if grid.nodes[m.metadata.dst_node_id] == "photo")
    assert "context" in last.content.array_records


def test_what_was_agreed_travels_once_and_again_to_a_site_that_lost_it(deploy, monkeypatch):
    deployment = deploy("pardon")
    grid, original = deployment.grid, server_app.LogLines.round

    def lose(self, record):
        for file in (deployment.folder / "ink" / "deployments").rglob("context-*"):
            file.unlink()
        original(self, record)

    monkeypatch.setattr(server_app.LogLines, "round", lose)
    deployment.start()
    sent = {
        site: [
            "context" in message.content.array_records
            for message in grid.sent
            if message.metadata.message_type == "train"
            and grid.nodes[message.metadata.dst_node_id] == site
        ]
        for site in SITES
    }
    assert sent == {"ink": [True, False, True], "chalk": [True, False], "photo": [True, False]}
    assert refusals(deployment) == []


def test_all_sites_failing_fails_the_run_and_a_restart_gives_the_undisturbed_bits(deploy, tmp_path):
    deployment = deploy("fedbn")
    grid = deployment.grid
    expected = run(deployment.chosen, tmp_path / "in", cache=tmp_path / "cache", report=False)

    def dies_after_training(site, message):
        # The work is done and its memory filed, but the reply is lost: round 2 must not count.
        if message.metadata.message_type != "train" or len(trained()) <= 3:
            return False
        client_app.app(message, grid.contexts[message.metadata.dst_node_id])
        return True

    def trained():
        return [entry for entry in grid.received if entry[1] == "train"]

    grid.fail = dies_after_training
    with pytest.raises(NotEnoughUpdates, match="0 good updates of 3"):
        deployment.start()
    assert read_run(deployment.path).status == "failed"
    for go_on in (
        lambda: run(deployment.chosen, deployment.path.parent, report=False),
        lambda: resume(deployment.path, workers=2),
    ):
        with pytest.raises(RunError, match="is a deployment's run, whose images are at the sites"):
            go_on()
    assert "0 good updates" in read_run(deployment.path).error
    grid.fail = lambda site, message: False
    again = LocalGrid(deployment.nodes, client_app.app, deployment.config)  # the SuperLink, too
    deployment.grid = again
    assert same(deployment.start(), weights(expected.folder))
    assert read_run(deployment.path).status == "completed"
    kept = {file: file.read_bytes() for file in deployment.path.rglob("*") if file.is_file()}
    for measure in (evaluate_run, lambda path: attack_run(path, "update")):
        with pytest.raises(RunError, match="nothing can be measured on them here"):
            measure(deployment.path)
    assert {f: f.read_bytes() for f in deployment.path.rglob("*") if f.is_file()} == kept


def test_a_node_may_not_take_the_name_another_key_was_registered_under(deploy):
    deployment = deploy()
    deployment.grid.registered = {"ink": "somebody-else"}
    with pytest.raises(RunError, match="missing: ink"):
        deployment.start()


def test_a_name_belongs_to_the_first_key_that_had_it_over_restarts_too(deploy, caplog):
    deployment = deploy()
    thief = {**deployment.nodes["ink"], "cache": str(deployment.folder / "thief")}
    deployment.grid.connect("ink", thief, public_key("thief"))  # registered as ink as well, later
    deployment.grid.fail = lambda site, message: message.metadata.message_type == "train"
    with pytest.raises(NotEnoughUpdates):
        deployment.start()
    assert "but the name belongs to the key SHA256:" in caplog.text
    trained = [m for m in deployment.grid.sent if m.metadata.message_type == "train"]
    assert {m.metadata.dst_node_id for m in trained} == {100, 101, 102}
    kept = json.loads((deployment.path / "deployment.json").read_text())["keys"]
    assert kept == {site: fingerprint(public_key(site)) for site in SITES}
    # The site is away and the thief alone: the name is not free.
    deployment.grid = LocalGrid(deployment.nodes, client_app.app, deployment.config)
    deployment.grid.keys[102] = public_key("thief")
    with pytest.raises(RunError, match="missing: ink"):
        deployment.start()
    # It comes back with its own key.
    deployment.grid = LocalGrid(deployment.nodes, client_app.app, deployment.config)
    deployment.start()
    assert read_run(deployment.path).status == "completed"


def test_a_key_without_a_name_can_take_none(deploy, caplog):
    deployment = deploy()
    deployment.grid.registered = dict.fromkeys(SITES, "")
    with pytest.raises(RunError, match="missing: ink, chalk, photo"):
        deployment.start()
    assert "its key was registered without a name" in caplog.text


def test_in_domain_shares_are_refused():
    fields = {**SMALL, "data": {**SMALL["data"], "id_val": 0.1}}
    with pytest.raises(ExperimentError, match=r"set data.id_val and data.id_test to 0"):
        server_app.coordinate(None, {"experiment": Experiment(**fields).to_yaml(), "sites": "a"})


def test_sites_that_only_evaluate_score_as_the_coordinators_own_folder_does(deploy):
    deployment = deploy(**{"evaluation-sites": "clinic,absent"})
    config = {"images": "digits:sketch", "cache": str(deployment.folder / "clinic")}
    deployment.grid.connect("clinic", {**config, "device": "cpu"})
    deployment.start()
    rows = [row for row in read_rows(deployment.path / "metrics.jsonl") if row["weights"] == "last"]
    theirs = [row for row in rows if row["domain"] == "sketch at clinic"]
    assert [row["round"] for row in theirs if row["metric"] == "accuracy"] == [0, 1, 2]
    # Sites send counts alone: what needs every image's prediction is not known of them.
    known = {row["metric"] for row in theirs}
    own = [row for row in rows if row["domain"] == "sketch" and row["metric"] in known]
    assert [row | {"domain": "sketch"} for row in theirs] == own
    assert {row[1:] for row in refusals(deployment)} == {(4, "absent: is not connected")}
    received = {kind for site, kind in deployment.grid.received if site == "clinic"}
    assert received == {"query.register", "evaluate"}
    clients = json.loads((deployment.path / "clients.json").read_text())["clients"]
    assert [client["name"] for client in clients] == list(SITES)


def test_without_a_folder_of_its_own_the_coordinator_has_the_evaluation_sites_scores(deploy):
    deployment = deploy(test="", **{"evaluation-sites": "clinic"})
    config = {"images": "digits:sketch", "cache": str(deployment.folder / "clinic")}
    deployment.grid.connect("clinic", {**config, "device": "cpu"})
    deployment.start()
    assert read_run(deployment.path).table.where(round=2, split="test", domain="sketch")
    assert "sketch" in (deployment.path / "report.html").read_text()


def test_a_site_cannot_train_and_only_evaluate(deploy):
    deployment = deploy(**{"evaluation-sites": "ink"})
    with pytest.raises(ExperimentError, match="'ink' trains"):
        deployment.start()


def test_a_site_that_would_train_on_what_the_run_holds_out_is_refused_by_name(deploy, caplog):
    deployment = deploy(**{"evaluation-sites": "clinic"})
    # Spelt in another way, it is the same domain.
    for name, domains in (("photo", ("photo", "SKETCH")), ("clinic", ("sketch",))):
        images = deployment.folder / f"images-{name}"
        for domain in domains:
            draw(images / domain)
        config = {"images": str(images), "cache": str(deployment.folder / name), "device": "cpu"}
        deployment.grid.nodes = {k: n for k, n in deployment.grid.nodes.items() if n != name}
        deployment.grid.connect(name, config)
    with pytest.raises(RunError, match=r"3 are needed; missing: photo"):
        deployment.start()
    (said,) = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert "'photo' and would train on 'SKETCH', which this run holds out; give it" in said
    deployment.config["min-sites"] = 2
    deployment.start()
    assert read_run(deployment.path).status == "completed"
    known = json.loads((deployment.path / "deployment.json").read_text())
    assert known["domains"] == ["ink", "chalk"]  # the evaluation site may hold it


def test_a_folder_whose_name_cannot_cross_is_said_at_the_site_in_one_line(deploy, caplog):
    deployment = deploy(**{"min-sites": 2})
    draw(deployment.folder / "images" / "photo ")
    config = {"images": str(deployment.folder / "images"), "cache": str(deployment.folder / "c")}
    deployment.grid.nodes = {k: n for k, n in deployment.grid.nodes.items() if n != "photo"}
    deployment.grid.connect("photo", {**config, "device": "cpu"})
    deployment.start()
    (said,) = [r for r in caplog.records if "too long or not plain" in r.getMessage()]
    assert said.exc_info is None
    assert "photo: the site's own log says why" not in caplog.text  # nobody has its place yet


def test_a_site_whose_images_changed_stops_and_names_them_to_itself_alone(deploy, caplog):
    deployment = deploy(method="fedavg", **{"min-sites": 3, "round-deadline": 30.0})
    images = deployment.folder / "images"
    draw(images / "photo")
    config = {"images": str(images), "cache": str(deployment.folder / "photo"), "device": "cpu"}
    deployment.grid.nodes = {k: n for k, n in deployment.grid.nodes.items() if n != "photo"}
    deployment.grid.connect("photo", config)
    secret = images / "photo" / "7" / "1.png"

    def change(site, message):
        if (site, message.metadata.message_type) == ("photo", "train"):
            Image.new("L", (16, 16), 99).save(secret)
        return False

    deployment.grid.fail = change
    deployment.start()
    reason = "photo: its images changed since it joined this run; its own log says which; put"
    assert [(r, c, said[: len(reason)]) for r, c, said in refusals(deployment)] == [
        (1, 2, reason),
        (2, 2, reason),
    ]
    assert "1 changed (photo/7/1.png)" in caplog.text
    left = [*deployment.path.glob("*.json*"), deployment.path / "report.html"]
    assert not any("1.png" in file.read_text() for file in left)
    # Nor is it let in again before they are back.
    deployment.grid.connect("photo", config)
    with pytest.raises(RunError, match="missing"):
        Deployment.start(again(deployment))


def write_decoder(file, scale):
    weights = load_codec("compact").decoder.state_dict()
    save_file({name: (tensor * scale).contiguous() for name, tensor in weights.items()}, file)


def test_sites_with_another_codec_are_refused_by_name(tmp_path, caplog):
    decoder = tmp_path / "decoder.safetensors"
    write_decoder(decoder, 1)
    method = {"name": "pardon", "decoder": str(decoder)}
    deployment = Deployment(tmp_path, experiment(method=method), **{"min-sites": 3})

    asked = []

    def change(site, message):
        # All sites of this grid share a disk: when the last is asked, another file lies there.
        asked.append(site)
        if len(asked) == len(SITES):
            write_decoder(decoder, 0.5)
        return False

    deployment.grid.fail = change
    with pytest.raises(RunError, match=r"has another file as method\.decoder than") as error:
        deployment.start()
    first, last = asked[0], asked[-1]
    assert f"missing: {last} (it calls itself {last!r} and has another file" in str(error.value)
    assert f"than {first!r}; all sites need the same one" in caplog.text
    # With one codec everywhere it runs; a site does not go on with another one.

    def change_later(site, message):
        if message.metadata.message_type == "train":
            write_decoder(decoder, 1)
        return False

    deployment.grid.fail = change_later
    with pytest.raises(NotEnoughUpdates, match="its files changed since it joined this run"):
        deployment.start()
    assert "files changed since this site joined the run: method.decoder has" in caplog.text


def again(deployment):
    """The same run, asked for more rounds than it has."""
    (deployment.path / "summary.json").unlink()
    return deployment


def draw(folder):
    """A folder of one small picture for every digit."""
    for digit in "0123456789":
        (folder / digit).mkdir(parents=True)
        Image.new("L", (16, 16), 20 * int(digit)).save(folder / digit / "1.png")


def test_traffic_says_where_the_time_and_the_bytes_went(deploy):
    deployment = deploy()
    deployment.start()
    rows = read_rows(deployment.path / "traffic.jsonl")
    trained = [row for row in rows if row["kind"] == "train"]
    trained.sort(key=lambda row: (row["round"], SITES.index(row["site"])))
    assert [(row["round"], row["site"]) for row in trained] == [
        (r, s) for r in (1, 2) for s in SITES
    ]
    assert (
        sorted(row["site"][:4] for row in rows if row["kind"] == "query.register") == ["node"] * 3
    )
    sent = [row for row in read_rows(deployment.path / "ledger.jsonl") if row["kind"] == "message"]
    updates = [row["bytes"] for row in sent if row["purpose"] == "update"]
    for row, size in zip(trained, updates, strict=True):
        assert 0 < row["train"] <= row["busy"] <= row["seconds"]
        assert size == row["bytes_up"]


def test_a_deployment_says_of_its_settings_what_a_run_says(tmp_path, caplog):
    chosen = experiment(privacy={"clipping_norm": 0.5})
    run(chosen, tmp_path / "in-process", cache=tmp_path / "cache", report=False)
    (wanted,) = (text for text in caplog.messages if "does nothing" in text)
    caplog.clear()
    Deployment(tmp_path, chosen).start()
    assert caplog.messages.count(wanted) == 1
