"""FINCH: clustering without parameters, by first neighbours.

Sarfraz, Sharma and Stiefelhagen, "Efficient Parameter-free Clustering Using First Neighbor
Relations" (CVPR 2019). Each point is linked to its nearest neighbour by cosine; connected points
are a cluster; the means of the clusters are clustered likewise, until one cluster would be left.
"""

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

_SIMILARITIES_AT_ONCE = 2**22


@dataclass(frozen=True)
class Finch:
    """Partitions of n points, from the finest to the coarsest.

    Attributes:
        partitions: one or more; each ``(n,)`` int64 labels, counted from 0 in the order in which
            the clusters first appear. Each is made of whole clusters of the one before.
    """

    partitions: tuple[np.ndarray, ...]

    @property
    def finest(self) -> np.ndarray:
        """The partition with the most clusters."""
        return self.partitions[0]

    @property
    def coarsest(self) -> np.ndarray:
        """The partition with the fewest clusters: two or more, unless the finest has one."""
        return self.partitions[-1]


def finch(vectors: np.ndarray) -> Finch:
    """Clusters vectors by cosine similarity, exactly, in float64.

    The result depends on the set of vectors only: reordering the rows reorders the labels and
    changes no cluster, because equally near neighbours are told apart by their values, not by
    their position. Equal rows always share a cluster. The similarity to a zero vector is 0.

    A level that would leave a single cluster is not kept, unless it is the first. (The authors'
    other stopping rules never apply: every further level at least halves the number of clusters.)

    Args:
        vectors: ``(n, d)`` finite numbers, n at least 1. Beside a float64 copy, memory grows with
            n only.

    Raises:
        ValueError: there are no vectors, or they are not finite.
    """
    points = np.array(vectors, dtype=np.float64, order="C")
    if points.ndim != 2 or points.size == 0 or not np.isfinite(points).all():
        raise ValueError("FINCH needs at least one vector, all of them finite")
    order, of_row, copies = _distinct(points)
    sums = points[order]
    sums *= copies[:, None]
    labels = _linked(_first_neighbors(sums, alone=copies == 1))
    partitions: list[np.ndarray] = []
    while not partitions or labels.max() > 0:
        of_row = labels[of_row]
        partitions.append(_in_order_of_appearance(of_row))
        members = csr_array((np.ones(len(labels)), (labels, np.arange(len(labels)))))
        sums = members @ sums
        labels = _linked(_first_neighbors(sums))
    return Finch(tuple(partitions))


def _distinct(points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds the distinct rows, in an order (of their bytes) that depends on their values alone.

    Returns:
        Where each distinct row stands, which one each row is, and how often each occurs.
    """
    points += 0.0  # -0.0 equals 0.0, but its bytes differ
    rows = points.view(np.dtype((np.void, points.shape[1] * points.itemsize))).ravel()
    _, order, of_row, copies = np.unique(
        rows, return_index=True, return_inverse=True, return_counts=True
    )
    return order, of_row, copies


def _first_neighbors(vectors: np.ndarray, alone: np.ndarray | None = None) -> np.ndarray:
    """Finds each vector's most similar other one; a vector with a copy is its own neighbour."""
    count = len(vectors)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(lengths > 0, lengths, 1)
    neighbors = np.arange(count)
    if count == 1:
        return neighbors
    step = max(1, _SIMILARITIES_AT_ONCE // count)
    for start in range(0, count, step):
        block = np.arange(start, min(start + step, count))
        similarity = unit[block] @ unit.T
        similarity[block - start, block] = -np.inf
        neighbors[block] = similarity.argmax(axis=1)
    return neighbors if alone is None else np.where(alone, neighbors, np.arange(count))


def _linked(neighbors: np.ndarray) -> np.ndarray:
    """Labels the connected components of the links from each point to its neighbour."""
    count = len(neighbors)
    links = csr_array((np.ones(count), (np.arange(count), neighbors)), shape=(count, count))
    _, labels = connected_components(links, directed=False)
    return np.asarray(labels, np.int64)


def _in_order_of_appearance(labels: np.ndarray) -> np.ndarray:
    _, first, compact = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[compact]
