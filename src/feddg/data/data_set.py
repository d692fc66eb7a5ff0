"""Data sets by name: where the images come from, and the experiment they are published with."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from feddg.data.augment import GENERAL_AUGMENTATIONS, AugmentSettings
from feddg.data.images import ImageTable
from feddg.errors import DataError, ExperimentError, field_fault, nearest
from feddg.registry import Registry
from feddg.settings import DataSettings, Settings
from feddg.storage import read_fields_of

Loader = Callable[..., ImageTable]
ANY = "folder"
"""The data set whose preset serves all that have none of their own."""
SCRATCH = "scratch"
"""The preset laid over one with pretrained weights where an experiment has none."""


@dataclass(frozen=True, kw_only=True)
class PublishedFile:
    """A file that a data set is published as.

    Attributes:
        address: where it is, by http or https.
        name: what it is called here; it ends in the kind of archive it is.
        bytes: its size as published; 0 where that is not known.
        checksum: ``md5:...`` or ``sha256:...`` as published; empty where none is.
        unpack: whether it is an archive of what is wanted.
        into: folder that its content goes to, below that of the data set.
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
        name: of its repository, ``owner/name``.
        revision: the branch, tag or commit that is taken.
        image: its column of images.
        label: its column of classes, names or their positions in ``DataSet.classes``.
        domain: its column of domains, the same.
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
        citation: authors, title, where and when.
        address: the official page or file.
        licence: what its owners allow; empty where they do not say.
        files: what ``feddg data get`` downloads; none where it has to be asked for.
        down: since when the host of the files has not answered; empty where it does.
        mirror: what is taken where there are no files, or their host is down.
        steps: how a person gets it where a program may not, a step each.
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
    """All that is particular to one data set; every field but the first two is optional.

    Attributes:
        name: what ``data.source`` and ``preset`` call it.
        summary: one line.
        load: lists the images: ``(root, options) -> ImageTable``, ``root`` a folder or None. None
            for a protocol without images of its own.
        options: what ``data.options`` may say, as ``load`` takes it beside ``root``. None where it
            takes nothing, or keywords that it checks for itself.
        instead: what to do where there is no ``load``, as the end of a sentence.
        preset: values of an experiment's fields; None for those of ``folder``. It is what
            ``preset`` names, whatever the source, and methods may have presets beside it.
        domains: in their order, so that a plan can be read where the images are not.
        validated_by: for each domain, the one that validates while it is tested and two are held
            out; none for the next in the list.
        augmentation: its own; ``train.augmentation`` finds it under the data set's name.
        classes: in the order of their labels, as published.
        class_count: how many there are, where they are not all named here.
        counts: images of each domain as published; a copy that differs is worth a warning.
        split_counts: images of each official split, by role (``train``, ``val``, ``test``,
            ``id_val``, ``id_test``). The loader gives each image's role in ``ImageTable.split``,
            and an experiment that holds nothing out uses it.
        publication: whom to cite, and what is allowed.
        around: names of folders that archives put around the images.
        spellings: further names that folders of domains and classes have, with those used here.
        parts: folders that some archives have between domain and class, with the role of their
            images (``train``, ``id_val``, ``id_test``; empty for none).
        layouts: the folders it is known to come as, a line each.
        protocol: one line: how papers use it, which the preset follows.
        clients: who really holds an image, in a word or two; empty where nobody knows.
    """

    name: str
    summary: str
    load: Loader | None = None
    options: type[Settings] | None = None
    instead: str = ""
    preset: Mapping[str, Any] | None = None
    domains: tuple[str, ...] = ()
    validated_by: Mapping[str, str] = field(default_factory=dict)
    augmentation: AugmentSettings | None = None
    classes: tuple[str, ...] = ()
    class_count: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    split_counts: Mapping[str, int] = field(default_factory=dict)
    publication: Publication | None = None
    around: tuple[str, ...] = ()
    spellings: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    layouts: tuple[str, ...] = ()
    protocol: str = ""
    clients: str = ""

    def __post_init__(self) -> None:
        if self.load is None and not self.instead:
            raise DataError(f"data set {self.name!r} has no load: say what to do instead")
        if self.validated_by and not (
            set(self.validated_by) == set(self.domains) >= set(self.validated_by.values())
            and all(test != val for test, val in self.validated_by.items())
        ):
            raise DataError(
                f"data set {self.name!r}: validated_by must name, for each of its domains, another"
            )
        if self.counts and set(self.counts) != set(self.domains):
            raise DataError(f"data set {self.name!r}: counts must be by its domains")

    @property
    def title(self) -> str:
        """Its name as papers spell it: how the summary begins."""
        return self.summary.partition(" (")[0].partition(":")[0]

    @property
    def number_of_classes(self) -> int:
        """Classes as published; 0 where that is not known."""
        return self.class_count or len(self.classes)

    @property
    def defined_by(self) -> Loader | None:
        """What tells it from another definition of the same name."""
        return self.load


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
"""All data sets, those without images included."""


def register_data_set(definition: DataSet) -> DataSet:
    """Makes a data set known: as a source, a preset, and an augmentation if it has its own.

    Raises:
        DataError: another data set has the name.
    """
    return DATA_SETS.add(definition.name, definition)


def define(name: str, load: Loader | None = None, options: type[Settings] | None = None) -> DataSet:
    """Registers one of our own data sets, of which ``sets/definitions.yaml`` says the rest.

    Args:
        name: what it is called.
        load: see :class:`DataSet`, as the next.
        options: what ``data.options`` may say.
    """
    fields = {**_definitions()[name], "name": name, "load": load, "options": options}
    return register_data_set(TypeAdapter(DataSet).validate_python(fields))


@cache
def _definitions() -> dict[str, Any]:
    file = Path(__file__).parent / "sets" / "definitions.yaml"
    return read_fields_of(file, "The list of data sets", DataError)


def from_loader(name: str, load: Loader) -> DataSet:
    """Returns a data set of which nothing is known but its images."""
    first_line = (inspect.getdoc(load) or "").partition("\n")[0]
    return DataSet(name=name, summary=first_line, load=load)


def presets() -> dict[str, Mapping[str, Any]]:
    """Returns experiment values by the name of their data set or protocol."""
    return {name: one.preset for name, one in DATA_SETS.items() if one.preset is not None}


def expects_weights(preset: str) -> bool:
    """Whether a preset's values are meant for a pretrained network."""
    return (presets().get(preset) or {}).get("model", {}).get("weights") is not None


def preset_of(source: str) -> str:
    """Returns the preset that a source has unless another is named."""
    return source if source in presets() else ANY


def augmentations() -> dict[str, AugmentSettings]:
    """Returns all augmentations by name: the general ones and those of data sets.

    Raises:
        ExperimentError: a data set's own has the name of a general one.
    """
    own = {name: one.augmentation for name, one in DATA_SETS.items() if one.augmentation}
    for name in own.keys() & GENERAL_AUGMENTATIONS.keys():
        raise ExperimentError(
            f"the data set {name!r} has an augmentation, and a general one is called the same; "
            "rename one"
        )
    return {**GENERAL_AUGMENTATIONS, **own}


def find_augmentation(name: str) -> AugmentSettings:
    """Returns the augmentation called ``name``.

    Raises:
        ExperimentError: there is none; names the nearest, and all.
    """
    found = augmentations()
    if name not in found:
        raise ExperimentError(
            f"unknown augmentation {name!r}{nearest(name, found)}; there are: {', '.join(found)}"
        )
    return found[name]


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
        name: of a data set that has images.
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
    if definition.options is not None:
        return definition.load(folder, checked_options(definition, options))
    try:
        inspect.signature(definition.load).bind(folder, **options)
    except TypeError as error:
        raise DataError(f"The data source '{name}' cannot be used this way: {error}.") from None
    return definition.load(folder, **options)


def load_images_of(data: DataSettings) -> ImageTable:
    """Returns the images that an experiment's settings name; see :func:`load_source`."""
    return load_source(data.source, data.root, **data.options).without(data.leave_out)


def checked_options(definition: DataSet, given: Mapping[str, object]) -> Settings:
    """Returns all options of a data set, those that were not given by their defaults.

    Raises:
        DataError: an option is unknown or has no value that it takes.
    """
    assert definition.options is not None
    try:
        return definition.options(**given)
    except ValidationError as error:
        fault = field_fault(error, list(definition.options.model_fields))
        raise DataError(f"data set {definition.name!r}, data.options: {fault}") from None
