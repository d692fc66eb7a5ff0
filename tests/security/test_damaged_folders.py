"""Damage of every kind ends in one line or in a recovery that is told of."""

import logging
import re
import signal

import pytest

import damaged_data
import damaged_runs
from damage import Original, Place
from feddg.errors import FeddgError

CASES = [*damaged_runs.CASES, *damaged_data.CASES]


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Original:
    """A finished run."""
    return Original.made(tmp_path_factory.mktemp("original"))


@pytest.fixture(autouse=True)
def _never_waits():
    """Ends a test that waits for what never comes, as a pipe's writer."""

    def give_up(*_):
        raise AssertionError("it waits for ever")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(300)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("family", dict.fromkeys(case.family for case in CASES))
def test_damage_is_told_of(family, original, tmp_path, caplog, subtests):
    for number, case in enumerate(case for case in CASES if case.family == family):
        place = Place(tmp_path / str(number), original)
        place.root.mkdir()
        caplog.clear()
        with subtests.test(case.what), caplog.at_level(logging.WARNING, "feddg"):
            if case.error is None:
                case.play(place)
                told = [record.getMessage() for record in caplog.records]
                assert all("\n" not in line for line in told)
                if case.said is None:
                    assert not told
                else:
                    assert any(re.search(case.said, line) for line in told), told
            else:
                with pytest.raises(FeddgError) as raised:
                    case.play(place)
                assert re.search(case.error, str(raised.value)), raised.value
                assert "\n" not in str(raised.value)
