"""Published data sets as people's disks have them: folders put around, and what macOS leaves."""

import shutil
from functools import partial
from pathlib import Path

import pytest

from feddg.data.images import ImageTable
from feddg.data.sources import load_source
from feddg.errors import DataError
from published_trees import LAYOUTS, images, office_home

MAKE = {name: layout.make for name, layout in LAYOUTS.items()} | {
    "office_home": partial(office_home, classes=3)
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path / "cache"))


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


@pytest.mark.parametrize("name", LAYOUTS)
def test_litter_and_folders_around_change_nothing(name: str, tmp_path: Path) -> None:
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
