"""Finds what the packages that read run folders bring: commands, and functions of ``feddg``.

Such a package has a module ``commands``, quick to import, with

- ``app``, a Typer app: with a name its commands are below it, else they stand beside ``feddg run``;
- ``FUNCTIONS``, by its modules, the names of what is reached as ``feddg.NAME``;
- ``NEEDS``, the extra that they take, and what for; empty if there is none.

Nothing below names such a package. Without its folder it has no commands and functions, and all
else works. Packages of others bring commands through an entry point, see :mod:`feddg.cli`.
"""

import functools
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from feddg.errors import MissingPackage, need

P = ParamSpec("P")
T = TypeVar("T")


@functools.cache
def readers() -> tuple[Any, ...]:
    """Returns the modules ``commands`` of the packages that are there."""
    files = sorted(Path(__file__).parent.glob("*/commands.py"))
    return tuple(import_module(f"feddg.{file.parent.name}.commands") for file in files)


def function(name: str) -> Any:
    """Returns a function that one of the packages brings.

    Raises:
        MissingPackage: none does, or it takes an extra that is not installed.
    """
    member = find(name)
    if member is None:
        raise MissingPackage(f"this copy of feddg lacks the package that brings `{name}`")
    return member


def find(name: str) -> Any:
    """Returns a function that one of the packages brings, None if none does; see above."""
    for reader in readers():
        for module, names in reader.FUNCTIONS.items():
            if name in names.split():
                if reader.NEEDS:
                    need(*reader.NEEDS)
                return getattr(import_module(f"{reader.__package__}.{module}"), name)
    return None


def with_page(
    work: Callable[Concatenate[Path | str, P], T],
) -> Callable[Concatenate[Path | str, P], T]:
    """Returns work on a run's folder that also writes the run's page anew, if a package can."""

    @functools.wraps(work)
    def called(folder: Path | str, *args: P.args, **options: P.kwargs) -> T:
        done = work(folder, *args, **options)
        if (ensure := find("ensure_report")) is not None:
            (Path(folder) / "report.html").unlink(missing_ok=True)
            ensure(Path(folder))
        return done

    return called  # type: ignore[return-value]
