"""What do many images, domains and clients cost? Inspecting, decoding and a first round, by size.

    python benchmarks/scale/measure.py FOLDER [--sizes 1000 10000 100000] [--skip-limited]

Makes trees of small JPEG files (300 images a domain and 50 a client, ten classes, no two files
alike) and runs ordinary commands on them, each in a process of its own whose wall seconds and
largest resident memory are those that the system counts:

- ``inspect, nothing cached``: ``feddg data inspect``: every file is read, hashed and decoded;
- ``inspect, cached``: once more;
- ``first round``: ``feddg run --rounds 1``, with 20 of the clients and the page at the end;
- ``first round, cache beyond memory``: of the largest tree at ``LARGE_SIDE`` pixels, with the
  memory that the process may allocate limited (RLIMIT_DATA) to less than the decoded images take.

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

SIDE, CLASSES, IN_DOMAIN, AT_CLIENT, PER_ROUND = 32, 10, 333, 50, 20
LARGE_SIDE, ALLOWED = 96, 1_500_000_000
SIZES = (1_000, 10_000, 100_000)


def make_tree(root: Path, images: int) -> int:
    """Writes ``root/domain/class/image.jpg``; returns the number of domains."""
    domains = max(3, images // IN_DOMAIN)
    done = root / "complete"
    if done.is_file():
        return domains
    shutil.rmtree(root, ignore_errors=True)
    for domain in range(domains):
        for of_class in range(CLASSES):
            (root / "images" / f"domain{domain:03}" / f"class{of_class}").mkdir(parents=True)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: _write(root / "images", number, domains), range(images)))
    done.touch()
    return domains


def _write(root: Path, number: int, domains: int) -> None:
    """A disc whose place is its class, on a ground that is its domain's, with noise of its own."""
    domain, of_class = number % domains, (number // domains) % CLASSES
    noise = numpy.random.default_rng(number).normal(0, 12, (SIDE, SIDE, 3))
    ground = numpy.random.default_rng(10**9 + domain).uniform(40, 200, 3)
    angle = 2 * numpy.pi * of_class / CLASSES
    rows, columns = numpy.mgrid[:SIDE, :SIDE] - SIDE / 2
    disc = (rows - 9 * numpy.sin(angle)) ** 2 + (columns - 9 * numpy.cos(angle)) ** 2 < 25
    pixels = ground + 60 * disc[..., None] + noise
    aside = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(numpy.uint8)).save(aside, "JPEG", quality=90)
    file = root / f"domain{domain:03}" / f"class{of_class}" / f"{number:06}.jpg"
    file.write_bytes(aside.getvalue())


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


def round_of(tree: Path, clients: int, side: int, folder: Path) -> list[str]:
    """Returns the arguments of a run of one round."""
    data = ["--data", "folder", "--root", str(tree / "images"), "--image-size", str(side)]
    held = ["--hold-out", "domain000", "--backbone", "cnn", "--weights", "none"]
    who = ["--clients", str(clients), "--clients-per-round", str(min(PER_ROUND, clients))]
    rest = ["--heterogeneity", "0", "--rounds", "1", "--out", str(folder / "runs"), "--quiet"]
    return ["run", *data, *held, *who, *rest]


def inspection(tree: Path, clients: int) -> list[str]:
    """Returns the arguments of an inspection."""
    data = ["--data", "folder", "--root", str(tree / "images"), "--image-size", str(SIDE)]
    who = ["--hold-out", "domain000", "--clients", str(clients), "--heterogeneity", "0"]
    return ["data", "inspect", *data, *who, "--quiet", "--json"]


def emptied(folder: Path) -> None:
    """Removes caches and runs."""
    for name in ("cache", "runs"):
        shutil.rmtree(folder / name, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
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
        tree, clients = folder / f"tree{images}", images // AT_CLIENT
        domains = make_tree(tree, images)
        emptied(folder)
        for what in ("inspect, nothing cached", "inspect, cached"):
            found = measured(inspection(tree, clients), folder)
            note(images, domains, clients, what, found)
        found = measured(round_of(tree, clients, SIDE, folder), folder)
        note(images, domains, clients, "first round", found)
    if not options.skip_limited:
        emptied(folder)
        found = measured(round_of(tree, clients, LARGE_SIDE, folder), folder, ALLOWED)
        decoded = images * LARGE_SIDE**2 * 3
        limited = {**found, "allowed_bytes": ALLOWED, "decoded_bytes": decoded}
        note(images, domains, clients, "first round, cache beyond memory", limited)


if __name__ == "__main__":
    main()
