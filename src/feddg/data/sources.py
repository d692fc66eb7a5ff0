"""Where images come from: a data set's own function, found by name, gives an ``ImageTable``.

Another package adds one with ``@register_source("name")``, or without being imported first through
an entry point of the group ``feddg.sources``. Who knows more of a data set than its images
registers a whole :class:`feddg.data.data_set.DataSet`.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import ValidationError

from feddg.data.data_set import DATA_SETS, DataSet, Loader, from_loader, register_data_set
from feddg.data.images import ImageTable
from feddg.errors import DataError, nearest
from feddg.settings import DataSettings


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
    if definition.options is not None:
        options = checked_options(definition, options)
    if definition.load is None:
        raise DataError(f"The data set '{name}' cannot be read as a source: {definition.instead}.")
    folder = None if root is None else Path(root).expanduser()
    try:
        inspect.signature(definition.load).bind(folder, **options)
    except TypeError as error:
        raise DataError(f"The data source '{name}' cannot be used this way: {error}.") from None
    return definition.load(folder, **options)


def load_images_of(data: DataSettings) -> ImageTable:
    """Returns the images that an experiment's settings name; see :func:`load_source`."""
    return load_source(data.source, data.root, **data.options).without(data.leave_out)


def checked_options(definition: DataSet, said: Mapping[str, object]) -> dict[str, object]:
    """Returns all options of a data set, those that were not said by their defaults.

    Raises:
        DataError: an option is unknown or has no value that it takes.
    """
    assert definition.options is not None
    try:
        return dict(definition.options(**said))
    except ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(map(str, fault["loc"]))
        fields = definition.options.model_fields
        if fault["type"] == "extra_forbidden":
            raise DataError(
                f"the data set {definition.name!r} has no option {name!r}{nearest(name, fields)}; "
                f"there are: {', '.join(fields)}"
            ) from None
        raise DataError(f"data.options.{name}: {fault['msg']} (got {fault['input']!r})") from None
