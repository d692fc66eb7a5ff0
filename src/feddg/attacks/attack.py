"""Runs attacks on a finished run, and stores results and pictures in its folder."""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, cast, get_args

import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from feddg.attacks.inversion import Inverted, Search, Step, invert_updates
from feddg.attacks.membership import membership
from feddg.attacks.reconstruction import (
    FED,
    FEWEST,
    GeneratorTraining,
    Reconstruction,
    reconstruct,
)
from feddg.attacks.senders import (
    MOST_LOOKED_AT,
    MembershipEffort,
    Senders,
    chosen_entries,
    entries_of,
)
from feddg.data.decoding import UnusableImageError, decode_image
from feddg.data.images import endings, images_below
from feddg.data.inspection import evenly
from feddg.diagnostics import Progress, silent
from feddg.errors import DataError, ExperimentError, need
from feddg.readers import with_page
from feddg.records import AttackRow
from feddg.runs.execute import load_finished_run
from feddg.runs.figures import add_figure, grid
from feddg.runs.folder import FIGURES, RunFolder
from feddg.runs.prepare import cache_folder, images_of
from feddg.runs.reading import ATTACKS, read_run
from feddg.settings import Settings

log = logging.getLogger("feddg")

SHOWN = 6
"""Columns of a picture per domain."""
Figure = tuple[str, Image.Image, str]
"""Name of the file, picture, caption."""
SMALLEST = 12
"""Smallest side in pixels for which SSIM is defined."""


def figure_of(found: Reconstruction, domain_names: Sequence[str]) -> Figure:
    """Returns the figure of a reconstruction."""
    domains = found.targets.domains
    present = domains.unique().tolist()
    shown = torch.cat([(domains == domain).nonzero().flatten()[:SHOWN] for domain in present])
    rows = [found.targets.images[shown], *(_bytes(found.drawn[fed][shown]) for fed in FED)]
    reader = "server" if found.attacker == "server" else "another client"
    names = [domain_names[domain] for domain in present]
    caption = (
        f"What the {reader} draws from {found.entry.key}, top to bottom: true images "
        f"({', '.join(names)}), drawn from what was sent, from each image's own sample, and from "
        "an unrelated image's, which is what chance looks like."
    )
    key = "".join(c if c.isalnum() else "-" for c in found.entry.key).strip("-")
    return f"attack-{found.attacker}-{key}.png", grid(*rows), caption


def figure_of_inverted(found: Inverted) -> Figure:
    """Returns the figure of inverted updates."""
    shown = torch.arange(min(2 * SHOWN, len(found.targets)))
    rows = [found.targets.images[shown], _bytes(found.drawn[shown])]
    caption = (
        f"Gradient inversion of single clients' updates of {found.batch_size} images "
        f"(optimizer: {found.optimizer}): true images above what was found."
    )
    name = f"attack-update-{found.optimizer}-{found.batch_size}.png"
    return name, grid(*rows), caption


def _bytes(images: Tensor) -> Tensor:
    return (images * 255).round().to(torch.uint8)


class AttackSettings(Settings):
    """Settings of an attack.

    Attributes:
        public: folders of images that the server has, searched at any depth.
        entry: what is attacked: a message entry by key or name, or ``statistics``; by default all.
        client: id of the malicious client; by default the one with most images.
        most_public: largest number of images of ``public``, or of the malicious client, to use.
        targets: number of true images to compare reconstructions with.
        steps: training steps of the generator; 0 for the linear attack alone.
        batch_sizes: numbers of images per update.
        updates: number of updates to attack for each batch size.
        iterations: steps of the search for an update's images.
        optimizer: optimizer of the client's one step: the run's own, or plain SGD.
        membership: size of the membership attack.
        seed: seed of all random draws.
    """

    public: Sequence[Path] = ()
    entry: str | None = None
    client: int | None = None
    most_public: int = Field(1000, ge=FEWEST)
    targets: int = Field(64, ge=2)
    steps: int = Field(300, ge=0)
    batch_sizes: Sequence[Annotated[int, Field(ge=1, le=MOST_LOOKED_AT)]] = (1, 4)
    updates: int = Field(4, ge=1)
    iterations: int = Field(300, ge=1)
    optimizer: str = Field("own", pattern=f"^({'|'.join(get_args(Step))})$")
    membership: MembershipEffort = MembershipEffort()
    seed: int = 0


def attack_run(
    folder: Path | str,
    kind: str,
    settings: AttackSettings | None = None,
    *,
    cache: Path | None = None,
    progress: Progress = silent,
) -> list[AttackRow]:
    """Attacks a finished run and stores the result in its folder.

    Args:
        folder: the run's folder; its images must be where they were.
        kind: ``server`` or ``client``: reconstruction from what is sent besides weights;
            ``update``: gradient inversion; ``membership``: membership inference.
        settings: settings of the attack.
        cache: folder for decoded pixels; the user's cache by default.
        progress: called with (what, done, total).

    Returns:
        The new rows.

    Raises:
        MissingPackage: the extra ``attacks`` is not installed.
        ExperimentError: the method sends nothing that this attack can use.
        DataError: there are no public images, or too few.
        RunError: the folder has no completed round, or the images have changed since the run.
    """
    need("attacks", "an attack", ["torchmetrics", "sklearn"])
    if kind not in KINDS:
        raise ExperimentError(f"there is no attack {kind!r}; there are: {', '.join(KINDS)}")
    chosen = settings or AttackSettings()
    path = Path(folder)
    loaded = load_finished_run(path, cache_folder(cache), progress)
    if loaded.settings.data.features is not None and kind != "membership":
        raise ExperimentError(
            f"a table of features has no images for --kind {kind} to reconstruct; --kind "
            "membership can attack it"
        )
    if loaded.settings.data.image_size < SMALLEST:
        raise DataError(f"images of less than {SMALLEST} pixels are too small to compare")
    found = list(KINDS[kind](Senders(loaded), chosen, progress))
    rows = [row for of_entry, _ in found for row in of_entry]
    keys = {(row.kind, row.key) for row in rows}
    others = [row for row in read_run(path).attacks if (row.kind, row.key) not in keys]
    with RunFolder(path) as opened:
        opened.replace_rows(ATTACKS, [*others, *rows])
    for _, figure in found:
        if figure is not None:
            add_figure(path / FIGURES, *figure)
    return rows


def load_public(folders: Sequence[Path], side: int, most: int | None = None) -> Tensor:
    """Returns the readable images under some folders as squares.

    Args:
        folders: searched at any depth, in the order of their paths.
        side: the short side is resized to this many pixels, and the centre square is taken.
        most: how many files are read, evenly over all; None for every one.

    Returns:
        ``(N, 3, side, side)``, uint8 RGB.

    Raises:
        DataError: a folder cannot be read, or holds no readable image.
    """
    files = [path for folder in folders for path in images_below(folder)]
    images = []
    for path in evenly(files, most or len(files)):
        try:
            images.append(torch.from_numpy(decode_image(path, side, "crop")).permute(2, 0, 1))
        except UnusableImageError as error:
            log.warning("%s is left out: %s", path, error)
    if not images:
        searched = ", ".join(map(str, folders))
        raise DataError(f"{searched}: no readable image ({endings()})")
    return torch.stack(images)


Found = tuple[Sequence[AttackRow], Figure | None]


def _from_server(
    senders: Senders, chosen: AttackSettings, progress: Progress, attacker: int | None = None
) -> Iterator[Found]:
    """Reconstructs images from what the server is sent, or what a malicious client receives."""
    loaded = senders.loaded
    entries = chosen_entries(loaded.method, loaded.network, chosen.entry)
    known = _known_images(senders, chosen, attacker)
    training = GeneratorTraining(chosen.steps, seed=chosen.seed)
    names = images_of(loaded).table.domain_names
    for entry in entries.values():
        found = reconstruct(
            senders, entry, *known, chosen.targets, training, attacker=attacker, progress=progress
        )
        yield found.rows(names), figure_of(found, names)


def _from_client(senders: Senders, chosen: AttackSettings, progress: Progress) -> Iterator[Found]:
    """Reconstructs other clients' images from what a malicious one receives."""
    sizes = images_of(senders.loaded).partition.sizes
    attacker = int(sizes.argmax()) if chosen.client is None else chosen.client
    if not 0 <= attacker < len(sizes):
        raise ExperimentError(f"there is no client {attacker}; the run has 0 to {len(sizes) - 1}")
    yield from _from_server(senders, chosen, progress, attacker)


def _known_images(
    senders: Senders, chosen: AttackSettings, attacker: int | None
) -> tuple[Tensor, Tensor]:
    """Returns the images that the attacker trains on, and their labels."""
    loaded, most = senders.loaded, chosen.most_public
    if attacker is not None:
        client = loaded.clients[attacker]
        return client.images()[:most].contiguous(), client.labels[:most]
    if not chosen.public:
        raise DataError(
            "the server's attack learns from public images: name a folder of them, --public "
            "FOLDER (any photographs that are not the run's)"
        )
    images = load_public(chosen.public, loaded.settings.data.image_size, most)
    return images, senders.labels(images)


def _from_updates(senders: Senders, chosen: AttackSettings, progress: Progress) -> Iterator[Found]:
    """Inverts single clients' updates."""
    search, step = Search(chosen.iterations, seed=chosen.seed), cast(Step, chosen.optimizer)
    for size in chosen.batch_sizes:
        found = invert_updates(senders, size, chosen.updates, search, step, progress)
        yield [found.row()], figure_of_inverted(found)


def _membership(senders: Senders, chosen: AttackSettings, progress: Progress) -> Iterator[Found]:
    """Asks which images were a client's own."""
    method, network = senders.loaded.method, senders.loaded.network
    wanted = chosen.entry
    entries = chosen_entries(method, network, wanted) if wanted else entries_of(method, network)
    effort = chosen.membership
    yield membership(senders, [*entries.values()], effort, progress, chosen.seed), None


KINDS: dict[str, Callable[[Senders, AttackSettings, Progress], Iterator[Found]]] = {
    "server": _from_server,
    "client": _from_client,
    "update": _from_updates,
    "membership": _membership,
}
attack = with_page(attack_run)
"""The same, and the run's page is written anew."""
