"""Before a site joins: its keys, its versions, and the way to the coordinator's proxy."""

import base64
import http.client
import os
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from feddg.errors import FeddgError
from feddg.flower.joining import JoinFile
from feddg.flower.preflight import Check, go, look, no_go
from feddg.storage import parse_fields, why

SECONDS = 10.0
MOST_AHEAD, MOST_BEHIND = 5.0, 300.0
"""Seconds that a site's clock may be before and behind the coordinator's: Flower refuses signatures
from the future, and old ones (``SYSTEM_TIME_TOLERANCE``, ``TIMESTAMP_TOLERANCE`` of flwr 1.41)."""
DOOR = "/v1/fleet/get-run"
"""A path that the proxy knows. Asked with GET, which it lets nobody through with: it answers 401
where the key is not on its list, 405 where it is."""


def check_connection(folder: Path, join: JoinFile) -> Iterator[Check]:
    """Yields the checks of a site's folder and of the way to the coordinator.

    Args:
        folder: what the coordinator sent, with the site's key in it.
        join: what it expects.
    """
    yield from check_versions(join)
    yield check_key(folder / join.site)
    yield check_trusted(folder / "trusted.yaml")
    try:
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    except OSError as error:
        found = f"{folder / 'ca.crt'}: {why(error)}"
        yield no_go("certificate", found, "the coordinator sends keys/ca.crt: put it here")
        return
    yield from check_proxy(join.address, context, folder / f"{join.site}.pub")


def check_versions(join: JoinFile) -> Iterator[Check]:
    """Compares the installed packages with the coordinator's."""
    for name, wanted, parts in (("feddg", join.feddg, 3), ("flwr", join.flwr, 2)):
        try:
            own = version(name)
        except PackageNotFoundError:
            own = "not installed"
        if own.split(".")[:parts] == wanted.split(".")[:parts]:
            yield go(name, own)
        else:
            remedy = f"pip install 'feddg[flower]=={join.feddg}' 'flwr=={join.flwr}'"
            yield no_go(name, f"{own}, the coordinator has {wanted}", remedy)


def check_key(key: Path) -> Check:
    """Whether the site's key is there, of the right kind, and for its owner's eyes alone."""
    what, public = "key", key.with_name(f"{key.name}.pub")
    if not key.is_file() or not public.is_file():
        return no_go(what, f"{key} and {public.name} are not there", "sh make_key.sh")
    mode = key.stat().st_mode & 0o777
    if os.name == "posix" and mode & 0o077:
        found = f"{key} may be read by others (mode {mode:o})"
        return no_go(what, found, f"chmod 600 {key}; if others could read it, make a new one")
    if not public.read_text("utf-8", "replace").startswith("ecdsa-sha2-nistp"):
        return no_go(what, f"{public} is no key of type ecdsa", "sh make_key.sh in another folder")
    return go(what, f"{key.name}, mode {mode:o}")


def check_trusted(file: Path) -> Check:
    """Whether the site knows whose apps it may run."""
    what = "trusted.yaml"
    try:
        found = parse_fields(file.read_text("utf-8"))
    except OSError as error:
        remedy = "the coordinator sends keys/trusted.yaml: put it here"
        return no_go(what, f"{file}: {why(error)}", remedy)
    except ValueError as error:
        return no_go(what, f"{file} {error}", "ask the coordinator for it again")
    keys = [name for name in found if str(name).startswith("fpk_")]
    if not keys:
        return no_go(what, f"{file} names no key", "ask the coordinator for it again")
    return go(what, f"apps signed by {', '.join(keys)}")


@dataclass(frozen=True)
class _Reply:
    status: int
    date: str | None
    at: float


def check_proxy(address: str, context: ssl.SSLContext, public: Path) -> Iterator[Check]:
    """Connects to the proxy, compares the clocks, and asks whether the key is on its list."""
    what = f"proxy {address}"
    try:
        reply = _ask(address, context, public)
    except FeddgError as error:
        yield no_go(what, str(error), "check address, firewall and ca.crt with the coordinator")
        return
    yield go(what, "answers with the coordinator's certificate")
    yield _clock(reply)
    yield _registration(reply.status, public)


def _registration(status: int, public: Path) -> Check:
    what = "registration"
    if status == http.client.METHOD_NOT_ALLOWED:
        return go(what, "the key is on the proxy's list")
    if status == http.client.UNAUTHORIZED:
        remedy = (
            f"send {public.name} to the coordinator, and read its fingerprint out; the coordinator "
            "registers it and reloads the proxy"
        )
        return no_go(what, "the key is not on the proxy's list", remedy)
    found, remedy = f"the proxy answers {status}", "is it the address of a federation's proxy?"
    if status == http.client.FORBIDDEN:
        found = "the proxy answers 403, whether the key is on its list or not"
        remedy = (
            "its nginx.conf is of an earlier version: the coordinator writes a deployment anew "
            "elsewhere and takes proxy/nginx.conf from there"
        )
    return no_go(what, found, remedy)


def _ask(address: str, context: ssl.SSLContext, public: Path) -> _Reply:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPSConnection(host, int(port), timeout=SECONDS, context=context)
    try:
        connection.request("GET", DOOR, headers=_key_header(public))
        reply = connection.getresponse()
        reply.read()
        return _Reply(reply.status, reply.getheader("Date"), time.time())
    except ssl.SSLCertVerificationError as error:
        said = f"ca.crt does not vouch for its certificate: {error.verify_message}"
        raise FeddgError(said) from None
    except TimeoutError:
        raise FeddgError(f"no answer within {SECONDS:g} s") from None
    except socket.gaierror:
        raise FeddgError(f"the name {host!r} is not known here") from None
    except (OSError, http.client.HTTPException) as error:
        raise FeddgError(f"cannot be reached: {why(error)}") from None
    finally:
        connection.close()


def _key_header(public: Path) -> dict[str, str]:
    """The site's public key as Flower sends it; none where there is no key yet."""
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_ssh_public_key,
    )

    try:
        key = load_ssh_public_key(public.read_bytes())
    except (OSError, ValueError):
        return {}
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return {"flwr-public-key": base64.b64encode(pem).decode("ascii")}


def _clock(reply: _Reply) -> Check:
    what = "clock"
    try:
        theirs = parsedate_to_datetime(reply.date or "").timestamp()
    except ValueError:
        return look(what, "the proxy does not say its time", "compare the clocks by hand")
    ahead = reply.at - theirs  # the proxy's is of whole seconds
    found = f"{abs(ahead):.0f} s {'ahead of' if ahead >= 0 else 'behind'} the coordinator's"
    if ahead > MOST_AHEAD or -ahead > MOST_BEHIND:
        remedy = "set the clock (NTP): calls signed at another time are refused"
        return no_go(what, found, remedy)
    if ahead > MOST_AHEAD / 2 + 1 or -ahead > MOST_BEHIND / 5:
        return look(what, found, "set the clock (NTP) before it drifts further")
    return go(what, found)
