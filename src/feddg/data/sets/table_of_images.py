"""The user's own table: a CSV file with path, class, domain and client of each image."""

import posixpath
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from pydantic import Field

from feddg.data import splits
from feddg.data.columns import FIRST, Columns, check_cells, read_columns
from feddg.data.data_set import define
from feddg.data.images import ImageTable, composed, listed_images, roles_of_domains
from feddg.data.published import needs_root
from feddg.errors import DataError
from feddg.settings import FixedPath, Settings
from feddg.storage import stamp

SUBGROUP = "subgroup "
"""What the option of a subgroup's column begins with, before its name."""
ROLES = {
    **{role: role for role in splits.ROLES},
    "training": "train",
    "valid": "val",
    "validation": "val",
    "testing": "test",
}


class ColumnOptions(Settings):
    """What the columns of a table are called, in ``data.options``."""

    path: str | None = Field(None, description="column of the images' files; by default path")
    label: str = Field("label", description="column of their classes")
    domain: str = Field("domain", description="column of their domains")
    client: str | None = Field(
        None,
        description="column of who holds them (patient, site, writer); by default client, where "
        "there is one",
    )
    group: str | None = Field(
        None,
        description="column of what is never split (patient, series, slide); by default group, "
        "where there is one",
    )
    split: str | None = Field(
        None,
        description="column of train, val or test (or id_val, id_test); by default split, where "
        "there is one",
    )
    subgroups: tuple[str, ...] = Field(
        (), description="further columns whose values results tell apart (scanner, sex, age band)"
    )

    @property
    def columns(self) -> dict[str, str]:
        """The columns by option, subgroups last."""
        named = self.model_dump(exclude={"subgroups", "images"})
        names = {option: name or option for option, name in named.items()}
        return names | {f"{SUBGROUP}{name}": name for name in self.subgroups}

    def required(self, always: Collection[str]) -> list[str]:
        """Returns the columns that must exist: those of some options, and those that were named."""
        return [
            name
            for option, name in self.columns.items()
            if option in always or getattr(self, option, name) is not None
        ]


class TableOptions(ColumnOptions):
    """The options of a table of images: names of columns, the folder of the images."""

    images: FixedPath | None = Field(
        None, description="folder that paths are relative to; by default that of the table"
    )


def list_table(root: Path | None, options: TableOptions) -> ImageTable:
    """Lists the images of a table, each with class and domain, optionally client and split.

    ``val`` and ``test`` of a domain that also trains are in-domain validation and test.

    Args:
        root: the table, which ends in ``.csv``, or a folder with ``table.csv``.
        options: names of its columns, and the folder of the images.

    Raises:
        DataError: a column is missing, or a row is wrong; the message names it.
    """
    file, name_of = needs_root("table", root), options.columns
    file = file / "table.csv" if file.is_dir() else file
    if file.suffix.lower() != ".csv":
        raise DataError(f"{file} is no table; a table ends in .csv.")
    table = read_columns(
        file,
        options.required(("path", "label", "domain")),
        name_of.values(),
        "Say what it is called: --set data.options.path=NAME, and label, domain, client, group, "
        "split so.",
    )
    folder = options.images or file.parent
    if not folder.is_dir():
        raise DataError(f"The folder of the images, {folder}, does not exist.")
    texts = {option: table[name] for option, name in name_of.items() if name in table}
    for option, cells in texts.items():
        check_cells(name_of[option], cells, table.row)
    return images_of_columns(
        texts,
        table.row,
        root=folder,
        paths=[_inside(table, index, text, folder) for index, text in enumerate(texts["path"])],
        listed_in=file.name,
        listed_rows=range(FIRST, FIRST + len(table)),
    )


def tidy_path(text: str, folder: Path) -> str:
    """Returns a path, perhaps of Windows, relative to a folder, without ``.`` and ``..`` inside."""
    path = PurePosixPath(text)
    if "\\" in text and stamp(folder / path) is None:
        path = PurePosixPath(PureWindowsPath(text).as_posix())  # written under Windows
    if path.is_absolute() and path.is_relative_to(folder):
        path = path.relative_to(folder)
    return posixpath.normpath(path)


def _inside(table: Columns, index: int, text: str, folder: Path) -> str:
    path, drive = PurePosixPath(tidy_path(text, folder)), PureWindowsPath(text).drive
    if not (path.is_absolute() or drive or path.parts[:1] in ((), ("..",))):
        return str(path)
    raise DataError(
        f"{table.row(index)} has the path {text!r}, which is not inside {folder}; write it "
        "relative to that folder, or name the one of all images: --set data.options.images=FOLDER."
    )


def roles_of_texts(texts: Sequence[str], row_at: Callable[[int], str]) -> list[str]:
    """Returns the roles that the cells of a split's column stand for, see :data:`ROLES`.

    Args:
        texts: the cells.
        row_at: returns what a row is called in messages.

    Raises:
        DataError: one is none; names its row.
    """
    roles = [ROLES.get(text.lower(), "") for text in texts]
    if "" in roles:
        place = roles.index("")
        raise DataError(
            f"{row_at(place)} has {texts[place]!r} as split; expected train, val or test (or "
            "id_val, id_test)."
        )
    return roles


def images_of_columns(
    columns: Mapping[str, Sequence[str]],
    row_at: Callable[[int], str] = str,
    **more: Any,
) -> ImageTable:
    """Returns the table of images that columns describe, in which splits may be spelt out.

    Args:
        columns: the cells by option, see :attr:`ColumnOptions.columns`.
        row_at: returns what a row is called in messages, if a split may be none.
        **more: see :func:`listed_images`.

    Raises:
        DataError: a split is none; names its row.
    """
    domains = [*map(composed, columns["domain"])]
    roles = roles_of_texts(columns.get("split", ()), row_at)
    return listed_images(
        labels=columns["label"],
        domains=domains,
        split=roles_of_domains(roles, domains) or None,
        clients=columns.get("client"),
        groups=columns.get("group"),
        subgroups={
            option.removeprefix(SUBGROUP): texts
            for option, texts in columns.items()
            if option.startswith(SUBGROUP)
        },
        **more,
    )


define("table", list_table, TableOptions)
