"""The page of predictions: the most doubtful first."""

import html
import re
from datetime import date

import pytest
from typer.testing import CliRunner

from feddg import travel
from feddg.cli import app
from feddg.prediction import predict as prediction
from feddg.prediction.predict import predict, predict_files
from trained_runs import write_images


@pytest.fixture
def images(tmp_path):
    write_images(tmp_path / "images" / "deep" / "er", 30)
    return tmp_path / "images"


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_the_page_shows_the_most_doubtful_first(finished, images, tmp_path, suffix):
    next(images.rglob("*.png")).rename(images / "=<b>bold.png")
    (images / "text.jpg").write_text("no image")
    out, page = tmp_path / f"labels{suffix}", tmp_path / "page.html"
    command = ["predict", str(finished), str(images), "--out", str(out), "-q", "--device", "cpu"]
    ended = CliRunner().invoke(app, [*command, "--html", str(page)])
    assert ended.exit_code == 0, ended.output
    text = page.read_text("utf-8")
    own = sorted(predict(finished, images), key=lambda row: (row.label is None, row.confidence))
    shown = re.findall(r'class="name" title="([^"]*)"', text)
    assert [html.unescape(name) for name in shown] == [row.file for row in own[:30]]
    assert text.count('src="data:image/jpeg;base64,') == 30
    assert "text.jpg: not an image in a known format" in text
    assert f"model {finished} · images {images} · {date.today().isoformat()}" in text
    (lead,) = re.findall(r'class="lead">([^<]*)', text)
    assert lead.startswith("How many of these labels are right was not measured. In its own test")
    assert "<b>bold" not in text  # a name is text
    assert "http://" not in text
    assert "https://" not in text
    assert page.stat().st_mode & 0o077 == 0


def test_of_many_images_the_most_doubtful_are_kept(finished, images, tmp_path, monkeypatch):
    monkeypatch.setattr(prediction, "MOST_SHOWN", 5)
    found = predict_files(finished, [images], tmp_path / "labels.csv")
    own = sorted(row.confidence for row in predict(finished, images))
    assert [row.confidence for row in found.doubtful] == pytest.approx(own[:5], abs=1e-6)
    assert (found.files, found.labels.total(), found.faults) == (30, 30, [])


def test_the_page_about_a_new_site_shows_the_riskiest_first(finished, cache, images, tmp_path):
    page = tmp_path / "travel.html"
    found = travel(finished, images, html=page, cache=cache)
    text = page.read_text("utf-8")
    assert found.expectation in html.unescape(text)
    assert f"model {finished} · images {images} · {date.today().isoformat()}" in text
    assert html.escape(found.advice.text) in text
    shown = re.findall(r'class="name" title="([^"]*)"', text)
    assert shown == [one.file for one in found.images]
    assert re.findall(r"<b>\d</b> ([\d.]+%)", text) == [f"{one.risk:.1%}" for one in found.images]
    assert text.count('src="data:image/jpeg;base64,') == 30
    assert "http://" not in text
    assert "https://" not in text
    assert page.stat().st_mode & 0o077 == 0
