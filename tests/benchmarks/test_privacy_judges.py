"""The judges of reconstructions against independent calculations."""

import importlib.util
import sys
from pathlib import Path

import numpy
import pytest
import torch
from scipy.linalg import sqrtm

from extras import needs
from feddg.errors import WeightsError
from feddg.rng import stream

pytestmark = needs("torchmetrics")
FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "privacy" / "judges.py"
spec = importlib.util.spec_from_file_location("privacy_judges", FILE)
judges = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = judges
spec.loader.exec_module(judges)


def noise(*shape, name="images"):
    return torch.rand(*shape, generator=stream(0, name))


def test_frechet_distance_is_that_of_two_gaussians():
    one = torch.randn(300, 4, generator=stream(0, "one"), dtype=torch.float64)
    other = torch.randn(300, 4, generator=stream(0, "other"), dtype=torch.float64) * 2 + 1
    a, b = (numpy.cov(part.numpy().T) for part in (one, other))
    expected = (one.mean(0) - other.mean(0)).square().sum().item()
    expected += numpy.trace(a + b - 2 * sqrtm(a @ b).real)
    assert judges.frechet_distance(one, other) == pytest.approx(expected, rel=1e-6)


def test_kernel_distance_is_unbiased_and_sees_a_shift():
    one, other = (torch.randn(200, 6, generator=stream(0, n)) for n in ("one", "other"))
    assert abs(judges.kernel_distance(one, other, 0)) < 0.1
    assert judges.kernel_distance(one, other + 1, 0) > 1
    assert judges.kernel_distance(one, other, 0) == judges.kernel_distance(one, other, 0)


def test_class_score_lies_between_one_and_the_number_of_classes():
    assert judges.class_score(torch.zeros(10, 4)) == pytest.approx(1)
    assert judges.class_score(50 * torch.eye(4).repeat(5, 1)) == pytest.approx(4)


def test_few_images_have_no_distance_between_collections():
    judge, images = judges.compact_extractor(), noise(16, 3, 16, 16)
    assert judge.scores(images[:4], images[4:8], 0).keys() == {"PD"}
    scores = judge.scores(images, images.flip(0), 0)
    assert scores.keys() == {"PD", "FD", "KD"}
    assert scores["FD"] == pytest.approx(0, abs=1e-6)


def test_a_backbone_from_a_file_judges(tmp_path):
    import torchvision
    from safetensors.torch import save_file

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        state = torchvision.models.squeezenet1_0(num_classes=5).state_dict()
        resnet = torchvision.models.resnet18(num_classes=5).state_dict()
    save_file(resnet, tmp_path / "weights.safetensors")
    extractor = judges.read_extractor(f"resnet18={tmp_path / 'weights.safetensors'}")
    images = noise(8, 3, 32, 32)
    scores = extractor.scores(images, images.flip(0), 0)
    assert scores.keys() == {"PD", "FD", "KD", "score"}
    assert scores["score"] >= 1
    assert judges.perceptual_distances(extractor, images, images).abs().max() < 1e-6
    assert state  # another architecture does not fit
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(WeightsError, match="does not fit"):
        judges.read_extractor(f"resnet18={tmp_path / 'other.safetensors'}")
    with pytest.raises(WeightsError, match="needs its weights"):
        judges.read_extractor("resnet18")
