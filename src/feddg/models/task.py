"""What a network is trained for: a loss to minimise and a score to report."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from feddg.errors import ExperimentError
from feddg.models.precision import as_usual
from feddg.settings import TrainSettings


def spread(outputs: Tensor) -> Tensor:
    """Returns the mean squared distance of several versions' outputs from their mean.

    Args:
        outputs: ``(versions, B, ...)``.
    """
    outputs = outputs.float()
    return (outputs - outputs.mean(0, keepdim=True)).square().mean()


def divergence_from_mean(logits: Tensor) -> Tensor:
    """Returns the mean over versions and answers of KL(p || mean of the versions' p).

    Args:
        logits: ``(versions, B, ..., classes)``.
    """
    logs = logits.float().log_softmax(-1)
    mean = torch.logsumexp(logs, 0, keepdim=True) - torch.tensor(float(len(logs))).log()
    return (logs.exp() * (logs - mean)).sum(-1).mean()


def binary_divergence(logits: Tensor) -> Tensor:
    """Returns the same as :func:`divergence_from_mean` of independent yes or no answers.

    For masks and for several labels an image, whose loss is the binary cross-entropy.

    Args:
        logits: ``(versions, B, ...)``, one an answer.
    """
    return divergence_from_mean(torch.stack([logits, torch.zeros_like(logits)], -1))


@dataclass(frozen=True)
class Task:
    """A task of your own: any outputs, any targets.

    >>> task = feddg.Task(loss=nn.functional.binary_cross_entropy_with_logits, score=dice)
    >>> fed = feddg.Federation([site_a, site_b], unet, "fedavg", task=task)

    Attributes:
        loss: ``loss(outputs, targets)``, a mean over the batch: the network's outputs for ``B``
            images, in float32, and their targets ``(B, ...)``.
        score: ``score(outputs, targets)``, one number an image, ``(B,)``; higher is better. For
            example the Dice coefficient, or minus the absolute error.
        name: the score's name in tables.
        divergence: how unlike the outputs ``(versions, B, ...)`` of several versions of the same
            images are, for methods that ask for equal answers (RandConv, VISTA): one number. By
            default :func:`spread`, in the outputs' own units; :func:`binary_divergence` for masks.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[Tensor, Tensor], Tensor]
    name: str = "score"
    divergence: Callable[[Tensor], Tensor] = spread
    term: str = field(default="loss", kw_only=True, repr=False)
    """What the loss is called among a round's loss terms."""
    has_classes: ClassVar[bool] = False
    """Whether targets are class ids, one an image."""

    def loss_at(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None, train: TrainSettings
    ) -> Tensor:
        """Returns the loss of a batch at a client.

        Args:
            outputs: of the batch.
            targets: of the batch.
            weights: of the classes at the client, ``(classes,)``; None if all count alike.
            train: the experiment's training settings.
        """
        with torch.autocast(outputs.device.type, enabled=False):
            return self.loss(outputs.float(), targets)

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the sum of the batch's losses."""
        with torch.autocast(outputs.device.type, enabled=False):
            return self.loss(outputs.float(), targets) * len(targets)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Tries loss, score and divergence on a batch.

        Raises:
            ExperimentError: one cannot be computed, or has another shape.
        """
        outputs = outputs.detach().clone().requires_grad_()
        one, versions = outputs[:1].detach(), torch.stack([outputs, outputs])
        for name, compute, shape in (
            ("loss", lambda: self.loss(outputs, targets), ()),
            ("score", lambda: self.score(outputs.detach(), targets), (len(targets),)),
            ("score", lambda: self.score(one, targets[:1]), (1,)),  # a last batch may be of one
            ("divergence", lambda: self.divergence(versions), ()),
        ):
            batch = 1 if shape == (1,) else len(targets)
            sizes = (batch, *outputs.shape[1:]), (batch, *targets.shape[1:])
            shapes = f"outputs {sizes[0]} and targets {sizes[1]}"
            try:
                with as_usual():
                    value = compute()
            except Exception as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise ExperimentError(f"the task's {name} fails for {shapes}: {reason}") from error
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            if got != shape:
                expected = "one number an image" if shape else "one number for the batch"
                raise ExperimentError(
                    f"the task's {name} gives {got} for {shapes}; it must be {expected}: {shape}"
                )
            if name == "loss" and not value.requires_grad:
                raise ExperimentError(
                    "the task's loss has no gradient: compute it from the outputs by PyTorch "
                    "operations only, without detach, item, argmax or comparisons"
                )


class Classification(Task):
    """One class an image: cross-entropy, and whether the largest logit is the image's class."""

    has_classes = True

    def __init__(self) -> None:
        super().__init__(
            cross_entropy, is_correct, "accuracy", divergence_from_mean, term="cross_entropy"
        )

    def loss_at(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None, train: TrainSettings
    ) -> Tensor:
        """Returns the cross-entropy, with label smoothing and class weights if set."""
        if weights is not None and train.label_smoothing:
            # PyTorch would weigh the smoothing of each class by the class's weight, so that one
            # which the client lacks would count the most.
            losses, by_image = losses_by_image(outputs, targets, weights, train)
            return (by_image * losses).sum() / by_image.sum()
        return cross_entropy(outputs, targets, weights, label_smoothing=train.label_smoothing)

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the sum of the batch's cross-entropies."""
        return cross_entropy(outputs, targets, reduction="sum")


def balanced(labels: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """Returns weights ``(classes,)`` that make classes count alike; their mean over images is 1.

    Args:
        labels: ``(n,)`` of all images that a client trains on.
        classes: how many there are.
        dtype: of the outputs that are weighed.
    """
    counts = labels.bincount(minlength=classes).to(dtype)
    return counts.sum() / ((counts > 0).sum() * counts.clamp(min=1))


def losses_by_image(
    outputs: Tensor, targets: Tensor, weights: Tensor | None, train: TrainSettings
) -> tuple[Tensor, Tensor]:
    """Returns each image's cross-entropy, and what it counts in a mean; see :meth:`Task.loss_at`.

    Returns:
        ``(B,)`` both; all images count 1 without class weights.
    """
    smoothing = train.label_smoothing
    losses = cross_entropy(outputs, targets, reduction="none", label_smoothing=smoothing)
    return losses, torch.ones_like(losses) if weights is None else weights[targets].to(losses)


def is_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns for each image, ``(B,)``, 1 if its largest logit is its class, else 0."""
    return (logits.argmax(1) == labels).float()


CLASSIFICATION = Classification()
"""The task of every experiment."""
