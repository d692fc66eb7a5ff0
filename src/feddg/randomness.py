"""Named random streams.

One integer seed; every use of randomness draws from its own generator, derived from the seed, a
purpose and ids by a stable hash. No global generator is read. So a new consumer never shifts an
old one, resuming needs no saved generator state, and a client's batch order does not depend on
who ran before it.
"""

import hashlib
import json

import numpy
import torch

Name = str | int


def derive_seed(seed: int, *names: Name) -> int:
    """Returns the 63-bit seed of the stream ``names`` under ``seed``.

    The same arguments give the same number on every machine, Python version and process.

    Args:
        seed: the experiment's seed.
        *names: the purpose and ids, for example ``("client", 7, 3)``.
    """
    key = json.dumps([seed, *names], separators=(",", ":")).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def stream(seed: int, *names: Name) -> torch.Generator:
    """Returns a fresh CPU generator for the stream ``names`` under ``seed``.

    Of the seed's 63 bits PyTorch's CPU generator (mt19937) uses the lower 32: good enough to keep
    streams apart, and nothing that must stay secret is drawn from it (see ``secure_noise``).
    """
    return torch.Generator().manual_seed(derive_seed(seed, *names))


def numpy_stream(seed: int, *names: Name) -> numpy.random.Generator:
    """Returns a fresh numpy generator for the stream ``names`` under ``seed``."""
    return numpy.random.default_rng(derive_seed(seed, *names))
