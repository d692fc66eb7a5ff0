"""Images in another style: deterministic, by chunks, one style each."""

import torch

from feddg.styles.codec import load_codec, transfer
from style_images import random_images, random_style


def test_reconstruction_keeps_the_picture() -> None:
    """A dark disc on a bright ground stays one (without a style, codec is near the identity)."""
    y, x = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
    disc = ((x - 32) ** 2 + (y - 32) ** 2 < 20**2).float()
    picture = (230 - 180 * disc).to(torch.uint8).expand(1, 3, 64, 64)
    codec = load_codec()
    stylized = transfer(codec, picture, torch.ones(2, codec.channels), 0.0)
    difference = (stylized.float() - picture.float()).abs().mean()
    assert difference < 30


def test_transfer_is_deterministic_and_goes_by_chunks() -> None:
    codec, images, style = load_codec(), random_images(5, 3, 16, 20), random_style(64)
    before = images.clone()
    stylized = transfer(codec, images, style, 0.7)
    assert stylized.dtype == torch.uint8
    assert stylized.shape == images.shape
    assert torch.equal(stylized, transfer(codec, images, style, 0.7))
    chunked = transfer(codec, images, style, 0.7, batch_size=2)
    assert (chunked.int() - stylized.int()).abs().max() <= 1  # a convolution may round differently
    assert torch.equal(images, before)
    assert not stylized.is_inference()


def test_transfer_takes_one_style_per_image_and_no_images() -> None:
    codec, images = load_codec(), random_images(3, 3, 16, 16)
    styles = torch.stack([random_style(64, seed) for seed in range(3)])
    together = transfer(codec, images, styles, batch_size=2)
    each = [transfer(codec, images[i : i + 1], styles[i]) for i in range(3)]
    assert (together.int() - torch.cat(each).int()).abs().max() <= 1
    assert transfer(codec, images[:0], styles[0]).shape == (0, 3, 16, 16)


def test_transfer_moves_colours_towards_the_style() -> None:
    """In the style of a red picture, a blue picture of the same texture turns red."""
    codec = load_codec()
    noise = random_images(1, 1, 64, 64) / 255
    colours = [torch.tensor(rgb).reshape(1, 3, 1, 1) for rgb in ((0.9, 0.1, 0.1), (0.1, 0.1, 0.9))]
    red, blue = (((0.3 * noise + 0.7 * colour) * 255).to(torch.uint8) for colour in colours)
    features = codec.encode(red / 255)
    style = torch.stack([features.mean((0, 2, 3)), features.std((0, 2, 3))])
    channels = transfer(codec, blue, style)[0].float().mean((1, 2))
    assert channels[0] > channels[2]
    kept = transfer(codec, blue, style, 0.0)[0].float().mean((1, 2))
    assert kept[2] > kept[0]
