"""The codec of the papers: indices, widths and faults of its files."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from codec_files import vgg19_modules, write_vgg19
from feddg.errors import WeightsError
from feddg.methods.composition import build_method
from feddg.methods.style_exchange import StyleExchange
from feddg.rng import stream
from feddg.styles.codec import load_codec, transfer
from feddg.styles.codecs.vgg19 import Vgg19Codec
from feddg.styles.convolutional import ConvolutionalCodec, initialised


def random_images(*shape: int, seed: int = 0) -> Tensor:
    generator = stream(seed, "images")
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def random_style(channels: int, seed: int = 0) -> Tensor:
    return torch.rand(2, channels, generator=stream(seed, "style")) + 0.1


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
    images = random_images(1, 3, 17, 20) / 255
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
    images = random_images(2, 3, 16, 16) / 255
    before = codec.style_features(images)
    assert before.min() < 0
    torch.testing.assert_close(before.relu(), codec.encode(images))


def test_wrong_weights_are_refused(tmp_path: Path) -> None:
    paths = write_vgg19(tmp_path)
    with pytest.raises(WeightsError, match=r"decoder\.pth: 0\.weight is missing"):
        load_codec("vgg19", encoder=paths["decoder"], decoder=paths["decoder"])
    narrow = dict(vgg19_modules(8)[0].state_dict()) | {"5.weight": torch.zeros(7, 9, 3, 3)}
    torch.save(narrow, tmp_path / "narrow.pth")
    with pytest.raises(WeightsError, match=r"narrow\.pth: 5\.weight has shape \(7, 9, 3, 3\)"):
        load_codec("vgg19", encoder=tmp_path / "narrow.pth", decoder=paths["decoder"])


@pytest.mark.parametrize("divisor", [2, 8, 16])
def test_widths_are_read_from_the_files(tmp_path: Path, divisor: int) -> None:
    codec = load_codec("vgg19", **write_vgg19(tmp_path, divisor))
    assert isinstance(codec, ConvolutionalCodec)
    assert codec.channels == 512 // divisor
    assert codec.stride == 8
    images = random_images(2, 3, 17, 20)
    expected = vgg19_modules(divisor)[0](images / 255)
    torch.testing.assert_close(codec.encode(images / 255), expected, rtol=1e-3, atol=1e-4)
    assert transfer(codec, images, random_style(codec.channels)).shape == images.shape
    untrained = Vgg19Codec.untrained(tmp_path / "vgg_normalised.pth", None, 0)
    assert convolutions(untrained.decoder) == convolutions(codec.decoder)


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
    fault = (
        r"large/decoder\.pth: 1\.weight takes maps of 64 channels, but the encoder "
        r".*small/vgg_normalised\.pth gives 32; use an encoder and a decoder"
    )
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
    redrawn = transfer(codec, picture, torch.ones(2, codec.channels), 0.0)
    assert (redrawn.float() - picture.float()).abs().mean() < 20


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
        ("encoder", "5.weight", "whole numbers", "5.weight holds int32, not floating-point"),
        ("decoder", "28.bias", "complex", "28.bias holds complex64, not floating-point"),
        ("encoder", "16.weight", "nan", "16.weight holds values that are not finite"),
        ("decoder", "8.weight", "inf", "8.weight holds values that are not finite"),
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
    with pytest.raises(
        WeightsError,
        match=r"needs an encoder and a decoder.*vgg_normalised\.pth.*'compact' needs no",
    ):
        load_codec("vgg19")
    absent = tmp_path / "absent.pth"
    with pytest.raises(WeightsError, match=r"absent\.pth: no such.*compact"):
        load_codec("vgg19", encoder=absent, decoder=absent)
    for name in ("text.pth", "text.safetensors"):
        broken = tmp_path / name
        broken.write_text("not weights")
        with pytest.raises(WeightsError, match=rf"{name} cannot be read|{name} is not a plain"):
            load_codec("compact", decoder=broken)
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(WeightsError, match=r"list\.pth"):
        load_codec("compact", decoder=tmp_path / "list.pth")
