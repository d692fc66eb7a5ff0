"""What do many images, domains and clients cost? Inspecting, decoding and a first round, by size.

    python benchmarks/scale/measure.py FOLDER [--sizes 1000 10000 100000] [--skip-limited]

Makes trees of small JPEG files (about 333 images a domain, 50 a natural client, ten classes, no two
files alike) with a table of path, label, domain and client, and runs ordinary commands on them,
each in a process of its own whose wall seconds, CPU seconds and largest resident memory are those
that the system counts:

- ``inspect, nothing cached``: ``feddg data inspect``: every file is read, hashed and decoded;
- ``inspect, cached``: once more;
- ``first round``: ``feddg run --rounds 1``, with 10 of the clients and the page at the end;
- ``first round, cache beyond memory``: of ``LARGE_IMAGES`` images at ``LARGE_SIDE`` pixels,
  with the memory that the process may allocate limited (RLIMIT_DATA) to less than the decoded
  images take; the mapped cache file is no part of it.

Trees that exist are used again; caches and runs are made anew. Results go to FOLDER/scale.json.
"""

import argparse
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
from PIL import Image

SIDE, CLASSES, IN_DOMAIN, AT_CLIENT, PER_ROUND = 32, 10, 333, 50, 10
LARGE_SIDE, LARGE_IMAGES, ALLOWED = 256, 10_000, 1_500_000_000
LITTLE_AT_ONCE = (
    "train.batch_size=4",
    "evaluate.batch_size=8",
    "data.id_val=0.01",
    "data.id_test=0.01",
)
SIZES = (1_000, 10_000, 100_000)


def make_tree(root: Path, images: int) -> tuple[int, int]:
    """Writes images and ``table.csv``; returns how many domains and clients there are."""
    clients, domains = images // AT_CLIENT, max(3, images // IN_DOMAIN)
    if (root / "table.csv").is_file():
        return domains, clients
    shutil.rmtree(root, ignore_errors=True)
    for client in range(clients):
        (root / "images" / f"client{client:04}").mkdir(parents=True)
    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda n: _write(root, n, domains, clients), range(images)))
    (root / "table.csv").write_text("\n".join(["path,label,domain,client", *rows]) + "\n")
    return domains, clients


def _write(root: Path, number: int, domains: int, clients: int) -> str:
    """A disc whose place is its class, on a ground that is its domain's, with noise of its own."""
    client, of_class = number % clients, (number // clients) % CLASSES
    domain = client % domains
    noise = numpy.random.default_rng(number).normal(0, 12, (SIDE, SIDE, 3))
    ground = numpy.random.default_rng(10**9 + domain).uniform(40, 200, 3)
    angle = 2 * numpy.pi * of_class / CLASSES
    rows, columns = numpy.mgrid[:SIDE, :SIDE] - SIDE / 2
    disc = (rows - 9 * numpy.sin(angle)) ** 2 + (columns - 9 * numpy.cos(angle)) ** 2 < 25
    pixels = ground + 60 * disc[..., None] + noise
    coded = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(numpy.uint8)).save(coded, "JPEG", quality=90)
    name = f"images/client{client:04}/{number:06}.jpg"
    (root / name).write_bytes(coded.getvalue())
    return f"{name},class{of_class},domain{domain:03},client{client:04}"


def measured(arguments: list[str], folder: Path, allowed: int | None = None) -> dict[str, float]:
    """Runs ``feddg`` with arguments; returns seconds and largest resident memory in bytes."""

    def limit() -> None:
        if allowed is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))

    environment = os.environ | {"FEDDG_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    with (folder / "last.log").open("w") as log:
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "feddg", *arguments],
            env=environment,
            stdout=log,
            stderr=log,
            preexec_fn=limit,
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        print((folder / "last.log").read_text()[-3000:], file=sys.stderr)
        raise SystemExit(f"feddg {' '.join(arguments)} ended with {process.returncode}")
    return {
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
    }


def images_of(tree: Path, side: int) -> list[str]:
    """Returns the flags for a tree's images and natural clients, one domain held out."""
    data = ["--data", "table", "--root", str(tree), "--image-size", str(side)]
    return [*data, "--hold-out", "domain000", "--partition", "client", "--quiet"]


def round_of(tree: Path, side: int, folder: Path, *more: str) -> list[str]:
    """Returns the arguments of a run of one round."""
    model = ["--backbone", "cnn", "--weights", "none", "--clients-per-round", str(PER_ROUND)]
    rest = ["--rounds", "1", "--out", str(folder / "runs")]
    return ["run", *images_of(tree, side), *model, *rest, *more]


def emptied(folder: Path) -> None:
    """Removes caches and runs."""
    for name in ("cache", "runs"):
        shutil.rmtree(folder / name, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--skip-limited", action="store_true")
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    rows = []

    def note(images: int, domains: int, clients: int, what: str, found: dict[str, float]) -> None:
        row = {"images": images, "domains": domains, "clients": clients, "what": what, **found}
        rows.append(row)
        print(json.dumps(row), flush=True)
        (folder / "scale.json").write_text(json.dumps(rows, indent=1) + "\n")

    for images in options.sizes:
        tree = folder / f"tree{images}"
        domains, clients = make_tree(tree, images)
        emptied(folder)
        for what in ("inspect, nothing cached", "inspect, cached"):
            command = ["data", "inspect", *images_of(tree, SIDE), "--json"]
            found = measured(command, folder)
            note(images, domains, clients, what, found)
        found = measured(round_of(tree, SIDE, folder), folder)
        note(images, domains, clients, "first round", found)
    if not options.skip_limited:
        images, tree = LARGE_IMAGES, folder / f"tree{LARGE_IMAGES}"
        domains, clients = make_tree(tree, images)
        emptied(folder)
        few = [f"--set={field}" for field in LITTLE_AT_ONCE]
        found = measured(round_of(tree, LARGE_SIDE, folder, *few), folder, ALLOWED)
        decoded = images * LARGE_SIDE**2 * 3
        limited = {**found, "allowed_bytes": ALLOWED, "decoded_bytes": decoded}
        note(images, domains, clients, "first round, cache beyond memory", limited)


if __name__ == "__main__":
    main()
