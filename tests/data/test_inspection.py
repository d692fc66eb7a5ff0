"""What is odd about images, labels, splits, copies and clients, and where it stops a run."""

import json
import logging
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from feddg.data.data_set import load_source
from feddg.data.decoding import Reading
from feddg.data.images import ImageTable, from_folder
from feddg.data.inspection import (
    about_clients,
    about_copies,
    about_ignored,
    about_labels,
    about_splits,
    about_survey,
    depth_of,
    ignored_files,
    inspect,
    survey,
)
from feddg.data.splits import Splits
from feddg.errors import DataError, FeddgError
from feddg.experiment import Experiment
from feddg.runs.beforehand import forecast
from feddg.runs.prepare import load_images
from image_folders import make_folder, noise


def test_summary_by_hand_and_ready_for_json() -> None:
    table = ImageTable(
        paths=("a/cat/1", "a/cat/2", "a/dog/1", "b/Dog/1"),
        labels=np.array([1, 1, 2, 0]),
        domains=np.array([0, 0, 0, 1]),
        class_names=("Dog", "cat", "dog"),
        domain_names=("a", "b"),
        root=Path("pictures"),
        split=np.array(["train", "val", "train", "test"]),
    )
    found = inspect(table)
    assert (
        json.loads(json.dumps(found))
        == found
        == {
            "root": "pictures",
            "images": 4,
            "domains": ["a", "b"],
            "classes": ["Dog", "cat", "dog"],
            "counts": {"a": {"Dog": 0, "cat": 2, "dog": 1}, "b": {"Dog": 1, "cat": 0, "dog": 0}},
            "totals": {"a": 3, "b": 1},
            "split": {"train": 2, "val": 1, "test": 1},
        }
    )


def test_images_without_files_have_neither_root_nor_split() -> None:
    table = ImageTable(
        ("a/x/1",), np.array([0]), np.array([0]), ("x",), ("a",), images=np.zeros((1, 2, 2, 3))
    )
    found = inspect(table)
    assert found["root"] is None
    assert found["split"] is None


# What is odd about labels, domains and copies, and where it stops.


def chosen(root, privacy=None, hold_out="c", **data):
    fields = {"source": "folder", "root": root, "image_size": 8, "id_val": 0.5, "id_test": 0.0}
    return Experiment(
        data={**fields, **data},
        hold_out=hold_out,
        clients=2,
        model={"backbone": "cnn", "weights": None},
        privacy=privacy or {},
    )


def load(root, tmp_path, *args, **fields):
    return load_images(chosen(root, *args, **fields), tmp_path / "cache", lambda *_: None)


@pytest.fixture
def root(tmp_path):
    return make_folder(tmp_path / "images", each=60)


def said(caplog) -> list[str]:
    texts = [record.getMessage() for record in caplog.records]
    assert all("\n" not in text for text in texts)
    return texts


def test_nothing_is_said_of_images_that_are_in_order(root, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        load(root, tmp_path)
    assert said(caplog) == []


def test_folders_of_classes_above_those_of_domains_are_noticed(subtests):
    for classes, domains, swapped in [
        (("site_1", "site 2"), ("monocyte", "lymphocyte"), True),
        (("Hospital A", "Hospital B"), ("cat", "dog"), True),
        (("art_painting", "photo", "sketch"), ("dog", "horse"), True),
        (("cat", "dog"), ("site_1", "site_2"), False),
        (("labrador", "collie"), ("north", "south"), False),
        (("photo", "dog"), ("north", "south"), False),
        (("photo", "sketch"), ("site_1", "site_2"), False),  # somebody tells styles apart
    ]:
        with subtests.test(classes=classes, domains=domains, swapped=swapped):
            counts = len(classes) * len(domains)
            table = ImageTable(
                tuple(f"{row}.png" for row in range(counts)),
                np.arange(counts) % len(classes),
                np.arange(counts) // len(classes),
                classes,
                domains,
                root=Path("."),
            )
            assert [one.code for one in about_labels(table)] == ["folders-swapped"] * swapped


@pytest.mark.parametrize("name", ["NaN", "NA", "null", "n/a"])
def test_a_class_called_like_a_missing_label_is_warned_about(name):
    names = (name, "cat")
    table = ImageTable(("1", "2"), np.arange(2), np.zeros(2, int), names, ("a",), root=Path("."))
    (found,) = about_labels(table)
    assert str(found.severity) == "warning"
    assert found.text.startswith(f"There are images of the class '{name}', which may")


@pytest.mark.parametrize(("missing", "level"), [(1, "INFO"), (2, "WARNING")])
def test_a_domain_of_few_of_the_classes_is_warned_about(tmp_path, caplog, missing, level):
    root = make_folder(tmp_path / "images", classes=("w", "x", "y"), each=60)
    for name in ("x", "y")[:missing]:
        shutil.rmtree(root / "b" / name)
    with caplog.at_level(logging.INFO):
        load(root, tmp_path)
    (record,) = caplog.records
    assert record.levelname == level
    names = ("x", "x, y")[missing - 1]
    assert record.getMessage().startswith(f"Some domains lack classes: b lacks {names}.")


def test_copies_in_one_class_stay_on_one_side_of_the_split(root, tmp_path, caplog):
    for number in range(30):
        shutil.copy(root / f"a/x/{number}.png", root / f"a/x/copy{number}.png")
    found = load(root, tmp_path, id_val=0.3, id_test=0.2)
    role_of = {
        found.table.paths[row]: role
        for role in ("train", "id_val", "id_test", "test")
        for row in getattr(found.splits, role)
    }
    roles = [role_of[f"a/x/{number}.png"] for number in range(30)]
    assert roles == [role_of[f"a/x/copy{number}.png"] for number in range(30)]
    assert {"train", "id_val", "id_test"} == set(roles)
    assert not any("among those that measure" in text for text in said(caplog))


def test_a_run_and_its_preview_stop_at_copies_across_a_held_out_domain(root, tmp_path):
    shutil.copy(root / "a/x/0.png", root / "c/x/copy.png")
    for domain in ("a", "c"):
        (root / domain / "x/empty.png").touch()  # copies of each other, and no images
    with pytest.raises(DataError, match=r"1 of test; a/x/0\.png = c/x/copy\.png"):
        forecast(chosen(root, id_val=0.0))
    (root / "c/x/copy.png").unlink()
    assert forecast(chosen(root, id_val=0.0)).splits["test"] == 120


@pytest.mark.parametrize("picks", [True, False])
def test_a_domain_that_tests_and_picks_the_round_is_noticed(picks):
    labels, domains = np.arange(400) % 2, np.arange(400) // 200
    names = tuple(map(str, range(400)))
    table = ImageTable(names, labels, domains, ("x", "y"), ("bern", "chur"), images=np.zeros(400))
    for rows, noticed in ((200, picks), (300, False)):
        parts = np.split(np.arange(400), [200, 200, 200, rows + 100])
        found = [one.code for one in about_splits(table, Splits(*parts), chosen=False, picks=picks)]
        assert found == ["picked-by-test-domain"] * noticed


def test_four_validation_images_pick_the_round_and_that_is_said(tmp_path, caplog):
    load(make_folder(tmp_path / "images", each=5), tmp_path, id_val=0.25)
    (text,) = said(caplog)
    assert "has only 4 images" in text
    assert "uncertain by 49 points" in text  # 1.96 * sqrt(0.25 / 4)
    caplog.clear()
    experiment = chosen(tmp_path / "images", id_val=0.25)
    one_round = experiment.train.model_copy(update={"rounds": 1})  # there is nothing to pick from
    experiment = experiment.model_copy(update={"train": one_round})
    load_images(experiment, tmp_path / "cache", lambda *_: None)
    assert said(caplog) == []


def test_copies_of_training_images_in_the_test_domain_end_the_run(root, tmp_path, caplog):
    for number in range(7):
        shutil.copy(root / f"a/x/{number}.png", root / f"c/x/copy{number}.png")
    where = r"Copies of training images .*7 of test; a/x/\d.png = c/x/copy\d.png"
    with pytest.raises(DataError, match=where):
        load(root, tmp_path, id_val=0.0)
    caplog.clear()
    load(root, tmp_path, id_val=0.0, duplicates="warn")
    assert any("7 of test" in text for text in said(caplog))
    assert any("14 files are 7 images, in two domains" in text for text in said(caplog))
    caplog.clear()
    load(root, tmp_path, id_val=0.0, duplicates="ignore")
    assert said(caplog) == []


def test_copies_among_training_images_are_no_single_image_to_hide(root, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "feddg")
    shutil.copy(root / "a/x/0.png", root / "a/x/copy.png")
    told = "privacy.record_epsilon is for one file, and 2 files are 1 image"
    privacy = {"record_epsilon": 8}
    with pytest.raises(DataError, match=rf"{told}.*Remove them"):
        load(root, tmp_path, privacy, id_val=0.0)
    for duplicates in ("warn", "ignore"):
        caplog.clear()
        load(root, tmp_path, privacy, id_val=0.0, duplicates=duplicates)
        assert any(text.startswith(told) for text in said(caplog))
    assert len(said(caplog)) == 1
    caplog.clear()
    load(root, tmp_path, {"style_epsilon": 8, "style_unit": "client"}, id_val=0.0)
    assert said(caplog) == []


def test_rows_that_are_tiles_of_one_image_are_no_single_image_to_hide():
    def codes(*names):
        rows = np.arange(len(names))
        features = np.zeros((len(names), 3), np.float32)
        table = ImageTable(names, rows % 2, rows * 0, ("x", "y"), ("a",), images=features)
        splits = Splits(rows, *[rows[:0]] * 4)
        hides = "privacy.record_epsilon"
        return [d.code for d in about_copies(table, names, splits, True, hides)]

    assert codes("1.tif#x0y0w8h8", "2.tif#x0y0w8h8") == []
    assert codes("1.tif#x0y0w8h8", "1.tif#x8y0w8h8") == ["tiles-weaken-epsilon"]


def test_an_official_split_with_a_leak_is_warned_about(root, tmp_path, caplog):
    lines = ["split,path"]
    for file in sorted(root.rglob("*.png")):
        path = file.relative_to(root).as_posix()
        lines.append(f"{'test' if path.startswith('c') else 'train'},{path}")
    shutil.copy(root / "a/x/0.png", root / "c/x/copy.png")
    lines.append("test,c/x/copy.png")
    split = tmp_path / "split.csv"
    split.write_text("\n".join(lines) + "\n")
    data = {"source": "folder", "root": root, "image_size": 8, "split_file": split}
    chosen = Experiment(data=data, clients=2, model={"backbone": "cnn", "weights": None})
    load_images(chosen, tmp_path / "cache", lambda *_: None)
    assert any("1 of test" in text for text in said(caplog))


def test_a_split_file_says_which_images_measure(root, tmp_path, caplog):
    roles = {"a": "train", "b": "train", "c": "test"}
    files = [file.relative_to(root).as_posix() for file in sorted(root.rglob("*.png"))]
    for leak in (False, True):
        caplog.clear()
        one = {"c/x/0.png": "train"} if leak else {}
        rows = [f"{one.get(path, roles[path[0]])},{path}" for path in files]
        split = tmp_path / "split.csv"
        split.write_text("\n".join(["split,path", *rows]))
        data = {"source": "folder", "root": root, "image_size": 8, "split_file": split}
        data |= {"id_val": 0.4, "duplicates": "ignore"}
        chosen = Experiment(data=data, clients=2, model={"backbone": "cnn", "weights": None})
        caplog.set_level("INFO")
        found = load_images(chosen, tmp_path / "cache", lambda *_: None).splits
        text = caplog.text
        assert "data.id_val 0.4: not used, since the split file says which images measure" in text
        assert ("No domain is held out" in text) == ("in domains that train (c)" in text) == leak
        assert (len(found.id_test), len(found.test)) == ((119, 0) if leak else (0, 120))


def test_a_split_file_may_list_what_is_left_out(root, tmp_path):
    (root / "a/x/broken.png").write_text("no image")
    files = [file.relative_to(root).as_posix() for file in sorted(root.rglob("*.png"))]
    split, roles = tmp_path / "split.csv", {"a": "train", "b": "val", "c": "test"}
    split.write_text("\n".join(["split,path", *(f"{roles[path[0]]},{path}" for path in files)]))
    data = {"source": "folder", "root": root, "image_size": 8, "split_file": split}
    data |= {"leave_out": "b", "duplicates": "ignore"}
    chosen = Experiment(data=data, clients=2, model={"backbone": "cnn", "weights": None})
    found = load_images(chosen, tmp_path / "cache", lambda *_: None).splits
    assert (len(found.train), len(found.val), len(found.test)) == (120, 0, 120)


def test_a_folder_of_which_nothing_is_held_out_trains_on_all_and_says_so(root, tmp_path, caplog):
    found = load(root, tmp_path, hold_out=())
    assert not len(found.splits.test)
    assert np.unique(found.table.domains[found.splits.train]).tolist() == [0, 1, 2]
    (text,) = said(caplog)
    assert text.startswith("No domain is held out: all train")
    assert "--hold-out DOMAIN, one of a, b, c" in text


def test_a_published_data_set_asks_which_domain_is_held_out(tmp_path):
    digits = Experiment(data="digits", model={"weights": None})
    with pytest.raises(FeddgError, match="one of ink, chalk, photo, sketch"):
        load_images(digits, tmp_path, lambda *_: None)


def test_depths_are_those_of_the_bands_that_become_colours(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    (tmp_path / "a/x").mkdir(parents=True)
    for number, infrared in enumerate((4095, 1023)):
        values = np.full((8, 8, 4), 1000, np.uint16)
        values[0, 0] = (1500, 1500, 1500, infrared)
        file = tmp_path / f"a/x/{number}.tif"
        tifffile.imwrite(file, values, photometric="rgb", extrasamples=["unassalpha"])
    assert survey(from_folder(tmp_path), Reading(bands=(4, 3, 2))).depths == {"a": 12}
    assert survey(from_folder(tmp_path), Reading(bands=(1, 2, 3))).depths == {"a": 11}


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_a_note_says_that_further_pages_of_a_tiff_are_not_read(tmp_path, kind):
    page = Image.fromarray(np.full((8, 8), 9, kind))
    file = tmp_path / "air" / "x" / "stack.tif"
    file.parent.mkdir(parents=True)

    def said():
        found = about_survey(survey(from_folder(tmp_path)), Reading())
        return [each.text for each in found if each.code == "pages-left-out"]

    page.save(file)
    assert said() == []
    page.save(file, save_all=True, append_images=[page])
    (text,) = said()
    assert text.endswith("'air' have several pages; only the first is read (air/x/stack.tif).")


def test_images_that_are_cut_are_looked_at_however_large(tmp_path, monkeypatch):
    monkeypatch.setattr("feddg.data.inspection.MOST_PIXELS", 100)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    (tmp_path / "a/x").mkdir(parents=True)
    file = tmp_path / "a/x/scan.tif"
    Image.fromarray(np.full((20, 20), 4000, np.uint16)).save(file)
    assert survey(from_folder(tmp_path)).depths == {}
    assert survey(from_folder(tmp_path), Reading(tile=10)).depths == {"a": 12}
    assert depth_of([file], Reading(tile=10)) == 12


def test_domains_left_out_on_purpose_are_not_ignored(root):
    table = from_folder(root)
    assert not ignored_files(table.without(["b"]), ["b"])
    assert ignored_files(table.without(["b"]))


def test_what_is_ignored_is_counted_by_kind(root):
    (root / "a/x/deep").mkdir()
    for number in range(4):
        noise(7000 + number).save(root / f"a/x/deep/{number}.png")
    noise(1).save(root / "a/loose.png")
    for name in ("a/x/slide.svs", "b/x/other.svs", "readme.txt", "a/LICENSE", "a/.DS_Store"):
        (root / name).touch()
    found = ignored_files(from_folder(root))
    assert {kind: len(paths) for kind, paths in found.items()} == {
        "in deeper folders": 4,
        "outside a class folder": 1,
        ".svs": 2,
        ".txt": 1,
        "without a suffix": 1,
    }
    texts = {finding.text: finding.severity for finding in about_ignored(found)}
    assert texts["Ignored, as they are no images: 1 .txt, 1 without a suffix."] == "note"
    (slides,) = [text for text in texts if ".svs" in text]
    assert "2 files (a/x/slide.svs, b/x/other.svs)" in slides
    assert "OpenSlide" in slides
    (deep,) = [text for text in texts if "deeper" in text]
    assert deep.startswith(
        "Ignored: 4 files (a/x/deep/0.png, a/x/deep/1.png, a/x/deep/2.png and 1 more)"
    )


def test_of_a_table_only_the_folders_of_its_images_are_searched(tmp_path):
    make_folder(tmp_path / "study", each=2)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/a.zip").touch()
    (tmp_path / "study/a/x/notes.txt").touch()
    paths = sorted(file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.png"))
    rows = [f"{path},{path.split('/')[2]},{path.split('/')[1]}" for path in paths[1:]]
    (tmp_path / "t.csv").write_text("\n".join(["path,label,domain", *rows]))
    found = ignored_files(load_source("table", tmp_path / "t.csv", images=tmp_path))
    assert found == {"images that are not in t.csv": paths[:1], ".txt": ["study/a/x/notes.txt"]}


@pytest.mark.skipif(sys.platform == "darwin", reason="names of files are UTF-8 there")
def test_names_of_files_are_escaped_whatever_their_bytes(root):
    (root / os.fsdecode(b"\xe9\x1b[31m.png")).write_bytes(b"")
    (root / os.fsdecode(b"notes.t\xe9\x1b[31mt")).write_bytes(b"")
    table = from_folder(root)
    found = [str(one) for one in about_ignored(ignored_files(table))]
    assert any(r"(\udce9\x1b[31m.png)" in text for text in found)
    assert any(r".t\udce9\x1b[31mt" in text for text in found)
    "".join(found).encode()


def test_a_class_with_most_of_the_images_is_warned_about(tmp_path, caplog):
    root = make_folder(tmp_path / "images", classes=("x", "y", "z"), each=30)
    for domain in ("a", "b"):
        for number in range(200):
            noise(10**6 + number + 1000 * (domain == "b")).save(
                root / domain / "x" / f"m{number}.png"
            )
    with caplog.at_level(logging.WARNING):
        load(root, tmp_path)
    (text,) = [text for text in said(caplog) if "always answering" in text]
    # 0.5 of each domain's images validate: shares stay what they are, 230 of 290.
    assert text.startswith("79% of the training images are of the class 'x'")


def test_a_client_with_most_of_the_images_is_warned_about(subtests):
    for sizes, said in [
        ([60, 20, 20], 0),
        ([50, 25, 25], None),
        ([74, 26], None),
        ([20, 80], 1),
        ([9], None),
    ]:
        with subtests.test(sizes=sizes, said=said):
            found = list(about_clients(sizes))
            assert len(found) == (said is not None)
            if found:
                share = max(sizes) / sum(sizes)
                assert found[0].text.startswith(f"Client {said} of {len(sizes)} holds {share:.0%}")
    (found,) = about_clients([20, 80], ["north", "south"])
    assert found.text.startswith("Site south holds 80% of the training images")
    assert "Ask it whether it does" in found.advice
