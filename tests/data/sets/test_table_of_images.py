"""Tables of one's own: what they may say, natural clients, and everything that is wrong in them."""

import logging
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest

import feddg
from feddg.data.data_set import load_source
from feddg.data.partition import held_alike
from feddg.errors import DataError, ExperimentError
from feddg.experiment import Experiment
from feddg.runs.prepare import load_images
from feddg.runs.reading import read_run
from odd_inputs import OUTSIDE
from partitions import partition
from published_trees import NAMES, hospital, image, write_table

SMALL = {
    "model": {"backbone": "cnn", "weights": None},
    "train": {"rounds": 1, "local_steps": 1, "batch_size": 4, "lr": 1e-3, "augmentation": "none"},
    "evaluate": {"pictures": False},
}


def test_a_table_says_everything(tmp_path: Path) -> None:
    rows = hospital(tmp_path)
    table = load_source("table", write_table(tmp_path / "patients.csv", rows))
    assert table.root == tmp_path
    assert list(table.paths) == [row[0] for row in rows]
    assert [table.class_names[label] for label in table.labels] == [row[1] for row in rows]
    assert [table.domain_names[domain] for domain in table.domains] == [row[2] for row in rows]
    assert table.clients.tolist() == [row[3] for row in rows]
    # Every domain trains, too, so what validates does so in its domain.
    assert set(table.split.tolist()) == {"train", "id_val"}


def test_val_and_test_of_a_domain_that_does_not_train_are_held_out(tmp_path: Path) -> None:
    rows = hospital(tmp_path)
    for row in rows:
        row[4] = "Test" if row[2] == "west" else row[4]
    table = load_source("table", write_table(tmp_path / "t.csv", rows))
    assert set(zip(table.domains.tolist(), table.split.tolist())) == {
        *((0, "train"), (0, "id_val"), (1, "train"), (1, "id_val"), (2, "test"))
    }


def test_client_and_split_are_optional_and_columns_may_be_called_otherwise(tmp_path: Path) -> None:
    rows = [row[:4] for row in hospital(tmp_path / "images")]
    names = ("file", "diagnosis", "hospital", "patient")
    file = write_table(tmp_path / "t.csv", rows, names)
    options = {"path": "file", "label": "diagnosis", "domain": "hospital"}
    table = load_source("table", file, **options, images=tmp_path / "images")
    assert table.clients is None
    assert table.split is None
    named = load_source("table", file, **options, images=tmp_path / "images", client="patient")
    assert named.clients.tolist() == [row[3] for row in rows]


def test_paths_are_found_however_they_are_written(tmp_path: Path) -> None:
    rows = hospital(tmp_path)
    plain = [row[0] for row in rows]
    rows[0][0] = f"./scans/../{plain[0]}"
    rows[1][0] = str(tmp_path / plain[1])
    rows[2][0] = plain[2].replace("/", "\\")
    assert list(load_source("table", write_table(tmp_path / "t.csv", rows)).paths) == plain


def changed(row: int, column: str, text: str):
    def change(rows: list[list[str]]) -> None:
        rows[row][NAMES.index(column)] = text

    return change


def test_a_bad_row_is_named_in_one_line(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for change, words in [
        *(
            (changed(3, "path", path), rf"^row 5 of t\.csv has the path {re.escape(repr(path))}")
            for path in (*OUTSIDE, ".")
        ),
        (
            changed(3, "path", "C:\\x\\1.png"),
            r"^row 5 .*; write it relative to that folder, or",
        ),
        (changed(3, "path", "a\0b.png"), r"^row 5 of t\.csv has 'a\\x00b.png' as path, with a cha"),
        (
            changed(3, "label", "flu\x1b[31m"),
            r"^row 5 of t\.csv has 'flu\\x1b.* as label, with a cha",
        ),
        (
            changed(3, "path", "a\u202egnp.exe"),
            r"^row 5 of t\.csv has 'a\\u202egnp.exe' as path, with a cha",
        ),
        (changed(3, "path", ""), r"^row 5 of t\.csv has no path"),
        (changed(3, "label", " "), r"^row 5 of t\.csv has no label"),
        (changed(0, "domain", ""), r"^row 2 of t\.csv has no domain"),
        (changed(3, "client", ""), r"^row 5 of t\.csv has no client"),
        (changed(3, "split", ""), r"^row 5 of t\.csv has no split"),
        (changed(3, "split", "holdout"), r"^row 5 of t\.csv has 'holdout' as split; expected"),
        (
            lambda rows: rows.append([f"./{rows[0][0]}", *rows[0][1:4], "val"]),
            r"t\.csv: row 2 .* and row 50 .* have the same path 'scans/",
        ),
        (lambda rows: rows[7].pop(), r"^row 9 of t\.csv has 4 cells"),
        (lambda rows: rows.clear(), r"t\.csv has no rows"),
        (
            lambda rows: [row.__setitem__(0, f"x{n}.png") for n, row in enumerate(rows)],
            r"^t\.csv lists images that are not there",
        ),
        (
            lambda rows: [row.__setitem__(0, f"x\\{n:0999}") for n, row in enumerate(rows)],
            r"^t\.csv lists images that are not there",
        ),
    ]:
        with subtests.test(words=words):
            tmp_path = tmp_path_factory.mktemp("case")
            rows = hospital(tmp_path)
            change(rows)
            with pytest.raises(DataError, match=words) as caught:
                load_source("table", write_table(tmp_path / "t.csv", rows))
            assert "\n" not in str(caught.value)


def test_a_root_that_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no table"):
        load_source("table", image(tmp_path / "a.png"))
    with pytest.raises(DataError, match=r"Cannot read .*table\.csv"):
        load_source("table", tmp_path)
    with pytest.raises(DataError, match=r"Cannot read .*gone\.csv"):
        load_source("table", tmp_path / "gone.csv")


def test_the_same_image_in_two_splits_is_found_by_content(tmp_path: Path) -> None:
    rows = hospital(tmp_path)
    split = [row[4] for row in rows]
    train, val = split.index("train"), split.index("val")
    (tmp_path / rows[val][0]).write_bytes((tmp_path / rows[train][0]).read_bytes())
    experiment = experiment_of(write_table(tmp_path / "t.csv", rows), hold_out=None)
    with pytest.raises(DataError) as caught:
        load_images(experiment, tmp_path / "cache", lambda *_: None)
    assert f"{rows[train][0]} (row {train + 2} of t.csv)" in str(caught.value)
    assert f"{rows[val][0]} (row {val + 2} of t.csv)" in str(caught.value)
    assert "\n" not in str(caught.value)


def experiment_of(file: Path, hold_out: str | None = "west", **fields) -> Experiment:
    return Experiment(
        **SMALL,
        data={"source": "table", "root": file, "image_size": 16, **fields.pop("data", {})},
        **({"hold_out": hold_out} if hold_out else {}),
        **fields,
    )


@pytest.mark.parametrize(
    ("method", "hold_out"), [("fedavg", "west"), ("pardon", None), ("centralised", "west")]
)
def test_natural_clients_train_on_what_they_hold(
    tmp_path: Path, method: str, hold_out: str | None
) -> None:
    file = write_table(tmp_path / "t.csv", hospital(tmp_path))
    clients = {"partition": "client", "per_round": 3}
    experiment = experiment_of(file, hold_out, clients=clients, method=method)
    run = feddg.run(experiment, tmp_path / "runs")
    table = read_run(run.folder).clients
    expected = 1 if method == "centralised" else 4 if hold_out else 6
    assert len(table.clients) == expected
    images = load_images(experiment, tmp_path / "cache", lambda *_: None)
    if method == "centralised":
        return
    held = images.table.clients
    for client, rows in enumerate(images.partition.rows):
        (name,) = set(held[images.splits.train[rows]].tolist())
        own = images[client].validation
        assert name == sorted(set(held[images.splits.train].tolist()))[client]
        assert len(own) == 4, "its own validation images, as the table has them"


def test_more_clients_per_round_than_number_says_are_no_fault_of_natural_ones(
    tmp_path: Path,
) -> None:
    file = write_table(tmp_path / "t.csv", hospital(tmp_path))
    experiment_of(file, clients={"partition": "client", "number": 2, "per_round": 3})
    with pytest.raises(ExperimentError, match="per_round is 3"):
        experiment_of(file, clients={"number": 2, "per_round": 3})


def test_images_that_say_nothing_of_clients_have_no_natural_ones(tmp_path: Path) -> None:
    rows = [[*row[:3], "", row[4]] for row in hospital(tmp_path)]
    file = write_table(
        tmp_path / "t.csv", [[*row[:3], row[4]] for row in rows], (*NAMES[:3], "split")
    )
    with pytest.raises(DataError, match="client needs to know which client holds each image"):
        load_images(experiment_of(file, clients={"partition": "client"}), None, lambda *_: None)


def test_natural_clients_stand_alone(tmp_path: Path) -> None:
    file = write_table(tmp_path / "t.csv", hospital(tmp_path))
    with pytest.raises(
        ExperimentError, match="client already decides which client holds which images"
    ):
        experiment_of(file, clients={"partition": "client", "alpha": 0.5})


def test_options_are_part_of_the_experiment(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    one = experiment_of(file)
    other = experiment_of(file, data={"options": {"label": "diagnosis"}})
    assert one.id != other.id
    assert one.data.options["label"] == "label", "what is not said is written out"
    with pytest.raises(ExperimentError, match=r"unknown field 'lable' \(did you mean 'label'\?\)"):
        experiment_of(file, data={"options": {"lable": "x"}})
    with pytest.raises(ExperimentError, match=r"data\.options: label"):
        experiment_of(file, data={"options": {"label": 3}})


def test_a_domain_or_patient_in_two_forms_of_unicode_is_one(tmp_path: Path) -> None:
    one, other = (unicodedata.normalize(form, "Orléans") for form in ("NFC", "NFD"))
    rows = [
        [image(tmp_path / f"{n}.png").name, "sick" if n % 2 else "well", place, place, role]
        for n, (place, role) in enumerate([(one, "train"), (other, "test")] * 4)
    ]
    table = load_source("table", write_table(tmp_path / "t.csv", rows))
    assert table.domain_names == (one,)
    assert set(table.split.tolist()) == {"train", "id_test"}
    assert set(table.clients.tolist()) == {one}


def test_a_table_may_list_tiles_alone(tmp_path: Path) -> None:
    image(tmp_path / "a.png")
    rows = [[f"a.png#x{4 * n}y0w4h4", "sick" if n else "well", "east"] for n in range(2)]
    table = load_source("table", write_table(tmp_path / "t.csv", rows, ("path", "label", "domain")))
    assert len(table) == 2


def test_the_own_split_may_be_left_aside(tmp_path: Path) -> None:
    file = write_table(tmp_path / "t.csv", hospital(tmp_path))
    own = load_images(experiment_of(file), None, lambda *_: None).splits
    assert len(own.id_val) == 16
    drawn = {"own_split": False, "id_val": 0.25, "id_test": 0.25}
    splits = load_images(experiment_of(file, data=drawn), None, lambda *_: None).splits
    assert (len(splits.id_val), len(splits.id_test)) == (8, 8)
    splits = load_images(experiment_of(file, (), data=drawn), None, lambda *_: None).splits
    assert (len(splits.id_val), len(splits.id_test)) == (12, 12)


def test_a_table_that_holds_domains_out_and_hold_out_as_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = hospital(tmp_path)
    for row in rows:
        row[4] = "test" if row[2] == "west" else "train"
    experiment = experiment_of(write_table(tmp_path / "t.csv", rows), "north")
    with caplog.at_level(logging.WARNING, logger="feddg"):
        splits = load_images(experiment, None, lambda *_: None).splits
    assert "own split holds domains out; it is not used" in caplog.text
    assert len(splits.test) == 16


def test_held_alike_by_hand() -> None:
    holders = np.array(["b", "a", "b", "c"])
    found = held_alike(holders, np.array(["c", "b", "x", "a", "b", "aa"]))
    assert [rows.tolist() for rows in found] == [[3], [1, 4], [0]]
    assert [len(rows) for rows in held_alike(holders, np.array([], dtype=str))] == [0, 0, 0]


def test_natural_partition_by_hand() -> None:
    holders = np.array(["b", "a", "b", "c"])
    found = partition(np.zeros(4), np.zeros(4), 99, scheme="client", holders=holders, seed=0)
    assert (len(found), found.owners.tolist()) == (3, [1, 0, 1, 2])
