"""Steps by gradients that are clipped image by image and noised: DP-SGD.

Abadi et al., "Deep Learning with Differential Privacy" (CCS 2016), Algorithm 1, of B images::

    g_i <- g_i min(1, C / |g_i|);   g = (1/B) (sum_i g_i + N(0, (z C)^2))

Neighbours differ by one image whose gradient is zero: the sensitivity of the sum is C. An image is
in one batch of an epoch; which one is drawn without looking at it, and the draw gets no credit.

Gradients are taken image by image (``torch.func``), not by Opacus' hooks: they do the same for any
layer, and the noise is :mod:`feddg.rng`'s. A network must treat every image by itself.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from feddg.clients.client import Batch, Client, RecordNoise
from feddg.models.network import Network
from feddg.rng import add_noise


class _Logits(nn.Module):
    """The network's logits, as its training has them."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Maps ``(B, 3, H, W)`` to ``(B, classes)``."""
        logits: Tensor = self.network.classifier(self.network.features(images))
        return logits


def image_gradients(client: Client, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
    """Returns each image's gradient by parameter, ``(B, ...)``, and the losses ``(B,)``."""
    model = _Logits(client.network)
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    fixed = {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad}
    fixed |= dict(model.named_buffers())

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(model, (parameters, fixed), (image[None],))
        return client.class_loss(logits, label[None])

    both = vmap(grad_and_value(loss), in_dims=(None, 0, 0), randomness="different")
    gradients, losses = both(trained, batch.images.contiguous(), batch.labels)
    return {n.removeprefix("network."): g for n, g in gradients.items()}, losses


def clipped_sum(gradients: dict[str, Tensor], norm: float) -> dict[str, Tensor]:
    """Returns the sum of the images' gradients, each of at most ``norm``; float64.

    A gradient that is not finite counts as zero.
    """
    rows = torch.cat([g.detach().flatten(1).double() for g in gradients.values()], dim=1)
    rows = torch.where(torch.isfinite(rows).all(1, keepdim=True), rows, 0.0)
    lengths = rows.norm(dim=1, keepdim=True)
    total = (rows * (norm / lengths.clamp_min(norm))).sum(0)
    parts = total.split([g[0].numel() for g in gradients.values()])
    return {n: part.reshape(g.shape[1:]) for (n, g), part in zip(gradients.items(), parts)}


def private_step(client: Client, batch: Batch, noise: RecordNoise) -> None:
    """Takes one optimizer step by a batch's clipped and noised gradient."""
    gradients, losses = image_gradients(client, batch)
    client.passes += len(batch) - 1  # together they went through as what looks like one image
    parameters = dict(client.network.named_parameters())
    for name, total in clipped_sum(gradients, noise.norm).items():
        noised = add_noise(total, noise.multiplier * noise.norm) / len(batch)
        parameters[name].grad = noised.to(parameters[name])
    client.note({"cross_entropy": losses.mean()})
    client.step()
