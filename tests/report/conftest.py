"""Every chart that these tests make is one of plotly: an unknown property or value is an error."""

from collections.abc import Iterator

import plotly.graph_objects as go
import pytest

from feddg.report import charts
from feddg.report.blocks import Chart


@pytest.fixture(scope="session", autouse=True)
def checked_charts() -> Iterator[None]:
    def checked(figure, height, caption):
        go.Figure(figure["data"], figure["layout"])
        return Chart(figure, height, caption)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "Chart", checked)
        yield
