"""What a round over Flower costs: a real deployment over loopback, one domain of PACS per site.

    python benchmarks/flower/loopback_costs.py --pacs PACS --weights resnet18.safetensors

Starts a SuperLink with TLS and node authentication and a SuperNode per site, all on this machine,
and prints two tables: seconds per round, and bytes per site and round by the ledger and by Flower.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))

from feddg.deploy.setup import deployment_fields
from feddg.experiment import Experiment
from feddg.runs.reading import read_rows
from feddg.settings import merge
from loopback import Loopback

Rows = list[dict[str, Any]]


def experiment(chosen: argparse.Namespace, sites: tuple[str, ...]) -> Experiment:
    """Returns the experiment: ResNet-18 from shared weights, few local steps."""
    fields = {
        "data": {"source": "folder", "image_size": chosen.image_size},
        "hold_out": chosen.test,
        "method": chosen.method,
        "model": {"backbone": "resnet18", "weights": chosen.weights, "embedding": "linear"},
        "train": {"rounds": chosen.rounds, "local_steps": chosen.local_steps, "batch_size": 32},
        "device": "cpu",
    }
    return Experiment(**merge(fields, deployment_fields(sites)))


def carry_out(loopback: Loopback) -> None:
    """Starts everything and waits for the end of the run."""
    try:
        loopback.start_link()
        for site in loopback.sites:
            loopback.register(site)
            loopback.start_node(site)
        status = loopback.finish(loopback.run(), seconds=3600)
        if status != "finished:completed":
            raise SystemExit(status + "\n" + loopback.log("superlink")[-5000:])
    finally:
        loopback.stop()


def seconds_table(traffic: Rows, metrics: Rows) -> list[str]:
    """Returns a line per round, along its slowest site: where the seconds went."""
    rounds = defaultdict(list)
    for row in traffic:
        if row["kind"] == "train":
            rounds[row["round"]].append(row)
    evaluated = {r["round"]: r["seconds"]["evaluate"] for r in metrics if r["kind"] == "round"}
    lines = [
        "| round | whole | training | our code at the site | Flower | evaluation | coordinator |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, rows in sorted(rounds.items()):
        slowest = max(rows, key=lambda row: float(row["seconds"]))
        parts = [slowest["train"], slowest["busy"] - slowest["train"]]
        parts += [slowest["seconds"] - slowest["busy"], evaluated[number]]
        following = rounds.get(number + 1)
        whole = min(r["at"] for r in following) - min(r["at"] for r in rows) if following else None
        known = sum(parts) if whole is None else whole
        parts.append(known - sum(parts))
        shown = ["-" if whole is None else f"{whole:.1f}", *(f"{part:.1f}" for part in parts)]
        lines.append(f"| {number} | {' | '.join(shown)} |")
    return lines


def bytes_table(traffic: Rows, ledger: Rows, sites: tuple[str, ...]) -> list[str]:
    """Returns a line per site: bytes of one round's training by the ledger and by Flower."""
    lines = [
        "| site | down, ledger | down, Flower | up, ledger | up, Flower |",
        "|---|---|---|---|---|",
    ]
    for client, site in enumerate(sites):
        cells = []
        for direction, purpose in (("down", "train"), ("up", "update")):
            ours = [
                row["bytes"]
                for row in ledger
                if row["kind"] == "message" and (row["client"], row["purpose"]) == (client, purpose)
            ]
            theirs = [
                row[f"bytes_{direction}"]
                for row in traffic
                if (row["site"], row["kind"]) == (site, "train")
            ]
            # The first message may hold what was agreed, which the ledger enters on its own.
            cells += [f"{int(statistics.median(found)):,}" for found in (ours, theirs)]
        lines.append(f"| {site} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pacs", type=Path, required=True, help="folder domain/class/*")
    parser.add_argument("--weights", required=True, help="backbone weights at the coordinator")
    parser.add_argument("--test", default="photo", help="the domain that nobody trains on")
    parser.add_argument("--method", default="pardon")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--local-steps", type=int, default=20)
    chosen = parser.parse_args()
    root = chosen.pacs.resolve()
    domains = sorted(folder.name for folder in root.iterdir() if folder.is_dir())
    sites = tuple(domain for domain in domains if domain != chosen.test)
    with tempfile.TemporaryDirectory() as scratch:
        test = Path(scratch) / "test"
        test.mkdir()
        (test / chosen.test).symlink_to(root / chosen.test, target_is_directory=True)
        loopback = Loopback(
            Path(scratch),
            experiment(chosen, sites),
            sites,
            images=f"{root}/{{site}}",
            test=str(test),
            **{"wait-seconds": 900.0},
        )
        before = os.getloadavg()
        carry_out(loopback)
        traffic, metrics, ledger = (
            read_rows(loopback.path / f"{name}.jsonl") for name in ("traffic", "metrics", "ledger")
        )
    print(f"cores {os.cpu_count()}; load before {before[0]:.1f}, after {os.getloadavg()[0]:.1f}\n")
    print("\n".join(seconds_table(traffic, metrics)), end="\n\n")
    print("\n".join(bytes_table(traffic, ledger, sites)))


if __name__ == "__main__":
    main()
