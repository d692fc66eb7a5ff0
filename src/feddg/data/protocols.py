"""Benchmark protocols: which domains are held out, scenario by scenario."""

from collections.abc import Mapping, Sequence

from feddg.data.data_set import DATA_SETS
from feddg.data.splits import Scenario, leave_one_out, leave_two_out
from feddg.errors import ExperimentError, nearest

PROTOCOLS = {
    "lodo": "leave one domain out: each is the test domain once",
    "ltdo": "leave two domains out: each is the test domain once and the validation domain once",
    "ltdo-all": "leave two domains out: every ordered pair",
}


def known_domains(*data_sets: str) -> tuple[str, ...]:
    """Returns the domains of the first of these data sets whose definition names them.

    So a benchmark's plan can be read where its images are not.
    """
    found = (DATA_SETS[name].domains for name in data_sets if name in DATA_SETS)
    return next(filter(None, found), ())


def scenarios(protocol: str, domains: Sequence[str], preset: str = "") -> list[Scenario]:
    """Returns the scenarios of a protocol.

    Args:
        protocol: one of ``PROTOCOLS``.
        domains: the data set's domains.
        preset: the data set whose ``validated_by`` says which domain validates while another is
            tested; where it has none for these domains, the next one in the list does.

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
    validates: Mapping[str, str] = DATA_SETS[preset].validated_by if preset in DATA_SETS else {}
    if set(validates) != set(domains):
        validates = dict(zip(domains, (*domains[1:], domains[0])))
    return [{"test": (name,), "val": (validates[name],)} for name in domains]
