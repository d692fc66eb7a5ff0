"""FedSR: its divergence against torch.distributions, its samples, and its prediction."""

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from feddg.errors import ExperimentError
from feddg.federation.local_training import load_weights
from feddg.methods.base import local_names
from feddg.methods.composition import build_method, method_class
from feddg.methods.fedsr import GaussianReference, gaussian_divergence
from feddg.models.network import embedding_of
from feddg.settings import TrainSettings
from federations import federation


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_divergence_is_that_of_torch_distributions():
    mean, other = random(6, 4), random(6, 4, seed=1)
    deviation, width = random(6, 4, seed=2).exp(), random(6, 4, seed=3).exp()
    expected = kl_divergence(Normal(mean, deviation), Normal(other, width)).sum(1)
    result = gaussian_divergence(mean, deviation, other, width)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    same = gaussian_divergence(mean, deviation, mean, deviation)
    torch.testing.assert_close(same, torch.zeros(6), atol=1e-6, rtol=0)


def test_the_reference_compares_scaled_moments_with_the_own_class():
    reference = GaussianReference(3, 4)
    assert torch.equal(reference.mean, torch.zeros(3, 4))
    assert torch.equal(reference.raw_deviation, torch.ones(3, 4))
    with torch.no_grad():
        reference.factor.fill_(-2.0)
        reference.mean.copy_(random(3, 4))
        reference.raw_deviation.copy_(random(3, 4, seed=1))
    mean, deviation, labels = random(5, 4, seed=2), random(5, 4, seed=3).exp(), [2, 0, 1, 1, 2]
    scaled = Normal(-2 * mean, 2 * deviation)
    widths = torch.log1p(reference.raw_deviation.detach().exp())
    own = Normal(reference.mean.detach()[labels], widths[labels])
    expected = kl_divergence(scaled, own).sum(1).mean()
    result = reference.divergence(mean, deviation, torch.tensor(labels))
    torch.testing.assert_close(result.detach(), expected, rtol=1e-4, atol=1e-4)


def test_a_factor_of_zero_stays_finite():
    reference = GaussianReference(2, 3)
    with torch.no_grad():
        reference.factor.zero_()
    loss = reference.divergence(random(4, 3), random(4, 3).exp(), torch.tensor([0, 1, 0, 1]))
    loss.backward()
    assert torch.isfinite(loss.detach())
    assert torch.isfinite(reference.factor.grad)


def started(**settings):
    small = federation("fedsr", settings=settings)
    client = small.client(0, received=small.server.state.weights)
    small.method.begin(client)
    return small, client


def test_terms_by_hand():
    for length in ("norm", "squared"):
        small, client = started(length=length, alpha_l2r=0.3, alpha_cmi=0.2)
        batch = next(client.batches())
        embeddings = small.network.features(batch.images)
        terms = small.method.head_loss(client, batch, embeddings)
        mean, deviation = embedding_of(small.network).last
        one = Normal(mean, deviation)
        standard = Normal(torch.zeros(128), torch.full((128,), 1 + 1 / torch.e).log() + 1)
        divergence = kl_divergence(one, standard).sum(1).mean()
        norms = embeddings.detach().double().pow(2).sum(1)
        norms = norms.sqrt() if length == "norm" else norms
        assert float(terms["length"].detach()) == pytest.approx(0.3 * float(norms.mean()), rel=1e-5)
        got = float(terms["divergence"].detach())
        assert got == pytest.approx(0.2 * float(divergence.detach()), rel=1e-4)


def test_the_divergence_is_of_the_pass_that_gave_the_embeddings():
    small, client = started()
    batch = next(client.batches())
    embeddings = small.network.features(batch.images)
    alone = small.method.head_loss(client, batch, embeddings)
    small.network.features(batch.images / 2)  # as PARDON's, RandConv's and VISTA's versions
    beside = small.method.head_loss(client, batch, embeddings)
    assert torch.equal(alone["divergence"], beside["divergence"])


def test_training_samples_have_the_predicted_moments():
    small, _ = started()
    embedding = embedding_of(small.network)
    features = random(1, 128).abs()
    mean, deviation = embedding.distribution(features)
    with torch.no_grad():
        samples = embedding(features.expand(20000, -1))
    torch.testing.assert_close(samples.mean(0), mean[0].detach(), atol=0.05, rtol=0)
    torch.testing.assert_close(samples.std(0), deviation[0].detach(), atol=0.05, rtol=0)
    embedding.eval()
    assert torch.equal(embedding(features), mean)


def test_training_noise_is_the_clients_own_and_repeatable():
    def sample(id, round):
        small, _ = started()
        client = small.client(id, received=small.server.state.weights)
        client.round = round
        small.method.begin(client)
        return embedding_of(small.network)(torch.ones(2, 128)).detach()

    assert torch.equal(sample(0, 1), sample(0, 1))
    assert not torch.equal(sample(0, 1), sample(1, 1))
    assert not torch.equal(sample(0, 1), sample(0, 2))


def predictor(samples=20):
    small, _ = started(samples=samples)
    load_weights(small.network, small.server.state.weights)
    return small, small.method.predictor(small.network).eval()


def test_the_prediction_is_the_mean_of_softmax_over_samples():
    small, predict = predictor(samples=3)
    images = torch.rand(4, 3, 16, 16)
    with torch.no_grad():
        features = small.network.featurizer(small.network.normalize(images))
        mean, deviation = embedding_of(small.network).distribution(features)
        each = [
            small.network.classifier(mean + deviation * noise).softmax(1) for noise in predict.noise
        ]
        result = predict(images).exp()
    assert len(each) == 3
    torch.testing.assert_close(result, sum(each) / 3)
    torch.testing.assert_close(result.sum(1), torch.ones(4))


def test_the_prediction_does_not_depend_on_batch_or_time():
    _, predict = predictor()
    _, again = predictor()
    images = torch.rand(4, 3, 16, 16)
    with torch.no_grad():
        whole = predict(images)
        torch.testing.assert_close(predict(images[2:3]), whole[2:3], rtol=1e-4, atol=1e-5)
        assert torch.equal(again(images), whole)


def test_references_stay_local():
    method = build_method("fedsr", {})
    local = local_names(method, federation(method).network)
    assert len(local) == 3
    assert all(name.startswith("heads.fedsr.") for name in local)


def test_it_learns():
    train = TrainSettings(rounds=12, batch_size=4, local_epochs=2)
    small = federation("fedsr", train=train)
    small.run()
    assert small.accuracy() > 0.8  # chance is 1/3


def test_settings_out_of_range_and_copa_are_refused():
    with pytest.raises(ExperimentError, match="samples: "):
        build_method("fedsr", {"samples": 0})
    with pytest.raises(ExperimentError, match="choose one"):
        method_class("fedsr+copa")
