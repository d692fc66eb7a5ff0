"""A site that took no part measures a model: right counts, and nothing but counts."""

import json

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from scipy.optimize import Bounds, LinearConstraint, milp
from typer.testing import CliRunner

from feddg.api import run as run_experiment
from feddg.cli import app
from feddg.data.data_set import load_source
from feddg.errors import DataError, FeddgError
from feddg.evaluation.groups import effective_number
from feddg.experiment import Experiment
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
    assert small not in [cell for row in hidden.confusion for cell in row]


def test_the_command_writes_counts_and_no_name(finished, site, tmp_path):
    out = tmp_path / "validation.json"
    command = ["deploy", "validate", str(finished), str(site), "--domain", "clinic"]
    ended = CliRunner().invoke(app, [*command, "--out", str(out), "--hide-below", "5"])
    assert ended.exit_code == 0, ended.output
    text = out.read_text()
    assert "patient" not in text
    assert "broken" not in text
    assert str(site) not in text
    found = ValidationFile.model_validate(json.loads(text))
    cells = [cell for row in found.domains[0].confusion for cell in row]
    assert None in cells
    assert all(cell is None or cell == 0 or cell >= 5 for cell in cells)
    assert found.domains[0].metrics == {}
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


def reachable(told, classes):
    """For every cell and row total, the smallest and largest value that fits what was told."""
    size = classes * classes
    rows, values = [], []

    def known(cells, value):
        row = numpy.zeros(size)
        row[cells] = 1
        rows.append(row)
        values.append(value)

    known(range(size), told.total)
    for i in range(classes):
        if told.images[i] is not None:
            known(range(i * classes, (i + 1) * classes), told.images[i])
        for j in range(classes):
            if told.confusion[i][j] is not None:
                known([i * classes + j], told.confusion[i][j])
    if told.correct is not None:
        known([i * classes + i for i in range(classes)], told.correct)
    constraints = LinearConstraint(numpy.array(rows), values, values)

    def ends(goal):
        found = [
            milp(sign * goal, constraints=constraints, integrality=1, bounds=Bounds(0, numpy.inf))
            for sign in (1, -1)
        ]
        assert all(one.success for one in found)
        return [round(sign * one.fun) for sign, one in zip((1, -1), found)]

    for i in range(classes):
        whole = numpy.zeros(size)
        whole[i * classes : (i + 1) * classes] = 1
        yield ("row", i), ends(whole)
        for j in range(classes):
            goal = numpy.zeros(size)
            goal[i * classes + j] = 1
            yield (i, j), ends(goal)


@settings(max_examples=60)
@given(arrays(numpy.int64, (3, 3), elements=st.sampled_from((0, 0, 1, 2, 4, 5, 9, 30))))
def test_no_small_count_can_be_computed(confusion):
    if confusion.sum() < SMALLEST:
        with pytest.raises(DataError, match="fewer than"):
            release(confusion, SMALLEST)
        return
    told = release(confusion, SMALLEST)
    for what, (low, high) in reachable(told, 3):
        count = confusion[what[1]].sum() if what[0] == "row" else confusion[what]
        assert low <= count <= high
        assert not (0 < count < SMALLEST) or low < high, (what, count, told)


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
    cells = [cell for row in told.confusion for cell in row]
    assert all(cell is None or cell == 0 or cell >= SMALLEST for cell in cells)
