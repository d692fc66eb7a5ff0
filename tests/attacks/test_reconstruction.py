"""The generator, on vectors whose answer is known."""

import pytest
import torch

from extras import needs
from feddg.attacks.image_metrics import (
    clustered_mean,
    perceptual_points,
    retrieval,
)
from feddg.attacks.reconstruction import GeneratorTraining, train_generator
from feddg.data.data_set import load_source
from feddg.errors import DataError
from feddg.rng import stream
from feddg.styles.codec import load_codec
from feddg.styles.statistics import measure

pytestmark = needs("torchmetrics")
PUBLIC, ASKED = 300, 60


@pytest.fixture(scope="module")
def images():
    table = load_source("digits")
    chosen = torch.randperm(len(table), generator=stream(0, "test"))[: PUBLIC + ASKED]
    return torch.from_numpy(table.images[chosen.numpy()]).permute(0, 3, 1, 2).contiguous()


@pytest.fixture(scope="module")
def attacked(images):
    """A generator for the linear, invertible encoder, and what it draws of images it never saw."""
    rows = measure(load_codec("colors"), images).styles().flatten(1).float()
    training = GeneratorTraining(steps=8, batch_size=8)
    generator = train_generator(rows[:PUBLIC], images[:PUBLIC], training)
    return generator, rows[PUBLIC:], images[PUBLIC:] / 255


def test_a_linear_encoder_gives_the_mean_colour_away(attacked):
    generator, rows, true = attacked
    drawn = generator.images(rows)
    error = (drawn.mean((2, 3)) - true.mean((2, 3))).abs()
    assert error.max() < 0.02
    wrong = (drawn.roll(1, 0).mean((2, 3)) - true.mean((2, 3))).abs()
    assert wrong.max() > 0.2, "the images' colours differ, so this could fail"


def test_a_generator_fed_noise_is_at_chance_in_retrieval(attacked):
    generator, rows, true = attacked
    groups = torch.zeros(ASKED)

    def look(drawn):
        return retrieval(perceptual_points(drawn), perceptual_points(true), groups)

    draws = [torch.randn(rows.shape, generator=stream(seed, "noise")) for seed in range(8)]
    blind = [look(generator.images(noise * generator.scale + generator.centre)) for noise in draws]
    # 480 ranks, uniform under chance: their mean is within 0.5 +- 0.05 but once in 5,000 times.
    assert torch.stack([found.ranks for found in blind]).mean() == pytest.approx(0.5, abs=0.05)
    assert sum(found.first for found in blind) / 8 < 4 / ASKED
    seeing = look(generator.images(rows))
    assert clustered_mean(seeing.ranks, torch.arange(ASKED)).high < 0.4


def test_training_is_a_function_of_its_seed(images):
    rows = measure(load_codec("colors"), images[:40]).styles().flatten(1).float()
    drawn = []
    for seed in (3, 3, 4):
        training = GeneratorTraining(steps=4, batch_size=8, seed=seed)
        torch.rand(7)  # the global generator is nobody's business
        drawn.append(train_generator(rows, images[:40], training).images(rows))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_the_network_is_kept_only_where_it_helps(images):
    rows = measure(load_codec("compact"), images[:PUBLIC]).styles().flatten(1).float()
    linear = train_generator(rows, images[:PUBLIC], GeneratorTraining(steps=0))
    trained = train_generator(
        rows, images[:PUBLIC], GeneratorTraining(steps=16, batch_size=16, perceptual=0)
    )
    assert trained.psnr >= linear.psnr
    assert linear.network is None


@pytest.mark.parametrize("length", [1, 40])
def test_the_linear_attack_finds_a_linear_map(length):
    """More numbers than images, and fewer: both sides of the ridge."""
    rng = stream(0, "linear", length)
    colours = torch.rand(32, 3, 1, 1, generator=rng)
    images = (colours.expand(-1, -1, 16, 16) * 255).round().to(torch.uint8)
    mixing = torch.randn(3, 3 * length, generator=rng)
    rows = colours.flatten(1) @ mixing
    generator = train_generator(rows, images, GeneratorTraining(steps=0))
    assert (generator.images(rows) - images / 255).abs().max() < 0.01


def test_too_few_images_are_refused():
    with pytest.raises(DataError, match="15 images are too few"):
        train_generator(
            torch.rand(15, 4), torch.zeros(15, 3, 16, 16, dtype=torch.uint8), GeneratorTraining()
        )
