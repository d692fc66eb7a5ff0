"""A method of one's own: clients stay close to what they were sent; checked, then run."""

from pydantic import Field

import feddg
from feddg.testing import check_method


class CloseSettings(feddg.MethodSettings):
    """How strongly clients are held."""

    weight: float = Field(0.01, ge=0, description="weight of the squared distance")


@feddg.register
class Close(feddg.Method):
    """Weights are held near the received ones."""

    name = "close"
    summary = "FedAvg with a term of distance"
    settings: CloseSettings

    def loss(self, client, batch):
        """Cross-entropy, and the distance to the received weights."""
        trained = client.network.named_parameters()
        far = sum((w - client.received[name]).square().sum() for name, w in trained)
        return super().loss(client, batch) | {"distance": self.settings.weight * far}


check_method(Close)
run = feddg.run(
    data="digits", method="close", hold_out="sketch", image_size=8, rounds=1, out="runs/own_method"
)
print(run)
