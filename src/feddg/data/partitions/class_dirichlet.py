"""By label: each class is dealt out by a Dirichlet draw over the clients, sizes following.

For every class the clients' shares of its images are drawn from Dir(alpha) (Yurochkin et al.,
"Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019; the label skew of Li et
al., "Federated Learning on Non-IID Data Silos", ICDE 2022), so that clients differ in size, too.
Under a domain skew, the draws weigh what a client is to hold of each domain: they are the same in
all domains, and with all clients alike the shares are exactly the papers'.
"""

import numpy as np

from feddg.data.partitions import Dealing, PartitionRule, register_partition


def _owners(dealing: Dealing, shares: np.ndarray, targets: np.ndarray) -> np.ndarray:
    assert dealing.alpha is not None
    random, classes = dealing.random, int(dealing.classes.max()) + 1
    # Normalised gamma variates are a Dirichlet draw; tiny ones that round to zero stay a share.
    drawn = random.gamma(dealing.alpha, size=(dealing.clients, classes)) + 1e-12
    owners = np.empty(len(dealing.domains), dtype=np.int64)
    for rows, target in zip(dealing.rows_by_domain, targets.T):
        for of_class in range(classes):
            own = random.permutation(rows[dealing.classes[rows] == of_class])
            weight = target * drawn[:, of_class]
            bounds = np.round(np.cumsum(weight) / weight.sum() * len(own)).astype(np.int64)
            owners[own] = np.repeat(np.arange(dealing.clients), np.diff(bounds, prepend=0))
    return owners


register_partition(
    PartitionRule(
        name="class_dirichlet",
        kind="labels",
        summary="each class dealt out by a draw with clients.alpha; sizes follow (Yurochkin 2019)",
        decide=_owners,
        setting="alpha",
        keeps_sizes=False,
    )
)
