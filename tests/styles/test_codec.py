"""AdaIN, the codecs of convolutions, and loading their weights."""

from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from codec_files import untrained, write_vgg19
from feddg.errors import WeightsError
from feddg.models.network import IMAGENET_MEAN, IMAGENET_STD
from feddg.styles.codec import CODECS, NormalizedCodec, adain, images_at_once, load_codec
from feddg.styles.codecs import CompactCodec, ConvolutionalCodec
from style_images import random_features, random_images, random_style


def random_codec(seed: int = 0) -> CompactCodec:
    return untrained(CompactCodec, None, None, seed).frozen()


@pytest.mark.parametrize(("gigabytes", "counts"), [(80, [256, 167, 8]), (8, [256, 55, 2])])
def test_a_batch_s_maps_fit_into_the_memory_of_an_accelerator(
    gigabytes: int, counts: list[int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = (0, gigabytes * 2**30)  # free, and in all
    monkeypatch.setattr(torch.get_device_module(device), "mem_get_info", lambda _: memory)
    assert [images_at_once(side, torch.device(device)) for side in (16, 224, 1024)] == counts


def test_adain_by_hand() -> None:
    features = torch.tensor([[[[1.0, 3.0], [5.0, 7.0]]]])  # mean 4, variance 20 / 4
    style = torch.tensor([[10.0], [2.0]])
    unit = np.array([-3.0, -1.0, 1.0, 3.0]) / np.sqrt(5.0 + 1e-5)
    expected = torch.tensor(10 + 2 * unit, dtype=torch.float32).reshape(1, 1, 2, 2)
    torch.testing.assert_close(adain(features, style), expected)
    halfway = (expected + features) / 2
    torch.testing.assert_close(adain(features, style, 0.5), halfway)


@settings(max_examples=25, deadline=None)
@given(
    images=st.integers(1, 3),
    channels=st.integers(1, 5),
    side=st.integers(2, 9),
    seed=st.integers(0, 1000),
)
def test_adain_gives_the_moments_of_the_style(
    images: int, channels: int, side: int, seed: int
) -> None:
    style = random_style(channels, seed)
    restyled = adain(random_features(images, channels, side, side + 1, seed=seed), style)
    for image in restyled.double().numpy():
        np.testing.assert_allclose(image.mean((1, 2)), style[0], atol=1e-4)
        np.testing.assert_allclose(image.std((1, 2)), style[1], rtol=1e-2)


def test_adain_at_strength_zero_is_the_identity() -> None:
    features = random_features(2, 4, 5, 6)
    assert torch.equal(adain(features, random_style(4), 0.0), features)


def test_adain_takes_one_style_per_image() -> None:
    features = random_features(2, 3, 4, 4)
    styles = torch.stack([random_style(3, 1), random_style(3, 2)])
    each = [adain(features[i : i + 1], styles[i]) for i in range(2)]
    torch.testing.assert_close(adain(features, styles), torch.cat(each))


def test_adain_of_a_constant_map_is_the_style_mean() -> None:
    style = random_style(3)
    restyled = adain(torch.full((1, 3, 4, 4), 7.0), style)
    torch.testing.assert_close(restyled, style[0][None, :, None, None].expand(1, 3, 4, 4))


@pytest.mark.parametrize("size", [(1, 1), (3, 8), (5, 4), (33, 47), (64, 64)])
def test_sizes(size: tuple[int, int]) -> None:
    codec = load_codec()
    images = random_images(2, 3, *size) / 255
    features = codec.encode(images)
    rounded_up = tuple(max(2, -(-length // codec.stride)) for length in size)
    assert features.shape == (2, codec.channels, *rounded_up)
    decoded = codec.decode(features, size)
    assert decoded.shape == (2, 3, *size)
    assert decoded.min() >= 0
    assert decoded.max() <= 1


def test_decode_resizes_to_a_size_that_the_features_are_not_of() -> None:
    codec = load_codec()
    features = codec.encode(random_images(1, 3, 32, 32) / 255)
    assert codec.decode(features, (50, 20)).shape == (1, 3, 50, 20)


def test_decode_clamps() -> None:
    codec = random_codec()
    features = random_features(1, codec.channels, 16, 16) * 100
    wild = codec.decoder(features)
    assert wild.min() < 0
    assert wild.max() > 1
    decoded = codec.decode(features, (32, 32))
    assert decoded.min() == 0
    assert decoded.max() == 1


def test_fingerprint_follows_weights_and_layer() -> None:
    codec = random_codec()
    same, other = random_codec(), random_codec(seed=5)
    assert codec.fingerprint() == same.fingerprint() != other.fingerprint()
    with torch.no_grad():
        next(same.decoder.parameters())[0, 0, 0, 0] += 1e-3
    assert codec.fingerprint() != same.fingerprint()
    elsewhere = CompactCodec(codec.encoder, codec.decoder, style_layer="conv4_1_pre")
    assert elsewhere.fingerprint() != codec.fingerprint()


def test_compact_is_small_frozen_and_cached() -> None:
    assets = Path(str(resources.files("feddg.styles") / "assets"))
    assert sum(path.stat().st_size for path in assets.glob("*.safetensors")) <= 4 * 2**20
    codec = load_codec("compact")
    assert codec is load_codec("compact")
    assert not codec.training
    assert not any(parameter.requires_grad for parameter in codec.parameters())
    assert codec.channels == 64


def test_no_file_of_objects_is_unpickled(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "module.pth")
    with pytest.raises(WeightsError, match=r"module\.pth is not a plain state dict"):
        load_codec("compact", encoder=tmp_path / "module.pth")


def test_decoders_end_in_rgb_at_the_encoders_scale() -> None:
    shapes = [c.architecture for c in CODECS.values() if issubclass(c, ConvolutionalCodec)]
    assert len(shapes) == 3
    for shape in shapes:
        assert 2 ** shape.decoder.count("up") == shape.stride
        assert shape.decoder[-1] == 3


def test_a_normalized_codec_is_another_one_on_normalised_images(tmp_path: Path) -> None:
    files = write_vgg19(tmp_path)
    inner = load_codec("vgg19", **files, style_layer="conv4_1_pre")
    codec = NormalizedCodec(inner).frozen()
    images = torch.rand(2, 3, 24, 20, generator=torch.manual_seed(0))
    mean, deviation = (torch.tensor(v).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    normalised = (images - mean) / deviation
    assert torch.equal(codec.encode(images), inner.encode(normalised))
    assert torch.equal(codec.style_features(images), inner.style_features(normalised))
    maps = 3 * codec.encode(images)
    drawn, clamped = codec.decode(maps, (24, 20)), inner.decode(maps, (24, 20))
    torch.testing.assert_close(((drawn - mean) / deviation).clamp(0, 1), clamped)
    assert not torch.equal((drawn - mean) / deviation, clamped)
    assert codec.fingerprint() != inner.fingerprint()
    assert torch.equal(codec.prepared((images * 255).to(torch.uint8)), (images * 255).floor() / 255)
    assert torch.equal(codec.prepared(images), images)
