"""Accuracy without labels: estimators, the calibration on sites, single images, a few labels."""

import math

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from feddg.prediction.estimators import (
    Familiar,
    LeftOutSite,
    Outputs,
    Part,
    Reference,
    Signals,
    Sums,
    fitted_temperature,
    images_to_label,
    labels_needed,
    left_out_sites,
    moments,
    novelty_of,
    right_chances,
    with_labels,
)
from feddg.rng import numpy_stream
from feddg.runs.calibration import (
    ENOUGH_SITES,
    Estimate,
    at_a_new_site,
    calibrated,
    calibration,
)

SEEDS = some.integers(0, 2**32 - 1)


def drawn(seed, images=60, classes=4):
    """Outputs of a model that is right now and then, with labels."""
    random = numpy_stream(seed, "test")
    logits = random.normal(size=(images, classes)) * random.uniform(0.5, 4)
    labels = numpy.where(random.random(images) < 0.6, logits.argmax(1), random.integers(classes))
    agreement = random.integers(0, 5, images) / 4
    return Outputs(logits, agreement), labels


@settings(max_examples=30)
@given(SEEDS)
def test_on_the_validation_images_themselves_an_estimate_is_their_accuracy(seed):
    outputs, labels = drawn(seed)
    accuracy = (outputs.logits.argmax(1) == labels).mean()
    reference = Reference.of(outputs, labels)
    found = Signals.of(reference, outputs)
    for name in ("atc", "doc", "agreement"):
        assert found.estimates[name] == pytest.approx(accuracy), name


@settings(max_examples=30)
@given(SEEDS, SEEDS)
def test_estimates_are_shares_and_do_not_know_the_order_of_images(seed, other):
    reference, (outputs, _) = Reference.of(*drawn(seed)), drawn(other, 37)
    order = numpy_stream(seed, "order").permutation(37)
    shuffled = Outputs(outputs.logits[order], outputs.agreement[order])
    found, again = Signals.of(reference, outputs), Signals.of(reference, shuffled)
    assert all(0 <= value <= 1 for value in found.estimates.values())
    assert found.estimates.keys() == {"confidence", "atc", "doc", "agreement"}
    assert again.estimates == pytest.approx(found.estimates)


def test_estimates_by_hand():
    logits = numpy.log(numpy.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6], [0.9, 0.1]]))
    labels = numpy.array([0, 0, 1, 0, 1])
    agreement = numpy.array([1, 1, 0.5, 0.5, 1])
    reference = Reference.of(Outputs(logits, agreement), labels)
    assert reference.accuracy == pytest.approx(3 / 5)
    # Two are wrong: ATC lets those pass that are at least as sure as the third least sure.
    at = reference.temperature
    sure = [max(p ** (1 / at), (1 - p) ** (1 / at)) / (p ** (1 / at) + (1 - p) ** (1 / at))
            for p in (0.9, 0.8, 0.7, 0.6, 0.9)]  # fmt: skip
    assert reference.confidence_threshold == pytest.approx(sorted(sure)[2])
    new = Outputs(logits[[0, 3]], agreement[[0, 3]])
    found = Signals.of(reference, new)
    assert found.estimates["atc"] == 0.5
    assert found.estimates["confidence"] == pytest.approx((sure[0] + sure[3]) / 2)
    moved = (sure[0] + sure[3]) / 2 - sum(sure) / 5
    assert found.estimates["doc"] == pytest.approx(3 / 5 + moved)
    assert found.estimates["agreement"] == pytest.approx(3 / 5 + 0.75 - 0.8)
    assert found.estimates.keys() == {"confidence", "atc", "doc", "agreement"}


def test_the_temperature_is_that_of_the_least_loss():
    random = numpy_stream(0, "temperature")
    logits = random.normal(size=(4000, 3))
    shares = numpy.exp(logits) / numpy.exp(logits).sum(1, keepdims=True)
    labels = (shares.cumsum(1) > random.random((4000, 1))).argmax(1)
    assert fitted_temperature(5 * logits, labels) == pytest.approx(5, rel=0.1)

    def loss(temperature):
        scaled = torch.from_numpy(logits / temperature)
        return float(torch.nn.functional.cross_entropy(scaled, torch.from_numpy(labels)))

    best = fitted_temperature(logits, labels)
    assert loss(best) <= min(loss(best * 0.98), loss(best * 1.02))


# Sites left out.


def sites_of(seed=0, sites=4, images=40, classes=3):
    """Images of sites that each shift their features a little."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (sites * images,), generator=generator)
    numbers = torch.arange(sites).repeat_interleave(images)
    centres = 2 * torch.randn(classes, 5, generator=generator)
    shifts = torch.randn(sites, 5, generator=generator)
    noise = torch.randn(len(labels), 5, generator=generator)
    return Part(centres[labels] + shifts[numbers] + noise, labels, numbers)


def test_a_site_left_out_is_one_whose_images_were_never_there():
    images = sites_of()
    measures = torch.arange(len(images.labels)) % 5 == 0
    train, validation = images.of(~measures), images.of(measures)
    found = list(left_out_sites(Sums(train, 3), train, validation, list("abcd")))
    assert [site.site for site in found] == ["a", "b", "c", "d"]
    for number, site in enumerate(found):
        rest = train.of(train.sites != number)
        alone = Sums(rest, 3)
        rows = images.sites == number
        weight, bias = alone.head()
        logits = images.features[rows].double() @ weight.T + bias
        right = (logits.argmax(1) == images.labels[rows]).double().mean()
        assert site.accuracy == pytest.approx(float(right))
        assert site.images == 40
        seen = validation.of(validation.sites != number)
        inside = seen.features.double() @ weight.T + bias
        temperature = fitted_temperature(inside.numpy(), seen.labels.numpy())
        sure = (logits / temperature).softmax(1).amax(1).mean()
        assert site.signals.estimates["confidence"] == pytest.approx(float(sure), abs=1e-4)
        assert "agreement" in site.signals.estimates


def test_two_sites_have_no_models_to_agree_and_one_site_cannot_be_left_out():
    two, one = sites_of(sites=2), sites_of(sites=1)
    found = list(left_out_sites(Sums(two, 3), two, two, ["a", "b"]))
    assert len(found) == 2
    assert all("agreement" not in site.signals.estimates for site in found)
    assert list(left_out_sites(Sums(one, 3), one, one, ["a"])) == []


def test_a_site_survives_its_file():
    images = sites_of()
    (first, *_) = left_out_sites(Sums(images, 3), images, images, list("abcd"))
    assert LeftOutSite.model_validate_json(first.model_dump_json()) == first


def test_a_model_of_log_probabilities_that_is_always_wrong_survives_its_file():
    """As copa's and fedsr's: their energy is always 0, and nothing is unlike what they know."""
    logits = torch.randn(12, 3).double().log_softmax(1).numpy()
    found = Reference.of(Outputs(logits), (logits.argmax(1) + 1) % 3)
    assert found.unlike == found.confidence_threshold == math.inf
    assert Reference.model_validate_json(found.model_dump_json()) == found


# Images that show something else.


CLASSES, DIRECTIONS = 4, 40


def pictures(seed, site, classes, images, foreign=False):
    """Moments of maps: classes and sites in 40 directions of 60, other images in the others."""
    random, fixed = numpy_stream(seed, "pictures"), numpy_stream(0, "centres")
    centres, styles = fixed.normal(0, 1, (CLASSES, DIRECTIONS)), fixed.normal(0, 1, (8, DIRECTIONS))
    labels = numpy.array(classes)[numpy.arange(images) % len(classes)]
    maps = random.normal(0, 0.2, (images, 60))
    maps[:, :DIRECTIONS] += centres[labels] + 0.5 * styles[site]
    maps[:, :DIRECTIONS] += random.normal(0, 0.5, (images, DIRECTIONS))
    if foreign:
        maps[:, DIRECTIONS:] += random.normal(1, 1, (images, 60 - DIRECTIONS))
    return maps, labels


def familiar_pictures(sites=4):
    """What a model sees at sites of these classes."""
    parts = [pictures(site, site, range(CLASSES), 200) for site in range(sites)]
    maps, labels = (numpy.concatenate(column) for column in zip(*parts))
    return Familiar.of(maps, numpy.repeat(numpy.arange(sites) + 3, 200), labels)


@pytest.mark.parametrize("images", [20, 200])
def test_images_that_show_something_else_are_noticed_and_a_new_site_is_not(images):
    """However few they are, and if they are of a single class."""
    familiar = familiar_pictures()
    limit = familiar.limit(images)
    alarms = {"all": 0, "one class": 0, "foreign": 0}
    for seed in range(100, 140):
        site, label = 4 + seed % 4, seed % CLASSES
        new = {
            "all": pictures(seed, site, range(CLASSES), images)[0],
            "one class": pictures(seed, site, [label], images)[0],
            "foreign": pictures(seed, site, [label], images, foreign=True)[0],
        }
        for kind, maps in new.items():
            alarms[kind] += familiar.novelty(maps) > limit
    assert alarms["all"] <= 4
    assert alarms["one class"] <= 4
    assert alarms["foreign"] == 40


def test_fewer_images_and_single_classes_are_allowed_more():
    familiar = familiar_pictures()
    assert familiar.limit(20) > familiar.limit(200)
    together = Familiar(
        familiar.spans, familiar.outside, familiar.sites, numpy.zeros_like(familiar.labels)
    )
    assert familiar.limit(50) > together.limit(50)


def test_a_span_by_hand():
    maps = numpy.array([[1.0, 0.0], [-1, 0], [3, 0], [-3, 0]])
    familiar = Familiar.of(maps, numpy.zeros(4), numpy.zeros(4))
    (span,) = familiar.spans
    assert span.basis.shape == (2, 1)
    assert familiar.novelty(maps) == pytest.approx(math.log(1e-9))  # all along the first direction
    # The second never changes: its scale is a twentieth of the mean deviation.
    first, mean = maps[:, 0].std(ddof=1), maps[:, 0].std(ddof=1) / 2
    scale = (first + 0.05 * mean, 0.05 * mean)
    variance = (maps[:, 0] ** 2).mean() / scale[0] ** 2
    expected = (0.1 / scale[1]) ** 2 / variance
    new = numpy.array([[7.0, 0.1]])
    assert familiar.novelty(new) == pytest.approx(math.log(expected), rel=1e-6)
    assert math.isinf(familiar.limit(20))  # one site says nothing of a new one


def test_a_site_of_one_image_makes_no_image_familiar():
    maps, _ = pictures(1, 0, range(CLASSES), 20)
    alone = numpy.concatenate([maps, maps[:1] + 5])
    familiar = Familiar.of(alone, numpy.repeat([0, 1], (20, 1)), numpy.zeros(21))
    (rest,) = Familiar.of(maps, numpy.zeros(20), numpy.zeros(20)).spans
    new, _ = pictures(2, 0, range(CLASSES), 30)
    only = novelty_of(rest.outside(torch.from_numpy(new))[:, None].numpy())
    assert familiar.novelty(new) == pytest.approx(only)


def test_signals_without_sites_call_nothing_foreign():
    maps, labels = pictures(0, 0, range(CLASSES), 50)
    outputs, truth = drawn(0)
    seen = Outputs(outputs.logits[:50], None, maps)
    one = Familiar.of(maps, numpy.zeros(50), labels)
    found = Signals.of(Reference.of(outputs, truth), seen, one)
    assert found.novelty is not None
    assert found.limit is None
    assert not found.foreign
    assert not Signals.of(Reference.of(outputs, truth), outputs, one).foreign  # no maps


def test_moments_are_means_and_deviations_of_channels():
    maps = torch.rand(4, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    found = moments(maps)
    assert torch.allclose(found[:, :3], maps.mean((2, 3)))
    assert found[1, 4] == pytest.approx(maps[1, 1].numpy().std(), rel=1e-5)
    assert moments(torch.full((1, 2, 1, 1), 0.4))[0].tolist() == pytest.approx([0.4, 0.4, 0, 0])


# The calibration and its interval.


def test_without_sites_the_estimate_is_the_signal_and_ten_points_are_supposed():
    found = calibrated(0.6, [], [], 10_000)
    assert found.value == 0.6
    assert found.reach == pytest.approx(2.92 * 0.1, abs=0.001)  # Student's t, two degrees


def test_many_sites_that_agree_are_believed():
    signals = numpy.linspace(0.3, 0.9, 40)
    truths = 0.1 + 0.5 * signals
    offset, slope, centre = calibration(signals, truths)
    assert offset == pytest.approx((truths - signals).mean(), abs=0.02)
    assert slope == pytest.approx(-0.5, abs=0.05)
    assert centre == pytest.approx(0.6)
    found = calibrated(0.5, signals, truths, 10_000)
    assert found.value == pytest.approx(0.35, abs=0.02)
    assert found.reach < 0.05


def test_few_sites_are_believed_in_part():
    offset, slope, _ = calibration(numpy.array([0.5, 0.5]), numpy.array([0.3, 0.3]))
    assert offset == pytest.approx(-0.2 * 2 / 3)  # two sites against a prior worth one
    assert slope == 0


def test_sites_that_err_in_different_directions_give_no_line():
    signals, truths = numpy.array([0.6, 0.7, 0.8]), numpy.array([0.75, 0.6, 0.75])
    assert calibration(signals, truths)[:2] == (0, 0)
    assert calibrated(0.9, signals, truths, 1000).value == 0.9


@settings(max_examples=50)
@given(some.lists(some.tuples(some.floats(0, 1), some.floats(0, 1)), min_size=2, max_size=8))
def test_a_line_is_taken_where_it_is_nearer_at_sites_that_it_leaves_out(sites):
    signals, truths = (numpy.array(column) for column in zip(*sites))
    rows = numpy.stack([numpy.ones(len(sites)), signals - signals.mean()], 1)
    prior = numpy.diag([1.0, 0.04])  # ten points against ten, and against a slope of a half

    def line(x, y):
        return numpy.linalg.lstsq(x.T @ x + prior, x.T @ y, rcond=None)[0]

    errors = truths - signals
    left_out = [
        errors[i] - rows[i] @ line(numpy.delete(rows, i, 0), numpy.delete(errors, i))
        for i in range(len(sites))
    ]
    gain = float(errors @ errors - numpy.square(left_out).sum())
    if abs(gain) > 1e-9:
        expected = line(rows, errors) if gain > 0 else (0, 0)
        assert calibration(signals, truths)[:2] == pytest.approx(expected, abs=1e-9)


def test_from_nine_sites_on_the_interval_is_that_of_jackknife_plus():
    random = numpy_stream(3, "jackknife")
    signals = random.uniform(0.4, 0.8, 12)
    truths = signals + random.normal(0, 0.05, 12)
    found = calibrated(0.6, signals, truths, 10**9)
    low, high = [], []
    for left in range(12):
        own = [i for i in range(12) if i != left]
        offset, slope, centre = calibration(signals[own], truths[own])
        error = abs(truths[left] - signals[left] - offset - slope * (signals[left] - centre))
        there = 0.6 + offset + slope * (0.6 - centre)
        low.append(there - error)
        high.append(there + error)
    assert len(signals) >= ENOUGH_SITES
    # 90 % of 13 is the 12th: of the lower ends the lowest, of the upper ends the highest.
    assert found.low == pytest.approx(min(low))
    assert found.high == pytest.approx(max(high))


def test_sites_of_another_model_widen_the_interval_and_leave_the_estimate():
    """One stand-in's estimates are 30 points too high: the model's may be as far off either way."""
    signals, truths = [0.9, 0.8, 0.7], [0.6, 0.5, 0.4]
    assert calibrated(0.5, signals, truths, 1000).value < 0.4
    found = calibrated(0.5, signals, truths, 1000, correct=False)
    assert found.value == 0.5
    assert found.high - 0.5 == pytest.approx(0.5 - found.low)
    assert found.high > 0.9


@pytest.mark.parametrize("sites", [3, 8, 25])
def test_intervals_hold_the_truth_as_often_as_they_say(sites):
    """Signals with errors of 12 points, another bias in each federation."""
    random, hits = numpy_stream(sites, "coverage"), 0
    for _ in range(300):
        truths = random.uniform(0.4, 0.8, sites + 1)
        signals = truths + random.normal(0.1, 0.1) + random.normal(0, 0.12, sites + 1)
        signals = signals.clip(0, 1)
        found = calibrated(signals[-1], signals[:-1], truths[:-1], 1000)
        hits += found.low <= truths[-1] <= found.high
    assert hits / 300 > 0.86


@settings(max_examples=50)
@given(
    some.floats(0, 1),
    some.lists(some.tuples(some.floats(0, 1), some.floats(0, 1)), max_size=12),
    some.integers(1, 500),
)
def test_an_interval_is_in_order_and_no_narrower_than_labels_would_justify(signal, sites, images):
    found = calibrated(signal, [s for s, _ in sites], [t for _, t in sites], images)
    assert 0 <= found.low <= found.value <= found.high <= 1
    least = 1.6448 * math.sqrt(found.value * (1 - found.value) / images)
    assert found.high >= min(1, found.value + least) - 1e-9
    assert found.low <= max(0, found.value - least) + 1e-9


def test_a_site_of_which_nothing_is_known_is_expected_to_do_as_others_did():
    one, three = at_a_new_site([0.6]), at_a_new_site([0.5, 0.6, 0.7])
    assert one.value == three.value == pytest.approx(0.6)
    assert one.reach == pytest.approx(2.92 * 0.1 * math.sqrt(2), abs=0.001)  # little from one site
    assert three.reach == pytest.approx(2.132 * 0.1 * math.sqrt(4 / 3), abs=0.001)
    random, hits = numpy_stream(0, "new site"), 0
    for _ in range(300):
        accuracies = random.normal(0.6, 0.05, 41)
        found = at_a_new_site(accuracies[:-1])
        hits += found.low <= accuracies[-1] <= found.high
    assert 0.86 < hits / 300 < 0.97


# Single images, and labels.


@settings(max_examples=30)
@given(SEEDS, some.floats(0.02, 0.98))
def test_chances_come_to_the_accuracy_and_keep_the_order(seed, accuracy):
    confidence = numpy_stream(seed, "confidence").uniform(0.2, 1, 50)
    chances = right_chances(confidence, accuracy)
    assert chances.mean() == pytest.approx(accuracy, abs=1e-6)
    assert (numpy.diff(chances[numpy.argsort(confidence)]) >= 0).all()


@settings(max_examples=30)
@given(SEEDS, some.integers(1, 80))
def test_images_to_label_are_different_ones_spread_over_confidence(seed, count):
    confidence = numpy_stream(seed, "confidence").random(60)
    chosen = images_to_label(confidence, count, seed)
    assert len(set(chosen.tolist())) == min(count, 60)
    place = numpy.argsort(numpy.argsort(confidence))[chosen]
    strata = max(1, min(count, 60) // 10)  # ten labels or more in each
    found = numpy.bincount(place * strata // 60, minlength=strata)
    assert found.max() - found.min() <= 1


def test_labels_hold_the_truth_where_right_and_wrong_alternate():
    """Equal steps of confidence would take the right half, or the wrong one, and be sure of it."""
    images, held = 300, 0
    confidence = numpy.linspace(0.3, 0.9, images)
    right = numpy.arange(images) % 2 == 0
    for seed in range(100):
        chosen = images_to_label(confidence, 150, seed)
        found = with_labels(Estimate(0.5, 0.2, 0.8), confidence, chosen, right[chosen])
        held += found.low <= 0.5 <= found.high
    assert held >= 85


def test_every_image_is_as_likely_to_be_chosen():
    confidence = numpy_stream(0, "confidence").random(50)
    counts = numpy.zeros(50)
    for seed in range(2000):
        counts[images_to_label(confidence, 5, seed)] += 1
    assert abs(counts / 2000 - 0.1).max() < 0.035


def made_up(seed, images=400, bias=0.15):
    """Confidences that are too high by ``bias``, and which answers are right."""
    random = numpy_stream(seed, "site")
    confidence = random.uniform(0.5, 1, images)
    return confidence, random.random(images) < (confidence - bias).clip(0, 1)


@pytest.mark.parametrize("labels", [20, 200])
def test_labels_bring_the_estimate_to_the_truth_and_the_interval_holds_it(labels):
    hits, errors, alone = 0, [], []
    for seed in range(200):
        confidence, right = made_up(seed)
        without = Estimate(0.75, 0.5, 1.0)
        chosen = images_to_label(confidence, labels, seed)
        chances = right_chances(confidence, without.value)
        found = with_labels(without, chances, chosen, right[chosen])
        hits += found.low <= right.mean() <= found.high
        errors.append(abs(found.value - right.mean()))
        alone.append(abs(right[chosen].mean() - right.mean()))
    assert hits / 200 > 0.86
    assert numpy.mean(errors) < numpy.mean(alone) + 0.005
    assert numpy.mean(errors) < 0.8 * math.sqrt(0.25 / labels)


def test_all_labels_leave_no_doubt():
    confidence, right = made_up(1)
    everything = numpy.arange(len(right))
    without = Estimate(0.9, 0.7, 1.0)
    found = with_labels(without, right_chances(confidence, 0.9), everything, right)
    assert found.value == pytest.approx(right.mean(), abs=1e-3)
    assert found.reach < 1e-3


@pytest.mark.parametrize(("labels", "stated"), [(10, 0.03), (100, 0.06)])
def test_labels_decide_where_the_estimate_errs_twice_as_much_as_it_says(labels, stated):
    random, hits = numpy_stream(labels, "contradiction", str(stated)), 0
    for seed in range(200):
        accuracy = random.uniform(0.4, 0.9)
        chances = right_chances(random.beta(4, 1.5, 400).clip(0.05, 0.99), accuracy)
        right = random.random(400) < chances
        value = float(numpy.clip(right.mean() + 2 * stated * random.normal(), 0.02, 0.98))
        without = Estimate(value, value - 1.645 * stated, value + 1.645 * stated)
        chosen = images_to_label(chances, labels, seed)
        found = with_labels(without, right_chances(chances, value), chosen, right[chosen])
        hits += found.low <= right.mean() <= found.high
    assert hits / 200 >= 0.88


def test_a_few_labels_that_are_all_right_do_not_make_sure():
    without = Estimate(0.7, 0.4, 1.0)
    chances = right_chances(numpy.full(500, 0.7), 0.7)
    found = with_labels(without, chances, numpy.arange(5), numpy.ones(5, bool))
    assert found.low < 0.85
    assert with_labels(without, chances, numpy.arange(1), numpy.ones(1, bool)) == without


def test_as_many_labels_as_are_said_bring_the_interval_to_five_points():
    confidence, right = made_up(2, images=3000)
    without = Estimate(0.6, 0.4, 0.8)
    chances = right_chances(confidence, without.value)
    count = labels_needed(without, chances)
    chosen = images_to_label(confidence, count)
    assert 100 < count < 300
    assert with_labels(without, chances, chosen, right[chosen]).reach == pytest.approx(0.05, 0.15)
    # A good model's labels are nearly all right, which two more answers make less sure.
    sure = right_chances(numpy.full(3000, 0.97), 0.97)
    count = labels_needed(without, sure)
    drawn = numpy_stream(0, "good").random(3000) < 0.97
    rows = numpy.arange(0, 3000, 3000 // count)[:count]
    assert with_labels(Estimate(0.97, 0.77, 1.0), sure, rows, drawn[rows]).reach < 0.06
    assert labels_needed(Estimate(0.6, 0.57, 0.63), chances) == 0
    assert labels_needed(without, chances[:40]) <= 40
