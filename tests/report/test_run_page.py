"""A run's page: every metric by domain, and commands that fit what was found."""

import functools
import json
import shlex
from typing import ClassVar

import numpy
import pytest
from typer.testing import CliRunner

from feddg.cli import app as cli
from feddg.errors import RunError
from feddg.evaluation.metrics import Predictions, measure
from feddg.experiment import Experiment, load_experiment
from feddg.prediction.travel import new_site
from feddg.records import AdaptationRow, SummaryFile
from feddg.report.blocks import Code, Facts, Prose, Table
from feddg.report.run_page import (
    adaptation_table,
    final_table,
    left_out_section,
    metrics_section,
    reference_lines,
    result_sentence,
    run_page,
    run_steps,
    verdict,
)
from feddg.runs.diagnostics import about_divergence
from feddg.runs.reading import read_run
from feddg.settings import leaves
from feddg.text import MISSING, number, percent, percent_sign
from run_folders import FolderMaker


class Measured(FolderMaker):
    """A run whose rows have metrics beside accuracy."""

    def metrics(self, domain, confusion):
        return {
            "macro_f1": 0.5 + domain / 10,
            "auroc": 0.9 - domain / 10,
            "calibration_error": 0.1 + domain / 5,
        }


def test_only_domains_of_the_models_own_round_are_named_and_counted(tmp_path):
    """An evaluation site that does not answer after the last round has no part in its accuracy."""
    run = FolderMaker(tmp_path / "run", test=["photo", "film", "clipart"]).write()
    rows = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    missing = '"round":6,', '"domain":"clipart"'
    kept = [row for row in rows if not all(part in row for part in missing)]
    assert len(kept) < len(rows)
    (run / "metrics.jsonl").write_text("\n".join(kept) + "\n", "utf-8")
    lead = result_sentence(read_run(run))
    assert "of the images of photo and film, which no client trained on" in lead
    assert final_table(read_run(run)).rows[0][1].text == "mean of domains (2 of 3)"


def test_a_page_has_a_split_of_many_domains_that_was_not_measured_at_last(tmp_path):
    run = FolderMaker(tmp_path / "run", val=[f"ward {i}" for i in range(13)]).write()
    rows = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    missing = '"round":6,', '"split":"val"'
    kept = [row for row in rows if not all(part in row for part in missing)]
    (run / "metrics.jsonl").write_text("\n".join(kept) + "\n", "utf-8")
    assert "mean of domains (0 of 13)" in [row[1].text for row in final_table(read_run(run)).rows]


def test_domains_are_averaged_pooled_and_the_worst_is_named(tmp_path):
    maker = Measured(tmp_path / "run", test=["a", "b"], rounds=2)
    section = metrics_section(read_run(maker.write()))
    (table,) = section.blocks
    assert isinstance(table, Table)
    assert [column.heading for column in table.columns] == [
        *("Split", "Domain", "Images", "Accuracy", "Macro-F1", "AUROC", "ECE")
    ]
    rows = {row[1].text: [cell.text for cell in row[2:]] for row in table.rows[:5]}
    assert rows["mean of domains (2)"][2:5] == ["55.0", "85.0", "20.0"]
    assert rows["worst domain (2)"][2:5] == ["50.0", "80.0", "30.0"]
    pooled = measure(Predictions(2 * numpy.array(maker.confusion())))["macro_f1"]
    assert rows["all images pooled (2)"][2:5] == [percent(pooled), MISSING, MISSING]


def test_runs_that_wrote_accuracies_alone_have_no_such_section(folder_maker):
    maker = folder_maker("plain")
    maker.confusion = lambda: None
    found = metrics_section(read_run(maker.write()))
    assert found is None


# The commands of "What to do next" are carried out as far as their experiments.


class Told(FolderMaker):
    """A run whose user said much: weights, image size, partition, a method's setting, a defence."""

    curve: ClassVar = {"good": (0.2, 0.0), "rising": (0.4, 0.06), "nothing": (0.0, 0.0)}

    def __init__(self, folder, images, kind="good", **said):
        super().__init__(folder / "run", test=["photo"], val=[], rounds=6)
        self.kind = kind
        self.whole = Experiment(
            data={"source": "folder", "root": images, "image_size": 48, "id_val": 0.2},
            hold_out={"test": ["photo"]},
            clients={"number": 7, "per_round": 3, "partition": "dirichlet", "alpha": 0.3},
            method={"name": "pardon", "gamma1": 0.25},
            model={"backbone": "resnet18", "weights": f"{images}/w 1e5.safetensors"},
            train={"rounds": 6, "lr": said.pop("lr", 2e-5), "momentum": 0.8},
            defences=[{"name": "trimmed_mean", "bad_clients": 1}],
            **{"seed": 4, "name": "mine", **said},
        )
        self.folder = folder / self.whole.label

    def experiment(self):
        return self.whole.model_dump(mode="json")

    def accuracy(self, split, domain, round_, weights="last"):
        level, step = self.curve[self.kind]
        return level + step * round_ + (0.3 if self.kind == "good" else 0)

    def confusion(self):
        return None if self.kind != "nothing" else [[0, 30, 0]] * 3


@pytest.fixture
def parsed(monkeypatch):
    """Runs a command as far as what it calls; returns the name and arguments of that call."""
    calls = []
    for place in ("api.run", "prediction.evaluate.evaluate"):
        stop = functools.partial(_stop, calls, place.rpartition(".")[2])
        monkeypatch.setattr(f"feddg.{place}", stop)

    def parse(line):
        CliRunner().invoke(cli, shlex.split(line)[1:], catch_exceptions=True)
        return calls.pop()

    return parse


def _stop(calls, name, *given, **fields):
    calls.append((name, given, fields))
    raise RunError("not carried out")


def _commands(folder):
    section = run_steps(read_run(folder))
    return [block.text for block in section.blocks if isinstance(block, Code)] if section else []


def _settings(experiment, *without):
    fields = leaves(experiment.model_dump(mode="json"))
    return {path: value for path, value in fields.items() if path not in without}


def _experiment_of(call):
    _, (file,), fields = call
    own = {"observer", "snapshots", "out", "again", "predictions", "workers"}
    return load_experiment(file, {k: v for k, v in fields.items() if k not in own}), fields["out"]


@pytest.mark.parametrize(
    ("kind", "changed"),
    [("rising", {"train.rounds", "seed"}), ("nothing", {"train.rounds", "train.lr"})],
)
def test_a_run_proposed_next_differs_in_one_setting(tmp_path, parsed, kind, changed):
    maker = Told(tmp_path, tmp_path / "pictures", kind)
    calls = [parsed(line) for line in _commands(maker.write())]
    before, found = _settings(maker.whole), set()
    for experiment, out in (_experiment_of(call) for call in calls if call[0] == "run"):
        (path,) = (path for path, value in _settings(experiment).items() if before[path] != value)
        found.add(path)
        assert out == tmp_path  # where a page finds it again
    assert found == changed


def test_another_seed_is_proposed_with_the_runs_settings(tmp_path, parsed):
    maker = Told(tmp_path, tmp_path / "pictures")
    (call,) = (c for c in map(parsed, _commands(maker.write())) if c[0] == "run")
    experiment, _ = _experiment_of(call)
    assert experiment.seed == maker.whole.seed + 1
    assert _settings(experiment, "seed") == _settings(maker.whole, "seed")


def test_what_is_done_is_not_proposed(tmp_path):
    maker = Told(tmp_path, tmp_path / "pictures")
    folder = maker.write()
    assert [shlex.split(line)[1] for line in _commands(folder)] == ["run", "evaluate"]
    (folder.parent / "plan.yaml").touch()  # it is one run of a comparison
    assert [shlex.split(line)[1] for line in _commands(folder)] == ["evaluate"]
    row = AdaptationRow(
        round=6,
        split="test",
        domain="photo",
        adaptation="none",
        accuracy=0.5,
        examples=9,
        batch_size=8,
    )
    (folder / "adaptation.jsonl").write_text(row.to_json() + "\n")
    assert run_steps(read_run(folder)) is None


def test_adaptations_are_shown_of_the_model_that_was_measured_last():
    shared = {"split": "test", "domain": "photo", "adaptation": "none", "examples": 9}
    table = adaptation_table(
        [
            AdaptationRow(round=round_, which=which, accuracy=accuracy, batch_size=8, **shared)
            for round_, which, accuracy in ((6, "final", 0.5), (3, "best_in_domain", 0.7))
        ]
    )
    assert [row[1].text for row in table.rows] == ["70.0"]
    assert "round 3" in table.caption


def test_of_an_experiment_that_cannot_be_read_no_other_is_proposed(tmp_path):
    maker = Told(tmp_path, tmp_path / "pictures", "nothing")
    folder = maker.write()
    text = (folder / "experiment.yaml").read_text().replace("pardon", "somebody_elses")
    (folder / "experiment.yaml").write_text(text)
    assert run_steps(read_run(folder)) is None


@pytest.mark.parametrize("failed", [False, True])
def test_after_too_large_a_rate_a_smaller_one_is_proposed(tmp_path, parsed, failed):
    maker = Told(tmp_path, tmp_path / "pictures", "nothing", lr=100.0)
    folder = maker.write()
    if failed:
        why = about_divergence()
        summary = SummaryFile(status="failed", error="client 0: nan", diagnostics=[why])
        (folder / "summary.json").write_text(summary.to_text())
    calls = [parsed(line) for line in _commands(folder)]
    assert [call[0] for call in calls] == ["run"]
    assert _experiment_of(calls[-1])[0].train.lr == 1e-4


class Counted(FolderMaker):
    """A run of which single classes are counted."""

    held: ClassVar = [60, 60, 60]

    def confusion(self):
        return [[70, 20, 10], [5, 90, 5], [10, 60, 30]]  # of the third 30 % are recognised

    def client_table(self):
        table = super().client_table()
        rows = [row.model_copy(update={"classes": self.held}) for row in table.clients]
        return table.model_copy(update={"clients": rows})


def test_the_top_says_what_is_known_in_plain_words(tmp_path):
    run = read_run(Counted(tmp_path / "pardon-run").write())
    answers = dict(verdict(run))
    assert list(answers) == ["At a new site", "Worst class", "What would help most"]
    assert answers["At a new site"] == str(new_site(run))
    assert answers["At a new site"].endswith("one site says nothing of another.")
    worst = f"horse: {percent_sign(0.3)} of 100 images recognised, mostly taken for elephant."
    assert answers["Worst class"] == worst
    assert answers["What would help most"].startswith("More sites: 1 site cannot show")
    assert "--choose 50" in answers["What would help most"]
    first = run_page(run).opening[0]
    assert dict(first.answers) == answers


def test_images_that_several_models_label_are_counted_once(tmp_path):
    maker = Counted(tmp_path / "local-run", method="local")  # its test domain has 400 images
    maker.confusion = lambda: [[280, 80, 40], [20, 360, 20], [40, 240, 120]]  # of three models
    run = read_run(maker.write())
    worst = f"horse: {percent_sign(0.3)} of 133 images recognised, mostly taken for elephant."
    assert dict(verdict(run))["Worst class"] == worst
    (section,) = (one for one in run_page(run).sections if one.title == "Mistakes by class")
    (table,) = section.blocks[-1].blocks
    assert [row[1].text for row in table.rows] == ["133"] * 3


def test_a_class_that_few_training_images_show_is_what_helps_most(tmp_path):
    maker = Counted(tmp_path / "run")
    maker.held = [60, 60, 6]
    helps = dict(verdict(read_run(maker.write())))["What would help most"]
    assert helps == f"More images of horse: 60 of {number(1260)} training images show it."


def test_images_of_a_client_that_withdrew_do_not_count_as_training_images(tmp_path):
    maker = Counted(tmp_path / "run")
    maker.held = [60, 60, 6]
    rounds = maker.write() / "rounds.jsonl"
    *rows, last = map(json.loads, rounds.read_text("utf-8").splitlines())
    last["forgotten"] = [0]
    rounds.write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, last]), "utf-8")
    helps = dict(verdict(read_run(maker.folder)))["What would help most"]
    assert helps == f"More images of horse: 54 of {number(1134)} training images show it."


def test_with_sites_enough_labels_at_the_new_one_help_most(tmp_path):
    maker = Counted(tmp_path / "run", test=[f"site {number}" for number in range(6)])
    answers = dict(verdict(read_run(maker.write())))
    assert "judging by 6 sites" in answers["At a new site"]
    assert answers["What would help most"].startswith("Labels for 50 images at the new site")


def test_the_reference_lines_beside_a_run_say_whether_it_was_worth_it(tmp_path):
    folder = Counted(tmp_path / "pardon-run").write()
    assert reference_lines(read_run(folder)) == {}
    for method, gain in (("local", -0.2), ("centralised", 0.1)):
        FolderMaker(tmp_path / f"{method}-run", method=method, gain=gain).write()
    FolderMaker(tmp_path / "local-other-seed", method="local", seed=1).write()
    FolderMaker(tmp_path / "local-unfinished", method="local", rounds=3, status=None).write()
    FolderMaker(
        tmp_path / "local-to-other-sites", method="local", heterogeneity=0.9, gain=0.3
    ).write()
    FolderMaker(tmp_path / "local-used-as-a-name", gain=0.4).write()
    run = read_run(folder)
    lines = reference_lines(run)
    assert list(lines) == ["local", "centralised"]
    for method, accuracy in lines.items():
        assert accuracy == read_run(tmp_path / f"{method}-run").accuracy
    assert lines["local"] < run.accuracy < lines["centralised"]
    together, alone, one = map(percent_sign, (run.accuracy, *lines.values()))
    assert dict(verdict(run))["Worth it?"] == (
        f"Together {together}, each site alone {alone} and all images in one place {one}."
    )


def test_no_more_clients_take_part_in_a_round_than_there_are(tmp_path):
    """Of clients that really hold the images, fewer may be found than a round asks for."""
    page = run_page(read_run(FolderMaker(tmp_path / "run", clients=3, per_round=4).write()))
    (facts,) = (block for block in page.opening if isinstance(block, Facts))
    rows = [[cell.text for cell in row] for row in facts.rows]
    assert ["Clients", "3", "3 in each round"] in rows


def test_a_run_that_was_not_measured_has_no_verdict(tmp_path):
    maker = FolderMaker(tmp_path / "run", rounds=0, status=None)
    maker.number_rows = lambda *_: []
    assert verdict(read_run(maker.write())) == []


def test_clients_left_out_are_listed_lowest_first(tmp_path):
    folder = Told(tmp_path, tmp_path / "pictures", "nothing").write()
    assert left_out_section(read_run(folder)) is None
    rounds = folder / "rounds.jsonl"
    rows = [json.loads(line) for line in rounds.read_text().splitlines()]
    row = next(row for row in rows if row["kind"] == "round")
    row["left_out"] = {"0": 0.75, "1": 0.25}
    rounds.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = left_out_section(read_run(folder))
    (prose,) = (block for block in section.blocks if isinstance(block, Prose))
    assert "50.0" in str(prose)
    (table,) = (block for block in section.blocks if isinstance(block, Table))
    shown = [str(line) for line in table.rows]
    assert "25.0" in shown[0]
    assert "75.0" in shown[1]
