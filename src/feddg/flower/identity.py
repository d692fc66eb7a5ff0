"""Which key may call itself which site: a name belongs to the first key that had it."""

import base64
import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
)
from flwr.proto.node_pb2 import NodeInfo

UNNAMED = "its key was registered without a name; register it with `feddg deploy register`"


def fingerprint(public_key: bytes) -> str:
    """Returns a PEM public key's fingerprint as ``ssh-keygen -l`` shows it, ``SHA256:...``.

    Raises:
        ValueError: the bytes are no public key.
    """
    key = load_pem_public_key(public_key)
    shown = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)  # "type base64"
    digest = hashlib.sha256(base64.b64decode(shown.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode("ascii").rstrip("=")


@dataclass
class Identities:
    """What is known of the sites' keys.

    Attributes:
        keys: fingerprint of the key that each site's name belongs to; grows.
        strict: whether nodes must have been registered under a name. Without, as where nobody has
            a key, any node is taken for what it says.
    """

    keys: dict[str, str] = field(default_factory=dict)
    strict: bool = True

    def objection(self, name: str, node: NodeInfo | None, sites: Collection[str]) -> str | None:
        """Says why a node may not be a site; without objection the name is its key's from now on.

        Args:
            name: what the node calls itself.
            node: what Flower knows of it; None if it is gone.
            sites: names of all sites of the deployment.
        """
        if name not in sites:
            return f"calls itself {name[:40]!r}, which is no site of this deployment"
        if node is not None and node.name and node.name != name:
            return f"calls itself {name!r}, but its key was registered as {node.name!r}"
        if not self.strict:
            return None
        if node is None or not node.name:
            return f"calls itself {name!r}, but {UNNAMED}"
        return self._other_key(name, node)

    def _other_key(self, name: str, node: NodeInfo) -> str | None:
        try:
            shown = fingerprint(node.public_key)
        except ValueError:
            return f"calls itself {name!r}, but has no key"
        known = self.keys.setdefault(name, shown)
        if known == shown:
            return None
        return (
            f"calls itself {name!r} with the key {shown}, but the name belongs to the key {known}; "
            "if the site has a new key, take the old one out of 'keys' in deployment.json"
        )
