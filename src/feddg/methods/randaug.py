"""RandAugment: two random operations of a fixed strength on every image.

Colour, contrast, sharpness, posterising, rotation, shear and others: each image gets operations
drawn at random from a list of 14, all at the same strength. No policy is searched for. Each client
augments its own images.

Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space"
(CVPR workshops 2020).

Equations:
    x' = o_2(o_1(x)),    o_i ~ U(operations), each at magnitude m of 31, signs at random

Leaves the client:
    The network, as in FedAvg.

Decisions:
    It comes after the experiment's crop and flip, and takes the place of its colour jitter and
    grayscale. All views of an image, such as a stylized copy, get the operations of the original.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor

from feddg.clients.client import Batch, Client
from feddg.methods.base import Method, MethodSettings, register
from feddg.rng import DrawnFrom

if TYPE_CHECKING:
    from torchvision.transforms.v2 import RandAugment


class RandAugSettings(MethodSettings):
    """Hyper-parameters of RandAugment."""

    operations: int = Field(2, ge=0, description="operations on each image (torchvision)")
    magnitude: int = Field(9, ge=0, le=30, description="their strength, of 30 (torchvision)")


@register
class RandAug(Method):
    """Applies random operations of one strength to every image."""

    name = "randaug"
    title = "RandAugment"
    summary = "RandAugment in place of colour jitter (Cubuk et al. 2020)"
    needs_images = True
    moves_pixels = True
    waits = "torchvision sends each image's affine matrices by itself"
    settings: RandAugSettings

    def begin(self, client: Client) -> None:
        """Turns the experiment's colour augmentation off."""
        plain = {"color_jitter": (0.0, 0.0, 0.0, 0.0), "grayscale": 0.0}
        client.augmentation = client.augmentation.model_copy(update=plain)
        super().begin(client)

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """Returns the loss of the augmented images."""
        rng = client.stream("randaug", client.steps)
        seed = int(torch.randint(2**62, (), generator=rng))
        from torchvision.transforms.v2 import RandAugment  # a second to import

        transform = RandAugment(self.settings.operations, self.settings.magnitude)
        varied = replace(
            batch,
            images=each(transform, batch.images, seed),
            views={name: each(transform, view, seed) for name, view in batch.views.items()},
        )
        return super().loss(client, varied)


def each(transform: "RandAugment", images: Tensor, seed: int) -> Tensor:
    """Transforms images one by one, each with its own draws; equal seeds give equal draws.

    Args:
        transform: torchvision's transform.
        images: ``(B, 3, H, W)`` float RGB in [0, 1].
        seed: seed of all draws.
    """
    # The operations on colour are defined for bytes.
    raw = (images * 255).round().to(torch.uint8)
    with DrawnFrom(seed):
        varied = torch.stack([transform(image) for image in raw])
    return (varied.to(images.dtype) / 255).contiguous(memory_format=torch.channels_last)
