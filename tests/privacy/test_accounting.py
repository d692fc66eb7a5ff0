"""Epsilon: against published values, against the accountant, and from the one to the other."""

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from feddg.api import resume, run
from feddg.clients.sampling import Schedule, drawn_clients, secret_clients
from feddg.errors import BudgetSpent, ExperimentError, FeddgError
from feddg.experiment import Experiment
from feddg.federation.federation import build
from feddg.privacy.accounting import (
    Account,
    Release,
    about_delta,
    accountants_epsilon,
    gaussian_epsilon,
    gaussian_noise,
    rounded_up,
    sampled_epsilon,
    sampled_noise,
    together,
)
from feddg.privacy.building import build_defences
from feddg.privacy.noise import Clipping
from feddg.records import PRIVACY_ROWS
from feddg.runs.observer import Observer
from feddg.runs.reading import read_run
from feddg.settings import PrivacySettings
from federations import federation

# dp-accounting's own test table (pld_privacy_accountant_test.py): three releases at epsilon 1.
COMPOSED = (math.sqrt(3), 0.126936)
SAMPLED = (0.5, 0.2, 0.15594)
# Balle and Wang's calibration (2018), delta 1e-5: noise by epsilon.
CALIBRATED = {0.5: 7.03, 1.0: 3.73, 2.0: 1.99, 4.0: 1.081, 8.0: 0.600, 16.0: 0.344}


def test_three_releases_cost_what_the_accountants_own_table_says():
    noise, delta = COMPOSED
    assert gaussian_epsilon(together([noise] * 3), delta) == pytest.approx(1, rel=0.01)
    assert accountants_epsilon(together([noise] * 3), delta) == pytest.approx(1, rel=0.01)


def test_three_secret_draws_cost_what_the_accountants_own_table_says():
    noise, rate, delta = SAMPLED
    assert sampled_epsilon(((noise, rate),) * 3, delta) == pytest.approx(1, rel=0.01)


def test_the_noise_for_an_epsilon_is_the_published_one(subtests):
    for epsilon in CALIBRATED:
        with subtests.test(epsilon=epsilon):
            assert gaussian_noise(epsilon, 1e-5) == pytest.approx(CALIBRATED[epsilon], rel=0.01)
            assert gaussian_epsilon(CALIBRATED[epsilon], 1e-5) == pytest.approx(epsilon, rel=0.01)


def test_the_accountant_and_the_closed_form_agree(subtests):
    for delta, noise in itertools.product([1e-3, 1e-7], [0.4, 1.0, 5.0, 50.0]):
        with subtests.test(noise=noise, delta=delta):
            exact, reported = gaussian_epsilon(noise, delta), accountants_epsilon(noise, delta)
            assert exact <= reported * (1 + 1e-6)
            assert reported == pytest.approx(exact, rel=1e-3)


def test_the_closed_form_is_the_gaussians_own_trade_off():
    # delta(epsilon) = P(loss > epsilon) - e^epsilon P'(loss > epsilon), by integration.
    noise, epsilon = 0.8, 1.3
    edge = epsilon * noise**2 + 0.5  # where the privacy loss is epsilon
    expected = stats.norm.sf(edge, 1, noise) - math.exp(epsilon) * stats.norm.sf(edge, 0, noise)
    assert gaussian_epsilon(noise, expected) == pytest.approx(epsilon, rel=1e-9)


@given(st.floats(0.01, 40), st.floats(1e-9, 0.1))
def test_noise_and_epsilon_are_each_others_inverse(epsilon, delta):
    assert gaussian_epsilon(gaussian_noise(epsilon, delta), delta) == pytest.approx(
        epsilon, rel=1e-6
    )


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=20))
def test_more_releases_never_cost_less(noises):
    assert together([*noises, 3.0]) <= together(noises)


def test_no_noise_costs_everything_and_no_release_nothing():
    assert gaussian_epsilon(0.0, 1e-5) == accountants_epsilon(0.0, 1e-5) == math.inf
    assert together([1.0, 0.0]) == 0.0
    assert sampled_epsilon(((0.0, 0.5),), 1e-5) == math.inf
    assert accountants_epsilon(together([]), 1e-5) == sampled_epsilon((), 1e-5) == 0.0


@pytest.mark.parametrize("noise", [1e-3, 0.02, 0.05])
def test_an_epsilon_that_says_nothing_is_still_counted(noise):
    exact = gaussian_epsilon(noise, 1e-5)
    assert exact * (1 - 1e-6) <= accountants_epsilon(noise, 1e-5) <= exact * 1.001
    drawn = sampled_epsilon(((noise, 0.5),) * 4, 1e-5)
    assert 0.9 * exact < drawn <= gaussian_epsilon(noise / 2, 1e-5)


# noise, rate, rounds, delta; epsilon and its error by prv-accountant 0.2.0 (Gopi, Lee, Wutschitz,
# 2021) has them: another method and another code than dp-accounting's.
PRV = [
    (0.6, 0.001, 10000, 1e-5, 2.4562, 0.0249),
    (1, 0.01, 1000, 1e-5, 1.8282, 0.0185),
    (5, 0.01, 1000, 1e-5, 0.2114, 0.0021),
    (2, 0.05, 500, 1e-5, 2.5320, 0.0255),
    (5, 0.2, 50, 1e-5, 1.1176, 0.0113),
    (1, 0.5, 20, 1e-5, 15.1233, 0.0508),
    (0.6, 0.9, 100, 1e-5, 184.9250, 0.0538),
    (0.8, 0.1, 100, 1e-7, 14.0072, 0.0506),
    (1.5, 0.3, 30, 1e-3, 4.2875, 0.0505),
    (1, 0.25, 1, 1e-5, 2.7065, 0.0273),
    (0.4, 0.02, 200, 1e-5, 23.0262, 0.0516),
]


def test_secret_draws_cost_what_another_accountant_says(subtests):
    for noise, rate, rounds, delta, epsilon, error in PRV:
        with subtests.test(
            noise=noise, rate=rate, rounds=rounds, delta=delta, epsilon=epsilon, error=error
        ):
            found = sampled_epsilon(((noise, rate),) * rounds, delta)
            assert epsilon - error <= found <= epsilon + error


def test_the_noise_for_secret_draws_is_the_least_that_is_enough():
    # Public draws of so many rounds would cost far more than 200.
    assert sampled_noise(8.0, 1e-5, 0.01, 1000) == pytest.approx(0.587, rel=3e-3)


def test_secret_draws_cost_less_than_known_ones():
    noise = sampled_noise(2.0, 1e-5, 0.25, 4)
    assert 0.97 * 2 < sampled_epsilon(((noise, 0.25),) * 4, 1e-5) <= 2
    assert noise < gaussian_noise(2.0, 1e-5) * math.sqrt(4)


@given(st.floats(1e-3, 1e4))
def test_rounding_a_noise_never_makes_it_smaller(noise):
    assert noise < rounded_up(noise) < noise * 1.002


def test_a_schedule_knows_who_takes_part_most_often():
    plan = Schedule(10, 3, seed=5, rounds=20)
    counts = [0] * 10
    for round in range(1, 21):
        for id in drawn_clients(range(10), 3, 5, round):
            counts[id] += 1
    assert sum(counts) == 60
    assert plan.most == max(counts)
    assert plan.rate == 0.3
    assert Schedule(4, 4, rounds=7).most == 7


def test_a_secret_draw_has_its_probability_and_no_seed():
    taken = [len(secret_clients(range(1000), 0.3)) for _ in range(20)]
    low, high = stats.binom.ppf([5e-10, 1 - 5e-10], 20_000, 0.3)
    assert low < sum(taken) < high
    assert len(set(taken)) > 1


# The account: every release counts, also after a resume, and the budget ends the run.


SMALL = {
    "data": {"source": "digits", "image_size": 8, "id_val": 0.0, "id_test": 0.0},
    "hold_out": "sketch",
    "clients": 3,
    "model": {"backbone": "cnn", "weights": None, "normalization": "frozen"},
    "train": {"rounds": 3, "local_steps": 1, "batch_size": 8},
    "device": "cpu",
    "precision": "float32",
}


def chosen(privacy, **change):
    return Experiment(**{**SMALL, **change, "privacy": privacy})


def defences_of(privacy):
    experiment = chosen(privacy)
    return build_defences(experiment, *build(experiment, 10))


def carried_out(experiment, folder, **options):
    return run(experiment, folder / "runs", cache=folder / "cache", report=False, **options)


def test_clients_pay_for_their_own_rounds_only():
    rows = []
    account = Account(write=rows.append)
    for round, clients in enumerate([(0, 1), (1, 2), (3,)], start=1):
        account.charge(Release("update", round, clients, 2.0), 1e-5)
    twice, once = (accountants_epsilon(2 / math.sqrt(n), 1e-5) for n in (2, 1))
    assert [row.epsilon for row in rows] == pytest.approx([once, twice, twice])
    assert account.after(Release("update", 4, (3,), 2.0), 1e-5) == pytest.approx(twice)
    assert account.after(Release("statistics", 0, (1,), 2.0), 1e-5) == pytest.approx(once)


def test_a_release_beyond_the_budget_is_not_entered():
    rows = []
    account = Account(write=rows.append)
    budget = accountants_epsilon(1.0, 1e-5) * 1.001
    account.charge(Release("update", 1, (0,), 1.0), 1e-5, budget)
    with pytest.raises(BudgetSpent, match=r"epsilon would be .* and the budget is"):
        account.charge(Release("update", 2, (0,), 1.0), 1e-5, budget)
    account.charge(Release("update", 2, (1,), 1.0), 1e-5, budget)
    assert [row.clients for row in rows] == [[0], [1]]


def test_a_row_is_on_disk_before_anything_is_released():
    small = federation(privacy={"epsilon": 8}, freeze=True)
    state = {n: t.clone() for n, t in small.server.state.weights.items()}
    seen = []

    def write(row):
        seen.append(row)
        assert all(small.server.state.weights[n].equal(t) for n, t in state.items())
        raise OSError("the disk is full")

    small.server.defences.defences[0].account = Account(write=write)
    with pytest.raises(OSError, match="full"):
        small.server.round()
    assert len(seen) == 1


def test_an_epsilon_picks_the_noise_of_the_planned_rounds_and_is_met(tmp_path):
    done = carried_out(chosen({"epsilon": 8.0}), tmp_path)
    spent = done.privacy["update", "client"]
    assert done.rounds_done == 3
    assert 7.9 < spent.epsilon <= 8.0
    assert gaussian_epsilon(spent.noise / math.sqrt(3), 1e-5) == pytest.approx(8, rel=0.01)
    (said,) = (one for one in done.summary.diagnostics if one.code == "update-privacy")
    assert "epsilon 8 at delta 1e-05" in said.text
    assert f"{spent.noise:g} times the norm" in said.text


def test_a_drawn_schedule_is_what_the_noise_is_made_for(tmp_path):
    clients = {"number": 6, "per_round": 2}
    experiment = chosen({"epsilon": 4.0}, clients=clients)
    spent = carried_out(experiment, tmp_path).privacy["update", "client"]
    assert 3.9 < spent.epsilon <= 4.0


def test_the_run_ends_before_the_budget_is_exceeded(tmp_path, caplog):
    noise = 1.0
    budget = accountants_epsilon(noise / math.sqrt(2), 1e-5) * 1.01
    experiment = chosen({"epsilon": budget, "noise_multiplier": noise})
    done = carried_out(experiment, tmp_path)
    assert done.rounds_done == 2
    assert done.status == "completed"
    assert "The run ends after round 2 of 3" in caplog.text
    (why,) = [each for each in done.summary.diagnostics if each.code == "budget-spent"]
    assert why.advice.startswith("Plan 2 rounds")
    assert done.table.round == 2
    assert all(row.confusion for row in done.result.where(metric="accuracy"))


class Stopping(Observer):
    """Is interrupted when a round is aggregated, before its checkpoint."""

    def __init__(self, at):
        self.at = at

    def round(self, row):
        if row.round == self.at:
            raise KeyboardInterrupt


def test_after_a_resume_it_goes_on_counting_interrupted_rounds_too(tmp_path):
    noise = 1.0
    budget = accountants_epsilon(noise / math.sqrt(3), 1e-5) * 1.01
    experiment = chosen({"epsilon": budget, "noise_multiplier": noise})
    with pytest.raises(KeyboardInterrupt):
        carried_out(experiment, tmp_path, observer=Stopping(2))
    folder = tmp_path / "runs" / experiment.label
    assert len(PRIVACY_ROWS.read(folder / "privacy.jsonl")) == 2  # of round 2 as well
    assert read_run(folder).rounds_done == 1
    done = resume(folder, cache=tmp_path / "cache")
    # Three releases are affordable, and one of them came to nothing.
    assert done.rounds_done == 2
    rows = PRIVACY_ROWS.read(folder / "privacy.jsonl")
    assert [row.round for row in rows] == [1, 2, 2]
    assert rows[-1].epsilon <= budget


@pytest.mark.parametrize("damage", ["gone", "a row less", "garbled"])
def test_without_its_account_a_run_does_not_go_on(tmp_path, damage):
    experiment = chosen({"epsilon": 8.0})
    with pytest.raises(KeyboardInterrupt):
        carried_out(experiment, tmp_path, observer=Stopping(3))
    file = tmp_path / "runs" / experiment.label / "privacy.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    if damage == "gone":
        file.unlink()
    elif damage == "garbled":
        file.write_text("".join([lines[0].replace('"noise":', '"nose":'), *lines[1:]]))
    else:
        file.write_text("".join(lines[1:]))
    words = (
        "damaged in row 1"
        if damage == "garbled"
        else "what earlier rounds have cost .*privacy.jsonl"
    )
    with pytest.raises(FeddgError, match=words):
        resume(file.parent, cache=tmp_path / "cache")


def test_a_cut_off_last_line_was_never_released(tmp_path):
    experiment = chosen({"epsilon": 8.0})
    with pytest.raises(KeyboardInterrupt):
        carried_out(experiment, tmp_path, observer=Stopping(2))
    file = tmp_path / "runs" / experiment.label / "privacy.jsonl"
    file.write_text(file.read_text() + '{"message":"upd')
    resume(file.parent, cache=tmp_path / "cache")
    assert [json.loads(line)["round"] for line in file.read_text().splitlines()][:3] == [1, 2, 2]


def test_what_cannot_be_met_says_what_could(subtests):
    for privacy, words in [
        ({"epsilon": 1.0, "noise_multiplier": 0.5}, r"one round costs 9\.\d+\. Set epsilon to at"),
        ({"epsilon": math.inf}, "privacy.epsilon: .*finite"),
        ({"epsilon": math.nan}, "privacy.epsilon"),
        ({"epsilon": -1}, "privacy.epsilon"),
        ({"epsilon": 1e-5}, r"would need noise of .* is the least that can be met"),
        ({"epsilon": 8, "clipping": "none"}, "set clipping"),
        ({"epsilon": 8, "noised_at": "client", "clipping": "adaptive"}, "exclude each other"),
        ({"epsilon": 8, "noised_at": "client", "sampling": "secret"}, "exclude each other"),
        ({"clipping": "fixed", "noised_at": "client"}, "set epsilon, or noise_multiplier"),
        ({"epsilon": 0}, "privacy.epsilon"),
        ({"epsilon": 8, "delta": 1}, "privacy.delta"),
    ]:
        with subtests.test(words=words), pytest.raises(ExperimentError, match=words):
            defences_of(privacy)


def test_the_value_that_could_be_met_can():
    first = chosen({"epsilon": 1.0, "noise_multiplier": 0.5})
    with pytest.raises(ExperimentError) as caught:
        build_defences(first, *build(first, 10))
    named = float(str(caught.value).partition("to at least ")[2].split(",")[0])
    second = chosen({"epsilon": named, "noise_multiplier": 0.5})
    defences = build_defences(second, *build(second, 10))
    assert all(defence.affords(1, [0, 1, 2]) for defence in defences.defences)


def test_a_delta_that_gives_a_client_away_is_said(tmp_path, caplog):
    carried_out(chosen({"epsilon": 8, "delta": 0.5}), tmp_path)
    assert "Set privacy.delta below 0.3" in caplog.text


def test_noise_at_the_client_counts_twice_the_norm(tmp_path):
    done = carried_out(chosen({"epsilon": 8.0, "noised_at": "client"}), tmp_path)
    rows = PRIVACY_ROWS.read(done.folder / "privacy.jsonl")
    assert [row.noised_at for row in rows] == ["client"] * 3
    central = Clipping(chosen({"epsilon": 8.0}).privacy).multiplier
    assert rows[0].noise == pytest.approx(central * math.sqrt(3), rel=2e-3)
    assert 7.9 < rows[-1].epsilon <= 8


def test_a_style_that_would_be_noise_alone_is_refused():
    words = r"privacy.style_epsilon 1e-09 would need noise of .*; 0.0\d+ is the least"
    styled = Experiment(**{**SMALL, "method": "pardon", "privacy": {"style_epsilon": 1e-9}})
    built = build(styled, 10)
    with pytest.raises(ExperimentError, match=words):
        build_defences(styled, *built)


def test_an_epsilon_that_says_nothing_is_warned_of(caplog):
    experiment = Experiment(**{**SMALL, "method": "fedavg", "privacy": {"epsilon": 1e6}})
    build_defences(experiment, *build(experiment, 10))
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("privacy.epsilon 1e+06 protects nothing")


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        ({"epsilon": 8, "delta": 0.5}, ["one of 2 clients"]),
        ({"style_epsilon": 8, "style_unit": "client", "delta": 0.5}, ["one of 2 clients"]),
        ({"style_epsilon": 8, "delta": 0.5}, ["one of 60 images"]),
        ({"record_epsilon": 8, "delta": 0.02}, ["one of 60 images"]),
        ({"record_epsilon": 8, "epsilon": 8, "delta": 0.5}, ["one of 2 clients", "one of 60"]),
        ({"record_epsilon": 8, "delta": 0.016}, []),
        ({"epsilon": 8, "delta": 0.49}, []),
        ({"clipping": "fixed", "delta": 0.5}, []),
    ],
)
def test_delta_is_judged_by_the_number_of_those_who_are_protected(privacy, words):
    said = [one.text for one in about_delta(PrivacySettings(**privacy), [20, 40])]
    assert len(said) == len(words)
    assert all(word in text for word, text in zip(words, said))


def test_an_epsilon_that_protects_nothing_is_still_counted(tmp_path):
    experiment = chosen({"epsilon": 1e6}, train={**SMALL["train"], "rounds": 1})
    spent = carried_out(experiment, tmp_path).privacy["update", "client"]
    assert 0.9e6 < spent.epsilon <= 1e6
