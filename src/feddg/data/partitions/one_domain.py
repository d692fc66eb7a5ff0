"""By domain: a single domain for every client, and equally many clients for every domain."""

from feddg.data.partitions import Dealing, PartitionRule, register_partition
from feddg.data.shares import Mix, equal_homes


def _mix(dealing: Dealing) -> Mix:
    return Mix(equal_homes(dealing.totals, dealing.clients), 0.0)


register_partition(
    PartitionRule(
        name="domain",
        kind="domains",
        summary="one domain each, equally many clients for every domain",
        decide=_mix,
    )
)
