"""``feddg deploy init``: the folder a coordinator starts from, with keys and start lines."""

import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from feddg.errors import ExperimentError
from feddg.experiment import Experiment
from feddg.flower.joining import JOIN, JoinFile, known_classes
from feddg.flower.start_files import Doors, start_files
from feddg.methods.base import require_network_fit
from feddg.methods.composition import method_class

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
serverapp = "feddg.flower.server_app:app"
clientapp = "feddg.flower.client_app:app"

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
