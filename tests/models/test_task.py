"""Tasks other than classification: own losses, scores and targets of any shape."""

import copy
import math
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import dp_accounting
import numpy
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from scipy.stats import t as student
from torch import Tensor, nn
from torch.distributions import Bernoulli, kl_divergence
from torch.nn import functional
from torch.utils.data import TensorDataset

import feddg
from discs import SEGMENT, Discs, SmallUNet, dice
from feddg.clients import client
from feddg.data.augment import AugmentSettings, apply, draw, moved
from feddg.errors import ExperimentError, FeddgError
from feddg.federation import local_training
from feddg.methods import FedAvg
from feddg.methods.base import methods
from feddg.models.task import CLASSIFICATION, balanced, binary_divergence, spread
from feddg.settings import TrainSettings
from federations import SmallFederation, same

RUN = [
    *("ccst", "dart", "elcfs", "fedavg", "fedbn", "feddg-ga", "fedgma", "fedprox", "mixstyle"),
    *("fish", "local", "mixup", "outlines", "randconv", "scaffold", "silobn", "vista"),
]
"""Methods that run any task."""


SITES = [Discs(0), Discs(1), Discs(5)]


def federation(method="fedavg", task=SEGMENT, **fields) -> feddg.Federation:
    options = {"lr": 0.01, "batch_size": 6, "averaging": "none", "precision": "float32"} | fields
    return feddg.Federation(SITES, SmallUNet(), method, task=task, **options)


def test_own_loss_score_and_network_learn_masks():
    fed = federation()
    before, after = fed.evaluate(Discs(2), "new"), None
    after = fed.fit(15).evaluate(Discs(2), "new")
    assert after.mean > 0.8 > before.mean
    assert "array(" not in str(after)
    outputs = fed.predict(Discs(2))
    assert outputs.shape == (12, 1, 16, 16)
    by_hand = dice(outputs, Discs(2).masks)
    numpy.testing.assert_allclose(after.values, by_hand, rtol=1e-6)
    loss = functional.binary_cross_entropy_with_logits(outputs, Discs(2).masks)
    assert after.loss == pytest.approx(float(loss), rel=1e-5)
    row = fed.server.round()
    assert set(row.terms) == {"loss"}


def test_a_score_has_an_interval_over_images_and_a_paired_difference():
    one, other = federation().fit(3), federation(seed=1).fit(1)
    first, second = one.evaluate(Discs(2)), other.evaluate(Discs(2))
    values = first.values
    half = student.ppf(0.975, 11) * values.std(ddof=1) / math.sqrt(12)
    assert first.interval == pytest.approx((values.mean() - half, values.mean() + half))
    difference, (low, high) = first.minus(second)
    assert difference == pytest.approx(first.mean - second.mean)
    apart = first.values - second.values
    half = student.ppf(0.975, 11) * apart.std(ddof=1) / math.sqrt(12)
    assert (low, high) == pytest.approx((difference - half, difference + half))
    with pytest.raises(ValueError, match="same images"):
        first.minus(one.evaluate(Discs(3, count=5)))


def test_a_paired_difference_is_over_the_groups_that_either_score_names():
    patients = [0] * 6 + [1] * 4 + [2] * 2
    one, other = federation().fit(1), federation(seed=1).fit(1)
    grouped, plain = one.evaluate(Discs(2), groups=patients), other.evaluate(Discs(2))
    difference, (low, high) = grouped.minus(plain)
    assert plain.minus(grouped) == (pytest.approx(-difference), pytest.approx((-high, -low)))
    renamed = other.evaluate(Discs(2), groups=["xyz"[patient] for patient in patients])
    assert grouped.minus(renamed) == (pytest.approx(difference), pytest.approx((low, high)))
    with pytest.raises(ValueError, match="their groups differ"):
        grouped.minus(other.evaluate(Discs(2), groups=patients[::-1]))


def test_an_interval_of_large_scores_is_around_their_mean():
    fed = federation(task=feddg.Task(SEGMENT.loss, lambda o, t: o.flatten(1).mean(1) - 5e7))
    found = fed.evaluate(Discs(2, count=12))
    low, high = found.interval
    assert low <= found.mean <= high
    assert found.mean == pytest.approx(found.values.astype(float).mean(), rel=1e-15)


def test_each_method_runs_the_task_or_refuses_by_name(subtests):
    for name in sorted(methods()):
        with subtests.test(name=name):
            kind = methods()[name]
            if kind.gathers_images:
                continue
            if name in RUN:
                fed = federation(name, local_steps=2).fit(1)
                assert math.isfinite(fed.evaluate(Discs(2)).mean)
                continue
            with pytest.raises(ExperimentError, match=name):
                federation(name)


def test_a_composition_runs_if_all_its_parts_do():
    federation("mixstyle+fedprox", local_steps=1).fit(1)
    with pytest.raises(ExperimentError, match="pardon"):
        federation("fedprox+pardon")


def test_fedavg_of_a_task_is_the_mean_of_what_clients_train_by_hand():
    fed = federation(optimizer="sgd", lr=0.1, batch_size=12).fit(1)
    trained = []
    for site in SITES:
        network = SmallUNet().train()
        loss = functional.binary_cross_entropy_with_logits(
            network((site.images * 255).round() / 255), site.masks
        )
        loss.backward()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter -= 0.1 * parameter.grad
        trained.append(dict(network.named_parameters()))
    for name, entry in fed.model.featurizer.model.named_parameters():
        expected = sum(each[name] for each in trained) / len(trained)
        torch.testing.assert_close(entry, expected, rtol=1e-3, atol=1e-4)


def test_the_divergence_of_masks_is_that_of_each_pixels_yes_or_no():
    logits = 4 * torch.randn(3, 2, 1, 5, 5, generator=torch.Generator().manual_seed(3))
    shares = Bernoulli(logits=logits.double())
    mean = Bernoulli(shares.probs.mean(0, keepdim=True).expand_as(logits))
    expected = kl_divergence(shares, mean).mean()
    assert float(binary_divergence(logits)) == pytest.approx(float(expected), rel=1e-5)
    far = torch.tensor([90.0, -90.0]).view(2, 1, 1, 1, 1)
    assert float(binary_divergence(far)) == pytest.approx(math.log(2))


def test_randconv_asks_for_equal_answers_by_the_tasks_own_divergence():
    asked = []

    def seen(versions: Tensor) -> Tensor:
        asked.append(tuple(versions.shape))
        return binary_divergence(versions)

    task = feddg.Task(SEGMENT.loss, dice, divergence=seen)
    federation("randconv", task, local_steps=1).fit(1)
    assert asked.count((3, 6, 1, 16, 16)) == len(SITES)
    with pytest.raises(ExperimentError, match=r"divergence gives \(2, 2, 1, 16, 16\)"):
        federation(task=feddg.Task(SEGMENT.loss, dice, divergence=lambda versions: versions))


# Targets of other shapes.


def test_several_labels_an_image():
    rng = torch.Generator().manual_seed(0)
    present = (torch.rand(20, 3, generator=rng) > 0.5).float()
    images = torch.rand(20, 3, 8, 8, generator=rng) / 2 + present[..., None, None] / 2
    site = TensorDataset(images, present)
    torch.manual_seed(0)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))
    task = feddg.Task(
        functional.binary_cross_entropy_with_logits,
        lambda outputs, targets: ((outputs > 0) == targets).float().mean(1),
    )
    fed = feddg.Federation([site, site], model, "fedprox", task=task, lr=0.3).fit(40)
    assert fed.evaluate(site).mean > 0.7


def test_one_number_an_image():
    images = torch.rand(20, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    site = TensorDataset(images, images.mean((1, 2, 3)))
    torch.manual_seed(0)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 1), nn.Flatten(0))
    task = feddg.Task(functional.mse_loss, lambda outputs, targets: -(outputs - targets).abs())
    fed = feddg.Federation([site, site], model, task=task, lr=0.05).fit(30)
    assert fed.evaluate(site).mean > -0.05


# Augmentation.


@pytest.mark.parametrize(
    "settings",
    [
        AugmentSettings(shift=3, flip=0.5, vertical_flip=0.5, quarter_turns=True),
        AugmentSettings(crop_scale=(0.5, 1.0), flip=0.5, quarter_turns=True),
        AugmentSettings(color_jitter=(0.2, 0.2, 0.2, 0.1)),
    ],
)
def test_masks_move_with_their_images(settings):
    masks = Discs(4, count=30).masks
    images = (masks.expand(-1, 3, -1, -1) * 255).byte()
    drawn = draw(settings, 30, 16, torch.Generator().manual_seed(0))
    found = moved(masks, drawn)
    assert found.shape == masks.shape
    assert set(found.unique().tolist()) == {0.0, 1.0}
    images = apply(images, drawn).mean(1, keepdim=True)
    agree = ((images > 0.4) == (found > 0.5)).float().mean()
    assert agree > (0.97 if settings.crop_scale else 0.999)
    several = moved(masks.expand(-1, 2, -1, -1), drawn)
    assert torch.equal(several[:, 1:], found)
    assert torch.equal(moved(masks[:, 0], drawn), found[:, 0])
    last = moved(masks.expand(-1, 3, -1, -1).movedim(1, -1), drawn)
    assert torch.equal(last, found.expand(-1, 3, -1, -1).movedim(1, -1))


def test_training_sees_masks_that_moved():
    seen = []

    def loss(outputs: Tensor, masks: Tensor) -> Tensor:
        seen.append(masks)
        return functional.binary_cross_entropy_with_logits(outputs, masks)

    fed = federation(task=feddg.Task(loss, dice), local_steps=1)
    fed.worker.augmentation = AugmentSettings(flip=1.0)
    fed.fit(1)
    own = {tuple(mask.flatten().tolist()) for site in SITES for mask in site.masks}
    mirrored = {tuple(mask.flip(-1).flatten().tolist()) for site in SITES for mask in site.masks}
    met = {tuple(mask.flatten().tolist()) for mask in seen[-1]}
    assert met <= mirrored
    assert not met & own


def shaped(change, augmentation, method="fedavg"):
    """A federation whose targets are discs' masks in another form."""
    site = TensorDataset(Discs(0).images, change(Discs(0).masks))
    count = change(Discs(0).masks)[0].numel()
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, count))
    task = feddg.Task(
        lambda outputs, targets: (outputs - targets.flatten(1)).square().mean(),
        lambda outputs, targets: -(outputs - targets.flatten(1)).abs().mean(1),
    )
    fields = {"augmentation": augmentation, "local_steps": 1}
    return feddg.Federation([site], net, method, task=task, **fields)


@pytest.mark.parametrize(
    "change",
    [
        lambda masks: masks[:, :, ::2, ::2],  # half resolution
        lambda masks: masks.flatten(1),
        lambda masks: masks.flatten(2),
        lambda masks: masks[:, 0, :3, :4],  # boxes
    ],
)
def test_what_cannot_move_with_its_image_is_refused_where_images_move(change):
    shape = tuple(change(Discs(0).masks).shape[1:])
    with pytest.raises(ExperimentError) as fault:
        shaped(change, "aerial")
    assert f"client 0 has targets {shape}" in str(fault.value)
    with pytest.raises(ExperimentError, match="randaug moves the pixels"):
        shaped(change, "none", "randaug")
    fed = shaped(change, "none").fit(1)
    fed.worker.augmentation = AugmentSettings(color_jitter=(0.2, 0.2, 0.2, 0.0))
    fed.fit(1)
    fed.worker.augmentation = AugmentSettings(flip=0.5)  # behind the federation's back
    with pytest.raises(FeddgError, match="leave behind"):
        fed.fit(1)


@pytest.mark.parametrize(
    "change", [lambda masks: masks.movedim(1, -1), lambda masks: masks[:, 0, 0, :4]]
)
def test_channels_last_move_and_rows_of_numbers_stay(change):
    shaped(change, "aerial").fit(1)


def test_a_method_that_moves_pixels_itself_refuses_masks():
    with pytest.raises(ExperimentError, match="randaug moves the pixels"):
        federation("randaug")


# What can be wrong.


def test_a_loss_or_score_that_does_not_fit_is_one_clear_line_before_training(subtests):
    for task, words in [
        (feddg.Task(functional.binary_cross_entropy_with_logits, lambda o, t: o.mean()), "score"),
        (feddg.Task(lambda o, t: (o - t).square(), dice), "task's loss gives"),
        (feddg.Task(functional.cross_entropy, lambda o, t: 1 / 0), "score fails"),
        (
            feddg.Task(lambda o, t: functional.mse_loss(o, t[:, :2]).item(), dice),
            "loss gives float",
        ),
        (feddg.Task(lambda o, t: o @ t[0, 0, :3], dice), "loss fails for outputs"),
        (feddg.Task(lambda o, t: ((o > 0) != t).float().mean(), dice), "loss has no gradient"),
        (feddg.Task(lambda o, t: SEGMENT.loss(o.detach(), t), dice), "loss has no gradient"),
        (
            feddg.Task(SEGMENT.loss, lambda o, t: dice(o, t).squeeze()),
            r"score gives \(\) for .*\(1, ",
        ),
    ]:
        with subtests.test(task=task, words=words):
            with pytest.raises(ExperimentError, match=words) as raised:
                federation(task=task)
            assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "around",
    [
        torch.no_grad,
        torch.inference_mode,
        partial(torch.autocast, "cpu", torch.bfloat16),
        partial(torch.autocast, "cpu", torch.float16),
    ],
)
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_what_a_program_sets_around_a_run_changes_nothing(around, method):
    expected = federation(method).fit(2)
    fed = federation(method)
    with around():
        fed.fit(2)
        score, outputs = fed.evaluate(Discs(2)), fed.predict(Discs(2).images)
    assert same(fed.weights, expected.weights)
    assert score.mean == expected.evaluate(Discs(2)).mean
    assert torch.equal(outputs, expected.predict(Discs(2).images))


def test_a_loss_that_changes_what_it_is_given_leaves_the_score_alone():
    def careless(outputs, targets):
        loss = SEGMENT.loss(outputs, targets.clone())
        if not outputs.requires_grad:
            outputs.zero_()
            targets.fill_(1)
        return loss

    plain, changed = (
        federation(task=feddg.Task(loss, dice)).evaluate(Discs(2), "new")
        for loss in (SEGMENT.loss, careless)
    )
    numpy.testing.assert_array_equal(changed.values, plain.values)


def test_a_score_that_is_not_a_number_names_the_image():
    def empty(outputs: Tensor, masks: Tensor) -> Tensor:
        return torch.where(torch.arange(len(masks)) == 3, math.nan, dice(outputs, masks))

    fed = federation(task=feddg.Task(SEGMENT.loss, empty))
    with pytest.raises(ExperimentError, match="nan for image 3 of new"):
        fed.evaluate(Discs(2), "new")


def test_targets_that_cannot_be_used_are_named(subtests):
    for site, words in [
        ([(torch.rand(3, 16, 16), torch.zeros(1, 8, 8))], r"client 1 has targets \(1, 8, 8\)"),
        ([(torch.rand(3, 16, 16), torch.zeros(1, 16, 16).long())], "int64, but client 0"),
        ([(torch.rand(3, 16, 16), "disc")], "image 0 has a str for a target"),
        ([(torch.rand(3, 16, 16), torch.full((1, 16, 16), math.nan))], "NaN"),
        (
            [(torch.rand(3, 16, 16), torch.zeros(1, 16, 16)), (torch.rand(3, 16, 16), 1.0)],
            "image 1 has a target",
        ),
        ([(torch.rand(3, 32, 32), torch.zeros(1, 32, 32))], "client 1 has images of 32 p"),
    ]:
        with subtests.test(words=words), pytest.raises(ExperimentError, match=words):
            feddg.Federation([SITES[0], site], SmallUNet(), task=SEGMENT)


def test_a_mask_without_a_task_says_what_to_do():
    with pytest.raises(ExperimentError, match=r"task=feddg.Task"):
        feddg.Federation(SITES, SmallUNet())


def test_classification_is_a_task_like_others():
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(6) % 4
    assert torch.equal(
        CLASSIFICATION.loss(logits, labels), functional.cross_entropy(logits, labels)
    )
    assert CLASSIFICATION.score(logits, labels).tolist() == (logits.argmax(1) == labels).tolist()
    assert float(spread(torch.stack([logits, logits + 2]))) == pytest.approx(1)


# What protects and carries a federation does so for any task.


@pytest.mark.parametrize(
    "fields",
    [
        {"averaging": "ema", "defences": ["median"]},
        {"privacy": {"clipping": "fixed", "clipping_norm": 1.0, "noise_multiplier": 0.1}},
        {"privacy": {"record_epsilon": 8.0}},
        {"defences": ["secure_aggregation"]},
    ],
)
def test_defences_privacy_and_averages_hold(fields):
    fed = federation(normalization="frozen", **fields).fit(2)
    assert math.isfinite(fed.evaluate(Discs(2)).mean)
    assert same(fed.weights, fed.server.state.weights) is (fed.settings.server.averaging == "none")


PRIVATE = {"privacy": {"record_epsilon": 8.0}, "local_epochs": 2, "normalization": "frozen"}


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("fedavg", {}),
        ("scaffold", {}),
        ("fedavg", {"averaging": "ema", "defences": ["median"]}),
        ("fedavg", {"normalization": "frozen", "defences": ["secure_aggregation"]}),
    ],
)
def test_a_federation_that_was_stopped_goes_on_with_the_bits_of_one_that_was_not(method, fields):
    whole = federation(method, rounds=3, **fields).fit(3)
    first = federation(method, rounds=3, **fields).fit(2)
    second = federation(method, rounds=3, **fields)
    second.resume(copy.deepcopy(first.server.state), copy.deepcopy(first.transport.memories))
    assert same(second.fit(1).server.state.weights, whole.server.state.weights)
    assert same(second.weights, whole.weights)


def test_secure_sums_of_a_task_are_the_sums_without():
    plain = federation(normalization="frozen").fit(2)
    hidden = federation(normalization="frozen", defences=["secure_aggregation"]).fit(2)
    assert not same(plain.weights, hidden.weights)  # sums are rounded to 2^-24 of the range
    for name, entry in plain.weights.items():
        torch.testing.assert_close(hidden.weights[name], entry, rtol=1e-5, atol=1e-6)


def test_another_accountant_counts_the_epsilon_of_a_private_task(monkeypatch):
    steps, private_step = defaultdict(list), local_training.private_step

    def noted(client, batch, noise):
        private_step(client, batch, noise)
        for place in batch.positions.tolist():
            steps[client.id, place].append(noise.multiplier)

    monkeypatch.setattr(local_training, "private_step", noted)
    federation(rounds=3, **PRIVATE).fit(3)
    assert {len(own) for own in steps.values()} == {3 * 2}  # every image, each epoch
    (multiplier,) = {one for own in steps.values() for one in own}
    accountant = PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(multiplier), 3 * 2)
    assert accountant.get_epsilon(1e-5) == pytest.approx(8, rel=0.01)


def test_class_weights_weigh_images_also_under_label_smoothing():
    train = TrainSettings(class_weights="balanced", label_smoothing=0.1)
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(6, 3, generator=generator)
    held = torch.tensor([0, 0, 0, 0, 1, 1])  # nothing of class 2
    weights = torch.tensor([0.75, 0.75, 0.75, 0.75, 1.5, 1.5])
    wanted = torch.full((6, 3), 0.1 / 3).scatter_(1, held[:, None], 0.9 + 0.1 / 3)
    by_hand = -(weights[:, None] * wanted * outputs.log_softmax(1)).sum() / 6
    own = balanced(held, 3, outputs.dtype)
    torch.testing.assert_close(CLASSIFICATION.loss_at(outputs, held, own, train), by_hand)
    even = torch.tensor([0, 0, 1, 1, 2, 2])  # where all weights are 1, they change nothing
    plain = TrainSettings(label_smoothing=0.1)
    weights = (balanced(even, 3, outputs.dtype), None)
    losses = [
        CLASSIFICATION.loss_at(outputs, even, w, each) for w, each in zip(weights, (train, plain))
    ]
    torch.testing.assert_close(*losses)


def test_class_weights_are_exact_whatever_the_precision():
    labels = torch.arange(4).repeat_interleave(torch.tensor([631, 33, 20, 17]))
    examples = SimpleNamespace(labels=labels)
    one = SimpleNamespace(training=examples, _balanced=None, worker=SimpleNamespace())
    one.worker.task, one.worker.train = CLASSIFICATION, TrainSettings(class_weights="balanced")
    found = client.Client.class_weights(one, torch.zeros(2, 4, dtype=torch.bfloat16))
    torch.testing.assert_close(found, 701 / (4 * labels.bincount().float()))


def test_class_weights_are_counted_once_a_client(monkeypatch):
    counted = []
    monkeypatch.setattr(client, "balanced", lambda *given: counted.append(1) or balanced(*given))
    train = TrainSettings(class_weights="balanced", local_steps=4, batch_size=4)
    SmallFederation(FedAvg(), train=train).run(1)
    assert len(counted) == 3
