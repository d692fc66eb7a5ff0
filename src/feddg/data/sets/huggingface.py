"""Hugging Face data sets, from the local disk or the hub."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from feddg.data.data_set import define
from feddg.data.images import ImageTable, listed_images, roles_of_domains
from feddg.data.published import taken_images
from feddg.errors import DataError, nearest, need
from feddg.settings import Settings
from feddg.storage import why

ROW = "feddg row"
"""Column with the original row number, to find a partition's rows again."""
ROLES = {"train": "train", "validation": "val", "valid": "val", "val": "val", "test": "test"}


class Partitioner(Protocol):
    """The interface of flwr-datasets' partitioners that is used here."""

    dataset: Any
    """The whole data set; set once."""

    @property
    def num_partitions(self) -> int:
        """Returns the number of partitions."""

    def load_partition(self, partition_id: int) -> Any:
        """Returns the part of the data set that a client holds."""


def clients_of(partitioner: Partitioner, whole: Any) -> list[str]:
    """Returns the client of each row of a data set: the partition's number, as text.

    Args:
        partitioner: any new object with the interface of flwr-datasets' partitioners.
        whole: a ``datasets.Dataset``.

    Raises:
        DataError: a row is in none of the partitions, or in two.
    """
    partitioner.dataset = whole.add_column(ROW, list(range(len(whole))))
    owners: dict[int, int] = {}
    for client in range(partitioner.num_partitions):
        for row in partitioner.load_partition(client)[ROW][:]:
            if owners.setdefault(row, client) != client:
                raise DataError(
                    f"The partitioner gives row {row} to the clients {owners[row]} and {client}."
                )
    left = next((row for row in range(len(whole)) if row not in owners), None)
    if left is not None:
        raise DataError(f"The partitioner gives row {left} to nobody.")
    width = len(str(partitioner.num_partitions - 1))
    return [f"{owners[row]:0{width}}" for row in range(len(whole))]


def clients_by_name(settings: Mapping[str, Any], whole: Any) -> list[str]:
    """Returns the client of each row, by a partitioner of flwr-datasets.

    Args:
        settings: the partitioner's name and arguments.
        whole: a ``datasets.Dataset``.

    Raises:
        MissingPackage: flwr-datasets is not installed.
        DataError: the partitioner does not accept these arguments.
    """
    need("partitioners", "data.options.partitioner")
    from flwr_datasets import partitioner as module

    # Only what is one of them: an experiment's file must not name any other code.
    names = [
        name for name in getattr(module, "__all__", dir(module)) if name.endswith("Partitioner")
    ]
    name = str(settings.get("name", ""))
    if name not in names:
        raise DataError(
            f"data.options.partitioner: unknown partitioner {name!r}{nearest(name, names)}; there "
            f"are: {', '.join(names)}"
        )
    try:
        made = getattr(module, name)(
            **{key: value for key, value in settings.items() if key != "name"}
        )
        return clients_of(made, whole)
    except DataError:
        raise
    except Exception as error:  # each says in its own way what it lacks
        raise DataError(f"data.options.partitioner: {name} cannot be used so: {error}.") from None


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
    partitioner: dict[str, Any] | None = Field(
        None,
        description="a partitioner of flwr-datasets that says who holds them: its name, and what "
        "it takes ({name: DirichletPartitioner, num_partitions: 10, ...})",
    )


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
    for part, found in parts.items():
        for use, column in column_of.items():
            if column not in found.column_names:
                raise DataError(
                    f"The split {part} has no column {column!r}"
                    f"{nearest(column, found.column_names)}; it has: "
                    f"{', '.join(found.column_names)}. Say what it is called: --set "
                    f"data.options.{use}=NAME."
                )
    fingerprints = [f"{part} {found._fingerprint}" for part, found in parts.items()]
    folder, paths = taken_images(
        ["huggingface 1", options.image, *fingerprints], lambda: _contents(parts, options.image)
    )
    columns = {
        use: [text for part, found in parts.items() for text in _texts(part, found, column)]
        for use, column in column_of.items()
        if use != "image"
    }
    clients: Sequence[str] | None = columns.get("client")
    if options.partitioner is not None:
        # As in Flower, every split is partitioned by itself, and client 0 is the same in all.
        clients = [
            name for found in parts.values() for name in clients_by_name(options.partitioner, found)
        ]
    split = None
    if len(parts) > 1:
        roles = [ROLES[part] for part, found in parts.items() for _ in range(len(found))]
        split = roles_of_domains(roles, columns["domain"])
    return listed_images(
        folder,
        paths,
        columns["label"],
        columns["domain"],
        listed_in="the data set",
        split=split,
        clients=clients,
        class_names=_class_names(next(iter(parts.values())), options.label, columns["label"]),
    )


def _read(root: Path | None, options: HuggingFaceOptions) -> Any:
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


def _chosen(found: Any, split: str | None) -> dict[str, Any]:
    """Returns the splits to use, by name."""
    parts = dict(found) if isinstance(found, dict) else {"train": found}
    if split is not None:
        if split not in parts:
            raise DataError(
                f"There is no split {split!r}{nearest(split, parts)}; there are: "
                f"{', '.join(parts)}."
            )
        return {split: parts[split]}
    strange = [part for part in parts if part not in ROLES]
    if strange and len(parts) > 1:
        raise DataError(
            f"It has the splits {', '.join(parts)}: name one (--set data.options.split="
            f"{next(iter(parts))}), as {strange[0]} is neither train, validation nor test."
        )
    return parts


def _contents(parts: dict[str, Any], image: str) -> Iterator[tuple[str, bytes]]:
    import datasets

    for part, found in parts.items():
        if isinstance(found.features[image], datasets.Image):
            found = found.cast_column(image, datasets.Image(decode=False))
        for number, value in enumerate(found.select_columns([image])):
            cell = value[image]
            content = cell.get("bytes") if isinstance(cell, dict) else cell
            if content is None and isinstance(cell, dict) and cell.get("path"):
                try:
                    content = Path(cell["path"]).read_bytes()
                except OSError:
                    content = None
            if not isinstance(content, bytes):
                raise DataError(f"row {number} of the split {part} has no image in {image!r}.")
            yield f"{part}/{number:07}", content


def _texts(part: str, found: Any, column: str) -> list[str]:
    """Returns a column as texts; labels become class names if the data set has them."""
    import datasets

    feature = found.features[column]
    values = found.with_format(None)[column][:]
    texts = []
    for number, value in enumerate(values):
        unlabelled = value == -1 and isinstance(feature, datasets.ClassLabel)
        if value is None or value == "" or unlabelled:
            raise DataError(f"row {number} of the split {part} has no {column}.")
        named = isinstance(feature, datasets.ClassLabel) and isinstance(value, int)
        texts.append(str(feature.int2str(value) if named else value))
    return texts


def _class_names(found: Any, label: str, labels: Sequence[str]) -> list[str]:
    """Returns the classes in the order of labels: the data set's own order, else sorted."""
    names = getattr(found.features[label], "names", None)
    if names:
        return [str(name) for name in names]
    present = sorted(set(labels))
    numbers = all(text.isdecimal() for text in present)
    return sorted(present, key=int) if numbers else present


define("huggingface", list_hugging_face, HuggingFaceOptions)
