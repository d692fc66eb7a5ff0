"""Tables of features: read in three formats, trained on, predicted, and refused with a reason."""

import numpy
import pandas
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors

import feddg
from feddg.data.data_set import load_source
from feddg.data.pixels import Vectors
from feddg.errors import DataError, ExperimentError, FeddgError
from feddg.methods.base import methods
from feddg.runs.model import load_model
from federations import ridge_of

CLASSES = ("cat", "dog", "eel")
NEED_IMAGES = [
    *("ccst", "dart", "elcfs", "jigen", "l2d", "outlines", "pardon", "randaug", "randconv"),
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


@pytest.mark.parametrize("kind", ["Float32", "Int64"])
def test_a_missing_number_of_parquet_is_named(table, kind):
    pytest.importorskip("pyarrow")
    frame = frame_of().assign(f3=pandas.array([1] * 89 + [None], dtype=kind))
    frame.to_parquet("t.parquet")
    with pytest.raises(DataError, match=r"row 90 of t\.parquet has a feature that is NaN"):
        load_source("features", table.with_name("t.parquet"))
    frame.iloc[:89].to_parquet("t.parquet")
    assert load_source("features", table.with_name("t.parquet")).images.dtype == numpy.float32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.drop(columns="label"), "no column 'label'"),
        (lambda f: f.rename(columns={"domain": "domian"}), "did you mean 'domian'"),
        (lambda f: f.assign(note="fine"), "column 'note', which holds no numbers"),
        (lambda f: f.assign(f3=numpy.where(f.index == 4, numpy.inf, f.f3)), "row 5 .* infinite"),
        (lambda f: f.assign(f3=numpy.where(f.index == 4, numpy.nan, f.f3)), "row 5 .* NaN"),
        (lambda f: f.assign(label=f.label.where(f.index != 7)), "row 8 .* has no label"),
        (lambda f: f.assign(label="cat"), "'cat' only"),
        (lambda f: f[["label", "domain", "path"]], "no column of features"),
        (lambda f: f.iloc[:0], "no rows"),
        (lambda f: f.assign(split="learn"), "row 1 .* 'learn' as split"),
    ],
)
def test_a_table_that_is_wrong_is_refused_in_one_line(table, change, words):
    change(frame_of()).to_csv(table, index=False)
    with pytest.raises(DataError, match=words) as refused:
        load_source("features", table)
    assert "\n" not in str(refused.value)


def test_the_row_numbers_that_pandas_writes_are_no_feature(table):
    frame_of().to_csv(table)
    with pytest.raises(DataError, match=r"'Unnamed: 0': write the file with index=False"):
        load_source("features", table)


def test_lists_of_two_lengths_and_of_text_are_refused(table):
    pytest.importorskip("pyarrow")
    frame = frame_of()[["label", "domain"]]
    for lists, words in (
        ([[1.0, 2.0]] * 89 + [[1.0]], "row 90 .* 1 features as e, the first row 2"),
        ([["a", "b"]] * 90, "row 1"),
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
    unseen.drop(columns="f3").to_csv("fewer.csv", index=False)
    with pytest.raises(FeddgError, match="11 features, the model takes 12"):
        list(feddg.predict(done.folder, "fewer.csv"))


def test_travel_expects_an_accuracy_on_a_table(table):
    done = run(table, method="ridge")
    unseen = frame_of()[lambda rows: rows["domain"] == "c"].drop(columns=["label", "domain"])
    unseen.to_csv("unseen.csv", index=False)
    found = feddg.travel(done.folder, "unseen.csv")
    assert len(found.images) == 30
    assert found.expected is None or found.expected.low <= done.accuracy <= found.expected.high


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


@pytest.mark.parametrize("name", sorted(methods()))
def test_each_method_runs_on_features_or_says_what_it_lacks(table, name):
    if name in NEED_IMAGES:
        with pytest.raises(ExperimentError, match=f"{name} changes images"):
            run(table, method=name)
    elif name in NEED_LAYERS:
        with pytest.raises(ExperimentError, match=f"{name} .*backbone"):
            run(table, method=name)
    else:
        assert 0 <= run(table, method=name, rounds=1).accuracy <= 1


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
