"""Small trees of every layout that published data sets come in: two images per class and split."""

import csv
import gzip
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from PIL import Image

from feddg.data.data_set import DATA_SETS
from feddg.data.images import ImageTable

SIDE = 8
_fresh = count(1)
DOMAIN_NET_CLASSES = ("The_Eiffel_Tower", "aircraft_carrier", "cell_phone", "cello", "t-shirt")
"""In the order of a case-sensitive sort."""


def image(path: Path, mode: str = "RGB", side: int = SIDE) -> Path:
    """Writes an image that is like no other."""
    bands = len(mode)
    pixels = np.random.default_rng(next(_fresh)).integers(0, 256, (side, side, bands), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.squeeze() if bands == 1 else pixels).save(path)
    return path


def images(root: Path, folders: Iterable[str], each: int = 2, suffix: str = "png") -> Path:
    """Writes images into folders below the root."""
    for folder in folders:
        for number in range(each):
            image(root / folder / f"{folder.replace('/', '_')}_{number}.{suffix}")
    return root


def _folders(*levels: Iterable[str]) -> list[str]:
    paths = [""]
    for level in map(list, levels):
        paths = [f"{path}/{name}" if path else name for path in paths for name in level]
    return paths


def _table(file: Path, names: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(names)
        writer.writerows(rows)


def pacs(root: Path) -> Path:
    definition = DATA_SETS["pacs"]
    return images(root, _folders(["kfold"], sorted(definition.domains), definition.classes))


def office_home(root: Path, fourth: str = "Real World", classes: int = 65) -> Path:
    names = DATA_SETS["office_home"].classes[:classes]
    domains = ["Art", "Clipart", "Product", fourth]
    return images(root, _folders(["OfficeHomeDataset_10072016"], domains, names))


def office_home_dassl(root: Path, classes: int = 65) -> Path:
    names = [name.lower() for name in DATA_SETS["office_home"].classes[:classes]]
    domains = ["art", "clipart", "product", "real_world"]
    return images(root, _folders(["office_home_dg"], domains, ["train", "val"], names))


def vlcs_folders(root: Path) -> Path:
    definition = DATA_SETS["vlcs"]
    return images(root, _folders(["VLCS"], definition.domains, definition.classes))


def vlcs_parts(root: Path, full: bool = True) -> Path:
    """JiGen's and Dassl's: numbers for classes, and ``full`` repeats the parts."""
    domains = ["CALTECH", "LABELME", "SUN", "PASCAL"]
    images(root, _folders(["VLCS"], domains, ["train", "crossval", "test"], "01234"))
    for file in sorted(root.glob("VLCS/*/*/*/*.png")) if full else ():
        repeated = file.parents[2] / "full" / file.parent.name / file.name
        repeated.parent.mkdir(parents=True, exist_ok=True)
        repeated.write_bytes(file.read_bytes())
    return root


def terra_folders(root: Path) -> Path:
    """One image of two animals lies in two class folders."""
    definition = DATA_SETS["terra_incognita"]
    images(root, _folders(["terra_incognita"], definition.domains, definition.classes))
    seen = image(root / "terra_incognita/location_38/coyote/both.png")
    (root / "terra_incognita/location_38/bird/both.png").write_bytes(seen.read_bytes())
    return root


def terra_raw(root: Path) -> Path:
    """LILA's: all images in one folder; other places and animals, and an image of two."""
    definition = DATA_SETS["terra_incognita"]
    kinds = [*definition.classes, "badger"]
    names = {kind: number for number, kind in enumerate(kinds)}
    shown, annotations = [], []
    for place in ("38", "43", "46", "100", "7"):
        for kind in kinds:
            for number in range(2):
                name = f"{place}-{kind}-{number}"
                image(root / f"eccv_18_all_images_sm/{name}.jpg")
                shown.append({"id": name, "file_name": f"{name}.jpg", "location": place})
                annotations.append({"image_id": name, "category_id": names[kind]})
    annotations.append({"image_id": "38-coyote-0", "category_id": names["bird"]})
    categories = [{"id": number, "name": name} for name, number in names.items()]
    half = len(annotations) // 2
    for part, own in (("train", annotations[:half]), ("trans_test", annotations[half:])):
        file = root / f"eccv_18_annotation_files/{part}_annotations.json"
        file.parent.mkdir(exist_ok=True)
        content = {"images": shown, "annotations": own, "categories": categories}
        file.write_text(json.dumps(content))
    return root


def domain_net_folders(root: Path) -> Path:
    domains = DATA_SETS["domain_net"].domains
    return images(root, _folders(["domain_net"], domains, DOMAIN_NET_CLASSES))


def domain_net_lists(root: Path, place: str = "", name: str = "domain_net") -> Path:
    """With the official lists, whose labels are in another order than a sort's."""
    definition = DATA_SETS[name]
    for domain in definition.domains:
        for part in ("train", "test"):
            lines = []
            for label, kind in enumerate(sorted(DOMAIN_NET_CLASSES, key=str.lower)):
                for number in range(2):
                    path = f"{domain}/{kind}/{domain}_{label}_{part}{number}.png"
                    image(root / "domainnet" / path)
                    lines.append(f"{path} {label}\n")
            file = root / "domainnet" / place / f"{domain}_{part}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(lines))
    return root


def mini_domain_net(root: Path) -> Path:
    return domain_net_lists(root, "splits_mini", "mini_domain_net")


def domain_net_wilds(root: Path) -> Path:
    rows = []
    for domain in DATA_SETS["domain_net"].domains:
        for part in ("train", "test"):
            for label, kind in enumerate(sorted(DOMAIN_NET_CLASSES, key=str.lower)):
                for number in range(2):
                    path = f"{domain}/{kind}/{part}{number}.png"
                    image(root / "domainnet_v1.0" / path)
                    rows.append((path, domain, part, kind, label))
    names = ("image_path", "domain", "split", "category", "y")
    _table(root / "domainnet_v1.0/metadata.csv", names, rows)
    return root


def camelyon17(root: Path) -> Path:
    """RGBA patches; a patient's number begins with zeros; the file knows the splits 0 and 1."""
    rows = []
    for center in range(5):
        patient = f"{4 + 20 * center:03}"
        for tumor in (0, 1):
            for split in (0, 1):
                for number in range(2):
                    x, y = 3328 + 32 * len(rows), 21792 + number
                    folder = f"patient_{patient}_node_{center % 2}"
                    name = f"patch_{folder}_x_{x}_y_{y}.png"
                    image(root / "camelyon17_v1.0/patches" / folder / name, "RGBA")
                    slide = 10 * center
                    rows.append((len(rows), patient, center % 2, x, y, tumor, slide, center, split))
    names = ("", "patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split")
    _table(root / "camelyon17_v1.0/metadata.csv", names, rows)
    return root


IWILDCAM_SPLITS = {"test": [0, 5], "train": [1, 3, 4], "val": [2]}
"""Locations by split, interleaved; those that train are in id_val and id_test, too."""


def iwildcam(root: Path) -> Path:
    home, rows = root / "iwildcam_v2.0", []
    for split, locations in IWILDCAM_SPLITS.items():
        roles = ("train", "id_val", "id_test") if split == "train" else (split,)
        for location in locations:
            for role in roles:
                for label in range(3):
                    for number in range(2):
                        name = f"{role}-{location}-{label}-{number}.jpg"
                        image(home / "train" / name)
                        when = f"2013-06-0{1 + number} 10:17:0{label}.000000"
                        place = (location, 100 + location, len(rows), "s")
                        kind = (label, 370 + label, when)
                        rows.append((len(rows), role, *place, *kind, name, name[:-4]))
    names = ("", "split", "location_remapped", "location", "sequence_remapped", "seq_id", "y")
    names += ("category_id", "datetime", "filename", "image_id")
    _table(home / "metadata.csv", names, rows)
    kinds = [(0, 370, "empty"), (99999, 5, "unused"), (1, 371, "deer, red"), (2, 372, "cat")]
    _table(home / "categories.csv", ("y", "category_id", "name"), kinds)
    (home / "RELEASE_v2.0.txt").write_text("")
    return root


def femnist_listed(root: Path, name: str = "metadata.csv") -> Path:
    rows = []
    roles = {0: ("train", "id_val", "id_test"), 1: ("train", "id_val", "id_test"), 2: ("val",)}
    for writer, own in (roles | {3: ("test",)}).items():
        for role in own:
            for label in (0, 36):
                for number in range(2):
                    path = f"images/{writer}_{role}_{label}_{number}.png"
                    image(root / "femnist_v1.0" / path, "L", 28)
                    rows.append((len(rows), path, role, label, writer))
    names = ("", "path", "split", "y", "domain_remapped")
    _table(root / "femnist_v1.0" / name, names, rows)
    return root


def digits_dg(root: Path) -> Path:
    domains = DATA_SETS["digits_dg"].domains
    return images(root, _folders(["digits_dg"], domains, ["train", "val"], "0123456789"))


def fed_isic2019(root: Path) -> Path:
    definition = DATA_SETS["fed_isic2019"]
    return images(root, _folders(definition.domains, ["train", "test"], definition.classes))


def office_caltech(root: Path) -> Path:
    definition = DATA_SETS["office_caltech"]
    return images(root, _folders(["office_caltech_10"], definition.domains, definition.classes))


def office_31(root: Path) -> Path:
    """Office-31's folders, and Caltech-256's names."""
    definition = DATA_SETS["office_caltech"]
    images(root, _folders(["amazon", "dslr", "webcam"], ["images"], definition.classes))
    caltech = ["003.backpack", "145.touring-bike", "027.calculator", "101.head-phones"]
    caltech += ["045.computer-keyboard", "127.laptop-101", "046.computer-monitor"]
    caltech += ["047.computer-mouse", "041.coffee-mug", "238.video-projector"]
    return images(root, _folders(["caltech"], ["images"], caltech))


def mnist(root: Path, packed: bool = True, each: int = 12) -> Path:
    """MNIST's four files: ``each`` digits of every class in both parts."""
    random = np.random.default_rng(4)
    folder = root / "MNIST/raw"
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        labels = np.repeat(np.arange(10, dtype=np.uint8), each)
        digits = random.integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
        head = struct.pack(">4i", 2051, *digits.shape)
        _binary(folder / f"{part}-images-idx3-ubyte", head + digits.tobytes(), packed)
        _binary(
            folder / f"{part}-labels-idx1-ubyte",
            struct.pack(">2i", 2049, len(labels)) + labels.tobytes(),
            packed,
        )
    return root


def _binary(file: Path, content: bytes, packed: bool) -> None:
    if packed:
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(content))
    else:
        file.write_bytes(content)


@dataclass(frozen=True)
class Layout:
    """A data set in one of its layouts, and how experiments split it."""

    source: str
    make: Callable[[Path], Path]
    official: bool = False


LAYOUTS = {
    "pacs": Layout("pacs", pacs),
    "office_home": Layout("office_home", office_home),
    "office_home_dassl": Layout("office_home", office_home_dassl),
    "vlcs_folders": Layout("vlcs", vlcs_folders),
    "vlcs_parts": Layout("vlcs", vlcs_parts),
    "terra_folders": Layout("terra_incognita", terra_folders),
    "terra_raw": Layout("terra_incognita", terra_raw),
    "domain_net_folders": Layout("domain_net", domain_net_folders),
    "domain_net_lists": Layout("domain_net", domain_net_lists),
    "domain_net_wilds": Layout("domain_net", domain_net_wilds),
    "mini_domain_net": Layout("mini_domain_net", mini_domain_net),
    "camelyon17": Layout("camelyon17", camelyon17, official=True),
    "iwildcam": Layout("iwildcam", iwildcam, official=True),
    "femnist_listed": Layout("femnist", femnist_listed, official=True),
    "digits_dg": Layout("digits_dg", digits_dg),
    "fed_isic2019": Layout("fed_isic2019", fed_isic2019),
    "rotated_mnist": Layout("rotated_mnist", mnist),
    "office_caltech": Layout("office_caltech", office_caltech),
    "office_31": Layout("office_caltech", office_31),
}


def rows(table: ImageTable) -> list[tuple[str, str, str]]:
    """Path, class and domain of every row, in words."""
    return [
        (path, table.class_names[label], table.domain_names[domain])
        for path, label, domain in zip(table.paths, table.labels, table.domains)
    ]


def by_split(table: ImageTable) -> dict[str, int]:
    """How many rows each split has."""
    return dict(Counter(table.split.tolist()))


def write_tree(root: Path, domains: tuple[str, ...], classes: tuple[str, ...]) -> Path:
    """Two empty files for each domain and class."""
    for domain in domains:
        for label in classes:
            (root / domain / label).mkdir(parents=True)
            for number in (1, 2):
                (root / domain / label / f"{number}.jpg").write_bytes(b"")
    return root


NAMES = ("path", "label", "domain", "client", "split")
"""Columns of a table of images."""


def write_table(file: Path, rows, names=NAMES) -> Path:
    """Writes a table of images."""
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened)
        writer.writerow(names)
        writer.writerows(rows)
    return file


def hospital(root: Path, each: int = 2) -> list[list[str]]:
    """Rows of images of three hospitals, two patients each; every patient has both classes."""
    rows = []
    for domain in ("north", "south", "west"):
        for patient in ("1", "2"):
            for label in ("healthy", "ill"):
                for split in ("train", "val"):
                    for number in range(each):
                        path = f"scans/{domain}{patient}{label}{split}{number}.png"
                        image(root / path)
                        rows.append([path, label, domain, f"{domain}-{patient}", split])
    return rows


def one_image(root: Path | None, colour: int = 0) -> ImageTable:
    zero = np.zeros(1, dtype=np.int64)
    image = np.full((1, 2, 2, 3), colour, dtype=np.uint8)
    return ImageTable(("a/b/1",), zero, zero, ("b",), ("a",), images=image)
