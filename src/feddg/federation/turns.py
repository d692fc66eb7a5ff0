"""What a client does, whatever carries the messages: describe itself, train, answer."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from feddg.clients.best_of_steps import BestOfSteps
from feddg.clients.client import Client, counted_passes
from feddg.clients.private_steps import private_step
from feddg.clients.threads import threads
from feddg.errors import ClientError
from feddg.guards.chain import NO_GUARDS, Guards
from feddg.messages import Message, Update, Weights, first_not_finite
from feddg.methods.base import Method, local_names


def load_weights(network: nn.Module, weights: Weights) -> None:
    """Copies ``weights`` into the network's state in place; entries not named stay as they are."""
    if not weights:
        return
    state = network.state_dict()
    with torch.no_grad():
        for name, tensor in weights.items():
            state[name].copy_(tensor)


def describe(client: Client, method: Method, weights: Weights) -> Message:
    """Runs the method's setup at one client; the network is in eval mode."""
    with _turn(client), torch.no_grad(), client.worker.autocast():
        load_weights(client.network, weights)
        client.network.eval()
        return method.describe(client) or Message()


def train(client: Client, method: Method, guards: Guards = NO_GUARDS) -> Update:
    """Trains one client for a round, from the weights it received and what it remembers.

    The guards see the update before it leaves.

    The update's weights are the network's live tensors (see :class:`feddg.messages.Update`).

    Raises:
        ClientError: the client cannot train, or its loss or what it remembers is not finite.
    """
    started = time.perf_counter()
    with _turn(client), counted_passes(client), client.held_still():
        local = _start(client, method)
        client.set_training()
        method.begin(client)
        client.optimizer = method.optimizer(client)
        images = 0
        selection = BestOfSteps(client) if client.worker.train.select_every else None
        with client.worker.autocast():
            for batch in client.batches():
                if client.worker.stopped.is_set():
                    raise ClientError("the round ended before it was done")
                if client.worker.record_noise is not None:
                    private_step(client, batch, client.worker.record_noise)
                else:
                    method.step(client, batch)
                images += len(batch)
                if selection is not None:
                    selection.step()
            if selection is not None:
                selection.restore()
            terms = client.mean_terms()
            extras = method.report(client)
    client.worker.stepper.keep(client.optimizer)
    state = client.network.state_dict()
    client.memory.update({name: state[name].detach().clone() for name in local})
    _require_finite_memory(client)
    seconds = time.perf_counter() - started
    if local >= state.keys():
        state = {}  # nothing is shared, so nothing leaves
    update = Update(client.id, len(client.examples), state, extras, terms, seconds, images)
    update.passes = client.passes
    return guards.protect(update, client.received, client.extras, client.secrets)


def answer(
    client: Client, method: Method, name: str, question: Message, guards: Guards = NO_GUARDS
) -> Message:
    """Answers a question of the server's under the weights that came with it, in eval mode.

    A guard's own question needs no weights.
    """
    own = guards.answer(client.id, client.round, name, question, client.secrets)
    if own is not None:
        return own
    with _turn(client), torch.no_grad(), client.worker.autocast():
        _start(client, method)
        client.network.eval()
        return method.answer(client, name, question)


@contextmanager
def _turn(client: Client) -> Iterator[None]:
    """Checks that the client has images, and gives its block the worker's share of the cores."""
    if not len(client.examples):
        raise ClientError("it holds no images; give it some or lower clients.number")
    with threads(client.worker.threads):
        yield


def _start(client: Client, method: Method) -> set[str]:
    """Loads what the client received, then what it remembers; returns the names that are local."""
    local = local_names(method, client.network)
    load_weights(client.network, client.received)
    load_weights(client.network, {n: t for n, t in client.memory.items() if n in local})
    return local


def _require_finite_memory(client: Client) -> None:
    """Raises ClientError before a diverged client remembers what would spoil its next rounds."""
    name = first_not_finite(client.memory.items())
    if name is not None:
        raise ClientError(
            f"{name!r} became infinite or NaN in round {client.round}; "
            f"lower train.lr (now {client.worker.train.lr:g})"
        )
