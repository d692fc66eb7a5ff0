"""All tables about privacy, from the CSV files of ``accuracy.py`` and ``attacks.py``.

    python benchmarks/privacy/page.py [--data FOLDER]

prints them in Markdown; docs/benchmarks.md has the short form of them.
"""

import argparse
import csv
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

DATA = Path(__file__).parents[2] / "docs" / "results" / "data"
DOMAINS = ("photo", "art_painting", "cartoon", "sketch", "all")
FED = {"sent": "sent", "sample": "image's own", "unrelated": "chance"}
RUNS = ("ccst", "ccst-single", "pardon", "elcfs", "fpl", "fedbn", "fedig")
JUDGED = ("FD", "KD", "PD")
NOISED = {
    "nothing": "nothing",
    "updates": "updates",
    "styles (image)": "styles, an image hidden",
    "styles (client)": "styles, a client hidden",
    "Table 10": "perturbed styles (FISC, Table 10), no promise",
}
ACCURACIES = ("digits", "pacs", "digits_ten_clients")


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
            place(row) if row["fed"] == "sent" else "",
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
        if (row["run"], row["domain"]) == (run, domain) and row["attacker"].startswith(attacker)
    ]
    yield from table(heads, body)


def place(row: dict[str, str]) -> str:
    """The domain that was drawn, and by whose client, where it was one."""
    own = row["attacker"].partition(" of ")[2]
    return f"{row['domain']}, by {own}" if own else row["domain"]


def gaps(found: list[dict[str, str]]) -> Iterator[str]:
    """The image's own minus what was sent."""
    heads = ["method", "attacker", "clients", "rank", "PSNR", "PD"]
    groups: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in found:
        key = (row["run"], row["attacker"], row["clients"])
        digits = 1 if row["metric"] == "psnr" else 2
        metric = row["metric"].partition("[")[0]
        groups.setdefault(key, {})[metric] = interval(row, "mean", "low", "high", digits)
    body = [
        [*key, *(cells.get(m, "-") for m in ("rank", "psnr", "PD"))]
        for key, cells in groups.items()
    ]
    yield from table(heads, body)


def updates(found: list[dict[str, str]]) -> Iterator[str]:
    heads = ["step", "images behind it", "updates", "PSNR", "chance", "SSIM", "PD", "cosine"]
    heads += ["rank (0.5 is chance)"]
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
            interval(row, "rank", "rank_low", "rank_high"),
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
    order, kinds = ("none", "clipped", "16", "8", "4", "1"), list(NOISED)
    ranked = sorted(
        groups.items(),
        key=lambda item: (
            item[0][0],
            kinds.index(item[0][1]),
            order.index(item[0][2]) if item[0][2] in order else 9,
        ),
    )
    body = [
        [
            method,
            NOISED[noised] + (", clipped only" if level == "clipped" else ""),
            "none" if level == "clipped" else level,
            rows[0]["noise"].rpartition(":")[2],
            spread([float(row["test_accuracy"]) for row in rows]),
            spread([float(row["in_domain_accuracy"]) for row in rows]),
            str(len(rows)),
        ]
        for (method, noised, level), rows in ranked
    ]
    yield from table(heads, body)


def tables(folder: Path) -> dict[str, str]:
    """Returns every table as Markdown, by the name that its mark has."""
    drawn = rows(folder, "reconstruction")
    made = {name: accuracies(rows(folder, name)) for name in ACCURACIES}
    made |= {
        "server": by_domain(drawn, "server"),
        "client": by_domain(drawn, "client"),
        "gaps": gaps(rows(folder, "differences")),
        "updates": updates(rows(folder, "updates")),
        "membership": members(rows(folder, "membership")),
    }
    return {name: "\n".join(lines).strip() for name, lines in made.items()}


def main(given: Sequence[str] | None = None) -> None:
    """Prints every table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the CSV files")
    options = parser.parse_args(given)
    made = tables(options.data)
    print("\n\n".join(f"### {name}\n\n{table}" for name, table in made.items()))


if __name__ == "__main__":
    main()
