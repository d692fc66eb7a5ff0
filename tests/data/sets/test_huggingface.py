"""Data sets of Hugging Face on disk."""

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import feddg
from feddg.data.data_set import load_source
from feddg.errors import DataError, MissingPackage
from feddg.runs.reading import read_run

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
CLASSES = ["zebra", "ant"]
"""In the order of their labels, which is not the alphabet's."""


@pytest.fixture(scope="module")
def hub():
    """The ``datasets`` library, without the hub."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pytest.importorskip("datasets", reason="needs datasets (feddg[huggingface])")
    found.disable_progress_bars()
    return found


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def made(hub, seed: int = 0, domains=("north", "south", "west"), each: int = 4, **more):
    """Images of two classes in some domains, of two patients each."""
    random = np.random.default_rng(seed)
    rows = [(d, y, n) for d in domains for y in (0, 1) for n in range(each)]
    columns = {
        "image": [Image.fromarray(random.integers(0, 256, (9, 8, 3), np.uint8)) for _ in rows],
        "label": [label for _, label, _ in rows],
        "domain": [domain for domain, _, _ in rows],
        "patient": [f"{domain}-{number % 2}" for domain, _, number in rows],
        **more,
    }
    features = hub.Features(
        {
            "image": hub.Image(),
            "label": hub.ClassLabel(names=CLASSES),
            "domain": hub.Value("string"),
            "patient": hub.Value("string"),
        }
    )
    return hub.Dataset.from_dict(columns, features=features)


def saved(found, folder: Path) -> Path:
    found.save_to_disk(str(folder))
    return folder


def test_a_data_set_on_disk(hub, tmp_path: Path) -> None:
    whole = made(hub)
    root = saved(whole, tmp_path / "hf")
    table = load_source("huggingface", root, client="patient")
    assert table.class_names == tuple(CLASSES)
    assert table.labels.tolist() == whole["label"][:]
    assert [table.domain_names[domain] for domain in table.domains] == whole["domain"][:]
    assert table.clients.tolist() == whole["patient"][:]
    assert table.split is None
    for row in (0, 7, 23):
        pixels = np.asarray(Image.open(table.root / table.paths[row]))
        assert (pixels == np.asarray(whole[row]["image"])).all()
    assert {(table.root / path).stat().st_mode & 0o777 for path in table.paths} == {0o600}


def test_its_images_are_taken_out_once(hub, tmp_path: Path) -> None:
    root = saved(made(hub), tmp_path / "hf")
    first = load_source("huggingface", root)
    stamps = [(first.root / path).stat().st_mtime_ns for path in first.paths]
    again = load_source("huggingface", root, client="patient")
    assert again.root == first.root
    assert [(again.root / path).stat().st_mtime_ns for path in again.paths] == stamps
    other = load_source("huggingface", saved(made(hub, seed=1), tmp_path / "other"))
    assert other.root != first.root


def test_its_splits_are_official(hub, tmp_path: Path) -> None:
    parts = {"train": made(hub), "validation": made(hub, 1), "test": made(hub, 2, ("east",))}
    root = saved(hub.DatasetDict(parts), tmp_path / "hf")
    table = load_source("huggingface", root)
    assert set(zip((table.domain_names[d] for d in table.domains), table.split.tolist())) == {
        *((name, role) for name in ("north", "south", "west") for role in ("train", "id_val")),
        ("east", "test"),
    }
    one = load_source("huggingface", root, split="test")
    assert (one.split, one.domain_names) == (None, ("east",))


def test_plain_labels_are_sorted_as_numbers_or_words(hub, tmp_path: Path) -> None:
    whole = made(hub)
    for kind, names in ((hub.Value("int64"), ("0", "1")), (hub.Value("string"), ("0", "1"))):
        root = saved(whole.cast_column("label", kind), tmp_path / str(kind.dtype))
        assert load_source("huggingface", root).class_names == names


def test_splits_may_name_other_classes(hub, tmp_path: Path) -> None:
    more = hub.ClassLabel(names=["yak", *CLASSES])
    test = made(hub, 2, ("east",)).cast_column("label", more)
    root = saved(hub.DatasetDict({"train": made(hub), "test": test}), tmp_path / "hf")
    table = load_source("huggingface", root)
    assert table.class_names == (*CLASSES, "yak")
    expected = [more.int2str(label) for label in test["label"][:]]
    assert [table.class_names[label] for label in table.labels[-8:]] == expected


def test_nan_is_no_class(hub, tmp_path: Path) -> None:
    whole = made(hub).cast_column("label", hub.Value("float32"))
    labels = [*whole["label"][:5], float("nan"), *whole["label"][6:]]
    whole = whole.remove_columns("label").add_column("label", labels)
    with pytest.raises(DataError, match="row 5 of the split train has no label"):
        load_source("huggingface", saved(whole, tmp_path / "hf"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"domain": "site"}, r"no column 'site'; it has: image, label, domain, patient.*options"),
        ({"label": "lable"}, r"'lable' \(did you mean 'label'\?\).*data\.options\.label"),
        ({"split": "test"}, "no split 'test'; there are: train"),
    ],
)
def test_what_is_not_there_is_named(hub, tmp_path: Path, options: dict, words: str) -> None:
    with pytest.raises(DataError, match=words):
        load_source("huggingface", saved(made(hub), tmp_path / "hf"), **options)


def test_a_row_without_a_domain_or_an_image(hub, tmp_path: Path) -> None:
    whole = made(hub)
    domains = whole["domain"][:]
    domains[5] = None
    with pytest.raises(DataError, match="row 5 of the split train has no domain"):
        load_source("huggingface", saved(made(hub, **{"domain": domains}), tmp_path / "a"))
    images = [*whole["image"][:3], None, *whole["image"][4:]]
    with pytest.raises(DataError, match="row 3 of the split train has no image"):
        load_source("huggingface", saved(made(hub, **{"image": images}), tmp_path / "b"))
    assert not list((tmp_path / "cache").glob("partial-*")), "nothing half done stays"


def test_a_folder_that_is_none_and_no_folder_at_all(hub, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Cannot read the Hugging Face data set") as caught:
        load_source("huggingface", tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="either a folder"):
        load_source("huggingface")
    with pytest.raises(DataError, match="either a folder"):
        load_source("huggingface", tmp_path, hub="somebody/something")


def test_without_the_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackage, match=r"pip install 'feddg\[huggingface\]'"):
        load_source("huggingface", tmp_path)


@pytest.mark.parametrize("method", ["fedavg", "pardon"])
def test_from_a_data_set_to_accuracies(hub, tmp_path: Path, method: str) -> None:
    root = saved(made(hub), tmp_path / "hf")
    experiment = feddg.Experiment(
        data={
            "source": "huggingface",
            "root": root,
            "image_size": 16,
            "options": {"client": "patient"},
        },
        hold_out="west",
        clients={"partition": "client"},
        method=method,
        model={"backbone": "cnn", "weights": None},
        train={"rounds": 1, "local_steps": 1, "batch_size": 4, "augmentation": "none"},
    )
    run = read_run(feddg.run(experiment, tmp_path / "runs", report=False).folder)
    assert len(run.clients.clients) == 4
    assert [row.examples for row in run.result.where(split="test", metric="accuracy")] == [8]
