"""Data sets by name: where their images come from, and the experiment they were published with."""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from feddg.data.augment import GENERAL_AUGMENTATIONS, AugmentSettings
from feddg.data.decoding import require_own_names
from feddg.data.groups import with_groups
from feddg.data.images import ImageTable
from feddg.errors import DataError, ExperimentError, FeddgError, nearest, schema_faults
from feddg.registry import Registry
from feddg.settings import DataSettings, Settings
from feddg.storage import read_fields_of

Loader = Callable[..., ImageTable]
Options = TypeVar("Options", bound=Settings)
ANY = "folder"
"""The data set whose preset is used for data sets without a preset of their own."""
SCRATCH = "scratch"
"""The preset for training from scratch: it replaces values of a preset for pretrained weights."""


@dataclass(frozen=True, kw_only=True)
class PublishedFile:
    """One downloadable file of a data set.

    Attributes:
        address: its http or https address.
        name: its file name here; the ending tells the kind of archive.
        bytes: its size as published; 0 if unknown.
        checksum: ``md5:...`` or ``sha256:...`` as published; empty if none is.
        unpack: whether it is an archive that must be unpacked.
        into: folder to unpack into, below the data set's folder.
    """

    address: str
    name: str
    bytes: int = 0
    checksum: str = ""
    unpack: bool = True
    into: str = ""


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """A copy on the Hugging Face hub: Parquet files with a row for every image.

    Attributes:
        name: the repository, ``owner/name``.
        revision: the branch, tag or commit to take.
        image: the column of images.
        label: the column of classes: names, or positions in ``DataSet.classes``.
        domain: the column of domains: names, or positions in ``DataSet.domains``.
    """

    name: str
    revision: str = "main"
    image: str = "image"
    label: str = "label"
    domain: str = "domain"


@dataclass(frozen=True, kw_only=True)
class Publication:
    """Where a data set comes from.

    Attributes:
        citation: authors, title, venue and year.
        address: the official page or file.
        licence: what its owners allow; empty if they do not say.
        files: what ``feddg data get`` downloads; empty if the data set must be requested.
        down: the date since which the host of the files has not answered; empty if it answers.
        mirror: the copy to take if there are no files, or their host is down.
        steps: how a person gets the data set where a program may not, one step each.
    """

    citation: str
    address: str = ""
    licence: str = ""
    files: tuple[PublishedFile, ...] = ()
    down: str = ""
    mirror: Mirror | None = None
    steps: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """The definition of one data set; all fields but the first two are optional.

    Attributes:
        name: its name in ``data.source`` and ``preset``.
        summary: one line.
        load: lists the images: ``(root, options) -> ImageTable``, ``root`` a folder or None. None
            for a protocol without images of its own.
        options: the settings in ``data.options``, passed to ``load`` after ``root``. None if it
            takes none, or checks keywords itself.
        instead: what to do if there is no ``load``, as the end of a sentence.
        preset: values of an experiment's fields; None for those of ``folder``. ``preset`` in an
            experiment selects them whatever the source; methods may add presets of their own.
        default: the preset of an experiment that names none; its own by default.
        domains: the domains in order, so that a plan can be made without the images.
        validated_by: for each test domain, the domain that validates if two are held out; None for
            the next in the list.
        augmentation: its own augmentation, which ``train.augmentation`` finds under the data set's
            name.
        classes: the classes in the order of their labels, as published.
        class_count: the number of classes, if they are not all named here.
        counts: images of each domain as published; a copy with other counts gets a warning.
        split_counts: images of each official split, by role (``train``, ``val``, ``test``,
            ``id_val``, ``id_test``). The loader gives each image's role in ``ImageTable.split``,
            and an experiment that holds nothing out uses it.
        publication: citation, licence and download.
        spellings: other names of the folders of domains and classes, with the names used here.
        parts: folders that some archives have between domain and class, with the role of their
            images (``train``, ``id_val``, ``id_test``; empty for none).
        lists: files of an official split, ``{domain}`` standing for a domain, by role (``train``,
            ``id_val``, ``id_test``); read if ``data.options`` has ``official_lists: true``.
        layouts: the folder layouts that are recognised, one line each.
        protocol: how papers use it, in one line; the preset follows it.
        clients: who holds an image in reality (such as a hospital), in a word or two; empty if
            unknown.
        alike: why images of different domains may be near copies of each other, as a sentence. Such
            pairs are a note, not a warning, and images that come from no files are searched, too
            (others are not: line drawings such as digits are too much alike).
    """

    name: str
    summary: str
    load: Loader | None = None
    options: type[Settings] | None = None
    instead: str = ""
    preset: Mapping[str, Any] | None = None
    default: str = ""
    domains: tuple[str, ...] = ()
    validated_by: Mapping[str, str] = field(default_factory=dict)
    augmentation: AugmentSettings | None = None
    classes: tuple[str, ...] = ()
    class_count: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    split_counts: Mapping[str, int] = field(default_factory=dict)
    publication: Publication | None = None
    spellings: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    lists: Mapping[str, str] = field(default_factory=dict)
    layouts: tuple[str, ...] = ()
    protocol: str = ""
    clients: str = ""
    alike: str = ""

    def __post_init__(self) -> None:
        if self.load is None and not self.instead:
            raise DataError(f"data set {self.name!r} has no load: say what to do instead")

    @property
    def title(self) -> str:
        """The name as papers spell it: the beginning of the summary."""
        return self.summary.partition(" (")[0].partition(":")[0]


def _adopt(name: str, loaded: Any) -> DataSet:
    definition = from_loader(name, loaded) if callable(loaded) else loaded
    if not isinstance(definition, DataSet):
        kind = type(loaded).__name__
        raise DataError(f"a data set is a DataSet or a function from a root to images, not {kind}")
    if definition.name != name:
        raise DataError(f"its entry point must be called {definition.name!r} as it is itself")
    return definition


DATA_SETS: Registry[DataSet] = Registry(
    "data set", "feddg.data.sets", group="feddg.sources", error=DataError, adopt=_adopt
)
"""All data sets, including those without images."""


register_data_set = DATA_SETS.register
"""Registers a data set: as a source, a preset, and an augmentation if it has its own."""


def define(name: str, load: Loader | None = None, options: type[Settings] | None = None) -> DataSet:
    """Registers a built-in data set; its other fields are in ``sets/definitions.yaml``.

    Args:
        name: the data set's name.
        load: see :class:`DataSet`.
        options: see :class:`DataSet`.
    """
    fields = {**_definitions()[name], "name": name, "load": load, "options": options}
    return register_data_set(TypeAdapter(DataSet).validate_python(fields))


@cache
def _definitions() -> dict[str, Any]:
    file = Path(__file__).parent / "sets" / "definitions.yaml"
    return read_fields_of(file, "The list of data sets", DataError)


def from_loader(name: str, load: Loader) -> DataSet:
    """Returns the definition of a data set of which only the loader is known."""
    first_line = (inspect.getdoc(load) or "").partition("\n")[0]
    return DataSet(name=name, summary=first_line, load=load)


def presets() -> dict[str, Mapping[str, Any]]:
    """Returns the presets: experiment values by the name of their data set or protocol."""
    return {name: entry.preset for name, entry in DATA_SETS.items() if entry.preset is not None}


def expects_weights(preset: str) -> bool:
    """Returns whether a preset is meant for a pretrained network."""
    return (presets().get(preset) or {}).get("model", {}).get("weights") is not None


def preset_of(source: str) -> str:
    """Returns the preset that a source has by default."""
    default = DATA_SETS[source].default if source in DATA_SETS else ""
    return default or (source if source in presets() else ANY)


def augmentations() -> dict[str, AugmentSettings]:
    """Returns all augmentations by name: the general ones and those of data sets."""
    added = {name: entry.augmentation for name, entry in DATA_SETS.items() if entry.augmentation}
    return {**GENERAL_AUGMENTATIONS, **added}


def find_augmentation(name: str | Mapping[str, Any]) -> AugmentSettings:
    """Returns the augmentation called ``name``, or that of its fields.

    Raises:
        ExperimentError: there is none; the message names the nearest and lists all. Or a field is
            unknown or out of range.
    """
    if isinstance(name, Mapping):
        with schema_faults(ExperimentError, "train.augmentation: ", AugmentSettings.model_fields):
            return AugmentSettings(**name)
    known = augmentations()
    if name not in known:
        raise ExperimentError(
            f"unknown augmentation {name!r}{nearest(name, known)}; there are: {', '.join(known)}"
        )
    return known[name]


# Where images come from: a data set's own function, found by name, gives an ``ImageTable``.
#
# Another package adds one with ``@register_source("name")``, or without being imported first
# through an entry point of the group ``feddg.sources``. Who knows more of a data set than its
# images registers a whole :class:`feddg.data.data_set.DataSet`.


def register_source(name: str) -> Callable[[Loader], Loader]:
    """Registers the decorated function ``(root, **options) -> ImageTable`` under ``name``.

    Raises:
        DataError: another data set already has this name.
    """

    def register(load: Loader) -> Loader:
        register_data_set(from_loader(name, load))
        return load

    return register


def load_source(name: str, root: Path | str | None = None, **options: object) -> ImageTable:
    """Returns the images of a data set.

    Args:
        name: a data set that has images.
        root: the folder of the images, if the data set needs one.
        **options: options of the data set's own function.

    Raises:
        DataError: the name or an option is unknown, the data set has no images of its own, or they
            cannot be listed, or told apart by their paths.
    """
    definition = DATA_SETS.find(name)
    if definition.load is None:
        raise DataError(f"The data set '{name}' cannot be read as a source: {definition.instead}.")
    folder = None if root is None else Path(os.path.expanduser(root))
    if definition.options is not None:
        table = definition.load(folder, checked_options(name, definition.options, options))
        return require_own_names(table, str(folder or name))
    try:
        inspect.signature(definition.load).bind(folder, **options)
    except TypeError as error:
        raise DataError(f"The data source '{name}' cannot be used this way: {error}.") from None
    return require_own_names(definition.load(folder, **options), str(folder or name))


def load_images_of(data: DataSettings) -> ImageTable:
    """Returns the images of an experiment's data settings, with groups; see :func:`load_source`.

    Raises:
        DataError: see there; or rows have another number of features than the experiment says.
    """
    table = load_source(data.source, data.root, **data.all_options).without(data.leave_out)
    width = 0 if table.images is None else table.images.shape[1]
    if data.features not in (None, width):
        raise DataError(
            f"{data.root}: a row has {width} features, and data.features is {data.features}; "
            "leave it out."
        )
    return with_groups(table, data.group_by)


def checked_options(
    name: str,
    options: type[Options],
    given: Mapping[str, object],
    fault: type[FeddgError] = DataError,
) -> Options:
    """Returns all options of a data set, with defaults for those not given.

    Raises:
        fault: an option is unknown or its value is not allowed.
    """
    with schema_faults(fault, f"data set {name!r}, data.options: ", options.model_fields):
        return options(**given)
