"""Published data sets as people's disks have them: folders put around, and what macOS leaves."""

import logging
import shutil
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

import published_trees as trees
from feddg.data.data_set import DATA_SETS, load_source
from feddg.data.decoded import open_pixels
from feddg.data.images import ImageTable
from feddg.data.published import image_suffix
from feddg.errors import DataError
from published_trees import LAYOUTS, by_split, images, office_home

MAKE = {name: layout.make for name, layout in LAYOUTS.items()} | {
    "office_home": partial(office_home, classes=3),
    "office_home_dassl": partial(trees.office_home_dassl, classes=3),
}


def listed(table: ImageTable) -> list[tuple[object, ...]]:
    """File name, class, domain and split of every row."""
    split = ["" for _ in table.paths] if table.split is None else table.split.tolist()
    return sorted(
        (path.rpartition("/")[2], table.class_names[label], table.domain_names[domain], role)
        for path, label, domain, role in zip(table.paths, table.labels, table.domains, split)
    )


def from_a_mac(root: Path) -> Path:
    """Beside every folder and file what Finder and its archiver leave."""
    for path in sorted(root.rglob("*")):
        if path.is_dir():
            (path / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
        else:
            other = root / "__MACOSX" / path.relative_to(root).with_name(f"._{path.name}")
            other.parent.mkdir(parents=True, exist_ok=True)
            other.write_bytes(b"\0\5\x16\7")
    (root / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    return root


def in_downloads(root: Path) -> Path:
    """In a folder of the archive's name, in another with nothing else in it."""
    around = root.with_name("downloads")
    around.mkdir()
    shutil.move(root, around / "archive (1)")
    return around


def test_litter_and_folders_around_change_nothing(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for name in LAYOUTS:
        with subtests.test(name=name):
            tmp_path = tmp_path_factory.mktemp("case")
            source = LAYOUTS[name].source
            root = MAKE[name](tmp_path / "images")
            plain = load_source(source, root)
            changed = load_source(source, in_downloads(from_a_mac(root)))
            assert listed(changed) == listed(plain)
            assert changed.domain_names == plain.domain_names
            assert changed.class_names == plain.class_names


@pytest.mark.parametrize("name", ["pacs", "vlcs_folders", "office_home_dassl", "office_caltech"])
def test_suffixes_in_capitals_are_suffixes(name: str, tmp_path: Path) -> None:
    root = MAKE[name](tmp_path / "images")
    plain = load_source(LAYOUTS[name].source, root)
    for file in sorted(root.rglob("*.png")):
        file.rename(file.with_suffix(".PNG"))
    changed = load_source(LAYOUTS[name].source, root)
    assert [path.lower() for path in changed.paths] == [path.lower() for path in plain.paths]


def test_a_domain_alone_is_no_folder_around(tmp_path: Path) -> None:
    images(tmp_path, ["photo/dog", "photo/horse"])
    with pytest.raises(DataError, match="lacks art_painting, cartoon, sketch"):
        load_source("pacs", tmp_path)


def test_only_formats_of_images_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bytes] = []
    monkeypatch.setattr(Image, "ID", [*Image.ID, "ODD"])
    monkeypatch.setitem(Image.OPEN, "ODD", (None, tried.append))
    assert image_suffix(b"%!PS-Adobe-3.0 EPSF-3.0") == ".png"
    assert not tried


def test_of_several_data_sets_in_a_folder_each_is_found(tmp_path: Path) -> None:
    trees.domain_net_folders(tmp_path / "a")  # nearer, and has a domain called sketch, too
    trees.pacs(tmp_path / "b/PACS")
    assert load_source("pacs", tmp_path).domain_names == DATA_SETS["pacs"].domains
    assert load_source("domain_net", tmp_path).domain_names == DATA_SETS["domain_net"].domains


# Every published data set in every layout it is known to come in: counts, labels, splits.


def test_every_layout_is_read_whole(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for name in LAYOUTS:
        with subtests.test(name=name):
            tmp_path = tmp_path_factory.mktemp("case")
            layout = LAYOUTS[name]
            definition = DATA_SETS[layout.source]
            root = MAKE[name](tmp_path / "images")
            table = load_source(layout.source, root)
            if definition.domains:
                assert table.domain_names == definition.domains
            if definition.classes:
                assert table.class_names == definition.classes
            if table.root is not None:
                assert all((table.root / path).is_file() for path in table.paths)
                assert len(set(table.paths)) == len(table)
            _, pixels, bad = open_pixels(table, 8, cache=None)
            assert (len(pixels), bad) == (len(table), [])
            assert load_source(layout.source, root).paths == table.paths, (
                "the same order every time"
            )


@pytest.mark.parametrize("name", ["vlcs_folders", "digits_dg", "camelyon17", "iwildcam"])
def test_counts_that_differ_are_a_warning_with_the_difference(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    definition = DATA_SETS[LAYOUTS[name].source]
    with caplog.at_level(logging.WARNING, logger="feddg"):
        table = load_source(definition.name, LAYOUTS[name].make(tmp_path))
    for domain, found in zip(table.domain_names, table.counts().sum(axis=1).tolist()):
        if domain in definition.counts:
            assert f"({found - definition.counts[domain]:+d})" in caplog.text
    for role, published in definition.split_counts.items():
        difference = by_split(table)[role] - published
        assert f"in its split {role}" in caplog.text
        assert f"({difference:+d})" in caplog.text


def test_published_counts_add_up() -> None:
    """As their papers, or the files that DomainBed deletes, say."""

    sums = {"vlcs": 10_729, "domain_net": 586_575, "camelyon17": 455_950, "terra_incognita": 24_330}
    sums |= {"digits_dg": 24_000, "office_caltech": 2_533, "rotated_mnist": 70_000}
    sums["camelyon17"] = 455_954
    for name, count in sums.items():
        assert sum(DATA_SETS[name].counts.values()) == count
    camelyon = DATA_SETS["camelyon17"]
    assert sum(camelyon.split_counts.values()) == 455_954
    assert camelyon.split_counts["val"] == camelyon.counts["hospital_1"]
    assert camelyon.split_counts["test"] == camelyon.counts["hospital_2"]


def test_images_of_one_name_and_size_are_told_apart_by_their_content(tmp_path: Path) -> None:
    for domain in DATA_SETS["digits_dg"].domains:
        for part in ("train", "val"):
            for label in range(10):
                trees.image(tmp_path / f"digits_dg/{domain}/{part}/{label}/00001.bmp")
    table = load_source("digits_dg", tmp_path)
    assert by_split(table) == {"train": 40, "id_val": 40}


def test_a_domain_without_parts_beside_others_is_read(tmp_path: Path) -> None:
    root = trees.office_31(tmp_path)
    (parted,) = root.rglob("amazon/images")
    for folder in [*parted.iterdir()]:
        shutil.move(folder, parted.parent / folder.name)
    parted.rmdir()
    found = load_source("office_caltech", tmp_path)
    assert found.counts().sum(axis=1).min() > 0


def test_parts_that_are_called_otherwise_than_the_whole_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = trees.vlcs_parts(tmp_path)
    (file, *_) = sorted(root.rglob("full/*/*.*"))
    file.rename(file.with_name("other.png"))
    load_source("vlcs", tmp_path)
    assert sum("its official split is not known" in line for line in caplog.messages) == 1
