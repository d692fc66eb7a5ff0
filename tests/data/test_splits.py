"""Which rows train, validate and test; split files; the protocols of benchmarks."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddg.data.images import ImageTable
from feddg.data.splits import (
    ROLES,
    Splits,
    from_csv,
    from_roles,
    hold_out,
    known_domains,
    scenarios,
)
from feddg.errors import DataError, ExperimentError
from split_files import write_csv

NAMES = ("photo", "art_painting", "cartoon", "sketch")


def table_of(counts: np.ndarray, seed: int = 0) -> ImageTable:
    """A table with these counts per domain and class, rows in random order."""
    domains, labels = (np.repeat(ids.ravel(), counts.ravel()) for ids in np.indices(counts.shape))
    order = np.random.default_rng(seed).permutation(len(domains))
    domains, labels = domains[order], labels[order]
    return ImageTable(
        paths=tuple(
            f"{NAMES[d]}/class{y}/{i}.jpg" for i, (d, y) in enumerate(zip(domains, labels))
        ),
        labels=labels,
        domains=domains,
        class_names=tuple(f"class{y}" for y in range(counts.shape[1])),
        domain_names=NAMES[: counts.shape[0]],
        root=Path("images"),
    )


PACS_LIKE = np.array([[189, 202, 432], [379, 255, 449], [389, 457, 405], [772, 80, 160]])


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
    splits = hold_out(table, ["photo"], ["A"], seed=0)
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


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"test": ["skecth"]}, "did you mean 'sketch'"),
        ({"test": ["sketch"], "val": ["S"]}, "'S' is held out for both"),
        ({"test": ["P", "A"], "val": ["C", "S"]}, "No images are left to train on"),
        ({"test": ["P"], "id_val": 0.5, "id_test": 0.5}, "add up to less than 1"),
        ({"test": ["P"], "id_val": -0.1}, "must not be negative"),
    ],
)
def test_impossible_wishes_are_refused(wish: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        hold_out(table_of(PACS_LIKE), **wish, seed=0)


def test_a_held_out_domain_without_images_is_refused() -> None:
    table = table_of(np.array([[3, 3], [0, 0]]))
    with pytest.raises(DataError, match="'art_painting' is to be held out but has no images"):
        hold_out(table, ["art_painting"], seed=0)


def test_csv_round_trip(tmp_path: Path) -> None:
    table = table_of(PACS_LIKE)
    splits = hold_out(table, ["photo"], ["sketch"], seed=0)
    write_csv(table, splits, tmp_path / "split.csv")
    shuffled = np.random.default_rng(1).permutation(len(table))
    again = from_csv(table.take(shuffled), tmp_path / "split.csv")
    for role in ROLES:
        assert sorted(shuffled[getattr(again, role)].tolist()) == getattr(splits, role).tolist()


HEADER = ",split,domain_remapped,domain,category,y,path\n"


def two_images() -> ImageTable:
    ids = np.array([0, 1])
    paths = ("Art Painting/Alarm_Clock/1.jpg", "Real World/Alarm_Clock/2.jpg")
    names = ("Art Painting", "Real World")
    return ImageTable(paths, ids * 0, ids, ("Alarm_Clock",), names, root=Path("images"))


def test_csv_may_spell_folders_differently(tmp_path: Path) -> None:
    file = tmp_path / "split.csv"
    file.write_text(
        HEADER
        + "0,test,1,real_world,Alarm_Clock,0,real_world/alarm clock/2.jpg\n"
        + "1,train,0,art_painting,Alarm_Clock,0,art_painting/Alarm_Clock/1.jpg\n"
    )
    splits = from_csv(two_images(), file)
    assert (splits.train.tolist(), splits.test.tolist()) == ([0], [1])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("0,train,0,a,b,0,Art Painting/Alarm_Clock/1.jpg\n", r"does not list 1 images.*2\.jpg"),
        ("0,train,0,a,b,0,x\n1,train,0,a,b,0,x\n", "lists x twice"),
        ("0,train,0,a,b,0,a/B/x.jpg\n1,test,0,a,b,0,A/b/x.jpg\n", "lists a/b/x.jpg twice"),
        (
            "".join(f"{i},train,0,a,b,0,a/b/{i}.jpg\n" for i in range(5)),
            r"lists 5 images that are not in the data: a/b/0\.jpg, a/b/1\.jpg, a/b/2\.jpg and 2 m",
        ),
        (
            "0,train,0,a,b,0,Art Painting/Alarm_Clock/1.jpg\n"
            "1,oops,0,a,b,0,Real World/Alarm_Clock/2.jpg\n",
            "Unknown split 'oops'",
        ),
        (
            "0,val,0,a,b,0,Art Painting/Alarm_Clock/1.jpg\n"
            "1,test,0,a,b,0,Real World/Alarm_Clock/2.jpg\n",
            "left to train on",
        ),
    ],
)
def test_csv_that_does_not_fit_is_refused(tmp_path: Path, lines: str, message: str) -> None:
    (tmp_path / "split.csv").write_text(HEADER + lines)
    with pytest.raises(DataError, match=message):
        from_csv(two_images(), tmp_path / "split.csv")


def test_csv_may_list_images_known_to_be_bad(tmp_path: Path) -> None:
    table = two_images()
    write_csv(table, from_roles(np.array(["train", "id_val"])), tmp_path / "split.csv")
    left = table.take([0])
    assert from_csv(left, tmp_path / "split.csv", skipped=[table.paths[1]]).train.tolist() == [0]
    with pytest.raises(DataError, match=r"not in the data: Real World/Alarm_Clock/2\.jpg"):
        from_csv(left, tmp_path / "split.csv")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"split,file\ntrain,x\n", "has no column 'path'"),
        (b"", "has no column 'split'"),
        (b"\xff\xfe\x00", "is not UTF-8"),
    ],
)
def test_csv_that_is_none(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "split.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        from_csv(two_images(), tmp_path / "split.csv")


def test_csv_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Cannot read .*nowhere\.csv"):
        from_csv(two_images(), tmp_path / "nowhere.csv")


def test_scenarios_of_pacs() -> None:
    assert scenarios("lodo", NAMES) == [{"test": (name,), "val": ()} for name in NAMES]
    pairs = scenarios("ltdo-all", NAMES)
    assert len(pairs) == 12
    assert {"test": ("photo",), "val": ("art_painting",)} in pairs
    assert all(pair["test"] != pair["val"] for pair in pairs)


# Protocols against the pairs that the papers print.


def pairs(protocol, domains, preset=""):
    found = scenarios(protocol, domains, preset)
    return {(s["val"] + ("",))[0] + ">" + s["test"][0] for s in found}


def test_pardon_s_pairs_of_pacs_and_office_home():
    """Its Table I: validation A, P, C, S beside test P, S, A, C; C, A, R, P beside A, P, C, R."""
    assert pairs("ltdo", known_domains("pacs"), "pacs") == {
        "art_painting>photo",
        "photo>sketch",
        "cartoon>art_painting",
        "sketch>cartoon",
    }
    assert pairs("ltdo", known_domains("office_home"), "office_home") == {
        "Clipart>Art",
        "Art>Product",
        "Real_World>Clipart",
        "Product>Real_World",
    }


@given(st.lists(st.text(min_size=1, max_size=3), min_size=3, max_size=7, unique=True))
def test_every_domain_is_tested_once(domains):
    for protocol in ("lodo", "ltdo"):
        found = scenarios(protocol, domains)
        assert [s["test"] for s in found] == [(name,) for name in domains]
        assert all(not set(s["test"]) & set(s["val"]) for s in found)
    assert sorted(s["val"] for s in scenarios("ltdo", domains)) == sorted((d,) for d in domains)
    assert len(scenarios("ltdo-all", domains)) == len(domains) * (len(domains) - 1)


@pytest.mark.parametrize(
    ("protocol", "domains", "text"),
    [("loddo", ["a", "b"], "did you mean 'lodo'"), ("ltdo", ["a", "b"], "needs 3 domains")],
)
def test_mistakes_are_named(protocol, domains, text):
    with pytest.raises(ExperimentError, match=text):
        scenarios(protocol, domains)
