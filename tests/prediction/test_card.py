"""Model cards: of an export and of every run, with what sites keep for themselves."""

from dataclasses import asdict

import pytest
import torch
import yaml
from typer.testing import CliRunner

from feddg.api import run as run_experiment
from feddg.cli import app
from feddg.errors import RunError
from feddg.experiment import Experiment
from feddg.prediction.export import MODEL_CARD, ensure_card, export_run
from feddg.runs.model import load_trained
from feddg.runs.reading import read_run
from feddg.text import percent
from trained_runs import SETTINGS, SHORT


def test_the_command_writes_a_card(run_of, tmp_path):
    run, path = run_of("fedavg"), tmp_path / "model.safetensors"
    ended = CliRunner().invoke(app, ["export", str(run), "--safetensors", str(path)])
    assert ended.exit_code == 0, ended.output
    text = (tmp_path / "model.md").read_text("utf-8")
    front = yaml.safe_load(text.split("---")[1])
    assert front["pipeline_tag"] == "image-classification"
    assert front["model-index"][0]["results"][0]["dataset"]["name"] == "sketch"
    for heading in ("Trained on", "Results", "What left the sites", "Use", "Limits", "Licence"):
        assert f"## {heading}" in text
    assert "| ink | " in text
    assert "| update | 6 | " in text
    scores = read_run(run).evaluations.at(2, "test")
    assert f"| {scores[0].accuracy:.1%} |" in text
    assert "ink/0/" not in text  # no file of the training images
    sketch = f"{percent(scores[0].accuracy)} % at sketch, which took no part"
    assert f"At a new site: {sketch}; one site says nothing of another." in text
    assert "nine times in ten" not in text


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
    (warning,) = done.diagnostics
    assert "no better than always answering the most frequent class" in warning.text
    assert done.metadata["diagnostics"] == [asdict(warning)]
    assert f"> **{warning}**" in done.card.read_text("utf-8")
    with pytest.raises(RunError, match="Its labels mean nothing"):
        export_run(meaningless, tmp_path / "strict.safetensors", "safetensors", strict=True)
    assert not (tmp_path / "strict.safetensors").exists()


def test_a_model_of_features_is_not_offered_as_one_of_images(tmp_path, cache):
    rows = ["label,domain,a,b"]
    for number in range(90):
        kind, noise = "xyz"[number % 3], (number * 7 % 11) / 20
        rows.append(f"{kind},site{number // 30},{number % 3 + noise},{(number % 3) ** 2 - noise}")
    (tmp_path / "features.csv").write_text("\n".join(rows))
    data = {"source": "features", "root": tmp_path / "features.csv"}
    chosen = Experiment(data=data, hold_out={"test": "site2"}, method="ridge")
    folder = run_experiment(chosen, tmp_path / "runs", cache=cache).folder
    card = (folder / MODEL_CARD).read_text("utf-8")
    assert "a classifier of features for domains nobody trained on" in card
    assert "Input: features (batch, 2).\n" in card
    assert "over 1 round of federated learning" in card
    for word in ("pixels", "Resize first", "feddg serve", "--onnx", "images/"):
        assert word not in card
    with pytest.raises(RunError, match="takes features, no images"):
        export_run(folder, tmp_path / "model.pt2", "torch")
    export_run(folder, tmp_path / "model.safetensors", "safetensors")
    assert "RGB" not in (tmp_path / "model.md").read_text("utf-8")
    served = CliRunner().invoke(app, ["serve", str(folder)])
    assert "takes features, no images: use feddg predict" in str(served.exception)
