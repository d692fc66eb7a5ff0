r"""Draws the stylized copies of PARDON's released code and ours from the same images.

    python benchmarks/papers/released_copies.py FOLDER --weights RESNET18 \
        --codec vgg19 --encoder ENCODER --decoder DECODER

FOLDER holds images at any depth; an image's class is the name of the folder that it is in, as in
PACS. Images are dealt out to clients, which send their styles; the copies of a batch are drawn in
the interpolation style. The released pipeline is written down here once more, in plain PyTorch
(judydnguyen/PARDON-FedDG, read at e5df7dd), and shares nothing with the package but the images, the
weights and the draws of augmentations. Printed for it, for ours by default, for ours with every
setting that follows the code but ``stylization``, and for ours with that one too:

- the largest distance of the interpolation style and of the copies to the released ones, copies as
  the network is given them, and the copies' in decibels (PSNR, as RGB);
- decibels between copies and originals;
- the share of all triplets inside the margin (an image, its copy, a copy of another class), and the
  length of the triplet term's gradient over that of the cross-entropy's: before training, and after
  some steps of cross-entropy on the images alone. Normalisation statistics are frozen throughout.
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

from feddg.clients.client import Batch, Client, Examples, Worker
from feddg.data.data_set import find_augmentation
from feddg.data.decoding import decode_image
from feddg.data.images import IMAGE_SUFFIXES
from feddg.data.pixels import ArrayPixels
from feddg.methods.composition import build_method
from feddg.methods.pardon import Pardon
from feddg.models.backbones import build_network, read_weights
from feddg.models.network import Network
from feddg.rng import stream
from feddg.settings import TrainSettings
from feddg.styles.codecs import CompactCodec

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
MARGIN, GAMMA1, GAMMA2 = 0.3, 0.75, 0.2
RELEASED = {
    "stylization": "released",
    "local_features": "flatten",
    "combine": "mixture",
    "median": "lower",
}
"""All settings by which styles and copies are those of the released code."""
AS_BEFORE = {name: value for name, value in RELEASED.items() if name != "stylization"} | {
    "style_layer": "conv4_1_pre",
    "stylized": "on_the_fly",
    "content_variance": "n-1",
}


# The released pipeline. Images are normalised tensors here, as its data loader makes them.


def layers(weights: dict[str, Tensor], between: Callable[[], nn.Module]) -> nn.Sequential:
    """Builds a codec's half; ``between`` is what stands where no convolution does."""
    kernels = {int(key.split(".")[0]): w for key, w in weights.items() if key.endswith("weight")}
    found: dict[int, nn.Module] = {}
    for place, kernel in sorted(kernels.items()):
        found[place] = nn.Conv2d(kernel.shape[1], kernel.shape[0], kernel.shape[-1])
        if kernel.shape[-1] == 3:
            found |= {place - 1: nn.ReflectionPad2d(1), place + 1: nn.ReLU()}
    half = nn.Sequential(*[found.get(place) or between() for place in range(max(found) + 1)])
    half.load_state_dict({key: weights[key].float() for key in half.state_dict()})
    return half.requires_grad_(False)


def encoder_of(weights: dict[str, Tensor], convolutions: int) -> nn.Sequential:
    """The encoder up to the ReLU after so many 3 x 3 convolutions."""
    places = sorted(
        int(k.split(".")[0]) for k, w in weights.items() if w.ndim == 4 and w[0, 0].numel() > 1
    )
    kept = {k: w for k, w in weights.items() if int(k.split(".")[0]) <= places[convolutions - 1]}
    return layers(kept, lambda: nn.MaxPool2d(2, ceil_mode=True))


def decoder_of(weights: dict[str, Tensor]) -> nn.Sequential:
    """The decoder; nothing follows its last convolution."""
    return layers(weights, lambda: nn.Upsample(scale_factor=2, mode="nearest"))[:-1]


def groups_of(points: Tensor) -> list[Tensor]:
    """FINCH by loops: the group of each point, from the finest partition to the coarsest."""
    of, partitions = torch.arange(len(points)), []
    while True:
        count = int(of.max()) + 1
        means = torch.stack([points[of == group].mean(0) for group in range(count)]).double()
        alike = functional.normalize(means, dim=1) @ functional.normalize(means, dim=1).T
        nearest = alike.fill_diagonal_(-2).argmax(1) if count > 1 else torch.zeros(1).long()
        label = torch.arange(count)
        for _ in range(count):  # the smallest number wanders along all links
            for one, other in enumerate(nearest.tolist()):
                label[one] = label[other] = min(label[one], label[other])
        joined = label.unique(return_inverse=True)[1][of]
        if partitions and joined.max() == 0:
            return partitions
        partitions.append(joined)
        if joined.max() == 0:
            return partitions
        of = joined


def style_of(encoder: nn.Sequential, images: Tensor) -> Tensor:
    """A client's style ``(2, C)``, of its augmented, normalised images."""
    maps = torch.cat([encoder[:-1](part) for part in images.split(32)])
    of = groups_of(maps.flatten(1))[-1]
    values = [maps[of == group].transpose(0, 1).flatten(1).double() for group in of.unique()]
    mean = torch.stack([cluster.mean(1) for cluster in values]).mean(0)
    square = torch.stack([cluster.square().mean(1) for cluster in values]).mean(0)
    return torch.stack([mean, (square - mean.square() + 1e-5).sqrt()]).float()


def interpolated(styles: Tensor) -> Tensor:
    """The server's style from the clients', ``(N, 2, C)``."""
    of = groups_of(styles.flatten(1))[0]
    means = torch.stack([styles[of == group].mean(0) for group in of.unique()])
    return means.median(0).values


def copies_of(
    encoder: nn.Sequential, decoder: nn.Sequential, images: Tensor, style: Tensor
) -> Tensor:
    """The copies of normalised images, as the classifier is given them."""
    maps = encoder(images)
    deviation = (maps.flatten(2).var(2, unbiased=True) + 1e-5).sqrt()[..., None, None]
    mean = maps.flatten(2).mean(2)[..., None, None]
    wanted, spread = style[0][:, None, None], style[1][:, None, None]
    transferred = spread * (maps - mean) / deviation + wanted
    return decoder(0.5 * transferred + 0.5 * maps)[..., : images.shape[-2], : images.shape[-1]]


def loss_of(
    embed: Callable[[Tensor], Tensor],
    classify: Callable[[Tensor], Tensor],
    images: Tensor,
    copies: Tensor,
    labels: Tensor,
    negatives: Tensor,
) -> dict[str, Tensor]:
    """The terms of the loss; ``negatives`` are the copies drawn for the anchors, one each."""
    z, z_copies = embed(images), embed(copies)
    near = z / z.norm(dim=1, keepdim=True), z_copies / z_copies.norm(dim=1, keepdim=True)
    apart = (near[0] - near[1]).norm(dim=1) - (near[0] - near[1][negatives]).norm(dim=1) + MARGIN
    return {
        "cross_entropy": functional.cross_entropy(classify(z), labels),
        "triplet": GAMMA1 * apart.clamp(min=0).mean(),
        "regularizer": GAMMA2 * (z.square() + z_copies.square()).mean(),
    }


# Ours, and what is measured of both.


@dataclass
class Site:
    """Clients whose images are at hand, for one method after another."""

    network: Network
    images: numpy.ndarray
    labels: Tensor
    rows: Sequence[Tensor]
    batch: Tensor
    seed: int

    def client(self, method: Pardon, id: int, rows: Tensor, round: int = 0) -> Client:
        """A client that holds these images."""
        train = TrainSettings(augmentation="pacs", hue="hsv", batch_size=len(rows))
        augmentation = find_augmentation("pacs").model_copy(update={"hue": "hsv"})
        worker = Worker(self.network, train, augmentation, torch.device("cpu"), self.seed)
        number = int(self.labels.max()) + 1
        parts = (ArrayPixels(self.images), rows, self.labels[rows], torch.zeros_like(rows))
        return Client(id, Examples(*parts, number, f"{id}"), worker, round=round)

    def ours(self, method: Pardon) -> tuple[list[Tensor], Tensor, Batch, Tensor, Client]:
        """Clients' styles, the interpolation style, a batch, its copies as RGB, and its client."""
        sent = [
            (id, method.client_statistics(self.client(method, id, rows)))
            for id, rows in enumerate(self.rows)
        ]
        context = method.aggregate_statistics(sent)
        client = self.client(method, len(self.rows), self.batch, round=1)
        client.context = context
        method.begin(client)
        batch = client.batch(torch.arange(len(self.batch)), client.stream("augment"))
        copies = method.copies(client, batch, "stylized")
        styles = [message.tensors["style"] for _, message in sent]
        return styles, context.tensors["style"], batch, copies, client


def inside_margin(network: Network, images: Tensor, copies: Tensor, labels: Tensor) -> float:
    """The share of all triplets inside the margin; images and copies as the network is given."""
    with torch.no_grad():
        z, z_copies = (
            functional.normalize(network.embedding(network.featurizer(x))) for x in (images, copies)
        )
    distances = torch.cdist(z, z_copies)
    punished = distances.diagonal()[:, None] - distances + MARGIN > 0
    return float(punished[labels[:, None] != labels].float().mean())


def gradient_ratio(network: Network, images: Tensor, copies: Tensor, labels: Tensor) -> float:
    """Length of the triplet term's gradient over that of the cross-entropy's."""
    other = (labels[:, None] != labels).float()
    negatives = torch.multinomial(other, 1, generator=stream(0, "negatives")).squeeze(1)
    terms = loss_of(
        lambda x: network.embedding(network.featurizer(x)),
        network.classifier,
        images,
        copies,
        labels,
        negatives,
    )
    lengths = []
    for name in ("triplet", "cross_entropy"):
        parts = [p for p in network.parameters() if p.requires_grad]
        found = torch.autograd.grad(terms[name], parts, retain_graph=True, allow_unused=True)
        lengths.append(torch.stack([g.norm() for g in found if g is not None]).norm())
    return float(lengths[0] / lengths[1])


def decibels(one: Tensor, other: Tensor) -> float:
    """Peak signal to noise of images in RGB, clamped to what can be seen."""
    return float(-10 * (one.clamp(0, 1) - other.clamp(0, 1)).square().mean().log10())


def trained(site: Site, steps: int, rate: float) -> Network:
    """A copy of the network after some steps of cross-entropy on the clients' images."""
    network = copy.deepcopy(site.network)
    optimizer = torch.optim.Adam(network.parameters(), rate)
    rng, rows = stream(site.seed, "steps"), torch.cat(list(site.rows))
    method = build_method("pardon", {})
    client = site.client(method, 0, rows)
    for _ in range(steps):
        drawn = torch.randperm(len(rows), generator=rng)[: len(site.batch)]
        batch = client.batch(drawn, rng)
        optimizer.zero_grad()
        functional.cross_entropy(network(batch.images), batch.labels).backward()
        optimizer.step()
    return network


def read(folder: Path, number: int, size: int, seed: int) -> tuple[numpy.ndarray, Tensor]:
    """Some images of a folder, drawn evenly, and their classes."""
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
    order = torch.randperm(len(files), generator=stream(seed, "files"))[:number].tolist()
    chosen = [files[place] for place in order]
    names = sorted({file.parent.name for file in chosen})
    if len(chosen) < number or len(names) < 2:
        raise SystemExit(
            f"{folder}: {number} images of at least two classes are needed, and there are "
            f"{len(files)} in all, and classes: {', '.join(names) or 'none'} (a class is a folder; "
            "--clients and --per-client say how many images are taken)"
        )
    images = numpy.stack([decode_image(file, size) for file in chosen])
    return images, torch.tensor([names.index(file.parent.name) for file in chosen])


def main() -> None:
    """Reads the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("PACS"))
    parser.add_argument("--codec", default="compact", help="compact, or vgg19 with both files")
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--decoder", type=Path)
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--weights", help="of the backbone; random ones by default")
    parser.add_argument("--embedding", default="none", help="none, or linear as released")
    parser.add_argument("--size", type=int, default=128, help="image side, pixels")
    parser.add_argument("--batch", type=int, default=32, help="images copied")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--per-client", type=int, default=16, help="images of a client")
    parser.add_argument("--steps", type=int, default=60, help="of cross-entropy")
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    number = options.clients * options.per_client
    images, labels = read(options.folder, number, options.size, options.seed)
    network = build_network(
        options.backbone,
        int(labels.max()) + 1,
        weights=options.weights,
        embedding=options.embedding,
        seed=options.seed,
        image_size=options.size,
    ).eval()
    rows = torch.arange(number).split(options.per_client)
    site = Site(network, images, labels, rows, torch.arange(options.batch), options.seed)
    codec = {"codec": options.codec, "encoder": options.encoder, "decoder": options.decoder}
    for line in compare(site, codec, trained(site, options.steps, options.lr)):
        print(line)


def compare(site: Site, codec: dict[str, object], later: Network) -> list[str]:
    """Returns the lines of the table."""
    variants = {"default": {}, "every other setting": AS_BEFORE, "released": RELEASED}
    ours = {
        name: site.ours(build_method("pardon", codec | settings))
        for name, settings in variants.items()
    }
    method = build_method("pardon", codec | RELEASED)
    normalised = [
        (method.style_images(site.client(method, id, rows)) - MEAN) / DEVIATION
        for id, rows in enumerate(site.rows)
    ]
    encoder, decoder = halves(codec)
    with torch.inference_mode():
        style = interpolated(torch.stack([style_of(encoder, part) for part in normalised]))
        batch = ours["default"][2]
        images = (batch.images - MEAN) / DEVIATION
        released = copies_of(encoder, decoder, images, style)
    found = {"the released code": (style, released)} | {
        f"ours, {name}": (part[1], (part[3] - MEAN) / DEVIATION) for name, part in ours.items()
    }
    lines = [
        f"{len(batch)} images of {images.shape[-1]} pixels, {len(site.rows)} clients, "
        f"margin {MARGIN}",
        "",
        "| copies | style: largest distance | copies: largest distance | copies, dB to released | "
        "copies, dB to the images | inside the margin, at the start | after training | gradient "
        "over cross-entropy's, at the start | after training |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (own, copies) in found.items():
        rgb = [x * DEVIATION + MEAN for x in (copies, released, images)]
        shares = [inside_margin(n, images, copies, batch.labels) for n in (site.network, later)]
        ratios = [
            gradient_ratio(n, images.clone(), copies.clone(), batch.labels)
            for n in (site.network, later)
        ]
        lines.append(
            f"| {name} | {(own - style).abs().max():.1e} | {(copies - released).abs().max():.1e} | "
            f"{decibels(rgb[0], rgb[1]):.1f} | {decibels(rgb[0], rgb[2]):.1f} | "
            + " | ".join([*(f"{100 * s:.1f} %" for s in shares), *(f"{r:.3f}" for r in ratios)])
            + " |"
        )
    return lines


def halves(codec: dict[str, object]) -> tuple[nn.Sequential, nn.Sequential]:
    """The encoder and the decoder of the settings, built here from the same files."""
    files = [CompactCodec.file(part, codec[part]) for part in ("encoder", "decoder")]
    weights = [read_weights(Path(str(file))) for file in files]
    return encoder_of(weights[0], 9 if codec["codec"] == "vgg19" else 4), decoder_of(weights[1])


if __name__ == "__main__":
    main()
