"""Names of methods as prose."""

import pytest

from feddg.report.text import spelled


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("feddg_ga", "FedDG-GA"),
        ("ccst+my_method", "CCST + my_method"),
        ("elcfs", "ELCFS (FedDG)"),
        ("pardon, gamma1 0.5", "PARDON, gamma1 0.5"),
        ("Single (K=1), A+B", "Single (K=1), A+B"),
    ],
)
def test_a_method_s_label_reads_well(label, expected):
    assert spelled(label) == expected
