"""Plans at the papers' own budget: their stages, the mean of ten rounds, the cases of the rule."""

import sys
from pathlib import Path

import pytest

from feddg.comparison.plan import expand_plan, load_plan
from feddg.comparison.results_file import ResultRow, add_rows
from feddg.comparison.statistics import Interval
from feddg.runs.table import SELECTION_RULES
from run_folders import accuracies, numbers, table_of
from scripts import load_script

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "own_size"


@pytest.fixture
def campaign():
    known = dict(SELECTION_RULES._found), dict(SELECTION_RULES._aliases)
    yield load_script(FOLDER / "campaign.py")
    SELECTION_RULES._found, SELECTION_RULES._aliases = known


def test_the_stages_are_the_plans_and_hold_every_method_and_seed_once(campaign):
    for path in FOLDER.glob("*.yaml"):
        whole = {cell.portable_id for cell in expand_plan(load_plan(path))}
        parts = [
            cell.portable_id
            for name, methods, seeds in campaign.STAGES
            if name == path.stem
            for cell in expand_plan(load_plan(campaign.plan_of(name, methods, seeds)))
        ]
        assert len(parts) == len(set(parts))
        assert set(parts) <= whole
        if path.stem in ("pacs_64", "three_clients_160"):
            assert set(parts) == whole


@pytest.mark.parametrize("pretend", [False, True])
def test_a_gpus_minutes_go_to_plans_that_can_be_run(pretend, campaign, monkeypatch):
    monkeypatch.setitem(sys.modules, "campaign", campaign)
    plans = load_script(FOLDER / "gpu.py").plans(pretend)
    assert {name for name, _ in plans} >= {f"own_{name}" for name, _, _ in campaign.STAGES}
    for name, fields in plans:
        assert expand_plan(load_plan(fields)), name


def test_a_gpus_minutes_are_not_begun_without_images_or_weights(campaign, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "campaign", campaign)
    gpu = load_script(FOLDER / "gpu.py")
    plans = gpu.plans(pretend=False)
    monkeypatch.chdir(tmp_path)
    assert gpu.absent(tmp_path / "PACS", plans) == str(tmp_path / "PACS")
    assert "weights/resnet18_imagenet.safetensors" in gpu.absent(tmp_path, plans)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "resnet18_imagenet.safetensors").touch()
    assert gpu.absent(tmp_path, plans) is None


def mean_of_last(rounds):
    """What the rule finds in some rounds; a round's accuracy is its number, in percent."""
    rows = [numbers(round, "test", "photo", round / 100) for round in rounds]
    found = SELECTION_RULES.find("last_ten").of(table_of(*rows))
    assert (found.round is None) == (found.value("test") is None)
    return found.value("test")


def test_the_mean_is_over_the_last_ten_rounds_and_nothing_else(campaign):
    assert mean_of_last(range(1, 51)) == pytest.approx(0.455)
    assert mean_of_last(range(42, 51)) is None
    assert mean_of_last([1, *range(42, 51)]) is None
    assert mean_of_last([]) is None


@pytest.mark.parametrize(
    ("leads", "case"),
    [
        ((1.0, 1.2, 0.9, 1.1), "is there"),
        ((-1.0, -1.2, 0.1, 0.2), "is not there"),
        ((-1.0, 6.0, 0.1, 0.2), "is undecided"),
        ((1.0, 1.0), "cannot be said yet"),
    ],
)
def test_one_of_three_cases_holds_over_domains(campaign, leads, case):
    assert campaign.case(Interval.of(leads)) == case


def test_the_verdict_averages_seeds_before_domains(campaign, tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "DATA", tmp_path)
    leads = {"photo": (1, 3), "art": (2, 2), "cartoon": (0, 4), "sketch": (2, 2.2)}
    rows = [
        ResultRow(
            method=method,
            held_out=domain,
            seed=seed,
            numbers=accuracies(last_ten=0.5 + share * lead / 100),
        )
        for domain, of_seeds in leads.items()
        for seed, lead in enumerate(of_seeds)
        for method, share in (("FedAvg", 0), ("PARDON", 1))
    ]
    add_rows(tmp_path / "own_pacs_64.csv", rows)
    assert campaign.default() == (
        "The default stylization is undecided: 0 validation domains have been run."
    )
    leads = {f"{domain} (val)": 1 + place / 10 for place, domain in enumerate(leads)}
    runs = [
        ResultRow(
            method=method,
            held_out=column,
            seed=0,
            numbers=(
                *accuracies("val", ema=round(0.4 + share * lead / 100, 7)),
                *accuracies(ema=0.9 - share / 2),
            ),
        )
        for column, lead in leads.items()
        for method, share in (("PARDON", 0), ("PARDON, released", 1))
    ]
    add_rows(tmp_path / "own_pacs_64_default.csv", runs)
    assert (
        "is released: released minus default, on 4 validation domains, +1.1" in campaign.default()
    )
    (line,) = campaign.verdict(methods=["PARDON"])
    assert line.startswith(
        "PARDON, mean of the last ten rounds: +2.0 (+1.9 to +2.1) over 4 domains"
    )
    assert "is there" in line
