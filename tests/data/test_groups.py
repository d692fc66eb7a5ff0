"""Groups: a patient's images keep one role and one client, whatever the partition."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feddg.data.groups import about_groups, roles_of_units, units_of, with_groups
from feddg.data.images import ImageTable, from_folder
from feddg.data.partition import PARTITIONS, PartitionRule, register_partition
from feddg.data.splits import hold_out
from feddg.errors import DataError

pytest.importorskip("pydicom", reason="DICOM is an optional extra")

from dicoms import dicom
from partitions import unit_partition

SCHEMES = (
    {"scheme": "iid"},
    {"scheme": "domain"},
    {"scheme": "heterogeneous", "heterogeneity": 0.3},
    {"scheme": "heterogeneous", "alpha": 0.5},
    {"scheme": "class_dirichlet", "alpha": 0.5},
    {"scheme": "iid", "quantity_alpha": 0.5},
    {"scheme": "iid", "shards": 2},
)


def table_of(groups, domains=3, classes=2, seed=0, mixed=True):
    """Images of some groups; a group has a domain, and one class unless ``mixed``."""
    random = np.random.default_rng(seed)
    groups = np.asarray(groups)
    home = random.permutation(np.arange(groups.max() + 1) % domains)  # enough for each client
    label = random.integers(classes, size=groups.max() + 1)
    labels = random.integers(classes, size=len(groups)) if mixed else label[groups]
    return ImageTable(
        tuple(f"{row}.png" for row in range(len(groups))),
        labels,
        home[groups],
        tuple(map(str, range(classes))),
        tuple("abcdefgh"[:domains]),
        images=np.zeros((len(groups), 8, 8, 3), np.uint8),
        groups=groups.astype(str),
    )


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(30, 120),
    id_val=st.sampled_from([0.05, 0.2]),
    mixed=st.booleans(),
)
def test_no_group_is_on_two_sides_or_at_two_clients(seed, count, id_val, mixed):
    random = np.random.default_rng(seed)
    table = table_of(random.integers(count, size=8 * count), seed=seed, mixed=mixed)
    units = units_of(table)
    roles = roles_of_units(table, units, id_val, 0.1, seed)
    splits = hold_out(table, ["a"], id_val=id_val, id_test=0.1, seed=seed, own=roles)
    domain_of = {}
    for role in ("train", "id_val", "id_test"):
        for group in np.unique(table.groups[getattr(splits, role)]):
            assert domain_of.setdefault(group, role) == role
    rows = splits.train
    for options in SCHEMES:
        share = unit_partition(
            units[rows], table.domains[rows], table.labels[rows], 4, seed=seed, **options
        )
        pairs = set(zip(table.groups[rows].tolist(), share.owners.tolist()))
        assert len(pairs) == len(np.unique(table.groups[rows]))
        assert share.sizes.min() > 0
    assert not list(about_groups(table, splits, share.owners))


def test_strata_are_as_even_as_groups_allow():
    table = table_of(np.repeat(np.arange(300), 5), mixed=False)
    roles = roles_of_units(table, units_of(table), 0.2, 0.1, seed=0)
    for domain in range(3):
        for label in range(2):
            cell = (table.domains == domain) & (table.labels == label)
            for role, share in (("id_val", 0.2), ("id_test", 0.1)):
                # Whole groups of five images: at most half of one away, and one where halves tie.
                assert abs((roles[cell] == role).sum() - share * cell.sum()) <= 5


def test_a_domain_of_five_groups_has_one_for_each_share_and_the_last_of_a_class_trains():
    table = table_of(np.repeat(np.arange(5), 20), domains=1)
    roles = roles_of_units(table, units_of(table), 0.05, 0.05, seed=0)
    assert [len(np.unique(table.groups[roles == r])) for r in ("train", "id_val", "id_test")] == [
        *(3, 1, 1)
    ]
    # Two groups, a class each: neither may leave training.
    table = table_of([0] * 10 + [1] * 10, domains=1)
    table.labels[:] = [0] * 10 + [1] * 10
    assert set(roles_of_units(table, units_of(table), 0.4, 0.4, seed=0)) == {"train"}


@pytest.mark.parametrize(
    "images",
    [
        [[20, 0, 0]] * 4 + [[10, 2, 0], [10, 0, 2]],
        [[0, 1, 0], [0, 0, 1], [0, 0, 1], [0, 0, 1], [1, 0, 1]],
    ],
)
def test_groups_that_have_to_train_take_no_share_away(images, caplog):
    counts = np.array(images)
    labels = np.concatenate([np.repeat(range(3), own) for own in counts])
    groups = np.repeat(np.arange(len(counts)), counts.sum(axis=1))
    table = replace(table_of(groups, domains=1, classes=3), labels=labels)
    for seed in range(30):
        roles = roles_of_units(table, units_of(table), 0.05, 0.05, seed)
        assert set(roles) == {"train", "id_val", "id_test"}
        assert set(labels[roles == "train"]) == {0, 1, 2}
    assert not caplog.records
    alone = replace(table_of(np.arange(6), domains=1, classes=6), labels=np.arange(6))
    assert set(roles_of_units(alone, units_of(alone), 0.2, 0.2, 0)) == {"train"}
    assert "No group of a can be spared for in-domain validation or test" in caplog.text


def test_copies_of_an_image_join_their_groups():
    table = table_of([0, 0, 1, 1, 2, 2], domains=1, classes=1)
    units = units_of(table, ["a", "b", "b", "c", "", ""])
    assert units.tolist() == [0, 0, 0, 0, 1, 1]
    assert units_of(table).tolist() == [0, 0, 1, 1, 2, 2]


def test_groups_at_two_sites_are_counted_in_one_warning():
    table = table_of(np.repeat(np.arange(6), 4), domains=2)
    table.domains[:] = [*[0] * 12, *[1] * 12]
    table.domains[[0, 4]] = 1  # two of six patients were at both hospitals
    roles = roles_of_units(table, units_of(table), 0.2, 0, seed=0)
    splits = hold_out(table, ["b"], id_val=0.2, id_test=0, seed=0, own=roles)
    (warning,) = about_groups(table, splits, np.zeros(len(splits.train), int))
    assert warning.code == "groups-on-both-sides"
    assert "2 have images that train and" in warning.text
    assert "2 are in several domains" in warning.text


def test_fewer_groups_than_clients_are_refused():
    with pytest.raises(DataError, match="3 groups"):
        unit_partition(np.arange(3), np.zeros(3, int), np.zeros(3, int), 4, seed=0)
    units, domains = np.array([0, 0, 0, 0, 1, 2, 3, 4]), np.array([0, 0, 0, 0, 1, 1, 1, 1])
    with pytest.raises(DataError, match="2 clients cannot share a domain of 1 groups"):
        unit_partition(units, domains, np.zeros(8, int), 4, seed=0, scheme="domain")


@pytest.mark.parametrize(
    ("pattern", "groups"),
    [("folder", ["a/x", "a/x", "b/y"]), (r"(?P<group>P\d+)_", ["P1", "P2", "P1"])],
)
def test_paths_say_the_group(pattern, groups):
    table = table_of([0, 1, 2], domains=1)
    object.__setattr__(table, "paths", ("a/x/P1_0.png", "a/x/P2_0.png", "b/y/P1_1.png"))
    assert with_groups(table, pattern).groups.tolist() == groups


def test_groups_of_a_table_can_be_left_out():
    assert with_groups(table_of([0, 1, 1], domains=1), "none").groups is None


@pytest.mark.parametrize(
    ("ids", "kept"),
    [
        ((("A", "A", "B"), ("C", "C", "D")), True),
        ((("ANON",) * 3, ("ANON",) * 3), False),
        ((("A", "A", "B"), ("ANON",) * 3), False),
        ((("A", "B", "C"), ("D", "E", "F")), False),
    ],
)
def test_patients_of_dicom_files_are_groups_where_their_ids_tell_them_apart(
    ids, kept, tmp_path, caplog
):
    for domain, own in zip("ab", ids):
        for number, patient in enumerate(own):
            file = tmp_path / domain / f"{'xy'[number % 2]}" / f"{number}.dcm"
            file.parent.mkdir(parents=True, exist_ok=True)
            dicom(file, np.full((8, 8), number, np.uint8), PatientID=patient)
    table = with_groups(from_folder(tmp_path), None)
    assert (table.groups is not None) == kept
    if kept:
        assert len(set(table.groups)) == 4
        assert all(name.isdecimal() and int(name) < 6 for name in table.groups)  # no hash of an ID
    mixed = ids[0] != ids[1] and "ANON" in ids[1]
    assert ("All DICOM files of 'b' have one patient's ID" in caplog.text) == mixed


@pytest.mark.parametrize(
    ("pattern", "words"),
    [("(", "no regular"), ("png", "a part called group"), ("(?P<group>Q)", "no group in")],
)
def test_a_pattern_that_cannot_serve_is_refused(pattern, words):
    with pytest.raises(DataError, match=words):
        with_groups(table_of([0, 1, 2], domains=1), pattern)


def test_a_rule_sees_who_holds_each_unit(monkeypatch):
    seen = []

    def decide(dealing):
        seen.append(dealing.holders)
        return np.arange(len(dealing.domains))

    monkeypatch.setattr(PARTITIONS, "_found", dict(PARTITIONS.items()))
    register_partition(PartitionRule(name="held", kind="whole", summary="by holder", decide=decide))
    units, zeros = np.array([0, 0, 1, 1]), np.zeros(4, int)
    holders = np.array(["a", "a", "b", "b"])
    found = unit_partition(units, zeros, zeros, 2, scheme="held", holders=holders, seed=0)
    assert seen[0].tolist() == ["a", "b"]
    assert found.owners.tolist() == [0, 0, 1, 1]
