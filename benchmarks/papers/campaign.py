"""Carries out the papers' shortened tables, one after another, and makes their pages.

    python benchmarks/papers/campaign.py [--tables NAME,NAME] [what `feddg compare` takes]
    python benchmarks/papers/campaign.py --root PACS --set model.weights=RESNET18 --jobs 2
    python benchmarks/papers/campaign.py --seeds 1   # a first seed of every table, then the rest

What the CSV files have is not run again, whatever machine ran it; a run that several tables share
is run for the first of them and copied to the others. It may be stopped at any time: the same
command goes on. A table that cannot be run is said, and does not stop the others.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pages

INTERRUPTED = 130


def carry_out(
    names: Sequence[str],
    arguments: Sequence[str],
    root: Path = pages.ROOT,
    compare: Callable[[list[str]], int] | None = None,
) -> list[str]:
    """Runs what is missing of each table and makes its page.

    Args:
        names: of tables, in order; all by default.
        arguments: further arguments of ``feddg compare``.
        root: the checkout.
        compare: carries out ``feddg compare`` and returns how it ended; a process by default.

    Returns:
        The tables of which not every run ended well.

    Raises:
        SystemExit: there is no such table, or it was interrupted.
    """
    run, failed = compare or _process, []
    chosen = pages.tables(names, root)
    for number, name in enumerate(chosen, start=1):
        print(f"{name}, {number} of {len(chosen)}", flush=True)
        ended = run(command(name, arguments, root))
        if (root / pages.DATA / f"{name}.csv").is_file():
            pages.make([name], root)
        if ended == INTERRUPTED:
            raise SystemExit(INTERRUPTED)
        if ended:
            failed.append(name)
    return failed


def command(name: str, arguments: Sequence[str], root: Path) -> list[str]:
    """Returns the arguments of ``feddg`` for a table: every other table's results are known."""
    data = root / pages.DATA
    others = [path for path in sorted(data.glob("*.csv")) if not path.stem.endswith(".trials")]
    own = data / f"{name}.csv"
    files = [own, *(path for path in others if path.stem != name)]
    plan = root / pages.PLANS / f"{name}.yaml"
    results = [part for file in files for part in ("--results", str(file))]
    return ["compare", str(plan), *results, *arguments]


def _process(arguments: list[str]) -> int:
    with subprocess.Popen([sys.executable, "-m", "feddg", *arguments]) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # it was told, too, and says itself when it is done
                continue


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tables", default="", help="which, with commas between; all by default")
    options, arguments = parser.parse_known_args()
    if failed := carry_out([name for name in options.tables.split(",") if name], arguments):
        raise SystemExit(f"not every run ended well: {', '.join(failed)}")


if __name__ == "__main__":
    main()
