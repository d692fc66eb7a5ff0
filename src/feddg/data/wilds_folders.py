"""Data sets of WILDS: a folder with ``metadata.csv``, and the images below it."""

from collections.abc import Collection
from pathlib import Path

from feddg.data.columns import Columns, read_columns
from feddg.data.images import check_folder, folder_names, plain_name
from feddg.errors import DataError

ROLES = ("train", "val", "test", "id_val", "id_test")
METADATA = "metadata.csv"


def holding(
    root: Path, files: Collection[str] = (METADATA,), around: Collection[str] = ()
) -> Path | None:
    """Returns the folder that holds one of the files: ``root``, or a known one inside it.

    Args:
        root: where to look.
        files: names, or patterns of names.
        around: names of folders that archives put around.

    Raises:
        DataError: there is no such folder.
    """
    check_folder(root)
    wrappers = {plain_name(name) for name in around}
    inside = [root / name for name in folder_names(root) if plain_name(name) in wrappers]
    deeper = [
        place / name
        for place in inside
        for name in folder_names(place)
        if plain_name(name) in wrappers
    ]
    for folder in (root, *inside, *deeper):
        if any(next(folder.glob(name), None) for name in files):
            return folder
    return None


def read_metadata(
    root: Path,
    title: str,
    around: Collection[str],
    wanted: Collection[str],
    optional: Collection[str] = (),
    files: Collection[str] = (METADATA,),
) -> Columns:
    """Reads the metadata of a data set of WILDS.

    Args:
        root: its folder, or one around it.
        title: its name, for messages.
        around: names that its folder has.
        wanted: columns that must be there.
        optional: columns that may be there.
        files: names of the metadata file, the first that is there.

    Raises:
        DataError: it is not there, or cannot be read.
    """
    folder = holding(root, files, around)
    if folder is None:
        there = ", ".join(sorted(path.name for path in root.iterdir())[:10]) or "nothing"
        raise DataError(
            f"{root} holds no {' or '.join(files)}, as {title} has it in "
            f"{' or '.join(dict.fromkeys(around))}. Found: {there}."
        )
    return read_columns(
        next(folder / name for name in files if (folder / name).is_file()), wanted, optional
    )


def check_images(root: Path, paths: Collection[str], listed_in: str) -> None:
    """Makes sure that a list and its images are beside each other, by a look at a few of them.

    Raises:
        DataError: none of the first is there.
    """
    first = list(paths)[:20]
    if first and not any((root / path).is_file() for path in first):
        raise DataError(
            f"{listed_in} lists images that are not there, the first as {root / first[0]}. Put the "
            "images there, or name another root."
        )


def roles(found: Columns, name: str = "split") -> list[str]:
    """Returns the column of roles.

    Raises:
        DataError: a row has none of WILDS' five.
    """
    for index, role in enumerate(found[name]):
        if role not in ROLES:
            raise DataError(
                f"{found.row(index)} has the split {role!r}; there are: {', '.join(ROLES)}."
            )
    return list(found[name])
