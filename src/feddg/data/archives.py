"""Archives from outside, unpacked into a folder and nowhere else: zip and tar, however packed."""

import re
import shutil
import stat
import tarfile
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from lzma import LZMAError
from pathlib import Path
from typing import IO

from feddg.errors import DataError
from feddg.storage import private_folder, why

Progress = Callable[[str, int, int], None]

MOST_FILES = 5_000_000
MOST_TIMES = 50
"""How many times the archive's own size its content may have; images hardly shrink."""
LEAST = 1 << 28
"""Bytes that any archive may hold."""
_DEEPEST, _LONGEST = 32, 255
_CHUNK = 1 << 20
_STRANGE = re.compile(r"[\x00-\x1f\x7f\\]|^[A-Za-z]:")


@dataclass(frozen=True)
class _Member:
    """A file in an archive: its name, its size as the archive says it, and how it is opened."""

    name: str
    size: int
    open: Callable[[], IO[bytes]]


def unpack(archive: Path, folder: Path, progress: Progress) -> None:
    """Unpacks an archive into a folder, whole or not at all.

    Plain files and folders alone are taken. Their modes and owners are not.

    Args:
        archive: zip or tar; the latter perhaps packed by gzip, bzip2 or xz.
        folder: where its content goes; what is there already is not replaced.
        progress: is told how many files there are so far, and 0.

    Raises:
        DataError: it is no archive, is damaged, holds what is none of a data set's (paths outside
            the folder, links, devices, encrypted files), or too much; or something is in the way.
    """
    aside = private_folder(folder) / f".unpacking-{uuid.uuid4().hex}"
    private_folder(aside)
    try:
        _write_all(archive, aside, progress)
        for entry in sorted(aside.iterdir()):
            if (folder / entry.name).exists():
                raise DataError(
                    f"{folder / entry.name} is there already; take it away, or name another root."
                )
        for entry in sorted(aside.iterdir()):
            entry.rename(folder / entry.name)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, LZMAError) as error:
        raise DataError(
            f"{archive.name} is damaged ({why(error)}); delete it and download it again."
        ) from None
    except OSError as error:
        raise DataError(f"Cannot unpack {archive} into {folder}: {why(error)}.") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_all(archive: Path, folder: Path, progress: Progress) -> None:
    size = archive.stat().st_size
    free = shutil.disk_usage(folder).free
    most = min(max(LEAST, MOST_TIMES * size), free)
    written, files = 0, 0
    for member in _members(archive):
        files += 1
        if files > MOST_FILES:
            raise DataError(f"{archive.name} holds more than {MOST_FILES:,} files; it is refused.")
        path = folder.joinpath(*_steps(archive, member.name))
        _check_size(archive, written + member.size, most, free)
        private_folder(path.parent)
        try:
            target = path.open("xb")
        except FileExistsError:
            raise DataError(f"{archive.name} holds {member.name!r} twice; it is refused.") from None
        with target, member.open() as source:
            while chunk := source.read(_CHUNK):
                written += len(chunk)
                _check_size(archive, written, most, free)
                target.write(chunk)
        path.chmod(0o600)
        progress(f"unpacking {archive.name}", files, 0)
    if not files:
        raise DataError(f"{archive.name} holds no files.")


def _check_size(archive: Path, size: int, most: int, free: int) -> None:
    if size <= most:
        return
    if most == free:
        raise DataError(f"The disk is too full to unpack {archive.name}.")
    raise DataError(
        f"{archive.name} unpacks to more than {most / 1e9:.1f} GB, {MOST_TIMES} times its size; no "
        "archive of images does, and it is refused."
    )


def _steps(archive: Path, name: str) -> list[str]:
    """Returns the parts of a path in an archive.

    Raises:
        DataError: it leads outside, or cannot be a file's.
    """
    steps = [step for step in name.split("/") if step not in ("", ".")]
    strange = _STRANGE.search(name) or any(len(s.encode()) > _LONGEST for s in steps)
    if name.startswith("/") or ".." in steps or strange or not 0 < len(steps) <= _DEEPEST:
        raise DataError(
            f"{archive.name} holds a file called {name[:200]!r}, which is no path inside a folder; "
            "it is refused."
        )
    return steps


def _members(archive: Path) -> Iterator[_Member]:
    if zipfile.is_zipfile(archive):
        yield from _zipped(archive)
    elif tarfile.is_tarfile(archive):
        yield from _tarred(archive)
    else:
        raise DataError(f"{archive} is neither a zip nor a tar file. Delete it and try again.")


def _zipped(archive: Path) -> Iterator[_Member]:
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            mode = info.external_attr >> 16
            if info.flag_bits & 1:
                raise DataError(f"{archive.name} is encrypted; unpack it yourself.")
            if info.is_dir():
                _steps(archive, info.filename)
                continue
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
                _refuse(archive, info.filename)
            try:
                yield _Member(info.filename, info.file_size, partial(opened.open, info))
            except NotImplementedError:
                raise DataError(f"{archive.name} is packed in a way unknown here.") from None


def _tarred(archive: Path) -> Iterator[_Member]:
    with tarfile.open(archive) as opened:
        while (info := opened.next()) is not None:
            opened.members = []  # type: ignore[attr-defined]  # of a million files, each would be remembered
            if info.isdir():
                if info.name not in (".", "./", ""):
                    _steps(archive, info.name)
                continue
            if not info.isreg() or info.issparse():
                _refuse(archive, info.name)
            yield _Member(info.name, info.size, partial(_open, opened, info))


def _open(archive: tarfile.TarFile, info: tarfile.TarInfo) -> IO[bytes]:
    found = archive.extractfile(info)
    assert found is not None
    return found


def _refuse(archive: Path, name: str) -> None:
    raise DataError(
        f"{archive.name} holds {name[:200]!r}, which is no plain file but a link or a device; it "
        "is refused."
    )
