"""Gradient inversion: reconstructs images from one client's update.

Geiping et al., "Inverting Gradients - How easy is it to break privacy in federated learning?"
(NeurIPS 2020), Eq. 4:

    argmin over x of  1 - cos(gradient(x, y), change of the weights) + tv * TV(x)

with signed steps of Adam, images held in [0, 1], and the labels known to the attacker. The client
takes one step on its whole batch without augmentation, which is the case that favours the attacker
most; defences do what they do in the run. Under Adam the first change is nearly the sign of the
gradient, and the search compares with that.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from feddg.attacks.image_metrics import (
    PERCEPTUAL,
    clustered_mean,
    perceptual_points,
    psnr,
    retrieval,
    ssim,
)
from feddg.attacks.senders import (
    Senders,
    Targets,
    chosen_clients,
    held,
    in_memory,
    looked_at,
    targets_of,
)
from feddg.diagnostics import Progress, silent
from feddg.errors import RunError
from feddg.methods.base import shared_parameters
from feddg.models.backbones import use_plain_attention
from feddg.models.normalization import freeze_statistics
from feddg.records import InversionRow
from feddg.rng import stream

Step = Literal["own", "sgd"]
SOFTNESS = 0.1
"""Below this share of a layer's mean gradient, Adam's sign is smoothed so that it has a slope."""


@dataclass(frozen=True)
class Search:
    """Settings of the search for images.

    Attributes:
        iterations: number of steps.
        lr: Adam's learning rate on pixels; divided by ten after 3/8, 5/8 and 7/8 of the steps.
        total_variation: weight of the total variation.
        seed: seed of the initial images.
    """

    iterations: int = 300
    lr: float = 0.1
    total_variation: float = 1e-2
    seed: int = 0


@dataclass(frozen=True)
class Inverted:
    """The images found for some updates of one batch size.

    Attributes:
        batch_size: number of images per update.
        optimizer: optimizer of the client's step.
        targets: the true images, update by update.
        drawn: ``(n, 3, S, S)`` in [0, 1], each at the position of its best-matching true image.
        cosines: ``(updates,)`` cosine objective of the images found.
        search: settings of the search.
    """

    batch_size: int
    optimizer: Step
    targets: Targets
    drawn: Tensor
    cosines: Tensor
    search: Search

    def row(self) -> InversionRow:
        """Returns all measurements."""
        true = self.targets.images.float() / 255
        updates = torch.arange(len(true)) // self.batch_size
        points = [perceptual_points(part) for part in (self.drawn, true)]
        retrieved = retrieval(points[0], points[1], torch.zeros(len(true)))
        rank = clustered_mean(retrieved.ranks, updates).within(0, 1)
        # Another update's images, which are matched with these as those of the update itself are.
        others = self.drawn.roll(self.batch_size, 0)
        unrelated = [
            psnr(*_assigned(drawn, other)).mean()
            for drawn, other in zip(others.split(self.batch_size), true.split(self.batch_size))
        ]
        return InversionRow(
            optimizer=self.optimizer,
            batch_size=self.batch_size,
            images=len(true),
            updates=len(self.cosines),
            iterations=self.search.iterations,
            psnr=float(psnr(self.drawn, true).mean()),
            ssim=float(ssim(self.drawn, true).mean()),
            unrelated_psnr=float(torch.stack(unrelated).mean()) if len(unrelated) > 1 else math.nan,
            scores={PERCEPTUAL: float((points[0] - points[1]).square().sum(1).mean())},
            rank=rank.mean,
            rank_low=rank.low,
            rank_high=rank.high,
            cosine=float(self.cosines.mean()),
            seed=self.search.seed,
        )


def invert_updates(
    senders: Senders,
    batch_size: int,
    updates: int,
    search: Search,
    optimizer: Step = "own",
    progress: Progress = silent,
) -> Inverted:
    """Reconstructs the images behind single clients' updates.

    Args:
        senders: the clients of the run.
        batch_size: number of images per update.
        updates: number of updates, from different clients if there are enough.
        search: settings of the search.
        optimizer: optimizer of the client's step: the run's own, or plain SGD.
        progress: called with (what, done, total).

    Raises:
        RunError: no trained weights leave a client, or none holds enough images.
    """
    network, method = senders.loaded.network, senders.loaded.method
    if senders.hides_training:
        raise RunError(f"{senders.hides_training}: there is no single update to invert")
    batches = list(_batches(senders, batch_size, updates, search.seed))
    if not batches:
        raise RunError(
            f"no client holds {batch_size} images; choose smaller --batch-sizes for this run"
        )
    changes: dict[str, object] = {"batch_size": batch_size, "local_steps": 1, "head_rounds": 0}
    if optimizer == "sgd":
        changes |= {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0}
    worker = senders.pretender(**changes)
    signed = worker.train.optimizer == "adam"
    client_data = [
        held(in_memory(b.images), torch.arange(batch_size), b.labels, network.classes)
        for b in batches
    ]
    broadcast = senders.broadcast
    names = list(shared_parameters(method, network))
    changed = [
        {n: (broadcast.weights[n] - u.weights[n]).detach().clone() for n in names if n in u.weights}
        for u in senders.trained(client_data, worker, broadcast)
    ]
    drawn, cosines = [], []
    for i, (batch, change) in enumerate(zip(batches, changed)):
        progress(f"updates of {batch_size}", i, len(batches))
        model = senders.loaded.with_weights(broadcast.weights).train()
        if worker.freeze or batch_size == 1:
            freeze_statistics(model)
        if worker.train.trainable in ("head", "lora"):  # as the clients trained it
            model.featurizer.eval()
        images, cosine = invert(
            model, change, batch.labels, batch.images.shape[-1], search, signed, ("update", i)
        )
        drawn.append(_assigned(images, batch.images.float() / 255)[0])
        cosines.append(cosine)
    model.eval().zero_grad()
    targets = Targets.joined(batches)
    return Inverted(batch_size, optimizer, targets, torch.cat(drawn), torch.tensor(cosines), search)


def invert(
    network: nn.Module,
    change: dict[str, Tensor],
    labels: Tensor,
    size: int,
    search: Search,
    signed: bool,
    names: Sequence[str | int] = (),
) -> tuple[Tensor, float]:
    """Searches for images whose gradient has the direction of a change of the weights.

    Args:
        network: with the weights that the client received, in its training mode.
        change: received minus sent weights, by parameter.
        labels: ``(B,)`` of the images.
        size: side of the images in pixels.
        search: settings of the search.
        signed: whether the client's step was Adam's first, nearly the sign of its gradient.
        names: names of the random stream of initial images.

    Returns:
        The images with the best objective, ``(B, 3, size, size)`` in [0, 1], and their cosine.
    """
    use_plain_attention(network)  # for a gradient's gradient
    device = next(network.parameters()).device
    named = dict(network.named_parameters())
    parameters = [named[name] for name in change]
    wanted = [tensor.to(device) for tensor in change.values()]
    rng = stream(search.seed, "inversion", *names)
    start = 0.5 + 0.1 * torch.randn(len(labels), 3, size, size, generator=rng)
    images = start.clamp(0, 1).to(device).requires_grad_(True)
    labels = labels.to(device)
    optimizer = torch.optim.Adam([images], search.lr)
    falls = [round(search.iterations * share) for share in (3 / 8, 5 / 8, 7 / 8)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, falls, 0.1)
    best, kept, reached = float("inf"), images.detach().clone(), 0.0
    for _ in range(search.iterations):
        loss = nn.functional.cross_entropy(network(images), labels)
        gradient = torch.autograd.grad(
            loss, parameters, create_graph=True, allow_unused=True, materialize_grads=True
        )
        cosine = _cosine([_softly_signed(g) if signed else g for g in gradient], wanted)
        objective = 1 - cosine + search.total_variation * _total_variation(images)
        if objective.item() < best:
            best, kept, reached = objective.item(), images.detach().clone(), cosine.item()
        (images.grad,) = torch.autograd.grad(objective, [images])
        images.grad.sign_()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            images.clamp_(0, 1)
    return kept.cpu(), reached


def _batches(senders: Senders, size: int, updates: int, seed: int) -> Iterator[Targets]:
    """Yields batches of images, each of one client; several per client if there are too few."""
    examples = senders.loaded.clients.__getitem__
    able = chosen_clients(senders.loaded, updates, seed, size)
    for number in range(updates if able else 0):
        client, turn = able[number % len(able)], number // len(able)
        positions = looked_at(examples(client), client, seed)
        start = turn * size
        if start + size <= len(positions):
            yield targets_of(examples(client), client, positions[start : start + size])


def _softly_signed(gradient: Tensor) -> Tensor:
    softness = SOFTNESS * gradient.abs().mean().detach() + 1e-12
    return gradient / (gradient.square() + softness.square()).sqrt()


def _cosine(gradients: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    product = torch.stack([(a * b).sum() for a, b in zip(gradients, wanted)]).sum()
    lengths = [torch.stack([t.square().sum() for t in part]).sum() for part in (gradients, wanted)]
    return product / (lengths[0] * lengths[1]).clamp(min=1e-24).sqrt()


def _total_variation(images: Tensor) -> Tensor:
    down = (images[..., 1:, :] - images[..., :-1, :]).abs().mean()
    across = (images[..., 1:] - images[..., :-1]).abs().mean()
    return down + across


def _assigned(drawn: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Returns drawn images in the order that fits the true ones best, and the true ones."""
    from scipy.optimize import linear_sum_assignment  # a second to import

    distances = torch.cdist(true.flatten(1), drawn.flatten(1)).square()
    _, columns = linear_sum_assignment(distances.numpy())
    return drawn[torch.from_numpy(columns)], true
