"""Downloads from a server on this machine that cuts, fails, lies and redirects."""

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from feddg.data import download as module
from feddg.data.data_set import PublishedFile
from feddg.data.download import digest, download
from feddg.errors import DataError
from file_server import Served, serving

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
    assert found == hashlib.sha256(CONTENT).hexdigest() == digest(path, "sha256")
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
    with pytest.raises(DataError, match=rf"{CUT:,} bytes have come; the same command goes on"):
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


def test_a_part_that_is_whole_already_is_not_asked_for_again(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.cuts[:] = [CUT, 0]
    monkeypatch.setattr(module, "ATTEMPTS", 1)
    with pytest.raises(DataError):
        download(published(server), tmp_path, silent)
    (tmp_path / ".images.zip.part").write_bytes(CONTENT)
    path, _ = download(published(server), tmp_path, silent)
    assert path.read_bytes() == CONTENT


def test_a_part_longer_than_the_file_begins_anew(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.cuts[:] = [CUT, 0]
    monkeypatch.setattr(module, "ATTEMPTS", 1)
    with pytest.raises(DataError):
        download(published(server), tmp_path, silent)
    monkeypatch.setattr(module, "ATTEMPTS", 3)
    (tmp_path / ".images.zip.part").write_bytes(CONTENT + b"more")
    path, _ = download(published(server), tmp_path, silent)
    assert path.read_bytes() == CONTENT


def test_a_damaged_part_does_not_pass_for_the_file(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.cuts[:] = [CUT, 0]
    monkeypatch.setattr(module, "ATTEMPTS", 1)
    with pytest.raises(DataError):
        download(published(server), tmp_path, silent)
    (tmp_path / ".images.zip.part").write_bytes(bytes(CUT))
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
    with pytest.raises(DataError, match=r"images.zip is there already and is not what.*Move it"):
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
        ("/circle", "in a circle"),
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
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(self, address: str, **options: object):
        answer = module.requests.Response()
        answer.status_code = 302
        answer.headers["Location"] = server.address + PATH
        answer.raw = io.BytesIO()
        return answer

    monkeypatch.setattr(module.requests.Session, "get", get)
    file = PublishedFile(address="https://example.org/x", name="images.zip")
    with pytest.raises(DataError, match="not encrypted"):
        download(file, tmp_path, silent)


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
    with pytest.raises(DataError, match="more than it said"):
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
