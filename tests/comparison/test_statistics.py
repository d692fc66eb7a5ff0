"""Statistics against scipy's own test, pandas, and simulations with a known answer."""

import math
from pathlib import Path

import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from feddg.comparison.results import Results
from feddg.comparison.statistics import (
    average_over_columns,
    best_other,
    margins,
    paired_margin,
    spread,
)
from feddg.comparison.statistics import leads as leads_of
from feddg.runs.table import EMA_MEAN

DATA = Path(__file__).parents[2] / "docs" / "results" / "data"


class Itself(dict):
    """Every column is a domain of its own."""

    def __missing__(self, column):
        return column


ITSELF = Itself()
accuracy = st.floats(0, 1)
keys = st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 4))
results = st.dictionaries(keys, accuracy, min_size=1)


@given(st.lists(accuracy, min_size=2))
def test_spread_is_pandas_mean_and_deviation(values):
    found, series = spread(values), pandas.Series(values)
    assert found.mean == pytest.approx(series.mean(), abs=1e-12)
    assert found.deviation == pytest.approx(series.std(), abs=1e-9)


def test_the_spread_of_little():
    assert spread([]) is None
    assert spread([0.5]).deviation is None


def ends(interval):
    return interval.low, interval.high


def domain_means(ours, theirs, seeds_first=True):
    """The paired differences averaged over seeds in every column, or over columns in every seed."""
    table = pandas.Series({k: ours[k] - theirs[k] for k in ours if k in theirs}).unstack()
    return table.mean(axis=1) if seeds_first else table.dropna(axis=1).mean(axis=0)


@given(results, results)
def test_both_intervals_are_scipy_s_over_averages_by_pandas(ours, theirs):
    margin = paired_margin(ours, theirs, ITSELF)
    if not set(ours) & set(theirs):
        assert margin is None
        return
    both = (margin.domains, True), (margin.seeds, False)
    for interval, seeds_first in both:
        values = domain_means(ours, theirs, seeds_first)
        assert interval.count == len(values)
        if seeds_first:
            assert margin.by_domain == pytest.approx(values.to_dict(), abs=1e-9)
        if len(values) < 3 or np.ptp(values) < 1e-8:
            assert (interval.reach, interval.p, interval.excludes_zero) == (None, None, False)
            continue
        expected = stats.ttest_1samp(values, 0)
        around = expected.confidence_interval(0.95)
        assert interval.mean == pytest.approx(values.mean(), abs=1e-9)
        assert ends(interval) == pytest.approx((around.low, around.high), abs=1e-9)
        assert interval.p == pytest.approx(expected.pvalue, abs=1e-9)
        assert interval.excludes_zero == (around.low * around.high > 0)


@given(results, results)
def test_the_margin_turns_round_with_the_methods(ours, theirs):
    there, back = paired_margin(ours, theirs, ITSELF), paired_margin(theirs, ours, ITSELF)
    if there is not None:
        for one, other in ((there.domains, back.domains), (there.seeds, back.seeds)):
            assert one.mean == pytest.approx(-other.mean, abs=1e-12, nan_ok=True)
            assert one.count == other.count
            assert one.reach == pytest.approx(other.reach)  # the last bit is of the order of keys
            assert one.p == pytest.approx(other.p)


@pytest.mark.parametrize(
    ("method", "mean", "low", "high"),
    [
        ("outlines", 15.7, -22.9, 54.3),
        ("vista", 23.6, 1.8, 45.4),
        ("randconv", 17.5, 2.2, 32.8),
        ("mixstyle", 6.0, -2.6, 14.6),
    ],
)
def test_published_margins_on_digits_over_domains(method, mean, low, high):
    published = Results.read(DATA / "serving_digits.csv")
    margin = published.margins(EMA_MEAN, "fedavg")[method]
    assert (margin.domains.count, margin.seeds.count) == (4, 5)
    assert 100 * margin.mean == pytest.approx(mean, abs=0.05)
    assert [100 * end for end in ends(margin.domains)] == pytest.approx([low, high], abs=0.05)
    assert not margin.decided, "among nine methods"


def test_four_domains_as_outlines_meets_them_by_hand():
    """Student's t with 3 degrees of freedom, from a printed table: 3.1824."""
    gains = {"ink": 0.045, "chalk": 0.043, "photo": 0.019, "sketch": 0.521}
    ours = {(name, seed): 0.4 + gain for name, gain in gains.items() for seed in range(5)}
    margin = paired_margin(ours, dict.fromkeys(ours, 0.4), ITSELF)
    reach = 3.1824 * np.std([*gains.values()], ddof=1) / 2
    assert margin.domains.reach == pytest.approx(reach, rel=1e-4)
    assert margin.domains.reach == margin.detectable == pytest.approx(0.387, abs=1e-3)
    assert (margin.seeds.reach, margin.seeds.count) == (None, 5), "equal in every seed"


def test_conditions_are_no_further_domains():
    """Three degrees of heterogeneity on two domains stay two domains."""
    random = np.random.default_rng(0)
    columns = {f"{d}, heterogeneity {h}": d for d in ("ink", "chalk") for h in (0, 0.1, 1)}
    ours = {(column, seed): random.random() for column in columns for seed in range(4)}
    margin = paired_margin(ours, dict.fromkeys(ours, 0.5), columns)
    assert (margin.domains.count, margin.domains.reach) == (2, None)
    assert margin.seeds.count == 4
    assert margin.mean == pytest.approx(np.mean([*ours.values()]) - 0.5)


def test_a_domain_with_fewer_seeds_counts_as_much_as_the_others():
    ours = {
        ("a", 0): 0.5,
        ("a", 1): 0.7,
        ("a", 2): 0.9,
        ("b", 0): 0.2,
        ("c", 0): 0.1,
        ("c", 1): 0.3,
    }
    margin = paired_margin(ours, dict.fromkeys(ours, 0.0), ITSELF)
    assert margin.mean == pytest.approx((0.7 + 0.2 + 0.2) / 3)
    assert margin.domains.count == 3
    assert margin.seeds.count == 1, "the seeds that all domains have"


def test_domains_with_no_seed_in_common_have_no_interval_over_seeds():
    ours = {("a", 0): 0.5, ("b", 1): 0.7}
    margin = paired_margin(ours, dict.fromkeys(ours, 0.0), ITSELF)
    assert (margin.seeds.count, margin.seeds.reach) == (0, None)
    assert math.isnan(margin.seeds.mean)
    assert margin.mean == pytest.approx(0.6)


@pytest.mark.parametrize(("domains", "seeds"), [(1, 5), (2, 5), (4, 1), (4, 2), (1, 1)])
def test_too_few_domains_or_seeds_claim_no_interval(domains, seeds):
    random = np.random.default_rng(0)
    ours = {(name, seed): random.random() for name in "abcd"[:domains] for seed in range(seeds)}
    margin = paired_margin(ours, dict.fromkeys(ours, 0.0), ITSELF)
    assert (margin.domains.reach is None, margin.seeds.reach is None) == (domains < 3, seeds < 3)
    assert domains > 2 or not margin.decided


@given(st.floats(-0.5, 0.5), st.integers(1, 6), st.integers(1, 6))
def test_equal_differences_decide_nothing(gain, domains, seeds):
    """They would give an interval of no width, which excludes zero whatever they are."""
    theirs = {(d, s): 0.5 + 0.01 * s for d in "abcdef"[:domains] for s in range(seeds)}
    ours = {key: value + gain for key, value in theirs.items()}
    margin = paired_margin(ours, theirs, ITSELF)
    assert margin.mean == pytest.approx(gain)
    assert (margin.domains.reach, margin.seeds.reach, margin.decided) == (None, None, False)


def table_of(*p_values):
    """Rows whose p-values over three domains are these: the middle one apart from the others."""
    rows = {}
    for place, p in enumerate(p_values):
        t = stats.t.ppf(1 - p / 2, 2)
        values = 0.1 * t / math.sqrt(3) + 0.1 * np.array([-1, 0, 1])
        ours = {(name, 0): float(value) for name, value in zip("abc", values)}
        rows[f"row {place}"] = (ours, dict.fromkeys(ours, 0.0))
    return rows


def test_holm_by_hand():
    """p = .01, .04, .03 and .005: times 3, 1, 2 and 4, and never below a smaller one's."""
    found = margins(table_of(0.01, 0.04, 0.03, 0.005), ITSELF)
    assert [one.domains.p for one in found.values()] == pytest.approx([0.01, 0.04, 0.03, 0.005])
    assert [one.p for one in found.values()] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert [one.decided for one in found.values()] == [True, False, False, True]


def test_two_methods_beside_each_other_are_one_comparison():
    (pair,) = table_of(0.03).values()
    found = margins({"this": pair, "that": pair[::-1]}, ITSELF)
    assert [one.p for one in found.values()] == pytest.approx([0.03, 0.03])
    assert found["this"].mean == -found["that"].mean


def test_a_row_without_a_p_value_is_no_comparison():
    one = {("a", 0): 0.5}
    found = margins(table_of(0.03) | {"little": (one, {("a", 0): 0.1})}, ITSELF)
    assert found["row 0"].p == pytest.approx(0.03)
    assert found["little"].p is None
    assert margins({"apart": (one, {("b", 0): 0.1})}, ITSELF) == {}


def test_a_tie_is_a_comparison():
    """A method that is nowhere apart was looked at, too, and one image would give it a p."""
    tie = dict.fromkeys([(name, 0) for name in "abcd"], 0.5)
    rows = table_of(0.01, 0.03) | {"tie": (tie, dict(tie))}
    found = margins(rows, ITSELF)
    assert [found[f"row {n}"].p for n in (0, 1)] == pytest.approx([0.03, 0.06])
    assert found["tie"].p is None
    assert {one.comparisons for one in found.values()} == {3}


# Simulations: the published spreads. A method's true lead varies between domains by some ten
# points, and a domain's by five from seed to seed, in which pairs of a domain are not independent.


BETWEEN, WITHIN, LEAD = 0.1, 0.05, 0.05
TABLES = 1000


def leads(random, domains, seeds, tables=TABLES, lead=LEAD, between=BETWEEN):
    """Paired differences ``(tables, domains, seeds)`` of drawn domains and seeds."""
    own = lead + between * random.standard_normal((tables, domains, 1))
    return own + WITHIN * random.standard_normal((tables, domains, seeds))


def as_accuracies(differences):
    return {(f"d{d}", s): float(v) for (d, s), v in np.ndenumerate(differences)}


def covered(intervals, truth=LEAD):
    return np.mean([one.low <= truth <= one.high for one in intervals])


@pytest.mark.parametrize(("domains", "seeds"), [(4, 5), (4, 1), (6, 3)])
def test_the_interval_over_domains_holds_the_lead_on_other_domains(domains, seeds):
    """Another draw of domains is covered in 95 %; by pairs, as it was done before, far less."""
    drawn = leads(np.random.default_rng(0), domains, seeds)
    nothing = dict.fromkeys(as_accuracies(drawn[0]), 0.0)
    found = [paired_margin(as_accuracies(one), nothing, ITSELF).domains for one in drawn]
    assert covered(found) >= 0.93  # of 0.95, with a standard error of 0.007
    if seeds > 1:
        pairs = drawn.reshape(TABLES, -1)
        low, high = stats.ttest_1samp(pairs, 0, axis=1).confidence_interval(0.95)
        assert np.mean((low <= LEAD) & (high >= LEAD)) < 0.8


def test_an_interval_over_four_domains_is_too_narrow_where_one_in_four_stands_out():
    """By ten times what the others differ by: those tables that miss it hold too low a mean."""
    random = np.random.default_rng(7)
    drawn = BETWEEN * (
        random.standard_normal((TABLES, 4)) + 10 * (random.random((TABLES, 4)) < 1 / 4)
    )
    nothing = {(f"d{d}", 0): 0.0 for d in range(4)}
    found = [paired_margin(as_accuracies(one[:, None]), nothing, ITSELF).domains for one in drawn]
    assert 0.65 < covered(found, BETWEEN * 10 / 4) < 0.75


def test_a_domain_with_one_seed_leaves_the_coverage():
    """Its mean is less certain than the others', and all count the same."""
    drawn = leads(np.random.default_rng(1), 4, 5)
    keys = [key for key in as_accuracies(drawn[0]) if key[0] != "d3" or key[1] == 0]
    nothing = dict.fromkeys(keys, 0.0)
    found = [paired_margin(as_accuracies(one), nothing, ITSELF) for one in drawn]
    assert {one.seeds.count for one in found} == {1}
    assert covered(one.domains for one in found) >= 0.93


def test_the_interval_over_seeds_holds_the_lead_on_these_domains():
    random = np.random.default_rng(2)
    held = 0
    for _ in range(1000):
        own = LEAD + BETWEEN * random.standard_normal(4)
        drawn = own[:, None] + WITHIN * random.standard_normal((4, 5))
        margin = paired_margin(as_accuracies(drawn), dict.fromkeys(as_accuracies(drawn), 0), ITSELF)
        held += margin.seeds.low <= own.mean() <= margin.seeds.high
    assert held / 1000 >= 0.93


def test_among_ten_methods_without_a_lead_few_tables_claim_one():
    """Holm: 5 % of tables at most; without it, one in three."""
    random = np.random.default_rng(3)
    nothing = dict.fromkeys(as_accuracies(np.zeros((4, 3))), 0.0)
    wrong = {"corrected": 0, "one by one": 0}
    for _ in range(300):
        drawn = leads(random, 4, 3, tables=9, lead=0.0)
        rows = {f"m{place}": (as_accuracies(one), nothing) for place, one in enumerate(drawn)}
        found = margins(rows, ITSELF).values()
        wrong["corrected"] += any(one.decided for one in found)
        wrong["one by one"] += any(one.domains.excludes_zero for one in found)
    assert wrong["corrected"] <= 0.08 * 300
    assert wrong["one by one"] > 0.25 * 300


def holm(p_values):
    """Which of these hypotheses Holm rejects: from the smallest p on, until one is too large."""
    rejected = np.zeros(len(p_values), bool)
    for left, place in zip(range(len(p_values), 0, -1), np.argsort(p_values)):
        if p_values[place] >= 0.05 / left:
            break
        rejected[place] = True
    return rejected


@pytest.mark.parametrize(("others", "claimed"), [(0.0, (0.44, 0.57)), (9.0, (0.8, 1.0))])
def test_a_true_difference_as_large_as_the_detectable_one_is_claimed_half_the_time(others, claimed):
    """Among nine methods, the other eight without a lead; more often where all of them lead.

    The figure is of one draw of domains, and true in the next. Half the width of the interval,
    which stood there once, is claimed in one of eight.
    """
    random, nothing = np.random.default_rng(6), {(f"d{d}", 0): 0.0 for d in range(4)}
    counts = {"detectable": 0, "half the width": 0}
    for _ in range(400):
        drawn, again = BETWEEN * random.standard_normal((2, 9, 4))
        rows = {f"m{n}": (as_accuracies(one[:, None]), nothing) for n, one in enumerate(drawn)}
        printed = margins(rows, ITSELF)["m0"]
        for name, lead in zip(counts, (printed.detectable, printed.domains.reach)):
            truth = np.array([lead] + 8 * [others])[:, None]
            counts[name] += holm(stats.ttest_1samp(again + truth, 0, axis=1).pvalue)[0]
    assert claimed[0] < counts["detectable"] / 400 < claimed[1]
    assert others or counts["half the width"] / 400 < 0.2


def test_the_detectable_difference_by_hand():
    """Of the margins in a table that have an interval, here two: t at 0.9875, 6.2053 of 2."""
    equal = {(name, 0): 0.5 for name in "abc"}
    rows = table_of(0.3, 0.6) | {"equal": (equal, dict.fromkeys(equal, 0.0))}
    found = margins(rows, ITSELF)
    assert found["row 0"].detectable == pytest.approx(6.2053 * 0.1 / math.sqrt(3), rel=1e-4)
    assert found["equal"].detectable is None


def test_the_best_of_alike_methods_is_not_said_to_lead():
    """The best is picked by the same numbers: its lead is over the next best of all."""
    random = np.random.default_rng(4)
    claimed = 0
    for _ in range(300):
        found = {
            f"m{place}": as_accuracies(one)
            for place, one in enumerate(leads(random, 4, 3, tables=5, lead=0.0))
        }
        best = max(found, key=lambda name: sum(found[name].values()))
        pairs = {name: (found[name], found[best_other(name, found)]) for name in found}
        claimed += margins(pairs, ITSELF)[best].decided
    assert claimed <= 0.06 * 300


def test_a_lag_behind_the_best_of_several_has_no_p():
    found = {
        name: {(f"d{d}", 0): level + 0.001 * d * (place + 1) for d in range(4)}
        for place, (name, level) in enumerate({"low": 0.1, "high": 0.5, "mid": 0.3}.items())
    }
    by_best = leads_of(found, ITSELF)
    assert {name: margin.p is None for name, margin in by_best.items()} == {
        "low": True,
        "high": False,
        "mid": True,
    }
    assert all(margin.decided for margin in leads_of(found, ITSELF, "mid").values())
    del found["low"]
    assert all(margin.decided for margin in leads_of(found, ITSELF).values())


def test_a_clear_gain_on_all_domains_is_decided():
    drawn = leads(np.random.default_rng(5), 4, 5, tables=1, lead=0.2, between=0.02)[0]
    margin = paired_margin(as_accuracies(drawn), dict.fromkeys(as_accuracies(drawn), 0.0), ITSELF)
    assert margin.decided
    assert margin.domains.p < 0.05


def test_an_average_needs_every_column_of_a_seed():
    found = {("a", 0): 0.2, ("b", 0): 0.4, ("a", 1): 0.6}
    average = average_over_columns(found, ["a", "b"])
    assert (average.mean, average.count) == (pytest.approx(0.3), 1)
    assert average_over_columns(found, ["a", "c"]) is None


def test_the_best_other_method_is_never_oneself_and_is_judged_on_shared_pairs():
    found = {
        "mine": {("a", 0): 0.9, ("b", 0): 0.9},
        "fair": {("a", 0): 0.5, ("b", 0): 0.5},
        "better": {("a", 0): 0.6, ("b", 0): 0.6},
        "lucky": {("a", 0): 0.99},
        "elsewhere": {("c", 0): 1.0},
    }
    assert best_other("mine", found) == "better"
    assert best_other("better", found) == "mine"
    assert best_other("mine", {"mine": found["mine"]}) is None


def test_over_data_sets_each_is_one_value_whatever_its_number_of_domains():
    gains = {"a1": 1.0, "a2": 3.0, "a3": 5.0, "a4": 7.0, "b1": 0.0, "b2": 2.0, "c1": 3.0}
    ours = {(domain, seed): 50 + gain + seed for domain, gain in gains.items() for seed in (0, 1)}
    theirs = {(domain, seed): 50.0 + seed for domain, seed in ours}
    names = {domain: domain for domain in gains}
    of = {domain: domain[0] for domain in gains}
    found = paired_margin(ours, theirs, names, of)
    whole = [4.0, 1.0, 3.0]
    low, high = stats.t.interval(0.95, 2, loc=np.mean(whole), scale=stats.sem(whole))
    assert found.collections.mean == pytest.approx(np.mean(whole))
    assert (found.collections.low, found.collections.high) == pytest.approx((low, high))
    assert found.domains == paired_margin(ours, theirs, names).domains
    assert paired_margin(ours, theirs, names).collections.count == 0
