"""The network around a backbone."""

import torch

from feddg.models.backbones import build_network


def test_resnet18_parameter_count_with_bottleneck_is_the_papers():
    network = build_network("resnet18", 7, weights=None, embedding="bottleneck")
    assert sum(p.numel() for p in network.parameters()) == 11_310_151


def test_images_are_normalised_inside():
    network = build_network("cnn", 3, weights=None)
    images = torch.rand(2, 3, 8, 8)
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    by_hand = torch.stack([(images[:, c] - mean[c]) / std[c] for c in range(3)], 1)
    torch.testing.assert_close(network.normalize(images), by_hand)
