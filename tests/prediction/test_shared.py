"""A model as a folder: what is refused before anything is built or believed."""

import hashlib
import json
import math
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import feddg
from feddg.errors import RunError
from feddg.prediction.export import save_model
from feddg.prediction.shared import CONFIG, WEIGHTS, read_shared
from odd_inputs import NOT_FINITE


@pytest.fixture(scope="module")
def shared(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as a folder."""
    folder = tmp_path_factory.mktemp("shared") / "model"
    save_model(finished, folder)
    return folder


@pytest.fixture
def folder(shared: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(shared, tmp_path / "model"))


def change(folder: Path, update: Callable[[dict], object]) -> None:
    fields = json.loads((folder / CONFIG).read_text())
    update(fields)
    (folder / CONFIG).write_text(json.dumps(fields))


def replace_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Other weights, which the configuration speaks of."""
    save_file(weights, folder / WEIGHTS)
    digest = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    change(folder, lambda fields: fields.update(weights_sha256=digest))


def refused(folder: Path, words: str) -> None:
    with pytest.raises(RunError, match=words) as caught:
        feddg.load_model(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "[1]", "{}", '{"model_type": "vit"}', '{"feddg_model": "x"}', "[" * 100_000]
)
def test_a_folder_of_another_program_is_refused(folder: Path, text: str) -> None:
    (folder / CONFIG).write_text(text)
    refused(folder, "holds no model of feddg")


def test_a_newer_version_is_named(folder: Path) -> None:
    change(folder, lambda fields: fields.update(feddg_model=2, something={"new": 1}))
    refused(folder, "newer version of feddg: pip install -U feddg")


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (lambda f: f.update(code="os"), "unknown field 'code'"),
        (lambda f: f["network"].update(root="x"), "unknown field 'network.root'"),
        (lambda f: f["network"].update(mean=[0, 0]), "network.mean"),
        (lambda f: f["network"].update(mean=[0, 0, math.nan]), "network.mean"),
        (lambda f: f["network"].update(std=[1, 1, 0]), "network.std"),
        (lambda f: f["network"].update(std=[1, 1, -1]), "network.std"),
        (lambda f: f["about"].update(class_names=[]), "about.class_names"),
        (lambda f: f["about"].update(image_size=0), "about.image_size"),
        (lambda f: f["about"].update(resize="often"), "about.resize"),
        (lambda f: f["about"].update(features=2**62), "about.features"),
        (lambda f: f["about"].update(depths=[10**9]), "about.depths"),
        (lambda f: f["about"].update(tile=1), "about.tile"),
        (lambda f: f["about"].update(bands=[3, 2]), "about.bands"),
        (lambda f: f["about"].update(bands=[0]), "about.bands"),
        (lambda f: f["network"]["model"].update(backbone="timm:hf-hub:a/b"), "unknown backbone"),
        (lambda f: f["network"]["model"].update(layers=3), "model.layers"),
        (lambda f: f["network"]["method"].update(name="os.system"), "unknown method"),
        (lambda f: f["network"]["method"].update(settings={"x": 1}), "x"),
        (lambda f: f["about"]["class_names"].pop(), r"size mismatch for classifier\.weight"),
    ],
)
def test_settings_that_are_none_are_named(folder: Path, update, words: str) -> None:
    change(folder, update)
    refused(folder, words)


def test_what_a_model_says_of_itself_cannot_command_a_terminal(folder: Path) -> None:
    change(folder, lambda fields: fields["about"].update(result="good\x1b[2J"))
    assert read_shared(folder).about.result == r"good\x1b[2J"


def test_other_weights_are_refused(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (folder / WEIGHTS).write_bytes(content)
    refused(folder, "is not the file that config.json names: its SHA-256")
    (folder / WEIGHTS).unlink()
    refused(folder, "Cannot read .*model.safetensors")


def test_weights_that_do_not_fit_are_refused(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    name = "classifier.weight"
    replace_weights(folder, weights | {name: weights[name][:, :3].contiguous()})
    refused(folder, rf"does not fit .*size mismatch for {name}: .*\[10, 3\].*\[10, 128\]")
    replace_weights(folder, weights | {"more": torch.zeros(1)})
    refused(folder, 'does not fit .*Unexpected.*"more"')
    replace_weights(folder, {key: value for key, value in weights.items() if key != name})
    refused(folder, f'does not fit .*Missing.*"{name}"')


@pytest.mark.parametrize("value", [*NOT_FINITE, -1.0])
def test_weights_that_are_no_usable_numbers_are_refused(folder: Path, value: float) -> None:
    weights = load_file(folder / WEIGHTS)
    name = next(name for name in weights if name.endswith("running_var"))
    weights[name][0] = value
    replace_weights(folder, weights)
    refused(folder, "holds no usable model: .*running_var.* is (not finite|below 0)")


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("model", {"backbone": "vit_h_14"}),
        ("model", {"backbone": "regnet_y_128gf"}),
        ("train", {"trainable": "lora", "lora_rank": 10**9}),
        ("train", {"trainable": "lora", "lora_rank": 10**18}),
    ],
)
def test_a_network_far_larger_than_its_weights_is_never_built(
    folder: Path, part: str, values: dict[str, object], monkeypatch
) -> None:
    if "lora_rank" in values:
        pytest.importorskip("peft")
    change(folder, lambda fields: fields["network"][part].update(values))
    sizes, plain = [], torch.nn.Parameter.__new__

    def noted(cls, data=None, requires_grad=True):
        if data is not None and data.device.type != "meta":
            sizes.append(data.numel())
        return plain(cls, data, requires_grad)

    monkeypatch.setattr(torch.nn.Parameter, "__new__", noted)
    of_one_size = values.get("backbone") == "vit_h_14"
    refused(folder, "takes no images" if of_one_size else "does not fit|cannot be built|lora")
    assert max(sizes, default=0) < 10**7


def test_nothing_is_unpickled(folder: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    (folder / WEIGHTS).write_bytes(pickle.dumps(Trap()))
    digest = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    change(folder, lambda fields: fields.update(weights_sha256=digest))
    refused(folder, "cannot be read as safetensors")
    assert not (tmp_path / "sprung").exists()


def test_it_is_one_model_as_it_is(folder: Path) -> None:
    with pytest.raises(RunError, match="--which is for run folders"):
        feddg.load_model(folder, which="final")
