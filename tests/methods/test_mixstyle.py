"""MixStyle against the paper's equations written out, and its limits."""

import copy

import numpy
import pytest
import torch

from feddg.errors import ExperimentError
from feddg.methods.composition import build_method
from feddg.methods.mixstyle import StyleMixer, mixed, mixers
from feddg.models.backbones import build_network
from feddg.settings import TrainSettings
from federations import federation, same


def maps(count=5, channels=3, side=4):
    return torch.randn(count, channels, side, side, generator=torch.Generator().manual_seed(1)) + 2


def mixed_by_hand(maps, partners, shares):
    """Equations 3 to 6, one image and channel at a time, in double precision."""
    x = maps.double().numpy()
    out = numpy.empty_like(x)
    for i, (j, share) in enumerate(zip(partners, shares)):
        for c in range(x.shape[1]):
            own, other = x[i, c], x[j, c]
            deviation = [numpy.sqrt(m.var() + 1e-6) for m in (own, other)]
            mean = share * own.mean() + (1 - share) * other.mean()
            scale = share * deviation[0] + (1 - share) * deviation[1]
            out[i, c] = (own - own.mean()) / deviation[0] * scale + mean
    return torch.from_numpy(out)


def test_mixing_is_the_papers_equations():
    partners, shares = [2, 0, 4, 3, 1], [0.0, 0.25, 0.5, 0.9, 1.0]
    result = mixed(maps(), torch.tensor(partners), torch.tensor(shares))
    expected = mixed_by_hand(maps(), partners, shares)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


def test_full_share_and_own_partner_change_nothing_and_none_takes_the_partners_moments():
    x, partners = maps(), torch.tensor([1, 2, 3, 4, 0])
    torch.testing.assert_close(mixed(x, partners, torch.ones(5)), x)
    torch.testing.assert_close(mixed(x, torch.arange(5), torch.full((5,), 0.3)), x)
    swapped = mixed(x, partners, torch.zeros(5))
    torch.testing.assert_close(swapped.mean((2, 3)), x[partners].mean((2, 3)))
    torch.testing.assert_close(swapped.std((2, 3)), x[partners].std((2, 3)), rtol=1e-4, atol=1e-4)


def test_moments_are_constants_of_the_gradient():
    x = maps().requires_grad_()
    partners, shares = torch.tensor([1, 2, 3, 4, 0]), torch.full((5,), 0.3)
    mixed(x, partners, shares).sum().backward()
    deviation = (x.detach().var((2, 3), correction=0) + 1e-6).sqrt()
    scale = (0.3 * deviation + 0.7 * deviation[partners]) / deviation
    torch.testing.assert_close(x.grad, scale[:, :, None, None].expand_as(x))


def test_a_mixer_draws_permutation_and_beta_from_its_own_generator():
    mixer = StyleMixer(1.0, 0.1)
    mixer.draw_from(numpy.random.default_rng(3))
    result = mixer.after_stage(mixer, (), maps())
    again = numpy.random.default_rng(3)
    again.random()
    shares, partners = again.beta(0.1, 0.1, 5), again.permutation(5)
    expected = mixed_by_hand(maps(), partners, shares)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_share_of_mixing_passes_is_the_probability():
    mixer = StyleMixer(0.3, 0.1)
    mixer.draw_from(numpy.random.default_rng(0))
    tiny = maps(2, 1, 1)
    count = sum(mixer.after_stage(mixer, (), tiny) is not None for _ in range(2000))
    assert 520 < count < 680  # 600 +- 4 standard deviations


@pytest.mark.parametrize("state", ["eval", "no generator", "batch of one"])
def test_it_leaves_maps_alone(state):
    mixer = StyleMixer(1.0, 0.1)
    if state != "no generator":
        mixer.draw_from(numpy.random.default_rng(0))
    mixer.train(state != "eval")
    assert mixer.after_stage(mixer, (), maps(1 if state == "batch of one" else 4)) is None


def test_maps_of_one_pixel_and_constant_maps_stay_finite():
    for x in (maps(4, 2, 1), torch.zeros(4, 2, 3, 3)):
        assert mixed(x, torch.tensor([1, 0, 3, 2]), torch.full((4,), 0.5)).isfinite().all()


def test_probability_zero_is_fedavg_bit_for_bit_and_one_is_not():
    plain = federation().run(1)
    assert same(federation("mixstyle", settings={"mix_probability": 0}).run(1), plain)
    assert not same(federation("mixstyle", settings={"mix_probability": 1}).run(1), plain)


def test_it_adds_no_names_and_the_network_outside_training_is_fedavgs():
    plain = build_network("cnn", 3, weights=None, seed=0)
    network = build_method("mixstyle", {}).network(build_network("cnn", 3, weights=None, seed=0))
    assert network.state_dict().keys() == plain.state_dict().keys()
    images = torch.rand(4, 3, 16, 16)
    assert torch.equal(network.eval()(images), plain.eval()(images))


def test_a_copied_network_mixes_with_its_own_mixers():
    network = build_method("mixstyle", {"mix_probability": 1}).network(
        build_network("cnn", 3, weights=None)
    )
    twin = copy.deepcopy(network).train()
    for mixer in mixers(network):
        mixer.draw_from(numpy.random.default_rng(0))
    images = torch.rand(4, 3, 16, 16)
    stage, copied = network.stages[0], twin.stages[0]
    hidden = torch.rand(4, 3, 16, 16)
    assert torch.equal(copied(hidden), torch.nn.Sequential.forward(copied, hidden))
    assert not torch.equal(stage(hidden), torch.nn.Sequential.forward(stage, hidden))
    assert network.train()(images).isfinite().all()


def test_with_a_fixed_featurizer_its_passes_are_mixed_and_nothing_of_them_is_cached(tmp_path):
    heads = {"train": TrainSettings(rounds=2, batch_size=4, trainable="head"), "cache": tmp_path}
    always = {"mix_probability": 1}
    mixing = federation("mixstyle", settings=always, **heads).run()
    assert not list(tmp_path.rglob("*features*"))
    plain = federation(**heads).run()
    assert list(tmp_path.rglob("*features*"))
    assert same(plain, federation(**heads | {"cache": None}).run())
    assert not same(plain, mixing)
    assert same(federation("mixstyle", settings=always, **heads).run(), mixing)


def test_a_backbone_without_enough_stages_is_refused_before_training():
    with pytest.raises(ExperimentError, match=r"4 stages, but this backbone has 3"):
        federation("mixstyle", settings={"mix_stages": 4})
    with pytest.raises(ExperimentError, match="mix_alpha"):
        build_method("mixstyle", {"mix_alpha": 0})
