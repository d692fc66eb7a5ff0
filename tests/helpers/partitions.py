"""Partitions of images, of a line each."""

import numpy as np

from feddg.data import partition as rules
from feddg.data.groups import partitioned_units


def dealing(domains, labels, clients: int, **fields) -> rules.Dealing:
    domains, labels = np.asarray(domains, np.int64), np.asarray(labels)
    return rules.Dealing(domains=domains, labels=labels, clients=clients, **fields)


def partition(*images, scheme: str = "heterogeneous", **fields) -> rules.Partition:
    return rules.partition(scheme, dealing(*images, **fields))


def unit_partition(units, *images, scheme: str = "heterogeneous", **fields) -> rules.Partition:
    return partitioned_units(units, scheme, dealing(*images, **fields))
