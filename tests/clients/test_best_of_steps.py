"""A client's choice among its own models, against a client that stops at each step."""

from dataclasses import replace

import pytest
import torch

from feddg.clients.client import Client
from feddg.federation.turns import train
from feddg.settings import TrainSettings
from federations import federation, same

STEPS = 7


def settings(steps=STEPS, every=None):
    return TrainSettings(
        rounds=1, local_steps=steps, select_every=every, batch_size=4, optimizer="sgd", lr=0.1
    )


def client_of(small, validation):
    """Client 0, which validates on other clients' images."""
    own = small.examples(0)
    if validation is not None:
        own = replace(own, validation=validation(small))
    weights = small.server.state.weights
    return Client(0, own, small.worker, round=1, received=weights)


def others(small):
    """The other clients' images, some labels wrong: an accuracy that goes up and down."""
    held = small.examples(1)
    rows = torch.arange(7, 18)
    return replace(held, rows=rows, labels=small.labels[rows].roll(1), domains=rows * 0)


def state_after(steps):
    small = federation(train=settings(steps))
    client = client_of(small, others)
    train(client, small.method)
    state = {name: t.clone() for name, t in small.network.state_dict().items()}
    validation = client.examples.validation
    images = validation.images().float() / 255
    with torch.no_grad():
        guess = small.network.eval()(images).argmax(1)
    return state, float((guess == validation.labels).float().mean())


@pytest.mark.parametrize("every", [1, 2, 3, 20])
def test_the_best_of_the_models_that_were_tried_is_sent(every):
    small = federation(train=settings(every=every))
    update = train(client_of(small, others), small.method)
    tried = sorted({*range(every, STEPS + 1, every), STEPS})
    models = {steps: state_after(steps) for steps in tried}
    best = max(tried, key=lambda steps: (models[steps][1], -steps))
    assert same(dict(update.weights), models[best][0])


def test_accuracies_differ_so_that_there_is_a_choice():
    assert len({state_after(steps)[1] for steps in range(1, STEPS + 1)}) > 1


def test_without_the_setting_the_last_model_is_sent():
    small = federation(train=settings())
    update = train(client_of(small, others), small.method)
    assert same(dict(update.weights), state_after(STEPS)[0])


def test_a_client_with_an_empty_share_sends_its_last_model():
    small = federation(train=settings(every=2))

    def nothing(small):
        none = small.examples(1)
        return replace(none, rows=none.rows[:0], labels=none.labels[:0], domains=none.domains[:0])

    update = train(client_of(small, nothing), small.method)
    assert same(dict(update.weights), state_after(STEPS)[0])


def test_what_stays_local_is_that_of_the_best_model():
    small = federation("fedbn", train=settings(every=1))
    client = client_of(small, others)
    update = train(client, small.method)
    assert client.memory
    assert all(torch.equal(client.memory[name], update.weights[name]) for name in client.memory)


def test_a_client_for_whom_nobody_set_images_aside_is_refused_by_name():
    small = federation(train=settings(every=2))
    small.server.settings = small.server.settings.model_copy(update={"attempts": 1})
    with pytest.raises(Exception, match=r"no validation images.*train\.select_every"):
        small.run(1)
