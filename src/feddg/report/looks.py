"""How a method's lines look: the same colour and dash on every page."""

import zlib
from collections.abc import Mapping
from typing import Final, NamedTuple

from feddg.methods.base import METHODS

COLOURS: Final = (
    "#6f7f8f",
    "#c8324b",
    "#1f78a4",
    "#d98a00",
    "#2a9d6f",
    "#8c3f8f",
    "#3bb0b0",
    "#8a5a2b",
    "#e377a8",
)
DASHES: Final = ("solid", "dot", "dash", "dashdot")


class Look(NamedTuple):
    """Colour and dash of a line."""

    colour: str
    dash: str


LOOKS: Final = tuple(Look(colour, dash) for dash in DASHES for colour in COLOURS)


def looks_of(methods: Mapping[str, str]) -> dict[str, Look]:
    """Returns the look of every label, no two alike while there are no more than ``LOOKS``.

    A method's look is that of its place among all methods, so it is the same on every page. What is
    no method of ours has one by its name; where that is taken on a page, the next free one.

    Args:
        methods: the label of every line and the method it is of, in the order of the page.
    """
    places = {name: place for place, name in enumerate(METHODS)}
    # Ours first: they must not lose their look to a name that happens to fall on it.
    order = sorted(methods, key=lambda label: methods[label].lower() not in places)
    taken: dict[str, int] = {}
    for label in order:
        name = methods[label].lower()
        wanted = places.get(name, zlib.crc32(name.encode()))
        used = set(taken.values())
        choices = ((wanted + step) % len(LOOKS) for step in range(len(LOOKS)))
        taken[label] = next((c for c in choices if c not in used), wanted % len(LOOKS))
    return {label: LOOKS[taken[label]] for label in methods}
