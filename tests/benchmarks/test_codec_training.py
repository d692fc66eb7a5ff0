"""Training a codec, interrupted or not."""

import csv
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from codec_files import training
from feddg.attacks.attack import load_public
from feddg.errors import DataError, WeightsError
from feddg.rng import stream
from feddg.styles.codec import adain, load_codec
from feddg.styles.codecs import CompactCodec, Vgg19Codec
from style_images import random_unit_images, write_images
from style_images import random_unit_images as images

TERMS = training.TERMS
Critic = training.Critic
draw_batch = training.draw_batch
grey = training.grey
inverted = training.inverted
judge = training.judge
line_drawing = training.line_drawing
LossNetwork = training.LossNetwork
moments = training.moments
pooled = training.pooled
Progress = training.Progress
Recipe = training.Recipe
train_codec = training.train_codec
TrainingBatch = training.TrainingBatch
unchanged = training.unchanged


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    root = tmp_path_factory.mktemp("pictures")
    return {
        "content": [write_images(root / "a", 3), write_images(root / "b", 2)],
        "style": [write_images(root / "c", 4)],
    }


SMALL = {"sizes": (16, 24), "batch_pixels": 1024, "seed": 3}


def recipe(steps: int, **changed) -> "training.Recipe":
    return Recipe(steps=steps, **(SMALL | changed))


@pytest.fixture(scope="module")
def judging_network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder of the VGG-19 shape, narrow, with random weights."""
    path = tmp_path_factory.mktemp("network") / "encoder.safetensors"
    widths = (4, 4, "pool", 6, 6, "pool", 8, 8, 8, 8, "pool", 10)
    shape = type(Vgg19Codec.architecture)(widths, (3,), colour_layer=True)
    layers = shape.modules()[0].to_empty(device="cpu")
    generator = stream(0, "network")
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
            nn.init.zeros_(layer.bias)
    save_file(layers.state_dict(), path)
    return path


def test_three_steps_write_a_decoder_that_loads(folders, tmp_path: Path) -> None:
    heard: list[training.Progress] = []
    decoder = train_codec(**folders, out=tmp_path, recipe=recipe(3), progress=heard.append)
    assert decoder == tmp_path / "decoder.safetensors"
    assert not (tmp_path / "encoder.safetensors").exists()
    assert {tensor.dtype for tensor in load_file(decoder).values()} == {torch.float16}
    trained = load_codec("compact", decoder=decoder)
    assert trained.fingerprint() != load_codec("compact").fingerprint()
    assert [(said.step, said.steps) for said in heard] == [(3, 3)]
    assert set(heard[0].losses) == set(TERMS)


def test_loss_falls(folders, tmp_path: Path) -> None:
    train_codec(**folders, out=tmp_path, recipe=recipe(100, learning_rate=2e-3))
    with (tmp_path / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [25, 50, 75, 100]
    for term in ("style", "reconstruction"):
        assert float(rows[-1][term]) < 0.8 * float(rows[0][term])


def test_same_seed_same_weights_even_when_interrupted(
    folders, judging_network: Path, tmp_path: Path
) -> None:
    """With everything that has a state: both parts of the codec, and the critic."""
    chosen = {"recipe": recipe(30, critic_weight=0.2), "loss_network": judging_network}
    through = train_codec(**folders, out=tmp_path / "through", **chosen)

    def stop(progress) -> None:
        raise KeyboardInterrupt

    again = {"out": tmp_path / "interrupted", "save_every": 10, **chosen}
    with pytest.raises(KeyboardInterrupt):
        train_codec(**folders, progress=stop, **again)  # at step 25, saved at 20
    continued = train_codec(**folders, **again)
    for name in ("encoder.safetensors", "decoder.safetensors", "loss.csv", "state.safetensors"):
        assert (through.parent / name).read_bytes() == (continued.parent / name).read_bytes()


def test_global_generator_is_left_alone(folders, judging_network: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    chosen = {"loss_network": judging_network}
    first = train_codec(
        **folders, out=tmp_path / "1", recipe=recipe(2, critic_weight=0.1), **chosen
    ).read_bytes()
    assert torch.equal(before, torch.get_rng_state())
    other = train_codec(
        **folders, out=tmp_path / "2", recipe=recipe(2, critic_weight=0.1, seed=4), **chosen
    )
    assert first != other.read_bytes()


def test_under_another_network_the_encoder_is_trained(
    folders, judging_network: Path, tmp_path: Path
) -> None:
    start = tmp_path / "first.safetensors"
    encoder = load_codec("compact").encoder.state_dict()
    save_file({key: weight.contiguous() for key, weight in encoder.items()}, start)
    decoder = train_codec(
        **folders, out=tmp_path, recipe=recipe(2), loss_network=judging_network, encoder=start
    )
    trained = load_file(tmp_path / "encoder.safetensors")
    for key, weight in encoder.items():
        assert not torch.equal(trained[key].float(), weight)
        torch.testing.assert_close(trained[key].float(), weight, atol=0.01, rtol=0.01)
    load_codec("compact", encoder=tmp_path / "encoder.safetensors", decoder=decoder)


def test_the_encoder_can_be_kept_under_another_network(
    folders, judging_network: Path, tmp_path: Path
) -> None:
    chosen = recipe(2, keep_encoder=True)
    decoder = train_codec(**folders, out=tmp_path, recipe=chosen, loss_network=judging_network)
    assert not (tmp_path / "encoder.safetensors").exists()
    trained = load_codec("compact", decoder=decoder)
    before = load_codec("compact").encoder.state_dict()
    for key, weight in trained.encoder.state_dict().items():
        assert torch.equal(weight, before[key])
    alone = train_codec(**folders, out=tmp_path / "alone", recipe=recipe(2))
    assert alone.read_bytes() != decoder.read_bytes()  # another judge


def test_other_settings_do_not_continue(folders, tmp_path: Path) -> None:
    train_codec(**folders, out=tmp_path, recipe=recipe(2))
    with pytest.raises(DataError, match=r"other settings \(steps, sizes\)"):
        train_codec(**folders, out=tmp_path, recipe=recipe(3, sizes=(16,)))
    with pytest.raises(DataError, match=r"other settings \(images\)"):
        train_codec(
            content=folders["style"], style=folders["style"], out=tmp_path, recipe=recipe(2)
        )
    (tmp_path / "state.safetensors").write_text("damaged")
    with pytest.raises(DataError, match=r"state\.safetensors"):
        train_codec(**folders, out=tmp_path, recipe=recipe(2))


def test_a_vgg19_decoder_can_be_trained(folders, judging_network: Path, tmp_path: Path) -> None:
    chosen = recipe(1, codec="vgg19")
    decoder = train_codec(**folders, out=tmp_path, recipe=chosen, encoder=judging_network)
    assert load_codec("vgg19", encoder=judging_network, decoder=decoder).channels == 10
    with pytest.raises(WeightsError, match="needs a weights file"):
        train_codec(**folders, out=tmp_path, recipe=chosen)


def test_a_codec_without_weights_cannot_be_trained(folders, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="'colors' has nothing to train"):
        train_codec(**folders, out=tmp_path, recipe=recipe(1, codec="colors"))


def test_the_command_line_trains_and_goes_on(
    folders, judging_network: Path, tmp_path: Path
) -> None:
    command = ["--content", *map(str, folders["content"]), "--style", str(folders["style"][0])]
    command += ["--out", str(tmp_path), "--steps", "2", "--size", "16", "24"]
    command += ["--loss-network", str(judging_network), "--critic", "0.1", "--save-every", "1"]
    training.main(command)
    written = (tmp_path / "decoder.safetensors").read_bytes()
    training.main(command)
    assert (tmp_path / "decoder.safetensors").read_bytes() == written
    expected = Recipe(steps=2, sizes=(16, 24), critic_weight=0.1)
    again = train_codec(
        **folders, out=tmp_path / "again", recipe=expected, loss_network=judging_network
    )
    assert again.read_bytes() == written


def test_folders_without_images_are_named(folders, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "readme.txt").write_text("no image")
    (tmp_path / "notes" / "broken.png").write_text("no image either")
    for folder, complaint in (("absent", "No such file"), ("notes", "no readable image")):
        with pytest.raises(DataError, match=rf"{folder}: {complaint}"):
            train_codec(content=[tmp_path / folder], style=folders["style"], out=tmp_path)
    with pytest.raises(DataError, match="style: no folder"):
        train_codec(content=folders["content"], style=[], out=tmp_path)


def test_training_can_start_from_weights(folders, tmp_path: Path) -> None:
    first = train_codec(**folders, out=tmp_path / "first", recipe=recipe(2))
    second = train_codec(
        **folders, out=tmp_path / "second", recipe=recipe(1, learning_rate=0.0), start=first
    )
    assert first.read_bytes() == second.read_bytes()


# What a codec's training looks at, and the variants it learns from.


def test_load_images_searches_in_depth(tmp_path: Path) -> None:
    write_images(tmp_path / "deep" / "a", 3)
    write_images(tmp_path / "b", 2)
    images = load_public([tmp_path], 20)
    assert images.shape == (5, 3, 20, 20)
    assert images.dtype == torch.uint8


def test_batches_hold_about_the_pixels_asked_for() -> None:
    collections = (
        (random_unit_images(0, 5, 64) * 255).to(torch.uint8),
        (random_unit_images(1, 3, 64) * 255).to(torch.uint8),
    )
    seen = set()
    for step in range(40):
        drawn = draw_batch(*collections, sizes=(16, 32, 128), pixels=8192, seed=1, step=step)
        count, _, side, _ = drawn.contents.shape
        assert drawn.styles.shape == drawn.counterparts.shape == drawn.contents.shape
        assert count == {16: 32, 32: 8, 128: 2}[side]
        assert count % drawn.pool == 0
        assert len(drawn.known) == len(drawn.strength) == count
        for part in (drawn.contents, drawn.styles, drawn.counterparts, drawn.strength):
            assert part.min() >= 0
            assert part.max() <= 1
        seen.add((side, drawn.pool > 1, bool(drawn.known.any()), bool(drawn.known.all())))
        again = draw_batch(*collections, sizes=(16, 32, 128), pixels=8192, seed=1, step=step)
        assert torch.equal(drawn.contents, again.contents)
    assert {side for side, *_ in seen} == {16, 32, 128}
    assert {pool for _, pool, *_ in seen} == {True, False}
    assert {known for *_, known, _ in seen} == {True, False}


def test_variants_keep_shape_and_range_and_differ(subtests: pytest.Subtests) -> None:
    for variant in training.VARIANTS:
        with subtests.test(variant=variant):
            images = torch.rand(3, 3, 24, 20, generator=stream(0, "images"))
            before = images.clone()
            varied = variant(images, stream(0, "variant"))
            assert varied.shape == images.shape
            assert varied.min() >= 0
            assert varied.max() <= 1
            assert torch.equal(varied, variant(images, stream(0, "variant")))
            assert torch.equal(varied, images) == (variant is unchanged)
            assert torch.equal(images, before)


def test_what_the_simple_variants_do() -> None:
    images = torch.rand(2, 3, 16, 16, generator=stream(0, "images"))
    generator = stream(0, "variant")
    torch.testing.assert_close(inverted(images, generator) + images, torch.ones_like(images))
    tones = grey(images, generator)
    assert torch.equal(tones[:, 0], tones[:, 2])
    edge = torch.ones(1, 3, 32, 32)
    edge[..., 16:] = 0
    drawing = line_drawing(edge, generator)[0, 0, 16]
    assert drawing[2] > 0.8
    assert drawing[16:19].min() < 0.2
    assert drawing[-3] > 0.8


# What a codec is trained for, against a calculation by hand.


def batch(
    contents: Tensor, styles: Tensor, strength: Sequence[float], **changed
) -> "training.TrainingBatch":
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


def terms(codec, network, given: "training.TrainingBatch") -> dict[str, float]:
    return {name: t.item() for name, t in zip(TERMS, judge(codec, network, None, given)[0])}


@pytest.fixture
def network() -> "training.LossNetwork":
    return LossNetwork(load_codec().encoder, images(9, count=4))


def test_loss_terms_are_zero_for_a_perfect_codec(network: "training.LossNetwork") -> None:
    """If decoding gave the original back at strength 0, no term would remain."""
    contents = images(0)
    found = terms(answering(contents), network, batch(contents, images(1), [0, 0]))
    assert found == pytest.approx(dict.fromkeys(TERMS, 0), abs=1e-8)


def test_loss_terms_by_hand(network: "training.LossNetwork") -> None:
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


def test_overshoot_is_judged_clamped_and_costs(network: "training.LossNetwork") -> None:
    contents = torch.ones(2, 3, 32, 32)
    answer = contents.clone()
    answer[0] += 0.5
    given = batch(contents, contents, [1.0, 1.0])
    found = terms(answering(answer), network, given)
    inside = terms(answering(contents), network, given)
    assert found.pop("overshoot") == pytest.approx(0.25)
    assert inside.pop("overshoot") == 0
    assert found == pytest.approx(inside, abs=1e-8)


def test_a_critic_learns_to_tell_real_from_redrawn(network: "training.LossNetwork") -> None:
    """On answers that are plainly wrong its loss falls, and the codec is told so."""
    critic = Critic(network.widths, seed=0)
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    codec, given = answering(torch.zeros(2, 3, 32, 32)), batch(images(1), images(2), [1.0, 1.0])
    heard = []
    for _ in range(30):
        terms, loss = judge(codec, network, critic, given)
        assert loss is not None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        heard.append((loss.item(), terms[-1].item()))
    assert heard[-1][0] < 0.1 < heard[0][0]
    assert heard[-1][1] > heard[0][1]
    weak = batch(images(1), images(2), [0.0, 0.5])
    assert judge(codec, network, critic, weak)[1] is None


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
