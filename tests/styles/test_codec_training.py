"""Training a codec, interrupted or not."""

import csv
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from feddg.cli import app
from feddg.errors import DataError, WeightsError
from feddg.rng import stream
from feddg.styles.codec import load_codec
from feddg.styles.codec_training import Progress, Recipe, train_codec
from feddg.styles.codecs.vgg19 import Vgg19Codec
from feddg.styles.training_losses import TERMS
from style_images import write_images


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    root = tmp_path_factory.mktemp("pictures")
    return {
        "content": [write_images(root / "a", 3), write_images(root / "b", 2)],
        "style": [write_images(root / "c", 4)],
    }


SMALL = {"sizes": (16, 24), "batch_pixels": 1024, "seed": 3}


def recipe(steps: int, **changed) -> Recipe:
    return Recipe(steps=steps, **(SMALL | changed))


@pytest.fixture(scope="module")
def judging_network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder of the VGG-19 shape, narrow, with random weights."""
    path = tmp_path_factory.mktemp("network") / "encoder.safetensors"
    widths = (4, 4, "pool", 6, 6, "pool", 8, 8, 8, 8, "pool", 10)
    shape = type(Vgg19Codec.architecture)(widths, (3,), colour_layer=True)
    layers = shape.modules()[0].to_empty(device="cpu")
    generator = stream(0, "network")
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
            nn.init.zeros_(layer.bias)
    save_file(layers.state_dict(), path)
    return path


def test_three_steps_write_a_decoder_that_loads(folders, tmp_path: Path) -> None:
    heard: list[Progress] = []
    decoder = train_codec(**folders, out=tmp_path, recipe=recipe(3), progress=heard.append)
    assert decoder == tmp_path / "decoder.safetensors"
    assert not (tmp_path / "encoder.safetensors").exists()
    assert {tensor.dtype for tensor in load_file(decoder).values()} == {torch.float16}
    trained = load_codec("compact", decoder=decoder)
    assert trained.fingerprint() != load_codec("compact").fingerprint()
    assert [(said.step, said.steps) for said in heard] == [(3, 3)]
    assert set(heard[0].losses) == set(TERMS)


def test_loss_falls(folders, tmp_path: Path) -> None:
    train_codec(**folders, out=tmp_path, recipe=recipe(100, learning_rate=2e-3))
    with (tmp_path / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [25, 50, 75, 100]
    for term in ("style", "reconstruction"):
        assert float(rows[-1][term]) < 0.8 * float(rows[0][term])


def test_same_seed_same_weights_even_when_interrupted(
    folders, judging_network: Path, tmp_path: Path
) -> None:
    """With everything that has a state: both parts of the codec, and the critic."""
    chosen = {"recipe": recipe(30, critic_weight=0.2), "loss_network": judging_network}
    through = train_codec(**folders, out=tmp_path / "through", **chosen)

    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    again = {"out": tmp_path / "interrupted", "save_every": 10, **chosen}
    with pytest.raises(KeyboardInterrupt):
        train_codec(**folders, progress=stop, **again)  # at step 25, saved at 20
    continued = train_codec(**folders, **again)
    for name in ("encoder.safetensors", "decoder.safetensors", "loss.csv", "state.safetensors"):
        assert (through.parent / name).read_bytes() == (continued.parent / name).read_bytes()


def test_global_generator_is_left_alone(folders, judging_network: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    chosen = {"loss_network": judging_network}
    first = train_codec(
        **folders, out=tmp_path / "1", recipe=recipe(2, critic_weight=0.1), **chosen
    ).read_bytes()
    assert torch.equal(before, torch.get_rng_state())
    other = train_codec(
        **folders, out=tmp_path / "2", recipe=recipe(2, critic_weight=0.1, seed=4), **chosen
    )
    assert first != other.read_bytes()


def test_under_another_network_the_encoder_is_trained(
    folders, judging_network: Path, tmp_path: Path
) -> None:
    start = tmp_path / "first.safetensors"
    encoder = load_codec("compact").encoder.state_dict()
    save_file({key: weight.contiguous() for key, weight in encoder.items()}, start)
    decoder = train_codec(
        **folders, out=tmp_path, recipe=recipe(2), loss_network=judging_network, encoder=start
    )
    trained = load_file(tmp_path / "encoder.safetensors")
    for key, weight in encoder.items():
        assert not torch.equal(trained[key].float(), weight)
        torch.testing.assert_close(trained[key].float(), weight, atol=0.01, rtol=0.01)
    load_codec("compact", encoder=tmp_path / "encoder.safetensors", decoder=decoder)


def test_the_encoder_can_be_kept_under_another_network(
    folders, judging_network: Path, tmp_path: Path
) -> None:
    chosen = recipe(2, keep_encoder=True)
    decoder = train_codec(**folders, out=tmp_path, recipe=chosen, loss_network=judging_network)
    assert not (tmp_path / "encoder.safetensors").exists()
    trained = load_codec("compact", decoder=decoder)
    before = load_codec("compact").encoder.state_dict()
    for key, weight in trained.encoder.state_dict().items():
        assert torch.equal(weight, before[key])
    alone = train_codec(**folders, out=tmp_path / "alone", recipe=recipe(2))
    assert alone.read_bytes() != decoder.read_bytes()  # another judge


def test_other_settings_do_not_continue(folders, tmp_path: Path) -> None:
    train_codec(**folders, out=tmp_path, recipe=recipe(2))
    with pytest.raises(DataError, match=r"other settings \(steps, sizes\)"):
        train_codec(**folders, out=tmp_path, recipe=recipe(3, sizes=(16,)))
    with pytest.raises(DataError, match=r"other settings \(images\)"):
        train_codec(
            content=folders["style"], style=folders["style"], out=tmp_path, recipe=recipe(2)
        )
    (tmp_path / "state.safetensors").write_text("damaged")
    with pytest.raises(DataError, match=r"state\.safetensors"):
        train_codec(**folders, out=tmp_path, recipe=recipe(2))


def test_a_vgg19_decoder_can_be_trained(folders, judging_network: Path, tmp_path: Path) -> None:
    chosen = recipe(1, codec="vgg19")
    decoder = train_codec(**folders, out=tmp_path, recipe=chosen, encoder=judging_network)
    assert load_codec("vgg19", encoder=judging_network, decoder=decoder).channels == 10
    with pytest.raises(WeightsError, match="needs an encoder and a decoder file"):
        train_codec(**folders, out=tmp_path, recipe=chosen)


def test_a_codec_without_weights_cannot_be_trained(folders, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="'colors' has nothing to train"):
        train_codec(**folders, out=tmp_path, recipe=recipe(1, codec="colors"))


def test_the_command_line_trains_and_goes_on(
    folders, judging_network: Path, tmp_path: Path
) -> None:
    content = [str(word) for path in folders["content"] for word in ("--content", path)]
    command = ["style", "train", *content, "--style", str(folders["style"][0])]
    command += ["--out", str(tmp_path), "--steps", "2", "--size", "16", "--size", "24"]
    command += ["--loss-network", str(judging_network), "--critic", "0.1", "--save-every", "1"]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    written = (tmp_path / "decoder.safetensors").read_bytes()
    assert CliRunner().invoke(app, command).exit_code == 0
    assert (tmp_path / "decoder.safetensors").read_bytes() == written
    expected = Recipe(steps=2, sizes=(16, 24), critic_weight=0.1)
    again = train_codec(
        **folders, out=tmp_path / "again", recipe=expected, loss_network=judging_network
    )
    assert again.read_bytes() == written


def test_folders_without_images_are_named(folders, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "readme.txt").write_text("no image")
    (tmp_path / "notes" / "broken.png").write_text("no image either")
    for folder, complaint in (("absent", "no such folder"), ("notes", "no readable image")):
        with pytest.raises(DataError, match=rf"{folder}: {complaint}"):
            train_codec(content=[tmp_path / folder], style=folders["style"], out=tmp_path)
    with pytest.raises(DataError, match="style: no folder"):
        train_codec(content=folders["content"], style=[], out=tmp_path)


def test_training_can_start_from_weights(folders, tmp_path: Path) -> None:
    first = train_codec(**folders, out=tmp_path / "first", recipe=recipe(2))
    second = train_codec(
        **folders, out=tmp_path / "second", recipe=recipe(1, learning_rate=0.0), start=first
    )
    assert first.read_bytes() == second.read_bytes()
