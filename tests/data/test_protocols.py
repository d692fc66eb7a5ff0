"""Split files, and which domains benchmarks hold out."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import published_trees
from feddg.data.data_set import DATA_SETS, load_source
from feddg.data.images import ImageTable
from feddg.data.protocols import from_csv, known_domains, scenarios
from feddg.data.splits import ROLES, from_roles, hold_out
from feddg.diagnostics import collected
from feddg.errors import DataError, ExperimentError
from split_files import NAMES, PACS_LIKE, table_of, write_csv


def test_csv_round_trip(tmp_path: Path) -> None:
    table = table_of(PACS_LIKE)
    splits = hold_out(table, ["photo"], ["sketch"], seed=0)
    write_csv(table, splits, tmp_path / "split.csv")
    shuffled = np.random.default_rng(1).permutation(len(table))
    again = from_csv(table.take(shuffled), tmp_path / "split.csv")
    for role in ROLES:
        assert sorted(shuffled[getattr(again, role)].tolist()) == getattr(splits, role).tolist()


def with_lists(root: Path, place: str) -> tuple[Path, dict[str, str]]:
    """PACS as published, with its lists; and the role that they give each image."""
    images = published_trees.pacs(root) / "kfold"
    lists, roles = root / place, {}
    lists.mkdir(parents=True, exist_ok=True)
    for domain in DATA_SETS["pacs"].domains:
        lines: dict[str, list[str]] = {"train": [], "crossval": [], "test": []}
        for label, kind in enumerate(DATA_SETS["pacs"].classes, start=1):
            for number, file in enumerate(sorted((images / domain / kind).iterdir())):
                path = f"{domain}/{kind}/{file.name}"
                part, roles[path] = ("crossval", "id_val") if number else ("train", "train")
                for of in (part, "test"):
                    lines[of].append(f"{path} {label}")
        for part, own in lines.items():
            (lists / f"{domain}_{part}_kfold.txt").write_text("\n".join(own) + "\n")
    return images, roles


@pytest.mark.parametrize("place", ["kfold", ".", "splits"])
def test_official_lists_are_read_on_request(tmp_path: Path, place: str) -> None:
    root, roles = with_lists(tmp_path, place)
    plain = load_source("pacs", root)
    assert plain.split is None
    table = load_source("pacs", root, official_lists=True)
    assert table.split is not None
    assert table.paths == plain.paths
    assert dict(zip(table.paths, table.split.tolist())) == roles
    splits = hold_out(table, ["photo"], seed=0, own=table.split)
    held = [path for path in table.paths if path.startswith("photo/")]
    assert [table.paths[row] for row in splits.test] == held  # all of them, as the test list says
    assert {roles[table.paths[row]] for row in splits.id_val} == {"id_val"}
    assert not len(splits.id_test)


def test_official_lists_that_do_not_fit_are_refused(subtests, tmp_path_factory):
    for file, change, message in [
        ("photo_train", None, r"no photo_train_kfold\.txt in .*official_lists=false"),
        ("photo_train", lambda text: text.replace(" 1", " one"), "expected .* a label"),
        ("photo_train", lambda text: text.replace(" 1", " 2", 1), "line 2 of .* a label"),
        ("photo_crossval", lambda text: text.replace("_1.png", "_0.png"), "is for training, too"),
        ("all", lambda text: text.partition("\n")[2], "lack 1 images of"),
    ]:
        with subtests.test(file=file, message=message):
            tmp_path = tmp_path_factory.mktemp("case")
            root, _ = with_lists(tmp_path, "kfold")
            names = ("photo_train", "photo_test") if file == "all" else (file,)
            for path in (root / f"{name}_kfold.txt" for name in names):
                path.unlink() if change is None else path.write_text(change(path.read_text()))
            with pytest.raises(DataError, match=message):
                load_source("pacs", root, official_lists=True)


def test_a_listed_image_that_is_not_there_gets_a_warning(tmp_path: Path) -> None:
    root, _ = with_lists(tmp_path, "kfold")
    next((root / "sketch" / "dog").iterdir()).unlink()
    with collected() as found:
        load_source("pacs", root, official_lists=True)
    assert ["1 images" in one.text for one in found if one.code == "listed-missing"] == [True]
    with pytest.raises(DataError, match="VLCS has no official lists"):
        load_source("vlcs", published_trees.vlcs_folders(tmp_path / "vlcs"), official_lists=True)


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


def test_csv_is_written_as_a_table_of_images_may_be(tmp_path: Path) -> None:
    table = table_of(PACS_LIKE)
    rows = [f"{role},{path}" for role, path in zip(["train"] * len(table), table.paths)]
    rows[:4] = [
        f"Training,./{table.paths[0]}",
        "VALID,{}".format(table.paths[1].replace("/", "\\")),
        f"testing,/images/x/../{table.paths[2]}",
        f"ID_TEST,.\\{table.paths[3]}",
    ]
    (tmp_path / "split.csv").write_text("\n".join(["split,path", *rows]))
    splits = from_csv(replace(table, root=Path("/images"), images=None), tmp_path / "split.csv")
    assert (splits.id_val.tolist(), splits.id_test.tolist()) == ([1], [2, 3])
    assert len(splits.train) == len(table) - 3


def test_csv_that_does_not_fit_is_refused(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for lines, message in [
        ("0,train,0,a,b,0,Art Painting/Alarm_Clock/1.jpg\n", r"does not list 1 images.*2\.jpg"),
        ("0,train,0,a,b,0,x\n1,train,0,a,b,0,x\n", "lists x twice"),
        ("0,train,0,a,b,0,a/B/x.jpg\n1,test,0,a,b,0,A/b/x.jpg\n", "lists A/b/x.jpg twice"),
        (
            "".join(f"{i},train,0,a,b,0,a/b/{i}.jpg\n" for i in range(5)),
            r"lists 5 images that are not in the data: a/b/0\.jpg, a/b/1\.jpg, a/b/2\.jpg and 2 m",
        ),
        (
            "0,train,0,a,b,0,Art Painting/Alarm_Clock/1.jpg\n"
            "1,train,0,a,b,0,./Real_World/x\\2.jpg\n",
            r"data: \./Real_World/x\\2\.jpg\. .* for example Art Painting/Alarm_Clock/1\.jpg\.",
        ),
        (
            "0,train,0,a,b,0,Art Painting/Alarm_Clock/1.jpg\n"
            "1,oops,0,a,b,0,Real World/Alarm_Clock/2.jpg\n",
            r"row 3 of split\.csv has 'oops' as split; expected train, val or test",
        ),
        (
            "0,val,0,a,b,0,Art Painting/Alarm_Clock/1.jpg\n"
            "1,test,0,a,b,0,Real World/Alarm_Clock/2.jpg\n",
            "left to train on",
        ),
    ]:
        with subtests.test(lines=lines, message=message):
            tmp_path = tmp_path_factory.mktemp("case")
            (tmp_path / "split.csv").write_text(HEADER + lines)
            with pytest.raises(DataError, match=message):
                from_csv(two_images(), tmp_path / "split.csv")


def test_csv_with_a_test_share_in_training_domains_holds_out_other_domains_only(
    tmp_path: Path,
) -> None:
    table = table_of(PACS_LIKE)
    photo = table.domains == table.domain_id("photo")
    roles = np.where(photo, "test", np.array(["train", "val", "test"])[np.arange(len(table)) % 3])
    rows = "".join(f"{role},{path}\n" for role, path in zip(roles, table.paths))
    (tmp_path / "split.csv").write_text(f"split,path\n{rows}")
    splits = from_csv(table, tmp_path / "split.csv")
    assert (splits.test == np.flatnonzero(photo)).all()
    assert len(splits.val) == 0
    assert (splits.id_test == np.flatnonzero(~photo & (roles == "test"))).all()
    assert (splits.id_val == np.flatnonzero(roles == "val")).all()


def test_csv_may_list_images_known_to_be_bad(tmp_path: Path) -> None:
    table = two_images()
    write_csv(table, from_roles(np.array(["train", "id_val"])), tmp_path / "split.csv")
    left = table.take([0])
    assert from_csv(left, tmp_path / "split.csv", skipped=[table.paths[1]]).train.tolist() == [0]
    with pytest.raises(DataError, match=r"not in the data: Real World/Alarm_Clock/2\.jpg"):
        from_csv(left, tmp_path / "split.csv")


def test_csv_without_a_column(tmp_path: Path) -> None:
    (tmp_path / "split.csv").write_text("split,file\ntrain,x\n")
    with pytest.raises(DataError, match="has no column 'path'"):
        from_csv(two_images(), tmp_path / "split.csv")


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
