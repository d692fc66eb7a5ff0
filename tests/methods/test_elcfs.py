"""ELCFS: the spectrum by explicit sums, the episode by hand, and its limits."""

import cmath
import math
from dataclasses import replace

import numpy
import pytest
import torch

from feddg.errors import ExperimentError
from feddg.messages import Message
from feddg.methods.composition import build_method, method_class
from feddg.methods.elcfs import low_frequencies, mix_amplitudes, spectrum
from feddg.settings import ExperimentSettings
from federations import federation, same


def images(count=2, height=6, width=7):
    rng = torch.Generator().manual_seed(4)
    return 0.3 + 0.4 * torch.rand(count, 3, height, width, generator=rng)


def coefficient(channel, row, column):
    """One Fourier coefficient, divided by the number of pixels, as the sum it is."""
    height, width = channel.shape
    return sum(
        channel[y, x] * cmath.exp(-2j * math.pi * (row * y / height + column * x / width))
        for y in range(height)
        for x in range(width)
    ) / (height * width)


def test_the_window_holds_the_lowest_frequencies_lowest_in_the_middle():
    x = images(1)
    window = low_frequencies(spectrum(x), 1)[0, 2]
    channel = x[0, 2].double().numpy()
    for i, row in enumerate((-1, 0, 1)):
        for j, column in enumerate((-1, 0, 1)):
            assert complex(window[i, j]) == pytest.approx(
                coefficient(channel, row, column), abs=1e-6
            )
    mean = low_frequencies(spectrum(x), 0)
    torch.testing.assert_close(mean.real.squeeze(), x.mean((2, 3)).squeeze())
    assert low_frequencies(spectrum(x), 9).shape[-2:] == (5, 5)  # no frequency twice


def test_amplitudes_move_by_the_share_and_phases_and_high_frequencies_stay():
    x, other, shares = images(), images(2) * 0.9 + 0.02, torch.tensor([0.25, 1.0])
    foreign = low_frequencies(spectrum(other), 1).abs()
    foreign[:, :, 1, 1] = x.mean((2, 3)) + 0.01  # keeps the result inside [0, 1]
    before, after = spectrum(x), spectrum(mix_amplitudes(x, foreign, shares))
    own, new = low_frequencies(before, 1), low_frequencies(after, 1)
    share = shares[:, None, None, None]
    torch.testing.assert_close(new.abs(), (1 - share) * own.abs() + share * foreign)
    torch.testing.assert_close(new / new.abs(), own / own.abs(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after[..., 2:5, :], before[..., 2:5, :], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(after[..., 2:6], before[..., 2:6], rtol=1e-4, atol=1e-6)


def test_share_zero_and_the_own_amplitudes_change_nothing():
    x = images()
    own = low_frequencies(spectrum(x), 1).abs()
    torch.testing.assert_close(mix_amplitudes(x, own, torch.tensor([0.5, 1.0])), x)
    torch.testing.assert_close(mix_amplitudes(x, torch.rand(2, 3, 3, 3), torch.zeros(2)), x)


def test_an_image_of_constant_amplitude():
    """A single bright pixel has the same amplitude at every frequency; so it can be mixed exactly.

    Lowering the amplitude inside the window by c leaves the pixel minus c times the window's own
    image, the sum of its cosines around the pixel.
    """
    side, y0, x0 = 8, 3, 5
    x = torch.zeros(1, 3, side, side)
    x[..., y0, x0] = 0.5
    x += 0.4  # the constant only changes the mean, which the foreign window shares
    amplitude = 0.5 / side**2
    foreign = torch.full((1, 3, 3, 3), amplitude)
    foreign[..., 1, 1] += 0.4
    torch.testing.assert_close(mix_amplitudes(x, foreign, torch.ones(1)), x)
    lower = foreign - 0.5 * amplitude
    lower[..., 1, 1] = foreign[..., 1, 1]
    y, z = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    waves = sum(
        torch.cos(2 * math.pi * (row * (y - y0) + column * (z - x0)) / side)
        for row in (-1, 0, 1)
        for column in (-1, 0, 1)
        if (row, column) != (0, 0)
    )
    expected = x - 0.5 * amplitude * waves
    torch.testing.assert_close(mix_amplitudes(x, lower, torch.ones(1)), expected)


def test_the_mean_alone_makes_a_constant_image_take_the_foreign_mean():
    x = torch.full((1, 3, 5, 5), 0.2)
    foreign = torch.tensor([0.3, 0.6, 1.7]).view(1, 3, 1, 1)
    result = mix_amplitudes(x, foreign, torch.tensor([0.5]))
    expected = torch.tensor([0.25, 0.4, 0.95]).view(1, 3, 1, 1).expand_as(x)
    torch.testing.assert_close(result, expected)
    assert float(mix_amplitudes(x, foreign, torch.ones(1)).max()) == 1.0  # clamped


def test_the_bank_holds_an_eighth_of_every_clients_images_and_nothing_else():
    small = federation("elcfs", sizes=(17, 3, 8), settings={"window": 0.07})
    small.server.setup()
    bank = small.server.state.context.tensors
    assert bank["amplitude_owners"].tolist() == [0, 0, 0, 1, 2]
    assert bank["amplitudes"].shape == (5, 3, 3, 3)
    drawn = torch.randperm(17, generator=small.client(0, round=0).stream("elcfs"))[:3]
    image = small.pixels.gather(drawn)[1].double().numpy() / 255
    expected = abs(coefficient(image[2], 1, -1))
    assert float(bank["amplitudes"][1, 2, 2, 0]) == pytest.approx(expected, rel=1e-4)
    up = [row for row in small.ledger if row.get("direction") == "up"]
    assert [row["bytes"] for row in up] == [4 * 27 * count for count in (3, 1, 1)]


def ready(settings, sizes=(6, 4), **options):
    small = federation("elcfs", settings=settings, sizes=sizes, freeze=True, **options)
    small.server.setup()
    client = small.client(context=small.server.state.context)
    return small, client, client.batch(torch.arange(sizes[0]), client.stream("augment"))


def test_only_other_clients_amplitudes_are_drawn_and_a_lone_client_draws_its_own():
    bank = torch.tensor([0.9, 0.9, 0.1])[:, None, None, None].expand(3, 3, 1, 1)
    owners = torch.tensor([0, 0, 1])
    small, client, batch = ready({"window": 0.0, "mixing": "full"})
    client.context = Message({"amplitudes": bank, "amplitude_owners": owners})
    mixed = small.method._mixed(client, replace(batch, images=batch.images * 0.1 + 0.4, drawn={}))
    assert mixed.mean((2, 3)) == pytest.approx(numpy.full((6, 3), 0.1), abs=0.02)
    client.context = Message({"amplitudes": bank[:2], "amplitude_owners": owners[:2]})
    mixed = small.method._mixed(client, replace(batch, images=batch.images * 0.1 + 0.4, drawn={}))
    assert mixed.mean((2, 3)) == pytest.approx(numpy.full((6, 3), 0.9), abs=0.02)


@pytest.mark.parametrize("order", ["first", "second"])
def test_the_episode_is_a_step_on_the_own_images_then_the_loss_on_the_mixed(order):
    settings = {"meta_step": 0.5, "clip": 0.02, "window": 0.07, "meta_order": order}
    small, client, batch = ready(settings)
    network, head = small.network, small.network.classifier
    for parameter in network.featurizer.parameters():
        parameter.requires_grad_(False)
    terms = small.method.loss(client, batch)
    with torch.no_grad():
        z = network.features(batch.images).double()
        mixed = network.features(small.method._mixed(client, batch)).double()
    w, b = (p.detach().double().requires_grad_() for p in (head.weight, head.bias))
    one_hot = torch.nn.functional.one_hot(batch.labels, 3).double()

    def losses():
        error = (z @ w.T + b).softmax(1) - one_hot  # the gradient of cross-entropy by the logits
        step_w, step_b = error.T @ z / len(z), error.mean(0)
        if order == "first":
            step_w, step_b = step_w.detach(), step_b.detach()
        logits = mixed @ (w - 0.5 * step_w.clamp(-0.02, 0.02)).T
        logits = logits + b - 0.5 * step_b.clamp(-0.02, 0.02)
        inner = -((z @ w.T + b).log_softmax(1) * one_hot).sum(1).mean()
        return inner, -(logits.log_softmax(1) * one_hot).sum(1).mean()

    inner, outer = losses()
    assert terms.keys() == {"cross_entropy", "episodic_cross_entropy"}
    torch.testing.assert_close(terms["cross_entropy"].double(), inner, rtol=1e-5, atol=0)
    torch.testing.assert_close(terms["episodic_cross_entropy"].double(), outer, rtol=1e-5, atol=0)
    expected = torch.autograd.grad(inner + outer, (w, b))
    got = torch.autograd.grad(sum(terms.values()), (head.weight, head.bias))
    for one, other in zip(got, expected):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-6)


def test_the_order_matters_and_the_network_keeps_its_parameters():
    gradients = {}
    for order in ("first", "second"):
        small, client, batch = ready({"meta_step": 0.5, "meta_order": order})
        before = {n: p.clone() for n, p in small.network.state_dict().items()}
        total = sum(small.method.loss(client, batch).values())
        gradients[order] = torch.autograd.grad(total, list(small.network.parameters()))
        assert same(before, small.network.state_dict())
    assert not all(torch.equal(a, b) for a, b in zip(gradients["first"], gradients["second"]))


def test_no_trial_step_and_no_mixing_doubles_fedavgs_loss():
    small, client, batch = ready({"meta_step": 0.0, "window": 0.0})
    own = low_frequencies(spectrum(batch.images), 0).abs()
    client.context = Message({"amplitudes": own[:1], "amplitude_owners": torch.tensor([1])})
    first = torch.tensor([0])
    alike = batch.rows(first, first)
    terms = small.method.loss(client, alike)
    torch.testing.assert_close(terms["cross_entropy"], terms["episodic_cross_entropy"])


def test_its_other_name_and_bad_settings():
    assert method_class("feddg") is method_class("elcfs")
    with pytest.raises(ExperimentError, match="window"):
        build_method("elcfs", {"window": 0.6})


def test_a_window_that_holds_the_mean_colour_alone_is_said():
    for size, window, advised in [(64, 0.01, 0.05), (99, 0.01, 0.04), (100, 0.01, 0), (64, 0, 0)]:
        method = build_method("elcfs", {"window": window})
        settings = ExperimentSettings(data={"image_size": size})
        advice = [one.advice for one in method.diagnostics(settings)]
        assert bool(advice) == bool(advised)
        assert all(f"Set method.window to {advised:g}," in text for text in advice)
