"""Comparisons of synthetic run folders: tables agree with pandas over the folders' own formulas."""

import csv
import io
import itertools
import json
import re
import shlex
import types
from dataclasses import replace

import numpy as np
import pandas
import pytest
import yaml

from feddg.comparison.results import Results, read_comparison, results_of
from feddg.comparison.results_file import ResultRow, to_text
from feddg.comparison.statistics import paired_margin
from feddg.diagnostics import Diagnostic, warning
from feddg.evaluation.metrics import Predictions, measure
from feddg.records import TEST, VAL
from feddg.report.blocks import Chart, Fold, Prose, Table
from feddg.report.comparison_page import comparison_page
from feddg.report.page import write_comparison, write_report
from feddg.report.run_page import run_page
from feddg.report.tables import (
    about_results,
    accuracy_table,
    by_domain,
    conclusion,
    detectable_text,
    interval_text,
    margin_table,
    rules_table,
    unseen,
)
from feddg.report.terminal import print_comparison
from feddg.report.text import spelled
from feddg.runs.diagnostics import UNSTEADY
from feddg.runs.reading import read_run
from feddg.runs.table import FINAL, SELECTION_RULES, WISE_FT_RULE
from feddg.text import MISSING, percent
from run_folders import ConstantMaker, FolderMaker, RisingMaker, accuracies, numbers

SCENARIOS = ("photo", "sketch", "art_painting")
GAINS = {"fedavg": 0.0, "pardon": 0.06, "mixstyle": 0.03}
SEEDS = (0, 1, 2)


def gain_of(method, scenario, seed, heterogeneity=0.1):
    """A made-up effect: of the method, the scenario, lambda, and chance."""
    chance = np.random.default_rng([len(method), len(scenario), seed]).normal(0, 0.01)
    return GAINS[method] - 0.1 * (scenario == "sketch") + 0.1 * heterogeneity + float(chance)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """A folder as ``feddg compare`` leaves it, and its makers by (method, scenario, seed, value).

    Tests that ask for the same share one folder.
    """
    made = {}

    def make(missing=(), values=(0.1,)):
        key = json.dumps([missing, values])
        if key not in made:
            made[key] = written(tmp_path_factory.mktemp("comparison"), missing, values)
        return made[key]

    return make


def written(folder, missing, values):
    makers, cells = {}, []
    for key in itertools.product(GAINS, SCENARIOS, SEEDS, values):
        method, scenario, seed, value = key
        name = "-".join(map(str, key))
        makers[key] = FolderMaker(
            folder / name,
            method=method,
            test=[scenario],
            training=["cartoon"],
            seed=seed,
            heterogeneity=value,
            gain=gain_of(method, scenario, seed, value),
            status="interrupted" if key[:3] in missing else "completed",
            pictures=0,
        )
        makers[key].write()
        place = {"method": method, "held_out": scenario, "seed": seed}
        place |= {"conditions": {"heterogeneity": str(value)}, "folder": name}
        cells.append(place)
    content = {"name": "made-up", "title": "Made up", "cells": cells}
    (folder / "comparison.json").write_text(json.dumps(content))
    return folder, makers


@pytest.fixture(scope="module")
def plain(comparison):
    """The results of such a folder, and its makers."""
    folder, makers = comparison()
    return read_comparison(folder), makers


def frame(makers):
    """Every run and rule as pandas rows, from the makers' formulas alone."""
    rows = []
    for (method, scenario, seed, value), maker in makers.items():
        rounds = range(1, 7)
        in_domain = max(rounds, key=lambda r: maker.accuracy("id_val", 0, r))
        held_out = max(rounds, key=lambda r: maker.accuracy("val", 0, r))
        chosen = {
            "final": (6, "last"),
            "swa": (6, "swa"),
            "ema": (6, "ema"),
            "best_in_domain": (in_domain, "last"),
            "best_held_out": (held_out, "last"),
        }
        for rule, (r, weights) in chosen.items():
            scores = {split: maker.accuracy(split, 0, r, weights) for split in (TEST, VAL)}
            place = {"method": method, "column": scenario, "seed": seed, "value": value}
            rows.append(place | {"rule": rule, "round": r} | scores)
    return pandas.DataFrame(rows)


def texts(table):
    return {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}


SPELLED = {"fedavg": "FedAvg", "pardon": "PARDON", "mixstyle": "MixStyle"}


def shown(mean, deviation):
    return f"{100 * mean:.1f} ± {100 * deviation:.1f}"


RULES = [rule for rule in SELECTION_RULES.values() if rule is not WISE_FT_RULE]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("split", [TEST, VAL])
def test_accuracies_agree_with_pandas(plain, rule, split):
    results, makers = plain
    own = frame(makers).query("rule == @rule.name")
    by_column = own.groupby(["method", "column"])[split].agg(["mean", "std"])
    averages = own.groupby(["method", "seed"])[split].mean().groupby("method").agg(["mean", "std"])
    found = texts(accuracy_table(results, rule, split))
    for method, name in SPELLED.items():
        expected = [shown(*by_column.loc[method, scenario]) for scenario in SCENARIOS]
        assert found[name][:4] == [*expected, shown(*averages.loc[method])]


def test_the_rules_that_a_run_follows_stand_side_by_side(plain):
    results, makers = plain
    own = frame(makers).groupby(["method", "rule", "seed"])[TEST].mean()
    averages = own.groupby(["method", "rule"]).agg(["mean", "std"])
    table = rules_table(results)
    assert [column.heading for column in table.columns[1:]] == [r.title for r in RULES]
    found = texts(table)
    for method, name in SPELLED.items():
        assert found[name] == [shown(*averages.loc[method, rule.name]) for rule in RULES]


def test_margins_agree_with_pandas(plain):
    results, makers = plain
    wide = (
        frame(makers)
        .query("rule == @FINAL.name")
        .pivot_table(index=["column", "seed"], columns="method", values=TEST)
    )
    found = texts(margin_table(results))
    for method, other in (("pardon", "mixstyle"), ("fedavg", "pardon"), ("mixstyle", "pardon")):
        differences = wide[method] - wide[other]
        # 4.3027: Student's t, two-sided 95 %, 2 degrees of freedom, from a printed table
        mean = differences.mean()
        by = {unit: differences.groupby(unit).mean() for unit in ("column", "seed")}
        error = {unit: own.std() / np.sqrt(3) for unit, own in by.items()}
        reach = {unit: 4.3027 * one for unit, one in error.items()}
        assert found[SPELLED[method]] == [
            SPELLED[other],
            f"{100 * mean:+.1f}",
            *(f"{100 * (mean - r):+.1f} to {100 * (mean + r):+.1f}" for r in reach.values()),
            " / ".join(f"{100 * by['column'][name]:+.1f}" for name in results.columns),
            f"{100 * 6.2053 * error['column']:.1f}",  # of two comparisons, at 1.25 % a side
            "3",
            "3",
        ]


@pytest.mark.parametrize("domains", [4, 12])
def test_differences_by_domain_stay_readable(domains):
    theirs = {(f"site_{n}", 0): 0.5 for n in range(domains)}
    ours = {key: 0.5 + 0.01 * (n - 1.5) for n, key in enumerate(theirs)}
    names = [name for name, _ in theirs]
    margin = paired_margin(ours, theirs, dict(zip(names, names)))
    cell = by_domain(margin, names)
    if domains == 4:
        assert (cell.text, cell.items) == ("-1.5 / -0.5 / +0.5 / +1.5", ())
    else:
        assert cell.text == "-1.5 to +9.5, 10 of 12 above 0"
        assert cell.items[:2] == ("site 0 -1.5", "site 1 -0.5")
        assert len(cell.items) == 12


def test_what_could_not_be_seen_counts_with_the_comparisons_of_the_table(plain):
    """By the figure that stands beside each margin, not by the interval's width."""
    results, _ = plain
    found = [
        replace(one, domains=replace(one.domains, reach=0.029), p=1.0, comparisons=9)
        for one in results.margins(FINAL).values()
    ]
    assert unseen(replace(one, comparisons=1) for one in found) == ""
    assert "in 3 of 3 comparisons" in unseen(found)
    assert f"it takes {detectable_text(found[0])} with" in unseen(found)


def test_what_is_undecided_does_not_depend_on_the_order_of_methods():
    """PARDON's lead is decided, and would still not be seen if it were three points."""
    levels = {"pardon": (0.76, 0.80, 0.84), "mixstyle": (0.5, 0.5, 0.5), "fedavg": (0.1, 0.2, 0.3)}
    rows = [
        ResultRow(method=method, held_out=name, seed=0, numbers=accuracies(final=value))
        for method, values in levels.items()
        for name, value in zip(SCENARIOS, values)
    ]
    captions = [
        margin_table(Results("mine", "mine", order)).caption for order in (rows, rows[::-1])
    ]
    assert "would be missed" in captions[0]  # of FedAvg
    assert captions[0] == captions[1]


def test_a_lead_is_bold_only_where_it_may_be_claimed(plain):
    """Over domains, and with as many comparisons as there are pairs of methods in the table."""
    results, _ = plain
    margins = results.margins(FINAL)
    rows = {row[0].text: row for row in margin_table(results).rows}
    for method, name in SPELLED.items():
        assert rows[name][2].strong == margins[method].decided
    pairs = {frozenset((method, margin.other)) for method, margin in margins.items()}
    assert {one.comparisons for one in margins.values()} == {len(pairs)}


def test_both_intervals_are_numbers_in_a_frame_and_in_a_file(comparison):
    folder, _ = comparison()
    write_comparison(folder)
    results = read_comparison(folder)
    frame = results.margin_frame("fedavg")
    assert list(frame["method"]) == ["pardon", "mixstyle"]
    assert set(frame["other"]) == {"fedavg"}
    margin = results.margins(FINAL, "fedavg")["pardon"]
    row = frame.set_index("method").loc["pardon"]
    assert row["rule"] == "final"
    expected = {
        "difference": margin.mean,
        "low": margin.domains.low,
        "high": margin.domains.high,
        "detectable": margin.detectable,
        "p_holm": margin.p,
        "domains": 3,
        "seeds_low": margin.seeds.low,
        "seeds_high": margin.seeds.high,
        "seeds": 3,
    } | {f"difference_{name}": own for name, own in margin.by_domain.items()}
    assert dict(row[list(expected)]) == pytest.approx(expected)
    file = pandas.read_csv(folder / "margins.csv")
    best = results.margin_frame()
    pandas.testing.assert_frame_equal(file, best, check_dtype=False)


def test_the_sentence_is_about_domains_and_names_both_intervals(plain):
    results, _ = plain
    said, (_, _, margin) = conclusion(results), results.leader
    assert f"{100 * margin.mean:.1f} points more than {spelled(margin.other)}" in said.text
    assert f"{interval_text(margin.domains, 'domain')} over domains" in said.text
    assert f"{interval_text(margin.seeds, 'seed')} over seeds on these domains" in said.text


def verdict_of(tmp_path, gains, seeds=3):
    """The conclusion about FedAvg and PARDON, whose lead by held-out domain is given."""
    folders = [
        FolderMaker(
            tmp_path / f"{method}-{held}-{seed}",
            method=method,
            test=[held],
            training=["cartoon"],
            seed=seed,
            gain=(gain + 0.002 * seed) * (method == "pardon"),
        ).write()
        for method in ("fedavg", "pardon")
        for held, gain in gains.items()
        for seed in range(seeds)
    ]
    results = results_of(folders)
    return conclusion(results), results.leader[2].domains


@pytest.mark.parametrize(
    ("gains", "code", "words"),
    [
        (
            {"photo": 0.05, "sketch": 0.06, "ink": 0.07},
            "decided",
            "The lead is more than chance, and should hold on other domains like these.",
        ),
        (
            {"photo": 0.01, "sketch": 0.01, "ink": 0.10},
            "not-decided",
            "On these domains that is more than chance. For other domains this is open: with 3 "
            "domains that differ this much, it takes a true lead of {reach} points to be claimed",
        ),
        ({"photo": 0.05}, "not-decided", "1 domain says nothing about others."),
        ({"photo": 0.05, "ink": 0.07}, "not-decided", "2 domains say too little about others."),
        (
            {"photo": 0.05, "sketch": 0.05, "ink": 0.05},
            "not-decided",
            "All domains differ by the same amount, so chance cannot be judged.",
        ),
    ],
)
def test_a_lead_is_claimed_over_domains_alone(tmp_path, gains, code, words):
    said, over_domains = verdict_of(tmp_path, gains)
    assert said.code == code
    assert words.format(reach=f"{100 * (over_domains.reach or 0):.1f}") in said.text


def test_runs_that_differ_in_what_validates_are_columns_of_one_method(tmp_path):
    folders = [
        FolderMaker(tmp_path / f"{method}{val}", method=method, test=["photo"], val=[val]).write()
        for method in ("fedavg", "pardon")
        for val in ("ink", "sketch")
    ]
    results = results_of(folders)
    assert results.methods == ["fedavg", "pardon"]
    assert results.columns == ["photo (validated on ink)", "photo (validated on sketch)"]
    assert set(results.domains.values()) == {"photo"}


def test_what_is_missing_is_in_no_mean_beside_the_accuracies(tmp_path):
    folders = [
        FolderMaker(tmp_path / f"{method}{held}{seed}", method=method, test=[held], seed=seed)
        for method in ("fedavg", "pardon")
        for held in ("photo", "ink")
        for seed in range(2)
        if method == "fedavg" or (held, seed) == ("photo", 0)
    ]
    table = accuracy_table(results_of([maker.write() for maker in folders]), FINAL)
    assert texts(table)["PARDON"][-3:] == [MISSING, MISSING, MISSING]
    assert "over at most 2 seeds" in table.caption


def test_seeds_that_all_methods_lack_in_a_column_are_not_counted(tmp_path):
    folders = {
        (method, held, seed): FolderMaker(
            tmp_path / f"{method}{held}{seed}", method=method, test=[held], seed=seed
        ).write()
        for method in ("fedavg", "pardon")
        for held in ("photo", "ink")
        for seed in range(2)
    }
    some = [folder for place, folder in folders.items() if place[1:] != ("ink", 1)]
    whole, part = (accuracy_table(results_of(own), FINAL) for own in ([*folders.values()], some))
    assert "over 2 seeds" in whole.caption
    assert "over at most 2 seeds" in part.caption


def test_a_method_against_itself_under_other_seeds_is_undecided(folder_maker):
    """Two groups of runs of one method that differ in their seeds alone."""
    random = np.random.default_rng(5)
    folders = [
        folder_maker(f"s{seed}", seed=seed, gain=float(random.normal(0, 0.02))).write()
        for seed in range(12)
    ]
    results = results_of(folders).values(FINAL)["pardon"]
    first = {("photo", seed): results["photo", seed] for seed in range(6)}
    second = {("photo", seed - 6): results["photo", seed] for seed in range(6, 12)}
    margin = paired_margin(first, second, {"photo": "photo"})
    assert margin.seeds.low < 0 < margin.seeds.high
    assert margin.domains.reach is None, "one domain"


def test_results_csv_holds_every_number(comparison):
    folder, makers = comparison()
    write_comparison(folder)
    rows = pandas.read_csv(folder / "results.csv")
    rows = rows.query("metric == 'accuracy' and over == 'domain_mean'")
    for split in (TEST, VAL):
        found = rows[rows["split"] == split].set_index(["method", "held_out", "seed", "rule"])
        expected = frame(makers).set_index(["method", "column", "seed", "rule"])
        pandas.testing.assert_series_equal(
            found["value"].sort_index(),
            expected[split].sort_index(),
            check_names=False,
            rtol=1e-12,
        )
        assert (found["round"].sort_index() == expected["round"].sort_index()).all()


def test_the_frame_is_tidy_and_has_every_number(comparison):
    folder, makers = comparison(values=(0.0, 1.0))
    found = read_comparison(folder).frame()
    assert {"method", "column", "held_out", "heterogeneity", "seed", "folder"} <= set(found.columns)
    keys = ["method", "held_out", "heterogeneity", "seed", "rule", "split", "metric", "over"]
    whole = ["round", "weights", "split", "domain", "metric", "value", "images", "bytes", "seconds"]
    assert set(whole) <= set(found.columns)
    assert not found.duplicated([*keys, "weights", "domain"]).any()
    of_domains = found.query("domain != '' and metric == 'accuracy'")
    means = of_domains.groupby([*keys[:6]])["value"].mean()
    named = found[found["over"] != ""]
    told = named.query("metric == 'accuracy' and over == 'domain_mean'").set_index(keys[:6])
    pandas.testing.assert_series_equal(means, told["value"].sort_index(), rtol=1e-12)
    chosen = named.query("metric == 'accuracy' and over == 'domain_mean' and split == 'test'")
    expected = frame(makers).rename(columns={"column": "held_out", "value": "heterogeneity"})
    expected["heterogeneity"] = expected["heterogeneity"].astype(str)
    pandas.testing.assert_series_equal(
        chosen.set_index(keys[:5])["value"].sort_index(),
        expected.set_index(keys[:5])[TEST].sort_index(),
        check_names=False,
        rtol=1e-12,
    )


def test_an_axis_does_not_take_the_name_of_another_column():
    rows = [
        ResultRow(
            method="fedavg",
            held_out="photo",
            seed=0,
            conditions={"weights": weights, "lr": "0.1"},
            numbers=accuracies(final=value),
        )
        for weights, value in (("imagenet", 0.8), ("none", 0.5))
    ]
    found = Results("mine", "mine", rows).frame()
    assert found.columns.is_unique
    assert dict(zip(found["model.weights"], found["value"])) == {"imagenet": 0.8, "none": 0.5}
    assert {*found["lr"]} == {"0.1"}


def test_three_lines_of_pandas_give_the_margins_from_the_frame_and_from_the_file(comparison):
    folder, _ = comparison()
    write_comparison(folder)
    results = read_comparison(folder)
    wanted = (
        "metric == 'accuracy' and split == 'test' and rule == 'final' and over == 'domain_mean'"
    )
    for table in (results.frame(), pandas.read_csv(folder / "results.csv")):
        wide = table.query(wanted).pivot(
            index=["held_out", "seed"], columns="method", values="value"
        )
        leads = wide.sub(wide["fedavg"], axis=0).groupby("held_out").mean()
        for method, margin in results.margins(FINAL, "fedavg").items():
            assert leads[method].mean() == pytest.approx(margin.mean, abs=1e-12)


def test_a_results_file_gives_the_tables_of_its_run_folders(comparison, tmp_path):
    folder, _ = comparison()
    runs = read_comparison(folder)
    without = {"run": None, "folder": ""}
    rows = [
        row.model_copy(update=without | {"numbers": row.table.rows, "experiment": f"{at:08x}"})
        for at, row in enumerate(runs.rows)
    ]
    file = tmp_path / "results.csv"
    file.write_text(to_text(rows), "utf-8")
    known = Results.read(file)
    for rule in RULES:
        assert texts(margin_table(known, rule)) == texts(margin_table(runs, rule))
        tables = [accuracy_table(results, rule, VAL) for results in (known, runs)]
        first, second = ({name: row[:4] for name, row in texts(one).items()} for one in tables)
        assert first == second
    page = write_report([file], tmp_path / "page.html").read_text("utf-8")
    assert "27 runs known from a results file alone" in page
    assert conclusion(known).text in page


def test_a_constant_model_that_wins_is_never_named_without_the_warning(tmp_path, folder_maker):
    """It is ahead by equal differences: neither a success nor a decision."""
    folders = [
        maker(name=f"{method}{seed}", method=method, seed=seed, gain=-0.1)
        for method, maker in (("fedavg", nothing_in(tmp_path)), ("pardon", folder_maker))
        for seed in range(3)
    ]
    results = results_of([maker.write() for maker in folders])
    warning = "(but no better than majority class in all 3 runs)"
    text = conclusion(results).text
    assert text.startswith("FedAvg recognised 60.0")
    assert warning in text
    assert "1 domain says nothing about others." in text
    assert "more than chance" not in text
    page = comparison_page(results)
    assert "most frequent class: FedAvg in all 3 runs." in page.opening[0].text
    rows = texts(accuracy_table(results, FINAL))
    assert "FedAvg (no better than majority class in all 3 runs)" in rows
    assert "PARDON" in rows


@pytest.mark.parametrize("gain", [0.2, -0.5])
def test_a_method_that_had_nothing_to_compare_is_named_even_if_none_is_fit(tmp_path, gain):
    """A run says it before round 1; among many runs nobody reads that."""

    class Idle(FolderMaker):
        def summary(self):
            idle = [] if self.method == "fedavg" else [warning("one-domain-clients", "It idles.")]
            return super().summary().model_copy(update={"diagnostics": idle})

    folders = [
        Idle(tmp_path / f"{method}{seed}", method=method, seed=seed, gain=gain).write()
        for method in ("fedavg", "pardon")
        for seed in range(2)
    ]
    said = [one for one in about_results(results_of(folders)) if one.code == "one-domain-clients"]
    assert [one.severity for one in said] == ["warning"]
    assert said[0].text.endswith("nothing to compare: PARDON in both runs.")
    assert "--partition iid" in said[0].advice


def nothing_in(folder):
    return lambda name, **fields: ConstantMaker(folder / name, **fields)


def test_methods_whose_accuracy_goes_up_and_down_are_named_with_advice(tmp_path):
    class Wobbling(FolderMaker):
        def accuracy(self, split, domain, round_, weights="last"):
            return 0.6 + 0.15 * (self.method == "fedavg") * (-1) ** round_

    folders = [
        Wobbling(tmp_path / method, method=method).write() for method in ("fedavg", "pardon")
    ]
    (found,) = (one for one in about_results(results_of(folders)) if one.code == UNSTEADY)
    assert found.text == "Rounds fluctuate: FedAvg."
    assert "--averaging swa" in found.advice


def test_balanced_accuracy_and_the_largest_class_stand_beside_the_accuracies(plain):
    results, makers = plain
    counts = np.array(next(iter(makers.values())).confusion())
    support = counts.sum(axis=1)
    table = accuracy_table(results, FINAL)
    assert [column.heading for column in table.columns[-2:]] == ["Balanced", "Largest class"]
    assert texts(table)["FedAvg"][-2:] == [
        f"{100 * np.mean(counts.diagonal() / support):.1f}",
        f"{100 * support.max() / support.sum():.1f}",
    ]


def test_as_long_as_a_column_is_not_measured_nothing_is_averaged_over_the_others(plain):
    whole, _ = plain
    first, *_ = whole.columns
    rows = [row for row in whole.rows if whole.column(row) == first]
    part = replace(whole, rows=rows, planned=whole.rows)
    for cells in texts(accuracy_table(part, FINAL)).values():
        assert MISSING not in cells[0]
        assert {*cells[1:]} == {MISSING}
    assert not any(MISSING in cells for cells in texts(accuracy_table(whole, FINAL)).values())


def test_an_untitled_comparison_names_methods_data_and_domain(folder_maker):
    folders = [
        folder_maker(f"{method}{seed}", method=method, seed=seed).write()
        for method in ("fedavg", "pardon")
        for seed in range(2)
    ]
    page = comparison_page(results_of(folders))
    assert page.title == "FedAvg and PARDON on pacs, tested on photo"


def test_an_incomplete_run_is_left_out_and_named(comparison):
    folder, _ = comparison(missing=[("pardon", "photo", 1)])
    results = read_comparison(folder)
    assert results.open == [("pardon-photo-1-0.1", "interrupted")]
    found = results.values(FINAL)
    assert ("photo", 1) not in found["pardon"]
    assert ("photo", 1) in found["fedavg"]
    page = write_comparison(folder).read_text("utf-8")
    assert "pardon-photo-1-0.1 (interrupted)" in page


def test_axes_get_tables_of_their_own(comparison):
    folder, makers = comparison(values=(0.0, 0.5, 1.0))
    results = read_comparison(folder)
    assert results.axes == {"held out": list(SCENARIOS), "heterogeneity": ["0.0", "0.5", "1.0"]}
    own = frame(makers).query("rule == @FINAL.name")
    means = own.groupby(["method", "value", "seed"])[TEST].mean().groupby(["method", "value"])
    found = texts(accuracy_table(results, FINAL, axis="heterogeneity"))
    expected = means.agg(["mean", "std"])
    assert found["PARDON"][:3] == [shown(*expected.loc["pardon", v]) for v in (0.0, 0.5, 1.0)]
    text = write_comparison(folder).read_text("utf-8")
    assert "By heterogeneity" in text


def test_bare_folders_find_their_places(folder_maker):
    folders = [
        folder_maker(
            f"{method}{value}{gamma}{seed}",
            method=method,
            heterogeneity=value,
            seed=seed,
            hyper_parameters={"gamma1": gamma} if method == "pardon" else {},
        ).write()
        for method, gamma in (("fedavg", 0), ("pardon", 0.5), ("pardon", 1.0))
        for value in (0.1, 1.0)
        for seed in (0, 1)
    ]
    results = results_of(folders)
    assert results.methods == ["fedavg", "pardon, gamma1 0.5", "pardon, gamma1 1.0"]
    assert results.axes == {"clients.heterogeneity": ["0.1", "1.0"]}
    assert results.seeds == [0, 1]
    assert len(results.values(FINAL)["fedavg"]) == 4


def test_settings_of_a_single_method_tell_its_runs_apart(folder_maker, tmp_path):
    """Each has its own row, its own curve, and its distance from the next."""
    makers = [folder_maker(f"h{value}", heterogeneity=value) for value in (0.1, 1.0)]
    folders = [maker.write() for maker in makers]
    names = [f"pardon, clients.heterogeneity {value}" for value in (0.1, 1.0)]
    results = results_of(folders)
    assert results.methods == names
    assert results.columns == ["photo"]
    page = write_report(folders, tmp_path / "report.html").read_text("utf-8")
    assert "What differs" in page
    assert "points more than" in page


def test_runs_on_images_of_other_options_are_no_seeds_of_one_method(folder_maker):
    folders = []
    for seed, option in enumerate(("noise", "blur")):
        folders.append(folder_maker(option, seed=seed).write())
        experiment = folders[-1] / "experiment.yaml"
        fields = yaml.safe_load(experiment.read_text())
        fields["data"]["options"] = {option: 1}
        experiment.write_text(yaml.safe_dump(fields))
    assert len(results_of(folders).columns) == 2


def test_runs_that_nothing_tells_apart_go_by_their_folders(folder_maker):
    folders = [folder_maker(name).write() for name in ("first", "second")]
    results = results_of(folders)
    assert results.methods == ["pardon (first)", "pardon (second)"]
    assert all(len(found) == 1 for found in results.values(FINAL).values())


def test_a_browser_draws_the_page_without_error_or_request(comparison, open_in_browser, tmp_path):
    folder, _ = comparison(values=(0.0, 1.0))
    text = write_comparison(folder).read_text("utf-8")
    page = tmp_path / "page.html"
    page.write_text(text.replace("<details", "<details open"), "utf-8")
    opened = open_in_browser(page)
    assert opened.errors == []
    assert opened.requests == []
    assert 'data-charts="drawn"' in opened.page
    # rounds, margins, heterogeneity, images, bytes, seconds
    assert opened.page.count('data-state="drawn"') == 6


def test_the_same_tables_are_on_the_page_and_in_the_files(comparison):
    folder, _ = comparison()
    page = write_comparison(folder).read_text("utf-8")
    names = {path.stem for path in (folder / "tables").glob("*.csv")}
    assert {"accuracy", "margins", "which_round_counts"} <= names
    for name in names:
        assert {p.suffix for p in (folder / "tables").glob(f"{name}.*")} == {".md", ".csv", ".tex"}
        for row in csv.reader(io.StringIO((folder / "tables" / f"{name}.csv").read_text())):
            assert row[0].split(" (")[0] in page
    whole = (folder / "tables" / "tables.md").read_text("utf-8")
    assert (folder / "tables" / "accuracy.md").read_text("utf-8") in whole


def test_report_of_a_comparison_folder_is_its_page(comparison, tmp_path):
    folder, _ = comparison()
    first = write_comparison(folder).read_text("utf-8")
    assert write_report([folder], tmp_path / "again.html").read_text("utf-8") == first


def strong_cells(blocks):
    for block in blocks:
        if isinstance(block, Fold):
            yield from strong_cells(block.blocks)
        elif isinstance(block, Table):
            yield from (cell.text for row in block.rows for cell in row if cell.strong)


def test_useless_methods_have_no_winner_one_box_and_one_command(tmp_path, capsys):
    folders = [
        ConstantMaker(tmp_path / f"{method}{seed}", method=method, seed=seed).write()
        for method in ("fedavg", "pardon", "mixstyle")
        for seed in range(3)
    ]
    page = comparison_page(results_of(folders))
    assert page.lead.startswith("No method here is fit to use: none of them beats always answering")
    (box,) = [one for one in page.opening if isinstance(one, Prose) and one.notice]
    assert box.text.startswith(
        "Most likely: too few rounds (the training loss was still falling after 6 "
    )
    (line,) = re.findall("`([^`]+)`", box.text)
    assert shlex.split(line) == ["feddg", "run", f"{folders[0]}/experiment.yaml", "--rounds", "24"]
    assert not [text for one in page.sections for text in strong_cells(one.blocks)]
    text = write_report(folders, tmp_path / "page.html").read_text("utf-8")
    assert text.count("No method here is fit to use") == 1
    for winner in ("points more than", "recognised 60", "has the best average", "may be chance"):
        assert winner not in text
    assert "no better than majority class" not in text

    print_comparison(
        types.SimpleNamespace(results=results_of(folders), folder=tmp_path, report=tmp_path)
    )
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("No method here is fit to use") == 1
    assert "--rounds 24" in shown
    assert "recognised" not in shown


def test_a_terminal_of_80_columns_cuts_no_name_and_shows_three_notes(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = ["fedavg", "mixstyle", "randconv", "feddg-ga"]
    folders = [
        FolderMaker(
            tmp_path / f"{name}-{held}", method=name, test=[held], gain=-0.01 * place
        ).write()
        for place, name in enumerate(names)
        for held in ("photo", "art_painting", "cartoon", "sketch")
    ]
    results = results_of(folders)
    notes = [Diagnostic("made-up", "note", f"Note {number}.") for number in range(5)]
    monkeypatch.setattr("feddg.report.terminal.about_results", lambda results: notes)
    done = types.SimpleNamespace(results=results, folder=tmp_path, report=tmp_path)
    print_comparison(done)
    shown = capsys.readouterr().out
    rows = [line.split()[0] for line in shown.splitlines() if line.strip()]
    assert not [name for name in names if rows.count(spelled(name)) < 2], shown
    assert "…" not in shown
    assert [f"note: Note {number}." in shown for number in range(5)] == [True] * 3 + [False] * 2
    assert "2 more notes in the report" in shown


def test_one_fit_method_is_a_comparison_as_ever(tmp_path, folder_maker):
    folders = [
        nothing_in(tmp_path)("fedavg", method="fedavg").write(),
        folder_maker("pardon", gain=-0.1).write(),
    ]
    results = results_of(folders)
    assert results.no_method_fit is None
    assert "fit to use" not in conclusion(results).text


def test_a_finding_that_methods_share_is_one_box(tmp_path):
    folders = [
        RisingMaker(tmp_path / method, method=method, gain=gain).write()
        for method, gain in (("fedavg", 0.0), ("pardon", 0.05))
    ]
    found = [one.text for one in about_results(results_of(folders)) if one.code == "still-rising"]
    assert found == ["Accuracy was still rising when training ended: FedAvg and PARDON."]


class Averaged(FolderMaker):
    """Runs that serve the mean of the last rounds, which classifies otherwise than the last."""

    def experiment(self):
        return super().experiment() | {"server": {"averaging": "swa"}}

    def _numbers(self, round_, split, index, domain, weights):
        rows = super()._numbers(round_, split, index, domain, weights)
        if rows[0].confusion is None:
            return rows
        counts = 10 * np.eye(3, dtype=int) + (1 if weights == "swa" else 7)
        found = measure(Predictions(counts)) | {"macro_f1": 0.9 if weights == "swa" else 0.1}
        of = {"examples": rows[0].examples, "weights": weights, "confusion": counts.tolist()}
        spent = self.spent(round_)
        return numbers(round_, split, domain, found.pop("accuracy"), **of, spent=spent, **found)


def test_a_comparison_page_is_of_one_rule(tmp_path):
    folders = [
        Averaged(tmp_path / f"{method}{seed}", method=method, seed=seed).write()
        for method in ("fedavg", "pardon")
        for seed in range(2)
    ]
    page = comparison_page(results_of(folders))
    top = [one.text for one in page.opening if isinstance(one, Prose)]
    assert any("for the model “mean of the last rounds”: every run serves it" in t for t in top)
    own = percent(33 / 39)
    accuracies = page.sections[0].blocks[0]
    assert {row[1].text.split(" ±")[0] for row in accuracies.rows} == {own}
    (metrics,) = next(one for one in page.sections if one.title == "Metrics").blocks
    assert metrics.rows[0][2].text == own
    assert metrics.rows[0][metrics_column(metrics, "Macro-F1")].text == "90.0"
    captions = " ".join(getattr(b, "caption", "") for s in page.sections for b in s.blocks)
    assert "after the final round" not in captions
    curve = next(b for b in page.sections[0].blocks if isinstance(b, Chart))
    assert "Each round's own model is measured" in curve.caption


def test_a_rule_of_all_budgets_is_not_said_to_be_served_where_no_run_serves_it(tmp_path):
    rows = []
    for method in ("fedavg", "pardon"):
        maker = Averaged(tmp_path / method, method=method)
        run, ends = read_run(maker.write()), [maker.spent(at)["images"] for at in (2, 6)]
        place = {"method": method, "held_out": "photo", "seed": 0}
        rows += [ResultRow(**place, budget=budget, run=run.at(budget)) for budget in ends]
    results = Results("x", "x", rows)
    assert [run.default_rule.name for run in results.at_largest.runs()] == ["swa", "swa"]
    said = comparison_page(results).opening[-1].text
    assert "for the model “final round”: runs serve other ones, but all results have this" in said


def metrics_column(table, heading):
    return [column.heading for column in table.columns].index(heading)


def test_a_run_page_is_of_one_model_which_its_top_names(tmp_path):
    run = read_run(Averaged(tmp_path / "run").write())
    page = run_page(run)
    top = [one.text for one in page.opening if isinstance(one, Prose)]
    assert any("the model “mean of the last rounds” (round 6)." in text for text in top)
    own = percent(33 / 39)
    assert own in page.lead
    sections = {one.title: one for one in page.sections}
    (metrics,) = [one for one in sections["Metrics"].blocks if isinstance(one, Table)]
    values = {row[metrics_column(metrics, "Macro-F1")].text for row in metrics.rows}
    assert values == {"90.0", own}  # pooled, it is that of the matrix
    matrix = next(one for one in sections["Mistakes by class"].blocks if isinstance(one, Chart))
    assert matrix.figure["data"][0]["customdata"] == (10 * np.eye(3, dtype=int) + 1).tolist()
    final = sections["Accuracy"].blocks[1]
    assert [cell.text for cell in final.rows[0][3:4]] == [own]
    named = {column.heading: column.note for column in final.columns}
    assert named["Mean of the last rounds"] == "this page's model, round 6"
    assert named["Final round"] == "round 6"
    assert sections["Accuracy"].blocks[0].caption.startswith("Each round's own model")


BUDGETS = {500: 2, 1500: 6}
"""Made-up rounds see 260 images."""


def test_ranking_winner_and_interval_are_of_one_budget(tmp_path):
    """Ridge leads early, PARDON in the end; FedAvg lacks a column of a seed."""
    makers, cells = {}, []
    gains = {"fedavg": 0.0, "pardon": 0.06, "ridge": 0.3}
    for key in itertools.product(gains, SCENARIOS, SEEDS):
        method, scenario, seed = key
        if key == ("fedavg", "sketch", 2):
            continue
        rounds = 1 if method == "ridge" else 6
        maker = makers[key] = FolderMaker(
            tmp_path / "-".join(map(str, key)),
            method=method,
            test=[scenario],
            training=["cartoon"],
            seed=seed,
            rounds=rounds,
            planned=rounds,
            gain=gains[method] + gain_of("fedavg", scenario, seed),
            pictures=0,
        )
        place = {"method": method, "held_out": scenario, "seed": seed, "folder": maker.folder.name}
        maker.write()
        cells += [place | {"budget": budget} for budget in BUDGETS]
    (tmp_path / "comparison.json").write_text(json.dumps({"name": "made-up", "cells": cells}))
    results = read_comparison(tmp_path)
    page = comparison_page(results)
    assert page.lead.startswith("1.5k images seen in training: PARDON recognised ")
    (section,) = (one for one in page.sections if one.title == "By images seen")
    table, picture, *folds = section.blocks
    for (budget, round), column in zip(BUDGETS.items(), (1, 2)):
        for row in table.rows:
            method = row[0].text.lower()
            seeds = SEEDS[:2] if method == "fedavg" else SEEDS
            values = [
                makers[method, scenario, seed].accuracy("test", 0, min(round, maker.rounds))
                for scenario in SCENARIOS
                for seed in seeds
                for maker in [makers[method, scenario, seed]]
            ]
            averages = np.reshape(values, (len(SCENARIOS), -1)).mean(axis=0)
            own = shown(averages.mean(), averages.std(ddof=1))
            assert row[column].text == own, (budget, method)
        best = [row[0].text for row in table.rows if row[column].strong]
        assert best == [{500: "Ridge", 1500: "PARDON"}[budget]]
    assert [fold.title for fold in folds] == ["500 images", "1.5k images"]
    winners = [fold.blocks[0].text.partition(" recognised")[0] for fold in folds]
    assert winners == ["Ridge", "PARDON"]
    lines = {trace["name"]: trace for trace in picture.figure["data"]}
    assert list(lines) == ["FedAvg", "PARDON", "Ridge"]
    assert len(lines["PARDON"]["x"]) == 7
    numbers = results.frame().query("method == 'ridge' and metric == 'accuracy'")
    assert set(numbers["budget"]) == {*BUDGETS}
