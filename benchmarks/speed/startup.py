"""How long until something happens? From the shell's command to its end.

    python benchmarks/speed/startup.py --pacs PACS --weights WEIGHTS

`feddg --help`, `feddg methods`, and from `feddg run` to the first training batch on images decoded
before; each some times, the median and the largest, and the median CPU seconds, which other work on
the machine changes less. A run is stopped at its first optimizer step. Before and after a change:
once with each version on PYTHONPATH, in turn.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
from rounds import timed

TO_FIRST_BATCH = """
import os, sys
from feddg.clients.client import Client
Client.descend = lambda self, terms: os._exit(42)
from feddg.cli import main
sys.argv = ["feddg", *sys.argv[1:]]
main()
"""


def report(name: str, command: list[str], times: int, expected: int) -> None:
    """Prints median and largest seconds of a command, and its median CPU seconds."""

    def once() -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != expected:
            raise SystemExit(f"{command} ended with {done.returncode}: {done.stderr[-2000:]}")

    def cpu() -> float:
        spent = os.times()
        return spent.children_user + spent.children_system

    once()
    seconds, spent = [], [cpu()]
    for _ in range(times):
        seconds.append(timed(once))
        spent.append(cpu())
    cells = (numpy.median(seconds), max(seconds), numpy.median(numpy.diff(spent)))
    print(f"| {name} | {' | '.join(f'{cell:.2f}' for cell in cells)} |", flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pacs", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--times", type=int, default=5)
    arguments = parser.parse_args()
    program = [sys.executable, "-m", "feddg"]
    print("| command | median s | largest s | CPU s |\n|---|---|---|---|")
    for command in ("--help", "methods", "adaptations"):
        report(f"feddg {command}", [*program, command], arguments.times, 0)
    starting = [sys.executable, "-c", TO_FIRST_BATCH, "run", "-q"]
    with tempfile.TemporaryDirectory() as folder:
        digits = ["--data", "digits", "--hold-out", "sketch", "--out", folder]
        report("feddg run, digits", [*starting, *digits], arguments.times, 42)
        if arguments.pacs and arguments.weights:
            pacs = ["--data", "pacs", "--root", str(arguments.pacs), "--hold-out", "photo"]
            pacs += ["--backbone", "resnet18", "--weights", str(arguments.weights)]
            pacs += ["--image-size", "64", "--preset", "pacs", "--out", folder]
            report("feddg run, PACS at 64 px", [*starting, *pacs], arguments.times, 42)


if __name__ == "__main__":
    main()
