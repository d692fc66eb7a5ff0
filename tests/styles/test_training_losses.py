"""What a codec is trained for, against a calculation by hand."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from feddg.rng import stream
from feddg.styles.codec import adain, load_codec
from feddg.styles.codecs.compact import CompactCodec
from feddg.styles.training_images import TrainingBatch
from feddg.styles.training_losses import TERMS, Critic, LossNetwork, judge, moments, pooled
from style_images import random_unit_images as images


def batch(contents: Tensor, styles: Tensor, strength: Sequence[float], **changed) -> TrainingBatch:
    count = len(contents)
    fields = {
        "counterparts": contents,
        "known": torch.zeros(count, 1, 1, 1),
        "strength": torch.tensor(strength, dtype=torch.float32).reshape(-1, 1, 1),
        "pool": 1,
    }
    return TrainingBatch(contents, styles, **(fields | changed))


def answering(answer: Tensor) -> CompactCodec:
    """A codec whose decoder gives the same answer whatever it is asked."""
    return CompactCodec(load_codec().encoder, nn.Sequential(_Answer(answer)))


def terms(codec, network, given: TrainingBatch) -> dict[str, float]:
    return {name: t.item() for name, t in zip(TERMS, judge(codec, network, None, given).terms)}


@pytest.fixture
def network() -> LossNetwork:
    return LossNetwork(load_codec().encoder, images(9, count=4))


def test_loss_terms_are_zero_for_a_perfect_codec(network: LossNetwork) -> None:
    """If decoding gave the original back at strength 0, no term would remain."""
    contents = images(0)
    found = terms(answering(contents), network, batch(contents, images(1), [0, 0]))
    assert found == pytest.approx(dict.fromkeys(TERMS, 0), abs=1e-8)


def test_loss_terms_by_hand(network: LossNetwork) -> None:
    contents, styles, answer, counterparts = images(1), images(2) * 0.5, images(3), images(4)
    given = batch(
        contents,
        styles,
        [0.0, 1.0],
        counterparts=counterparts,
        known=torch.ones(2, 1, 1, 1),
    )
    found = terms(answering(answer), network, given)
    # The first image is to come back, the second to take on the second style.
    layers, gains = load_codec().encoder, []
    examples = images(9, count=4)
    expected = dict.fromkeys(TERMS, 0.0)
    for depth in (3, 10):  # up to the ReLU of the first convolution of both scales
        gain = layers[:depth](examples).var((0, 2, 3)).mean().sqrt()
        gains.append(gain.item())
        wanted = [layers[:depth](image) / gain for image in (contents[:1], styles[1:])]
        reached = layers[:depth](answer) / gain
        targets = torch.stack([_style(features) for features in wanted])
        styles_found = torch.stack([_style(features[None]) for features in reached])
        expected["style"] += ((styles_found - targets) ** 2).mean().item()
        before = layers[:depth](contents[:1])[0] / gain
        expected["reconstruction"] += 0.1 * ((reached[0] - before) ** 2).mean().item()
        after = layers[:depth](counterparts[1:])[0] / gain
        expected["counterpart"] += 0.1 * ((reached[1] - after) ** 2).mean().item()
    own = layers[:10](contents) / gain
    target = torch.cat([own[:1], adain(own[1:], targets[1])])
    expected["content"] = ((reached - target) ** 2).mean().item()
    expected["reconstruction"] += (answer[0] - contents[0]).abs().mean().item()
    expected["counterpart"] += (answer[1] - counterparts[1]).abs().mean().item()
    assert found == pytest.approx(expected, rel=1e-3)


def test_overshoot_is_judged_clamped_and_costs(network: LossNetwork) -> None:
    contents = torch.ones(2, 3, 32, 32)
    answer = contents.clone()
    answer[0] += 0.5
    given = batch(contents, contents, [1.0, 1.0])
    found = terms(answering(answer), network, given)
    inside = terms(answering(contents), network, given)
    assert found.pop("overshoot") == pytest.approx(0.25)
    assert inside.pop("overshoot") == 0
    assert found == pytest.approx(inside, abs=1e-8)


def test_a_critic_learns_to_tell_real_from_redrawn(network: LossNetwork) -> None:
    """On answers that are plainly wrong its loss falls, and the codec is told so."""
    critic = Critic(network.widths, seed=0)
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    codec, given = answering(torch.zeros(2, 3, 32, 32)), batch(images(1), images(2), [1.0, 1.0])
    heard = []
    for _ in range(30):
        judgement = judge(codec, network, critic, given)
        assert judgement.critic is not None
        optimizer.zero_grad()
        judgement.critic.backward()
        optimizer.step()
        heard.append((judgement.critic.item(), judgement.terms[-1].item()))
    assert heard[-1][0] < 0.1 < heard[0][0]
    assert heard[-1][1] > heard[0][1]
    weak = batch(images(1), images(2), [0.0, 0.5])
    assert judge(codec, network, critic, weak).critic is None


def test_pooled_moments_are_those_of_the_neighbours_as_one() -> None:
    features = torch.rand(6, 4, 5, 5, generator=stream(0, "features"))
    together = pooled(moments(features), 3)
    assert together.shape == (6, 2, 4)
    for index, row in enumerate(together):
        start = 3 * (index // 3)
        torch.testing.assert_close(row, _style(features[start : start + 3]), rtol=1e-3, atol=1e-4)
    assert torch.allclose(pooled(moments(features), 1), moments(features), atol=1e-6)


class _Answer(nn.Module):
    """A decoder that gives the same answer whatever it is asked."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, features: Tensor) -> Tensor:
        return self.answer


def _style(features: Tensor) -> Tensor:
    """The moments of all positions of all maps, ``(2, C)``."""
    rows = features.movedim(1, 0).flatten(1)
    return torch.stack([rows.mean(1), (rows.var(1, correction=0) + 1e-5).sqrt()])
