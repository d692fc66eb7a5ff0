"""Downloads from a server on this machine that cuts, fails, lies and redirects."""

import hashlib
import io
import itertools
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import requests

from feddg.data import download as module
from feddg.data.data_set import PublishedFile
from feddg.data.download import download, unpack
from feddg.errors import DataError
from feddg.storage import digest
from file_server import Served, serving
from odd_inputs import OUTSIDE

CUT = 6 * module._CHUNK
CONTENT = np.random.default_rng(0).bytes(300_000)
PATH = "/data/images.zip"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.0)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[Served]:
    with serving(files={PATH: CONTENT}) as served:
        yield served


def published(server: Served, checksum: str | None = None, path: str = PATH) -> PublishedFile:
    md5 = f"md5:{hashlib.md5(CONTENT).hexdigest()}"
    return PublishedFile(
        address=server.address + path,
        name="images.zip",
        checksum=md5 if checksum is None else checksum,
    )


def silent(what: str, done: int, total: int) -> None:
    pass


def ranges(server: Served) -> list[str | None]:
    return [asked for _, asked in server.asked]


def only_the_file(folder: Path) -> bool:
    return {path.name for path in folder.iterdir()} - {".images.zip.lock"} == {"images.zip"}


@pytest.mark.parametrize("checksum", [None, "", "sha256:" + hashlib.sha256(CONTENT).hexdigest()])
def test_a_file_comes_whole_and_is_private(server: Served, tmp_path: Path, checksum) -> None:
    told = []
    path, found = download(
        published(server, checksum), tmp_path, lambda *progress: told.append(progress)
    )
    assert path.read_bytes() == CONTENT
    assert found == hashlib.sha256(CONTENT).hexdigest() == digest(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert told[-1][0] == "downloading images.zip, MB"
    assert only_the_file(tmp_path)


def test_a_cut_connection_goes_on_where_it_was_cut(server: Served, tmp_path: Path) -> None:
    server.cuts[:] = [CUT, CUT // 2, 0, 1]
    path, _ = download(published(server), tmp_path, silent)
    assert path.read_bytes() == CONTENT
    starts = [CUT, CUT + CUT // 2, CUT + CUT // 2, CUT + CUT // 2]
    assert ranges(server) == [None, *(f"bytes={start}-" for start in starts)]


def test_a_later_call_goes_on_where_an_earlier_one_gave_up(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.cuts[:] = [CUT, 0, 0]
    monkeypatch.setattr(module, "ATTEMPTS", 2)
    with pytest.raises(DataError, match=rf"{CUT:,} bytes have arrived; the same command continues"):
        download(published(server), tmp_path, silent)
    path, _ = download(published(server), tmp_path, silent)
    assert path.read_bytes() == CONTENT
    assert ranges(server)[-1] == f"bytes={CUT}-"


def test_another_file_at_the_server_is_not_mixed_with_what_came(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ATTEMPTS", 1)
    server.cuts[:] = [CUT, 0]
    with pytest.raises(DataError):
        download(published(server, ""), tmp_path, silent)
    server.files[PATH] = CONTENT[::-1]
    path, _ = download(published(server, ""), tmp_path, silent)
    assert path.read_bytes() == CONTENT[::-1]


def test_without_a_checksum_or_a_version_it_begins_anew(server: Served, tmp_path: Path) -> None:
    server.validators = False
    server.cuts[:] = [CUT]
    path, _ = download(published(server, ""), tmp_path, silent)
    assert path.read_bytes() == CONTENT
    assert ranges(server) == [None, None]


@pytest.mark.parametrize("cuts", [[CUT], [CUT, 200_000]])
def test_a_server_without_ranges_sends_it_again(server: Served, tmp_path: Path, cuts) -> None:
    server.ranges = False
    server.cuts[:] = cuts
    path, _ = download(published(server), tmp_path, silent)
    assert path.read_bytes() == CONTENT


@pytest.fixture
def part(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The part that an earlier call left, which gave up."""
    server.cuts[:] = [CUT, 0]
    with monkeypatch.context() as patched:
        patched.setattr(module, "ATTEMPTS", 1)
        with pytest.raises(DataError):
            download(published(server), tmp_path, silent)
    return tmp_path / ".images.zip.part"


@pytest.mark.parametrize("content", [CONTENT, CONTENT + b"more"])
def test_a_part_that_is_whole_or_longer(
    server: Served, tmp_path: Path, part: Path, content: bytes
) -> None:
    part.write_bytes(content)
    asked = len(server.asked)
    path, _ = download(published(server), tmp_path, silent)
    assert path.read_bytes() == CONTENT
    assert len(server.asked) - asked == (1 if content == CONTENT else 2), "begun anew if longer"


def test_a_damaged_part_does_not_pass_for_the_file(
    server: Served, tmp_path: Path, part: Path
) -> None:
    part.write_bytes(bytes(CUT))
    with pytest.raises(DataError, match=r"not what was published.*It was deleted"):
        download(published(server), tmp_path, silent)
    path, _ = download(published(server), tmp_path, silent)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_server_that_is_busy_is_asked_again(server: Served, tmp_path: Path, code: int) -> None:
    server.failures[:] = [code, code]
    path, _ = download(published(server), tmp_path, silent)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("code", [401, 403, 404, 410])
def test_what_is_not_there_is_not_asked_for_again(
    server: Served, tmp_path: Path, code: int
) -> None:
    server.failures[:] = [code]
    with pytest.raises(DataError, match=rf"the server says {code}.*official page"):
        download(published(server), tmp_path, silent)
    assert len(server.asked) == 1


@pytest.mark.parametrize("kind", ["md5", "sha256"])
def test_a_wrong_checksum_leaves_nothing(server: Served, tmp_path: Path, kind: str) -> None:
    wrong = hashlib.new(kind, b"other").hexdigest()
    with pytest.raises(DataError, match=rf"its {kind} is .*, not {wrong}.*deleted"):
        download(published(server, f"{kind}:{wrong}"), tmp_path, silent)
    assert not (tmp_path / "images.zip").exists()
    assert not list(tmp_path.glob(".images.zip.part*"))


def test_a_file_that_is_there_is_compared_and_not_asked_for(server: Served, tmp_path: Path) -> None:
    (tmp_path / "images.zip").write_bytes(CONTENT)
    download(published(server), tmp_path, silent)
    assert server.asked == []
    (tmp_path / "images.zip").write_bytes(CONTENT[1:])
    with pytest.raises(DataError, match=r"images.zip already exists"):
        download(published(server), tmp_path, silent)
    assert (tmp_path / "images.zip").read_bytes() == CONTENT[1:], "a user's file was deleted"
    assert server.asked == []


def test_redirects_are_followed(server: Served, tmp_path: Path) -> None:
    server.redirects = {"/old": "/new", "/new": f"{server.address}{PATH}"}
    server.cuts[:] = [CUT]
    path, _ = download(published(server, path="/old"), tmp_path, silent)
    assert path.read_bytes() == CONTENT
    assert server.asked[-1] == (PATH, f"bytes={CUT}-")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("/circle", "Cannot download .*redirects"),
        ("file:///etc/passwd", "no address of http or https"),
        ("ftp://127.0.0.1/x", "no address of http or https"),
    ],
)
def test_redirects_that_lead_nowhere(
    server: Served, tmp_path: Path, target: str, words: str
) -> None:
    server.redirects = {"/circle": target}
    with pytest.raises(DataError, match=words):
        download(published(server, path="/circle"), tmp_path, silent)


def test_an_encrypted_address_does_not_lead_to_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def send(self: object, request: requests.PreparedRequest, **_: object) -> requests.Response:
        answer = requests.Response()
        answer.status_code, answer.url, answer.request = 302, str(request.url), request
        answer.headers["Location"] = "http://example.org/y"
        answer.raw = io.BytesIO()
        asked.append(answer.url)
        return answer

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", send)
    for address in ("https://example.org/x", "HTTPS://example.org/x"):
        file = PublishedFile(address=address, name="images.zip")
        with pytest.raises(DataError, match=r"not encrypted.*http://example.org/y"):
            download(file, tmp_path, silent)
    assert asked == ["https://example.org/x"] * 2


def test_an_answer_without_a_length_is_taken_whole(server: Served, tmp_path: Path) -> None:
    server.length = False
    path, _ = download(published(server), tmp_path, silent)
    assert path.read_bytes() == CONTENT


def test_a_file_too_large_for_the_disk_is_not_begun(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": module._RESERVE + 1000})
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(DataError, match="to spare"):
        download(published(server), tmp_path, silent)
    server.length = False
    with pytest.raises(DataError, match="more than it announced"):
        download(published(server), tmp_path, silent)


def test_a_server_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as gone:
        pass
    monkeypatch.setattr(module, "ATTEMPTS", 2)
    with pytest.raises(DataError, match="Cannot download") as caught:
        download(published(gone), tmp_path, silent)
    assert "\n" not in str(caught.value)


def test_two_processes_do_not_write_one_file(server: Served, tmp_path: Path) -> None:
    from filelock import FileLock

    with (
        FileLock(tmp_path / ".images.zip.lock"),
        pytest.raises(DataError, match="Another process"),
    ):
        download(published(server), tmp_path, silent)


# Archives of every kind, and those that mean harm.


FILES = {"VLCS/SUN09/bird/1.jpg": b"one", "VLCS/SUN09/car/2.jpg": b"two" * 1000}


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


def test_archives_of_every_kind(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for mode in ["zip", "w", "w:gz", "w:bz2", "w:xz"]:
        with subtests.test(mode=mode):
            tmp_path = tmp_path_factory.mktemp("case")
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
    with pytest.raises(DataError, match="VLCS already exists"):
        unpack(zipped(tmp_path / "a.zip", {"A/1": b"", **FILES}), tmp_path / "out", silent)
    assert read(tmp_path / "out") == {}


def test_paths_outside_the_folder_are_refused(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for pack, name in itertools.product([zipped, tarred], [*OUTSIDE, "a\nb"]):
        with subtests.test(name=name, pack=pack):
            tmp_path = tmp_path_factory.mktemp("case")
            packed = pack(tmp_path / "a.bin", {"good.jpg": b"good", name: b"evil"})
            with pytest.raises(DataError, match="no path inside a folder"):
                unpack(packed, tmp_path / "deep/out", silent)
            assert read(tmp_path / "deep") == {}
            assert list((tmp_path / "deep/out").iterdir()) == [], "nothing is left half unpacked"
            assert not list(tmp_path.rglob("evil*"))


def test_names_in_another_encoding_are_refused(tmp_path: Path) -> None:
    spelled = {"format": tarfile.GNU_FORMAT, "encoding": "latin-1"}
    with tarfile.open(tmp_path / "a.tar", "w", **spelled) as archive:
        archive.addfile(tarfile.TarInfo("images/café.png"))
    with pytest.raises(DataError, match=r"images/caf\\udce9\.png', which is no path") as caught:
        unpack(tmp_path / "a.tar", tmp_path / "out", silent)
    str(caught.value).encode()
    assert not (tmp_path / "out/images").exists()


def test_links_and_devices_in_tar_are_refused(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for kind in [
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.CHRTYPE,
        tarfile.BLKTYPE,
        tarfile.FIFOTYPE,
    ]:
        with subtests.test(kind=kind):
            tmp_path = tmp_path_factory.mktemp("case")
            with tarfile.open(tmp_path / "a.tar", "w") as archive:
                info = tarfile.TarInfo("images")
                info.type, info.linkname = kind, "/etc"
                archive.addfile(info)
                inside = tarfile.TarInfo("images/passwd")
                archive.addfile(inside)
            with pytest.raises(DataError, match="link or a device"):
                unpack(tmp_path / "a.tar", tmp_path / "out", silent)
            assert list((tmp_path / "out").iterdir()) == []


def test_a_link_in_zip_leads_nowhere(tmp_path: Path) -> None:
    link = {"images": stat.S_IFLNK | 0o777}
    packed = zipped(tmp_path / "a.zip", {"images": b"/etc"}, link)
    unpack(packed, tmp_path / "out", silent)
    assert not (tmp_path / "out/images").is_symlink()
    assert read(tmp_path / "out") == {"images": b"/etc"}
    packed = zipped(tmp_path / "b.zip", {"images": b"/etc", "images/passwd": b""}, link)
    with pytest.raises(DataError, match="Cannot unpack"):
        unpack(packed, tmp_path / "other", silent)


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
    with pytest.raises(DataError, match=r"Cannot unpack .*File exists"):
        unpack(path, tmp_path / "out", silent)


@pytest.mark.parametrize("files", [{"a": b"", "a/b": b""}, {"a": b"", "x" * 300: b""}])
def test_what_a_disk_cannot_hold_leaves_nothing(tmp_path: Path, files: dict[str, bytes]) -> None:
    with pytest.raises(DataError, match="Cannot unpack"):
        unpack(tarred(tmp_path / "a.tgz", files), tmp_path / "out", silent)
    assert read(tmp_path / "out") == {}


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_a_damaged_archive(tmp_path: Path, pack) -> None:
    packed = pack(tmp_path / "a.bin", {"a.jpg": bytes(range(256)) * 400})
    content = bytearray(packed.read_bytes())
    content[60:80] = bytes(20)
    packed.write_bytes(content)
    with pytest.raises(DataError, match=r"damaged|neither a zip nor a tar|no path"):
        unpack(packed, tmp_path / "out", silent)
    assert read(tmp_path / "out") == {}


@pytest.mark.parametrize("content", [b"", b"<html>Sign in to go on</html>"])
def test_a_page_instead_of_an_archive(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(DataError, match="neither a zip nor a tar"):
        unpack(tmp_path / "a.zip", tmp_path / "out", silent)
