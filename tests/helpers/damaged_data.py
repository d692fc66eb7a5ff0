"""Damaged images, caches, stylized copies, split files, weights, experiment files and plans."""

import errno
import os
import pickle
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
from PIL import Image

from damage import SIZE, Case, Place
from feddg import storage
from feddg.comparison.plan import load_plan
from feddg.data.decoded import open_pixels
from feddg.data.images import from_folder
from feddg.data.pixels import PixelStore
from feddg.data.protocols import from_csv
from feddg.experiment import load_experiment
from odd_inputs import DEEP, cut, flip, folder, loop, pipe, write

IMAGES, CACHE, STYLIZED = (
    "Images",
    "The cache of decoded images",
    "stylized copies and other results kept",
)
FILES, PLANS, SPLITS = "An experiment file", "A plan", "Split files"
EPS = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n"


def opened(root: Path, cache: Path | None = None) -> tuple[list[str], PixelStore]:
    """Lists and opens images; returns the paths that are used."""
    table, pixels, _ = open_pixels(from_folder(root), SIZE, cache=cache)
    pixels.gather(range(len(table)))
    return list(table.paths), pixels


def strange(name: str | bytes, put: Callable[[Path], Any]) -> Callable[[Place], None]:
    """Opens images of which one was replaced by something strange; the others are used."""

    def play(place: Place) -> None:
        own = place.images / "a" / "cat"
        (own / "0.png").unlink()
        put(own / os.fsdecode(name))
        used, _ = opened(place.images)
        assert len(used) == 23
        assert not any(path.endswith("0.png") for path in used if path.startswith("a/cat"))

    return play


def alone(put: Callable[[Path], Any]) -> Callable[[Place], Any]:
    """Opens a folder of images that is none."""

    def play(place: Place) -> None:
        put(place.root / "odd")
        opened(place.root / "odd")

    return play


def bind(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path may not be long
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def gone_after_listing(place: Place) -> None:
    table = from_folder(place.images)
    (place.images / table.paths[0]).unlink()
    kept, _, bad = open_pixels(table, SIZE, cache=None)
    assert (len(kept), bad[0].reason) == (23, "file not found")


def changed_while_decoding(place: Place) -> None:
    table = from_folder(place.images)

    def progress(what: str, done: int, total: int) -> None:
        if done == 24:
            Image.new("RGB", (9, 9)).save(place.images / table.paths[0])

    open_pixels(table, SIZE, cache=place.root / "cache", progress=progress)


def bomb(path: Path) -> None:
    Image.new("1", (30_000, 30_000)).save(path, "PNG")


LEFT_OUT = "one line, and it is left out"
NO_FILE = r"1 entries of .*a/cat, as .*, are named like images and left out"
CASES: list[Case] = [
    *(
        Case(IMAGES, what, strange(name, put), said=said)
        for what, name, put, said in (
            ("a folder named like an image", "x.jpg", folder, NO_FILE),
            ("a pipe named like an image", "x.jpg", pipe, NO_FILE),
            ("a socket named like an image", "x.jpg", bind, NO_FILE),
            ("a link to itself named like an image", "x.jpg", loop, NO_FILE),
            (
                "a link to a device named like an image",
                "x.jpg",
                lambda p: p.symlink_to("/dev/zero"),
                NO_FILE,
            ),
            ("a link to nowhere", "x.jpg", lambda p: p.symlink_to("none"), NO_FILE),
            (
                "a name with a line break",
                "x\ny.png",
                Image.new("RGB", (8, 8)).save,
                r"as 'x\\ny\.png', are named like images",
            ),
            (
                "a name that is no UTF-8",
                b"x\xff.png",
                Image.new("RGB", (8, 8)).save,
                "cannot be printed",
            ),
            ("a PostScript file called .png", "x.png", write(EPS), "not an image in a known"),
            ("a PDF called .jpg", "x.jpg", write("%PDF-1.4\n"), "not an image in a known"),
            (
                "a PCX file called .png",
                "x.png",
                lambda p: Image.new("RGB", (8, 8)).save(p, "PCX"),
                "not an image in a known",
            ),
            ("a page of the web called .jpg", "x.jpg", write("<html>"), "not an image in a known"),
            ("900 million pixels in a small file", "x.png", bomb, "more than 89,478,485 pixels"),
        )
    ),
    Case(
        IMAGES,
        "a file is removed after it was listed",
        gone_after_listing,
        said="file not found",
    ),
    Case(
        IMAGES,
        "a file is replaced while the cache is made",
        changed_while_decoding,
        error="were changed while they were decoded",
    ),
    *(
        Case(IMAGES, what, alone(put), error=error)
        for what, put, error in (
            ("the folder is a pipe", pipe, "not a folder"),
            ("the folder is a link to itself", loop, "not a folder"),
            (
                "a domain's name has a line break",
                lambda p: (p / "a\nb" / "cat").mkdir(parents=True),
                r"The folder 'a\\nb' .* cannot be printed",
            ),
        )
    ),
]


def cached(kind: str, damage: Callable[[Path], Any]) -> Callable[[Place], None]:
    """Opens images from a cache that was damaged; what comes out is what went in."""

    def play(place: Place) -> None:
        cache = place.root / "cache"
        _, first = opened(place.images, cache)
        expected = first.gather(range(24))
        (file,) = cache.glob(f"{kind}-*")
        damage(file)
        _, again = opened(place.images, cache)
        assert (again.gather(range(24)) == expected).all()
        (pixels,) = cache.glob("pixels-*")
        damaged_no_more = numpy.load(pixels)
        assert (damaged_no_more.transpose(0, 3, 1, 2) == expected.numpy()).all()

    return play


def same_size_and_time(place: Place) -> None:
    cache, path = place.root / "cache", place.images / "a" / "cat" / "0.bmp"
    Image.new("RGB", (SIZE, SIZE), "red").save(path)
    _, pixels = opened(place.images, cache)
    before, status = pixels.gather([0]), path.stat()
    Image.new("RGB", (SIZE, SIZE), "blue").save(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    _, pixels = opened(place.images, cache)
    assert (pixels.gather([0]) != before).any()


def half_made(place: Place) -> None:
    cache = place.root / "cache"
    left = [cache / f"partial-{'0' * 32}", cache / f".{'0' * 24}-stylized.npy.4194305.1"]
    left[0].mkdir(parents=True)
    left[1].write_text("half")
    for path in left:
        os.utime(path, (0, time.time() - 100_000))
    opened(place.images, cache)
    assert not any(path.exists() for path in left)


def pickled(path: Path) -> None:
    numpy.save(path, numpy.array([{"a": 1}] * 24, dtype=object), allow_pickle=True)


DAMAGED = "is damaged; the images are decoded"
CASES += [
    *(
        Case(CACHE, f"`{kind}-*` {how}", cached(kind, damage), said=line)
        for kind, how, damage, line in (
            ("pixels", "is missing", os.unlink, None),
            ("pixels", "is a pipe", pipe, DAMAGED),
            ("pixels", "holds a pickle", pickled, DAMAGED),
            ("checked", "has a flipped bit", lambda p: flip(p, 0.5), DAMAGED),
            ("checked", "is deep", write(DEEP), DAMAGED),
            ("checked", "is a pipe", pipe, DAMAGED),
        )
    ),
    Case(
        CACHE,
        "an image was changed, its size and time were not",
        same_size_and_time,
    ),
    Case(CACHE, "what killed processes left half-made", half_made),
]


def kept(damage: Callable[[Path], Any], *, stays: bool = False) -> Callable[[Place], None]:
    """Opens a kept array that was damaged; it is what it was."""

    def play(place: Place) -> None:
        path, array = place.root / "cache" / "kept.npy", numpy.arange(1000.0)
        assert (storage.kept_array(path, lambda: array) == array).all()
        damage(path)
        assert (storage.kept_array(path, lambda: array.copy()) == array).all()
        assert stays or (storage.open_array(path) == array).all()

    return play


def full_disk(place: Place) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    real, array = storage.replace_file, numpy.arange(10.0)
    storage.replace_file = full  # type: ignore[assignment]
    try:
        found = storage.kept_array(place.root / "cache" / "kept.npy", lambda: array)
    finally:
        storage.replace_file = real
    assert (found == array).all()


CASES += [
    *(
        Case(STYLIZED, f"a file {how}", kept(damage), said="is damaged .* computed again")
        for how, damage in {
            "is cut short": cut,
            "is empty": write(""),
            "holds a pickle": lambda p: p.write_bytes(pickle.dumps([1])),
            "is a pipe": pipe,
            "is a link to itself": loop,
        }.items()
    ),
    Case(
        STYLIZED,
        "a file is a folder",
        kept(folder, stays=True),
        said="Cannot keep what is computed once in .*: Is a directory",
    ),
    Case(
        STYLIZED,
        "the disk is full",
        full_disk,
        said="Cannot keep what is computed once in .*: No space left",
    ),
]


def split(put: Callable[[Path], Any]) -> Callable[[Place], Any]:
    def play(place: Place) -> None:
        put(place.root / "split.csv")
        from_csv(from_folder(place.images), place.root / "split.csv")

    return play


CASES += [
    Case(SPLITS, what, play, error=error)
    for what, play, error in (
        ("the split file lacks columns", split(write("a,b\n")), "has no column 'split'"),
        (
            "the split file lists an image twice",
            split(write("split,path\ntrain,a/cat/0.png\ntest,a/cat/0.png\n")),
            "lists a/cat/0.png twice",
        ),
    )
]


def said(read: Callable[[Path], Any], put: Callable[[Path], Any]) -> Callable[[Place], None]:
    def play(place: Place) -> None:
        put(place.root / "said.yaml")
        read(place.root / "said.yaml")

    return play


YAML = (
    ("it is a word", write("seed\n"), "must hold fields"),
    ("it is indented with tabs", write("train:\n\tlr: 1\n"), r"is not valid YAML: .*\(line 2"),
    ("it is nested 60 levels deep", write(f"a: {'[' * 60}{']' * 60}"), "more than 50 levels"),
    ("a value holds itself", write("data: &a [*a]\n"), "more than 100,000 values"),
    ("a field is said twice", write("seed: 1\nseed: 2\n"), "'seed' is said twice .line 2"),
    ("a field's name is a number", write("1: 2\n"), "has a field whose name is not text: 1"),
    ("a field's name is a list", write("[1]: 2\n"), "is not valid YAML"),
    ("it makes an object of Python", write("a: !!python/object:os.x {}\n"), "is not valid YAML"),
    ("a field is unknown", write("sed: 1\n"), "sed"),
)
CASES += [
    Case(family, what, said(read, put), error=error)
    for family, read in ((FILES, load_experiment), (PLANS, load_plan))
    for what, put, error in YAML
]
CASES += [
    *(
        Case(FILES, what, said(load_experiment, write(text)), error=e)
        for what, text, e in (
            ("a part is a list", "train: [1]\n", "train: must hold fields"),
            ("a part is a number", "data: 3\n", "data: must hold fields"),
            ("the method's name is a list", "method: {name: [a]}\n", "method"),
            (
                "the method's settings are a list",
                "method: {name: sfa, settings: [1]}\n",
                "settings",
            ),
            ("a number is NaN", "train: {lr: .nan}\n", r"train\.lr: .*"),
            ("a number is infinite", "train: {lr: .inf}\n", r"train\.lr: .*finite"),
            ("a number has 5,000 digits", "seed: 1" + "0" * 5000 + "\n", "seed|not valid YAML"),
            ("a number is a date", "seed: 2020-01-01\n", "seed: .*integer"),
            (
                "clients are too many",
                "clients: {number: 2, per_round: 9}\n",
                "per_round is 9",
            ),
            ("a defence is a number", "defences: [3]\n", "defences"),
        )
    ),
    *(
        Case(PLANS, what, said(load_plan, write(text)), error=error)
        for what, text, error in (
            ("its methods are a number", "methods: 3\n", "methods"),
            ("its seeds are words", "methods: [fedavg]\nseeds: [a]\n", "seeds"),
        )
    ),
    Case(
        FILES,
        "it begins with a byte order mark",
        lambda p: load_experiment(p.file("e.yaml", "\ufeffseed: 7\n")).seed == 7 or 1 / 0,
    ),
    Case(
        FILES,
        "a part of which nothing is said",
        lambda p: load_experiment(p.file("e.yaml", "train:\nseed: 7\n")).seed == 7 or 1 / 0,
    ),
]
