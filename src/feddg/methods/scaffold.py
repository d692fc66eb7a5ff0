"""SCAFFOLD: control variates correct each client's drift (Karimireddy et al., ICML 2020).

Every client remembers c_k, an estimate of the gradient of its own loss; the server keeps their mean
c. Each local step adds c - c_k to the gradient, so that clients move along the direction of all
instead of their own. Twice the traffic of FedAvg, and every client remembers one model's worth.

Equations:
    Local, K_k steps:  y <- y - lr (g(y) - c_k + c), from y = x.
    Afterwards, option II:  c_k+ = c_k - c + (x - y) / (K_k lr).
    Server, over the sampled S of N clients:  x <- x + mean_S (y_k - x);
        c <- c + (1/N) sum_S (c_k+ - c_k).
    From zero, c is the mean of all N c_k at all times.

Leaves the client:
    Its weights, its number of images, and the change of its control variate: one tensor for each
    shared parameter.

Decisions:
    Only plain SGD: with momentum or Adam (x - y) / (K lr) is no gradient, so other optimizers are
    refused. The preset sets SGD, with learning rate 0.001 for pretrained networks. Updates count
    equally, as in the paper: the controls c - c_k average to zero over clients only when all count
    the same; `weighting: examples` gives FedAvg's mean. Buffers are averaged. Another server
    learning rate is `server.optimizer: fedavgm` with `beta1: 0`. If a round fails and is tried
    again, clients begin with their controls from before it. A client whose update is refused keeps
    its new control, and so do sites on a network that are not asked again; then c is only
    approximately their mean.
"""

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from feddg.clients.client import Client
from feddg.errors import ExperimentError
from feddg.messages import (
    LARGEST,
    Broadcast,
    EntrySchema,
    Message,
    SchemaContext,
    Update,
    Weights,
    add_to,
    copied,
    differences,
    joined,
    on_device,
    prefixed,
)
from feddg.methods.base import (
    Method,
    MethodSettings,
    Presets,
    State,
    noting,
    register,
    require,
    shared_parameters,
)
from feddg.models.network import Network
from feddg.settings import ExperimentSettings

CONTROL = "scaffold/"
CLIENTS = "scaffold_clients"


class ScaffoldSettings(MethodSettings):
    """Hyper-parameters of SCAFFOLD."""

    weighting: Literal["uniform", "examples"] = Field(
        "uniform", description="how updates count in the mean: alike (paper), or by images (FedAvg)"
    )


@register
class Scaffold(Method):
    """Corrects every client's steps towards the common direction with control variates."""

    name = "scaffold"
    title = "SCAFFOLD"
    summary = "control variates against client drift, plain SGD (Karimireddy et al. 2020)"
    settings: ScaffoldSettings
    presets: ClassVar[Presets] = {
        # Pretrained networks diverge at 0.003 to 0.01 and in-domain validation chose 0.001 on three
        # data sets; for digits, of 0.01, 0.03, 0.1 and 0.3.
        "*": {"train": {"optimizer": "sgd", "momentum": 0.0, "lr": 0.001}},
        "scratch": {"train": {"lr": 0.01}},
        "digits": {"train": {"lr": 0.1}},
    }
    sends: ClassVar[dict[str, EntrySchema]] = Method.sends | {
        "update/scaffold/*": EntrySchema(
            "the change of its control variate, for every shared parameter",
            entry_of=CONTROL,
            beyond=lambda method, context, changes: _beyond(context, changes),
        )
    }

    excludes: ClassVar[dict[str, str]] = {
        "copa": "scaffold reads gradients off how far a client went from what it was sent, and "
        "copa begins with the classifier of its domain; choose one"
    }

    def check(self, experiment: ExperimentSettings) -> None:
        """Refuses optimizers other than plain SGD, and selection among a client's models."""
        super().check(experiment)
        needed = {"optimizer": "sgd", "momentum": 0, "schedule_by": "round", "select_every": None}
        require(
            experiment,
            "scaffold's control variates follow from all steps that a client takes in a round, of "
            "plain SGD with one learning rate",
            {f"train.{name}": value for name, value in needed.items()},
        )
        if getattr(self.settings, "instance_gate", None) is not None:  # fedig's
            raise ExperimentError(
                "scaffold's control variates need one learning rate for all parameters, and gates "
                "have another: set method.instance_gate to none"
            )

    def initial_extras(self, network: Network, clients: int) -> Weights:
        """Returns the server's control c = 0, and N."""
        shared = shared_parameters(self, network)
        controls = {CONTROL + name: torch.zeros_like(p.detach()) for name, p in shared.items()}
        number = {CLIENTS: torch.tensor(clients)}
        return super().initial_extras(network, clients) | controls | number

    def broadcast(self, state: State) -> Broadcast:
        """Adds the server's control to the broadcast."""
        broadcast = super().broadcast(state)
        broadcast.extras = joined(broadcast.extras, Message(_controls(state.extras)))
        return broadcast

    def optimizer(self, client: Client) -> torch.optim.Optimizer:
        """Returns SGD that adds c - c_k to every gradient."""
        optimizer = super().optimizer(client)
        shared, controls, kept = self._controls(client)
        controls |= differences(controls, kept, kept)
        client.scratch["scaffold"] = corrections = [(p, controls[n]) for n, p in shared.items()]
        optimizer.register_step_pre_hook(lambda *_: _correct(corrections))
        return optimizer

    def report(self, client: Client) -> Message:
        """Updates c_k (option II) and reports its change."""
        shared, controls, kept = self._controls(client)
        changes = differences(shared, client.received, shared)
        if changes:
            torch._foreach_div_([*changes.values()], -client.steps * client.train.lr)
            torch._foreach_sub_([*changes.values()], [controls[name] for name in changes])
        new = copied(kept)
        add_to(new, changes)
        client.memory |= prefixed(CONTROL, Message(new)).tensors
        return joined(super().report(client), prefixed(CONTROL, Message(changes)))

    def _controls(self, client: Client) -> tuple[Weights, Weights, Weights]:
        """Returns the shared parameters, c and c_k, which has no entries before they trained."""
        shared = shared_parameters(self, client.network)
        c, kept = (
            on_device({n: held[CONTROL + n] for n in shared if CONTROL + n in held}, client.device)
            for held in (client.extras.tensors, client.memory)
        )
        return {**shared}, c, kept

    def share(self, state: State, update: Update) -> float:
        """Returns equal weights, or FedAvg's if the settings ask for them."""
        return 1.0 if self.settings.weighting == "uniform" else super().share(state, update)

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Returns FedAvg's mean of the weights, with c moved by the sum of changes over N."""
        totals: Weights = {}
        noted = noting(updates, lambda update: add_to(totals, _controls(update.extras.tensors)))
        state = super().aggregate(state, noted)
        clients = int(state.extras[CLIENTS])
        state.extras |= {name: state.extras[name] + t / clients for name, t in totals.items()}
        return state


def _beyond(context: SchemaContext, changes: Weights) -> Weights:
    """Returns how far control changes lie beyond what fits how the sender moved the weights.

    The change is ``(x - y) / (K lr) - c``. Twice that is allowed, because defences may shorten an
    update. A larger control would make every honest client's next steps too long.
    """
    if context.gradients is None:
        return {name: change.abs() - LARGEST for name, change in changes.items()}
    names = [name for name in changes if name in context.server_extras]
    if not names:
        return {}
    controls = [context.server_extras[name].to(changes[name]) for name in names]
    reach = context.gradients(name.removeprefix(CONTROL) for name in names)
    torch._foreach_mul_(reach, 2.0)
    torch._foreach_add_(reach, torch._foreach_abs(controls), alpha=1e-3)
    lengths = torch._foreach_add([changes[name] for name in names], controls)
    torch._foreach_abs_(lengths)
    torch._foreach_sub_(lengths, reach)
    return dict(zip(names, lengths))


def _controls(tensors: Weights) -> Weights:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(CONTROL)}


def _correct(corrections: list[tuple[Tensor, Tensor]]) -> None:
    pairs = [(p.grad, correction) for p, correction in corrections if p.grad is not None]
    if pairs:
        torch._foreach_add_([gradient for gradient, _ in pairs], [added for _, added in pairs])
