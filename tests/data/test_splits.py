"""Which rows train, validate and test."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddg.data.splits import (
    ROLES,
    Splits,
    hold_out,
)
from feddg.errors import DataError
from split_files import PACS_LIKE, table_of


def all_rows(splits: Splits) -> list[int]:
    return sorted(np.concatenate([getattr(splits, role) for role in ROLES]).tolist())


def test_leave_one_domain_out() -> None:
    table = table_of(PACS_LIKE)
    splits = hold_out(table, ["sketch"], seed=0)
    assert set(table.domains[splits.test].tolist()) == {3}
    assert len(splits.test) == PACS_LIKE[3].sum()
    assert len(splits.val) == 0
    for role in ("train", "id_val", "id_test"):
        assert set(table.domains[getattr(splits, role)].tolist()) == {0, 1, 2}
    assert all_rows(splits) == list(range(len(table)))


def test_leave_two_domains_out() -> None:
    table = table_of(PACS_LIKE)
    splits = hold_out(table, ["photo"], ["art_painting"], seed=0)
    assert splits.test.tolist() == np.flatnonzero(table.domains == 0).tolist()
    assert splits.val.tolist() == np.flatnonzero(table.domains == 1).tolist()
    assert set(table.domains[splits.train].tolist()) == {2, 3}
    assert all(getattr(splits, role).dtype == np.int64 for role in ROLES)


counts_tables = st.tuples(
    st.integers(2, 4), st.integers(1, 6), st.integers(0, 2**16), st.integers(1, 60)
).map(lambda s: np.random.default_rng(s[2]).integers(0, s[3] + 1, (s[0], s[1])))


@given(counts_tables, st.integers(0, 9), st.integers(0, 10), st.integers(0, 99))
def test_in_domain_shares_are_stratified(
    counts: np.ndarray, val_twentieths: int, test_twentieths: int, seed: int
) -> None:
    counts[:, 0] += 2  # something to train on in every domain
    shares = {"id_val": val_twentieths / 20, "id_test": test_twentieths / 20}
    table = table_of(counts, seed)
    splits = hold_out(table, ["photo"], seed=seed, **shares)
    assert all_rows(splits) == list(range(len(table)))
    trained = table.take(splits.train).counts()
    assert (trained[1:][counts[1:] > 0] >= 1).all(), "the last of a class in a domain trains"
    for role, share in shares.items():
        found = table.take(getattr(splits, role)).counts()
        assert (found[0] == 0).all()
        assert (found[1:] <= np.ceil(counts[1:] * share - 1e-9)).all()
        assert (found.sum(axis=1)[1:] <= np.ceil(counts.sum(axis=1)[1:] * share)).all()


def test_in_domain_totals_are_exact_where_there_is_room() -> None:
    # 10 classes of 9 images: a twentieth of each is 0.45, of the domain 4.5 (rounds to even: 4).
    table = table_of(np.full((2, 10), 9))
    splits = hold_out(table, ["photo"], id_val=0.05, id_test=0.10, seed=0)
    assert (len(splits.id_val), len(splits.id_test)) == (4, 9)
    by_class = table.take(splits.id_test).counts()[1]
    assert by_class.max() == 1
    # 0.29 * 100 is 28.999999999999996 in floating point.
    exact = hold_out(table_of(np.full((2, 1), 100)), ["photo"], id_val=0.29, seed=0)
    assert len(exact.id_val) == 29


def test_left_overs_do_not_all_go_to_the_first_classes() -> None:
    table = table_of(np.full((2, 10), 9))
    chosen = [
        tuple(table.labels[hold_out(table, ["photo"], seed=seed).id_val].tolist())
        for seed in range(8)
    ]
    assert len({tuple(sorted(classes)) for classes in chosen}) > 1


def test_an_images_role_does_not_depend_on_the_scenario() -> None:
    table = table_of(PACS_LIKE)
    one, two = hold_out(table, ["photo"], seed=4), hold_out(table, ["sketch"], ["photo"], seed=4)
    for role in ("train", "id_val", "id_test"):
        rows = getattr(one, role)
        assert rows[table.domains[rows] < 3].tolist() == getattr(two, role).tolist()


def test_seed_decides_the_in_domain_split() -> None:
    table = table_of(PACS_LIKE)
    first, again, other = (hold_out(table, ["photo"], seed=s).id_val.tolist() for s in (0, 0, 1))
    assert first == again
    assert first != other


def test_no_in_domain_parts() -> None:
    splits = hold_out(table_of(PACS_LIKE), ["photo"], id_val=0, id_test=0, seed=0)
    assert len(splits.id_val) == len(splits.id_test) == 0


def test_impossible_wishes_are_refused(subtests: pytest.Subtests) -> None:
    for wish, message in [
        ({"test": ["skecth"]}, "did you mean 'sketch'"),
        ({"test": ["sketch"], "val": ["sketch"]}, "'sketch' is held out for both"),
        (
            {"test": ["photo", "art_painting"], "val": ["cartoon", "sketch"]},
            "No images are left to train on",
        ),
        ({"test": ["photo"], "id_val": 0.5, "id_test": 0.5}, "add up to less than 1"),
        ({"test": ["photo"], "id_val": -0.1}, "must not be negative"),
    ]:
        with subtests.test(message=message), pytest.raises(DataError, match=message):
            hold_out(table_of(PACS_LIKE), **wish, seed=0)


def test_a_held_out_domain_without_images_is_refused() -> None:
    table = table_of(np.array([[3, 3], [0, 0]]))
    with pytest.raises(DataError, match=r"'art_painting' .* no images"):
        hold_out(table, ["art_painting"], seed=0)
