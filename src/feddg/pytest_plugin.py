"""Every rule for methods as a test of its own; pytest finds it where feddg is installed.

    @pytest.mark.feddg(method=MyMethod)
    def test_it_keeps_the_rules(feddg_check):
        feddg_check()

Nothing of feddg is imported before a test asks for it.
"""

from functools import partial

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Says what the mark is."""
    config.addinivalue_line(
        "markers", "feddg(method): a method of one's own; feddg_check() checks a rule of it"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes a test of every rule and method."""
    if "feddg_check" not in metafunc.fixturenames:
        return
    marks = metafunc.definition.iter_markers("feddg")
    methods = [mark.kwargs["method"] for mark in marks if "method" in mark.kwargs]
    if not methods:
        raise pytest.UsageError("feddg_check needs the mark feddg(method=MyMethod) above the test")
    from feddg.testing import CHECKS, check_method  # takes seconds

    metafunc.parametrize(
        "feddg_check",
        [
            pytest.param(partial(check_method, one, [check]), id=f"{one.__name__}-{check.__name__}")
            for one in methods
            for check in CHECKS
        ],
    )
