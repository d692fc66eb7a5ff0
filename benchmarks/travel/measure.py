"""How far estimates of accuracy without labels are from the truth, and how often intervals hold it.

    python benchmarks/travel/measure.py features pacs --root PACS --size 224 --out FEATURES
    python benchmarks/travel/measure.py cases FEATURES --out docs/results/data/travel
    python benchmarks/travel/measure.py runs digits --runs RUNS --out docs/results/data/travel
    python benchmarks/travel/measure.py foreign FEATURES --size 224 --out FOREIGN
    python benchmarks/travel/measure.py objects FEATURES --classes 4 --seeds 10 11 --out OBJECTS

`features` takes frozen features of all images once, in parts of 500 in random order. `cases` leaves
each domain out, and five of thirty clients, from a classifier in closed form on these; `runs`
leaves each domain out of trained runs; `foreign` asks about images of none of the classes, and
`objects` trains on some classes and asks about images of the others, in styles of training and in
others. All but the last two go on where they stopped. They write OUT.csv, a row for each case and
estimator, and OUT_labels.csv, a row for each case and number of labels.
"""

import argparse
import csv
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy
import torch

import feddg
from feddg.data.data_set import DATA_SETS
from feddg.data.partition import partition
from feddg.data.pixels import as_unit
from feddg.evaluation.travel import (
    Estimate,
    Familiar,
    LeftOutSite,
    Outputs,
    Part,
    Reference,
    Signals,
    Sums,
    appearance,
    calibrated,
    images_to_label,
    left_out_sites,
    outputs_of,
    right_chances,
    shows_other_objects,
    with_labels,
)
from feddg.experiment import Experiment
from feddg.models.backbones import build_network
from feddg.models.network import Network
from feddg.prediction.travel import Recorder, calibrate, foreignness
from feddg.rng import numpy_stream, stream
from feddg.runs.diagnostics import wilson
from feddg.runs.prepare import load_images, load_table
from feddg.storage import cache_folder

PART, BATCH = 500, 32
SEEDS = (0, 1)
METHODS = ("fedavg", "pardon", "mixstyle")
CLIENTS, STAY_OUT, MOST_DRAWS = 30, 5, 4
LABELS = (0, 20, 50, 100, 200)
VALIDATION = 0.1
HEAD = ["images", "case", "seed", "sites", "size", "truth", "estimator", "raw", "estimate", "low"]
HEAD += ["high"]
DRAWS = 40
LABELS_HEAD = ["images", "case", "seed", "truth", "labels", "error", "held", "width"]
FOREIGN_HEAD = ["images", "held_out", "kind", "farther", "unlike", "estimate"]
OBJECTS_HEAD = ["images", "held_out", "classes", "seed", "kind", "domain", "size", "looks", "doubt"]
OBJECTS_HEAD += ["apart", "found", "estimate", "truth"]
FEW = 50
LABELS_HEAD += ["error_alone", "held_alone", "width_alone"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    features = commands.add_parser("features")
    features.add_argument("data")
    features.add_argument("--root", type=Path)
    features.add_argument("--size", type=int, default=96)
    features.add_argument("--backbone", default="efficientnet_lite0")
    features.add_argument("--weights", default="imagenet")
    features.add_argument("--out", type=Path, required=True)
    cases = commands.add_parser("cases")
    cases.add_argument("features", type=Path)
    cases.add_argument("--out", type=Path, required=True)
    foreign = commands.add_parser("foreign")
    foreign.add_argument("features", type=Path)
    foreign.add_argument("--size", type=int, default=96)
    foreign.add_argument("--backbone", default="efficientnet_lite0")
    foreign.add_argument("--weights", default="imagenet")
    foreign.add_argument("--out", type=Path, required=True)
    objects = commands.add_parser("objects")
    objects.add_argument("features", type=Path)
    objects.add_argument("--classes", type=int, nargs="+", help="how many are trained on")
    objects.add_argument("--seeds", type=int, nargs="+", help="that draw which")
    objects.add_argument("--domains", nargs="*", help="held out in turn; all by default")
    objects.add_argument("--out", type=Path, required=True)
    runs = commands.add_parser("runs")
    runs.add_argument("data")
    runs.add_argument("--root", type=Path)
    runs.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    runs.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    if chosen.command == "features":
        data = {"source": chosen.data, "root": chosen.root, "image_size": chosen.size}
        model = {"backbone": chosen.backbone, "weights": chosen.weights}
        write_features(Experiment(data=data, model=model), chosen.out)
    elif chosen.command == "foreign":
        network = build_network(
            chosen.backbone, 2, weights=chosen.weights, image_size=chosen.size
        ).eval()
        write_foreign(chosen.features, network, chosen.size, chosen.out)
    elif chosen.command == "objects":
        write_objects(chosen.features, chosen.classes, chosen.seeds, chosen.domains, chosen.out)
    elif chosen.command == "cases":
        write_cases(chosen.features, chosen.out)
    else:
        write_runs(chosen.data, chosen.root, chosen.runs, chosen.out)


def write_features(experiment: Experiment, folder: Path) -> None:
    """Writes the features of an experiment's images before any training, part by part."""
    folder.mkdir(parents=True, exist_ok=True)
    data, model = experiment.data, experiment.model
    table, pixels, *_ = load_table(experiment, None, lambda *_: None)
    names = {"domains": table.domain_names, "classes": table.class_names}
    numpy.savez(folder / "names.npz", **{name: numpy.array(own) for name, own in names.items()})
    network = build_network(
        model.backbone, len(table.class_names), weights=model.weights, image_size=data.image_size
    ).eval()
    network = network.to(memory_format=torch.channels_last)
    order = torch.randperm(len(table), generator=stream(0, "travel features"))
    for number, rows in enumerate(order.split(PART)):
        out = folder / f"part-{number:04}.npz"
        if out.exists():
            continue
        found = []
        with torch.inference_mode():
            for batch in rows.split(BATCH):
                images = as_unit(pixels.gather(batch))
                found.append((network.features(images).numpy(), appearance(images).numpy()))
        own = rows.numpy()
        features, looks = map(numpy.concatenate, zip(*found))
        part = {"features": features, "looks": looks, "rows": own}
        part |= {"labels": table.labels[own], "domains": table.domains[own]}
        aside = folder / f".{out.name}"
        numpy.savez(aside, **part)
        aside.rename(out)
        print(out, flush=True)


class Case(NamedTuple):
    """A site that took no part, and what is known about it.

    Attributes:
        name: of the site.
        seed: of what was drawn.
        reference: the model on in-domain validation images.
        sites: those that were left out in turn.
        outputs: what the model makes of the site's images.
        right: whether that is right, ``(n,)``.
    """

    name: str
    seed: int
    reference: Reference
    sites: list[LeftOutSite]
    outputs: Outputs
    right: numpy.ndarray


def read_features(folder: Path) -> tuple[Part, list[str], list[str]]:
    """Returns the images of a folder of features, the names of domains, and of classes."""
    parts = [numpy.load(file) for file in sorted(folder.glob("part-*.npz"))]
    names = numpy.load(folder / "names.npz")
    columns = [
        torch.from_numpy(numpy.concatenate([part[name] for part in parts]))
        for name in ("features", "labels", "domains", "looks")
    ]
    return Part(*columns), names["domains"].tolist(), names["classes"].tolist()


def write_cases(folder: Path, out: Path) -> None:
    """Writes the rows of cases on frozen features that are not there yet."""
    images, domains, class_names = read_features(folder)
    classes = len(class_names)
    for seed in SEEDS:
        for number, name in enumerate(domains):
            if not is_there(out, folder.name, name, seed):
                found = held_out(images, classes, [number], domains, seed)
                write_rows(out, folder.name, found)
    for seed in range(MOST_DRAWS):
        if not is_there(out, f"{folder.name}, clients", None, seed):
            owners = partition(images.sites.numpy(), images.labels.numpy(), CLIENTS, seed=seed)
            clients = images._replace(sites=torch.from_numpy(owners.owners))
            chosen = numpy_stream(seed, "who stays out").permutation(CLIENTS)[:STAY_OUT]
            labels = [f"client {number}" for number in range(CLIENTS)]
            found = held_out(clients, classes, sorted(chosen.tolist()), labels, seed)
            write_rows(out, f"{folder.name}, clients", found)


def write_foreign(folder: Path, network: Network, size: int, out: Path) -> None:
    """Writes how far images of none of the classes are, beside a domain that took no part."""
    images, domains, class_names = read_features(folder)
    none, kinds = torch.zeros(BATCH, dtype=torch.long), {}
    for name, pixels in foreign_images(size):
        with torch.inference_mode():
            shown = as_unit(pixels)
            kinds[name] = Part(network.features(shown), none, none, appearance(shown))
    for number, name in enumerate(domains):
        found_without = without(images, len(class_names), [number], domains, 0)
        sums, sites, reference, familiar, _ = found_without
        head, others = sums.head(), sums.others()
        own = {"the domain": images.of(images.sites == number)}
        for kind, part in (own | kinds).items():
            found = Signals.of(reference, outputs_of(part, head, others), familiar)
            row = [folder.name, name, kind, *foreignness(found, sites), found.combined]
            append(out.with_suffix(".csv"), FOREIGN_HEAD, [row])


def write_objects(
    folder: Path, counts: list[int], seeds: list[int], chosen: list[str] | None, out: Path
) -> None:
    """Trains on some classes and asks about folders of images of these, and of the others.

    Kinds: of the classes, ``own`` images of a site's validation, all of a ``new domain``, and the
    same of a single class (``one class``, its most frequent); of the other classes, images of a
    domain that trained (``objects``), and of the new one (``objects, new domain``). Of each there
    are all images, and 50.
    """
    images, domains, class_names = read_features(folder)
    for count, seed, (held, name) in product(counts, seeds, enumerate(domains)):
        if chosen and name not in chosen:
            continue
        order = numpy_stream(seed, "classes", str(count)).permutation(len(class_names))
        numbers = torch.full((len(class_names),), -1)
        numbers[torch.from_numpy(order[:count].copy())] = torch.arange(count)
        labels = numbers[images.labels]
        known = images._replace(labels=labels).of(labels >= 0)
        others = images._replace(labels=labels).of(labels < 0)
        sums, sites, reference, familiar, validation = without(known, count, [held], domains, seed)
        head, beside = sums.head(), sums.others()
        folders = {("new domain", held): known.of(known.sites == held)}
        for site in range(len(domains)):
            if site != held:
                folders["own", site] = validation.of(validation.sites == site)
            kind = "objects, new domain" if site == held else "objects"
            folders[kind, site] = others.of(others.sites == site)
            here = known.of(known.sites == site)
            folders["one class", site] = here.of(here.labels == here.labels.mode().values)
        for (kind, site), part in folders.items():
            few = torch.from_numpy(numpy_stream(seed, kind).permutation(len(part.labels))[:FEW])
            for own in (part, part.of(few)):
                outputs = outputs_of(own, head, beside)
                found = Signals.of(reference, outputs, familiar)
                content = found.content
                estimate = calibrated(
                    found.combined,
                    [one.signals.combined for one in sites],
                    [one.accuracy for one in sites],
                    len(own.labels),
                )
                row = [folder.name, name, count, seed, kind, domains[site], len(own.labels)]
                if content is not None:
                    row += [content.looks, content.doubt, content.apart]
                else:
                    row += ["", "", ""]
                row.append(
                    int(shows_other_objects(content, [one.signals.content for one in sites]))
                )
                truth = float((outputs.predicted == own.labels.numpy()).mean())
                append(out.with_suffix(".csv"), OBJECTS_HEAD, [[*row, estimate.value, truth]])
        print(folder.name, name, count, seed, flush=True)


def foreign_images(size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields what shows none of PACS' classes, 32 images of each kind ``(32, 3, size, size)``."""
    random, shape = stream(0, "foreign images"), (BATCH, 3, size, size)
    yield "random noise", torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
    shades = torch.randint(0, 256, (BATCH, 3, 1, 1), generator=random, dtype=torch.uint8)
    yield "blank images", shades.expand(shape)
    data = {"source": "digits", "image_size": size}
    table, pixels, *_ = load_table(Experiment(data=data), None, lambda *_: None)
    rows = torch.arange(0, len(table), len(table) // BATCH)[:BATCH]
    yield "digits in four styles", pixels.gather(rows)


def without(
    images: Part, classes: int, unseen: list[int], names: list[str], seed: int
) -> tuple[Sums, list[LeftOutSite], Reference, Familiar | None, Part]:
    """Trains on all sites but some.

    Returns:
        What classifiers are solved from, its sites, its reference and what is familiar to it, both
        on validation images; these.
    """
    apart = torch.from_numpy(numpy.isin(images.sites.numpy(), unseen))
    measures = torch.rand(len(apart), generator=stream(seed, "validation")) < VALIDATION
    train, validation = images.of(~apart & ~measures), images.of(~apart & measures)
    sums = Sums(train, classes)
    alike = len(names) == CLIENTS
    sites = list(left_out_sites(sums, train, validation, names, alike=alike))
    seen = outputs_of(validation, sums.head(), sums.others())
    looks = torch.zeros_like(validation.sites) if alike else validation.sites
    familiar = Familiar.of(seen, looks.numpy())
    return sums, sites, Reference.of(seen, validation.labels.numpy()), familiar, validation


def held_out(
    images: Part, classes: int, unseen: list[int], names: list[str], seed: int
) -> Iterator[Case]:
    """Trains on all sites but some, and yields each of these."""
    sums, sites, reference, *_ = without(images, classes, unseen, names, seed)
    head, others = sums.head(), sums.others()
    for site in unseen:
        own = images.of(images.sites == site)
        outputs = outputs_of(own, head, others)
        right = outputs.predicted == own.labels.numpy()
        yield Case(names[site], seed, reference, sites, outputs, right)


def write_runs(data: str, root: Path | None, folder: Path, out: Path) -> None:
    """Trains a run for each domain, method and seed; each rests on those that held others out."""
    domains = DATA_SETS.find(data).domains
    for seed, method in product(SEEDS, METHODS):
        fields = {"data": {"source": data, "root": root}, "seed": seed, "method": method}
        lodo = {
            domain: feddg.run(out=folder, report=False, hold_out=domain, **fields).folder
            for domain in domains
        }
        for domain, run in lodo.items():
            if is_there(out, f"{data}, {method}", domain, seed):
                continue
            model = Recorder(run, "cpu", None)
            others = [other for other in lodo.values() if other != run]
            found = calibrate(run, model, beside=others)
            images = load_images(model.trained.experiment, cache_folder(), lambda *_: None)
            rows = images.splits.test
            for part in torch.from_numpy(rows).split(BATCH):
                model.see(as_unit(images.pixels.gather(part)))
            outputs = model.taken()
            right = outputs.predicted == images.table.labels[rows]
            case = Case(domain, seed, found.reference, list(found.sites), outputs, right)
            write_rows(out, f"{data}, {method}", iter([case]))


def is_there(out: Path, images: str, name: str | None, seed: int) -> bool:
    """Whether there are rows of a case; without a name, of any."""
    path = out.with_suffix(".csv")
    if not path.is_file():
        return False
    with path.open(newline="", encoding="utf-8") as file:
        return any(
            row["images"] == images and row["seed"] == str(seed) and name in (None, row["case"])
            for row in csv.DictReader(file)
        )


def write_rows(out: Path, images: str, cases: Iterator[Case]) -> None:
    """Appends the rows of cases."""
    found = list(cases)
    labels = out.with_name(f"{out.name}_labels.csv")
    append(labels, LABELS_HEAD, [[images, *row] for case in found for row in label_rows(case)])
    append(out.with_suffix(".csv"), HEAD, [[images, *row] for case in found for row in rows(case)])
    print(images, [case.name for case in found], flush=True)


def append(path: Path, head: list[str], rows: list[list[object]]) -> None:
    """Appends rows, below a head in a new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.is_file()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([head] * new)
        writer.writerows(
            [[f"{cell:.4f}" if isinstance(cell, float) else cell for cell in row] for row in rows]
        )


def rows(case: Case) -> Iterator[list[object]]:
    """Yields a row for each estimator: as it is, and calibrated on the sites."""
    found = Signals.of(case.reference, case.outputs)
    own = {**found.estimates, "combined": found.combined}
    before = {
        name: [
            site.signals.combined if name == "combined" else site.signals.estimates.get(name)
            for site in case.sites
        ]
        for name in own
    }
    truths = [site.accuracy for site in case.sites]
    size, truth = len(case.right), float(case.right.mean())
    about = [case.name, case.seed, len(case.sites), size, truth]
    for name, raw in own.items():
        if None not in before[name]:
            yield [*about, name, raw, *calibrated(raw, before[name], truths, size)]
    yield [*about, "left out", float(numpy.mean(truths)), "", "", ""]


def label_rows(case: Case) -> Iterator[list[object]]:
    """Yields a row for each number of labels, means over draws: with what is known, and alone."""
    found = Signals.of(case.reference, case.outputs)
    truths = [site.accuracy for site in case.sites]
    signals = [site.signals.combined for site in case.sites]
    without = calibrated(found.combined, signals, truths, len(case.right))
    confidence = case.outputs.confidence(case.reference.temperature)
    chances, truth = right_chances(confidence, without.value), float(case.right.mean())
    for count in LABELS:
        if count >= len(case.right):
            continue
        draws = []
        for draw in range(DRAWS if count else 1):
            chosen = images_to_label(confidence, count, draw)
            estimate = with_labels(without, chances, chosen, case.right[chosen])
            order = numpy_stream(draw, "labels", case.name).permutation(len(case.right))
            alone = alone_estimate(case.right[order[:count]])
            draws.append([*_against(estimate, truth), *_against(alone, truth)])
        yield [case.name, case.seed, truth, count, *map(float, numpy.mean(draws, axis=0))]


def _against(found: Estimate, truth: float) -> list[float]:
    held = float(found.low <= truth <= found.high)
    return [abs(found.value - truth), held, found.high - found.low]


def alone_estimate(right: numpy.ndarray) -> Estimate:
    """Returns the share of right answers, and Wilson's interval at the level of 90 %."""
    if not len(right):
        return Estimate(0.5, 0.0, 1.0)
    share = float(right.mean())
    # Wilson's interval depends on z^2 / n alone: that of 90 % is that of 95 % of more images.
    found = wilson(share, round(len(right) * (1.959964 / 1.644854) ** 2))
    return Estimate(share, found.low, found.high)


if __name__ == "__main__":
    main()
