"""Exported models answer as the run does, say what they are, and work without feddg."""

import json
import math
import subprocess
import sys

import numpy
import pytest
import timm
import torch
import torchvision
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from feddg.cli import app
from feddg.data.pixels import as_unit
from feddg.errors import AdaptationError, MissingPackage, RunError
from feddg.models.backbones import own_state
from feddg.prediction import model_file
from feddg.prediction.export import export_run
from feddg.prediction.model import load_model, load_trained
from feddg.prediction.model_file import DeployedClassifier, example
from feddg.rng import DrawnFrom
from feddg.runs.energy import energy
from trained_runs import SHORT, trained_run


@pytest.fixture
def onnxruntime():
    pytest.importorskip("onnx", reason="needs the extra `export`")
    pytest.importorskip("onnxscript", reason="needs the extra `export`")
    return pytest.importorskip("onnxruntime", reason="needs the extra `export`")


def expected(run, pixels, adapt=None):
    with torch.inference_mode():
        logits = load_model(run, adapt=adapt)(as_unit(pixels)).float()
    return logits.softmax(1).numpy(), logits.argmax(1).numpy(), energy(logits).numpy()


@pytest.mark.parametrize(
    ("method", "adapt"),
    [("fedavg", None), ("fedavg", "fixed:alpha=0.3"), ("fedig-a", None), ("copa", None)],
)
def test_onnx_answers_as_the_run_does(run_of, tmp_path, onnxruntime, method, adapt):
    run, path = run_of(method), tmp_path / "model.onnx"
    done = export_run(run, path, "onnx", adapt=adapt)
    assert done.description.checked == {"random_images": 64, "real_images": 128}
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    pixels = example(done.description.image_size, 33, seed=7)
    for count in (1, 33):
        own = pixels[:count]
        found = session.run(None, {"images": own.numpy()})
        shares, labels, energies = expected(run, own, adapt)
        assert numpy.abs(found[0] - shares).max() < 1e-4
        assert (found[1] == labels).all()
        assert numpy.abs(found[2] - energies).max() < 1e-3
    said = json.loads(session.get_modelmeta().custom_metadata_map["feddg"])
    assert said["class_names"] == list(load_trained(run).class_names)
    assert said["opset"] == 18
    assert said["image_size"] == done.description.image_size
    assert session.get_inputs()[0].shape[0] == "batch"


def test_torch_programs_work_in_a_process_that_has_no_feddg(run_of, tmp_path):
    pixels = {}
    for method in ("fedavg", "fedig-a"):
        done = export_run(run_of(method), tmp_path / f"{method}.pt2", "torch")
        pixels[method] = example(done.description.image_size, 5, seed=7)
        numpy.save(tmp_path / f"{method}_pixels.npy", pixels[method].numpy())
    script = (
        "import sys, numpy, torch\n"
        "sys.modules['feddg'] = None\n"
        "for method in sys.argv[1:]:\n"
        "    extra = {'feddg.json': ''}\n"
        "    model = torch.export.load(f'{method}.pt2', extra_files=extra).module()\n"
        "    shares, labels, _ = model(torch.from_numpy(numpy.load(f'{method}_pixels.npy')))\n"
        "    numpy.save(f'{method}.npy', shares.detach().numpy())\n"
        "    open(f'{method}.json', 'w').write(extra['feddg.json'])\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", script, *pixels]
    subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    for method in pixels:
        run, said = run_of(method), json.loads((tmp_path / f"{method}.json").read_text())
        assert said["class_names"] == list(load_trained(run).class_names)
        shares = numpy.load(tmp_path / f"{method}.npy")
        assert numpy.abs(shares - expected(run, pixels[method])[0]).max() < 1e-4


def test_several_classifiers_are_exported_under_an_adaptation(run_of, tmp_path):
    done = export_run(run_of("copa"), tmp_path / "x.pt2", "torch", adapt="fixed:alpha=0.3")
    assert done.checked == 192  # compared with the run before the file is put in its place
    assert done.path.is_file()


def test_weights_are_the_runs_to_the_bit(run_of, tmp_path):
    run, path = run_of("fedavg"), tmp_path / "model.safetensors"
    export_run(run, path, "safetensors")
    own = own_state(load_trained(run).network)
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(own)
        assert all(torch.equal(file.get_tensor(name), own[name]) for name in own)
        about = json.loads(file.metadata()["feddg"])
    assert about["image_size"] == 32
    assert about["input"].endswith("minus (0.485, 0.456, 0.406), divided by (0.229, 0.224, 0.225)")


@pytest.mark.parametrize("backbone", ["resnet18", "efficientnet_lite0", "timm:resnet18"])
def test_weights_are_for_the_network_that_the_file_names(tmp_path, cache, backbone):
    fields = {**SHORT, "data": {"source": "digits", "image_size": 32}}
    model = {"backbone": backbone, "weights": None}
    run, path = trained_run(tmp_path, cache, model=model, **fields), tmp_path / "w.safetensors"
    name = export_run(run, path, "safetensors").description.backbone
    with DrawnFrom(0):
        if name.startswith("timm:"):
            own = timm.create_model(name.removeprefix("timm:"), num_classes=10)
        else:
            own = torchvision.models.get_model(name, num_classes=10)
    own.load_state_dict(load_file(path), strict=True)
    pixels = example(32, 4, seed=7)
    shares, *_ = expected(run, pixels)
    trained = load_model(run)
    with torch.inference_mode():
        logits = own.eval()(trained.normalize(as_unit(pixels)))
    assert logits.softmax(1).numpy() == pytest.approx(shares, abs=1e-5)


def test_a_model_keeps_the_normalisation_it_was_trained_with(tmp_path, cache):
    run = trained_run(tmp_path, cache, model={"backbone": "test_resnet", "weights": None}, **SHORT)
    written = json.loads((run / "environment.json").read_text())
    assert written["normalization"] == {"mean": [0.5] * 3, "std": [0.5] * 3}
    images = torch.rand(2, 3, 32, 32)
    halves = load_model(run)
    torch.testing.assert_close(halves.normalize(images), 2 * images - 1)
    # Another version of timm may expect other colours of its default weights.
    written["normalization"] = {"mean": [0.0] * 3, "std": [1.0] * 3}
    (run / "environment.json").write_text(json.dumps(written))
    assert torch.equal(load_model(run).normalize(images), images)


@pytest.mark.parametrize("adapt", ["tent", "tsmobn", "random"])
def test_adaptations_with_a_memory_are_refused(run_of, tmp_path, adapt):
    with pytest.raises(AdaptationError, match="remembers the images"):
        export_run(run_of("fedavg"), tmp_path / "model.pt2", "torch", adapt=adapt)
    assert not list(tmp_path.iterdir())


def test_a_file_that_answers_differently_is_not_written(run_of, tmp_path, monkeypatch):
    write = model_file._write_program

    def wrong(*arguments):
        answer = write(*arguments)
        return lambda images: (answer(images)[0] + 2e-4, answer(images)[1])

    monkeypatch.setattr(model_file, "_write_program", wrong)
    (tmp_path / "model.pt2").write_text("what was there")
    with pytest.raises(RunError, match="was not written"):
        export_run(run_of("fedavg"), tmp_path / "model.pt2", "torch")
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt2"]
    assert (tmp_path / "model.pt2").read_text() == "what was there"


def test_one_format_is_asked_for(run_of, tmp_path):
    ended = CliRunner().invoke(app, ["export", str(run_of("fedavg"))])
    assert isinstance(ended.exception, RunError)
    with pytest.raises(AdaptationError, match="weights alone"):
        export_run(run_of("fedavg"), tmp_path / "x.safetensors", "safetensors", adapt="iabn")


def test_onnx_without_its_extra_is_one_clear_line(run_of, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    pytest.importorskip("onnx", reason="needs the extra `export`")
    with pytest.raises(MissingPackage, match=r"feddg\[export\]"):
        export_run(run_of("fedavg"), tmp_path / "x.onnx", "onnx")


def test_the_graph_gives_no_label_to_what_is_not_finite():
    logits = torch.tensor([[0.0, 1.0], [math.nan, 1.0], [1.0, math.inf], [-math.inf, 0.0]])

    class Model(torch.nn.Module):
        def forward(self, images):
            return logits

    _, label, _ = DeployedClassifier(Model())(torch.zeros(4, 3, 8, 8))
    assert label.tolist() == [1, -1, -1, 1]
