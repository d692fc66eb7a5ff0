"""Served weights of whole runs: means, rules and kept models against independent calculations."""

import json
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from feddg.api import resume, run
from feddg.errors import ExperimentError, FeddgError, RunError
from feddg.evaluation.accuracy import Evaluation, Score
from feddg.experiment import Experiment
from feddg.federation.federation import build_worker
from feddg.federation.validation import CHANGES
from feddg.models.trained import fingerprint
from feddg.prediction.evaluate import evaluate_run
from feddg.prediction.model import load_model, load_trained
from feddg.records import EMA, LAST, SWA, ClientRow, ClientsTable
from feddg.runs import folder as folder_module
from feddg.runs.evaluate import Evaluate
from feddg.runs.folder import kept_weights
from feddg.runs.prepare import build_evaluation, in_process, load_images
from feddg.runs.reading import read_rows, read_run
from feddg.runs.table import FINAL, SELECTION_RULES
from federations import same
from image_folders import make_folder

ROUNDS = 4
SMALL = {
    "data": {"source": "digits", "image_size": 8},
    "hold_out": {"val": "chalk", "test": "sketch"},
    "clients": {"number": 6, "per_round": 3},
    "train": {"rounds": ROUNDS, "local_steps": 4, "batch_size": 32, "lr": 3e-3},
    "precision": "float32",
    "device": "cpu",
}
RULES = ("final", "swa", "ema", "best_in_domain", "best_held_out")


def experiment(**change) -> Experiment:
    fields = {**SMALL, **change}
    return Experiment(**{**fields, "train": {**SMALL["train"], **fields["train"]}})


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache):
    """A run of which every round's model was kept as a snapshot."""
    chosen, out = experiment(server={"wise_ft": "auto"}), tmp_path_factory.mktemp("runs")
    return run(chosen, out, cache=cache, snapshots=range(ROUNDS + 1)).folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"weights": "nowhere.safetensors"}}, "nowhere.safetensors does not exist"),
        ({"method": "ridge", "model": {"embedding": "linear"}}, "set model.embedding to none"),
    ],
)
def test_what_is_missing_is_said_before_images_are_decoded(tmp_path, change, words):
    fields = {"data": {"source": "folder", "root": str(tmp_path)}, "hold_out": "ink", **change}
    with pytest.raises(FeddgError, match=words):  # and not that there are no images
        in_process(Experiment(**fields), tmp_path / "cache", print)


def test_a_folder_is_evaluated_in_eleven_passes_by_default(tmp_path, cache, monkeypatch):
    """The start, five rounds' models, their mean from round 2 on, and at last the other mean.

    The mean of the first round alone is its model.
    """
    data = {"source": "folder", "root": make_folder(tmp_path / "images"), "image_size": 16}
    default = Experiment(data=data)
    fields = {name: getattr(default, name).model_dump() for name in ("server", "evaluate")}
    train = {"rounds": default.train.rounds, "local_steps": 1}
    model, scores, passes = {"backbone": "cnn", "weights": None}, Evaluation.scores, []

    def counted(evaluation, predictor, outputs=None):
        passes.append(sum(len(rows) for _, _, rows in evaluation.parts()))
        return scores(evaluation, predictor, outputs)

    monkeypatch.setattr(Evaluation, "scores", counted)
    fields |= {"device": "cpu", "precision": "float32"}  # in bfloat16 validation passes again
    chosen = Experiment(data=data, model=model, train=train, **fields)
    done = run(chosen, tmp_path, cache=cache)
    assert len(passes) == 11
    assert len({*passes}) == 1
    kept = [(row.round, row.weights) for row in done.table]
    expected = [(round, LAST) for round in range(6)] + [(round, EMA) for round in range(1, 6)]
    assert {*kept} == {*expected, (5, SWA)}


def snapshots(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [load_file(folder / f"snapshots/round-{r}.safetensors") for r in range(ROUNDS + 1)]


def moved(mean, model, share):
    """A mean moved towards a model, entry by entry; counters are the model's."""
    return {
        name: mean[name] + (tensor - mean[name]) * share if tensor.is_floating_point() else tensor
        for name, tensor in model.items()
    }


def weights_of(folder, which):
    return kept_weights(folder, SELECTION_RULES.find(which))[1]


def rows_of(folder):
    """The evaluations as they stand in the file, read by nothing of ours but JSON."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["metric"] == "accuracy"]


def mean_accuracy(rows, split, weights="last"):
    """Accuracy of a split by round, the mean over its domains."""
    found = defaultdict(list)
    for row in rows:
        if (row["split"], row["weights"]) == (split, weights):
            found[row["round"]].append(row["value"])
    return {round: math.fsum(values) / len(values) for round, values in found.items()}


def test_swa_and_ema_are_those_of_a_plain_loop_over_the_saved_models(finished):
    models = snapshots(finished)
    tail = moved(models[3], models[4], 1 / 2)
    ema = models[1]
    for before, model in enumerate(models[2:], start=1):
        ema = moved(ema, model, 1 - min(0.9, before / (before + 9)))
    assert same(weights_of(finished, "swa"), tail)
    assert same(weights_of(finished, "ema"), ema)
    assert same(weights_of(finished, "final"), models[4])


def test_every_rule_is_what_an_independent_calculation_finds(finished, cache):
    rows, models = rows_of(finished), snapshots(finished)
    summary = json.loads((finished / "summary.json").read_text())
    chosen = {"final": ROUNDS, "swa": ROUNDS, "ema": ROUNDS, "wise_ft": ROUNDS}
    for which, split in (("best_in_domain", "id_val"), ("best_held_out", "val")):
        by_round = {r: a for r, a in mean_accuracy(rows, split).items() if r > 0}
        chosen[which] = min(r for r, a in by_round.items() if a == max(by_round.values()))
        assert same(weights_of(finished, which), models[chosen[which]])
    trained = load_trained(finished, which="final")
    images = load_images(trained.experiment, cache, lambda *_: None)
    for which, round in chosen.items():
        rule = SELECTION_RULES.find(which)
        assert rule.of(read_run(finished).table).round == round
        weights = which if which in ("swa", "ema", "wise_ft") else "last"
        expected = mean_accuracy(rows, "test", weights)[round]
        own = {"rule": which, "split": "test", "over": "domain_mean", "metric": "accuracy"}
        (number,) = [one for one in summary["numbers"] if own.items() <= one.items()]
        assert (number["round"], number["value"]) == (round, expected)
        network = trained.network
        network.load_state_dict(weights_of(finished, which))
        worker = build_worker(network, trained.experiment)
        scores = build_evaluation(trained.experiment, images, worker).scores(network)
        (test,) = [score for score in scores if score.split == "test"]
        assert test.accuracy == expected


def test_a_model_is_loaded_by_its_rule(finished):
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    logits = {}
    for which in (*RULES, "wise_ft"):
        trained = load_trained(finished, which=which)
        assert trained.which == which
        assert same(dict(trained.network.state_dict()), weights_of(finished, which))
        with torch.no_grad():
            logits[which] = load_model(finished, which=which)(images)
    assert not torch.equal(logits["final"], logits["swa"])
    with torch.no_grad():
        assert torch.equal(load_model(finished)(images), logits["wise_ft"])


def test_only_files_that_a_rule_needs_are_kept(finished):
    index = json.loads((finished / "checkpoint/checkpoint.json").read_text())["models"]
    assert index.keys() == {"best_in_domain", "best_held_out", "wise_ft"}
    files = {file.name for file in (finished / "models").iterdir()}
    kept = [json.loads(path.read_text()) for path in (finished / "checkpoint").glob("*.json")]
    needed = {name for checkpoint in kept for name in checkpoint["models"].values()}
    assert needed >= {*index.values()}
    assert files == needed | {"wise_ft.json"}


def test_wise_ft_chose_on_in_domain_validation_alone(finished):
    choice = json.loads((finished / "models/wise_ft.json").read_text())
    tried = {float(s): a for s, a in choice["in_domain_validation"].items()}
    assert choice["share"] == max(s for s, a in tried.items() if a == max(tried.values()))
    models = snapshots(finished)
    if choice["share"] < 1:
        assert same(weights_of(finished, "wise_ft"), moved(models[0], models[4], choice["share"]))
    else:
        assert same(weights_of(finished, "wise_ft"), models[4])
    assert mean_accuracy(rows_of(finished), "id_val", "wise_ft")[ROUNDS] == max(tried.values())


def everything(folder: Path) -> dict[str, bytes]:
    """All that a run leaves of its weights, and its evaluations."""
    index = json.loads((folder / "checkpoint/checkpoint.json").read_text())
    tensors = load_file(folder / "checkpoint" / index["state"])
    found = {k: t.numpy().tobytes() for k, t in tensors.items() if CHANGES not in k}
    found |= {p.name: p.read_bytes() for p in (folder / "models").iterdir()}
    metrics = [row | {"seconds": 0} for row in read_rows(folder / "metrics.jsonl")]
    return found | {
        "metrics": json.dumps(metrics).encode(),
        "index": repr(index["models"]).encode(),
    }


@pytest.mark.parametrize("fatal", ["state-1", "state-4", "round-", "wise_ft"])
def test_a_run_that_breaks_off_anywhere_ends_the_same(
    finished, tmp_path, cache, monkeypatch, fatal
):
    real, count = folder_module.save_file, 0

    def breaks(tensors, path, metadata=None):
        nonlocal count
        count += fatal in str(path)
        if count == (2 if fatal == "round-" else 1) and fatal in str(path):
            raise KeyboardInterrupt
        real(tensors, path, metadata)

    chosen = experiment(server={"wise_ft": "auto"})
    monkeypatch.setattr(folder_module, "save_file", breaks)
    with pytest.raises(KeyboardInterrupt):
        run(chosen, tmp_path, cache=cache, report=False)
    monkeypatch.undo()
    done = resume(tmp_path / chosen.label, cache=cache).folder
    assert everything(done) == everything(finished)


def test_what_is_served_is_measured_whenever_the_last_weights_are(tmp_path, cache):
    chosen = experiment(server={"averaging": "ema"}, evaluate={"averages": "never"})
    folder = run(chosen, tmp_path, cache=cache, report=False).folder
    measured = defaultdict(set)
    for row in rows_of(folder):
        measured[row["weights"]].add(row["round"])
    assert measured == {"last": {0, 1, 2, 3, 4}, "ema": {1, 2, 3, 4}}
    assert load_trained(folder).which == "ema"
    with pytest.raises(RunError, match=r"no 'swa' model, which takes evaluate\.averages"):
        load_model(folder, which="swa")
    with pytest.raises(RunError, match=r"'wise_ft' model, which takes server\.wise_ft"):
        load_model(folder, which="wise_ft")


def test_means_are_measured_every_time_where_asked_for(tmp_path, cache):
    chosen = experiment(evaluate={"averages": "every", "every": 2}, server={"swa_fraction": 0.25})
    folder = run(chosen, tmp_path, cache=cache, report=False).folder
    measured = defaultdict(set)
    for row in rows_of(folder):
        measured[row["weights"]].add(row["round"])
    assert measured == {"last": {0, 2, 4}, "ema": {2, 4}, "swa": {4}}
    assert same(weights_of(folder, "swa"), kept_weights(folder, FINAL)[1])


def test_no_model_looks_at_an_image_twice(tmp_path, cache, monkeypatch):
    seen, plain = [], Evaluation.predict

    def counting(self, predictor, rows):
        model = fingerprint(predictor)
        seen.extend((model, row) for row in rows.tolist())
        return plain(self, predictor, rows)

    monkeypatch.setattr(Evaluation, "predict", counting)
    chosen = experiment(train={"rounds": 2, "local_steps": 1}, server={"averaging": "ema"})
    done = run(chosen, tmp_path, cache=cache, report=False)
    assert len(set(seen)) == len(seen)
    measured = defaultdict(set)
    for row in rows_of(done.folder):
        measured[row["weights"]].add(row["round"])
    assert measured == {"last": {0, 1, 2}, "ema": {1, 2}, "swa": {2}}
    assert (done.folder / "ood_score.json").is_file()
    assert (done.folder / "figures" / "unseen.png").is_file()


def test_auto_needs_in_domain_validation(tmp_path, cache):
    data = {**SMALL["data"], "id_val": 0.0}
    with pytest.raises(ExperimentError, match=r"server\.wise_ft: auto.*set data\.id_val"):
        run(experiment(data=data, server={"wise_ft": "auto"}), tmp_path, cache=cache)


def test_wise_ft_starts_where_training_of_the_whole_network_does(tmp_path, cache):
    chosen = experiment(
        train={"head_rounds": 2}, server={"wise_ft": 0.5, "averaging": "swa", "swa_fraction": 0.25}
    )
    folder = run(chosen, tmp_path, cache=cache, snapshots=range(ROUNDS + 1), report=False).folder
    models = snapshots(folder)
    expected = moved(models[2], models[4], 0.5)
    assert same(weights_of(folder, "wise_ft"), expected)
    for name, tensor in models[2].items():
        if name.startswith("featurizer."):
            assert torch.equal(tensor, models[0][name])
    index = json.loads((folder / "checkpoint/checkpoint.json").read_text())
    tensors = load_file(folder / "checkpoint" / index["state"])
    # Two rounds of the heads and two of all: only the latter's changes are remembered.
    assert len(tensors[f"extras/{CHANGES}"]) == 2


def test_adaptations_are_measured_on_the_model_that_is_asked_for(finished, cache):
    ours = {}
    for which in ("final", "swa"):
        found = evaluate_run(finished, ["global"], which=which, cache=cache)
        ours[which] = {(row.split, row.domain): row.accuracy for row in found.scores}
        assert {row.which for row in found.scores} == {which}
    for row in rows_of(finished):
        which = {"last": "final", "swa": "swa"}.get(row["weights"])
        if which and row["round"] == ROUNDS:
            assert ours[which][row["split"], row["domain"]] == row["value"]


def test_what_is_expected_without_labels_is_the_same_whatever_the_labels():
    """Half of the images of twenty patients are right: those of half the patients, or any."""
    rows = [ClientRow(id=id, domains=[1], classes=[1]) for id in range(3)]
    clients = ClientsTable(domains=["ink"], classes=["a"], clients=rows)
    method = SimpleNamespace(left_out=lambda state: dict.fromkeys(range(3), (0.7, 0.7)))
    settings = SimpleNamespace(clients=SimpleNamespace(partition="client"))
    federation = SimpleNamespace(
        method=method, clients=SimpleNamespace(held=clients), settings=settings
    )
    evaluate = SimpleNamespace(_federation=federation)
    found = []
    right = np.repeat([0.0, 1.0], 40)
    for values in (right, np.random.default_rng(0).permutation(right)):
        score = Score(
            *("test", "sketch", 40, 80, 0.0, np.zeros((0, 0))),
            confidence=0.7,
            values=values,
            groups=np.repeat(np.arange(20), 4),
        )
        found += Evaluate._expected(evaluate, SimpleNamespace(round=1), [score])
    assert found[0] == found[1]
