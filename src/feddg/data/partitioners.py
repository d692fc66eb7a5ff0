"""Flower's partitioners (flwr-datasets): who holds each image of a Hugging Face data set."""

from collections.abc import Mapping
from typing import Any, Protocol

from feddg.errors import DataError, nearest

ROW = "feddg row"
"""Column that tells which image a row of a partition is."""


class Partitioner(Protocol):
    """What is used of a partitioner: flwr-datasets' documented interface."""

    dataset: Any
    """The whole data set; it is set once."""

    @property
    def num_partitions(self) -> int:
        """How many partitions there are."""

    def load_partition(self, partition_id: int) -> Any:
        """Returns the part of the data set that a client holds."""


def clients_of(partitioner: Partitioner, whole: Any) -> list[str]:
    """Returns who holds each row of a data set: the numbers of partitions, as texts.

    Args:
        partitioner: any object with the interface of flwr-datasets' partitioners, new.
        whole: a ``datasets.Dataset``.

    Raises:
        DataError: a row is in none of the partitions, or in two.
    """
    partitioner.dataset = whole.add_column(ROW, list(range(len(whole))))
    owners: dict[int, int] = {}
    for client in range(partitioner.num_partitions):
        for row in partitioner.load_partition(client)[ROW][:]:
            if owners.setdefault(row, client) != client:
                raise DataError(
                    f"The partitioner gives row {row} to the clients {owners[row]} and {client}."
                )
    left = next((row for row in range(len(whole)) if row not in owners), None)
    if left is not None:
        raise DataError(f"The partitioner gives row {left} to nobody.")
    width = len(str(partitioner.num_partitions - 1))
    return [f"{owners[row]:0{width}}" for row in range(len(whole))]


def clients_by_name(said: Mapping[str, Any], whole: Any) -> list[str]:
    """Returns who holds each row, by a partitioner of flwr-datasets.

    Args:
        said: its name, and what it takes.
        whole: a ``datasets.Dataset``.

    Raises:
        DataError: flwr-datasets is not there, or the partitioner cannot be used so.
    """
    try:
        from flwr_datasets import partitioner as known
    except ImportError:
        raise DataError(
            "data.options.partitioner needs Flower's partitioners: `pip install flwr-datasets`."
        ) from None
    # Only what is one of them: an experiment's file must not name any other code.
    names = [name for name in getattr(known, "__all__", dir(known)) if name.endswith("Partitioner")]
    name = str(said.get("name", ""))
    if name not in names:
        raise DataError(
            f"data.options.partitioner: unknown partitioner {name!r}{nearest(name, names)}; there "
            f"are: {', '.join(names)}"
        )
    try:
        made = getattr(known, name)(**{key: value for key, value in said.items() if key != "name"})
        return clients_of(made, whole)
    except DataError:
        raise
    except Exception as error:  # each says in its own way what it lacks
        raise DataError(f"data.options.partitioner: {name} cannot be used so: {error}.") from None
