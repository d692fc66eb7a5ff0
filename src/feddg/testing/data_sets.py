"""Checks of a data set of one's own: what feddg demands of its own."""

from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy

from feddg.data.fingerprint import ContentHashes, file_of, images_file
from feddg.data.images import ImageTable
from feddg.data.inspection import about_copies, about_labels
from feddg.data.pixels import open_pixels
from feddg.data.splits import from_roles
from feddg.errors import FeddgError
from feddg.testing.methods import Fault, FaultsFound, other_global_numbers

CONFUSING = "Accuracies would be of something else than what they seem to be of"


class DataSetFault(FaultsFound):
    """A data set breaks rules."""


def check_data_set(
    load: Callable[..., ImageTable], root: Path | str | None = None, **options: Any
) -> None:
    """Checks a data set: same images twice, shapes, labels, domains, copies, and its errors.

    Args:
        load: lists the images, ``load(root, **options)``, as ``register_source`` takes it.
        root: the folder of the images, if it needs one.
        **options: options of ``load``.

    Raises:
        DataSetFault: it breaks rules; says which, where and why they matter.
    """
    folder = None if root is None else Path(root)
    faults = []
    try:
        tables = []
        for seed in (1, 2):
            with other_global_numbers(seed):
                tables.append(load(folder, **options))
        for check in (_is_listed, _is_the_same, _can_be_read, _says_what_is_what, _has_no_copies):
            found = [Fault(check.__name__[1:].replace("_", " "), *one) for one in check(*tables)]
            faults += found
            if found and check is _is_listed:
                break
    except Exception as error:
        faults.append(Fault("can be loaded", f"{type(error).__name__}: {error}", "Nobody could"))
    faults += [Fault("says what is wrong", *one) for one in _errors(load, folder, options)]
    if faults:
        raise DataSetFault(getattr(load, "__name__", repr(load)), faults)


Found = Iterator[tuple[str, str]]


def _is_listed(table: ImageTable, _: ImageTable) -> Found:
    if not isinstance(table, ImageTable) or not len(table):
        yield f"it gives {table!r:.60}, not an ImageTable with images", "Nothing could be trained"
        return
    for what in ("paths", "class_names", "domain_names"):
        names = getattr(table, what)
        if bad := [name for name in names if not isinstance(name, str) or not name.strip()]:
            yield f"{what} holds {bad[0]!r}", "Results are listed by name"
        elif len(set(names)) < len(names):
            yield f"{what} holds {sorted(names, key=names.count)[-1]!r} twice", "Which is meant?"
    for what in ("labels", "domains"):
        if (kind := getattr(table, what).dtype) != numpy.int64:
            yield f"{what} are {kind}, not int64", "They are positions in the lists of names"


def _is_the_same(table: ImageTable, again: ImageTable) -> Found:
    why = "Nobody could repeat a result: draw from a generator of your own, and sort what you list"
    for what in ("paths", "class_names", "domain_names", "labels", "domains", "images", "split"):
        if not numpy.array_equal(*(numpy.asarray(getattr(t, what)) for t in (table, again))):
            yield f"{what} differ when it is loaded again", why
    hashes = [None if t.root is None else ContentHashes(t.root, None) for t in (table, again)]
    if images_file(table, hashes[0]) != images_file(again, hashes[1]):
        yield "files differ when it is loaded again", why


def _can_be_read(table: ImageTable, _: ImageTable) -> Found:
    images = table.images
    if images is None:
        open_pixels(table, 32, cache=None, on_bad_image="fail")
    elif images.ndim == 2:
        if images.dtype != numpy.float32 or not numpy.isfinite(images).all():
            yield "features are not finite float32", "Nothing could be trained"
    elif images.dtype != numpy.uint8 or images.ndim != 4 or images.shape[-1] != 3:
        shape = f"{images.dtype} {images.shape}"
        yield f"images are {shape}, not uint8 (n, height, width, 3)", "Nothing could be trained"


def _says_what_is_what(table: ImageTable, _: ImageTable) -> Found:
    for one in about_labels(table):
        if one.severity != "note" and one.code != "missing-classes":
            yield one.text.rstrip("."), CONFUSING


def _has_no_copies(table: ImageTable, _: ImageTable) -> Found:
    files = [file_of(path) for path in table.paths]
    if table.root is not None:
        known = ContentHashes(table.root, None).of(files)
        contents = [known[file][1] for file in files]
    else:
        assert table.images is not None
        contents = [sha256(image.tobytes()).hexdigest() for image in table.images]
    splits = None if table.split is None else from_roles(table.split)
    for one in about_copies(table, files, contents, splits, refuse=True):
        if one.severity != "note":
            yield one.text.rstrip("."), CONFUSING


def _errors(load: Callable[..., ImageTable], folder: Path | None, options: dict[str, Any]) -> Found:
    cases = {"an unknown option": (folder, {**options, "no_such_option": 1}, "")}
    if folder is not None:
        cases["a folder that is not there"] = folder / "not there", options, "not there"
    for what, (place, chosen, named) in cases.items():
        try:
            load(place, **chosen)
            wrong = "it is taken"
        except (FeddgError, TypeError) as error:  # of options, load_source makes one line
            clear = named in str(error) and "\n" not in str(error)
            told = isinstance(error, FeddgError) or not named
            wrong = "" if clear and told else f"{type(error).__name__}: {error}"
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            yield f"{what}: {wrong}", "Whoever mistypes it must be told so in one line"
