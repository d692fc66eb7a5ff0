"""What notebooks show of themselves, and where nothing is one."""

from feddg.runs.execute import Run
from feddg.runs.reading import read_run


def test_a_folder_that_is_gone_or_damaged_leaves_the_plain_text(folder_maker, tmp_path):
    assert Run(tmp_path / "gone", None)._repr_html_() is None
    folder = folder_maker().write()
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(["{", *rows]))
    assert read_run(folder)._repr_html_() is None
