"""L2D: an augmentation network learns to make images of a client look unlike themselves.

A small network of random convolutions with learnable scales and shifts stylizes each batch. The
classifier trains on both versions and pulls their embeddings together; the augmentation network in
turn is trained to carry as little of the original as it can while each class stays recognisable.
Every client has its own augmentation network, which never leaves it.

Wang et al., "Learning to Diversify for Single Domain Generalization" (ICCV 2021).

Equations:
    x' = 0.6 s(sum_i w_i tanh(T_i(x))) + 0.4 x,   T_i(x) = up_i(scale_i * IN(down_i(x)) + shift_i)
    z = m(h) + 0.2 exp(v(h) / 2) e,    h = f(x),    e ~ N(0, 1)
    task:      CE(g(z), y) and CE(g(z'), y), half each + alpha1 SupCon(z, z')
               - alpha2 mean_d l(z | m', v')
    augmenter: MMD(z, z' | y) + beta CLUB(z; z'),
               CLUB = sum_d [l(z_i | m'_i, v'_i) - l(z_j | m'_i, v'_i)] / 2, j a random other
    l(z | m, v) = -(z - m)^2 / exp(v) - v:   twice a Gaussian's log-density without its constant

    s is the sigmoid, down_i and up_i are random convolutions of 5, 9, 13 and 17 pixels (i = 0 is a
    1 x 1 convolution of the colours), IN instance normalisation; f the network's embedding, m and v
    linear layers behind it (v the log-variance, not negative); at test z = m(h). mean_d and sum_d
    are over the embedding's dimensions.

Leaves the client:
    The network, as in FedAvg, with the layers m and v. The augmentation network stays.

Decisions:
    As the script: alpha1 = alpha2 = 1, beta 0.1, blend 0.6, noise 0.2, augmenter trained by plain
    SGD with learning rate 0.005; convolutions are drawn anew for the task's step and are fixed for
    the augmenter's. From memory of the code (inference): contrastive temperature 0.07, five
    Gaussian kernels in the MMD, the mixture's form. Convolutions larger than the image are left
    out.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Generator, Tensor, nn
from torch.nn import functional

from feddg.clients.client import Batch, Client
from feddg.messages import Message, Weights, copied, joined, on_device, prefixed, under
from feddg.methods.base import Method, MethodSettings, register
from feddg.models.network import Network
from feddg.settings import Fraction, NotNegative, Positive

KERNELS = (5, 9, 13, 17)
_KEPT = "l2d/"


class L2dSettings(MethodSettings):
    """Hyper-parameters of L2D."""

    contrastive_weight: NotNegative = Field(1.0, description="alpha1 (code, PACS script)")
    likelihood_weight: NotNegative = Field(1.0, description="alpha2 (code, PACS script)")
    information_weight: NotNegative = Field(0.1, description="beta (code, PACS script)")
    augmenter_lr: NotNegative = Field(0.005, description="the augmenter's SGD (code, PACS script)")
    augmented_share: Fraction = Field(0.6, description="blend of the augmented image (code)")
    embedding_noise: NotNegative = Field(0.2, description="scale of the noise in z (code)")
    contrast_temperature: Positive = Field(0.07, description="of SupCon (from memory)")
    condition: Literal["augmented", "original"] = Field(
        "augmented",
        description="whose Gaussian the other version's embedding is judged by (authors' script: "
        "the original's)",
    )


class Augmenter(nn.Module):
    """Stylizes normalised images by random convolutions; its scales and shifts are learned.

    Args:
        size: side of the images in pixels.
        rng: generator of the initial scales and shifts.
    """

    def __init__(self, size: int, rng: Generator) -> None:
        super().__init__()
        self.noise = nn.Parameter(torch.zeros(1))
        self.scales, self.shifts = nn.ParameterDict(), nn.ParameterDict()
        for kernel in (kernel for kernel in KERNELS if kernel < size):
            shape = (3, size - kernel + 1, size - kernel + 1)
            self.scales[str(kernel)] = 1 + 0.1 * torch.randn(shape, generator=rng)
            self.shifts[str(kernel)] = 0.1 * torch.randn(shape, generator=rng)

    def draws(self, count: int, side: int, rng: Generator, *, random_mixture: bool) -> Weights:
        """Draws what a pass of so many images of a side needs, on the CPU.

        Args:
            count: number of images.
            side: theirs, in pixels; may be smaller than ``size``.
            rng: generator of the noise, convolutions and mixture.
            random_mixture: whether the branches get random weights.
        """
        drawn = {"noise": torch.randn(count, 3, side, side, generator=rng), "1": _kernel(1, rng)}
        sizes = [int(name) for name in self.scales if int(name) < side]
        for size in sizes:
            drawn |= {f"{size}/{way}": _kernel(size, rng) for way in ("down", "up")}
        weights = torch.ones(1 + len(sizes))
        if random_mixture:
            weights = torch.randn(1 + len(sizes), generator=rng).abs()
        return drawn | {"weights": weights / weights.sum()}

    def forward(self, images: Tensor, drawn: Weights) -> Tensor:
        """Returns logits of stylized images ``(B, 3, H, W)``; their sigmoid is RGB in [0, 1].

        Args:
            images: normalised.
            drawn: see :meth:`draws`.
        """
        drawn = {name: tensor.to(images) for name, tensor in drawn.items()}
        images = images + 0.01 * self.noise * drawn["noise"]
        branches = [torch.tanh(functional.conv2d(images, drawn["1"]))]
        for size in (int(name) for name in self.scales):
            if size < images.shape[-1]:
                down, up = drawn[f"{size}/down"], drawn[f"{size}/up"]
                branches.append(torch.tanh(self._branch(images, size, down, up)))
        return torch.einsum("k,kbchw->bchw", drawn["weights"], torch.stack(branches))

    def _branch(self, images: Tensor, size: int, down: Tensor, up: Tensor) -> Tensor:
        smaller = convolution(images, down)
        height, width = smaller.shape[-2:]
        scale, shift = (part[str(size)][:, :height, :width] for part in (self.scales, self.shifts))
        styled = scale * functional.instance_norm(smaller) + shift
        return transposed_convolution(styled, up)


class LogVarianceEmbedding(nn.Module):
    """An embedding with mean and log-variance; its forward pass gives the mean.

    Args:
        inner: the embedding before it.
        size: number of input and output features.
    """

    def __init__(self, inner: nn.Module, size: int) -> None:
        super().__init__()
        self.inner, self.mean, self.spread = inner, nn.Linear(size, size), nn.Linear(size, size)

    def moments(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and log-variance, ``(B, size)`` each."""
        hidden = self.inner(features)
        return functional.leaky_relu(self.mean(hidden)), functional.relu(self.spread(hidden))

    def forward(self, features: Tensor) -> Tensor:
        """Returns the mean."""
        return self.moments(features)[0]


@register
class L2d(Method):
    """An augmentation network and the classifier learn against each other."""

    name = "l2d"
    title = "L2D"
    summary = "learned augmentation, contrast and likelihood (Wang et al. 2021)"
    needs_images = True
    settings: L2dSettings

    def network(self, network: Network) -> Network:
        """Adds mean and log-variance layers after the embedding."""
        network = super().network(network)
        inner, size = network.embedding, network.features_dimension
        network.embedding = network.initialised("l2d", lambda: LogVarianceEmbedding(inner, size))
        return network

    def begin(self, client: Client) -> None:
        """Restores the client's augmenter, or creates it."""
        super().begin(client)
        size = client.examples.pixels.size
        rng = client.lasting_stream("l2d", "augmenter")
        augmenter = Augmenter(size, rng)
        kept = {n.removeprefix(_KEPT): t for n, t in client.memory.items() if n.startswith(_KEPT)}
        state = {name: tensor.clone() for name, tensor in (kept or augmenter.state_dict()).items()}
        augmenter.load_state_dict(on_device(state, client.device), assign=True)
        client.scratch["l2d"] = augmenter

    def report(self, client: Client) -> Message:
        """Stores the augmenter at the client; it is not sent."""
        client.memory |= copied(client.scratch["l2d"].state_dict(prefix=_KEPT))
        return super().report(client)

    def draws(self, client: Client, positions: Tensor, labels: Tensor) -> Weights:
        """Adds what both steps draw, and the batch's rows by class."""
        count, side = len(labels), client.training.pixels.size
        shape, augmenter = (2 * count, client.network.features_dimension), client.scratch["l2d"]
        rng = client.stream("l2d", client.steps)
        added = prefixed("task/", Message(augmenter.draws(count, side, rng, random_mixture=True)))
        added.tensors["task/embedding"] = torch.randn(shape, generator=rng)
        rng = client.stream("l2d", "augmenter", client.steps + 1)  # after the task's step
        fixed = client.lasting_stream("l2d", "convolutions")
        drawn = Message(augmenter.draws(count, side, fixed, random_mixture=False))
        added = joined(added, prefixed("augmenter/", drawn))
        added.tensors["augmenter/embedding"] = torch.randn(shape, generator=rng)
        added.tensors["others"] = torch.randperm(count, generator=rng)
        for c in torch.unique(labels).tolist():
            added.tensors[f"class/{c}"] = (labels == c).nonzero().squeeze(1)
        return super().draws(client, positions, labels) | prefixed("l2d/", added).tensors

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """Returns the task's loss on the images and their augmented versions."""
        chosen, drawn = self.settings, self._own(client, batch, "task/")
        with torch.no_grad():
            varied = self._varied(client, batch.images, drawn)
        network, noise = client.network, drawn["embedding"]
        (z, stylized), judged, moments = self._embedded(network, batch.images, varied, noise)
        terms = {n: term / 2 for n, term in self.head_loss(client, batch, z).items()}
        on_stylized = self.head_loss(client, batch, stylized)
        contrast = supervised_contrast(z, stylized, batch.labels, chosen.contrast_temperature)
        return (
            terms
            | {f"augmented_{n}": term / 2 for n, term in on_stylized.items()}
            | {"contrast": chosen.contrastive_weight * contrast}
            | {"likelihood": -chosen.likelihood_weight * log_density(judged, *moments).mean()}
        )

    def step(self, client: Client, batch: Batch) -> None:
        """Takes one step of the task, then one of the augmenter."""
        super().step(client, batch)
        drawn = self._own(client, batch, "augmenter/")
        varied = self._varied(client, batch.images, drawn)
        network, noise = client.network, drawn["embedding"]
        (z, stylized), judged, moments = self._embedded(network, batch.images, varied, noise)
        others = self.drawn(client, batch)["l2d/others"]
        information = log_density(judged, *moments) - log_density(judged[others], *moments)
        rows = list(self._own(client, batch, "class/").values())
        objective = class_discrepancy(z, stylized, rows)
        objective = objective + self.settings.information_weight * information.sum(1).mean() / 2
        parameters = list(client.scratch["l2d"].parameters())
        gradients = torch.autograd.grad(objective, parameters, allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients):
                if gradient is not None:
                    parameter -= self.settings.augmenter_lr * gradient

    def _own(self, client: Client, batch: Batch, purpose: str) -> Weights:
        return under(f"l2d/{purpose}", Message(self.drawn(client, batch))).tensors

    def _varied(self, client: Client, images: Tensor, drawn: Weights) -> Tensor:
        share, normal = self.settings.augmented_share, client.network.normalize(images)
        made = client.scratch["l2d"](normal, drawn).sigmoid()
        return share * made + (1 - share) * images

    def _embedded(
        self, network: Network, images: Tensor, varied: Tensor, noise: Tensor
    ) -> tuple[tuple[Tensor, ...], Tensor, tuple[Tensor, Tensor]]:
        """Embeds both versions in one batch.

        Returns:
            Both embeddings; the sample whose likelihood is taken; and the moments of the other
            version, which define the likelihood.
        """
        features = network.featurizer(network.normalize(torch.cat([images, varied])))
        assert isinstance(network.embedding, LogVarianceEmbedding)
        mean, spread = network.embedding.moments(features)
        noise = self.settings.embedding_noise * noise.to(mean)
        embeddings = mean + (spread / 2).exp() * noise
        both, judge = embeddings.chunk(2), int(self.settings.condition == "augmented")
        return both, both[1 - judge], (mean.chunk(2)[judge], spread.chunk(2)[judge])


def _kernel(size: int, rng: Generator) -> Tensor:
    """Draws convolution weights like torch's default: uniform up to 1 / sqrt(fan in)."""
    uniform = 2 * torch.rand(3, 3, size, size, generator=rng) - 1
    return uniform / math.sqrt(3 * size**2)


def convolution(images: Tensor, kernel: Tensor) -> Tensor:
    """Returns ``conv2d(images, kernel)``, by Fourier transforms.

    Ordinary convolution is slow for large kernels on three channels; this takes a fraction of its
    time for 16 images of 32 pixels.

    Args:
        images: ``(B, C, n, n)``.
        kernel: ``(C', C, k, k)``, k at most n.

    Returns:
        ``(B, C', n - k + 1, n - k + 1)`` float32 (or float64, as the images).
    """
    side, rest = images.shape[-1], images.shape[-1] - kernel.shape[-1] + 1
    mixed = _mix(_spectrum(images, side), _spectrum(kernel, side).conj())
    return torch.fft.irfft2(mixed, s=(side, side))[..., :rest, :rest]


def transposed_convolution(images: Tensor, kernel: Tensor) -> Tensor:
    """Returns ``conv_transpose2d(images, kernel)``, by Fourier transforms.

    Args:
        images: ``(B, C, n, n)``.
        kernel: ``(C, C', k, k)``.

    Returns:
        ``(B, C', n + k - 1, n + k - 1)`` float32 (or float64, as the images).
    """
    side = images.shape[-1] + kernel.shape[-1] - 1
    mixed = _mix(_spectrum(images, side), _spectrum(kernel, side).transpose(0, 1))
    return torch.fft.irfft2(mixed, s=(side, side))


def _spectrum(images: Tensor, side: int) -> Tensor:
    # There are no transforms of 16-bit numbers.
    exact = images if images.dtype == torch.float64 else images.float()
    return torch.fft.rfft2(exact.contiguous(), s=(side, side))


def _mix(images: Tensor, kernel: Tensor) -> Tensor:
    """Sums ``images[b, c] * kernel[o, c]`` over c."""
    channels = range(images.shape[1])
    products = [images[:, None, c] * kernel[None, :, c] for c in channels]
    return torch.stack(products).sum(0)


def log_density(values: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """Returns twice the log-density of a Gaussian without its constant, element by element."""
    return -(mean - values).square() / log_variance.exp() - log_variance


def supervised_contrast(z: Tensor, stylized: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Returns the supervised contrastive loss (Khosla et al. 2020) of two views of a batch.

    Args:
        z: ``(B, d)``.
        stylized: ``(B, d)``.
        labels: ``(B,)``.
        temperature: above 0.
    """
    unit = functional.normalize(torch.cat([z, stylized]).float(), dim=1)
    itself = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    logs = (unit @ unit.T / temperature).masked_fill(itself, -math.inf).log_softmax(1)
    both = labels.repeat(2)
    positive = (both[:, None] == both[None, :]) & ~itself
    closeness = logs.masked_fill(~positive, 0).sum(1) / positive.sum(1)
    return -closeness.mean()


def class_discrepancy(z: Tensor, stylized: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """Returns the squared MMD between two views, class by class, averaged over the classes.

    Args:
        z: ``(B, d)``.
        stylized: ``(B, d)``.
        rows: of the images of each class.
    """
    return torch.stack([discrepancy(z[members], stylized[members]) for members in rows]).mean()


def discrepancy(one: Tensor, other: Tensor) -> Tensor:
    """Returns the squared maximum mean discrepancy under the sum of five Gaussian kernels.

    Their bandwidths are 1/4, 1/2, 1, 2 and 4 times the mean squared distance of all pairs.

    Args:
        one: ``(m, d)``.
        other: ``(n, d)``.
    """
    points = torch.cat([one, other]).float()
    squares = (points[:, None] - points[None, :]).square().sum(-1)
    pairs = len(points) * (len(points) - 1)
    width = (squares.detach().sum() / pairs).clamp(min=1e-12)
    kernel = torch.stack([(-squares / (width * 2.0**k)).exp() for k in range(-2, 3)]).sum(0)
    split = len(one)
    cross = kernel[:split, split:].mean()
    return kernel[:split, :split].mean() + kernel[split:, split:].mean() - 2 * cross
