"""Charts by themselves: shares, groups of clients, styles of lines."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from feddg.methods.base import METHODS
from feddg.records import ClientRow, ClientsTable
from feddg.report.charts import (
    class_accuracy,
    client_groups,
    client_heat_map,
    confusion_matrix,
    line_styles,
)


@given(arrays(np.int64, (3, 3), elements=st.integers(0, 40)))
def test_matrix_and_bars_say_the_same_percent(counts):
    counts = counts.astype(float)
    names = ["a", "b", "c"]
    (heat,) = confusion_matrix(counts, names, "").figure["data"]
    (bars,) = class_accuracy(counts, names).figure["data"]
    assert [heat["text"][index][index] for index in range(3)] == list(bars["text"])
    assert heat["texttemplate"] == "%{text}"


def test_a_bar_that_ends_at_100_has_room_for_its_text():
    layout = class_accuracy(np.eye(2), ["a", "b"]).figure["layout"]
    assert layout["xaxis"]["range"][1] >= 115


def test_a_method_looks_the_same_on_every_page():
    alone = line_styles({"PARDON": "pardon"})
    beside = line_styles({"CCST": "ccst", "mine": "mine", "FedAvg": "fedavg", "PARDON": "pardon"})
    assert alone["PARDON"] == beside["PARDON"]
    assert len(set(beside.values())) == 4
    assert len(set(line_styles({name: name for name in METHODS}).values())) == len(METHODS)
    twice = line_styles({"a": "pardon", "b": "pardon"})
    assert twice["a"] != twice["b"]


@settings(max_examples=60)
@given(
    arrays(np.int64, st.tuples(st.integers(1, 400), st.integers(1, 5)), elements=st.integers(0, 9))
)
def test_every_client_is_in_one_group_of_its_main_domain(counts):
    groups = client_groups(counts)
    assert sorted(np.concatenate(groups)) == list(range(len(counts)))
    for group in groups:
        assert len({int(np.argmax(counts[index])) for index in group}) == 1
    assert len(groups) <= 100 + counts.shape[1]


def test_ten_thousand_clients_share_about_a_hundred_columns():
    clients = [
        ClientRow(id=index, domains=[90, 10] if index % 4 else [0, 50], classes=[1])
        for index in range(10_000)
    ]
    table = ClientsTable(domains=["a", "b"], classes=["k"], clients=clients)
    chart = client_heat_map(table, "domains")
    (trace,) = chart.figure["data"]
    assert np.shape(trace["z"]) == (2, 100)
    assert np.sum(trace["customdata"], axis=1).tolist() == [7500 * 90, 7500 * 10 + 2500 * 50]
    assert trace["z"][0] == [90.0] * 75 + [0.0] * 25
