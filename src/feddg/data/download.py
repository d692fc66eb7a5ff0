"""Downloads a published data set, checks its checksums and unpacks it."""

import os
import re
import shutil
import tarfile
import tempfile
import textwrap
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from lzma import LZMAError
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import requests
from pydantic import Field

from feddg.data.data_set import DataSet, Mirror, PublishedFile, load_source
from feddg.data.mirror import fetch, local_files, mirrored_files, mirrored_images
from feddg.diagnostics import Progress
from feddg.errors import DataError, need
from feddg.records import JsonFile
from feddg.storage import (
    FILE_MODE,
    alone,
    digest,
    file_faults,
    private_folder,
    read_text,
    replace_text,
    sync,
)

ATTEMPTS = 6
"""Tries in a row without any new byte before the download fails."""
PAUSE = 1.0
"""Seconds before the second try; doubled from try to try."""
_LONGEST_PAUSE = 60.0
_TIMEOUT = (30, 60)
"""Seconds to connect, and to wait for the next bytes."""
_CHUNK = 1 << 14
"""Bytes read at a time; at most these are lost when a connection is cut."""
_RESERVE = 1 << 28
"""Bytes left free on the disk."""
_CUT = (
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
    requests.exceptions.ContentDecodingError,
)
"""What ends a try before the whole file is there; the next may succeed."""
_LATER = (408, 425, 429, 500, 502, 503, 504)
MIRROR = ".mirror"
"""Where a mirror's files are downloaded to, in the data set's folder."""
_STRANGE = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]|^[A-Za-z]:")


def download(file: PublishedFile, folder: Path, progress: Progress) -> tuple[Path, str]:
    """Downloads a file and checks it against its published checksum.

    Args:
        file: the file to download.
        folder: where it goes, under its own name.
        progress: called with the MB received and the MB in total (0 if unknown).

    Returns:
        The path, and the file's SHA-256 in hexadecimal digits.

    Raises:
        DataError: it cannot be downloaded, or its checksum differs.
    """
    target, part = private_folder(folder) / file.name, folder / f".{file.name}.part"
    with alone(target, DataError(f"Another process downloads to {folder} already.")):
        if not target.is_file():
            _fetch_all(file, part, progress)
            if wrong := _differs(part, file):
                _forget(part)
                raise DataError(
                    f"What {file.address} sent is not what was published: {wrong}. It was "
                    "deleted; try again, or look at the official page."
                )
            part.replace(target)
            _forget(part)
        elif wrong := _differs(target, file):  # somebody put it there: it is not ours to delete
            raise DataError(
                f"{target} already exists and is not what was published: {wrong}. Move it away "
                "or delete it, then try again."
            )
        return target, digest(target)


def _differs(path: Path, file: PublishedFile) -> str:
    """Returns how a file's checksum differs from the published one; empty if it does not."""
    kind, _, published = file.checksum.partition(":")
    actual = digest(path, kind) if published else ""
    return f"its {kind} is {actual}, not {published}" if actual != published.lower() else ""


def _version_of(part: Path) -> Path:
    """Returns the path of the note with the server's version tag of a partial file."""
    return part.with_name(f"{part.name}.version")


def _forget(part: Path) -> None:
    part.unlink(missing_ok=True)
    _version_of(part).unlink(missing_ok=True)


def _size(part: Path) -> int:
    return part.stat().st_size if part.is_file() else 0


def _fetch_all(file: PublishedFile, part: Path, progress: Progress) -> None:
    """Requests a file again and again until all of it is there."""
    vain = 0
    while True:
        before = _size(part)
        try:
            _fetch(file, part, progress)
            return
        except _CUT as error:
            reason = textwrap.shorten(str(error) or type(error).__name__, 200)
        except requests.exceptions.InvalidSchema as error:
            raise DataError(
                f"Refused: {file.address} leads to one that is not encrypted, or is no address of "
                f"http or https ({error})."
            ) from None
        except requests.RequestException as error:
            raise DataError(f"Cannot download {file.address}: {error}.") from None
        vain = 0 if _size(part) > before else vain + 1
        if vain >= ATTEMPTS:
            raise DataError(
                f"Cannot download {file.address}: {reason}. {_size(part):,} bytes have arrived; "
                "the same command continues from there."
            )
        time.sleep(min(PAUSE * 2**vain, _LONGEST_PAUSE))


def _fetch(file: PublishedFile, part: Path, progress: Progress) -> None:
    """Requests the missing bytes once, and writes what arrives."""
    come, version = _size(part), _version_of(part)
    same_if = read_text(version, DataError) if version.is_file() else ""
    if not (same_if or file.checksum):
        come = 0  # nothing would tell whether the rest is of the same file
    # As it is stored: a file that is packed on the way has no ranges of its own.
    asked = {"Accept-Encoding": "identity", "User-Agent": "feddg"}
    if come:
        asked |= {"Range": f"bytes={come}-"} | ({"If-Range": same_if} if same_if else {})
    with (
        _session(file.address) as session,
        session.get(file.address, headers=asked, stream=True, timeout=_TIMEOUT) as answer,
    ):
        code, headers = answer.status_code, answer.headers
        sent, _, whole = headers.get("Content-Range", "").partition("/")
        total = int(whole) if whole.isdecimal() else 0
        if code in _LATER:
            raise requests.ConnectionError(f"the server says {code} {answer.reason}")
        if code == 416 and come and come == total:
            return
        if code == 416 or (code == 206 and not sent.startswith(f"bytes {come}-")):
            _forget(part)
            raise requests.ConnectionError("the server now has another file, or sent another part")
        if code not in (200, 206):
            raise DataError(
                f"Cannot download {file.address}: the server says {code} {answer.reason}. Check on "
                "the official page whether it has moved."
            )
        if code == 200:
            come, total = 0, int(headers.get("Content-Length") or 0)
        tag = headers.get("ETag", "")
        weak = not tag or tag.startswith("W/")
        replace_text(version, headers.get("Last-Modified", "") if weak else tag)
        _write(file, part, answer, come, total, progress)


def _session(address: str) -> requests.Session:
    """Returns a session that no redirect leads from https to http."""
    session = requests.Session()
    if address.strip().lower().startswith("https:"):
        del session.adapters["http://"]
    return session


def _write(
    file: PublishedFile,
    part: Path,
    answer: requests.Response,
    start: int,
    total: int,
    progress: Progress,
) -> None:
    """Appends an answer to a partial file with ``start`` bytes of ``total`` (0 if unknown)."""
    free = shutil.disk_usage(part.parent).free - _RESERVE
    if total - start > free:
        raise DataError(
            f"{file.name} needs {(total - start) / 1e9:.1f} GB, and {part.parent} has "
            f"{max(free, 0) / 1e9:.1f} GB to spare."
        )
    come, limit = start, total or start + free
    with part.open("ab" if start else "wb") as opened:
        part.chmod(FILE_MODE)
        for chunk in answer.iter_content(_CHUNK):
            come += len(chunk)
            if come > limit:
                raise DataError(f"{file.address} sent more than it announced.")
            opened.write(chunk)
            if come >> 20 != (come - len(chunk)) >> 20 or come == total:
                progress(f"downloading {file.name}, MB", come >> 20, total >> 20)
        sync(opened)
    if come < total:
        raise requests.ConnectionError(f"the connection was cut at {come:,} of {total:,} bytes")


_Member = tuple[str, IO[bytes]]
"""Name and opened content of an archived file."""


def unpack(archive: Path, folder: Path, progress: Progress) -> None:
    """Unpacks an archive into a folder, whole or not at all.

    Only plain files and folders are unpacked, without their modes and owners.

    Args:
        archive: zip or tar; a tar may be compressed with gzip, bzip2 or xz.
        folder: where the content goes; existing files are not replaced.
        progress: called with the number of files so far, and 0.

    Raises:
        DataError: it is no archive, is damaged, does not fit on the disk, or holds paths outside
            the folder, a tar's links and devices, or encrypted files; or a file is in the way.
    """
    if zipfile.is_zipfile(archive):
        members = _zipped(archive)
    elif tarfile.is_tarfile(archive):
        members = _tarred(archive)
    else:
        raise DataError(f"{archive} is neither a zip nor a tar file. Delete it and try again.")
    _put(members, archive, folder, progress)


def _put(members: Iterable[_Member], archive: Path, folder: Path, progress: Progress) -> None:
    """Writes the files of an archive into a folder, all or none."""
    damage = (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, LZMAError, RuntimeError)
    private_folder(folder)
    with (
        file_faults(
            DataError, f"Cannot unpack {archive} into {folder} (delete it if damaged)", *damage
        ),
        tempfile.TemporaryDirectory(prefix=".unpacking-", dir=folder) as name,
    ):
        aside = Path(name)
        for files, (member, source) in enumerate(members, start=1):
            path = aside.joinpath(*_steps(archive, member))
            private_folder(path.parent)
            with path.open("xb") as target, source:
                shutil.copyfileobj(source, target)
            path.chmod(FILE_MODE)
            progress(f"unpacking {archive.name}", files, 0)
        entries = sorted(aside.iterdir())
        for entry in entries:
            if (folder / entry.name).exists():
                raise DataError(
                    f"{folder / entry.name} already exists; move it, or name another root."
                )
        for entry in entries:
            entry.rename(folder / entry.name)


def _steps(archive: Path, name: str) -> list[str]:
    """Returns the parts of a path in an archive.

    Raises:
        DataError: it leads outside the folder, or is no valid file name.
    """
    steps = [step for step in name.split("/") if step not in ("", ".")]
    if name.startswith("/") or ".." in steps or _STRANGE.search(name) or not steps:
        raise DataError(
            f"{archive.name} holds {name[:200]!r}, which is no path inside a folder; it is refused."
        )
    return steps


def _zipped(archive: Path) -> Iterator[_Member]:
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            if not info.is_dir():  # a link's content, its target, is written like any other
                yield info.filename, opened.open(info)


def _tarred(archive: Path) -> Iterator[_Member]:
    with tarfile.open(archive) as opened:
        while (info := opened.next()) is not None:
            opened.members = []  # type: ignore[attr-defined]  # of a million files, each would be remembered
            if info.isdir():
                continue
            source = opened.extractfile(info) if info.isreg() else None
            if source is None:
                raise DataError(
                    f"{archive.name} holds {info.name[:200]!r}, no plain file but a link or a "
                    "device; it is refused."
                )
            yield info.name, source


class Received(JsonFile):
    """The record of what was downloaded for a data set: ``.feddg-NAME.json`` in its folder.

    Attributes:
        files: the SHA-256 of each published file, by its name.
        revision: the requested revision of the mirror; empty for the definition's.
        commit: the commit of the mirror that the files are from; empty if no mirror was used.
        complete: whether all images of the mirror are there.
    """

    files: dict[str, str] = Field(default_factory=dict)
    revision: str = ""
    commit: str = ""
    complete: bool = False


def about(definition: DataSet) -> list[str]:
    """Returns the lines to read before a data set is fetched: citation, licence, size, steps.

    Raises:
        DataError: it is not published, or built in.
    """
    publication = definition.publication
    if publication is None or not (publication.files or publication.mirror or publication.steps):
        raise DataError(
            f"The data set '{definition.name}' is not one that is downloaded: {definition.summary}."
        )
    lines = [
        f"{definition.name}: {definition.summary}",
        f"Cite: {publication.citation}",
        f"Licence: {publication.licence or 'none is stated; look at the official page'}",
    ]
    if publication.address:
        lines.append(f"Official page: {publication.address}")
    for file in publication.files:
        size = f", {file.bytes / 1e9:.1f} GB" if file.bytes else ""
        checksum = file.checksum or "no checksum published"
        lines.append(f"File: {file.address} ({file.name}{size}; {checksum})")
    if publication.down:
        lines.append(host_down(definition))
    if publication.mirror:
        lines.append(f"Mirror: https://huggingface.co/datasets/{publication.mirror.name}")
    lines += [f"By hand: {number}. {step}" for number, step in enumerate(publication.steps, 1)]
    return lines


def host_down(definition: DataSet) -> str:
    """Returns a sentence that the host of a data set's files is down, and where else they are."""
    publication = definition.publication
    assert publication is not None
    host, mirror = urlsplit(publication.files[0].address).netloc, publication.mirror
    return f"{host} has not answered since {publication.down}; " + (
        f"the mirror {mirror.name} on Hugging Face is taken." if mirror else "no mirror is known."
    )


def get_data_set(
    definition: DataSet,
    root: Path,
    progress: Progress,
    *,
    keep: bool = False,
    revision: str | None = None,
    source: Path | None = None,
) -> dict[str, str]:
    """Downloads and unpacks a data set; files already received are not downloaded again.

    Args:
        definition: a data set with published files or a mirror.
        root: its folder, created if missing.
        progress: called with the progress so far.
        keep: whether to keep archives after they are unpacked.
        revision: the mirror's revision (a commit); by default the one that feddg names.
        source: a folder with the mirror's Parquet files, obtained in another way.

    Returns:
        The SHA-256 of every file, by its name.

    Raises:
        DataError: a file cannot be downloaded, has another checksum, or cannot be unpacked.
    """
    source = source and Path(os.path.expanduser(source))
    publication = definition.publication
    assert publication is not None
    mirror = publication.mirror
    if mirror and (publication.down or revision or source or not publication.files):
        return _get_mirrored(definition, mirror, root, progress, keep, revision, source)
    if revision or source:
        raise DataError(f"{definition.title} has no mirror whose files could be taken.")
    record, received = _record(definition, root)
    for file in publication.files:
        if file.name in received.files:
            continue
        try:
            path, checksum = download(file, root, progress)
        except DataError as error:
            down = f" {host_down(definition)}" if publication.down else ""
            raise DataError(f"{error}{down}") from None
        if file.unpack:
            unpack(path, root / file.into, progress)
            if not keep:
                path.unlink()
        received = Received(files={**received.files, file.name: checksum})
        replace_text(record, received.to_text())
    return dict(received.files)


def _record(definition: DataSet, root: Path) -> tuple[Path, Received]:
    file = private_folder(root) / f".feddg-{definition.name}.json"
    return file, Received.read(file) or Received()


def _check_case(definition: DataSet, root: Path) -> None:
    """Refuses a disk on which the folders of two classes, such as a and A, would be one."""
    if len({name.casefold() for name in definition.classes}) == len(definition.classes):
        return
    with tempfile.TemporaryDirectory(dir=private_folder(root)) as probe:
        (Path(probe) / "a").touch()
        if (Path(probe) / "A").exists():
            raise DataError(
                f"{root} is on a disk that does not tell a from A, which classes of "
                f"{definition.title} do; name a root on another disk."
            )


def _get_mirrored(
    definition: DataSet,
    mirror: Mirror,
    root: Path,
    progress: Progress,
    keep: bool,
    revision: str | None,
    source: Path | None,
) -> dict[str, str]:
    """Takes a data set from its mirror; an interrupted download continues at the same commit."""
    need("parquet", "a mirror")
    record, received = _record(definition, root)
    same = revision is None or revision in (received.revision, received.commit)
    if received.complete and not same:
        raise DataError(
            f"{root} holds the images of {received.commit or 'files at hand'}; for {revision} name "
            "another root."
        )
    if received.complete:
        return dict(received.files)
    for name in definition.domains:
        if (root / name).exists():
            raise DataError(f"{root / name} already exists; move it, or name another root.")
    _check_case(definition, root)
    asked = commit = ""
    if source is None:
        asked = revision or received.revision
        wanted = (received.commit if same else "") or asked or mirror.revision
        commit, names = mirrored_files(definition, mirror, wanted)
        if commit != received.commit:
            shutil.rmtree(root / MIRROR, ignore_errors=True)
        replace_text(record, Received(revision=asked, commit=commit).to_text())
        fetch(mirror, commit, names, private_folder(root / MIRROR))
    folder = source or root / MIRROR
    paths = local_files(definition, folder)
    files = {path.relative_to(folder).as_posix(): digest(path) for path in paths}
    _put(mirrored_images(definition, mirror, paths), Path(mirror.name), root, progress)
    received = Received(files=files, revision=asked, commit=commit, complete=True)
    replace_text(record, received.to_text())
    if not keep:
        shutil.rmtree(root / MIRROR, ignore_errors=True)
    load_source(definition.name, root)  # says where there are other images than were published
    return files
