"""Tables of features: read in three formats, trained on, predicted, and refused with a reason."""

import re
from pathlib import Path

import numpy
import pandas
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors
from typer.testing import CliRunner

import feddg
from feddg.cli import app
from feddg.clients.threads import threads
from feddg.data.data_set import load_source
from feddg.data.pixels import Vectors
from feddg.diagnostics import silent
from feddg.errors import DataError, ExperimentError
from feddg.experiment import Experiment
from feddg.methods.base import methods
from feddg.models import precision
from feddg.prediction.classifier import RunClassifier
from feddg.prediction.export import save_model
from feddg.prediction.model import load_model
from feddg.runs.beforehand import preview
from feddg.runs.inspection import inspect_experiment
from federations import ridge_of

CLASSES = ("cat", "dog", "eel")
NEED_IMAGES = [
    *(
        "ccst",
        "dart",
        "elcfs",
        "jigen",
        "l2d",
        "mixup",
        "outlines",
        "pardon",
        "randaug",
        "randconv",
    ),
    "vista",
]
NEED_LAYERS = ["csac", "fedbn", "fedig", "fedig-a", "mixstyle", "silobn"]


def frame_of(rows: int = 90, width: int = 12) -> pandas.DataFrame:
    """Returns features of three classes in three domains."""
    rng = numpy.random.default_rng(0)
    labels, domains = numpy.arange(rows) % 3, numpy.arange(rows) // 3 % 3
    centres = rng.normal(size=(3, width))
    features = 2 * centres[labels] + rng.normal(size=(rows, width)) + 0.3 * domains[:, None]
    frame = pandas.DataFrame(features.astype(numpy.float32)).add_prefix("f")
    frame["label"] = [CLASSES[label] for label in labels]
    frame["domain"] = ["abc"[domain] for domain in domains]
    frame["path"] = [f"{row}.jpg" for row in range(rows)]
    return frame


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A CSV table in a folder that is the present one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "features.csv"
    frame_of().to_csv(file, index=False)
    return file


def run(file, **fields):
    options = {"hold_out": "c", "rounds": 2, "clients": 2, "report": False} | fields
    return feddg.run(data={"source": "features", "root": file}, **options)


# Reading.


def test_csv_parquet_lists_and_safetensors_are_one_table(table):
    pytest.importorskip("pyarrow")
    frame = frame_of()
    names = [name for name in frame if name.startswith("f")]
    frame[[*reversed(frame.columns)]].to_parquet("wide.parquet")
    lists = frame[["label", "domain", "path"]].copy()
    lists["embedding"] = list(frame[names].to_numpy())
    lists.to_parquet("lists.parquet")
    first = load_source("features", table)
    assert first.images.shape == (90, 12)
    assert first.class_names == CLASSES
    assert first.domain_names == ("a", "b", "c")
    assert first.paths[:2] == ("0.jpg", "1.jpg")
    for file in ("wide.parquet", "lists.parquet"):
        other = load_source("features", table.with_name(file))
        numpy.testing.assert_array_equal(other.images, first.images)
        numpy.testing.assert_array_equal(other.labels, first.labels)
    numbers = {"label": first.labels, "domain": first.domains, "features": first.images}
    save_file(numbers, table.with_name("t.safetensors"))
    other = load_source("features", table.with_name("t.safetensors"))
    numpy.testing.assert_array_equal(other.images, first.images)
    assert other.class_names == ("0", "1", "2")


def test_several_tensors_of_features_are_columns_of_their_own(tmp_path):
    random = numpy.random.default_rng(0)
    near, far = (random.normal(size=(6, width)).astype("float32") for width in (4, 2))
    tensors = {"label": numpy.arange(6) % 2, "domain": numpy.arange(6) // 3, "f": near, "g": far}
    save_file(tensors, tmp_path / "t.safetensors")
    found = load_source("features", tmp_path / "t.safetensors")
    assert found.feature_names == ("f 0", "f 1", "f 2", "f 3", "g 0", "g 1")
    numpy.testing.assert_array_equal(found.images, numpy.concatenate([near, far], 1))


def test_columns_have_other_names_and_clients_and_splits(table):
    frame = frame_of().rename(columns={"label": "organ", "domain": "site", "path": "slide"})
    frame["client"] = numpy.arange(len(frame)) % 4
    frame["split"] = numpy.where(frame["site"] == "c", "test", "train")
    frame.to_csv(table, index=False)
    options = {"label": "organ", "domain": "site", "path": "slide"}
    found = load_source("features", table, **options)
    assert found.images.shape == (90, 12)
    assert set(found.clients) == {"0", "1", "2", "3"}
    assert set(found.split) == {"train", "test"}


def test_names_stay_as_they_are_written(table):
    frame = frame_of()
    frame["label"] = numpy.array(["007", "07", "None"])[numpy.arange(90) % 3]
    frame["domain"] = numpy.array(["1.10", "1.1", "NA"])[numpy.arange(90) // 3 % 3]
    frame["client"] = [" 001", "001"] * 45
    frame.to_csv(table, index=False)
    found = load_source("features", table)
    assert found.class_names == ("007", "07", "None")
    assert found.domain_names == ("1.1", "1.10", "NA")
    assert set(found.clients) == {"001"}


def test_a_class_in_two_forms_of_unicode_is_one(table):
    names = numpy.array(["e\u0301lan", "\xe9lan", "cat"])
    frame_of().assign(label=names[numpy.arange(90) % 3]).to_csv(table, index=False)
    assert load_source("features", table).class_names == ("cat", "\xe9lan")


def test_bfloat16_becomes_float32(table):
    frame = frame_of()
    features = frame[[name for name in frame if name.startswith("f")]].to_numpy()
    halves = torch.from_numpy(features.copy()).bfloat16()
    file = table.with_name("t.safetensors")
    numbers = {name: torch.arange(90) % 3 for name in ("label", "domain")}
    save_tensors({**numbers, "features": halves}, file)
    found = load_source("features", file).images
    assert found.dtype == numpy.float32
    assert (torch.from_numpy(found) == halves.float()).all()


def test_a_pressure_and_a_year_are_not_rounded_away(tmp_path, monkeypatch):
    """Where bfloat16 is fast it is the default; in eight bits all these rows would be one."""
    monkeypatch.setattr(precision, "has_fast_bfloat16", lambda device: True)
    random = numpy.random.default_rng(0)
    well = random.random(400) < 0.5
    shift = numpy.where(well, 1.0, -1.0)[:, None] + random.normal(size=(400, 2)) / 2
    frame = pandas.DataFrame(
        numpy.array([101_325, 2015]) + shift * [150, 3], columns=["Pa", "year"]
    )
    frame = frame.assign(label=numpy.where(well, "well", "ill"), domain=[*"abcd"] * 100)
    frame.to_csv(tmp_path / "t.csv", index=False)
    where = {"out": tmp_path, "cache": tmp_path / "cache", "report": False}
    data = {"source": "features", "root": tmp_path / "t.csv"}
    done = feddg.run(data=data, method="ridge", hold_out="a", clients=3, **where)
    assert done.environment["precision"] == "float32"
    assert done.accuracy > 0.9
    assert RunClassifier(done.folder, precision="auto").precision == "float32"


def test_whole_numbers_that_float32_does_not_have_are_named(tmp_path, caplog):
    frame = frame_of().assign(when=1_700_000_001 + numpy.arange(90), small=numpy.arange(90))
    frame["real"] = frame["when"] + 0.0
    frame["even"] = 2.0 ** (25 + frame["small"] % 3)  # which float32 has
    frame.to_csv(tmp_path / "t.csv", index=False)
    load_source("features", tmp_path / "t.csv")
    (line,) = [line for line in caplog.messages if "rounds them" in line]
    assert "in real, when:" in line


def test_whole_numbers_in_lists_that_float32_does_not_have_are_said(tmp_path, caplog):
    rows = torch.arange(90)
    columns = {"v": torch.stack([100_000_001 + rows, rows], 1), "label": rows % 3}
    save_tensors(columns | {"domain": rows // 3 % 3}, tmp_path / "t.safetensors")
    load_source("features", tmp_path / "t.safetensors")
    assert "in v: features are float32, which rounds them" in caplog.text


def test_tensors_of_other_kinds_and_shapes(tmp_path):
    file, rows = tmp_path / "t.safetensors", torch.arange(90)
    whole = {"label": rows[:, None] % 3, "domain": rows % 3, "features": torch.rand(90, 4)}
    save_tensors(whole | {"features": whole["features"].to(torch.float8_e4m3fn)}, file)
    found = load_source("features", file)
    assert found.class_names == ("0", "1", "2")
    assert (
        torch.from_numpy(found.images) == whole["features"].to(torch.float8_e4m3fn).float()
    ).all()
    for odd in ({"label": torch.rand(90, 2)}, {"more": torch.tensor(1.0)}):
        save_tensors(whole | odd, file)
        with pytest.raises(DataError, match=f"the column '{next(iter(odd))}' is .*: expected"):
            load_source("features", file)


@pytest.mark.parametrize("kind", ["Float32", "Int64"])
def test_a_missing_number_of_parquet_is_named(table, kind):
    pytest.importorskip("pyarrow")
    frame = frame_of().assign(f3=pandas.array([1] * 89 + [None], dtype=kind))
    frame.to_parquet("t.parquet")
    with pytest.raises(DataError, match=r"row 90 of t\.parquet .* NaN"):
        load_source("features", table.with_name("t.parquet"))
    frame.iloc[:89].to_parquet("t.parquet")
    assert load_source("features", table.with_name("t.parquet")).images.dtype == numpy.float32


def test_a_table_that_is_wrong_is_refused_in_one_line(subtests, table):
    for change, words in [
        (lambda f: f.drop(columns="label"), "no column 'label'"),
        (lambda f: f.rename(columns={"domain": "domian"}), "did you mean 'domian'"),
        (lambda f: f.assign(note="fine"), "column 'note', which holds no numbers"),
        (lambda f: f.assign(f3=numpy.where(f.index == 4, numpy.inf, f.f3)), "row 5 .* infinite"),
        (lambda f: f.assign(f3=numpy.where(f.index == 4, numpy.nan, f.f3)), "row 5 .* NaN"),
        (lambda f: f.assign(label=f.label.where(f.index != 7)), "row 8 .* has no label"),
        (lambda f: f[["label", "domain", "path"]], "no column of features"),
        (lambda f: f.iloc[:0], "no rows"),
        (lambda f: f.assign(split="learn"), "row 1 .* 'learn' as split"),
        (
            lambda f: f.assign(path=[f"{row // 9}-{row % 3}.png" for row in range(90)]),
            r"row 1 \(domain 'a'\) and row 4 \(domain 'b'\) .* '0-0.png'",
        ),
        (
            lambda f: f.assign(path=[f"{row % 30}.png#x{row}y0w9h9" for row in range(90)]),
            r"row 1 \(domain 'a'\) and row 31 \(domain 'b'\) .* '0.png'",
        ),
        (lambda f: f.assign(path="scan.png"), r"row 2 \(domain 'a'\) .* 'scan.png'"),
        (lambda f: f.rename(columns={"f3": "f2"}), "two columns called 'f2'"),
        (lambda f: f.rename(columns={"f3": "f\x1b"}), "cannot be printed"),
        (lambda f: f.replace("cat", "c\x1b[31mat"), r"row 1 .* 'c\\x1b\[31mat' as label"),
        (lambda f: f.replace("a", "a\nb"), r"row 1 .* as domain"),
        (lambda f: f.replace("4.jpg", "4\u2028.jpg"), "row 5 .* as path"),
    ]:
        with subtests.test(words=words):
            change(frame_of()).to_csv(table, index=False)
            with pytest.raises(DataError, match=words) as refused:
                load_source("features", table)
            assert "\n" not in str(refused.value)


def test_a_column_that_is_named_and_is_not_there_is_said(table):
    frame_of().assign(patient=1).to_csv(table, index=False)  # it would be a feature
    with pytest.raises(DataError, match=r"no column 'pateint' \(did you mean 'patient'"):
        load_source("features", table, client="pateint")
    with pytest.raises(DataError, match="no column 'group'"):
        load_source("features", table, group="group")
    frame_of().to_csv(table, index=False, sep=";")
    with pytest.raises(DataError, match=r"no column 'label'; it has: f0;f1;.*;label;domain;path"):
        load_source("features", table)


def test_the_order_of_names_is_the_same_for_all_tables(table):
    columns = frame_of()[["label", "domain", "f1"]].assign(f01=1.0)
    columns.to_csv(table, index=False)
    columns[[*reversed(columns.columns)]].to_csv("other.csv", index=False)
    first, other = (load_source("features", table.with_name(n)) for n in (table.name, "other.csv"))
    assert first.feature_names == other.feature_names
    numpy.testing.assert_array_equal(first.images, other.images)


def test_the_row_numbers_that_pandas_writes_are_no_feature(table):
    frame_of().to_csv(table)
    with pytest.raises(DataError, match=r"'Unnamed: 0': write the file with index=False"):
        load_source("features", table)


def test_lists_of_two_lengths_and_of_text_are_refused(table):
    pytest.importorskip("pyarrow")
    frame = frame_of()[["label", "domain"]]
    for lists, words in (
        ([[1.0, 2.0]] * 89 + [[1.0]], "row 90 .* 1 features as e, the first row 2"),
        ([["a", "b"]] * 90, "column 'e', which holds no numbers"),
    ):
        frame.assign(e=lists).to_parquet("lists.parquet")
        with pytest.raises(DataError, match=words):
            load_source("features", table.with_name("lists.parquet"))


@pytest.mark.parametrize("name", ["nothing.csv", "table.xlsx"])
def test_a_file_that_is_none_is_refused(table, name):
    with pytest.raises(DataError, match="no table of features"):
        load_source("features", table.with_name(name))


# Training and predicting.


def test_ridge_is_scikit_learns(table):
    data = {"source": "features", "root": table, "id_val": 0.0, "id_test": 0.0}
    method = {"name": "ridge", "penalties": [0.5]}
    done = feddg.run(data=data, method=method, hold_out="c", clients=2, report=False)
    frame = frame_of()
    images = frame[[name for name in frame if name.startswith("f")]].to_numpy(numpy.float32)
    logits = load_model(done.folder)(torch.from_numpy(images.copy())).detach().double().numpy()
    trained = (frame["domain"] != "c").to_numpy()
    expected = ridge_of(images[trained], numpy.arange(90)[trained] % 3, 0.5).predict(images)
    scale = (logits * expected).sum() / (expected * expected).sum()  # a temperature
    numpy.testing.assert_allclose(logits / scale, expected, atol=1e-6)


def test_what_a_run_learnt_labels_another_table(table):
    done = run(table, method="fedprox", rounds=20, lr=0.01)
    assert done.experiment.data.features == 12
    assert done.accuracy > 0.6
    unseen = frame_of().drop(columns=["label", "domain"])
    unseen[[*reversed(unseen.columns)]].to_csv("unseen.csv", index=False)
    rows = list(feddg.predict(done.folder, "unseen.csv"))
    assert [row.file for row in rows] == [f"{row}.jpg" for row in range(90)]
    right = [row.label == label for row, label in zip(rows, frame_of()["label"])]
    assert sum(right) > 60
    save_model(done.folder, Path("shared"))
    assert list(feddg.predict("shared", "unseen.csv")) == rows
    for odd, words in (
        (unseen.drop(columns="f3"), r"lacks 'f3': its columns"),
        (unseen.rename(columns={"f3": "g3"}), "lacks 'f3' and has 'g3'"),
        (unseen.assign(age=70.0), "has 'age'"),
    ):
        odd.to_csv("odd.csv", index=False)
        for model in (done.folder, "shared"):
            (row,) = feddg.predict(model, "odd.csv")
            assert re.search(f"odd.csv {words}", row.reason)


def test_a_bad_table_or_row_does_not_stop_the_others(table):
    folder = run(table, method="ridge").folder
    unseen = frame_of(6).drop(columns=["label", "domain"])
    unseen.to_csv("good.csv", index=False)
    unseen.drop(columns="f3").to_csv("narrow.csv", index=False)
    large = unseen.f3.where(unseen.index > 1, 3e38)  # their logits are infinite
    unseen.assign(f3=large).to_csv("partly.csv", index=False)
    named = ["narrow.csv", "good.csv", "partly.csv"]
    done = feddg.predict_files(folder, named, Path("labels.csv"))
    assert (done.files, done.failed) == (3, 1)
    assert len(done.faults) == 1 + 2
    assert sum(done.labels.values()) == 6 + 4
    ended = CliRunner().invoke(app, ["predict", str(folder), *named, "--out", "x.csv", "-q"])
    assert ended.exit_code == 0
    assert "2 of 3 tables labelled" in ended.output


def diagnosed(file, **changes):
    """Returns the codes of what a run says of a table, besides what it says of every table."""
    frame = frame_of().assign(**changes)
    frame.to_csv(file, index=False)
    chosen = Experiment(data={"source": "features", "root": file}, hold_out="c")
    return {one["code"]: one["text"] for one in inspect_experiment(chosen, silent)["diagnostics"]}


@pytest.mark.parametrize("scale", [1, -7])
def test_a_column_that_is_the_class_is_named(table, scale):
    numbers = numpy.arange(90)
    assert "column-tells-the-class" not in diagnosed(table, constant=1.0, coin=numbers // 9 % 2)
    said = diagnosed(table, y=scale * (numbers % 3), coin=numbers // 9 % 2)
    assert "column 'y' tells" in said["column-tells-the-class"]
    noisy = numbers % 3 + numpy.random.default_rng(0).uniform(-0.3, 0.3, 90)
    assert "column 'noisy' tells" in diagnosed(table, noisy=noisy)["column-tells-the-class"]


def test_copies_of_held_out_rows_are_refused_and_near_ones_named(table):
    frame = frame_of()
    names = [name for name in frame if name.startswith("f")]
    copies = frame[frame["domain"] == "c"].assign(domain="a", path=lambda f: "a/" + f["path"])
    pandas.concat([frame, copies]).to_csv(table, index=False)
    with pytest.raises(DataError, match=r"\(\d+ of test; .*row 91 of"):
        run(table, method="ridge")
    copies[names] *= 1 + 1e-5
    pandas.concat([frame, copies]).to_csv(table, index=False)
    chosen = Experiment(data={"source": "features", "root": table}, hold_out="c")
    said = {one["code"]: one["text"] for one in inspect_experiment(chosen, silent)["diagnostics"]}
    assert "a/6.jpg and 6.jpg" in said["near-copies"] or "a/7.jpg" in said["near-copies"]
    assert "near-copies" not in diagnosed(table)


def test_the_scale_of_features_changes_nothing_in_closed_form(table):
    frame = frame_of()
    names = [name for name in frame if name.startswith("f")]
    frame[names] += 2 * numpy.random.default_rng(1).normal(size=(90, 12))
    rights = set()
    for scale in (1.0, 1e-6, 1e4, 1e6):
        (frame[names] * scale).join(frame[["label", "domain"]]).to_csv(table, index=False)
        rights.add(run(table, name=f"{scale:g}", method="ridge", clients=3).accuracy)
    assert len(rights) == 1
    assert 0.4 < rights.pop() < 1


def test_travel_expects_an_accuracy_on_a_table(table):
    done = run(table, method="ridge")
    unseen = frame_of()[lambda rows: rows["domain"] == "c"].drop(columns=["label", "domain"])
    unseen.to_csv("unseen.csv", index=False)
    found = feddg.travel(done.folder, "unseen.csv")
    assert len(found.images) == 30
    assert found.expected is None or found.expected.low <= done.accuracy <= found.expected.high


@pytest.mark.parametrize("width", [2, 6])
def test_travel_sees_that_rows_are_of_something_else_where_there_are_few_columns(table, width):
    frame = frame_of(width=width)
    frame.to_csv("few.csv", index=False)
    where = {"data": {"source": "features", "root": "few.csv"}, "cache": "cache", "out": "runs"}
    done = feddg.run(**where, hold_out="c", clients=2, method="ridge", report=False)
    rows = frame[frame["domain"] == "c"].drop(columns=["label", "domain"])
    numbers = [name for name in rows if name.startswith("f")]
    rows.to_csv("unseen.csv", index=False)
    noise = numpy.random.default_rng(1).normal(100, 50, (len(rows), width))
    rows.assign(**dict(zip(numbers, noise.T))).to_csv("noise.csv", index=False)
    assert feddg.travel(done.folder, "noise.csv").expected is None
    assert feddg.travel(done.folder, "unseen.csv").expected is not None


def test_a_comparison_and_privacy_and_secure_sums(table):
    found = feddg.compare(
        ["fedavg", "ridge"],
        data={"source": "features", "root": table},
        hold_out="c",
        rounds=2,
        clients=3,
        seeds=1,
    )
    assert set(found.frame()["method"]) == {"fedavg", "ridge"}
    private = run(table, privacy={"record_epsilon": 8.0}, name="private")
    assert private.experiment.privacy.record_epsilon == 8.0
    run(table, clients=3, defences=["secure_aggregation"], name="secure")


def test_a_wide_network_on_features_trains_on_several_threads(table):
    few = {"rounds": 1, "local_steps": 1, "evaluate": {"averages": "never"}}
    with threads(2):
        assert 0 <= run(table, method="selfreg", **few).accuracy <= 1


def test_each_method_runs_on_features_or_says_what_it_lacks(subtests, table):
    for name in sorted(methods()):
        with subtests.test(name=name):
            if name in NEED_IMAGES:
                with pytest.raises(ExperimentError, match=f"{name} changes images"):
                    run(table, method=name)
            elif name in NEED_LAYERS:
                with pytest.raises(ExperimentError, match=f"{name} .*backbone"):
                    run(table, method=name)
            else:
                few = {"rounds": 1, "local_steps": 1, "evaluate": {"averages": "never"}}
                assert 0 <= run(table, method=name, **few).accuracy <= 1


def test_an_experiment_that_names_another_number_of_features_is_told(table):
    with pytest.raises(DataError, match=r"12 features, .*data\.features is 11"):
        feddg.run(data={"source": "features", "root": table, "features": 11}, hold_out="c")


def test_a_dry_run_says_how_many_features_there_are_and_where_weights_come_from(table):
    found = preview(data={"source": "features", "root": table}, hold_out="c", clients=2)
    assert found.settings["data.features"].value == 12
    assert found.settings["model.weights"].source == "preset features"
    assert found.forecast.pixel_bytes == 0


def test_features_go_with_their_backbone_only(table):
    with pytest.raises(ExperimentError, match=r"model.backbone features goes with"):
        run(table, backbone="cnn")


def test_features_are_sent_to_a_device_once():
    store = Vectors(numpy.arange(12, dtype=numpy.float32).reshape(4, 3))
    assert store.gather([2, 0]).tolist() == [[6, 7, 8], [0, 1, 2]]
    meta = torch.device("meta")
    store.gather([1], meta)
    sent = store._features[meta]
    store.gather([2], meta)
    assert store._features[meta] is sent
    assert len(store) == 4


def test_groups_and_subgroups_are_no_features(tmp_path):
    rows = [f"{'ab'[n % 2]},d{n % 3},P{n // 2},s{n % 2},{n}.5,1" for n in range(12)]
    (tmp_path / "t.csv").write_text("\n".join(["label,domain,group,scanner,x,y", *rows]))
    table = load_source("features", tmp_path / "t.csv", subgroups=("scanner",))
    assert table.feature_names == ("x", "y")
    assert table.groups.tolist() == [f"P{n // 2}" for n in range(12)]
    assert table.subgroups["scanner"].tolist() == [f"s{n % 2}" for n in range(12)]
