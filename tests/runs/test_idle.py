"""What is said of layers that do less than their names promise."""

import pytest

from feddg.experiment import checked_settings
from feddg.models.backbones import build_network
from feddg.models.normalization import batch_norms
from feddg.runs.idle import about_normalization


@pytest.mark.parametrize(
    ("embedding", "model", "said"),
    [
        ("bottleneck", {"normalization": "frozen", "weights": "w"}, "embedding.1"),
        ("none", {"normalization": "frozen", "weights": "w"}, None),
        ("bottleneck", {"normalization": "train", "weights": "w"}, None),
        ("bottleneck", {"normalization": "frozen", "weights": None}, None),
    ],
)
def test_normalisation_that_nobody_trains_is_said(embedding, model, said):
    network = build_network("cnn", 3, weights=None, embedding=embedding, seed=0)
    for layer in batch_norms(network.featurizer).values():
        layer.running_mean.fill_(0.5)  # as pretrained weights would
    settings = checked_settings({"model": model})
    found = [str(each) for each in about_normalization(network, settings)]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
    assert "featurizer" not in " ".join(found)
