"""Predictions of new images: streamed, resumed, bad files, formulas, out of distribution."""

import json
import os
import stat
from types import SimpleNamespace

import numpy
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from feddg.cli import app
from feddg.data.pixels import as_unit
from feddg.errors import AdaptationError, DataError, ExperimentError, RunError
from feddg.evaluation.metrics import area_under_roc
from feddg.experiment import load_stored
from feddg.prediction.classifier import image_files, load_classifier
from feddg.prediction.evaluate import decide_run
from feddg.prediction.model import load_model
from feddg.prediction.predict import predict, predict_files, prediction_of
from feddg.runs.energy import energy
from feddg.runs.execute import OOD_SCORE, read_energy_threshold
from feddg.runs.prepare import load_images
from feddg.runs.reading import EXPERIMENT, read_run
from trained_runs import read_csv, write_images


def test_predictions_are_the_models_own(finished, images):
    model = load_model(finished)
    found = list(predict(finished, images))
    assert [row.file for row in found] == sorted(str(p) for p in images.rglob("*.png"))
    files = [numpy.array(Image.open(row.file)) for row in found]
    batch = torch.from_numpy(numpy.stack(files)).permute(0, 3, 1, 2)
    with torch.inference_mode():
        logits = model(as_unit(batch))
    shares = logits.softmax(1)
    assert [row.label for row in found] == [model.class_names[i] for i in shares.argmax(1)]
    assert torch.tensor([row.probabilities for row in found]).allclose(shares, atol=1e-6)
    assert torch.tensor([row.energy for row in found]).allclose(energy(logits), atol=1e-4)


@pytest.mark.parametrize("value", [numpy.nan, numpy.inf])
def test_there_is_no_label_for_an_output_that_is_not_finite(value):
    model = SimpleNamespace(class_names=("cat", "dog"), threshold=1.0)
    found = prediction_of(model, "a.png", numpy.array([value, 0.5]), 0.0)
    assert found.label is None
    assert found.unlike_training is None
    assert "not finite" in found.reason


def test_the_second_of_two_runs_is_no_folder_of_images(finished, images, tmp_path):
    with pytest.raises(DataError, match="is a run folder, not a folder of images; name one run"):
        predict_files(finished, [finished, images], tmp_path / "labels.csv")


def test_batches_change_nothing(finished, images):
    whole = [row.label for row in predict(finished, images, batch_size=64)]
    assert [row.label for row in predict(finished, images, batch_size=7)] == whole
    assert [row.label for row in predict(finished, images, adapt="global")] == whole


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
@pytest.mark.parametrize("stop_after", [1, 3])
def test_an_interrupted_table_goes_on_to_the_same_bytes(
    finished, images, tmp_path, suffix, stop_after
):
    (images / "broken.png").write_bytes(b"no image")
    straight, halting = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    predict_files(finished, [images], straight, batch_size=8)
    calls = []

    def stop(what, done, total):
        calls.append((done, total))
        if len(calls) == stop_after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predict_files(finished, [images], halting, batch_size=8, progress=stop)
    assert not halting.exists()
    assert stat.S_IMODE((tmp_path / f"b{suffix}.part").stat().st_mode) == 0o600
    with (tmp_path / f"b{suffix}.part").open("ab") as table:
        table.write(b"half a ro")  # what a kill in the midst of a batch leaves
    whole = (tmp_path / f"b{suffix}.part").read_bytes()
    done = predict_files(finished, [images], halting, batch_size=8)
    assert done.continued == 8 * stop_after
    assert halting.read_bytes() == straight.read_bytes()
    halting.unlink()  # now without the end of the last line of a batch alone
    (tmp_path / f"b{suffix}.part").write_bytes(whole.removesuffix(b"\nhalf a ro"))
    again = predict_files(finished, [images], halting, batch_size=8)
    assert again.continued == 8 * (stop_after - 1)
    assert halting.read_bytes() == straight.read_bytes()
    assert done.failed == 1
    assert done.files == 31
    assert not list(tmp_path.glob("*.part*"))


def test_images_that_were_replaced_are_read_again(finished, images, tmp_path):
    files = sorted(images.rglob("*.png"))
    out, fresh = tmp_path / "labels.csv", tmp_path / "fresh.csv"

    def stop(what, done, total):
        if done > 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predict_files(finished, [images], out, batch_size=8, progress=stop)
    files[10].write_bytes(files[-1].read_bytes())
    os.utime(files[10], ns=(files[-1].stat().st_atime_ns, files[-1].stat().st_mtime_ns))
    assert predict_files(finished, [images], out, batch_size=8).continued == 8
    predict_files(finished, [images], fresh, batch_size=8)
    assert out.read_bytes() == fresh.read_bytes()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_other_work_is_not_continued(finished, images, tmp_path, precision):
    out = tmp_path / "labels.csv"

    def stop(what, done, total):
        if done > 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predict_files(finished, [images], out, batch_size=8, progress=stop)
    more = int(precision == "float32")
    write_images(images / "a_folder_in_front", more)
    done = predict_files(finished, [images], out, batch_size=8, precision=precision)
    assert done.continued == 0
    assert len(read_csv(out)) == 30 + more


def test_another_adaptation_inside_a_file_is_other_work(finished, images, tmp_path, monkeypatch):
    exported, out = load_classifier(finished), tmp_path / "labels.csv"
    monkeypatch.setattr("feddg.prediction.predict.load_classifier", lambda *options: exported)

    def stop(what, done, total):
        raise KeyboardInterrupt

    for first, then, continued in (("iabn", "global", 0), ("global", "global", 8)):
        exported.description = exported.description.model_copy(update={"adaptation": first})
        with pytest.raises(KeyboardInterrupt):
            predict_files("model.onnx", [images], out, batch_size=8, progress=stop)
        exported.description = exported.description.model_copy(update={"adaptation": then})
        done = predict_files("model.onnx", [images], out, batch_size=8)
        assert done.continued == continued


def test_bad_files_have_a_row_with_the_reason_and_do_not_fail_the_command(
    finished, images, tmp_path
):
    (images / "=cmd.png").write_bytes(b"")
    (images / "text.jpg").write_text("no image")
    out = tmp_path / "labels.csv"
    command = ["predict", str(finished), str(images), "--out", str(out), "-q", "--device", "cpu"]
    ended = CliRunner().invoke(app, [*command, "--probabilities"])
    assert ended.exit_code == 0, ended.output
    assert "30 of 32 images labelled" in ended.output
    rows = read_csv(out)
    bad = [row for row in rows if row["reason"]]
    assert [row["reason"] for row in bad] == ["empty file", "not an image in a known format"]
    assert all(row["label"] == "" for row in bad)
    good = next(row for row in rows if not row["reason"])
    shares = [float(good[name]) for name in good if name.startswith("probability: ")]
    assert sum(shares) == pytest.approx(1, abs=1e-4)
    assert max(shares) == float(good["confidence"])


def test_all_bad_files_fail_the_command(finished, tmp_path):
    (tmp_path / "text.jpg").write_text("no image")
    command = ["predict", str(finished), str(tmp_path / "text.jpg")]
    ended = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "x.jsonl"), "-q"])
    assert ended.exit_code == 1
    row = json.loads((tmp_path / "x.jsonl").read_text())
    assert row["label"] is None


@pytest.mark.parametrize("start", list("=+-@"))
def test_no_cell_is_a_formula(finished, tmp_path, monkeypatch, start):
    monkeypatch.chdir(tmp_path)
    file = write_images(tmp_path, 1)[0].rename(tmp_path / f"{start}SUM(1).png")
    predict_files(finished, [file.name], tmp_path / "labels.csv")
    assert read_csv(tmp_path / "labels.csv")[0]["file"] == f"'{file.name}"
    predict_files(finished, [file.name], tmp_path / "labels.jsonl")
    assert json.loads((tmp_path / "labels.jsonl").read_text())["file"] == file.name


def test_bfloat16_where_it_is_asked_for(finished, images, tmp_path):
    tables = {}
    for precision in ("float32", "bfloat16"):
        out = tmp_path / f"{precision}.jsonl"
        predict_files(finished, [images], out, precision=precision)
        tables[precision] = [json.loads(line) for line in out.read_text().splitlines()]
    pairs = list(zip(*tables.values(), strict=True))
    apart = [abs(one["confidence"] - other["confidence"]) for one, other in pairs]
    assert 0 < max(apart) < 0.05
    with pytest.raises(ExperimentError, match="choose auto, float32 or bfloat16"):
        predict_files(finished, [images], tmp_path / "a.csv", precision="half")


def test_an_unknown_adaptation_or_ending_is_refused(finished, images, tmp_path):
    with pytest.raises(AdaptationError, match="adaptation"):
        predict_files(finished, [images], tmp_path / "x.csv", adapt="nonsense")
    with pytest.raises(DataError, match=r"must end in one of \.csv"):
        predict_files(finished, [images], tmp_path / "x.txt")
    (folder := tmp_path / "folder.csv").mkdir()
    with pytest.raises(DataError, match=r"folder\.csv is a folder; name a file"):
        predict_files(finished, [images], folder)
    assert list(tmp_path.glob("x*")) == []


def test_names_are_read_once_and_what_is_predicted_is_not_written_over(finished, images, tmp_path):
    files = sorted(images.rglob("*.png"))[:3]
    assert [row.file for row in predict(finished, iter(files))] == [str(file) for file in files]
    predict_files(finished, iter(files), tmp_path / "x.csv")
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 4
    for written in ({"out": files[0]}, {"out": tmp_path / "x.jsonl", "html": tmp_path / "x.csv"}):
        named = [*files, tmp_path / "x.csv"]
        with pytest.raises(DataError, match=r"must end in|is to be predicted"):
            predict_files(finished, named, **written)
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 4


def test_an_adaptation_with_a_memory_is_never_continued_midway(finished, images, tmp_path):
    work = {"adapt": "tsmobn", "batch_size": 8}
    predict_files(finished, [images], tmp_path / "a.csv", **work)

    def stop(what, done, total):
        if done > 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        predict_files(finished, [images], tmp_path / "b.csv", progress=stop, **work)
    done = predict_files(finished, [images], tmp_path / "b.csv", **work)
    assert done.continued == 0
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


def test_the_energy_knows_foreign_images(finished, cache, tmp_path):
    model = load_model(finished)
    light = read_energy_threshold(finished, model)
    images = load_images(load_stored(finished / EXPERIMENT), cache, lambda *_: None)
    inside = images.pixels.gather(torch.from_numpy(images.splits.id_val))
    order = torch.randperm(inside[0, 0].numel(), generator=torch.Generator().manual_seed(0))
    foreign = inside.flatten(2)[..., order].view_as(inside)  # the same colours, no digit
    with torch.inference_mode():
        energies = [energy(model(as_unit(part))) for part in (inside, foreign)]
    assert len(inside) == light.images
    assert float((energies[0] <= light.threshold).float().mean()) == pytest.approx(0.95, abs=0.01)
    scores = torch.cat(energies).numpy()
    assert area_under_roc(numpy.arange(len(scores)) >= len(inside), scores) > 0.6


def test_another_models_threshold_is_never_used(finished, images):
    model = load_model(finished)
    assert read_energy_threshold(finished, model) is not None
    with torch.no_grad():
        next(model.parameters()).add_(1e-3)
    assert read_energy_threshold(finished, model) is None


def test_a_run_without_a_threshold_says_so(finished, images, tmp_path):
    kept = (finished / OOD_SCORE).read_bytes()
    (finished / OOD_SCORE).unlink()
    try:
        done = predict_files(finished, [images], tmp_path / "labels.csv")
    finally:
        (finished / OOD_SCORE).write_bytes(kept)
    assert done.unlike is None
    assert {row["unlike_training"] for row in read_csv(tmp_path / "labels.csv")} == {""}


def test_a_meaningless_model_is_announced_and_strictly_refused(meaningless, tmp_path, images):
    out = str(tmp_path / "labels.csv")
    command = ["predict", str(meaningless), str(images), "--out", out, "-q"]
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 0
    assert "DO NOT RELY ON THIS MODEL" in ended.output
    assert "no better than always answering the most frequent class" in " ".join(
        ended.output.split()
    )
    with pytest.raises(RunError, match="Its labels mean nothing"):
        predict_files(meaningless, [images], tmp_path / "strict.csv", strict=True)
    assert not (tmp_path / "strict.csv").exists()


def test_control_codes_of_names_reach_neither_table_nor_terminal(finished, images, tmp_path):
    (images / "\x1b[2Ja\r\u202eb\x9b.jpg").write_text("no image")
    (bad,) = predict_files(finished, [images], tmp_path / "x.csv", batch_size=8).faults
    (row,) = [row for row in read_csv(tmp_path / "x.csv") if row["reason"]]
    assert row["file"] == rf"{images}/\x1b[2Ja\r\u202eb\x9b.jpg"
    assert (bad.file, bad.reason) == (row["file"], row["reason"])


def test_links_are_followed_as_in_training(images, tmp_path):
    inside = next(images.rglob("*.png"))
    outside = tmp_path / "elsewhere" / "other.png"
    outside.parent.mkdir()
    outside.write_bytes(inside.read_bytes())
    before = list(image_files([images]))
    links = [images / name for name in ("away.png", "folder", "inside.png", "nowhere.png")]
    for link, target in zip(links, (outside, outside.parent, inside, tmp_path / "nowhere")):
        link.symlink_to(target, target_is_directory=target.is_dir())
    added = [links[0], links[1] / "other.png", links[2]]
    assert list(image_files([images])) == sorted([*before, *added])
    (outside.parent / "back").symlink_to(images, target_is_directory=True)  # in a circle
    assert list(image_files([images])) == sorted([*before, *added])
    linked = tmp_path / "linked"
    linked.symlink_to(images, target_is_directory=True)
    assert len(list(image_files([linked]))) == len(before) + 3
    assert list(image_files([links[0]])) == [links[0]]


def test_predict_does_not_advise_settings_of_training(finished, tmp_path):
    tifffile = pytest.importorskip("tifffile")
    tifffile.imwrite(tmp_path / "float.tif", numpy.zeros((16, 16), numpy.float32))
    (row,) = predict(finished, tmp_path / "float.tif")
    assert row.reason == "floating-point pixels without a known range"


def test_a_threshold_cuts_only_the_model_that_it_was_chosen_for(
    averaged, images, tmp_path, cache, subtests
):
    def column(**options):
        predict_files(averaged, [images], tmp_path / "x.csv", probabilities=True, **options)
        rows = read_csv(tmp_path / "x.csv")
        return [(row["decision: 3"] == "yes", float(row["probability: 3"])) for row in rows]

    def refused(words, **options):
        with pytest.raises(DataError, match=words):
            column(**options)

    own = read_run(averaged).details
    assert (own.which, own.round) == ("ema", 3)
    assert column(decision="3") == [
        (s >= own.decision.threshold, s) for _, s in column(decision="3")
    ]
    again = f"`feddg evaluate {averaged} --decision {{}} --which "
    refused(
        f"for 3 of this model: choose one with {again.format(3)}swa`", decision="3", which="swa"
    )
    refused("for the model without --adapt", decision="3", adapt="global")
    refused(f"for 2 of this model: choose one with {again.format(2)}ema`", decision="2")
    refused("no class of .* is called 'x'", decision="x", threshold=0.5)
    other = decide_run(averaged, "3", which="swa", cache=cache).decision.threshold
    assert other != own.decision.threshold
    refused(f"{again.format(3)}ema`", decision="3")
    found = column(decision="3", which="swa")
    assert [yes for yes, _ in found] == [share >= other for _, share in found]
    for options in ({}, {"which": "final"}, {"adapt": "global"}):
        with subtests.test(**options):
            assert all(yes for yes, _ in column(threshold=1e-9, **options))
    file = averaged / "details.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({"decision": content["decision"]}))
    refused("has no threshold for 3 of this model", decision="3")
    file.unlink()
    refused("has no decision: name a class with --decision CLASS", threshold=0.5)


def test_a_round_chosen_by_validation_is_the_final_one_where_it_is_the_last(
    averaged, images, tmp_path, cache
):
    decide_run(averaged, "3", which="final", cache=cache)
    done = predict_files(
        averaged, [images], tmp_path / "x.csv", decision="3", which="best_in_domain"
    )
    assert done.classifier.description.round == 3
