"""What is said before round 1 of methods and layers that do less than their names promise."""

from collections.abc import Iterable, Iterator

from feddg.clients.client import steps_of_round
from feddg.diagnostics import Diagnostic, note, warning
from feddg.errors import first_names
from feddg.methods.base import Method, title_of
from feddg.methods.domains import DomainMethod, PenalisedLosses
from feddg.models.network import Network
from feddg.models.normalization import batch_norms
from feddg.settings import ExperimentSettings, TrainSettings
from feddg.text import counted

ONE_DOMAIN, NEVER_WEIGHTED = "one-domain-clients", "annealing-never-ends"
DEAL_OUT = (
    "It is for clients with several domains. Where all images are here, deal the domains out "
    "(--partition iid, or heterogeneous with --heterogeneity 1); otherwise choose another method."
)


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


def about_normalization(network: Network, settings: ExperimentSettings) -> Iterator[Diagnostic]:
    """Warns of batch normalisation that nobody trains although it seems so."""
    model, layers = settings.model, batch_norms(network)
    if model.normalization == "frozen" and model.weights is not None:
        fresh = [
            name
            for name, layer in layers.items()
            if layer.running_mean is not None
            and layer.running_var is not None
            and not layer.running_mean.any()
            and bool((layer.running_var == 1).all())
        ]
        if fresh:
            yield warning(
                "new-normalisation-frozen",
                "model.normalization is frozen, and new layers, which have no statistics yet, "
                f"never normalise: {first_names(fresh)}.",
                "Set model.normalization to train.",
            )
