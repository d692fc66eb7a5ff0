"""COPA: the frozen classifiers' loss by hand, aggregation in domains, the ensemble, one domain."""

import pytest
import torch

from feddg.errors import ExperimentError
from feddg.experiment import Experiment
from feddg.federation.local_training import load_weights
from feddg.methods.composition import build_method
from feddg.methods.copa import heads_of
from feddg.settings import ExperimentSettings, TrainSettings
from federations import federation, same, trained_alone

SGD = TrainSettings(rounds=2, batch_size=4, optimizer="sgd", lr=0.05)
GATE = "featurizer.blocks.0.2.gate"


def with_heads(**settings):
    """A client of domain 0 in a federation whose heads 0, 1 and 3 have been trained."""
    small = federation("copa", settings=settings, freeze=True)
    weights = small.server.state.weights
    noise = torch.Generator().manual_seed(0)
    weights["heads.copa.weight"] = torch.randn(6, 3, 128, generator=noise)
    weights["heads.copa.bias"] = torch.randn(6, 3, generator=noise)
    weights["heads.copa.trained"] = torch.tensor([True, True, False, True, False, False])
    load_weights(small.network, weights)
    client = small.client(0, received=weights)
    small.method.begin(client)
    return small, client, weights


def test_the_own_head_is_trained_and_the_others_are_frozen():
    small, client, weights = with_heads(others=0.7)
    batch = next(client.batches())
    embeddings = small.network.features(batch.images)
    terms = small.method.head_loss(client, batch, embeddings)

    def entropy(head):
        logits = embeddings @ weights["heads.copa.weight"][head].T
        logits = logits + weights["heads.copa.bias"][head]
        return torch.nn.functional.cross_entropy(logits, batch.labels)

    torch.testing.assert_close(terms["cross_entropy"], entropy(0), rtol=1e-4, atol=1e-5)
    others = 0.7 * (entropy(1) + entropy(3)) / 2
    torch.testing.assert_close(terms["other_classifiers"], others, rtol=1e-4, atol=1e-5)
    small.network.zero_grad()
    terms["other_classifiers"].backward(retain_graph=True)
    assert small.network.classifier.weight.grad is None
    assert small.network.featurizer.blocks[0][0].weight.grad.abs().max() > 0
    assert not any(tensor.requires_grad for tensor in heads_of(small.network).buffers())


def test_round_one_is_cross_entropy_only_and_each_domain_keeps_its_classifier():
    small = federation("copa", settings={"gate": None}, train=SGD)
    small.server.round()
    assert all(reply.terms.keys() == {"cross_entropy"} for reply in small.replies)
    weights = small.server.state.weights
    assert weights["heads.copa.trained"].tolist() == [True, True, True, False, False, False]
    start = federation().server.state.weights
    for id in range(3):  # each client of the small federation is a domain of its own
        alone = trained_alone(id, start, train=SGD)
        torch.testing.assert_close(weights["heads.copa.weight"][id], alone["classifier.weight"])
        torch.testing.assert_close(weights["heads.copa.bias"][id], alone["classifier.bias"])
    small.server.round()
    assert "other_classifiers" in small.replies[-1].terms


def test_one_domain_without_gates_is_fedavg():
    small = federation("copa", settings={"gate": None})
    for_client = small.examples

    def one_domain(id):
        examples = for_client(id)
        examples.domains.zero_()
        return examples

    small.transport.examples = one_domain
    weights, expected = small.run(), federation().run()
    shared = {name: t for name, t in weights.items() if not name.startswith("heads.")}
    assert same(shared, expected)
    assert torch.equal(weights["heads.copa.weight"][0], expected["classifier.weight"])
    assert not weights["heads.copa.trained"][1:].any()


def test_heads_of_absent_domains_stay():
    small = federation("copa")
    small.server.round()
    before = small.server.state.weights["heads.copa.weight"].clone()
    small.server.sample = lambda round, attempt=0: [1]
    small.server.round()
    after = small.server.state.weights["heads.copa.weight"]
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert not torch.equal(after[1], before[1])


def test_the_prediction_is_the_mean_of_the_trained_heads_softmax():
    small, _, weights = with_heads()
    predict = small.method.predictor(small.network).eval()
    images = torch.rand(4, 3, 16, 16)
    with torch.no_grad():
        embeddings = small.network.features(images)
        each = [
            (embeddings @ weights["heads.copa.weight"][h].T + weights["heads.copa.bias"][h])
            for h in (0, 1, 3)
        ]
        expected = sum(logits.softmax(1) for logits in each) / 3
        torch.testing.assert_close(predict(images).exp(), expected, rtol=1e-4, atol=1e-6)
        heads_of(small.network).trained.zero_()
        untrained = small.network(images).softmax(1)
        torch.testing.assert_close(predict(images).exp(), untrained)


def test_gates_have_their_own_learning_rate_and_stay_between_zero_and_one():
    hot = TrainSettings(rounds=3, batch_size=4, optimizer="sgd", lr=1.0, weight_decay=0.1)
    small = federation("copa", train=hot, settings={"gate": 0.5})
    groups = small.client().optimizer.param_groups
    assert [group["lr"] for group in groups] == [1.0, 10.0]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    counted = sum(len(group["params"]) for group in groups)
    assert counted == len(list(small.network.parameters()))
    gate = small.run()[GATE]
    assert gate.min() >= 0
    assert gate.max() <= 1
    assert (gate != 0.5).any()


def test_more_domains_than_heads_are_refused_by_name():
    small = federation("copa", settings={"heads": 2})
    record = small.server.round()
    assert [refusal.client for refusal in record.refused] == [2]
    assert "set method.heads to at least 3" in record.refused[0].reason


def test_more_clients_than_heads_are_refused_before_training():
    settings = {"name": "copa", "heads_by": "client"}
    experiment = Experiment(data="digits", hold_out="sketch", clients=9, method=settings)
    with pytest.raises(ExperimentError, match=r"set method\.heads to 9"):
        build_method("copa", experiment.method.settings).check(experiment)


@pytest.mark.parametrize(
    ("averaging", "per_round", "said"),
    [("swa", 2, 1), ("ema", 2, 1), ("none", 2, 0), ("swa", None, 0)],
)
def test_means_that_hold_untrained_classifiers_are_said(averaging, per_round, said):
    experiment = ExperimentSettings(
        clients={"number": 3, "per_round": per_round}, server={"averaging": averaging}
    )
    assert len([*build_method("copa", {}).diagnostics(experiment)]) == said
