"""RSC against masks worked out by hand on linear models, and its limits."""

import numpy
import pytest
import torch
from torch import nn

from feddg.errors import ExperimentError
from feddg.methods.composition import build_method
from feddg.methods.rsc import keep_mask, spared
from federations import federation, same

SMALL = {"sizes": (8,), "freeze": True}


def one_batch(small, round=1):
    client = small.client()
    client.round = round
    return client, client.batch(torch.arange(8), client.stream("augment"))


def test_the_largest_entries_of_each_row_are_muted():
    importance = torch.tensor([[3.0, -1.0, 2.0, 0.5], [-4.0, -3.0, -2.0, -9.0]])
    expected = torch.tensor([[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0]])
    assert torch.equal(keep_mask(importance, 0.5), expected)
    assert torch.equal(keep_mask(importance, 0.0), torch.ones(2, 4))
    assert torch.equal(keep_mask(importance, 1.0), torch.zeros(2, 4))


def test_shares_are_rounded_up_as_in_the_published_codes(subtests):
    for count, share, muted in [
        (49, 1 / 3, 17),
        (512, 1 / 3.2, 160),
        (30, 0.1, 3),
        (512, 1 / 3, 171),
    ]:
        with subtests.test(count=count, share=share, muted=muted):
            assert int((keep_mask(torch.randn(2, count), share) == 0).sum(1)[0]) == muted


def test_only_the_images_that_lose_most_confidence_stay_muted():
    keep = torch.zeros(4, 2)
    drop = torch.tensor([0.1, 0.4, -0.2, 0.3])
    rows = spared(keep, drop, 2)[:, 0]
    assert rows.tolist() == [1, 0, 1, 0]
    assert spared(keep, drop, 4, smallest=0.1)[:, 0].tolist() == [1, 0, 1, 0]
    assert spared(keep, drop, 0)[:, 0].tolist() == [1, 1, 1, 1]


def test_on_a_linear_head_the_gradient_is_the_true_class_row_of_its_weights():
    """Muted are the largest weights of the true class, for the images that lose most."""
    small = federation("rsc", settings={"muted_features": 0.25, "muted_images": 0.5}, **SMALL)
    client, batch = one_batch(small)
    z = torch.randn(8, 128, generator=torch.Generator().manual_seed(5))
    w = small.network.classifier.weight.detach().double().numpy()
    b = small.network.classifier.bias.detach().double().numpy()
    masked, drops = z.double().numpy().copy(), []

    def confidence(row, label):
        logits = w @ row + b
        return numpy.exp(logits[label]) / numpy.exp(logits).sum()

    for row, label in zip(masked, batch.labels.tolist()):
        before = confidence(row, label)
        row[numpy.argsort(w[label])[-32:]] = 0
        drops.append(before - confidence(row, label))
    muted = numpy.argsort(drops)[-4:]
    final = z.double().numpy().copy()
    final[muted] = masked[muted]
    losses = [-numpy.log(confidence(r, y)) for r, y in zip(final, batch.labels.tolist())]
    terms = small.method.head_loss(client, batch, z)
    assert terms["cross_entropy"].item() == pytest.approx(numpy.mean(losses), rel=1e-5)


def test_no_gradient_reaches_muted_features():
    settings = {"muted_features": 0.25, "muted_images": 1.0}
    small = federation("rsc", settings=settings, **SMALL)
    client, batch = one_batch(small)
    z = torch.randn(8, 128, requires_grad=True)
    small.method.head_loss(client, batch, z)["cross_entropy"].backward()
    muted = keep_mask(small.network.classifier.weight.detach()[batch.labels], 0.25) == 0
    assert (z.grad[muted] == 0).all()
    assert (z.grad[~muted] != 0).all()


@pytest.mark.parametrize("muting", ["vector", "spatial"])
@pytest.mark.parametrize("share", ["muted_images", "muted_features"])
def test_share_zero_is_fedavg_bit_for_bit(muting, share):
    settings = {"muting": muting, share: 0.0, "muted_channels": 0.0}
    assert same(federation("rsc", settings=settings).run(1), federation().run(1))


def test_the_share_of_the_batch_grows_with_the_rounds():
    method = build_method("rsc", {"muted_images": 0.3, "images_growth": 0.2, "growth_rounds": 10})
    shares = [method.image_share(round) for round in (1, 10, 11, 20, 21, 41)]
    assert shares == pytest.approx([0.3, 0.3, 0.5, 0.5, 0.7, 1.0])
    assert build_method("rsc", {}).image_share(40) == pytest.approx(1 / 3)


class Averages(nn.Module):
    """A backbone whose one stage is the identity, followed by the mean over places."""

    out_features = 3

    def __init__(self):
        super().__init__()
        self.stages = [nn.Identity()]

    def forward(self, images):
        return self.stages[0](images).mean((2, 3))


def spatial(seed):
    settings = {"muting": "spatial", "muted_images": 1.0, "muted_features": 0.25}
    small = federation("rsc", settings=settings | {"muted_channels": 1 / 3}, seed=seed, **SMALL)
    small.network.featurizer = Averages()
    small.network.classifier = nn.Linear(3, 3)
    client, batch = one_batch(small)
    by_places = bool(torch.rand((), generator=client.stream("rsc", 0)) < 0.5)
    return small, client, batch, by_places


@pytest.mark.parametrize("places", [True, False])
def test_the_spatial_form_mutes_places_or_channels_of_the_last_map(places):
    seed = next(s for s in range(20) if spatial(s)[3] is places)
    small, client, batch, _ = spatial(seed)
    maps = small.network.normalize(batch.images).detach().double().numpy()
    w = small.network.classifier.weight.detach().double().numpy()
    b = small.network.classifier.bias.detach().double().numpy()
    losses = []
    for x, label in zip(maps, batch.labels.tolist()):
        muted = x.copy()
        if places:  # d logit / d map is w / (H W) at every place: the channel weights of Grad-CAM
            importance = numpy.tensordot(w[label], x, 1)
            muted[:, importance >= numpy.sort(importance.ravel())[-64]] = 0
        else:
            muted[w[label].argmax()] = 0
        before, after = (w @ m.mean((1, 2)) + b for m in (x, muted))

        def confidence(logits, label=label):
            return numpy.exp(logits[label]) / numpy.exp(logits).sum()

        kept = after if confidence(before) - confidence(after) > 1e-4 else before
        losses.append(-numpy.log(confidence(kept)))
    terms = small.method.loss(client, batch)
    assert terms["cross_entropy"].item() == pytest.approx(numpy.mean(losses), rel=1e-4)
    assert not small.network.stages[0]._forward_hooks


def test_probing_leaves_normalisation_statistics_as_fedavg_would():
    settings = {"muting": "spatial", "muted_features": 0.0, "muted_channels": 0.0}
    small, plain = federation("rsc", settings=settings), federation()
    for one in (small, plain):
        client = one.client()
        one.method.loss(client, client.batch(torch.arange(7), client.stream("augment")))
    assert same(dict(small.network.named_buffers()), dict(plain.network.named_buffers()))
    assert small.network.training


def test_a_backbone_without_stages_is_refused_in_the_spatial_form():
    network = federation().network
    network.featurizer = nn.Flatten()
    with pytest.raises(ExperimentError, match=r"names no stages; set method\.muting"):
        build_method("rsc", {"muting": "spatial"}).network(network)
