"""What noise hides: an adversarial client never moves the released sum by more than the norm."""

import math

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from feddg.clients.sampling import Schedule
from feddg.messages import Message, Update
from feddg.methods.base import Round, State, weighted_mean
from feddg.privacy import noise
from feddg.privacy.accounting import Account
from feddg.privacy.defence import WeightNames
from feddg.privacy.noise import Clipping
from feddg.settings import PrivacySettings
from odd_inputs import NOT_FINITE

FACTS = WeightNames(frozenset("ab"), frozenset("ab"))
VALUES = st.floats(-1e6, 1e6, width=32)
CHANGE = st.lists(VALUES, min_size=4, max_size=4)
SENT = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([[0.0, 3.0]])}


def weights(change):
    values = torch.tensor(change, dtype=torch.float32)
    return {"a": SENT["a"] + values[:2], "b": SENT["b"] + values[2:][None]}


def defence(**fields):
    found = Clipping(PrivacySettings(**{"clipping": "fixed", **fields}), Schedule(4, 4))
    found.facts = FACTS
    return found


def begun(own):
    """A round of the defence's, and what its clients are told."""
    state = State(SENT)
    own.remember(state, own.initial_memory())
    return Round(1, [], state), told(own)


def told(own):
    """What a client is told."""
    return Message({}, {"norm": own.settings.clipping_norm, "noise": own.multiplier})


def released(own, changes, examples):
    """The server's side of a round without its noise, as a sum of changes."""
    round, told = begun(own)
    updates = (
        own.received(own.protect(Update(k, n, weights(c)), SENT, told), round)
        for k, (c, n) in enumerate(zip(changes, examples))
    )
    collected = list(own.collected(updates, round))
    state = State(weighted_mean((u.weights, u.examples) for u in collected), {})
    found = own.completed(state, round).weights
    return torch.cat([(found[n].double() - SENT[n].double()).flatten() for n in "ab"]) * len(
        collected
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(CHANGE, st.integers(1, 10**6)), min_size=1, max_size=5),
    st.integers(0, 4),
    st.sampled_from([0.01, 1.0, 50.0]),
)
def test_no_client_moves_the_sum_by_more_than_the_norm(clients, at, norm):
    own = defence(clipping_norm=norm)
    changes, examples = zip(*clients)
    silent = list(changes)
    silent[at % len(changes)] = [0.0] * 4
    moved = released(own, changes, examples) - released(own, silent, examples)
    rounding = 1e-5 * len(changes)  # weights near 1 in float32
    assert float(moved.norm()) <= norm * (1 + 1e-5) + rounding


@settings(max_examples=200, deadline=None)
@given(CHANGE, CHANGE, st.sampled_from([0.01, 1.0, 50.0]))
def test_two_updates_of_a_client_are_at_most_two_norms_apart(one, other, norm):
    own = defence(clipping_norm=norm)
    told = Message({}, {"norm": norm})
    left, right = (own.protect(Update(0, 1, weights(c)), SENT, told).weights for c in (one, other))
    parts = [float((left[n].double() - right[n].double()).square().sum()) for n in left]
    apart = math.sqrt(sum(parts))
    assert apart <= 2 * norm * (1 + 1e-5) + 1e-5


def test_a_server_that_sends_large_weights_does_not_make_rounded_changes_longer(monkeypatch):
    """Of 2^21, float32 knows quarters: a change of 0.15 in each entry is rounded to 0.25."""
    own = defence(clipping_norm=0.3, noise_multiplier=1.0, noised_at="client")
    large = {name: torch.full_like(tensor, 2.0**21) for name, tensor in SENT.items()}
    trained = {name: tensor + 1 for name, tensor in large.items()}
    hidden = {}
    monkeypatch.setattr(noise, "add_noise", lambda x, _: hidden.setdefault(x.shape, x))
    own.protect(Update(0, 1, trained), large, told(own))
    assert 0 < float(torch.cat([x.flatten() for x in hidden.values()]).norm()) <= 0.3 * (1 + 1e-6)


def test_over_10_000_draws_the_released_mean_has_the_stated_variance():
    own = defence(clipping_norm=0.5, noise_multiplier=1.5)
    updates = [Update(k, 1, SENT) for k in range(3)]  # of four that were planned
    own.account = Free()
    big = {n: t.double() for n, t in SENT.items()}
    drawn = []
    for _ in range(10_000):
        round, _ = begun(own)
        list(own.collected(iter(updates), round))
        found = own.completed(State(dict(big), {}), round).weights
        drawn.append(torch.cat([(found[n] - big[n]).flatten() for n in "ab"]))
    errors = torch.stack(drawn).numpy() / (1.5 * 0.5 / 4)
    low, high = stats.chi2.ppf([5e-10, 1 - 5e-10], errors.size)
    assert low < (errors**2).sum() < high
    assert numpy.abs(errors.mean(0)).max() < 6 / 100
    assert numpy.abs(numpy.corrcoef(errors.T) - numpy.eye(4)).max() < 6 / 100


class Free(Account):
    """Counts nothing."""

    def charge(self, *_):
        return None


def test_noise_at_the_client_has_the_stated_variance_and_leaves_the_rest_alone():
    own = defence(clipping_norm=0.5, noise_multiplier=2.0, noised_at="client")
    own.facts = WeightNames(frozenset("ab"), frozenset("a"))
    big = {"a": torch.zeros(20_000, dtype=torch.float64), "b": torch.ones(3)}
    trained = {"a": big["a"], "b": torch.zeros(3)}
    found = own.protect(Update(0, 1, trained), big, told(own)).weights
    assert torch.equal(found["b"], big["b"])  # it is not trained: what it says, nobody may see
    noise = (found["a"] / (2.0 * 0.5)).numpy()
    low, high = stats.chi2.ppf([5e-10, 1 - 5e-10], noise.size)
    assert low < (noise**2).sum() < high


@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_change_that_is_not_finite_never_leaves_under_noise(value):
    own = defence(clipping_norm=0.5, noise_multiplier=2.0, noised_at="client")
    trained = {n: torch.full_like(t, value) for n, t in SENT.items()}
    found = own.protect(Update(0, 1, trained), SENT, told(own)).weights
    for name, sent in SENT.items():  # as if it had not trained: noise alone
        assert torch.isfinite(found[name]).all()
        assert float((found[name] - sent).abs().max()) < 8 * 2.0 * 0.5


def test_a_secret_draw_of_nobody_is_released_like_any_other():
    plan = Schedule(20, 2, rounds=3)
    own = Clipping(PrivacySettings(clipping="fixed", noise_multiplier=1.0, sampling="secret"), plan)
    assert own.secret_rate == 0.1
    own.account, own.facts = Free(), FACTS
    round, _ = begun(own)
    collected = list(own.collected(iter(()), round))
    state = State(weighted_mean((u.weights, u.examples) for u in collected), {})
    found = own.completed(state, round).weights
    assert all(not torch.equal(found[n], SENT[n]) for n in "ab")
    # And a round of many is divided by the number that was to be expected: 2.
    faint = {"clipping": "fixed", "noise_multiplier": 1e-9, "sampling": "secret"}
    quiet = Clipping(PrivacySettings(**faint), plan)
    quiet.account, quiet.facts = Free(), FACTS
    round, _ = begun(quiet)
    updates = [Update(k, 1, weights([0.05, 0, 0, 0])) for k in range(6)]
    collected = list(quiet.collected(iter(updates), round))
    state = State(weighted_mean((u.weights, u.examples) for u in collected), {})
    moved = quiet.completed(state, round).weights["a"] - SENT["a"]
    torch.testing.assert_close(moved, torch.tensor([0.15, 0.0]), rtol=1e-3, atol=1e-5)
