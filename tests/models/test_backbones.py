"""Convolutions on tiny maps as matrix products: the same numbers as PyTorch's own."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from feddg.errors import ExperimentError, WeightsError
from feddg.models.backbones import SmallMapConv2d, build_network, use_small_map_convolutions
from feddg.models.normalization import freeze_statistics, statistics_names
from federations import affine_names


@given(
    size=st.integers(1, 9),
    kernel=st.sampled_from([1, 3, 5]),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    bias=st.booleans(),
    last=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_same_result_and_gradients(size, kernel, stride, padding, bias, last):
    if size + 2 * padding < kernel:
        return
    torch.manual_seed(0)
    # Not 3 channels: of these PyTorch's own backward step writes past its memory for kernels of 1
    # with a stride, channels-last (seen with MALLOC_CHECK_=3), and ends the process now and then.
    plain = nn.Conv2d(8, 5, kernel, stride, padding, bias=bias)
    if last:
        plain = plain.to(memory_format=torch.channels_last)
    fast = copy.deepcopy(plain)
    use_small_map_convolutions(fast)
    assert type(fast) is SmallMapConv2d
    images = torch.randn(2, 8, size, size)
    results = []
    for layer in (plain, fast):
        entry = images.clone().requires_grad_()
        result = layer(entry)
        result.square().sum().backward()
        results.append([result, entry.grad, *(p.grad for p in layer.parameters())])
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(8, 4, 4), (2, 7, 4, 4), (2, 8, 1, 4), (2, 8, 0, 0), (8, 4)])
def test_what_a_convolution_takes_and_refuses_the_faster_one_does_too(shape):
    plain = nn.Conv2d(8, 5, 3)
    fast = copy.deepcopy(plain)
    use_small_map_convolutions(fast)
    images = torch.randn(shape)
    if shape == (8, 4, 4):
        torch.testing.assert_close(fast(images), plain(images))
        return
    with pytest.raises(RuntimeError) as expected:
        plain(images)
    with pytest.raises(RuntimeError) as found:
        fast(images)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_mixed_precision_is_as_near_to_float32_as_pytorchs_own(size):
    torch.manual_seed(0)
    plain = nn.Conv2d(64, 32, 3, 2, 1, bias=False)
    fast = copy.deepcopy(plain)
    use_small_map_convolutions(fast)
    images = torch.randn(4, 64, size, size)
    exact = plain(images)
    with torch.autocast("cpu", torch.bfloat16):
        own, found = plain(images), fast(images)
    assert found.dtype == own.dtype == torch.bfloat16
    assert (found - exact).abs().max() <= 1.5 * (own - exact).abs().max() + 1e-3


def test_a_tiny_result_is_a_matrix_product_and_a_large_one_is_not(monkeypatch):
    layer = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1))
    use_small_map_convolutions(layer)
    used = []
    monkeypatch.setattr(nn.Conv2d, "forward", lambda self, input: used.append(input.shape))
    layer(torch.rand(1, 3, 2, 2))
    assert used == []
    layer[0].forward(torch.rand(1, 3, 8, 8))
    assert used == [(1, 3, 8, 8)]


def test_layers_that_are_no_plain_convolution_stay_as_they_are():
    layers = nn.Sequential(
        nn.Conv2d(4, 4, 3, groups=4),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Conv2d(4, 4, (3, 1)),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    )
    use_small_map_convolutions(layers)
    assert {type(layer) for layer in layers} == {nn.Conv2d}


def test_a_resnets_state_and_embeddings_do_not_change():
    network = build_network("resnet18", 7, weights=None).eval()
    changed = copy.deepcopy(network)
    use_small_map_convolutions(changed)
    assert list(changed.state_dict()) == list(network.state_dict())
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(
            changed.features(images), network.features(images), rtol=1e-4, atol=1e-4
        )


# Backbones, network, normalisation.


@pytest.mark.parametrize(
    ("name", "size", "stages"),
    [("cnn", 32, 3), ("resnet18", 32, 4), ("densenet121", 32, 4), ("mobilenet_v2", 32, 19)],
)
def test_backbones_by_name(name, size, stages):
    network = build_network(name, 5, weights=None).eval()
    images = torch.rand(2, 3, size, size)
    assert network(images).shape == (2, 5)
    assert network.features(images).shape == (2, network.features_dimension)
    assert len(network.stages) == stages


def test_resnet18_parameter_count_with_bottleneck_is_the_papers():
    network = build_network("resnet18", 7, weights=None, embedding="bottleneck")
    assert sum(p.numel() for p in network.parameters()) == 11_310_151


def test_initial_weights_come_from_the_seed_alone():
    torch.manual_seed(1)
    one = build_network("cnn", 3, weights=None, seed=5).state_dict()
    torch.manual_seed(2)
    other = build_network("cnn", 3, weights=None, seed=5).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    third = build_network("cnn", 3, weights=None, seed=6).state_dict()
    assert not torch.equal(one["classifier.weight"], third["classifier.weight"])


def test_images_are_normalised_inside():
    network = build_network("cnn", 3, weights=None)
    images = torch.rand(2, 3, 8, 8)
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    by_hand = torch.stack([(images[:, c] - mean[c]) / std[c] for c in range(3)], 1)
    torch.testing.assert_close(network.normalize(images), by_hand)


def test_all_hundred_normalisation_entries_of_a_resnet18_are_found():
    network = build_network("resnet18", 7, weights=None)
    statistics, affine = statistics_names(network), affine_names(network)
    assert len(statistics) == 20 * 3
    assert len(affine) == 20 * 2
    assert statistics | affine <= network.state_dict().keys()
    assert any("downsample.1" in name for name in statistics)


def test_frozen_statistics_stay_while_affine_parameters_train():
    network = build_network("cnn", 3, weights=None)
    network.train()
    freeze_statistics(network)
    before = {
        n: t.clone() for n, t in network.state_dict().items() if n in statistics_names(network)
    }
    network(torch.rand(4, 3, 16, 16)).sum().backward()
    after = network.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert network.featurizer.blocks[0][2].weight.grad.abs().sum() > 0


def test_pretrained_weights_from_a_file_without_its_head(tmp_path):
    import torchvision

    donor = torchvision.models.resnet18(num_classes=11)
    file = tmp_path / "w.safetensors"
    save_file(
        {name: t.half() if t.is_floating_point() else t for name, t in donor.state_dict().items()},
        file,
    )
    network = build_network("resnet18", 7, weights=str(file))
    trunk = network.featurizer.model
    assert trunk.conv1.weight.dtype == torch.float32
    assert torch.equal(trunk.conv1.weight, donor.conv1.weight.half().float())
    torch.save(donor.state_dict(), tmp_path / "w.pth")
    again = build_network("resnet18", 7, weights=str(tmp_path / "w.pth"))
    assert torch.equal(again.featurizer.model.conv1.weight, donor.conv1.weight)


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path):
    import torchvision

    file = tmp_path / "w.safetensors"
    state = torchvision.models.resnet18().state_dict()
    state["conv1.weight"] = torch.zeros(64, 3, 5, 5)
    save_file(state, file)
    with pytest.raises(
        WeightsError, match=r"w\.safetensors.*conv1\.weight has shape \(64, 3, 5, 5\)"
    ):
        build_network("resnet18", 7, weights=str(file))
    with pytest.raises(WeightsError, match="does not fit backbone 'cnn'"):
        build_network("cnn", 7, weights=str(file))
    with pytest.raises(WeightsError, match="does not exist"):
        build_network("cnn", 7, weights=str(tmp_path / "absent.pth"))
    for name, content in (("t.pth", b"hello"), ("t.safetensors", b"hello"), ("e.pth", b"")):
        (tmp_path / name).write_bytes(content)
        kind = "safetensors file" if name.endswith("rs") else "PyTorch state dict"
        said = (
            rf"{name} is not a plain {kind}: .*; save model.state_dict\(\) alone, .*another file$"
        )
        with pytest.raises(WeightsError, match=said):
            build_network("cnn", 7, weights=str(tmp_path / name))


def test_a_pickled_object_is_never_loaded(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "module.pth")
    with pytest.raises(WeightsError, match="state dict"):
        build_network("cnn", 7, weights=str(tmp_path / "module.pth"))


def test_unknown_backbone_suggests_the_nearest():
    with pytest.raises(ExperimentError, match="did you mean 'resnet18'"):
        build_network("resnet_18", 7, weights=None)
