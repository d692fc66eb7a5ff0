"""FedBN and SiloBN: what stays local, against a slow version with one federation per client."""

import pytest
import torch
from torch import nn

from feddg.errors import ExperimentError
from feddg.experiment import Experiment
from feddg.methods.base import local_names
from feddg.methods.composition import build_method, method_class
from feddg.models.backbones import build_network
from feddg.models.network import Network
from feddg.models.normalization import statistics_names
from feddg.settings import TrainSettings
from federations import affine_names, federation, trained_alone

SIZES = (7, 5, 6)
SGD = TrainSettings(rounds=2, batch_size=4, optimizer="sgd", lr=0.005)


def mean(weights):
    """Example-weighted mean in double precision; counters from the first client."""
    first = weights[0]
    return {
        name: sum(w[name].double() * n for w, n in zip(weights, SIZES)) / sum(SIZES)
        if first[name].is_floating_point()
        else first[name]
        for name in first
    }


def by_hand(local, rounds):
    """Trains all clients round by round; entries in ``local`` are their own."""
    start = federation().server.state.weights
    own = [{}, {}, {}]
    for round in range(1, rounds + 1):
        trained = [trained_alone(id, start | own[id], round, train=SGD) for id in range(len(SIZES))]
        own = [{name: weights[name] for name in local} for weights in trained]
        start = {name: t.to(start[name].dtype) for name, t in mean(trained).items()}
    return start, own


@pytest.mark.parametrize("name", ["fedbn", "silobn"])
def test_local_entries_are_remembered_and_the_rest_averaged(name):
    small = federation(name, train=SGD)
    local = local_names(small.method, small.network)
    expected, own = by_hand(local, 2)
    weights = small.run(2)
    for key, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-4, atol=1e-6)
    for id, memory in small.transport.memories.items():
        assert memory.keys() == local
        for key, tensor in memory.items():
            torch.testing.assert_close(tensor, own[id][key], rtol=1e-4, atol=1e-6)
    differing = "featurizer.blocks.0.2.running_mean"
    assert not torch.allclose(own[0][differing], own[1][differing])


def test_all_hundred_normalisation_tensors_of_a_resnet18_stay_local():
    network = build_network("resnet18", 7, weights=None)
    local = local_names(build_method("fedbn", {}), network)
    assert len(local) == 100
    assert "featurizer.model.layer2.0.downsample.1.running_var" in local
    assert local == affine_names(network) | statistics_names(network)


def test_silobn_shares_scales_and_shifts():
    network = build_network("resnet18", 7, weights=None)
    local = local_names(build_method("silobn", {}), network)
    assert len(local) == 60
    assert local == statistics_names(network)


def test_the_bottlenecks_normalisation_is_local_too():
    network = build_network("cnn", 3, weights=None, embedding="bottleneck")
    assert "embedding.1.running_mean" in local_names(build_method("silobn", {}), network)
    assert "embedding.1.weight" in local_names(build_method("fedbn", {}), network)


def test_a_client_that_is_not_sampled_keeps_its_own_and_a_new_one_starts_from_the_average():
    small = federation("fedbn")
    draws = iter([[0, 1], [1, 2]])
    small.server.sample = lambda round, attempt=0: next(draws)
    small.server.round()
    average = {name: t.clone() for name, t in small.server.state.weights.items()}
    kept = {name: t.clone() for name, t in small.transport.memories[0].items()}
    small.server.round()
    assert all(torch.equal(kept[name], t) for name, t in small.transport.memories[0].items())
    alone = trained_alone(2, average, 2)
    assert all(torch.equal(t, alone[name]) for name, t in small.transport.memories[2].items())


class Plain(nn.Module):
    """A featurizer without normalisation."""

    out_features = 12

    def forward(self, images):
        return images.flatten(1)


@pytest.mark.parametrize("name", ["fedbn", "silobn"])
def test_a_backbone_without_normalisation_is_refused_before_training(name):
    with pytest.raises(ExperimentError, match=f"{name} keeps batch normalisation.*has none"):
        build_method(name, {}).network(Network(Plain(), 2))


@pytest.mark.parametrize("name", ["fedbn", "silobn"])
def test_statistics_are_trained_even_where_pretrained_experiments_freeze_them(name):
    options = {"data": {"source": "pacs", "root": "."}, "hold_out": "sketch"}
    assert Experiment(**options).model.normalization == "frozen"
    assert Experiment(**options, method=name).model.normalization == "train"


@pytest.mark.parametrize("name", ["silobn", "fedig", "fedig-a"])
def test_frozen_statistics_are_refused_by_methods_that_need_them(name):
    frozen = Experiment(
        data="digits", hold_out="sketch", method=name, model={"normalization": "frozen"}
    )
    with pytest.raises(ExperimentError, match=rf"{name} .*: set model\.normalization to train"):
        build_method(name, {}).check(frozen)


@pytest.mark.parametrize("name", ["fedbn", "silobn", "fedig"])
@pytest.mark.parametrize("trainable", ["head", "lora"])
def test_normalisation_that_nobody_trains_is_said(name, trainable):
    options = {"data": "digits", "hold_out": "sketch", "method": name}

    def said(embedding):
        fields = {"train": {"trainable": trainable}, "model": {"embedding": embedding}}
        return [d.code for d in build_method(name, {}).diagnostics(Experiment(**options, **fields))]

    assert "fixed-normalisation" in said("none")
    assert "fixed-normalisation" not in said("bottleneck")  # whose normalisation is trained


def test_the_two_cannot_be_combined():
    with pytest.raises(ExperimentError, match="already keeps the statistics"):
        method_class("fedbn+silobn")
