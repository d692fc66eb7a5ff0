"""Downloads that survive cut connections, and are what was published.

What has come so far lies in ``.NAME.part``; the same call goes on from there, where the server says
that its file is still the same, or a published checksum will.
"""

import hashlib
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import requests
from pydantic import ValidationError

from feddg.data.data_set import PublishedFile
from feddg.errors import DataError
from feddg.records import JsonFile
from feddg.storage import alone, open_file, private_folder, read_text, replace_text, sync, why

Progress = Callable[[str, int, int], None]

ATTEMPTS = 6
"""Tries in a row that bring nothing before it is given up."""
MOST_ATTEMPTS = 1000
"""Tries altogether."""
PAUSE = 1.0
"""Seconds before the second try; they double from try to try."""
_LONGEST_PAUSE = 60.0
_TIMEOUT = (30, 60)
"""Seconds to connect, and to wait for the next bytes."""
_CHUNK = 1 << 14
"""Bytes at a time: no more are lost when a connection is cut."""
_MOST_REDIRECTS = 10
_RESERVE = 1 << 28
"""Bytes that are left free on the disk."""
_CUT = (
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
    requests.exceptions.ContentDecodingError,
)
_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")
_LATER = (408, 425, 429, 500, 502, 503, 504)


class PartFacts(JsonFile):
    """What is known of a file of which a part has come.

    Attributes:
        address: where it comes from.
        same_if: what the server says as long as its file is the same; empty where it says nothing.
    """

    address: str
    same_if: str = ""


class _Again(Exception):
    """A try that ended without the whole file; the next may do better."""


@dataclass
class _Job:
    """One file on its way."""

    file: PublishedFile
    folder: Path
    progress: Progress

    @property
    def part(self) -> Path:
        return self.folder / f".{self.file.name}.part"

    @property
    def facts(self) -> Path:
        return self.folder / f".{self.file.name}.part.json"

    def come(self) -> int:
        """Bytes that have come so far."""
        return self.part.stat().st_size if self.part.is_file() else 0

    def forget(self) -> None:
        """Removes what has come so far."""
        self.part.unlink(missing_ok=True)
        self.facts.unlink(missing_ok=True)

    def known(self) -> PartFacts | None:
        """What is known of the part; None where it cannot be gone on with."""
        try:
            known = PartFacts.model_validate_json(read_text(self.facts, DataError))
        except (DataError, ValidationError):
            return None
        fits = known.address == self.file.address and (known.same_if or self.file.checksum)
        return known if fits else None


def download(file: PublishedFile, folder: Path, progress: Progress) -> tuple[Path, str]:
    """Downloads a file and compares it with its published checksum.

    Args:
        file: what is wanted.
        folder: where it goes, under its name.
        progress: is told how many MB there are, of how many (0 where nobody knows).

    Returns:
        The file, and its SHA-256 in hexadecimal digits.

    Raises:
        DataError: it cannot be had, or is not what was published.
    """
    job = _Job(file, private_folder(folder), progress)
    target = folder / file.name
    with alone(target, DataError(f"Another process downloads to {folder} already.")):
        if not target.is_file():
            _whole(job)
            if wrong := _differs(job.part, file):
                job.forget()
                raise DataError(
                    f"What came from {file.address} is not what was published: {wrong}. It was "
                    "deleted; try again, or look at the official page."
                )
            job.part.replace(target)
            job.facts.unlink(missing_ok=True)
        elif wrong := _differs(target, file):  # somebody put it there: it is not ours to delete
            raise DataError(
                f"{target} is there already and is not what was published: {wrong}. Move it away "
                "or delete it, then try again."
            )
        return target, digest(target, "sha256")


def digest(path: Path, kind: str) -> str:
    """Returns the checksum of a file, ``md5`` or ``sha256``, in hexadecimal digits."""
    found = hashlib.new(kind, usedforsecurity=False)
    with open_file(path) as opened:
        while chunk := opened.read(1 << 20):
            found.update(chunk)
    return found.hexdigest()


def _differs(path: Path, file: PublishedFile) -> str:
    """Says how a file's checksum is not the published one; empty where it is, or none is known."""
    kind, _, published = file.checksum.partition(":")
    found = digest(path, kind) if published else ""
    return f"its {kind} is {found}, not {published}" if found != published.lower() else ""


def _whole(job: _Job) -> None:
    """Fetches until everything is there."""
    vain = 0
    for _ in range(MOST_ATTEMPTS):
        before = job.come()
        try:
            _fetch(job)
            return
        except (_Again, *_CUT) as error:
            last = error
        except requests.RequestException as error:
            raise DataError(f"Cannot download {job.file.address}: {error}.") from None
        vain = 0 if job.come() > before else vain + 1
        if vain >= ATTEMPTS:
            break
        time.sleep(min(PAUSE * 2**vain, _LONGEST_PAUSE))
    raise DataError(
        f"Cannot download {job.file.address}: {_reason(last)}. {job.come():,} bytes have come; the "
        "same command goes on from there."
    )


def _reason(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) < 200 else f"{text[:200]}..."


def _fetch(job: _Job) -> None:
    """Asks once for what is missing, and writes what comes."""
    come, known = job.come(), job.known()
    if come and known is None:
        job.forget()
        come = 0
    # As it is stored: a file that is packed on the way has no ranges of its own.
    headers = {"Accept-Encoding": "identity", "User-Agent": "feddg"}
    if come and known is not None:
        headers["Range"] = f"bytes={come}-"
        if known.same_if:
            headers["If-Range"] = known.same_if
    with requests.Session() as session, _opened(session, job.file.address, headers) as answer:
        if answer.status_code == 416:
            if _range(answer)[1] == come and come:
                return
            job.forget()
            raise _Again("the server has another file now")
        if answer.status_code in _LATER:
            raise _Again(f"the server says {answer.status_code} {answer.reason}")
        if answer.status_code not in (200, 206):
            raise DataError(
                f"Cannot download {job.file.address}: the server says {answer.status_code} "
                f"{answer.reason}. Look at the official page whether it has moved."
            )
        start, total = 0, int(answer.headers.get("Content-Length") or 0)
        if answer.status_code == 206:
            start, total = _range(answer)
            if start != come or not come:
                job.forget()
                raise _Again("the server sent another part than it was asked for")
        elif job.come():
            job.part.unlink()
        facts = PartFacts(address=job.file.address, same_if=_same_if(answer))
        replace_text(job.facts, facts.to_text())
        _write(job, answer, start, total)


@contextmanager
def _opened(
    session: requests.Session, address: str, headers: dict[str, str]
) -> Iterator[requests.Response]:
    """Opens an address, following redirects from https to https, or from http to either."""
    start = urlsplit(address)
    for _ in range(_MOST_REDIRECTS):
        here = urlsplit(address)
        if here.scheme not in ("http", "https"):
            raise DataError(f"{address} is no address of http or https.")
        if start.scheme == "https" and here.scheme != "https":
            raise DataError(f"Refused: {start.netloc} leads to {address}, which is not encrypted.")
        answer = session.get(
            address, headers=headers, stream=True, timeout=_TIMEOUT, allow_redirects=False
        )
        if not answer.is_redirect:
            with answer:
                yield answer
            return
        answer.close()
        address = urljoin(address, answer.headers["Location"])
    raise DataError(f"{start.geturl()} leads in a circle.")


def _range(answer: requests.Response) -> tuple[int, int]:
    """Returns where the part that was sent begins, and how long the whole is; 0 if not known."""
    found = _RANGE.fullmatch(answer.headers.get("Content-Range", "").strip())
    if found is None:
        return -1, 0
    return int(found[1] or -1), 0 if found[3] == "*" else int(found[3])


def _same_if(answer: requests.Response) -> str:
    tag = answer.headers.get("ETag", "")
    return answer.headers.get("Last-Modified", "") if not tag or tag.startswith("W/") else tag


def _write(job: _Job, answer: requests.Response, start: int, total: int) -> None:
    free = shutil.disk_usage(job.folder).free - _RESERVE
    if total - start > free:
        raise DataError(
            f"{job.file.name} needs {(total - start) / 1e9:.1f} GB, and {job.folder} has "
            f"{max(free, 0) / 1e9:.1f} GB to spare."
        )
    come, limit = start, total or start + free
    try:
        with job.part.open("ab") as part:
            job.part.chmod(0o600)
            for chunk in answer.iter_content(_CHUNK):
                come += len(chunk)
                if come > limit:
                    raise DataError(f"{job.file.address} sends more than it said; it is stopped.")
                part.write(chunk)
                if come >> 20 != (come - len(chunk)) >> 20 or come == total:
                    job.progress(f"downloading {job.file.name}, MB", come >> 20, total >> 20)
            sync(part)
    except OSError as error:
        if isinstance(error, requests.RequestException):
            raise
        raise DataError(f"Cannot write {job.part}: {why(error)}.") from None
    if come < total:
        raise _Again(f"the connection was cut at {come:,} of {total:,} bytes")
