"""Keys: the coordinator signs the app, and registers sites at its SuperLink."""

import base64
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from flwr.cli.build import build_fab_from_disk
from flwr.cli.flower_config import read_superlink_connection
from flwr.cli.log import start_stream
from flwr.cli.utils import init_http_client_from_connection
from flwr.common.constant import NOOP_FLWR_AID
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.fab_pb2 import Fab as FabProto
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.primitives.asymmetric_ed25519 import create_message_to_sign, load_private_key
from flwr.superlink.federation import NoOpFederationManager

from feddg.deploy.setup import NO_KEY, REGISTERED, public_key, trusted_keys
from feddg.errors import FeddgError
from feddg.storage import file_faults, replace_bytes, replace_text

BUNDLE, SIGNATURE = "signed/app.fab", "signed/signature.json"
KEY, TRUSTED = "keys/signing", "keys/trusted.yaml"
CONNECTION, HOME, DATABASE = "feddg", "flower-home", "superlink.db"
APP = "@feddg/feddg-deployment"


def signed_fab(content: bytes, key_id: str, signed_at: int, signature: str) -> Fab:
    """Returns a bundled app with its signature, as Flower sends it to the sites.

    Args:
        content: the bundle, a zip file.
        key_id: name of the public key in ``trusted.yaml``.
        signed_at: time of signing, seconds since 1970.
        signature: signature of content and time, in URL-safe base64.
    """
    entry = json.dumps({"signature": signature, "signed_at": signed_at})
    digest = hashlib.sha256(content).hexdigest()
    return Fab(digest, content, {key_id: entry, "valid_license": "Valid"})


def sign_app(folder: Path, key: Path | None = None) -> Fab:
    """Bundles the app of a deployment's folder and signs it.

    Args:
        folder: the deployment's folder, written by ``feddg deploy init``.
        key: the private ed25519 key in OpenSSH's format; by default the one in the folder.

    Raises:
        FeddgError: the app or the key cannot be used, or the sites do not trust the key.
    """
    file = key or folder / KEY
    with file_faults(FeddgError, f"{file} is no signing key", *NO_KEY):
        private = load_private_key(file)
    trusted = trusted_keys(folder / TRUSTED)
    signer = private.public_key().public_bytes_raw()
    id = next((id for id, public in trusted.items() if public.public_bytes_raw() == signer), None)
    if id is None:
        raise FeddgError(f"sites would not run it: {folder / TRUSTED} does not hold this key")
    content, now = _bundle(folder), int(time.time())
    signed = private.sign(create_message_to_sign(hashlib.sha256(content).digest(), now))
    signature = base64.urlsafe_b64encode(signed).decode("ascii")
    fields: dict[str, Any] = {"key_id": id, "signed_at": now, "signature": signature}
    replace_bytes(folder / BUNDLE, content)
    replace_text(folder / SIGNATURE, json.dumps(fields, indent=1))
    return signed_fab(content, **fields)


def read_signed(folder: Path) -> Fab:
    """Returns the app as last signed.

    Raises:
        FeddgError: there is no signed app, or the folder's ``pyproject.toml`` is another one.
    """
    without = f"{folder} holds no signed app (run `feddg deploy sign`)"
    with file_faults(FeddgError, without, ValueError, TypeError):
        fields = json.loads((folder / SIGNATURE).read_text(encoding="utf-8"))
        app = signed_fab((folder / BUNDLE).read_bytes(), **fields)
    if _bundle(folder) != app.content:
        raise FeddgError(
            f"{folder / 'pyproject.toml'} is not the one that was signed; run `feddg deploy sign`"
        )
    return app


def _bundle(folder: Path) -> bytes:
    with file_faults(FeddgError, f"{folder} holds no Flower app that can be bundled", ValueError):
        return build_fab_from_disk(folder)


# What the coordinator asks of its own SuperLink: to register a site's key, to run the signed app.
#
# Nothing here passes through the proxy: it needs the coordinator's machine.


def register_site(folder: Path, site: str, key: Path) -> None:
    """Registers a site's key at the SuperLink, and allows it at the proxy.

    Args:
        folder: the deployment's.
        site: one of its sites.
        key: the site's public key.

    Raises:
        FeddgError: the name has another key, the key another name, the site is not part of this
            deployment, or the SuperLink cannot be reached.
    """
    if site not in {of_site.name for of_site in folder.glob("sites/*")}:
        raise FeddgError(f"{site!r} is no site of the deployment {folder}")
    pem = public_key(key)
    with _superlink(folder) as client:
        nodes = client.ListNodes(ListNodesRequest()).nodes_info
        present = [node for node in nodes if node.status != "unregistered"]
        named = next((node for node in present if node.name == site), None)
        if named is not None and named.public_key != pem:
            raise FeddgError(
                f"another key is registered as {site}: a name belongs to a key. If the site lost "
                f"it: `FLWR_HOME={(folder / HOME).resolve()} flwr supernode unregister "
                f"{named.node_id} feddg`, then register again"
            )
        owner = next((node for node in present if node.public_key == pem), None)
        if owner is not None and owner.name != site:
            raise FeddgError(f"{key} is registered as {owner.name or 'a site without a name'}")
        if owner is None:
            client.RegisterNode(RegisterNodeRequest(public_key=pem, name=site))
    let_through(folder / REGISTERED, site, pem)


def let_through(file: Path, site: str, pem: bytes) -> None:
    """Puts a site's key on the proxy's list and removes its earlier key."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    of_site = {line.rpartition(" ")[2]: line for line in lines}
    key = base64.b64encode(pem).decode("ascii").replace("+", "[+]")
    of_site[f"{site};"] = f'"~^{key}$" {site};'  # as plain strings nginx ignores their case
    replace_text(file, "".join(f"{of_site[name]}\n" for name in sorted(of_site)))


def run_signed(folder: Path, *, stream: bool = False) -> int:
    """Starts the signed app of a deployment's folder, or continues its run.

    Args:
        folder: the deployment's folder, with the SuperLink's database.
        stream: whether to show the log until the run ends.

    Returns:
        Flower's run id.

    Raises:
        FeddgError: the app is not signed, has changed since, or the SuperLink refuses it.
    """
    app = read_signed(folder)
    with _superlink(folder) as client:
        _deposit(folder / DATABASE, app)
        # By its digest: a bundle sent along would be taken without its signature.
        fab = FabProto(hash_str=app.hash_str)
        started = client.StartRun(StartRunRequest(fab=fab, app_spec=APP))
        if not started.HasField("run_id"):
            raise FeddgError("the SuperLink did not start the run; its log says why")
        if stream:
            start_stream(started.run_id, client)
    return int(started.run_id)


def _deposit(database: Path, app: Fab) -> None:
    """Stores the app with those of Flower's hub, the only ones it verifies signatures of."""
    if not database.is_file():
        raise FeddgError(
            f"{database} is not there: start the SuperLink in this folder with --database "
            f"{DATABASE}"
        )
    state = SqlLinkState(str(database), NoOpFederationManager(), ObjectStoreFactory().store())
    state.initialize()
    state.store_app(app, NOOP_FEDERATION_ID, APP, TaskType.SERVER_APP, NOOP_FLWR_AID)


@contextmanager
def _superlink(folder: Path) -> Iterator[ControlHttpClient]:
    os.environ["FLWR_HOME"] = str((folder / HOME).resolve())
    client = init_http_client_from_connection(read_superlink_connection(CONNECTION))
    try:
        yield client
    except httpx.HTTPStatusError as error:
        raise FeddgError(f"the SuperLink refuses: {error.response.text[:500]}") from None
    except httpx.TransportError as error:
        raise FeddgError(f"the SuperLink cannot be reached; is it running? ({error})") from None
    finally:
        client.close()
