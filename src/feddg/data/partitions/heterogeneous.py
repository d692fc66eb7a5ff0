"""By domain: every domain has its home clients, and lambda says how much leaves home.

A client is to hold ``n(c, d) = lambda * n_d / C + (1 - lambda) * [c is a home of d] * n_d /
homes(d)`` images of domain ``d`` (Bai, Bagchi and Inouye, "Benchmarking Algorithms for Federated
Domain Generalization", ICLR 2024): with heterogeneity lambda = 1 every one of the ``C`` clients has
the global mix of domains, with lambda = 0 each domain stays at home. A domain has as many homes as
its size deserves, so that clients are about equally large.
"""

from feddg.data.partitions import Dealing, PartitionRule, register_partition
from feddg.data.shares import Mix, proportional_homes


def _mix(dealing: Dealing) -> Mix:
    return Mix(proportional_homes(dealing.totals, dealing.clients), dealing.heterogeneity)


register_partition(
    PartitionRule(
        name="heterogeneous",
        kind="domains",
        summary="main domains, of which clients.heterogeneity (lambda) says how much leaves home",
        decide=_mix,
    )
)
