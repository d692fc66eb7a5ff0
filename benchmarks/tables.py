"""The tables of README.md and of pages in docs, from docs/results/data.

    python benchmarks/tables.py

rewrites every table that stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``.
"""

import csv
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from feddg.comparison.plan import load_plan
from feddg.comparison.results import Results
from feddg.comparison.results_file import Place, ResultRow
from feddg.comparison.statistics import (
    Accuracies,
    Key,
    Margin,
    average_over_columns,
    paired_margin,
)
from feddg.methods.base import METHODS
from feddg.records import ID_VAL, TEST
from feddg.report.page import between_marks
from feddg.report.tables import (
    by_domain,
    detectable_text,
    domains_of,
    interval_text,
    over_data_sets,
    spread_text,
    unseen,
)
from feddg.report.text import points, spelled
from feddg.runs.intervals import holm
from feddg.runs.table import BEST_HELD_OUT, EMA_MEAN, FINAL
from feddg.text import readable

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "results" / "data"
RATE = "train.lr"
PAGES = tuple(
    ROOT / name
    for name in (
        *("README.md", "docs/baseline.md", "docs/benchmarks.md", "docs/cluster.md"),
        *("docs/segmentation.md", "docs/which_method.md"),
    )
)


ROUNDS = {"serving_digits": 10, "serving_pacs": 12}
"""Of every run: a results file has images and seconds of one round."""
POOLED = "SGD 3e-3, all images in one place"
"""A reference line, not a recipe that validation may choose."""
OWN_RULES = {"last_ten": "last ten", "ema": "EMA"}
OWN_SIZES = {
    "pacs_160": "160 pixels",
    "sketch_224": "224 pixels",
    "pacs_224_resnet50": "224, ResNet-50",
}
PUBLISHED = {
    "224 pixels, 1.5m images (FedIG-A)": ("90.4", "72.5", "72.6", "73.9", "77.4", ""),
    "224 pixels, some 300k (MCSAD)": ("", "", "", "", "82.8", ""),
    "not federated, 224 pixels (MCSAD)": ("96.0", "77.0", "75.9", "69.2", "79.5", ""),
    "FedIG itself, all four domains train (FedIG-A)": ("", "", "", "", "", "94.5"),
}
"""ResNet-18; FedIG-A's Tables 5 and 12, MCSAD's own."""
ADVISED = {"PACS": ("outlines",), "digits": ("mixstyle", "randconv", "vista")}
"""The methods that the advice names; all others are on the page of benchmarks."""
LEVELS = ("none", "clipped", "16", "8", "4", "1")
PROTECTED = {
    ("fedavg", "updates"): "FedAvg, updates",
    ("pardon", "updates"): "PARDON, updates",
    ("pardon", "styles (image)"): "PARDON, styles, an image hidden",
    ("pardon", "styles (client)"): "PARDON, styles, a client hidden",
}


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    head_line, *lines = (f"| {' | '.join(line)} |" for line in (head, *rows))
    return "\n".join([head_line, f"|{'---|' * len(head)}", *lines])


def percent(value: float) -> str:
    """Returns a number with a digit; nothing of none."""
    return "" if math.isnan(value) else f"{value:.1f}"


def margin_text(margin: Margin) -> str:
    """``+1.3 (-0.4 to +2.1)``, with the interval over domains."""
    return f"{points(margin.mean)} ({interval_text(margin.domains, 'domain')})"


def lead(margin: Margin | None) -> str:
    """Returns a margin with its interval over domains, bold where a lead or lag may be claimed."""
    if margin is None:
        return ""
    return f"**{margin_text(margin)}**" if margin.decided else margin_text(margin)


def over_seeds(margin: Margin | None) -> str:
    """Returns a margin's interval over seeds on these domains."""
    return "" if margin is None else interval_text(margin.seeds, "seed")


def by_domains(results: Results, found: Mapping[str, Margin]) -> tuple[str, dict[str, str]]:
    """Returns the heading of the differences by domain, and by method their text."""
    names = domains_of(results, found.values())
    heading = f"by domain: {' / '.join(map(readable, names))}"
    return heading, {method: by_domain(one, names).text for method, one in found.items()}


def with_note(table: str, found: Sequence[Margin]) -> str:
    """Returns a table with a sentence about differences that its domains cannot show, if any."""
    return f"{table}\n\n{note}" if (note := unseen(found)) else table


def campaign(name: str) -> str:
    """Returns accuracy on unseen domains by method, best first, with the lead of each.

    Intervals over seeds are left out where no method has enough of them.
    """
    results = Results.read(DATA / f"{name}.csv")
    found = {rule: results.values(rule) for rule in (FINAL, EMA_MEAN)}
    leads, shown = results.margins(EMA_MEAN, "fedavg"), []
    heading, by_method = by_domains(results, leads)
    enough_seeds = any(one.seeds.reach is not None for one in leads.values())
    for method in results.methods:
        means = [average_over_columns(own[method], results.columns) for own in found.values()]
        cells = [spelled(method), *map(spread_text, means), lead(leads.get(method))]
        cells += [over_seeds(leads.get(method))] * enough_seeds + [by_method.get(method, "")]
        shown.append((-means[-1].mean if means[-1] else 0.0, cells))
    head = ["method", "final round", "EMA", "EMA, minus FedAvg", *["over seeds"] * enough_seeds]
    head.append(heading)
    return with_note(markdown(head, [cells for _, cells in sorted(shown)]), list(leads.values()))


def front() -> str:
    """Returns README's table: accuracy on each domain held out, images that we did not draw."""
    whole = [row for row in rows_of("folder_defaults") if row["images_a_domain"] == "all"]
    pacs = {r["held"]: float(r["unseen"]) for r in whole if r["default"] == "default"}
    shown = [("PACS, as a folder", "fedavg", pacs)]
    for method, own in Results.read(DATA / "emoji_demo.csv").values(FINAL).items():
        shown.append(
            (
                "emoji, `feddg demo`",
                method,
                {column: 100 * value for (column, _), value in own.items()},
            )
        )
    body = [
        [
            images,
            f"`{method}`",
            ", ".join(f"{readable(domain)} {value:.1f}" for domain, value in found.items()),
            f"**{statistics.mean(found.values()):.1f}**",
        ]
        for images, method, found in shown
    ]
    return markdown(["images", "method", "trained on the others, tested on", "mean"], body)


def images_of(results: Results, method: str, name: str) -> str:
    """Returns how many images a method's runs saw in a table's rounds, in thousands."""
    return f"{images_a_round(results, method) * ROUNDS[name] / 1000:.0f}k"


def images_a_round(results: Results, method: str) -> float:
    """Returns how many images a method's runs saw a round, on average."""
    return statistics.fmean(results.values("", "images_per_round", "", "")[method].values())


def advice() -> str:
    """Returns the differences behind the advice of "Which method", with the budget of each."""
    held: dict[str, str] = {}
    by_weights: dict[str, dict[Key, float]] = {}
    for row in rows_of("folder_defaults"):
        key = (f"{row['images_a_domain']} {row['held']}", 0)
        held[key[0]] = row["held"]
        by_weights.setdefault(row["default"], {})[key] = float(row["unseen"]) / 100
    sizes = "PACS, 60, 400 or all images a domain"
    from_weights = paired_margin(by_weights["default"], by_weights["from scratch"], held)
    seen = "0.8k, 5k or 35k; 10k, 65k or 400k"
    body = [["1", "ImageNet weights, 5 rounds, minus from scratch", sizes, seen, from_weights]]
    for name, data in (("serving_pacs", "PACS"), ("serving_digits", "digits")):
        results = Results.read(DATA / f"{name}.csv")
        seen = images_of(results, "fedavg", name)
        final, ema = (results.values(rule)["fedavg"] for rule in (FINAL, EMA_MEAN))
        averaged = paired_margin(ema, final, results.domains)
        body.append(["1", "FedAvg: averaged weights (EMA) minus last", data, seen, averaged])
        advised, found = "1" if data == "PACS" else "2", results.margins(EMA_MEAN, "fedavg")
        for method in ADVISED[data]:
            images = images_of(results, method, name)
            words = f"{spelled(method)} minus FedAvg"
            body.append([advised, words, data, images, found[method]])
    spent = Results.read(DATA / "budget_pacs.csv")
    for budget in spent.budgets:
        found = spent.at(budget).margins(EMA_MEAN, "fedavg")
        for advised, method in (("1", "dart"), ("1", "outlines"), ("3", "ridge")):
            words = [f"{spelled(method)} minus FedAvg", "PACS, 64 pixels", f"{budget // 1000}k"]
            body.append([advised, *words, found[method]])
    drawn = Results.read(DATA / "emoji_small.csv")
    found, images = drawn.at_largest.margins(EMA_MEAN, "fedavg"), f"{drawn.budgets[-1] // 1000}k"
    for advised, method in (("1", "dart"), ("1", "outlines"), ("2", "mixstyle"), ("2", "randconv")):
        words = [f"{spelled(method)} minus FedAvg", "emoji, from scratch", images]
        body.append([advised, *words, found[method]])
    own = Results.read(DATA / "own_pacs_64.csv")
    for method, margin in own.margins(EMA_MEAN, own.methods[0]).items():
        images = f"{images_a_round(own, method) * 50 / 1000:.0f}k"
        body.append(["1", f"{method}, minus FedAvg", "PACS, 64 pixels", images, margin])
    head = ["advice", "compared", "data", "images seen", "points, over domains"]
    head += ["over seeds", "by domain", "detectable"]
    rows = []
    for *words, one in sorted(body, key=lambda cells: cells[0]):
        own = by_domain(one, sorted(one.by_domain)).text
        rows.append([*words, lead(one), over_seeds(one), own, detectable_text(one)])
    return markdown(head, rows)


def converged() -> str:
    """Returns accuracy on emoji against images seen, leads over FedAvg, and what the last added."""
    results = Results.read(DATA / "emoji_small.csv")
    last = results.at_largest
    found = [results.at(budget).values(EMA_MEAN) for budget in results.budgets]
    final, leads, shown = last.values(FINAL), last.margins(EMA_MEAN, "fedavg"), []
    heading, by_method = by_domains(last, leads)
    for method, own in found[-1].items():
        by_budget = [*(one[method] for one in found), final[method]]
        means = [average_over_columns(values, last.columns) for values in by_budget]
        added = paired_margin(own, found[-2][method], last.domains)
        cells = [spelled(method), *map(spread_text, means)]
        cells += [lead(leads.get(method)), over_seeds(leads.get(method))]
        cells += [by_method.get(method, ""), margin_text(added) if added else ""]
        shown.append((-means[-2].mean if means[-2] else 0.0, cells))
    sizes = [f"{budget // 1000}k" for budget in results.budgets]
    head = ["method", *sizes, f"{sizes[-1]}, last model", "minus FedAvg", "over seeds"]
    head += [heading, f"{sizes[-1]} minus {sizes[-2]}"]
    return with_note(markdown(head, [cells for _, cells in sorted(shown)]), list(leads.values()))


def own_size() -> str:
    """Returns PARDON's table at the papers' number of images: accuracy by domain, and leads."""
    results = Results.read(DATA / "own_pacs_64.csv")
    first, body, shown = results.methods[0], [], list[Margin]()
    for rule, title in OWN_RULES.items():
        found = results.margins(rule, first)
        shown += found.values()
        for method, values in results.values(rule).items():
            margin = found.get(method)
            means = [
                statistics.mean(v for (held, _), v in values.items() if held == domain)
                for domain in results.columns
            ]
            cells = [f"{100 * value:.1f}" for value in (*means, statistics.mean(means))]
            own = by_domain(margin, results.columns).text if margin else ""
            body.append([title, method, *cells, lead(margin), own])
    head = ["weights", "method", *map(readable, results.columns), "mean", "minus FedAvg"]
    head.append("by domain")
    return with_note(markdown(head, body), shown)


def own_sizes() -> str:
    """Returns what has been run at larger sizes: accuracy by the last ten rounds / by EMA."""
    cells: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, size in OWN_SIZES.items():
        for rule in OWN_RULES:
            for method, values in accuracies(f"own_{name}", rule).items():
                for (held, _), value in values.items():
                    cell = cells.setdefault((size, readable(held)), {}).setdefault(method, [])
                    cell.append(f"{100 * value:.1f}")
    methods = list(dict.fromkeys(method for own in cells.values() for method in own))
    return markdown(
        ["size", "unseen", *methods],
        [
            [*place, *(" / ".join(own.get(method, ())) for method in methods)]
            for place, own in sorted(cells.items())
        ],
    )


def accuracies(name: str, rule: str) -> dict[str, Accuracies]:
    """Returns a CSV file's accuracies on the held-out domain by method, column and seed."""
    return Results.read(DATA / f"{name}.csv").values(rule)


def rows_of(name: str) -> list[dict[str, str]]:
    """Returns the rows of a CSV file, column names without what stands in brackets."""
    with (DATA / f"{name}.csv").open(newline="", encoding="utf-8") as content:
        return [
            {column.partition("[")[0]: cell for column, cell in row.items()}
            for row in csv.DictReader(content)
        ]


def accuracy_by_epsilon(name: str) -> str:
    """Returns accuracy on the unseen domain by what is noised and epsilon."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in rows_of(f"privacy_{name}"):
        noised = "updates" if row["noised"] == "nothing" else row["noised"]
        key = (row["method"], noised, row["level"])
        groups.setdefault(key, []).append(100 * float(row["test_accuracy"]))
    body = [
        [title]
        + [
            f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"
            if (values := groups.get((*key, level)))
            else ""
            for level in LEVELS
        ]
        for key, title in PROTECTED.items()
    ]
    return markdown(["noised", "nothing", "clipped only", *(f"ε = {e}" for e in LEVELS[2:])], body)


def robust_updates() -> str:
    """Returns accuracy on emoji by defence and liars, mean of the seeds: unseen / seen domains."""
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows_of("robust_updates"):
        if row["images"] != "emoji":
            continue
        defence = row["defence"].partition(",")[0]
        if "selected" in row["defence"]:
            defence += ", half of the sites selected"
        column = f"{row['liars']} of {row['sites']} lie"
        groups.setdefault((defence, column), []).append(row)
    defences, columns = (list(dict.fromkeys(key[place] for key in groups)) for place in (0, 1))
    body = [
        [name, *(seen_and_unseen(groups[name, column]) for column in columns)] for name in defences
    ]
    return markdown(["`defences`", *columns], body)


def seen_and_unseen(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns ``71 / 67``: mean accuracy on the unseen domain and on the seen ones, percent."""
    columns = ("unseen_accuracy", "seen_accuracy")
    return " / ".join(
        f"{100 * statistics.mean(float(row[c]) for row in rows):.0f}" for c in columns
    )


def folder_defaults() -> str:
    """Returns accuracy on each unseen domain of PACS as a folder, by default and from scratch."""
    rows = rows_of("folder_defaults")
    unseen = list(dict.fromkeys(row["held"] for row in rows))
    body = []
    for images, kind in dict.fromkeys((row["images_a_domain"], row["default"]) for row in rows):
        own = {r["held"]: r for r in rows if (r["images_a_domain"], r["default"]) == (images, kind)}
        found = [own[name]["unseen"] if name in own else "" for name in unseen]
        measured = [float(each) for each in found if each]
        seconds = statistics.mean(float(r["cpu_seconds"]) for r in own.values())
        mean = f"{statistics.mean(measured):.1f}"
        body.append([images, kind, *found, mean, f"{seconds:.0f}"])
    head = ["images a domain", "default", *map(readable, unseen), "mean", "CPU seconds"]
    return markdown(head, body)


def grouped(name: str, *columns: str) -> dict[tuple[str, ...], list[dict[str, str]]]:
    """Returns the rows of a file by what some columns say."""
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows_of(name):
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return groups


def travel_labels() -> str:
    """Returns errors and intervals by the number of labels, beside those of labels alone.

    Of the 24 domains: simulated clients have too few images for 50 labels.
    """
    columns = ("error", "held", "width", "error_alone", "held_alone", "width_alone")
    body = []
    for (count,), every in grouped("travel_labels", "labels").items():
        rows = [row for row in every if "clients" not in row["images"]]
        means = [100 * statistics.mean(float(row[column]) for row in rows) for column in columns]
        cells = [f"{mean:.{digits}f}" for mean, digits in zip(means, (1, 0, 0) * 2)]
        body.append([count, *(cells if count != "0" else [*cells[:3], "", "", ""])])
    head = ["labels", "error", "held, %", "width"]
    return markdown([*head, *(f"{name}, labels alone" for name in head[1:])], body)


def nuclei() -> str:
    """Returns Dice by method and unseen kind, mean and deviation of the seeds."""
    cells: dict[str, dict[str, str]] = {}
    for (method, kind), rows in grouped("nuclei", "method", "unseen").items():
        dice = {(kind, int(row["seed"])): float(row["dice"]) for row in rows}
        seen = 100 * statistics.mean(float(row["inside"]) for row in rows)
        mean = spread_text(average_over_columns(dice, [kind]))
        cells.setdefault(METHODS.find(method).title, {})[readable(kind)] = f"{mean} / {seen:.0f}"
    kinds = list(dict.fromkeys(kind for own in cells.values() for kind in own))
    body = [[method, *(own[kind] for kind in kinds)] for method, own in cells.items()]
    return markdown(["method", *kinds], body)


def recipes(*names: str) -> str:
    """Returns recipes for FedAvg, best in-domain first: unseen / in-domain validation, in percent.

    Below stands how often in-domain validation chose well, over columns and numbers of images.

    Args:
        names: of the CSV files of one search.
    """
    rows = pd.concat(pd.read_csv(DATA / f"{name}.csv") for name in names)
    rows = rows.query("metric == 'accuracy' and over == 'domain_mean' and rule in ['final', 'ema']")
    most = rows["budget"].max()
    keys = ["method", "held_out", "rule", "budget"]
    found = 100 * rows.pivot_table(index=keys, columns="split", values="value")[["test", "id_val"]]
    of_last = found.xs("final", level="rule")
    inside = of_last["id_val"].unstack(["budget", "held_out"])[most]
    body = []
    for recipe, mean in inside.mean(axis=1, skipna=False).sort_values(ascending=False).items():
        cells = [recipe]
        for column in inside:
            if math.isnan(inside.loc[recipe, column]):
                cells.append("")
                continue
            last, means = (
                " / ".join(f"{value:.1f}" for value in found.loc[recipe, column, rule, most])
                for rule in ("final", "ema")
            )
            cells.append(f"{last} ({means})")
        body.append([*cells, percent(mean)])
    cases = of_last.drop(POOLED, errors="ignore").groupby(["held_out", "budget"])
    lost = cases["test"].max() - cases.apply(lambda case: case["test"][case["id_val"].idxmax()])
    head = ["recipe", *(f"{readable(column)} unseen" for column in inside), "in-domain, mean"]
    return markdown(head, body) + (
        "\n\nIn-domain validation chose a recipe within a point of the best on the unseen domain "
        f"in {(lost <= 1).sum()} of {len(lost)} cases (domains and numbers of images), and lost "
        f"{lost.mean():.1f} points on average."
    )


def launches() -> str:
    """Returns what a step and a turn of each method launch, and which steps are recorded."""
    body = []
    for row in rows_of("speed_launches"):
        recorded = "yes" if row["recorded"] == "True" else f"no: {row['why']}"
        step = " → ".join(filter(None, (row["step"], row["step_recorded"])))
        body.append([row["method"], recorded, step, row["turn"], row["waits"]])
    return markdown(["method", "recorded", "a step", "a turn", "its waits"], body)


def recipe_columns() -> str:
    """Returns FedAvg by the chosen recipe on every column, beside what is published, in percent."""
    runs = {"four_columns_160": "160 pixels", "four_columns_96": "96 pixels"}
    runs |= {"curve_96": "96 pixels", "curve_64": "64 pixels"}
    runs |= {f"pooled_{size}": f"not federated, {size} pixels" for size in (160, 96)}
    columns = ["photo", "art_painting", "cartoon", "sketch"]
    body = []
    for name, size in runs.items():
        rows = pd.read_csv(DATA / f"baseline_{name}.csv")
        rows = rows.query("metric == 'accuracy' and over == 'domain_mean' and rule == 'final'")
        by_column = 100 * rows.pivot_table(
            index=["budget", "split"], columns="held_out", values="value"
        ).reindex(columns=columns)
        for budget in by_column.index.unique("budget"):
            outside, inside = by_column.loc[budget].loc[["test", "id_val"]].to_numpy()
            numbers = [*outside, outside.mean(), inside.mean()]
            seen = f"{budget // 1000}k" + (" of 200k" if name.startswith("curve") else "")
            body.append([f"{size}, {seen} images", *map(percent, numbers)])
    for name, cells in PUBLISHED.items():
        body.append([name, *cells])
    return markdown(["FedAvg", *map(readable, columns), "mean", "in-domain"], body)


def at_chosen_rates(
    rows: Iterable[tuple[float, ResultRow]], tried: Mapping[str, int]
) -> list[ResultRow]:
    """Returns of all runs in a place the one whose rate is best in-domain, the lower if equal.

    Args:
        rows: each with its rate.
        tried: the number of rates of each method; a place counts once all have been run.
    """
    places: dict[Place, dict[float, ResultRow]] = {}
    for rate, row in rows:
        places.setdefault(row.place, {})[rate] = row
    of = {"rule": FINAL.name, "split": ID_VAL, "metric": "accuracy", "over": "domain_mean"}

    def in_domain(pair: tuple[float, ResultRow]) -> tuple[float, float]:
        return next(iter(pair[1].table.where(**of))).value, -pair[0]

    chosen = [max(by_rate.items(), key=in_domain) for by_rate in places.values()]
    return [
        row for (_, row), found in zip(chosen, places.values()) if len(found) == tried[row.method]
    ]


def fourteen_domains() -> Results:
    """Returns the runs that count by the rule of ``methods/fourteen_domains_64.yaml``.

    A method's second rate stands in a plan of its own.
    """
    read, rows = [], []
    tried: Counter[str] = Counter()
    for name in ("fourteen_domains_64", "fourteen_other_rate_64"):
        plan = load_plan(ROOT / f"benchmarks/methods/{name}.yaml")
        read.append(Results.read(DATA / f"{name}.csv", plan))
        rates = {one.label: one.experiment.get("train", {}).get("lr", 0) for one in plan.methods}
        tried.update(rates.keys())
        rows += [(rates[row.method], row) for row in read[-1].rows]
    return replace(read[0], rows=at_chosen_rates(rows, tried))


def at_best_rate(name: str) -> Results:
    """Returns the runs that count by the rule of the plan ``methods/NAME.yaml``.

    Its rates are an axis of the plan, which the one that counts replaces. A seed counts once every
    method has been run with it on every domain.
    """
    plan = load_plan(ROOT / f"benchmarks/methods/{name}.yaml")
    results = Results.read(DATA / f"{name}.csv", plan)

    def with_rate(row: ResultRow) -> tuple[float, ResultRow]:
        others = dict(row.conditions)
        rate = float(others.pop(RATE))
        return rate, row.model_copy(update={"conditions": others})

    tried = dict.fromkeys(results.methods, len(plan.settings[RATE]))
    rows = at_chosen_rates(map(with_rate, results.rows), tried)
    planned = {place.place: place for _, place in map(with_rate, results.planned)}
    found = {row.place for row in rows}
    partly = {row.seed for place, row in planned.items() if place not in found}
    rows = [row for row in rows if row.seed not in partly]
    return replace(results, rows=rows, planned=[*planned.values()])


def many_domains(results: Results) -> str:
    """Returns each method beside FedAvg over the domains of several data sets."""
    body = []
    for method, margin in results.margins(FINAL, "FedAvg").items():
        apart = by_domain(margin, list(margin.by_domain)).text
        cells = [method, str(len(margin.by_domain)), lead(margin), over_data_sets(margin)]
        body.append([*cells, apart, detectable_text(margin)])
    head = ["minus FedAvg", "domains", "points, over domains", "over data sets", "by domain"]
    return markdown([*head, "detectable"], body)


def well_trained(results: Results) -> str:
    """Returns each method's accuracies of one data set, and its differences from FedAvg."""
    margins = results.margins(FINAL, "FedAvg")
    outside, inside = (results.values(FINAL, split=split) for split in (TEST, ID_VAL))
    columns = list(dict.fromkeys(map(results.column, results.rows)))
    body = []
    for method in outside:
        cells = [
            spread_text(average_over_columns(values.get(method, {}), columns))
            for values in (outside, inside)
        ]
        one = margins.get(method)
        beside = ["", "", ""]
        if one is not None:
            beside = [lead(one), by_domain(one, columns).text, detectable_text(one)]
        body.append([method, *cells, *beside])
    of = f"by domain ({', '.join(map(readable, columns))})"
    return markdown(["method", "unseen", "in-domain", "minus FedAvg", of, "detectable"], body)


def benchmark_methods() -> str:
    """Returns FedDG_Benchmark's methods beside FedAvg at both heterogeneities.

    By the rule of ``methods/bai_pacs_64.yaml``: the p-values of all comparisons are corrected
    together.
    """
    plan = load_plan(ROOT / "benchmarks/methods/bai_pacs_64.yaml")
    results = Results.read(DATA / "bai_pacs_64.csv", plan).at_largest
    parts = []
    for value in ("1", "0.1"):
        rows, planned = (
            [place for place in places if place.conditions["heterogeneity"] == value]
            for places in (results.rows, results.planned)
        )
        parts.append(replace(results, rows=rows, planned=planned))
    found = [part.margins(BEST_HELD_OUT, "FedAvg") for part in parts]
    known = {
        (place, method): one.domains.p
        for place, of_part in enumerate(found)
        for method, one in of_part.items()
        if one.domains.p is not None
    }
    corrected = dict(zip(known, holm([*known.values()])))
    body = []
    for method in results.methods:
        cells = [method]
        for place, part in enumerate(parts):
            for rule in (BEST_HELD_OUT, EMA_MEAN):
                values = part.values(rule).get(method, {})
                cells.append(spread_text(average_over_columns(values, part.columns)))
            one = found[place].get(method)
            if one is not None:
                p = corrected.get((place, method))
                one = replace(one, p=p, comparisons=len(known))
            cells += [lead(one), "" if one is None else detectable_text(one)]
        body.append(cells)
    head = ["accuracy", "EMA", "minus FedAvg", "detectable"]
    parts_of_head = [f"{text}, {cell}" for text in ("mixed", "apart") for cell in head]
    return markdown(["method", *parts_of_head], body)


def tables() -> dict[str, str]:
    """Returns every table by its name."""
    return {
        "front": front(),
        "advice": advice(),
        "converged": converged(),
        "baseline": recipes("baseline_three_clients_64", "baseline_three_clients_64_further"),
        "baseline_short_turns": recipes("baseline_hundred_clients_64"),
        "recipe_columns": recipe_columns(),
        "many_domains": many_domains(fourteen_domains()),
        "thirty_clients": many_domains(at_best_rate("fourteen_thirty_64")),
        "well_trained": well_trained(at_best_rate("pacs_60k_64")),
        "benchmark_methods": benchmark_methods(),
        "own_size": own_size(),
        "own_sizes": own_sizes(),
        "serving_digits": campaign("serving_digits"),
        "serving_pacs": campaign("serving_pacs"),
        "folder_defaults": folder_defaults(),
        "privacy_pacs": accuracy_by_epsilon("pacs"),
        "robust_updates": robust_updates(),
        "travel_labels": travel_labels(),
        "nuclei": nuclei(),
        "launches": launches(),
    }


def remade(page: str, made: Mapping[str, str]) -> str:
    """Returns a page with those of the tables that it has made anew."""
    for name, table in made.items():
        start = f"<!-- table: {name} -->"
        if start in page:
            page = between_marks(page, table.strip(), start, "<!-- end of table -->")
    return page


def main() -> None:
    """Rewrites the pages."""
    made = tables()
    for page in PAGES:
        page.write_text(remade(page.read_text("utf-8"), made), "utf-8")


if __name__ == "__main__":
    main()
