"""A published data set, downloaded, compared with its checksum and unpacked."""

from collections.abc import Callable
from pathlib import Path

from pydantic import Field

from feddg.data.archives import unpack
from feddg.data.data_set import DataSet, PublishedFile
from feddg.data.download import download
from feddg.errors import DataError
from feddg.records import JsonFile
from feddg.storage import private_folder, replace_text

Progress = Callable[[str, int, int], None]


class Received(JsonFile):
    """What has been received of a data set: ``.feddg-NAME.json`` in its folder.

    Attributes:
        files: the SHA-256 of each published file, by its name.
    """

    files: dict[str, str] = Field(default_factory=dict)


def about(definition: DataSet) -> list[str]:
    """Returns what one should know before a data set is downloaded, in lines.

    Raises:
        DataError: it is not published, or built in.
    """
    publication = definition.publication
    if publication is None or not (publication.files or publication.steps):
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
        lines.append(f"File: {file.address} ({file.name}{size}; {file.checksum or _NO_CHECKSUM})")
    return lines


_NO_CHECKSUM = "no checksum published"


def get_data_set(
    definition: DataSet, root: Path, progress: Progress, *, keep: bool = False
) -> dict[str, str]:
    """Downloads and unpacks a data set; what has been received is not asked for again.

    Args:
        definition: with the files of its publication.
        root: its folder, which is made where there is none.
        progress: is told how far it has come.
        keep: whether archives stay once they are unpacked.

    Returns:
        The SHA-256 of every file, by its name.

    Raises:
        DataError: a file cannot be had, is not what was published, or cannot be unpacked.
    """
    publication = definition.publication
    assert publication is not None
    record = private_folder(root) / f".feddg-{definition.name}.json"
    received = Received.read(record) or Received()
    for file in publication.files:
        if file.name in received.files:
            continue
        found = _get(file, root, progress, keep)
        received = Received(files={**received.files, file.name: found})
        replace_text(record, received.to_text())
    return dict(received.files)


def _get(file: PublishedFile, root: Path, progress: Progress, keep: bool) -> str:
    path, found = download(file, root, progress)
    if file.unpack:
        unpack(path, root / file.into, progress)
        if not keep:
            path.unlink()
    return found
