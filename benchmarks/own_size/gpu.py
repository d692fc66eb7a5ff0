"""A few minutes on a GPU: parity and speed first, then the cells that are still missing.

    python benchmarks/own_size/gpu.py --root PACS --minutes 12 [--results FOLDER] [--out FOLDER]

PACS is a folder of images; the working folder has ``weights``, as for ``campaign.py``: without
images, or the weights of any network, it ends at once. Four minutes at most go to
``benchmarks/speed/gpu.py``, unless it has done all. Then come the plans of ``benchmarks/baseline``,
by name, and the stages of ``campaign.py``, in its order: as many runs at once as memory and cores
allow. A run that ends is a row in its plan's CSV file at once; when time is up the others stop, and
go on when the command is given again with their folder. So it may end after 4 minutes or 12. What
the project's own CSV files have is copied to ``--results`` and not run again; with other images,
such as a smaller copy of PACS, ``--fresh`` begins files of its own. ``--plans NAME ...`` takes
these plans alone, in this order. ``--pretend`` tries it without a GPU, on drawn digits and a small
network.
"""

import argparse
import csv
import json
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from campaign import DATA, ROOT, STAGES, plan_of

import feddg
from feddg.comparison.plan import load_plan
from feddg.comparison.pool import STOP_SECONDS
from feddg.errors import FeddgError
from feddg.settings import merge

BASELINE = ROOT / "benchmarks" / "baseline"
SPEED_MINUTES = 4.0
TO_STOP = float(STOP_SECONDS)
"""Seconds before the end at which runs are told to stop; they may end their round."""
PRETENDED = {
    "data": {"source": "digits", "image_size": 8},
    "model": {"backbone": "cnn", "weights": None},
    "clients": {"number": 2, "per_round": None, "partition": "heterogeneous"},
    "train": {"rounds": 1, "local_steps": 1, "batch_size": 8},
    "evaluate": {"every": 1, "pictures": False},
}


def plans(pretend: bool) -> list[tuple[str, dict[str, Any]]]:
    """Returns the name of each plan's CSV file, and its fields, the most telling first."""
    found = [
        (f"baseline_{file.stem}", load_plan(file).model_dump(exclude_unset=True))
        for file in sorted(BASELINE.glob("*.yaml"))
    ]
    found += [(f"own_{name}", plan_of(name, methods, seeds)) for name, methods, seeds in STAGES]
    if pretend:
        for _, fields in found:
            fields.pop("budgets", None)
            fields["base"] = merge({"preset": None}, PRETENDED)
            fields["hold_out"] = ["photo", "sketch"]
    return found


def absent(root: Path, whole: list[tuple[str, dict[str, Any]]]) -> str | None:
    """Returns what no plan can begin without, if it is not here: images, or a network's weights."""
    weights = {str(fields["base"]["model"]["weights"]) for _, fields in whole}
    if root.is_dir() and any(Path(name).exists() for name in weights):
        return None
    return ", ".join(sorted(weights)) if root.is_dir() else str(root)


def speed(file: Path, minutes: float, pretend: bool) -> None:
    """Measures parity and speed, in a process that cannot take longer."""
    script = ROOT / "benchmarks" / "speed" / "gpu.py"
    words = [sys.executable, str(script), str(file), "--minutes", str(0.8 * minutes)]
    with suppress(subprocess.TimeoutExpired):  # what it has measured is in the file
        subprocess.run([*words, *["--pretend"] * pretend], timeout=60 * minutes, check=False)


def rows(folder: Path) -> dict[str, int]:
    """Returns how many rows each CSV file of a folder has."""
    counts = {}
    for file in sorted([*folder.glob("baseline_*.csv"), *folder.glob("own_*.csv")]):
        with file.open(encoding="utf-8", newline="") as opened:
            counts[file.stem] = sum(1 for _ in csv.DictReader(opened))
    return counts


def main() -> None:
    """Does as much as the minutes allow."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path("data/pacs"))
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--out", type=Path, default=Path("comparisons/own_size"))
    parser.add_argument("--results", type=Path, default=DATA, help="folder of the CSV files")
    parser.add_argument("--jobs", type=int, help="runs at once; what the GPU has room for")
    parser.add_argument("--fresh", action="store_true", help="do not go on from our CSV files")
    parser.add_argument("--plans", nargs="+", metavar="NAME", help="such as own_pacs_160")
    parser.add_argument("--pretend", action="store_true", help="no GPU: try the script out")
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes - TO_STOP
    whole = plans(given.pretend)
    if given.plans:
        names = [name for name, _ in whole]
        if unknown := [name for name in given.plans if name not in names]:
            parser.error(f"there is no plan {', '.join(unknown)}; there are {', '.join(names)}")
        whole = [plan for name in given.plans for plan in whole if plan[0] == name]
    if not given.pretend and (gone := absent(given.root, whole)):
        parser.error(f"not here: {gone}")
    given.results.mkdir(parents=True, exist_ok=True)
    measured = given.results / "gpu.json"
    if not (measured.exists() and not json.loads(measured.read_text())["left out"]):
        speed(measured, min(SPEED_MINUTES, given.minutes / 2), given.pretend)
    ours = [] if given.pretend or given.fresh else [DATA / f"{name}.csv" for name, _ in whole]
    for known in ours:
        if known.exists() and not (copy := given.results / known.name).exists():
            shutil.copyfile(known, copy)
    before = rows(given.results)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, end - time.monotonic()))
    try:
        for name, fields in whole:
            print(name, flush=True)
            try:
                feddg.compare(
                    fields,
                    given.out / name,
                    overrides={} if given.pretend else {"root": str(given.root.resolve())},
                    jobs=given.jobs,
                    results=given.results / f"{name}.csv",
                    report=False,
                    drop_weights=True,
                )
            except FeddgError as error:  # the next plan may do
                print(f"{name}: {error}", flush=True)
    except KeyboardInterrupt:
        print("time is up; the same command goes on")
    signal.setitimer(signal.ITIMER_REAL, 0)
    for name, count in rows(given.results).items():
        print(f"{name}: {count - before.get(name, 0)} more rows, {count} in all")


if __name__ == "__main__":
    main()
