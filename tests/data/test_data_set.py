"""A benchmark data set is one new file: everything below works with no other edit."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

import feddg
from feddg.comparison.plan import expand_plan, load_plan
from feddg.data.data_set import (
    DATA_SETS,
    DataSet,
    find_augmentation,
    load_source,
    register_source,
)
from feddg.data.images import ImageTable
from feddg.data.protocols import PROTOCOLS, scenarios
from feddg.errors import DataError
from feddg.runs.reading import read_run
from published_trees import LAYOUTS, Layout, office_home, one_image, write_tree
from run_folders import accuracy_rows

TOY = '''
"""Toy: three classes of colours in four kinds of noise."""

import numpy

from feddg.data.augment import AugmentSettings
from feddg.data.data_set import DataSet, register_data_set
from feddg.data.images import ImageTable


def draw_toy(root):
    """Returns 96 images of 16 by 16 pixels, the fourth domain's split between val and test."""
    labels, domains = numpy.arange(96) % 3, numpy.arange(96) // 24
    chance = numpy.random.default_rng(0)
    pixels = chance.integers(0, 60 + 30 * domains[:, None, None, None], (96, 16, 16, 3))
    pixels[numpy.arange(96), :, :, labels] += 100
    names = [f"{TOY.domains[d]}/{c}/{i}" for i, (d, c) in enumerate(zip(domains, labels))]
    roles = numpy.array(["train", "train", "val", "test"])[domains]
    return ImageTable(
        tuple(names), labels, domains, ("red", "green", "blue"), TOY.domains,
        images=pixels.astype(numpy.uint8), split=roles,
    )


TOY = register_data_set(
    DataSet(
        name="toy",
        summary="Toy: three colours in four kinds of noise",
        load=draw_toy,
        preset={
            "data": {"image_size": 16, "id_val": 0.1},
            "clients": {"number": 2},
            "model": "cnn",
            "train": {"rounds": 1, "batch_size": 8, "augmentation": "toy"},
        },
        domains=("calm", "low", "high", "wild"),
        validated_by={"calm": "wild", "wild": "low", "low": "high", "high": "calm"},
        augmentation=AugmentSettings(vertical_flip=0.5, quarter_turns=True),
        split_counts={"train": 48, "val": 24, "test": 24},
    )
)
'''


def test_a_data_set_of_another_package(tmp_path: Path, fresh: pytest.MonkeyPatch) -> None:
    about = tmp_path / "site/toys-1.0.dist-info"
    about.mkdir(parents=True)
    (tmp_path / "site/toys.py").write_text(TOY)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[feddg.sources]\ntoy = toys:TOY\n")
    fresh.syspath_prepend(tmp_path / "site")
    fresh.setenv("FEDDG_CACHE", str(tmp_path / "cache"))

    experiment = feddg.Experiment(data="toy", hold_out={"test": "wild", "val": "low"})
    chosen = experiment.preset, experiment.clients.number, experiment.data.image_size
    assert chosen == ("toy", 2, 16)
    assert (experiment.model.backbone, experiment.train.augmentation) == ("cnn", "toy")
    assert find_augmentation("toy").quarter_turns
    assert "toy" in DATA_SETS

    def held(protocol: str) -> list:
        plan = {"base": {"data": "toy"}, "hold_out": protocol, "methods": ["fedavg"]}
        return [cell.experiment.hold_out for cell in expand_plan(load_plan(plan))]

    assert [held.test for held in held("lodo")] == [("calm",), ("low",), ("high",), ("wild",)]
    pairs = {held.test + held.val for held in held("ltdo")}
    assert pairs == {("calm", "wild"), ("wild", "low"), ("low", "high"), ("high", "calm")}
    assert len(held("ltdo-all")) == 12

    done = feddg.run(experiment, tmp_path, report=False)
    assert done.table.where(split="test").domains == ["wild"]
    assert done.table.where(split="val").domains == ["low"]
    official = feddg.run(feddg.Experiment(data="toy"), tmp_path, report=False)
    assert [row.examples for row in accuracy_rows(official, 1, "test")] == [24]
    assert official.table.where(split="val").domains == ["high"]


def test_a_definition_without_images_says_what_to_do_instead() -> None:
    with pytest.raises(DataError, match=r"data set 'bad'.*say what to do instead"):
        DataSet(name="bad", summary="")


def test_builtin_sources_are_known() -> None:
    with_images = {name for name, one in DATA_SETS.items() if one.load is not None}
    assert {"digits", "folder", "office_home", "pacs"} <= with_images
    assert not {"fedig", "fedig_silos", "strong"} & with_images


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


def test_sources_on_disk_need_a_root() -> None:
    for source in {"folder", *(n for n, d in DATA_SETS.items() if d.layouts)} - {"huggingface"}:
        with pytest.raises(DataError, match=f"'{source}' needs the folder.* --root FOLDER"):
            load_source(source)


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
    with pytest.raises(DataError, match=r"'grey': .*one_image and .*lambda"):
        register_source("grey")(lambda root: one_image(root))


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (
            ("1.png", "2.png", "1.png"),
            r"mine: row 1 \(domain 'a'\) and row 3 \(domain 'c'\) .*'1.png'",
        ),
        (("1.png", "1.png", "2.png"), r"row 1 \(domain 'a'\) and row 2 \(domain 'a'\)"),
        (("1#x0y0w2h2", "1#x2y0w2h2", "1#x4y0w2h2"), r"row 1 .* row 3 .* the same path '1'"),
        (("1.png", "2\x1b.png", "3.png"), "cannot be printed"),
    ],
)
def test_rows_with_one_path_are_refused(paths: tuple[str, ...], words: str) -> None:
    classes, images = np.array([0, 1, 0]), np.zeros((3, 2, 2, 3), np.uint8)
    domains = np.array([0, 0, 1])
    table = ImageTable(paths, classes, domains, ("x", "y"), ("a", "c"), images=images)
    register_source("mine")(lambda root: table)
    with pytest.raises(DataError, match=words):
        load_source("mine")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("fedig", r"--data pacs --root FOLDER --preset fedig\."),
        ("fedig_silos", "--preset fedig_silos"),
        ("strong", "--preset strong"),
    ],
)
def test_what_has_no_images_says_what_to_do(tmp_path: Path, name: str, remedy: str) -> None:
    with pytest.raises(DataError, match=rf"'{name}' cannot be read as a source.*{remedy}"):
        load_source(name, tmp_path)


def test_published_sizes_add_up() -> None:
    """15,588 images (Office-Home's paper), 9,991 (PACS's), 203,029 (WILDS)."""
    home, pacs, wild = (DATA_SETS[name] for name in ("office_home", "pacs", "iwildcam"))
    assert (len(home.classes), sum(home.counts.values())) == (65, 15_588)
    assert (len(pacs.classes), sum(pacs.counts.values())) == (7, 9_991)
    assert sum(wild.split_counts.values()) == 203_029


# Every published data set from its folder to accuracies; PACS under every protocol.


SMALL = {
    "model": {"backbone": "cnn", "weights": None, "embedding": "none", "normalization": "train"},
    "train": {"rounds": 1, "local_steps": 1, "batch_size": 8, "optimizer": "adam", "lr": 1e-3},
    "evaluate": {"pictures": False},
}
BY_SOURCE = {layout.source: layout for layout in reversed(LAYOUTS.values())}
"""The first layout of each."""
BY_SOURCE["office_home"] = Layout("office_home", partial(office_home, classes=4))
NOT_PUBLISHED = {"digits", "emoji", "folder"}
CASES = [
    *((source, "official" if layout.official else "lodo") for source, layout in BY_SOURCE.items()),
    *(("pacs", protocol) for protocol in PROTOCOLS if protocol != "lodo"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


@pytest.fixture
def trees(folders: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDDG_CACHE", str(folders / "cache"))
    return folders


def test_every_published_data_set_is_tried() -> None:
    published = {name for name, one in DATA_SETS.items() if one.publication is not None}
    assert published - NOT_PUBLISHED == BY_SOURCE.keys()


@pytest.mark.parametrize(("source", "protocol"), CASES)
def test_from_the_folder_to_accuracies(source: str, protocol: str, trees: Path) -> None:
    root = trees / source
    if not root.exists():
        BY_SOURCE[source].make(root)
    definition = DATA_SETS[source]
    held = {} if protocol == "official" else scenarios(protocol, definition.domains, source)[-1]
    experiment = feddg.Experiment(
        **SMALL,
        data={"source": source, "root": root, "image_size": 16},
        hold_out=held,
        clients={"number": 3, "per_round": 2, "partition": "heterogeneous"},
        method="pardon",
    )
    assert experiment.preset == (definition.default or source)
    run = feddg.run(experiment, trees / "runs", report=False)
    done = read_run(run.folder)
    tested = done.table.where(split="test").domains
    assert tested == (list(held["test"]) if held else tested)
    assert tested
    for row in accuracy_rows(done, 1, "test"):
        assert row.examples > 0
        assert 0 <= row.value <= 1
