"""Benchmark protocols: which domains are held out, scenario by scenario."""

from collections.abc import Sequence

from feddg.data.splits import Scenario, leave_one_out, leave_two_out
from feddg.errors import ExperimentError, nearest

PROTOCOLS = {
    "lodo": "leave one domain out: each is the test domain once",
    "ltdo": "leave two domains out: each is the test domain once and the validation domain once",
    "ltdo-all": "leave two domains out: every ordered pair",
}
KNOWN_DOMAINS = {
    "pacs": ("photo", "art_painting", "cartoon", "sketch"),
    "office_home": ("Art", "Clipart", "Product", "Real_World"),
    "digits": ("ink", "chalk", "photo", "sketch"),
}
"""Domains by preset, so that a benchmark's plan can be read where its images are not."""

_ORDER = {
    "pacs": ("photo", "art_painting", "cartoon", "sketch"),
    "office_home": ("Art", "Clipart", "Real_World", "Product"),
}
"""PARDON's pairs (its Table I): each domain is tested while the next one validates."""


def scenarios(protocol: str, domains: Sequence[str], preset: str = "") -> list[Scenario]:
    """Returns the scenarios of a protocol.

    Args:
        protocol: one of ``PROTOCOLS``.
        domains: the data set's domains.
        preset: the data set's preset; PARDON's pairs of validation and test domain are used for
            ``pacs`` and ``office_home``. Elsewhere the next domain in the list validates.

    Raises:
        ExperimentError: unknown protocol, or too few domains for it.
    """
    if protocol not in PROTOCOLS:
        known = "; ".join(f"{name}: {text}" for name, text in PROTOCOLS.items())
        raise ExperimentError(
            f"unknown protocol {protocol!r}{nearest(protocol, PROTOCOLS)}; there are: {known}"
        )
    needed = 2 if protocol == "lodo" else 3
    if len(domains) < needed:
        raise ExperimentError(f"{protocol} needs {needed} domains or more, got {list(domains)}")
    if protocol == "lodo":
        return leave_one_out(domains)
    if protocol == "ltdo-all":
        return leave_two_out(domains)
    paired: Sequence[str] = _ORDER.get(preset, ())
    order = paired if set(paired) == set(domains) else domains
    validates = dict(zip(order, (*order[1:], order[0])))
    return [{"test": (name,), "val": (validates[name],)} for name in domains]
