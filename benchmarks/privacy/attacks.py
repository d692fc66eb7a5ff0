"""What the messages of several methods give away on PACS at 64 pixels; sized for one core.

    python benchmarks/privacy/attacks.py --pacs PACS --public FOLDER --out OUT \
        [--extractor resnet18=FILE] [--stage all|runs|reconstruct|update|membership]

PACS is the published folder (domain/class/image); FOLDER holds photographs and paintings that no
evaluation set knows. A run of each method is trained on 64 clients of one domain and 32 images each
(512 images of every domain), then attacked: reconstruction by the server, which has public images,
and by a malicious client that has all 512 images of its domain; gradient inversion; membership.
Rows go to OUT/*.csv as they are found, pictures to OUT/grids. A run or file that is there is kept.
"""

import argparse
import csv
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from feddg.api import run
from feddg.attacks.cases import MembershipEffort
from feddg.attacks.entries import entries_of
from feddg.attacks.extractors import read_extractor
from feddg.attacks.generator import GeneratorTraining
from feddg.attacks.image_metrics import Judges
from feddg.attacks.inversion import Search, invert_updates
from feddg.attacks.membership import membership
from feddg.attacks.reconstruction import Effort, reconstruct
from feddg.attacks.senders import Senders
from feddg.experiment import Experiment
from feddg.row_files import Row
from feddg.runs.figures import grid
from feddg.runs.subject import Subject, load_subject
from feddg.styles.training_images import load_images

DOMAINS = ("photo", "art_painting", "cartoon", "sketch")
TRAIN, ASIDE, TEST = 512, 64, 8
CLIENTS, SIZE, PUBLIC = 64, 64, 600
EFFORT = Effort(targets=128, training=GeneratorTraining(steps=60, batch_size=16))
INVERSIONS = (("sgd", 1, 4), ("own", 1, 2), ("sgd", 8, 1), ("sgd", 32, 1), ("own", 8, 1))
MEMBERSHIP = MembershipEffort(clients=12, images=24, shadows=2)
SHOWN = 3
SCORES = ("FD", "KD", "score", "PD")
"""Columns for distances and score; the extractor that judged is the command's."""
SHORT = {"rounds": 1, "local_steps": 1, "batch_size": 8}
EPOCH = {"rounds": 1, "batch_size": 32}
RUNS: dict[str, tuple[str, dict, dict]] = {
    "pardon": ("pardon", {"twins": "on_the_fly"}, SHORT),
    "ccst": ("ccst", {"variant": "pardon", "twins": "on_the_fly"}, SHORT),
    "fpl": ("fpl", {}, EPOCH),
    "elcfs": ("elcfs", {"window": 0.05, "meta_order": "first"}, SHORT),
    "fedavg": ("fedavg", {}, EPOCH),
}
"""By name: the method, its settings, its training. Styles and spectra are sent before round 1."""


def subset(pacs: Path, out: Path) -> tuple[Path, Path]:
    """Links some images of every domain, by turns over classes; returns their folder and split."""
    root, split = out / "images", out / "split.csv"
    if split.exists():
        return root, split
    rows = []
    for domain in DOMAINS:
        folders = sorted(p for p in (pacs / domain).iterdir() if p.is_dir())
        queues = [sorted(folder.iterdir()) for folder in folders]
        files = [q[i] for i in range(max(map(len, queues))) for q in queues if i < len(q)]
        roles = ["train"] * TRAIN + ["id_val"] * ASIDE + ["test"] * TEST
        for file, role in zip(files, roles):
            path = Path(domain) / file.parent.name / file.name
            (root / path.parent).mkdir(parents=True, exist_ok=True)
            (root / path).symlink_to(file.resolve())
            rows.append((role, path))
    with split.open("w", newline="") as file:
        csv.writer(file).writerows([("split", "path"), *rows])
    return root, split


def train(name: str, out: Path, root: Path, split: Path) -> Path:
    """Trains a run, or finds it."""
    method, settings, training = RUNS[name]
    experiment = Experiment(
        name=name,
        data={"source": "folder", "root": str(root), "image_size": SIZE, "split_file": str(split)},
        clients={"number": CLIENTS, "partition": "domain"},
        method={"name": method, "settings": settings},
        model={"backbone": "cnn", "weights": None},
        train={"lr": 1e-3, "augmentation": "none"} | training,
        evaluate={"every": training["rounds"]},
        precision="float32",
    )
    return run(experiment, out / "runs", cache=out / "cache", report=False).folder


def public_images(folders: Sequence[Path], out: Path) -> Tensor:
    """Returns public images ``(n, 3, 64, 64)``, evenly from all folders."""
    kept = out / "public.pt"
    if not kept.exists():
        found = [load_images([folder], SIZE) for folder in folders]
        share = PUBLIC // len(found)
        torch.save(torch.cat([part[:: max(1, len(part) // share)][:share] for part in found]), kept)
    images: Tensor = torch.load(kept, weights_only=True)
    return images


def write(file: Path, name: str, rows: Sequence[Row]) -> None:
    """Appends rows to a CSV file, the run's name first."""
    new = not file.exists()
    with file.open("a", newline="") as content:
        writer = csv.writer(content, lineterminator="\n")
        for row in rows:
            fields = row.model_dump(exclude={"kind", "curve"})
            scores = fields.pop("scores", None)
            flat = {"run": name, **fields}
            if scores is not None:  # few images have no distance between collections
                found = {key.partition("[")[0]: value for key, value in scores.items()}
                flat |= {short: found.get(short, "") for short in SCORES}
            if new:
                writer.writerow(flat)
                new = False
            writer.writerow([f"{v:.4f}" if isinstance(v, float) else v for v in flat.values()])


def clients_of(subject: Subject, *domains: int) -> list[int]:
    main = subject.main_domains()
    return [client for client in range(len(main)) if int(main[client]) in domains]


def attack(
    name: str, folder: Path, public: Tensor, out: Path, judges: Judges, attackers: Sequence[str]
) -> None:
    """Draws images again from what one run sends beside weights: by the server, by clients."""
    subject = load_subject(folder, out / "cache", lambda *_: None)
    senders = Senders(subject)
    names = subject.images.table.domain_names
    for entry in entries_of(subject.method, subject.worker.network).values():
        if "server" in attackers:
            found = reconstruct(senders, entry, public, senders.labels(public), EFFORT, judges)
            write(
                out / "privacy_reconstruction.csv", name, measured(name, found, names, judges, out)
            )
            draw(found, out / "grids" / f"{name}-server.png")
        # A malicious client of photos draws the other domains, one of paintings the photos.
        for own, others in ((0, (1, 2, 3)), (1, (0,))):
            if DOMAINS[own] not in attackers:
                continue
            ids = [names.index(DOMAINS[place]) for place in (own, *others)]
            rows = subject.images.splits.train
            rows = rows[subject.images.table.domains[rows] == ids[0]]
            images = subject.images.pixels.gather(rows).contiguous()
            found = reconstruct(
                senders,
                entry,
                images,
                torch.from_numpy(subject.images.table.labels[rows]),
                Effort(EFFORT.targets * len(others) // len(DOMAINS), EFFORT.training),
                judges,
                attacker=clients_of(subject, ids[0])[0],
                victims=clients_of(subject, *ids[1:]),
            )
            write(
                out / "privacy_reconstruction.csv", name, measured(name, found, names, judges, out)
            )
            draw(found, out / "grids" / f"{name}-client-{DOMAINS[own]}.png")


def measured(name: str, found, names, judges: Judges, out: Path) -> list[Row]:
    """Returns the rows of reconstructions; differences go to a file of their own."""
    rows = found.rows(names, judges)
    other = [row for row in rows if row.kind == "difference"]
    write(out / "privacy_differences.csv", name, other)
    return [row for row in rows if row.kind == "reconstruction"]


def draw(found, file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    domains = found.targets.domains
    shown = torch.cat([(domains == d).nonzero()[:SHOWN, 0] for d in domains.unique()])
    rows = [(found.drawn[fed][shown] * 255).byte() for fed in ("sent", "sample", "unrelated")]
    picture = grid(found.targets.images[shown], *rows)
    picture.quantize(128).save(file, optimize=True)


def stage(wanted: str, name: str) -> bool:
    return wanted in ("all", name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pacs", type=Path, required=True)
    parser.add_argument("--public", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--extractor", default="compact")
    parser.add_argument("--stage", default="all")
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--attackers", default="server,photo,art_painting")
    said = parser.parse_args()
    torch.set_num_threads(1)
    out, begun = said.out, time.time()
    out.mkdir(parents=True, exist_ok=True)
    root, split = subset(said.pacs, out)
    folders = {name: train(name, out, root, split) for name in said.runs.split(",")}
    print(f"{time.time() - begun:6.0f} s: trained", flush=True)
    judges = Judges(read_extractor(said.extractor))
    if stage(said.stage, "reconstruct"):
        public = public_images(said.public, out)
        for name, folder in folders.items():
            if name != "fedavg":
                attack(name, folder, public, out, judges, said.attackers.split(","))
                print(f"{time.time() - begun:6.0f} s: {name}", flush=True)
    for name in folders:
        if stage(said.stage, "membership"):
            subject = load_subject(folders[name], out / "cache", lambda *_: None)
            entries = list(entries_of(subject.method, subject.worker.network).values())
            rows = membership(Senders(subject), entries, MEMBERSHIP)
            write(out / "privacy_membership.csv", name, rows)
            print(f"{time.time() - begun:6.0f} s: membership of {name}", flush=True)
    if stage(said.stage, "update") and "fedavg" in folders:
        senders = Senders(load_subject(folders["fedavg"], out / "cache", lambda *_: None))
        for optimizer, size, updates in INVERSIONS:
            search = Search(iterations=60)
            found = invert_updates(senders, size, updates, search, optimizer)
            write(out / "privacy_updates.csv", "fedavg", [found.row(judges)])
            shown = torch.arange(min(12, len(found.targets)))
            picture = grid(found.targets.images[shown], (found.drawn[shown] * 255).byte())
            (out / "grids").mkdir(exist_ok=True)
            picture.quantize(128).save(out / "grids" / f"update-{optimizer}-{size}.png")
            print(f"{time.time() - begun:6.0f} s: {optimizer} {size}", flush=True)


if __name__ == "__main__":
    main()
