"""What a classifier is asked about: files by their names, pixels as in training."""

import io
import math
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import tifffile
import torch
from PIL import Image

from feddg.data.images import ImageBytes
from feddg.data.pixels import as_unit
from feddg.errors import DataError, RunError
from feddg.experiment import load_stored
from feddg.prediction.classifier import (
    RunClassifier,
    count_files,
    image_files,
    load_classifier,
)
from feddg.prediction.export import export_run
from feddg.prediction.model import load_model
from feddg.prediction.model_file import ModelDescription
from feddg.prediction.predict import predict, predict_files, predictor_of
from feddg.prediction.validation import validate
from feddg.runs.prepare import load_images
from feddg.runs.provenance import depths_of_run
from feddg.runs.reading import EXPERIMENT, read_run
from trained_runs import read_csv, trained_run


def test_what_is_named_is_found(images, tmp_path):
    files = sorted(images.rglob("*.png"))
    (images / ".hidden.png").write_bytes(b"")
    (images / "notes.txt").write_text("")
    (images / "loop").symlink_to(images, target_is_directory=True)
    assert list(image_files([images])) == files
    assert list(image_files([f"{images}/*/*/0000?.png"])) == files[:10]
    assert list(image_files([f"{images}/**/*.png"]))[: len(files)]
    assert list(image_files([files[3], files[1]])) == [files[3], files[1]]
    with pytest.raises(DataError, match="nowhere does not exist"):
        image_files(["nowhere"])
    (tmp_path / "a [1]").mkdir()
    with pytest.raises(DataError, match="there is no image in"):
        count_files([tmp_path / "a [1]"])
    for nothing in (tmp_path / "*.png", tmp_path / "a [1]/*"):
        with pytest.raises(DataError, match="matches nothing"):
            image_files([files[0], nothing])


@pytest.fixture(scope="module")
def deep_run(tmp_path_factory, cache):
    """A run on images of 12 bits in four bands, of which the last three are taken."""
    root = tmp_path_factory.mktemp("deep")
    rng = numpy.random.default_rng(0)
    for domain in ("north", "south", "west"):
        for kind, band in (("corn", 1), ("wheat", 3)):
            for number in range(8):
                values = rng.integers(0, 900, (24, 24, 4), numpy.uint16)
                values[:, :, band] += 3000
                file = root / domain / kind / f"{number}.tif"
                file.parent.mkdir(parents=True, exist_ok=True)
                tifffile.imwrite(file, values, photometric="minisblack", planarconfig="contig")
    data = {"source": "folder", "root": str(root), "image_size": 16, "bands": [2, 3, 4]}
    train = {"rounds": 1, "local_steps": 10, "batch_size": 8, "augmentation": "none"}
    fields = {"data": data | {"id_val": 0.2, "id_test": 0}, "hold_out": "west", "train": train}
    model = {"backbone": "cnn", "weights": "none"}
    clients = {"number": 2, "partition": "domain"}
    out = tmp_path_factory.mktemp("runs")
    return trained_run(out, cache, model=model, clients=clients, **fields), root / "west"


def test_files_are_read_as_in_training(deep_run, cache):
    run, folder = deep_run
    images = load_images(load_stored(run / EXPERIMENT), cache, lambda *_: None)
    rows = torch.from_numpy(images.splits.test)
    with torch.inference_mode():
        logits = load_model(run)(as_unit(images.pixels.gather(rows))).float()
    own = {images.table.paths[row]: shares for row, shares in zip(rows, logits.softmax(1))}
    found = list(predict(run, folder))
    assert len(found) == len(own) == 16
    for row in found:
        name = str(Path(row.file).relative_to(folder.parent))
        assert torch.allclose(torch.tensor(row.probabilities), own[name], atol=1e-5)
    assert depths_of_run(run) == (12,)


def test_an_image_by_itself_is_as_deep_as_those_of_training(deep_run):
    run, _ = deep_run
    dark = numpy.full((16, 16, 4), 500, numpy.uint16)
    stored = io.BytesIO()
    tifffile.imwrite(stored, dark, photometric="minisblack", planarconfig="contig")
    pixels = RunClassifier(run).description.decode(ImageBytes("dark.tif", stored.getvalue()))
    assert set(pixels.ravel().tolist()) == {round(500 * 255 / 4095)}


def test_dark_images_alone_do_not_become_bright(deep_run, tmp_path, caplog):
    run, _ = deep_run
    dark = numpy.full((16, 16, 4), 500, numpy.uint16)
    tifffile.imwrite(tmp_path / "dark.tif", dark, photometric="minisblack", planarconfig="contig")
    (alone,) = predict(run, tmp_path)
    assert "These images use 10 bits, those of the run 12: white is 4095" in caplog.text
    tifffile.imwrite(tmp_path / "full.tif", dark + 3500, photometric="minisblack")
    beside, _ = predict(run, tmp_path)
    assert beside.probabilities == pytest.approx(alone.probabilities, abs=1e-6)
    pixels = RunClassifier(run).description.decode(tmp_path / "dark.tif")
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    with torch.inference_mode():
        served = load_model(run)(as_unit(image)).softmax(1)[0]
    assert alone.probabilities == pytest.approx(served.tolist(), abs=1e-5)


def test_a_site_measures_what_is_predicted_for_its_dark_images(deep_run, tmp_path):
    run, folder = deep_run
    for kind in folder.iterdir():
        for number in range(4):
            values = numpy.full((16, 16, 4), 300 + 40 * number, numpy.uint16)
            file = tmp_path / "site" / kind.name / f"{number}.tif"
            file.parent.mkdir(parents=True, exist_ok=True)
            tifffile.imwrite(file, values, photometric="minisblack", planarconfig="contig")
    (domain,) = validate(run, tmp_path / "site", domain="clinic").domains
    expected = [row.confidence for row in predict(run, tmp_path / "site")]
    assert domain.mean_confidence == pytest.approx(numpy.mean(expected), abs=1e-4)


def predicted_as_served(folder, used, depths):
    """The bits of white in each image of these bits, to a run whose domains use these depths."""
    fields = {"class_names": ["a"], "image_size": 16, "resize": "squash", "input": "RGB"}
    about = ModelDescription(**fields, depths=depths)
    files = [folder / f"{bits}.tif" for bits in used]
    for file, bits in zip(files, used):
        pixels = numpy.full((16, 16), 2**bits - 1, numpy.uint16)
        tifffile.imwrite(file, pixels, photometric="minisblack")
    predictor = predictor_of(SimpleNamespace(description=about), files, 1)
    found = [predictor.decode(file)[0][1] for file in files]
    if len(files) == 1 or len(depths) > 1:
        assert all((about.decode(file) == pixels).all() for file, pixels in zip(files, found))
    whites = [(2**bits - 1) * 255 / int(pixels.max()) for bits, pixels in zip(used, found)]
    return [round(math.log2(white)) for white in whites]


def test_images_as_deep_as_a_domain_of_the_run_are_read_as_there(tmp_path, caplog):
    assert predicted_as_served(tmp_path, [12], (12, 16)) == [12]
    assert predicted_as_served(tmp_path, [12], ()) == [12]
    assert predicted_as_served(tmp_path, [12], (12,)) == [12]
    assert "These images use" not in caplog.text


def test_a_deeper_file_does_not_darken_those_beside_it(tmp_path, caplog):
    assert predicted_as_served(tmp_path, [12, 16, 14], (12, 16)) == [12, 16, 16]
    assert "These images use 16 bits, those of the run 12 and 16: white in each is" in caplog.text
    assert "a dark image of a deeper domain becomes brighter" in caplog.text
    assert predicted_as_served(tmp_path, [12, 14], (10, 12)) == [12, 14]
    assert "These images use 14 bits, those of the run 10 and 12: white in each is" in caplog.text


def test_images_of_a_run_of_one_depth_have_one_white(tmp_path, caplog):
    assert predicted_as_served(tmp_path, [12, 14], (12,)) == [14, 14]
    assert "These images use 14 bits, those of the run 12: white is 16383" in caplog.text


def test_large_images_have_a_row_for_every_tile_as_in_training(tmp_path, cache):
    rng = numpy.random.default_rng(1)
    for domain in ("north", "south", "west"):
        for kind, shade in (("corn", 60), ("wheat", 190)):
            file = tmp_path / "images" / domain / kind / "field.png"
            file.parent.mkdir(parents=True)
            pixels = rng.integers(shade - 40, shade + 40, (96, 128, 3), numpy.uint8)
            Image.fromarray(pixels).save(file)
    data = {"source": "folder", "root": str(tmp_path / "images"), "image_size": 16, "tile": 32}
    run = trained_run(
        tmp_path / "runs",
        cache,
        data=data | {"id_val": 0, "id_test": 0},
        hold_out="west",
        model={"backbone": "cnn", "weights": "none"},
        clients={"number": 2, "partition": "domain"},
        train={"rounds": 1, "local_steps": 2, "batch_size": 8, "augmentation": "none"},
    )
    images = load_images(load_stored(run / EXPERIMENT), cache, lambda *_: None)
    rows = torch.from_numpy(images.splits.test)
    with torch.inference_mode():
        logits = load_model(run)(as_unit(images.pixels.gather(rows))).float()
    found = list(predict(run, tmp_path / "images" / "west"))
    names = [str(Path(row.file).relative_to(tmp_path / "images")) for row in found]
    assert names == [images.table.paths[row] for row in rows]
    assert len(names) == 24
    shares = torch.tensor([row.probabilities for row in found])
    assert torch.allclose(shares, logits.softmax(1), atol=1e-5)
    done = predict_files(run, [tmp_path / "images" / "west"], tmp_path / "labels.csv")
    assert (done.files, len(read_csv(done.out))) == (2, 24)
    measured = read_run(run).table.where(split="test", metric="accuracy", weights="last").rows
    assert {(row.examples, row.groups) for row in measured} == {(24, 2)}  # tiles of two files


def test_an_exported_file_labels_as_its_run_does(deep_run, tmp_path):
    for name in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(name, reason="needs the extra `export`")
    run, folder = deep_run
    file = export_run(run, tmp_path / "model.onnx", "onnx").path
    own, found = list(predict(run, folder)), list(predict(file, folder))
    assert [row.label for row in found] == [row.label for row in own]
    assert [row.unlike_training for row in found] == [row.unlike_training for row in own]
    shares = [numpy.array([row.probabilities for row in rows]) for rows in (own, found)]
    assert numpy.abs(shares[0] - shares[1]).max() < 1e-4
    for asked in ({"device": "cuda"}, {"precision": "half"}):
        with pytest.raises(RunError, match="for the CPU in float32"):
            load_classifier(file, **asked)
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    with pytest.raises(RunError, match="cannot be read as ONNX"):
        next(predict(tmp_path / "broken.onnx", folder))
