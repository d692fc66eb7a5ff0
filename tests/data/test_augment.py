"""Augmentation against torchvision's single-image functions, and what pairing promises."""

import colorsys
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from pydantic import ValidationError
from torch import Tensor
from torchvision import transforms
from torchvision.transforms import functional

from feddg.data import augment
from feddg.data.augment import (
    GENERAL_AUGMENTATIONS,
    NONE,
    AugmentSettings,
    Draw,
    apply,
    draw,
    register_augmentation,
)
from feddg.data.data_set import augmentations, find_augmentation
from feddg.errors import ExperimentError
from feddg.experiment import Experiment, checked_settings
from feddg.federation.federation import build_worker
from feddg.models.backbones import build_network

PACS = find_augmentation("pacs")
CROP = AugmentSettings(crop_scale=(0.3, 1.0), flip=0.5)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(count: int, size: int, low: int = 0, high: int = 256) -> Tensor:
    shape = (count, size, size, 3)
    images = torch.randint(low, high, shape, dtype=torch.uint8, generator=rng(count + size))
    return images.permute(0, 3, 1, 2)


def box_of(places: Tensor, row: int) -> tuple[list[int], bool]:
    """Reads (top, left, height, width) and whether it is mirrored off a crop's draw.

    A crop is enlarged, so its outermost pixels look at the outermost pixels of the box.
    """
    across, down = places[:, row]
    left, right = sorted([across[0].item(), across[-1].item()])
    top, bottom = down[0].item(), down[-1].item()
    box = [top, left, bottom - top + 1, right - left + 1]
    assert all(value == int(value) for value in box)
    return [int(value) for value in box], bool(across[0] > across[-1])


@pytest.mark.parametrize("size", [12, 33])
def test_crops_and_flips_equal_torchvision(size: int) -> None:
    images = noise(20, size)
    drawn = draw(CROP, 20, size, rng())
    seen = set()
    for row, augmented in enumerate(apply(images, drawn)):
        box, mirrored = box_of(drawn.places, row)
        seen.add((*box, mirrored))
        expected = functional.resized_crop(images[row].float(), *box, [size, size], antialias=False)
        expected = functional.hflip(expected) if mirrored else expected
        # Both interpolate in float32 on values up to 255.
        np.testing.assert_allclose(augmented, expected / 255, atol=1e-5)
    assert len(seen) == 20


def test_crop_boxes_are_distributed_as_torchvisions() -> None:
    count, size = 4000, 64
    corners, sides = augment._draw_crops((0.3, 0.9), (3 / 4, 4 / 3), count, size, rng())
    assert (corners >= 0).all()
    assert (corners + sides <= size).all()
    blank = torch.zeros(3, size, size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = [
            transforms.RandomResizedCrop.get_params(blank, [0.3, 0.9], [3 / 4, 4 / 3])
            for _ in range(count)
        ]
    top, left, height, width = np.array(theirs).T
    ours = [corners[:, 1], corners[:, 0], sides[:, 1], sides[:, 0]]
    for mine, other in zip(ours, (top, left, height, width)):
        # Standard errors of the means of 4000 numbers with deviations below 12: 0.19 each.
        assert abs(mine.mean().item() - other.mean()) < 1
        assert abs(mine.std().item() - other.std()) < 1
    # A correlation of width and height that is off would show in the areas.
    assert abs((ours[2] * ours[3]).mean().item() - (height * width).mean()) < 60


def test_a_crop_that_cannot_fit_keeps_the_whole_image() -> None:
    wide = AugmentSettings(crop_scale=(1.0, 1.0), crop_ratio=(2.0, 3.0))
    drawn = draw(wide, 3, 10, rng())
    assert [box_of(drawn.places, row) for row in range(3)] == [([0, 0, 10, 10], False)] * 3


def test_a_certain_flip_is_an_exact_mirror_image() -> None:
    images = noise(5, 9)
    flipped = apply(images, draw(AugmentSettings(flip=1.0), 5, 9, rng()))
    assert torch.equal(flipped, images.flip(3).float() / 255)


def test_flips_come_as_often_as_asked() -> None:
    drawn = draw(AugmentSettings(flip=0.3), 4000, 4, rng())
    mirrored = drawn.places[0, :, 0] > drawn.places[0, :, -1]
    assert abs(mirrored.float().mean().item() - 0.3) < 0.03  # four standard errors


def vertically(drawn: Draw, row: int) -> bool:
    down = drawn.places[1, row]
    return bool(down[0] > down[-1])


def test_upside_down_mirror_images_equal_torchvision_and_come_as_often_as_asked() -> None:
    images = noise(5, 9)
    upended = apply(images, draw(AugmentSettings(vertical_flip=1.0), 5, 9, rng()))
    assert torch.equal(upended, functional.vflip(images).float() / 255)
    drawn = draw(AugmentSettings(vertical_flip=0.3), 4000, 4, rng())
    share = sum(vertically(drawn, row) for row in range(4000)) / 4000
    assert abs(share - 0.3) < 0.03  # four standard errors


@pytest.mark.parametrize("size", [1, 8, 11])
def test_quarter_turns_are_turns_each_as_often_as_the_others(size: int) -> None:
    images = noise(400, size)
    turned = apply(images, draw(AugmentSettings(quarter_turns=True), 400, size, rng()))
    assert turned.is_contiguous(memory_format=torch.channels_last)
    found = [0, 0, 0, 0]
    for before, after in zip(images.float() / 255, turned):
        equal = [torch.equal(torch.rot90(before, k, (1, 2)), after) for k in range(4)]
        assert any(equal)  # a turn, never a mirror image
        found[equal.index(True)] += 1
    if size > 1:
        assert all(abs(count - 100) < 36 for count in found)  # four standard errors


def test_mirrors_and_turns_together_reach_all_eight_symmetries_of_a_square() -> None:
    settings = AugmentSettings(flip=0.5, vertical_flip=0.5, quarter_turns=True)
    images = noise(1, 6).expand(800, 3, 6, 6)
    symmetries = [
        torch.rot90(side, k, (1, 2)) for side in (images[0], images[0].flip(2)) for k in range(4)
    ]
    counts = [0] * 8
    for after in apply(images, draw(settings, 800, 6, rng())):
        counts[[torch.equal(one.float() / 255, after) for one in symmetries].index(True)] += 1
    assert all(abs(count - 100) < 38 for count in counts)  # four standard errors


def test_a_turned_crop_is_torchvisions_crop_of_the_transposed_image() -> None:
    settings = AugmentSettings(crop_scale=(0.3, 1.0), quarter_turns=True)
    images = noise(20, 12)
    drawn = draw(settings, 20, 12, rng())
    assert 0 < drawn.transposed.sum() < 20
    for row, augmented in enumerate(apply(images, drawn)):
        picture = images[row].float()
        picture = picture.transpose(1, 2) if drawn.transposed[row] else picture
        across, down = drawn.places[:, row]
        left, right = sorted([int(across[0]), int(across[-1])])
        top, bottom = sorted([int(down[0]), int(down[-1])])
        box = [top, left, bottom - top + 1, right - left + 1]
        expected = functional.resized_crop(picture, *box, [12, 12], antialias=False)
        expected = functional.hflip(expected) if across[0] > across[-1] else expected
        expected = functional.vflip(expected) if down[0] > down[-1] else expected
        np.testing.assert_allclose(augmented, expected / 255, atol=1e-5)


def test_an_augmentation_is_found_by_name_or_named() -> None:
    assert find_augmentation("none") == AugmentSettings()
    assert {"aerial", "microscope", "digits", "pacs", "office_home"} <= set(augmentations())
    with pytest.raises(ExperimentError, match=r"'arial' \(did you mean 'aerial'"):
        find_augmentation("arial")


def test_shifts_move_whole_pixels_and_repeat_the_edge() -> None:
    size, most = 9, 3
    images = noise(60, size)
    drawn = draw(AugmentSettings(shift=most), 60, size, rng())
    padded = np.pad(images.numpy(), [(0, 0), (0, 0), (most, most), (most, most)], mode="edge")
    found = set()
    for row, augmented in enumerate(apply(images, drawn)):
        matches = [
            (top, left)
            for top in range(2 * most + 1)
            for left in range(2 * most + 1)
            if np.array_equal(
                padded[row, :, top : top + size, left : left + size] / np.float32(255), augmented
            )
        ]
        assert len(matches) == 1
        found.update(matches)
    assert {top for top, _ in found} == {left for _, left in found} == set(range(2 * most + 1))


# Between 100 and 150 none of the following leaves [0, 1], where torchvision would clamp.
TAME = {"low": 100, "high": 151}


def factor_of(drawn: Draw, row: int, kind: str) -> float:
    """Reads the factor of a single colour change off its draw."""
    if kind == "brightness":
        return drawn.colors[row].sum(1)[0].item()
    if kind == "contrast":
        return 1 - drawn.contrast[row].item()
    return (drawn.colors[row].trace().item() - 1) / 2  # saturation: trace of P + s (I - P)


@pytest.mark.parametrize("kind", ["brightness", "contrast", "saturation"])
def test_single_colour_changes_equal_torchvision(kind: str) -> None:
    place = ["brightness", "contrast", "saturation"].index(kind)
    strengths = tuple(0.4 if i == place else 0.0 for i in range(4))
    images = noise(8, 10, **TAME)
    drawn = draw(AugmentSettings(color_jitter=strengths), 8, 10, rng())
    for row, augmented in enumerate(apply(images, drawn)):
        factor = factor_of(drawn, row, kind)
        assert 0.6 <= factor <= 1.4
        change = getattr(functional, f"adjust_{kind}")
        # torchvision weighs green and red with 0.587 and 0.2989; we make the three sum to 1.
        np.testing.assert_allclose(augmented, change(images[row] / 255, factor), atol=1e-4)


def test_brightness_contrast_and_saturation_in_this_order_equal_torchvision() -> None:
    images = noise(8, 10, **TAME)
    drawn = draw(AugmentSettings(color_jitter=(0.3, 0.3, 0.3, 0.0)), 8, 10, rng())
    for row, augmented in enumerate(apply(images, drawn)):
        both = drawn.colors[row].sum(1)[0].item()  # brightness times contrast
        brightness = both + drawn.contrast[row].item()
        saturation = (drawn.colors[row].trace().item() / both - 1) / 2
        expected = functional.adjust_brightness(images[row] / 255, brightness)
        expected = functional.adjust_contrast(expected, both / brightness)
        expected = functional.adjust_saturation(expected, saturation)
        np.testing.assert_allclose(augmented, expected, atol=2e-4)


def test_grayscale_equals_torchvision_and_comes_as_often_as_asked() -> None:
    images = noise(8, 10)
    gray = apply(images, draw(AugmentSettings(grayscale=1.0), 8, 10, rng()))
    expected = functional.rgb_to_grayscale(images / 255, num_output_channels=3)
    np.testing.assert_allclose(gray, expected, atol=2e-4)
    colors = draw(AugmentSettings(grayscale=0.1), 4000, 10, rng()).colors
    share = (colors.diagonal(dim1=1, dim2=2).sum(1) < 2).float().mean().item()
    assert abs(share - 0.1) < 0.02  # four standard errors


def chroma(red: float, green: float, blue: float) -> complex:
    return complex(*colorsys.rgb_to_yiq(red, green, blue)[1:])


def test_hue_turns_the_chroma_and_keeps_the_luma() -> None:
    images = noise(40, 4, **TAME)
    drawn = draw(AugmentSettings(color_jitter=(0.0, 0.0, 0.0, 0.4)), 40, 4, rng())
    turns = []
    for before, after in zip(images / 255, apply(images, drawn)):
        before, after = before.flatten(1).T, after.flatten(1).T
        luma = torch.tensor([0.299, 0.587, 0.114])
        np.testing.assert_allclose(after @ luma, before @ luma, atol=1e-5)
        ratio = [chroma(*a) / chroma(*b) for a, b in zip(after.tolist(), before.tolist())]
        # colorsys rounds its coefficients to two digits.
        np.testing.assert_allclose(np.abs(ratio), 1, atol=0.05)
        assert np.ptp(np.angle(np.array(ratio) / ratio[0])) < 0.1
        turns.append(np.angle(ratio[0]) / (2 * math.pi))
    assert max(np.abs(turns)) < 0.41
    assert min(turns) < -0.3 < 0.3 < max(turns)


def test_hue_in_hsv_is_torchvisions_shift_and_another_than_the_rotation() -> None:
    images = noise(40, 4)
    images[0] = 77  # grey has no hue
    jitter = {"color_jitter": (0.0, 0.0, 0.0, 0.4)}
    drawn = draw(AugmentSettings(hue="hsv", **jitter), 40, 4, rng())
    assert drawn.hue is not None
    expected = [functional.adjust_hue(i / 255, turn) for i, turn in zip(images, drawn.hue.tolist())]
    np.testing.assert_allclose(apply(images, drawn), torch.stack(expected), atol=2e-6)
    rotated = apply(images, draw(AugmentSettings(**jitter), 40, 4, rng()))
    assert (rotated - torch.stack(expected)).abs().mean() > 0.02


@pytest.mark.parametrize("jitter", [0.0, 0.4])
def test_whole_pixels_are_what_interpolation_gives(jitter: float) -> None:
    settings = AugmentSettings(shift=3, flip=0.5, color_jitter=(jitter,) * 4)
    drawn = draw(settings, 20, 9, rng())
    assert not drawn.places.is_floating_point()
    images = noise(20, 9)
    for ordered in (images, images.contiguous(memory_format=torch.channels_last)):
        taken = apply(ordered, drawn)
        assert taken.is_contiguous(memory_format=torch.channels_last)
        between = apply(ordered, replace(drawn, places=drawn.places.float()))
        assert torch.equal(taken, between) if not jitter else torch.allclose(taken, between)


def test_contrast_uses_the_mean_of_the_crop() -> None:
    bright_half = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    bright_half[..., 4:] = 200
    right = torch.stack([torch.linspace(4, 7, 8), torch.linspace(0, 7, 8)])[:, None]
    drawn = Draw(right, 0.5 * torch.eye(3)[None], torch.tensor([0.5]))
    np.testing.assert_allclose(apply(bright_half, drawn), 200 / 255, rtol=1e-6)


def test_values_are_clamped_once_at_the_end() -> None:
    images = torch.full((1, 3, 2, 2), 200, dtype=torch.uint8)
    places = torch.tensor([[[0.0, 1.0]], [[0.0, 1.0]]])
    brighter = Draw(places, 2 * torch.eye(3)[None], torch.zeros(1))
    assert (apply(images, brighter) == 1).all()
    # Twice as bright, then half the contrast: 400 and 0 meet half way to their mean of 200.
    images[..., 0] = 0
    both = Draw(places, 2 * 0.5 * torch.eye(3)[None], torch.tensor([0.5 * 2]))
    expected = torch.tensor([100 / 255, 1.0]).expand(1, 3, 2, 2)
    np.testing.assert_allclose(apply(images, both), expected, rtol=1e-6)


def test_presets_give_finite_channels_last_images_in_range(subtests: pytest.Subtests) -> None:
    for size, settings in itertools.product([1, 2, 17], augmentations().values()):
        with subtests.test(settings=settings, size=size):
            images = noise(6, size)
            augmented = apply(images, draw(settings, 6, size, rng()))
            assert augmented.shape == (6, 3, size, size)
            assert augmented.dtype == torch.float32
            assert augmented.is_contiguous(memory_format=torch.channels_last)
            assert augmented.min() >= 0
            assert augmented.max() <= 1
            assert torch.equal(
                augmented, apply(images.contiguous(), draw(settings, 6, size, rng()))
            )


def test_no_augmentation_is_a_cast() -> None:
    images = noise(4, 6)
    assert torch.equal(apply(images, draw(NONE, 4, 6, rng())), images.float() / 255)


def test_settings_that_only_just_change_nothing() -> None:
    whole = AugmentSettings(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0))
    images = noise(4, 6)
    assert torch.equal(apply(images, draw(whole, 4, 6, rng())), images.float() / 255)


def test_views_of_the_same_images_get_the_same_draw() -> None:
    images = noise(16, 12)
    stylized = images.flip(1)  # the same pictures with red and blue exchanged
    drawn = draw(CROP, 16, 12, rng())
    assert torch.equal(apply(stylized, drawn).flip(1), apply(images, drawn))
    colored = draw(PACS, 16, 12, rng())
    assert torch.equal(apply(images, colored), apply(images.clone(), colored))


def test_every_sample_has_its_own_draw() -> None:
    same = noise(1, 16).expand(12, 3, 16, 16)
    augmented = apply(same, draw(PACS, 12, 16, rng())).flatten(1)
    assert len({tuple(image.tolist()) for image in augmented}) == 12


def test_draws_depend_on_the_generator_alone() -> None:
    torch.manual_seed(1)
    first = draw(PACS, 8, 16, rng(5))
    before = torch.random.get_rng_state()
    again = draw(PACS, 8, 16, rng(5))
    other = draw(PACS, 8, 16, rng(6))
    assert torch.equal(torch.random.get_rng_state(), before)
    for name in ("places", "colors", "contrast"):
        assert torch.equal(getattr(first, name), getattr(again, name))
        assert not torch.equal(getattr(first, name), getattr(other, name))


def test_an_images_result_does_not_depend_on_its_batch() -> None:
    images, drawn = noise(6, 11), draw(PACS, 6, 11, rng())
    alone = Draw(drawn.places[:, 2:3], drawn.colors[2:3], drawn.contrast[2:3])
    np.testing.assert_allclose(apply(images[2:3], alone)[0], apply(images, drawn)[2], atol=1e-6)


def test_settings_out_of_range(subtests: pytest.Subtests) -> None:
    for settings in [
        {"flip": 1.5},
        {"grayscale": -0.1},
        {"shift": -1},
        {"crop_scale": (0.0, 1.0)},
        {"crop_scale": (0.9, 0.8)},
        {"crop_scale": (0.9, 1.1)},
        {"crop_ratio": (0.0, 1.0)},
        {"color_jitter": (0.1, 0.1, 0.1, 0.6)},
        {"crop_scale": (0.5, 1.0), "shift": 2},
        {"blur": 1},
    ]:
        with subtests.test(settings=settings), pytest.raises(ValidationError):
            AugmentSettings(**settings)


def test_an_augmentation_may_be_written_in_the_experiment() -> None:
    fields = {"crop_scale": [0.8, 1.0], "flip": 0.5}
    chosen = Experiment(data="pacs", hold_out="photo", train={"augmentation": fields})
    assert find_augmentation(chosen.train.augmentation) == AugmentSettings(**fields)
    assert chosen.id != Experiment(data="pacs", hold_out="photo").id
    again = Experiment(**yaml.safe_load(chosen.to_yaml()))
    assert again.id == chosen.id
    for wrong, said in (({"flop": 0.5}, "flop"), ({"flip": 2}, "flip")):
        with pytest.raises(ExperimentError, match=rf"train\.augmentation: .*{said}"):
            Experiment(data="pacs", train={"augmentation": wrong})


@pytest.mark.parametrize(
    ("own", "train", "expected"),
    [
        ({}, "rotation", "rotation"),
        ({}, "hsv", "hsv"),
        ({"hue": "hsv"}, "rotation", "hsv"),
        ({"hue": "rotation"}, "hsv", "rotation"),
    ],
)
def test_an_augmentation_that_says_its_hue_keeps_it(own, train, expected) -> None:
    settings = checked_settings({"train": {"hue": train}})
    worker = build_worker(build_network("cnn", 2, weights=None), settings, AugmentSettings(**own))
    assert worker.augmentation.hue == expected


def test_a_program_adds_an_augmentation_by_name() -> None:
    mine = AugmentSettings(vertical_flip=0.25)
    register_augmentation("upside-down-now-and-then", mine)
    try:
        assert find_augmentation("upside-down-now-and-then") == mine
        assert "upside-down-now-and-then" in augmentations()
        with pytest.raises(ExperimentError, match="upside-down-now-and-then"):
            find_augmentation("upside-down-now-and-than")
    finally:
        GENERAL_AUGMENTATIONS._found.pop("upside-down-now-and-then")
    assert {"aerial", "microscope", "none"} <= set(augmentations())
    assert find_augmentation("aerial").quarter_turns
    assert find_augmentation("microscope").vertical_flip
