"""What higher packages do for objects of lower ones: show them, open them, load their models.

The objects are below the packages that can do that. So the package's own ``__init__``, which knows
all of them, says where each of these is; it is imported only when somebody asks.
"""

import sys
from importlib import import_module
from typing import Any


def higher(what: str) -> Any:
    """Returns the module that does something for objects of lower packages."""
    from feddg import HIGHER

    return import_module(HIGHER[what])


class Shown:
    """An object that a notebook shows as tables and curves, and ``print`` in a few lines."""

    def __repr__(self) -> str:
        from feddg.errors import FeddgError

        try:
            return str(higher("notebook").text_of(self))
        except (FeddgError, OSError) as error:  # a run folder that is gone, or damaged
            return f"{type(self).__name__}: {error}"

    def _repr_html_(self) -> str | None:
        """Returns HTML without scripts; None if it cannot be made, so that text is shown."""
        from feddg.errors import FeddgError

        try:
            found: str = higher("notebook").html_of(self)
        except (FeddgError, OSError):  # a run folder that is gone, or damaged
            return None
        return found


def in_notebook() -> bool:
    """Returns whether this process belongs to a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


def notebook_observer() -> Any:
    """Returns the :class:`feddg.runs.observer.Observer` that shows a run; None elsewhere."""
    return higher("progress").notebook_observer() if in_notebook() else None


def notebook_watcher() -> Any:
    """Returns the :class:`feddg.comparison.pool.Watcher` that shows many runs; None elsewhere."""
    return higher("progress").notebook_watcher() if in_notebook() else None
