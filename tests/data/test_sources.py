import logging
from pathlib import Path

import numpy as np
import pytest

from feddg.data.data_set import DATA_SETS
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


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What is registered meanwhile is forgotten again, and entry points are looked for anew."""
    len(DATA_SETS)
    for name in ("_found", "_broken"):
        monkeypatch.setattr(DATA_SETS, name, dict(getattr(DATA_SETS, name)))
    monkeypatch.setattr(DATA_SETS, "_complete", False)
    return monkeypatch


def test_builtin_sources_are_known() -> None:
    assert {"digits", "folder", "office_home", "pacs"} <= set(source_names())
    assert not {"fedig", "fedig_silos"} & set(source_names())
    assert source_names() == sorted(source_names())


def test_unknown_source_suggests_the_nearest() -> None:
    with pytest.raises(DataError, match=r"'digit' \(did you mean 'digits'\?\).*folder.*pacs"):
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


@pytest.mark.parametrize(
    "source",
    sorted({"folder", *(name for name, one in DATA_SETS.items() if one.layouts)} - {"huggingface"}),
)
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


@pytest.mark.usefixtures("fresh")
def test_registered_source_gets_root_and_options() -> None:
    register_source("grey")(one_image)
    table = load_source("grey", colour=7)
    assert table.images is not None
    assert table.images[0, 0, 0, 0] == 7
    with pytest.raises(
        DataError, match=r"two data sets are called 'grey': .*one_image and .*lambda"
    ):
        register_source("grey")(lambda root: one_image(root))


@pytest.mark.usefixtures("fresh")
def test_a_notebooks_cell_may_register_its_function_again() -> None:
    code = "def load(root):\n    return {}\n"
    for answer in (1, 2):
        cell: dict = {"__name__": "notebook"}
        exec(code.format(answer), cell)
        register_source("mine")(cell["load"])
    assert DATA_SETS["mine"].load(None) == 2
    with pytest.raises(DataError, match="two data sets are called 'digits'"):
        register_source("digits")(cell["load"])


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("fedig", r"--data pacs --root FOLDER --preset fedig\."),
        ("fedig_silos", "--preset fedig_silos"),
    ],
)
def test_what_has_no_images_says_what_to_do(tmp_path: Path, name: str, remedy: str) -> None:
    with pytest.raises(DataError, match=rf"'{name}' cannot be read as a source.*{remedy}"):
        load_source(name, tmp_path)


def test_sources_of_other_packages(
    tmp_path: Path, fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = tmp_path / "theirs-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[feddg.sources]\ntheirs = their_module:load\nbroken = no_such_module:load\n"
        "whole = their_module:WHOLE\nrenamed = their_module:WHOLE\nnumber = their_module:NUMBER\n"
    )
    (tmp_path / "their_module.py").write_text(
        "from feddg.data.data_set import DataSet\n"
        "from feddg.data.images import from_folder\n"
        "def load(root, *, first=1):\n"
        "    return from_folder(root).take(range(first))\n"
        "WHOLE = DataSet(name='whole', summary='Theirs', load=load, domains=('b', 'a'))\n"
        "NUMBER = 3\n"
    )
    fresh.syspath_prepend(tmp_path)
    images = write_tree(tmp_path / "images", ("a", "b"), ("x", "y"))
    with caplog.at_level(logging.WARNING, logger="feddg"):
        assert {"theirs", "whole", "digits"} <= set(source_names())
    assert caplog.text.count("cannot be loaded") == 3
    assert DATA_SETS["whole"].domains == ("b", "a")
    assert len(load_source("whole", images, first=2)) == 2
    assert len(load_source("theirs", images, first=3)) == 3
    for name, reason in [
        ("broken", "of no_such_module:load cannot be loaded: No module"),
        ("renamed", "must be called 'whole'"),
        ("number", "not int"),
    ]:
        with pytest.raises(DataError, match=f"'{name}' .*{reason}"):
            load_source(name)


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


def office_home_tree(root: Path, fourth: str, plain: bool = False) -> Path:
    classes = DATA_SETS["office_home"].classes
    if plain:
        classes = tuple(name.replace("_", " ").lower() for name in classes)
    return write_tree(root, ("Art", "Clipart", "Product", fourth), classes)


@pytest.mark.parametrize("fourth", ["Real World", "Real_World", "RealWorld", "real_world", "real"])
@pytest.mark.parametrize("around", ["", "OfficeHomeDataset_10072016", "office_home"])
def test_office_home_in_its_spellings(tmp_path: Path, fourth: str, around: str) -> None:
    office_home_tree(tmp_path / around, fourth, plain=fourth == "real")
    table = load_source("office_home", tmp_path)
    assert table.domain_names == ("Art", "Clipart", "Product", "Real_World")
    assert table.counts().tolist() == [[2] * 65] * 4
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


def test_published_sizes_add_up() -> None:
    """15,588 images (Office-Home's paper), 9,991 (PACS's), 203,029 (WILDS)."""
    home, pacs, wild = (DATA_SETS[name] for name in ("office_home", "pacs", "iwildcam"))
    assert (len(home.classes), sum(home.counts.values())) == (65, 15_588)
    assert (len(pacs.classes), sum(pacs.counts.values())) == (7, 9_991)
    assert sum(wild.split_counts.values()) == 203_029


def test_real_pacs_has_the_published_counts(
    shared_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="feddg"):
        table = load_source("pacs", shared_data / "pacs")
    assert table.counts().sum(axis=1).tolist() == [1670, 2048, 2344, 3929]
    assert caplog.text == ""
