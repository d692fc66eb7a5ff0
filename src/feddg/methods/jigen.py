"""JiGen: the network also solves jigsaw puzzles of its images.

Some images are cut into 3 x 3 tiles and shuffled by one of 30 known permutations; a second head
tells which one. Solving this needs shapes and where they belong, which the domains share, and keeps
the features from leaning on local texture. Each client does this on its own.

Carlucci et al., "Domain Generalization by Solving Jigsaw Puzzles" (CVPR 2019), Eq. 1.

Equations:
    L = CE(g(f(x')), y) + weight CE(j(f(x')), p)

    x' is the image shuffled by permutation p, or the whole image with p = 0; g is the classifier, j
    the jigsaw head over 30 + 1 classes. Permutations are chosen greedily from all 9!, each as far
    as possible in Hamming distance from those chosen before (Noroozi and Favaro 2016).

Leaves the client:
    The network, as in FedAvg, with the jigsaw head.

Decisions:
    As the authors' ResNet-18 code for PACS: weight 0.7, share of whole images 0.9, classification
    loss on shuffled images too. The other tenth draws from all orders, the identity among them. A
    greedy step takes the largest minimum distance, then the largest sum, then the first in
    lexicographic order; the search starts from the identity, so that shuffled images are far from
    whole ones too. Where a side is no multiple of 3, what is left over stays in its place as a rim,
    so that an image has the same size in training and at test.
"""

import functools
import itertools
from dataclasses import replace

import numpy
import torch
from pydantic import Field
from torch import Tensor, nn

from feddg.clients.client import Batch, Client
from feddg.messages import Weights
from feddg.methods.base import Method, MethodSettings, register
from feddg.models.network import Network
from feddg.settings import Fraction, NotNegative

GRID = 3


class JigenSettings(MethodSettings):
    """Hyper-parameters of JiGen."""

    jigsaw_weight: NotNegative = Field(0.7, description="weight of the puzzle (code, ResNet-18)")
    whole_share: Fraction = Field(
        0.9, description="share of images that draw no order (code, ResNet-18)"
    )
    permutations: int = Field(30, ge=1, le=1000, description="puzzles beside the whole image")


@functools.cache
def distant_permutations(count: int) -> Tensor:
    """Returns ``(count + 1, 9)`` tile orders that are far apart; row 0 is the identity."""
    pool = numpy.array(list(itertools.permutations(range(GRID**2))), dtype=numpy.int8)
    nearest = numpy.full(len(pool), GRID**2)
    total = numpy.zeros(len(pool), dtype=numpy.int64)
    chosen = [0]
    for _ in range(count):
        distance = (pool != pool[chosen[-1]]).sum(1)
        nearest, total = numpy.minimum(nearest, distance), total + distance
        chosen.append(int((nearest * GRID**2 * (count + 1) + total).argmax()))
    return torch.from_numpy(pool[chosen].astype(numpy.int64))


def shuffled(images: Tensor, orders: Tensor) -> Tensor:
    """Cuts images into 3 x 3 tiles and rearranges them.

    Args:
        images: ``(B, C, H, W)``; a rim beyond a multiple of 3 does not move.
        orders: ``(B, 9)``, the tile at each place, row by row.
    """
    count, channels = images.shape[:2]
    height, width = (side // GRID for side in images.shape[-2:])
    top, left = ((side % GRID) // 2 for side in images.shape[-2:])
    across, down = slice(left, left + GRID * width), slice(top, top + GRID * height)
    tiles = images[..., down, across].reshape(count, channels, GRID, height, GRID, width)
    tiles = tiles.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    tiles = tiles[torch.arange(count, device=images.device)[:, None], orders]
    tiles = tiles.view(count, GRID, GRID, channels, height, width).permute(0, 3, 1, 4, 2, 5)
    result = images.contiguous(memory_format=torch.channels_last).clone()
    result[..., down, across] = tiles.reshape(count, channels, GRID * height, GRID * width)
    return result


@register
class Jigen(Method):
    """A second head predicts how an image's tiles were shuffled."""

    name = "jigen"
    title = "JiGen"
    summary = "jigsaw puzzles as a second task (Carlucci et al. 2019)"
    needs_images = True
    settings: JigenSettings

    def network(self, network: Network) -> Network:
        """Adds the jigsaw head."""
        network = super().network(network)
        size = network.features_dimension, self.settings.permutations + 1
        network.heads["jigsaw"] = network.initialised("jigsaw", lambda: nn.Linear(*size))
        return network

    def draws(self, client: Client, positions: Tensor, labels: Tensor) -> Weights:
        """Adds each image's puzzle, and the order of its tiles."""
        count, rng = self.settings.permutations, client.stream("jigsaw", client.steps)
        whole = torch.rand(len(labels), generator=rng) < self.settings.whole_share
        puzzles = torch.randint(count + 1, (len(labels),), generator=rng).masked_fill(whole, 0)
        orders = distant_permutations(count)[puzzles]
        drawn = {"jigsaw/puzzles": puzzles, "jigsaw/orders": orders}
        return super().draws(client, positions, labels) | drawn

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """Shuffles some images, and their views in the same way."""
        drawn = self.drawn(client, batch)
        orders = drawn["jigsaw/orders"]
        puzzled = replace(
            batch,
            images=shuffled(batch.images, orders),
            views={name: shuffled(view, orders) for name, view in batch.views.items()},
            targets=batch.targets | {"jigsaw": drawn["jigsaw/puzzles"]},
        )
        return super().loss(client, puzzled)

    def head_loss(self, client: Client, batch: Batch, embeddings: Tensor) -> dict[str, Tensor]:
        """Returns the classification terms and the cross-entropy of the puzzle."""
        puzzles = batch.targets["jigsaw"]
        guesses = client.network.heads["jigsaw"](embeddings)
        puzzle = self.settings.jigsaw_weight * nn.functional.cross_entropy(guesses, puzzles)
        return super().head_loss(client, batch, embeddings) | {"jigsaw": puzzle}
