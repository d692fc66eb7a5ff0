"""Counts the files and functions of this package that one round of FedAvg calls.

    PYTHONPATH=tests python benchmarks/house/touched.py [--list]

Round 2 of a small run on digits, in one process and over Flower's grid; a comprehension counts as a
function where the interpreter calls it as one (Python 3.11). What sites do in threads counts;
what a run does once a round is aggregated does not: trackers, evaluation and checkpoint, its hooks.
"""

import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import feddg
from feddg.clients.threads import share_of_process
from feddg.federation.server import Server
from feddg.runs.context import Measurer
from feddg.runs.execute import Records
from feddg.runs.observer import Progress
from flower_grid import Deployment, experiment

ROOT = str(Path(feddg.__file__).parent)


def touched(work: Callable[[], Any]) -> Counter[str]:
    """Returns how many functions of each file the second round of ``work`` calls."""
    found: set[tuple[str, str]] = set()
    round_of, begun = Server.round, [0]

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            found.add((code.co_filename[len(ROOT) + 1 :], code.co_qualname))

    def watched(server: Server) -> Any:
        begun[0] += 1
        if begun[0] == 2:
            threading.setprofile(watch)
            sys.setprofile(watch)
        try:
            return round_of(server)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def unseen(completed: Callable[..., Any]) -> Callable[..., Any]:
        def quietly(*arguments: Any) -> Any:
            watching = sys.getprofile()
            sys.setprofile(None)
            try:
                return completed(*arguments)
            finally:
                sys.setprofile(watching)

        return quietly

    afterwards = {hook: hook.completed for hook in (Progress, Measurer, Records)}
    for hook, completed in afterwards.items():
        hook.completed = unseen(completed)  # type: ignore[attr-defined, method-assign]
    Server.round = watched  # type: ignore[method-assign]
    try:
        work()
    finally:
        Server.round = round_of  # type: ignore[method-assign]
        for hook, completed in afterwards.items():
            hook.completed = completed  # type: ignore[attr-defined, method-assign]
    return Counter(file for file, _ in found)


def main() -> None:
    """Prints both counts."""
    share_of_process(1)
    small = experiment(method="fedavg")
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        counts = {
            "in one process": touched(
                lambda: feddg.run(small, here / "a", cache=here / "cache", report=False)
            ),
            "over Flower": touched(lambda: Deployment(here, small).start()),
        }
    for name, files in counts.items():
        print(f"{name}: {len(files)} files, {files.total()} functions")
        if "--list" in sys.argv:
            print("\n".join(f"  {count:3} {file}" for file, count in sorted(files.items())))


if __name__ == "__main__":
    main()
