"""Packages that a test needs and an installation may lack."""

from importlib.util import find_spec

import pytest


def needs(package: str) -> pytest.MarkDecorator:
    """Skips where a package is missing, without importing it: torchmetrics takes seconds."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}")
