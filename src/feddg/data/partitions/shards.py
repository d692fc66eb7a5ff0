"""By label: images sorted by class are cut into shards, and each client gets a few of them.

With one domain and clients of one size these are the shards of McMahan et al.,
"Communication-Efficient Learning of Deep Networks from Decentralized Data" (AISTATS 2017), which
the field calls the pathological split: two shards for each of 100 clients. Under a domain or size
skew a client's images of every domain come in as many shards, in the same order in all domains, so
that it holds the same few classes everywhere.
"""

import numpy as np

from feddg.data.partitions import Dealing, PartitionRule, register_partition
from feddg.data.shares import deal_by_shares
from feddg.errors import DataError


def _owners(dealing: Dealing, shares: np.ndarray, targets: np.ndarray) -> np.ndarray:
    assert dealing.shards is not None
    random, each = dealing.random, dealing.shards
    if dealing.clients * each > len(dealing.labels):
        raise DataError(
            f"{dealing.clients} clients with {each} shards each need at least "
            f"{dealing.clients * each} training images; there are {len(dealing.labels)}. Use fewer "
            "shards or fewer clients."
        )
    # Which client holds each shard, in the order in which they lie along the sorted images.
    order = random.permutation(dealing.clients * each)

    def arrange(places: np.ndarray, classes: np.ndarray) -> np.ndarray:
        held = np.bincount(places, minlength=dealing.clients)
        client, number = np.divmod(order, each)
        sizes = held[client] // each + (number < held[client] % each)
        return np.repeat(client, sizes)

    return deal_by_shares(dealing.rows_by_domain, shares, random, dealing.classes, arrange)


register_partition(
    PartitionRule(
        name="shards",
        kind="labels",
        summary="clients.shards runs of images sorted by class each (McMahan 2017: 2)",
        decide=_owners,
        setting="shards",
        aliases=("pathological",),
    )
)
