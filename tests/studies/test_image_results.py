"""Results by image: what is in the file, who may read it, and two runs compared by it."""

import json
import stat

import numpy as np
import pytest
from typer.testing import CliRunner

from feddg.api import compare
from feddg.cli import app
from feddg.errors import RunError
from feddg.runs.reading import read_run
from feddg.studies.image_results import (
    read_image_results,
    results_file,
    write_image_results,
    write_missing_results,
)
from feddg.studies.paired_runs import compare_images
from trained_runs import SETTINGS

pyarrow = pytest.importorskip("pyarrow", reason="needs PyArrow: pip install 'feddg[parquet]'")
arrow = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory, cache):
    train = {**SETTINGS["train"], "rounds": 1, "local_steps": 8}
    fields = {key: value for key, value in SETTINGS.items() if key != "hold_out"}
    fields["data"] = {**SETTINGS["data"], "image_size": 16}
    plan = {
        "base": {**fields, "train": train, "evaluate": {"every": 1}},
        "hold_out": ["sketch", "photo"],
        "methods": ["fedavg", "fedprox", "local"],
        "seeds": 1,
    }
    return compare(plan, tmp_path_factory.mktemp("runs") / "c", cache=cache, predictions=True)


@pytest.fixture(scope="module")
def folders(comparison):
    return {
        (run.method, run.held_out("test")[0]): run.folder
        for run in map(read_run, sorted(comparison.folder.glob("*-digits-*")))
    }


def test_the_file_holds_what_the_rows_count(folders):
    folder = folders["fedavg", "sketch"]
    file = results_file(folder)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    table = arrow.read_table(file).to_pydict()
    run = read_run(folder)
    classes = run.clients.classes
    shares = np.array([table[f"probability: {name}"] for name in classes]).T
    assert shares.sum(axis=1) == pytest.approx(1, abs=1e-5)
    assert table["predicted"] == [classes[place] for place in shares.argmax(axis=1)]
    for row in run.evaluations.at(1, "test") + run.evaluations.at(1, "id_val"):
        own = [
            (label, predicted)
            for label, predicted, split, domain in zip(
                table["label"], table["predicted"], table["split"], table["domain"]
            )
            if (split, domain) == (row.split, row.domain)
        ]
        assert len(own) == row.examples
        assert sum(a == b for a, b in own) / len(own) == pytest.approx(row.accuracy)
        counts = np.zeros((len(classes), len(classes)), int)
        for label, predicted in own:
            counts[classes.index(label), classes.index(predicted)] += 1
        assert counts.tolist() == row.confusion
    assert "train" not in table["split"]


def test_two_runs_are_compared_from_the_command_line(folders):
    pair = [str(folders[method, "sketch"]) for method in ("fedprox", "fedavg")]
    done = CliRunner().invoke(app, ["paired", *pair, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    records = [read_run(folders[method, "sketch"]) for method in ("fedprox", "fedavg")]
    accuracies = [record.evaluations.value(1, "test") for record in records]
    (pooled,) = (
        d for d in found["differences"] if (d["metric"], d["aggregate"]) == ("accuracy", "pooled")
    )
    assert [pooled["first"], pooled["second"]] == pytest.approx(accuracies)
    assert pooled["low"] <= pooled["first"] - pooled["second"] <= pooled["high"]
    shown = CliRunner().invoke(app, ["paired", *pair])
    assert "McNemar: " in shown.output
    assert "95 %" in shown.output


def test_the_comparisons_page_has_them_and_says_nothing_of_runs_without(comparison):
    page = comparison.report.read_text("utf-8")
    assert "Image by image" in page
    assert "Only FedAvg" in page


def test_runs_on_different_images_are_refused(folders):
    one, other = (read_image_results(folders["fedavg", held]) for held in ("sketch", "photo"))
    with pytest.raises(RunError, match=r"measured on different images: 447 and 449"):
        compare_images(one, other)


def test_clients_without_a_model_in_common_have_none_and_are_told_of(folders, cache):
    folder = folders["local", "sketch"]
    assert not results_file(folder).exists()
    (reason,) = write_missing_results([folder, folders["fedavg", "sketch"]], cache=cache)
    assert "every client has a model of its own" in reason
    with pytest.raises(RunError, match=r"feddg evaluate .* --predictions"):
        read_image_results(folder)


def test_another_model_has_a_file_of_its_own_and_damage_is_told_of(folders, cache):
    folder = folders["fedprox", "photo"]
    written = write_image_results(folder, which="best_in_domain", cache=cache)
    assert written == results_file(folder, "best_in_domain")
    assert read_image_results(folder, "best_in_domain").which == "best_in_domain"
    written.write_bytes(written.read_bytes()[:-40])
    with pytest.raises(RunError, match="is damaged or no results by image"):
        read_image_results(folder, "best_in_domain")
    arrow.write_table(pyarrow.table({"file": ["a"]}), written)
    with pytest.raises(RunError, match="is damaged or no results by image"):
        read_image_results(folder, "best_in_domain")
