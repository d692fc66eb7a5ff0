"""``feddg data get``: licence first, then the files, then what to do next."""

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import published_trees
from feddg.data import download
from feddg.data.data_set import DATA_SETS, DataSet, Publication, PublishedFile, register_data_set
from feddg.data.images import from_folder
from file_server import Served, serving


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(download, "PAUSE", 0.0)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    len(DATA_SETS)
    monkeypatch.setattr(DATA_SETS, "_found", dict(DATA_SETS._found))
    with serving() as served:
        yield served


def archive(tmp_path: Path) -> bytes:
    """Images of two domains and two classes, in a tar file."""
    published_trees.images(tmp_path / "made", ["north/a", "north/b", "south/a", "south/b"])
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as packed:
        packed.add(tmp_path / "made", "pictures")
    return content.getvalue()


def register(server: Served, content: bytes, checksum: str = "") -> None:
    server.files = {"/pictures.tgz": content, "/list.txt": b"a list"}
    register_data_set(
        DataSet(
            name="pictures",
            summary="Pictures (Somebody 2020): two classes in two domains",
            load=lambda root: from_folder(root / "v1/pictures"),
            publication=Publication(
                citation="S. Body, Pictures, 2020",
                address="https://example.org/pictures",
                licence="CC BY 4.0",
                files=(
                    PublishedFile(
                        address=f"{server.address}/pictures.tgz",
                        name="pictures.tgz",
                        bytes=len(content),
                        checksum=checksum,
                        into="v1",
                    ),
                    PublishedFile(
                        address=f"{server.address}/list.txt", name="list.txt", unpack=False
                    ),
                ),
            ),
        )
    )


def test_nothing_is_downloaded_before_the_licence_is_accepted(feddg, server, tmp_path) -> None:
    register(server, archive(tmp_path))
    code, out, err = feddg("data", "get", "pictures", "--root", "here")
    assert code == 1
    assert "Cite: S. Body, Pictures, 2020" in out
    assert "Licence: CC BY 4.0" in out
    assert "https://example.org/pictures" in out
    assert "no checksum published" in out
    assert "if you accept the licence, --accept-licence" in err
    assert server.asked == []
    assert not Path("here").exists()


def test_it_comes_is_unpacked_and_can_be_inspected(feddg, server, tmp_path) -> None:
    content = archive(tmp_path)
    register(server, content, f"sha256:{hashlib.sha256(content).hexdigest()}")
    server.cuts[:] = [16384 // 8]
    arguments = ("data", "get", "pictures", "--root", "here", "--accept-licence")
    code, out, err = feddg(*arguments)
    assert (code, err) == (0, "")
    assert out.index("Licence") < out.index("sha256 ")
    assert f"sha256 {hashlib.sha256(content).hexdigest()}  pictures.tgz" in out
    assert "feddg data inspect --data pictures --root here" in out
    assert Path("here/list.txt").read_bytes() == b"a list"
    assert not Path("here/pictures.tgz").exists(), "an archive goes once it is unpacked"
    code, out, _ = feddg("data", "inspect", "--data", "pictures", "--root", "here", "--json")
    assert code == 0
    assert '"images": 8' in out
    asked = len(server.asked)
    assert feddg(*arguments)[0] == 0
    assert len(server.asked) == asked, "what has been received is not asked for again"


def test_the_folder_of_the_next_command_is_quoted(feddg, server, tmp_path) -> None:
    content = archive(tmp_path)
    register(server, content, f"sha256:{hashlib.sha256(content).hexdigest()}")
    _, out, _ = feddg("data", "get", "pictures", "--root", "my data", "--accept-licence")
    assert "feddg data inspect --data pictures --root 'my data'\n" in out


def test_archives_are_kept_where_asked(feddg, server, tmp_path) -> None:
    register(server, archive(tmp_path))
    arguments = ("data", "get", "pictures", "--root", "here", "--accept-licence", "--keep")
    assert feddg(*arguments)[0] == 0
    assert Path("here/pictures.tgz").is_file()


@pytest.mark.parametrize("fault", ["checksum", "gone", "no archive"])
def test_faults_end_in_one_line(feddg, server, tmp_path, fault) -> None:
    content = b"<html>" if fault == "no archive" else archive(tmp_path)
    register(server, content, "md5:" + "0" * 32 if fault == "checksum" else "")
    if fault == "gone":
        server.files = {}
    code, _, err = feddg("data", "get", "pictures", "--root", "here", "--accept-licence")
    assert code == 1
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not Path("here/v1/pictures").exists()


def test_what_has_to_be_asked_for_prints_the_steps(feddg) -> None:
    code, out, _ = feddg("data", "get", "vlcs", "--root", "here", "--accept-licence")
    assert code == 1
    assert "C. Fang" in out
    assert "1. Take VLCS" in out
    assert "2. Unpack" in out
    assert out.endswith("It has to be fetched by hand.\n")
    assert "By hand: 1. Take PACS" in feddg("data", "get", "pacs")[1], "or from a mirror"
    assert not Path("here").exists()


def test_a_mirror_is_said_and_taken_once_the_licence_is_accepted(feddg, hub, tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs PyArrow (feddg[parquet])")
    from pyarrow import parquet

    png = published_trees.image(tmp_path / "a.png").read_bytes()
    domains = ["photo", "art_painting", "cartoon", "sketch"]
    columns = {"image": [{"bytes": png, "path": "a.png"}] * 4, "domain": domains, "label": [6] * 4}
    parquet.write_table(pyarrow.table(columns), tmp_path / "train-00000-of-00001.parquet")
    content = (tmp_path / "train-00000-of-00001.parquet").read_bytes()
    commit = hub.commit("datasets/flwrlabs/pacs", {"data/train-00000-of-00001.parquet": content})
    arguments = ("data", "get", "pacs", "--root", "here", "--revision", commit)
    code, out, err = feddg(*arguments)
    assert code == 1
    assert "Mirror: https://huggingface.co/datasets/flwrlabs/pacs" in out
    assert "if you accept the licence, --accept-licence" in err
    assert hub.asked == []
    code, out, _ = feddg(*arguments, "--accept-licence", "--quiet")
    assert code == 0
    assert f"sha256 {hashlib.sha256(content).hexdigest()}  data--train-0" in out
    assert Path("here/sketch/person/a.png").read_bytes() == png
    arguments = ("data", "get", "pacs", "--root", "there", "--from", ".", "--accept-licence")
    assert feddg(*arguments)[0] == 0
    assert Path("there/sketch/person/a.png").read_bytes() == png


@pytest.mark.parametrize("name", ["digits", "folder", "table", "fedig"])
def test_what_is_not_published_is_not_got(feddg, name) -> None:
    code, _, err = feddg("data", "get", name, "--root", "here")
    assert code == 1
    assert "not one that is downloaded" in err


def test_an_unknown_name_suggests_the_nearest(feddg) -> None:
    code, _, err = feddg("data", "get", "camelyon", "--root", "here")
    assert code == 1
    assert "did you mean 'camelyon17'" in err


def test_published_files_are_named_by_https_and_their_checksums_by_kind() -> None:
    for one in DATA_SETS.values():
        for file in one.publication.files if one.publication else ():
            assert file.address.startswith("https://")
            kind, _, digits = file.checksum.partition(":")
            assert len(digits) == {"": 0, "md5": 32, "sha256": 64}[kind]


def test_inspect_writes_croissant(feddg, tmp_path) -> None:
    root = published_trees.camelyon17(tmp_path / "images")
    arguments = ("data", "inspect", "--data", "camelyon17", "--root", root)
    code, out, _ = feddg(*arguments, "--image-size", 8, "--croissant", "meta/c.json")
    assert code == 0
    assert "written: meta/c.json, meta/c.csv" in out
    assert "train 12" in out, "an official split is shown without anything held out"
    code, _, err = feddg(*arguments, "--croissant", "c.txt")
    assert code == 1
    assert "ends in .json" in err


def test_inspect_lists_bad_files_and_clients(feddg, image_folder, tmp_path):
    bad = image_folder / "red/dark/zero.jpg"
    bad.touch()
    text = image_folder / "red/dark/text.jpg"
    text.write_text("not an image")
    held = ["--hold-out", "blue", "--clients", "2"]
    code, shown, _ = feddg("data", "inspect", "--root", image_folder, "--json", *held)
    assert code == 0
    found = json.loads(shown)
    assert found["counts"]["red"] == {"dark": 4, "light": 4}
    assert {image["path"] for image in found["bad_images"]} == {
        "red/dark/zero.jpg",
        "red/dark/text.jpg",
    }
    place = found["domains"].index("red")
    assert sum(one["domains"][place] for one in found["clients"]) == found["splits"]["train"]
    assert feddg("data", "inspect", "--root", image_folder, *held)[0] == 0
    only = image_folder / "green/dark/only.jpg"
    only.parent.mkdir(parents=True)
    only.touch()
    bad.unlink()
    text.unlink()
    code, shown, _ = feddg("data", "inspect", "--root", image_folder, *held)
    assert code == 1, "an error is printed"
    assert "1 file cannot be used" in shown
    assert "has no usable image" in shown
    assert feddg("data", "inspect", "--root", image_folder, "--json", *held)[0] == 1


def test_inspect_shows_how_images_are_stored_and_what_is_odd(feddg, image_folder):
    for number in range(3):
        values = np.full((30, 40), 100 + number, np.uint16)
        values[0, 0] = 2**11 - 1
        Image.fromarray(values).save(image_folder / f"blue/dark/deep{number}.tif")
    shutil.copy(image_folder / "red/dark/0.png", image_folder / "blue/dark/copy.png")
    (image_folder / "red/dark/slide.svs").touch()
    command = ["data", "inspect", "--root", image_folder, "--hold-out", "blue", "--clients", "2"]
    code, shown, _ = feddg(*command, "--json")
    assert code == 1  # a copy of an image that trains is among those that measure
    found = json.loads(shown)
    blue, red = found["stored"]["blue"], found["stored"]["red"]
    assert (blue["smallest"], blue["largest"]) == ([20, 24], [40, 30])
    assert blue["modes"] == {"RGB": 9, "I;16": 3}
    assert (blue["bits"], blue["high"], blue["files"]) == (11, 2**11 - 1, 12)
    assert red["modes"] == {"RGB": 8}
    assert (red["bits"], red["low"], red["high"]) == (8, 30, 255)
    assert found["ignored"] == {".svs": 1}
    texts = [one["text"] for one in found["diagnostics"]]
    errors = [one["text"] for one in found["diagnostics"] if one["severity"] == "error"]
    assert any(".svs" in text for text in texts)
    assert any("red/dark/0.png = blue/dark/copy.png" in text for text in errors) or any(
        "blue/dark/copy.png = red/dark/0.png" in text for text in texts
    )
    code, shown, _ = feddg(*command)
    assert code == 1
    for words in ("how they are stored", "20 x 24", "40 x 30", "warning:", "OpenSlide"):
        assert words in shown
