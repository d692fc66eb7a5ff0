"""What the server's checks add to a round of ResNet-18, in one process and over Flower's grid.

    python benchmarks/security/checks_cost.py --data pacs --root PACS    (without: digits)
    python benchmarks/security/checks_cost.py --grid                     (three sites of digits)

Every other round goes without its checks. Printed are CPU seconds, which a busy machine disturbs
less than seconds: of a round, of the checks inside it by their own clock, and the paired difference
of neighbouring rounds with and without. Set OMP_NUM_THREADS=1: threads that wait count as work.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))

from feddg.api import run
from feddg.experiment import Experiment
from feddg.federation.server import Server
from feddg.federation.validation import ChangeSizes, MessageChecks
from feddg.runs import folder as checkpoints

STEPS = 10
"""Local steps of 32 images where the data are the digits: about what PACS gives each of 20."""


class Enough(Exception):
    """As many rounds were measured as were asked for."""


class Stopwatch:
    """CPU seconds of rounds and of the checks inside them; lets every other round go unchecked.

    Args:
        pairs: how many rounds to measure with checks, and how many without.
    """

    def __init__(self, pairs: int) -> None:
        self._pairs = pairs
        self.rounds: list[tuple[bool, float, float]] = []
        self.parts: Counter[str] = Counter()
        self._count, self._began, self._spent, self._depth = 0, 0.0, 0.0, 0

    @property
    def checking(self) -> bool:
        """Whether the present round is checked; the setup is."""
        return self._count % 2 == 0

    def next_round(self) -> None:
        """Ends a round and begins the next."""
        now = time.process_time()
        if self._count:
            self.rounds.append((self.checking, now - self._began, self._spent))
        if len(self.rounds) > 2 * self._pairs:
            raise Enough
        self._count += 1
        self._began, self._spent = time.process_time(), 0.0

    def watch(self, owner: Any, name: str, unchecked: Callable[..., Any] | None) -> None:
        """Times a function; in rounds without checks ``unchecked``, if any, takes its place."""
        real = getattr(owner, name)

        @wraps(real)
        def watched(*arguments: Any, **named: Any) -> Any:
            if owner is Server:
                self.next_round()
                return real(*arguments, **named)
            if not self.checking and unchecked is not None:
                return unchecked(*arguments, **named)
            began, self._depth = time.process_time(), self._depth + 1
            try:
                return real(*arguments, **named)
            finally:
                self._depth -= 1
                if not self._depth:  # one inside another is the outer one's
                    took = time.process_time() - began
                    self._spent += took
                    self.parts[name] += took * self.checking

        setattr(owner, name, watched)

    def lines(self) -> list[str]:
        """Returns what was found; the first round only warms up."""
        rounds = self.rounds[1:]
        checked = [(whole, inside) for on, whole, inside in rounds if on]
        bare = [whole - inside for on, whole, inside in rounds if not on]
        whole = statistics.median(whole for whole, _ in checked)
        inside = statistics.median(inside for _, inside in checked)
        pairs = [one[1] - other[1] for one, other in zip(rounds[::2], rounds[1::2])]
        signs = [1 if on else -1 for on, *_ in rounds[::2]]
        apart = [sign * difference for sign, difference in zip(signs, pairs)]
        share = 100 * statistics.median(apart) / statistics.median(bare)
        spread = 100 * (max(apart) - min(apart)) / 2 / statistics.median(bare)
        total = sum(self.parts.values())
        said = ", ".join(f"{name} {part / total:.0%}" for name, part in self.parts.most_common(5))
        return [
            f"a round: {whole:.2f} s of CPU, its checks {1000 * inside:.0f} ms: "
            f"{100 * inside / (whole - inside):.2f} % more",
            f"paired, with and without: {share:+.2f} % (+- {spread:.2f}, {len(apart)} pairs)",
            f"of the checks: {said}",
        ]


def install(pairs: int) -> Stopwatch:
    """Puts a stopwatch around every check."""
    watch = Stopwatch(pairs)
    nothing: Callable[..., Any] = lambda *arguments, **named: None  # noqa: E731
    watch.watch(Server, "round", None)
    watch.watch(ChangeSizes, "received", lambda self, update, round: update)
    watch.watch(ChangeSizes, "completed", lambda self, state, round: state)
    watch.watch(MessageChecks, "update_fault", nothing)
    watch.watch(MessageChecks, "message_fault", nothing)
    watch.watch(checkpoints, "checksum", None)  # a checkpoint needs its sums, and they count
    return watch


def fields(chosen: argparse.Namespace) -> dict[str, Any]:
    """Returns the experiment's fields."""
    train = {"rounds": 2 * chosen.pairs + 2, "batch_size": 32}
    if chosen.data == "digits":
        train["local_steps"] = STEPS
    data = {"source": chosen.data, "root": chosen.root}
    return {
        "data": data | {"image_size": 96, "id_val": 0, "id_test": 0},
        "hold_out": "sketch",
        "clients": {"number": chosen.clients, "partition": "heterogeneous", "heterogeneity": 0.1},
        "model": {"backbone": "resnet18", "weights": None},
        "train": train,
        "evaluate": {"every": 10_000, "averages": "never"},
        "device": "cpu",
        "precision": "float32",
    }


def over_the_grid(chosen: argparse.Namespace, folder: Path) -> None:
    """Carries the rounds out over Flower's messages, without its processes."""
    from feddg.deploy import transport
    from flower_grid import SITES, Deployment

    read_reply = transport.read_reply
    opened: list[float] = []

    def timed(*arguments: Any) -> Any:
        began = time.process_time()
        try:
            return read_reply(*arguments)
        finally:
            opened.append(time.process_time() - began)

    transport.read_reply = timed
    every = fields(chosen)
    every["data"] |= {"source": "digits", "root": None}
    every["clients"] = {"number": len(SITES), "partition": "domain"}
    every["train"]["local_steps"] = STEPS
    with suppress(Enough):
        Deployment(folder, Experiment(**every), test="").start()
    large = statistics.median(sorted(opened)[len(opened) // 2 :])
    print(f"reading one update, its arrays' headers checked: {1000 * large:.0f} ms of CPU")


def main() -> None:
    """Prints the cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--root", default=None)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--grid", action="store_true")
    chosen = parser.parse_args()
    watch = install(chosen.pairs)
    with tempfile.TemporaryDirectory() as place, suppress(Enough):
        folder = Path(place)
        if chosen.grid:
            over_the_grid(chosen, folder)
        else:
            cache = folder / "cache"
            run(Experiment(**fields(chosen)), folder / "runs", cache=cache, report=False)
    print("\n".join(watch.lines()), flush=True)


if __name__ == "__main__":
    main()
