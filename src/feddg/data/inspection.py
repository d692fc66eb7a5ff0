"""Inspects a folder of images: what it holds, how images are stored, and what looks wrong.

If a result would be meaningless, the run stops here with one line.
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from feddg.data.decoded import open_pixels
from feddg.data.decoding import (
    AS_IT_IS,
    MOST_PIXELS,
    MOST_TILED_PIXELS,
    ONE_HUGE_IMAGE,
    Reading,
    Samples,
    bits_used,
    is_deep,
    quiet_pillow,
    read_samples,
    read_tiff,
)
from feddg.data.fingerprint import file_of
from feddg.data.images import (
    IMAGE_SUFFIXES,
    REMEDIES,
    ImageTable,
    composed,
    is_dicom,
    open_image,
    plain_name,
)
from feddg.data.pixels import PixelStore
from feddg.data.splits import ROLES, Splits
from feddg.diagnostics import Diagnostic, Progress, Severity, note, silent, warning
from feddg.errors import first_names
from feddg.records import BadImageRow
from feddg.rng import numpy_stream
from feddg.settings import DataSettings, grouped
from feddg.text import counted, number

Item = TypeVar("Item")
HALF = 0.5
"""Share above which a class or client has too many of the images, if it also exceeds one and a half
even shares.
"""

SMALL_VALIDATION = 50
"""Validation sets smaller than this choose a round mostly by chance: accuracy is uncertain by 14
points.
"""
FEW_ROWS, ROWS_LOOKED_AT = 20, 2_000
TELLS_ALONE = 0.98
"""A column that tells this share of each class, among these rows, tells the class alone."""
SHOWN = 3
WEAKENS = "-weaken-epsilon"
"""The end of what a diagnostic is called whose images weaken an epsilon."""
COPIES: dict[str, tuple[Severity, str]] = {
    "classes": ("warning", "two classes: one of the labels is wrong"),
    "domains": ("warning", "two domains: if one is held out, it is not unseen"),
    "one-class": ("note", "the same class of the same domain"),
}
REMOVE = "Remove them, or confirm with data.duplicates: warn."
DEEPER, OUTSIDE, LEFT_OUT = "in deeper folders", "outside a class folder", "of folders left out"
UNLISTED = "images that are not in"
UNNAMED_DICOM = "that are DICOM and not named so"
_LEVELS = 2
"""Folders above an image: domain and class."""
SAMPLE = 24
"""Number of images of a domain whose bit depth is looked at."""
_MAYBE_DEEP = (".tif", ".tiff", ".png", ".jp2", ".j2k")
_PLACE = re.compile(
    r"(^|[\W\d_])(site|hospital|clinic|cent(er|re)|lab|scanner|camera|domain|style|photo|sketch|"
    r"cartoon|painting|clipart)s?($|[\W\d_])"
)
"""Names that domains have, and classes hardly ever."""
_MISSING = ("na", "nan", "null", "n/a")
"""Classes that are called like a missing label."""
_SEE_THROUGH = 0.5
"""Share of half-transparent pixels above which a fourth band is probably not transparency."""


def about_labels(table: ImageTable, published: Collection[str] = ()) -> Iterator[Diagnostic]:
    """Finds names that differ in spelling only, and domains and classes without usable images.

    Args:
        table: usable images.
        published: names that are as the authors gave them: FEMNIST tells ``S`` from ``s``.
    """
    for what, names in (("classes", table.class_names), ("domains", table.domain_names)):
        for group in similar([name for name in names if name not in published]):
            yield warning(
                "similar-names",
                f"The {what} {_quoted(group)} differ in spelling only.",
                "If they are one, give them one name.",
            )
    missing = [name for name in table.class_names if name.casefold() in _MISSING]
    if missing:
        yield warning(
            "class-called-missing",
            f"There are images of {_classes(missing)}, which may stand for a missing label.",
            "If it does, take these rows out of the table.",
        )
    places, others = (
        [bool(_PLACE.search(name.casefold())) for name in names]
        for names in (table.class_names, table.domain_names)
    )
    if all(places) and len(places) > 1 and not any(others):
        yield warning(
            "folders-swapped",
            f"The classes ({first_names(table.class_names, SHOWN)}) are called like places or "
            "styles, and the domains are not.",
            "If these are the domains, let their folders be the upper ones: ROOT/DOMAIN/CLASS.",
        )
    counts = table.counts()
    for domain, images in zip(table.domain_names, counts.sum(axis=1).tolist()):
        if not images:
            yield Diagnostic(
                "domain-without-images",
                "error",
                f"The domain '{domain}' has no usable image.",
                "Repair its files, or take the folder out.",
            )
    classes = counts.sum(axis=0)
    unused = [name for name, images in zip(table.class_names, classes.tolist()) if not images]
    if np.count_nonzero(classes) < 2:
        left = table.class_names[int(classes.argmax())]
        yield Diagnostic(
            "one-class",
            "error",
            f"Only the class '{left}' has usable images.",
            "A classifier needs images of two classes at least.",
        )
    elif unused:
        text = f"There is no usable image of {_classes(unused)} in any domain."
        yield warning("class-without-images", text)
    lacking = {
        domain: [name for name, images in zip(table.class_names, row) if not images]
        for domain, row in zip(table.domain_names, counts.tolist())
        if any(row) and not all(row)
    }
    most = sorted(lacking, key=lambda domain: -len(lacking[domain]))
    if most:
        parts = [f"{domain} lacks {first_names(lacking[domain], SHOWN)}" for domain in most]
        text = f"Some domains lack classes: {first_names(parts, SHOWN)}."
        advice = (
            "Where classes are missing, a model may learn the place instead: add images, or leave "
            "the domain out (data.leave_out)."
        )
        classes_left = len(table.class_names) - len(lacking[most[0]])
        few = classes_left < max(2, len(table.class_names) / 2)
        yield warning("missing-classes", text, advice) if few else note("missing-classes", text)


def about_splits(
    table: ImageTable, splits: Splits, *, chosen: bool, picks: bool = True
) -> Iterator[Diagnostic]:
    """Finds classes without training images, and validation sets too small to choose by.

    Args:
        table: usable images.
        splits: the rows by role.
        chosen: whether the user chose what is held out; an official split is not criticised.
        picks: whether there are several evaluated rounds to pick from.
    """
    trained = _counts(table, splits.train)
    if np.count_nonzero(trained) < 2:
        (left,) = np.flatnonzero(trained)
        yield Diagnostic(
            "one-class-to-train-on",
            "error",
            f"Only the class '{table.class_names[left]}' is left to train on.",
            "Hold out fewer domains.",
        )
    for role, rows in (("test", splits.test), ("validation", splits.val)):
        counts = _counts(table, rows)
        unseen = np.flatnonzero((trained == 0) & (counts > 0))
        if len(unseen):
            names = [table.class_names[i] for i in unseen]
            homes = [table.domain_names[i] for i in np.unique(table.domains[rows])]
            domains = "domain" if len(homes) == 1 else "domains"
            images = counted(int(counts[unseen].sum()), "image")
            has = f"{'has' if len(homes) == 1 else 'have'} {images}"
            stops: Severity = "error" if chosen and role == "test" else "warning"
            yield Diagnostic(
                "class-not-trained",
                stops,
                f"No client trains on {_classes(names)}, of which the held-out {role} {domains} "
                f"{_quoted(homes)} {has}: they cannot be recognised.",
                "Add images of other domains, or take the folders out.",
            )
    shared = np.intersect1d(table.domains[splits.val], table.domains[splits.test])
    if picks and len(shared):
        yield warning(
            "picked-by-test-domain",
            f"Images of {_quoted([table.domain_names[i] for i in shared])} validate, and others of "
            "the same test: a round picked on held-out validation is picked by a domain that is "
            "tested.",
            "Let a domain that does not train have either, or pick on in-domain validation.",
        )
    present, largest = int(np.count_nonzero(trained)), int(trained.argmax())
    share = trained[largest] / max(1, trained.sum())
    if present > 1 and share > max(HALF, 1.5 / present):
        yield warning(
            "one-class-dominates",
            f"{share:.0%} of the training images are of the class '{table.class_names[largest]}': "
            "always answering it is right for as many.",
            "Read the balanced accuracy, and try train.class_weights.",
        )
    files = list(map(file_of, table.paths))
    of = np.array(files) if table.groups is None else table.groups
    what = ("image",) if table.groups is None else ("group of images", "groups of images")
    for where, rows in (("held-out", splits.val), ("training", splits.id_val)):
        count = len(np.unique(of[rows]))
        if picks and 0 < count < SMALL_VALIDATION:
            margin = 100 * 1.96 * (0.25 / count) ** 0.5
            yield warning(
                "small-validation",
                f"Validation on {where} domains has only {counted(count, *what)}: a round "
                f"picked by it is picked by chance (an accuracy of 50 % is uncertain by "
                f"{margin:.0f} points).",
            )


def about_clients(sizes: Sequence[int], sites: Sequence[str] = ()) -> Iterator[Diagnostic]:
    """Finds a client that dominates the shared model by its number of images.

    Args:
        sizes: the training images of each client.
        sites: the names of the clients, if they are sites, which say themselves what they have.
    """
    largest, total = max(sizes, default=0), sum(sizes)
    if len(sizes) > 1 and largest > max(HALF, 1.5 / len(sizes)) * total:
        place = list(sizes).index(largest)
        who = f"Site {sites[place]}" if sites else f"Client {place} of {len(sizes)}"
        yield warning(
            "one-client-dominates",
            f"{who} holds {largest / total:.0%} of the training images: the average, which weighs "
            "clients by images, is mostly its own.",
            "Ask it whether it does, or use a defence that counts sites alike." if sites else "",
        )


def about_columns(table: ImageTable, splits: Splits) -> Iterator[Diagnostic]:
    """Finds columns of features that tell the class alone, as the class's own number does.

    A row gets the class of the row whose value is nearest, among a sample of the training domains.

    Args:
        table: usable rows.
        splits: the rows by role.
    """
    seen = np.sort(np.concatenate([splits.train, splits.id_val, splits.id_test]))
    if table.images is None or table.images.ndim != 2 or len(seen) < FEW_ROWS:
        return
    # In an order of chance: rows of one value are no neighbours for standing side by side.
    places = np.linspace(0, len(seen) - 1, min(len(seen), ROWS_LOOKED_AT)).astype(np.int64)
    rows = numpy_stream(0, "columns").permutation(seen[places])
    labels = table.labels[rows]
    classes = np.flatnonzero(np.bincount(labels) > 1)
    telling: list[str] = []
    for place in range(table.images.shape[1] if len(classes) > 1 else 0):
        order = np.argsort(table.images[rows, place], kind="stable")
        values, truth = table.images[rows[order], place].astype(np.float64), labels[order]
        gaps = np.concatenate([[np.inf], np.diff(values), [np.inf]])
        guess = truth[np.arange(len(rows)) + np.where(gaps[:-1] <= gaps[1:], -1, 1)]
        if min((guess == truth)[truth == label].mean() for label in classes) >= TELLS_ALONE:
            names = table.feature_names
            telling.append(repr(names[place]) if len(names) > 1 else f"number {place + 1}")
    if telling:
        yield warning(
            "column-tells-the-class",
            f"{'Each of the columns' if telling[1:] else 'The column'} {first_names(telling, 5)} "
            "tells the class alone.",
            "If it was made from the class, as its number is, take it out: accuracies mean nothing "
            "with it.",
        )


def about_copies(
    table: ImageTable,
    contents: Sequence[str],
    splits: Splits | None,
    refuse: bool,
    hides_images: str = "",
) -> Iterator[Diagnostic]:
    """Finds files with the same content: within a class, across classes, domains or splits.

    Args:
        table: usable images.
        contents: a hash of each row's file, or of the row itself; empty if unknown.
        splits: the rows by role, if known.
        refuse: whether to raise an error for copies that invalidate a result: training images in a
            validation or test set, or copies among training images if a privacy guarantee is for
            single images.
        hides_images: the setting whose epsilon is for a single image; empty for none. What weakens
            it has a code that ends in :data:`WEAKENS`.
    """
    what, files = "rows", list(table.paths)
    if table.root is not None:
        what, files = "files", list(map(file_of, files))
    groups = groups_of_copies(files, contents)
    if table.listed_rows is not None:  # named with their row, where a table of a user's lists them
        numbers = table.listed_rows.tolist()
        files = [f"{file} (row {n} of {table.listed_in})" for file, n in zip(files, numbers)]
    kinds: dict[str, list[list[int]]] = {where: [] for where in COPIES}
    for rows in groups:
        labels, domains = np.unique(table.labels[rows]), np.unique(table.domains[rows])
        where = "classes" if len(labels) > 1 else "domains" if len(domains) > 1 else "one-class"
        kinds[where].append(rows)
    for where, alike in kinds.items():
        if alike:
            severity, text = COPIES[where]
            text = f"{_contents(alike, what)}, in {text} ({_pair(files, alike)})."
            yield Diagnostic(f"copies-in-{where}", severity, text)
    if splits is None:
        return
    stops: Severity = "error" if refuse else "warning"
    remedy = REMOVE if refuse else ""
    training = set(splits.train.tolist())
    trained = [[row for row in rows if row in training] for rows in groups]
    leaked: dict[str, list[list[int]]] = {}
    for role in ROLES[1:]:
        measured = set(getattr(splits, role).tolist())
        copies = [(own[0], row) for rows, own in zip(groups, trained) if own for row in rows]
        if pairs := [[own, row] for own, row in copies if row in measured]:
            leaked[role] = pairs
    if leaked:
        images = ", ".join(f"{len(pairs)} of {role}" for role, pairs in leaked.items())
        example = _pair(files, next(iter(leaked.values())))
        yield Diagnostic(
            "train-test-leak",
            stops,
            f"Copies of training images are among those that measure ({images}; {example}): "
            "accuracies are too high.",
            remedy,
        )
    paths = [table.paths[row] for row in splits.train.tolist()]
    if hides_images and len({*map(file_of, paths)}) < len({*paths}):
        yield Diagnostic(
            "tiles-weaken-epsilon",
            stops,
            f"{hides_images} is for one row, and several rows are tiles of one image, which "
            "together tell more of it.",
            "Have a row for each image, or confirm with data.duplicates: warn.",
        )
    copied = [own for own in trained if len(own) > 1]
    if copied and hides_images:
        yield Diagnostic(
            "copies-weaken-epsilon",
            stops,
            f"{hides_images} is for one {what.rstrip('s')}, and {_contents(copied, what)} "
            f"({_pair(files, copied)}): of an image with copies more is revealed than that epsilon "
            "says.",
            remedy,
        )


def groups_of_copies(files: Sequence[str], contents: Sequence[str]) -> list[list[int]]:
    """Returns groups of files with the same content, each file by its first row.

    Args:
        files: the file of each row.
        contents: a hash of each row's file; empty if unknown.
    """
    first = {file: row for row, file in reversed(list(enumerate(files)))}
    by_content = grouped((contents[row], row) for row in sorted(first.values()))
    return [rows for content, rows in by_content.items() if content and len(rows) > 1]


def similar(names: Sequence[str]) -> list[list[str]]:
    """Returns groups of names that differ in case, blanks, ``_``, ``-`` or a plural's s only."""
    groups = grouped((plain_name(name).removesuffix("s"), name) for name in sorted(names))
    return [group for _, group in sorted(groups.items()) if len(group) > 1]


def _quoted(names: Sequence[str]) -> str:
    return first_names([f"'{name}'" for name in names], SHOWN)


def _classes(names: Sequence[str]) -> str:
    return f"the {'class' if len(names) == 1 else 'classes'} {_quoted(names)}"


def _counts(table: ImageTable, rows: np.ndarray) -> np.ndarray:
    return np.bincount(table.labels[rows], minlength=len(table.class_names))


def _contents(groups: list[list[int]], what: str) -> str:
    return f"{sum(map(len, groups))} {what} are {counted(len(groups), 'image')}"


def _pair(files: Sequence[str], groups: list[list[int]]) -> str:
    first, other, *_ = groups[0]
    return f"{files[first]} = {files[other]}"


def ignored_files(table: ImageTable, left_out: Sequence[str] = ()) -> dict[str, list[str]]:
    """Finds the files below a table's root that are not in the table, without hidden ones.

    Of a user's table only the folders of its images are searched: its root may be ``/``.

    Args:
        table: all images, including those that cannot be decoded.
        left_out: domains that somebody left out on purpose; their images are not ignored.

    Returns:
        Their paths by kind: the place of an unused image, or the suffix of another file.
    """
    ignored: dict[str, list[str]] = {}
    if table.root is None:
        return ignored
    used = set(map(file_of, table.paths))
    folders = [""] if table.listed_rows is None else sorted(set(map(os.path.dirname, used)))
    found = dict.fromkeys(path for folder in folders for path in _files(table.root, folder))
    for path in (path for path in found if path not in used):
        kind = os.path.splitext(path)[1].lower() or "without a suffix"
        if kind in IMAGE_SUFFIXES and table.listed_in:
            kind = f"{UNLISTED} {table.listed_in}"
        elif kind in IMAGE_SUFFIXES:
            deeper = path.count("/") - _LEVELS
            kind = DEEPER if deeper > 0 else OUTSIDE if deeper < 0 else LEFT_OUT
            if composed(path.partition("/")[0]) in map(composed, left_out):
                continue
        elif re.fullmatch(r"\.\d+|without a suffix", kind) and is_dicom(table.root / path):
            kind = UNNAMED_DICOM
        ignored.setdefault(kind, []).append(path)
    return ignored


def about_ignored(found: Mapping[str, Sequence[str]]) -> Iterator[Diagnostic]:
    """Reports ignored files: images and archives of images as warnings, other files as a note."""
    others = []
    for kind, paths in sorted(found.items()):
        named = f"Ignored: {counted(len(paths), 'file')} ({first_names(paths, SHOWN)})"
        if kind in (DEEPER, OUTSIDE, LEFT_OUT):
            advice = "Images lie as <root>/<domain>/<class>/<image>."
            yield warning("ignored-images", f"{named} {kind}.", advice)
        elif kind == UNNAMED_DICOM:
            yield warning("ignored-images", f"{named} {kind}.", "Let their names end in .dcm.")
        elif kind in REMEDIES:
            yield warning("ignored-images", f"{named} ending in {kind}: {REMEDIES[kind]}.")
        elif kind.startswith(UNLISTED):
            yield note("ignored-images", f"Ignored: {number(len(paths))} {kind}.")
        else:
            others.append(f"{len(paths)} {kind}")
    if others:
        text = f"Ignored, as they are no images: {', '.join(others)}."
        yield note("ignored-files", text)


def _files(root: Path, below: str) -> Iterator[str]:
    for folder, folders, files in os.walk(root / below):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        place = os.path.relpath(folder, root).replace(os.sep, "/")
        for name in sorted(files):
            if not name.startswith("."):
                yield name if place == "." else f"{place}/{name}"


def inspect(table: ImageTable) -> dict[str, object]:
    """Returns a summary that can be written as JSON.

    Returns:
        ``root``; ``images``, ``domains`` and ``classes`` (how many, and the names in order);
        ``counts`` and ``totals`` (images per domain and class, and per domain);
        and ``split`` (images per split of the benchmark, if it has one).
    """
    counts = table.counts()
    return {
        "root": None if table.root is None else str(table.root),
        "images": len(table),
        "domains": list(table.domain_names),
        "classes": list(table.class_names),
        "counts": {
            domain: dict(zip(table.class_names, row.tolist()))
            for domain, row in zip(table.domain_names, counts)
        },
        "totals": dict(zip(table.domain_names, counts.sum(axis=1).tolist())),
        "split": None if table.split is None else dict(Counter(table.split.tolist())),
    }


@dataclass(frozen=True)
class Survey:
    """How the images of each domain are stored, found from a sample.

    Attributes:
        depths: bits used by values of files deeper than 8 bits, by domain.
        veiled: for each domain whose fourth band is probably not transparency, an example file.
        paged: for each domain with a TIFF of several pages, an example file.
    """

    depths: Mapping[str, int]
    veiled: Mapping[str, str]
    paged: Mapping[str, str] = field(default_factory=dict)


def survey(table: ImageTable, reading: Reading = AS_IT_IS) -> Survey:
    """Looks at up to ``SAMPLE`` images of each domain, evenly spaced.

    Args:
        table: images in files.
        reading: whether images are cut into tiles, so that larger ones are looked at, too.
    """
    assert table.root is not None
    depths, veiled, paged = dict[str, int](), dict[str, str](), dict[str, str]()
    for domain, files in files_by_domain(table).items():
        chosen = evenly([file for file in files if file.lower().endswith(_MAYBE_DEEP)], SAMPLE)
        looks = _looks([table.root / file for file in chosen], reading)
        if bits := max((bits for bits, _ in looks), default=0):
            depths[domain] = bits
        for file, (_, veil) in zip(chosen, looks):
            if veil:
                veiled.setdefault(domain, file)
        with quiet_pillow(tiled=reading.tile is not None):
            several = next((file for file in chosen if _has_pages(table.root / file)), None)
        if several is not None:
            paged[domain] = several
    return Survey(depths, veiled, paged)


Opened = tuple[ImageTable, PixelStore, list[BadImageRow]]
"""The usable rows, their pixels, and the files that cannot be used."""


def open_images(
    table: ImageTable,
    data: DataSettings,
    cache: Path | None,
    progress: Progress = silent,
) -> tuple[Opened, Survey]:
    """Opens a table's images as an experiment's data settings say; tells how they are stored.

    Args:
        table: the images.
        data: the settings.
        cache: as the rest, see :func:`feddg.data.decoded.open_pixels`.
        progress: called while files are decoded.

    Raises:
        DataError: see there.
    """
    reading = Reading.of(data)
    surveyed = Survey({}, {}) if table.root is None else survey(table, reading)
    opened = open_pixels(
        table,
        data.image_size,
        cache=cache,
        resize=data.resize,
        budget_bytes=int(data.pixel_budget_gb * 2**30),
        on_bad_image=data.on_bad_image,
        reading=reading,
        depths=surveyed.depths,
        progress=progress,
    )
    return opened, surveyed


def depth_of(files: Iterable[Path], reading: Reading = AS_IT_IS) -> int:
    """Returns the bit depth used by files, from ``SAMPLE`` of those that may be deep; 0 for 8 bits.

    All files count as one domain, as images predicted together do.
    """
    chosen = evenly([file for file in files if file.suffix.lower() in _MAYBE_DEEP], SAMPLE)
    return max((bits for bits, _ in _looks(chosen, reading)), default=0)


def about_survey(found: Survey, reading: Reading) -> Iterator[Diagnostic]:
    """Reports the bit depths, what is not read, and bands that are probably not transparency."""
    if reading.range == "auto":
        for domain, bits in found.depths.items():
            text = f"The domain '{domain}' uses {bits} bits: white is {2**bits - 1}."
            yield note("deep-images", text)
        if len(set(found.depths.values())) > 1:
            depths = ", ".join(f"{domain} {bits}" for domain, bits in found.depths.items())
            text = f"The bit depths of domains differ ({depths})."
            yield warning("bit-depths-differ", text)
    for domain, file in found.paged.items():
        text = (
            f"TIFFs of the domain '{domain}' have several pages; only the first is read ({file})."
        )
        yield note("pages-left-out", text)
    if reading.bands:
        return
    for domain, file in found.veiled.items():
        yield warning(
            "half-transparent",
            f"Images of the domain '{domain}' are mostly half transparent ({file}).",
            "If the fourth band is near infrared, set data.bands: [1, 2, 3], or they turn white.",
        )


def files_by_domain(table: ImageTable) -> dict[str, list[str]]:
    """Returns the distinct files of each domain, in the table's order."""
    files = grouped(dict.fromkeys(zip(table.domains.tolist(), map(file_of, table.paths))))
    return {name: files.get(domain, []) for domain, name in enumerate(table.domain_names)}


def evenly(items: Sequence[Item], count: int) -> list[Item]:
    """Returns at most ``count`` items, evenly spaced."""
    count = min(count, len(items))
    return [items[place * len(items) // count] for place in range(count)]


def _looks(files: Sequence[Path], reading: Reading) -> list[tuple[int, bool]]:
    """Returns files' bit depths (0 for 8 bits), and whether their fourth bands look odd."""
    tiled = reading.tile is not None

    def look(file: Path) -> tuple[int, bool]:
        samples = _samples(file, deep_only=True, most=MOST_TILED_PIXELS if tiled else MOST_PIXELS)
        if samples is None:
            return 0, False
        veil, values = samples.alpha and _half_transparent(samples.values[:, :, -1]), samples.values
        colours, bands = samples.colours, reading.bands
        if bands and max(bands) <= values.shape[2]:  # else decoding says so
            colours = values[:, :, [band - 1 for band in bands]]
        return (0 if values.dtype == np.uint8 else bits_used(colours)), veil

    with quiet_pillow(tiled=tiled), ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(look, files))


def _has_pages(path: Path) -> bool:
    try:
        with open_image(path) as image:
            tags = getattr(image, "tag_v2", None)  # of a TIFF
            return tags is not None and bool(tags.next)
    except Exception:  # decoding says what is wrong with it
        return False


def _samples(path: Path, *, deep_only: bool = False, most: int = MOST_PIXELS) -> Samples | None:
    """Returns the raw values of a file; None if it is too large to look at, or damaged.

    Args:
        path: the file.
        deep_only: whether to skip files of 8 bits without transparency.
        most: the largest number of pixels to look at.
    """
    try:
        with open_image(path) as image:
            if image is None:
                return read_tiff(path)
            pixels = image.size[0] * image.size[1]
            if pixels > most:
                return None
            if deep_only and not is_deep(image) and image.mode not in ("LA", "RGBA"):
                return None
            with nullcontext() if pixels <= MOST_PIXELS else ONE_HUGE_IMAGE:
                return read_samples(path, image)
    except Exception:  # decoding says what is wrong with it
        return None


def is_readable(path: Path) -> bool:
    """Returns whether an image file's values can be read."""
    with quiet_pillow():
        return _samples(path) is not None


def _half_transparent(alpha: np.ndarray) -> bool:
    most = 255 if alpha.dtype == np.uint8 else 2**16 - 1
    return bool(((alpha > 0) & (alpha < most)).mean() > _SEE_THROUGH)


def stored_images(table: ImageTable) -> dict[str, dict[str, object]]:
    """Reads the header of every file, and the values of up to ``SAMPLE`` files of each domain.

    Args:
        table: all images; rendered ones are skipped.

    Returns:
        By domain: ``files`` (how many, including unusable ones); width and height of the image with
        the fewest pixels (``smallest``, (0, 0) if none opens), of the median one (``middle``) and
        of the one with the most (``largest``); ``modes`` (files of each kind, such as ``RGB`` or
        ``uint16 x 4``); and of the sample ``bits`` (the depth that values use), ``low``, ``high``
        and ``mean`` (of the values over all bands) and ``sampled`` (files).
    """
    if table.root is None:
        return {}
    stored: dict[str, dict[str, object]] = {}
    with quiet_pillow(tiled=True), ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for domain, files in files_by_domain(table).items():
            heads = list(filter(None, pool.map(_head, map(table.root.joinpath, files))))
            heads.sort(key=lambda head: (head[0] * head[1], head))
            sizes = [head[:2] for head in heads] or [(0, 0)]
            modes = dict(Counter(mode for _, _, mode in heads).most_common())
            if len(heads) < len(files):
                modes["cannot be opened"] = len(files) - len(heads)
            looked_at = map(table.root.joinpath, evenly(files, SAMPLE))
            sample = list(filter(None, pool.map(_values, looked_at)))
            bits, low, high, mean = zip(*sample) if sample else ((0,), (0.0,), (0.0,), (0.0,))
            stored[domain] = {
                "files": len(files),
                "smallest": sizes[0],
                "middle": sizes[len(sizes) // 2],
                "largest": sizes[-1],
                "modes": modes,
                "bits": max(bits),
                "low": min(low),
                "high": max(high),
                "mean": float(np.mean(mean)),
                "sampled": len(sample),
            }
    return stored


def _head(path: Path) -> tuple[int, int, str] | None:
    """Returns width, height and kind of a file; None if it cannot be opened."""
    try:
        with open_image(path) as image:
            if image is None:
                height, width, bands = (values := read_tiff(path).values).shape
                return width, height, f"{values.dtype} x {bands}"
            deep = is_deep(image) and image.mode in ("RGB", "RGBA")
            return (*image.size, f"16 bits x {len(image.getbands())}" if deep else image.mode)
    except Exception:  # decoding says what is wrong with it
        return None


def _values(path: Path) -> tuple[int, float, float, float] | None:
    """Returns bit depth, smallest, largest and mean value of a file; None if it cannot be read."""
    samples = _samples(path)
    numbers = np.empty(0) if samples is None else samples.colours
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return None
    bits = 8 if numbers.dtype == np.uint8 else bits_used(numbers)
    return bits, float(numbers.min()), float(numbers.max()), float(numbers.mean())
