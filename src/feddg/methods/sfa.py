"""SFA: the embedding is perturbed with Gaussian noise, so that the classifier has to be smooth.

Noise that scales and shifts the embedding stands for the shift to an unseen domain. The simple form
draws it alike for every direction; the adaptive form draws the shift along the directions in which
images of the same class differ at this client. Each client does so on its own.

Li et al., "A Simple Feature Augmentation for Domain Generalization" (ICCV 2021).

Equations:
    z' = a * z + b,    a ~ N(1, s_a^2),    b ~ N(0, s_b^2)          (SFA-S)
                                           b ~ N(0, S_y)            (SFA-A)
    L = CE(g(z), y) / 2 + CE(g(z'), y) / 2

    S_y is the covariance of the embeddings of class y over the client's last 8 batches, shrunk
    towards a multiple of the identity: (1 - e) S_y + e tr(S_y) / d I, with e = 0.1.

Leaves the client:
    The network, as in FedAvg. Covariances stay.

Decisions:
    The noise scales are not published: 0.5 is our choice, about the scale of raw embeddings.
    That the clean loss is kept, with one half, is inference; so are the shrinkage and the window of
    8 batches, which starts anew each round. A draw from N(0, S_y) is made as sum_j x_j (z_j -
    mean_y) / sqrt(n_y) with x ~ N(0, 1) over the class's n_y embeddings: its covariance is exactly
    S_y and no d x d matrix is formed. A class with a single embedding gets SFA-S's shift.
"""

from collections import deque
from typing import Literal

import torch
from pydantic import Field
from torch import Generator, Tensor

from feddg.clients.client import Batch, Client
from feddg.messages import Weights, on_device
from feddg.methods.base import Method, MethodSettings, register
from feddg.settings import Fraction, NotNegative


class SfaSettings(MethodSettings):
    """Hyper-parameters of SFA."""

    noise: Literal["simple", "adaptive"] = Field("simple", description="SFA-S, or SFA-A")
    scale_noise: NotNegative = Field(0.5, description="s_a (our choice; not published)")
    shift_noise: NotNegative = Field(0.5, description="s_b (our choice; not published)")
    recent_batches: int = Field(8, ge=1, description="behind a covariance, SFA-A (second-hand)")
    shrinkage: Fraction = Field(0.1, description="e, SFA-A (our choice)")


@register
class Sfa(Method):
    """Scales and shifts embeddings by Gaussian noise."""

    name = "sfa"
    title = "SFA"
    summary = "Gaussian noise on the embedding (Li et al. 2021)"
    settings: SfaSettings

    def draws(self, client: Client, positions: Tensor, labels: Tensor) -> Weights:
        """Adds the noise that scales and the noise that shifts each embedding."""
        shape = 2, len(labels), client.network.features_dimension
        drawn = {"sfa": torch.randn(shape, generator=client.stream("sfa", client.steps))}
        return super().draws(client, positions, labels) | drawn

    def head_loss(self, client: Client, batch: Batch, embeddings: Tensor) -> dict[str, Tensor]:
        """Returns half the loss of the clean embeddings plus half that of noisy ones."""
        clean = super().head_loss(client, batch, embeddings)
        noisy = super().head_loss(client, batch, self._perturbed(client, batch, embeddings))
        return {name: term / 2 for name, term in clean.items()} | {
            f"noisy_{name}": term / 2 for name, term in noisy.items()
        }

    def _perturbed(self, client: Client, batch: Batch, embeddings: Tensor) -> Tensor:
        chosen = self.settings
        a, b = self.drawn(client, batch)["sfa"].to(embeddings)
        shift = chosen.shift_noise * b
        if chosen.noise == "adaptive":
            window = client.scratch.setdefault("sfa", deque(maxlen=chosen.recent_batches))
            if self.is_first_pass(client, batch, "sfa"):
                window.append((embeddings.detach().float(), batch.labels))
            seen, classes = (torch.cat(part) for part in zip(*window))
            rng = client.stream("sfa", client.steps)
            torch.randn(2, *embeddings.shape, generator=rng)  # drawn before, see `draws`
            along, known = class_noise(batch.labels, seen, classes, chosen.shrinkage, rng)
            shift = torch.where(known[:, None], along.to(shift), shift)
        return embeddings * (1 + chosen.scale_noise * a) + shift


def class_noise(
    labels: Tensor, seen: Tensor, classes: Tensor, shrinkage: float, rng: Generator
) -> tuple[Tensor, Tensor]:
    """Draws noise with the shrunk covariance of each label's class.

    Args:
        labels: ``(B,)``.
        seen: ``(M, d)`` embeddings from which the covariances are estimated.
        classes: ``(M,)`` their classes.
        shrinkage: weight of the identity, in [0, 1].
        rng: CPU generator.

    Returns:
        ``(B, d)`` noise, and ``(B,)`` whether the class has at least two embeddings.
    """
    member = (classes[:, None] == classes[None, :]).float()
    centered = seen - member @ seen / member.sum(1, keepdim=True)
    mine = (labels[:, None] == classes[None, :]).float()
    counts = mine.sum(1).clamp(min=1)
    shapes = {"along": len(seen), "around": seen.shape[1]}
    drawn = {n: torch.randn(len(labels), size, generator=rng) for n, size in shapes.items()}
    sent = on_device(drawn, seen.device)
    along = (sent["along"] * mine) @ centered / counts[:, None].sqrt()
    variance = mine @ centered.square().mean(1) / counts  # tr(S_y) / d
    around = sent["around"] * variance[:, None].sqrt()
    return (1 - shrinkage) ** 0.5 * along + shrinkage**0.5 * around, counts > 1
