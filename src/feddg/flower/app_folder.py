"""``feddg deploy init``: the folder a coordinator starts from, with keys and start lines."""

import ipaddress
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from feddg.errors import ExperimentError
from feddg.experiment import Experiment

NAME = r"[A-Za-z0-9][A-Za-z0-9_-]*"

PYPROJECT = '''[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "feddg-deployment"
version = "1.0.0"
description = "A federation of {count} sites, run by feddg."
license = {{ file = "LICENSE" }}
dependencies = ["flwr>={flwr},<2", "feddg[flower]=={feddg}"]

[tool.flwr.app]
publisher = "feddg"
fab-format-version = 1
flwr-version-target = "{flwr}"

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
wait-seconds = 300.0  # how long to wait for them
round-deadline = 3600.0  # seconds a site has for one message; later replies are dropped
poll-seconds = 0.5  # between two looks at the mailbox
experiment = """
{experiment}"""
'''

LICENSE = """This app holds configuration only. The code it runs is feddg's, licensed under the
Apache License 2.0: https://www.apache.org/licenses/LICENSE-2.0
"""

KEYS = """#!/bin/sh
# Makes a certificate authority and the coordinator's certificate in keys/. Run once, there.
set -eu
cd "$(dirname "$0")"
mkdir -p keys && chmod 700 keys && cd keys
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -days 825 \\
  -subj "/CN=feddg deployment CA" -keyout ca.key -out ca.crt
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes \\
  -subj "/CN={host}" -keyout server.key -out server.csr
printf 'subjectAltName={names}\\n' > server.ext
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 825 \\
  -extfile server.ext -out server.crt
"""

START = """# Starting this federation

Everywhere: `pip install 'feddg[flower]=={feddg}' 'flwr=={flwr}'`, and
`export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1`.

## Coordinator

    sh make_keys.sh
    flower-superlink --host {bind} --port {port} --database superlink.db --enable-supernode-auth \\
      --ssl-ca-certfile keys/ca.crt --ssl-certfile keys/server.crt --ssl-keyfile keys/server.key \\
      --disable-runtime-dependency-installation

`~/.flwr/config.toml` (or `$FLWR_HOME/config.toml`):

    [superlink.feddg]
    address = "{address}"
    root-certificates = "{folder}/keys/ca.crt"

## Each site
{nodes}
## Coordinator, when the sites are connected

    flwr run . feddg --stream

Stopped or failed? Start the SuperLink again without `make_keys.sh`; the SuperNodes reconnect, and
the same line goes on from the last completed round.
"""

NODE = """
### {site}

Once: make a key, and send `{site}.pub` (never `{site}`) to the coordinator, who sends `ca.crt`.

    ssh-keygen -q -t ecdsa -b 384 -N "" -f {site}

The coordinator registers it:

    flwr supernode register {site}.pub feddg --name {site}

Then, with the folder of the images as root/class/*:

    flower-supernode --superlink {address} --root-certificates ca.crt \\
      --auth-supernode-private-key {site} \\
      --node-config 'site="{site}" images="/data/images" domain="{site}" cache="/var/cache/feddg"'
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
    out: Path = Path("runs"),
    test: str = "",
    min_sites: int = 0,
    judges: Sequence[str] = (),
) -> list[Path]:
    """Writes the Flower app, a script for certificates, and the start lines.

    Args:
        folder: made if absent; files that exist are not overwritten.
        experiment: what is run; ``clients.number`` is the number of sites.
        sites: their names, letters, digits, ``-`` and ``_``.
        address: HOST:PORT at which sites reach the coordinator.
        out: the run folder's parent at the coordinator.
        test: the coordinator's test folder, ``digits:DOMAIN``, or empty.
        min_sites: sites that must be connected; 0 for all.
        judges: names of sites that never train and are asked for the accuracy.

    Returns:
        The files written.

    Raises:
        ExperimentError: a name, the address or the folder cannot be used.
    """
    host, port = _checked([*sites, *judges], address)
    versions = {"feddg": version("feddg"), "flwr": version("flwr")}
    nodes = "".join(NODE.format(site=site, address=address) for site in [*sites, *judges])
    bind = "127.0.0.1" if host in ("127.0.0.1", "localhost") else "0.0.0.0"
    where = {"address": address, "port": port, "bind": bind, "folder": folder.resolve()}
    contents = {
        "pyproject.toml": PYPROJECT.format(
            count=len(sites),
            sites=",".join(sites),
            out=_basic(str(out.expanduser().resolve())),
            test=_basic(test),
            judges=",".join(judges),
            minimum=min_sites,
            experiment=_multiline(experiment.to_yaml()),
            **versions,
        ),
        "LICENSE": LICENSE,
        "make_keys.sh": KEYS.format(host=host, names=_alternative_names(host)),
        "START.md": START.format(nodes=nodes, **where, **versions),
    }
    taken = next((name for name in contents if (folder / name).exists()), None)
    if taken is not None:
        raise ExperimentError(f"{folder / taken} exists already; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8")
    return [folder / name for name in contents]


def _checked(sites: Sequence[str], address: str) -> tuple[str, str]:
    bad = next((site for site in sites if not re.fullmatch(NAME, site)), None)
    if bad is not None:
        raise ExperimentError(f"site {bad!r}: use letters, digits, - and _ only")
    if not sites or len(set(sites)) < len(sites):
        raise ExperimentError("name at least one site, each once: --site hospital-a --site ...")
    host, colon, port = address.rpartition(":")
    if not colon or not re.fullmatch(r"[A-Za-z0-9.-]+", host) or not port.isdigit():
        raise ExperimentError(f"address {address!r}: write HOST:PORT, for example fl.org:8000")
    return host, port


def _alternative_names(host: str) -> str:
    try:
        own = f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        own = f"DNS:{host}"
    return ",".join(dict.fromkeys(("DNS:localhost", "IP:127.0.0.1", own)))


def _basic(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _multiline(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
