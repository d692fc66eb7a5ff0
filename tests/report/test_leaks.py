"""What left the sites, on a page."""

import html
from types import SimpleNamespace

from extras import needs
from feddg.report.leaks import _Entry, _epsilon
from feddg.report.page import write_report
from trained_runs import SHORT

pytestmark = needs("torchmetrics")


def test_the_page_of_a_run_nobody_attacked_says_how(finished, tmp_path):
    page = write_report([finished], tmp_path / "report.html").read_text("utf-8")
    assert "No attack has been tried on this run" in page
    assert "feddg privacy attack" in page


def test_the_network_is_named_beside_what_a_method_sends_of_each_of_its_tensors(
    train_once, tmp_path
):
    train = {"optimizer": "sgd", "momentum": 0, "rounds": 1, "local_steps": 1}
    run = train_once("scaffold", **{**SHORT, "train": {**SHORT["train"], **train}})
    page = html.unescape(write_report([run], tmp_path / "report.html").read_text("utf-8"))
    assert "the network's weights" in page
    assert "scaffold/*" in page
    assert "scaffold/featurizer" not in page


def test_an_epsilon_stands_beside_what_was_noised_alone():
    row = SimpleNamespace(
        message="statistics", epsilon=4.0, delta=1e-5, unit="image", noised_at="client"
    )
    run = SimpleNamespace(method="pardon", privacy={0: row})
    sent = (_Entry("statistics", name, False, 1, 1, 1) for name in ("style", "images"))
    assert [_epsilon(run, entry)[:7] for entry in sent] == ["4 at 1e", ""]
