"""FedGMA: where clients disagree on a direction, weights move less (Tenison et al., TMLR 2023).

A coordinate whose change has the same sign at nearly all clients is likely to matter in every
domain; one whose sign differs fits particular clients. FedGMA counts the signs of each coordinate
over the round's clients and shrinks the mean change where they agree too little. Local training is
FedAvg's.

Equations:
    D_k = w_k - w_t;   A = |(1/K) sum_k sign(D_k)|, coordinate by coordinate;
    m = 1 where A >= tau, else A;   w <- w_t + eta m * sum_k (n_k/n) D_k.
    tau = 0 with eta = 1 is FedAvg, bit for bit.

Leaves the client:
    Its weights and its number of images, as in FedAvg.

Decisions:
    Normalisation statistics and entries that stay local are not masked. The sums of signs and of
    changes are updated as updates arrive, in the memory of two models, however many clients there
    are.
"""

from collections.abc import Iterable

import torch
from pydantic import Field
from torch import Tensor

from feddg.messages import Update, Weights, add_to, differences
from feddg.methods.base import Method, MethodSettings, State, noting, register, shared_entries
from feddg.models.network import Network
from feddg.settings import Fraction, Positive

MASKED = "fedgma/masked"
"""Mask of the network's state entries whose change is masked, by sorted names."""


class FedGMASettings(MethodSettings):
    """Hyper-parameters of FedGMA."""

    tau: Fraction = Field(
        0.4, description="agreement from which a coordinate moves in full (PARDON's configuration)"
    )
    eta: Positive = Field(1.0, description="server step size (PARDON's configuration)")
    legacy_mask: bool = Field(
        False, description="the multiplier of published benchmark code: 1 + A above tau, 0 below"
    )


@register
class FedGMA(Method):
    """Masks the mean change by the clients' agreement in sign."""

    name = "fedgma"
    summary = "changes shrink where clients disagree in sign (Tenison et al. 2023)"
    settings: FedGMASettings

    def initial_extras(self, network: Network, clients: int) -> Weights:
        """Returns the mask of shared parameters."""
        shared = shared_entries(self, network)
        masked = torch.tensor([name in shared for name in sorted(network.state_dict())])
        return super().initial_extras(network, clients) | {MASKED: masked}

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Moves the previous weights by the mean change times each coordinate's multiplier."""
        before = state.weights
        masked = [n for n, yes in zip(sorted(before), state.extras[MASKED].tolist()) if yes]
        signs: Weights = {}
        count = 0

        def note(update: Update) -> None:
            nonlocal count
            count += 1
            changes = differences(update.weights, before, masked)
            if changes:
                torch._foreach_sign_([*changes.values()])
            add_to(signs, changes)

        state = super().aggregate(state, noting(updates, note))
        for name, total in signs.items():
            step = self.settings.eta * self.multiplier(total.abs() / count)
            # Written so that a step of exactly 1 gives the mean itself, without rounding.
            state.weights[name] = torch.lerp(before[name], state.weights[name], step)
        return state

    def multiplier(self, agreement: Tensor) -> Tensor:
        """Returns the multiplier of each coordinate's mean change, from A in [0, 1]."""
        agreed = agreement >= self.settings.tau
        if self.settings.legacy_mask:
            return torch.where(agreed, 1 + agreement, 0.0)
        return torch.where(agreed, 1.0, agreement)
