"""``feddg deploy init``: the folder a coordinator starts from, and what each site is given."""

import ipaddress
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import Field, ValidationError

from feddg.data.data_set import DATA_SETS, load_source
from feddg.errors import ExperimentError, FeddgError
from feddg.experiment import Experiment
from feddg.methods.base import require_network_fit
from feddg.methods.composition import method_class
from feddg.records import JsonFile
from feddg.storage import parse_fields

JOIN = "join.json"


class JoinFile(JsonFile):
    """What a deployment expects of a site.

    Attributes:
        site: the site's name.
        address: HOST:PORT of the coordinator's proxy.
        feddg: the version that all must have.
        flwr: the version of Flower.
        classes: names of the classes; empty where the coordinator did not know them.
        experiment: as YAML.
        trains: whether the site trains, or only evaluates.
    """

    site: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    address: str
    feddg: str
    flwr: str
    classes: tuple[str, ...] = ()
    experiment: str
    trains: bool = True

    def settings(self) -> Experiment:
        """Returns the experiment.

        Raises:
            ExperimentError: it is none that this version knows.
        """
        try:
            return Experiment(**parse_fields(self.experiment))
        except (ValueError, ValidationError) as error:
            text = " ".join(str(error).split())[:200]
            raise ExperimentError(f"{JOIN} holds no experiment of this version: {text}") from None


def read_join(folder: Path) -> JoinFile:
    """Returns what the coordinator sent.

    Raises:
        FeddgError: there is none, or it is damaged.
    """
    found = JoinFile.read(folder / JOIN)
    if found is None:
        raise FeddgError(
            f"{folder} holds no {JOIN}: name the folder sites/NAME that the coordinator sent"
        )
    return found


def known_classes(experiment: Experiment, test: str) -> Sequence[str]:
    """Returns the classes that a coordinator knows of: of its test folder, or of the data set."""
    if test and not test.startswith("digits:"):
        try:
            return load_source("folder", Path(test).expanduser()).class_names
        except FeddgError:
            return ()  # the run says what is wrong with it
    source = "digits" if test else experiment.data.source
    if source == "digits":
        return load_source("digits").class_names
    return DATA_SETS.find(source).classes


def held_out_among(domains: Iterable[str], held_out: Collection[str]) -> list[str]:
    """Returns those of a site's domains that an experiment holds out, however they are spelt."""
    held = {_spelt_alike(name) for name in held_out}
    return [name for name in domains if _spelt_alike(name) in held]


def _spelt_alike(name: str) -> str:
    """Returns what two spellings of a domain's name have in common."""
    return " ".join(name.replace("_", " ").split()).casefold()


# The files around a deployment's app: keys, proxy, services, and how to start them.


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
"""What a site with a registered key asks of Flower's Fleet service; a key registers itself with
``register-node``, which is not among them."""

COORDINATOR = {
    "START.md": "START.md.j2",
    "make_keys.sh": "make_keys.sh.j2",
    "compose.yaml": "compose.yaml.j2",
    "Dockerfile": "Dockerfile.j2",
    "flower-home/config.toml": "config.toml.j2",
    "proxy/nginx.conf": "nginx.conf.j2",
    "systemd/feddg-superlink.service": "superlink.service.j2",
    "systemd/feddg-proxy.service": "proxy.service.j2",
}
SITE = {
    "make_key.sh": "site/make_key.sh.j2",
    "compose.yaml": "site/compose.yaml.j2",
    "Dockerfile": "Dockerfile.j2",
    "feddg-site.service": "site/site.service.j2",
}
REGISTERED = "proxy/sites.map"
"""The proxy's list of registered keys, a line for each."""


@dataclass(frozen=True)
class Doors:
    """Where a deployment is reached.

    Attributes:
        host: of the proxy, as sites know it.
        port: of the proxy.
        superlink_port: of the SuperLink, on the coordinator's loopback interface.
    """

    host: str
    port: int
    superlink_port: int

    @property
    def address(self) -> str:
        """Where sites connect: the proxy."""
        return f"{self.host}:{self.port}"

    @property
    def listen(self) -> str:
        """What the proxy listens on; nothing but loopback when it is tried on one machine."""
        local = self.host in ("localhost", "127.0.0.1")
        return f"127.0.0.1:{self.port}" if local else str(self.port)

    @property
    def names(self) -> str:
        """The certificate's alternative names."""
        try:
            own = f"IP:{ipaddress.ip_address(self.host)}"
        except ValueError:
            own = f"DNS:{self.host}"
        return ",".join(dict.fromkeys(("DNS:localhost", "IP:127.0.0.1", own)))


def start_files(
    folder: Path,
    doors: Doors,
    sites: Sequence[str],
    versions: dict[str, str],
    *,
    out: Path,
    test: str = "",
) -> dict[str, str]:
    """Returns what surrounds a deployment's app: file names within ``folder``, and contents.

    Args:
        folder: where the files will lie, absolute.
        doors: where the deployment is reached.
        sites: names of all sites, those that only evaluate, too.
        versions: of ``feddg`` and ``flwr``.
        out: the run folder's parent at the coordinator, absolute.
        test: the coordinator's test folder, or empty.
    """
    loader = PackageLoader("feddg.deploy")
    environment = Environment(
        loader=loader,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # nothing here is a page
    )
    values = {
        **versions,
        "folder": folder,
        "bin": Path(sys.executable).parent,
        "host": doors.host,
        "port": doors.port,
        "address": doors.address,
        "listen": doors.listen,
        "names": doors.names,
        "superlink_host": "127.0.0.1",
        "superlink_port": doors.superlink_port,
        "superlink": f"127.0.0.1:{doors.superlink_port}",
        "methods": FLEET_METHODS,
        "sites": sites,
        "out": out,
        "test": test if test.startswith("/") else "",
    }

    def text(template: str, **more: str) -> str:
        return environment.get_template(template).render(values, **more)

    contents = {name: text(template) for name, template in COORDINATOR.items()}
    for site in sites:
        for name, template in SITE.items():
            contents[f"sites/{site}/{name}"] = text(template, site=site)
    return contents | {REGISTERED: ""}


# ``feddg deploy init``: the folder a coordinator starts from, with keys and start lines.


NAME = r"[A-Za-z0-9][A-Za-z0-9_-]*"

PYPROJECT = '''[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "feddg-deployment"
version = "1.0.0"
description = "A federation of {count} sites, run by feddg."
license = {{ file = "LICENSE" }}
dependencies = ["flwr>={flwr},<1.42", "feddg[flower]=={feddg}"]

[tool.flwr.app]
publisher = "feddg"
fab-format-version = 1
flwr-version-target = "{flwr}"
fab-include = ["LICENSE"]  # beside this file: what is signed and sent to sites

# The code is the installed library's; this folder only configures it.
[tool.flwr.app.components]
serverapp = "feddg.deploy.server_app:app"
clientapp = "feddg.deploy.client_app:app"

[tool.flwr.app.config]
sites = "{sites}"  # client 0, 1, ...: keep the order
evaluation-sites = "{judges}"  # sites that never train and are asked for the accuracy
out = {out}  # at the coordinator: the run folder's parent
test = {test}  # at the coordinator: root/domain/class/*, digits:DOMAIN, or "" for no evaluation
test-domain = ""  # for a test folder root/class/*: what its images are called
cache = ""  # at the coordinator; "" for the user's cache
min-sites = {minimum}  # must be connected, or the run fails
wait-seconds = 300.0  # how long to wait for them, until they have introduced themselves
round-deadline = 3600.0  # seconds a site has for one message; later replies are dropped
poll-seconds = 0.5  # between two looks at the mailbox
experiment = """
{experiment}"""
'''

LICENSE = """This app holds configuration only. The code it runs is feddg's, licensed under the
Apache License 2.0: https://www.apache.org/licenses/LICENSE-2.0
"""


def deployment_fields(sites: Sequence[str]) -> dict[str, Any]:
    """Returns what a deployment lays over an experiment: its sites, who train on all they have."""
    return {
        "data": {"id_val": 0.0, "id_test": 0.0, "root": None},
        "clients": {"number": len(sites), "partition": "domain"},
    }


def write_app(
    folder: Path,
    experiment: Experiment,
    sites: Sequence[str],
    *,
    address: str = "127.0.0.1:8000",
    superlink_port: int = 0,
    out: Path = Path("runs"),
    test: str = "",
    min_sites: int = 0,
    judges: Sequence[str] = (),
    classes: Sequence[str] = (),
) -> list[Path]:
    """Writes the Flower app, the proxy that sites reach, services, scripts for keys, start lines.

    Args:
        folder: made if absent, for its owner alone; files that exist are not overwritten.
        experiment: what is run; ``clients.number`` is the number of sites.
        sites: their names, letters, digits, ``-`` and ``_``.
        address: HOST:PORT at which sites reach the coordinator's proxy.
        superlink_port: of the SuperLink behind it, on loopback; 0 for the one after the proxy's.
        out: the run folder's parent at the coordinator.
        test: the coordinator's test folder, ``digits:DOMAIN``, or empty.
        min_sites: sites that must be connected; 0 for all.
        judges: names of sites that never train and are asked for the accuracy.
        classes: that sites must have, for `feddg deploy check`; by default those of the test
            folder, or of the data set.

    Returns:
        The files written.

    Raises:
        ExperimentError: a name, the address or the folder cannot be used.
    """
    require_network_fit(method_class(experiment.method.name))
    everybody = [*sites, *judges]
    doors = _checked(everybody, address, superlink_port)
    folder, out = folder.expanduser().resolve(), out.expanduser().resolve()
    _check_path(folder)
    versions = {"feddg": version("feddg"), "flwr": version("flwr")}
    contents = {
        "pyproject.toml": PYPROJECT.format(
            count=len(sites),
            sites=",".join(sites),
            out=_basic(str(out)),
            test=_basic(test),
            judges=",".join(judges),
            minimum=min_sites,
            experiment=_multiline(experiment.to_yaml()),
            **versions,
        ),
        "LICENSE": LICENSE,
        **start_files(folder, doors, everybody, versions, out=out, test=test),
    }
    expected = list(classes or known_classes(experiment, test))
    for site in everybody:
        contents[f"sites/{site}/{JOIN}"] = JoinFile(
            site=site,
            address=address,
            classes=tuple(expected),
            experiment=experiment.to_yaml(),
            trains=site in sites,
            **versions,
        ).to_text()
    taken = next((name for name in contents if (folder / name).exists()), None)
    if taken is not None:
        raise ExperimentError(f"{folder / taken} exists already; choose another folder")
    for name, content in contents.items():
        _write(folder / name, content, folder)
    return [folder / name for name in contents]


def _write(file: Path, content: str, folder: Path) -> None:
    """Writes a file that only its owner may read, in folders that only they may enter."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for parent in reversed(file.relative_to(folder).parents[:-1]):
        (folder / parent).mkdir(mode=0o700, exist_ok=True)
    file.touch(mode=0o600)
    file.write_text(content, encoding="utf-8")
    if file.suffix == ".sh":
        file.chmod(0o700)


def _checked(sites: Sequence[str], address: str, superlink_port: int) -> Doors:
    bad = next((site for site in sites if not re.fullmatch(NAME, site)), None)
    if bad is not None:
        raise ExperimentError(f"site {bad!r}: use letters, digits, - and _ only")
    if not sites or len(set(sites)) < len(sites):
        raise ExperimentError("name at least one site, each once: --site hospital-a --site ...")
    host, colon, digits = address.rpartition(":")
    known = colon and re.fullmatch(r"[A-Za-z0-9.-]+", host) and re.fullmatch(r"[0-9]+", digits)
    if not known or not 0 < int(digits) < 65536:
        raise ExperimentError(f"address {address!r}: write HOST:PORT, for example fl.org:8000")
    port = int(digits)
    behind = superlink_port or (port + 1 if port < 65535 else port - 1)
    if behind == port or not 0 < behind < 65536:
        raise ExperimentError(f"the SuperLink cannot listen on port {behind}: choose another")
    return Doors(host, port, behind)


def _check_path(folder: Path) -> None:
    # It stands in unit files, YAML, TOML and shell lines.
    bad = re.search(r"""["'\\$:%#`\s]""", str(folder))
    if bad is not None:
        raise ExperimentError(f"{folder}: choose a folder without {bad.group()!r} in its path")


def _basic(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _multiline(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
