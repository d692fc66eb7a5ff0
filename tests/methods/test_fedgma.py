"""FedGMA: three updates with chosen signs by hand, numpy on random ones, and tau = 0."""

import numpy
import pytest
import torch
from torch import nn

from feddg.errors import ExperimentError
from feddg.messages import Update
from feddg.methods.base import State
from feddg.methods.composition import build_method
from feddg.methods.fedgma import MASKED
from federations import federation, same


def aggregated(settings, before, changes, counts):
    """Runs the aggregation on updates that live in one reused tensor, as a transport's do."""
    start = torch.tensor(before)
    state = State(
        {"a.weight": start, "b.running_var": start.clone()},
        {MASKED: torch.tensor([True, False])},
    )
    live = torch.empty_like(start)

    def updates():
        for id, (change, count) in enumerate(zip(changes, counts)):
            live.copy_(start + torch.tensor(change))
            yield Update(id, count, {"a.weight": live, "b.running_var": live})

    weights = build_method("fedgma", settings).aggregate(state, updates()).weights
    assert torch.equal(start, torch.tensor(before))
    return weights


CHANGES = [[1.0, 1.0, 2.0, 0.0], [2.0, 1.0, -2.0, 0.0], [3.0, -2.0, 0.0, 0.0]]
COUNTS = [1, 1, 2]
# Signs: all agree; two against one; one each and a zero; nobody moves.
AGREEMENT = [1, 1 / 3, 0, 0]
MEAN = [9 / 4, -2 / 4, 0, 0]


def test_by_hand():
    before = [10.0, 20.0, 30.0, 40.0]
    weights = aggregated({"tau": 0.4, "eta": 0.5}, before, CHANGES, COUNTS)
    expected = [10 + 0.5 * 9 / 4, 20 + 0.5 / 3 * -0.5, 30, 40]
    torch.testing.assert_close(weights["a.weight"], torch.tensor(expected))
    plain = torch.tensor(before) + torch.tensor(MEAN)
    torch.testing.assert_close(weights["b.running_var"], plain)


def test_agreement_at_tau_counts_as_agreed():
    weights = aggregated({"tau": 1.0}, [0.0] * 4, CHANGES, COUNTS)
    torch.testing.assert_close(weights["a.weight"], torch.tensor([9 / 4, -0.5 / 3, 0, 0]))


def test_legacy_mask_by_hand():
    weights = aggregated({"tau": 0.3, "legacy_mask": True}, [0.0] * 4, CHANGES, COUNTS)
    expected = torch.tensor([2 * 9 / 4, 4 / 3 * -0.5, 0, 0])
    torch.testing.assert_close(weights["a.weight"], expected)
    weights = aggregated({"tau": 0.4, "legacy_mask": True}, [0.0] * 4, CHANGES, COUNTS)
    torch.testing.assert_close(weights["a.weight"], torch.tensor([2 * 9 / 4, 0, 0, 0]))


@pytest.mark.parametrize("legacy", [False, True])
def test_against_numpy(legacy):
    rng = numpy.random.default_rng(0)
    before, changes = rng.normal(size=50), rng.normal(size=(5, 50)) + 0.3
    counts = [3, 1, 4, 1, 5]
    settings = {"tau": 0.5, "eta": 0.7, "legacy_mask": legacy}
    weights = aggregated(
        settings, before.astype("float32"), [c.astype("float32") for c in changes], counts
    )
    agreement = numpy.abs(numpy.sign(changes).mean(0))
    above = agreement >= 0.5
    multiplier = above * (1 + agreement) if legacy else numpy.where(above, 1, agreement)
    mean = (changes * numpy.array(counts)[:, None]).sum(0) / sum(counts)
    expected = torch.from_numpy(before + 0.7 * multiplier * mean).float()
    torch.testing.assert_close(weights["a.weight"], expected, rtol=1e-4, atol=1e-5)


def test_tau_zero_is_fedavg_bit_for_bit():
    zero = federation("fedgma", settings={"tau": 0})
    assert same(zero.run(), federation().run())
    assert not same(federation("fedgma").run(), zero.server.state.weights)


def test_normalisation_statistics_take_the_plain_mean():
    masked, plain = federation("fedgma").run(1), federation().run(1)
    for name, tensor in plain.items():
        if "running" in name or "tracked" in name:
            assert torch.equal(masked[name], tensor)


def test_a_tied_weight_is_masked_under_all_its_names():
    layer = nn.Linear(2, 2)
    tied = nn.ModuleDict({"one": layer, "other": layer})
    masked = build_method("fedgma", {}).initial_extras(tied, 3)[MASKED]
    assert masked.all()
    assert len(masked) == 4


@pytest.mark.parametrize(("setting", "value"), [("tau", 1.1), ("tau", -0.1), ("eta", 0.0)])
def test_settings_out_of_range_are_refused(setting, value):
    with pytest.raises(ExperimentError, match=f"fedgma: {setting}"):
        build_method("fedgma", {setting: value})
