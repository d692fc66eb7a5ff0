"""The cryptography of masked sums: keys, masks, shares of secrets; all of it from kept libraries.

X25519, HKDF, ChaCha20 and its authenticated form are ``cryptography``'s, Shamir's secret sharing is
``pycryptodome``'s. A secret is 32 bytes; all randomness is the operating system's.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence

import numpy

from feddg.errors import ClientError

SECRET = 32
"""Bytes of a key, a seed, a share."""
SEALED = 12 + 2 * SECRET + 16
"""Bytes of two shares on their way: nonce, content, tag."""
_HALF = SECRET // 2


def new_secret() -> bytes:
    """Returns 32 random bytes: a seed, or a private key."""
    return os.urandom(SECRET)


def public_key(private: bytes) -> bytes:
    """Returns the X25519 public key, 32 bytes, of a private one."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed(private: bytes, public: bytes, purpose: str) -> bytes:
    """Returns the 32 bytes that two holders of keys both know, and nobody else (RFC 7748, 5869).

    Args:
        private: one's private key.
        public: the other's public key.
        purpose: what it is for; another purpose gives other bytes.

    Raises:
        ClientError: the public key is none.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    try:
        other = X25519PublicKey.from_public_bytes(public)
        shared = X25519PrivateKey.from_private_bytes(private).exchange(other)
    except ValueError:
        raise ClientError("was told a public key that is none") from None
    return HKDF(SHA256(), SECRET, None, f"feddg {purpose}".encode()).derive(shared)


def is_public_key(public: bytes) -> bool:
    """Whether others can agree with a public key: zero and points of low order are none."""
    try:
        agreed(new_secret(), public, "trial")
    except ClientError:
        return False
    return True


def mask(seed: bytes, length: int) -> numpy.ndarray:
    """Returns the mask that a seed stands for: ``length`` uint64, indistinguishable from uniform.

    ChaCha20's key stream; a seed is used for one mask only.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    stream = Cipher(ChaCha20(seed, bytes(16)), None).encryptor()
    return numpy.frombuffer(stream.update(bytes(8 * length)), "<u8")


def commitment(seed: bytes) -> bytes:
    """Returns 32 bytes by which a seed or a share is recognised, and which say nothing of it."""
    return hashlib.blake2b(seed, digest_size=SECRET, person=b"feddg seed").digest()


def split(secret: bytes, threshold: int, holders: int) -> list[bytes]:
    """Returns a share of a secret for each holder; any ``threshold`` of them make it again.

    Fewer say nothing (Shamir, "How to Share a Secret", 1979).
    """
    from Crypto.Protocol.SecretSharing import Shamir

    halves = [Shamir.split(threshold, holders, secret[at : at + _HALF], False) for at in (0, _HALF)]
    return [first + second for (_, first), (_, second) in zip(*halves)]


def combined(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Returns the secret from shares, by their holders' places from 0.

    Args:
        shares: at least ``threshold``; no more are used.
        threshold: as it was split.
    """
    from Crypto.Protocol.SecretSharing import Shamir

    used = sorted(shares.items())[:threshold]
    halves = (
        Shamir.combine([(place + 1, share[at : at + _HALF]) for place, share in used], False)
        for at in (0, _HALF)
    )
    return b"".join(halves)


def sealed(key: bytes, content: bytes, way: Sequence[int]) -> bytes:
    """Returns content that only the key opens; ``way`` (round, from, to) is bound to it."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    nonce = os.urandom(12)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, content, _label(way))


def opened(key: bytes, content: bytes, way: Sequence[int]) -> bytes | None:
    """Returns what :func:`sealed` was given; None if it was changed on its way, or is another's."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(content[:12], content[12:], _label(way))
    except InvalidTag:
        return None


def _label(way: Sequence[int]) -> bytes:
    return "/".join(map(str, way)).encode()
