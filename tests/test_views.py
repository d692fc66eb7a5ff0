"""What notebooks show of themselves, and where nothing is one."""

import types

from feddg import views
from feddg.runs.execute import Run
from feddg.runs.reading import read_run


def test_a_folder_that_is_gone_or_damaged_leaves_the_plain_text(folder_maker, tmp_path):
    assert Run(tmp_path / "gone", None)._repr_html_() is None
    folder = folder_maker().write()
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(["{", *rows]))
    assert read_run(folder)._repr_html_() is None


def test_progress_is_shown_in_notebooks_only(monkeypatch):
    assert views.notebook_observer() is None
    assert views.notebook_watcher() is None
    shell = type("ZMQInteractiveShell", (), {})()
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(views.sys.modules, "IPython", ipython)
    from feddg.cli.progress import Lines, ManyBars

    monkeypatch.setattr("feddg.cli.progress.find_spec", lambda name: None)
    assert isinstance(views.notebook_observer(), Lines)
    assert isinstance(views.notebook_watcher(), ManyBars)
