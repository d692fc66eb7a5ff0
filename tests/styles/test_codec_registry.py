"""Codecs by name: ours, a caller's own, and the one without a network."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from feddg.errors import ExperimentError, WeightsError
from feddg.methods.composition import build_method
from feddg.rng import stream
from feddg.styles.codec import CODECS, Codec, load_codec, register_codec, transfer
from feddg.styles.statistics import measure


def random_images(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, generator=stream(seed, "images"), dtype=torch.uint8)


def test_all_codecs_name_and_describe_themselves() -> None:
    assert set(CODECS) == {"compact", "modulated", "vgg19", "colors"}
    for name, codec in CODECS.items():
        assert codec.name == name
        assert codec.summary


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    known = (
        r"unknown codec 'compct' \(did you mean 'compact'\?\); there are: colors, compact, "
        "modulated, vgg19"
    )
    with pytest.raises(WeightsError, match=known):
        load_codec("compct")
    with pytest.raises(ExperimentError, match=rf"method pardon, setting 'codec':.*{known}"):
        build_method("pardon", {"codec": "compct"})


def test_a_codec_of_ones_own_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    CODECS.find("colors")  # complete, so that leaving the test takes nothing away
    monkeypatch.setattr(CODECS, "_found", dict(CODECS._found))

    @register_codec
    class Doubling(CODECS["colors"]):
        """Colours twice as bright."""

        name = "doubling"
        summary = "for this test"

        def encode(self, images: Tensor) -> Tensor:
            return 2 * images

    codec = load_codec("doubling")
    images = random_images(2, 3, 4, 4)
    expected = 2 * images.double().mean((2, 3)) / 255
    np.testing.assert_allclose(measure(codec, images).styles()[:, 0], expected, rtol=1e-6)
    assert build_method("pardon", {"codec": "doubling"}).settings.codec == "doubling"
    with pytest.raises(WeightsError, match="two codecs are called 'doubling'"):
        register_codec(type("Other", (Codec,), {"name": "doubling", "summary": ""}))


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
    with pytest.raises(WeightsError, match=r"'colors' has no weights: leave out decoder=a\.pth"):
        load_codec("colors", decoder=Path("a.pth"))
    with pytest.raises(WeightsError, match=r"'colors' cannot measure styles on 'conv4_1_pre'"):
        load_codec("colors", style_layer="conv4_1_pre")


def test_colours_resize_to_a_size_that_the_features_are_not_of() -> None:
    features = torch.rand(1, 3, 8, 8, generator=stream(0, "features")) * 3 - 1
    decoded = load_codec("colors").decode(features, (5, 20))
    assert decoded.shape == (1, 3, 5, 20)
    assert decoded.min() >= 0
    assert decoded.max() <= 1
