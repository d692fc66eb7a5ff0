"""What a client does under any transport: sends statistics, trains, answers questions."""

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.linalg import vector_norm

from feddg.clients.client import Batch, Client, Prepared, RecordNoise
from feddg.clients.graphs import Turn
from feddg.clients.optim import kept_moments, take_up
from feddg.clients.threads import threads
from feddg.errors import ClientError, Diverged
from feddg.federation.head_start import HeadStart
from feddg.messages import Message, Update, Weights, copied, copy_all, first_fault, not_finite
from feddg.methods.base import Method, local_names
from feddg.models.dropout import draw_dropout_from
from feddg.models.precision import as_usual
from feddg.privacy.building import NO_DEFENCES, Defences
from feddg.privacy.robust import moved, moving
from feddg.rng import add_noise


class Steps:
    """Takes a client's steps in a round: by its method, recorded, or private (DP-SGD).

    Args:
        client: ready for its first step.
        method: its method.
    """

    def __init__(self, client: Client, method: Method) -> None:
        self._client, self._method, noise = client, method, client.worker.record_noise
        self._noise = None if method.one_round else noise
        if client.records_steps:
            client.turn = Turn(client, method)

    def take(self, prepared: Prepared) -> None:
        """Takes a step on a batch."""
        if self._noise is not None:
            private_step(self._client, prepared.batch(), self._noise)
        elif self._client.turn is not None:
            self._client.turn.step(prepared)
        else:
            self._method.step(self._client, prepared.batch())

    def end(self) -> None:
        """Ends the round's steps; the client's network holds what it sends."""


class BestOfSteps(Steps):
    """Keeps the best of a client's models, tested every ``train.select_every`` steps and last.

    FedIG's appendix A.2. Models are tested on the client's own validation images in evaluation
    mode, with their own running statistics. Ties go to the first. A client without validation
    images sends its last model.

    Raises:
        ClientError: no validation images were set aside for clients.
    """

    def __init__(self, client: Client, method: Method) -> None:
        super().__init__(client, method)
        if client.examples.validation is None:
            raise ClientError(
                "it has no validation images to choose its model by; leave train.select_every out"
            )
        self._validation = client.examples.validation
        self._every = client.worker.train.select_every or 1
        self._steps = 0
        self._best: tuple[float, Weights] | None = None

    def take(self, prepared: Prepared) -> None:
        """Takes a step, and tests the model if it is due."""
        super().take(prepared)
        self._steps += 1
        if self._steps % self._every == 0:
            self._try()

    def end(self) -> None:
        """Loads the best model into the client's network."""
        if self._steps % self._every:
            self._try()
        if self._best is not None:
            self._client.network.load_state_dict(self._best[1])

    def _try(self) -> None:
        """Keeps the model if its score on the validation images, if there are any, is the best."""
        client, total = self._client, 0.0
        if not len(self._validation):
            return
        client.network.eval()
        with torch.no_grad():
            for batch in client.plain_batches(examples=self._validation):
                outputs = client.network(batch.images)
                total += float(client.worker.task.score(outputs, batch.labels).sum())
        client.set_training()
        score = total / len(self._validation)
        if self._best is None or not score <= self._best[0]:
            self._best = score, copied(client.network.state_dict())


# Steps by gradients that are clipped image by image and noised: DP-SGD.
#
# Abadi et al., "Deep Learning with Differential Privacy" (CCS 2016), Algorithm 1, of B images::
#
#     g_i <- g_i min(1, C / |g_i|);   g = (1/B) (sum_i g_i + N(0, (z C)^2))
#
# Neighbours differ by one image whose gradient is zero: the sensitivity of the sum is C. An image
# is in one batch of an epoch; which one is drawn without looking at it, and the draw gets no
# credit.
#
# Gradients are taken image by image (``torch.func``), not by Opacus' hooks: they do the same for
# any layer, and the noise is :mod:`feddg.rng`'s. A network must treat every image by itself.


def image_gradients(client: Client, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
    """Returns each image's gradient by parameter, ``(B, ...)``, and the losses ``(B,)``."""
    model = client.network
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    fixed = {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad}
    fixed |= dict(model.named_buffers())

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        outputs = functional_call(model, (parameters, fixed), (image[None],))
        return client.task_loss(outputs, label[None])

    both = vmap(grad_and_value(loss), in_dims=(None, 0, 0), randomness="different")
    # vmap's batch normalisation takes no bfloat16 beside its float32 statistics.
    with torch.autocast(batch.images.device.type, enabled=False):
        gradients, losses = both(trained, batch.images.float().contiguous(), batch.labels)
    return gradients, losses


_COLUMNS = 2**16
"""Entries of a gradient that are summed at once: a network's of all images would need gigabytes."""


def clipped_sum(gradients: dict[str, Tensor], norm: float) -> dict[str, Tensor]:
    """Returns the sum of the images' gradients, each clipped to ``norm``, in float64.

    A gradient that is not finite counts as zero.
    """
    rows = [g.detach().flatten(1) for g in gradients.values()]
    by_parameter = torch.stack([vector_norm(row, dim=1, dtype=torch.float64) for row in rows])
    lengths = vector_norm(by_parameter, dim=0)[:, None]
    finite = torch.isfinite(lengths)
    factors = torch.where(finite, norm / lengths.clamp_min(norm), 0.0)

    def total(row: Tensor) -> Tensor:
        return torch.cat(
            [(torch.where(finite, part, 0.0) * factors).sum(0) for part in row.split(_COLUMNS, 1)]
        )

    return {n: total(row).reshape(g.shape[1:]) for (n, g), row in zip(gradients.items(), rows)}


def private_step(client: Client, batch: Batch, noise: RecordNoise) -> None:
    """Takes one optimizer step with a batch's clipped and noised gradient (DP-SGD)."""
    gradients, losses = image_gradients(client, batch)
    parameters = dict(client.network.named_parameters())
    for name, total in clipped_sum(gradients, noise.norm).items():
        noised = add_noise(total, noise.multiplier * noise.norm) / len(batch)
        parameters[name].grad = noised.to(parameters[name])
    client.note({client.worker.task.term: losses.mean()})
    client.step()


def load_weights(network: nn.Module, weights: Weights) -> None:
    """Copies ``weights`` into the network's state in place; other entries do not change."""
    state = network.state_dict(keep_vars=True) if weights else {}
    copy_all((state[name] for name in weights), weights.values())


def widened(message: Message, method: Method, purpose: str) -> Message:
    """Returns a message with float32 where mixed precision left 16 bits that nobody declared.

    Args:
        message: what the client sends.
        method: the method that declares it.
        purpose: as in ``Method.sends``: ``statistics``, ``update`` or ``answer:...``.
    """

    def wide(name: str, tensor: Tensor) -> Tensor:
        sends, entry = method.sends.items(), f"{purpose}/{name}"
        kinds = {schema.dtype for key, schema in sends if fnmatchcase(entry, key)}
        half = {torch.bfloat16, torch.float16} - kinds
        return tensor.float() if tensor.dtype in half else tensor

    tensors = {name: wide(name, tensor) for name, tensor in message.tensors.items()}
    return Message(tensors, message.scalars)


def client_statistics(client: Client, method: Method) -> Message:
    """Returns a client's statistics for the setup; the network is in eval mode."""
    with _at_rest(client):
        load_weights(client.network, client.received)
        return widened(method.client_statistics(client) or Message(), method, "statistics")


def train(client: Client, method: Method, defences: Defences = NO_DEFENCES) -> Update:
    """Trains one client for a round and returns its update, as changed by the defences.

    The update's weights are the network's live tensors (see :class:`feddg.messages.Update`).

    Raises:
        ClientError: the client cannot train, or its loss or what it remembers is not finite.
    """
    if (head := _head_start(client, method)) is not None:
        with _at_rest(client):
            return head.update(client)
    started, before = time.perf_counter(), dict(client.memory)
    with _local_work(client), client.held_still():
        local = _start(client, method)
        client.set_training()
        draw_dropout_from(client.network, client.stream("dropout"))
        method.begin(client)
        client.optimizer = method.optimizer(client)
        client.network.zero_grad()  # of a turn before that failed, or of what begins this one
        if client.train.keep_optimizer:
            take_up(client.optimizer, client.network, client.memory)
        with client.worker.autocast():
            images = _take_steps(client, method)
            try:
                extras = widened(method.report(client), method, "update")
            except Exception:
                client.mean_terms()  # a loss that is not finite is the cause, and says so
                raise
    if client.train.keep_optimizer:
        client.memory.update(kept_moments(client.optimizer, client.network))
    state = client.network.state_dict()
    if client.turn is not None:
        client.memory = client.turn.released(client.memory)
        extras.tensors = client.turn.released(extras.tensors)
    client.memory.update(copied({name: state[name] for name in local}))
    strange = [(n, type(v).__name__) for n, v in client.memory.items() if not isinstance(v, Tensor)]
    if strange:
        name, kind = strange[0]
        raise ClientError(f"client.memory[{name!r}] is of type {kind}, and must be a tensor")
    if new := [(n, t) for n, t in client.memory.items() if t is not before.get(n)]:
        live = {t.untyped_storage().data_ptr() for t in state.values()}  # the next client's, too
        shared = {n: t for n, t in new if t.untyped_storage().data_ptr() in live}
        client.memory.update(copied(shared))
    state = {n: tensor for n, tensor in state.items() if n not in client.network.frozen}
    if local >= state.keys():
        state = {}  # nothing is shared, so nothing leaves
    terms: dict[str, float] = {}
    spoiled, far = None, 0.0
    if not any(defence.clips for defence in defences.defences):
        change = moving({} if defences.defences else state, client.received)
        terms, (spoiled, far) = client.mean_terms(not_finite(client.memory), change)
    elif first_fault([not_finite(client.memory)]) is not None:
        client.memory = before  # no failure may show, nor may it spoil the rounds to come
    if spoiled is not None:
        raise Diverged(
            f"{spoiled!r} became infinite or NaN in round {client.round}; "
            f"lower train.lr (now {client.worker.train.lr:g})"
        )
    seconds = time.perf_counter() - started
    update = Update(client.id, len(client.examples), state, extras, terms, seconds, images)
    update = defences.protect(update, client.received, client.extras, client.secrets)
    if defences.defences:
        far = moved(update.weights, client.received)
    update.moved = far  # measured here, where several clients are at work
    return update


def _take_steps(client: Client, method: Method) -> int:
    """Takes a round's steps, a batch each; returns how many images they had."""
    if method.trains_on_features(client):
        client.features = client.frozen_features()
    images, chosen = 0, BestOfSteps if client.worker.train.select_every else Steps
    steps = chosen(client, method)
    for prepared in client.prepare(functools.partial(method.draws, client)):
        if client.worker.stopped.is_set():
            raise ClientError("the round ended before it was done")
        steps.take(prepared)
        images += prepared.count
    steps.end()
    return images


def answer(client: Client, method: Method, name: str, defences: Defences = NO_DEFENCES) -> Message:
    """Returns a client's answer to what it was sent as a question, under the sent weights.

    The network is in eval mode. Questions of a defence need no weights.
    """
    question = client.extras
    answered = defences.answer(client.id, client.round, name, question, client.secrets)
    if answered is not None:
        return answered
    with _at_rest(client):
        if (head := _head_start(client, method)) is not None:
            return head.answer(client, name, question)
        client.alike = not _start(client, method)
        return widened(method.answer(client, name, question), method, f"answer:{name}")


def _head_start(client: Client, method: Method) -> HeadStart | None:
    """Returns the method of the phase before round 1, if the client is in it."""
    first = client.round == 0 and client.worker.train.head == "ridge"
    return HeadStart(method) if first else None


@contextmanager
def _local_work(client: Client) -> Iterator[None]:
    """Checks that the client has images; its block has gradients and the worker's threads."""
    if not len(client.examples):
        raise ClientError("it holds no images; give it some or lower clients.number")
    with as_usual(), threads(client.worker.threads):
        yield


@contextmanager
def _at_rest(client: Client) -> Iterator[None]:
    """Its block has the client's network in eval mode, and no gradients."""
    with _local_work(client), torch.no_grad(), client.worker.autocast():
        client.network.eval()
        yield


def _start(client: Client, method: Method) -> set[str]:
    """Loads the received weights, then the client's memory; returns the names of local entries."""
    local = local_names(method, client.network)
    load_weights(client.network, client.received)
    if client.network.frozen:  # which it was sent before round 1
        state = client.network.state_dict()
        client.received = {n: state[n] for n in client.network.frozen} | client.received
    load_weights(client.network, {n: t for n, t in client.memory.items() if n in local})
    return local
