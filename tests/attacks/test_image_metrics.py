"""Metrics against independent calculations, and the names they may carry."""

import hashlib
import warnings

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.linalg import sqrtm

from feddg.attacks import image_metrics
from feddg.attacks.image_metrics import (
    Collection,
    Judges,
    class_score,
    clustered_mean,
    collection_scores,
    compact_extractor,
    frechet_distance,
    kernel_distance,
    perceptual_distances,
    perceptual_points,
    psnr,
    read_extractor,
    read_lpips,
    retrieval,
    ssim,
)
from feddg.errors import WeightsError
from feddg.rng import stream

torchmetrics = pytest.importorskip("torchmetrics")


def scored(one, other, extractor):
    return collection_scores(
        *(Collection.of(part, extractor) for part in (one, other)), extractor, seed=0
    )


def found_by(one, other, groups):
    eye = compact_extractor()
    return retrieval(perceptual_points(eye, one), perceptual_points(eye, other), groups)


def noise(*shape, name="images"):
    return torch.rand(*shape, generator=stream(0, name))


def test_psnr_and_ssim_of_pairs():
    one, other = noise(3, 3, 16, 16), noise(3, 3, 16, 16, name="others")
    expected = -10 * torch.log10((one - other).square().flatten(1).mean(1))
    assert torch.allclose(psnr(one, other), expected, atol=1e-4)
    assert torch.allclose(psnr(one, one), torch.full((3,), 100.0))
    assert torch.allclose(ssim(one, one), torch.ones(3))
    assert (ssim(one, other) < 0.2).all()


def test_frechet_distance_is_that_of_two_gaussians():
    one = torch.randn(300, 4, generator=stream(0, "one"), dtype=torch.float64)
    other = torch.randn(300, 4, generator=stream(0, "other"), dtype=torch.float64) * 2 + 1
    a, b = (numpy.cov(part.numpy().T) for part in (one, other))
    expected = (one.mean(0) - other.mean(0)).square().sum().item()
    expected += numpy.trace(a + b - 2 * sqrtm(a @ b).real)
    assert frechet_distance(one, other) == pytest.approx(expected, rel=1e-6)


def test_kernel_distance_is_unbiased_and_sees_a_shift():
    one, other = (torch.randn(200, 6, generator=stream(0, n)) for n in ("one", "other"))
    assert abs(kernel_distance(one, other, 0)) < 0.1
    assert kernel_distance(one, other + 1, 0) > 1
    assert kernel_distance(one, other, 0) == kernel_distance(one, other, 0)


def test_class_score_lies_between_one_and_the_number_of_classes():
    assert class_score(torch.zeros(10, 4)) == pytest.approx(1)
    assert class_score(50 * torch.eye(4).repeat(5, 1)) == pytest.approx(4)


def test_collections_must_be_of_one_size():
    with pytest.raises(ValueError, match="both sides as many"):
        scored(noise(9, 3, 16, 16), noise(8, 3, 16, 16), compact_extractor())
    assert scored(noise(4, 3, 16, 16), noise(4, 3, 16, 16), compact_extractor()) == {}


def test_unpublished_networks_stand_in_the_names():
    images = noise(16, 3, 16, 16)
    scores = scored(images, images.flip(0), compact_extractor())
    assert set(scores) == {"FD[compact]", "KD[compact]"}
    assert scores["FD[compact]"] == pytest.approx(0, abs=1e-6)
    assert Judges().perceptual_name == "PD[compact]"


def test_a_backbone_from_a_file_judges_under_its_name(tmp_path):
    import torchvision
    from safetensors.torch import save_file

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        state = torchvision.models.squeezenet1_0(num_classes=5).state_dict()
        resnet = torchvision.models.resnet18(num_classes=5).state_dict()
    save_file(resnet, tmp_path / "weights.safetensors")
    extractor = read_extractor(f"resnet18={tmp_path / 'weights.safetensors'}")
    images = noise(8, 3, 32, 32)
    scores = scored(images, images.flip(0), extractor)
    assert set(scores) == {"FD[resnet18]", "KD[resnet18]", "score[resnet18]"}
    assert scores["score[resnet18]"] >= 1
    assert Judges(extractor).perceptual_name == "PD[resnet18]"
    assert Judges(extractor).perceptual(images, images).abs().max() < 1e-6
    assert state  # another architecture does not fit
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(WeightsError, match="does not fit"):
        read_extractor(f"resnet18={tmp_path / 'other.safetensors'}")


@pytest.mark.parametrize("spelling", ["inception", "resnet18"])
def test_nothing_is_downloaded(spelling):
    with pytest.raises(WeightsError, match="needs its weights"):
        read_extractor(spelling)


def test_published_names_are_for_published_weights(tmp_path):
    file = tmp_path / "inception.pth"
    file.write_bytes(b"something else")
    with pytest.raises(WeightsError, match="is not the published file"):
        read_extractor(f"inception={file}")
    with pytest.raises(WeightsError, match="is not the published file"):
        read_lpips(f"alex={file}")
    with pytest.raises(WeightsError, match="LPIPS needs its trunk"):
        read_lpips("compact")


def test_lpips_is_that_of_its_package_once_the_trunk_is_there(tmp_path, monkeypatch):
    lpips = pytest.importorskip("lpips")
    import torchvision

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        trunk = torchvision.models.squeezenet1_1()
        network = lpips.LPIPS(net="squeeze", pnet_rand=True, verbose=False).eval()
    file = tmp_path / "squeeze.pth"
    torch.save(trunk.state_dict(), file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:8]
    monkeypatch.setitem(image_metrics.PUBLISHED, "squeeze", digest)
    for slice_name, part in network.net.named_children():
        if slice_name.startswith("slice"):
            for number, layer in part.named_children():
                layer.load_state_dict(trunk.features[int(number)].state_dict())
    one, other = noise(2, 3, 32, 32), noise(2, 3, 32, 32, name="others")
    with torch.inference_mode():
        expected = network(one, other, normalize=True).flatten()
    work = read_lpips(f"squeeze={file}")
    assert torch.allclose(work(one, other), expected)
    assert Judges(lpips=work).perceptual_name == "LPIPS"


def test_perceptual_points_are_as_far_apart_as_the_images():
    eye = compact_extractor()
    one, other = noise(3, 3, 16, 16), noise(3, 3, 16, 16, name="others")
    with torch.inference_mode():
        expected = perceptual_distances(eye, one, other)
    points = [perceptual_points(eye, part) for part in (one, other)]
    assert torch.allclose((points[0] - points[1]).square().sum(1), expected, rtol=1e-4)


def test_retrieval_of_the_images_themselves_of_others_and_of_ties():
    images = noise(20, 3, 16, 16)
    groups = torch.arange(20) // 10
    found = found_by(images, images, groups)
    assert found.ranks.max() == 0
    assert found.first == 1
    assert found.first_chance == pytest.approx(0.1)
    same = images[:1].expand(20, -1, -1, -1)
    tied = found_by(same, same, groups)
    assert tied.ranks.tolist() == [0.5] * 20
    assert tied.first == pytest.approx(0.1), "what cannot be told apart is found by chance"
    alone = found_by(images[:1], images[:1], groups[:1])
    assert alone.ranks.isnan().all()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-5, 5, width=32)), min_size=2, max_size=30))
def test_clustered_means_are_means_of_cluster_means(pairs):
    clusters, values = (torch.tensor(part) for part in zip(*pairs))
    found = clustered_mean(values, clusters)
    means = [values[clusters == c].double().mean().item() for c in clusters.unique()]
    assert found.mean == pytest.approx(numpy.mean(means), abs=1e-5)
    if len(means) > 1 and numpy.std(means) > 1e-6:
        low, high = stats.t.interval(0.95, len(means) - 1, numpy.mean(means), stats.sem(means))
        assert (found.low, found.high) == (
            pytest.approx(low, abs=1e-4),
            pytest.approx(high, abs=1e-4),
        )
