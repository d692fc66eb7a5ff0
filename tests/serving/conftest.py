"""What the tests of the server share."""

import pytest

from trained_runs import trained_run


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A short run on digits, trained once."""
    return trained_run(tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("cache"))
