"""Makes a collection with patients from the nuclei, by `python examples/clinic.py FOLDER`.

Each microscope image is a patient, its four quarters are what was taken of it: FOLDER/table.csv
names them with the class (dense or sparse), kind of microscope, patient, and two further columns.
"""

import csv
import io
import sys
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

DENSE = 0.12
"""From this share of pixels in nuclei on, a quarter is dense."""


def main(out: Path) -> None:
    """Writes the quarters and their table."""
    rows = [("path", "label", "domain", "group", "light", "side")]
    with zipfile.ZipFile(Path(__file__).with_name("nuclei.zip")) as archive:
        for name in sorted(n for n in archive.namelist() if "/images/" in n):
            if name.startswith("brightfield"):
                continue  # nothing there is dense
            kind, _, file = name.split("/")
            mask = archive.read(f"{kind}/masks/{Path(file).stem}.png")
            nuclei = np.array(Image.open(io.BytesIO(mask)).convert("L")) > 0
            image = np.array(Image.open(io.BytesIO(archive.read(name))).convert("RGB"))
            light = "bright" if image.mean() > 60 else "dark"
            for place in range(4):
                top, left = 64 * (place // 2), 64 * (place % 2)
                down, across = slice(top, top + 64), slice(left, left + 64)
                label = "dense" if nuclei[down, across].mean() >= DENSE else "sparse"
                path = Path(kind, f"{Path(file).stem}_{place}.png")
                (out / path).parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image[down, across]).save(out / path)
                side = "right" if place % 2 else "left"
                rows.append((path.as_posix(), label, kind, Path(file).stem, light, side))
    with (out / "table.csv").open("w", newline="", encoding="utf-8") as table:
        csv.writer(table).writerows(rows)
    print(
        f"{len(rows) - 1} images of {len({row[3] for row in rows[1:]})} patients: {out}/table.csv"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
