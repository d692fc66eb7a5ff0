"""How long until something happens? From the shell's command to its end.

    python benchmarks/speed/startup.py --pacs PACS --weights WEIGHTS

`feddg --help`, and from `feddg run` to the first training batch on images decoded before; each some
times, the median and the largest. The second stops the process at its first optimizer step.
"""

import argparse
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
    """Prints median and largest seconds of a command."""

    def once() -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != expected:
            raise SystemExit(f"{command} ended with {done.returncode}: {done.stderr[-2000:]}")

    once()
    seconds = [timed(once) for _ in range(times)]
    print(f"| {name} | {numpy.median(seconds):.2f} | {max(seconds):.2f} |", flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pacs", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--times", type=int, default=5)
    arguments = parser.parse_args()
    program = str(Path(sys.executable).with_name("feddg"))
    print("| command | median s | largest s |\n|---|---|---|")
    report("feddg --help", [program, "--help"], arguments.times, 0)
    starting = [sys.executable, "-c", TO_FIRST_BATCH, "run", "-q"]
    with tempfile.TemporaryDirectory() as folder:
        digits = ["--data", "digits", "--hold-out", "sketch", "--out", folder]
        report("feddg run, digits", [*starting, *digits], arguments.times, 42)
        if arguments.pacs and arguments.weights:
            pacs = ["--data", "pacs", "--root", str(arguments.pacs), "--hold-out", "photo"]
            pacs += ["--backbone", "resnet18", "--weights", str(arguments.weights)]
            pacs += ["--image-size", "64", "--out", folder]
            report("feddg run, PACS at 64 px", [*starting, *pacs], arguments.times, 42)


if __name__ == "__main__":
    main()
