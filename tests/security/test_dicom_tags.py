"""What DICOM files say of a patient is in nothing that is written, shown or sent."""

import logging

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("pydicom", reason="pydicom is an optional extra")

import pydicom

import feddg
from dicoms import SECRETS, dicom, put_raw
from feddg.cli import app
from feddg.experiment import Experiment

DOMAINS = ("ward", "clinic", "lab")
FIELDS = {
    "data": {"source": "folder", "image_size": 16, "id_val": 0, "id_test": 0},
    "hold_out": "lab",
    "clients": {"number": 2, "partition": "domain"},
    "model": {"backbone": "cnn", "weights": "none"},
    "train": {"rounds": 2, "local_steps": 2, "batch_size": 4, "augmentation": "none"},
    "device": "cpu",
    "precision": "float32",
}


@pytest.fixture(scope="module")
def hospital(tmp_path_factory):
    """``root/domain/class/*.dcm``; in each class some files are cut off, one has spoiled tags."""
    root, rng = tmp_path_factory.mktemp("hospital"), np.random.default_rng(0)
    for domain in DOMAINS:
        for label, shade in (("ill", 200), ("well", 900)):
            for number in range(10):
                pixels = rng.integers(0, 300, (20, 20)).astype(np.uint16) + shade
                tags = {"WindowCenter": "600", "WindowWidth": "1200"} if number % 2 else {}
                path = dicom(root / domain / label / f"{number}.dcm", pixels, bits=12, **tags)
            whole = path.read_bytes()
            (root / domain / label / "torn.dcm").write_bytes(whole[:-90])
            (root / domain / label / "torn early.dcm").write_bytes(whole[: len(whole) // 4])
            spoiled = pydicom.dcmread(path)
            put_raw(spoiled, "WindowCenter", "DS", b"Planted^Hildegard ")
            spoiled.save_as(root / domain / label / "spoiled.dcm")
            (root / domain / label / "unnamed").write_bytes(whole)
    return root


def leaks(texts, *folders):
    """Which secrets are in texts, and in the names and bytes of files."""
    found = [(secret, text[:200]) for text in texts for secret in SECRETS if secret in text]
    files = [file for folder in folders for file in sorted(folder.rglob("*"))]
    for file in files:
        content = file.read_bytes() if file.is_file() else b""
        held = [s for s in SECRETS if s in file.name or s.encode() in content]
        found += [(secret, str(file)) for secret in held]
    assert len(files) > 5
    return found


def test_a_run_its_report_its_caches_and_its_predictions(
    hospital, tmp_path, capfd, caplog, monkeypatch
):
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path / "home"))
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, logger="feddg")
    data = {**FIELDS["data"], "root": str(hospital)}
    out, cache, table = tmp_path / "runs", tmp_path / "cache", tmp_path / "table.csv"
    run = feddg.run(Experiment(method="pardon", **{**FIELDS, "data": data}), out, cache=cache)
    invoke = CliRunner().invoke
    inspected = invoke(app, ["data", "inspect", "--data", "folder", "--root", str(hospital)])
    files = [str(hospital / "lab"), "--out", str(table), "--html", str(tmp_path / "page.html")]
    predicted = invoke(app, ["predict", str(run.folder), *files])
    shown = [inspected.output, predicted.output, *capfd.readouterr(), caplog.text]
    assert "18 of 78 images left out" in caplog.text
    assert "a damaged DICOM file" in table.read_text()
    assert "DICOM and not named so" in caplog.text
    assert leaks(shown, tmp_path) == []


def test_what_sites_send_and_what_the_coordinator_keeps(hospital, tmp_path, capfd, caplog):
    pytest.importorskip("flwr", reason="Flower is an optional extra")
    from feddg.deploy import client_app
    from flower_grid import Deployment, LocalGrid

    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, logger="feddg")
    chosen = Experiment(method="pardon", **{**FIELDS, "hold_out": {"test": [], "val": []}})
    config = {"sites": "ward,clinic", "test": str(hospital / "lab"), "test-domain": "lab"}
    deployment, crossed = Deployment(tmp_path, chosen, **config), []
    own = {"device": "cpu"}
    sites = {
        name: own | {"images": str(hospital / name), "domain": name, "cache": str(tmp_path / name)}
        for name in ("ward", "clinic")
    }

    def site(message, context):
        reply = client_app.app(message, context)
        for content in (message.content, reply.content):
            crossed.extend(str(dict(record)) for record in content.config_records.values())
            arrays = [a for record in content.array_records.values() for a in record.values()]
            crossed.extend(array.data.decode("latin-1") for array in arrays)
        return reply

    deployment.grid = LocalGrid(sites, site, deployment.config)
    deployment.start()
    assert len(crossed) > 20
    assert leaks([*crossed, *capfd.readouterr(), caplog.text], tmp_path) == []
