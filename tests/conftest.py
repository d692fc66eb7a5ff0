"""What several tests need."""

import os
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("feddg", deadline=None)  # no timed assertions
hypothesis.settings.load_profile("feddg")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with PACS, backbone weights and codec images; tests that need it skip without it.

    ``FEDDG_SHARED_DATA`` names it; by default it is looked for beside the checkout.
    """
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("FEDDG_SHARED_DATA", default))
    if not (folder / "pacs").is_dir():
        pytest.skip(f"needs the data folder {folder} (set FEDDG_SHARED_DATA)")
    return folder
