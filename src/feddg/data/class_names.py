"""Names of the classes and domains of a program's own data sets: found, and joined.

torchvision's ``ImageFolder`` numbers the classes that its folder has: where sites lack some, one
number means another class at each of them. So labels are compared by name where there are names.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy
from torch.utils.data import ConcatDataset, Dataset, Subset

from feddg.data.images import plain_name
from feddg.diagnostics import warn
from feddg.errors import ExperimentError, first_names

Numbered = Mapping[int, str]
"""Names of classes by their numbers in one data set."""
REMEDY = "give class_names=[...], all classes in the order of the model's logits"


def own_names(dataset: object) -> Numbered | None:
    """Returns what a data set itself says in ``class_to_idx`` or ``classes``, or None."""
    numbers, names = (getattr(dataset, name, None) for name in ("class_to_idx", "classes"))
    if isinstance(numbers, Mapping) and numbers:
        pairs = [(int(number), str(name)) for name, number in numbers.items()]
        return dict(sorted(dict(reversed(pairs)).items()))  # of several names the first
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return None
    return dict(enumerate(names)) or None


def tables_of(dataset: object, labels: numpy.ndarray) -> list[Numbered | None]:
    """Returns for each label ``(n,)`` of a data set the names by which it is to be read, or None.

    They may stand in a data set inside: of ``Subset``, ``ConcatDataset``, or another one that holds
    a single data set of its length. Where labels were changed on the way, as by
    ``target_transform``, they have no names.
    """
    known: dict[int, Numbered | None] = {}
    places = [_named(dataset, index, own_names, known) for index in range(len(labels))]
    for place, label in zip(places, labels.tolist()):
        if place is not None and _label_in(*place[:2], dataset, label) != label:
            known[id(place[0])] = None
    return [None if place is None else known[id(place[0])] for place in places]


def own_domains(dataset: Any) -> Sequence[str] | None:
    """Returns what a data set itself says in ``domains``, if that is one for each of its images."""
    given: Any = getattr(dataset, "domains", None)
    if not hasattr(given, "__len__") or len(given) != len(dataset):
        return None
    return [str(name) for name in (given.tolist() if hasattr(given, "tolist") else given)]


def domains_of(dataset: object, targets: numpy.ndarray, where: str) -> list[str | None]:
    """Returns the name of the domain of each image; None where no data set inside names one.

    A data set that holds another one of its length may have it in another order: its domains count
    only if all targets are alike.

    Args:
        dataset: the data set.
        targets: its labels or targets ``(n, ...)``.
        where: whose it is, for a warning.
    """
    known: dict[int, Any] = {}
    places = [_named(dataset, index, own_domains, known) for index in range(len(targets))]
    for place, target in zip(places, targets):
        if place is None or place[2] or known[id(place[0])][place[1]] is None:
            continue
        with suppress(TypeError, ValueError, IndexError, KeyError, RuntimeError):
            if numpy.array_equal(numpy.ravel(place[0][place[1]][1]), numpy.ravel(target)):
                continue
        known[id(place[0])] = [None] * len(place[0])
        warn(
            "domains-not-used",
            f"A data set inside {where}'s names domains, but has other targets, so its images may "
            "be in another order: these domains are not used.",
            "Give the outer data set an attribute domains, one name an image.",
        )
    return [None if place is None else known[id(place[0])][place[1]] for place in places]


def _label_in(named: Any, place: int, outer: Any, label: int) -> int | None:
    """Returns the label of an image in the data set that names it; None if it is not known."""
    with suppress(TypeError, ValueError, IndexError, KeyError):
        targets = getattr(named, "targets", None)
        if targets is not None and len(targets) == len(named):
            return int(targets[place])
        if named is not outer:
            return int(named[place][1])
        if getattr(named, "target_transform", None) is None:
            return label
    return None


def _named(
    dataset: Any, index: int, own: Callable[[Any], object], known: dict[int, Any]
) -> tuple[Any, int, bool] | None:
    """Returns the data set inside that names something of an image, and the image's number there.

    Also whether the number is certain: a data set around it may have an order of its own.

    Args:
        dataset: the data set.
        index: the image's number in it.
        own: what a data set names itself; None for nothing.
        known: gets what each data set inside names, by its identity.
    """
    if id(dataset) not in known:
        known[id(dataset)] = own(dataset)
    if known[id(dataset)] is not None:
        return dataset, index, True
    if isinstance(dataset, Subset):
        return _named(dataset.dataset, int(dataset.indices[index]), own, known)
    if isinstance(dataset, ConcatDataset):
        part = bisect_right(dataset.cumulative_sizes, index)
        first = dataset.cumulative_sizes[part - 1] if part else 0
        return _named(dataset.datasets[part], index - first, own, known)
    attributes = getattr(dataset, "__dict__", {}).values()
    inner: list[object] = [value for value in attributes if isinstance(value, Dataset)]
    alike = len(inner) == 1 and hasattr(inner[0], "__len__") and len(inner[0]) == len(dataset)
    found = _named(inner[0], index, own, known) if alike else None
    return found and (*found[:2], False)


def joined(
    tables: Sequence[tuple[str, Numbered | None]], classes: int | None = None
) -> tuple[str, ...]:
    """Returns the names of all classes in the order of their common numbers; none if none has any.

    That is the order of the first data set that has all of them; else they are sorted.

    Args:
        tables: who has which names; None for one without, whose numbers are taken to be those of
            the others if these all name as many classes as there are.
        classes: how many there are; None if that is not known.

    Raises:
        ExperimentError: some have no names, and those of the others differ; names differ in
            spelling only; or two classes have one.
    """
    named = [(where, table) for where, table in tables if table is not None]
    without = [where for where, table in tables if table is None]
    spelt: dict[str, tuple[str, str, Numbered]] = {}
    for where, table in named:
        if twice := [name for name, count in Counter(table.values()).items() if count > 1]:
            raise ExperimentError(
                f"{where} calls two classes {twice[0]!r}, which are told apart by their names: "
                f"{REMEDY}"
            )
        for name in table.values():
            other, there, theirs = spelt.setdefault(plain_name(name), (name, where, table))
            if name not in theirs.values() and other not in table.values():
                raise ExperimentError(
                    f"{where} has a class {name!r}, and {there} {other!r}: call one class the same "
                    "everywhere"
                )
    names = sorted({name for _, table in named for name in table.values()})
    whole = (list(table.values()) for _, table in named if [*table] == [*range(len(names))])
    order = next((listed for listed in whole if sorted(listed) == names), names)
    alike = all(dict(table) == dict(enumerate(order)) for _, table in named)
    if without and named and not (alike and len(order) == classes):
        raise ExperimentError(
            f"{without[0]} does not name its classes, as others do that number theirs in several "
            f"ways or lack some: {REMEDY}"
        )
    return tuple(order)


def renumbered(
    labels: numpy.ndarray, tables: Sequence[Numbered | None], names: Sequence[str], where: str
) -> numpy.ndarray:
    """Returns labels ``(n,)`` as positions in ``names``, by the names that each of them has.

    Args:
        labels: the labels.
        tables: the names by which each is to be read; one without stays as it is.
        names: all classes.
        where: whose they are, for messages.

    Raises:
        ExperimentError: a class is not among them.
    """
    place = {name: number for number, name in enumerate(names)}
    numbers = labels.copy()
    for index, (label, table) in enumerate(zip(labels.tolist(), tables, strict=True)):
        if table is None:
            continue
        if label not in table:
            raise ExperimentError(
                f"{where}, image {index} has label {label}, and its data set names the classes "
                f"{first_names([f'{number} {name}' for number, name in table.items()])}"
            )
        if table[label] not in place:
            raise ExperimentError(
                f"{where}, image {index} is of the class {table[label]!r}, which is none of the "
                f"federation's: {first_names(names)}; {REMEDY}"
            )
        numbers[index] = place[table[label]]
    return numbers
