"""Which model should a run from scratch serve?

    python benchmarks/without_weights/measure.py --out FOLDER

The built-in digits written out as folders, each domain held out, as runs without weights go by
default but at 32 pixels: the last round's model and the mean of the later rounds' ("swa") on the
same images. Printed: one row a run, accuracy in percent.
"""

import argparse
import shutil
import time
from pathlib import Path

import numpy
from PIL import Image

import feddg
from feddg.data.data_set import load_source
from feddg.data.images import ImageTable
from feddg.runs.reading import read_run


def chosen(table: ImageTable, domain: str, count: int) -> list[int]:
    """Returns image numbers of a domain, spread over its classes, always the same."""
    own = numpy.flatnonzero(table.domains == table.domain_names.index(domain))
    rng = numpy.random.default_rng(0)
    by_class = [rng.permutation(own[table.labels[own] == c]) for c in set(table.labels[own])]
    turns = [(place, int(row)) for rows in by_class for place, row in enumerate(rows)]
    return [row for _, row in sorted(turns)[:count]]


def write_folder(table: ImageTable, counts: dict[str, int], root: Path) -> Path:
    """Writes so many images of each domain as root/domain/class/*."""
    shutil.rmtree(root, ignore_errors=True)
    for domain, count in counts.items():
        for row in chosen(table, domain, count):
            name = table.class_names[table.labels[row]]
            folder = root / domain / name
            folder.mkdir(parents=True, exist_ok=True)
            if table.images is not None:
                Image.fromarray(table.images[row]).save(folder / f"{row}.png")
            else:
                source = Path(table.root or "") / table.paths[row]
                shutil.copy(source, folder / f"{row}{source.suffix}")
    return root


def measured(root: Path, domain: str, seed: int, out: Path) -> str:
    """Carries a run out; returns a row of its accuracies on the held-out domain."""
    experiment = feddg.Experiment(
        data={"source": "folder", "root": root, "image_size": 32},
        model={"weights": None},
        hold_out=domain,
        seed=seed,
    )
    started = time.process_time()
    done = feddg.run(experiment, out / "runs", report=False)
    seconds = time.process_time() - started
    rows = [row for row in read_run(done.folder).metrics.evaluations if row.split == "test"]
    last = max(row.round for row in rows)
    found = {row.weights: 100 * row.accuracy for row in rows if row.round == last}
    return (
        f"| {domain} | {seed} | {experiment.train.rounds} | {found['last']:.1f} "
        f"| {found['swa']:.1f} | {seconds:.0f} |"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hold-out", default="ink,chalk,photo,sketch")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", type=int, default=40, help="of a training domain")
    parser.add_argument("--seeds", type=int, default=2)
    asked = parser.parse_args()
    table = load_source("digits")
    print("| unseen | seed | rounds | last | SWA | CPU s |")
    print("|---|---|---|---|---|---|", flush=True)
    for domain in asked.hold_out.split(","):
        counts = {d: 200 if d == domain else asked.images for d in table.domain_names}
        root = write_folder(table, counts, asked.out / f"without-{domain}")
        for seed in range(asked.seeds):
            print(measured(root, domain, seed, asked.out), flush=True)


if __name__ == "__main__":
    main()
