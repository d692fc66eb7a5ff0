"""Training a decoder, and the image variants it learns from."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from feddg.errors import DataError, WeightsError
from feddg.randomness import numpy_stream, stream
from feddg.styles import decoder_training as training
from feddg.styles.codec import adain, load_codec, vgg19_modules
from feddg.styles.decoder_training import Progress, load_images, train_decoder
from feddg.styles.variants import VARIANTS, Variant, grey, inverted, line_drawing, unchanged


def write_images(folder: Path, number: int, side: int = 40) -> Path:
    """Coloured ramps with a bright square; something a decoder can learn."""
    folder.mkdir(parents=True)
    draws = numpy_stream(number, "images", folder.name)
    for index in range(number):
        ramp = np.linspace(0, 1, side)[:, None, None] * draws.random(3) * np.ones((1, side, 1))
        ramp[5:20, 10:25] = draws.random(3)
        Image.fromarray((ramp * 255).astype(np.uint8)).save(folder / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    root = tmp_path_factory.mktemp("pictures")
    return {
        "content": [write_images(root / "a", 3), write_images(root / "b", 2)],
        "style": [write_images(root / "c", 4)],
    }


TINY = {"size": 16, "batch_size": 4, "seed": 3}


def test_three_steps_write_a_decoder_that_loads(
    folders: dict[str, list[Path]], tmp_path: Path
) -> None:
    heard: list[Progress] = []
    decoder = train_decoder(**folders, out=tmp_path / "new", steps=3, progress=heard.append, **TINY)
    assert decoder == tmp_path / "new" / "decoder.safetensors"
    assert {tensor.dtype for tensor in load_file(decoder).values()} == {torch.float16}
    trained = load_codec("compact", decoder=decoder)
    assert trained.fingerprint() != load_codec("compact").fingerprint()
    assert [(said.step, said.steps) for said in heard] == [(3, 3)]
    assert set(heard[0].losses) == set(training.TERMS)
    assert not list((tmp_path / "new").glob("*.partial"))


def test_loss_falls(folders: dict[str, list[Path]], tmp_path: Path) -> None:
    train_decoder(**folders, out=tmp_path, steps=75, **TINY)
    with (tmp_path / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [25, 50, 75]
    for term in ("style", "reconstruction"):
        assert float(rows[-1][term]) < 0.8 * float(rows[0][term])


def test_same_seed_same_weights_even_when_interrupted(
    folders: dict[str, list[Path]], tmp_path: Path
) -> None:
    through = train_decoder(**folders, out=tmp_path / "through", steps=30, **TINY)

    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    interrupted = {"out": tmp_path / "interrupted", "steps": 30, "save_every": 10, **TINY}
    with pytest.raises(KeyboardInterrupt):
        train_decoder(**folders, progress=stop, **interrupted)  # at step 25, saved at 20
    continued = train_decoder(**folders, **interrupted)
    assert through.read_bytes() == continued.read_bytes()
    curves = [(path.parent / "loss.csv").read_text() for path in (through, continued)]
    assert curves[0] == curves[1]


def test_global_generator_is_left_alone(folders: dict[str, list[Path]], tmp_path: Path) -> None:
    before = torch.get_rng_state()
    first = train_decoder(**folders, out=tmp_path / "1", steps=2, **TINY).read_bytes()
    assert torch.equal(before, torch.get_rng_state())
    other = train_decoder(**folders, out=tmp_path / "2", steps=2, **(TINY | {"seed": 4}))
    assert first != other.read_bytes()


def test_other_settings_do_not_continue(folders: dict[str, list[Path]], tmp_path: Path) -> None:
    train_decoder(**folders, out=tmp_path, steps=2, **TINY)
    with pytest.raises(DataError, match=r"other settings \(steps\)"):
        train_decoder(**folders, out=tmp_path, steps=3, **TINY)
    with pytest.raises(DataError, match=r"other settings \(images\)"):
        train_decoder(
            content=folders["style"], style=folders["style"], out=tmp_path, steps=2, **TINY
        )
    (tmp_path / "state.safetensors").write_text("damaged")
    with pytest.raises(DataError, match=r"state\.safetensors"):
        train_decoder(**folders, out=tmp_path, steps=2, **TINY)


def test_vgg19_decoder_can_be_trained(folders: dict[str, list[Path]], tmp_path: Path) -> None:
    encoder = tmp_path / "vgg_normalised.pth"
    torch.save(vgg19_modules()[0].state_dict(), encoder)
    small = TINY | {"batch_size": 2}
    decoder = train_decoder(
        **folders, out=tmp_path / "out", steps=1, name="vgg19", encoder=encoder, **small
    )
    assert load_codec("vgg19", encoder=encoder, decoder=decoder).channels == 512
    with pytest.raises(WeightsError, match="needs its encoder"):
        train_decoder(**folders, out=tmp_path / "out", steps=1, name="vgg19", **small)


def test_folders_without_images_are_named(folders: dict[str, list[Path]], tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "readme.txt").write_text("no image")
    (tmp_path / "notes" / "broken.png").write_text("no image either")
    for folder, complaint in (("absent", "no such folder"), ("notes", "no readable image")):
        with pytest.raises(DataError, match=rf"{folder}: {complaint}"):
            train_decoder(content=[tmp_path / folder], style=folders["style"], out=tmp_path)
    with pytest.raises(DataError, match="style: no folder"):
        train_decoder(content=folders["content"], style=[], out=tmp_path)


def test_load_images_searches_in_depth(folders: dict[str, list[Path]]) -> None:
    images = load_images([folders["content"][0].parent], 20)
    assert images.shape == (9, 3, 20, 20)
    assert images.dtype == torch.uint8


def test_loss_terms_are_zero_for_a_perfect_decoder() -> None:
    """If decoding gave the original back at strength 0, no term would remain."""
    images = torch.rand(2, 3, 32, 32, generator=stream(0, "images"))
    codec = load_codec()
    perfect = training.Codec("compact", codec.encoder, nn.Sequential(_Answer(images)))
    batch = training._Batch(images, images.flip(0), torch.zeros(2, 1, 1), pooled=False)
    for term in training._loss_terms(perfect, batch):
        assert term.item() == pytest.approx(0, abs=1e-8)


def test_loss_terms_by_hand() -> None:
    images = torch.rand(2, 3, 32, 32, generator=stream(1, "images"))
    styles = torch.rand(2, 3, 32, 32, generator=stream(2, "images")) * 0.5
    answer = torch.rand(2, 3, 32, 32, generator=stream(3, "images"))
    codec = load_codec()
    fixed = training.Codec("compact", codec.encoder, nn.Sequential(_Answer(answer)))
    strength = torch.tensor([0.0, 1.0]).reshape(2, 1, 1)
    content, style, reconstruction, overshoot = training._loss_terms(
        fixed, training._Batch(images, styles, strength, pooled=False)
    )
    # The first image is reconstructed, the second takes on the second style.
    wanted = [images[:1], styles[1:]]
    target = torch.cat(
        [
            codec.encode(images[:1]),
            adain(codec.encode(images[1:]), _style(codec.encode(styles[1:]))),
        ]
    )
    reached = codec.encode(answer)
    assert content.item() == pytest.approx(((reached - target) ** 2).mean().item(), rel=1e-4)
    assert reconstruction.item() == pytest.approx((answer[0] - images[0]).abs().mean().item())
    expected = 0.0
    for depth in (3, 10, 13):  # up to the ReLU of conv1_1, of conv2_1, and of the last one
        maps = [codec.encoder[:depth](image) for image in wanted]
        targets = torch.stack([_style(features) for features in maps])
        moments = codec.encoder[:depth](answer)
        found = torch.stack([_style(features[None]) for features in moments])
        expected += ((found - targets) ** 2).mean().item()
    assert style.item() == pytest.approx(expected, rel=1e-3)
    assert overshoot.item() == 0


def test_overshoot_is_judged_clamped_and_costs() -> None:
    images = torch.ones(2, 3, 32, 32)
    answer = images.clone()
    answer[0] += 0.5
    codec = load_codec()
    fixed = training.Codec("compact", codec.encoder, nn.Sequential(_Answer(answer)))
    batch = training._Batch(images, images, torch.ones(2, 1, 1), pooled=False)
    content, style, _, overshoot = training._loss_terms(fixed, batch)
    assert overshoot.item() == pytest.approx(0.25)
    inside = training.Codec("compact", codec.encoder, nn.Sequential(_Answer(images)))
    expected = training._loss_terms(inside, batch)
    torch.testing.assert_close((content, style), (expected[0], expected[1]))


def test_training_can_start_from_a_decoder(folders: dict[str, list[Path]], tmp_path: Path) -> None:
    first = train_decoder(**folders, out=tmp_path / "first", steps=2, **TINY)
    second = train_decoder(
        **folders, out=tmp_path / "second", steps=1, start=first, learning_rate=0.0, **TINY
    )
    assert first.read_bytes() == second.read_bytes()


def test_pooled_moments_are_those_of_the_batch_as_one() -> None:
    features = torch.rand(3, 4, 5, 5, generator=stream(0, "features"))
    pooled = training._pooled(training._moments(features))
    assert pooled.shape == (3, 2, 4)
    for row in pooled:
        torch.testing.assert_close(row, _style(features), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.__name__)
def test_variants_keep_shape_and_range_and_differ(variant: Variant) -> None:
    images = torch.rand(3, 3, 24, 20, generator=stream(0, "images"))
    before = images.clone()
    varied = variant(images, stream(0, "variant"))
    assert varied.shape == images.shape
    assert varied.min() >= 0
    assert varied.max() <= 1
    assert torch.equal(varied, variant(images, stream(0, "variant")))
    assert torch.equal(varied, images) == (variant is unchanged)
    assert torch.equal(images, before)


def test_what_the_simple_variants_do() -> None:
    images = torch.rand(2, 3, 16, 16, generator=stream(0, "images"))
    generator = stream(0, "variant")
    torch.testing.assert_close(inverted(images, generator) + images, torch.ones_like(images))
    tones = grey(images, generator)
    assert torch.equal(tones[:, 0], tones[:, 2])
    edge = torch.ones(1, 3, 32, 32)
    edge[..., 16:] = 0
    drawing = line_drawing(edge, generator)[0, 0, 16]
    assert drawing[2] > 0.8
    assert drawing[16:19].min() < 0.2
    assert drawing[-3] > 0.8


class _Answer(nn.Module):
    """A decoder that gives the same answer whatever it is asked."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, features: Tensor) -> Tensor:
        return self.answer


def _style(features: Tensor) -> Tensor:
    """The moments of all positions of all maps, ``(2, C)``."""
    rows = features.movedim(1, 0).flatten(1)
    return torch.stack([rows.mean(1), (rows.var(1, correction=0) + 1e-5).sqrt()])
