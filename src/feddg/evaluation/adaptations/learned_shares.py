"""Shares of the image's own moments that were learned in training: adapters, and gates."""

from torch import Tensor, nn

from feddg.evaluation.adaptation import register_adaptation
from feddg.evaluation.predictors import Predictor
from feddg.models.normalization import BatchInstanceNorm2d, Rule, Share, adapter_of, interpolated


@register_adaptation
class Adapter(Predictor):
    """The adapter trained by FedIG-A: a share for each layer and image."""

    name = "adapter"
    summary = "FedIG-A's trained adapters give the share, for each layer and image"
    order = 30
    cost = "moments of every map, and two small linear layers beside it"

    def require(self, model: nn.Module) -> None:
        """A model with adapters."""
        if adapter_of(model) is None:
            raise self.refused(
                "it was trained without adapters, and they cannot be added afterwards; "
                "train with --method fedig-a"
            )
        super().require(model)

    def rule(self, images: Tensor) -> Rule:
        """Mixes by the mean of alpha."""
        adapter = adapter_of(self.model)
        assert adapter is not None
        share: Share = adapter.share()
        return interpolated(self.model, share)


@register_adaptation
class BatchInstance(Predictor):
    """Batch-instance normalisation: a share per channel, learned in training (Nam and Kim 2018)."""

    name = "bin"
    summary = "batch-instance normalisation, whose shares were learned in training"
    order = 40
    cost = "moments of every map"

    def require(self, model: nn.Module) -> None:
        """A model with gates."""
        if not any(isinstance(layer, BatchInstanceNorm2d) for layer in model.modules()):
            raise self.refused(
                "it was trained without batch-instance normalisation; train with --method fedig "
                "--set method.instance_gate=1 (or with copa)"
            )

    def rule(self, images: Tensor) -> Rule:
        """Each layer as it was trained."""
        return lambda layer, inputs: type(layer).forward(layer, inputs)
