"""The files around a deployment's app: keys, proxy, services, and how to start them."""

import ipaddress
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

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
    loader = PackageLoader("feddg.flower")
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
