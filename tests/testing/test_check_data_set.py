"""Faults that a stranger's data set may have, each found and named; ours have none."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy
import pytest

from feddg.data.data_set import load_source
from feddg.data.images import ImageTable, from_folder
from feddg.errors import DataError
from feddg.testing import DataSetFault, check_data_set
from published_trees import write_tree


def drawn(root: Path | None = None, *, seed: int = 0) -> ImageTable:
    """Twenty-four images of two classes in three domains."""
    labels, domains = numpy.arange(24) % 2, numpy.arange(24) // 8
    pixels = numpy.random.default_rng(seed).integers(0, 256, (24, 8, 8, 3), numpy.uint8)
    names = tuple(f"{d}/{c}/{i}" for i, (d, c) in enumerate(zip(domains, labels)))
    return ImageTable(names, labels, domains, ("cat", "dog"), ("ink", "oil", "pen"), images=pixels)


def changed(**columns):
    return lambda root: replace(drawn(), **columns)


def global_numbers(root):
    pixels = numpy.random.randint(0, 256, (24, 8, 8, 3))  # noqa: NPY002 - the fault
    return replace(drawn(), images=pixels.astype(numpy.uint8))


def a_copy(row, of, **columns):
    images = drawn().images.copy()
    images[row] = images[of]
    return changed(images=images, **columns)


def grows(root):
    grows.times = getattr(grows, "times", 0) + 1
    return drawn().take(range(24 - grows.times % 2))


def takes_all(root, **options):
    return drawn()


def nothing(root):
    return drawn().take([])


ROLES = numpy.array(["train"] * 16 + ["test"] * 8)
HALF = numpy.full((24, 5), 0.5, numpy.float32)
FAULTS = {
    "global numbers": (global_numbers, "the second time it gives others"),
    "another number each time": (grows, "the second time it gives others"),
    "no images": (nothing, "is no ImageTable with images"),
    "a label out of range": (changed(labels=numpy.arange(24) % 3), "labels must lie in 0..1"),
    "labels that are floats": (changed(labels=drawn().labels / 1.0), "labels are float64"),
    "a domain without a name": (changed(domain_names=("ink", "", "pen")), "domain_names holds ''"),
    "a domain twice": (changed(domain_names=("ink", "pen", "pen")), "holds 'pen' twice"),
    "a row twice": (changed(paths=("ink/cat/0",) * 24), "holds 'ink/cat/0' twice"),
    "names nearly alike": (changed(class_names=("cat", "Cats")), "differ in spelling only"),
    "a domain without images": (
        changed(domain_names=("ink", "oil", "pen", "wax")),
        "The domain 'wax' has no usable image",
    ),
    "a class without images": (
        changed(class_names=("cat", "dog", "elk")),
        "no usable image of the class 'elk'",
    ),
    "floats for pixels": (changed(images=drawn().images / 255), "not uint8"),
    "grey images": (changed(images=drawn().images[..., :1]), "not uint8"),
    "features of nan": (changed(images=HALF * numpy.nan), "finite float32"),
    "copies in two classes": (a_copy(1, of=0), "one of the labels is wrong"),
    "copies in two domains": (a_copy(8, of=0), "it is not unseen"),
    "copies of training images": (a_copy(16, of=0, split=ROLES), "Copies of training images"),
    "an unknown role": (changed(split=numpy.full(24, "exam")), "Unknown split 'exam'"),
    "any option": (takes_all, "an option 'no_such_option': it is taken"),
}


def faults(load, root=None):
    with pytest.raises(DataSetFault) as caught:
        check_data_set(load, root)
    return str(caught.value)


def test_a_planted_fault_is_found_and_said(subtests):
    for fault in FAULTS:
        with subtests.test(fault=fault):
            load, words = FAULTS[fault]
            assert words in faults(load)


def test_faults_of_a_folder_are_found_and_said(tmp_path):
    root = write_tree(tmp_path, ("ink", "oil"), ("cat", "dog"))

    def loses_the_folder(root):
        return from_folder(root) if root.exists() else from_folder(tmp_path)

    def speaks_of_a_key(root):
        return from_folder(root) if root.exists() else {}[str(root)]

    def speaks_of_nothing(root):
        if root.exists():
            return from_folder(root)
        raise DataError("no images")

    assert "a folder 'not there': it is taken" in faults(loses_the_folder, root)
    assert "a folder 'not there': KeyError" in faults(speaks_of_a_key, root)
    assert "a folder 'not there': DataError: no images" in faults(speaks_of_nothing, root)
    first = min(root.rglob("*.*"))
    first.with_stem("torn").write_bytes(first.read_bytes()[:40])
    assert "torn" in faults(partial(load_source, "folder"), root)


def test_data_sets_without_faults_have_none():
    check_data_set(drawn)
    features = numpy.random.default_rng(0).normal(size=(24, 5)).astype(numpy.float32)
    check_data_set(changed(images=features))


def test_those_of_the_package_have_none_but_a_moon_that_is_a_circle():
    check_data_set(partial(load_source, "digits"))
    found = faults(partial(load_source, "emoji"))
    assert "has 1 fault" in found
    assert "mono/nature/1f311 = mono/symbols/1f534" in found
