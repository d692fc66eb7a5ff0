"""A finished run served under adaptations: rows, refusals, personal scores, alpha, the report."""

import csv

import pytest
import torch
from typer.testing import CliRunner

from feddg.api import run
from feddg.cli import app
from feddg.errors import AdaptationError, ExperimentError
from feddg.evaluation.adaptation import ADAPTATIONS
from feddg.experiment import Experiment
from feddg.runs.model import load_model, load_trained
from feddg.runs.prepare import load_images
from feddg.runs.reading import OWN, read_alphas, read_run
from feddg.studies.evaluate import evaluate_run

SMALL = {
    "data": {"source": "digits", "id_val": 0.1, "id_test": 0},
    "hold_out": "sketch",
    "clients": {"number": 3, "partition": "domain"},
    "train": {"rounds": 1, "local_steps": 6, "batch_size": 32, "augmentation": "none"},
    "evaluate": {"every": 1},
    "precision": "float32",
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache):
    """A FedIG-A run, whose models every adaptation but ``bin`` suits."""
    chosen = Experiment(**SMALL, method="fedig-a", model={"embedding": "bottleneck"})
    return run(chosen, tmp_path_factory.mktemp("runs"), cache=cache).folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory, cache):
    chosen = Experiment(**SMALL, method="fedavg")
    return run(chosen, tmp_path_factory.mktemp("runs"), cache=cache, report=False).folder


def test_all_adaptations_are_measured_on_every_domain(finished, cache):
    found = evaluate_run(finished, cache=cache)
    assert list(found.refused) == ["bin"]
    names = list(dict.fromkeys(score.adaptation for score in found.scores))
    assert names == [name for name in ADAPTATIONS if name != "bin"]
    for name in names:
        own = [score for score in found.scores if score.adaptation == name]
        places = {(score.split, score.domain) for score in own}
        assert places == {("test", "sketch")} | {("id_val", d) for d in ("ink", "chalk", "photo")}


def test_the_adapter_is_what_the_run_itself_was_measured_by(finished, cache):
    scores = evaluate_run(finished, ["adapter"], cache=cache).scores
    evaluations = read_run(finished).evaluations
    for score in scores:
        assert score.accuracy == evaluations.get(1, score.split, score.domain).accuracy


def test_what_is_known_is_not_measured_again(finished, cache, monkeypatch):
    first = evaluate_run(finished, ["global", "fixed:alpha=0.2"], cache=cache)
    monkeypatch.setattr("feddg.studies.evaluate.load_images", None)
    assert evaluate_run(finished, ["global", "fixed:alpha=0.2"], cache=cache) == first
    with pytest.raises(TypeError):
        evaluate_run(finished, ["global"], batch_size=63, cache=cache)


def test_each_clients_domain_is_measured_under_its_own_statistics(finished, cache):
    found = evaluate_run(finished, ["global"], personal=True, cache=cache)
    own = [score for score in found.scores if score.adaptation == OWN]
    assert sorted((s.client, s.split) for s in own) == [(k, "id_val") for k in range(3)]
    assert {score.domain for score in own} == {"ink", "chalk", "photo"}
    trained = load_trained(finished)
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


def test_alpha_is_written_for_every_evaluated_image_when_the_run_ends(finished, cache):
    alphas = read_alphas(finished)
    rows = read_run(finished).metrics.evaluations
    evaluated = [row.examples for row in rows if (row.round, row.weights) == (1, "last")]
    assert alphas.values.shape == (sum(evaluated), 3)
    assert alphas.layers == tuple(f"featurizer.blocks.{i}.2" for i in range(3))
    assert next(iter(alphas.by_domain())) == "sketch"
    assert ((alphas.values >= 0) & (alphas.values <= 1)).all()
    with (finished / "alphas.csv").open() as file:
        rows = list(csv.DictReader(file))
    trained = load_trained(finished)
    images = load_images(trained.experiment, cache, lambda *progress: None)
    paths = {path: row for row, path in enumerate(images.table.paths)}
    some = rows[:5]
    pixels = images.pixels.gather(torch.tensor([paths[row["image"]] for row in some])).float() / 255
    with torch.no_grad():
        shares = trained.method.layer_shares(trained.network, pixels)
    for name, alpha in shares.items():
        written = torch.tensor([float(row[name]) for row in some])
        torch.testing.assert_close(written, alpha, atol=1e-4, rtol=0)


def test_methods_that_adapt_no_layer_write_no_alpha(plain):
    assert not (plain / "alphas.csv").exists()
    assert read_alphas(plain) is None


def test_the_report_shows_alpha(finished):
    page = (finished / "report.html").read_text()
    assert "How far each layer adapts" in page


def test_a_model_can_be_loaded_under_an_adaptation(finished, plain):
    images = torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        own = load_model(finished)(images)
        torch.testing.assert_close(load_model(finished, adapt="adapter")(images), own)
        served = load_model(plain, adapt="iabn")
        assert served(images).shape == (4, 10)
        assert served.class_names == tuple("0123456789")
        plain_logits = load_model(plain)(images)
        assert torch.equal(load_model(plain, adapt="global")(images), plain_logits)
    with pytest.raises(AdaptationError, match="trained without adapters"):
        load_model(plain, adapt="adapter")


def test_what_is_asked_for_by_name_must_suit(plain, cache):
    with pytest.raises(AdaptationError, match="clients keep no normalisation"):
        evaluate_run(plain, ["global", "ensemble"], cache=cache)


def test_the_command_prints_a_table_and_the_reasons(finished, plain, monkeypatch, cache):
    monkeypatch.setenv("FEDDG_CACHE", str(cache))
    told = CliRunner().invoke(app, ["evaluate", str(finished)])
    assert told.exit_code == 0, told.output
    assert "tent" in told.output
    assert "bin cannot serve this model" in told.output
    assert "Test-time adaptation" in (finished / "report.html").read_text()
    told = CliRunner().invoke(app, ["evaluate", str(plain), "--adapt", "fixed:alpha=0", "--json"])
    assert '"adaptation": "fixed:alpha=0"' in told.output
    told = CliRunner().invoke(app, ["adaptations"])
    assert all(name in told.output for name in ADAPTATIONS)


def test_clients_validate_on_images_of_their_own_domain(cache):
    chosen = Experiment(**SMALL)
    images = load_images(chosen, cache, lambda *progress: None)
    seen = []
    for client in range(3):
        own = images.examples(client)
        assert len(own.domains.unique()) == 1
        assert torch.equal(own.validation.domains.unique(), own.domains.unique())
        seen += own.validation.rows.tolist()
    assert sorted(seen) == sorted(images.splits.id_val.tolist())


def test_choosing_a_clients_model_needs_validation_images(cache):
    fields = {**SMALL, "data": {"source": "digits", "id_val": 0, "id_test": 0}}
    fields["train"] = {**SMALL["train"], "select_every": 2}
    with pytest.raises(ExperimentError, match=r"train\.select_every.*data\.id_val above 0"):
        load_images(Experiment(**fields), cache, lambda *progress: None)
