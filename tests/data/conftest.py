"""What the tests of data share."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cached from one test to the next."""
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path / "cache"))
