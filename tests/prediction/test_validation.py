"""A site that took no part measures a model: right counts, and nothing but counts."""

import json
from itertools import combinations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from typer.testing import CliRunner

from feddg.api import run as run_experiment
from feddg.cli import app
from feddg.data.data_set import load_source
from feddg.errors import DataError, FeddgError
from feddg.evaluation.groups import effective_number
from feddg.experiment import Experiment
from feddg.prediction.classifier import load_classifier
from feddg.prediction.predict import predict
from feddg.prediction.validation import ValidationFile, release, validate
from feddg.runs.intervals import wilson


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Images of the held-out domain in folders by class, one of them broken."""
    table, folder = load_source("digits"), tmp_path_factory.mktemp("site") / "images"
    rows = numpy.flatnonzero(table.domains == table.domain_id("sketch"))[:200]
    for row in rows:
        file = folder / table.class_names[table.labels[row]] / f"patient-{row}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(table.images[row]).save(file)
    (folder / "3" / "broken.png").write_bytes(b"no image")
    return folder


def test_counts_are_those_of_the_predictions(finished, site):
    found = validate(finished, site, domain="clinic")
    (domain,) = found.domains
    expected = numpy.zeros((10, 10), int)
    for row in predict(finished, site):
        if row.label is not None:
            expected[int(row.file.split("/")[-2]), int(row.label)] += 1
    assert domain.confusion == expected.tolist()
    assert (domain.images, domain.unusable, domain.domain) == (200, 1, "clinic")
    assert domain.correct == expected.trace()
    assert domain.accuracy == expected.trace() / 200
    assert domain.interval[0] < domain.accuracy < domain.interval[1]
    unlike = sum(row.unlike_training is True for row in predict(finished, site))
    assert domain.unlike_training == unlike
    assert found.model.method == "fedavg"
    grouped = validate(finished, site, domain="clinic", group_by=r"(?P<group>patient-\d|broken)")
    low, high = grouped.domains[0].interval
    assert high - low > domain.interval[1] - domain.interval[0]


def test_tiles_of_one_file_are_not_independent(tmp_path, cache):
    rng = numpy.random.default_rng(0)
    for domain in ("a", "b", "c"):
        for number in range(24):
            file = tmp_path / "images" / domain / "xy"[number % 2] / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 200, (32, 32, 3)) + 50 * (number % 2)
            Image.fromarray(pixels.astype(numpy.uint8)).save(file)
    experiment = Experiment(
        data={"root": str(tmp_path / "images"), "tile": 16, "image_size": 16},
        hold_out="c",
        model={"backbone": "cnn", "weights": None},
        clients={"number": 2, "partition": "domain"},
        train={"rounds": 1, "head": "random"},
        precision="float32",
    )
    run = run_experiment(experiment, tmp_path / "runs", cache=cache).folder
    (domain,) = validate(run, tmp_path / "images" / "c", domain="c").domains
    assert domain.images == 96
    answers = predict(run, tmp_path / "images" / "c")
    right = numpy.array([one.label == one.file.split("/")[-2] for one in answers])
    files = numpy.repeat(numpy.arange(24), 4)
    expected = wilson(right.mean(), effective_number(right.astype(float), files))[1:]
    assert domain.interval == pytest.approx(expected)
    assert domain.interval != pytest.approx(wilson(right.mean(), 96)[1:])
    # A count of tiles may be of a fourth as many files.
    small = min(cell for row in domain.confusion for cell in row if cell)
    least = small // 4 + 1
    assert least <= small
    (hidden,) = validate(run, tmp_path / "images" / "c", domain="c", hide_below=least).domains
    assert {cell for row in hidden.confusion for cell in row} == {None}


def test_the_command_writes_counts_and_no_name(finished, site, tmp_path, monkeypatch):
    exported = load_classifier(finished, "iabn")  # as an ONNX file holds it
    monkeypatch.setattr("feddg.prediction.validation.load_classifier", lambda *options: exported)
    out = tmp_path / "validation.json"
    command = ["deploy", "validate", str(finished), str(site), "--domain", "clinic"]
    ended = CliRunner().invoke(app, [*command, "--out", str(out), "--hide-below", "5"])
    assert ended.exit_code == 0, ended.output
    text = out.read_text()
    assert "patient" not in text
    assert "broken" not in text
    assert str(site) not in text
    found = ValidationFile.model_validate(json.loads(text))
    assert {cell for row in found.domains[0].confusion for cell in row} == {None}
    assert found.domains[0].metrics == {}
    assert found.adaptation == "iabn"
    assert "test-time adaptation of the file: iabn" in ended.output
    assert "nothing about single images" in ended.output


def test_a_class_that_the_model_cannot_know_is_named(finished, site, tmp_path):
    strange = tmp_path / "images" / "eleven"
    strange.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(strange / "a.png")
    with pytest.raises(FeddgError, match="knows no class 'eleven'"):
        validate(finished, strange.parent, domain="clinic")


def test_too_few_images_are_told_to_nobody(finished, site, tmp_path):
    few = tmp_path / "images" / "3"
    few.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(few / "a.png")
    with pytest.raises(DataError, match="fewer than the 5"):
        validate(finished, few.parent, domain="clinic", hide_below=5)


# What is hidden stays hidden: no small count can be computed from what is handed out.


SMALLEST = 5


def tables(classes, total):
    """Every table of so many images."""
    size = classes**2
    ends = combinations(range(total + size - 1), size - 1)
    bars = numpy.array([(-1, *places, total + size - 1) for places in ends])
    return (numpy.diff(bars) - 1).reshape(-1, classes, classes)


@pytest.mark.parametrize(("classes", "smallest", "most"), [(2, 5, 16), (2, 3, 20), (3, 3, 6)])
def test_no_small_count_can_be_computed(classes, smallest, most):
    """Not even by whoever knows by which rule counts are hidden."""
    for total in range(smallest, most + 1):
        alike = {}
        for table in tables(classes, total):
            alike.setdefault(str(release(table, smallest)), []).append(table)
        for told, fitting in alike.items():
            cells = numpy.array(fitting)
            correct = cells.trace(axis1=1, axis2=2)[:, None]
            sums = [cells.sum(2), cells.sum(1), correct, total - correct]
            counts = numpy.concatenate([cells.reshape(len(cells), -1), *sums], axis=1)
            known = counts.min(0) == counts.max(0)
            assert not (known & (counts[0] > 0) & (counts[0] < smallest)).any(), told


def test_a_threshold_of_two_would_hide_ones_that_everybody_knows_to_be_ones():
    with pytest.raises(DataError, match="at least 3"):
        release(numpy.array([[1, 1], [1, 29]]), 2)


@given(arrays(numpy.int64, (3, 3), elements=st.integers(0, 40)))
def test_without_a_threshold_everything_is_told(confusion):
    if not confusion.any():
        return
    told = release(confusion, 0)
    assert told.confusion == confusion.tolist()
    assert told.images == confusion.sum(1).tolist()
    assert told.correct == confusion.trace()


def test_what_is_large_is_told():
    confusion = numpy.array([[90, 10, 0], [8, 70, 22], [0, 12, 60]])
    assert release(confusion, SMALLEST).confusion == confusion.tolist()


def test_a_common_table_keeps_its_accuracy():
    confusion = numpy.array([[90, 2, 3], [1, 70, 4], [2, 3, 60]])
    told = release(confusion, SMALLEST)
    assert told.correct == 220
    assert told.images == [95, 75, 65]
    assert told.confusion == [[None] * 3] * 3


def test_each_part_is_told_or_not_by_its_own_counts():
    rare = release(numpy.array([[90, 8], [2, 1]]), SMALLEST)
    assert (rare.images, rare.correct, rare.total) == ([None, None], 91, 101)
    nearly_all_right = release(numpy.array([[50, 2], [1, 50]]), SMALLEST)
    assert (nearly_all_right.images, nearly_all_right.correct) == ([52, 51], None)
    all_right = release(numpy.array([[50, 0], [0, 50]]), SMALLEST)
    assert (all_right.confusion, all_right.correct) == ([[50, 0], [0, 50]], 100)
