"""A site withdraws: the model is that of a federation in which it never took part, or refused."""

import json

import numpy as np
import pytest

import feddg
from feddg.diagnostics import silent
from feddg.errors import ExperimentError, RunError
from feddg.experiment import load_stored
from feddg.federation.inprocess import InProcess
from feddg.messages import Refusal
from feddg.methods.ridge import Ridge
from feddg.prediction.evaluate import decide, evaluate_run
from feddg.runs.execute import OOD_SCORE, EnergyThresholds, forget, is_complete
from feddg.runs.folder import kept_weights
from feddg.runs.prepare import load_images
from feddg.runs.reading import read_run
from feddg.runs.table import EMA_MEAN, FINAL

SITES = ("north", "east", "south", "west")
ABOUT = {
    "data": {"source": "features", "id_val": 0, "id_test": 0},
    "hold_out": "unseen",
    "partition": "client",
}


def table_of(path, leave_out=""):
    """Features of four sites and an unseen domain; a site has its own spread and classes."""
    random, rows = np.random.default_rng(0), ["label,domain,client,a,b,c,d"]
    for number, site in enumerate((*SITES, "unseen")):
        for _ in range(20 + 7 * number):
            label = int(random.integers(3))
            values = random.normal(size=4) * (1 + number / 4) + np.eye(4)[label] * 1.5
            if site != leave_out:
                domain = "unseen" if site == "unseen" else "a" if number < 2 else "b"
                cells = ",".join(f"{value:.6f}" for value in values)
                rows.append(f"c{label},{domain},{site},{cells}")
    path.write_text("\n".join(rows) + "\n")
    return path


def ran(tmp_path, leave_out="", **more):
    table = table_of(tmp_path / f"table{leave_out}.csv", leave_out)
    about = ABOUT | {"data": ABOUT["data"] | {"root": str(table)}} | more
    return feddg.run(out=tmp_path / "runs", report=False, **({"method": "ridge"} | about))


def weights(run):
    return kept_weights(run.folder, FINAL)[1]


@pytest.mark.parametrize("site", SITES)
def test_what_is_left_is_a_federation_without_the_site(tmp_path, site):
    run, without = ran(tmp_path), ran(tmp_path, site)
    client = sorted(SITES).index(site)
    assert run.contributors == [0, 1, 2, 3]
    (run.folder / "travel.safetensors").write_bytes(b"what sites' images gave")
    before = weights(run)["classifier.weight"].clone()
    done = forget(run.folder, client)
    assert done.contributors == [id for id in range(4) if id != client]
    for name, tensor in weights(without).items():
        assert np.allclose(tensor, weights(done)[name], rtol=1e-6, atol=1e-6), name
    assert not np.allclose(before, weights(done)["classifier.weight"], atol=1e-4)
    assert done.accuracy == pytest.approx(without.accuracy)
    now = read_run(run.folder)
    row = now.rounds[-1]
    assert (row.round, row.forgotten) == (2, (client,))
    assert {number.round for number in now.table.rows} == {2}
    assert set(row.left_out) == set(done.contributors)
    ledger = [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text().splitlines()]
    asked = {
        one["client"] for one in ledger if one.get("round") == 2 and one["purpose"] == "update"
    }
    assert asked == {client}
    # Nothing in the folder holds what was known before.
    assert not (run.folder / "travel.safetensors").exists()
    assert [file.name for file in run.folder.rglob("state-*.safetensors")] == [
        "state-2.safetensors"
    ]


def test_a_site_that_is_away_is_not_said_to_be_as_it_was_beside_the_one_that_left(
    tmp_path, monkeypatch
):
    run, ask = ran(tmp_path), InProcess.ask
    assert set(run.rounds[-1].left_out) == {0, 1, 2, 3}

    def without_2(transport, clients, *question):
        for id, reply in ask(transport, clients, *question):
            yield id, Refusal(id, "is away") if id == 2 else reply

    monkeypatch.setattr(InProcess, "ask", without_2)
    assert set(forget(run.folder, 1).rounds[-1].left_out) == {0, 3}


def test_averages_over_rounds_forget_it_too(tmp_path):
    run, without = ran(tmp_path), ran(tmp_path, "east")
    forget(run.folder, sorted(SITES).index("east"))
    kept, never = (kept_weights(each.folder, EMA_MEAN)[1] for each in (run, without))
    for name, tensor in never.items():
        assert np.allclose(tensor, kept[name], rtol=1e-6, atol=1e-6), name


def test_what_cannot_be_forgotten_leaves_the_run_complete(tmp_path, monkeypatch):
    run = ran(tmp_path)
    before = (run.folder / "summary.json").read_bytes()
    monkeypatch.setattr(Ridge, "without", lambda *_: pytest.fail("not the sums of training"))
    with pytest.raises(pytest.fail.Exception):
        forget(run.folder, 1)
    assert (run.folder / "summary.json").read_bytes() == before
    assert is_complete(run.folder)
    with pytest.raises(ExperimentError, match=r"set server\.wise_ft to none"):
        ran(tmp_path, server={"wise_ft": 0.5})


def test_two_sites_one_after_the_other_and_no_site_twice(tmp_path):
    run = ran(tmp_path)
    forget(run.folder, 1)
    done = forget(run.folder, 3)
    assert done.contributors == [0, 2]
    with pytest.raises(RunError, match="no part"):
        forget(run.folder, 1)
    with pytest.raises(RunError, match="no part"):
        forget(run.folder, 9)


def test_a_network_that_was_trained_forgets_nothing(tmp_path):
    run = ran(tmp_path, method="fedavg", rounds=2)
    before = (run.folder / "metrics.jsonl").read_bytes()
    with pytest.raises(RunError, match="step by step from round 1"):
        forget(run.folder, 1)
    assert (run.folder / "metrics.jsonl").read_bytes() == before


def test_sums_under_masks_or_noise_are_not_opened(tmp_path):
    run = ran(tmp_path, defences="secure_aggregation", method={"name": "ridge", "settings": {}})
    with pytest.raises(RunError, match="masked, noised or changed"):
        forget(run.folder, 1)


def test_images_that_changed_since_are_refused(tmp_path):
    run = ran(tmp_path)
    table = tmp_path / "table.csv"
    table.write_text(table.read_text().replace("c0,a,east", "c1,a,east", 1))
    with pytest.raises(RunError, match="changed"):
        forget(run.folder, 0)


@pytest.mark.parametrize(
    "more", [{"train": {"augmentation": {"flip": 0.5}}}, {"method": "ridge+randconv"}]
)
def test_sums_of_images_that_are_drawn_anew_are_not_subtracted(tmp_path, more):
    """They would be of other images than those that were added."""
    data = {"source": "digits", "image_size": 8, "id_val": 0, "id_test": 0}
    about = {"data": data, "hold_out": "ink", "clients": {"number": 3, "partition": "domain"}}
    model = {"backbone": "cnn", "weights": None, "normalization": "frozen"}
    run = feddg.run(
        out=tmp_path, report=False, **about, model=model, **({"method": "ridge"} | more)
    )
    with pytest.raises(RunError, match="anew in every round"):
        forget(run.folder, 1)
    assert is_complete(run.folder)


def test_none_of_its_images_chooses_or_measures(tmp_path):
    """Thresholds and in-domain accuracies are of the sites that stay, also when asked for later."""
    table = table_of(tmp_path / "table.csv")
    data = ABOUT["data"] | {"root": str(table), "id_val": 0.2, "id_test": 0.2}
    evaluate = {"decision": "c1"}
    run = feddg.run(
        out=tmp_path / "runs", method="ridge", **ABOUT | {"data": data, "evaluate": evaluate}
    )
    experiment = load_stored(run.folder / "experiment.yaml")
    images = load_images(experiment, tmp_path / "cache", silent)
    client = sorted(SITES).index("south")
    staying = {role: int((images.owners(role) != client).sum()) for role in ("id_val", "id_test")}
    everyone = {role: len(images.owners(role)) for role in staying}
    assert all(staying[role] < everyone[role] for role in staying)

    def measured():
        """The images behind accuracies, the decision's threshold and the one on energies."""
        rows = {(row.split, row.domain): row.examples for row in read_run(run.folder).table.rows}
        counts = {role: sum(n for at, n in rows.items() if at[0] == role) for role in staying}
        decided = read_run(run.folder).details.decision.rows
        return counts, sum(row.images for row in decided if row.split == "id_val")

    assert measured() == (everyone, everyone["id_val"])
    forget(run.folder, client)
    energies = EnergyThresholds.read(run.folder / OOD_SCORE).models.values()
    assert staying["id_val"] in {row.images for row in energies}
    assert measured() == (staying, staying["id_val"])
    decide(run.folder)
    assert measured() == (staying, staying["id_val"])
    scores = evaluate_run(run.folder, ["global"]).scores
    assert sum(row.examples for row in scores if row.split == "id_val") == staying["id_val"]
