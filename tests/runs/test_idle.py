"""What is said of layers that do less than their names promise."""

import pytest

from feddg.experiment import checked_settings
from feddg.models.backbones import build_network
from feddg.models.normalization import batch_norms
from feddg.runs.idle import about_normalization


@pytest.mark.parametrize(
    ("backbone", "embedding", "model", "batch_size", "said"),
    [
        ("cnn", "bottleneck", {"normalization": "frozen", "weights": "w"}, 32, "embedding.1"),
        ("cnn", "none", {"normalization": "frozen", "weights": "w"}, 1, None),
        ("cnn", "bottleneck", {"normalization": "train", "weights": "w"}, 32, None),
        ("cnn", "bottleneck", {"normalization": "frozen", "weights": None}, 32, None),
        ("cnn", "none", {"normalization": "train"}, 1, "Raise train.batch_size"),
        ("cnn_gn", "none", {"normalization": "train"}, 1, None),
    ],
)
def test_normalisation_that_nobody_trains_is_said(backbone, embedding, model, batch_size, said):
    network = build_network(backbone, 3, weights=None, embedding=embedding, seed=0)
    for layer in batch_norms(network.featurizer).values():
        layer.running_mean.fill_(0.5)  # as pretrained weights would
    settings = checked_settings({"model": model, "train": {"batch_size": batch_size}})
    found = [str(each) for each in about_normalization(network, settings)]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
    assert "featurizer" not in " ".join(found)
