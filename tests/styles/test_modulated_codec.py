"""The codec whose decoder reads the whole style: against its definition, image by image."""

from importlib import resources
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from feddg.errors import WeightsError
from feddg.rng import stream
from feddg.styles.codec import VARIANCE_FLOOR, load_codec, transfer
from feddg.styles.codec_training import Recipe, train_codec
from feddg.styles.codecs.compact import CompactCodec
from feddg.styles.codecs.modulated import ModulatedCodec
from feddg.styles.statistics import measure


def random_images(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, generator=stream(seed, "images"), dtype=torch.uint8)


def drawn_slowly(maps: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """One image's decoding in float64, a convolution at a time, from the file's weights."""
    doubles = {key: value.double() for key, value in weights.items()}
    channels = maps.double().flatten(1)
    deviation = (channels.var(1, correction=0) + VARIANCE_FLOOR).sqrt()
    style = torch.cat([channels.mean(1), deviation])
    summary = (doubles["read.weight"] @ style + doubles["read.bias"]).clamp(min=0)
    written = doubles["write.weight"] @ summary + doubles["write.bias"]
    widths = [64, 32, 32]
    scales, shifts = written[: sum(widths)].split(widths), written[sum(widths) :].split(widths)
    image = maps.double()[None]
    for place, index in enumerate((1, 4, 8, 11)):
        if place == 2:
            image = image.repeat_interleave(2, 2).repeat_interleave(2, 3)
        padded = functional.pad(image, (1, 1, 1, 1), mode="reflect")
        weight, bias = doubles[f"layers.{index}.weight"], doubles[f"layers.{index}.bias"]
        image = functional.conv2d(padded, weight, bias)
        if place < 3:
            modulated = image * (1 + scales[place])[:, None, None] + shifts[place][:, None, None]
            image = modulated.clamp(min=0)
    return image[0].clamp(0, 1)


def test_the_decoder_is_its_definition() -> None:
    codec = load_codec("modulated")
    maps = codec.encode(codec.prepared(random_images(3, 3, 22, 18)))
    weights = load_file(ModulatedCodec.file("decoder", None))
    for row, found in zip(maps, codec.decode(maps, (22, 18)), strict=True):
        torch.testing.assert_close(found.double(), drawn_slowly(row, weights), atol=1e-5, rtol=0)


def test_styles_are_those_of_compact_and_pictures_are_not() -> None:
    images = random_images(4, 3, 32, 32)
    compact, modulated = load_codec("compact"), load_codec("modulated")
    style = measure(compact, images).styles()
    assert torch.equal(measure(modulated, images).styles(), style)
    before, after = (transfer(codec, images, style.flip(0)) for codec in (compact, modulated))
    assert not torch.equal(before, after)
    assert compact.fingerprint() != modulated.fingerprint()


def test_the_summary_of_a_style_is_each_images_own() -> None:
    codec, images = load_codec("modulated"), random_images(9, 3, 16, 16)
    style = measure(codec, random_images(9, 3, 16, 16, seed=1)).styles()
    together = transfer(codec, images, style).int()
    alone = transfer(codec, images, style, batch_size=1).int()
    assert (together - alone).abs().max() <= 1  # convolutions round by their number of images


def test_its_two_files_are_small() -> None:
    parts = [ModulatedCodec.file(part, None) for part in ("encoder", "decoder")]
    assert sum(part.stat().st_size for part in parts) < 300_000
    assert parts[0] == CompactCodec.file("encoder", None)
    assets = Path(str(resources.files("feddg.styles") / "assets"))
    assert parts[1] == assets / "modulated_decoder.safetensors"


def test_its_training_begins_with_what_compact_draws() -> None:
    images = random_images(2, 3, 24, 24)
    begun = ModulatedCodec.untrained(ModulatedCodec.file("encoder", None), None, seed=3).frozen()
    compact = load_codec("compact")
    style = measure(compact, images).styles().flip(0)
    assert torch.equal(transfer(begun, images, style), transfer(compact, images, style))


def test_a_trained_decoder_is_loaded_and_another_codecs_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for number, image in enumerate(random_images(4, 3, 48, 48)):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{number}.png")
    recipe = Recipe(codec="modulated", steps=2, batch_pixels=4 * 32**2, sizes=(32,))
    decoder = train_codec(content=[folder], style=[folder], out=tmp_path / "out", recipe=recipe)
    trained = load_codec("modulated", decoder=decoder)
    assert trained.fingerprint() != load_codec("modulated").fingerprint()
    with pytest.raises(WeightsError, match=r"layers\.1\.weight is missing"):
        load_codec("modulated", decoder=CompactCodec.file("decoder", None))
    with pytest.raises(WeightsError, match=r"1\.weight is missing"):
        load_codec("compact", decoder=decoder)
