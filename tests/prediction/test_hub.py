"""A model as a folder, and on the Hugging Face hub: the same answers, and nothing private."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

import feddg
from feddg import evaluate, predict_files
from feddg.cli import app
from feddg.errors import AdaptationError, FeddgError, RunError
from feddg.methods.composition import build_method
from feddg.prediction.classifier import RunClassifier
from feddg.prediction.export import export_run, save_model
from feddg.prediction.model import load_trained
from feddg.prediction.model_file import ModelDescription
from feddg.prediction.shared import CONFIG, WEIGHTS, network_config
from trained_runs import SHORT, read_csv, trained_run, write_images

NAME = "somebody/digits"


@pytest.mark.parametrize("method", ["fedavg", "copa", "fedig-a", "ccst+jigen"])
def test_a_folder_answers_as_its_run(run_of, images, tmp_path, method):
    run, folder = run_of(method), tmp_path / "model"
    save_model(run, folder)
    assert {path.name for path in folder.iterdir()} == {CONFIG, WEIGHTS, "README.md"}
    size = RunClassifier(run).description.image_size
    pixels = torch.rand(5, 3, size, size, generator=torch.Generator().manual_seed(0))
    own, loaded = feddg.load_model(run), feddg.load_model(folder)
    assert torch.equal(own(pixels), loaded(pixels))
    assert own.class_names == loaded.class_names
    if method == "fedavg":
        adapted = feddg.load_model(run, adapt="iabn"), feddg.load_model(folder, adapt="iabn")
        assert torch.equal(adapted[0](pixels), adapted[1](pixels))
        with pytest.raises(AdaptationError, match="ensemble"):
            feddg.load_model(folder, adapt="ensemble")
    for named, table in ((run, "a.csv"), (folder, "b.csv")):
        predict_files(named, [images], tmp_path / table, probabilities=True)
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    assert RunClassifier(folder).identity == RunClassifier(run).identity
    assert RunClassifier(folder).threshold == RunClassifier(run).threshold


def test_a_network_that_predicts_by_samples_draws_those_of_its_run(train_once, tmp_path):
    run = train_once("fedsr", seed=1, **SHORT)
    save_model(run, tmp_path / "model")
    own, loaded = feddg.load_model(run), feddg.load_model(tmp_path / "model")
    size = RunClassifier(run).description.image_size
    pixels = torch.rand(5, 3, size, size, generator=torch.Generator().manual_seed(0))
    assert torch.equal(own(pixels), loaded(pixels))


def test_only_what_rebuilds_the_network_leaves(tmp_path, cache, image_files):
    """Of the settings those of the network; no file, no client."""
    run = trained_run(
        tmp_path / "runs",
        cache,
        method={"name": "pardon", "settings": {"codec": "colors", "strength": 0.25}},
        data={"source": "folder", "root": str(image_files), "image_size": 16, "id_val": 0.2},
        hold_out="west",
        name="mine",
        seed=7,
        model={"backbone": "cnn", "weights": None},
        clients={"number": 2, "partition": "domain"},
        train={"rounds": 1, "local_steps": 1, "batch_size": 4, "augmentation": "none"},
    )
    folder = tmp_path / "model"
    save_model(run, folder)
    config = json.loads((folder / CONFIG).read_text())
    assert config.keys() == {"feddg_model", "weights_sha256", "network", "about"}
    assert config["network"].keys() == {"method", "model", "train", "mean", "std", "seed"}
    assert config["network"]["model"].keys() == {"backbone", "embedding", "normalization"}
    assert config["network"]["train"].keys() == {"trainable", "lora_rank"}
    assert config["network"]["method"]["settings"]["strength"] == 0.25
    trained = load_trained(run)
    method = build_method("ccst+jigen", {"encoder": tmp_path / "encoder.safetensors"})
    settings = network_config(trained.experiment, method, trained.network).method["settings"]
    assert "encoder" not in settings
    whole = b"".join(path.read_bytes() for path in folder.iterdir())
    for secret in (str(tmp_path), "patient", "anna", "client_id", str(image_files.name)):
        assert secret.encode() not in whole, secret
    text = (folder / "README.md").read_text()
    assert "| north | " in text, "names of domains, with their numbers of images, do leave"


@pytest.fixture
def image_files(tmp_path):
    """Images with names that are nobody's business."""
    root = tmp_path / "secret_place"
    for domain, style in (("north", "ink"), ("south", "chalk"), ("west", "sketch")):
        for number, file in enumerate(write_images(root / domain, 12, style)):
            folder = root / domain / ("odd" if number % 2 else "even")
            folder.mkdir(exist_ok=True)
            file.rename(folder / f"patient_anna_{number}.png")
    return root


def test_the_card_is_one_that_the_hub_reads(run_of, tmp_path, monkeypatch):
    from huggingface_hub import ModelCard

    save_model(run_of("fedavg"), tmp_path / "model")
    found = ModelCard((tmp_path / "model" / "README.md").read_text()).data
    assert (found.library_name, found.pipeline_tag) == ("feddg", "image-classification")
    assert {"federated-learning", "domain-generalization", "fedavg"} <= set(found.tags)
    assert found.metrics == ["accuracy"]
    [result] = found.eval_results
    assert (result.dataset_name, result.metric_type) == ("sketch", "accuracy")
    assert 0 < result.metric_value <= 1
    assert found.license == "other", "it began from random values: the images' terms are not known"
    assert "hf:owner/name" in found.to_yaml() + (tmp_path / "model" / "README.md").read_text()


def test_why_a_run_did_not_end_and_where_it_is_stays(run_of, tmp_path):
    run = shutil.copytree(run_of("fedavg"), tmp_path / "Doe" / "run")
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    ended = summary | {"status": "failed", "error": "site-2: /data/Doe/7.png is damaged"}
    (run / "summary.json").write_text(json.dumps(ended), "utf-8")
    shared = save_model(run, tmp_path / "shared").path
    exported = export_run(run, tmp_path / "model.safetensors", "safetensors")
    for told in (shared / "config.json", shared / "README.md", exported.path, exported.card):
        text = told.read_bytes()
        assert b"The run has not ended. This is round " in text
        assert b"Doe" not in text


def test_adapters_beside_published_weights_whose_licence_is_said(tmp_path, cache):
    pytest.importorskip("peft", reason="needs peft (feddg[lora])")
    run = trained_run(
        tmp_path / "runs",
        cache,
        model={"backbone": "efficientnet_lite0", "weights": "imagenet"},
        train={"rounds": 1, "local_steps": 1, "batch_size": 8, "trainable": "lora", "lora_rank": 2},
    )
    save_model(run, tmp_path / "model")
    pixels = torch.rand(2, 3, 32, 32)
    loaded = feddg.load_model(tmp_path / "model")
    assert torch.equal(loaded(pixels), feddg.load_model(run)(pixels))
    assert loaded.mean == (0.5, 0.5, 0.5), "the weights' own colours"
    text = (tmp_path / "model" / "README.md").read_text()
    assert yaml.safe_load(text.split("---")[1])["license"] == "apache-2.0"
    assert "began from ImageNet weights under apache-2.0" in text


def test_a_data_set_with_a_mirror_is_linked(run_of):
    from feddg.prediction.card import _front_matter, weights_license
    from feddg.prediction.classifier import describe_model
    from feddg.runs.reading import read_run

    assert weights_license("cnn") is weights_license("resnet18") is None
    run = run_of("fedavg")
    record, about = read_run(run), describe_model(run, load_trained(run))
    record.settings["data"]["source"] = "pacs"
    fields = yaml.safe_load(_front_matter(record, about, [], None))
    assert (fields["license"], fields["datasets"]) == ("other", ["flwrlabs/pacs"])
    assert "model-index" not in fields


def test_uploaded_and_used_from_the_hub(run_of, hub, images, tmp_path):
    run, folder = run_of("fedavg"), tmp_path / "model"
    done = CliRunner().invoke(app, ["export", str(run), "--hub", str(folder)])
    assert done.exit_code == 0, done.output
    assert f"model card: {folder / 'README.md'}" in done.output
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    first = hub.commit(f"models/{NAME}", files)
    pixels = torch.rand(3, 3, 32, 32)
    assert torch.equal(feddg.load_model(f"hf:{NAME}")(pixels), feddg.load_model(run)(pixels))
    asked = len([one for one in hub.asked if one[0] == "GET"])
    table = str(tmp_path / "labels.csv")
    done = CliRunner().invoke(app, ["predict", f"hf:{NAME}", str(images), "--out", table])
    assert done.exit_code == 0, done.output
    assert len(read_csv(Path(table))) == 30
    assert asked == len([one for one in hub.asked if one[0] == "GET"]), "it is downloaded once"
    hub.commit(f"models/{NAME}", {CONFIG: b"{}"})
    with pytest.raises(RunError, match="holds no model of feddg"):
        feddg.load_model(f"hf:{NAME}")
    assert torch.equal(
        feddg.load_model(f"hf:{NAME}@{first}")(pixels), feddg.load_model(run)(pixels)
    )
    (folder / WEIGHTS).write_bytes(b"")
    with pytest.raises(RunError, match="SHA-256"):
        feddg.load_model(folder)


def test_what_the_hub_refuses_is_one_line(hub):
    hub.commit("models/an/other", {"config.json": b'{"model_type": "vit"}', WEIGHTS: b"many"})
    hub.commit("models/a/gguf", {"weights.gguf": b""})
    for name, words in (
        ("no/body", "Cannot load hf:no/body: .*Repository Not Found"),
        ("an/other@v2", "Revision Not Found"),
        ("an/other", "holds no model of feddg"),
        ("a/gguf", "Entry Not Found"),
        ("not a name", "Cannot load hf:not a name: "),
    ):
        with pytest.raises(FeddgError, match=words) as caught:
            feddg.load_model(f"hf:{name}")
        assert "\n" not in str(caught.value)
    assert not any(path.endswith(WEIGHTS) for _, path, _ in hub.asked), "first the configuration"


def test_what_is_there_is_not_replaced(run_of, tmp_path):
    run = run_of("fedavg")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(RunError, match="holds something else; name a new folder"):
            save_model(run, tmp_path / name)
    (tmp_path / "other's").mkdir()
    (tmp_path / "other's/config.json").write_text('{"architectures": ["BertModel"]}')
    with pytest.raises(RunError, match="another program's"):
        save_model(run, tmp_path / "other's")
    assert len(list((tmp_path / "other's").iterdir())) == 1
    save_model(run, tmp_path / "model")
    save_model(run, tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("a page of my own")
    save_model(run, tmp_path / "model")
    assert (tmp_path / "model" / "README.former.md").read_text() == "a page of my own"
    with pytest.raises(AdaptationError, match="pass --adapt when you use it"):
        save_model(run, tmp_path / "other", adapt="iabn")


@pytest.mark.parametrize("names", [("cat", "cat"), ("cat", ""), (" ",)])
def test_classes_that_cannot_be_told_apart_are_no_model(names):
    with pytest.raises(ValidationError, match="class_names"):
        ModelDescription(class_names=names, image_size=8, resize="squash", input="RGB")


def test_a_folder_is_no_run(run_of, tmp_path):
    save_model(run_of("fedavg"), tmp_path / "model")
    for act in (
        lambda: evaluate(tmp_path / "model"),
        lambda: export_run(tmp_path / "model", tmp_path / "m.safetensors", "safetensors"),
        lambda: save_model(tmp_path / "model", tmp_path / "again"),
    ):
        with pytest.raises(RunError, match="holds no run"):
            act()
    with pytest.raises(RunError, match="There is no run folder"):
        save_model("hf:owner/name", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_meaningless_model_says_so_and_may_be_refused(meaningless, tmp_path):
    done = save_model(meaningless, tmp_path / "model")
    assert done.description.diagnostics
    assert RunClassifier(tmp_path / "model").diagnostics == done.description.diagnostics
    with pytest.raises(RunError, match="Leave out --strict"):
        save_model(meaningless, tmp_path / "other", strict=True)
