"""How pure are the FINCH groups of the clients' styles? PARDON's claim in small.

    python benchmarks/styles/groups.py RUN_FOLDER

reads the styles that a PARDON run's clients sent, groups them as the server does, and prints for
each partition how many groups there are, how many hold clients of one main domain only, and the
purity: the share of clients whose main domain is the most frequent one of their group.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from safetensors.torch import load_file

from feddg.styles.statistics import finch


def purity(groups: list[int], domains: list[str]) -> tuple[int, float]:
    """Returns how many groups hold one domain only, and the purity in [0, 1]."""
    members = {g: Counter(d for h, d in zip(groups, domains) if h == g) for g in set(groups)}
    single = sum(len(counts) == 1 for counts in members.values())
    return single, sum(max(counts.values()) for counts in members.values()) / len(domains)


def main(folder: Path) -> None:
    """Prints the table for one run."""
    styles = load_file(folder / "setup.safetensors")["style"]
    table = json.loads((folder / "clients.json").read_text(encoding="utf-8"))
    names = table["domains"]
    main_domain = [
        names[max(range(len(names)), key=client["domains"].__getitem__)]
        for client in table["clients"]
    ]
    print(f"{len(styles)} clients: {dict(Counter(main_domain))}")
    for level, labels in enumerate(finch(styles.flatten(1).numpy()), start=1):
        groups = labels.tolist()
        single, share = purity(groups, main_domain)
        owners = Counter(
            Counter(d for h, d in zip(groups, main_domain) if h == g).most_common(1)[0][0]
            for g in set(groups)
        )
        print(
            f"partition {level}: {len(set(groups))} groups, {single} of one domain, "
            f"purity {share:.3f}, groups by domain {dict(owners)}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
