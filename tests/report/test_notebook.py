"""What a notebook shows: whole, escaped, without scripts, and never an error."""

import base64
import io
import json
import re
import types

import pytest
from PIL import Image

from feddg.comparison.compare import Comparison
from feddg.comparison.plan import load_plan
from feddg.prediction.predict import PredictedImages, Prediction
from feddg.report.notebook import html_of
from feddg.runs.reading import Run, read_run


def pictures(page):
    return re.findall(r'src="data:(image/[a-z+]+);base64,([^"]+)"', page)


def test_a_run_shows_a_table_and_what_speaks_against_it(folder_maker):
    folder = folder_maker(classes=["<b>dog", "a$b$", "horse"], test=["<i>photo"]).write()
    page = Run(folder)._repr_html_()
    assert page == read_run(folder)._repr_html_()
    final = read_run(folder).accuracy
    assert f"{100 * final:.1f}" in page
    assert "&lt;i&gt;photo" in page
    assert "<i>" not in page
    assert "<script" not in page


def test_a_run_that_has_measured_nothing_is_shown(folder_maker):
    folder = folder_maker(status=None).write()
    (folder / "metrics.jsonl").write_text("")
    assert "Nothing has been measured yet" in read_run(folder)._repr_html_()


def test_predictions_are_shown_and_still_there(tmp_path):
    files = [tmp_path / f"{n}.png" for n in range(20)]
    for n, file in enumerate(files):
        Image.new("RGB", (9, 7), (n, 0, 0)).save(file)
    files[3].write_bytes(b"no image any more")
    made = [Prediction(str(file), label="<dog>", confidence=0.25) for file in files]
    made[1] = Prediction(str(files[1]), reason="it is cut off")
    made[2] = Prediction(str(files[2]), "cat", 0.9, unlike_training=True)
    found = PredictedImages(iter(made))
    page = found._repr_html_()
    assert len(pictures(page)) == 11  # of twelve, one file is no image any more
    assert {kind for kind, _ in pictures(page)} == {"image/jpeg"}
    assert "&lt;dog&gt;, 25.0\N{NO-BREAK SPACE}%" in page
    assert "unusable: it is cut off" in page
    assert "cat, 90.0\N{NO-BREAK SPACE}%, unlike anything seen in training" in page
    assert "and more" in page
    assert next(found) == made[0]
    assert list(found) == made[1:]
    assert "There are no more" in found._repr_html_()


def test_a_tile_is_shown_as_the_part_of_its_file_that_it_is(tmp_path):
    """By hand: the left half is red, the right one blue."""
    halves = Image.new("RGB", (64, 64), (200, 0, 0))
    halves.paste((0, 0, 200), (32, 0, 64, 64))
    halves.save(tmp_path / "a.png")
    names = [f"{tmp_path / 'a.png'}#x{left}y0w32h32" for left in (0, 32)]
    page = PredictedImages(Prediction(name, "cat", 0.9) for name in names)._repr_html_()
    shown = [Image.open(io.BytesIO(base64.b64decode(text))) for _, text in pictures(page)]
    reds = [picture.getpixel((48, 48))[0] for picture in shown]
    assert reds[0] > 150 > 50 > reds[1]


def test_a_comparison_names_its_failures(tmp_path):
    outcome = types.SimpleNamespace(
        status="failed", error="no <b> space", cell=types.SimpleNamespace(folder=tmp_path / "one")
    )
    (tmp_path / "comparison.json").write_text(
        '{"name": "n", "title": null, "question": null, "cells": []}'
    )
    shown = Comparison(load_plan({}), tmp_path, [], [], outcomes=[outcome])
    assert "no &lt;b&gt; space" in shown._repr_html_()
    assert str(shown).splitlines() == [
        "n",
        f"0 runs, 1 failed; folder: {tmp_path}",
        "No method has a result in every column yet.",
    ]


def test_a_run_and_predictions_print_as_a_few_lines_that_end_in_a_sentence(folder_maker, tmp_path):
    folder = folder_maker().write()
    title, place, sentence = repr(read_run(folder)).splitlines()
    assert (title, place) == ("PARDON, tested on photo", f"folder: {folder}")
    assert "the shared model recognised " in sentence
    assert sentence.endswith(".")
    (folder / "metrics.jsonl").write_text("damaged\ndamaged\n")
    assert repr(read_run(folder)).startswith("Run: ")
    found = PredictedImages(iter([Prediction("a.png", "cat", 0.9)]))
    assert repr(found).endswith("as you loop over them.")
    assert len(list(found)) == 1


def test_a_comparison_prints_its_conclusion(folder_maker):
    rows = []
    for method in ("fedavg", "pardon"):
        folder = folder_maker(method, method=method).write().parent
        rows.append({"method": method, "held_out": "photo", "seed": 0, "folder": method})
    (folder / "comparison.json").write_text(json.dumps({"name": "mine", "cells": rows}))
    shown = repr(Comparison(load_plan({}), folder, [], []))
    assert len(shown) < 1000
    assert shown.startswith("mine\n")
    assert shown.endswith("1 domain says nothing about others.")


def test_other_things_are_refused():
    with pytest.raises(TypeError):
        html_of(3)
