"""Draws the papers' figures of a finished run: feature maps, loss landscape, grey levels.

    python benchmarks/papers/figures.py RUN [--beside FEDAVG_RUN] [--out PAGE]

The page is ``figures.html`` in the run's folder if no other is named. Feature maps before the last
round need ``feddg run --snapshots``. Needs scikit-learn.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from sklearn.manifold import TSNE
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from feddg.data.pixels import as_unit
from feddg.diagnostics import Progress, silent
from feddg.errors import RunError
from feddg.federation.federation import Federation
from feddg.messages import Update, Weights
from feddg.methods.base import has_global_model, title_of
from feddg.privacy.building import NO_DEFENCES
from feddg.records import client_name
from feddg.report.blocks import Block, Chart, Page, Prose, Section
from feddg.report.charts import (
    COLOURS,
    HEAT_COLOURS,
    axis,
    chart_of,
    label_of,
    line_chart,
    line_of,
    markers_of,
)
from feddg.report.page import write_page
from feddg.report.text import percent
from feddg.rng import stream
from feddg.runs.execute import load_finished_run
from feddg.runs.figures import some_of_each
from feddg.runs.folder import SNAPSHOTS, kept_weights
from feddg.runs.prepare import cache_folder
from feddg.runs.reading import read_run
from feddg.runs.table import FINAL
from feddg.storage import is_file, why

# t-SNE maps of features by class and by domain, as training goes on (PARDON, Figure 1).


PER_DOMAIN = 150


def feature_maps(loaded: Federation, folder: Path, progress: Progress) -> dict[str, Any]:
    """Returns t-SNE maps of some images' features before training, at snapshots, and at the end."""
    table, held = loaded.clients.table, loaded.clients.splits
    # Of training domains from the part that nobody trained on, if there is one.
    rows = numpy.concatenate([held.test, held.val, held.id_test, held.id_val])
    trained = ~numpy.isin(table.domains[held.train], table.domains[rows])
    rows = numpy.concatenate([rows, held.train[trained]])
    rows = some_of_each(table.domains, rows, PER_DOMAIN, loaded.settings.seed, "t-SNE")
    weights = (
        {0: loaded.untrained()}
        | snapshots(folder)
        | {loaded.server.state.round: loaded.server.state.weights}
    )
    maps = []
    for done, (round_, of_round) in enumerate(sorted(weights.items())):
        progress("t-SNE", done, len(weights))
        network = loaded.with_weights(of_round)
        features = over_batches(loaded, rows, network.features)  # type: ignore[arg-type]
        points = TSNE(
            perplexity=max(2.0, min(30.0, (len(rows) - 1) / 3)), init="pca", random_state=0
        ).fit_transform(features.numpy())
        maps.append({"round": round_, "points": numpy.round(points, 2).tolist()})
    unseen = {*held.test.tolist(), *held.val.tolist()}
    return {
        "classes": list(table.class_names),
        "domains": list(table.domain_names),
        "labels": table.labels[rows].tolist(),
        "of_domain": table.domains[rows].tolist(),
        "held_out": [row in unseen for row in rows.tolist()],
        "maps": maps,
    }


def snapshots(folder: Path) -> dict[int, Weights]:
    """Returns the global weights that a run stored for earlier rounds, by round."""
    found: dict[int, Weights] = {}
    for file in sorted((folder / SNAPSHOTS).glob("round-*.safetensors")):
        try:
            if is_file(file):
                found[int(file.stem.removeprefix("round-"))] = load_file(file)
        except (OSError, SafetensorError, ValueError) as error:
            raise RunError(f"{file} is damaged: {why(error)}. Delete it, or run again.") from None
    return found


def over_batches(
    loaded: Federation, rows: numpy.ndarray, work: Callable[[Tensor], Tensor]
) -> Tensor:
    """Returns ``work`` applied to the images of some rows, on the CPU in float32."""
    worker, size = loaded.worker, loaded.settings.evaluate.batch_size
    with torch.inference_mode(), worker.autocast():
        parts = [
            work(as_unit(loaded.clients.pixels.gather(part), worker.device)).float().cpu()
            for part in torch.from_numpy(rows).split(size)
        ]
    return torch.cat(parts)


# The loss over the plane through a global model and its clients' (PARDON, Figure 1).


LANDSCAPE_IMAGES, GRID = 256, 15
ON_ONE_LINE = 1e-5
"""Part of a direction below which it may be rounding error."""
MARGIN = 0.35
"""Margin of the landscape around its points, as a share of their distance."""


def loss_landscape(
    loaded: Federation, rival: Weights | None, rival_name: str, progress: Progress
) -> dict[str, Any]:
    """Returns the loss over the plane through three models, for seen and unseen domains."""
    domains = loaded.clients.partition.counts.argmax(1)
    first = int(numpy.argmax(domains == domains[0]))
    second = int(numpy.argmax(domains != domains[first]))
    wanted = [first] if rival is not None else [first, second]
    trained = [_trained_again(loaded, client) for client in wanted]
    points = [("global model", loaded.server.state.weights)]
    points += [(client_name(client), weights) for client, weights in zip(wanted, trained)]
    if rival is not None:
        points.append((rival_name, rival))
    plane = Plane.through(points[0][1], points[1][1], points[2][1])
    places = [plane.place(weights) for _, weights in points]
    mean = [sum(axis) / 2 for axis in zip(*places[1:])]
    axes = [_ticks([place[i] for place in places]) for i in (0, 1)]
    splits = loaded.clients.splits
    samples = {"seen": splits.train, "unseen": splits.test}
    rows = {name: _sample(part, loaded, name) for name, part in samples.items() if len(part)}
    losses: dict[str, list[list[float]]] = {name: [] for name in rows}
    for done, y in enumerate(axes[1]):
        progress("loss landscape", done, len(axes[1]))
        line = [_losses(loaded, plane.weights(x, y), rows) for x in axes[0]]
        for name in rows:
            losses[name].append([round(found[name], 4) for found in line])
    marks = [{"name": name, "x": p[0], "y": p[1]} for (name, _), p in zip(points, places)]
    if rival is None:
        marks.append({"name": "mean of the clients", "x": mean[0], "y": mean[1]})
    return {"x": axes[0], "y": axes[1], "losses": losses, "points": marks}


def _trained_again(loaded: Federation, client: int) -> Weights:
    """Returns a client's weights after one more round of training from the global model."""
    state, clients = loaded.server.state, loaded.clients
    memories = dict(loaded.transport.memories)
    transport = loaded.others(
        clients.__getitem__, len(clients), loaded.worker, memories, NO_DEFENCES
    )
    (update,) = (
        reply.keep() if isinstance(reply, Update) else reply
        for reply in transport.train([client], loaded.method.broadcast(state))
    )
    if not isinstance(update, Update):
        raise RunError(f"client {client} cannot train: {update.reason}")
    return {name: update.weights.get(name, own) for name, own in state.weights.items()}


@dataclass(frozen=True)
class Plane:
    """The plane through three models' weights, with orthonormal axes.

    Attributes:
        origin: the first model.
        along: unit direction to the second, over all floats in their order ``(n,)``.
        across: unit direction to the third, orthogonal to ``along``.
    """

    origin: Weights
    along: Tensor
    across: Tensor

    @classmethod
    def through(cls, first: Weights, second: Weights, third: Weights) -> "Plane":
        """Returns the plane; if the models lie on one line, ``across`` is zero."""
        start = _vector(first, first)
        along = _unit(_vector(second, first) - start)
        whole = rest = _vector(third, first) - start
        for _ in range(2):  # once more takes away what rounding left
            rest = rest - rest.dot(along) * along
        if rest.dot(rest) <= ON_ONE_LINE**2 * whole.dot(whole):
            rest = torch.zeros_like(rest)
        return cls(first, along, _unit(rest))

    def place(self, weights: Weights) -> tuple[float, float]:
        """Returns a model's coordinates in the plane."""
        offset = _vector(weights, self.origin) - _vector(self.origin, self.origin)
        return float(offset.dot(self.along)), float(offset.dot(self.across))

    def weights(self, x: float, y: float) -> Weights:
        """Returns the model at a point; integer entries are the first model's."""
        moved = _vector(self.origin, self.origin) + x * self.along + y * self.across
        own = {n: t for n, t in self.origin.items() if t.is_floating_point()}
        parts = moved.split([tensor.numel() for tensor in own.values()])
        return self.origin | {n: part.view_as(own[n]) for n, part in zip(own, parts)}


def _vector(weights: Weights, like: Weights) -> Tensor:
    """Returns all floats of a model as one vector, in the order of another model's entries."""
    names = [name for name, tensor in like.items() if tensor.is_floating_point()]
    return torch.cat([weights[name].float().flatten() for name in names])


def _unit(direction: Tensor) -> Tensor:
    length = direction.norm()
    return direction / length if length else direction


def _ticks(places: Sequence[float]) -> list[float]:
    low, high = min(places), max(places)
    margin = MARGIN * ((high - low) or 1.0)
    return [round(v, 6) for v in numpy.linspace(low - margin, high + margin, GRID).tolist()]


def _sample(rows: numpy.ndarray, loaded: Federation, name: str) -> numpy.ndarray:
    generator = stream(loaded.settings.seed, "landscape", name)
    chosen: numpy.ndarray = rows[torch.randperm(len(rows), generator=generator).numpy()]
    return chosen[:LANDSCAPE_IMAGES]


def _losses(
    loaded: Federation, weights: Weights, rows: dict[str, numpy.ndarray]
) -> dict[str, float]:
    network = loaded.with_weights(weights)
    for module in network.modules():
        if isinstance(module, _BatchNorm) and module.running_var is not None:
            module.running_var.clamp_(min=0)  # beyond the three models a line may leave it
    predictor = loaded.method.predictor(network).eval()
    labels = torch.from_numpy(loaded.clients.table.labels)
    return {
        name: float(nn.functional.cross_entropy(over_batches(loaded, own, predictor), labels[own]))
        for name, own in rows.items()
    }


# Grey levels of clients' images before and after style exchange (CCST).


MOST_CLIENTS, GREY_IMAGES, GREY_BINS = 6, 64, 32


def grey_levels(loaded: Federation, progress: Progress) -> dict[str, Any]:
    """Returns histograms of some clients' grey levels, before and after stylizing."""
    domains = loaded.clients.partition.counts.argmax(1)
    # First one client of each domain, then a second one, ...
    earlier = [int((domains[:i] == domain).sum()) for i, domain in enumerate(domains)]
    order = numpy.argsort(earlier, kind="stable")
    before, after, names = [], [], []
    for done, client in enumerate(order[:MOST_CLIENTS].tolist()):
        progress("grey levels", done, min(len(order), MOST_CLIENTS))
        images = loaded.clients[client].images()[:GREY_IMAGES]
        if len(images) == 0:
            continue
        with torch.no_grad():
            stylized = loaded.method.preview(images, loaded.server.state.context)
        before.append(grey_histogram(images))
        after.append(None if stylized is None else grey_histogram(stylized))
        domain = loaded.clients.partition.domain_ids[int(domains[client])]
        names.append(f"{client_name(client)}, {loaded.clients.table.domain_names[domain]}")
    return {"clients": names, "before": before, "after": after}


def grey_histogram(images: Tensor) -> list[float]:
    """Returns the shares of grey levels (ITU-R 601) of uint8 images ``(N, 3, H, W)``, by bin."""
    weights = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
    grey = (images.float() * weights).sum(dim=1)
    counts = torch.histc(grey, GREY_BINS, min=0, max=256)
    return [round(v, 6) for v in (counts / counts.sum()).tolist()]


def figures(
    folder: Path,
    *,
    beside: Path | None = None,
    cache: Path | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Returns what the figures of a completed run show.

    Args:
        folder: the run's folder.
        beside: another run with the same network (such as a FedAvg run), whose global weights
            become a point of the loss landscape; without it a second client of this run is used.
        cache: folder for decoded pixels and stylized copies; the user's cache by default.
        progress: called with (what, done, total).

    Raises:
        FeddgError: the run has no model, or ``beside`` has another network.
    """
    loaded = load_finished_run(folder, cache_folder(cache), progress)
    if not has_global_model(loaded.method, loaded.network):
        name = loaded.method.name
        raise RunError(f"{folder}: under {name} there is no global model to look into")
    rival, rival_name = None, ""
    if beside is not None:
        rival, own = kept_weights(beside, FINAL)[1], loaded.server.state.weights
        if {n: t.shape for n, t in rival.items()} != {n: t.shape for n, t in own.items()}:
            raise RunError(f"{beside} trained another network; name a run with the same one")
        rival_name = f"{title_of(read_run(beside).method)} model"
    return {
        "features": feature_maps(loaded, folder, progress),
        "landscape": loss_landscape(loaded, rival, rival_name, progress),
        "grey_levels": grey_levels(loaded, progress),
    }


# Charts.


def feature_map(
    points: numpy.ndarray, groups: numpy.ndarray, names: Sequence[str], text: str
) -> Chart:
    """Returns a scatter plot of features in a plane, coloured by group.

    Args:
        points: ``(n, 2)`` coordinates.
        groups: ``(n,)`` index of each point's group.
        names: names of the groups.
        text: the round, and the meaning of the groups.
    """
    traces = [
        markers_of(
            points[groups == group].tolist(),
            {"size": 5, "color": colour, "opacity": 0.75},
            "%{fullData.name}<extra></extra>",
            name=label_of(name),
        )
        for (group, name), colour in zip(enumerate(names), cycle(COLOURS))
        if (groups == group).any()
    ]
    bare = axis("", showticklabels=False, showgrid=False)
    layout = {"xaxis": bare, "yaxis": bare, "showlegend": True, "hovermode": "closest"}
    return chart_of(traces, 400, f"Features {text}.", **layout)


def landscape(found: Mapping[str, Any], losses: Sequence[Sequence[float]], images: str) -> Chart:
    """Returns the loss over a plane through marked models.

    Args:
        found: the plane: ``x``, ``y``, and ``points`` with names.
        losses: the loss by ``y`` and ``x``.
        images: the images on which the loss is computed.
    """
    surface = {
        "type": "contour",
        "x": found["x"],
        "y": found["y"],
        "z": numpy.log10(numpy.maximum(losses, 1e-6)).round(4).tolist(),
        "customdata": losses,
        "hovertemplate": "loss %{customdata:.3g}<extra></extra>",
        "colorscale": HEAT_COLOURS,
        "showscale": False,
        "contours": {"coloring": "heatmap"},
        "line": {"width": 0.5, "color": "#ffffff"},
    }
    points = found["points"]
    marks = markers_of(
        [(point["x"], point["y"]) for point in points],
        {"size": 10, "color": "#c8324b", "line": {"width": 1, "color": "#ffffff"}},
        "%{text}<extra></extra>",
        text=[label_of(point["name"]) for point in points],
    )
    tag = {"bgcolor": "rgba(255,255,255,0.8)", "showarrow": False, "yshift": 18}
    names = [tag | {"x": p["x"], "y": p["y"], "text": label_of(p["name"])} for p in points]
    distance = axis("distance in weights", showgrid=False)
    caption = (
        f"Loss on {images} over the plane through the marked models; logarithmic colours, dark is "
        "high. Clients: after one more round of their own training."
    )
    layout = {"xaxis": distance, "yaxis": distance, "annotations": names, "showlegend": False}
    return chart_of([surface, marks], 430, caption, **layout)


def grey_histograms(names: Sequence[str], rows: Sequence[Sequence[float]], when: str) -> Chart:
    """Returns histograms of grey levels, one line per client."""
    lines = []
    for name, shares, colour in zip(names, rows, cycle(COLOURS)):
        width = 256 / len(shares)
        points = [((index + 0.5) * width, round(share, 5)) for index, share in enumerate(shares)]
        lines.append(line_of(points, label_of(name), colour, scale=100) | {"mode": "lines"})
    caption = f"Grey levels of some clients' images {when} style transfer."
    x, y = axis("grey level", range=[0, 256]), axis("share of pixels (%)", rangemode="tozero")
    return line_chart(lines, caption, x, y)


# The page.


def _feature_maps(found: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    labels, domains = numpy.array(found["labels"]), numpy.array(found["of_domain"])
    unseen = {found["domains"][d] for d, out in zip(domains, found["held_out"]) if out}
    names = [f"{name} (unseen)" if name in unseen else name for name in found["domains"]]
    for each in found["maps"]:
        points = numpy.array(each["points"])
        when = "before training" if each["round"] == 0 else f"after round {each['round']}"
        by_class = feature_map(points, labels, found["classes"], f"{when}, by class")
        blocks += [by_class, feature_map(points, domains, names, f"{when}, by domain")]
    text = (
        "t-SNE maps of the features in front of the classifier: near points have similar "
        "features, while far distances and the axes mean nothing. Classes should fall apart, "
        "domains should mix."
    )
    return [*blocks, Prose(text)]


def _landscapes(found: dict[str, Any]) -> list[Block]:
    words = {"seen": "training images", "unseen": "images of unseen domains"}
    return [landscape(found, losses, words.get(n, n)) for n, losses in found["losses"].items()]


def _grey_levels(found: dict[str, Any]) -> list[Block]:
    before = grey_histograms(found["clients"], found["before"], "before")
    if any(after is None for after in found["after"]) or not found["after"]:
        return [before, Prose("The method transfers no styles, so there is no after.")]
    text = (
        "Mean difference between two clients' histograms (total variation; 0 is the same, 100 "
        f"nothing in common): {percent(overlap_gap(found['before']))} before, "
        f"{percent(overlap_gap(found['after']))} after."
    )
    after = grey_histograms(found["clients"], found["after"], "after")
    return [before, after, Prose(text)]


def overlap_gap(histograms: Sequence[Sequence[float]]) -> float | None:
    """Mean total variation distance over pairs of histograms, in [0, 1]; None for fewer than 2."""
    shares = numpy.array(histograms)
    pairs = [(i, j) for i in range(len(shares)) for j in range(i)]
    if not pairs:
        return None
    return float(numpy.mean([numpy.abs(shares[i] - shares[j]).sum() / 2 for i, j in pairs]))


def page_of(found: dict[str, Any], title: str) -> Page:
    """Returns the page of :func:`figures`."""
    return Page(
        title,
        "Features, losses and grey levels of a finished run.",
        [],
        [],
        [
            Section("Features", _feature_maps(found["features"])),
            Section("Loss landscape", _landscapes(found["landscape"])),
            Section("Grey levels of clients", _grey_levels(found["grey_levels"])),
        ],
    )


def main() -> None:
    """Writes the page of the run that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--beside", type=Path, help="a run whose model stands in the landscape")
    parser.add_argument("--out", type=Path, help="the page to write")
    asked = parser.parse_args()
    page = page_of(figures(asked.run, beside=asked.beside), f"Figures of {asked.run.name}")
    print(write_page(page, asked.out or asked.run / "figures.html"))


if __name__ == "__main__":
    main()
