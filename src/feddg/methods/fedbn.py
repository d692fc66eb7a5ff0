"""FedBN and SiloBN: normalisation that stays with each client."""

from collections.abc import Iterable
from typing import ClassVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from feddg.diagnostics import Diagnostic, warning
from feddg.errors import ExperimentError
from feddg.methods.base import Method, Presets, register
from feddg.models.network import Network
from feddg.models.normalization import batch_norms
from feddg.settings import ExperimentSettings


class OwnNormalization(Method):
    """Batch normalisation, or a part of it, stays with the clients."""

    any_task = True
    presets: ClassVar[Presets] = {"*": {"model": {"normalization": "train"}}}

    def network(self, network: Network) -> Network:
        """Refuses a network without batch normalisation."""
        if not batch_norms(network):
            raise ExperimentError(
                f"{self.name} keeps batch normalisation with the clients, but this backbone has "
                "none; choose one that has (cnn, resnet18, densenet121) or another method"
            )
        return super().network(network)

    def diagnostics(self, experiment: ExperimentSettings) -> Iterable[Diagnostic]:
        """Warns of normalisation that nobody trains."""
        yield from super().diagnostics(experiment)
        trained = experiment.train.trainable
        if trained in ("head", "lora") and experiment.model.embedding != "bottleneck":
            text = f"train.trainable is {trained}: normalisation stays the same at all clients."
            yield warning("fixed-normalisation", text, "Set it to all or norm+head.")


@register
class FedBN(OwnNormalization):
    """FedBN: batch normalisation stays with each client (Li et al., ICLR 2021).

    Batch normalisation holds what is particular to a domain: the scale and the brightness of its
    features. FedBN averages every other layer and lets each client keep its own normalisation,
    scales and shifts as well as statistics, from its first round on. A domain that no client holds
    is predicted with the average of the clients' normalisation.

    Equations:
        w = w^shared + w^BN;  w^shared <- sum_k (n_k/n) w_k^shared;  w_k^BN is never overwritten.
        Unseen domain: w^BN = sum_k (n_k/n) w_k^BN over the last round's clients.

    Leaves the client:
        Its weights and its number of images, as in FedAvg. The normalisation layers are sent too:
        the server needs them for the average that unseen domains use, and a client that has not
        trained yet starts from it.

    Decisions:
        Normalisation means batch normalisation of any dimension, counters included. The average for
        unseen domains follows FedIG's protocol; the paper does not predict them. Pretrained
        experiments freeze normalisation statistics by default, which would leave FedBN only scales
        and shifts to keep; its preset therefore trains them (model.normalization: train).
    """

    name = "fedbn"
    summary = "all of batch normalisation stays with the clients (Li et al. 2021)"

    def is_local(self, name: str, module: nn.Module) -> bool:
        """Returns whether the entry belongs to a batch-normalisation layer."""
        return isinstance(module, _BatchNorm) or super().is_local(name, module)


@register
class SiloBN(OwnNormalization):
    """SiloBN: only normalisation statistics stay with each client (Andreux et al., DART 2020).

    The running means and variances of batch normalisation describe one site's images; its scales
    and shifts are learnt like any weight. SiloBN therefore averages everything except the
    statistics, so that each client normalises by its own. FedBN, which came later, keeps scales and
    shifts local too.

    Equations:
        w = w^shared + s;  w^shared <- sum_k (n_k/n) w_k^shared;  s_k = (mean, variance) is never
        overwritten. Unseen domain: s = sum_k (n_k/n) s_k over the last round's clients.

    Leaves the client:
        Its weights and its number of images, as in FedAvg. The statistics are sent too: the server
        needs them for the average that unseen domains use, and a client that has not trained yet
        starts from it.

    Decisions:
        The paper estimates an unseen centre's statistics from that centre's own images; ours uses
        the average of the clients', as for FedBN, so that prediction needs no target images
        (inference). With frozen statistics the method would be FedAvg: its preset trains them, and
        an experiment that freezes them is refused. Batches of one image leave them as they are, of
        which a run warns.
    """

    name = "silobn"
    summary = "normalisation statistics stay with the clients (Andreux et al. 2020)"
    excludes: ClassVar[dict[str, str]] = {
        "fedbn": "fedbn already keeps the statistics with the clients, and more; choose one"
    }

    def check(self, experiment: ExperimentSettings) -> None:
        """Refuses frozen statistics."""
        super().check(experiment)
        if experiment.model.normalization == "frozen":
            raise ExperimentError(
                f"{self.name} needs the clients' own normalisation statistics, and this experiment "
                "freezes them: set model.normalization to train"
            )

    def is_local(self, name: str, module: nn.Module) -> bool:
        """Returns whether the entry is a running mean, variance or counter."""
        local = isinstance(module, _BatchNorm) and name in dict(module.named_buffers(recurse=False))
        return local or super().is_local(name, module)
