"""Pages of the papers' tables: made from a plan and a CSV file, and nothing in them is made up."""

import statistics
from pathlib import Path

import pytest
from scipy import stats

from feddg.comparison.plan import expand_plan, load_plan
from feddg.comparison.results import Results
from feddg.comparison.results_file import ResultRow, to_text
from feddg.comparison.tuning import TriedRow, TuningFile
from feddg.errors import RunError
from feddg.records import NumberRow
from run_folders import accuracies
from scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
NAME = "pardon_table1_pacs"


@pytest.fixture(scope="module")
def pages():
    return load_script(ROOT / "benchmarks" / "papers" / "pages.py")


def made_up(cell, final, tail, best, experiment=None):
    return ResultRow(
        experiment=experiment or cell.experiment.portable_id,
        method=cell.method,
        held_out=cell.held_out,
        conditions=cell.conditions,
        seed=cell.seed,
        machine="x86_64, cpu, float32, 1 threads",
        numbers=(
            *accuracies(final=final, swa=tail, best_in_domain=best),
            *accuracies("val", final=final / 2, swa=final / 2, best_in_domain=final / 2),
            NumberRow(weights="last", split="test", metric="fluctuation", value=0.02),
        ),
    )


@pytest.fixture
def folder(tmp_path, pages):
    """Two of the plans, the list as it is, and a place for results."""
    (tmp_path / pages.PLANS).mkdir(parents=True)
    (tmp_path / pages.PLANS.parent / "pardon").symlink_to(ROOT / pages.PLANS.parent / "pardon")
    for name in (NAME, "pardon_table2_pacs"):
        plan = (ROOT / pages.PLANS / f"{name}.yaml").read_text("utf-8")
        (tmp_path / pages.PLANS / f"{name}.yaml").write_text(plan, "utf-8")
    (tmp_path / pages.DATA).mkdir(parents=True)
    index = (ROOT / pages.INDEX).read_text("utf-8")
    (tmp_path / pages.INDEX).write_text(index, "utf-8")
    return tmp_path


def accuracy(method, column, seed):
    base = {"fedavg": 0.50, "pardon": 0.55, "ccst": 0.52}[method]
    gain = 0.01 * column * seed + 0.02 * (column == 3) if method == "pardon" else -0.005 * seed
    return base + 0.02 * column + gain


def some_results():
    """FedAvg and PARDON whole, CCST without the last column and the last seed."""
    plan = load_plan(f"short/{NAME}")
    columns = list(dict.fromkeys(cell.held_out for cell in expand_plan(plan)))
    found = []
    for cell in expand_plan(plan):
        column = columns.index(cell.held_out)
        if cell.method in ("fedavg", "pardon") or (
            cell.method == "ccst" and column < 3 and cell.seed < 2
        ):
            value = accuracy(cell.method, column, cell.seed)
            experiment = "0badf00d" if cell.method == "ccst" else None
            found.append(made_up(cell, value, value + 0.03, value + 0.01, experiment))
    return found


def rows_after(text, words):
    lines = text.split(words, 1)[1].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    table = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return {row[0]: row[1:] for row in table}


def test_the_page_of_a_table_is_made_from_its_file(folder, pages):
    results = some_results()
    (folder / pages.DATA / f"{NAME}.csv").write_text(to_text(results), "utf-8")
    written = pages.make([NAME], folder)
    assert written == [folder / pages.PAGES / f"{NAME}.md", folder / pages.INDEX]
    text = written[0].read_text("utf-8")
    assert f"feddg compare short/{NAME} --results" in text
    assert "**30 of 84 cells are run.**" in text
    assert "x86_64, cpu" in text
    assert "6 cells ran with another experiment than the plan's to the letter" in text
    for words, shift in (
        ("**Final round.**", 0),
        ("**Mean of the last rounds.**", 0.03),
        ("**Best in-domain validation.**", 0.01),
    ):
        table = rows_after(text, words)
        for method, title in (("fedavg", "FedAvg"), ("pardon", "PARDON")):
            for column in range(4):
                values = [100 * (accuracy(method, column, seed) + shift) for seed in range(3)]
                by_hand = f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"
                assert table[title][column] == by_hand
        assert table["CCST"][2].endswith("(2 of 3)")
        assert table["CCST"][3] == table["CCST"][4] == "not run"
        assert set(table["FPL"][:5]) == {"not run"}
        assert table["FedAvg"][5] == "2.0"
    tails = rows_after(text, "**Margins, mean of the last rounds.**")
    margins = rows_after(text, "**Margins, final round.**")
    rows = [
        [100 * (accuracy("pardon", c, s) - accuracy("fedavg", c, s)) for s in range(3)]
        for c in range(4)
    ]
    by_domain, by_seed = ([statistics.mean(own) for own in part] for part in (rows, zip(*rows)))
    mean = statistics.mean(by_domain)
    reach, over_seeds = (
        stats.t.ppf(0.975, len(own) - 1) * statistics.stdev(own) / len(own) ** 0.5
        for own in (by_domain, by_seed)
    )
    domains, seeds = (f"{mean - r:+.1f} to {mean + r:+.1f}" for r in (reach, over_seeds))
    apart = " / ".join(f"{own:+.1f}" for own in by_domain)
    both = [domains, seeds, apart, f"{reach:.1f}"]  # CCST has no interval
    assert margins["PARDON"][:5] == [f"**{mean:+.1f}**", *both]
    assert margins["FedAvg"][0] == "–"
    assert tails["PARDON"][:2] == margins["PARDON"][:2]  # both gained as much
    assert "not run / 62.01" in text  # FPL on art painting, from the paper
    assert "Shortened: 96 pixels" in text
    index = (folder / pages.INDEX).read_text("utf-8")
    older = "; 6 cells ran under another plan than today's"
    assert f"`{NAME}`: 30 of 84 cells, 3 seeds{older}." in index
    assert "`pardon_table2_pacs`: 0 of 84 cells." in index
    short = rows_after(index, f"`{NAME}`")
    assert set(short) == {"method", "---", "FedAvg", "CCST", "PARDON"}
    for column in range(4):
        values = [100 * accuracy("pardon", column, seed) for seed in range(3)]
        ours, _, paper = short["PARDON"][column].split(" / ")
        assert ours == f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"
        assert 50 < float(paper) < 100
    assert (
        short["PARDON"][4]
        == f"**{mean:+.1f} (domains {domains}; seeds {seeds}; by domain {apart})**"
    )
    assert short["FedAvg"][4] == ""
    # Again changes nothing, and what was written around the tables stays.
    assert pages.make([NAME], folder)[0].read_text("utf-8") == text
    written[0].write_text(text + "\nWhat it says: nothing.\n", "utf-8")
    pages.make([NAME], folder)
    assert written[0].read_text("utf-8").endswith("\nWhat it says: nothing.\n")


def test_a_table_of_which_nothing_is_run_has_a_page_that_says_so(folder, pages):
    text = pages.make([NAME], folder)[0].read_text("utf-8")
    assert "**0 of 84 cells are run.**" in text
    assert "not run / 62.01" in text  # FPL on art painting, from the paper
    assert "Final round" not in text


def test_what_was_tuned_stands_on_the_page(folder, pages):
    results = some_results()
    (folder / pages.DATA / f"{NAME}.csv").write_text(to_text(results), "utf-8")
    tried = [
        TriedRow(
            method="fedavg",
            held_out="photo",
            values={"train.lr": rate},
            score=score,
            trials=1,
            picked=rate == "0.0003",
        )
        for rate, score in (("3e-05", 0.41), ("0.0003", 0.47))
    ]
    tuning = TuningFile(rule="Final round", rounds=8, seeds=(0,), tried=tuple(tried))
    (folder / pages.DATA / f"{NAME}.tuning.json").write_text(tuning.to_text(), "utf-8")
    text = pages.make([NAME], folder)[0].read_text("utf-8")
    assert "train.lr 0.0003 is the highest that was tried" in text
    assert "47.0" in text
    assert "1 seed, 8 rounds each" in text


def test_a_file_that_does_not_fit_its_plan_is_said(folder, pages):
    results = some_results()
    plan = load_plan(f"short/{NAME}")
    stranger = results[0].model_copy(update={"method": "fedprox"})
    file = folder / pages.DATA / f"{NAME}.csv"
    file.write_text(to_text([*results, stranger]), "utf-8")
    text = pages.make([NAME], folder)[0].read_text("utf-8")
    assert "1 row of the file belongs to no cell" in text
    again = results[0].model_copy(update={"experiment": "deadbeef"})
    with pytest.raises(RunError, match=r"fedavg, photo, seed 0 appears twice.*deadbeef"):
        Results.of_rows([*results, again], plan)
    with pytest.raises(RunError, match="needs the marks"):
        pages.between_marks("# No marks\n", "")
    with pytest.raises(SystemExit, match="no plan pardon_table9"):
        pages.make(["pardon_table9"], folder)


def test_the_page_of_all_tables_is_up_to_date(pages):
    names = sorted(path.stem for path in (ROOT / pages.PLANS).glob("*.yaml"))
    index = (ROOT / pages.INDEX).read_text("utf-8")
    assert pages.between_marks(index, pages.listing(names)) == index, (
        "run `python benchmarks/papers/pages.py`"
    )


def test_the_paper_stands_beside_ours_and_a_wrong_average_is_marked(pages):
    paper = {
        "source": "Some paper, Table 9",
        "values": {
            "test": {
                "fedavg": {"photo": 50.0, "sketch": 40.0, "art": 45.0},
                "ours": {"photo": 60.0, "sketch": 50.0, "art": 55.0},
            }
        },
        "average": {"test": {"fedavg": 45.04, "ours": 56.0}},
    }
    rows = [
        ResultRow(
            method="fedavg", held_out=column, seed=seed, numbers=accuracies(final=0.5 + seed / 50)
        )
        for column in ("photo", "sketch", "art")
        for seed in (0, 1)
    ]
    results = Results.of_rows(rows)
    found = pages.paper_table(results, paper, "test", "none")
    texts = {row[0].text: [cell.text for cell in row[1:]] for row in found.rows}
    assert texts["FedAvg"][0] == "51.0 ± 1.4 / 50.00"
    assert texts["FedAvg"][3].endswith(" / 45.04")  # rounding is no fault
    assert texts["ours"] == [
        "none / 60.00",
        "none / 50.00",
        "none / 55.00",
        "none / 56.00 * (55.00)",
    ]
    assert pages.paper_table(results, paper, "val") is None
