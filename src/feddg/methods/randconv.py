"""RandConv: images pass through random convolutions that change texture and keep shape.

At every step a convolution with new random weights is laid over the images, mixed with the
originals. The network has to give three such versions of an image the same answer, so it cannot
lean on local texture. Each client does so on its own.

Xu et al., "Robust and Generalizable Visual Representation Learning via Random Convolutions" (ICLR
2021), Algorithm 1.

Equations:
    x_j = (1 - a) x + a (x * w),    w ~ N(0, 1 / (3 k^2)),    k in {1, 3, 5, 7},    a ~ U(0, 1)
    L = CE(g(f(x_1)), y) + weight * mean_j KL(p_j || mean p),    j = 1, 2, 3

    p_j are the class probabilities of version j; kernel size, weights and a are drawn anew for
    every version and step, and shared by the batch.

Leaves the client:
    The network, as in FedAvg.

Decisions:
    ``mix`` is RC_mix with weight 10 and is the default; ``image`` is RC_img, which leaves a version
    as it is with probability 0.5 (weight 5 on digits). As in the code, images are convolved after
    normalisation, without bias and not clamped, and no gradient is stopped in the consistency term.
    Here a is the share of the convolution, so that 0 returns the image. The cross-entropy of the
    first version alone, and the mean (not the sum) over the three divergences, are from memory of
    the paper (inference).
"""

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Generator, Tensor, nn

from feddg.clients.client import Batch, Client
from feddg.messages import Weights
from feddg.methods.base import Method, MethodSettings, register
from feddg.models.network import Network
from feddg.settings import Fraction, NotNegative

KERNELS = (1, 3, 5, 7)


class RandConvSettings(MethodSettings):
    """Hyper-parameters of RandConv."""

    convolution: Literal["mix", "image"] = Field("mix", description="RC_mix, or RC_img (code)")
    identity_probability: Fraction = Field(0.5, description="of an unchanged version, RC_img")
    consistency_weight: NotNegative = Field(10.0, description="code: RC_mix 10, RC_img 5")
    versions: int = Field(3, ge=1, description="versions of each image per step (paper)")
    version_of: Literal["image", "last_version"] = Field(
        "image", description="what is convolved: the image, or the version before (code: a chain)"
    )


@register
class RandConv(Method):
    """Random convolutions of an image must be classified alike."""

    name = "randconv"
    summary = "random convolutions and consistency (Xu et al. 2021)"
    any_task = True
    needs_images = True
    settings: RandConvSettings

    def draws(self, client: Client, positions: Tensor, labels: Tensor) -> Weights:
        """Adds the kernel of each version, and its share."""
        rng, drawn = client.stream("randconv", client.steps), {}
        for version in range(self.versions):
            share, size, still = torch.rand(3, generator=rng)
            drawn[f"randconv/{version}"] = random_kernel(
                KERNELS[int(size * len(KERNELS))], rng, client
            )
            if self.settings.convolution == "image":
                share = (still >= self.settings.identity_probability).float()
            drawn[f"randconv/{version}/share"] = share
        return super().draws(client, positions, labels) | drawn

    @property
    def versions(self) -> int:
        """How many versions of each image a step shows."""
        return self.settings.versions if self.settings.consistency_weight else 1

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """Returns the loss of the first version, and the divergence of all from their mean."""
        network, weight = client.network, self.settings.consistency_weight
        versions, drawn = self.versions, self.drawn(client, batch)
        made: list[Tensor] = []
        for version in range(versions):
            chained = made and self.settings.version_of == "last_version"
            kernel, share = drawn[f"randconv/{version}"], drawn[f"randconv/{version}/share"]
            images = made[-1] if chained else batch.images
            made.append(convolved(network, images, kernel, share))
        embeddings = network.features_of(made)
        terms = self.head_loss(client, batch, embeddings[0])
        if versions == 1:
            return terms
        logits = torch.stack([network.classifier(z) for z in embeddings])
        return terms | {"consistency": weight * client.worker.task.divergence(logits)}


def random_kernel(size: int, rng: Generator, client: Client | None = None) -> Tensor:
    """Draws weights ``(3, 3, size, size)`` of a convolution that preserves an image's variance.

    If the steps of ``client`` are recorded, zeros around them make all :data:`KERNELS` one size.
    """
    kernel = torch.randn(3, 3, size, size, generator=rng) / math.sqrt(3 * size**2)
    rim = (KERNELS[-1] - size) // 2 if client is not None and client.records_steps else 0
    return nn.functional.pad(kernel, [rim] * 4) if rim else kernel


def convolved(network: Network, images: Tensor, kernel: Tensor, share: Tensor) -> Tensor:
    """Returns images mixed with the convolution of the normalised images.

    Args:
        network: provides the normalisation of ``(B, 3, H, W)`` images in [0, 1].
        images: RGB in [0, 1].
        kernel: ``(3, 3, k, k)``, k odd.
        share: a number: 0 returns the images, 1 only the convolution; the result is not clamped to
            [0, 1].
    """
    kernel = kernel.to(images)
    filtered = nn.functional.conv2d(network.normalize(images), kernel, padding="same")
    return (1 - share) * images + share * network.denormalize(filtered)
