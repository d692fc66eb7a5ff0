"""Folders of domains and classes: PACS, Office-Home, VLCS, Office-Caltech, Digits-DG."""

import itertools
import logging
from pathlib import Path

import numpy as np
import pytest

import published_trees as trees
from feddg.data.data_set import DATA_SETS, load_source
from feddg.errors import DataError
from published_trees import by_split, rows, write_tree


def test_office_home_of_dassl_keeps_its_split(tmp_path: Path) -> None:
    table = load_source("office_home", trees.office_home_dassl(tmp_path, classes=3))
    assert by_split(table) == {"train": 4 * 3 * 2, "id_val": 4 * 3 * 2}
    assert all(
        ("/val/" in path) == (role == "id_val") for path, role in zip(table.paths, table.split)
    )


def test_both_layouts_of_vlcs_give_the_same_label_ids(tmp_path: Path) -> None:
    one = load_source("vlcs", trees.vlcs_folders(tmp_path / "a"))
    other = load_source("vlcs", trees.vlcs_parts(tmp_path / "b"))
    assert one.class_names == other.class_names == ("bird", "car", "chair", "dog", "person")
    assert one.domain_names == other.domain_names
    for path, name, domain in rows(other):
        folder, _, number, _ = path.split("/")
        assert one.class_names[int(number)] == name
        assert {"CALTECH": "Caltech101", "LABELME": "LabelMe", "SUN": "SUN09"}.get(
            folder, "VOC2007"
        ) == domain


@pytest.mark.parametrize("full", [True, False])
def test_vlcs_lists_every_image_once(tmp_path: Path, full: bool) -> None:
    table = load_source("vlcs", trees.vlcs_parts(tmp_path, full))
    assert by_split(table) == dict.fromkeys(("train", "id_val", "id_test"), 4 * 5 * 2)
    assert all(path.split("/")[1] == "full" for path in table.paths) == full


def test_vlcs_with_full_alone_has_no_split(tmp_path: Path) -> None:
    for domain in ("CALTECH", "LABELME", "SUN", "PASCAL"):
        trees.images(tmp_path, [f"{domain}/full/{label}" for label in range(5)])
    table = load_source("vlcs", tmp_path)
    assert len(table) == 4 * 5 * 2
    assert table.split is None


def test_vlcs_whose_full_has_other_files_than_its_parts_reads_full_alone(tmp_path: Path) -> None:
    trees.vlcs_parts(tmp_path, full=False)
    for domain in ("CALTECH", "LABELME", "SUN", "PASCAL"):
        trees.images(tmp_path / "VLCS", [f"{domain}/full/{label}" for label in range(5)], each=6)
    table = load_source("vlcs", tmp_path)
    assert len(table) == 4 * 5 * 6
    assert table.split is None


def test_digits_dg_keeps_its_split(tmp_path: Path) -> None:
    table = load_source("digits_dg", trees.digits_dg(tmp_path))
    assert by_split(table) == {"train": 4 * 10 * 2, "id_val": 4 * 10 * 2}


def test_office_caltech_with_the_names_of_both_collections(tmp_path: Path) -> None:
    one = load_source("office_caltech", trees.office_caltech(tmp_path / "a"))
    other = load_source("office_caltech", trees.office_31(tmp_path / "b"))
    assert one.counts().tolist() == other.counts().tolist() == [[2] * 10] * 4
    assert one.split is None
    assert other.split is None


PACS_DOMAINS = ("art_painting", "cartoon", "photo", "sketch")


PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")


@pytest.mark.parametrize("around", ["", "PACS", "kfold", "PACS/kfold"])
def test_pacs_has_the_benchmarks_order_wherever_it_lies(tmp_path: Path, around: str) -> None:
    write_tree(tmp_path / around, PACS_DOMAINS, PACS_CLASSES)
    table = load_source("pacs", tmp_path)
    assert table.domain_names == ("photo", "art_painting", "cartoon", "sketch")
    assert table.class_names == PACS_CLASSES
    assert table.root == tmp_path / around
    for path, label, domain in zip(table.paths, table.labels, table.domains):
        name = f"{table.domain_names[domain]}/{table.class_names[label]}/"
        assert path.startswith(name)


def test_pacs_folders_may_be_spelled_differently(tmp_path: Path) -> None:
    write_tree(tmp_path, ("Art Painting", "Cartoon", "PHOTO", "sketch"), ("Dog", "House"))
    table = load_source("pacs", tmp_path)
    assert table.counts()[:, [0, 5]].tolist() == [[2, 2]] * 4
    first_art = table.paths[int(np.flatnonzero(table.domains == 1)[0])]
    assert first_art == "Art Painting/Dog/1.jpg"


def test_pacs_of_another_size_is_a_warning_with_both_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="feddg"):
        load_source("pacs", write_tree(tmp_path, PACS_DOMAINS, PACS_CLASSES))
    assert "2344" in caplog.text
    assert "14" in caplog.text


def test_pacs_leaves_other_domains_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tree(tmp_path, (*PACS_DOMAINS, "photo_backup"), PACS_CLASSES)
    with caplog.at_level(logging.WARNING, logger="feddg"):
        table = load_source("pacs", tmp_path)
    assert len(table) == 4 * 7 * 2
    assert not any("backup" in path for path in table.paths)
    assert "photo_backup" in caplog.text


def test_pacs_without_a_domain_lists_what_is_there(tmp_path: Path) -> None:
    write_tree(tmp_path, ("cartoon", "photo", "sketch"), PACS_CLASSES)
    with pytest.raises(DataError, match=r"lacks art_painting.*cartoon, photo, sketch"):
        load_source("pacs", tmp_path)


def test_pacs_with_a_strange_class(tmp_path: Path) -> None:
    write_tree(tmp_path, PACS_DOMAINS, (*PACS_CLASSES, "zebra"))
    with pytest.raises(DataError, match="unexpected class folders: zebra"):
        load_source("pacs", tmp_path)


def office_home_tree(root: Path, fourth: str, plain: bool = False, count: int = 65) -> Path:
    classes = DATA_SETS["office_home"].classes[:count]
    if plain:
        classes = tuple(name.replace("_", " ").lower() for name in classes)
    return write_tree(root, ("Art", "Clipart", "Product", fourth), classes)


def test_office_home_in_its_spellings(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for around, fourth in itertools.product(
        ["", "OfficeHomeDataset_10072016", "office_home"],
        ["Real World", "Real_World", "RealWorld", "real_world", "real"],
    ):
        with subtests.test(fourth=fourth, around=around):
            tmp_path = tmp_path_factory.mktemp("case")
            office_home_tree(tmp_path / around, fourth, plain=fourth == "real", count=5)
            table = load_source("office_home", tmp_path)
            assert table.domain_names == ("Art", "Clipart", "Product", "Real_World")
            assert table.counts().tolist() == [[2] * 5 + [0] * 60] * 4
            assert table.class_names[0] == "Alarm_Clock"
            assert table.class_names == tuple(sorted(table.class_names))
            assert table.root == tmp_path / around
            for path, domain in zip(table.paths, table.domains):
                assert (path.split("/")[0] == fourth) == (domain == 3)


def test_office_home_of_another_size_is_a_warning_with_both_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="feddg"):
        load_source("office_home", office_home_tree(tmp_path, "Real World"))
    assert "Office-Home has 4357 images in Real_World" in caplog.text
    assert "holds 130" in caplog.text


def test_office_home_without_its_fourth_domain(tmp_path: Path) -> None:
    write_tree(tmp_path, ("Art", "Clipart", "Product"), ("Bed", "Bike"))
    with pytest.raises(DataError, match=r"lacks Real_World\. Found: Art, Clipart, Product"):
        load_source("office_home", tmp_path)


def test_real_pacs_has_the_published_counts(
    shared_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="feddg"):
        table = load_source("pacs", shared_data / "pacs")
    assert table.counts().sum(axis=1).tolist() == [1670, 2048, 2344, 3929]
    assert caplog.text == ""
