"""By nature: a client is who really holds the data: a patient, a site, a writer, a camera."""

import numpy as np

from feddg.data.partitions import Dealing, PartitionRule, register_partition
from feddg.errors import DataError


def _known(dealing: Dealing) -> np.ndarray:
    if dealing.holders is None:
        raise DataError(
            "clients.partition client needs to know who holds each image, and these images do not "
            "say: give a table with the column client (--data table), or choose another partition."
        )
    return dealing.holders


def _number(dealing: Dealing) -> int:
    return len(np.unique(_known(dealing)))


def _owners(dealing: Dealing) -> np.ndarray:
    owners: np.ndarray = np.unique(_known(dealing), return_inverse=True)[1]
    return owners.astype(np.int64)


register_partition(
    PartitionRule(
        name="client",
        kind="whole",
        summary="who really holds the data, as the images say: as many clients as there are",
        decide=_owners,
        number=_number,
        aliases=("natural",),
    )
)
