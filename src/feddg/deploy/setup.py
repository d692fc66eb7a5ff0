"""``feddg deploy init``: writes the coordinator's folder and the files for each site."""

import ipaddress
import json
import re
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from jinja2 import Environment
from pydantic import Field

from feddg.data.data_set import DATA_SETS
from feddg.deploy.site import DIGITS, list_images, require_fit_for_sites
from feddg.deploy.wire import SITE_NAME
from feddg.errors import ExperimentError, FeddgError
from feddg.experiment import Experiment, load_experiment
from feddg.records import JsonFile
from feddg.storage import file_faults, open_file, read_fields_of, replace_text
from feddg.text import templates_of

JOIN = "join.json"
FLEET_METHODS = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "get-run",
    "get-fab",
    "push-object",
    "pull-object",
    "confirm-message-received",
)
"""Methods of Flower's Fleet service for sites with a registered key; ``register-node`` is not among
them, because a key could register itself with it.
"""
NO_KEY = (ValueError, TypeError, UnsupportedAlgorithm)
"""What is raised for a file that is not a key."""
REGISTERED = "proxy/sites.map"
"""The proxy's list of registered keys, one per line."""


class JoinFile(JsonFile):
    """What a deployment expects from a site.

    Attributes:
        site: the site's name.
        address: HOST:PORT of the coordinator's proxy.
        feddg: required version of feddg.
        flwr: required version of Flower.
        classes: names of the classes; empty if the coordinator did not know them.
        features: columns of a table of features, if the coordinator knew them.
        experiment: the experiment, as YAML.
        tested: domains of the coordinator's test folder, on which nobody trains.
        trains: whether the site trains, or only evaluates.
    """

    site: str = Field(pattern=f"^{SITE_NAME}$")
    address: str
    feddg: str
    flwr: str
    classes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    experiment: str
    tested: tuple[str, ...] = ()
    trains: bool = True


def read_join(folder: Path) -> JoinFile:
    """Reads the join file that the coordinator sent.

    Raises:
        FeddgError: it does not exist, or is damaged.
    """
    join = JoinFile.read(folder / JOIN)
    if join is None:
        raise FeddgError(
            f"{folder} holds no {JOIN}: name the folder sites/NAME that the coordinator sent"
        )
    return join


def public_key(file: Path) -> bytes:
    """Returns a site's public key in PEM, as Flower writes it.

    Args:
        file: the key as written by ``ssh-keygen``, ``*.pub``.

    Raises:
        FeddgError: it is not the public key of an elliptic curve.
    """
    with file_faults(FeddgError, f"{file} is no public key", *NO_KEY), open_file(file) as content:
        key = load_ssh_public_key(content.read())
    if not isinstance(key, EllipticCurvePublicKey):
        raise FeddgError(f"{file}: sites' keys are of type ecdsa; the site runs make_key.sh")
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def trusted_keys(file: Path) -> dict[str, Ed25519PublicKey]:
    """Returns the keys of a ``trusted.yaml``, by id: a site runs apps signed by one of them.

    Raises:
        FeddgError: it cannot be read, or lists none.
    """
    texts = read_fields_of(file, "the list of trusted keys", FeddgError)
    with file_faults(FeddgError, f"{file} lists no trusted keys", *NO_KEY):
        listed = {id: load_ssh_public_key(str(text).encode()) for id, text in texts.items()}
    keys = {id: key for id, key in listed.items() if isinstance(key, Ed25519PublicKey)}
    if not keys:
        raise FeddgError(f"{file} lists no trusted keys; make_keys.sh makes it")
    return keys


def _known_names(experiment: Experiment, test: str) -> tuple[Sequence[str], ...]:
    """Returns the classes and features a coordinator knows, and the domains of its test folder."""
    if not test:
        return DATA_SETS.find(experiment.data.source).classes, (), ()
    try:
        table = list_images(test, None, experiment.data)
    except FeddgError:
        return (), (), ()  # the run says what is wrong with it
    return table.class_names, table.feature_names, table.domain_names


def deployment_fields(sites: Sequence[str]) -> dict[str, object]:
    """Returns the deployment's experiment fields: its sites, which train on all their images."""
    return {
        "data": {"id_val": 0.0, "id_test": 0.0, "root": None},
        "clients": {"number": len(sites), "partition": "domain"},
    }


def write_app(
    folder: Path,
    experiment: Experiment | Path,
    sites: Sequence[str],
    *,
    address: str = "127.0.0.1:8000",
    superlink_port: int = 0,
    out: Path = Path("runs"),
    test: str = "",
    min_sites: int = 0,
    evaluation_sites: Sequence[str] = (),
    classes: Sequence[str] = (),
) -> list[Path]:
    """Writes the Flower app, the proxy, services, scripts for keys, and start commands.

    Args:
        folder: created if missing, readable by its owner only; existing files are not overwritten.
        experiment: the experiment, or its file; ``clients.number`` is the number of sites, which
            train on all their images.
        sites: names of letters, digits, ``-`` and ``_``.
        address: HOST:PORT at which sites reach the coordinator's proxy.
        superlink_port: port of the SuperLink, on loopback behind the proxy; 0 for the one after the
            proxy's.
        out: parent of the run folder at the coordinator.
        test: the coordinator's folder of test images, or ``digits:DOMAIN``; empty for none.
        min_sites: number of sites that must be connected; 0 for all.
        evaluation_sites: names of sites that only evaluate.
        classes: classes that sites must have, for `feddg deploy check`; by default those of the
            test folder, or of the data set.

    Returns:
        The files written.

    Raises:
        ExperimentError: a name, the address or the folder cannot be used.
    """
    if not sites:
        raise ExperimentError("name at least one site that trains: --site NAME")
    everybody = [*sites, *evaluation_sites]
    host, port, behind = _checked(everybody, address, superlink_port)
    experiment = load_experiment(experiment, deployment_fields(sites))
    require_fit_for_sites(experiment)
    if min_sites > len(sites):
        raise ExperimentError(f"min-sites is {min_sites}; there are {len(sites)} sites")
    folder, out = folder.expanduser().resolve(), out.expanduser().resolve()
    if test and not test.startswith(DIGITS):  # the SuperLink starts elsewhere
        test = str(Path(test).expanduser().resolve())
    # It stands in unit files, YAML, TOML and shell lines.
    bad = re.search(r"""["'\\$:%#`\s]""", str(folder))
    if bad is not None:
        raise ExperimentError(f"{folder}: choose a folder without {bad.group()!r} in its path")
    versions = {"feddg": version("feddg"), "flwr": version("flwr")}
    local = host in ("localhost", "127.0.0.1")
    environment = templates_of("feddg.deploy")
    environment.filters |= {
        "toml": partial(json.dumps, ensure_ascii=False),
        "toml_lines": _multiline,
    }
    environment.globals |= {
        **versions,
        "folder": folder,
        "bin": Path(sys.executable).parent,
        "host": host,
        "port": port,
        "address": address,
        "listen": f"127.0.0.1:{port}" if local else str(port),
        "names": _certificate_names(host),
        "superlink_host": "127.0.0.1",
        "superlink_port": behind,
        "superlink": f"127.0.0.1:{behind}",
        "methods": FLEET_METHODS,
        "sites": everybody,
        "trainers": sites,
        "evaluation_sites": evaluation_sites,
        "min_sites": min_sites,
        "out": str(out),
        "test": test,
        "experiment": experiment.to_yaml(),
    }
    contents = _rendered(environment, "coordinator/") | {REGISTERED: ""}
    known, features, tested = _known_names(experiment, test)
    for site in everybody:
        for name, content in _rendered(environment, "site/", site=site).items():
            contents[f"sites/{site}/{name}"] = content
        contents[f"sites/{site}/{JOIN}"] = JoinFile(
            site=site,
            address=address,
            classes=tuple(classes or known),
            features=tuple(features),
            experiment=experiment.to_yaml(),
            tested=tuple(tested),
            trains=site in sites,
            **versions,
        ).to_text()
    taken = next((name for name in contents if (folder / name).exists()), None)
    if taken is not None:
        raise ExperimentError(f"{folder / taken} exists already; choose another folder")
    for name, content in contents.items():
        replace_text(folder / name, content)
        if name.endswith(".sh"):
            (folder / name).chmod(0o700)
    return [folder / name for name in contents]


def _rendered(environment: Environment, folder: str, **values: str) -> dict[str, str]:
    """Returns the files whose templates are in a folder, by their paths below it."""
    return {
        name.removeprefix(folder).removesuffix(".j2"): environment.get_template(name).render(values)
        for name in environment.list_templates()
        if name.startswith(folder)
    }


def _checked(sites: Sequence[str], address: str, superlink_port: int) -> tuple[str, int, int]:
    """Returns the proxy's host and port, and the port of the SuperLink behind it.

    Raises:
        ExperimentError: a site's name or the address cannot be used.
    """
    bad = next((site for site in sites if not re.fullmatch(SITE_NAME, site)), None)
    if bad is not None:
        raise ExperimentError(f"site {bad!r}: use only letters, digits, - and _")
    if len(set(sites)) < len(sites):
        raise ExperimentError("name each site once: --site hospital-a --site ...")
    match = re.fullmatch(r"([A-Za-z0-9.-]+):([0-9]+)", address)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ExperimentError(f"address {address!r}: write HOST:PORT, for example fl.org:8000")
    host, port = match[1], int(match[2])
    behind = superlink_port or port + 1
    if behind == port or not 0 < behind < 65536:
        raise ExperimentError(f"the SuperLink cannot listen on port {behind}: choose another")
    return host, port, behind


def _certificate_names(host: str) -> str:
    """Returns the alternative names of the proxy's certificate."""
    try:
        subject = f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        subject = f"DNS:{host}"
    return ",".join(dict.fromkeys(("DNS:localhost", "IP:127.0.0.1", subject)))


def _multiline(text: str) -> str:
    """Returns lines for a TOML string between three quotation marks."""
    return text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
