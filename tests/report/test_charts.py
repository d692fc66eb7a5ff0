"""Charts by themselves: shares, groups of clients, styles of lines."""

import base64
import csv
import gzip
import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from plotly.offline import get_plotlyjs, get_plotlyjs_version

from feddg.comparison.results import Results
from feddg.comparison.results_file import COLUMNS
from feddg.methods.base import METHODS
from feddg.records import ClientRow, ClientsTable, NumberRow
from feddg.report.charts import (
    COLOURS,
    accuracy_curves,
    chart_of,
    client_groups,
    client_heat_map,
    confusion_matrix,
    forest_plot,
    line_styles,
)
from feddg.report.comparison_page import comparison_page
from feddg.report.page import _packed_plotly
from feddg.runs.table import FINAL, NumberTable


@given(arrays(np.int64, (3, 3), elements=st.integers(0, 40)))
def test_a_small_matrix_says_its_percents(counts):
    counts = counts.astype(float)
    names = ["a", "b", "c"]
    matrix = confusion_matrix(counts, names, "").figure
    (heat,), layout = matrix["data"], matrix["layout"]
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    assert heat["text"] == [[f"{100 * share:.0f}" for share in row] for row in shares]
    assert heat["texttemplate"] == "%{text}"
    assert layout["xaxis"]["tickangle"] == -45  # the browser's own choice hides the last on phones


def test_a_chart_holds_what_json_can():
    made = chart_of([{"y": np.array([1.0, np.nan]), "x": (1, np.int64(2))}], 9, "", bargap=math.inf)
    assert made.figure == {"data": [{"y": [1.0, None], "x": [1, 2]}], "layout": {"bargap": None}}


def test_a_wrong_property_of_a_chart_is_told_here():
    with pytest.raises(ValueError, match="colour"):
        chart_of([{"line": {"colour": "red"}}], 9, "")


def test_the_script_of_pages_is_that_of_plotly():
    shipped = gzip.decompress(base64.b64decode(_packed_plotly())).decode()
    assert shipped.startswith("/**\n* plotly.js v")
    if get_plotlyjs_version() in shipped[:40]:
        assert shipped == get_plotlyjs()


def test_methods_of_a_comparison_have_colours_and_lines_of_their_own():
    styles = line_styles([*METHODS])
    assert len(set(styles.values())) == len(METHODS)
    assert len({style.colour for style in [*styles.values()][: len(COLOURS)]}) == len(COLOURS)


# What eyes without one kind of cones see of linear RGB (Machado et al. 2009, severity 1).
SEEN_BY = {
    "all cones": np.eye(3),
    "no long": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "no middle": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "no short": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}


@pytest.mark.parametrize("eyes", SEEN_BY)
def test_colours_stay_apart_for_all_eyes(eyes):
    """At least 12 in CIE 1976 L*a*b*, where 2 can just be told apart; and not too light."""
    rgb = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in COLOURS]) / 255
    linear = np.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92)
    seen = np.clip(linear @ np.array(SEEN_BY[eyes]).T, 0, 1)
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    x, y, z = np.cbrt(np.clip(seen @ to_xyz.T / (0.9505, 1, 1.089), 0.0001, None)).T
    lab = np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)
    apart = np.linalg.norm(lab[:, None] - lab[None], axis=2) + 1000 * np.eye(len(COLOURS))
    assert apart.min() > 12
    assert lab[:, 0].max() < 75


@settings(max_examples=60)
@given(
    arrays(np.int64, st.tuples(st.integers(1, 400), st.integers(1, 5)), elements=st.integers(0, 9))
)
def test_every_client_is_in_one_group_in_the_order_of_main_domains(counts):
    groups = client_groups(counts)
    order = np.concatenate(groups)
    assert sorted(order) == list(range(len(counts)))
    assert (np.diff(counts.argmax(axis=1)[order]) >= 0).all()
    sizes = [len(group) for group in groups]
    assert len(sizes) <= 100
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == -(-len(counts) // 100)


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


def test_domains_of_several_data_sets_stand_below_their_names(tmp_path):
    gains = {"a": {"ink": 0.2, "sketch": 0.0}, "b": {"sketch": 0.4}, "c": {"sketch": 0.3}}
    file = tmp_path / "results.csv"
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, COLUMNS)
        writer.writeheader()
        for name, domains in gains.items():
            for domain, gain in domains.items():
                for method, value in {"fedavg": 0.5, "pardon": 0.5 + gain}.items():
                    place = {"method": method, "held_out": domain, "seed": 0}
                    place["conditions"] = json.dumps({"data": name})
                    kind = {"rule": "final", "split": "test", "over": "domain_mean"}
                    writer.writerow(place | kind | {"metric": "accuracy", "value": value})
    results = Results.read(file)
    assert results.columns == ["a, ink", "a, sketch", "b, sketch", "c, sketch"]
    margin = results.margins(FINAL, "fedavg")["pardon"]
    assert margin.domains.mean == pytest.approx(0.225)
    assert margin.domains.count == 4
    assert margin.collections.mean == pytest.approx((0.1 + 0.4 + 0.3) / 3)
    figure = forest_plot(results, "pardon", "fedavg", margin).figure
    rows = dict(zip(figure["layout"]["yaxis"]["ticktext"], figure["data"][0]["x"]))
    names = ["<b>a</b>", "ink", "sketch", "<b>b</b>", "<b>c</b>"]
    assert list(rows)[:5] == names
    assert figure["data"][0]["x"][:4] == [None, 20, 0, None]
    assert rows["<b>all domains</b>"] == 22.5
    assert rows["<b>all data sets</b>"] == pytest.approx(80 / 3, abs=1e-3)
    reach = figure["data"][0]["error_x"]["array"]
    assert reach[-1] == pytest.approx(100 * margin.collections.reach)
    assert set(reach[:-2]) == {0}
    assert "By domain" in [section.title for section in comparison_page(results).sections]
    (row,) = results.margin_frame("fedavg").to_dict("records")
    assert row["data_sets_mean"] == margin.collections.mean
    assert row["data_sets_count"] == 3
    assert row["difference_a, ink"] == pytest.approx(0.2)


@dataclass
class Evaluated:
    """A run of which a chart asks for nothing but its numbers."""

    numbers: list[NumberRow]
    default_rule = FINAL

    @property
    def table(self):
        return NumberTable(self.numbers)


def number(split, domain, value):
    return NumberRow(
        round=1, weights="last", split=split, domain=domain, metric="accuracy", value=value
    )


@pytest.mark.parametrize("domains", [7, 8])
def test_no_two_domains_have_the_same_line(domains):
    numbers = [number("id_val", f"d{n}", n / 10) for n in range(domains)]
    lines = accuracy_curves(Evaluated([number("test", "new", 0.5), *numbers])).figure["data"]
    looks = [(line["line"]["color"], line["line"].get("dash")) for line in lines]
    assert len(set(looks)) == len(looks) == 1 + (domains if domains < 8 else 1)
