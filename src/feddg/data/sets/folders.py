"""Data sets that are folders of images by domain and class, and presets without a data set."""

from pathlib import Path

from feddg.data.data_set import ANY, DATA_SETS, SCRATCH, Loader, define
from feddg.data.images import ImageTable, from_folder
from feddg.data.protocols import official_roles
from feddg.data.published import load_published, needs_root


def list_folder(root: Path | None) -> ImageTable:
    """Object folder laid out as ``root/domain/class/image``.

    Raises:
        DataError: the folder is missing or empty.
    """
    return from_folder(needs_root(ANY, root))


def _reader_of(name: str) -> Loader:
    def load(root: Path | None, official_lists: bool = False) -> ImageTable:
        table = load_published(DATA_SETS[name], root)
        return official_roles(table, DATA_SETS[name]) if official_lists else table

    return load


define(ANY, list_folder)
for _preset in (SCRATCH, "strong", "fedig", "fedig_silos"):
    define(_preset)
for _name in ("pacs", "office_home", "vlcs", "office_caltech", "digits_dg", "fed_isic2019"):
    define(_name, _reader_of(_name))
