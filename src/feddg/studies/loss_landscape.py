"""The loss over the plane through a global model and its clients' (PARDON, Figure 1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from feddg.errors import RunError
from feddg.federation.inprocess import InProcess
from feddg.messages import Update, Weights
from feddg.records import client_name
from feddg.rng import stream
from feddg.runs.prepare import Progress
from feddg.runs.subject import Subject
from feddg.studies.feature_maps import over_batches

LANDSCAPE_IMAGES, GRID = 256, 15
ON_ONE_LINE = 1e-5
"""Part of a direction that may be rounding alone."""
MARGIN = 0.35
"""How far the landscape goes beyond its points, as a share of their distance."""


def loss_landscape(
    subject: Subject, rival: Weights | None, rival_name: str, progress: Progress
) -> dict[str, Any]:
    """Loss over the plane through three models, on images of seen and of unseen domains."""
    domains = subject.main_domains()
    first = int(numpy.argmax(domains == domains[0]))
    second = int(numpy.argmax(domains != domains[first]))
    wanted = [first] if rival is not None else [first, second]
    trained = [_after_a_turn(subject, client) for client in wanted]
    points = [("global model", subject.state.weights)]
    points += [(client_name(client), weights) for client, weights in zip(wanted, trained)]
    if rival is not None:
        points.append((rival_name, rival))
    plane = Plane.through(points[0][1], points[1][1], points[2][1])
    places = [plane.place(weights) for _, weights in points]
    mean = [sum(axis) / 2 for axis in zip(*places[1:])]
    axes = [_ticks([place[i] for place in places]) for i in (0, 1)]
    splits = subject.images.splits
    samples = {"seen": splits.train, "unseen": splits.test}
    rows = {name: _sample(part, subject, name) for name, part in samples.items() if len(part)}
    losses: dict[str, list[list[float]]] = {name: [] for name in rows}
    for done, y in enumerate(axes[1]):
        progress("loss landscape", done, len(axes[1]))
        line = [_losses(subject, plane.weights(x, y), rows) for x in axes[0]]
        for name in rows:
            losses[name].append([round(found[name], 4) for found in line])
    marks = [{"name": name, "x": p[0], "y": p[1]} for (name, _), p in zip(points, places)]
    if rival is None:
        marks.append({"name": "mean of the clients", "x": mean[0], "y": mean[1]})
    return {"x": axes[0], "y": axes[1], "losses": losses, "points": marks}


def _after_a_turn(subject: Subject, client: int) -> Weights:
    """A client's weights after one more round of training from the global model."""
    method, state = subject.method, subject.state
    transport = InProcess(
        method,
        [subject.worker],
        len(subject.images.partition),
        subject.images.examples,
        dict(subject.memories),
    )
    transport.hand_out(state.agreed)
    (update,) = (
        reply.keep() if isinstance(reply, Update) else reply
        for reply in transport.train([client], method.broadcast(state))
    )
    if not isinstance(update, Update):
        raise RunError(f"client {client} cannot train: {update.reason}")
    return {name: update.weights.get(name, own) for name, own in state.weights.items()}


@dataclass(frozen=True)
class Plane:
    """The plane through three models' weights, with orthonormal axes.

    Attributes:
        origin: the first model.
        along: unit direction to the second.
        across: unit direction to the third, made orthogonal to ``along``.
    """

    origin: Weights
    along: Weights
    across: Weights

    @classmethod
    def through(cls, first: Weights, second: Weights, third: Weights) -> "Plane":
        """Returns the plane; of three models on one line, ``across`` is zero."""
        along = _unit(_minus(second, first))
        whole = rest = _minus(third, first)
        for _ in range(2):  # once more takes away what rounding left
            shadow = _dot(rest, along)
            rest = {name: t - shadow * along[name] for name, t in rest.items()}
        if _dot(rest, rest) <= ON_ONE_LINE**2 * _dot(whole, whole):
            rest = {name: torch.zeros_like(t) for name, t in rest.items()}
        return cls(first, along, _unit(rest))

    def place(self, weights: Weights) -> tuple[float, float]:
        """Returns a model's coordinates in the plane."""
        offset = _minus(weights, self.origin)
        return _dot(offset, self.along), _dot(offset, self.across)

    def weights(self, x: float, y: float) -> Weights:
        """Returns the model at a place; entries that are no floats are the first model's."""
        moved = {
            name: self.origin[name] + x * self.along[name] + y * self.across[name]
            for name in self.along
        }
        return self.origin | moved


def _floats(weights: Weights) -> Weights:
    return {name: t.float() for name, t in weights.items() if t.is_floating_point()}


def _minus(one: Weights, other: Weights) -> Weights:
    taken = _floats(other)
    return {name: t - taken[name] for name, t in _floats(one).items()}


def _dot(one: Weights, other: Weights) -> float:
    return float(sum((one[name] * other[name]).sum().double() for name in other))


def _unit(direction: Weights) -> Weights:
    length = _dot(direction, direction) ** 0.5
    return {name: t / length if length else t for name, t in direction.items()}


def _ticks(places: Sequence[float]) -> list[float]:
    low, high = min(places), max(places)
    margin = MARGIN * ((high - low) or 1.0)
    return [round(v, 6) for v in numpy.linspace(low - margin, high + margin, GRID).tolist()]


def _sample(rows: numpy.ndarray, subject: Subject, name: str) -> numpy.ndarray:
    chance = stream(subject.experiment.seed, "landscape", name)
    chosen: numpy.ndarray = torch.randperm(len(rows), generator=chance).numpy()
    taken: numpy.ndarray = rows[chosen[:LANDSCAPE_IMAGES]]
    return taken


def _losses(subject: Subject, weights: Weights, rows: dict[str, numpy.ndarray]) -> dict[str, float]:
    network = subject.network(weights)
    for module in network.modules():
        if isinstance(module, _BatchNorm) and module.running_var is not None:
            module.running_var.clamp_(min=0)  # beyond the three models a line may leave it
    predictor = subject.method.predictor(subject.worker.network).eval()
    labels = torch.from_numpy(subject.images.table.labels)
    return {
        name: float(nn.functional.cross_entropy(over_batches(subject, own, predictor), labels[own]))
        for name, own in rows.items()
    }
