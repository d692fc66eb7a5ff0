"""Strong colour and texture variants of images: more styles for the decoder than folders hold.

Each variant takes float RGB images ``(B, 3, H, W)`` in [0, 1] and a generator, and returns images
of the same shape and range.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Variant = Callable[[Tensor, torch.Generator], Tensor]


def unchanged(images: Tensor, generator: torch.Generator) -> Tensor:
    """Returns the images as they are."""
    return images


def recoloured(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mixes the colour channels by a random matrix and bends the tones."""
    mix = torch.eye(3) + 0.6 * torch.randn(3, 3, generator=generator)
    mixed = torch.einsum("oc,bchw->bohw", mix, images - 0.5) + 0.5
    return mixed.clamp(0, 1).pow(_between(0.5, 2.0, generator))


def inverted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Returns the negative."""
    return 1 - images


def grey(images: Tensor, generator: torch.Generator) -> Tensor:
    """Grey tones of random contrast and brightness."""
    contrast = _between(0.4, 2.5, generator)
    brightness = _between(0.3, 0.7, generator)
    return ((_luminance(images) - 0.5) * contrast + brightness).clamp(0, 1).expand_as(images)


def line_drawing(images: Tensor, generator: torch.Generator) -> Tensor:
    """Dark lines on white paper, from a difference of Gaussians."""
    return _paper_with_lines(images, generator).expand_as(images)


def flat_colours(images: Tensor, generator: torch.Generator) -> Tensor:
    """Smooth, saturated areas of few tones with dark outlines."""
    from torchvision.transforms.functional import gaussian_blur  # a second to import

    smooth = gaussian_blur(images, [5, 5], [1.5, 1.5])
    levels = 2 + int(_between(0, 4, generator))
    luminance = _luminance(smooth)
    vivid = luminance + (smooth - luminance) * _between(1.0, 3.0, generator)
    posterised = (vivid.clamp(0, 1) * levels).round() / levels
    outlined: Tensor = posterised * _paper_with_lines(images, generator)
    return outlined


def texture(images: Tensor, generator: torch.Generator) -> Tensor:
    """Blobs or stripes of one random scale in random colours, over faint traces of the images."""
    height, width = images.shape[-2:]
    rows = max(1, height // 2 ** int(_between(0, 6, generator)))
    columns = max(1, width // 2 ** int(_between(0, 6, generator)))
    noise = torch.rand(len(images), 1, rows, columns, generator=generator)
    blobs = functional.interpolate(noise, (height, width), mode="bilinear")
    mask = torch.sigmoid((blobs - 0.5) * _between(4, 60, generator))
    colours = torch.rand(2, len(images), 3, 1, 1, generator=generator)
    return 0.85 * (colours[0] * mask + colours[1] * (1 - mask)) + 0.15 * images


VARIANTS: tuple[Variant, ...] = (
    unchanged,
    recoloured,
    flat_colours,
    line_drawing,
    grey,
    inverted,
    texture,
)


def _paper_with_lines(images: Tensor, generator: torch.Generator) -> Tensor:
    """Returns ``(B, 1, H, W)``: 1 on paper, towards 0 where a neighbourhood's edge is dark."""
    width = _between(0.6, 1.6, generator)
    luminance = _luminance(images)
    from torchvision.transforms.functional import gaussian_blur

    fine, coarse = (gaussian_blur(luminance, [9, 9], [s, s]) for s in (width, 1.6 * width))
    threshold = _between(0.005, 0.03, generator)
    return torch.sigmoid((fine - coarse + threshold) * _between(100, 400, generator))


def _luminance(images: Tensor) -> Tensor:
    return images.mean(dim=1, keepdim=True)


def _between(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * torch.rand((), generator=generator).item()
