"""How objects of this package are shown in a notebook, and printed.

Pages and progress bars come from higher packages than the objects shown. So they are named here as
text, and imported only when a notebook asks.
"""

import sys
from importlib import import_module
from typing import Any

_PAGES, _PROGRESS = "feddg.report.notebook", "feddg.cli.progress"


class Shown:
    """An object that a notebook shows as tables and curves, and ``print`` in a few lines."""

    def __repr__(self) -> str:
        from feddg.errors import FeddgError

        try:
            return str(import_module(_PAGES).text_of(self))
        except (FeddgError, OSError) as error:  # a run folder that is gone, or damaged
            return f"{type(self).__name__}: {error}"

    def _repr_html_(self) -> str | None:
        """Returns HTML without scripts; None if it cannot be made, so that text is shown."""
        from feddg.errors import FeddgError

        try:
            found: str = import_module(_PAGES).html_of(self)
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
    return import_module(_PROGRESS).notebook_observer() if in_notebook() else None


def notebook_watcher() -> Any:
    """Returns the :class:`feddg.comparison.pool.Watcher` that shows many runs; None elsewhere."""
    return import_module(_PROGRESS).notebook_watcher() if in_notebook() else None
