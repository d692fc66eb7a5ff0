"""Cells of CSV files: no text is taken for a formula, numbers stay numbers, texts come back."""

import csv
import io
import json
import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from damage import draw_images
from feddg.data.images import from_folder
from feddg.data.protocols import from_csv
from feddg.data.splits import hold_out
from feddg.errors import RunError
from feddg.records import (
    ADAPTATION_ROWS,
    LEDGER_ROWS,
    METRIC_ROWS,
    ROUND_ROWS,
    AdaptationRow,
    ClientRow,
    ClientsTable,
    LayoutRow,
    MessageRow,
    MetricRow,
    NumberRow,
    RefusalRow,
    RefusedUpdate,
    RoundRow,
    RowFile,
    SetupRow,
    SummaryFile,
    TensorEntry,
    TrafficRow,
    as_cell,
    client_name,
    from_cell,
)
from feddg.report.blocks import Cell, Column, Table
from feddg.report.tables import to_csv
from split_files import write_csv

FORMULAS = [
    "'=",
    "''-0.5",
    "=1+1",
    "+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "=",
    "-",
    "--1",
]


def test_formulas_become_texts(subtests):
    for text in FORMULAS:
        with subtests.test(text=text):
            assert as_cell(text) == f"'{text}"
            assert from_cell(f"'{text}") == text


def test_numbers_and_other_texts_stay(subtests):
    for value in [
        -3,
        -0.5,
        None,
        "-0.5",
        "+1.25",
        "-1e-05",
        "-1.20 ± 0.30",
        "-3 %",
        "cat",
        "'cat",
        "",
    ]:
        with subtests.test(value=value):
            assert as_cell(value) == value


@given(st.text() | st.text("'=+-@1a", max_size=4))
def test_no_text_begins_a_formula_and_all_come_back(text):
    cell = as_cell(text)
    begins = cell[:1] in set("=+-@\t\r")
    assert not begins or not set(cell) - set("0123456789.,eE+-% ±")
    assert from_cell(cell) == text


def test_a_split_file_with_such_names_is_read_back(tmp_path):
    images = draw_images(tmp_path / "images")
    (images / "a").rename(images / "=a")
    table = from_folder(images)
    splits = hold_out(table, ["c"], [], id_val=0, id_test=0, seed=0)
    write_csv(table, splits, tmp_path / "split.csv")
    rows = list(csv.reader(io.StringIO((tmp_path / "split.csv").read_text(), newline="")))
    assert not [cell for row in rows[1:] for cell in row if cell.startswith("=")]
    again = from_csv(table, tmp_path / "split.csv")
    assert numpy.array_equal(again.train, splits.train)
    assert numpy.array_equal(again.test, splits.test)


def test_a_reports_tables_hold_none():
    columns = [Column("=method"), Column("accuracy", numeric=True)]
    table = Table(columns, [[Cell("=HYPERLINK(1)"), Cell("-1.5")]])
    rows = list(csv.reader(io.StringIO(to_csv(table))))
    assert rows == [["'=method", "accuracy"], ["'=HYPERLINK(1)", "-1.5"]]


# Rows of files: what is written is read back, and damage is named.


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
counts = st.integers(0, 10**12)
numbers = st.floats()
by_name = st.dictionaries(texts, numbers, max_size=3)
measured = st.builds(
    MetricRow,
    **dict.fromkeys(("round", "images", "examples"), counts),
    **dict.fromkeys(("weights", "split", "domain"), texts),
    **dict.fromkeys(("value", "seconds"), numbers),
    metric=st.sampled_from(["accuracy", "loss"]),
    bytes=counts.map(float),
    confusion=st.none() | st.lists(st.lists(counts, max_size=3), max_size=3),
)
rounds = st.one_of(
    st.builds(
        SetupRow,
        seconds=numbers,
        groups=st.dictionaries(texts, st.lists(st.lists(counts, max_size=3), max_size=3)),
    ),
    st.builds(
        RoundRow,
        round=counts,
        clients=st.lists(counts, max_size=3),
        refused=st.lists(st.builds(RefusedUpdate, client=counts, reason=texts), max_size=2),
        terms=by_name,
        examples=counts,
        images=counts,
        seconds=by_name,
        bytes_up=counts,
        bytes_down=counts,
    ),
)
tensors = st.builds(
    TensorEntry, name=texts, shape=st.lists(counts, max_size=4), dtype=texts, bytes=counts
)
ledger = st.one_of(
    st.builds(LayoutRow, id=texts, tensors=st.lists(tensors), scalars=st.lists(texts)),
    st.builds(
        MessageRow,
        round=counts,
        direction=st.sampled_from(["up", "down"]),
        client=counts,
        purpose=texts,
        layout=texts,
        bytes=counts,
    ),
    st.builds(RefusalRow, round=counts, client=counts, reason=texts),
)
adapted = st.builds(
    AdaptationRow,
    adaptation=texts,
    round=counts,
    batch_size=counts,
    split=texts,
    domain=texts,
    accuracy=numbers,
    examples=counts,
    client=st.none() | counts,
)
traffic = st.builds(
    TrafficRow,
    **dict.fromkeys(("at", "seconds", "busy", "train"), numbers),
    **dict.fromkeys(("round", "bytes_up", "bytes_down"), counts),
    **dict.fromkeys(("kind", "site"), texts),
)
KINDS = [
    (METRIC_ROWS, measured),
    (ROUND_ROWS, rounds),
    (LEDGER_ROWS, ledger),
    (ADAPTATION_ROWS, adapted),
    (RowFile(TrafficRow), traffic),
]


def as_read(value):
    """A value as reading should give it back: what is not finite is NaN, which equals itself."""
    if isinstance(value, float):
        return value if math.isfinite(value) else "NaN"
    if isinstance(value, dict):
        return {name: as_read(own) for name, own in value.items()}
    return [as_read(own) for own in value] if isinstance(value, list | tuple) else value


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.parametrize(("file", "kinds"), KINDS)
@given(data=st.data())
def test_what_is_written_is_read_back(tmp_path_factory, file, kinds, data):
    rows = data.draw(st.lists(kinds, max_size=4))
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(row.to_json() + "\n" for row in rows), encoding="utf-8")
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        json.loads(line, parse_constant=refuse)
    expected = [as_read(row.model_dump()) for row in rows]
    assert [as_read(row.model_dump()) for row in file.read(path)] == expected
    # And with a last row that a crash cut off.
    with path.open("a", encoding="utf-8") as lines:
        lines.write('{"kind"')
    assert [as_read(row.model_dump()) for row in file.read(path)] == expected
    assert [as_read(row.model_dump()) for row in file.parse(file.to_text(rows))] == expected


ROUND = '{"kind":"round","round":1,"clients":[0,2]}'


def read(tmp_path, *lines):
    path = tmp_path / "rounds.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return ROUND_ROWS.read(path)


def test_what_another_version_knows_is_left_out(tmp_path):
    newer = ROUND.replace('"round":1', '"round":2,"wind":"north","images_per_second":3')
    rows = read(tmp_path, ROUND, '{"kind":"weather","round":1}', newer, "")
    assert rows == [RoundRow(round=1, clients=[0, 2]), RoundRow(round=2, clients=[0, 2])]


def test_numbers_that_older_versions_wrote_outside_json_are_read(tmp_path):
    (row,) = read(tmp_path, ROUND[:-1] + ',"terms":{"a":NaN,"b":Infinity,"c":null,"d":1}}')
    assert math.isnan(row.terms["a"])
    assert math.isnan(row.terms["c"])
    assert (row.terms["b"], row.terms["d"]) == (math.inf, 1.0)


def test_a_damaged_row_is_named_with_its_file_and_field(subtests, tmp_path_factory):
    for line, words in [
        ('{"kind":"round","clients":[0]}', "in row 3: round.round: Field required"),
        (
            '{"round":1,"clients":[0]}',
            "in row 3: 0: Unable to extract tag using discriminator 'kind'",
        ),
        (
            '{"kind":"round","round":1,"clients":["x"]}',
            r"in row 3: round\.clients\.0: .*integer.* \(got 'x'\)",
        ),
        ("[1]", "in row 3: .*object"),
        ('{"kind":"ro', "in row 3: Invalid JSON"),
    ]:
        with subtests.test(line=line, words=words):
            tmp_path = tmp_path_factory.mktemp("case")
            with pytest.raises(RunError, match=rf"rounds\.jsonl is damaged {words}"):
                read(tmp_path, ROUND, "", line, ROUND)


def test_a_damaged_file_is_named_with_its_field(tmp_path):
    path = tmp_path / "clients.json"
    assert ClientsTable.read(path) is None
    path.write_text('{"domains":["a"],"classes":["b"],"clients":[{"id":4,"domains":[1]}]}')
    with pytest.raises(
        RunError, match=r"clients\.json is damaged: clients\.0\.classes: Field required"
    ):
        ClientsTable.read(path)


def test_a_client_without_a_name_is_called_one_way():
    assert ClientRow(id=7, domains=[], classes=[]).name == client_name(7) == "client-7"
    assert ClientRow(id=7, name="hospital", domains=[], classes=[]).name == "hospital"


def test_a_summary_holds_what_every_rule_chose(tmp_path):
    number = NumberRow(rule="final", round=3, split="test", metric="loss", value=0.25)
    for numbers in ([], [number], [number, number.model_copy(update={"round": None})]):
        summary = SummaryFile(status="completed", numbers=numbers)
        path = tmp_path / "summary.json"
        path.write_text(summary.to_text())
        assert SummaryFile.read(path) == summary
    assert json.loads(summary.to_text())["numbers"][0] == number.model_dump(exclude_defaults=True)
