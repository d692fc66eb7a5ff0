"""Codecs by name: ours, a caller's own, and the one without a network."""

import re
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

import style_images
from codec_files import initialised, training, untrained, vgg19_modules, write_vgg19
from feddg.errors import ExperimentError, WeightsError
from feddg.methods.composition import build_method
from feddg.methods.style_exchange import StyleExchange
from feddg.rng import stream
from feddg.styles.codec import CODECS, VARIANCE_FLOOR, Codec, load_codec, register_codec, transfer
from feddg.styles.codecs import (
    CompactCodec,
    ConvolutionalCodec,
    ModulatedCodec,
    Vgg19Codec,
)
from feddg.styles.statistics import measure


def random_images(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, generator=stream(seed, "images"), dtype=torch.uint8)


def test_all_codecs_name_themselves() -> None:
    assert set(CODECS) == {"compact", "modulated", "vgg19", "colors"}
    for name, codec in CODECS.items():
        assert codec.name == name


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    known = (
        r"unknown codec 'compct' \(did you mean 'compact'\?\); there are: colors, compact, "
        "modulated, vgg19"
    )
    with pytest.raises(WeightsError, match=known):
        load_codec("compct")
    with pytest.raises(ExperimentError, match=rf"method pardon: codec:.*{known}"):
        build_method("pardon", {"codec": "compct"})


def test_a_codec_of_ones_own_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    CODECS.find("colors")  # complete, so that leaving the test takes nothing away
    monkeypatch.setattr(CODECS, "_found", dict(CODECS._found))

    @register_codec
    class Doubling(CODECS["colors"]):
        """Colours twice as bright."""

        name = "doubling"

        def encode(self, images: Tensor) -> Tensor:
            return 2 * images

    codec = load_codec("doubling")
    images = random_images(2, 3, 4, 4)
    expected = 2 * images.double().mean((2, 3)) / 255
    np.testing.assert_allclose(measure(codec, images).styles()[:, 0], expected, rtol=1e-6)
    assert build_method("pardon", {"codec": "doubling"}).settings.codec == "doubling"
    with pytest.raises(WeightsError, match="two codecs are called 'doubling'"):
        register_codec(type("Other", (Codec,), {"name": "doubling"}))


@given(st.integers(1, 3), st.integers(1, 9), st.integers(2, 9), st.integers(0, 99))
def test_colours_by_hand(count: int, height: int, width: int, seed: int) -> None:
    """Colour transfer written out in NumPy, in double precision."""
    images, model = (random_images(n, 3, height, width, seed=seed + n) for n in (count, 5))
    codec = load_codec("colors")
    style = measure(codec, model).pooled().styles()[0]
    wanted = model.numpy() / 255
    mean, deviation = wanted.mean((0, 2, 3)), np.sqrt(wanted.var((0, 2, 3)) + 1e-5)
    np.testing.assert_allclose(style, np.stack([mean, deviation]), rtol=1e-6)
    colours = images.numpy() / 255
    own = colours.mean((2, 3), keepdims=True)
    spread = np.sqrt(colours.var((2, 3), keepdims=True) + 1e-5)
    full = (colours - own) / spread * deviation[:, None, None] + mean[:, None, None]
    for strength in (0.0, 0.3, 1.0):
        expected = np.clip(strength * full + (1 - strength) * colours, 0, 1) * 255
        found = transfer(codec, images, style, strength).numpy()
        assert np.abs(found - expected).max() <= 0.51


def test_colours_take_no_files_and_no_other_layer() -> None:
    with pytest.raises(WeightsError, match="codec 'colors' has no weights: leave out"):
        load_codec("colors", decoder=Path("a.pth"))
    with pytest.raises(WeightsError, match=r"'colors' cannot measure styles on 'conv4_1_pre'"):
        load_codec("colors", style_layer="conv4_1_pre")


def test_colours_resize_to_a_size_that_the_features_are_not_of() -> None:
    features = torch.rand(1, 3, 8, 8, generator=stream(0, "features")) * 3 - 1
    decoded = load_codec("colors").decode(features, (5, 20))
    assert decoded.shape == (1, 3, 5, 20)
    assert decoded.min() >= 0
    assert decoded.max() <= 1


# The codec whose decoder reads the whole style: against its definition, image by image.


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
    begun = untrained(ModulatedCodec, ModulatedCodec.file("encoder", None), None, seed=3).frozen()
    compact = load_codec("compact")
    style = measure(compact, images).styles().flip(0)
    assert torch.equal(transfer(begun, images, style), transfer(compact, images, style))


def test_a_trained_decoder_is_loaded_and_another_codecs_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for number, image in enumerate(random_images(4, 3, 48, 48)):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{number}.png")
    recipe = training.Recipe(codec="modulated", steps=2, batch_pixels=4 * 32**2, sizes=(32,))
    decoder = training.train_codec(
        content=[folder], style=[folder], out=tmp_path / "out", recipe=recipe
    )
    trained = load_codec("modulated", decoder=decoder)
    assert trained.fingerprint() != load_codec("modulated").fingerprint()
    with pytest.raises(WeightsError, match=r"layers\.1\.weight is missing"):
        load_codec("modulated", decoder=CompactCodec.file("decoder", None))
    with pytest.raises(WeightsError, match=r"1\.weight is missing"):
        load_codec("compact", decoder=decoder)


# The codec of the papers: indices, widths and faults of its files.


def convolutions(module: nn.Sequential) -> dict[int, tuple[int, int]]:
    found = {i: layer for i, layer in enumerate(module) if isinstance(layer, nn.Conv2d)}
    return {i: (layer.in_channels, layer.out_channels) for i, layer in found.items()}


def test_vgg19_has_the_layer_indices_of_the_common_files() -> None:
    encoder, decoder = vgg19_modules()
    assert len(encoder) == 31
    assert convolutions(encoder) == {
        0: (3, 3), 2: (3, 64), 5: (64, 64), 9: (64, 128), 12: (128, 128), 16: (128, 256),
        19: (256, 256), 22: (256, 256), 25: (256, 256), 29: (256, 512),
    }  # fmt: skip
    assert convolutions(decoder) == {
        1: (512, 256), 5: (256, 256), 8: (256, 256), 11: (256, 256), 14: (256, 128),
        18: (128, 128), 21: (128, 64), 25: (64, 64), 28: (64, 3),
    }  # fmt: skip


def test_a_file_with_other_weights_is_another_codec_and_a_method_keeps_its_own(
    tmp_path: Path,
) -> None:
    files = write_vgg19(tmp_path)
    method = build_method("pardon", {"codec": "vgg19", **files})
    assert isinstance(method, StyleExchange)
    first, own = load_codec("vgg19", **files), method.codec()
    assert first is load_codec("vgg19", **files) is own
    write_vgg19(tmp_path, divisor=16)
    second = load_codec("vgg19", **files)
    assert second.fingerprint() != first.fingerprint()
    assert method.codec() is own  # a run has one codec from its first round to its last


def test_vgg19_loads_state_dicts_and_safetensors(tmp_path: Path) -> None:
    paths = write_vgg19(tmp_path, divisor=1)
    codec = load_codec("vgg19", **paths)
    assert isinstance(codec, ConvolutionalCodec)
    assert codec.channels == 512
    images = style_images.random_images(1, 3, 17, 20) / 255
    features = codec.encode(images)
    assert features.shape == (1, 512, 3, 3)
    torch.testing.assert_close(features, vgg19_modules()[0](images), rtol=1e-3, atol=1e-4)
    assert codec.decode(features, (17, 20)).shape == (1, 3, 17, 20)
    converted = tmp_path / "decoder.safetensors"
    weights = {key: weight.contiguous() for key, weight in codec.decoder.state_dict().items()}
    save_file(weights, converted)
    again = load_codec("vgg19", encoder=paths["encoder"], decoder=converted)
    assert again.fingerprint() == codec.fingerprint()


def test_styles_can_be_measured_before_the_last_relu(tmp_path: Path) -> None:
    codec = load_codec("vgg19", **write_vgg19(tmp_path), style_layer="conv4_1_pre")
    images = style_images.random_images(2, 3, 16, 16) / 255
    before = codec.style_features(images)
    assert before.min() < 0
    torch.testing.assert_close(before.relu(), codec.encode(images))


def test_wrong_weights_are_refused(tmp_path: Path) -> None:
    paths = write_vgg19(tmp_path)
    with pytest.raises(WeightsError, match=r"decoder\.pth: 0\.weight is missing"):
        load_codec("vgg19", encoder=paths["decoder"], decoder=paths["decoder"])
    narrow = dict(vgg19_modules(8)[0].state_dict()) | {"5.weight": torch.zeros(7, 9, 3, 3)}
    torch.save(narrow, tmp_path / "narrow.pth")
    with pytest.raises(WeightsError, match=r"5\.weight has shape \(7, 9, 3, 3\)"):
        load_codec("vgg19", encoder=tmp_path / "narrow.pth", decoder=paths["decoder"])


@pytest.mark.parametrize("divisor", [2, 8, 16])
def test_widths_are_read_from_the_files(tmp_path: Path, divisor: int) -> None:
    codec = load_codec("vgg19", **write_vgg19(tmp_path, divisor))
    assert isinstance(codec, ConvolutionalCodec)
    assert codec.channels == 512 // divisor
    assert codec.stride == 8
    images = style_images.random_images(2, 3, 17, 20)
    expected = vgg19_modules(divisor)[0](images / 255)
    torch.testing.assert_close(codec.encode(images / 255), expected, rtol=1e-3, atol=1e-4)
    assert transfer(codec, images, style_images.random_style(codec.channels)).shape == images.shape
    begun = untrained(Vgg19Codec, tmp_path / "vgg_normalised.pth", None, 0)
    assert convolutions(begun.decoder) == convolutions(codec.decoder)


def test_an_uneven_pair_is_read_as_it_is(tmp_path: Path) -> None:
    """Pruning need not keep the ratios of the layers, nor prune both parts alike."""
    shape = Vgg19Codec.architecture
    encoder = (3, 5, "pool", 4, 6, "pool", 7, 8, 9, 10, "pool", 11)
    decoder = (2, "up", 3, 4, 5, 6, "up", 7, 8, "up", 9, 3)
    parts = replace(shape, encoder=encoder, decoder=decoder).modules()
    for name, module in zip(("encoder", "decoder"), parts):
        weights = initialised(module, 1, name).state_dict()
        save_file({key: w.contiguous() for key, w in weights.items()}, tmp_path / name)
        (tmp_path / name).rename(tmp_path / f"{name}.safetensors")
    files = {name: tmp_path / f"{name}.safetensors" for name in ("encoder", "decoder")}
    codec = load_codec("vgg19", **files)
    assert isinstance(codec, ConvolutionalCodec)
    assert [out for _, out in convolutions(codec.encoder).values()][1:] == [
        entry for entry in encoder if entry != "pool"
    ]
    assert [out for _, out in convolutions(codec.decoder).values()] == [
        entry for entry in decoder if entry != "up"
    ]


def test_parts_that_do_not_fit_each_other_are_named(tmp_path: Path) -> None:
    small, large = write_vgg19(tmp_path / "small", 16), write_vgg19(tmp_path / "large", 8)
    fault = r"large/decoder\.pth: 1\.weight has shape .*trained together"
    with pytest.raises(WeightsError, match=fault):
        load_codec("vgg19", encoder=small["encoder"], decoder=large["decoder"])


def test_the_quarter_width_pair(shared_data: Path) -> None:
    files = {
        p: shared_data / f"codec/vgg19_quarter_{p}.safetensors" for p in ("encoder", "decoder")
    }
    codec = load_codec("vgg19", **files)
    assert codec.channels == 128
    y, x = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
    disc = ((x - 32) ** 2 + (y - 32) ** 2 < 20**2).float()
    picture = (230 - 180 * disc).to(torch.uint8).expand(1, 3, 64, 64)
    stylized = transfer(codec, picture, torch.ones(2, codec.channels), 0.0)
    assert (stylized.float() - picture.float()).abs().mean() < 20


def spoiled(weights: dict[str, Tensor], key: str, fault: str) -> dict[str, Tensor]:
    changed = dict(weights)
    if fault == "missing":
        del changed[key]
    elif fault == "whole numbers":
        changed[key] = weights[key].to(torch.int32)
    elif fault == "complex":
        changed[key] = weights[key].to(torch.complex64)
    else:
        changed[key] = weights[key].clone()
        changed[key].view(-1)[-1] = float(fault)
    return changed


@pytest.mark.parametrize(
    ("part", "key", "fault", "said"),
    [
        ("encoder", "12.weight", "missing", "12.weight is missing"),
        ("encoder", "29.bias", "missing", "29.bias is missing"),
        ("encoder", "5.weight", "whole numbers", "5.weight holds no finite"),
        ("decoder", "28.bias", "complex", "28.bias holds no finite"),
        ("encoder", "16.weight", "nan", "16.weight holds no finite"),
        ("decoder", "8.weight", "inf", "8.weight holds no finite"),
    ],
)
@pytest.mark.parametrize("pair", ["small", "quarter"])
def test_a_spoiled_file_is_one_clear_line(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    pair: str,
    part: str,
    key: str,
    fault: str,
    said: str,
) -> None:
    """In a pair of random weights, and in the quarter-width pair where it is at hand."""
    if pair == "small":
        encoder, decoder = vgg19_modules(16)
        weights = {"encoder": dict(encoder.state_dict()), "decoder": dict(decoder.state_dict())}
    else:
        folder = request.getfixturevalue("shared_data") / "codec"
        weights = {
            p: load_file(folder / f"vgg19_quarter_{p}.safetensors") for p in ("encoder", "decoder")
        }
    weights[part] = spoiled(weights[part], key, fault)
    files = {name: tmp_path / f"{name}.safetensors" for name in weights}
    for name, file in files.items():
        save_file(weights[name], file)
    with pytest.raises(WeightsError, match=re.escape(said)) as caught:
        load_codec("vgg19", **files)
    assert str(files[part]) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"weights file for its encoder.*'compact' needs no"):
        load_codec("vgg19")
    absent = tmp_path / "absent.pth"
    with pytest.raises(WeightsError, match=r"absent\.pth does not exist"):
        load_codec("vgg19", encoder=absent, decoder=absent)
    for name in ("text.pth", "text.safetensors"):
        broken = tmp_path / name
        broken.write_text("not weights")
        with pytest.raises(WeightsError, match=rf"{name} cannot be read|{name} is not a plain"):
            load_codec("compact", decoder=broken)
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(WeightsError, match=r"list\.pth"):
        load_codec("compact", decoder=tmp_path / "list.pth")
