"""FedAvg: clients train the global network, the server averages what they send.

Each sampled client trains the global network on its own images; the server takes the mean of what
comes back, in which a client counts by its number of images. Every other method changes some of
this and keeps the rest.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data"
(AISTATS 2017), Algorithm 1.

Equations:
    w_k = w after local steps down the gradient of CE(g(f(x)), y) on the client's images
    w <- sum_k (n_k / n) w_k,   n = sum_k n_k over the round's clients

Leaves the client:
    The network after local training, and the number of images.

Decisions:
    Every client's optimizer starts afresh each round. Statistics of batch normalisation are
    averaged like weights; integer buffers are copied from the round's first client. The mean is a
    running one, in client order, so that its value does not depend on who answers first.
    All of this stands in ``feddg.methods.base`` as the default of every hook, because every other
    method starts from it; so no composition names ``fedavg``.
"""

from feddg.methods.base import Method
from feddg.methods.catalogue import register
from feddg.methods.reference import Reference


@register
class FedAvg(Method):
    """Federated averaging: every hook of the base as it is."""

    name = "fedavg"
    title = "FedAvg"
    summary = "weighted mean of the clients' weights (McMahan et al. 2017)"
    reference = Reference("the paper's algorithm; its authors published no code that is followed")
