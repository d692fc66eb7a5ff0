"""By domain: none at all; every client has the global mix (lambda = 1)."""

from feddg.data.partitions import Dealing, PartitionRule, register_partition
from feddg.data.shares import Mix, proportional_homes


def _mix(dealing: Dealing) -> Mix:
    return Mix(proportional_homes(dealing.totals, dealing.clients), 1.0)


register_partition(
    PartitionRule(
        name="iid", kind="domains", summary="the global mix of domains everywhere", decide=_mix
    )
)
