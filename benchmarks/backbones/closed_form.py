"""The closed-form classifier on PACS: accuracy on each unseen domain, seconds and bytes.

    python benchmarks/backbones/closed_form.py PACS OUT.csv [--weights resnet18=FILE] \
        [--backbones efficientnet_lite0 resnet18] [--sizes 96 128 160 224]

One client a domain, three of the four domains, all their images; features of every image are
computed once for all four columns, which gives what ``feddg run --method ridge`` gives. The penalty
is chosen by accuracy at the client that is left out; beside it stands what lambda = 1 gives. What
is in OUT.csv is not computed again.
"""

import argparse
import csv
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from feddg.data.images import from_folder
from feddg.data.pixels import as_unit, open_pixels
from feddg.messages import Message
from feddg.models.backbones import build_network
from feddg.models.closed_form import (
    EXAMPLES,
    PENALTIES,
    chosen_by,
    left_out_answer,
    means,
    packed,
    solved,
)
from feddg.storage import cache_folder

FIELDS = (
    *("backbone", "size", "unseen", "accuracy", "penalty", "left_out", "lambda_1"),
    *("seconds", "megabytes"),
)


def features_of(root: Path, backbone: str, weights: str, size: int) -> tuple[Tensor, ...]:
    """Returns features ``(n, d)`` float64, labels and domains of all images, and the seconds."""
    table = from_folder(root)
    table, pixels, bad, *_ = open_pixels(table, size, cache=cache_folder())
    assert not bad
    network = build_network(backbone, len(table.class_names), weights=weights, image_size=size)
    network = network.eval().to(memory_format=torch.channels_last)
    started, parts = time.process_time(), []
    with torch.no_grad():
        for rows in torch.arange(len(table)).split(64):
            parts.append(network.features(as_unit(pixels.gather(rows))).double())
    seconds = time.process_time() - started
    domains = [table.domain_names[d] for d in table.domains.tolist()]
    return torch.cat(parts), torch.from_numpy(table.labels), domains, seconds


def columns(features: Tensor, labels: Tensor, domains: list[str]) -> Iterator[dict[str, object]]:
    """Yields the figures of each domain held out."""
    classes, names = int(labels.max()) + 1, sorted(set(domains))
    held = {name: torch.tensor([d == name for d in domains]) for name in names}
    sums = {name: means(features[rows], labels[rows], classes) for name, rows in held.items()}
    for unseen in names:
        sites = [name for name in names if name != unseen]
        counts = [int(held[name].sum()) for name in sites]
        shares = [count / sum(counts) for count in counts]
        gram, cross = (sum(s * sums[n][i] for s, n in zip(shares, sites)) for i in (0, 1))
        answers = [
            left_out_answer(
                Message({}, {EXAMPLES: sum(counts)}),
                (packed(gram), cross),
                (packed(sums[name][0]), sums[name][1]),
                features[held[name]],
                labels[held[name]],
                PENALTIES,
            )
            for name in sites
        ]
        choice = chosen_by(answers, PENALTIES)
        accuracy = []
        for weight, bias in solved(gram, cross, [choice.penalty, 1.0]):
            scores = features[held[unseen]] @ weight.T + bias
            accuracy.append(float((scores.argmax(1) == labels[held[unseen]]).double().mean()))
        yield {
            "unseen": unseen,
            "accuracy": f"{100 * accuracy[0]:.1f}",
            "penalty": choice.penalty,
            "left_out": f"{100 * sum(choice.accuracies) / len(choice.accuracies):.1f}",
            "lambda_1": f"{100 * accuracy[1]:.1f}",
            "megabytes": f"{8 * (packed(gram).numel() + cross.numel()) / 1e6:.2f}",
        }


def main() -> None:
    """Measures what is not in the file yet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--weights", nargs="*", default=[])
    parser.add_argument("--backbones", nargs="*", default=["efficientnet_lite0", "resnet18"])
    parser.add_argument("--sizes", nargs="*", type=int, default=[96, 128, 160, 224])
    given = parser.parse_args()
    files = dict(pair.split("=", 1) for pair in given.weights)
    rows = list(csv.DictReader(given.out.open())) if given.out.exists() else []
    there = {(row["backbone"], row["size"]) for row in rows}
    for backbone in given.backbones:
        for size in given.sizes:
            if (backbone, str(size)) in there:
                continue
            weights = files.get(backbone, "imagenet")
            *found, seconds = features_of(given.root, backbone, weights, size)
            each = {"backbone": backbone, "size": size, "seconds": f"{seconds:.0f}"}
            rows += [each | row for row in columns(*found)]
            with given.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
            print(backbone, size, *(row["accuracy"] for row in rows[-4:]), flush=True)


if __name__ == "__main__":
    main()
