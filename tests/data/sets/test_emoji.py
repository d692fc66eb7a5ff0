"""The built-in emoji: what the file holds, and objects that train in no style."""

import numpy as np
import pytest

from feddg.data import near_copies
from feddg.data.data_set import DATA_SETS, load_source
from feddg.data.pixels import ArrayPixels
from feddg.data.sets import emoji
from feddg.data.splits import hold_out
from feddg.errors import DataError
from feddg.text import number

OBJECTS = 1089


@pytest.fixture(scope="module")
def table():
    return load_source("emoji")


@pytest.fixture
def new_objects():
    return load_source("emoji", objects="held_out")


def objects_of(table, rows) -> set[str]:
    return {table.paths[row].rpartition("/")[2] for row in rows.tolist()}


def test_every_style_draws_every_object_once(table):
    assert table.images.shape == (4 * OBJECTS, 48, 48, 3)
    assert table.domain_names == ("noto", "blob", "emojitwo", "mono")
    names = [path.partition("/")[2] for path in table.paths]
    assert len(set(names[:OBJECTS])) == OBJECTS
    assert names == 4 * names[:OBJECTS]
    for path, label, domain in zip(table.paths, table.labels, table.domains):
        assert path.startswith(f"{table.domain_names[domain]}/{table.class_names[label]}/")
    assert (table.counts() == [66, 85, 160, 179, 207, 274, 118]).all()


def test_drawings_are_on_white_and_where_they_belong(table):
    assert not (table.images == 255).all(axis=(1, 2, 3)).any()
    corners = table.images[:, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert np.median(corners) == 255
    grey = table.images[table.domains == 3]
    assert (grey == grey[..., :1]).all()
    apples = {
        name: table.images[table.paths.index(f"{name}/food/1f34e")] for name in ("noto", "blob")
    }
    for apple in apples.values():  # a red apple is red in the middle
        red, green, blue = apple[24, 24].tolist()
        assert red > 150 > max(green, blue)


def test_the_credits_and_licences_are_beside_it():
    folder = emoji.FILE.parent
    text = (folder / "CREDITS.md").read_text("utf-8")
    assert all(f"`{style}`" in text for style in DATA_SETS["emoji"].domains)
    assert "Apache License" in (folder / "Apache-2.0.txt").read_text("utf-8")
    assert "SIL OPEN FONT LICENSE" in (folder / "OFL-1.1.txt").read_text("utf-8")
    assert "Creative Commons Attribution 4.0" in (folder / "EmojiTwo.txt").read_text("utf-8")
    assert emoji.FILE.stat().st_size < 5e6


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match="reads no folder"):
        load_source("emoji", tmp_path)


def test_held_out_objects_train_in_no_style_and_alone_are_measured(new_objects):
    splits = hold_out(new_objects, ["mono"], ["blob"], seed=0)
    trained = objects_of(new_objects, np.concatenate([splits.train, splits.id_val]))
    for role in (splits.test, splits.val, splits.id_test):
        assert len(role)
        assert not objects_of(new_objects, role) & trained
    assert len(splits.test) == len(splits.val) == len(splits.id_test) / 2 == 222
    assert not set(np.unique(new_objects.domains[splits.train])) & {1, 3}
    assert objects_of(new_objects, splits.test) == objects_of(new_objects, splits.id_test)


def test_shared_objects_measure_the_whole_style(table):
    splits = hold_out(table, ["mono"], seed=0)
    assert len(splits.test) == OBJECTS
    assert len(splits.train) + len(splits.id_val) + len(splits.id_test) == 3 * OBJECTS


def test_near_copies_are_single_drawings_not_styles(table):
    """Black-and-white drawings are some of EmojiTwo's own: those are found, and no style is."""
    pixels = ArrayPixels(table.images)

    def alike(one: str, other: str) -> int:
        rows = [np.flatnonzero(table.domains == table.domain_id(name)) for name in (one, other)]
        return len({found for _, found in near_copies.near_copies(pixels, *rows)})

    assert alike("noto", "blob") == 3
    assert alike("noto", "emojitwo") == 0
    assert 100 < alike("emojitwo", "mono") < 200


def test_drawings_of_one_form_are_a_note_that_names_the_other_question(table):
    pixels, splits = ArrayPixels(table.images), hold_out(table, ["noto"], seed=0)
    found = [pixels, table.paths, [""] * len(table), splits]
    (note,) = near_copies.about_near_copies(*found, DATA_SETS.find("emoji").alike)
    assert (note.code, note.severity) == ("near-copies", "note")
    assert f"31 of {number(1413)}" in note.text
    assert "data.options.objects=held_out" in note.advice
    (warning,) = near_copies.about_near_copies(*found)
    assert warning.severity == "warning"
