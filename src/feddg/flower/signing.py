"""The coordinator's signature under a deployment's app; sites run no app without it.

The form is Flower's (its ``--trusted-entities``): ed25519 over the time of signing, 8 bytes, big
end first, and the SHA-256 digest of the bundled app. Flower 1.41 itself signs only what is
published on its hub; here the signature is made, and kept, beside the app.
"""

import base64
import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.cli.build import build_fab_from_disk

from feddg.errors import FeddgError
from feddg.storage import replace_bytes, replace_text

BUNDLE, SIGNATURE = "signed/app.fab", "signed/signature.json"
KEY, TRUSTED = "keys/signing", "keys/trusted.yaml"


@dataclass(frozen=True)
class SignedApp:
    """A bundled app, and who vouches for it.

    Attributes:
        content: the bundle, a zip file.
        key_id: what the public key is called in ``trusted.yaml``.
        signed_at: seconds since 1970.
        signature: over both, in URL-safe base64.
    """

    content: bytes
    key_id: str
    signed_at: int
    signature: str

    @property
    def digest(self) -> str:
        """Its SHA-256 digest, by which Flower knows it, in hexadecimal digits."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def verifications(self) -> dict[str, str]:
        """What Flower hands to the sites with the bundle."""
        entry = {"signature": self.signature, "signed_at": self.signed_at}
        return {self.key_id: json.dumps(entry), "valid_license": "Valid"}

    def verify(self, trusted: Path) -> None:
        """Checks the signature against the keys of a ``trusted.yaml``, as a site does.

        Raises:
            FeddgError: none of the keys signed this.
        """
        key = _trusted(trusted).get(self.key_id)
        try:
            if key is None:
                raise InvalidSignature
            key.verify(
                base64.urlsafe_b64decode(self.signature), _signed(self.content, self.signed_at)
            )
        except (InvalidSignature, ValueError):
            raise FeddgError(
                f"the signed app was not signed by a key of {trusted}; run `feddg deploy sign`"
            ) from None


def sign_app(folder: Path, key: Path | None = None) -> SignedApp:
    """Bundles the app of a deployment's folder and signs it.

    Args:
        folder: what ``feddg deploy init`` wrote.
        key: the private key, of ed25519, in OpenSSH's form; by default the folder's own.

    Raises:
        FeddgError: the app or the key cannot be used, or sites do not trust the key.
    """
    private = _private_key(key or folder / KEY)
    trusted = _trusted(folder / TRUSTED)
    own = private.public_key().public_bytes_raw()
    id = next((id for id, known in trusted.items() if known.public_bytes_raw() == own), None)
    if id is None:
        raise FeddgError(f"sites would not run it: {folder / TRUSTED} does not hold this key")
    content, now = _bundle(folder), int(time.time())
    signature = base64.urlsafe_b64encode(private.sign(_signed(content, now))).decode("ascii")
    app = SignedApp(content, id, now, signature)
    replace_bytes(folder / BUNDLE, content)
    fields = {"key_id": id, "signed_at": now, "signature": signature}
    replace_text(folder / SIGNATURE, json.dumps(fields, indent=1))
    return app


def read_signed(folder: Path) -> SignedApp:
    """Returns the app as it was signed last.

    Raises:
        FeddgError: there is none, it was not signed by a key that sites trust, or it is not what
            the folder's ``pyproject.toml`` says now.
    """
    try:
        fields = json.loads((folder / SIGNATURE).read_text(encoding="utf-8"))
        app = SignedApp(
            (folder / BUNDLE).read_bytes(),
            str(fields["key_id"]),
            int(fields["signed_at"]),
            str(fields["signature"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FeddgError(
            f"{folder} holds no signed app ({error}); run `feddg deploy sign`"
        ) from None
    app.verify(folder / TRUSTED)
    if _bundle(folder) != app.content:
        raise FeddgError(
            f"{folder / 'pyproject.toml'} was changed since it was signed; run `feddg deploy sign`"
        )
    return app


def _bundle(folder: Path) -> bytes:
    try:
        return build_fab_from_disk(folder)
    except (OSError, ValueError) as error:
        raise FeddgError(f"{folder} holds no Flower app that can be bundled: {error}") from None


def _signed(content: bytes, signed_at: int) -> bytes:
    return signed_at.to_bytes(8, "big") + hashlib.sha256(content).digest()


def _private_key(file: Path) -> Ed25519PrivateKey:
    try:
        key = load_ssh_private_key(file.read_bytes(), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise FeddgError(f"{file} is no signing key ({error}); make_keys.sh makes one") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise FeddgError(f"{file} is no ed25519 key, which signing needs; make_keys.sh makes one")
    return key


def _trusted(file: Path) -> dict[str, Ed25519PublicKey]:
    try:
        entries = yaml.safe_load(file.read_text(encoding="utf-8"))
        keys = {str(id): load_ssh_public_key(str(text).encode()) for id, text in entries.items()}
    except (OSError, ValueError, AttributeError, yaml.YAMLError, UnsupportedAlgorithm) as error:
        raise FeddgError(f"{file} lists no trusted keys ({error}); make_keys.sh makes it") from None
    return {id: key for id, key in keys.items() if isinstance(key, Ed25519PublicKey)}
