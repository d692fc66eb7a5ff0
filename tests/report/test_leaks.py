"""What left the sites, on a page."""

from extras import needs
from feddg.report.page import write_report

pytestmark = needs("torchmetrics")


def test_the_page_of_a_run_nobody_attacked_says_how(finished, tmp_path):
    page = write_report([finished], tmp_path / "report.html").read_text("utf-8")
    assert "No attack on what was sent has been tried" in page
    assert "feddg privacy attack" in page
