"""Gradient inversion where the answer is known."""

import torch
from torch import nn

from extras import needs
from feddg.attacks.inversion import Search, invert
from feddg.rng import stream

pytestmark = needs("torchmetrics")


class Linear(nn.Module):
    """One linear layer: its gradient is the image times a number, so inversion is easy."""

    def __init__(self, size):
        super().__init__()
        self.layer = nn.Linear(3 * size * size, 4)
        with torch.no_grad():
            self.layer.weight.copy_(
                torch.randn(self.layer.weight.shape, generator=stream(0, "w")) / 20
            )
            self.layer.bias.zero_()

    def forward(self, images):
        return self.layer(images.flatten(1))


def change_of(network, images, labels, signed):
    loss = nn.functional.cross_entropy(network(images), labels)
    names, parameters = zip(*network.named_parameters())
    gradients = torch.autograd.grad(loss, parameters)
    return {n: g.sign() if signed else g for n, g in zip(names, gradients)}


def test_an_image_behind_a_linear_layer_is_found():
    network, size = Linear(8), 8
    ramp = torch.linspace(0.1, 0.9, size)
    image = torch.stack([ramp.expand(size, -1), ramp.expand(size, -1).T, torch.full((8, 8), 0.4)])
    labels = torch.tensor([2])
    change = change_of(network, image[None], labels, signed=False)
    search = Search(iterations=200, total_variation=1e-4)
    found, cosine = invert(network, change, labels, size, search, signed=False)
    assert cosine > 0.999
    # A gradient says nothing of its length, so the image is found up to one.
    scale = (found * image).sum() / found.square().sum()
    assert (scale * found[0] - image).square().mean() < 2e-3


def test_a_signed_step_tells_less():
    network, size = Linear(8), 8
    image = torch.rand(1, 3, 8, 8, generator=stream(0, "image"))
    labels = torch.tensor([1])
    search = Search(iterations=60, total_variation=0)
    cosines = [
        invert(network, change_of(network, image, labels, signed), labels, size, search, signed)[1]
        for signed in (False, True)
    ]
    assert cosines[0] > 0.98
    again = invert(network, change_of(network, image, labels, True), labels, size, search, True)
    assert again[1] == cosines[1], "the search is a function of its seed"
