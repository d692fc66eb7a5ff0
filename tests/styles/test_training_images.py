"""What a codec's training looks at, and the variants it learns from."""

from pathlib import Path

import pytest
import torch

from feddg.rng import stream
from feddg.styles.training_images import draw_batch, load_images
from feddg.styles.variants import VARIANTS, Variant, grey, inverted, line_drawing, unchanged
from style_images import random_unit_images, write_images


def test_load_images_searches_in_depth(tmp_path: Path) -> None:
    write_images(tmp_path / "deep" / "a", 3)
    write_images(tmp_path / "b", 2)
    images = load_images([tmp_path], 20)
    assert images.shape == (5, 3, 20, 20)
    assert images.dtype == torch.uint8


def test_batches_hold_about_the_pixels_asked_for() -> None:
    collections = (
        (random_unit_images(0, 5, 64) * 255).to(torch.uint8),
        (random_unit_images(1, 3, 64) * 255).to(torch.uint8),
    )
    seen = set()
    for step in range(40):
        drawn = draw_batch(*collections, sizes=(16, 32, 128), pixels=8192, seed=1, step=step)
        count, _, side, _ = drawn.contents.shape
        assert drawn.styles.shape == drawn.counterparts.shape == drawn.contents.shape
        assert count == {16: 32, 32: 8, 128: 2}[side]
        assert count % drawn.pool == 0
        assert len(drawn.known) == len(drawn.strength) == count
        for part in (drawn.contents, drawn.styles, drawn.counterparts, drawn.strength):
            assert part.min() >= 0
            assert part.max() <= 1
        seen.add((side, drawn.pool > 1, bool(drawn.known.any()), bool(drawn.known.all())))
        again = draw_batch(*collections, sizes=(16, 32, 128), pixels=8192, seed=1, step=step)
        assert torch.equal(drawn.contents, again.contents)
    assert {side for side, *_ in seen} == {16, 32, 128}
    assert {pool for _, pool, *_ in seen} == {True, False}
    assert {known for *_, known, _ in seen} == {True, False}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.__name__)
def test_variants_keep_shape_and_range_and_differ(variant: Variant) -> None:
    images = torch.rand(3, 3, 24, 20, generator=stream(0, "images"))
    before = images.clone()
    varied = variant(images, stream(0, "variant"))
    assert varied.shape == images.shape
    assert varied.min() >= 0
    assert varied.max() <= 1
    assert torch.equal(varied, variant(images, stream(0, "variant")))
    assert torch.equal(varied, images) == (variant is unchanged)
    assert torch.equal(images, before)


def test_what_the_simple_variants_do() -> None:
    images = torch.rand(2, 3, 16, 16, generator=stream(0, "images"))
    generator = stream(0, "variant")
    torch.testing.assert_close(inverted(images, generator) + images, torch.ones_like(images))
    tones = grey(images, generator)
    assert torch.equal(tones[:, 0], tones[:, 2])
    edge = torch.ones(1, 3, 32, 32)
    edge[..., 16:] = 0
    drawing = line_drawing(edge, generator)[0, 0, 16]
    assert drawing[2] > 0.8
    assert drawing[16:19].min() < 0.2
    assert drawing[-3] > 0.8
