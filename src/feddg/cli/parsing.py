"""What people write on the command line, read into fields."""

from collections.abc import Callable, Iterable
from typing import Any

from feddg.errors import ExperimentError


def held_out(text: str) -> dict[str, list[str]]:
    """Reads ``sketch``, ``art,sketch`` or ``val=art_painting,test=photo``.

    Raises:
        ExperimentError: a role is neither val nor test.
    """
    held: dict[str, list[str]] = {"test": [], "val": []}
    role = "test"
    for part in filter(None, text.split(",")):
        before, equals, after = part.strip().partition("=")
        if equals and before not in held:
            raise ExperimentError(f"--hold-out {text}: {before!r} is neither val nor test")
        role = before if equals else role
        held[role].append(after if equals else before)
    return held


def hold_outs(text: str) -> Any:
    """Reads a protocol's name, or hold-outs apart by semicolons.

    Raises:
        ExperimentError: see :func:`held_out`.
    """
    if text in ("lodo", "ltdo", "ltdo-all"):
        return text
    return [held_out(part) for part in text.split(";")]


def client_counts(text: str) -> list[tuple[int, int | None]]:
    """Reads ``50`` or ``50:5`` (5 of 50 per round), several apart by commas.

    Raises:
        ExperimentError: it is written in another way.
    """
    return [_client_count(part) for part in text.split(",")]


def _client_count(text: str) -> tuple[int, int | None]:
    number, _, per_round = text.partition(":")
    try:
        return int(number), int(per_round) if per_round else None
    except ValueError:
        raise ExperimentError(f"--clients {text}: write N, or N:K with K per round") from None


def comma_separated(text: str) -> list[str]:
    """Reads words apart by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(flag: str) -> Callable[[str], list[float]]:
    """Returns what reads a flag's numbers, apart by commas."""

    def read(text: str) -> list[float]:
        try:
            return [float(part) for part in text.split(",")]
        except ValueError:
            raise ExperimentError(f"{flag} {text}: write one or more numbers: 0,0.1,1") from None

    return read


def whole_numbers(flag: str, text: str) -> list[int]:
    """Reads whole numbers apart by commas.

    Raises:
        ExperimentError: one is none; names the flag.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ExperimentError(f"{flag} {text}: write one or more numbers: 7,8,9") from None


def seeds(text: str) -> int | list[int]:
    """Reads how many seeds (``3``), or which (``7,8,9``; ``7,`` is seed 7 alone).

    Raises:
        ExperimentError: it is written in another way.
    """
    numbers, comma, rest = text.rpartition(",")
    one_alone = bool(comma) and not rest.strip() and "," not in numbers
    found = whole_numbers("--seeds", numbers if one_alone else text)
    return found if len(found) > 1 or one_alone else found[0]


def assigned(pairs: Iterable[str]) -> dict[str, Any]:
    """Reads ``a.b=value`` pairs into nested fields; values are YAML.

    Raises:
        ExperimentError: a pair is written in another way.
    """
    fields: dict[str, Any] = {}
    for pair in pairs:
        from feddg.settings import merge, nested

        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ExperimentError(f"--set {pair}: write FIELD=VALUE, for example train.lr=0.001")
        fields = merge(fields, nested(key, _value(pair, value)))
    return fields


def _value(pair: str, text: str) -> Any:
    import yaml

    try:
        if "e" in text.lower():
            return float(text)  # YAML reads 1e-4 as a word
    except ValueError:
        pass
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ExperimentError(f"--set {pair}: the value cannot be read as YAML") from None


def named(option: str) -> tuple[str, str]:
    """Reads ``KEY=VALUE``.

    Raises:
        ExperimentError: there is no name or no value.
    """
    name, _, value = option.partition("=")
    if not name or not value:
        raise ExperimentError(f"--launcher-option {option}: write it as NAME=VALUE")
    return name, value


def privacy(text: str) -> dict[str, Any]:
    """Reads ``epsilon=8,delta=1e-5``: fields of ``privacy``.

    Raises:
        ExperimentError: it is written in another way.
    """
    fields: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, _ = part.partition("=")
        if not equals or not name.strip():
            raise ExperimentError(f"--privacy {text}: write FIELD=VALUE,..: epsilon=8,delta=1e-5")
        fields |= assigned([part])
    return fields


def without_none(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns nested fields without those that say nothing."""
    kept = {k: without_none(v) if isinstance(v, dict) else v for k, v in fields.items()}
    return {k: v for k, v in kept.items() if v is not None and v != {}}
