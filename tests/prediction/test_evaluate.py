"""A finished run served under adaptations: rows, refusals, personal scores, alpha, the report."""

import json
import re
import shutil
import stat
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from typer.testing import CliRunner

from feddg.api import compare, run
from feddg.cli import app
from feddg.data.pixels import as_unit
from feddg.errors import AdaptationError, ExperimentError
from feddg.experiment import Experiment
from feddg.prediction.adaptation import ADAPTATIONS, ClientEnsemble
from feddg.prediction.evaluate import (
    decide,
    decide_run,
    evaluate_run,
    results_file,
    write_image_results,
    write_missing_results,
)
from feddg.prediction.model import load_model, load_trained
from feddg.runs.energy import energy
from feddg.runs.execute import read_energy_threshold
from feddg.runs.folder import kept_weights
from feddg.runs.prepare import load_images
from feddg.runs.reading import OWN, read_adapted, read_run
from run_folders import accuracy_rows
from trained_runs import SETTINGS, SHORT

SMALL = {
    **SETTINGS,
    "data": SHORT["data"],
    "train": {**SETTINGS["train"], "rounds": 1, "local_steps": 6},
    "evaluate": {"every": 1},
}


@pytest.fixture(scope="module")
def adaptive(tmp_path_factory, cache):
    """A FedIG-A run, whose models every adaptation but ``bin`` suits."""
    chosen = Experiment(**SMALL, method="fedig-a", model={"embedding": "bottleneck"})
    return run(chosen, tmp_path_factory.mktemp("runs"), cache=cache).folder


def test_all_adaptations_are_measured_on_every_domain(adaptive, cache):
    found = evaluate_run(adaptive, cache=cache)
    assert list(found.refused) == ["bin"]
    names = list(dict.fromkeys(score.adaptation for score in found.scores))
    assert names == [name for name in ADAPTATIONS if name != "bin"]
    for name in names:
        own = [score for score in found.scores if score.adaptation == name]
        places = {(score.split, score.domain) for score in own}
        assert places == {("test", "sketch")} | {("id_val", d) for d in ("ink", "chalk", "photo")}


def test_the_adapter_is_what_the_run_itself_was_measured_by(adaptive, cache):
    scores = evaluate_run(adaptive, ["adapter"], cache=cache).scores
    table = read_run(adaptive).table.where(weights="last", round=1)
    for score in scores:
        assert score.accuracy == table.where(split=score.split).values()[score.domain]


def test_what_is_measured_again_replaces_what_was_there(adaptive, cache):
    first = evaluate_run(adaptive, ["global", "fixed:alpha=0.2"], cache=cache)
    kept = read_adapted(adaptive)
    assert evaluate_run(adaptive, ["fixed:alpha=0.2"], cache=cache).scores == first.scores[4:]
    assert sorted(map(str, read_adapted(adaptive))) == sorted(map(str, kept))
    evaluate_run(adaptive, ["global"], batch_size=63, cache=cache)
    assert len(read_adapted(adaptive)) == len(kept) + 4


def test_each_clients_domain_is_measured_under_its_own_statistics(adaptive, cache):
    found = evaluate_run(adaptive, ["global"], personal=True, cache=cache)
    own = [score for score in found.scores if score.adaptation == OWN]
    assert sorted((s.client, s.split) for s in own) == [(k, "id_val") for k in range(3)]
    assert {score.domain for score in own} == {"ink", "chalk", "photo"}
    trained = load_trained(adaptive)
    images = load_images(trained.experiment, cache, lambda *progress: None)
    score = own[0]
    network = trained.network
    network.load_state_dict(network.state_dict() | trained.parts.clients[score.client])
    domain = images.table.domain_id(score.domain)
    rows = images.splits.id_val[images.table.domains[images.splits.id_val] == domain]
    with torch.no_grad():
        pixels = images.pixels.gather(torch.from_numpy(rows)).float() / 255
        guess = network(pixels).argmax(1).numpy()
    assert score.accuracy == (guess == images.table.labels[rows]).mean()


def test_clients_statistics_serve_the_methods_own_predictor(train_once, cache, monkeypatch):
    folder, served = train_once("fedbn+fedsr", **SHORT), []
    init = ClientEnsemble.__init__

    def noted(self, model, *arguments):
        served.append(type(model))
        init(self, model, *arguments)

    monkeypatch.setattr(ClientEnsemble, "__init__", noted)
    found = evaluate_run(folder, ["global"], personal=True, cache=cache)
    assert {score.client for score in found.scores} == {None, 0, 1, 2}
    assert {*served} == {type(load_trained(folder).predictor())}


def test_the_clients_statistics_of_another_round_are_refused(run_of, cache, monkeypatch):
    def earlier(folder, *rules):
        rule, weights, round = kept_weights(folder, *rules)
        return rule, weights, round - 1

    monkeypatch.setattr("feddg.prediction.model.kept_weights", earlier)
    folder = run_of("fedbn")
    for options in ({"adaptations": ["ensemble"]}, {"adaptations": ["global"], "personal": True}):
        with pytest.raises(AdaptationError, match=r"round \d+ was not kept; leave out --which"):
            evaluate_run(folder, cache=cache, **options)


def test_what_is_asked_for_by_name_must_suit(finished, cache):
    with pytest.raises(AdaptationError, match="clients keep no normalisation"):
        evaluate_run(finished, ["global", "ensemble"], cache=cache)


def test_the_command_prints_a_table_and_the_reasons(adaptive, finished, monkeypatch, cache):
    monkeypatch.setenv("FEDDG_CACHE", str(cache))
    told = CliRunner().invoke(app, ["evaluate", str(adaptive)])
    assert told.exit_code == 0, told.output
    assert "tent" in told.output
    assert "bin cannot serve this model" in told.output
    assert "Test-time adaptation" in (adaptive / "report.html").read_text()
    told = CliRunner().invoke(
        app, ["evaluate", str(finished), "--adapt", "fixed:alpha=0", "--json"]
    )
    assert '"adaptation": "fixed:alpha=0"' in told.output
    told = CliRunner().invoke(app, ["adaptations"])
    assert all(name in told.output for name in ADAPTATIONS)


def test_clients_validate_on_images_of_their_own_domain(cache):
    chosen = Experiment(**SMALL)
    images = load_images(chosen, cache, lambda *progress: None)
    seen = []
    for client in range(3):
        own = images[client]
        assert len(own.domains.unique()) == 1
        assert torch.equal(own.validation.domains.unique(), own.domains.unique())
        seen += own.validation.rows.tolist()
    assert sorted(seen) == sorted(images.splits.id_val.tolist())


def test_choosing_a_clients_model_needs_validation_images(cache):
    fields = {**SMALL, "data": {"source": "digits", "id_val": 0, "id_test": 0}}
    fields["train"] = {**SMALL["train"], "select_every": 2}
    with pytest.raises(ExperimentError, match=r"train\.select_every.*data\.id_val above 0"):
        load_images(Experiment(**fields), cache, lambda *progress: None)


# Results by image: what is in the file, who may read it, and two runs compared by it.


@pytest.fixture(scope="module")
def arrow():
    return pytest.importorskip(
        "pyarrow.parquet", reason="needs PyArrow: pip install 'feddg[parquet]'"
    )


@pytest.fixture(scope="module")
def comparison(arrow, tmp_path_factory, cache):
    train = {**SETTINGS["train"], "rounds": 1, "local_steps": 8}
    fields = {key: value for key, value in SETTINGS.items() if key != "hold_out"}
    fields["data"] = {**SETTINGS["data"], "image_size": 8}
    plan = {
        "base": {**fields, "train": train, "evaluate": {"every": 1}},
        "hold_out": ["sketch"],
        "methods": ["fedavg", "fedprox", "local"],
        "seeds": 1,
    }
    return compare(plan, tmp_path_factory.mktemp("runs") / "c", cache=cache, predictions=True)


@pytest.fixture(scope="module")
def folders(comparison):
    return {cell.method: cell.folder for cell in comparison.cells}


def test_the_file_holds_what_the_rows_count(arrow, folders):
    folder = folders["fedavg"]
    file = results_file(folder)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    table = arrow.read_table(file).to_pydict()
    run = read_run(folder)
    classes = run.clients.classes
    shares = np.array([table[f"probability: {name}"] for name in classes]).T
    assert shares.sum(axis=1) == pytest.approx(1, abs=1e-5)
    assert table["predicted"] == [classes[place] for place in shares.argmax(axis=1)]
    for row in (*accuracy_rows(run, 1, "test"), *accuracy_rows(run, 1, "id_val")):
        own = [
            (label, predicted)
            for label, predicted, split, domain in zip(
                table["label"], table["predicted"], table["split"], table["domain"]
            )
            if (split, domain) == (row.split, row.domain)
        ]
        assert len(own) == row.examples
        assert sum(a == b for a, b in own) / len(own) == pytest.approx(row.value)
        counts = np.zeros((len(classes), len(classes)), int)
        for label, predicted in own:
            counts[classes.index(label), classes.index(predicted)] += 1
        assert counts.tolist() == row.confusion
    assert "train" not in table["split"]


def test_two_models_are_told_apart_image_by_image(folders):
    """As docs/compare.md has it: pandas and SciPy on the files of two runs."""
    a, b = (folders[method] for method in ("fedprox", "fedavg"))
    page = (Path(__file__).parents[2] / "docs" / "compare.md").read_text("utf-8")
    section = page.partition("## Image by image")[2]
    code = section.partition("```python\n")[2].partition("print(")[0]
    names = {"pandas": pandas, "a": a, "b": b}
    exec(code, names)
    right = [names["one"].mean(), names["other"].mean()]
    assert right == pytest.approx([read_run(f).accuracy for f in (a, b)])


def test_clients_without_a_model_in_common_have_none_and_are_told_of(folders, cache):
    folder = folders["local"]
    assert not results_file(folder).exists()
    (reason,) = write_missing_results([folder, folders["fedavg"]], cache=cache)
    assert "every client has a model of its own" in reason.text


def test_another_model_has_a_file_of_its_own(arrow, folders, cache):
    folder = folders["fedprox"]
    written = write_image_results(folder, which="best_in_domain", cache=cache)
    assert written == results_file(folder, "best_in_domain")
    about = json.loads(arrow.read_schema(written).metadata[b"feddg"])
    assert about["which"] == "best_in_domain"


# Decisions: what a finished run is asked again, and with what.


def test_what_a_run_was_asked_for_is_kept_unless_something_else_is_said(averaged, cache):
    def asked(*about, **options):
        made = decide_run(averaged, *about, cache=cache, **options).decision
        return made.of, made.target, made.reached, made.rows[0].prevalence

    assert asked("3", which="swa") == asked() == ("3", "sensitivity", 0.9, 0.1)
    assert asked("3", specificity=0.8) == ("3", "specificity", 0.8, 0.1)
    assert asked(sensitivity=0.7, prevalence=0.2) == ("3", "sensitivity", 0.7, 0.2)
    *other, prevalence = asked("4")
    assert other == ["4", "specificity", 0.95]
    assert prevalence != 0.1


def test_thresholds_are_for_the_answers_that_the_model_gives_where_it_is_used(tmp_path, cache):
    fields = {**SETTINGS, "precision": "bfloat16"}
    fields["evaluate"] = {"decision": "3", "sensitivity": 0.85}
    folder = run(Experiment(**fields), tmp_path, cache=cache).folder
    images = load_images(Experiment(**fields), cache, lambda *_: None)
    inside = images.splits.id_val
    with torch.inference_mode():
        pixels = images.pixels.gather(torch.from_numpy(inside))
        logits = load_model(folder)(as_unit(pixels)).float()
    scores = logits.softmax(1)[:, 3].double().numpy()
    rows = [row for row in read_run(folder).details.decision.rows if row.split == "id_val"]
    measured = sum(mean * images for row in rows for mean, *_, images in row.reliability)
    assert measured / len(inside) == pytest.approx(scores.mean(), abs=1e-6)
    limit = read_energy_threshold(folder, load_model(folder)).threshold
    assert (energy(logits) - limit).abs().min() < 1e-5


def test_a_card_with_another_decision_is_renamed(averaged, cache):
    decide(averaged, "5", sensitivity=0.8, cache=cache)
    card = averaged / "model_card.md"
    assert "5" in card.read_text().partition("## Decision")[2].splitlines()[2]
    former = len(list(averaged.glob("model_card.former*")))
    decide(averaged, "5", sensitivity=0.8, cache=cache)
    assert len(list(averaged.glob("model_card.former*"))) == former
    decide(averaged, "6", cache=cache)
    assert len(list(averaged.glob("model_card.former*"))) == former + 1


def test_an_option_of_a_decision_does_something_or_is_refused(
    averaged, finished, monkeypatch, cache, subtests
):
    monkeypatch.setenv("FEDDG_CACHE", str(cache))

    def told(folder, *options):
        return CliRunner().invoke(app, ["evaluate", str(folder), "--json", *options])

    done = told(averaged, "--sensitivity", ".8")
    assert json.loads(done.stdout)["decision"]["reached"] == 0.8
    assert not (averaged / "adaptation.jsonl").exists()
    for options, words in [
        (["--sensitivity", ".9"], "has no decision: name a class with --decision CLASS"),
        (["--prevalence", ".1"], "has no decision"),
        (["--decision", "3", "--specificity", ".95", "--sensitivity", ".9"], "leave one of them"),
        (["--decision", "3", "--specificity", "1"], "evaluate: specificity: Input should be less"),
    ]:
        with subtests.test(options=options):
            assert words in str(told(finished, *options).exception)


def test_clients_statistics_are_refused_where_clients_keep_none(run_of, cache):
    folder = run_of("fedavg")
    with pytest.raises(AdaptationError, match="clients"):
        evaluate_run(folder, ["global"], personal=True, cache=cache)


def test_a_run_is_measured_on_the_device_that_is_asked_for(run_of, tmp_path, cache):
    folder = shutil.copytree(run_of("fedavg"), tmp_path / "moved")
    file = folder / "experiment.yaml"
    file.write_text(re.sub(r"(?m)^device: .*", "device: cuda:7", file.read_text()))
    with pytest.raises(ExperimentError, match="cuda:7"):
        evaluate_run(folder, ["global"], cache=cache)
    assert evaluate_run(folder, ["global"], device="cpu", cache=cache).scores
