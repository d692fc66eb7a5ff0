"""Where images come from: a data set's own function, found by name, gives an ``ImageTable``.

Another package adds one with ``@register_source("name")``, or without being imported first through
an entry point of the group ``feddg.sources``. Who knows more of a data set than its images
registers a whole :class:`feddg.data.data_set.DataSet`.
"""

import inspect
from collections.abc import Callable
from pathlib import Path

from feddg.data.data_set import DATA_SETS, Loader, from_loader, register_data_set
from feddg.data.images import ImageTable
from feddg.errors import DataError


def register_source(name: str) -> Callable[[Loader], Loader]:
    """Registers the decorated function ``(root, **options) -> ImageTable`` under ``name``.

    Raises:
        DataError: another data set already has this name.
    """

    def register(load: Loader) -> Loader:
        register_data_set(from_loader(name, load))
        return load

    return register


def source_names() -> list[str]:
    """Returns the names of the data sets that have images, sorted; other packages' included."""
    return sorted(name for name, definition in DATA_SETS.items() if definition.load is not None)


def load_source(name: str, root: Path | str | None = None, **options: object) -> ImageTable:
    """Returns the images of a data set.

    Args:
        name: one of ``source_names()``.
        root: the folder of the images, where the data set needs one.
        **options: what the data set's function itself takes.

    Raises:
        DataError: the name or an option is unknown, the data set has no images of its own, or they
            cannot be listed.
    """
    definition = DATA_SETS.find(name)
    if definition.load is None:
        raise DataError(f"The data set '{name}' cannot be read as a source: {definition.instead}.")
    folder = None if root is None else Path(root).expanduser()
    try:
        inspect.signature(definition.load).bind(folder, **options)
    except TypeError as error:
        raise DataError(f"The data source '{name}' cannot be used this way: {error}.") from None
    return definition.load(folder, **options)
