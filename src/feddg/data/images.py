"""The list of images of an experiment: path, label and domain of each; nothing is decoded."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO
from unicodedata import normalize

import numpy as np
from PIL import Image, UnidentifiedImageError, features

from feddg.diagnostics import warn
from feddg.errors import DataError, nearest
from feddg.storage import entries, open_file, stamp
from feddg.text import printable

_ALWAYS = {
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".jfif": "JPEG",
    ".png": "PNG",
    ".bmp": "BMP",
    ".gif": "GIF",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".webp": "WEBP",
}
_JPEG2000 = {".jp2": "JPEG2000", ".j2k": "JPEG2000"}
_AVIF = {".avif": "AVIF"}
_TIFFS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
"""How TIFFs begin."""
_HEIF = {".heic": "HEIF", ".heif": "HEIF"}
"""Photos of phones: need the optional package pillow-heif."""
_DICOM = {".dcm": "DICOM", ".dicom": "DICOM"}
"""Medical images: need the optional package pydicom."""

_REMEDIES = {
    "needs `pip install 'feddg[heic]'`": tuple(_HEIF),
    "needs `pip install 'feddg[dicom]'`": tuple(_DICOM),
    "this Pillow was built without JPEG 2000": tuple(_JPEG2000),
    "this Pillow was built without AVIF": tuple(_AVIF),
    "whole-slide images: cut them into tiles first, for example with OpenSlide": (
        *(".svs", ".ndpi", ".mrxs", ".scn", ".vms", ".bif"),
    ),
    "convert them to PNG or TIFF first": (".nii", ".mha", ".mhd", ".nrrd"),
    "arrays: write them as PNG or TIFF first": (".npy", ".npz", ".mat", ".h5", ".hdf5", ".nc"),
    "archives: unpack them": (".zip", ".tar", ".gz", ".tgz", ".7z", ".rar"),
    "films: write their frames as images first": (".mp4", ".avi", ".mov", ".mkv", ".webm"),
    "raw photos: develop them to JPEG or TIFF first": (
        *(".cr2", ".cr3", ".nef", ".arw", ".dng", ".orf", ".raf"),
    ),
    "drawings: write them as PNG first": (".svg", ".eps", ".pdf", ".ai"),
    "convert them to TIFF first": (".ecw", ".sid", ".img", ".vrt"),
}
REMEDIES = {suffix: remedy for remedy, suffixes in _REMEDIES.items() for suffix in suffixes}
"""What to do about files with images in formats that are not read, by suffix."""
_COLUMNS = (
    *("labels", "domains", "images", "split", "clients", "groups", "listed_rows", "held_back"),
)
LAYOUT = "<root>/<domain>/<class>/<image>, for example images/sketch/dog/0001.jpg"


USABLE_FORMATS = {
    **_ALWAYS,
    **(_JPEG2000 if features.check("jpg_2000") else {}),
    **(_AVIF if features.check("avif") else {}),
    **(_HEIF if find_spec("pillow_heif") else {}),
    **(_DICOM if find_spec("pydicom") else {}),
}
"""The formats that can be decoded here: Pillow's name by suffix."""
IMAGE_SUFFIXES = frozenset(USABLE_FORMATS)
FORMATS = tuple(dict.fromkeys(f for f in USABLE_FORMATS.values() if f not in ("HEIF", "DICOM")))
"""The formats that a file's content may have, whatever its name. Pillow opens dozens of formats and
starts other programs for some (Ghostscript for EPS). A HEIF file must be named as one; a DICOM file
must not be named as one of these.
"""


@dataclass(frozen=True)
class ImageBytes:
    """An image file in memory.

    Attributes:
        name: its file name; only the ending counts.
        content: the bytes of the file.
    """

    name: str
    content: bytes = field(repr=False)

    @property
    def suffix(self) -> str:
        """The ending of the name."""
        return PurePosixPath(self.name).suffix


ImageSource = Path | ImageBytes
"""Where an image file is."""


def open_source(source: ImageSource) -> IO[bytes]:
    """Opens an image file to read its bytes.

    Raises:
        OSError: it cannot be opened, or is no plain file.
    """
    return BytesIO(source.content) if isinstance(source, ImageBytes) else open_file(source)


def is_dicom(file: Path) -> bool:
    """Returns whether a file is DICOM by its header, whatever its name."""
    try:
        with open_file(file) as content:
            return content.read(132)[128:] == b"DICM"
    except OSError:
        return False


@contextmanager
def open_image(path: ImageSource) -> Iterator[Image.Image | None]:
    """Opens an image file of a supported format with Pillow, without decoding it.

    Yields None for a TIFF of more bands than Pillow supports.

    Raises:
        PIL.UnidentifiedImageError: its content has none of these formats.
        OSError: it cannot be opened, or is no plain file.
    """
    formats, ending = FORMATS, path.suffix.lower()
    if ending in _HEIF and ending in IMAGE_SUFFIXES:
        register_heif()
        formats = (*FORMATS, "HEIF")
    elif (ending in _DICOM or ending not in IMAGE_SUFFIXES) and ".dcm" in IMAGE_SUFFIXES:
        register_dicom()
        formats = ("DICOM", *FORMATS)  # first: a TIFF may be hidden in its head
    with ExitStack() as stack:
        file, image = stack.enter_context(open_source(path)), None
        try:
            image = stack.enter_context(Image.open(file, formats=formats))
        except UnidentifiedImageError:
            file.seek(0)
            if file.read(4) not in _TIFFS:
                raise
        yield image


@cache
def register_heif() -> None:
    """Registers HEIF with Pillow; needs the optional package."""
    from pillow_heif import register_heif_opener

    register_heif_opener()


@cache
def register_dicom() -> None:
    """Registers DICOM with Pillow; needs the optional package."""
    from feddg.data.formats.dicom import DicomImage

    Image.register_open("DICOM", DicomImage)


def endings() -> str:
    """Returns the suffixes of images for messages, with those that need a further package."""
    others = [
        f"{name} {REMEDIES[name]}" for name in (".heic", ".dcm") if name not in IMAGE_SUFFIXES
    ]
    return "; ".join([", ".join(sorted(IMAGE_SUFFIXES)), *others])


@dataclass(frozen=True, eq=False)
class ImageTable:
    """Images with their labels and domains, one row each.

    Attributes:
        paths: one per row, relative to ``root``, with ``/``; for rendered images a made-up name
            such as ``ink/3/0001``.
        labels: ``(n,)`` int64, positions in ``class_names``.
        domains: ``(n,)`` int64, positions in ``domain_names``.
        class_names: the classes, in the order of their labels.
        domain_names: the domains, in the order of their numbers.
        root: the folder the paths start from; ``None`` when ``images`` is given.
        images: ``(n, height, width, 3)`` uint8 for rendered sources, ``(n, d)`` float32 for
            features without images, otherwise ``None``.
        split: ``(n,)`` strings from a benchmark's own file (``train``, ``val``, ``test``,
            ``id_val`` or ``id_test``), otherwise ``None``.
        clients: ``(n,)`` strings: who holds each image in reality, if known (a patient, a site, a
            writer), otherwise ``None``.
        groups: ``(n,)`` strings: what each image belongs to (a patient, a series, a slide) and must
            not be parted from, otherwise ``None``; see :mod:`feddg.data.groups`.
        subgroups: further columns by name, ``(n,)`` strings each, whose values are told apart in
            results (a scanner, an age band).
        listed_in: name of the file that lists the images; empty if the folder layout does.
        listed_rows: ``(n,)`` int64 row of each image in that file, from 1; None if messages need
            not name it.
        held_back: ``(n,)`` bool: images of objects that train in no domain, and alone measure in a
            held-out one; None if the data set holds back whole domains only.
        feature_names: of features without images: their columns in order, or the one of lists.
    """

    paths: tuple[str, ...]
    labels: np.ndarray
    domains: np.ndarray
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...]
    root: Path | None = None
    images: np.ndarray | None = None
    split: np.ndarray | None = None
    clients: np.ndarray | None = None
    groups: np.ndarray | None = None
    subgroups: Mapping[str, np.ndarray] = field(default_factory=dict)
    listed_in: str = ""
    listed_rows: np.ndarray | None = None
    held_back: np.ndarray | None = None
    feature_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        columns = {name: getattr(self, name) for name in _COLUMNS}
        for name, column in (*columns.items(), *self.subgroups.items()):
            if column is not None and len(column) != len(self.paths):
                raise ValueError(f"{name} has {len(column)} rows, paths has {len(self.paths)}")
        if (self.root is None) == (self.images is None):
            raise ValueError("an ImageTable has either a root folder or rendered images")
        for name, size in (("labels", len(self.class_names)), ("domains", len(self.domain_names))):
            places = getattr(self, name)
            if len(places) and not (places.min() >= 0 and places.max() < size):
                raise ValueError(f"{name} must lie in 0..{size - 1}")

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, rows: Sequence[int] | np.ndarray) -> "ImageTable":
        """Returns the table of these rows, in this order, with all class and domain names."""
        rows = np.asarray(rows, dtype=np.int64)
        columns = {
            name: column[rows] for name in _COLUMNS if (column := getattr(self, name)) is not None
        }
        subgroups = {name: column[rows] for name, column in self.subgroups.items()}
        paths = tuple(self.paths[row] for row in rows.tolist())
        return replace(self, paths=paths, subgroups=subgroups, **columns)

    def without(self, domains: Iterable[str]) -> "ImageTable":
        """Returns the table without some domains and their names.

        Raises:
            DataError: a domain does not exist, or none would remain.
        """
        left_out = {self.domain_id(name) for name in domains}
        if not left_out:
            return self
        remaining = [id for id in range(len(self.domain_names)) if id not in left_out]
        if not remaining:
            raise DataError("All domains are left out; leave one to train on.")
        table = self.take(np.flatnonzero(np.isin(self.domains, remaining)))
        return replace(
            table,
            domains=np.searchsorted(remaining, table.domains),
            domain_names=tuple(self.domain_names[id] for id in remaining),
        )

    def domain_id(self, name: str) -> int:
        """Returns the position of a domain in ``domain_names``.

        Raises:
            DataError: there is no domain of this name.
        """
        if (exact := composed(name)) in self.domain_names:
            return self.domain_names.index(exact)
        wanted, hint = plain_name(name), nearest(name, self.domain_names)
        if wanted in map(plain_name, self.class_names):
            hint = ", but a class: folders must be ROOT/DOMAIN/CLASS"
        elif wanted in ("all", "each", "lodo"):
            hint = " (to hold each out in turn: feddg compare --hold-out lodo)"
        raise DataError(
            f"There is no domain {name!r}{hint}; there are: {', '.join(self.domain_names)}."
        )

    def counts(self) -> np.ndarray:
        """Returns how many images each domain has of each class: ``(domains, classes)`` int64."""
        shape = (len(self.domain_names), len(self.class_names))
        cells = np.ravel_multi_index((self.domains, self.labels), shape)
        return np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)


def from_folder(root: Path | str) -> ImageTable:
    """Lists the images under ``root/domain/class/``, sorted by domain, class and file name.

    Hidden files and folders are ignored. Domains and classes without a single image are left out
    with a warning in the log; a class may be absent from some domains.

    Args:
        root: the folder that holds one folder per domain.

    Raises:
        DataError: the folder is missing, is not a folder, or holds no images in this layout.
    """
    root = check_folder(root)
    rows = [
        (domain, label, f"{domain}/{path}")
        for domain in folder_names(root)
        for label, path in _class_images(root / domain)
    ]
    table = _listed(root, rows, LAYOUT)
    classes = set(table.class_names)
    for domain in folder_names(root):
        if composed(domain) not in table.domain_names:
            text = f"{root / domain} has no class folder with images and is left out."
            warn("folder-left-out", text)
            continue
        for label in folder_names(root / domain):
            if composed(label) not in classes:
                text = (
                    f"Class '{label}' has no images in any domain and is left out "
                    f"({root / domain / label})."
                )
                warn("folder-left-out", text)
    return table


def from_class_folders(root: Path | str, domain: str) -> ImageTable:
    """Lists the images of one domain under ``root/class/``, sorted by class and file name.

    Args:
        root: the folder that holds one folder per class.
        domain: what the domain is called.

    Raises:
        DataError: the folder is missing, is not a folder, or holds no images in this layout.
    """
    root = check_folder(root)
    rows = [(domain, label, path) for label, path in _class_images(root)]
    return _listed(root, rows, "<root>/<class>/<image>")


def _class_images(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields class and path of the images in class folders, sorted by both."""
    for label in folder_names(folder):
        for name in image_names(folder / label):
            yield label, f"{label}/{name}"


def _listed(root: Path, rows: Sequence[tuple[str, str, str]], layout: str) -> ImageTable:
    if not rows:
        raise DataError(
            f"No images were found in {root} as {layout}. {_what_is_there(root)} "
            f"Image files end in {endings()}."
        )
    domains, labels, paths = zip(*rows)
    return listed_images(root, paths, labels, domains)


def plain_name(name: str) -> str:
    """Returns a name as it is compared: lower case, without blanks, ``_`` and ``-``."""
    return re.sub(r"[\s_-]", "", composed(name)).lower()


def is_printable(name: str) -> bool:
    """Returns whether a name has no control characters, line ends and bytes that are no UTF-8.

    No file of ours could hold them.
    """
    return printable(name) == name


def composed(name: str) -> str:
    """Returns a name with letters such as é as one character, where macOS may write two."""
    return normalize("NFC", name)


def check_folder(root: Path | str) -> Path:
    """Returns a folder, of a user also as ``~``, after checking that it is there.

    Raises:
        DataError: it is not.
    """
    root = Path(os.path.expanduser(root))
    if not os.path.isdir(root):  # False also for what cannot be looked at
        raise DataError(f"{root} does not exist, or is not a folder. Expected {LAYOUT}.")
    return root


def folder_names(folder: Path) -> list[str]:
    """Returns the names of the folders in a folder, sorted; hidden ones do not count.

    Raises:
        DataError: it cannot be read, or a name cannot be printed.
    """
    names = [e.name for e in entries(folder, DataError) if _is_kind(e.is_dir) and e.name[0] != "."]
    for name in names:
        if not is_printable(name):
            raise DataError(
                f"The folder {name!r} in {folder} has a name that cannot be printed. Rename it: "
                "folders name domains and classes."
            )
    return names


def image_names(folder: Path) -> list[str]:
    """Returns the names of the images in a folder, sorted; skipped files are logged.

    Raises:
        DataError: it cannot be read.
    """
    images = [e for e in entries(folder, DataError) if is_image(e.name)]
    names = [e.name for e in images if _is_kind(e.is_file) and is_printable(e.name)]
    if left_out := sorted({entry.name for entry in images} - {*names}):
        warn(
            "images-left-out",
            f"{len(left_out)} entries of {folder}, as {left_out[0]!r}, are named like images and "
            "left out: they are no files, or their names cannot be printed.",
        )
    return names


def images_below(folder: Path, seen: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yields the images below a folder, in the order of their paths; hidden ones do not count.

    Links are followed, but not to a folder that they lie in.

    Args:
        folder: the folder.
        seen: the real paths of the folders above it.

    Raises:
        DataError: a folder cannot be read.
    """
    above = seen | {os.path.realpath(folder)}
    for entry in entries(folder, DataError):
        path = folder / entry.name
        if _is_kind(entry.is_dir):
            if not entry.name.startswith(".") and os.path.realpath(path) not in above:
                yield from images_below(path, above)
        elif is_image(entry.name) and _is_kind(entry.is_file):
            yield path


def _is_kind(test: Callable[[], bool]) -> bool:
    """Returns the answer of ``test``; False for a link that leads nowhere or in a circle."""
    try:
        return test()
    except OSError:
        return False


def is_image(name: str) -> bool:
    """Returns whether a file is an image by its name; hidden files are not."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def _what_is_there(root: Path) -> str:
    """Describes a folder with another layout, so that its owner sees what to change."""
    image = next(images_below(root), None)
    if image is not None:
        above = image.parent.parent.parent
        named = f": {above}" if above.is_relative_to(root) else ""
        return f"There is an image at {image}: name the folder two levels above{named}."
    names = folder_names(root)
    if not names:
        return "It holds no folders."
    return f"It holds the folders {', '.join(names[:10])}, without images."


def listed_images(
    root: Path | None,
    paths: Iterable[str],
    labels: Sequence[str],
    domains: Sequence[str],
    *,
    listed_in: str = "",
    split: Sequence[str] | None = None,
    clients: Sequence[str] | None = None,
    groups: Sequence[str] | None = None,
    subgroups: Mapping[str, Sequence[str]] | None = None,
    listed_rows: Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
    domain_names: Sequence[str] | None = None,
    images: np.ndarray | None = None,
    feature_names: tuple[str, ...] = (),
) -> ImageTable:
    """Returns the table of images listed by the names of their class and domain.

    A name that is written in two forms of Unicode is one class, domain, client or group.

    Args:
        root: the folder that paths are relative to; None for rows without files.
        paths: of the images, relative to ``root``.
        labels: the class of each.
        domains: the domain of each.
        listed_in: the file that lists them; empty if all images below ``root`` are meant.
        split: the role of each; None if there are no roles.
        clients: who holds each; None if unknown.
        groups: what each belongs to; None if unknown.
        subgroups: further columns by name.
        listed_rows: the row of each in that file, from 1; None if messages should not name it.
        class_names: the classes in the order of their labels; sorted by default.
        domain_names: the domains in their order; sorted by default.
        images: of rows without files, see :class:`ImageTable`.
        feature_names: likewise.

    Raises:
        DataError: none of the first listed images exists.
    """
    paths = tuple(paths)
    # A row may be a tile of a file: a.tif#x0y0w256h256.
    first = {name for path in paths[:20] for name in (path, path.rpartition("#x")[0] or path)}
    if root and listed_in and paths and not any(stamp(root / name) for name in first):
        raise DataError(
            f"{listed_in} lists images that are not there, the first as {root / paths[0]}. Put the "
            "images there, or name the folder that holds them."
        )
    labels, domains = (list(map(composed, names)) for names in (labels, domains))
    class_names = tuple(map(composed, class_names or sorted(set(labels))))
    domain_names = tuple(map(composed, domain_names or sorted(set(domains))))
    return ImageTable(
        paths=paths,
        labels=positions(labels, class_names),
        domains=positions(domains, domain_names),
        class_names=class_names,
        domain_names=domain_names,
        root=root,
        split=None if split is None else np.array(split),
        clients=None if clients is None else np.array([*map(composed, clients)]),
        groups=None if groups is None else np.array([*map(composed, groups)]),
        subgroups={
            name: np.array([*map(composed, column)]) for name, column in (subgroups or {}).items()
        },
        listed_in=listed_in,
        listed_rows=None if listed_rows is None else np.array(listed_rows, dtype=np.int64),
        images=images,
        feature_names=feature_names,
    )


def roles_of_domains(roles: Sequence[str], domains: Sequence[str]) -> list[str]:
    """Returns roles in which ``val`` and ``test`` of a training domain are in-domain.

    Args:
        roles: of each image: train, val, test, id_val or id_test.
        domains: of each image.
    """
    training = {domain for domain, role in zip(domains, roles) if role == "train"}
    return [
        f"id_{role}" if domain in training and role in ("val", "test") else role
        for domain, role in zip(domains, roles)
    ]


def positions(names: Sequence[object], among: Sequence[object]) -> np.ndarray:
    """Returns ``(n,)`` int64: the position of each name in another list.

    Raises:
        KeyError: a name is not among them.
    """
    place = {name: index for index, name in enumerate(among)}
    return np.array([place[name] for name in names], dtype=np.int64)
