"""A model is loaded from its run: the right one, and one that predicts what was measured."""

import pytest
import torch

from feddg.data.data_set import load_source
from feddg.errors import AdaptationError, RunError
from feddg.prediction.model import load_model
from feddg.runs.reading import read_run


def test_the_model_predicts_what_the_run_measured(finished):
    model = load_model(finished)
    table = load_source("digits")
    rows = table.domains == table.domain_id("sketch")
    images = torch.from_numpy(table.images[rows]).permute(0, 3, 1, 2).float() / 255
    with torch.inference_mode():
        predicted = model(images).argmax(1).numpy()
    accuracy = (predicted == table.labels[rows]).mean()
    assert accuracy == pytest.approx(read_run(finished).accuracy)
    assert model.class_names == tuple("0123456789")


def test_a_model_can_be_loaded_under_an_adaptation(finished, run_of):
    images, adaptive, plain = torch.rand(4, 3, 32, 32), run_of("fedig-a"), finished
    with torch.no_grad():
        own = load_model(adaptive)(images)
        torch.testing.assert_close(load_model(adaptive, adapt="adapter")(images), own)
        served = load_model(plain, adapt="iabn")
        assert served(images).shape == (4, 10)
        assert served.class_names == tuple("0123456789")
        plain_logits = load_model(plain)(images)
        assert torch.equal(load_model(plain, adapt="global")(images), plain_logits)
    with pytest.raises(AdaptationError, match="trained without adapters"):
        load_model(plain, adapt="adapter")


def test_a_rule_without_a_model_says_why(finished):
    with pytest.raises(RunError, match=r"unknown selection rule 'best'.*best_held_out"):
        load_model(finished, which="best")
    with pytest.raises(RunError, match="which takes a held-out validation domain"):
        load_model(finished, which="best_held_out")
