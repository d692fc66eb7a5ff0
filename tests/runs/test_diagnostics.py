"""What speaks against a run's accuracy, on made-up rows with a known answer."""

import html
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits

import feddg
from feddg.diagnostics import Diagnostic
from feddg.evaluation.metrics import Predictions, measure
from feddg.records import ID_VAL, TEST, ClientRow, MetricRow
from feddg.report.page import write_report
from feddg.report.run_page import result_sentence
from feddg.runs.diagnostics import (
    DOMAIN_AT_CHANCE,
    FALLS,
    LEARNED_NOTHING,
    MAJORITY,
    NOTHING_GAINED,
    SITE_FAR_BELOW,
    STILL_RISING,
    TOO_LARGE,
    UNSTEADY,
    UNTRAINED,
    about_accuracy,
    about_domains,
    about_rate,
    about_result,
    about_sites,
    causes_of_failure,
    lower_rate,
    result_sentence_of,
    split_accuracy,
    usual_rate,
)
from feddg.runs.reading import read_run
from feddg.runs.table import NumberTable
from run_folders import FolderMaker, numbers, table_of
from trained_runs import trained_run

START = [[0, 0, 60], [0, 0, 20], [0, 0, 20]]


def row(round_, counts, domain="photo"):
    counts = np.array(counts)
    metrics = measure(Predictions(counts))
    accuracy, examples = metrics.pop("accuracy"), int(counts.sum())
    return numbers(round_, TEST, domain, accuracy, examples, confusion=counts.tolist(), **metrics)


def curve(accuracies, examples=1000):
    """Evaluations of a balanced two-class test set with these accuracies from round 0 on."""
    half = examples // 2
    rows = []
    for round_, accuracy in enumerate(accuracies):
        right = round(accuracy * half)
        rows.append(row(round_, [[right, half - right], [half - right, right]]))
    return table_of(*rows)


def codes(table):
    return [found.code for found in about_accuracy(table, table.round)]


def test_an_interval_of_recall_counts_images_that_several_models_label_once():
    counts = [[60, 40], [20, 80]]
    once, thrice = (
        split_accuracy(table_of(numbers(1, TEST, "a", 0.7, 200, confusion=confusion)))
        for confusion in (counts, [[3 * count for count in row] for row in counts])
    )
    assert once.balanced_interval == pytest.approx(thrice.balanced_interval)


def test_a_model_that_names_one_class_is_no_better_than_always_answering_it():
    """The case of the issue: 60 % correct, one class 60 % of the images, 98 % of predictions."""
    table = table_of(row(0, START), row(1, [[589, 7, 0], [198, 6, 0], [192, 4, 4]]))
    (majority,) = about_accuracy(table, 1)
    assert (majority.code, majority.severity) == (MAJORITY, "warning")
    assert "most frequent class: that is right for 59.6% of the held-out images" in majority.text
    assert majority.advice
    at = split_accuracy(table.where(round=1))
    assert at.most_predicted == (0, pytest.approx(979 / 1000))
    assert at.balanced == pytest.approx(np.mean([589 / 596, 6 / 204, 4 / 200]))
    assert at.guessing == pytest.approx(1 / 3)


def test_a_model_that_learned_is_not_accused():
    good = [[550, 30, 16], [20, 170, 14], [10, 20, 170]]
    assert codes(table_of(row(0, START), row(1, good))) == []


def test_a_high_accuracy_with_a_balanced_one_near_chance_is_found():
    """Slightly better than the constant by images, but classes are told apart by no more."""
    counts = [[9000, 0], [995, 5]]
    found = about_accuracy(table_of(row(1, counts)), 1)
    assert found[0].code == MAJORITY


@given(
    st.integers(2, 6),
    st.data(),
)
def test_every_constant_model_is_found_whatever_the_classes(classes, data):
    support = data.draw(st.lists(st.integers(1, 300), min_size=classes, max_size=classes))
    named = data.draw(st.integers(0, classes - 1))
    counts = np.zeros((classes, classes), int)
    counts[:, named] = support
    assert MAJORITY in codes(table_of(row(3, counts)))


def test_one_constant_serves_all_domains():
    """Each domain has another commonest class: no constant reaches the mean of their shares."""
    rows = [row(1, [[80, 0], [20, 0]], "a"), row(1, [[20, 0], [80, 0]], "b")]
    assert split_accuracy(table_of(*rows)).constant == pytest.approx(0.5)


def test_rows_without_confusion_use_their_recorded_metrics():
    metrics = {"balanced_accuracy": 0.26, "largest_class_share": 0.59}
    recorded = table_of(numbers(2, TEST, "photo", 0.6, 100, **metrics))
    at = split_accuracy(recorded)
    assert (at.constant, at.balanced, at.predicted) == (0.59, 0.26, None)
    assert codes(recorded) == [MAJORITY]


def test_an_earlier_round_is_judged_by_the_classes_of_a_later_one():
    """A good model of rare classes, whose round has no confusion matrix."""
    for domains in (
        {"photo": [[800, 100], [10, 90]]},
        {"a": [[800, 100], [20, 80]], "b": [[80, 20], [100, 800]]},
    ):
        last = [row(9, counts, domain) for domain, counts in domains.items()]
        rows = {MAJORITY in codes(table_of(*last))}
        earlier = []
        for domain, counts in domains.items():
            told = measure(Predictions(np.array(counts)))
            earlier.append(numbers(4, TEST, domain, examples=int(np.sum(counts)), **told))
        table = table_of(*earlier, *last)
        of_earlier = [one.code for one in about_accuracy(table, 4)]
        rows |= {MAJORITY in of_earlier}
        assert rows == {False}


def test_a_few_patients_are_no_proof_that_a_rare_class_is_known():
    counts = [[890, 10], [66, 34]]
    accuracy, *others = row(1, counts)
    assert MAJORITY not in codes(table_of([accuracy, *others]))
    of_patients = accuracy.model_copy(update={"independent": 30.0})
    assert MAJORITY in codes(table_of([of_patients, *others]))


def test_below_the_start_is_found():
    assert UNTRAINED in codes(curve([0.7, 0.65, 0.69, 0.66]))
    assert UNTRAINED not in codes(curve([0.7, 0.69]))  # within chance
    assert codes(curve([0.5, 0.7, 0.71, 0.7])) == []


def test_a_rise_at_the_end_is_told_from_noise(subtests):
    for accuracies, rising in [
        ([0.5, 0.6, 0.65, 0.7, 0.75], True),
        ([0.5, 0.6, 0.7, 0.8], True),
        ([0.5, 0.6, 0.7], False),  # one step between trained rounds tells nothing
        ([0.5, 0.6, 0.85, 0.86, 0.861], False),  # levelled
        ([0.5, 0.8, 0.82, 0.79, 0.81, 0.80], False),
        ([0.5, 0.8, 0.75, 0.7, 0.65], False),
        ([0.5, *np.linspace(0.55, 0.9, 20)], True),
        ([0.5, *(0.9 + 0.01 * math.sin(7 * r) for r in range(30))], False),
    ]:
        with subtests.test(accuracies=accuracies, rising=rising):
            assert (STILL_RISING in codes(curve(accuracies))) == rising


@pytest.mark.parametrize(
    ("accuracies", "examples", "unsteady"),
    [
        ([0.2, 0.42, 0.6, 0.3, 0.64, 0.43], 400, True),
        ([0.2, 0.42, 0.6, 0.3, 0.64, 0.43], 20, False),  # within the chance of the images
        ([0.2, 0.3, 0.5, 0.52], 1000, False),  # it levels off
        ([0.2, 0.6, 0.3, 0.6, 0.61, 0.6, 0.61], 1000, False),  # it has calmed down
    ],
)
def test_a_curve_that_goes_up_and_down_at_its_end_gets_a_word(accuracies, examples, unsteady):
    found = {
        one.code: one for one in about_accuracy(curve(accuracies, examples), len(accuracies) - 1)
    }
    assert (UNSTEADY in found) == unsteady
    if unsteady:
        assert "by 30.0 points" in found[UNSTEADY].text


def validated(accuracies, images=500, domains=3, weights="last"):
    """Evaluations of in-domain validation, an evaluation a round, beside a test domain."""
    domain_rows = [
        numbers(
            round_,
            split,
            f"domain {number}",
            min(1.0, max(0.0, float(accuracy))),
            examples=images,
            weights=weights,
        )
        for round_, accuracy in enumerate(accuracies, start=1)
        for split in (ID_VAL, TEST)
        for number in range(domains)
    ]
    return table_of(*domain_rows)


FALLING = [*np.linspace(0.6, 0.9, 8), *np.linspace(0.9, 0.8, 16)]
LEVEL = [*np.linspace(0.6, 0.9, 8), *[0.9] * 16]


@pytest.mark.parametrize(
    ("accuracies", "images", "falls"),
    [
        (FALLING, 500, True),
        (LEVEL, 500, False),
        ([0.867, 0.886, 0.909, 0.879], 200, True),  # that of four budgets
        ([0.867, 0.886, 0.909, 0.879], 10, False),  # within the chance of the images
        ([0.9, 0.8], 500, True),
        ([0.9], 500, False),
        ([0.867, 0.905, 0.909, 0.901], 100_000, False),  # less than a point
    ],
)
def test_a_fall_of_in_domain_validation_gets_a_word(accuracies, images, falls):
    found = {
        one.code: one for one in about_accuracy(validated(accuracies, images), len(accuracies))
    }
    assert (FALLS in found) == falls
    if falls:
        assert found[FALLS].severity == "note"
        for advice in ("schedule=cosine", "momentum=0.9", "--averaging ema"):
            assert advice in found[FALLS].advice


@pytest.mark.parametrize(("curve_", "least", "most"), [(FALLING, 0.9, 1), (LEVEL, 0, 0.15)])
def test_a_fall_is_told_from_noise(curve_, least, most):
    """Rounds that swing by two points, as a last model does."""
    random = np.random.default_rng(5)
    curves = [np.array(curve_) + 0.02 * random.standard_normal(len(curve_)) for _ in range(60)]
    told = [FALLS in codes(validated(one)) for one in curves]
    assert least <= np.mean(told) <= most


def test_averages_that_were_measured_every_round_are_judged_by_themselves():
    last, ema = validated(FALLING), validated(LEVEL, weights="ema")
    both = table_of([*last, *ema])
    assert FALLS in {one.code for one in about_accuracy(both, 24)}
    assert FALLS not in {one.code for one in about_accuracy(both, 24, weights="ema")}
    late = table_of([*last, *ema.where(round=24)])
    assert FALLS in {one.code for one in about_accuracy(late, 24, weights="ema")}


class Started(FolderMaker):
    """It begins with a classifier in closed form that is right for 61 %."""

    end = 0.62

    def accuracy(self, split, domain, round_, weights="last"):
        return 0.61 if round_ == 0 else self.end


@pytest.mark.parametrize(
    ("end", "head", "told"),
    [(0.62, "ridge", True), (0.8, "ridge", False), (0.62, "random", False), (0.3, "ridge", False)],
)
def test_rounds_that_gained_nothing_over_the_closed_form_are_named(tmp_path, end, head, told):
    maker = Started(tmp_path / "run", rounds=5, planned=5)
    maker.end = end
    run = read_run(maker.write())
    run.settings["train"]["head"] = head
    found = {one.code: one for one in about_result(run)}
    assert (NOTHING_GAINED in found) == told
    if told:
        assert found[NOTHING_GAINED].text.startswith(
            "5 rounds of training gained no more than chance"
        )


LOSSES = (3, 2.9, 2.0, 1.9, 1.0, 0.9)


def causes(folder, weights="imagenet", images=1000, losses=LOSSES, backbone="resnet18", inside=0.4):
    """Why a run of three classes with this loss by round learned nothing."""
    maker = FolderMaker(folder, rounds=len(losses), planned=len(losses))
    run = read_run(maker.write())
    counts = np.array([[1000 * inside, 1000 * (1 - inside)], [1000 * (1 - inside), 1000 * inside]])
    own = row(maker.rounds, counts.astype(int))
    vars(run)["result"] = table_of([r.model_copy(update={"split": ID_VAL}) for r in own])
    rounds = [r.model_copy(update={"terms": {"l": v}}) for r, v in zip(run.rounds, losses)]
    vars(run)["rounds"] = rounds
    run.settings["model"] |= {"weights": weights, "backbone": backbone}
    only = run.clients.clients[0].model_copy(update={"classes": [images] * 3})
    vars(run)["clients"] = run.clients.model_copy(update={"clients": [only]})
    return [(cause.text.partition(" (")[0], cause.flags) for cause in causes_of_failure(run)]


def test_causes_of_a_failure_are_in_the_order_that_a_run_shows(tmp_path):
    level = (3, 1.0, 1.0, 1.0, 1.0, 1.0)
    pretrained = ("--backbone", "resnet18", "--weights", "imagenet")
    small = ("too low a learning rate", ("--lr", "0.001"))
    assert causes(tmp_path / "a") == [("too few rounds", ("--rounds", "24")), small]
    assert causes(tmp_path / "b", weights=None, images=12)[:3] == [
        ("too few rounds", ("--rounds", "24")),
        ("too few images", pretrained),
        ("no pretrained weights", pretrained),
    ]
    assert causes(tmp_path / "c", None, losses=level) == [
        ("no pretrained weights", pretrained),
        small,
    ]
    assert causes(tmp_path / "d", images=12, losses=level) == [("too few images", ()), small]
    assert causes(tmp_path / "f", None, losses=level, backbone="features") == [small]
    unlike = causes(tmp_path / "g", inside=0.9)
    assert unlike[0] == ("a held-out domain unlike the others, or with other labels", ())
    assert unlike[1:] == [("too few rounds", ("--rounds", "24")), small]
    rising = causes(tmp_path / "e", losses=(1.0, 1.0, 1.0, 2.0, 2.0, 2.0))
    assert rising == [("too high a learning rate", ("--lr", "1e-05"))]


def test_of_losses_that_nobody_sent_nothing_is_said(tmp_path):
    run = read_run(FolderMaker(tmp_path / "run", rounds=6, planned=6).write())
    vars(run)["rounds"] = [row.model_copy(update={"terms": {}}) for row in run.rounds]
    texts = [cause.text for cause in causes_of_failure(run)]
    assert "too few rounds (only 6 rounds)" in texts


class Fallen(FolderMaker):
    """Training makes 22 % of 47 %, then recovers a little, while its loss falls."""

    start = 0.47

    def accuracy(self, split, domain, round_, weights="last"):
        return self.start if round_ == 0 else 0.2 + 0.01 * round_

    def round_row(self, round_):
        terms = {"cross_entropy": 2 - 0.2 * round_}
        return super().round_row(round_).model_copy(update={"terms": terms})


def test_where_training_hurts_nobody_is_told_to_train_longer(tmp_path):
    run = read_run(Fallen(tmp_path / "run", rounds=6, planned=6).write())
    found = {one.code: one for one in about_result(run)}
    assert UNTRAINED in found
    assert "still-rising" not in found
    assert "labels mean nothing" not in str(found[UNTRAINED])
    assert "keep the closed form" in found[UNTRAINED].advice
    assert not any("longer" in one.advice for one in found.values())
    first, second = causes_of_failure(run)
    assert "hurts (47.0% right before round 1, 26.0% at the end)" in first.text
    assert (first.flags[0], second.flags) == ("--lr", ("--method", "ridge"))
    assert "rounds" not in first.text + second.text


def test_a_start_that_was_a_guess_has_nothing_to_keep(tmp_path):
    maker = Fallen(tmp_path / "run", rounds=6, planned=6)
    maker.start = 0.3
    run = read_run(maker.write())
    assert ("--method", "ridge") not in [cause.flags for cause in causes_of_failure(run)]


def test_a_mean_over_domains_is_not_called_a_share_of_their_images(tmp_path):
    maker = FolderMaker(tmp_path / "run", test=["photo", "sketch"], training=["cartoon"])
    said = result_sentence_of(maker.write(), "final", 3)
    assert "on average over 2 domains nobody trained on (photo, sketch; " in said
    assert " images in all), the model was right for " in said
    assert "(the mean over these domains)" in result_sentence(read_run(maker.folder))


def test_a_guess_from_which_training_fell_is_not_worth_keeping():
    guess, worse = [[90, 0], [60, 0]], [[40, 50], [40, 20]]
    found = about_accuracy(table_of(row(0, guess), row(1, worse)), 1)
    advice = {one.code: one.advice for one in found}
    assert advice == {
        MAJORITY: "Its labels mean nothing: look at the images.",
        UNTRAINED: "Training hurts: lower the learning rate.",
    }
    (majority,) = [one for one in found if one.code == MAJORITY]
    assert "within chance" not in majority.text  # 40 % of 150 images against 60 %


def test_a_method_that_does_not_train_is_told_nothing_of_rates_and_rounds(tmp_path):
    maker = Astray(tmp_path / "run", rounds=1, planned=1)
    run = read_run(maker.write())
    run.settings["method"] = {"name": "ridge"}
    run.settings["train"] = {"lr": 0.001, "rounds": 1}
    advice = {one.code: one.advice for one in about_result(run)}
    assert "learning rate" not in advice[MAJORITY]
    assert "longer" not in advice[MAJORITY]
    assert TOO_LARGE not in advice
    for cause in causes_of_failure(run):
        assert "--lr" not in cause.flags
        assert "--rounds" not in cause.flags or "fedavg" in cause.flags
        assert "rate" not in cause.text


def test_a_model_that_tells_classes_apart_is_not_useless_for_one_frequent_class():
    """The case of the issue: 60 % of one class, balanced accuracy 51.8, guessing has 25."""
    counts = [[360, 80, 80, 80], [60, 70, 10, 10], [60, 10, 70, 10], [60, 10, 10, 20]]
    table = table_of(row(1, counts))
    at = split_accuracy(table.where(round=1))
    assert at.accuracy.share < at.constant
    assert at.balanced > 0.4 > at.guessing
    assert MAJORITY not in codes(table)


def test_before_any_training_nothing_is_claimed():
    assert codes(table_of(row(0, START))) == []
    assert about_accuracy(table_of(), None) == []


def test_one_sentence_is_in_the_log_in_the_summary_and_on_the_page(tmp_path, caplog):
    train = {"rounds": 2, "local_steps": 1, "lr": 1e-9}
    data = {"source": "digits", "id_val": 0.02, "id_test": 0}
    every = {"every": 1}
    folder = trained_run(
        tmp_path / "runs", tmp_path / "cache", train=train, data=data, evaluate=every
    )
    write_report([folder], folder / "report.html")
    told = json.loads((folder / "summary.json").read_text("utf-8"))["diagnostics"]
    assert {"small-validation", "few-images-of-a-class", MAJORITY} <= {one["code"] for one in told}
    page = html.unescape((folder / "report.html").read_text("utf-8"))
    for one in told:
        assert set(one) == {"code", "severity", "text", "advice"}
        assert one["text"] in page
        assert one["code"] in LEARNED_NOTHING or one["text"] in caplog.text
    assert read_run(folder).summary.diagnostics == [Diagnostic(**one) for one in told]


# A training domain that is not learned while the others are.


def in_domain(accuracies, examples=100, round_=1, largest=0.1):
    """In-domain validation and test of these domains."""
    return table_of(
        *(
            numbers(round_, split, domain, accuracy, examples // 2, largest_class_share=largest)
            for domain, accuracy in accuracies.items()
            for split in ("id_val", "id_test")
        )
    )


def test_a_domain_at_chance_is_named_where_the_others_are_learned(subtests):
    for accuracies, fields, named in [
        ({"a": 0.6, "b": 0.7, "c": 0.1}, {}, ["c"]),
        ({"a": 0.6, "b": 0.7, "c": 0.02}, {}, ["c"]),
        ({"a": 0.9, "b": 0.9, "c": 0.08}, {"largest": 0.5}, ["c"]),  # two classes, exchanged
        ({"a": 0.9, "b": 0.9, "c": 0.5}, {"largest": 0.5}, ["c"]),
        ({"a": 0.9, "b": 0.9, "c": 0.08}, {"round_": 0}, []),
        ({"a": 0.6, "b": 0.7, "c": 0.3}, {}, []),  # harder, and learned
        ({"a": 0.12, "b": 0.2, "c": 0.05}, {}, []),  # nothing is learned yet
        ({"a": 0.6, "b": 0.7, "c": 0.1}, {"examples": 6}, []),  # too few images to tell
        ({"c": 0.1}, {}, []),  # no others
        ({"a": 0.6, "b": 0.7, "c": 0.1}, {"largest": 1.0}, []),  # one class a domain
    ]:
        with subtests.test(accuracies=accuracies, fields=fields, named=named):
            found = about_domains(in_domain(accuracies, **fields))
            assert [one.text.split("'")[1] for one in found] == named


def test_a_domain_whose_rare_class_is_known_is_learned():
    table = in_domain({"a": 0.94, "b": 0.94, "c": 0.917}, largest=0.95, examples=1000)
    known = [
        MetricRow(**dict(one) | {"metric": "balanced_accuracy", "value": 0.9})
        for one in table.where(metric="accuracy")
    ]
    assert list(about_domains(NumberTable([*table, *known]))) == []


def test_a_round_without_one_of_the_domains_is_not_on_the_curve():
    rows = [numbers(round_, TEST, "a", 0.9) for round_ in range(1, 5)]
    rows += [numbers(round_, TEST, "b", 0.5) for round_ in (1, 2, 4)]
    assert table_of(*rows).curve(TEST) == {1: 0.7, 2: 0.7, 4: 0.7}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Digits of three places of one style, and a few to hold out, by what is wrong with ``c``."""
    root = tmp_path_factory.mktemp("places")
    scans, labels = load_digits(return_X_y=True)
    scans = np.uint8(scans.reshape(-1, 8, 8) * 255 / 16)
    order = np.random.default_rng(0).permutation(len(labels))[:780]
    faults = {
        "none": lambda image, label: (image, label),
        "exchanged": lambda image, label: (image, label ^ 1),
        "dark": lambda image, label: (image // 32, label),
    }
    for fault, change in faults.items():
        for place, row in enumerate(order.tolist()):
            domain = ("a", "b", "c", "out")[min(place // 240, 3)]
            image, label = scans[row], int(labels[row])
            if domain == "c":
                image, label = change(image, label)
            folder = root / fault / domain / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{row}.png")
    return root


@pytest.mark.parametrize(
    ("fault", "seed"),
    [("none", 0), ("none", 1), ("exchanged", 0), ("dark", 0)],
)
def test_a_place_with_exchanged_labels_or_other_greys_is_named(places, tmp_path, fault, seed):
    done = feddg.run(
        data={"source": "folder", "root": places / fault, "image_size": 16}
        | {"id_val": 0.15, "id_test": 0.15},
        hold_out="out",
        model={"backbone": "cnn", "weights": None},
        clients={"number": 3, "partition": "domain"},
        train={"rounds": 2, "local_epochs": 1, "lr": 0.003, "augmentation": "none"},
        evaluate={"pictures": False},
        seed=seed,
        out=tmp_path,
        cache=tmp_path / "cache",
        report=False,
    )
    found = [one for one in done.summary.diagnostics if one.code == DOMAIN_AT_CHANCE]
    assert len(found) == (fault != "none")
    assert all("domain 'c'" in one.text and "labels" in one.advice for one in found)


class Astray(FolderMaker):
    rate, loss, level = 100.0, 2.0, 0.0

    def experiment(self):
        return super().experiment() | {"train": {"rounds": self.planned, "lr": self.rate}}

    def accuracy(self, split, domain, round_, weights="last"):
        return self.level

    def confusion(self):
        right = super().confusion()
        return right if self.level else [[sum(row), *[0] * (len(row) - 1)] for row in right]

    def round_row(self, round_):
        return super().round_row(round_).model_copy(update={"terms": {"cross_entropy": self.loss}})


@pytest.mark.parametrize(
    ("rate", "loss", "said"),
    [
        (100.0, math.log(3), "it is 100, where the preset has 0.001."),  # of dead units: at chance
        (100.0, math.nan, "the preset has 0.001 and the training loss is not finite."),
        (3e-5, 1e9, "the training loss ended at 1e+09, that of guessing is 1.1."),
        (3e-5, math.log(3), None),
    ],
)
def test_a_learning_rate_that_is_too_large_is_named(tmp_path, rate, loss, said):
    maker = Astray(tmp_path / "run")
    maker.rate, maker.loss = rate, loss
    found = about_result(read_run(maker.write()))
    assert {one.code for one in found} & LEARNED_NOTHING
    if said is None:
        assert found[0].code != TOO_LARGE
        return
    assert found[0].code == TOO_LARGE
    assert found[0].text.endswith(said)
    assert found[0].advice == f"Lower train.lr: --lr {1e-3 if rate > 1 else 3e-6:g}."


def test_a_loss_that_is_a_sum_over_images_is_no_sign_of_a_large_rate(tmp_path):
    maker = Astray(tmp_path / "run")
    maker.rate, maker.loss = 3e-5, 32 * math.log(3)
    run = read_run(maker.write())
    assert [one.code for one in about_rate(run)] == [TOO_LARGE]
    run.settings["method"] = {"name": "afl", "settings": {"afl_over": "domains"}}
    assert not [*about_rate(run)]
    run.settings["method"] = {"name": "mixstyle+mine", "settings": {}}  # it may weigh the loss
    assert not [*about_rate(run)]


def test_the_presets_rate_is_for_its_optimizer_alone(tmp_path):
    maker = Astray(tmp_path / "run")
    maker.rate, maker.loss = 100.0, 1e9
    run = read_run(maker.write())
    assert usual_rate(run) == 1e-3  # SGD
    run.settings["train"] = run.settings["train"] | {"optimizer": "adam", "lr": 0.1}
    assert usual_rate(run) is None
    assert lower_rate(run) == pytest.approx(0.01)


def test_of_a_model_that_learned_no_rate_is_named(tmp_path):
    maker = Astray(tmp_path / "run")
    maker.level = 0.9
    record = read_run(maker.write())
    assert TOO_LARGE not in {one.code for one in about_result(record)}
    assert [one.code for one in about_rate(record)] == [TOO_LARGE]


# A site whose images or labels others cannot make anything of.


@pytest.mark.parametrize(
    ("left_out", "named"),
    [
        ({0: 0.30, 1: 0.07, 2: 0.36, 3: 0.33}, [1]),
        ({0: 0.30, 1: 0.20, 2: 0.36, 3: 0.33}, []),
        ({0: 0.30, 1: 0.01}, []),  # which of two is the other's fault?
        ({0: 0.0, 1: 1.0, 2: 1.0}, [0]),
    ],
)
def test_a_site_far_below_the_others_when_it_is_left_out_is_named(left_out, named):
    clients = [
        ClientRow(id=id, name=f"lab {id}", domains=[300], classes=[150, 150]) for id in left_out
    ]
    run = SimpleNamespace(
        setup=SimpleNamespace(left_out=left_out),
        rounds=[],
        clients=SimpleNamespace(clients=clients),
        client_name=lambda id: f"lab {id}",
    )
    found = list(about_sites(run))
    assert [one.code for one in found] == [SITE_FAR_BELOW] * len(named)
    assert all(f"'lab {id}'" in one.text for id, one in zip(named, found))


def test_in_domain_validation_decides_whether_training_was_too_short():
    """Whoever trains longer because a held-out domain says so has chosen by it."""

    def both(inside, outside):
        rows = []
        for round_, (own, held_out) in enumerate(zip(inside, outside, strict=True)):
            rows += row(round_, [[round(500 * held_out), 500], [500, round(500 * held_out)]])
            level = round(500 * own)
            counts = [[level, 500 - level], [500 - level, level]]
            told = row(round_, counts)
            rows += [number.model_copy(update={"split": ID_VAL}) for number in told]
        return table_of(rows)

    (majority,) = [m for m in about_accuracy(both([0.5, 0.8], [0.5, 0.5]), 1) if m.code == MAJORITY]
    assert majority.advice.startswith(
        "Its labels mean nothing: in-domain it is right for 80.0%, so"
    )
    rising, level = [0.5, 0.6, 0.65, 0.7, 0.75], [0.7, 0.71, 0.7, 0.71, 0.7]
    assert STILL_RISING in codes(both(rising, level))
    assert STILL_RISING not in codes(both(level, rising))
