"""By size: how many images clients hold is a Dirichlet draw.

Clients' shares of all images are drawn from Dir(alpha) (Li et al., "Federated Learning on Non-IID
Data Silos: An Experimental Study", ICDE 2022, section IV-C); a small alpha for few large clients
and many small ones. Under a domain skew the homes of a domain share it in these proportions.
"""

import numpy as np

from feddg.data.partitions import Dealing, PartitionRule, register_partition
from feddg.rng import numpy_stream


def _weights(dealing: Dealing) -> np.ndarray:
    assert dealing.quantity_alpha is not None
    random = numpy_stream(dealing.seed, "partition", "quantity")
    drawn = random.gamma(dealing.quantity_alpha, size=dealing.clients)
    # Nobody is to hold nothing: the least is a thousandth of the mean.
    weights: np.ndarray = np.maximum(drawn, max(1e-3 * drawn.mean(), 1e-12))
    return weights


register_partition(
    PartitionRule(
        name="quantity",
        kind="sizes",
        summary="sizes drawn with clients.quantity_alpha (Li 2022)",
        decide=_weights,
        setting="quantity_alpha",
    )
)
