"""RandAugment: own draws for every image, alike in all views, and its limits."""

import pytest
import torch
from torchvision.transforms.v2 import RandAugment

from feddg.clients.client import Batch
from feddg.data.data_set import find_augmentation
from feddg.errors import ExperimentError
from feddg.methods.composition import build_method
from feddg.methods.randaug import each
from federations import colored_images, federation, same

PACS = find_augmentation("pacs")


def images(count=6):
    pixels = torch.from_numpy(colored_images(count)[0]).permute(0, 3, 1, 2)
    return pixels.float() / 255


def test_each_image_is_torchvisions_result_under_consecutive_draws():
    transform = RandAugment(2, 9)
    result = each(transform, images(), 7)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        for image, got in zip((images() * 255).round().byte(), result):
            assert torch.equal((got * 255).round().byte(), transform(image))


def test_images_get_draws_of_their_own_and_the_same_seed_the_same():
    same_image = images(1).expand(12, -1, -1, -1)
    one, again = (each(RandAugment(2, 15), same_image, 7) for _ in range(2))
    assert torch.equal(one, again)
    assert len({tuple(image.flatten().tolist()) for image in one}) > 6
    assert not torch.equal(one, each(RandAugment(2, 15), same_image, 8))


def test_the_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = each(RandAugment(2, 15), images(), 7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(each(RandAugment(2, 15), images(), 7), one)


class Recorder(type(build_method("randaug", {}))):
    def head_loss(self, client, batch, embeddings):
        client.scratch["batch"] = batch
        return super().head_loss(client, batch, embeddings)


def test_views_get_the_operations_of_their_originals():
    small = federation(Recorder(), sizes=(8,))
    client = small.client()
    batch = client.batch(torch.arange(8), client.stream("augment"))
    stylized = Batch(
        batch.images, batch.labels, batch.positions, {"stylized": batch.images.clone()}
    )
    small.method.loss(client, stylized)
    seen = client.scratch["batch"]
    assert torch.equal(seen.images, seen.views["stylized"])
    assert not torch.equal(seen.images, batch.images)
    assert 0 <= float(seen.images.min()) <= float(seen.images.max()) <= 1


def test_it_takes_the_place_of_colour_jitter_and_keeps_crop_and_flip():
    small = federation("randaug", augmentation=PACS)
    client, other = small.client(0), small.client(1)
    small.method.begin(client)
    assert not client.augmentation.recolors
    assert client.augmentation.crop_scale == PACS.crop_scale
    assert client.augmentation.flip == PACS.flip
    assert other.augmentation == PACS  # the worker's settings are everyone's


def test_no_operations_are_fedavg_bit_for_bit():
    assert same(federation("randaug", settings={"operations": 0}).run(1), federation().run(1))
    assert not same(federation("randaug").run(1), federation().run(1))


def test_bad_settings_are_refused_by_name():
    with pytest.raises(ExperimentError, match="magnitude"):
        build_method("randaug", {"magnitude": 31})
