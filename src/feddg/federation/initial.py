"""The server's state before the first round."""

from torch import Tensor

from feddg.federation import server_optimizer
from feddg.guards.chain import NO_GUARDS, Guards
from feddg.messages import Weights
from feddg.methods.base import Method, State
from feddg.models.network import Network
from feddg.settings import ServerSettings


def initial_state(
    method: Method,
    network: Network,
    clients: int,
    *,
    rounds: int,
    settings: ServerSettings,
    guards: Guards = NO_GUARDS,
) -> State:
    """Returns the state before round 1 for a freshly built network.

    Args:
        method: what will be run.
        network: what it trains.
        clients: how many there are in all.
        rounds: how many there will be, for schedules.
        settings: the server's; its optimizer may keep tensors in the state.
        guards: may keep tensors in the state, too.
    """
    weights: Weights = {name: clone(t) for name, t in network.state_dict().items()}
    extras = method.initial_extras(network, clients)
    extras |= server_optimizer.initial_extras(settings, method, network)
    extras |= guards.initial_extras()
    return State(weights, extras, rounds=rounds)


def clone(tensor: Tensor) -> Tensor:
    """Returns an independent copy."""
    return tensor.detach().clone()
