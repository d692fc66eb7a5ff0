"""What the messages of several methods give away on PACS at 64 pixels; sized for one core.

    python benchmarks/privacy/attacks.py --pacs PACS --public FOLDER --out OUT \
        [--extractor resnet18=FILE] [--stage all|runs|reconstruct|update|membership|transfer]
        [--small]

PACS is the published folder (domain/class/image); FOLDER holds photographs and paintings that no
evaluation set knows. A run of each method is trained on 64 clients of one domain and 32 images each
(512 images of every domain), then attacked: reconstruction by the server, which has public images,
and by a malicious client that has all 512 images of its domain; gradient inversion; membership.
Rows go to OUT/*.csv as they are found, pictures to OUT/grids. A run or file that is there is kept.
--small tries all of it in a minute: 16 images of a domain in 2 clients, at 32 pixels; its numbers
say nothing.
"""

import argparse
import csv
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from attack_scale import FULL, SMALL, Scale
from judges import Extractor, read_extractor
from torch import Tensor

from feddg.api import run
from feddg.attacks.attack import load_public
from feddg.attacks.inversion import Search, invert_updates
from feddg.attacks.membership import membership
from feddg.attacks.reconstruction import ALL, GeneratorTraining, Reconstruction, reconstruct
from feddg.attacks.senders import Senders, entries_of
from feddg.errors import RunError
from feddg.experiment import Experiment
from feddg.federation.federation import Federation
from feddg.records import Row
from feddg.runs.execute import load_finished_run
from feddg.runs.figures import grid

STAGES = ("transfer", "reconstruct", "membership", "update")
DOMAINS = ("photo", "art_painting", "cartoon", "sketch")
PUBLIC, SHOWN = 600, 3
SCORES = ("FD", "KD", "score", "PD")
"""Columns for distances and score; the extractor that judged is the command's."""
SHORT = {"rounds": 1, "local_steps": 1, "batch_size": 8}
FLY = {"stylized": "on_the_fly"}
EPOCH = {"rounds": 1, "batch_size": 32}
RUNS: dict[str, tuple[str, dict, dict]] = {
    "pardon": ("pardon", FLY, SHORT),
    "ccst": ("ccst", {"variant": "pardon"} | FLY, SHORT),
    "ccst-single": ("ccst", {"variant": "pardon", "share": "single"} | FLY, SHORT),
    "fpl": ("fpl", {}, EPOCH),
    "elcfs": ("elcfs", {"window": 0.05, "meta_order": "first"}, SHORT),
    "fedbn": ("fedbn", {}, EPOCH),
    "fedig": ("fedig", {}, EPOCH),
    "fedavg": ("fedavg", {}, EPOCH),
}
"""By name: the method, its settings, its training. Styles and spectra are sent before round 1."""


def subset(pacs: Path, out: Path, scale: Scale) -> tuple[Path, Path]:
    """Links some images of every domain, by turns over classes; returns their folder and split."""
    root, split = out / "images", out / "split.csv"
    if split.exists():
        return root, split
    rows = []
    for domain in DOMAINS:
        folders = sorted(p for p in (pacs / domain).iterdir() if p.is_dir())
        queues = [sorted(folder.iterdir()) for folder in folders]
        files = [q[i] for i in range(max(map(len, queues))) for q in queues if i < len(q)]
        roles = ["train"] * scale.train + ["id_val"] * scale.aside + ["test"] * scale.test
        for file, role in zip(files, roles):
            path = Path(domain) / file.parent.name / file.name
            (root / path.parent).mkdir(parents=True, exist_ok=True)
            (root / path).symlink_to(file.resolve())
            rows.append((role, path))
    with split.open("w", newline="") as file:
        csv.writer(file).writerows([("split", "path"), *rows])
    return root, split


def train(name: str, out: Path, root: Path, split: Path, scale: Scale) -> Path:
    """Trains a run, or finds it."""
    method, settings, training = RUNS[name]
    experiment = Experiment(
        name=name,
        data={
            "source": "folder",
            "root": str(root),
            "image_size": scale.size,
            "split_file": str(split),
        },
        clients={"number": scale.clients, "partition": "domain"},
        method={"name": method, "settings": settings},
        model={"backbone": "cnn", "weights": None},
        train={"lr": 1e-3, "augmentation": "none"} | training,
        evaluate={"every": training["rounds"]},
        precision="float32",
    )
    return run(experiment, out / "runs", cache=out / "cache", report=False).folder


def public_images(folders: Sequence[Path], out: Path, side: int) -> Tensor:
    """Returns public images ``(n, 3, side, side)``, evenly from all folders."""
    kept = out / "public.pt"
    if not kept.exists():
        found = [load_public([folder], side) for folder in folders]
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
                flat |= {short: scores.get(short, "") for short in SCORES}
            if new:
                writer.writerow(flat)
                new = False
            writer.writerow([f"{v:.4f}" if isinstance(v, float) else v for v in flat.values()])


def clients_of(loaded: Federation, *domains: int) -> list[int]:
    main = loaded.clients.partition.counts.argmax(1)
    return [client for client in range(len(main)) if int(main[client]) in domains]


def attack(
    name: str,
    folder: Path,
    public: Tensor,
    out: Path,
    judge: Extractor,
    attackers: Sequence[str],
    targets: int,
    training: GeneratorTraining,
) -> None:
    """Draws images again from what one run sends beside weights: by the server, by clients."""
    loaded = load_finished_run(folder, out / "cache", lambda *_: None)
    senders = Senders(loaded)
    names = loaded.clients.table.domain_names
    for entry in entries_of(loaded.method, loaded.network).values():
        if "server" in attackers:
            found = reconstruct(senders, entry, public, senders.labels(public), targets, training)
            keep(name, "server", judged(found, names, judge), out)
            draw(found, out / "grids" / f"{name}-server.png")
        # A malicious client of photos draws the other domains, one of paintings the photos.
        for own, others in ((0, (1, 2, 3)), (1, (0,))):
            if DOMAINS[own] not in attackers:
                continue
            ids = [names.index(DOMAINS[place]) for place in (own, *others)]
            rows = loaded.clients.splits.train
            rows = rows[loaded.clients.table.domains[rows] == ids[0]]
            images = loaded.clients.pixels.gather(rows).contiguous()
            try:
                found = reconstruct(
                    senders,
                    entry,
                    images,
                    torch.from_numpy(loaded.clients.table.labels[rows]),
                    targets * len(others) // len(DOMAINS),
                    training,
                    attacker=clients_of(loaded, ids[0])[0],
                    victims=clients_of(loaded, *ids[1:]),
                )
            except RunError as error:  # it is sent nothing of the kind
                print(f"{name}, {DOMAINS[own]}: {error}", flush=True)
                continue
            keep(name, f"client of {DOMAINS[own]}", judged(found, names, judge), out)
            draw(found, out / "grids" / f"{name}-client-{DOMAINS[own]}.png")


def judged(found: Reconstruction, names: Sequence[str], judge: Extractor) -> list[Row]:
    """Returns the rows of a reconstruction with what the judges make of it."""
    true, domains = found.targets.images.float() / 255, found.targets.domains
    rows: list[Row] = []
    for row in found.rows(names):
        if row.kind == "reconstruction":
            chosen = torch.tensor([row.domain in (ALL, names[d]) for d in domains.tolist()])
            scores = judge.scores(found.drawn[row.fed][chosen], true[chosen], found.seed)
            row = row.model_copy(update={"scores": scores})
        rows.append(row)
    return rows


def keep(name: str, attacker: str, rows: Sequence[Row], out: Path) -> None:
    """Writes the rows of a reconstruction; differences go to a file of their own."""
    named = [row.model_copy(update={"attacker": attacker}) for row in rows]
    for kind, file in (("difference", "differences"), ("reconstruction", "reconstruction")):
        write(out / f"privacy_{file}.csv", name, [row for row in named if row.kind == kind])


def draw(found, file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    domains = found.targets.domains
    shown = torch.cat([(domains == d).nonzero()[:SHOWN, 0] for d in domains.unique()])
    rows = [(found.drawn[fed][shown] * 255).byte() for fed in ("sent", "sample", "unrelated")]
    picture = grid(found.targets.images[shown], *rows)
    picture.quantize(128).save(file, optimize=True)


def stage(wanted: str, name: str) -> bool:
    return wanted in ("all", name)


def transferred(name: str, folder: Path, out: Path) -> None:
    """Keeps what a run's report shows of transferred images (PARDON, Fig. 8)."""
    picture = folder / "figures" / "styles.png"
    if picture.exists():
        (out / "grids").mkdir(exist_ok=True)
        shutil.copy(picture, out / "grids" / f"{name}-transferred.png")


def invert(folder: Path, out: Path, judge: Extractor, scale: Scale) -> None:
    """Searches for the images behind single updates."""
    senders = Senders(load_finished_run(folder, out / "cache", lambda *_: None))
    for optimizer, size, updates in scale.inversions:
        search = Search(iterations=scale.iterations)
        found = invert_updates(senders, size, updates, search, optimizer)
        true = found.targets.images.float() / 255
        scores = judge.scores(found.drawn, true, search.seed)
        row = found.row().model_copy(update={"scores": scores})
        write(out / "privacy_updates.csv", "fedavg", [row])
        shown = torch.arange(min(12, len(found.targets)))
        picture = grid(found.targets.images[shown], (found.drawn[shown] * 255).byte())
        (out / "grids").mkdir(exist_ok=True)
        picture.quantize(128).save(out / "grids" / f"update-{optimizer}-{size}.png")


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pacs", type=Path, required=True)
    parser.add_argument("--public", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--extractor", default="compact")
    parser.add_argument("--stage", default="all", choices=("all", "runs", *STAGES))
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--attackers", default="server,photo,art_painting")
    parser.add_argument("--small", action="store_true")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    said = arguments(given)
    scale = SMALL if said.small else FULL
    stages = STAGES if said.stage == "all" else (said.stage,)
    out, begun = said.out, time.time()

    def tell(what: str) -> None:
        print(f"{time.time() - begun:6.0f} s: {what}", flush=True)

    out.mkdir(parents=True, exist_ok=True)
    root, split = subset(said.pacs, out, scale)
    folders = {name: train(name, out, root, split, scale) for name in said.runs.split(",")}
    tell("trained")
    judge = read_extractor(said.extractor)
    for name, folder in folders.items():
        if "transfer" in stages:
            transferred(name, folder, out)
        if "reconstruct" in stages and name != "fedavg":
            public = public_images(said.public, out, scale.size)
            attack(
                name,
                folder,
                public,
                out,
                judge,
                said.attackers.split(","),
                scale.targets,
                scale.training,
            )
            tell(name)
        if "membership" in stages:
            loaded = load_finished_run(folder, out / "cache", lambda *_: None)
            entries = list(entries_of(loaded.method, loaded.network).values())
            rows = membership(Senders(loaded), entries, scale.membership)
            write(out / "privacy_membership.csv", name, rows)
            tell(f"membership of {name}")
        if "update" in stages and name == "fedavg":
            invert(folder, out, judge, scale)
            tell("updates")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
