"""Sites with tables of features: the bits of one process, and what is wrong said of its site."""

import numpy
import pandas
import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra")

from feddg.api import run
from feddg.deploy import client_app, server_app
from feddg.deploy.preflight import check_site
from feddg.deploy.setup import write_app
from feddg.errors import ExperimentError, RunError
from feddg.experiment import Experiment
from feddg.prediction.predict import predict
from feddg.runs.reading import read_run
from federations import same
from flower_grid import LocalGrid, weights

WIDTH, SITES = 12, ("graz", "lyon", "oslo")


def frame_of(domains):
    """Features of three classes, 30 rows a domain."""
    rng = numpy.random.default_rng(0)
    centres = rng.normal(size=(3, WIDTH))
    frames = []
    for domain in (*SITES, "rome"):
        labels = numpy.arange(30) % 3
        features = 2 * centres[labels] + rng.normal(size=(30, WIDTH))
        frame = pandas.DataFrame(features.astype(numpy.float32)).add_prefix("f")
        frames.append(frame.assign(organ=numpy.array(["cat", "dog", "eel"])[labels], domain=domain))
    whole = pandas.concat(frames)
    return whole[whole["domain"].isin(domains)]


def experiment(method, **data):
    own = {"source": "features", "features": WIDTH, "options": {"label": "organ"}}
    return Experiment(
        data={**own, "id_val": 0.0, "id_test": 0.0, **data},
        hold_out="rome",
        method=method,
        clients={"number": 3, "partition": "domain"},
        train={"rounds": 1 if method == "ridge" else 3, "local_epochs": 2, "batch_size": 8},
        device="cpu",
    )


@pytest.fixture
def tables(tmp_path):
    """A table of all, one of each site, and one of the coordinator's."""
    places = {"all": (*SITES, "rome"), **{site: (site,) for site in (*SITES, "rome")}}
    for name, domains in places.items():
        frame_of(domains).to_csv(tmp_path / f"{name}.csv", index=False)
    return tmp_path


def start(folder, chosen):
    config = {
        "experiment": chosen.to_yaml(),
        "sites": ",".join(SITES),
        "out": str(folder / "runs"),
        "test": str(folder / "rome.csv"),
        "cache": str(folder / "coordinator"),
        "poll-seconds": 0.001,
        "wait-seconds": 0.01,
    }
    nodes = {
        site: {"images": str(folder / f"{site}.csv"), "cache": str(folder / site), "device": "cpu"}
        for site in SITES
    }
    return server_app.coordinate(LocalGrid(nodes, client_app.app, config), config)


@pytest.mark.parametrize("method", ["ridge", "fedavg", "scaffold"])
def test_tables_of_features_over_flower_have_the_bits_of_one_process(tables, method):
    alone = experiment(method, root=tables / "all.csv")
    expected = run(alone, tables / "alone", cache=tables / "cache", report=False)
    done = start(tables, experiment(method))
    assert done.status == "completed"
    assert same(weights(done.folder), weights(expected.folder))
    last = done.rounds_done
    ours, theirs = (
        [(row.metric, row.value) for row in one.table.where(round=last, domain="rome")]
        for one in (done, expected)
    )
    assert ours == theirs != []
    assert read_run(done.folder).settings["data"]["features"] == WIDTH


def narrower(frame):
    return frame.drop(columns="f3")


def misnamed(frame):
    return frame.rename(columns={"organ": "tissue"})


@pytest.mark.parametrize(
    ("change", "at_the_site"),
    [
        (narrower, "a row of its table has 11 features, and 12 in the federation"),
        (misnamed, "lyon.csv has no column 'organ'"),
        (lambda frame: frame.rename(columns={"f3": "f03x"}), "lacks 'f3' and has 'f03x'"),
        (lambda frame: frame.assign(f3="x"), "column 'f3', which holds no numbers"),
    ],
)
def test_a_table_that_does_not_fit_is_said_of_its_site(tables, caplog, change, at_the_site):
    change(frame_of(["lyon"])).to_csv(tables / "lyon.csv", index=False)
    with pytest.raises(RunError, match=r"missing: lyon"):
        start(tables, experiment("ridge"))
    said = [record.getMessage() for record in caplog.records]
    assert any(at_the_site in line and "\n" not in line for line in said)
    assert any("'lyon'" in line for line in said)  # at the coordinator


def test_a_test_table_with_other_columns_is_refused_and_names_are_kept(tables):
    other = frame_of(["rome"]).rename(columns={"f3": "g3"})
    other.to_csv(tables / "rome.csv", index=False)
    with pytest.raises(ExperimentError, match=r"rome\.csv lacks 'f3' and has 'g3'"):
        start(tables, experiment("ridge"))
    columns = frame_of(["rome"]).columns[::-1]
    frame_of(["rome"])[columns].to_csv(tables / "rome.csv", index=False)
    done = start(tables, experiment("ridge"))
    assert done.clients.features == [f"f{number}" for number in range(WIDTH)]
    other.to_csv(tables / "odd.csv", index=False)
    (row,) = predict(done.folder, tables / "odd.csv")
    assert row.label is None
    assert "odd.csv lacks 'f3' and has 'g3'" in row.reason


def test_an_app_of_tables_says_how_wide_they_are_and_a_site_is_checked(tables):
    file = tables / "experiment.yaml"
    file.write_text(experiment("fedavg", features=None).to_yaml())
    with pytest.raises(ExperimentError, match=r"set data\.features to their number in a row"):
        write_app(tables / "app", file, SITES)
    file.write_text(experiment("fedavg").to_yaml())
    write_app(tables / "app", file, SITES, test=str(tables / "rome.csv"))
    place = tables / "app" / "sites" / "lyon"
    found = {one.code: one for one in check_site(place, str(tables / "lyon.csv"), offline=True)[1]}
    assert {one.severity for one in found.values()} <= {"note", "warning"}
    assert "classes" not in found
    frame_of(["lyon"]).rename(columns={"f3": "g3"}).to_csv(tables / "lyon.csv", index=False)
    found = {one.code: one for one in check_site(place, str(tables / "lyon.csv"), offline=True)[1]}
    assert "lacks 'f3' and has 'g3': its columns are not those of this" in found["joining"].text
    narrower(frame_of(["lyon"])).to_csv(tables / "lyon.csv", index=False)
    (_, (odd,)) = check_site(place, str(tables / "lyon.csv"), offline=True)
    assert "11 features" in odd.text
