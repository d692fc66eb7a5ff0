"""SiloBN: only normalisation statistics stay with each client (Andreux et al., DART 2020).

The running means and variances of batch normalisation describe one site's images; its scales and
shifts are learnt like any weight. SiloBN therefore averages everything except the statistics, so
that each client normalises by its own. FedBN, which came later, keeps scales and shifts local too.

Equations:
    w = w^shared + s;  w^shared <- sum_k (n_k/n) w_k^shared;  s_k = (mean, variance) is never
    overwritten. Unseen domain: s = sum_k (n_k/n) s_k over the last round's clients.

Leaves the client:
    Its weights and its number of images, as in FedAvg. The statistics are sent too: the server
    needs them for the average that unseen domains use, and a client that has not trained yet starts
    from it.

Decisions:
    The paper estimates an unseen centre's statistics from that centre's own images; ours uses the
    average of the clients', as for FedBN, so that prediction needs no target images (inference).
    With frozen statistics the method would be FedAvg: its preset trains them, and an experiment
    that freezes them is refused.
"""

from typing import Any, ClassVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from feddg.errors import ExperimentError
from feddg.methods.base import Method
from feddg.methods.catalogue import register
from feddg.methods.fedbn import require_batch_norms
from feddg.methods.reference import CodeDifference, Reference
from feddg.models.network import Network
from feddg.settings import ExperimentSettings


@register
class SiloBN(Method):
    """Normalisation statistics stay with each client; scales and shifts are shared."""

    name = "silobn"
    title = "SiloBN"
    summary = "normalisation statistics stay with the clients (Andreux et al. 2020)"
    reference = Reference(
        "none by the authors; one public re-implementation",
        (
            CodeDifference(
                "it kept all four tensors of a layer at first, which is FedBN, and later the "
                "statistics",
                "statistics and their counter stay, scales and shifts are shared",
                "the paper",
            ),
        ),
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {"*": {"model": {"normalization": "train"}}}
    excludes: ClassVar[dict[str, str]] = {
        "fedbn": "fedbn already keeps the statistics with the clients, and more; choose one"
    }

    def check(self, experiment: ExperimentSettings) -> None:
        """Refuses frozen statistics."""
        super().check(experiment)
        if experiment.model.normalization == "frozen":
            raise ExperimentError(
                "silobn with frozen normalisation statistics is fedavg; "
                "set model.normalization to train"
            )

    def network(self, network: Network) -> Network:
        """Refuses a network without batch normalisation."""
        require_batch_norms(network, self.name)
        return super().network(network)

    def is_local(self, name: str, module: nn.Module) -> bool:
        """Running means, variances and counters of batch normalisation."""
        own = isinstance(module, _BatchNorm) and name in dict(module.named_buffers(recurse=False))
        return own or super().is_local(name, module)
