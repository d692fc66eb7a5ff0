"""The tables of docs/results/privacy.md and privacy_attacks.md, from the CSV files beside them.

    python benchmarks/privacy/page.py [docs/results/data]

prints them as Markdown.
"""

import csv
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

DATA = Path(__file__).parents[2] / "docs" / "results" / "data"
DOMAINS = ("photo", "art_painting", "cartoon", "sketch", "all")
FED = {"sent": "sent", "sample": "image's own", "unrelated": "chance"}
RUNS = ("ccst", "ccst-single", "pardon", "elcfs", "fpl", "fedbn")
JUDGED = ("FD", "KD", "PD")


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    """Returns the rows of one file; none where it is not there."""
    file = folder / f"privacy_{name}.csv"
    if not file.exists():
        return []
    with file.open(newline="") as content:
        return [
            {name.partition("[")[0]: cell for name, cell in row.items()}
            for row in csv.DictReader(content)
        ]


def short(text: str, digits: int) -> str:
    return f"{float(text):.{digits}f}" if text not in ("", "nan") else "-"


def interval(row: dict[str, str], mean: str, low: str, high: str, digits: int = 2) -> str:
    ends = f"{short(row[low], digits)}, {short(row[high], digits)}"
    return f"{short(row[mean], digits)} [{ends}]"


def table(heads: list[str], body: list[list[str]]) -> Iterator[str]:
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    yield from ("| " + " | ".join(cells) + " |" for cells in body)
    yield ""


def by_domain(found: list[dict[str, str]], attacker: str) -> Iterator[str]:
    """Like PARDON's Table IV: sent against the image's own, domain by domain."""
    heads = ["method", "domain", "drawn from", "n", "PSNR", "SSIM", "FD", "KD", "PD", "score"]
    heads += ["rank (0.5 is chance)"]
    body = [
        [
            row["run"] if row["fed"] == "sent" else "",
            row["domain"] if row["fed"] == "sent" else "",
            FED[row["fed"]],
            row["images"],
            short(row["psnr"], 1),
            short(row["ssim"], 2),
            *(short(row.get(name, ""), 1) for name in JUDGED),
            short(row.get("score", ""), 1),
            interval(row, "rank", "rank_low", "rank_high"),
        ]
        for run in RUNS
        for domain in DOMAINS
        for row in found
        if (row["run"], row["domain"], row["attacker"]) == (run, domain, attacker)
    ]
    yield from table(heads, body)


def gaps(found: list[dict[str, str]]) -> Iterator[str]:
    """The image's own minus what was sent."""
    heads = ["method", "attacker", "clients", "rank", "PSNR", "PD"]
    groups: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in found:
        key = (row["run"], row["attacker"], row["clients"])
        digits = 1 if row["metric"] == "psnr" else 2
        groups.setdefault(key, {})[row["metric"]] = interval(row, "mean", "low", "high", digits)
    body = [
        [*key, *(cells.get(m, "-") for m in ("rank", "psnr", "PD[resnet18]"))]
        for key, cells in groups.items()
    ]
    yield from table(heads, body)


def updates(found: list[dict[str, str]]) -> Iterator[str]:
    heads = ["step", "images behind it", "updates", "PSNR", "chance", "SSIM", "PD", "cosine"]
    body = [
        [
            "plain SGD" if row["optimizer"] == "sgd" else "Adam, the run's",
            row["batch_size"],
            row["updates"],
            short(row["psnr"], 1),
            short(row["unrelated_psnr"], 1),
            short(row["ssim"], 2),
            short(row.get("PD", ""), 1),
            short(row["cosine"], 2),
        ]
        for row in found
    ]
    yield from table(heads, body)


def members(found: list[dict[str, str]]) -> Iterator[str]:
    heads = ["run", "read", "attack", "clients", "members", "AUC (0.5 is chance)"]
    body = [
        [
            *(row[name] for name in ("run", "entry", "attack", "clients", "members")),
            interval(row, "auc", "low", "high"),
        ]
        for row in found
    ]
    yield from table(heads, body)


def spread(values: list[float]) -> str:
    """A mean in percent, with its standard deviation over seeds."""
    mean = f"{100 * statistics.mean(values):.1f}"
    return f"{mean} ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else mean


def accuracies(found: list[dict[str, str]]) -> Iterator[str]:
    """Accuracy by method, what is noised, and epsilon."""
    heads = ["method", "noised", "epsilon", "noise / sensitivity"]
    heads += ["unseen domain", "in-domain", "seeds"]
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in found:
        groups.setdefault((row["method"], row["noised"], row["level"]), []).append(row)
    order = ("none", "clipped", "16", "8", "4", "1")
    ranked = sorted(
        groups.items(),
        key=lambda item: (*item[0][:2], order.index(item[0][2]) if item[0][2] in order else 9),
    )
    body = [
        [
            *key,
            rows[0]["noise"].rpartition(":")[2],
            spread([float(row["test_accuracy"]) for row in rows]),
            spread([float(row["in_domain_accuracy"]) for row in rows]),
            str(len(rows)),
        ]
        for key, rows in ranked
    ]
    yield from table(heads, body)


def main(folder: Path) -> None:
    """Prints every table."""
    for name in ("digits", "pacs", "digits_ten_clients"):
        print("\n".join([f"### {name}", *accuracies(rows(folder, name))]))
    drawn = rows(folder, "reconstruction")
    print("\n".join(["### server", *by_domain(drawn, "server")]))
    print("\n".join(["### client", *by_domain(drawn, "client")]))
    print("\n".join(["### gaps", *gaps(rows(folder, "differences"))]))
    print("\n".join(["### updates", *updates(rows(folder, "updates"))]))
    print("\n".join(["### membership", *members(rows(folder, "membership"))]))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)
