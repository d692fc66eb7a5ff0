"""Archives of every kind, and those that mean harm."""

import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from feddg.data import archives
from feddg.data.archives import unpack
from feddg.errors import DataError

FILES = {"VLCS/SUN09/bird/1.jpg": b"one", "VLCS/SUN09/car/2.jpg": b"two" * 1000}


def silent(what: str, done: int, total: int) -> None:
    pass


def zipped(path: Path, files: dict[str, bytes], modes: dict[str, int] | None = None) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (modes or {}).get(name, 0o100644) << 16
            archive.writestr(info, content)
    return path


def tarred(path: Path, files: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mode = 0o4777
            archive.addfile(info, io.BytesIO(content))
    return path


def read(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("mode", ["zip", "w", "w:gz", "w:bz2", "w:xz"])
def test_archives_of_every_kind(tmp_path: Path, mode: str) -> None:
    packed = tmp_path / "a.bin"
    zipped(packed, FILES) if mode == "zip" else tarred(packed, FILES, mode)
    told = []
    unpack(packed, tmp_path / "out", lambda *progress: told.append(progress))
    assert read(tmp_path / "out") == FILES
    assert [done for _, done, _ in told] == [1, 2]
    modes = {path.stat().st_mode & 0o7777 for path in (tmp_path / "out").rglob("*.jpg")}
    assert modes == {0o600}, "an archive's modes are not taken over"


def test_the_rest_of_the_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    unpack(zipped(tmp_path / "a.zip", FILES), tmp_path / "out", silent)
    assert read(tmp_path / "out") == {**FILES, "mine.txt": b"mine"}


def test_what_is_there_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out/VLCS").mkdir(parents=True)
    with pytest.raises(DataError, match="VLCS is there already"):
        unpack(zipped(tmp_path / "a.zip", {"A/1": b"", **FILES}), tmp_path / "out", silent)
    assert read(tmp_path / "out") == {}


OUTSIDE = [
    *("../evil.jpg", "/evil.jpg", "a/../../evil.jpg", "a/..", "..", "C:\\evil.jpg", "C:evil"),
    *("a\\..\\..\\evil.jpg", "a\nb", "x" * 300, "/".join("a" * 40)),
]


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("pack", [zipped, tarred])
def test_paths_outside_the_folder_are_refused(tmp_path: Path, name: str, pack) -> None:
    packed = pack(tmp_path / "a.bin", {"good.jpg": b"good", name: b"evil"})
    with pytest.raises(DataError, match="no path inside a folder"):
        unpack(packed, tmp_path / "deep/out", silent)
    assert read(tmp_path / "deep") == {}
    assert list((tmp_path / "deep/out").iterdir()) == [], "nothing is left half unpacked"
    assert not list(tmp_path.rglob("evil*"))


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE]
)
def test_links_and_devices_in_tar_are_refused(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        info = tarfile.TarInfo("images")
        info.type, info.linkname = kind, "/etc"
        archive.addfile(info)
        inside = tarfile.TarInfo("images/passwd")
        archive.addfile(inside)
    with pytest.raises(DataError, match="link or a device"):
        unpack(tmp_path / "a.tar", tmp_path / "out", silent)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO])
def test_links_and_devices_in_zip_are_refused(tmp_path: Path, kind: int) -> None:
    packed = zipped(tmp_path / "a.zip", {"images": b"/etc"}, {"images": kind | 0o777})
    with pytest.raises(DataError, match="link or a device"):
        unpack(packed, tmp_path / "out", silent)


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_bombs_are_refused(tmp_path: Path, pack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "LEAST", 1000)
    packed = pack(tmp_path / "a.bin", {"bomb.jpg": bytes(5_000_000)})
    with pytest.raises(DataError, match="50 times its size"):
        unpack(packed, tmp_path / "out", silent)
    assert list((tmp_path / "out").iterdir()) == []


def test_bombs_of_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MOST_FILES", 3)
    packed = tarred(tmp_path / "a.tgz", {str(number): b"" for number in range(4)})
    with pytest.raises(DataError, match="more than 3 files"):
        unpack(packed, tmp_path / "out", silent)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("pack", ["zip", "tar"])
def test_a_file_that_is_there_twice_is_refused(tmp_path: Path, pack: str) -> None:
    path = tmp_path / "a.bin"
    if pack == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.jpg", b"1")
            archive.writestr("./a.jpg", b"2")
    else:
        with tarfile.open(path, "w") as archive:
            for _ in range(2):
                archive.addfile(tarfile.TarInfo("a.jpg"))
    with pytest.raises(DataError, match="twice"):
        unpack(path, tmp_path / "out", silent)


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    packed = tarred(tmp_path / "a.tgz", {"a": b"", "a/b": b""})
    with pytest.raises(DataError, match="Cannot unpack"):
        unpack(packed, tmp_path / "out", silent)


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_a_damaged_archive(tmp_path: Path, pack) -> None:
    packed = pack(tmp_path / "a.bin", {"a.jpg": bytes(range(256)) * 400})
    content = bytearray(packed.read_bytes())
    content[60:80] = bytes(20)
    packed.write_bytes(content)
    with pytest.raises(DataError, match=r"damaged|neither a zip nor a tar|no path|no files"):
        unpack(packed, tmp_path / "out", silent)
    assert read(tmp_path / "out") == {}


@pytest.mark.parametrize("content", [b"", b"<html>Sign in to go on</html>"])
def test_a_page_instead_of_an_archive(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(DataError, match="neither a zip nor a tar"):
        unpack(tmp_path / "a.zip", tmp_path / "out", silent)


def test_an_archive_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no files"):
        unpack(zipped(tmp_path / "a.zip", {}), tmp_path / "out", silent)
