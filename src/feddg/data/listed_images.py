"""Images that a file lists, or that are drawn: rows with names become an ``ImageTable``."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from feddg.data.images import ImageTable


def listed_images(
    root: Path,
    paths: Iterable[str],
    labels: Sequence[str],
    domains: Sequence[str],
    *,
    listed_in: str,
    split: Sequence[str] | None = None,
    clients: Sequence[str] | None = None,
    listed_rows: Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
    domain_names: Sequence[str] | None = None,
) -> ImageTable:
    """Returns the table of images that are listed with the names of their class and domain.

    Args:
        root: where the paths start.
        paths: of the images, below ``root``.
        labels: the class of each.
        domains: the domain of each.
        listed_in: the file that lists them.
        split: the role of each; None where there is none.
        clients: who holds each; None where nobody knows.
        listed_rows: the row of each in that file, as a person counts; None for no telling.
        class_names: in the order of labels; sorted by default.
        domain_names: in their order; sorted by default.
    """
    class_names = tuple(class_names or sorted(set(labels)))
    domain_names = tuple(domain_names or sorted(set(domains)))
    return ImageTable(
        paths=tuple(paths),
        labels=positions(labels, class_names),
        domains=positions(domains, domain_names),
        class_names=class_names,
        domain_names=domain_names,
        root=root,
        split=None if split is None else np.array(split),
        clients=None if clients is None else np.array(clients),
        listed_in=listed_in,
        listed_rows=None if listed_rows is None else np.array(listed_rows, dtype=np.int64),
    )


def roles_of_domains(roles: Sequence[str], domains: Sequence[str]) -> list[str]:
    """Returns roles as they are meant: in a domain that trains, ``val`` and ``test`` are in-domain.

    Args:
        roles: of each image: train, val, test, id_val or id_test.
        domains: of each image.
    """
    training = {domain for domain, role in zip(domains, roles) if role == "train"}
    return [
        f"id_{role}" if domain in training and role in ("val", "test") else role
        for domain, role in zip(domains, roles)
    ]


def positions(names: Sequence[str], among: Sequence[str]) -> np.ndarray:
    """Returns ``(n,)`` int64: the place of each name among others.

    Raises:
        KeyError: a name is not among them.
    """
    place = {name: index for index, name in enumerate(among)}
    return np.array([place[name] for name in names], dtype=np.int64)
