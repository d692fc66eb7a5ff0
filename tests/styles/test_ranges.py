"""Which styles there can be: what images give lies inside, with and without noise."""

import itertools

import pytest
import torch

from codec_files import training, write_vgg19
from feddg.messages import SchemaContext
from feddg.methods.composition import build_method
from feddg.rng import stream
from feddg.styles.codec import load_codec
from feddg.styles.ranges import extreme_images, noised_range, style_range
from feddg.styles.statistics import (
    StyleNoise,
    interpolation_style,
    measure,
    private_style,
)
from federations import colored_images, federation


def inside(styles, low, high):
    return bool(((styles >= low) & (styles <= high)).all())


def many_images(side):
    """Blocks of colour under every strong variant."""
    rng = stream(3, "images", side)
    blocks = torch.rand(6, 3, 4, 4, generator=rng).repeat_interleave(side // 4, -1)
    images = blocks.repeat_interleave(side // 4, -2)
    varied = torch.cat([variant(images, rng) for variant in training.VARIANTS])
    return (varied.clamp(0, 1) * 255).to(torch.uint8)


def test_styles_of_images_lie_inside(subtests, tmp_path_factory):
    for name, layer, side in itertools.product(
        ["compact", "vgg19"], ["output", "conv4_1_pre"], [16, 32, 64]
    ):
        with subtests.test(side=side, layer=layer, name=name):
            tmp_path = tmp_path_factory.mktemp("case")
            files = write_vgg19(tmp_path) if name == "vgg19" else {}
            codec = load_codec(name, style_layer=layer, **files)
            low, high = style_range(codec)
            assert low.shape == high.shape == (2, codec.channels)
            assert inside(measure(codec, many_images(side)).styles(), low, high)
            assert (low[1] == 0).all()
            assert layer != "output" or low.min() > -0.01  # a ReLU's map has no negative mean


def test_colours_are_what_colours_can_be():
    codec = load_codec("colors")
    low, high = style_range(codec)
    torch.testing.assert_close(low, torch.zeros(2, 3), atol=2e-4, rtol=0)
    torch.testing.assert_close(high, torch.tensor([[1.0], [0.5]]).expand(2, 3), atol=2e-4, rtol=0)
    images = (extreme_images() * 255).to(torch.uint8)
    assert inside(measure(codec, images).styles(), low, high)


def test_noised_styles_lie_inside_their_own_range(subtests):
    for images, unit, name in itertools.product(
        [3, 40], ["image", "client"], ["compact", "colors"]
    ):
        with subtests.test(name=name, unit=unit, images=images):
            codec, noise = load_codec(name), StyleNoise(2.0, unit)
            pixels = torch.from_numpy(colored_images(images)[0]).permute(0, 3, 1, 2)
            moments = measure(codec, pixels)
            low, high = noised_range(codec, noise, images)
            plain = style_range(codec)
            drawn = torch.stack([private_style(moments, codec, noise) for _ in range(100)])
            assert inside(drawn, low, high)
            assert images > 3 or not inside(drawn, *plain)


@pytest.mark.parametrize("name", ["pardon", "vista", "ccst"])
def test_sites_that_noise_their_styles_are_not_refused(name):
    noise = StyleNoise(2.0)
    small = federation(name, sizes=(7, 5, 6), style_noise=noise)
    small.server.checks._registered = {0: 7, 1: 5, 2: 6}
    small.server.setup()
    assert not [row for row in small.ledger if row["kind"] == "refusal"]


def test_a_perturbed_style_may_lie_as_far_outside_as_its_perturbation_reaches():
    known = SchemaContext(7, 5, 16)
    plain = build_method("pardon", {})
    noised = build_method("pardon", {"noise_scale": 0.5, "noise_coefficient": 0.3})
    low, high = noised.style_range(known)
    for ours, theirs, sign in zip((low, high), plain.style_range(known), (-1, 1)):
        torch.testing.assert_close(ours[0], theirs[0] + sign * 4.0)
    assert (low[1] == 0).all()
    small = federation(noised)
    small.server.setup()
    assert not [row for row in small.ledger if row["kind"] == "refusal"]


# What a style inside the range can do to the interpolation style


def grouped(directions):
    styles = torch.eye(16)[directions].view(-1, 2, 8) + 1
    return styles + 0.01 * torch.rand(styles.shape, generator=stream(0, "styles"))


@pytest.mark.parametrize("directions", [[0, 0, 3, 3, 9, 9], [0, 0, 3, 3, 9, 9, 12, 12]])
def test_of_three_groups_or_more_one_site_moves_the_median_within_the_others(directions):
    styles = grouped(directions)
    styles[-1] *= 10
    found, groups = interpolation_style(styles)
    assert groups.max() == len(set(directions)) - 1
    others = styles[:-1]
    assert inside(found, others.amin(0), others.amax(0))


def test_of_two_groups_the_median_is_a_mean_and_one_site_moves_it():
    styles = grouped([0, 0, 3, 3, 3])
    styles[-1] *= 10
    found, groups = interpolation_style(styles)
    assert groups.max() == 1
    means = torch.stack([styles[groups == group].mean(0) for group in (0, 1)])
    torch.testing.assert_close(found, means.mean(0))
    assert not inside(found, styles[:-1].amin(0), styles[:-1].amax(0))
