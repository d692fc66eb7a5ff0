"""Published data sets as people's disks have them: folders put around, and what macOS leaves."""

import json
import logging
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import published_trees as trees
from feddg.data.data_set import DATA_SETS, load_source
from feddg.data.images import ImageTable
from feddg.data.pixels import open_pixels
from feddg.errors import DataError
from published_trees import LAYOUTS, images, office_home

MAKE = {name: layout.make for name, layout in LAYOUTS.items()} | {
    "office_home": partial(office_home, classes=3),
    "office_home_dassl": partial(trees.office_home_dassl, classes=3),
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


# Every published data set in every layout it is known to come in: counts, labels, splits.


def rows(table: ImageTable) -> list[tuple[str, str, str]]:
    """Path, class and domain of every row, in words."""
    return [
        (path, table.class_names[label], table.domain_names[domain])
        for path, label, domain in zip(table.paths, table.labels, table.domains)
    ]


def by_split(table: ImageTable) -> dict[str, int]:
    return dict(Counter(table.split.tolist()))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_read_whole(name: str, tmp_path: Path) -> None:
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
    assert load_source(layout.source, root).paths == table.paths, "the same order every time"


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


@pytest.mark.parametrize("make", [trees.terra_folders, trees.terra_raw])
def test_terra_incognita_counts_an_image_of_two_animals_once(make, tmp_path: Path) -> None:
    table = load_source("terra_incognita", make(tmp_path))
    assert table.domain_names == ("location_100", "location_38", "location_43", "location_46")
    extra = [1, 0] if make is trees.terra_folders else [0, 0]
    # ... by its first class in the alphabet.
    counts = table.counts()
    assert counts.sum() == 4 * 10 * 2 + sum(extra)
    bird, coyote = counts[1, 0], counts[1, 3]
    assert (bird, coyote) == ((3, 2) if make is trees.terra_folders else (3, 1))


def test_terra_incognita_without_annotations_says_what_is_missing(tmp_path: Path) -> None:
    trees.image(tmp_path / "eccv_18_all_images_sm/1.jpg")
    with pytest.raises(DataError, match="no annotations below"):
        load_source("terra_incognita", tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"images": [], "annotations": []}'])
def test_terra_incognita_with_broken_annotations(tmp_path: Path, content: str) -> None:
    trees.terra_raw(tmp_path)
    (tmp_path / "eccv_18_annotation_files/x.json").write_text(content)
    with pytest.raises(DataError, match=r"x\.json is no file of annotations"):
        load_source("terra_incognita", tmp_path)


@pytest.mark.parametrize("make", [trees.domain_net_folders, trees.domain_net_wilds])
def test_domain_net_without_lists_numbers_classes_as_folder_readers_do(
    make, tmp_path: Path
) -> None:
    table = load_source("domain_net", make(tmp_path))
    assert table.class_names == trees.DOMAIN_NET_CLASSES
    assert table.split is None


def test_domain_net_with_lists_has_their_labels_and_split(tmp_path: Path) -> None:
    table = load_source("domain_net", trees.domain_net_lists(tmp_path))
    assert table.class_names == tuple(sorted(trees.DOMAIN_NET_CLASSES, key=str.lower))
    assert by_split(table) == {"train": 6 * 5 * 2, "id_test": 6 * 5 * 2}
    for path, name, domain in rows(table):
        assert path.startswith(f"{domain}/{name}/")


def test_mini_domain_net_needs_its_lists(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no splits_mini/.*feddg data get mini_domain_net"):
        load_source("mini_domain_net", trees.domain_net_folders(tmp_path))
    table = load_source("mini_domain_net", trees.mini_domain_net(tmp_path / "mini"))
    assert table.domain_names == ("clipart", "painting", "real", "sketch")
    assert by_split(table) == {"train": 4 * 5 * 2, "id_test": 4 * 5 * 2}


@pytest.mark.parametrize("beside", [True, False])
def test_domain_net_leaves_listed_duplicates_out(
    tmp_path: Path, beside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    root = trees.domain_net_folders(tmp_path / "images")
    whole = load_source("domain_net", root)
    out = [whole.paths[0], whole.paths[7]]
    name = "domain_net_duplicates.txt"
    file = root / "domain_net" / name if beside else tmp_path / "mine.txt"
    file.write_text("\n".join(out) + "\n")
    options = {} if beside else {"duplicates": file}
    with caplog.at_level(logging.WARNING, logger="feddg"):
        table = load_source("domain_net", root, **options)
    assert set(whole.paths) - set(table.paths) == set(out)
    assert "2 images left out" in caplog.text


def test_domain_net_with_a_list_of_other_paths_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("somewhere/else.png\n")
    with caplog.at_level(logging.WARNING, logger="feddg"):
        load_source("domain_net", trees.domain_net_folders(tmp_path / "a"), duplicates=file)
    assert "None of the 1 lines" in caplog.text


@pytest.mark.parametrize("line", ["clipart/x.png 0", "clipart/a/../x.png 0", "clipart/a/x.png"])
def test_domain_net_with_a_broken_list(tmp_path: Path, line: str) -> None:
    trees.domain_net_lists(tmp_path)
    with (tmp_path / "domainnet/real_test.txt").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(DataError, match=r"line 11 of .*real_test\.txt"):
        load_source("domain_net", tmp_path)


def test_domain_net_with_a_label_of_two_classes(tmp_path: Path) -> None:
    trees.domain_net_lists(tmp_path)
    with (tmp_path / "domainnet/real_test.txt").open("a") as file:
        file.write("real/cello/x.png 0\n")
    with pytest.raises(DataError, match="label 0 stands for both aircraft_carrier and cello"):
        load_source("domain_net", tmp_path)


def test_published_counts_add_up() -> None:
    """As their papers, or the files that DomainBed deletes, say."""
    from feddg.data.sets.domain_net import REMOVED

    sums = {"vlcs": 10_729, "domain_net": 586_575, "camelyon17": 455_950, "terra_incognita": 24_330}
    sums |= {"digits_dg": 24_000, "office_caltech": 2_533, "rotated_mnist": 70_000}
    sums["camelyon17"] = 455_954
    for name, count in sums.items():
        assert sum(DATA_SETS[name].counts.values()) == count
    assert sum(REMOVED.values()) == 9_431
    camelyon = DATA_SETS["camelyon17"]
    assert sum(camelyon.split_counts.values()) == 455_954
    assert camelyon.split_counts["val"] == camelyon.counts["hospital_1"]
    assert camelyon.split_counts["test"] == camelyon.counts["hospital_2"]


def test_camelyon17_has_the_official_split_and_its_hospitals(tmp_path: Path) -> None:
    table = load_source("camelyon17", trees.camelyon17(tmp_path))
    assert table.class_names == ("normal", "tumor")
    # Two images for each of two labels: of hospitals 0, 3, 4, by the file's split; 1, 2 whole.
    assert by_split(table) == {"train": 12, "id_val": 12, "val": 8, "test": 8}
    held = {role: set(table.domains[table.split == role].tolist()) for role in ("val", "test")}
    assert held == {"val": {1}, "test": {2}}
    assert table.clients.tolist() == [domain for _, _, domain in rows(table)]
    assert "patches/patient_004_node_0/" in table.paths[0], "zeros before a patient's number stay"


def test_camelyon17s_transparency_is_left_away(tmp_path: Path) -> None:
    table = load_source("camelyon17", trees.camelyon17(tmp_path))
    stored = np.asarray(Image.open(table.root / table.paths[0]))
    assert stored.shape[2] == 4
    _, pixels, _ = open_pixels(table, trees.SIDE, cache=None)
    assert pixels.gather([0]).shape == (1, 3, trees.SIDE, trees.SIDE)


def test_iwildcams_images_lie_in_train_whatever_their_split(tmp_path: Path) -> None:
    table = load_source("iwildcam", trees.iwildcam(tmp_path))
    assert all(path.startswith("train/") for path in table.paths)
    names = [f"location_{number}" for number in (1, 3, 4, 0, 2, 5)]
    assert list(table.domain_names) == names, "those that train come first"
    assert table.class_names == ("empty", "deer, red", "cat")
    assert by_split(table) == {"train": 18, "id_val": 18, "id_test": 18, "val": 6, "test": 12}
    for path, name, domain in rows(table):
        _, location, label, _ = path.removeprefix("train/").split("-")
        assert (table.class_names[int(label)], f"location_{location}") == (name, domain)
    assert table.clients.tolist() == [domain for _, _, domain in rows(table)]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("id_val", "extra", r"row \d+ of metadata.csv has 'extra' as split"),
        ("train-1-0-0.jpg", "../x.jpg", r"row \d+ of metadata.csv has '\.\./x\.jpg' as filename"),
        ("filename", "file", "no column 'filename'"),
    ],
)
def test_iwildcam_with_a_broken_metadata_file(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    file = trees.iwildcam(tmp_path) / "iwildcam_v2.0/metadata.csv"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(DataError, match=words):
        load_source("iwildcam", tmp_path)


@pytest.mark.parametrize("source", ["iwildcam", "camelyon17"])
def test_a_wilds_folder_that_is_none(source: str, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    with pytest.raises(DataError, match=r"holds no metadata\.csv.*Found: images"):
        load_source(source, tmp_path)


def test_metadata_without_its_images_names_one(tmp_path: Path) -> None:
    root = trees.iwildcam(tmp_path)
    (root / "iwildcam_v2.0/train").rename(root / "iwildcam_v2.0/test")
    with pytest.raises(DataError, match="lists images that are not there"):
        load_source("iwildcam", tmp_path)


def test_femnists_duplicates_are_used_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = trees.femnist_leaf(tmp_path)
    with caplog.at_level(logging.WARNING, logger="feddg"):
        table = load_source("femnist", root)
    # Four images of every writer in both parts; all writers but the first store one twice.
    assert "5 images are stored twice" in caplog.text
    assert by_split(table) == {"train": 3 * 4, "id_test": 3 * 4, "test": 4}
    assert table.domain_names == (*trees.WRITERS, "f9999_99")
    assert table.clients.tolist() == [domain for _, _, domain in rows(table)]
    assert {name for _, name, _ in rows(table)} == {"0", "A"}
    assert (len(table.class_names), table.class_names[36]) == (62, "a")
    content = json.loads(next((root / "data/train").glob("*.json")).read_text())
    first = np.round(np.array(content["user_data"][trees.WRITERS[0]]["x"][0]) * 255)
    assert (table.images[0, :, :, 1].ravel() == first).all(), "ink stays 0 and paper 255"


def test_femnist_whole_has_no_split(tmp_path: Path) -> None:
    root = trees.femnist_leaf(tmp_path)
    (root / "data/train").rename(root / "data/all_data")
    (root / "data/test").rename(root / "data/other")
    table = load_source("femnist", root)
    assert (len(table), table.split) == (12, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content.pop("user_data"), "user_data: Field required"),
        (lambda content: content["user_data"].popitem(), "do not match"),
        (lambda content: content["user_data"]["f0000_14"]["y"].append(1), "do not match"),
        (lambda content: content["user_data"]["f0000_14"]["y"].__setitem__(0, 62), "image 0 of"),
        (lambda content: content["user_data"]["f0000_14"]["x"][1].pop(), "image 1 of"),
        (lambda content: content["user_data"]["f0000_14"]["x"][1].__setitem__(0, 7), "image 1 of"),
    ],
)
def test_femnist_with_a_broken_file(tmp_path: Path, change, words: str) -> None:
    file = next((trees.femnist_leaf(tmp_path) / "data/train").glob("*.json"))
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=words):
        load_source("femnist", tmp_path)


@pytest.mark.parametrize("name", ["metadata.csv", "femnist_new_metadata.csv"])
def test_femnist_as_listed_by_the_benchmark(tmp_path: Path, name: str) -> None:
    table = load_source("femnist", trees.femnist_listed(tmp_path, name))
    assert by_split(table) == {"train": 8, "id_val": 8, "id_test": 8, "val": 4, "test": 4}
    assert table.domain_names == tuple(f"writer_{number}" for number in range(4))
    assert {name for _, name, _ in rows(table)} == {"0", "a"}


def test_digits_dg_keeps_its_split(tmp_path: Path) -> None:
    table = load_source("digits_dg", trees.digits_dg(tmp_path))
    assert by_split(table) == {"train": 4 * 10 * 2, "id_val": 4 * 10 * 2}


@pytest.mark.parametrize("packed", [True, False])
def test_rotated_mnist_turns_each_digit_by_one_angle(tmp_path: Path, packed: bool) -> None:
    table = load_source("rotated_mnist", trees.mnist(tmp_path, packed))
    assert table.counts().sum(axis=1).tolist() == [40] * 6
    assert table.counts().sum(axis=0).tolist() == [24] * 10
    digits = np.random.default_rng(4).integers(0, 256, (120, 28, 28), dtype=np.uint8)
    straight = {image.tobytes() for image in table.images[table.domains == 0, :, :, 0]}
    assert any(digit.tobytes() in straight for digit in digits)
    turned = [
        np.asarray(Image.fromarray(digit).rotate(45, Image.Resampling.BILINEAR)).tobytes()
        for digit in digits
    ]
    found = {image.tobytes() for image in table.images[table.domains == 3, :, :, 0]}
    assert 0 < len(found & set(turned)) <= 40


def test_rotated_mnist_is_drawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = trees.mnist(tmp_path / "images")
    first = load_source("rotated_mnist", root)
    monkeypatch.setattr("feddg.data.sets.digits.turned_digits", None)  # not called again
    assert (load_source("rotated_mnist", root).images == first.images).all()


@pytest.mark.parametrize("damage", ["cut", "labels for images", "gone"])
def test_mnist_files_that_are_none(tmp_path: Path, damage: str) -> None:
    folder = trees.mnist(tmp_path, packed=False) / "MNIST/raw"
    file = folder / "t10k-images-idx3-ubyte"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "gone":
        file.unlink()
    else:
        file.write_bytes((folder / "t10k-labels-idx1-ubyte").read_bytes())
    with pytest.raises(DataError, match="t10k-images-idx3-ubyte"):
        load_source("rotated_mnist", tmp_path)


def test_office_caltech_with_the_names_of_both_collections(tmp_path: Path) -> None:
    one = load_source("office_caltech", trees.office_caltech(tmp_path / "a"))
    other = load_source("office_caltech", trees.office_31(tmp_path / "b"))
    assert one.counts().tolist() == other.counts().tolist() == [[2] * 10] * 4
    assert one.split is None
    assert other.split is None
