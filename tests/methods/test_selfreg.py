"""SelfReg against loops over pairs, and its limits."""

import numpy
import pytest
import torch

from feddg.errors import ExperimentError
from feddg.methods.base import Method
from feddg.methods.composition import build_method, compose
from feddg.methods.selfreg import SelfReg, projector, same_class_partners
from federations import federation, same


def test_partners_are_a_permutation_inside_every_class_and_all_of_them_occur():
    labels = torch.tensor([2, 0, 1, 2, 0, 2])
    rng = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(300):
        partners = same_class_partners(labels, rng)
        assert torch.equal(partners.sort().values, torch.arange(6))
        assert torch.equal(labels[partners], labels)
        seen.add(tuple(partners.tolist()))
    assert len(seen) == 2 * 6  # 2! for class 0, 1! for class 1, 3! for class 2


def test_the_terms_are_the_papers_sums_over_pairs():
    small = federation("selfreg", sizes=(8,))
    client = small.client()
    batch = client.batch(torch.arange(8), client.stream("augment"))
    z = torch.randn(8, 128, generator=torch.Generator().manual_seed(2))
    terms = small.method.head_loss(client, batch, z)
    rng = client.stream("selfreg", 0)
    one, two = (same_class_partners(batch.labels, rng).tolist() for _ in range(2))
    share = client.numpy_stream("selfreg", 0).beta(0.5, 0.5)
    with torch.no_grad():
        c = small.network.classifier(z).double().numpy()
        r = small.network.heads["projector"](z).double().numpy()
    cross_entropy = terms["cross_entropy"].item()

    def pairs(own, others):
        individual, mixed = [], []
        for i in range(8):
            mixture = share * others[one[i]] + (1 - share) * others[two[i]]
            individual.append(((own[i] - others[one[i]]) ** 2).mean())
            mixed.append(((own[i] - mixture) ** 2).mean())
        return share * numpy.mean(individual) + (1 - share) * numpy.mean(mixed)

    scale = min(cross_entropy, 1.0)
    assert terms["logit_regularizer"].item() == pytest.approx(scale * pairs(c, c), rel=1e-5)
    features = 0.3 * pairs(z.double().numpy(), r)
    assert terms["feature_regularizer"].item() == pytest.approx(scale * features, rel=1e-5)


class Large(Method):
    """Adds a term."""

    name = "large"

    def head_loss(self, client, batch, embeddings):
        return super().head_loss(client, batch, embeddings) | {"large": torch.tensor(9.0)}


def test_the_scale_does_not_know_what_other_parts_add():
    found = []
    for method in (SelfReg, compose((SelfReg, Large))):
        small = federation(method(), sizes=(8,))
        client = small.client()
        batch = client.batch(torch.arange(8), client.stream("augment"))
        z = torch.randn(8, 128, generator=torch.Generator().manual_seed(2))
        z += 20 * small.network.classifier.weight.detach()[batch.labels]
        terms = small.method.head_loss(client, batch, z)
        assert terms["cross_entropy"] < 1
        found.append(terms["logit_regularizer"].item())
    assert found[0] == found[1] > 0


def test_the_scale_is_a_constant_of_the_gradient_and_at_most_one():
    small = federation("selfreg", sizes=(8,), settings={"feature_weight": 0.0})
    client = small.client()
    batch = client.batch(torch.arange(8), client.stream("augment"))
    z = torch.randn(8, 128, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        small.network.classifier.weight.mul_(30)  # a cross-entropy above 1
    terms = small.method.head_loss(client, batch, z)
    assert terms["cross_entropy"].item() > 1
    rng = client.stream("selfreg", 0)
    one, two = (same_class_partners(batch.labels, rng) for _ in range(2))
    share = client.numpy_stream("selfreg", 0).beta(0.5, 0.5)
    c = small.network.classifier(z)
    individual = (c - c[one]).square().mean()
    mixed = (c - share * c[one] - (1 - share) * c[two]).square().mean()
    expected = share * individual + (1 - share) * mixed
    torch.testing.assert_close(terms["logit_regularizer"], expected)
    weight = small.network.classifier.weight
    got, want = (torch.autograd.grad(t, weight)[0] for t in (terms["logit_regularizer"], expected))
    torch.testing.assert_close(got, want)


def test_one_sample_per_class_gives_no_logit_loss():
    small = federation("selfreg", sizes=(3,))
    client = small.client()
    batch = client.batch(torch.arange(3), client.stream("augment"))
    assert len(set(batch.labels.tolist())) == 3
    terms = small.method.loss(client, batch)
    assert terms["logit_regularizer"].item() == 0
    assert terms["feature_regularizer"].item() > 0


def test_without_regularization_the_shared_network_is_fedavgs():
    trained = federation("selfreg", settings={"regularization": 0.0}).run(1)
    shared = {name: t for name, t in trained.items() if not name.startswith("heads.")}
    assert same(shared, federation().run(1))


def test_a_batch_of_one_is_trained_by_cross_entropy_alone():
    small = federation("selfreg", sizes=(1, 1))
    client = small.client()
    batch = client.batch(torch.arange(1), client.stream("augment"))
    assert small.method.loss(client, batch).keys() == {"cross_entropy"}
    assert all(t.isfinite().all() for t in small.run().values())


@pytest.mark.parametrize(("size", "hidden"), [(128, 1024), (512, 1024), (2048, 2048)])
def test_the_projector_keeps_the_size_and_normalises_after_each_layer(size, hidden):
    widths = [layer.out_features for layer in projector(size) if hasattr(layer, "out_features")]
    assert widths == [hidden, hidden, size]
    norms = [layer for layer in projector(size) if isinstance(layer, torch.nn.BatchNorm1d)]
    assert [layer.num_features for layer in norms] == widths


def test_bad_settings_are_refused():
    with pytest.raises(ExperimentError, match="mixture_alpha"):
        build_method("selfreg", {"mixture_alpha": 0})
