"""FEMNIST from LEAF's files: handwritten digits and letters of 3,550 writers, each a domain."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from feddg.data.data_set import DataSet, define
from feddg.data.images import (
    ImageTable,
    folder_names,
    from_folder,
    listed_images,
    positions,
    roles_of_domains,
)
from feddg.data.published import (
    ROLES,
    Drawn,
    compare_counts,
    folder_of,
    kept_drawn,
    published_root,
    read_metadata,
    rename,
    rendered_table,
)
from feddg.diagnostics import Diagnostic, emit
from feddg.errors import DataError, field_fault
from feddg.storage import open_file, why

SIDE = 28
TABLES = ("metadata.csv", "femnist_new_metadata.csv")
JSONS = ("all_data/*.json", "train/*.json", "test/*.json", "*.json")


class _Samples(BaseModel):
    model_config = ConfigDict(extra="ignore")
    x: list[list[float]]
    y: list[int]


class _Content(BaseModel):
    """The content of a file; other fields, such as ``num_samples``, are not needed."""

    model_config = ConfigDict(extra="ignore")
    users: list[str]
    user_data: dict[str, _Samples]


def list_leaf(folder: Path, definition: DataSet) -> ImageTable:
    """Reads images of 28 x 28 grey pixels; exact duplicates of a writer are used once.

    Args:
        folder: contains ``train`` and ``test``, or ``all_data``, or the files themselves.
        definition: gives the classes.

    Returns:
        A table whose domains and clients are the writers. Images in ``test`` are ``id_test`` if
        their writer also trains, else ``test``.

    Raises:
        DataError: there are no files, or one has another format.
    """
    parts = {name: sorted((folder / name).glob("*.json")) for name in ("train", "test")}
    if not parts["train"]:
        whole = sorted((folder / "all_data").glob("*.json")) or sorted(folder.glob("*.json"))
        parts = {"train": whole, "test": []}
    if not parts["train"]:
        raise DataError(f"{folder} holds no JSON files to train on: LEAF's are in train/.")
    count = len(definition.classes)
    grey, records = kept_drawn(
        [*parts["train"], *parts["test"]],
        "leaf 1",
        lambda: _read(parts["train"], parts["test"], count),
    )
    writers = records["writer"]
    names = tuple(np.unique(writers).tolist())
    labels = records["label"].astype(np.int64)
    roles = ["test" if tests else "train" for tests in records["tests"].tolist()]
    split = np.array(roles_of_domains(roles, writers.tolist())) if parts["test"] else None
    domains = positions(writers.tolist(), names)
    clients = np.array(writers)
    return rendered_table(grey, labels, domains, definition.classes, names, split, clients)


def _read(train: list[Path], test: list[Path], classes: int) -> Drawn:
    images: list[np.ndarray] = []
    records: list[tuple[str, int, bool]] = []
    seen: set[bytes] = set()
    twice = 0
    for tests, files in ((False, train), (True, test)):
        for file in files:
            for writer, label, image in _samples(file, classes):
                about = f"{writer}\0{label}\0".encode()
                key = hashlib.blake2b(about + image.tobytes(), digest_size=16).digest()
                if key in seen:
                    twice += 1
                    continue
                seen.add(key)
                images.append(image)
                records.append((writer, label, tests))
    if twice:
        text = f"{twice} images are stored twice, as LEAF does; each is used once."
        emit(Diagnostic("images-left-out", "warning", text))
    if not images:
        raise DataError("The JSON files hold no images.")
    longest = max(len(writer) for writer, _, _ in records)
    form = [("writer", f"U{longest or 1}"), ("label", "i8"), ("tests", "?")]
    return np.stack(images), np.array(records, dtype=form)


def _samples(file: Path, classes: int) -> Iterator[tuple[str, int, np.ndarray]]:
    try:
        with open_file(file) as opened:
            content = _Content.model_validate_json(opened.read())
    except OSError as error:
        raise DataError(f"Cannot read {file}: {why(error)}.") from None
    except ValidationError as error:
        raise DataError(
            f"{file} is no file of LEAF's: {field_fault(error)[:300]}. Expected users, and in "
            "user_data for each of them x (784 numbers an image) and y."
        ) from None
    for user in content.users:
        samples = content.user_data.get(user)
        if samples is None or len(samples.x) != len(samples.y):
            raise DataError(f"{file}: the images and labels of user {user!r} do not match.")
        for number, (pixels, label) in enumerate(zip(samples.x, samples.y)):
            grey = np.array(pixels)
            fits = grey.shape == (SIDE * SIDE,) and bool(((grey >= 0) & (grey <= 1)).all())
            if not fits or not 0 <= label < classes:
                raise DataError(
                    f"{file}: image {number} of user {user!r} is not {SIDE * SIDE} numbers from 0 "
                    f"to 1 with a label from 0 to {classes - 1}."
                )
            yield user, label, np.round(grey * 255).astype(np.uint8).reshape(SIDE, SIDE)


def list_femnist(root: Path | None) -> ImageTable:
    """FEMNIST as LEAF's JSON files, as WILDS' folder with ``metadata.csv``, or from the mirror.

    The mirror's images lie in ``writer/class``. LEAF stores the first image of nearly every writer
    twice: it is used once. If its files are split, test images of a writer that also trains are
    in-domain test, those of other writers test.

    Raises:
        DataError: none of these exists, or a file has another format.
    """
    folder = published_root(FEMNIST, root)
    writers = folder_names(folder)
    if writers and set(folder_names(folder / writers[0])) & set(FEMNIST.classes):
        table = rename(from_folder(folder), FEMNIST)
        return replace(table, clients=np.array(table.domain_names)[table.domains])
    if folder_of(FEMNIST, root, lambda folder: any((folder / f).is_file() for f in TABLES)):
        table = _listed(root)
    else:
        home = folder_of(FEMNIST, root, lambda folder: any(any(folder.glob(f)) for f in JSONS))
        if home is None:
            raise DataError(
                f"{root} holds neither LEAF's JSON files (all_data/, or train/ and test/) nor "
                f"{' or '.join(TABLES)}."
            )
        table = list_leaf(home, FEMNIST)
    compare_counts(FEMNIST, table)
    return table


def _listed(root: Path | None) -> ImageTable:
    wanted, optional = ("path", "split", "y", "domain_remapped"), ("domain",)
    found = read_metadata(FEMNIST, root, wanted, optional, TABLES)
    numbers = found.numbers("domain_remapped")
    writers = found["domain"] if "domain" in found else [f"writer_{number}" for number in numbers]
    by_number = dict(sorted(zip(numbers, writers)))
    return listed_images(
        found.file.parent,
        found["path"],
        [FEMNIST.classes[label] for label in found.numbers("y", len(FEMNIST.classes))],
        writers,
        listed_in=found.file.name,
        split=found.check("split", ROLES),
        clients=writers,
        class_names=FEMNIST.classes,
        domain_names=list(dict.fromkeys([*by_number.values(), *writers])),
    )


FEMNIST = define("femnist", list_femnist)
