"""Odd folders of images, one for each kind of mistake, and what is said of them."""

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import tifffile
from PIL import Image

from feddg.errors import FeddgError
from feddg.experiment import Experiment
from feddg.runs.prepare import load_images
from image_folders import make_folder, noise

USED, NOTES, WARNS, STOPS = "used", "note", "warning", "stops"
SEED = iter(range(10_000, 1_000_000))


@dataclass(frozen=True)
class Case:
    """One odd folder.

    Attributes:
        group: heading under which it is listed.
        what: what is odd, in words.
        build: makes the oddity in a folder of three domains (west is held out) of cats and dogs.
        outcome: what it leads to.
        said: words that must be among what is said.
        data: settings of the experiment's data.
        hold_out: the domain tested on.
        patched: objects replaced while images are loaded, to spare the test large files.
    """

    group: str
    what: str
    build: Callable[[Path], object]
    outcome: str
    said: str = ""
    data: Mapping[str, object] = field(default_factory=dict)
    hold_out: str = "west"
    patched: Mapping[str, object] = field(default_factory=dict)


def try_out(case: Case, folder: Path) -> tuple[str, list[str]]:
    """Builds a case's folder and loads it as a run does.

    Returns:
        What it leads to, and the lines said.
    """
    root = make_folder(folder / "images", ("north", "south", "west"), ("cat", "dog"), 3)
    case.build(root)
    lines: list[tuple[int, str]] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append((record.levelno, record.getMessage()))
    logger, level = logging.getLogger("feddg"), logging.getLogger("feddg").level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    patches = [patch(name, value) for name, value in case.patched.items()]
    for one in patches:
        one.start()
    error = None
    try:
        fields = {"source": "folder", "root": root, "image_size": 8, "id_val": 0, "id_test": 0}
        chosen = Experiment(
            data={**fields, **case.data},
            hold_out=case.hold_out,
            clients=2,
            model={"backbone": "cnn", "weights": None},
        )
        load_images(chosen, folder / "cache", lambda *_: None)
    except FeddgError as found:
        error = str(found)
    finally:
        for one in patches:
            one.stop()
        logger.removeHandler(handler)
        logger.setLevel(level)
    texts = [text for _, text in lines] + ([error] if error else [])
    worst = max((level for level, _ in lines), default=0)
    quiet = {0: USED, logging.INFO: NOTES}.get(worst, WARNS)
    return (STOPS if error else quiet), [text.replace(str(root), "images") for text in texts]


def _image() -> Image.Image:
    return noise(next(SEED))


def _save(path: str, image: Image.Image | None = None, **options: object) -> Callable[[Path], None]:
    def build(root: Path) -> None:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        (image or _image()).save(file, **options)

    return build


def _write(path: str, content: bytes = b"") -> Callable[[Path], None]:
    def build(root: Path) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)

    return build


def _cut_off(path: str) -> Callable[[Path], None]:
    def build(root: Path) -> None:
        _save(path, noise(next(SEED), 64))(root)
        (root / path).write_bytes((root / path).read_bytes()[:2000])

    return build


def _folders(*paths: str) -> Callable[[Path], None]:
    return lambda root: [(root / path).mkdir(parents=True) for path in paths]


def _more(domains: tuple[str, ...], classes: tuple[str, ...]) -> Callable[[Path], None]:
    def build(root: Path) -> None:
        for domain in domains:
            for name in classes:
                for number in range(3):
                    _save(f"{domain}/{name}/{number}.png")(root)

    return build


def _remove(*patterns: str) -> Callable[[Path], None]:
    return lambda root: [shutil.rmtree(p) for pattern in patterns for p in root.glob(pattern)]


def _spoil(pattern: str) -> Callable[[Path], None]:
    return lambda root: [file.write_text("no image") for file in sorted(root.glob(pattern))]


def _copy(source: str, *targets: str) -> Callable[[Path], None]:
    return lambda root: [shutil.copy(root / source, root / target) for target in targets]


def _all(*builds: Callable[[Path], object]) -> Callable[[Path], None]:
    return lambda root: [build(root) for build in builds]


def _deep(path: str, bits: int, bands: int = 1, **options: object) -> Callable[[Path], None]:
    def build(root: Path) -> None:
        values = np.random.default_rng(next(SEED)).integers(0, 2**bits, (16, 16, bands))
        values[0, 0] = 2**bits - 1
        kind = np.uint8 if bits <= 8 else np.uint16
        photometric = "rgb" if bands in (3, 4) else "minisblack"
        file = root / path
        data = values.astype(kind).squeeze()
        tifffile.imwrite(file, data, photometric=photometric, **options)

    return build


def _floats(path: str) -> Callable[[Path], None]:
    values = np.linspace(-3, 900, 256, dtype=np.float32).reshape(16, 16)
    return lambda root: tifffile.imwrite(root / path, values)


def _logo() -> Image.Image:
    logo = Image.new("RGBA", (16, 16), (255, 0, 0, 0))
    logo.paste((0, 0, 255, 255), (4, 4, 12, 12))
    return logo


def _one_too_deep(root: Path) -> None:
    for domain in ("north", "south", "west"):
        (root / "more").mkdir(exist_ok=True)
        shutil.move(root / domain, root / "more" / domain)


def _without_domains(root: Path) -> None:
    for name in ("cat", "dog"):
        shutil.move(root / "north" / name, root / name)
    _remove("north", "south", "west")(root)


def _file_instead(root: Path) -> None:
    shutil.rmtree(root)
    root.write_text("an archive")


def _turned(root: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    _save("north/cat/turned.jpg", _image(), exif=exif)(root)


FILES, PLACES, LABELS, COPIES = "Files", "Where files lie", "Labels and domains", "Copies"
PIXELS, SPLITS = "Pixels", "Splits"
EIGHT = {"planarconfig": "contig"}
ALPHA = {"extrasamples": ["unassalpha"]}
SMALL_LIMIT = {"feddg.data.decoding.MOST_PIXELS": 300, "feddg.data.inspection.MOST_PIXELS": 300}
WITHOUT_PACKAGES = {
    f"feddg.data.{module}.IMAGE_SUFFIXES": frozenset({".png", ".jpg", ".tif"})
    for module in ("images", "inspection")
}
CASES = [
    Case(FILES, "an empty file", _write("north/cat/a.jpg"), WARNS, "a.jpg (empty file)"),
    Case(FILES, "text named .jpg", _write("north/cat/a.jpg", b"cat"), WARNS, "not an image"),
    Case(FILES, "a JPEG cut off", _cut_off("north/cat/a.jpg"), WARNS, "1 of 19 images left out"),
    Case(FILES, "a PNG cut off", _cut_off("north/cat/a.png"), WARNS, "1 of 19 images left out"),
    Case(FILES, "a TIFF cut off", _cut_off("north/cat/a.tif"), WARNS, "1 of 19 images left out"),
    Case(
        FILES,
        "a bad file, with `on_bad_image: fail`",
        _write("north/cat/a.jpg"),
        STOPS,
        "on_bad_image: skip",
        {"on_bad_image": "fail"},
    ),
    Case(FILES, "every file is bad", _spoil("*/*/*"), STOPS, "None of the 18 images"),
    Case(FILES, "a PNG named .jpg", _save("north/cat/a.jpg", format="PNG"), USED),
    Case(FILES, "endings in capitals", _save("north/cat/A.JPG"), USED),
    Case(FILES, "a .jfif", _save("north/cat/a.jfif", format="JPEG"), USED),
    Case(FILES, "a .jp2", _save("north/cat/a.jp2"), USED),
    Case(FILES, "an .avif", _save("north/cat/a.avif"), USED),
    Case(FILES, "a .webp", _save("north/cat/a.webp"), USED),
    Case(
        FILES,
        "a .heic, without pillow-heif",
        _write("north/cat/a.heic"),
        WARNS,
        "feddg[heic]",
        patched=WITHOUT_PACKAGES,
    ),
    Case(FILES, "a whole slide, .svs", _write("north/cat/a.svs"), WARNS, "OpenSlide"),
    Case(
        FILES,
        "two DICOM files, without pydicom",
        _all(_write("north/cat/a.dcm"), _write("north/dog/b.dcm")),
        WARNS,
        "2 files (north/cat/a.dcm, north/dog/b.dcm) ending in .dcm: needs `pip install "
        "'feddg[dicom]'`",
        patched=WITHOUT_PACKAGES,
    ),
    Case(FILES, "a volume, .nii", _write("north/cat/a.nii"), WARNS, "PNG or TIFF"),
    Case(FILES, "an array, .npy", _write("north/cat/a.npy"), WARNS, "arrays"),
    Case(FILES, "an archive", _write("images.zip"), WARNS, "unpack"),
    Case(FILES, "a film", _write("north/cat/a.mp4"), WARNS, "frames"),
    Case(FILES, "a raw photo", _write("north/cat/a.cr2"), WARNS, "develop"),
    Case(FILES, "a drawing, .svg", _write("north/cat/a.svg"), WARNS, "as PNG"),
    Case(FILES, "a readme", _write("readme.txt"), NOTES, "1 .txt"),
    Case(FILES, "Thumbs.db of Windows", _write("north/cat/Thumbs.db"), NOTES, "1 .db"),
    Case(FILES, "a file without an ending", _write("north/LICENSE"), NOTES, "without a suffix"),
    Case(FILES, "hidden files", _write("north/cat/.DS_Store"), USED),
    Case(FILES, "a name of 200 letters", _save(f"north/cat/{'x' * 200}.png"), USED),
    Case(PLACES, "a folder in a class folder", _save("north/cat/more/a.png"), WARNS, "in deeper"),
    Case(PLACES, "an image beside class folders", _save("north/a.png"), WARNS, "outside a class"),
    Case(PLACES, "an image beside domains", _save("a.png"), WARNS, "outside a class"),
    Case(PLACES, "all one folder too deep", _one_too_deep, STOPS, "two levels above"),
    Case(PLACES, "no domain folders", _without_domains, STOPS, "two levels above"),
    Case(PLACES, "an empty folder", _remove("*"), STOPS, "It holds no folders"),
    Case(PLACES, "no such folder", shutil.rmtree, STOPS, "does not exist"),
    Case(PLACES, "a file in its place", _file_instead, STOPS, "not a folder"),
    Case(PLACES, "a hidden class folder", _save("north/.cache/a.png"), USED),
    Case(PLACES, "an empty domain folder", _folders("east"), WARNS, "left out"),
    Case(PLACES, "an empty class folder", _folders("north/cow"), WARNS, "'cow' has no images"),
    Case(
        PLACES,
        "a class folder empty in one domain",
        _more(("south", "west"), ("cow",)),
        NOTES,
        "north lacks cow",
    ),
    Case(LABELS, "`Cat` beside `cat`", _more(("north", "west"), ("Cat",)), WARNS, "spelling"),
    Case(
        LABELS,
        "`polar bear` beside `polar_bear`",
        _all(
            _more(("north", "south", "west"), ("polar bear",)),
            _more(("north", "south", "west"), ("polar_bear",)),
        ),
        WARNS,
        "spelling",
    ),
    Case(
        LABELS, "domains `North` and `north`", _more(("North",), ("cat", "dog")), WARNS, "domains"
    ),
    Case(LABELS, "names in any script", _more(("north", "west"), ("猫", "кот")), NOTES, "lacks"),
    Case(LABELS, "a class only in the test domain", _more(("west",), ("cow",)), STOPS, "'cow'"),
    Case(LABELS, "a class in one training domain only", _more(("north",), ("cow",)), NOTES, "cow"),
    Case(LABELS, "one class", _remove("*/dog"), STOPS, "Only the class 'cat'"),
    Case(LABELS, "one class left: the other's files are bad", _spoil("*/dog/*"), STOPS, "'cat'"),
    Case(LABELS, "one class left to train on", _remove("[ns]*/dog"), STOPS, "left to train on"),
    Case(
        LABELS,
        "a class whose files are all bad",
        _all(_more(("north", "west"), ("cow",)), _spoil("*/cow/*")),
        WARNS,
        "no usable image of the class 'cow'",
    ),
    Case(
        LABELS,
        "a domain that cannot be decoded",
        _spoil("south/*/*"),
        STOPS,
        "'south' has no usable image",
    ),
    Case(LABELS, "the test domain cannot be decoded", _spoil("west/*/*"), STOPS, "'west'"),
    Case(SPLITS, "an unknown held-out domain", _folders(), STOPS, "'west'", hold_out="wset"),
    Case(SPLITS, "only the held-out domain", _remove("north", "south"), STOPS, "left to train on"),
    Case(
        SPLITS,
        "four validation images",
        _more(("north", "south"), ("cow",)),
        WARNS,
        "picked by chance",
        {"id_val": 0.25},
    ),
    Case(COPIES, "in one class", _copy("north/cat/0.png", "north/cat/b.png"), NOTES, "1 image"),
    Case(
        COPIES,
        "in two classes",
        _copy("north/cat/0.png", "north/dog/b.png"),
        WARNS,
        "cat/0.png = north/dog/b.png",
    ),
    Case(COPIES, "in two domains", _copy("north/cat/0.png", "south/cat/b.png"), WARNS, "domains"),
    Case(
        COPIES,
        "of a training image in the test domain",
        _copy("north/cat/0.png", "west/cat/b.png"),
        STOPS,
        "data.duplicates: warn",
    ),
    Case(
        COPIES,
        "the same, with `duplicates: warn`",
        _copy("north/cat/0.png", "west/cat/b.png"),
        WARNS,
        "1 of test",
        {"duplicates": "warn"},
    ),
    Case(
        COPIES,
        "the same, with `duplicates: ignore`",
        _copy("north/cat/0.png", "west/cat/b.png"),
        USED,
        data={"duplicates": "ignore"},
    ),
    Case(PIXELS, "one pixel", _save("north/cat/a.png", Image.new("RGB", (1, 1))), USED),
    Case(PIXELS, "2000 x 4 pixels", _save("north/cat/a.png", Image.new("L", (2000, 4), 9)), USED),
    Case(PIXELS, "one bit", _save("north/cat/a.png", Image.new("1", (9, 9), 1)), USED),
    Case(PIXELS, "a palette", _save("north/cat/a.png", _image().quantize(8)), USED),
    Case(PIXELS, "CMYK", _save("north/cat/a.jpg", Image.new("CMYK", (9, 9), 5)), USED),
    Case(PIXELS, "transparency", _save("north/cat/a.png", _logo()), USED),
    Case(PIXELS, "a turned photograph", _turned, USED),
    Case(
        PIXELS,
        "a damaged tag block",
        _save("north/cat/a.png", noise(3), exif=b"Exif\0\0 no tags"),
        USED,
    ),
    Case(
        PIXELS,
        "an animation: its first frame",
        _save("north/cat/a.gif", noise(4), save_all=True, append_images=[noise(5)]),
        USED,
    ),
    Case(
        PIXELS,
        "several pages: the first",
        _save("north/cat/a.tif", noise(6), save_all=True, append_images=[noise(7)]),
        NOTES,
        "several pages; only the first is read (north/cat/a.tif)",
    ),
    Case(PIXELS, "11 of 16 bits", _deep("north/cat/a.tif", 11), NOTES, "11 bits: white is 2047"),
    Case(PIXELS, "12 of 16 bits, colour", _deep("north/cat/a.tif", 12, 3), NOTES, "12 bits"),
    Case(
        PIXELS,
        "domains of different depth",
        _all(_deep("north/cat/a.tif", 12), _deep("south/cat/a.tif", 16)),
        WARNS,
        "north 12, south 16",
    ),
    Case(
        PIXELS,
        "near infrared stored as transparency",
        _deep("north/cat/a.tif", 8, 4, **ALPHA),
        WARNS,
        "data.bands: [1, 2, 3]",
    ),
    Case(
        PIXELS,
        "the same, with `bands: [1, 2, 3]`",
        _deep("north/cat/a.tif", 8, 4, **ALPHA),
        USED,
        data={"bands": [1, 2, 3]},
    ),
    Case(
        PIXELS,
        "eight bands",
        _deep("north/cat/a.tif", 12, 8, **EIGHT),
        WARNS,
        "8 bands: choose three",
    ),
    Case(
        PIXELS,
        "bands that are not there",
        _folders(),
        STOPS,
        "3 bands, but data.bands asks for 4",
        {"bands": [4, 3, 2]},
    ),
    Case(PIXELS, "floating-point numbers", _floats("north/cat/a.tif"), WARNS, "range: percentile"),
    Case(
        PIXELS,
        "the same, with `range: percentile`",
        _floats("north/cat/a.tif"),
        USED,
        data={"range": "percentile"},
    ),
    Case(
        PIXELS,
        "an image too large to decode (20,000 x 15,000)",
        _save("north/cat/a.png", noise(8, 40)),
        WARNS,
        "data.tile: 512",
        patched=SMALL_LIMIT,
    ),
    Case(
        PIXELS,
        "the same, with `tile`",
        _save("north/cat/a.png", noise(8, 40)),
        USED,
        data={"tile": 16},
        patched=SMALL_LIMIT,
    ),
]


@pytest.mark.parametrize("group", dict.fromkeys(case.group for case in CASES))
def test_odd_folders_lead_to_what_they_should(group, tmp_path, subtests):
    for number, case in enumerate(case for case in CASES if case.group == group):
        with subtests.test(case.what):
            outcome, lines = try_out(case, tmp_path / str(number))
            assert outcome == case.outcome, lines
            assert case.said in "\n".join(lines)
            for line in lines:
                assert not [mark for mark in ("\n", "Traceback", "Error(") if mark in line]
