"""Centralised: all training images in one place, as if nobody had anything to hide.

The reference line above every federation: what privacy costs. One client holds the images of all,
and takes in a round as many optimizer steps as the clients of a federation's round take together,
on batches of the same size. Everything else is the same harness: the same split, network,
augmentation, rounds and tables.

Equations:
    w <- w after S local steps down the gradient of CE(g(f(x)), y) on all training images
    S = (K / N) sum_k steps_k, rounded: N clients, of which K take part in a round;
    steps_k = local_epochs * batches of client k, or local_steps.

Leaves the client:
    The images, before training begins: in this reference line nothing is private. The ledger lists
    what the one client and the server exchange.

Decisions:
    Steps are equal and not images: a batch is what an update of the weights learns from. Clients'
    last batches are smaller, so a centralised round sees somewhat more images. Clients are dealt
    out as the experiment says first, for their number of steps; then all images go to one client.
    A round is no whole number of passes over the images in general: each round begins a new random
    order. The optimizer starts afresh each round, as every client's does. Guards and update
    privacy are refused, for one client has nobody to hide among. It combines with methods that
    change what a client does by itself (`centralised+mixstyle`). It runs in one process: over a
    network it would have to send images.
"""

from feddg.errors import ExperimentError
from feddg.methods.base import Method
from feddg.methods.catalogue import register
from feddg.methods.reference import Reference
from feddg.methods.reference_lines import refuse_guards
from feddg.settings import ExperimentSettings


@register
class Centralised(Method):
    """One client with everybody's images; every hook of the base as it is."""

    name = "centralised"
    aliases = ("centralized",)
    title = "Centralised"
    summary = "reference line: all training images in one place, equally many steps"
    reference = Reference("none: a reference line of this project")
    gathers_images = True
    in_process_only = "it trains on all images in one place, and no image ever leaves a site"

    def check(self, experiment: ExperimentSettings) -> None:
        """Refuses what needs several clients."""
        refuse_guards(experiment, self.name, "has one client, with nobody to hide among")
        if experiment.server.min_updates > 1:
            raise ExperimentError(
                f"{self.name} has one client; set server.min_updates to 1 (it is "
                f"{experiment.server.min_updates})"
            )
        super().check(experiment)
