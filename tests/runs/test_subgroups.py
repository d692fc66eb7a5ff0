"""Subgroups: what is shown to be worse is, and many small ones give no false alarm."""

import numpy as np
import pytest

from feddg.runs.details import subgroup_rows, worst


def test_many_small_subgroups_give_few_false_alarms():
    random, alarms = np.random.default_rng(0), 0
    for _ in range(200):
        patients = random.integers(60, size=600)
        skill = random.beta(8, 2, size=60)
        correct = (random.random(600) < skill[patients]).astype(float)
        columns = {
            "scanner": random.integers(20, size=60).astype(str)[patients],
            "sex": np.array(["f", "m"])[random.integers(2, size=60)][patients],
        }
        rows = subgroup_rows("test", columns, correct, patients)
        alarms += any(row.p is not None and row.p < 0.05 for row in rows)
    assert alarms / 200 <= 0.07


def test_two_halves_are_one_comparison():
    random = np.random.default_rng(2)
    sex = np.array(["f", "m"])[random.integers(2, size=300)]
    correct = (random.random(300) < np.where(sex == "m", 0.65, 0.85)).astype(float)
    alone = [row.p for row in subgroup_rows("test", {"sex": sex}, correct)]
    thirds = np.array(["a", "b", "c"])[np.arange(300) % 3]
    among = subgroup_rows("test", {"sex": sex, "scanner": thirds}, correct)
    assert alone[0] == alone[1] < 0.05
    assert [row.p for row in among[:2]] == [pytest.approx(4 * alone[0])] * 2


def test_a_scanner_that_fails_is_named():
    random = np.random.default_rng(1)
    scanner = np.array(["a", "b", "c"])[np.arange(600) % 3]
    correct = (random.random(600) < np.where(scanner == "c", 0.6, 0.9)).astype(float)
    rows = subgroup_rows("test", {"scanner": scanner}, correct)
    assert worst(rows).value == "c"
    row = next(row for row in rows if row.value == "c")
    assert row.accuracy[0] == pytest.approx(correct[scanner == "c"].mean())
    assert row.difference == pytest.approx(
        correct[scanner == "c"].mean() - correct[scanner != "c"].mean()
    )
    assert worst(subgroup_rows("test", {"scanner": np.full(600, "a")}, correct)) is None
