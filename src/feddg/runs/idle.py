"""What is said before round 1 of methods that do less than their names promise."""

from collections.abc import Iterable

from feddg.clients.client import steps_of_round
from feddg.diagnostics import Diagnostic, note, warning
from feddg.methods.base import Method, title_of
from feddg.methods.domains import DomainMethod, PenalisedLosses
from feddg.settings import TrainSettings
from feddg.text import counted

ONE_DOMAIN, NEVER_WEIGHTED = "one-domain-clients", "annealing-never-ends"
DEAL_OUT = "Deal the domains out with --partition iid, or heterogeneous with --heterogeneity 1."


def unreached_weight(
    method: Method, train: TrainSettings, rounds: int, clients: Iterable[tuple[int, int]]
) -> list[Diagnostic]:
    """Returns what to say where no client takes the steps after which a penalty has its weight.

    Args:
        method: the method.
        train: how clients train.
        rounds: the number of all rounds.
        clients: the number of domains and of images of each; asked for only if it matters.
    """
    if not isinstance(method, PenalisedLosses) or method.weight <= 1:
        return []
    counts = [*clients]
    if all(domains < 2 for domains, _ in counts):
        return []
    steps = rounds * max(steps_of_round(train, images) for _, images in counts)
    if steps > method.annealing:
        return []
    text = (
        f"No client takes more than {counted(steps, 'step')}, and {title_of(method.name)}'s weight "
        f"counts after {method.annealing} (method.{method.anneals}): until then it is 1."
    )
    advice = "In a short run 1 may be the best weight: a larger one keeps a network from learning."
    return [warning(NEVER_WEIGHTED, text, advice)]


def idle_clients(method: Method, domains: Iterable[int]) -> list[Diagnostic]:
    """Returns what to say where a method that compares a client's domains does nothing, or less.

    Args:
        method: the method.
        domains: the number of each client's domains.
    """
    if not isinstance(method, DomainMethod):
        return []
    alone, title = [count < 2 for count in domains], title_of(method.name)
    if not any(alone):
        return []
    if not all(alone):
        some = f"{sum(alone)} of {len(alone)} clients have images of one domain: "
        text = f"{some}there {title} has nothing to compare."
        return [note(ONE_DOMAIN, text)]
    text = (
        f"{title} compares the domains within a client, and every client has one domain: it has "
        "nothing to do, and trains plainly."
    )
    return [warning(ONE_DOMAIN, text, DEAL_OUT)]
