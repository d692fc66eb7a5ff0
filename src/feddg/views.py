"""What objects of the lower packages show of themselves, in notebooks and when they are printed."""

import sys

from feddg.errors import FeddgError
from feddg.readers import find


class Shown:
    """An object that a notebook shows as tables, and ``print`` in a few lines."""

    def __repr__(self) -> str:
        text_of = find("text_of")
        try:
            return super().__repr__() if text_of is None else str(text_of(self))
        except (FeddgError, OSError) as error:  # a run folder that is gone, or damaged
            return f"{type(self).__name__}: {error}"

    def _repr_html_(self) -> str | None:
        """Returns HTML without scripts; None if it cannot be made, so that text is shown."""
        html_of = find("html_of")
        try:
            return None if html_of is None else str(html_of(self))
        except (FeddgError, OSError):  # a run folder that is gone, or damaged
            return None


def in_notebook() -> bool:
    """Returns whether this process belongs to a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"
