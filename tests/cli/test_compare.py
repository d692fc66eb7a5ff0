"""`feddg compare` from the command line."""

import pytest
from PIL import Image


def test_compare_shows_its_plan_and_runs_nothing(feddg, tmp_path):
    code, _, shown = feddg(
        *("compare", "--data", "digits", "--methods", "fedavg,pardon"),
        *("--hold-out", "sketch;val=ink,test=photo", "--clients", "6:2,3"),
        *("--heterogeneity", "0,1", "--seeds", "4,5", "--rounds", "1"),
        "--dry-run",
    )
    assert code == 0
    assert "32 runs: 0 complete, 0 to continue, 32 to start" in shown
    assert "2 of 6, 3" in shown
    assert not (tmp_path / "comparisons").exists()


@pytest.mark.parametrize("flag", [["--clients", "a:b"], ["--seeds", "one"], ["--methods", "pardo"]])
def test_compare_names_a_mistake(feddg, flag):
    code, _, shown = feddg("compare", "--data", "digits", "--hold-out", "lodo", *flag, "--dry-run")
    assert code == 1
    assert flag[1] in shown


def test_the_plan_that_is_written_is_the_plan_that_was_run(feddg, runs_here, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "base: {data: digits}\n"
        "methods: [fedavg, {name: fedprox, mu: 3, experiment: {train: {batch_size: 8}}}]\n"
        "settings: {train.lr: [0.1, 0.2]}\n"
    )
    flags = ["--hold-out", "sketch", "--clients", "3", "--rounds", "1", "--image-size", "8"]
    flags += ["--set", "train.lr=0.01", "--set", "train.batch_size=256"]
    flags += ["--set", "train.local_epochs=1", "-q", "--jobs", "1"]
    code, _, shown = feddg("compare", "mine.yaml", "--out", "out", *flags)
    assert code == 0
    assert "2 runs: 0 complete" in shown
    code, _, shown = feddg("compare", "out/plan.yaml", "--out", "out", "--dry-run")
    assert code == 0
    assert "2 runs: 2 complete, 0 to continue, 0 to start" in shown


def test_brackets_in_a_plan_are_shown_as_they_are(feddg, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "title: PACS (see [/data/pacs])\nbase: {data: digits, hold_out: sketch}\n"
        "methods: [{name: fedavg, label: '[/x]'}]\n"
    )
    code, _, shown = feddg("compare", "mine.yaml", "--dry-run")
    assert code == 0, shown
    assert "PACS (see [/data/pacs])" in " ".join(shown.split())
    assert "[/x]" in shown


def test_several_data_sets_are_a_plan_over_them_and_one_is_a_field(feddg, tmp_path):
    for site in ("a", "b", "c"):
        for label in ("x", "y"):
            (tmp_path / "photos" / site / label).mkdir(parents=True)
            for n in range(9):
                image = Image.new("RGB", (8, 8), (20 * n, ord(site), ord(label)))
                image.save(tmp_path / "photos" / site / label / f"{n}.png")
    code, _, shown = feddg("compare", "--data", "emoji,digits", "--seeds", "2", "--dry-run")
    assert code == 0, shown
    assert "32 runs" in shown
    (tmp_path / "mine.yaml").write_text(
        "data: [emoji, {source: folder, name: ours, root: photos}]\nmethods: [fedavg]\n"
    )
    code, _, shown = feddg("compare", "mine.yaml", "--root", str(tmp_path), "--dry-run")
    assert code == 0, shown
    assert "7 runs" in shown
    alone = ("--data", "folder", "--root", str(tmp_path / "photos"), "--hold-out", "lodo")
    code, _, shown = feddg("compare", "mine.yaml", *alone, "--dry-run")
    assert code == 0, shown
    assert "3 runs" in shown
