"""Reads a data set's mirror on the Hugging Face hub: Parquet files with a row for every image."""

import io
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from feddg.data.data_set import DataSet, Mirror
from feddg.data.images import IMAGE_SUFFIXES, plain_name
from feddg.data.published import image_suffix, meant
from feddg.errors import DataError, first_names
from feddg.storage import why

PARQUET = ".parquet"
_PLAIN = re.compile(r"[\w+-][\w .()+-]*")


def hub_fault(error: Exception) -> str:
    """Returns the reason why a request to the Hugging Face hub failed, in one line."""
    return textwrap.shorten(why(error).removesuffix("."), 300)


def mirrored_files(definition: DataSet, mirror: Mirror, revision: str) -> tuple[str, list[str]]:
    """Lists a mirror's Parquet files.

    Args:
        definition: the data set.
        mirror: its mirror.
        revision: a branch, a tag or a commit.

    Returns:
        The commit, and the paths of its files.

    Raises:
        DataError: the hub does not answer, or has no such files.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        info = hub.dataset_info(mirror.name, revision=revision)
    except Exception as error:  # it raises what its many parts raise
        raise DataError(
            f"Cannot read {mirror.name} at {revision!r} on {hub.endpoint}: {hub_fault(error)}."
        ) from None
    names = [sibling.rfilename for sibling in info.siblings or []]
    wanted = _wanted(definition, names)
    if not wanted:
        raise DataError(
            f"{mirror.name} holds no Parquet files; found: {first_names(names) or 'nothing'}."
        )
    return info.sha or revision, wanted


def fetch(mirror: Mirror, commit: str, names: Iterable[str], folder: Path) -> None:
    """Downloads files of a mirror into a folder; those that are there are not asked for again.

    Raises:
        DataError: one cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download

    for name in names:
        try:
            hf_hub_download(
                mirror.name, name, repo_type="dataset", revision=commit, local_dir=folder
            )
        except Exception as error:  # it raises what its many parts raise
            raise DataError(
                f"Cannot download {name} of {mirror.name}: {hub_fault(error)}. The same command "
                "goes on with this file."
            ) from None


def local_files(definition: DataSet, folder: Path) -> list[Path]:
    """Lists a mirror's Parquet files that somebody downloaded into a folder.

    Raises:
        DataError: there are none.
    """
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob(f"*{PARQUET}")}
    files = [paths[name] for name in _wanted(definition, sorted(paths))]
    if not files:
        raise DataError(f"{folder} holds no Parquet files of {definition.title}.")
    return files


def _wanted(definition: DataSet, names: Iterable[str]) -> list[str]:
    """Returns the Parquet files to use; of several splits, those in the definition's ``parts``."""
    files = [name for name in names if name.endswith(PARQUET) and ".." not in name.split("/")]
    if not definition.parts or len({_split_of(name) for name in files}) < 2:
        return files
    return [name for name in files if plain_name(_split_of(name)) in definition.parts]


def _split_of(name: str) -> str:
    """Returns the split of ``data/train-00000-of-00002.parquet`` or ``train/0000.parquet``."""
    *folders, file = re.split(r"[/\\]|--", name.removesuffix(PARQUET))
    split = file.partition("-")[0]
    return folders[-1] if split.isdecimal() and folders else split


def mirrored_images(
    definition: DataSet, mirror: Mirror, files: Sequence[Path]
) -> Iterator[tuple[str, io.BytesIO]]:
    """Yields a mirror's images as path and bytes.

    Paths are ``domain/class/image``, or ``domain/split/class/image`` if there are several splits.
    An image keeps its name in the file, or gets a running number.

    Args:
        definition: gives domains and classes.
        mirror: gives the columns.
        files: the Parquet files.

    Raises:
        DataError: a file cannot be read or lacks a column; a row has no
            image, class or domain, or one that the definition does not know.
    """
    splits = [_split_of(str(file)) for file in files]
    parts = len(set(splits)) > 1 and bool(definition.parts)
    taken: set[str] = set()
    for file, split in zip(files, splits):
        for domain, label, name, content in _rows(definition, mirror, file):
            folder = f"{domain}/{split}/{label}" if parts else f"{domain}/{label}"
            base = PurePosixPath((name or "").replace("\\", "/")).name
            plain = _PLAIN.fullmatch(base) and Path(base).suffix.lower() in IMAGE_SUFFIXES
            path = f"{folder}/{base}"
            if not plain or path in taken:
                path = f"{folder}/image-{len(taken):07}{image_suffix(content)}"
            taken.add(path)
            yield path, io.BytesIO(content)


def _rows(definition: DataSet, mirror: Mirror, file: Path) -> Iterator[tuple[str, str, str, bytes]]:
    """Yields domain, class, file name (may be empty) and content of every image."""
    from pyarrow import ArrowException, parquet

    columns = [mirror.image, mirror.label, mirror.domain]
    try:
        with parquet.ParquetFile(file) as opened:
            schema = opened.schema_arrow
            if missing := [name for name in columns if name not in schema.names]:
                raise DataError(
                    f"{file.name} has no column {first_names(missing)}; it has: "
                    f"{', '.join(schema.names)}. `--data huggingface` reads columns of any name: "
                    f"--set data.options.hub={mirror.name}."
                )
            label_of = _namer(definition.classes, schema, mirror.label, definition)
            domain_of = _namer(definition.domains, schema, mirror.domain, definition)
            batches = opened.iter_batches(batch_size=256, columns=columns)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            for row, cells in enumerate(rows):
                cell = cells[mirror.image]
                whole = cell if isinstance(cell, dict) else {"bytes": cell}
                image, name = whole.get("bytes"), whole.get("path") or ""
                try:
                    if not isinstance(image, bytes) or not image:
                        raise ValueError(f"has no {mirror.image}")
                    domain = domain_of(cells[mirror.domain])
                    label = label_of(cells[mirror.label])
                except ValueError as fault:
                    raise DataError(f"Row {row} of {file.name} {fault}.") from None
                yield domain, label, name, image
    except (OSError, ValueError, ArrowException) as error:
        raise DataError(f"Cannot read {file}: {textwrap.shorten(why(error), 200)}") from None


def _namer(
    names: tuple[str, ...], schema: Any, column: str, definition: DataSet
) -> Callable[[object], str]:
    """Returns a function from a cell to a name of the definition: by name, else by position."""
    classes = _class_names(schema, column)

    @cache
    def name_of(value: object) -> str:
        if classes and isinstance(value, int) and 0 <= value < len(classes):
            value = classes[value]
        text = str(int(value) if isinstance(value, bool) else "" if value is None else value)
        if not (text := text.strip()):
            raise ValueError(f"has no {column}")
        meaning = meant(definition, text)
        if meaning in names:
            return str(meaning)
        if names and text.isdecimal() and int(text) < len(names):
            return names[int(text)]
        if names or not _PLAIN.fullmatch(text):
            known = f"; there are: {first_names(names, 12)}" if names else ""
            raise ValueError(f"has {text[:80]!r} as {column}, which is no name of it{known}")
        return text

    return name_of


def _class_names(schema: Any, column: str) -> list[str]:
    """Returns the class names that the library ``datasets`` stores in a file's schema."""
    try:
        written = json.loads((schema.metadata or {})[b"huggingface"])
        return [str(name) for name in written["info"]["features"][column]["names"]]
    except (KeyError, TypeError, ValueError):
        return []
