"""Tables as CSV, Markdown and LaTeX, whatever is in their cells."""

import csv
import io
import re

from feddg.report.blocks import Cell, Column, Table
from feddg.report.tables import to_csv, to_latex, to_markdown

TRICKY = Table(
    [Column("Method", numeric=False), Column("100 %", "a_b")],
    [
        [Cell("A & B_{c} | d"), Cell("1.0 ± 0.2", strong=True)],
        [Cell('x, "y"\nz'), Cell("–")],
    ],
    "50 % of $x$ # ~ ^ \\",
)


def test_csv_reads_back():
    rows = list(csv.reader(io.StringIO(to_csv(TRICKY))))
    assert rows == [
        ["Method", "100 % (a_b)"],
        ["A & B_{c} | d", "1.0 ± 0.2"],
        ['x, "y"\nz', ""],
    ]


def test_markdown_keeps_its_columns():
    lines = to_markdown(TRICKY).splitlines()[:4]
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in lines] == [3, 3, 3, 3]
    assert lines[1] == "| :--- | ---: |"
    assert "**1.0 ± 0.2**" in lines[2]


def test_latex_escapes_what_is_special():
    text = to_latex(TRICKY)
    assert r"A \& B\_\{c\} | d & \textbf{1.0 $\pm$ 0.2} \\" in text
    assert r"50 \% of \$x\$ \# \textasciitilde{} \textasciicircum{} \textbackslash{}" in text
    assert text.count(r"\\") == 3
    assert r"\begin{tabular}{lr}" in text
