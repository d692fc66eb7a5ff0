"""A site that took no part measures a model: right counts, and nothing but counts."""

import json

import numpy
import pytest
from PIL import Image
from typer.testing import CliRunner

from feddg.cli import app
from feddg.data.data_set import load_source
from feddg.errors import DataError, FeddgError
from feddg.studies.prediction import predict
from feddg.studies.validation import ValidationFile, validate
from trained_runs import trained_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return trained_run(tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("cache"))


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
    assert "Nothing of a single image" in ended.output


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
