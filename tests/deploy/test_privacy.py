"""Defences over Flower's in-process grid: the same code and the same bits as in-process."""

import json
import math

import pytest
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="Flower is an optional extra")

from feddg.api import run
from feddg.deploy.server_app import Deployment as Config
from feddg.deploy.wire import Payload
from feddg.errors import ExperimentError
from feddg.runs.reading import read_rows
from federations import same
from flower_grid import SMALL, Deployment, experiment, ledger, weights

FROZEN = {"model": {"backbone": "cnn", "weights": None, "normalization": "frozen"}}
TRAIN = SMALL["train"]


def extras(path):
    index = json.loads((path / "checkpoint/checkpoint.json").read_text())
    tensors = load_file(path / "checkpoint" / index["state"])
    return {name: tensor for name, tensor in tensors.items() if name.startswith("extras/")}


CASES = {
    "adaptive": {"privacy": {"clipping": "adaptive", "clipping_norm": 0.25}, "method": "fedprox"},
    "bounding": {"defences": "norm_bounding", "server": {"optimizer": "fedavgm"}},
    "centred clipping": {"defences": "centred_clipping"},
}


@pytest.mark.parametrize("case", CASES)
def test_flower_gives_the_bits_of_the_in_process_transport(case, tmp_path, monkeypatch):
    left = {"in-process": [], "flower": []}
    where = "in-process"
    from feddg.privacy.building import Defences

    original = Defences.protect

    def noted(self, update, received, told, *more):
        update = original(self, update, received, told, *more)
        left[where].append((update.client, update.keep().weights, dict(update.extras.scalars)))
        return update

    monkeypatch.setattr(Defences, "protect", noted)
    chosen = experiment(train=TRAIN, **FROZEN, **CASES[case])
    expected = run(chosen, tmp_path / "in-process", cache=tmp_path / "cache", report=False)
    where = "flower"
    deployment = Deployment(tmp_path, chosen)
    assert same(deployment.start(), weights(expected.folder))
    assert same(extras(deployment.path), extras(expected.folder))
    ours, theirs = (sorted(updates, key=lambda u: u[0]) for updates in left.values())
    assert len(ours) == len(theirs) == 6
    for one, other in zip(ours, theirs, strict=True):
        assert one[0] == other[0]
        assert same(one[1], other[1])
        assert one[2] == other[2]
    crossed, entered = (ledger(path) for path in (deployment.path, expected.folder))
    assert sorted(entry for entry in crossed if entry[3] != "register") == sorted(entered)


def test_the_grid_carries_the_norm_the_bit_and_no_loss(tmp_path):
    privacy = {"clipping": "adaptive", "clipping_norm": 0.25}
    chosen = experiment(train={**TRAIN, "rounds": 1}, privacy=privacy, **FROZEN)
    deployment = Deployment(tmp_path, chosen)
    replies = []
    original = deployment.grid.pull_messages

    def watched(ids):
        found = original(ids)
        replies.extend(Payload.from_records(message.content) for message in found)
        return found

    deployment.grid.pull_messages = watched
    deployment.start()
    updates = [reply for reply in replies if "weights" in reply.parts]
    assert [update.part("extras").scalars for update in updates] == [{"clipping/norm_bit": 1}] * 3
    assert all(not update.part("terms") for update in updates)
    norm = extras(deployment.path)["extras/defences/clipping/norm"]
    assert norm.item() == pytest.approx(0.25 * math.exp(0.1))


def test_a_site_that_does_not_clip_is_refused_by_name(tmp_path, monkeypatch):
    from feddg.privacy.noise import Clipping

    original = Clipping.protect
    monkeypatch.setattr(
        Clipping,
        "protect",
        lambda self, update, *rest: update if update.client == 2 else original(self, update, *rest),
    )
    privacy = {"clipping": "fixed", "clipping_norm": 0.01}
    chosen = experiment(train={**TRAIN, "rounds": 1}, privacy=privacy, **FROZEN)
    deployment = Deployment(tmp_path, chosen)
    deployment.start()
    rows = read_rows(deployment.path / "ledger.jsonl")
    refused = [(row["client"], row["reason"]) for row in rows if row["kind"] == "refusal"]
    assert len(refused) == 1
    assert refused[0][0] == 2
    assert "long; the norm is 0.01" in refused[0][1]


def test_a_method_that_cannot_be_protected_is_refused_before_round_1(tmp_path):
    chosen = experiment(method="pardon", privacy={"clipping": "fixed"}, **FROZEN)
    deployment = Deployment(tmp_path, chosen)
    with pytest.raises(ExperimentError, match="neither clipped nor noised"):
        deployment.start()
    assert "train" not in {kind for _, kind in deployment.grid.received}


def test_privacy_asked_for_in_the_apps_config_is_refused_by_name():
    with pytest.raises(ExperimentError, match=r"the app's config: unknown field 'clipping'"):
        Config.read({"sites": "a", "clipping": "fixed", "clipping-norm": 0.5})
