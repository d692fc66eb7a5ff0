"""Settings: what they mean and refuse, wherever they are written."""

import pytest

from feddg.errors import ExperimentError
from feddg.experiment import Experiment
from feddg.settings import (
    ACTS_WITH,
    EvaluateSettings,
    ExperimentSettings,
    leaves,
    without_effect,
)


def test_which_rounds_are_evaluated(subtests):
    for fields, measured in [
        ({"every": 4}, [4, 8, 10]),
        ({"every": 10, "every_of_last": 3}, [8, 9, 10]),
        ({"every": 3, "every_of_last": 1}, [3, 6, 9, 10]),
        ({"every": 1, "every_of_last": 20}, list(range(1, 11))),
    ]:
        with subtests.test(fields=fields, measured=measured):
            settings = EvaluateSettings(**fields)
            assert [r for r in range(1, 11) if settings.after(r, 10)] == measured


def test_none_may_be_written_for_what_may_be_empty(subtests):
    for part, field in [
        ("clients", "per_round"),
        ("clients", "alpha"),
        ("train", "local_steps"),
        ("train", "gradient_clipping"),
        ("server", "largest_change"),
        ("privacy", "epsilon"),
        ("data", "tile"),
    ]:
        with subtests.test(part=part, field=field):
            said = Experiment(**{"data": "digits", "hold_out": "sketch", part: {field: "none"}})
            assert getattr(getattr(said, part), field) is None


def test_none_stays_a_word_where_it_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = Experiment(
        data={"source": "folder", "root": "none", "image_size": 32},
        train={"augmentation": "none"},
        server={"wise_ft": "none"},
    )
    assert said.data.root == tmp_path / "none"
    assert (said.train.augmentation, said.server.wise_ft) == ("none", "none")
    assert Experiment(data="digits", hold_out="ink", preset="none").preset == "digits"
    with pytest.raises(ExperimentError, match=r"train\.rounds"):
        Experiment(data="digits", train={"rounds": "none"})


def test_truth_is_no_number(subtests):
    for part, field in [
        ("train", "lr"),
        ("train", "rounds"),
        ("server", "wise_ft"),
        ("train", "local_steps"),
    ]:
        with (
            subtests.test(part=part, field=field),
            pytest.raises(ExperimentError, match=rf"^{part}\.{field}: must not be true or false"),
        ):
            Experiment(data="digits", hold_out="sketch", **{part: {field: True}})


def test_truth_is_no_number_of_a_method_either():
    with pytest.raises(ExperimentError, match="gamma1: must not be true or false"):
        Experiment(data="digits", hold_out="sketch", method={"name": "pardon", "gamma1": True})
    stylized = {"name": "pardon", "stylized_cross_entropy": True}
    assert (
        Experiment(data="digits", method=stylized).method.settings["stylized_cross_entropy"] is True
    )


def test_a_rule_about_several_fields_is_said_without_all_of_them():
    with pytest.raises(ExperimentError) as said:
        Experiment(data="digits", train={"rounds": 4, "warmup_rounds": 4})
    assert "warmup_rounds" in str(said.value)


def test_what_is_said_of_a_decision_counts_or_is_refused(subtests):
    for fields, words in [
        ({"specificity": 0.9}, "specificity belongs to a decision about a class: name the class"),
        ({"sensitivity": 0.9}, "sensitivity belongs to a decision"),
        ({"prevalence": 0.1}, "prevalence belongs to a decision"),
        ({"decision": "a", "specificity": 0.9, "sensitivity": 0.9}, "leave one of them out"),
        ({"decision": "a", "specificity": 0.95, "sensitivity": 0.9}, "leave one of them out"),
    ]:
        with subtests.test(fields=fields), pytest.raises(ExperimentError, match=words):
            Experiment(data="digits", evaluate=fields)
    for fields in (
        {},
        {"decision": "a", "sensitivity": 0.9},
        {"decision": "a", "specificity": 0.9},
    ):
        with subtests.test(fields=fields):  # as a run's file has it, with every default
            stored = EvaluateSettings(**fields).model_dump()
            assert EvaluateSettings(**stored).model_dump() == stored


def test_what_does_nothing_without_another_field_is_said(subtests):
    said = {"data": "digits", "hold_out": "sketch"}
    for fields, names in [
        ({"privacy": {"clipping_norm": 0.5}}, ["privacy.clipping_norm"]),
        ({"privacy": {"clipping_norm": 0.5, "clipping": "fixed"}}, []),
        ({"privacy": {"delta": 1e-3, "sampling": "secret"}}, ["privacy.delta", "privacy.sampling"]),
        ({"privacy": {"delta": 1e-3, "epsilon": 8.0}}, []),
        ({"privacy": {"record_norm": 2.0}}, ["privacy.record_norm"]),
        ({"train": {"momentum": 0.9, "optimizer": "adam"}}, ["train.momentum"]),
        ({"train": {"momentum": 0.9, "optimizer": "sgd"}}, []),
        ({"server": {"lr": 0.5}}, ["server.lr"]),
        ({"server": {"lr": 0.5, "optimizer": "fedavgm"}}, []),
        ({"server": {"beta2": 0.5, "optimizer": "fedavgm"}}, ["server.beta2"]),
        ({"train": {"schedule_gamma": 0.5, "schedule": "cosine"}}, ["train.schedule_gamma"]),
    ]:
        with subtests.test(**fields):
            experiment = Experiment(**said, **fields)
            found = without_effect(experiment, experiment.given)
            assert [text.partition(" ")[0] for text in found] == names
    (text,) = without_effect(experiment, experiment.given)
    assert text == (
        "train.schedule_gamma is 0.5 and does nothing: it goes with train.schedule: step."
    )


def test_what_is_for_images_does_nothing_to_rows_of_features():
    rows = Experiment(
        data={"source": "features", "features": 6, "tile": 64},
        train={"augmentation": {"flip": 0.5}},
    )
    found = [text.partition(" ")[0] for text in without_effect(rows, rows.given)]
    assert found == ["data.tile", "train.augmentation"]


def test_fields_that_go_with_others_are_there():
    fields = leaves(ExperimentSettings().model_dump(mode="json"))
    for field, needs in ACTS_WITH.items():
        assert {field, *(need.partition(": ")[0] for need in needs)} <= fields.keys()
