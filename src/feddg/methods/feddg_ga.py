"""FedDG-GA: clients whose loss the averaging raises count more (Zhang et al., CVPR 2023).

Averaging helps some clients and hurts others: the generalization gap of a client is its loss under
the new average minus its loss under its own weights. FedDG-GA gives clients with a large gap more
weight in the next average, by steps that shrink over the rounds. One question after every round
asks its clients for their loss.

Equations:
    w <- sum_k a_k w_k / sum_k a_k over the round's clients;   G_k = L_k(w) - L_k(w_k).
    `mode: paper`   a_k <- max(0, a_k + d_r A (G_k - mean G) / max_j |G_j - mean G|)
    `mode: code`    a_k <- clip(a_k + d_r A G_k / (K max_j |G_j|), 0, A), G of accuracy, not loss
    A = sum of a_k over the round's K clients, restored by scaling afterwards; a_k = 1/N at first.
    d_r = (1 - r/R) d for rounds r = 0 .. R-1 (code: (1 - (r-1)/R) d).

Leaves the client:
    Its weights, its number of images, its loss under its own weights, and, asked after the round,
    its loss under the new average.

Decisions:
    Under sampling only the round's clients change, among themselves: their sum A stays, and steps
    scale with it. If all weights of a round's clients are 0, they count alike. The losses are
    measured on the client's training images without augmentation, in eval mode.
"""

from collections.abc import Iterable, Iterator
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from feddg.clients.client import Client
from feddg.messages import (
    LARGEST,
    EntrySchema,
    Message,
    Range,
    SchemaContext,
    Update,
    Weights,
    joined,
    on_device,
)
from feddg.methods.base import Ask, Method, MethodSettings, State, noting, register
from feddg.models.network import Network
from feddg.settings import Fraction

WEIGHTS = "feddg-ga/weights"
OWN, AVERAGED = "feddg-ga/loss_own", "feddg-ga/loss_averaged"
QUESTION = "generalization"
NEGLIGIBLE = 1e-12
"""A small number instead of weight 0, so that clients which all have 0 count equally."""


class FedDGGASettings(MethodSettings):
    """Hyper-parameters of FedDG-GA."""

    step_size: Fraction = Field(
        0.2, description="d, the first step of the weights (default of the authors' code)"
    )
    mode: Literal["paper", "code"] = Field(
        "paper", description="centred gaps of the loss, or the authors' code: gaps of accuracy"
    )


def _losses(method: "FedDGGA", context: SchemaContext, name: str) -> Range:
    """Returns the range of a client's loss: a cross-entropy, or minus an accuracy in [-1, 0]."""
    if not context.classifies:
        return -LARGEST, LARGEST
    return (0.0, LARGEST) if method.settings.mode == "paper" else (-1.0, 0.0)


@register
class FedDGGA(Method):
    """Weights each client in the mean by its generalization gap."""

    name = "feddg-ga"
    title = "FedDG-GA"
    summary = "clients with a larger generalization gap count more (Zhang et al. 2023)"
    settings: FedDGGASettings
    by_last_round = "FedDG-GA's steps shrink"
    excludes: ClassVar[dict[str, str]] = {
        "scaffold": "feddg-ga and scaffold each decide what a client counts; choose one",
        "copa": "feddg-ga's weights follow the losses of the averaged classifier, with which copa "
        "never predicts; choose one",
    }
    sends: ClassVar[dict[str, EntrySchema]] = Method.sends | {
        f"update/{OWN}": EntrySchema("its mean loss under its own weights", (), within=_losses),
        f"answer:{QUESTION}/{AVERAGED}": EntrySchema(
            "its mean loss under the new average", (), within=_losses
        ),
    }

    def initial_extras(self, network: Network, clients: int) -> Weights:
        """Returns the initial weights a_k = 1/N."""
        extras = {WEIGHTS: torch.full((clients,), 1 / clients)}
        return super().initial_extras(network, clients) | extras

    def report(self, client: Client) -> Message:
        """Adds the loss under the client's own weights."""
        return joined(super().report(client), Message({OWN: self.measure(client)}))

    def answer(self, client: Client, name: str, question: Message) -> Message:
        """Returns the loss under the new average."""
        if name != QUESTION:
            return super().answer(client, name, question)
        return Message({AVERAGED: self.measure(client)})

    @torch.no_grad()
    def measure(self, client: Client) -> Tensor:
        """Returns the client's mean loss, or minus its accuracy, over its plain images."""
        client.network.eval()
        task, parts = client.worker.task, list[Tensor]()
        for outputs, targets in self._outputs(client):
            if self.settings.mode == "paper":
                parts.append(task.total(outputs, targets).float())
            else:
                parts.append(-task.score(outputs, targets).sum().float())
        return sum(parts, torch.zeros_like(parts[0])) / len(client.examples)

    def _outputs(self, client: Client) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the outputs of a client's plain images, and their targets."""
        if not client.worker.task.has_classes:  # what is predicted is large
            for batch in client.plain_batches():
                yield client.network(batch.images).float(), batch.labels
            return
        (outputs,) = client.of_images("outputs", lambda images: (client.network(images),))
        (labels,) = on_device({"": client.examples.labels}, outputs.device).values()
        yield from zip(outputs.split(64), labels.split(64))

    def share(self, state: State, update: Update) -> float:
        """Returns the client's weight a_k."""
        return max(float(state.extras[WEIGHTS][update.client]), NEGLIGIBLE)

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Averages with the weights a_k, and stores clients' own losses for :meth:`after_round`."""
        losses = torch.zeros_like(state.extras[WEIGHTS])

        def note(update: Update) -> None:
            losses[update.client] = update.extras.tensors[OWN]

        state = super().aggregate(state, noting(updates, note))
        state.extras[OWN] = losses
        return state

    def after_round(self, state: State, ask: Ask) -> State:
        """Asks for the losses under the average, and adjusts the weights by the gaps."""
        state = super().after_round(state, ask)
        losses, weights = state.extras.pop(OWN), state.extras[WEIGHTS].clone()
        answers = {id: reply.tensors[AVERAGED] for id, reply in ask(QUESTION, Message())}
        if answers:
            ids = torch.tensor(list(answers), device=weights.device)
            gaps = torch.stack(list(answers.values())).to(losses) - losses[ids]
            weights[ids] = self.adjusted(weights[ids], gaps, self._step(state))
        state.extras[WEIGHTS] = weights
        return state

    def _step(self, state: State) -> float:
        passed = state.round - (1 if self.settings.mode == "paper" else 2)
        return float(self.settings.step_size * (1 - passed / state.rounds if state.rounds else 1))

    def adjusted(self, weights: Tensor, gaps: Tensor, step: float) -> Tensor:
        """Returns the weights of the round's clients after a step; their sum does not change.

        Args:
            weights: ``(K,)``, at least 0.
            gaps: ``(K,)`` G_k.
            step: d_r.
        """
        paper = self.settings.mode == "paper"
        mass = weights.sum()
        gaps = gaps - gaps.mean() if paper else gaps / len(gaps)
        largest = gaps.abs().max() * (1 if paper else len(gaps))
        if not largest > 0 or not mass > 0:
            return weights
        moved = (weights + step * mass * gaps / largest).clamp(0, None if paper else float(mass))
        return moved * mass / moved.sum() if moved.sum() > 0 else weights
