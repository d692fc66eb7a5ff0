"""Model cards: of an export and of every run, with what sites keep for themselves."""

import json
import shutil

import numpy
import pytest
import torch
import yaml
from typer.testing import CliRunner

import feddg
from feddg.api import run as run_experiment
from feddg.cli import app
from feddg.errors import RunError
from feddg.experiment import Experiment
from feddg.prediction.card import model_card
from feddg.prediction.classifier import describe_model
from feddg.prediction.export import MODEL_CARD, ensure_card, export_run, save_model
from feddg.prediction.model import load_trained
from feddg.prediction.model_file import ENDINGS, OWN_WAY
from feddg.runs import execute
from feddg.runs.reading import read_run
from feddg.text import percent
from trained_runs import SETTINGS, SHORT


def test_the_command_writes_a_card(run_of, tmp_path):
    run, path = run_of("fedavg"), tmp_path / "model.safetensors"
    ended = CliRunner().invoke(app, ["export", str(run), "--safetensors", str(path)])
    assert ended.exit_code == 0, ended.output
    text = (tmp_path / "model.safetensors.md").read_text("utf-8")
    front = yaml.safe_load(text.split("---")[1])
    assert front["pipeline_tag"] == "image-classification"
    assert front["model-index"][0]["results"][0]["dataset"]["name"] == "sketch"
    for heading in ("Trained on", "Results", "What left the sites", "Use", "Limits", "Licence"):
        assert f"## {heading}" in text
    assert "| ink | " in text
    assert "| update | 6 | " in text
    accuracy = read_run(run).accuracy
    assert f"| {accuracy:.1%} |" in text
    assert "ink/0/" not in text  # no file of the training images
    sketch = f"{percent(accuracy)} % at sketch, which took no part"
    assert f"At a new site: {sketch}; one site says nothing of another." in text
    assert "nine times in ten" not in text


def test_each_domain_keeps_its_own_accuracy_where_the_hub_reads_it(tmp_path, cache):
    from huggingface_hub import ModelCard

    fields = SETTINGS | SHORT | {"hold_out": ["sketch", "photo"], "clients": 2}
    folder = run_experiment(Experiment(**fields), tmp_path / "runs", cache=cache).folder
    found = ModelCard((folder / MODEL_CARD).read_text("utf-8")).data.eval_results
    shown = {row.dataset_name: row.metric_value for row in found}
    assert shown.keys() == {"sketch", "photo"}


def test_every_run_has_a_card_that_nobody_overwrites(tmp_path, cache):
    experiment = Experiment(**SETTINGS | SHORT)
    folder = run_experiment(experiment, tmp_path / "runs", cache=cache).folder
    card = folder / MODEL_CARD
    text = card.read_text("utf-8")
    assert yaml.safe_load(text.split("---")[1])["library_name"] == "feddg"
    assert "Mean over the test domains: **" in text
    assert "(95 %:" in text
    assert "feddg predict RUN" in text
    assert "ink/0/" not in text  # no file of the training images
    assert "as its own" not in text
    card.write_text("edited")
    run_experiment(experiment, tmp_path / "runs", cache=cache)
    assert card.read_text() == "edited"


def test_a_models_files_of_several_formats_have_a_card_each(run_of, tmp_path):
    formats = ("safetensors", "torch")
    files = [tmp_path / f"model{ENDINGS[format]}" for format in formats]
    cards = [export_run(run_of("fedavg"), *each).card for each in zip(files, formats)]
    assert {*tmp_path.iterdir()} == {*files, *cards}
    said = [yaml.safe_load(card.read_text("utf-8").split("---")[1]) for card in cards]
    assert [front["library_name"] for front in said] == ["feddg", "pytorch"]


@pytest.mark.parametrize("format", ["--safetensors", "--hub"])
def test_an_edited_card_is_kept_when_a_model_is_exported_again(run_of, tmp_path, caplog, format):
    path = tmp_path / ("shared" if format == "--hub" else "model.safetensors")
    card = path / "README.md" if format == "--hub" else tmp_path / "model.safetensors.md"
    command = ["export", str(run_of("fedavg")), format, str(path)]
    for _ in range(2):  # nothing was edited in between
        assert CliRunner().invoke(app, command).exit_code == 0
    former = card.with_suffix(".former.md")
    assert not former.exists()
    text = card.read_text("utf-8")
    card.write_text(f"{text}\nFor research alone.\n", "utf-8")
    assert CliRunner().invoke(app, command).exit_code == 0
    assert former.name in caplog.text
    assert former.read_text("utf-8").endswith("For research alone.\n")
    assert card.read_text("utf-8") == text
    card.write_text(f"{text}\nAgain.\n", "utf-8")
    assert CliRunner().invoke(app, command).exit_code == 0
    assert former.read_text("utf-8").endswith("For research alone.\n")
    assert card.with_suffix(".former1.md").read_text("utf-8").endswith("Again.\n")


def test_a_card_says_what_sites_keep_for_themselves(run_of):
    folder = run_of("fedbn")
    own = sum(
        len(module.state_dict())
        for module in load_trained(folder).network.modules()
        if isinstance(module, torch.nn.BatchNorm2d)
    )
    said = f"Under fedbn every site keeps {own} of the model's tensors as its own."
    assert said in ensure_card(folder).read_text("utf-8")


def test_a_run_without_a_common_model_has_no_card_and_does_not_fail(tmp_path, cache):
    fields = SETTINGS | SHORT | {"method": "local"}
    folder = run_experiment(Experiment(**fields), tmp_path, cache=cache).folder
    assert (folder / "report.html").is_file()
    assert not (folder / MODEL_CARD).exists()


def test_a_meaningless_model_says_so_in_file_and_card(meaningless, tmp_path):
    done = export_run(meaningless, tmp_path / "model.safetensors", "safetensors")
    (warning,) = done.description.diagnostics
    assert "no better than always answering the most frequent class" in warning.text
    assert f"> **{warning}**" in done.card.read_text("utf-8")
    with pytest.raises(RunError, match="Its labels mean nothing"):
        export_run(meaningless, tmp_path / "strict.safetensors", "safetensors", strict=True)
    assert not (tmp_path / "strict.safetensors").exists()


def test_a_model_of_features_is_not_offered_as_one_of_images(tmp_path, cache):
    rows = ["label,domain,a,b"]
    for number in range(90):
        kind, noise = "xyz"[number % 3], (number * 7 % 11) / 20 + number / 997
        rows.append(f"{kind},site{number // 30},{number % 3 + noise},{(number % 3) ** 2 - noise}")
    (tmp_path / "features.csv").write_text("\n".join(rows))
    data = {"source": "features", "root": tmp_path / "features.csv"}
    chosen = Experiment(data=data, hold_out={"test": "site2"}, method="ridge")
    folder = run_experiment(chosen, tmp_path / "runs", cache=cache).folder
    shared = save_model(folder, tmp_path / "shared").card
    for file, named in ((folder / MODEL_CARD, "RUN"), (shared, "FOLDER")):
        card = file.read_text("utf-8")
        assert "a classifier of features for domains nobody trained on" in card
        assert "Input: features (batch, 2).\n" in card
        assert "over 1 round of federated learning" in card
        assert f"`feddg predict {named} features.csv --out labels.csv`" in card
        for word in ("pixels", "Resize first", "feddg serve", "--onnx", "images/", "image-class"):
            assert word not in card
    with pytest.raises(RunError, match="takes features, not images"):
        export_run(folder, tmp_path / "model.pt2", "torch")
    export_run(folder, tmp_path / "model.safetensors", "safetensors")
    assert "RGB" not in (tmp_path / "model.safetensors.md").read_text("utf-8")
    served = CliRunner().invoke(app, ["serve", str(folder)])
    assert "takes features, not images: use feddg predict" in str(served.exception)


def test_names_of_classes_and_domains_are_text_in_a_card(run_of, tmp_path):
    run = shutil.copytree(run_of("fedavg"), tmp_path / "run")
    about = describe_model(run, load_trained(run))
    names = ("<script>a", "b|c", "[d](e)", *about.class_names[3:])
    clients = json.loads((run / "clients.json").read_text())
    (run / "clients.json").write_text(json.dumps({**clients, "classes": names}))
    text = model_card(run, about.model_copy(update={"class_names": names}))
    for shown in ("&lt;script>a", "b\\|c", "\\[d](e)"):
        assert text.count(shown) == 2  # among the outputs, and with its images
    assert [raw for raw in ("<script", " b|c", " [d]") if raw in text] == []


def test_a_card_calls_no_domain_unseen_that_sites_trained_on(run_of, tmp_path):
    """An evaluation site of a deployment may hold images of a domain that others train on."""
    run = shutil.copytree(run_of("fedavg"), tmp_path / "run")
    about = describe_model(run, load_trained(run))
    assert "Accuracy on domains that no site trained on;" in model_card(run, about)
    clients = run / "clients.json"
    clients.write_text(clients.read_text("utf-8").replace('"ink"', '"sketch"'), "utf-8")
    assert "Accuracy on images held out of training, some of a domain" in model_card(run, about)


def test_a_card_has_decision_subgroups_and_who_was_forgotten_in_the_order_of_the_law(
    tmp_path, cache
):
    random, rows = numpy.random.default_rng(0), ["label,domain,client,group,scanner,a,b"]
    for n in range(240):
        sick, site = n % 3 == 0, "abcd"[n % 4]
        values = random.normal(size=2) + 2 * sick
        label = "sick" if sick else "well"
        rows.append(f"{label},{site},{site},P{n // 3 % 40},s{n % 5},{values[0]},{values[1]}")
    (tmp_path / "t.csv").write_text("\n".join(rows))
    data = {"source": "features", "root": str(tmp_path / "t.csv"), "id_val": 0.3}
    about = {"hold_out": "d", "partition": "client", "decision": "sick", "subgroups": ["scanner"]}
    done = feddg.run(data=data, method="ridge", out=tmp_path, cache=cache, report=False, **about)
    former = ensure_card(done.folder).read_text("utf-8")
    assert "Held by 3 clients." in former
    execute.forget(done.folder, 1, cache=cache)
    assert (done.folder / "model_card.former.md").read_text("utf-8") == former
    card = (done.folder / "model_card.md").read_text("utf-8")
    assert "Held by 2 clients." in card
    order = ("Purpose", "Use", "Trained on", "What left the sites", "Results", "Decision: sick")
    order += ("Subgroups", "Limits", "Changes", "Licence", "What this card cannot know")
    places = [card.index(f"## {heading}") for heading in order]
    assert places == sorted(places)
    assert "never taken part: client 1." in card
    row = next(row for row in done.details.decision.rows if row.split == "test")
    assert f"| {row.auroc[0]:.1%} ({row.auroc[1]:.1%} to {row.auroc[2]:.1%}) |" in card
    assert "| scanner s3 | test |" in card
    assert "counts groups of them" in card


def test_a_card_has_a_threshold_only_if_it_is_its_models(averaged, cache):
    def card(which, **changes):
        about = describe_model(averaged, load_trained(averaged, which=which))
        return model_card(averaged, about.model_copy(update=changes))

    own = f"from a probability of {read_run(averaged).details.decision.threshold:.9g} on"
    assert own in card("ema")
    assert own in card("ema", adaptation=OWN_WAY)
    for text in (card("ema", adaptation="global"), card("swa")):
        assert own not in text
        assert "## Decision: 3, or not\n\nThe run's threshold is for another" in text
    assert "for this one without the test-time adaptation" in card("ema", adaptation="global")
    assert "--decision CLASS --which swa" in card("swa")
