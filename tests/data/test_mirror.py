"""Data sets from their mirrors on the Hugging Face hub, or from Parquet files at hand."""

import hashlib
import io
import json
import logging
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from feddg.data.data_set import DATA_SETS, load_source
from feddg.data.download import _check_case, get_data_set
from feddg.errors import DataError, MissingPackage
from hub_server import Hub

PACS, FILE = "datasets/flwrlabs/pacs", "data/train-00000-of-00002.parquet"


def silent(what: str, done: int, total: int) -> None:
    pass


def picture(number: int, kind: str = "PNG") -> bytes:
    """A small image that is like no other."""
    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def parquet(class_names: dict[str, list[str]] | None = None, **columns: list) -> bytes:
    """A Parquet file as the library ``datasets`` writes it."""
    pyarrow = pytest.importorskip("pyarrow", reason="needs PyArrow (feddg[parquet])")
    from pyarrow import parquet as writer

    features = {
        name: {"names": names, "_type": "ClassLabel"} for name, names in (class_names or {}).items()
    }
    about = json.dumps({"info": {"features": features}}).encode()
    table = pyarrow.table(columns).replace_schema_metadata({b"huggingface": about})
    file = io.BytesIO()
    writer.write_table(table, file)
    return file.getvalue()


def rows(domains: list, labels: list, first: int = 0, names: list | None = None, **more) -> dict:
    """Columns of a mirror, an image in every row."""
    found = [picture(first + number) for number in range(len(domains))]
    names = names or [f"pic_{first + number:03}.png" for number in range(len(domains))]
    image = [{"bytes": data, "path": name} for data, name in zip(found, names)]
    return {"image": image, "domain": domains, "label": labels, **more}


def pacs_files() -> dict[str, bytes]:
    """Two files: a dog and a person in each of the four domains."""
    definition = DATA_SETS["pacs"]
    names = {"label": list(definition.classes)}
    two = [definition.domains[:2], definition.domains[2:]]
    return {
        f"data/train-0000{number}-of-00002.parquet": parquet(
            names, **rows([*domains, *domains], [0, 0, 6, 6], 4 * number)
        )
        for number, domains in enumerate(two)
    } | {"README.md": b"# PACS"}


def get(name: str, root: Path, **options) -> dict[str, str]:
    return get_data_set(DATA_SETS[name], root, silent, **options)


def written(root: Path) -> set[str]:
    return {
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def test_a_mirror_becomes_the_usual_folders(hub: Hub, tmp_path: Path, caplog) -> None:
    files = pacs_files()
    hub.commit(PACS, files)
    root = tmp_path / "PACS"
    with caplog.at_level(logging.WARNING, logger="feddg"):
        found = get("pacs", root)
    del files["README.md"]
    assert found == {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    assert len(written(root)) == 8, "the Parquet files are gone"
    assert (root / "photo/dog/pic_000.png").read_bytes() == picture(0)
    assert (root / "sketch/person/pic_007.png").read_bytes() == picture(7)
    assert (root / "photo/dog/pic_000.png").stat().st_mode & 0o777 == 0o600
    assert "PACS has 1670 images in photo" in caplog.text, "counts are compared"
    table = load_source("pacs", root)
    assert table.counts().sum() == 8
    asked = len(hub.asked)
    assert get("pacs", root) == found
    assert len(hub.asked) == asked, "what is complete is not asked for again"


def test_an_interrupted_get_goes_on_at_its_commit(hub: Hub, tmp_path: Path) -> None:
    files = pacs_files()
    first = hub.commit(PACS, files)
    second = FILE.replace("00000-", "00001-")
    hub.failures[second] = [500]
    with pytest.raises(DataError, match=f"Cannot download {second} of .*500.* goes on with this"):
        get("pacs", tmp_path / "PACS", revision="main")
    assert not (tmp_path / "PACS/photo").exists()
    hub.commit(PACS, {FILE: b"another file since"})
    hub.asked.clear()
    get("pacs", tmp_path / "PACS", keep=True, revision="main")
    sent = [path for method, path, _ in hub.asked if method == "GET" and "resolve" in path]
    assert sent == [f"/{PACS}/resolve/{first}/{second}"]
    assert len([*(tmp_path / "PACS").rglob("*.parquet")]) == 2
    assert len([*(tmp_path / "PACS").rglob("*.png")]) == 8


def test_a_connection_that_is_cut_is_taken_up(hub: Hub, tmp_path: Path) -> None:
    hub.commit(PACS, pacs_files())
    hub.cuts[:] = [1 << 12]
    with suppress(DataError):  # older clients of the hub leave it to the next command
        get("pacs", tmp_path / "PACS")
    get("pacs", tmp_path / "PACS")
    assert len(written(tmp_path / "PACS")) == 8
    assert len([1 for method, path, _ in hub.asked if method == "GET" and "resolve" in path]) == 3


def test_files_of_a_gated_mirror_are_asked_for_with_the_token(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.commit(PACS, pacs_files())
    hub.token = "hf_mine"
    with pytest.raises(DataError, match=r"flwrlabs/pacs: .*restricted") as caught:
        get("pacs", tmp_path / "PACS")
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert len(get("pacs", tmp_path / "PACS")) == 2
    assert len(written(tmp_path / "PACS")) == 8


def test_a_revision_may_be_named(hub: Hub, tmp_path: Path) -> None:
    commit = hub.commit(PACS, pacs_files())
    hub.commit(PACS, {FILE: b"no Parquet"})
    found = get("pacs", tmp_path / "PACS", revision=commit)
    assert len(written(tmp_path / "PACS")) == 8
    assert get("pacs", tmp_path / "PACS", revision=commit) == found
    with pytest.raises(DataError, match=rf"holds the images of {commit}; for main name another"):
        get("pacs", tmp_path / "PACS", revision="main")
    with pytest.raises(DataError, match=r"'v9' on http.*Revision Not Found"):
        get("pacs", tmp_path / "other", revision="v9")


def test_parquet_files_at_hand_are_read_where_they_are(tmp_path: Path) -> None:
    for name, data in pacs_files().items():
        (tmp_path / "had" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "had" / name).write_bytes(data)
    found = get("pacs", tmp_path / "PACS", source=tmp_path / "had")
    assert set(found) == {FILE, FILE.replace("00000-", "00001-")}
    assert len(written(tmp_path / "PACS")) == 8
    assert (tmp_path / "had" / FILE).is_file()
    with pytest.raises(DataError, match="holds no Parquet files of PACS"):
        get("pacs", tmp_path / "other", source=tmp_path / "PACS")
    with pytest.raises(DataError, match="VLCS has no mirror"):
        get("vlcs", tmp_path / "vlcs", source=tmp_path / "had")


def test_spellings_of_a_mirror_become_the_definitions(hub: Hub, tmp_path: Path) -> None:
    definition = DATA_SETS["office_home"]
    names = {"label": [name.replace("_", " ") for name in definition.classes]}
    columns = rows(["Art", "Clipart", "Product", "Real World"], [0, 1, 2, 63])
    hub.commit(
        "datasets/flwrlabs/office-home",
        {"data/train-00000-of-00001.parquet": parquet(names, **columns)},
    )
    get("office_home", tmp_path)
    assert written(tmp_path) == {
        "Art/Alarm_Clock/pic_000.png",
        "Clipart/Backpack/pic_001.png",
        "Product/Batteries/pic_002.png",
        "Real_World/Trash_Can/pic_003.png",
    }, "one split is no official one"
    assert load_source("office_home", tmp_path).domain_names == definition.domains


def test_splits_of_a_mirror_are_official(hub: Hub, tmp_path: Path) -> None:
    centers = list(range(5))
    labels = {"label": ["non-tumor", "tumor"]}

    def file(centers: list, first: int) -> bytes:
        columns = rows(centers, [number % 2 for number in range(len(centers))], first)
        columns["center"] = columns.pop("domain")
        return parquet(labels, **columns)

    hub.commit(
        "datasets/wltjr1007/Camelyon17-WILDS",
        {
            "data/train-00000-of-00001.parquet": file([0, 0, 3, 4], 0),
            "data/id_val-00000-of-00001.parquet": file([0, 0, 3, 4], 10),
            "data/validation-00000-of-00001.parquet": file([1, 1], 20),
            "data/test-00000-of-00001.parquet": file([2, 2], 30),
            "data/unlabeled_image-00000-of-00001.parquet": file(centers, 40),
        },
    )
    get("camelyon17", tmp_path)
    table = load_source("camelyon17", tmp_path)
    assert len(table) == 12, "what has no labels is left out"
    found = set(zip((table.domain_names[d] for d in table.domains), table.split.tolist()))
    train = {(f"hospital_{n}", role) for n in (0, 3, 4) for role in ("train", "id_val")}
    assert found == train | {("hospital_1", "val"), ("hospital_2", "test")}
    assert table.clients.tolist() == [table.domain_names[d] for d in table.domains]
    assert table.class_names == ("normal", "tumor")


def test_writers_are_domains_and_letters_keep_their_case(hub: Hub, tmp_path: Path) -> None:
    classes = list(DATA_SETS["femnist"].classes)
    columns = rows(
        ["f01", "f01", "f02", "f02"], [classes.index(c) for c in "Aa5a"], names=[None] * 4
    )
    columns = {"image": columns["image"], "writer_id": columns["domain"], "hsf_id": [0] * 4} | {
        "character": columns["label"]
    }
    hub.commit(
        "datasets/flwrlabs/femnist",
        {"data/train.parquet": parquet({"character": classes}, **columns)},
    )
    get("femnist", tmp_path)
    assert (tmp_path / "f01/A/image-0000000.png").read_bytes() == picture(0)
    table = load_source("femnist", tmp_path)
    assert [table.class_names[label] for label in table.labels] == ["A", "a", "5", "a"]
    assert table.clients.tolist() == ["f01", "f01", "f02", "f02"]
    assert table.class_names == tuple(classes)


def test_centers_are_domains_by_their_number(hub: Hub, tmp_path: Path) -> None:
    columns = rows(list(range(6)), [0, 1, 2, 3, 4, 7])
    columns["center"] = columns.pop("domain")
    hub.commit(
        "datasets/flwrlabs/fed-isic2019",
        {f"data/{split}-00000-of-00001.parquet": parquet(**columns) for split in ("train", "test")},
    )
    get("fed_isic2019", tmp_path)
    assert (tmp_path / "MSK/test/BKL/pic_004.png").is_file()
    table = load_source("fed_isic2019", tmp_path)
    assert table.domain_names == DATA_SETS["fed_isic2019"].domains
    assert (tmp_path / "HAM_vienna_dias/train/SCC/pic_005.png").is_file()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"domain": None}, "no column domain; it has: image, label, site"),
        ({"label": ["dog", "dog", "cat"]}, "Row 2 of .* has 'cat' as label, .*dog, elephant"),
        ({"label": ["dog", "", "dog"]}, "Row 1 of .* has no label"),
        ({"domain": ["photo", "../photo", "photo"]}, "Row 1 of .* has '../photo' as domain"),
        ({"image": [{"bytes": b"", "path": "a.png"}] * 3}, "Row 0 of .* has no image"),
    ],
)
def test_rows_that_cannot_be_used_are_named(
    hub: Hub, tmp_path: Path, change: dict, words: str
) -> None:
    columns = rows(["photo"] * 3, ["dog"] * 3) | {"site": [1] * 3} | change
    columns = {name: values for name, values in columns.items() if values}
    hub.commit(PACS, {FILE: parquet(**columns)})
    with pytest.raises(DataError, match=words) as caught:
        get("pacs", tmp_path / "PACS")
    assert "\n" not in str(caught.value)
    assert [path.name for path in (tmp_path / "PACS").iterdir() if path.is_dir()] == [".mirror"]


def test_hostile_names_stay_in_the_folder(hub: Hub, tmp_path: Path) -> None:
    names = ["../../out.png", "/etc/passwd", "..\\..\\out.png", ".png", "a.png", "a.png"]
    columns = rows([*["f01"] * 6, "f02"], ["a"] * 7, names=[*names, None])
    columns = {"image": columns["image"], "writer_id": columns["domain"], "character": ["a"] * 7}
    hub.commit("datasets/flwrlabs/femnist", {"train.parquet": parquet(**columns)})
    root = tmp_path / "deep/er/femnist"
    get("femnist", root)
    numbered = {f"f01/a/image-000000{number}.png" for number in (1, 2, 3, 5)}
    numbered.add("f02/a/image-0000006.png")
    assert written(root) == numbered | {"f01/a/out.png", "f01/a/a.png"}
    assert written(tmp_path / "deep") == {f"er/femnist/{name}" for name in written(root)}
    columns["writer_id"][2] = "../../f01"
    hub.commit("datasets/flwrlabs/femnist", {"train.parquet": parquet(**columns)})
    with pytest.raises(DataError, match=r"Row 2 of train.parquet .*f01' as writer_id"):
        get("femnist", tmp_path / "again")
    assert not (tmp_path / "f01").exists()


def test_a_damaged_file_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.commit(PACS, pacs_files() | {FILE: b"something else"})
    with pytest.raises(DataError, match=r"Cannot read .*train-00000-of-00002\.parquet"):
        get("pacs", tmp_path / "PACS")
    assert not (tmp_path / "PACS/photo").exists()


def test_a_listing_leads_to_no_other_folder(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs PyArrow (feddg[parquet])")
    hub.commit(PACS, {"../../../out.parquet": b""})
    with pytest.raises(DataError, match="holds no Parquet files"):
        get("pacs", tmp_path / "deep/er/PACS")


def test_folders_that_are_there_are_left_alone(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs PyArrow (feddg[parquet])")
    (tmp_path / "photo").mkdir()
    with pytest.raises(DataError, match="photo already exists"):
        get("pacs", tmp_path)
    assert hub.asked == []


def test_hubs_and_libraries_that_are_not_there(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match=r"flwrlabs/pacs at 'main' .*Repository Not Found"):
        get("pacs", tmp_path / "a")
    hub.commit(PACS, {"README.md": b""})
    with pytest.raises(DataError, match=r"holds no Parquet files; found: README.md"):
        get("pacs", tmp_path / "a")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match="Cannot read flwrlabs/pacs") as caught:
        get("pacs", tmp_path / "a")
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackage, match=r"pip install 'feddg\[parquet\]'"):
        get("pacs", tmp_path / "a")


def test_a_host_that_is_down_is_said_with_its_mirror(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from feddg.data import download
    from feddg.data.download import about

    down = "worksheets.codalab.org has not answered since November 2025"
    assert f"{down}; the mirror wltjr1007/Camelyon17-WILDS on Hugging Face is taken." in about(
        DATA_SETS["camelyon17"]
    )

    def fail(*_: object) -> None:
        raise DataError("Cannot download it.")

    monkeypatch.setattr(download, "download", fail)
    with pytest.raises(DataError, match=f"Cannot download it. {down}; no mirror is known."):
        get("iwildcam", tmp_path)


def test_letters_are_not_put_where_a_and_a_capital_are_one(tmp_path: Path, monkeypatch) -> None:
    """As on the disks of many a Mac."""
    real = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: self.name == "A" or real(self))
    with pytest.raises(DataError, match=r"does not tell a from A.*another disk"):
        _check_case(DATA_SETS["femnist"], tmp_path / "letters")
    _check_case(DATA_SETS["pacs"], tmp_path / "pictures")
    assert not any((tmp_path / "letters").iterdir())
