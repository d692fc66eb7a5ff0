"""Measures a style codec on a folder of ``domain/class/image`` files.

Four questions, all answered on images that no probe was fitted to:

1. Content: does a classifier fitted to one domain's originals (and one fitted to all domains')
   still read them after encoding and decoding, and after stylizing them in every domain's style?
2. Style: does a classifier of domains take an image stylized in domain D's pooled style for D?
3. Fidelity and cost: error of encoding and decoding, distance to the style asked for, time.
4. Use: do clients of few images, grouped by their styles alone (FINCH), group by domain?

The classifiers are logistic regressions on a pretrained backbone's features. That of the domains
is fitted twice: to originals, and to encoded and decoded originals, so that the codec's own look
cannot be mistaken for a style.

    python benchmarks/codec/measure.py --data PACS --weights imagenet --out results.json
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from feddg.data.data_set import load_source
from feddg.data.decoding import decode_image
from feddg.data.images import ImageTable
from feddg.models.backbones import build_network
from feddg.rng import numpy_stream
from feddg.styles.codec import Codec, load_codec, transfer
from feddg.styles.statistics import finch, measure

STRENGTHS = (0.5, 1.0)
IMAGENET_MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
IMAGENET_DEVIATION = torch.tensor([0.229, 0.224, 0.225])[:, None, None]

Features = Callable[[Tensor], np.ndarray]


def main() -> None:
    """Reads the command line, measures at each size and writes one JSON file."""
    options = _options()
    torch.set_num_threads(options.threads)
    codec = load_codec(options.codec, encoder=options.encoder, decoder=options.decoder)
    network = build_network(options.backbone, 1, weights=options.weights)
    table = load_source("folder", options.data)
    results = {
        "codec": codec.fingerprint(),
        "backbone": options.backbone,
        "sizes": {
            size: measure_size(codec, network.featurizer.eval(), table, size, options)
            for size in options.size
        },
    }
    text = json.dumps(results, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of domain/class/image")
    parser.add_argument("--size", type=int, nargs="+", default=[64], help="image side, pixels")
    parser.add_argument("--fit", type=int, default=500, help="images per domain for the probes")
    parser.add_argument("--test", type=int, default=150, help="images per domain to stylize")
    parser.add_argument("--content", default="photo", help="domain whose classes are read")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--weights", default="imagenet", help="imagenet, or a weights file")
    parser.add_argument("--codec", default="compact")
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--decoder", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--pictures", type=Path, help="folder for before/after pictures")
    return parser.parse_args()


def measure_size(
    codec: Codec,
    backbone: nn.Module,
    table: ImageTable,
    size: int,
    options: argparse.Namespace,
) -> dict:
    """All measurements at one image size."""
    domains = list(table.domain_names)
    fit, test = {}, {}
    for index, domain in enumerate(domains):
        rows = np.flatnonzero(table.domains == index)
        rows = numpy_stream(0, "measure", domain).permutation(rows)[: options.fit + options.test]
        images, labels = _images(table, rows, size), table.labels[rows]
        fit[domain] = images[: options.fit], labels[: options.fit]
        test[domain] = images[options.fit :], labels[options.fit :]
    styles = {
        domain: measure(codec, images).pooled().styles()[0] for domain, (images, _) in fit.items()
    }
    if options.pictures:
        options.pictures.mkdir(parents=True, exist_ok=True)
        for strength in STRENGTHS:
            picture = _picture(codec, test, styles, strength)
            picture.save(options.pictures / f"{size}px_{strength}.png")
    stylized = {
        (source, target, strength): transfer(codec, test[source][0], styles[target], strength)
        for source in domains
        for target in domains
        for strength in STRENGTHS
    }
    decoded = {domain: _reconstruct(codec, test[domain][0]) for domain in domains}

    def features(images: Tensor) -> np.ndarray:
        return _features(backbone, images)

    return {
        "content": _content(features, options.content, fit, test, decoded, stylized),
        "style": _style(features, codec, fit, test, decoded, stylized),
        "style_distance": _style_distances(codec, test, styles, stylized),
        "psnr_db": {d: _psnr(test[d][0], decoded[d]) for d in domains},
        "client_groups": _client_groups(codec, fit),
        "transfer_ms_per_image": _milliseconds(codec, test[domains[0]][0], styles[domains[0]]),
    }


def _content(
    features: Features, domain: str, fit: dict, test: dict, decoded: dict, stylized: dict
) -> dict:
    """Accuracy, %, of a classifier of classes fitted to a domain's originals.

    ``other_domains`` says how it reads originals of the other domains: what looks like one of
    theirs can hardly be read better. ``all_domains`` is the same of a classifier that was fitted
    to originals of every domain, and so knows their looks.
    """
    one = _reading(features, [fit[domain]], domain, test, decoded, stylized)
    known = [d for d in fit if d != domain]
    probe = _probe(features(fit[domain][0]), fit[domain][1])
    one["other_domains"] = {
        d: _share(probe.predict(features(test[d][0])) == test[d][1]) for d in known
    }
    one["all_domains"] = _reading(features, list(fit.values()), domain, test, decoded, stylized)
    return one


def _reading(
    features: Features, fitted: list, domain: str, test: dict, decoded: dict, stylized: dict
) -> dict:
    """Accuracy, %, on a domain's images as they are, decoded and stylized."""
    labels = np.concatenate([labels for _, labels in fitted])
    probe = _probe(features(torch.cat([images for images, _ in fitted])), labels)
    truth = test[domain][1]

    def accuracy(images: Tensor) -> float:
        return round(100 * probe.score(features(images), truth), 1)

    return {
        "images": len(truth),
        "original": accuracy(test[domain][0]),
        "decoded": accuracy(decoded[domain]),
        "stylized": {
            f"{target} {strength}": accuracy(images)
            for (source, target, strength), images in stylized.items()
            if source == domain
        },
    }


def _style(
    features: Features, codec: Codec, fit: dict, test: dict, decoded: dict, stylized: dict
) -> dict:
    """Shares, %, of images that a classifier of domains takes for the style's domain."""
    domains = list(fit)
    answers = np.repeat(np.arange(len(domains)), [len(fit[d][0]) for d in domains])
    fitted = {
        "originals": torch.cat([fit[d][0] for d in domains]),
        "decoded": torch.cat([_reconstruct(codec, fit[d][0]) for d in domains]),
    }
    found = {}
    unseen = {"originals": {d: test[d][0] for d in domains}, "decoded": decoded}
    seen = {key: features(images) for key, images in stylized.items()}
    for kind, images in fitted.items():
        probe = _probe(features(images), answers)
        plain = [probe.predict(features(unseen[kind][d])) for d in domains]
        found[kind] = {
            "own_domain": {d: _share(plain[i] == i) for i, d in enumerate(domains)},
            "before": {
                target: _share(np.concatenate([p == i for j, p in enumerate(plain) if j != i]))
                for i, target in enumerate(domains)
            },
            "stylized": {
                f"{source} to {target} {strength}": _share(
                    probe.predict(seen[source, target, strength]) == domains.index(target)
                )
                for source, target, strength in stylized
                if source != target
            },
        }
    return found


def _share(hits: np.ndarray) -> float:
    return round(100 * float(np.mean(hits)), 1)


def _style_distances(codec: Codec, test: dict, styles: dict, stylized: dict) -> dict:
    """Distance to the style asked for, relative to its norm, before and after stylizing."""

    def distance(images: Tensor, style: Tensor) -> float:
        found = measure(codec, images).pooled().styles()[0]
        return round(((found - style).norm() / style.norm()).item(), 3)

    return {
        f"{source} to {target}": [
            distance(test[source][0], styles[target]),
            distance(images, styles[target]),
        ]
        for (source, target, strength), images in stylized.items()
        if strength == 1.0 and source != target
    }


def _client_groups(codec: Codec, fit: dict, images: int = 8, clients: int = 25) -> dict:
    """The finest FINCH groups of one-domain clients, and how many clients sit with strangers."""
    styles, domains = [], []
    for index, (pictures, _) in enumerate(fit.values()):
        for client in pictures.split(images)[:clients]:
            styles.append(measure(codec, client).pooled().styles()[0].flatten())
            domains.append(index)
    groups = finch(torch.stack(styles).numpy())[0]
    counts = np.zeros((groups.max() + 1, len(fit)), int)
    np.add.at(counts, (groups, domains), 1)
    return {
        "clients": len(groups),
        "groups": len(counts),
        "clients_outside_their_groups_main_domain": int(counts.sum() - counts.max(1).sum()),
    }


def _reconstruct(codec: Codec, images: Tensor) -> Tensor:
    return transfer(codec, images, torch.ones(2, codec.channels), 0.0)


def _psnr(images: Tensor, decoded: Tensor) -> float:
    """Mean over images of the peak signal-to-noise ratio, dB."""
    errors = (images.float() - decoded.float()).square().mean((1, 2, 3)).clamp(min=1e-3)
    return round((10 * (255**2 / errors).log10()).mean().item(), 1)


def _milliseconds(codec: Codec, images: Tensor, style: Tensor) -> float:
    """The fastest of three passes, per image."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        transfer(codec, images[:64], style)
        times.append(time.perf_counter() - start)
    return round(1000 * min(times) / len(images[:64]), 1)


def _images(table: ImageTable, rows: np.ndarray, size: int) -> Tensor:
    pixels = [decode_image(table.root / table.paths[row], size) for row in rows]
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()


def _features(backbone: nn.Module, images: Tensor) -> np.ndarray:
    with torch.inference_mode():
        parts = [
            backbone((part / 255 - IMAGENET_MEAN) / IMAGENET_DEVIATION) for part in images.split(64)
        ]
        return torch.cat(parts).numpy()


def _probe(features: np.ndarray, labels: np.ndarray) -> Pipeline:
    regression = LogisticRegression(C=0.01, max_iter=1000)
    return make_pipeline(StandardScaler(), regression).fit(features, labels)


def _picture(codec: Codec, test: dict, styles: dict, strength: float) -> Image.Image:
    """Rows: an image of each domain. Columns: original, decoded, each domain's style."""
    rows = []
    for images, labels in test.values():
        for row in [int(np.flatnonzero(labels == label)[0]) for label in np.unique(labels)[:3]]:
            image = images[row : row + 1]
            views = [image, _reconstruct(codec, image)]
            views += [transfer(codec, image, style, strength) for style in styles.values()]
            rows.append(torch.cat(views, dim=3))
    return Image.fromarray(torch.cat(rows, dim=2)[0].permute(1, 2, 0).numpy())


if __name__ == "__main__":
    main()
