import logging
from pathlib import Path

import numpy as np
import pytest

from feddg.data import sources
from feddg.data.images import ImageTable
from feddg.data.sources import load_source, register_source, source_names
from feddg.errors import DataError

PACS_DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")


def write_tree(root: Path, domains: tuple[str, ...], classes: tuple[str, ...]) -> Path:
    for domain in domains:
        for label in classes:
            (root / domain / label).mkdir(parents=True)
            for number in (1, 2):
                (root / domain / label / f"{number}.jpg").write_bytes(b"")
    return root


def one_image(root: Path | None, colour: int = 0) -> ImageTable:
    zero = np.zeros(1, dtype=np.int64)
    image = np.full((1, 2, 2, 3), colour, dtype=np.uint8)
    return ImageTable(("a/b/1",), zero, zero, ("b",), ("a",), images=image)


def test_builtin_sources_are_known() -> None:
    assert {"digits", "folder", "pacs"} <= set(source_names())
    assert source_names() == sorted(source_names())


def test_unknown_source_suggests_the_nearest() -> None:
    with pytest.raises(DataError, match=r"'digit' \(did you mean 'digits'\?\).*folder, pacs"):
        load_source("digit")


def test_folder(tmp_path: Path) -> None:
    table = load_source("folder", write_tree(tmp_path, ("b", "a"), ("y", "x")))
    assert table.domain_names == ("a", "b")
    assert table.counts().tolist() == [[2, 2], [2, 2]]


def test_folder_accepts_a_string_and_the_home_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_tree(tmp_path / "images", ("a",), ("x", "y"))
    assert load_source("folder", "~/images").root == tmp_path / "images"


@pytest.mark.parametrize("source", ["folder", "pacs"])
def test_sources_on_disk_need_a_root(source: str) -> None:
    with pytest.raises(DataError, match=f"'{source}' needs the folder"):
        load_source(source)


def test_folder_with_a_single_class(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="class 'x' only"):
        load_source("folder", write_tree(tmp_path, ("a", "b"), ("x",)))


def test_digits_take_no_root(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="leave out root"):
        load_source("digits", tmp_path)


def test_unknown_option() -> None:
    with pytest.raises(DataError, match=r"'digits' cannot be used this way.*size"):
        load_source("digits", size=3)


def test_registered_source_gets_root_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_sources", dict(sources._sources))
    register_source("grey")(one_image)
    table = load_source("grey", colour=7)
    assert table.images is not None
    assert table.images[0, 0, 0, 0] == 7
    with pytest.raises(DataError, match="already is a data source named 'grey'"):
        register_source("grey")(lambda root: one_image(root))


def test_sources_of_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "theirs-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[feddg.sources]\ntheirs = their_module:load\nbroken = no_such_module:load\n"
    )
    (tmp_path / "their_module.py").write_text(
        "from feddg.data.images import from_folder\n"
        "def load(root, *, first=1):\n"
        "    return from_folder(root).take(range(first))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    images = write_tree(tmp_path / "images", ("a", "b"), ("x", "y"))
    assert {"theirs", "broken", "digits"} <= set(source_names())
    assert len(load_source("theirs", images, first=3)) == 3
    with pytest.raises(DataError, match=r"'broken' \(no_such_module:load\) cannot be loaded"):
        load_source("broken")


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
    assert [table.domain_id(letter) for letter in "PACS"] == [0, 1, 2, 3]


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


def test_real_pacs_has_the_published_counts(
    shared_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="feddg"):
        table = load_source("pacs", shared_data / "pacs")
    assert table.counts().sum(axis=1).tolist() == [1670, 2048, 2344, 3929]
    assert caplog.text == ""
