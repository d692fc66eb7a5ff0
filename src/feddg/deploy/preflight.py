"""Checks before a site joins: images, machine, keys, versions and connection."""

import base64
import os
import shutil
import ssl
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from pathlib import Path

import httpx
import numpy
import torch

from feddg.clients.client import Examples, steps_of_round
from feddg.data.decoding import Reading
from feddg.data.fingerprint import file_of
from feddg.data.groups import with_groups
from feddg.data.images import ImageTable
from feddg.data.inspection import survey
from feddg.data.pixels import ArrayPixels, PixelStore, Vectors
from feddg.deploy.setup import JoinFile, public_key, read_join, trusted_keys
from feddg.deploy.site import (
    Site,
    SiteConfig,
    copies_in,
    list_images,
    objection_to,
    read_experiment,
    registration_of,
)
from feddg.diagnostics import Diagnostic, Progress, collected, note, silent, warning
from feddg.errors import FeddgError, first_names
from feddg.experiment import Experiment
from feddg.federation.federation import Federation, build, build_worker
from feddg.methods.composition import build_method
from feddg.models.precision import choose_device
from feddg.privacy.building import NO_DEFENCES, build_defences
from feddg.settings import ServerSettings
from feddg.storage import private_folder, why
from feddg.text import size

WORST_SHARE = 0.1
"""Share of unreadable images above which the folder is probably wrong."""
ROUND_DEADLINE = 3600.0
"""Default time limit of a site for one round, in seconds."""
SPARE_BYTES = 2**30
STEPS = 4
"""Training steps that each of two simulated clients tries."""
SECONDS = 10.0
MOST_AHEAD, MOST_BEHIND = 5.0, 300.0
"""Seconds that a site's clock may be ahead of or behind the coordinator's. Flower refuses
signatures from the future, and old ones (``SYSTEM_TIME_TOLERANCE``, ``TIMESTAMP_TOLERANCE`` in
flwr).
"""
DOOR = "/v1/fleet/get-run"
"""A path of the proxy for testing a key with GET, which is never allowed: the answer is 401 if the
key is not on its list, and 405 if it is.
"""


def failed(code: str, found: str, advice: str) -> Diagnostic:
    """Returns a failed check, which keeps the site from joining."""
    return Diagnostic(code, "error", found, advice)


def passed(code: str, found: str, holds: bool, advice: str) -> Diagnostic:
    """Returns a check that failed if something does not hold, with the advice for that case."""
    return note(code, found) if holds else failed(code, found, advice)


def check_site(
    folder: Path,
    images: str,
    domain: str | None = None,
    *,
    cache: Path | str | None = None,
    device: str = "auto",
    offline: bool = False,
    unlabelled: bool = False,
    progress: Progress = silent,
) -> tuple[str, list[Diagnostic]]:
    """Checks a site before it joins: images, machine, keys, versions and connection.

    Args:
        folder: the coordinator's files, with the site's key.
        images: ``root/domain/class/*``, or ``root/class/*`` with ``domain``.
        domain: name of the domain for images in ``root/class/*``.
        cache: the site's cache folder.
        device: the device for training.
        offline: whether to skip keys, versions and the connection.
        unlabelled: the images have no labels, and the site only evaluates (``labels=false``).
        progress: called while images are decoded.

    Returns:
        The site's name, and the result of each check.
    """
    join = read_join(folder)
    config = SiteConfig(
        site=join.site,
        images=images,
        domain=domain,
        cache=Path(cache) if cache else None,
        device=device,
        labels=not unlabelled,
    )
    about_connection = () if offline else check_connection(folder, join)
    return join.site, [*about_connection, *check_images(join, config, progress)]


def check_images(
    join: JoinFile, config: SiteConfig, progress: Progress = silent
) -> Iterator[Diagnostic]:
    """Yields the checks of a site's images and machine as they are done.

    The site is opened as when it joins, and what it would register is judged as the coordinator
    would. Its pixels stay in the cache, so that it then joins at once.

    Args:
        join: what the coordinator expects.
        config: the SuperNode's ``--node-config``.
        progress: called while images are decoded.
    """
    run, cache = {"experiment": join.experiment}, config.cache_folder
    try:
        experiment = read_experiment(run)
    except FeddgError as error:
        yield failed("joining", str(error), "Install the version that the coordinator has.")
        return
    try:
        barred = (*experiment.hold_out.test, *experiment.hold_out.val, *join.tested)
        name = "" if config.labels else join.site
        table = list_images(config.images, config.domain, experiment.data, name)
        new, held_out = registration_of(table, experiment), barred if join.trains else None
        if objection := objection_to(new, join.classes, join.features, held_out):
            raise FeddgError(f"This site {objection}.")  # before minutes of decoding
        with collected() as said:
            site = Site(config, run, progress)
            if config.labels and not join.trains:
                with_groups(site.table, experiment.data.group_by)
        build_method(experiment.method.name, experiment.method.settings).read_files()
    except FeddgError as error:
        yield failed("joining", str(error), "Mend this first: what follows has not been checked.")
        return
    yield from said
    used = len(table if table.root is None else set(map(file_of, site.table.paths)))
    text = f"{used} of {len(table)} images can be used."
    remedy = "Repair or remove the others: `feddg data inspect` names them."
    yield passed("images", text, len(table) - used <= WORST_SHARE * len(table), remedy)
    depths = {} if table.root is None else survey(table, Reading.of(experiment.data)).depths
    yield from check_depths(depths, experiment)
    if config.labels:
        yield from check_classes(table.class_names, join.classes)
    if join.trains and (copies := copies_in(site.table, experiment, cache)):
        yield copies
    yield check_disk(site.table, experiment, cache)
    yield check_machine(site.table, experiment, config.device, trains=join.trains)


def check_classes(mine: Sequence[str], expected: Sequence[str]) -> Iterator[Diagnostic]:
    """Warns of classes that the site lacks, or that the coordinator did not name."""
    if not expected:
        yield warning(
            "classes",
            f"There are {len(mine)}: {first_names(mine, 8)}.",
            "The coordinator named none: compare these, letter by letter, with the other sites'.",
        )
    elif missing := sorted(set(expected) - set(mine)):
        text = f"Not here: {first_names(missing, 8)}."
        yield warning("classes", text, "Right if this site has no such images.")


def check_depths(depths: Mapping[str, int], experiment: Experiment) -> Iterator[Diagnostic]:
    """Warns of bits, by domain, that nobody elsewhere will know of."""
    if depths and experiment.data.range == "auto":
        yield warning(
            "depths-stay-here",
            f"These images use {max(depths.values())} bits, and the run will not say so: what "
            "predicts with the model takes the brightest value that it sees for white.",
            "Ask the coordinator for data.range: full or percentile.",
        )


def check_disk(table: ImageTable, experiment: Experiment, cache: Path) -> Diagnostic:
    """Checks that the cache folder is writable and has room for copies of all pixels and memory."""
    code, decoded = "disk", table.root is not None
    pixels = 3 * len(table) * experiment.data.image_size**2 if decoded else 0
    _, network = build(experiment.without_weights, max(2, len(table.class_names)))
    weights = sum(parameter.numel() for parameter in network.parameters())
    needed = pixels + 32 * weights + SPARE_BYTES
    try:
        private_folder(cache)
        with tempfile.TemporaryFile(dir=cache) as file:
            file.write(b"0")
        free = shutil.disk_usage(cache).free
    except OSError as error:
        return failed(code, f"{cache}: {why(error)}.", "Choose another folder with --cache.")
    text = f"{size(free)} are free in {cache}, about {size(needed)} are needed."
    more = "Free some space, or choose another folder with --cache."
    return passed(code, text, needed <= free, more)


def check_machine(
    table: ImageTable, experiment: Experiment, device: str, *, trains: bool
) -> Diagnostic:
    """Trains on a few batches of noise, and says how long a round would take here."""
    code, chosen = "speed", experiment.model_copy(update={"device": device})
    try:
        where = choose_device(device)
        seconds_each = seconds_per_image(chosen, max(2, len(table.class_names)))
    except (FeddgError, RuntimeError) as error:
        text = f"A step of training failed: {str(error).splitlines()[0]}"
        remedy = "Name another --device, or run the experiment here by itself to see why."
        return failed(code, text, remedy)
    train, count = experiment.train, len(table)
    # Who only evaluates takes no longer than if it trained once on each image.
    images = steps_of_round(train, count) * train.batch_size if trains else count
    seconds = seconds_each * images
    text = f"{1 / seconds_each:,.0f} images a second on {where}, about {seconds:,.0f} s a round."
    less = "Use fewer local steps, or a larger round-deadline at the coordinator."
    return passed(code, text, seconds <= ROUND_DEADLINE, less)


def seconds_per_image(experiment: Experiment, classes: int) -> float:
    """Returns the time per image of training on batches of noise, in the second of two rounds.

    Raises:
        FeddgError: the experiment cannot be trained here.
        RuntimeError: PyTorch fails, for example for lack of memory.
    """
    # Two rounds, each a pass over STEPS batches.
    once = {"rounds": 2, "local_steps": None, "local_epochs": 1, "head_rounds": 0}
    train = experiment.train.model_copy(update=once)
    bare = experiment.without_weights.model_copy(update={"train": train})
    size, images = bare.data.image_size, STEPS * train.batch_size
    noise = numpy.random.default_rng(0).integers(0, 256, (images, size, size, 3), numpy.uint8)
    pixels: PixelStore = ArrayPixels(noise)
    if (width := bare.data.features) is not None:
        pixels = Vectors(numpy.zeros((images, width), numpy.float32))
    rows = torch.arange(images)

    pair = [
        Examples(pixels, rows, rows % classes, torch.full((images,), client), classes)
        for client in range(2)
    ]
    number = experiment.clients.model_copy(update={"number": len(pair), "per_round": None})
    alone = bare.model_copy(update={"clients": number, "server": ServerSettings()})
    method, network = build(bare, classes)
    # One client after the other, as at a site; what noise costs there counts.
    worker = build_worker(network, alone, defences=build_defences(bare, method, network))
    worker.style_noise = None  # of which this server does not know, and which takes no time
    parts = (pair, network, method, alone)
    federation = Federation(*parts, defences=NO_DEFENCES, workers=[worker])
    federation.start()
    federation.server.round()  # the first one also starts the device
    row = federation.server.round()
    return row.seconds["train"] / row.images


def check_connection(folder: Path, join: JoinFile) -> Iterator[Diagnostic]:
    """Yields the checks of a site's folder and its connection to the coordinator.

    Args:
        folder: the coordinator's files, with the site's key.
        join: what it expects.
    """
    yield from check_versions(join)
    yield check_key(folder / join.site)
    yield check_trusted(folder / "trusted.yaml")
    yield from check_proxy(join.address, folder / "ca.crt", folder / f"{join.site}.pub")


def check_versions(join: JoinFile) -> Iterator[Diagnostic]:
    """Compares the installed packages with the coordinator's."""
    for name, wanted, parts in (("feddg", join.feddg, 3), ("flwr", join.flwr, 2)):
        installed = version(name)
        if installed.split(".")[:parts] == wanted.split(".")[:parts]:
            yield note(name, f"{installed}.")
        else:
            remedy = f"pip install 'feddg[flower]=={join.feddg}' 'flwr=={join.flwr}'"
            yield failed(name, f"{installed}; the coordinator has {wanted}.", remedy)


def check_key(key: Path) -> Diagnostic:
    """Checks that the site's key exists, has the right kind, and is readable by its owner only."""
    code = "key"
    try:
        public_key(key.with_name(f"{key.name}.pub"))
        mode = key.stat().st_mode & 0o777
    except (FeddgError, OSError) as error:
        return failed(code, str(error), "sh make_key.sh in a folder without keys")
    text = f"{key.name} has mode {mode:o}."
    remedy = f"chmod 600 {key}; if others could read it, make a new one."
    return passed(code, text, os.name != "posix" or not mode & 0o077, remedy)


def check_trusted(file: Path) -> Diagnostic:
    """Checks that the site has the keys of trusted apps."""
    code, remedy = "trusted-apps", "The coordinator sends keys/trusted.yaml: put it here."
    try:
        return note(code, f"The site runs apps signed by {', '.join(trusted_keys(file))}.")
    except FeddgError as error:
        return failed(code, str(error), remedy)


def check_proxy(address: str, certificate: Path, public: Path) -> Iterator[Diagnostic]:
    """Connects to the proxy, compares clocks, and tests whether the key is on its list."""
    try:
        key = public_key(public)
    except FeddgError:
        key = b""  # as where there is none yet
    header = {"flwr-public-key": base64.b64encode(key).decode("ascii")}
    try:
        context = ssl.create_default_context(cafile=str(certificate))
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        url = f"https://{address}{DOOR}"
        reply = httpx.get(url, headers=header, verify=context, timeout=SECONDS, trust_env=False)
        now = time.time()
    except (OSError, httpx.HTTPError) as error:
        text = f"{address} cannot be reached with {certificate}: {error}."
        yield failed("proxy", text, "Check address, firewall and ca.crt with the coordinator.")
        return
    yield note("proxy", f"{address} answers with the coordinator's certificate.")
    if "Date" in reply.headers:
        yield _clock(reply.headers["Date"], now)
    yield _registration(reply.status_code, public)


def _registration(status: int, public: Path) -> Diagnostic:
    code = "registration"
    if status == httpx.codes.METHOD_NOT_ALLOWED:
        return note(code, "The key is on the proxy's list.")
    if status == httpx.codes.UNAUTHORIZED:
        remedy = (
            f"Send {public.name} to the coordinator, and read its fingerprint out; the coordinator "
            "registers it and reloads the proxy."
        )
        return failed(code, "The key is not on the proxy's list.", remedy)
    remedy = "Is it the address of a federation's proxy, and its nginx.conf of this version?"
    return failed(code, f"The proxy answers {status}, whatever the key.", remedy)


def _clock(date: str, now: float) -> Diagnostic:
    ahead = now - parsedate_to_datetime(date).timestamp()  # the proxy's is of whole seconds
    text = f"{abs(ahead):.0f} s {'ahead of' if ahead >= 0 else 'behind'} the coordinator's."
    refused = "Set the clock (NTP): calls signed at another time are refused."
    return passed("clock", text, -MOST_BEHIND <= ahead <= MOST_AHEAD, refused)
