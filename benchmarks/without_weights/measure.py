"""What do missing ImageNet weights cost, and which model should a run from scratch serve?

    python benchmarks/without_weights/measure.py weights PACS WEIGHTS --out FOLDER
    python benchmarks/without_weights/measure.py serve --out FOLDER

``weights``: PACS as a plain folder of a user's, reduced to some images a domain, each asked domain
held out once: with the weights, and as a run goes without any, all else as it is by default but
64 pixels for both. ``serve``: the built-in digits written out as folders, each domain held out, as
runs without weights go by default but at 32 pixels: the last round's model and the mean of the
later rounds' ("swa") on the same images. Printed: one row a run, accuracy in percent.
"""

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

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


def measured(root: Path, domain: str, seed: int, size: int, out: Path, **fields: Any) -> str:
    """Carries a run out; returns a row of its accuracies on the held-out domain."""
    experiment = feddg.Experiment(
        data={"source": "folder", "root": root, "image_size": size},
        hold_out=domain,
        seed=seed,
        **fields,
    )
    started = time.process_time()
    done = feddg.run(experiment, out / "runs", report=False)
    seconds = time.process_time() - started
    rows = [row for row in read_run(done.folder).metrics.evaluations if row.split == "test"]
    last = max(row.round for row in rows)
    found = {row.weights: 100 * row.accuracy for row in rows if row.round == last}
    network = f"{experiment.model.backbone}, {(experiment.model.weights and 'ImageNet') or 'none'}"
    return (
        f"| {domain} | {seed} | {network} | {experiment.train.rounds} | {found['last']:.1f} "
        f"| {found['swa']:.1f} | {seconds:.0f} |"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="what", required=True)
    weights = commands.add_parser("weights")
    weights.add_argument("pacs", type=Path)
    weights.add_argument("weights", type=Path)
    weights.add_argument("--hold-out", default="photo,sketch")
    serve = commands.add_parser("serve")
    serve.add_argument("--hold-out", default="ink,chalk,photo,sketch")
    for command, images, seeds in ((weights, 75, 1), (serve, 40, 2)):
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--images", type=int, default=images, help="of a training domain")
        command.add_argument("--seeds", type=int, default=seeds)
    asked = parser.parse_args()
    pacs = asked.what == "weights"
    table = load_source("pacs", asked.pacs) if pacs else load_source("digits")
    print("| unseen | seed | network, weights | rounds | last | SWA | CPU s |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for domain in asked.hold_out.split(","):
        counts = {d: 200 if d == domain else asked.images for d in table.domain_names}
        root = write_folder(table, counts, asked.out / f"without-{domain}")
        models: list[dict[str, Any]] = [{"weights": None}]
        if pacs:
            models.insert(0, {"backbone": "resnet18", "weights": str(asked.weights)})
        for seed in range(asked.seeds):
            for model in models:
                row = measured(root, domain, seed, 64 if pacs else 32, asked.out, model=model)
                print(row, flush=True)


if __name__ == "__main__":
    main()
