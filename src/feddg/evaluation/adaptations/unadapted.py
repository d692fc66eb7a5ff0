"""No adaptation at all, under the name that tables compare with."""

from torch import Tensor, nn

from feddg.evaluation.adaptation import register_adaptation
from feddg.evaluation.predictors import Predictor, by_running_statistics
from feddg.models.normalization import Rule


@register_adaptation
class Global(Predictor):
    """No adaptation: the running statistics, also where the model has an adapter or gates."""

    name = "global"
    summary = "no adaptation: the running statistics"
    order = 0

    def require(self, model: nn.Module) -> None:
        """Any model."""

    def rule(self, images: Tensor) -> Rule:
        """The running statistics."""
        return by_running_statistics
