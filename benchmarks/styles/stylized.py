"""What does PARDON's triplet loss still find to do? Images and copies, seen by models.

    python benchmarks/styles/stylized.py PARDON_RUN [RUN ...] [--strengths 0.5 1.0]

stylizes images of the training domains that nobody trained on (in-domain validation and test) in
the run's interpolation style and shows them to its model before training, to the trained one, and
to those of further runs with the same held-out domains. Printed for each, as a Markdown table:

- accuracy on the images and on their stylized copies, percent;
- the distance of an image's embedding to that of its stylized copy, and to stylized copies of other
  classes, of unit
  length both, so 0 to 2;
- triplets inside the margin: the share of (image, stylized copy, stylized copy of another class)
  that Eq. 7 punishes,
  percent, and its mean. Over all such triplets, not over drawn ones.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from feddg.clients.client import Batch
from feddg.data.pixels import as_unit
from feddg.experiment import load_experiment
from feddg.methods.composition import build_method
from feddg.methods.pardon import Pardon
from feddg.models.network import Network
from feddg.runs.folder import EXPERIMENT, RunFolder
from feddg.runs.model import load_trained
from feddg.runs.prepare import build, cache_folder, load_images

HEADER = (
    "| model | strength | accuracy on images | on copies | distance to copy | to copies of other "
    "classes | triplets inside the margin | mean of Eq. 7 |\n|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    """Reads the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="a PARDON run, then any others")
    parser.add_argument("--strengths", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    first = options.runs[0]
    experiment = load_experiment(first / EXPERIMENT)
    images = load_images(experiment, cache_folder(), lambda what, done, total: None)
    method, network = build(experiment, len(images.table.class_names))
    with RunFolder(first) as opened:
        checkpoint = opened.load_checkpoint()
    if not isinstance(method, Pardon) or checkpoint is None or not checkpoint.state.context:
        parser.error(f"{first} is no PARDON run with an interpolation style")
    held = torch.cat(
        [torch.from_numpy(images.splits.id_val), torch.from_numpy(images.splits.id_test)]
    )
    originals = images.pixels.gather(held)
    labels = torch.from_numpy(images.table.labels)[held]
    style = checkpoint.state.context.tensors["style"]
    chosen = experiment.method.settings
    stylized = {
        s: drawn_by(build_method("pardon", chosen | {"strength": s}), originals, style)
        for s in options.strengths
    }
    networks = {"before training": network.eval()}
    for run in options.runs:
        trained = load_trained(run)
        if trained.experiment.hold_out != experiment.hold_out:
            parser.error(f"{run} held other domains out than {first}")
        networks[trained.method.name] = trained.network
    margin = method.settings.margin
    print(f"{len(labels)} images, margin {margin}\n\n{HEADER}")
    for name, network in networks.items():
        for strength, copies in stylized.items():
            cells = compare(network, originals, copies, labels, margin)
            print(f"| {name} | {strength:g} | " + " | ".join(cells) + " |")


def drawn_by(method: Pardon, originals: Tensor, style: Tensor) -> Tensor:
    """Returns the copies ``(N, 3, H, W)`` of uint8 images as a network is given them, RGB."""
    nothing = torch.empty(0, dtype=torch.int64)
    parts = (Batch(as_unit(part), nothing, nothing) for part in originals.split(64))
    with torch.inference_mode():
        return torch.cat([method.stylize(part, style) for part in parts])


def compare(
    network: Network, originals: Tensor, stylized: Tensor, labels: Tensor, margin: float
) -> list[str]:
    """Returns one row's cells for uint8 images and their stylized copies, ``(N, 3, H, W)`` each."""
    (own, on_images), (other, on_stylized) = seen(network, originals), seen(network, stylized)
    distances = torch.cdist(own, other)
    to_twin = distances.diagonal()
    of_other_class = labels[:, None] != labels[None, :]
    punished = (to_twin[:, None] - distances + margin).clamp(min=0)[of_other_class]
    return [
        f"{100 * (on_images == labels).float().mean():.1f}",
        f"{100 * (on_stylized == labels).float().mean():.1f}",
        f"{to_twin.mean():.3f}",
        f"{distances[of_other_class].mean():.3f}",
        f"{100 * (punished > 0).float().mean():.1f}",
        f"{punished.mean():.4f}",
    ]


def seen(network: Network, images: Tensor) -> tuple[Tensor, Tensor]:
    """Returns embeddings of unit length ``(N, d)`` and predicted classes ``(N,)``.

    Images are uint8, or RGB in floating point.
    """
    device = next(network.parameters()).device
    unit = images if images.is_floating_point() else as_unit(images)
    with torch.inference_mode():
        parts = [network.features(part.to(device)).cpu() for part in unit.split(256)]
        embeddings = torch.cat(parts)
        predicted = network.classifier(embeddings.to(device)).argmax(1).cpu()
    return torch.nn.functional.normalize(embeddings, dim=1), predicted


if __name__ == "__main__":
    main()
