"""Every published data set from its folder to accuracies, under every protocol that suits it."""

from functools import partial
from pathlib import Path

import pytest

import feddg
from feddg.data.data_set import DATA_SETS
from feddg.data.protocols import PROTOCOLS, scenarios
from feddg.data.sources import source_names
from feddg.runs.reading import read_run
from published_trees import LAYOUTS, Layout, office_home

SMALL = {
    "model": {"backbone": "cnn", "weights": None, "embedding": "none", "normalization": "train"},
    "train": {"rounds": 1, "local_steps": 1, "batch_size": 8, "optimizer": "adam", "lr": 1e-3},
    "evaluate": {"pictures": False},
}
BY_SOURCE = {layout.source: layout for layout in reversed(LAYOUTS.values())}
"""The first layout of each."""
BY_SOURCE["office_home"] = Layout("office_home", partial(office_home, classes=4))
NOT_PUBLISHED = {"digits", "folder"}
CASES = [
    (source, protocol)
    for source, layout in BY_SOURCE.items()
    for protocol in (("official",) if layout.official else PROTOCOLS)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


@pytest.fixture
def trees(folders: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDDG_CACHE", str(folders / "cache"))
    return folders


def test_every_published_data_set_is_tried() -> None:
    published = {name for name in source_names() if DATA_SETS[name].publication is not None}
    assert published - NOT_PUBLISHED == BY_SOURCE.keys()


@pytest.mark.parametrize(("source", "protocol"), CASES)
def test_from_the_folder_to_accuracies(source: str, protocol: str, trees: Path) -> None:
    root = trees / source
    if not root.exists():
        BY_SOURCE[source].make(root)
    definition = DATA_SETS[source]
    held = {} if protocol == "official" else scenarios(protocol, definition.domains, source)[-1]
    for method in ("fedavg", "pardon"):
        experiment = feddg.Experiment(
            **SMALL,
            data={"source": source, "root": root, "image_size": 16},
            hold_out=held,
            clients={"number": 3, "per_round": 2, "partition": "heterogeneous"},
            method=method,
        )
        assert experiment.preset == source
        run = feddg.run(experiment, trees / "runs", report=False)
        evaluations = read_run(run.folder).evaluations
        tested = evaluations.domains("test")
        assert tested == (list(held["test"]) if held else tested)
        assert tested
        for row in evaluations.at(1, "test"):
            assert row.examples > 0
            assert 0 <= row.accuracy <= 1
