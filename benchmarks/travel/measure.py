"""How far estimates of accuracy without labels are from the truth, and how often intervals hold it.

    python benchmarks/travel/measure.py features pacs --root PACS --most 300 --out FEATURES/pacs
    python benchmarks/travel/measure.py cases FEATURES/pacs-lite0 --out docs/results/data/travel
    python benchmarks/travel/measure.py runs digits --runs RUNS --out docs/results/data/travel
    python benchmarks/travel/measure.py tuned emoji --runs RUNS --out docs/results/data/travel_tuned
    python benchmarks/travel/measure.py folders FEATURES/* --out docs/results/data/travel_folders

`features` takes frozen features of images once, in parts of 500 in random order. `cases` leaves
each domain out, and five of thirty clients, from a classifier in closed form on these; `runs`
leaves each domain out of trained runs, `tuned` of runs that fine-tune a pretrained network, which
rest on no other run. These go on where they stopped; they write OUT.csv, a row for each case and
estimator, and OUT_labels.csv, a row for each case and number of labels. `folders` draws folders of
each domain that took no part, of its single classes, and of all other collections, and writes how
many of them are refused.
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
from feddg.data.partition import Dealing, partition
from feddg.data.pixels import as_unit
from feddg.experiment import Experiment
from feddg.models.backbones import build_network
from feddg.prediction.estimators import (
    Familiar,
    LeftOutSite,
    Outputs,
    Part,
    Reference,
    Signals,
    Sums,
    images_to_label,
    left_out_sites,
    outputs_of,
    right_chances,
    with_labels,
)
from feddg.prediction.travel import STAND_IN, Recorder, calibrate, watch_middle
from feddg.rng import numpy_stream, stream
from feddg.runs.calibration import Estimate, calibrated
from feddg.runs.intervals import wilson
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
FOLDERS_HEAD = ["images", "held_out", "accuracy", "kind", "size", "folders", "refused"]
SIZES, FOLDERS = (20, 50, 200), 20
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
    features.add_argument("--most", type=int, help="images of a domain")
    folders = commands.add_parser("folders")
    folders.add_argument("features", type=Path, nargs="+")
    folders.add_argument("--out", type=Path, required=True)
    tuned = commands.add_parser("tuned")
    tuned.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    tuned.add_argument("--backbone", default="efficientnet_lite0")
    tuned.add_argument("--weights", default="imagenet")
    tuned.add_argument("--rounds", type=int, default=4)
    runs = commands.add_parser("runs")
    for command in (runs, tuned):
        command.add_argument("data")
        command.add_argument("--root", type=Path)
        command.add_argument("--runs", type=Path, required=True, help="folder of the runs")
        command.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    if chosen.command == "features":
        data = {"source": chosen.data, "root": chosen.root, "image_size": chosen.size}
        model = {"backbone": chosen.backbone, "weights": chosen.weights}
        write_features(Experiment(data=data, model=model), chosen.out, chosen.most)
    elif chosen.command == "folders":
        write_folders(chosen.features, chosen.out)
    elif chosen.command == "tuned":
        model = {"backbone": chosen.backbone, "weights": chosen.weights}
        about = {"model": model, **tuned_for(chosen.rounds)}
        write_tuned(chosen.data, chosen.root, chosen.runs, chosen.out, chosen.seeds, about)
    elif chosen.command == "cases":
        write_cases(chosen.features, chosen.out)
    else:
        write_runs(chosen.data, chosen.root, chosen.runs, chosen.out)


def write_features(experiment: Experiment, folder: Path, most: int | None) -> None:
    """Writes the features of an experiment's images before any training, part by part.

    With ``most`` of so many images of each domain at random.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, model = experiment.data, experiment.model
    table, pixels, *_ = load_table(experiment, None, lambda *_: None)
    names = {"domains": table.domain_names, "classes": table.class_names}
    numpy.savez(folder / "names.npz", **{name: numpy.array(own) for name, own in names.items()})
    network = build_network(
        model.backbone, len(table.class_names), weights=model.weights, image_size=data.image_size
    ).eval()
    network = network.to(memory_format=torch.channels_last)
    seen: list[torch.Tensor] = []
    watch_middle(network, seen.append)
    order = torch.randperm(len(table), generator=stream(0, "travel features"))
    if most is not None:
        place = torch.from_numpy(table.domains)[order]
        order = torch.cat([order[place == domain][:most] for domain in place.unique()])
    for number, rows in enumerate(order.split(PART)):
        out = folder / f"part-{number:04}.npz"
        if out.exists():
            continue
        found = []
        seen.clear()
        with torch.inference_mode():
            for batch in rows.split(BATCH):
                found.append(network.features(as_unit(pixels.gather(batch))).numpy())
        own = rows.numpy()
        part = {"features": numpy.concatenate(found), "maps": torch.cat(seen).numpy(), "rows": own}
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
        correct: whether the sites correct the estimate.
    """

    name: str
    seed: int
    reference: Reference
    sites: list[LeftOutSite]
    outputs: Outputs
    right: numpy.ndarray
    correct: bool = True


def read_features(folder: Path) -> tuple[Part, numpy.ndarray, list[str], list[str]]:
    """Returns a folder's features, its maps' moments, the names of domains, and of classes."""
    parts = [numpy.load(file) for file in sorted(folder.glob("part-*.npz"))]
    names = numpy.load(folder / "names.npz")
    columns = [
        torch.from_numpy(numpy.concatenate([part[name] for part in parts]))
        for name in ("features", "labels", "domains", "maps")
    ]
    *own, maps = columns
    return Part(*own), maps.numpy(), names["domains"].tolist(), names["classes"].tolist()


def write_cases(folder: Path, out: Path) -> None:
    """Writes the rows of cases on frozen features that are not there yet."""
    images, _, domains, class_names = read_features(folder)
    classes = len(class_names)
    for seed in SEEDS:
        for number, name in enumerate(domains):
            if not is_there(out, folder.name, name, seed):
                found = held_out(images, classes, [number], domains, seed)
                write_rows(out, folder.name, found)
    for seed in range(MOST_DRAWS):
        if not is_there(out, f"{folder.name}, clients", None, seed):
            sites, classes_of = images.sites.numpy(), images.labels.numpy()
            dealing = Dealing(domains=sites, labels=classes_of, clients=CLIENTS, seed=seed)
            owners = partition("heterogeneous", dealing).owners
            clients = images._replace(sites=torch.from_numpy(owners))
            chosen = numpy_stream(seed, "who stays out").permutation(CLIENTS)[:STAY_OUT]
            labels = [f"client {number}" for number in range(CLIENTS)]
            found = held_out(clients, classes, sorted(chosen.tolist()), labels, seed)
            write_rows(out, f"{folder.name}, clients", found)


def write_folders(folders: list[Path], out: Path) -> None:
    """Writes how many folders of images are refused, by what they show and how many there are.

    Every domain of every collection with several classes is left out in turn. Of it folders are
    drawn: of all its images, and of single classes; of the other collections, of single domains.
    """
    collections = {folder.name: read_features(folder) for folder in folders}
    for name, (images, maps, domains, class_names) in collections.items():
        labels, places = images.labels.numpy(), images.sites.numpy()
        if name.startswith(ONE_KIND):
            continue
        for held, domain in enumerate(domains):
            inside = places != held
            familiar = Familiar.of(maps[inside], places[inside], labels[inside])
            (case,) = held_out(images, len(class_names), [held], domains, 0)
            random = numpy_stream(0, "folders", name, domain)
            limits = {size: familiar.limit(size) for size in SIZES}
            own = numpy.flatnonzero(~inside)
            kinds = {"new domain": [(maps, own)]}
            kinds["one class"] = [
                (maps, rows)
                for label in range(len(class_names))
                if len(rows := own[labels[own] == label]) >= SIZES[0]
            ]
            for other, (its, its_maps, its_domains, _) in collections.items():
                if other == name:
                    continue
                shown = its.labels.numpy() == 0 if other.startswith(ONE_KIND) else True
                kinds[other] = [
                    (its_maps, rows)
                    for number in range(len(its_domains))
                    if len(rows := numpy.flatnonzero((its.sites.numpy() == number) & shown))
                    >= SIZES[0]
                ]
            for (kind, sources), size in product(kinds.items(), SIZES):
                found = [
                    familiar.novelty(which[random.choice(rows, size, len(rows) < size)])
                    > limits[size]
                    for which, rows in sources
                    for _ in range(FOLDERS // len(sources) + 1)
                ]
                row = [name, domain, float(case.right.mean()), kind, size, len(found), sum(found)]
                append(out.with_suffix(".csv"), FOLDERS_HEAD, [row])
            print(name, domain, flush=True)


ONE_KIND = ("nuclei", "pictures")
"""Images of one class (the first; of nuclei the second are masks), foreign to all others."""


def without(
    images: Part, classes: int, unseen: list[int], names: list[str], seed: int
) -> tuple[Sums, list[LeftOutSite], Reference]:
    """Trains on all sites but some; returns the sums, the sites left out, and the reference."""
    apart = torch.from_numpy(numpy.isin(images.sites.numpy(), unseen))
    measures = torch.rand(len(apart), generator=stream(seed, "validation")) < VALIDATION
    train, validation = images.of(~apart & ~measures), images.of(~apart & measures)
    sums = Sums(train, classes)
    sites = list(left_out_sites(sums, train, validation, names))
    seen = outputs_of(validation, sums.head(), sums.others())
    return sums, sites, Reference.of(seen, validation.labels.numpy())


def held_out(
    images: Part, classes: int, unseen: list[int], names: list[str], seed: int
) -> Iterator[Case]:
    """Trains on all sites but some, and yields each of these."""
    sums, sites, reference = without(images, classes, unseen, names, seed)
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
            others = [other for other in lodo.values() if other != run]
            write_rows(out, f"{data}, {method}", iter([case_of(run, domain, seed, others)]))


def write_tuned(
    data: str,
    root: Path | None,
    folder: Path,
    out: Path,
    seeds: list[int],
    about: dict[str, object],
) -> None:
    """Fine-tunes a network for each domain and seed, and estimates it there as a user would."""
    name = f"{root.name if root else data}, tuned"
    listed = [path.name for path in root.iterdir() if path.is_dir()] if root else None
    domains = sorted(listed or DATA_SETS.find(data).domains)
    for seed, domain in product(seeds, domains):
        if not is_there(out, name, domain, seed):
            fields = {"data": {"source": data, "root": root, "image_size": 64}, "seed": seed}
            done = feddg.run(out=folder, report=False, hold_out=domain, **fields, **about)
            write_rows(out, name, iter([case_of(done.folder, domain, seed, [])]))


def tuned_for(rounds: int) -> dict[str, object]:
    """Returns the settings of a few minutes' fine-tuning: 1,152 images a round."""
    return {
        "clients": {"number": 3, "partition": "domain"},
        "train": {"rounds": rounds, "local_steps": 12, "batch_size": 32},
        "evaluate": {"every": rounds, "pictures": False},
    }


def case_of(run: Path, domain: str, seed: int, beside: list[Path]) -> Case:
    """Returns a run's model at the domain that it held out."""
    model = Recorder(run, "cpu", None)
    found = calibrate(run, model, beside=beside)
    images = load_images(model.trained.experiment, cache_folder(), lambda *_: None)
    rows = images.splits.test
    outputs = model.outputs(images, rows)
    right = outputs.predicted == images.table.labels[rows]
    correct = found.models != STAND_IN
    return Case(domain, seed, found.reference, list(found.sites), outputs, right, correct)


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
            yield [
                *about,
                name,
                raw,
                *calibrated(raw, before[name], truths, size, correct=case.correct),
            ]
    yield [*about, "left out", float(numpy.mean(truths)), "", "", ""]


def label_rows(case: Case) -> Iterator[list[object]]:
    """Yields a row for each number of labels, means over draws: with what is known, and alone."""
    found = Signals.of(case.reference, case.outputs)
    truths = [site.accuracy for site in case.sites]
    signals = [site.signals.combined for site in case.sites]
    size = len(case.right)
    without = calibrated(found.combined, signals, truths, size, correct=case.correct)
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
