"""Federated algorithms, one per file; each class can be imported from here by its name.

    >>> from feddg.methods import FedAvg, Pardon
    >>> Pardon(gamma1=0.75).settings.margin
    0.3

A composition has no class here; use its name: ``method="ccst+jigen"``.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name[:1].isupper():  # modules are in small letters
        from feddg.methods.base import METHODS

        for method in METHODS.values():
            if method.__name__ == name:
                return method
    raise AttributeError(f"module 'feddg.methods' has no attribute {name!r}")


def __dir__() -> list[str]:
    from feddg.methods.base import METHODS

    return sorted(method.__name__ for method in METHODS.values())
