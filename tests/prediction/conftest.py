"""Fixtures of the tests of a model in use."""

import pytest

from trained_runs import write_images


@pytest.fixture
def images(tmp_path):
    """A folder of thirty images, deep inside."""
    write_images(tmp_path / "images" / "deep" / "er", 30)
    return tmp_path / "images"
