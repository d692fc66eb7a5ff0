"""Checks of a data set of one's own: what feddg demands of its own."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy

from feddg.data.decoded import open_pixels
from feddg.data.decoding import require_own_names
from feddg.data.fingerprint import content_hashes, contents_of_rows, file_of, images_file
from feddg.data.images import ImageTable
from feddg.data.inspection import about_copies, about_labels
from feddg.data.splits import from_roles
from feddg.errors import DataError, FeddgError
from feddg.testing.methods import Fault, FaultsFound, other_global_numbers

UNUSABLE = "Nothing could be trained"
MISLEADING = "Accuracies would not be of what they seem to be of"


class DataSetFault(FaultsFound):
    """A data set breaks rules."""


def check_data_set(
    load: Callable[..., ImageTable], root: Path | str | None = None, **options: object
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
    faults: list[Fault] = []
    try:
        with other_global_numbers(1):
            table = load(folder, **options)
        with other_global_numbers(2):
            again = load(folder, **options)
        faults += _about_names(table) or [*_about_images(table, again)]
    except Exception as error:
        faults.append(Fault("images can be read", f"{type(error).__name__}: {error}", UNUSABLE))
    faults += _about_errors(load, folder, options)
    if faults:
        raise DataSetFault(getattr(load, "__name__", repr(load)), faults)


def _about_names(table: ImageTable) -> list[Fault]:
    if not isinstance(table, ImageTable) or not len(table):
        return [Fault("images are listed", f"{table!r:.60} is no ImageTable with images", UNUSABLE)]
    faults = []
    for what in ("paths", "class_names", "domain_names"):
        counted = Counter(name.strip() for name in getattr(table, what))
        for name in [name for name, count in counted.items() if count > 1 or not name][:1]:
            text = f"{what} holds {name!r}" + " twice" * (counted[name] > 1)
            faults.append(Fault("names tell apart", text, MISLEADING))
    for what in ("labels", "domains"):
        if (kind := getattr(table, what).dtype) != numpy.int64:
            faults.append(Fault("labels are positions", f"{what} are {kind}, not int64", UNUSABLE))
    if not faults:
        try:
            require_own_names(table, "it")
        except DataError as error:
            faults.append(Fault("names tell apart", str(error), MISLEADING))
    return faults


def _about_images(table: ImageTable, again: ImageTable) -> Iterator[Fault]:
    splits = None if table.split is None else from_roles(table.split)
    if images_file(table, None) != images_file(again, None) or table.paths != again.paths:
        why = "Nobody could repeat a result: draw from a generator of your own, sort what you list"
        yield Fault("the same images twice", "the second time it gives others", why)
    if table.root is not None:
        open_pixels(table, 32, cache=None, on_bad_image="fail")
        files = [file_of(path) for path in table.paths]
        known = content_hashes(table.root, files, None)
        contents = [known[file][1] for file in files]
    else:
        assert table.images is not None
        contents = contents_of_rows(table)
        kind, shape = table.images.dtype, table.images.shape
        pixels = kind == numpy.uint8 and shape[3:] == (3,)
        features = kind == numpy.float32 and len(shape) == 2
        if not pixels and not (features and numpy.isfinite(table.images).all()):
            what = f"{kind} {shape}, not uint8 (n, height, width, 3) or finite float32 (n, d)"
            yield Fault("images are pixels or features", what, UNUSABLE)
    warnings = [*about_labels(table), *about_copies(table, contents, splits, refuse=True)]
    for warning in warnings:
        if warning.severity != "note" and warning.code != "missing-classes":
            yield Fault("images show what they should", warning.text.rstrip("."), MISLEADING)


def _about_errors(
    load: Callable[..., ImageTable], folder: Path | None, options: dict[str, object]
) -> Iterator[Fault]:
    cases = {"no_such_option": (folder, {**options, "no_such_option": 1})}
    if folder is not None:
        cases["not there"] = folder / "not there", options
    for wrong, (place, chosen) in cases.items():
        said = "it is taken"
        try:
            load(place, **chosen)
        except Exception as error:
            clear = isinstance(error, (FeddgError, TypeError)) and "\n" not in str(error)
            said = "" if clear and wrong in str(error) else f"{type(error).__name__}: {error}"
        if said:
            what = f"{'an option' if place == folder else 'a folder'} {wrong!r}: {said}"
            yield Fault("errors are clear", what, "Whoever mistypes it must be told so in one line")
