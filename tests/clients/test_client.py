"""A client's batches, gradients and kept features."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddg.clients.client import split_batches, steps_of_round
from feddg.comparison.plan import _images_of_a_round
from feddg.settings import TrainSettings
from federations import federation, same

TRAIN = TrainSettings(rounds=1, batch_size=4, local_steps=3)


@pytest.mark.parametrize(
    ("images", "kept", "dropped"),
    [(8, [4, 4], [4, 4]), (10, [4, 4, 2], [4, 4]), (9, [4, 5], [4, 4]), (3, [3], [3])],
)
def test_a_last_batch_that_is_not_full_may_be_left_out(images, kept, dropped):
    for drop_last, sizes in ((False, kept), (True, dropped)):
        train = TrainSettings(rounds=1, batch_size=4, local_epochs=2, drop_last=drop_last)
        small = federation(sizes=(images,), train=train)
        assert [len(batch) for batch in small.client().batches()] == 2 * sizes
        assert _images_of_a_round(images, train) == 2 * sum(sizes)


def test_what_is_kept_in_float32_has_its_gradient_in_float32():
    client = federation().client(0)
    weights = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    embeddings = torch.randn(8, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def loss():
        with torch.autocast("cpu", enabled=False):
            return {"apart": (embeddings @ weights).square().sum()}

    (expected,) = torch.autograd.grad(loss()["apart"], embeddings)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        client.backward(loss())
    assert torch.equal(embeddings.grad, expected)


@pytest.mark.parametrize("method", ["fedavg", "mixstyle", "pardon"])
def test_an_image_counts_once_a_step_however_often_it_passes(method):
    small = federation(method, sizes=(8, 8), train=TRAIN)
    small.server.setup()
    row = small.server.round()
    assert [reply.images for reply in small.replies] == [12, 12]
    assert row.images == 24


@pytest.mark.parametrize("kind", [{"trainable": "head"}, {"head": "ridge"}])
def test_features_on_disk_are_of_the_network_that_asks(kind, tmp_path):
    """The two networks have the same entries; they differ in how images enter."""

    def trained(colours, cache):
        small = federation(train=TRAIN.model_copy(update=kind), backbone="cnn_gn", cache=cache)
        small.network.normalize_by((colours,) * 3, (0.2,) * 3)
        return small.run(1)

    first = trained(0.5, tmp_path)
    assert same(trained(0.4, tmp_path), trained(0.4, None))
    assert same(first, trained(0.5, tmp_path))


@given(
    st.integers(1, 40),
    st.integers(1, 9),
    st.booleans(),
    st.integers(1, 3),
    st.none() | st.integers(1, 20),
)
def test_the_steps_of_a_round_are_those_that_a_client_takes(images, size, drop, epochs, steps):
    chosen = {"batch_size": size, "drop_last": drop, "local_epochs": epochs, "local_steps": steps}
    train = TrainSettings(**chosen)
    cut = split_batches(torch.arange(images), size, drop)
    assert steps_of_round(train, images) == (steps or epochs * len(cut))
