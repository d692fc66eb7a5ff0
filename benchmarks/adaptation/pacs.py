"""FedIG, FedIG-A and FedIG under every adaptation on PACS, leave one domain out.

Runs are found by their content, so a second call goes on where the first was stopped; the table
holds what is complete.

    python benchmarks/adaptation/pacs.py --root PACS --weights resnet18.safetensors \
        --rounds 20 --local-steps 20 --out runs/fedig
"""

import argparse
import shlex
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from feddg.api import run
from feddg.data.pixels import as_unit
from feddg.diagnostics import silent
from feddg.experiment import Experiment
from feddg.models.network import Network
from feddg.models.normalization import adapter_of, interpolated, map_layers, normalised_by
from feddg.prediction.adaptation import ADAPTATIONS
from feddg.prediction.evaluate import evaluate_run
from feddg.prediction.model import load_trained
from feddg.records import ID_VAL, TEST, AdaptationRow
from feddg.runs.prepare import load_images
from feddg.runs.reading import OWN, Run, read_run
from feddg.runs.table import BEST_IN_DOMAIN, FINAL
from feddg.storage import cache_folder

DOMAINS = ("photo", "art_painting", "cartoon", "sketch")
PAPER = {
    "FedAvg": 77.35, "FedBN": 80.79, "FedIG": 84.07, "FedIG + fixed": 83.73,
    "FedIG + random": 79.87, "FedIG + bin": 83.54, "FedIG + ensemble": 84.02,
    "FedIG + iabn": 84.11, "FedIG + mixnorm": 84.45, "FedIG-A": 85.53,
}  # fmt: skip
"""Averages in percent: ResNet-18 of ImageNet at 224 pixels, 40 rounds of 200 steps, 4 seeds."""
BEFORE_TRAINING = ("adapter", "bin", "global")


@dataclass(frozen=True)
class Line:
    """A line of the table: a method, and how its model predicts."""

    label: str
    method: str
    adaptation: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


LINES = (
    Line("FedAvg", "fedavg"),
    Line("FedBN", "fedbn"),
    Line("FedIG", "fedig"),
    *(Line(f"FedIG + {n}", "fedig", n) for n in ADAPTATIONS if n not in BEFORE_TRAINING),
    Line("FedIG + bin", "fedig", "bin", {"instance_gate": 1.0}),
    Line("FedIG-A", "fedig-a"),
    Line("FedIG-A, adapters off", "fedig-a", "global"),
)


def experiment(line: Line, test: str, seed: int, args: argparse.Namespace) -> Experiment:
    """Returns what is run for a line and a held-out domain."""
    fields: dict[str, Any] = {
        "preset": "fedig" if args.silos is None else "fedig_silos",
        "data": {"source": "pacs", "root": str(args.root), "image_size": args.image_size},
        "hold_out": test,
        "method": {"name": line.method, "settings": line.settings},
        "model": {"weights": str(args.weights)},
        "train": {
            "rounds": args.rounds, "local_steps": args.local_steps, "batch_size": args.batch_size,
            "lr": args.lr,
        },
        "evaluate": {"every": args.eval_every},
        "seed": seed,
        "precision": args.precision,
    }  # fmt: skip
    if args.silos not in (None, "iid"):
        fields["clients"] = {"alpha": float(args.silos)}
    return Experiment(**fields)


def lines(args: argparse.Namespace) -> Iterator[Line]:
    """Yields the lines that are asked for."""
    return (line for line in LINES if args.methods is None or line.method in args.methods)


def carry_out(args: argparse.Namespace) -> None:
    """Runs what is missing, domain by domain, so that a table can be read early."""
    for seed in args.seeds:
        for test in args.domains:
            for line in lines(args):
                chosen = experiment(line, test, seed, args)
                done = run(chosen, args.out)
                if line.adaptation is not None:
                    evaluate_run(done.folder, [line.adaptation], batch_size=args.adapt_batch)
                if line.method.startswith("fedig") and line.adaptation is None:
                    evaluate_run(done.folder, ["global"], personal=True)
                print(f"{test}, seed {seed}: {line.label}", flush=True)
            write(args)


def folders(line: Line, test: str, args: argparse.Namespace) -> list[Path]:
    """Returns the complete runs of a line and a domain, one per seed."""
    found = [args.out / experiment(line, test, seed, args).label for seed in args.seeds]
    return [
        f for f in found if (f / "summary.json").is_file() and read_run(f).status == "completed"
    ]


def accuracies(line: Line, test: str, args: argparse.Namespace, best: bool = False) -> list[float]:
    """Returns test accuracy in percent, one per seed that is complete."""
    values = []
    for folder in folders(line, test, args):
        record = read_run(folder)
        if line.adaptation is None:
            value = held_out(record, best)
        else:
            scores = stored(folder, line.adaptation, args)
            value = next((s.accuracy for s in scores if s.split == TEST), None)
        values += [] if value is None else [100 * value]
    return values


def held_out(record: Run, best: bool) -> float | None:
    """Test accuracy after the final round, or the best by in-domain validation."""
    rule = BEST_IN_DOMAIN if best else FINAL
    return rule.of(record.table).value(TEST)


def stored(folder: Path, name: str, args: argparse.Namespace) -> list[AdaptationRow]:
    """Returns scores that are already measured; nothing is computed here but what is missing."""
    return evaluate_run(folder, [name], batch_size=args.adapt_batch).scores


def write(args: argparse.Namespace) -> None:
    """Writes the table and the figure of all complete runs."""
    args.results.mkdir(parents=True, exist_ok=True)
    name = "pacs_fedig" if args.silos is None else f"pacs_fedig_silos_{args.silos}"
    parts = [heading(args), table(args), selection_table(args), seen_table(args)]
    picture = args.results / f"{name}_alphas.png"
    if draw_alphas(args, picture):
        parts.append(
            "Alpha of FedIG-A's adapters on the unseen domain, layer by layer from the image "
            "to the classifier; a point per image, the line joins the medians (Figure 7).\n\n"
            f"![alpha by layer]({picture.name})"
        )
    (args.results / f"{name}.md").write_text("\n\n".join(part for part in parts if part) + "\n")


def heading(args: argparse.Namespace) -> str:
    command = shlex.join(["python", "benchmarks/adaptation/pacs.py", *shown(sys.argv[1:])])
    setting = "one domain per client" if args.silos is None else (
        f"ten clients per domain, labels {args.silos}, ten sampled per round")  # fmt: skip
    return (
        "# FedIG and test-time adaptation on PACS\n\n"
        f"    {command}\n\n"
        f"ResNet-18 ({args.weights.name}), {args.image_size} pixels, bottleneck of 256, "
        f"{setting}, {args.rounds} rounds of {args.local_steps} steps, batch {args.batch_size}, "
        f"SGD {args.lr:g} with momentum 0.5, {len(args.seeds)} seed(s). The paper: weights of "
        "ImageNet, 224 pixels, 40 rounds of 200 steps, batch 64, 4 seeds, the best model "
        "of every 20 steps and of all rounds. The numbers are therefore not comparable one by one."
    )


def shown(arguments: list[str]) -> list[str]:
    """Returns the command's words with folders and files by their last names."""
    return [Path(word).name if word.startswith("/") else word for word in arguments]


def table(args: argparse.Namespace) -> str:
    """Accuracy on the unseen domain after the final round."""
    rows = [row(line, args) for line in lines(args)]
    names = [name.replace("_", " ") for name in args.domains]
    return "## Accuracy on the unseen domain, final round (%)\n\n" + markdown(
        ("method", *names, "mean", "paper's mean"), [r for r in rows if r]
    )


def row(line: Line, args: argparse.Namespace, best: bool = False) -> list[str] | None:
    """A line of a table: a cell per domain, and the mean where all are there."""
    values = [accuracies(line, test, args, best) for test in args.domains]
    if not any(values):
        return None
    mean = f"{statistics.mean(map(statistics.mean, values)):.1f}" if all(values) else "-"
    paper = PAPER.get(line.label) if args.silos is None else None
    return [line.label, *map(cell, values), mean, "-" if paper is None else f"{paper:.1f}"]


def cell(values: list[float]) -> str:
    """Mean, and standard deviation over seeds where there are several."""
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def selection_table(args: argparse.Namespace) -> str:
    """The same under the paper's rule for the round."""
    rows = [row(line, args, best=True) for line in lines(args) if line.adaptation is None]
    names = [name.replace("_", " ") for name in args.domains]
    kept = [r[:-1] for r in rows if r]
    title = "## The same in the round with the best mean validation of the seen clients (%)\n\n"
    return title + markdown(("method", *names, "mean"), kept) if kept else ""


def seen_table(args: argparse.Namespace) -> str:
    """Accuracy inside the federation under local and global statistics (the paper's Table 12)."""
    rows = []
    for line in (line for line in lines(args) if line.method.startswith("fedig")):
        if line.adaptation is not None:
            continue
        for how in (OWN, "global", None):
            cells = [seen(line, test, how, args) for test in args.domains]
            if any(cells):
                words = {OWN: "local statistics", "global": "global statistics", None: "as trained"}
                rows.append([f"{line.label}, {words[how]}", *map(cell, cells)])
    names = [f"without {name.replace('_', ' ')}" for name in args.domains]
    title = "## Accuracy of the clients' own domains, in-domain validation, final round (%)\n\n"
    return title + markdown(("method", *names), rows) if rows else ""


def seen(line: Line, test: str, how: str | None, args: argparse.Namespace) -> list[float]:
    """Returns in-domain validation accuracy in percent, the mean over domains, one per seed."""
    values = []
    for folder in folders(line, test, args):
        record = read_run(folder)
        if how is None:
            value = FINAL.of(record.table).value(ID_VAL)
            values += [] if value is None else [100 * value]
            continue
        found = evaluate_run(folder, ["global"], personal=True).scores
        own = [s.accuracy for s in found if s.adaptation == how and s.split == ID_VAL]
        values += [100 * statistics.mean(own)] if own else []
    return values


def markdown(header: tuple[str, ...], rows: list[list[str]]) -> str:
    """Returns a Markdown table."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (list(header), rule, *rows))


def alphas(folder: Path) -> numpy.ndarray:
    """Returns how far each layer of a run adapts to each test image, ``(n, layers)``."""
    trained = load_trained(folder)
    images = load_images(trained.experiment, cache_folder(), silent)
    found = []
    for rows in torch.from_numpy(images.splits.test).split(256):
        with torch.inference_mode():
            own = shares_of(trained.network, as_unit(images.pixels.gather(rows)))
        found.append(torch.stack(list(own.values()), 1))
    return torch.cat(found).numpy()


def shares_of(network: Network, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns alpha of each layer for each image, ``(B,)`` by the layer's name."""
    adapter, names = adapter_of(network), list(map_layers(network))
    assert adapter is not None
    share = adapter.share()
    found: dict[str, torch.Tensor] = {}

    def watched(number: int, layer, ours, image) -> torch.Tensor:
        return found.setdefault(names[number], share(number, layer, ours, image))

    with normalised_by(network, interpolated(network, watched)):
        network(images)
    return {name: found[name] for name in names}


def draw_alphas(args: argparse.Namespace, path: Path) -> bool:
    """Draws alpha by layer on each unseen domain; says whether there was anything to draw."""
    import matplotlib.pyplot as plt

    line = next(line for line in LINES if line.method == "fedig-a")
    found = {}
    for test in args.domains:
        for folder in folders(line, test, args)[:1]:
            found[test] = alphas(folder)
    if not found:
        return False
    figure, axes = plt.subplots(2, 2, figsize=(10, 6), sharex=True, sharey=True)
    jitter = numpy.random.default_rng(0)
    top = 1.05 * max(1e-3, *(values.max() for values in found.values()))
    for axis, (test, values) in zip(axes.flat, found.items()):
        some = values[:: max(1, len(values) // 400)]
        places = numpy.arange(1, values.shape[1] + 1)
        across = places + jitter.uniform(-0.3, 0.3, some.shape)
        axis.plot(across, some, ".", markersize=1, color="#7fb8bd")
        axis.plot(places, numpy.median(values, axis=0), color="#c8324b", linewidth=1)
        axis.set(title=test.replace("_", " "), ylim=(0, top), xticks=places[::3])
    for axis in axes[-1]:
        axis.set_xlabel("layer")
    for axis in axes[:, 0]:
        axis.set_ylabel("alpha")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="PACS: root/domain/class/*")
    parser.add_argument("--weights", type=Path, required=True, help="ResNet-18's starting weights")
    parser.add_argument("--out", type=Path, default=Path("runs/fedig"))
    parser.add_argument("--results", type=Path, default=Path("runs"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--local-steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument("--adapt-batch", type=int, default=64)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS), help="held out in turn")
    parser.add_argument("--methods", nargs="+", help="fedavg fedbn fedig fedig-a; all by default")
    parser.add_argument("--silos", help="ten clients per domain: iid, or Dirichlet's alpha")
    parser.add_argument("--only-write", action="store_true", help="train nothing")
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    if given.only_write:
        write(given)
    else:
        carry_out(given)
