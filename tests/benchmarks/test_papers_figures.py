"""The papers' figures: geometry by hand, numbers against numpy, the page of a real run."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddg.api import run
from feddg.errors import RunError
from feddg.experiment import Experiment
from feddg.federation.local_training import load_weights
from feddg.prediction.model import load_model
from feddg.report.page import render
from scripts import load_script

drawing = load_script(Path(__file__).resolve().parents[2] / "benchmarks" / "papers" / "figures.py")
Plane, grey_histogram, overlap_gap = drawing.Plane, drawing.grey_histogram, drawing.overlap_gap


def model(*values):
    a, b = torch.tensor(values[:2]).float(), torch.tensor(values[2:]).float()
    return {"a": a, "b": b, "n": torch.tensor(3)}


def test_the_plane_s_coordinates_are_distances():
    """A right-angled triangle in weight space: legs 5 and 2."""
    plane = Plane.through(model(0.0, 0, 0, 0), model(3.0, 4, 0, 0), model(0.0, 0, 2, 0))
    assert plane.place(model(3.0, 4, 0, 0)) == pytest.approx((5, 0), abs=1e-6)
    assert plane.place(model(0.0, 0, 2, 0)) == pytest.approx((0, 2), abs=1e-6)
    middle = plane.weights(2.5, 1.0)
    assert torch.allclose(middle["a"], torch.tensor([1.5, 2.0]))
    assert torch.allclose(middle["b"], torch.tensor([1.0, 0.0]))
    assert middle["n"] == 3


numbers = st.lists(st.floats(-5, 5, width=32), min_size=4, max_size=4)


@given(numbers, numbers, numbers)
def test_a_model_of_the_plane_is_found_at_its_place(first, second, third):
    models = [model(*values) for values in (first, second, third)]
    plane = Plane.through(*models)
    for one in models:
        again = plane.weights(*plane.place(one))
        for name in ("a", "b"):
            assert torch.allclose(again[name], one[name], atol=1e-3)


def test_grey_levels_are_numpy_s():
    # Seeded: a grey level on the very edge of a bin is rounded to one side or the other.
    chance = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (3, 3, 5, 7), dtype=torch.uint8, generator=chance)
    grey = np.einsum("nchw,c->nhw", images.numpy().astype(float), [0.299, 0.587, 0.114])
    expected, _ = np.histogram(grey, bins=32, range=(0, 256))
    assert grey_histogram(images) == pytest.approx(expected / expected.sum(), abs=2e-3)


def test_the_gap_between_histograms_by_hand():
    assert overlap_gap([[1, 0], [0, 1]]) == 1
    assert overlap_gap([[0.5, 0.5], [0.5, 0.5], [1, 0]]) == pytest.approx((0 + 0.5 + 0.5) / 3)
    assert overlap_gap([[1, 0]]) is None


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two small runs, one with a snapshot, and its figures beside the other."""
    place = tmp_path_factory.mktemp("analyses")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "GRID", 3)
        patch.setattr(drawing, "PER_DOMAIN", 12)
        patch.setattr(drawing, "LANDSCAPE_IMAGES", 24)
        folders = {}
        for method in ("ccst", "fedavg"):
            experiment = Experiment(
                data={"source": "digits", "image_size": 16, "id_val": 0.6},
                hold_out="sketch",
                clients=3,
                method=method,
                train={"rounds": 2, "local_steps": 2, "batch_size": 32},
                evaluate={"every": 2, "pictures": False, "averages": "never"},
            )
            folders[method] = run(
                experiment, place, cache=place / "cache", report=False, snapshots=[1]
            ).folder
        found = drawing.figures(folders["ccst"], beside=folders["fedavg"], cache=place / "cache")
    return SimpleNamespace(**folders, found=found)


def test_features_are_mapped_before_training_at_the_snapshot_and_at_the_end(finished):
    features = finished.found["features"]
    assert [each["round"] for each in features["maps"]] == [0, 1, 2]
    assert features["domains"] == ["ink", "chalk", "photo", "sketch"]
    assert np.bincount(features["of_domain"]).tolist() == [12, 12, 12, 12]
    held = [
        features["domains"][d] for d, out in zip(features["of_domain"], features["held_out"]) if out
    ]
    assert set(held) == {"sketch"}
    for each in features["maps"]:
        assert np.isfinite(each["points"]).all()
        assert np.array(each["points"]).shape == (48, 2)


def test_the_snapshot_is_that_round_s_model(finished):
    """It fits the network, and is not yet where the run ended."""
    (kept,) = drawing.snapshots(finished.ccst).values()
    ended = load_model(finished.ccst)
    assert set(kept) == set(ended.state_dict())
    moved = [not torch.equal(kept[name], tensor) for name, tensor in ended.state_dict().items()]
    assert any(moved)
    load_weights(ended, kept)
    assert all(torch.equal(kept[name], tensor) for name, tensor in ended.state_dict().items())


def test_the_landscape_holds_its_models(finished):
    landscape = finished.found["landscape"]
    assert [point["name"] for point in landscape["points"]] == [
        "global model",
        "client-0",
        "FedAvg model",
    ]
    origin = landscape["points"][0]
    assert (origin["x"], origin["y"]) == pytest.approx((0, 0), abs=1e-5)
    assert set(landscape["losses"]) == {"seen", "unseen"}
    for losses in landscape["losses"].values():
        assert np.array(losses).shape == (3, 3)
        assert (np.array(losses) > 0).all()
    for axis in ("x", "y"):
        assert min(landscape[axis]) < min(p[axis] for p in landscape["points"])
        assert max(landscape[axis]) > max(p[axis] for p in landscape["points"])


def test_grey_levels_of_every_client_before_and_after(finished):
    levels = finished.found["grey_levels"]
    assert levels["clients"] == ["client-0, ink", "client-1, chalk", "client-2, photo"]
    for kind in ("before", "after"):
        assert [sum(shares) for shares in levels[kind]] == pytest.approx([1, 1, 1], abs=1e-4)
    assert levels["before"] != levels["after"]


def test_the_page_shows_them(finished):
    page = drawing.page_of(finished.found, "Figures")
    titles = [section.title for section in page.sections]
    assert titles == ["Features", "Loss landscape", "Grey levels of clients"]
    assert "after round 2, by domain" in render(page)


def test_another_network_and_an_empty_folder_are_refused(finished, tmp_path):
    with pytest.raises(RunError, match="holds no run"):
        drawing.figures(tmp_path)
    other = Experiment(
        data={"source": "digits", "image_size": 16},
        hold_out="sketch",
        clients=3,
        model={"backbone": "cnn", "embedding": "linear"},
        train={"rounds": 1, "local_steps": 1, "batch_size": 32},
    )
    folder = run(other, tmp_path, cache=tmp_path / "cache", report=False).folder
    with pytest.raises(RunError, match="another network"):
        drawing.figures(finished.fedavg, beside=folder, cache=tmp_path / "cache")
