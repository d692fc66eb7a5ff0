"""Checks before a site joins: images, machine, keys, versions and connection."""

import base64
import os
import shutil
import ssl
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from pathlib import Path

import httpx
import numpy
import torch

from feddg.clients.client import Examples, steps_of_round
from feddg.data.decoded import DecodedFiles
from feddg.data.decoding import Reading, quiet_pillow
from feddg.data.images import ImageTable
from feddg.data.inspection import survey
from feddg.data.pixels import ArrayPixels, PixelStore, Vectors
from feddg.data.sets.features import columns_fault
from feddg.deploy.setup import JoinFile, public_key, read_join, trusted_keys
from feddg.deploy.site import copies_in, held_out_among, list_images
from feddg.diagnostics import Diagnostic, note, silent, warning
from feddg.errors import FeddgError, first_names
from feddg.experiment import Experiment
from feddg.federation.federation import Federation, build, build_worker
from feddg.methods.composition import build_method
from feddg.models.precision import choose_device
from feddg.privacy.building import NO_DEFENCES, build_defences
from feddg.runs.prepare import methods_files
from feddg.settings import ServerSettings
from feddg.storage import cache_folder, private_folder, why
from feddg.text import size

SAMPLE = 256
"""Number of images that are decoded."""
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

    Returns:
        The site's name, and the result of each check.
    """
    join = read_join(folder)
    place = cache_folder(cache).expanduser()
    about_images = check_images(join, images, domain, place, device, unlabelled=unlabelled)
    return join.site, [*(() if offline else check_connection(folder, join)), *about_images]


def check_images(
    join: JoinFile,
    images: str,
    domain: str | None,
    cache: Path,
    device: str = "auto",
    *,
    unlabelled: bool = False,
) -> Iterator[Diagnostic]:
    """Yields the checks of a site's images and machine as they are done.

    Args:
        join: what the coordinator expects.
        images: the images, as in the SuperNode's ``--node-config``.
        domain: name of the domain for images in ``root/class/*``.
        cache: the site's cache folder.
        device: the device for training.
        unlabelled: see :func:`check_site`.
    """
    try:
        experiment = join.settings()
    except FeddgError as error:
        yield failed("experiment", str(error), "Install the version that the coordinator has.")
        return
    if join.trains and unlabelled:
        advice = "Give it labels, or ask the coordinator to name it in evaluation-sites."
        yield failed("images", "This site is to train, and has no labels.", advice)
        return
    try:
        table = list_images(images, domain, experiment.data, join.site if unlabelled else "")
    except FeddgError as error:
        remedy = "Name a folder root/class/* and --domain, or a table with the columns asked for."
        yield failed("images", str(error), remedy)
        return
    if join.features and (fault := columns_fault(table.feature_names, join.features)):
        text = f"{images} {fault} of the coordinator's."
        yield failed("features", text, "Rename them, or take them out.")
    reading = Reading.of(experiment.data)
    depths = {} if table.root is None else survey(table, reading).depths
    yield check_decoding(table, experiment, depths)
    yield from check_depths(depths, experiment)
    if not unlabelled:
        yield check_classes(table, join.classes)
        yield check_domains(table, experiment, join.tested, trains=join.trains)
    if join.trains and (copies := copies_in(table, experiment, cache)):
        yield copies
    yield check_disk(table, experiment, cache)
    named = check_named_files(experiment)
    yield named
    if named.severity == "error":
        return  # a step of training would fail of the same
    yield check_machine(table, experiment, device, trains=join.trains)


def check_depths(depths: Mapping[str, int], experiment: Experiment) -> Iterator[Diagnostic]:
    """Warns of bits, by domain, that nobody elsewhere will know of."""
    if depths and experiment.data.range == "auto":
        yield warning(
            "depths-stay-here",
            f"These images use {max(depths.values())} bits, and the run will not say so: what "
            "predicts with the model takes the brightest value that it sees for white.",
            "Ask the coordinator for data.range: full or percentile.",
        )


def check_decoding(
    table: ImageTable, experiment: Experiment, depths: Mapping[str, int]
) -> Diagnostic:
    """Decodes some images, evenly spaced, in the same way as training does."""
    code, data = "images-decode", experiment.data
    if table.root is None:
        return note(code, f"{len(table)} images need no decoding.")
    places = numpy.linspace(0, len(table) - 1, min(SAMPLE, len(table))).astype(int)
    sample, reading = table.take(numpy.unique(places)), Reading.of(data)
    files = DecodedFiles(sample, data.image_size, data.resize, reading, depths)
    with quiet_pillow(tiled=data.tile is not None):
        bad = files.bad(silent)
    count = len(bad)
    text = (
        f"{len(sample) - count} of {len(sample)} images tried can be read, of {len(table)} in all."
    )
    if not count:
        return note(code, text)
    reason, times = Counter(image.reason for image in bad).most_common(1)[0]
    text += f" Most often: {reason} ({times})."
    if data.on_bad_image == "fail" or count > WORST_SHARE * len(sample):
        return failed(code, text, "Repair or remove these files: `feddg data inspect` names them.")
    return warning(code, text, "They will be left out; `feddg data inspect` names them.")


def check_classes(table: ImageTable, expected: tuple[str, ...]) -> Diagnostic:
    """Compares the names of the class folders with the federation's."""
    code, mine = "classes", sorted(table.class_names)
    if not expected:
        return warning(
            code,
            f"There are {len(mine)}: {first_names(mine, 8)}.",
            "The coordinator named none: compare these, letter by letter, with the other sites'.",
        )
    strange = sorted(set(mine) - set(expected))
    missing = sorted(set(expected) - set(mine))
    if strange:
        return failed(
            code,
            f"The federation does not know {first_names(strange, 8)}.",
            f"Rename or remove these folders; it has {first_names(expected, 8)}.",
        )
    if missing:
        return warning(
            code, f"Not here: {first_names(missing, 8)}.", "Right if this site has no such images."
        )
    return note(code, f"All {len(expected)} are here.")


def check_domains(
    table: ImageTable, experiment: Experiment, tested: Sequence[str] = (), *, trains: bool
) -> Diagnostic:
    """Checks whether the site would train on a held-out domain; the run would exclude it."""
    code, held_out = "domains", experiment.hold_out
    mine = [table.domain_names[domain] for domain in numpy.unique(table.domains)]
    excluded = held_out_among(mine, (*held_out.test, *held_out.val, *tested))
    if not excluded:
        return note(code, f"Not held out: {first_names(mine, 8)}.")
    text = f"Held out in this experiment: {first_names(excluded, 8)}"
    if not trains:
        return note(code, f"{text}; this site only evaluates.")
    return failed(
        code,
        f"{text}; this site takes no part in training.",
        "Name a folder without these images, or ask the coordinator to name this site in "
        "--evaluation-site.",
    )


def check_disk(table: ImageTable, experiment: Experiment, cache: Path) -> Diagnostic:
    """Checks that the cache folder is writable and has room for pixels, copies and memory."""
    code, decoded = "disk", table.root is not None
    pixels = 3 * len(table) * experiment.data.image_size**2 if decoded else 0
    _, network = build(experiment.without_weights, max(2, len(table.class_names)))
    weights = sum(parameter.numel() for parameter in network.parameters())
    needed = 2 * pixels + 32 * weights + SPARE_BYTES
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


def check_named_files(experiment: Experiment) -> Diagnostic:
    """Checks the files that the method's settings name, such as a codec's weights."""
    code = "files-of-the-method"
    try:
        build_method(experiment.method.name, experiment.method.settings).read_files()
    except FeddgError as error:
        return failed(code, str(error), "Put the coordinator's file there, under the same path.")
    names = sorted(methods_files(experiment))
    return note(code, f"{', '.join(names)} can be read." if names else "None are needed.")


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
