"""Hugging Face data sets, from the local disk or the hub."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field

from feddg.data.data_set import define
from feddg.data.images import ImageTable
from feddg.data.published import taken_images
from feddg.data.sets.table_of_images import ROLES, images_of_columns
from feddg.errors import DataError, nearest, need
from feddg.settings import Settings
from feddg.storage import why


class HuggingFaceOptions(Settings):
    """The options of a Hugging Face data set in ``data.options``."""

    hub: str | None = Field(None, description="its name on the hub, where root says no folder")
    config: str | None = Field(None, description="its configuration on the hub")
    revision: str | None = Field(None, description="a commit on the hub, so that it stays the same")
    split: str | None = Field(
        None, description="one of its splits; by default all: train, validation and test"
    )
    image: str = Field("image", description="column of the images")
    label: str = Field("label", description="column of their classes")
    domain: str = Field("domain", description="column of their domains")
    client: str | None = Field(None, description="column of who holds them (patient, site, writer)")


def list_hugging_face(root: Path | None, options: HuggingFaceOptions) -> ImageTable:
    """Lists the images of a Hugging Face data set, written into the cache once.

    ``validation`` and ``test`` of a domain that also trains are in-domain validation and test.

    Args:
        root: a folder that ``save_to_disk`` wrote; None for the hub.
        options: its name on the hub, and the names of its columns.

    Raises:
        DataError: the data set cannot be read, or lacks a column; a
            row has no image, label or domain.
    """
    if (root is None) == (options.hub is None):
        raise DataError(
            "The data source 'huggingface' needs either a folder (root) or a name on the hub "
            "(--set data.options.hub=NAME)."
        )
    parts = _chosen(_read(root, options), options.split)
    column_of = {"image": options.image, "label": options.label, "domain": options.domain}
    if options.client:
        column_of["client"] = options.client
    for part, part_rows in parts.items():
        for use, column in column_of.items():
            if column not in part_rows.column_names:
                raise DataError(
                    f"The split {part} has no column {column!r}"
                    f"{nearest(column, part_rows.column_names)}; it has: "
                    f"{', '.join(part_rows.column_names)}. Say what it is called: --set "
                    f"data.options.{use}=NAME."
                )
    fingerprints = [f"{part} {rows._fingerprint}" for part, rows in parts.items()]
    folder, paths = taken_images(
        ["huggingface 1", options.image, *fingerprints], lambda: _contents(parts, options.image)
    )
    columns = {
        use: [text for part, rows in parts.items() for text in _texts(part, rows, column)]
        for use, column in column_of.items()
        if use != "image"
    }
    if len(parts) > 1:
        columns["split"] = [part for part, rows in parts.items() for _ in range(len(rows))]
    return images_of_columns(
        columns,
        root=folder,
        paths=paths,
        listed_in="the data set",
        class_names=_class_names(next(iter(parts.values())), options.label, columns["label"]),
    )


def _read(root: Path | None, options: HuggingFaceOptions) -> object:
    need("huggingface", "the data source 'huggingface'")
    import datasets

    try:
        if root is not None:
            return datasets.load_from_disk(str(root))
        return datasets.load_dataset(options.hub, options.config, revision=options.revision)
    except Exception as error:  # it raises what its many parts raise
        text = " ".join(why(error).split())[:300]
        raise DataError(
            f"Cannot read the Hugging Face data set {root or options.hub}: {text}."
        ) from None


def _chosen(data_set: Any, split: str | None) -> dict[str, Any]:
    """Returns the splits to use, by name."""
    parts = dict(data_set) if isinstance(data_set, dict) else {"train": data_set}
    if split is not None:
        if split not in parts:
            raise DataError(
                f"There is no split {split!r}{nearest(split, parts)}; there are: "
                f"{', '.join(parts)}."
            )
        return {split: parts[split]}
    strange = [part for part in parts if part.lower() not in ROLES]
    if strange and len(parts) > 1:
        raise DataError(
            f"It has the splits {', '.join(parts)}: name one (--set data.options.split="
            f"{next(iter(parts))}), as {strange[0]} is neither train, validation nor test."
        )
    return parts


def _contents(parts: dict[str, Any], image: str) -> Iterator[tuple[str, bytes]]:
    import datasets

    for part, rows in parts.items():
        if isinstance(rows.features[image], datasets.Image):
            rows = rows.cast_column(image, datasets.Image(decode=False))
        for number, value in enumerate(rows.select_columns([image])):
            cell = value[image] if isinstance(value[image], dict) else {"bytes": value[image]}
            content = cell.get("bytes")
            if content is None and cell.get("path"):
                with suppress(OSError):
                    content = Path(cell["path"]).read_bytes()
            if not isinstance(content, bytes):
                raise DataError(f"row {number} of the split {part} has no image in {image!r}.")
            yield f"{part}/{number:07}", content


def _texts(part: str, rows: Any, column: str) -> list[str]:
    """Returns a column as texts; labels become class names if the data set has them."""
    import datasets

    feature = rows.features[column]
    values = rows.with_format(None)[column][:]
    named, texts = isinstance(feature, datasets.ClassLabel), []
    for number, value in enumerate(values):
        missing = value is None or value == "" or value != value  # NaN equals nothing
        if missing or (named and value == -1):
            raise DataError(f"row {number} of the split {part} has no {column}.")
        texts.append(str(feature.int2str(value) if named and isinstance(value, int) else value))
    return texts


def _class_names(rows: Any, label: str, labels: Sequence[str]) -> list[str]:
    """Returns the classes in the order of labels: the data set's own order, else sorted."""
    names = getattr(rows.features[label], "names", None)
    if names:  # of its first split; others may have more
        return [*names, *sorted(set(labels) - set(names))]
    present = sorted(set(labels))
    numbers = all(text.isdecimal() for text in present)
    return sorted(present, key=int) if numbers else present


define("huggingface", list_hugging_face, HuggingFaceOptions)
