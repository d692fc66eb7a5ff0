"""What a folder of one's own gets by default: what was tried for it, and what it is worth.

    python benchmarks/without_weights/folder.py choose PACS OUT.csv --work FOLDER
    python benchmarks/without_weights/folder.py defaults PACS OUT.csv --work FOLDER

``choose``: EfficientNet-Lite0 with packaged weights, trained as :data:`TRIED` says, a quarter of
the images set aside for in-domain validation. ``defaults``: the default, and ``--weights none``,
each domain held out. Images of a domain are drawn once; rows in OUT.csv are not run again.
"""

import argparse
import csv
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import feddg
from feddg.records import EMA, ID_VAL, TEST

TRIED = {
    100: [
        ("random", "head", 224, 1e-3, 20),
        ("random", "head", 224, 1e-2, 20),
        ("random", "head", 224, 3e-2, 20),
        ("random", "head", 128, 1e-2, 20),
        ("random", "all", 96, 1e-3, 20),
        ("random", "all", 128, 3e-4, 20),
        ("random", "all", 128, 1e-3, 20),
        *(("ridge", "head", size, 0.0, 0) for size in (96, 128, 160, 224)),
        ("ridge", "head", 224, 1e-3, 20),
        ("ridge", "all", 128, 1e-4, 5),
        ("ridge", "all", 160, 1e-4, 5),
    ],
    400: [
        *(("ridge", "head", size, 0.0, 0) for size in (160, 224)),
        ("ridge", "all", 160, 3e-5, 5),
        ("ridge", "all", 160, 1e-4, 5),
        ("ridge", "all", 224, 1e-4, 5),
        ("random", "all", 160, 1e-4, 20),
    ],
    2000: [
        *(("ridge", "head", size, 0.0, 0) for size in (160, 224)),
        ("ridge", "all", 160, 1e-4, 5),
        ("ridge", "all", 160, 3e-5, 5),
    ],
}
"""By images a domain: the classifier's start, what is trained, pixels, learning rate, rounds."""
SETTINGS = ("images_a_domain", "head", "trainable", "size", "lr", "rounds", "held")
FIGURES = ("id_val", "unseen", "cpu_seconds")


def drawn(pacs: Path, images: int | str, work: Path) -> Path:
    """Returns a folder of so many images of each domain (or "all"), the same ones every time."""
    if isinstance(images, str):
        return pacs
    root = work / f"pacs{images}"
    if root.is_dir():
        return root
    for domain in sorted(folder for folder in pacs.iterdir() if folder.is_dir()):
        files = sorted(file for file in domain.glob("*/*") if file.is_file())
        random.Random(0).shuffle(files)
        for file in files[:images]:
            target = root / domain.name / file.parent.name / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    return root


def measured(root: Path, work: Path, held: str, fields: dict[str, Any]) -> dict[str, str]:
    """Carries a run out; returns its accuracies, means over domains, and its CPU seconds."""
    data = {"source": "folder", "root": root, "duplicates": "warn", **fields.pop("data", {})}
    evaluate = {"every": 1000, "pictures": False}
    started = time.process_time()
    done = feddg.run(
        data=data, hold_out=held, evaluate=evaluate, **fields, out=work / "runs", report=False
    )
    seconds = time.process_time() - started
    last = done.table.where(round=done.rounds_done, weights=EMA)
    means = {split: f"{100 * last.value(split):.1f}" for split in (ID_VAL, TEST)}
    return dict(zip(FIGURES, (means[ID_VAL], means[TEST], f"{seconds:.0f}")))


def tried() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yields what to write down of a run, and the fields of its experiment."""
    for images, settings in TRIED.items():
        for values in settings:
            head, trainable, size, lr, rounds = values
            train: dict[str, Any] = {"head": head, "trainable": trainable, "rounds": rounds}
            train |= {"lr": lr} | ({"augmentation": "none"} if trainable == "head" else {})
            method = {"method": "fedavg", "train": train} if rounds else {"method": "ridge"}
            fields = {"data": {"image_size": size, "id_val": 0.25, "id_test": 0.05}, **method}
            for held in ("art_painting", "sketch"):
                yield dict(zip(SETTINGS, (images, *values, held))), fields


def by_default() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yields the same of the default and of what there is without weights."""
    for images in (60, 400, "all"):
        for name, fields in (("default", {}), ("from scratch", {"model": {"weights": None}})):
            for held in ("photo", "art_painting", "cartoon", "sketch"):
                yield {"images_a_domain": images, "default": name, "held": held}, fields


def main() -> None:
    """Measures what is not in the file yet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["choose", "defaults"])
    parser.add_argument("pacs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    given = parser.parse_args()
    rows = list(csv.DictReader(given.out.open())) if given.out.exists() else []
    for about, fields in tried() if given.what == "choose" else by_default():
        place = {name: str(value) for name, value in about.items()}
        if any(place.items() <= row.items() for row in rows):
            continue
        root = drawn(given.pacs, about["images_a_domain"], given.work)
        rows.append(place | measured(root, given.work, about["held"], dict(fields)))
        print(*rows[-1].values(), flush=True)
        with given.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
