"""The closed-form classifier on PACS: accuracy on each unseen domain, seconds and bytes.

    python benchmarks/backbones/closed_form.py PACS OUT.csv [--weights resnet18=FILE] \
        [--backbones efficientnet_lite0 resnet18] [--sizes 96 128 160 224] \
        [--versions none outlines]

One client a domain, three of the four domains, all their images; features of every image are
computed once for all four columns, which gives what ``feddg run --method ridge`` gives. The penalty
is chosen by accuracy at the client that is left out; beside it stands what lambda = 1 gives. With a
version the features of a second version of every training image join the sums. What is in OUT.csv
is not computed again.
"""

import argparse
import csv
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as images_as

from feddg.data.decoded import open_pixels
from feddg.data.images import from_folder
from feddg.data.pixels import as_unit
from feddg.messages import Message
from feddg.methods.outlines import outlines
from feddg.methods.randconv import KERNELS, convolved, random_kernel
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
from feddg.models.network import Network
from feddg.rng import stream
from feddg.storage import cache_folder

RNG = stream(0, "closed_form.py")


def convolved_at_random(images: Tensor, network: Network) -> Tensor:
    """Returns a batch under one random convolution, in full."""
    size = KERNELS[int(torch.randint(len(KERNELS), (1,), generator=RNG))]
    return convolved(network, images, random_kernel(size, RNG), 1.0)


VERSIONS: dict[str, Callable[[Tensor, Network], Tensor]] = {
    "outlines": lambda images, network: outlines(images),
    "grey outlines": lambda images, network: outlines(images_as.rgb_to_grayscale(images, 3)),
    "white on black": lambda images, network: 1 - outlines(images),
    "grey": lambda images, network: images_as.rgb_to_grayscale(images, 3),
    "three times the contrast": lambda images, network: images_as.adjust_contrast(images, 3.0),
    "random convolution": convolved_at_random,
}
"""What may join every image, by name."""
NO_VERSION = "none"
FIELDS = (
    *("backbone", "size", "version", "unseen", "accuracy", "penalty", "left_out", "lambda_1"),
    *("seconds", "megabytes"),
)


def features_of(
    root: Path, backbone: str, weights: str, size: int, versions: list[str]
) -> Iterator[tuple[str, Tensor, Tensor, Tensor, list[str], float]]:
    """Yields by version: features ``(n, d)`` float64 of all images, plain and in that version.

    Then labels, domains, and the seconds that both take. The version ``none`` has no features.
    """
    table = from_folder(root)
    table, pixels, bad, *_ = open_pixels(table, size, cache=cache_folder())
    assert not bad
    network = build_network(backbone, len(table.class_names), weights=weights, image_size=size)
    network = network.eval().to(memory_format=torch.channels_last)
    labels = torch.from_numpy(table.labels)
    domains = [table.domain_names[d] for d in table.domains.tolist()]

    def measured(version: Callable[[Tensor, Network], Tensor]) -> tuple[Tensor, float]:
        started, parts = time.process_time(), []
        with torch.no_grad():
            for rows in torch.arange(len(table)).split(64):
                images = version(as_unit(pixels.gather(rows)), network)
                parts.append(network.features(images).double())
        return torch.cat(parts), time.process_time() - started

    plain, seconds = measured(lambda images, network: images)
    for name in versions:
        own, more = (plain[:0], 0.0) if name == NO_VERSION else measured(VERSIONS[name])
        yield name, plain, own, labels, domains, seconds + more


def columns(
    features: Tensor, versions: Tensor, labels: Tensor, domains: list[str]
) -> Iterator[dict[str, object]]:
    """Yields the figures of each domain held out; ``versions`` join the sums if there are any."""
    classes, names = int(labels.max()) + 1, sorted(set(domains))
    held = {name: torch.tensor([d == name for d in domains]) for name in names}
    sums = {}
    for name, rows in held.items():
        seen = torch.cat([features[rows], versions[rows]]) if len(versions) else features[rows]
        sums[name] = means(seen, labels[rows].repeat(len(seen) // int(rows.sum())), classes)
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
    parser.add_argument("--versions", nargs="*", default=[NO_VERSION, "outlines"])
    given = parser.parse_args()
    files = dict(pair.split("=", 1) for pair in given.weights)
    rows = list(csv.DictReader(given.out.open())) if given.out.exists() else []
    there = {(row["backbone"], row["size"], row["version"]) for row in rows}
    for backbone in given.backbones:
        for size in given.sizes:
            left = [v for v in given.versions if (backbone, str(size), v) not in there]
            if not left:
                continue
            weights = files.get(backbone, "imagenet")
            for version, *found, seconds in features_of(given.root, backbone, weights, size, left):
                each = {"backbone": backbone, "size": size, "version": version}
                each["seconds"] = f"{seconds:.0f}"
                rows += [each | row for row in columns(*found)]
                with given.out.open("w", newline="") as file:
                    writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(rows)
                print(*each.values(), *(row["accuracy"] for row in rows[-4:]), flush=True)


if __name__ == "__main__":
    main()
