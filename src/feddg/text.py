"""Formats numbers and names as text, rounded and with units."""

import math
import re
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

MISSING = "–"
SPACE = "\N{NO-BREAK SPACE}"
THIN_SPACE = "\N{NARROW NO-BREAK SPACE}"
"""Separator of thousands."""
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line ends, changes of writing direction, and bytes that are not UTF-8."""


def percent(share: float | None) -> str:
    """Returns a share in [0, 1] as ``83.4``: percent with one decimal, without the sign."""
    if share is None or not math.isfinite(share):
        return MISSING
    return f"{100 * share:.1f}"


def percent_sign(share: float | None) -> str:
    """Returns a share in [0, 1] as ``83.4 %``."""
    text = percent(share)
    return text if text == MISSING else f"{text}{SPACE}%"


def number(value: float | None) -> str:
    """Returns a count or rate with at least three digits and a thin space between thousands."""
    if value is None or not math.isfinite(value):
        return MISSING
    digits = 0 if float(value).is_integer() or abs(value) >= 100 else 1
    return f"{value:,.{digits}f}".replace(",", THIN_SPACE)


def short(count: int) -> str:
    """Returns a count as ``15k`` or ``1.5M``, without rounding."""
    for unit, letter in ((10**6, "M"), (1000, "k")):
        if count >= unit and count % (unit // 1000) == 0:
            return f"{count / unit:.12g}{letter}"
    return str(count)


def size(count: float | None) -> str:
    """Returns bytes as ``44.8 MB`` (1 MB is 1,000,000 bytes)."""
    if count is None or not math.isfinite(count):
        return MISSING
    value = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:.3g}{SPACE}{unit}"
        value /= 1000
    return f"{value:.3g}{SPACE}TB" if value < 999.5 else f"{number(value)}{SPACE}TB"


def duration(seconds: float | None) -> str:
    """Returns seconds as ``0.42 s``, ``12 s``, ``3 min 12 s`` or ``5 h 20 min``."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if 0 < seconds < 0.001:
        return f"under{SPACE}1{SPACE}ms"
    if seconds < 9.95:
        return f"{seconds:.2g}{SPACE}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}{SPACE}s"
    if whole < 3600:
        return f"{whole // 60}{SPACE}min {whole % 60}{SPACE}s"
    return f"{whole // 3600}{SPACE}h {whole % 3600 // 60}{SPACE}min"


def counted(count: int, singular: str, plural: str | None = None) -> str:
    """Returns ``1 client``, ``12 clients``."""
    return f"{number(count)} {singular if count == 1 else plural or singular + 's'}"


def listed(names: Sequence[str]) -> str:
    """Returns ``a``, ``a and b``, ``a, b and c``."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def readable(name: str) -> str:
    """Returns a name from a file as text: ``art_painting`` becomes ``art painting``."""
    return name.replace("_", " ")


def shortened(name: str, length: int = 24) -> str:
    """Returns a name cut to a length that fits an axis."""
    return name if len(name) <= length else f"{name[: length - 1]}…"


def value_text(value: Any) -> str:
    """Returns a setting's value as text: ``none`` if it is empty, a list without brackets."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None or value == {} else str(value)


def command(*words: str) -> str:
    """Returns a command line of feddg, quoted for a shell."""
    return shlex.join(["feddg", *words])


def printable(text: str) -> str:
    r"""Returns a text on one line that a terminal shows safely: ESC becomes ``\x1b``."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def templates_of(package: str, folder: str = "templates", *, escape: bool = False) -> "Environment":
    """Returns the templates in a folder of a package; an unknown name in one of them raises.

    Args:
        package: its dotted name.
        folder: the folder.
        escape: whether all text is escaped, for HTML.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader(package, folder),
        undefined=StrictUndefined,
        autoescape=escape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=not escape,
    )


def print_line(console: Any, text: str) -> None:
    """Prints a line on Rich's console as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
