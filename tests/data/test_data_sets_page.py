"""docs/data_sets.md says what the definitions say now."""

import runpy
from pathlib import Path

from feddg.data.data_set import DATA_SETS

SCRIPT = Path(__file__).parents[2] / "docs/generate_data_sets.py"


def test_the_page_is_up_to_date() -> None:
    made = runpy.run_path(str(SCRIPT))
    text = made["PAGE"].read_text("utf-8")
    assert text == made["page"](text), "run `python docs/generate_data_sets.py`"


def test_every_published_data_set_says_how_it_is_had_and_used() -> None:
    for one in runpy.run_path(str(SCRIPT))["data_sets"]():
        if one.summary.endswith("built in"):
            continue
        had = one.publication.files, one.publication.mirror, one.publication.steps
        assert any(had), one.name
        assert one.layouts, one.name
        assert one.protocol, one.name
        assert one.preset is not None, one.name
        assert one.domains or one.split_counts or one.clients, one.name
    assert DATA_SETS["table"].options is not None
