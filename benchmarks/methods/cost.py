"""What each method costs beside FedAvg: code, time, bytes, memory.

    python benchmarks/methods/cost.py --pacs PACS --weights WEIGHTS

PACS at 64 pixels, ResNet-18, 4 of 100 clients per round, one local epoch. Every method runs in a
process of its own, where its rounds and FedAvg's take turns; printed is the median of the ratios.
One-off work (styles, stylized copies) is done before. Bytes are the ledger's, per client: in setup,
and per round up and down. Memory is the peak of private memory beyond FedAvg's own process. Code
lines leave out blank lines, comments and docstrings.
"""

import argparse
import ast
import inspect
import io
import json
import subprocess
import sys
import tokenize
from pathlib import Path

import numpy
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "speed"))

from jobs import JOBS, Federation
from rounds import PeakMemory, timed

from feddg.methods.base import Method, methods
from feddg.methods.composition import method_class
from feddg.records import LedgerRow, MessageRow

LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)


def code_lines(source: str) -> int:
    """Counts the lines that hold code: no blank lines, comments or docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            text = node.body[0]
            prose |= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in LAYOUT and token.type != tokenize.ENDMARKER
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - prose)


def measure(arguments: argparse.Namespace, method: str) -> dict[str, float]:
    """Times rounds of a method and of FedAvg in turn, and counts its bytes."""
    job = JOBS[arguments.job]
    rows: list[LedgerRow] = []
    with PeakMemory() as memory:
        own = Federation(
            job.experiment(method, arguments.precision, arguments.pacs, arguments.weights)
        )
        own.server.ledger._write = rows.append
        own.server.setup()
        own.begin_everywhere()
        own.server.round()
        own.server.round()
    peak = memory.peak
    plain = Federation(
        job.experiment("fedavg", arguments.precision, arguments.pacs, arguments.weights)
    )
    plain.server.round()
    ratios = []
    for _ in range(arguments.pairs):
        plain.server.state.round = own.server.state.round  # the same clients and batches
        ratios.append(1 / timed(plain.server.round) * timed(own.server.round))
    clients, per_round = len(own.transport.clients), own.server.per_round or 1

    def sent(direction: str, in_setup: bool) -> float:
        total = sum(
            row.bytes
            for row in rows
            if isinstance(row, MessageRow)
            and row.direction == direction
            and (row.round == 0) == in_setup
            and row.round <= 2
        )
        return total / clients if in_setup else total / per_round / 2

    return {
        "seconds": float(numpy.median(ratios)),
        "up": sent("up", False),
        "down": sent("down", False),
        "setup_up": sent("up", True),
        "setup_down": sent("down", True),
        "memory": peak,
    }


def main() -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", choices=JOBS, default="resnet18_64")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--pacs", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments, arguments.one)))
        return
    lines = [
        "# What each method costs\n",
        (__doc__ or "").split("\n\n", 2)[2].strip() + "\n",
        f"{torch.get_num_threads()} CPU cores, {arguments.precision}, torch {torch.__version__}, "
        f"medians of {arguments.pairs} pairs. The command:\n",
        "    python benchmarks/methods/cost.py --pacs PACS --weights WEIGHTS\n",
        "| method | code lines | round, to FedAvg | up, MB | down, MB | setup up / down, kB "
        "| extra memory, MB |\n|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    names = ["fedavg", *(name for name in methods() if name != "fedavg")]
    base = 0.0
    for name in names:
        given = [sys.executable, __file__, *sys.argv[1:], "--one", name]
        done = subprocess.run(given, capture_output=True, text=True)
        if done.returncode:
            print(f"| {name} | failed: {done.stderr.strip().splitlines()[-1]} |", flush=True)
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        base = base or found["memory"]
        # FedAvg's code is the base of all methods; of the others the file is counted.
        method = method_class(name)
        module = sys.modules[(Method if name == "fedavg" else method).__module__]
        print(
            f"| [{method.title}](../methods/{name}.md) | {code_lines(inspect.getsource(module))} "
            f"| {found['seconds']:.2f} | {found['up'] / 1e6:.1f} | {found['down'] / 1e6:.1f} "
            f"| {found['setup_up'] / 1e3:.1f} / {found['setup_down'] / 1e3:.1f} "
            f"| {(found['memory'] - base) / 1e6:+.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
