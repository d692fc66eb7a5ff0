"""Will a run's model travel: what is kept, what is said, what labels change."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import numpy
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

import feddg
from feddg.cli import app
from feddg.data.data_set import load_source
from feddg.diagnostics import Diagnostic
from feddg.errors import DataError, RunError
from feddg.models.backbones import SmallCNN
from feddg.prediction import travel as module
from feddg.prediction.estimators import Familiar, LeftOutSite, Reference, Signals
from feddg.prediction.evaluate import evaluate_run, write_image_results
from feddg.prediction.predict import predict
from feddg.prediction.travel import (
    FOREIGN,
    MEASURED,
    STAND_IN,
    TRAVEL,
    UNLIKE,
    USELESS,
    NewSite,
    Recorder,
    TravelFile,
    calibrate,
    new_site,
    travel,
)
from feddg.records import EstimateRow
from feddg.report.predictions_page import sites_table
from feddg.report.run_page import left_out_section, verdict
from feddg.rng import numpy_stream
from feddg.runs.calibration import Estimate, at_a_new_site
from feddg.runs.diagnostics import MAJORITY
from feddg.runs.reading import read_run
from feddg.text import SPACE
from run_folders import FolderMaker
from trained_runs import SETTINGS, SHORT, read_csv, trained_run


def write_domain(folder, domain, count=200):
    """Writes digits of a domain; returns the true class of each file."""
    table = load_source("digits")
    rows = numpy.flatnonzero(table.domains == table.domain_id(domain))
    rows = rows[:: len(rows) // count][:count]  # of all classes
    folder.mkdir(parents=True, exist_ok=True)
    truths = {}
    for number, row in enumerate(rows):
        file = folder / f"{number:04d}.png"
        Image.fromarray(table.images[row]).save(file)
        truths[str(file)] = table.class_names[table.labels[row]]
    return truths


@pytest.fixture(scope="module")
def sketches(tmp_path_factory):
    """The folder of the domain that nobody trained on, and the truth about its images."""
    folder = tmp_path_factory.mktemp("sketch")
    return folder, write_domain(folder, "sketch")


@pytest.fixture
def unlimited(monkeypatch):
    """Nothing is refused: for models of other styles, sketches of digits are something else."""
    monkeypatch.setattr(Familiar, "limit", lambda self, images: math.inf)


def accuracy(run, folder, truths):
    rows = list(predict(run, folder))
    return sum(row.label == truths[row.file] for row in rows) / len(rows)


SHORTER = {"train": {**SETTINGS["train"], "rounds": 1}, "evaluate": {"every": 1}}


@pytest.fixture(scope="module")
def beside(train_once):
    """Runs like the finished one that held other domains out."""
    return [train_once(hold_out=domain, **SHORTER) for domain in ("ink", "chalk", "photo")]


@pytest.mark.usefixtures("unlimited")
def test_the_truth_is_within_the_interval_at_a_domain_that_took_no_part(
    finished, cache, sketches, beside
):
    folder, truths = sketches
    found = travel(finished, folder, beside=beside, cache=cache)
    truth = accuracy(finished, folder, truths)
    assert found.expected.low <= truth <= found.expected.high
    assert [site.site for site in found.calibration.sites] == ["ink", "chalk", "photo"]
    assert found.calibration.models == "runs"
    for site, run in zip(found.calibration.sites, beside):
        assert site.accuracy == pytest.approx(read_run(run).accuracy)
    assert len(found.images) == 200
    assert sum(one.answers for one in found.classes) == 200
    # What is thought of single images comes to what is thought of all.
    assert 1 - numpy.mean([one.risk for one in found.images]) == pytest.approx(found.expected.value)
    risks = [one.risk for one in found.images]
    assert risks == sorted(risks, reverse=True)
    labels = {row.file: row.label for row in predict(finished, folder)}
    assert {one.file: one.label for one in found.images} == labels
    # It is kept: the next call needs no other run.
    assert travel(finished, folder, cache=cache).expected == found.expected
    (finished / TRAVEL).unlink()


@pytest.fixture(scope="module")
def ridge(train_once):
    """A run whose features are as they were."""
    return train_once("ridge", train={"batch_size": 64})


@pytest.mark.usefixtures("unlimited")
def test_a_network_from_scratch_has_no_site_to_rest_on(finished, cache, sketches):
    found = travel(finished, sketches[0], cache=cache)
    assert found.calibration.sites == ()
    assert "travel-no-sites" in [one.code for one in found.diagnostics]
    assert found.expected.high - found.expected.low > 0.3


def test_runs_of_another_kind_do_not_stand_beside(finished, cache, sketches, ridge):
    with pytest.raises(RunError, match="another method or other classes"):
        travel(finished, sketches[0], beside=[ridge], cache=cache)


def test_a_site_like_those_of_training_is_expected_to_do_as_well(finished, cache, tmp_path):
    truths = write_domain(tmp_path / "site", "chalk")
    found = travel(finished, tmp_path / "site", cache=cache)
    truth = accuracy(finished, tmp_path / "site", truths)
    assert found.expected.low <= truth <= found.expected.high
    assert found.advice.code != FOREIGN
    assert found.signals.novelty < found.signals.limit


def test_the_runs_images_are_looked_at_once(finished, cache, sketches, monkeypatch):
    first = travel(finished, sketches[0], cache=cache)
    kept = TravelFile.read(finished / TRAVEL)
    monkeypatch.setattr(module, "load_images", None)
    again = travel(finished, sketches[0], cache=cache)
    assert again.expected == first.expected
    assert again.signals == first.signals
    assert again.signals.limit is not None
    assert again.calibration == kept == first.calibration
    assert (finished / TRAVEL).stat().st_mode & 0o077 == 0


def test_another_models_calibration_is_not_taken(finished, cache, sketches):
    first = travel(finished, sketches[0], cache=cache)
    stranger = first.calibration.model_copy(update={"weights": "another's"})
    (finished / TRAVEL).write_text(stranger.to_text())
    assert travel(finished, sketches[0], cache=cache).calibration == first.calibration
    (finished / TRAVEL).write_text("{}")
    with pytest.raises(RunError, match=r"travel\.json is damaged"):
        travel(finished, sketches[0], cache=cache)
    (finished / TRAVEL).unlink()


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Two hundred images of noise."""
    folder, random = tmp_path_factory.mktemp("foreign"), numpy_stream(0, "foreign")
    for number in range(200):
        pixels = random.integers(0, 256, (32, 32, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03d}.png")
    return folder


@pytest.mark.parametrize("count", [20, 200])
def test_of_images_that_show_something_else_no_accuracy_is_printed(
    finished, cache, foreign, tmp_path, count
):
    files = sorted(map(str, foreign.glob("*.png")))[:count]
    page = tmp_path / "page.html"
    found = feddg.travel(finished, files, cache=cache, html=page)
    assert (found.advice.code, found.advice.severity) == (FOREIGN, "warning")
    assert found.advice.text.startswith(UNLIKE)
    assert "do not tell whether this is a new style or other objects" in found.advice.text
    assert f"label {min(count, 50)} of them" in found.advice.advice
    assert len(found.diagnostics) == 1  # nothing that contradicts it
    assert found.expected is found.without_labels is None
    assert found.fields()["value"] is None
    assert {one.right for one in found.classes} == {one.risk for one in found.images} == {None}
    text = page.read_text("utf-8")
    assert "Expected accuracy" not in text
    assert "Probably wrong" not in text
    ended = CliRunner().invoke(app, ["travel", str(finished), *files, "--device", "cpu"])
    assert ended.exit_code == 0, ended.output
    words = " ".join(ended.output.split())
    assert found.advice.text in words
    assert "Expected accuracy" not in words
    assert "right in" not in words


def test_few_images_and_single_classes_of_a_site_are_no_false_alarm(finished, cache, tmp_path):
    truths = write_domain(tmp_path / "site", "ink", 400)
    files, random = sorted(truths), numpy_stream(0, "folders")
    folders = [random.choice(files, count, replace=False).tolist() for count in (20, 50) * 2]
    folders += [[f for f in files if truths[f] == label] for label in sorted({*truths.values()})]
    for own in folders:
        assert travel(finished, own, cache=cache).advice.code in {"travels", "label-first"}


@pytest.fixture
def no_finite_output(finished, cache, monkeypatch):
    calibrate(finished, Recorder(finished, "cpu", None), cache=cache)
    forward = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda *given: forward(*given) * math.nan)


@pytest.mark.usefixtures("no_finite_output")
def test_outputs_that_are_not_finite_are_no_accuracy(finished, cache, sketches):
    """Their largest would be the first class, as the labels of some images are."""
    with pytest.raises(RunError, match="not finite"):
        evaluate_run(finished, batch_size=50, cache=cache)
    with pytest.raises(DataError, match="not finite"):
        travel(finished, sketches[0], cache=cache)


@pytest.mark.usefixtures("no_finite_output")
def test_outputs_that_are_not_finite_are_no_labels_in_a_table(finished, cache):
    pytest.importorskip("pyarrow.parquet", reason="needs the extra `parquet`")
    with pytest.raises(RunError, match="not finite"):
        write_image_results(finished, cache=cache)


def test_labels_overrule_the_advice_not_to_use_a_model(finished, cache, foreign, tmp_path):
    file = tmp_path / "labels.csv"
    travel(finished, foreign, choose=30, labels=file, cache=cache)
    rows = read_csv(file)
    with file.open("w", newline="") as content:
        csv.writer(content).writerows([["file", "label"], *([row["file"], "3"] for row in rows)])
    found = travel(finished, foreign, labels=file, cache=cache)
    assert found.advice.code != FOREIGN
    assert found.expected is not None
    assert found.labels == 30


def test_the_advice_does_not_contradict_itself(ridge, cache):
    """Use it, and label some first, never stand together."""
    found = calibrate(ridge, Recorder(ridge, "cpu", None), cache=cache)
    reference = found.reference.model_copy(update={"accuracy": 0.95})
    found, signals = found.model_copy(update={"reference": reference}), found.sites[0].signals
    for expected in (Estimate(0.9, 0.88, 0.92), Estimate(0.6, 0.4, 0.8)):
        codes = [one.code for one in module._diagnostics(found, signals, expected, 0, 150, 1000)]
        assert codes[0] == ("travels" if expected.reach < 0.05 else "label-first")
        assert codes[1:] == ["travel-rests-on"]
    for labels, words in ((0, "% correctly."), (30, "and on 30 labels.")):
        *_, basis = module._diagnostics(found, signals, expected, labels, 150, 1000)
        assert basis.text.endswith(f"{words} {MEASURED}")


def test_of_a_model_that_has_learned_nothing_no_accuracy_is_printed(
    finished, cache, sketches, tmp_path, monkeypatch
):
    """Not even its accuracy in domain is anything that a new site could come near to."""
    nothing = Diagnostic(MAJORITY, "warning", "It is no better than a constant.")
    monkeypatch.setattr("feddg.prediction.classifier.about_model", lambda *run: (nothing,))
    found = travel(finished, sketches[0], cache=cache)
    assert (found.expected, found.without_labels) == (None, None)
    assert [one.code for one in found.diagnostics] == [USELESS]
    file = tmp_path / "labels.csv"
    rows = [f"{one.file},{one.label}\n" for one in found.images[:3]]
    file.write_text(f"file,label\n{''.join(rows)}")
    found = travel(finished, sketches[0], labels=file, cache=cache)
    assert found.expected is not None
    codes = [one.code for one in found.diagnostics]
    assert codes[:2] == [USELESS, "travel-rests-on"]


def test_a_single_label_changes_nothing_and_says_nothing(finished, cache, foreign, tmp_path):
    file = tmp_path / "labels.csv"
    row = travel(finished, foreign, cache=cache).images[0]
    file.write_text(f"file,label\n{row.file},{row.label}\n")
    found = travel(finished, foreign, labels=file, cache=cache)
    assert (found.advice.code, found.expected, found.labels) == (FOREIGN, None, 0)


def test_an_image_that_is_named_twice_is_one(finished, cache, sketches):
    folder, truths = sketches
    found = travel(finished, [folder, next(iter(truths))], cache=cache)
    assert len(found.images) == len(truths)


def test_tiles_of_an_image_are_one_image(finished, cache, sketches, monkeypatch):
    answers, images = module._answers, []

    def tiled(*arguments):
        rows, failed = answers(*arguments)
        return [replace(row, file=f"one.tif#x{n}y0w8h8") for n, row in enumerate(rows)], failed

    monkeypatch.setattr(module, "_answers", tiled)
    counted = TravelFile.at
    monkeypatch.setattr(
        TravelFile, "at", lambda kept, signals, n: images.append(n) or counted(kept, signals, n)
    )
    assert len(travel(finished, sketches[0], cache=cache).images) == len(sketches[1])
    assert images == [1]


def test_how_often_intervals_held_is_what_the_page_says():
    docs = Path(__file__).parents[2] / "docs"
    page = " ".join((docs / "benchmarks.md").read_text("utf-8").split())
    for name, kind, words in (
        ("travel", "domains", "at whole domains of digits, PACS and emoji in {} of {}"),
        ("travel", "clients", "at simulated clients that mix domains in {} of {}"),
        ("travel_tuned", "domains", "correct nothing: {} of {} held"),
    ):
        rows = read_csv(docs / "results" / "data" / f"{name}.csv")
        own = [
            row
            for row in rows
            if row["estimator"] == "combined"
            and ("clients" in row["images"]) == (kind == "clients")
        ]
        held = [float(row["low"]) <= float(row["truth"]) <= float(row["high"]) for row in own]
        assert words.format(sum(held), len(held)) in page


def test_an_interval_of_five_points_or_near_the_accuracy_in_domain_may_be_used(ridge, cache):
    found = calibrate(ridge, Recorder(ridge, "cpu", None), cache=cache)
    near, inside = found.sites[0].signals, found.reference.accuracy
    for expected in (Estimate(0.3, 0.26, 0.34), Estimate(inside, inside - 0.04, 1.0)):
        advice, *_ = module._diagnostics(found, near, expected, 0, 0, 1000)
        assert advice.text.startswith("Use it, if ")


@pytest.mark.usefixtures("unlimited")
def test_labels_narrow_the_interval_and_move_the_estimate_to_the_truth(
    finished, cache, sketches, tmp_path
):
    folder, truths = sketches
    file = tmp_path / "labels.csv"
    without = travel(finished, folder, choose=60, labels=file, cache=cache)
    rows = read_csv(file)
    assert len(rows) == 60
    assert {row["file"] for row in rows} == {one.file for one in without.images if one.chosen}
    assert without.labels == 0
    with file.open("w", newline="") as content:
        writer = csv.writer(content)
        writer.writerow(["file", "label"])
        writer.writerows([row["file"], truths[row["file"]]] for row in rows)
    found = travel(finished, folder, labels=file, cache=cache)
    truth = accuracy(finished, folder, truths)
    assert found.labels == 60
    assert found.without_labels == without.expected
    assert found.expected.reach < without.expected.reach
    assert found.expected.low <= truth <= found.expected.high
    assert abs(found.expected.value - truth) < 0.1
    # Of a class only labels tell, and how many they are.
    assert {one.right for one in without.classes} == {None}
    answers = {one.file: one.label for one in found.images}
    for one in found.classes:
        own = [row["file"] for row in rows if answers[row["file"]] == one.name]
        right = sum(truths[file] == one.name for file in own)
        assert (one.labels, one.right) == (len(own), right / len(own) if own else None)
        assert not own or one.low <= one.right <= one.high


@pytest.mark.usefixtures("unlimited")
def test_the_estimate_says_how_far_off_it_was_at_the_sites_left_out(finished, cache, sketches):
    """Those of another model correct nothing; so the number stands beside their errors."""
    found = travel(finished, sketches[0], cache=cache)
    sites = tuple(
        LeftOutSite(
            site=name, images=9, accuracy=0.3, signals=Signals(estimates={"confidence": share})
        )
        for name, share in (("ink", 0.61), ("chalk", 0.72))
    )
    update = {"sites": sites, "models": STAND_IN}
    off = replace(found, calibration=found.calibration.model_copy(update=update))
    assert off.errors == pytest.approx([0.31, 0.42])
    assert off.expectation.endswith("such an estimate was 31 and 42 points too high.")
    assert off.fields()["errors_at_sites"] == off.errors
    assert "too high" not in found.expectation
    near = [site.model_copy(update={"accuracy": 0.65}) for site in sites]
    update["sites"] = tuple(near)
    off = replace(found, calibration=found.calibration.model_copy(update=update))
    assert "points too" not in off.expectation


def test_predict_says_how_to_ask_how_many_are_right(ridge, sketches, tmp_path):
    command = ["predict", str(ridge), str(sketches[0]), "--out", str(tmp_path / "a.csv"), "-q"]
    ended = CliRunner().invoke(app, [*command, "--device", "cpu"])
    assert f"feddg travel {ridge} {sketches[0]}" in ended.output


def test_a_new_site_is_expected_to_do_as_those_that_took_no_part(ridge, finished, cache):
    found = calibrate(ridge, Recorder(ridge, "cpu", None), cache=cache)
    run = read_run(ridge)
    (held_out,) = run.result.where(split="test", metric="accuracy")
    accuracies = [site.accuracy for site in found.sites] + [held_out.value]
    site = new_site(run)
    assert [*site.accuracies.values()] == accuracies
    assert site.estimate == at_a_new_site(accuracies)
    assert site.estimate.value == pytest.approx(numpy.mean(accuracies))
    (ridge / TRAVEL).unlink()
    # A closed-form method leaves its clients out by itself; of others the held-out domain is known.
    measured = list(run.rounds[-1].left_out.values())
    assert [*new_site(run).accuracies.values()] == [*measured, held_out.value]
    assert [*new_site(read_run(finished)).accuracies] == [held_out.domain]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_than_three_sites_are_told_as_they_were_measured(count):
    site = NewSite(dict(zip(["ink", "art_painting", "photo"][:count], [0.549, 0.7, 0.2])))
    assert (site.estimate is None) == (count < 3)
    assert ("nine times in ten" in str(site)) == (count == 3)
    if count < 3:
        assert f"54.9{SPACE}% at ink" in str(site)
        rest = ("one site says nothing of another.", "two say little of a third.")[count - 1]
        assert str(site).endswith(rest)


def test_what_stands_in_for_a_model_says_nothing_of_it(tmp_path):
    """Neither the classifier that training starts from, nor those on the pretrained features."""
    run = read_run(FolderMaker(tmp_path / "run", test=["photo"]).write())
    (held_out,) = run.result.where(split="test", metric="accuracy")
    run.setup.left_out.update(dict.fromkeys(range(10), 0.95))
    run.settings["clients"]["partition"] = "client"
    alone = NewSite({held_out.domain: held_out.value})
    assert new_site(run) == alone
    shares = dict.fromkeys(Reference.model_fields, 0.9) | {"images": 9}
    reference = Reference(**shares)
    sites = (LeftOutSite(site="ink", images=9, accuracy=0.95, signals=Signals(estimates={})),)
    kept = TravelFile(weights="", reference=reference, sites=sites, kind="domain", models=STAND_IN)
    (run.folder / TRAVEL).write_text(kept.to_text())
    assert new_site(run) == alone
    (run.folder / TRAVEL).write_text(kept.model_copy(update={"models": "features"}).to_text())
    assert new_site(run) == NewSite({"ink": 0.95, held_out.domain: held_out.value})
    # A domain is one site, however many of these runs held it out.
    same = [site.model_copy(update={"site": held_out.domain}) for site in sites]
    kept = kept.model_copy(update={"models": "runs", "sites": tuple(same)})
    (run.folder / TRAVEL).write_text(kept.to_text())
    assert new_site(run) == alone


def test_the_table_of_sites_has_the_estimates_that_were_compared():
    """With two sites no model lacks a third, so that agreement is known at the new one alone."""
    shares = dict.fromkeys(Reference.model_fields, 0.9) | {"images": 9}
    signals = Signals(estimates={"confidence": 0.6, "atc": 0.4})
    new = Signals(estimates={"confidence": 0.7, "atc": 0.5, "agreement": 0.9})
    kept = TravelFile(
        weights="",
        reference=Reference(**shares),
        sites=[LeftOutSite(site=s, images=9, accuracy=0.5, signals=signals) for s in "ab"],
        kind="domain",
        models="features",
    )
    table = sites_table(SimpleNamespace(calibration=kept, signals=new))
    assert [row[2].text for row in table.rows] == ["50.0"] * 2
    assert "the estimate for the new images is 60.0" in table.caption


@pytest.mark.parametrize(
    ("partition", "alone", "sites"),
    [("heterogeneous", False, 0), ("domain", True, 10), ("client", False, 10)],
)
@pytest.mark.parametrize("held_out", [["photo"], []])
def test_shards_of_the_domains_that_trained_are_no_new_sites(
    tmp_path, partition, alone, sites, held_out
):
    """Ten simulated clients of two domains did well without themselves: nothing of a new site."""
    run = read_run(FolderMaker(tmp_path / "run", test=held_out).write())
    run.rounds[-1].left_out.update(dict.fromkeys(range(10), 0.95))
    run.settings["clients"]["partition"] = partition
    if alone:  # each has a domain of its own
        held = numpy.eye(10, dtype=int).tolist()
        own = [c.model_copy(update={"domains": row}) for c, row in zip(run.clients.clients, held)]
        vars(run)["clients"] = run.clients.model_copy(
            update={"clients": own, "domains": [f"place {id}" for id in range(10)]}
        )
    accuracies = [0.95] * sites + [*run.result.where(split="test").values().values()]
    known = new_site(run)
    assert [*known.accuracies.values()] == accuracies if accuracies else known is None
    estimate = EstimateRow(
        round=3, site="clinic", images=9, confidence=0.9, value=0.84, low=0.8, high=0.88, sites=10
    )
    run._records.append(estimate)
    answers = dict(verdict(run))
    assert ("At a new site" in answers) == bool(accuracies)
    assert ("At clinic" in answers) == bool(sites)
    text = str(left_out_section(run))
    assert ("90 % interval" in text) == bool(sites)
    assert ("says nothing of a new site" in text) == (not sites)


@pytest.mark.usefixtures("unlimited")
def test_the_command_prints_the_answer_and_its_numbers(ridge, cache, sketches, tmp_path):
    calibrate(ridge, Recorder(ridge, "cpu", None), cache=cache)
    command = ["travel", str(ridge), str(sketches[0]), "--device", "cpu"]
    ended = CliRunner().invoke(
        app, [*command, "--choose", "7", "--labels", str(tmp_path / "l.csv")]
    )
    assert ended.exit_code == 0, ended.output
    expected = travel(ridge, sketches[0], cache=cache)
    words = " ".join(ended.output.split())
    assert expected.expectation in words
    assert "if they show the model's classes (0, 1, 2, 3, 4 and 5 more)" in words
    assert expected.advice.text in words
    assert all(site.site in words for site in expected.calibration.sites)
    assert len(read_csv(tmp_path / "l.csv")) == 7
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert found["value"] == expected.expected.value
    assert found["advice"] == expected.advice.text
    assert len(found["images"]) == 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,label\na,b\n", "has no column 'file'"),
        (
            "file,label\nabsent.png,3\n",
            "row 2 of labels.csv: absent.png is not among the named images",
        ),
        ("file,label\n{0},eleven\n", "knows no class 'eleven'"),
        ("file,label\n{0},3\n{0},3\n", "row 3 of labels.csv: .* appears twice"),
    ],
)
def test_labels_that_do_not_fit_are_named(finished, cache, sketches, tmp_path, text, message):
    folder, truths = sketches
    file = tmp_path / "labels.csv"
    file.write_text(text.format(next(iter(truths))))
    with pytest.raises(DataError, match=message):
        travel(finished, folder, labels=file, cache=cache)


def test_labels_of_rows_that_share_a_name_are_refused(tmp_path, cache):
    """Each table of features names its rows, and a label would go to the last of a name."""

    def row(number):
        return f"{number % 3 + (number * 7 % 11) / 20},{number / 120}"

    rows = [f"{'xyz'[number % 3]},site{number // 30},{row(number)}" for number in range(120)]
    (tmp_path / "features.csv").write_text("\n".join(["label,domain,a,b", *rows]))
    data = {"source": "features", "root": tmp_path / "features.csv"}
    chosen = feddg.Experiment(data=data, hold_out={"test": "site3"}, method="ridge")
    run = feddg.run(chosen, tmp_path / "runs", cache=cache).folder
    tables = [tmp_path / "monday.csv", tmp_path / "tuesday.csv"]
    for table in tables:
        table.write_text("\n".join(["path,a,b", *(f"scan{n},{row(n)}" for n in range(20))]))
    labels = tmp_path / "labels.csv"
    assert travel(run, tables[:1], choose=10, labels=labels, cache=cache).expected is not None
    with pytest.raises(DataError, match="several rows are called scan0"):
        travel(run, tables, labels=labels, cache=cache)
    assert travel(run, tables, cache=cache).expected is not None


def test_a_file_of_labels_is_not_written_over(finished, cache, sketches, tmp_path):
    (tmp_path / "labels.csv").write_text("file,label\n")
    with pytest.raises(DataError, match="exists; name a new file"):
        travel(finished, sketches[0], choose=5, labels=tmp_path / "labels.csv", cache=cache)


@pytest.mark.usefixtures("unlimited")
def test_clients_of_a_single_domain_that_are_drawn_by_lot_are_no_sites(
    tmp_path, cache, sketches, monkeypatch
):
    monkeypatch.setattr("feddg.prediction.classifier.about_model", lambda *run: ())
    run = trained_run(
        tmp_path,
        cache,
        "ridge",
        data={"source": "digits", "id_val": 0.2, "id_test": 0, "image_size": 16},
        hold_out={"test": ["sketch"], "val": ["photo", "chalk"]},
        clients={"number": 4, "partition": "iid"},
        train={"batch_size": 64},
    )
    found = travel(run, sketches[0], cache=cache)
    assert found.calibration.sites == ()
    assert found.calibration.models == "none"
    assert read_run(run).rounds[-1].left_out
    assert read_run(run).estimates == []  # the clients show the same images
    assert "travel-no-sites" in [one.code for one in found.diagnostics]


def test_trained_features_are_stood_in_for_by_those_that_training_began_from(
    tmp_path, cache, sketches
):
    """Both runs began from one file of weights: the sites left out are the same."""
    weights = tmp_path / "weights.safetensors"
    save_file(SmallCNN().state_dict(), weights)
    model = {"backbone": "cnn", "weights": str(weights)}
    found = [
        travel(
            trained_run(
                tmp_path,
                cache,
                model=model,
                data=SHORT["data"],
                train=SHORT["train"] | {"rounds": rounds},
            ),
            sketches[0],
            cache=cache,
        )
        for rounds in (1, 2)
    ]
    one, other = (each.calibration for each in found)
    assert one.models == other.models == "first features"
    signals = found[0].signals
    mean = fmean(signals.estimates.values())
    assert one.at(signals, 200).value == pytest.approx(mean)  # not corrected
    assert one.sites == other.sites
    assert one.reference != other.reference
    assert "agreement" not in one.sites[0].signals.estimates
    assert "agreement" not in found[0].signals.estimates


def test_no_site_takes_more_images_than_it_takes(ridge, cache, monkeypatch):
    model = Recorder(ridge, "cpu", None)
    whole = calibrate(ridge, model, cache=cache)
    monkeypatch.setattr(module, "MOST_OF_A_SITE", 100)
    found = calibrate(ridge, model, cache=cache)
    assert sum(site.images for site in whole.sites) > 1000
    assert sum(site.images for site in found.sites) == 3 * 100 + found.reference.images
    assert found.reference == whole.reference.model_copy(
        update={"agreement": found.reference.agreement}
    )


def test_without_validation_images_there_is_nothing_to_compare_with(tmp_path, cache, sketches):
    run = trained_run(
        tmp_path,
        cache,
        data={"source": "digits", "id_val": 0, "id_test": 0, "image_size": 16},
        train={"rounds": 1, "local_steps": 2, "batch_size": 16, "augmentation": "none"},
    )
    with pytest.raises(RunError, match=r"data\.id_val"):
        travel(run, sketches[0], cache=cache)


@pytest.mark.usefixtures("unlimited")
def test_features_that_were_not_trained_have_not_seen_the_sites(ridge, cache, sketches):
    found = travel(ridge, sketches[0], cache=cache)
    assert found.calibration.models == "features"
    assert {site.site for site in found.calibration.sites} == {"ink", "chalk", "photo"}
    assert "agreement" in found.signals.estimates
    assert all("agreement" in site.signals.estimates for site in found.calibration.sites)
    folder, truths = sketches
    truth = accuracy(ridge, folder, truths)
    assert found.expected.low <= truth <= found.expected.high


def test_a_site_of_a_few_images_does_not_say_what_sites_look_like():
    numbers = numpy.repeat([0, 1, 2], [30, 1, 40])
    maps = numpy.random.default_rng(0).normal(size=(71, 6)).astype("float32")
    seen = lambda images, rows: SimpleNamespace(maps=maps[rows])  # noqa: E731
    table = SimpleNamespace(labels=numpy.arange(71) % 2)
    images = SimpleNamespace(splits=SimpleNamespace(train=numpy.arange(71)), table=table)
    trained = SimpleNamespace(experiment=SimpleNamespace(seed=0))
    model = SimpleNamespace(trained=trained, outputs=seen)
    found = module._familiar(model, images, numbers, numpy.arange(71))
    assert len(found.spans) == 2
    assert len(found.labels) == 70
    assert math.isfinite(found.limit(20))
