"""The tables of README.md, docs/benchmarks.md and docs/which_method.md, from docs/results/data.

    python benchmarks/tables.py

rewrites every table that stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``.
"""

import csv
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from feddg.comparison.results import Results, read_results
from feddg.comparison.statistics import (
    Key,
    Margin,
    average_over_columns,
    margins,
    paired_margin,
)
from feddg.evaluation.travel import ESTIMATORS
from feddg.records import ID_TEST, TEST, VAL
from feddg.report.results_page import between_marks
from feddg.report.tables import (
    accuracy_columns,
    by_method,
    detectable_text,
    interval_text,
    margin_text,
    spread_text,
    to_markdown,
    unseen,
)
from feddg.report.text import spelled
from feddg.runs.reading import EMA_MEAN, FINAL, SWA_MEAN
from feddg.text import readable

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "results" / "data"
PAGES = tuple(ROOT / name for name in ("README.md", "docs/benchmarks.md", "docs/which_method.md"))


@dataclass(frozen=True)
class Campaign:
    """A table of methods, each beside plain averaging.

    Attributes:
        rounds: of every run: a results file has images and seconds of one round.
        files: the results files.
        left_out: methods that the table does not show.
        beside: by a method's label, that of a further one that it is compared with.
        heading: of that column.
        without: a held-out domain that we drew ourselves; a column shows the mean of the others.
    """

    rounds: int
    files: Sequence[str]
    left_out: Sequence[str] = ()
    beside: Callable[[str], str] | None = None
    heading: str = ""
    without: str = ""


ColumnsOfRows = Mapping[str, Callable[[list[dict[str, str]]], str]]
"""By heading, a cell made of several rows of a file."""


def default_codec(method: str) -> str:
    """Returns the method of ``CCST, colours`` with its default codec."""
    return method.partition(",")[0].lower()


OTHERS = (
    *("mixstyle", "rsc", "feddg-ga", "fedig-a", "randconv", "vista"),
    *("outlines", "ridge", "ridge+outlines"),
)
OF_DEFAULT = "minus the same with `compact`, EMA"
CAMPAIGNS: Mapping[str, Campaign] = {
    "serving_digits": Campaign(10, ["serving_digits"], without="sketch"),
    "serving_ablation": Campaign(
        10,
        ["serving_ablation", "serving_digits"],
        ["rsc", "ccst", "pardon", "feddg-ga", "fedig-a", "outlines"],
        lambda method: "vista",
        "minus VISTA, EMA",
    ),
    "serving_pacs": Campaign(12, ["serving_pacs"]),
    "codecs_digits": Campaign(
        10, ["codecs_digits", "serving_digits"], OTHERS, default_codec, OF_DEFAULT
    ),
    "codecs_pacs": Campaign(12, ["codecs_pacs", "serving_pacs"], OTHERS, default_codec, OF_DEFAULT),
}
"""The tables of methods, by name."""
SEARCHES = ("vista_search", "vista_search_pacs")
TESTED = ("sketch", "cartoon", "art_painting", "photo")
NOISED = ("digits", "pacs", "digits_ten_clients")
LEVELS = ("none", "clipped", "16", "8", "4", "1")
PROTECTED = {
    ("fedavg", "updates"): "FedAvg, updates",
    ("pardon", "updates"): "PARDON, updates",
    ("pardon", "styles (image)"): "PARDON, styles, an image hidden",
    ("pardon", "styles (client)"): "PARDON, styles, a client hidden",
}
ATTACKED = ("pardon", "ccst", "ccst-single", "elcfs", "fpl", "fedbn", "fedig")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    head_line, *lines = (f"| {' | '.join(line)} |" for line in (head, *rows))
    return "\n".join([head_line, f"|{'---|' * len(head)}", *lines])


def lead(margin: Margin | None) -> str:
    """Returns a margin with its interval over domains, bold where a lead or lag may be claimed."""
    if margin is None:
        return ""
    return f"**{margin_text(margin)}**" if margin.decided else margin_text(margin)


def over_seeds(margin: Margin | None) -> str:
    """Returns a margin's interval over seeds on these domains."""
    return "" if margin is None else interval_text(margin.seeds, "seed")


def with_note(table: str, found: Sequence[Margin]) -> str:
    """Returns a table with a sentence about differences that its domains cannot show, if any."""
    return f"{table}\n\n{note}" if (note := unseen(found)) else table


def campaign(about: Campaign) -> str:
    """Returns accuracy on unseen domains by method, best first, with budget and lead of each."""
    rows = [row for name in about.files for row in read_results(DATA / f"{name}.csv")]
    results = Results.of_rows([row for row in rows if row.method not in about.left_out])
    found = {rule: results.accuracies(rule) for rule in (FINAL, SWA_MEAN, EMA_MEAN)}
    final, ema = (results.margins(rule, "fedavg") for rule in (FINAL, EMA_MEAN))
    others = {m: about.beside(m) for m in results.methods} if about.beside else {}
    own = found[EMA_MEAN]
    pairs = {m: (own[m], own[other]) for m, other in others.items() if m != other}
    further = margins(pairs, results.domains)
    rest = Results.of_rows([row for row in results.rows if row.held_out != about.without])
    leads_of_rest = rest.margins(EMA_MEAN, "fedavg")
    shown = []
    for method in results.methods:
        means = [average_over_columns(found[rule][method], results.columns) for rule in found]
        seconds = results.mean(method, "seconds") / results.mean("fedavg", "seconds")
        seen = results.mean(method, "images") * about.rounds / 1000
        seeds = len({row.seed for row in results.of(method)})
        cells = [spelled(method), *map(spread_text, means)]
        cells += [lead(final.get(method)), lead(ema.get(method)), over_seeds(ema.get(method))]
        cells += [lead(further.get(method))] if others else []
        if about.without:
            mean = average_over_columns(rest.accuracies(EMA_MEAN)[method], rest.columns)
            cells += [spread_text(mean), lead(leads_of_rest.get(method))]
        cells += [str(seeds), f"{seen:.0f}k", f"{seconds:.1f}"]
        shown.append((-means[2].mean if means[2] else 0.0, cells))
    head = ["method", "final round", "SWA", "EMA", "minus FedAvg, final", "minus FedAvg, EMA"]
    head += [
        "EMA, over seeds",
        *([about.heading] if others else []),
        *([f"EMA without {about.without}", "minus FedAvg"] if about.without else []),
        "seeds",
        "images seen",
        "time",
    ]
    table = markdown(head, [cells for _, cells in sorted(shown)])
    return with_note(table, [*ema.values(), *further.values()])


def front() -> str:
    """Returns README's table: accuracy on each domain held out, images that we did not draw."""
    whole = [row for row in rows_of("folder_defaults") if row["images_a_domain"] == "all"]
    pacs = {r["held"]: float(r["unseen"]) for r in whole if r["default"] == "default"}
    shown = [("PACS, as a folder", "fedavg", pacs)]
    for method, own in Results.read(DATA / "emoji_demo.csv").accuracies(FINAL).items():
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


def advice() -> str:
    """Returns the differences behind the advice of "Which method", with the budget of each."""
    trained = rows_of("folder_defaults"), rows_of("folder_choice")
    held: dict[str, str] = {}
    by_weights: dict[str, dict[Key, float]] = {}
    for row in trained[0]:
        key = (f"{row['images_a_domain']} {row['held']}", 0)
        held[key[0]] = row["held"]
        by_weights.setdefault(row["default"], {})[key] = float(row["unseen"]) / 100
    by_rounds: dict[str, dict[Key, float]] = {}
    for row in trained[1]:
        if (row["head"] == "ridge" and row["trainable"] == "all") or row["rounds"] == "0":
            key = (f"{row['images_a_domain']} {row['size']} {row['held']}", 0)
            held[key[0]] = row["held"]
            by_rounds.setdefault(f"{row['rounds']} {row['lr']}", {})[key] = (
                float(row["unseen"]) / 100
            )
    sizes = "PACS, 60, 400 or all images a domain"
    from_weights = paired_margin(by_weights["default"], by_weights["from scratch"], held)
    seen = "0.8k, 5k or 35k; 10k, 65k or 400k"
    body = [["1", "ImageNet weights, 5 rounds, minus from scratch", sizes, seen, from_weights]]
    for name, data in (("serving_pacs", "PACS"), ("serving_digits", "digits")):
        results = Results.read(DATA / f"{name}.csv")
        seen = f"{results.mean('fedavg', 'images') * CAMPAIGNS[name].rounds / 1000:.0f}k"
        final, ema = (results.accuracies(rule)["fedavg"] for rule in (FINAL, EMA_MEAN))
        averaged = paired_margin(ema, final, results.domains)
        body.append(["1", "FedAvg: averaged weights (EMA) minus last", data, seen, averaged])
        advised, found = "1" if data == "PACS" else "2", results.margins(EMA_MEAN, "fedavg")
        for method in ("outlines", "ccst", "mixstyle", "feddg-ga", "pardon", "randconv", "vista"):
            images = f"{results.mean(method, 'images') * CAMPAIGNS[name].rounds / 1000:.0f}k"
            words = f"{spelled(method)} minus FedAvg"
            body.append([advised, words, data, images, found[method]])
    spent = Results.read(DATA / "budget_pacs.csv")
    for budget in spent.budgets:
        found = spent.at(budget).margins(EMA_MEAN, "fedavg")
        for advised, method in (("1", "dart"), ("1", "outlines"), ("3", "ridge")):
            words = [f"{spelled(method)} minus FedAvg", "PACS, 64 pixels", f"{budget // 1000}k"]
            body.append([advised, *words, found[method]])
    sizes = "PACS, 100 or 400 images a domain"
    rounds = paired_margin(by_rounds["5 0.0001"], by_rounds["0 0.0"], held)
    body.append(["3", "closed form and 5 rounds minus closed form", sizes, "1k or 4k", rounds])
    head = ["advice", "compared", "data", "images seen", "domains", "points, over domains"]
    head += ["over seeds", "detectable"]
    rows = [
        [*words, str(one.domains.count), lead(one), over_seeds(one), detectable_text(one)]
        for *words, one in sorted(body, key=lambda cells: cells[0])
    ]
    return markdown(head, rows)


def learning_rates(name: str, *columns: str) -> str:
    """Returns accuracy by learning rate, in-domain validation first: it alone may choose.

    Args:
        name: of the results file.
        columns: what rows are told apart by; the rest is averaged over.
    """
    groups: dict[tuple[str, ...], list[Mapping[str, float]]] = {}
    for row in read_results(DATA / f"{name}.csv"):
        known = {"method": spelled(row.method), "held out": row.held_out, **row.conditions}
        known["rate"] = f"{float(known['train.lr']):.0e}".replace("e-0", "e-")
        groups.setdefault(tuple(known[column] for column in columns), []).append(row.numbers)
    numbers = [
        f"{split}_{rule}" for split in ("id_val", "test") for rule in ("final", "swa", "ema")
    ]
    body = [
        [*key, *(f"{100 * statistics.mean(row[n] for row in rows):.1f}" for n in numbers)]
        for key, rows in sorted(groups.items(), key=lambda item: (item[0][:-1], float(item[0][-1])))
    ]
    head = [
        f"{split}, {rule}" for split in ("in-domain", "unseen") for rule in ("final", "SWA", "EMA")
    ]
    return markdown([*columns, *head], body)


def by_validation(name: str, plain: str = "") -> str:
    """Returns accuracy by EMA on the domain that chooses, best first, and on the unseen one.

    Args:
        name: of the results file; columns that a method lacks are left out.
        plain: the row of the grid that is shown as plain averaging.
    """
    rows = {(row.method, row.held_out): row.numbers for row in read_results(DATA / f"{name}.csv")}
    if plain:
        grid = read_results(DATA / "grid_pacs.csv")
        rows |= {("fedavg", row.held_out): row.numbers for row in grid if row.method == plain}
    methods = dict.fromkeys(method for method, _ in rows)
    tested = [c for c in TESTED if all((method, c) in rows for method in methods)]
    body = []
    for method in methods:
        own = [rows[method, column] for column in tested]
        cells = [[numbers["val_ema"]] for numbers in own]
        cells += [[n[key] for n in own] for key in ("val_ema", "val_final", "test_ema")]
        means = [statistics.mean(values) for values in cells]
        body.append((-means[-3], [spelled(method), *(f"{100 * mean:.1f}" for mean in means)]))
    head = [f"tested on {column.replace('_', ' ')}" for column in tested]
    head = ["what", *head, "mean", "last model", "unseen domain"]
    return markdown(head, [cells for _, cells in sorted(body)])


def budgets(name: str, tested: Sequence[str] = TESTED) -> str:
    """Returns accuracy by images seen: EMA, and the lead over plain averaging; last model."""
    results = Results.read(DATA / f"{name}.csv")
    body, noted = [], list[Margin]()
    for budget in results.budgets:
        part = results.at(budget)
        found = {rule: part.accuracies(rule) for rule in (FINAL, EMA_MEAN)}
        leads = {rule: part.margins(rule, "fedavg") for rule in found}
        noted += leads[EMA_MEAN].values()
        for method in part.methods:
            by_column = {column: value for (column, _), value in found[EMA_MEAN][method].items()}
            cells = [f"{100 * by_column[c]:.1f}" if c in by_column else "" for c in tested]
            means = [average_over_columns(one[method], list(by_column)) for one in found.values()]
            shown = [f"{budget // 1000}k", spelled(method), *cells]
            for mean, own in zip(means, leads.values()):
                shown += [spread_text(mean), lead(own.get(method))]
            body.append(((budget, -means[1].mean if means[1] else 0.0), shown))
    head = ["images seen", "method", *(column.replace("_", " ") for column in tested)]
    head += ["last model", "minus FedAvg", "EMA", "minus FedAvg"]
    return with_note(markdown(head, [cells for _, cells in sorted(body)]), noted)


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


def ridge_by_epsilon() -> str:
    """Returns ridge's accuracy on the unseen domains by epsilon, and the spread over seeds."""
    groups: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for row in rows_of("privacy_ridge"):
        seeds = groups.setdefault((row["features"], row["clients"], row["level"]), {})
        seeds.setdefault(row["seed"], []).append(float(row["accuracy"]))
    body = []
    for features, clients in dict.fromkeys(key[:2] for key in groups):
        means = [
            [statistics.mean(columns) for columns in groups[features, clients, level].values()]
            for level in LEVELS
        ]
        cells = [f"{statistics.mean(own):.1f} ± {statistics.stdev(own):.1f}" for own in means]
        body.append(["512" if features == "all_features" else "64", clients, *cells])
    head = ["features", "clients", "as they are", "clipped only"]
    return markdown([*head, *(f"ε = {e}" for e in LEVELS[2:])], body)


def ranks(attacker: str) -> str:
    """Returns how well images are found again by what an attacker draws, over all domains."""
    drawn = {
        (row["run"], row["fed"]): row
        for row in rows_of("privacy_reconstruction")
        if row["domain"] == "all" and row["attacker"] in (attacker, f"{attacker} of photo")
    }
    hidden = {
        row["run"]: interval(row, "mean", "low", "high")
        for row in rows_of("privacy_differences")
        if row["metric"] == "rank" and row["attacker"] in (attacker, f"{attacker} of photo")
    }
    body = []
    for run in ATTACKED:
        rows = [drawn[run, fed] for fed in ("sent", "sample", "unrelated")]
        cells = [interval(row, "rank", "rank_low", "rank_high") for row in rows]
        psnr = " / ".join(f"{float(row['psnr']):.1f}" for row in rows)
        body.append([run, *cells, hidden.get(run, ""), psnr])
    head = ["method", "drawn from what was sent", "from the image's own", "chance"]
    head += ["own minus sent", "PSNR: sent / own / chance, dB"]
    return markdown(head, body)


def interval(row: Mapping[str, str], mean: str, low: str, high: str) -> str:
    """Returns ``0.49 [0.44, 0.54]``."""
    middle, *ends = (f"{float(row[name]):.2f}" for name in (mean, low, high))
    return f"{middle} [{', '.join(ends)}]"


def inversion() -> str:
    """Returns what gradient inversion finds, by step and batch."""
    names = {"sgd": "plain SGD", "own": "Adam, the run's"}
    body = [
        [names.get(row["optimizer"], row["optimizer"]), row["batch_size"]]
        + [f"{float(row[name]):.1f}" for name in ("psnr", "unrelated_psnr")]
        + [interval(row, "rank", "rank_low", "rank_high")]
        for row in rows_of("privacy_updates")
    ]
    return markdown(["step", "images", "PSNR, dB", "chance", "rank"], body)


def membership() -> str:
    """Returns how well an attacker tells members from others, by what is read."""
    found = {
        (row["run"], row["entry"], row["attack"]): interval(row, "auc", "low", "high")
        for row in rows_of("privacy_membership")
    }
    body = [
        [run, entry, found[run, entry, "threshold"], found[run, entry, "shadow"]]
        for run, entry in dict.fromkeys((run, entry) for run, entry, _ in found)
    ]
    return markdown(["method", "read", "AUC, threshold", "AUC, shadow clients"], body)


def robust_updates() -> str:
    """Returns accuracy by defence and share of liars, mean of the seeds: unseen / seen domains."""
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows_of("robust_updates"):
        groups.setdefault((row["defence"], row["liars"]), []).append(row)
    defences = list(dict.fromkeys(defence for defence, _ in groups))
    liars = list(dict.fromkeys(count for _, count in groups))
    body = [[name, *(seen_and_unseen(groups[name, count]) for count in liars)] for name in defences]
    return markdown(["`defences`", *(f"{count} of 10 lie" for count in liars)], body)


def robust_styles() -> str:
    """Returns accuracy by what one of five sites says its style is: unseen / seen domains."""
    groups: dict[tuple[str, str], dict[str, list[dict[str, str]]]] = {}
    for row in rows_of("robust_styles"):
        key = (row["lie"], {"True": "yes", "False": "no"}[row["ranges"]])
        groups.setdefault(key, {}).setdefault(row["method"], []).append(row)
    methods = ("pardon", "vista")
    body = [[*key, *(seen_and_unseen(own[m]) for m in methods)] for key, own in groups.items()]
    return markdown(["its style is", "ranges checked", *map(spelled, methods)], body)


def seen_and_unseen(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns ``71 / 67``: mean accuracy on the unseen domain and on the seen ones, percent."""
    columns = ("unseen_accuracy", "seen_accuracy")
    return " / ".join(
        f"{100 * statistics.mean(float(row[c]) for row in rows):.0f}" for c in columns
    )


def scale() -> str:
    """Returns what many images and clients cost."""
    body = [
        [
            row["what"],
            *(f"{int(row[name]):,}" for name in ("images", "domains", "clients")),
            f"{float(row['cpu_seconds']):.0f}",
            f"{int(row['peak_bytes']) / 1e9:.2f}",
        ]
        for row in rows_of("scale")
    ]
    return markdown(["what", "images", "domains", "clients", "CPU s", "peak GB"], body)


def workers() -> str:
    """Returns what a round takes by one process and by two workers."""
    body = []
    for row in rows_of("workers"):
        if row["process"]:
            continue
        cpu, worker, training, messages = (
            float(row[name]) for name in ("cpu", "worker_cpu", "training", "messages")
        )
        threads = 2 if row["setup"] == "one process, two threads" else 1
        parts = [
            f"{messages:.3f}" if worker else "",
            f"{cpu - training - messages:.3f}" if threads == 1 else "",
        ]
        longest = max(cpu / threads, worker)
        wall = [f"{float(row[name]):.1f}" for name in ("seconds", "waiting")]
        body.append([row["job"], row["setup"], f"{longest:.2f}", *parts, *wall])
    heading = ["job", "by", "CPU s, longest", "messages", "sums, checks", "wall s", "waiting"]
    return markdown(heading, body)


def workers_projection() -> str:
    """Returns how much sooner four GPUs would end a round than one, from measured parts.

    Of ResNet-18 by two workers: the server's work for each of a round's 4 updates, and what
    messages take for each of the 2 that cross.
    """
    (row,) = (
        r for r in rows_of("workers") if (r["job"], r["setup"]) == ("ResNet-18", "two workers")
    )
    cpu, training, messages = (float(row[name]) for name in ("cpu", "training", "messages"))
    server, message = (cpu - training - messages) / 4, messages / 2
    body = []
    for seconds in (0.1, 0.5, 2.0):
        one = 20 * (seconds + server)
        four = 5 * seconds + 20 * server + 15 * message
        body.append([f"{seconds:g}", f"{one:.1f}", f"{four:.1f}", f"{one / four:.1f}"])
    return markdown(["s a client", "one GPU, s", "four GPUs, s", "times as fast"], body)


def workers_nodes() -> str:
    """Returns what the processes of a round on two nodes take."""
    body = [
        [
            f"{row['process']}{', the server' if row['process'] == '0' else ''}",
            f"{float(row['seconds']):.0f}",
            f"{float(row['cpu_seconds']):.0f}",
            f"{int(row['peak_bytes']) / 1e9:.2f}",
        ]
        for row in rows_of("workers")
        if row["process"]
    ]
    return markdown(["process", "wall s", "CPU s", "peak GB"], body)


def bytes_sent() -> str:
    """Returns megabytes of a client's update, by network and by what is trained."""
    found = {(row["backbone"], row["trainable"]): row["megabytes"] for row in rows_of("bytes_sent")}
    parts = list(dict.fromkeys(part for _, part in found))
    body = [[name, *(found[name, p] for p in parts)] for name in dict.fromkeys(n for n, _ in found)]
    return markdown(["MB a client and round", *parts], body)


def closed_form() -> str:
    """Returns accuracy of the closed-form classifier on each unseen domain of PACS."""
    plain = [row for row in rows_of("closed_form_pacs") if row["version"] == "none"]
    own = {
        "seconds": lambda rows: rows[0]["seconds"],
        "MB a client": lambda rows: rows[0]["megabytes"],
    }
    return closed_form_of(plain, {}, own)


def closed_form_versions() -> str:
    """Returns the same where versions of the images are in the sums, beside images alone."""
    rows = rows_of("closed_form_pacs")
    places = {(row["backbone"], row["size"]) for row in rows if row["version"] != "none"}
    beside = [row for row in rows if (row["backbone"], row["size"]) in places]

    def in_the_sums(rows: list[dict[str, str]]) -> str:
        version = rows[0]["version"]
        return "images alone" if version == "none" else f"images and {version}"

    own = {"sites left out": lambda rows: mean_of(rows, "left_out")}
    return closed_form_of(beside, {"in the sums": in_the_sums}, own)


def closed_form_of(rows: list[dict[str, str]], before: ColumnsOfRows, after: ColumnsOfRows) -> str:
    """A row for each network, size and version: accuracies on unseen domains between columns."""
    unseen = list(dict.fromkeys(row["unseen"] for row in rows))
    body = []
    for key in dict.fromkeys((row["backbone"], row["size"], row["version"]) for row in rows):
        own = [r for r in rows if (r["backbone"], r["size"], r["version"]) == key]
        figures = {row["unseen"]: row["accuracy"] for row in own}
        cells = [cell(own) for cell in before.values()], [cell(own) for cell in after.values()]
        accuracies = [figures[name] for name in unseen]
        body.append([*key[:2], *cells[0], *accuracies, mean_of(own, "accuracy"), *cells[1]])
    head = ["network", "pixels", *before, *map(readable, unseen), "mean", *after]
    return markdown(head, body)


def mean_of(rows: list[dict[str, str]], name: str) -> str:
    """The mean of a column of figures."""
    return f"{statistics.mean(float(row[name]) for row in rows):.1f}"


def folder_choice() -> str:
    """Returns what was tried for a folder of one's own."""
    head = ["images a domain", "pixels", "classifier starts", "then", "in-domain", "unseen"]
    body = []
    for row in rows_of("folder_choice"):
        rounds = int(row["rounds"])
        what = "" if row["trainable"] == "all" else f" ({row['trainable']} alone)"
        then = f"{rounds} rounds at {float(row['lr']):g}{what}" if rounds else "nothing"
        start = "in closed form" if row["head"] == "ridge" else "at random"
        unseen = f"{readable(row['held'])} {row['unseen']}"
        cells = [row["images_a_domain"], row["size"], start, then, row["id_val"], unseen]
        body.append([*cells, row["cpu_seconds"]])
    return markdown([*head, "CPU seconds"], body)


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


def training_steps() -> str:
    """Returns milliseconds of a training step beside the plain loop's, a row for each size."""
    rows = {
        (row["threads"], row["size"], row["backbone"], row["precision"]): row
        for row in rows_of("speed_steps")
    }
    jobs = [
        (backbone, precision)
        for backbone in ("efficientnet_lite0", "resnet18")
        for precision in ("float32", "bfloat16")
    ]
    body = [
        [threads, size]
        + [
            f"{row['feddg']} / {row['bare']} = {float(row['ratio']):.2f}"
            for row in (rows[threads, size, *job] for job in jobs)
        ]
        for threads, size in dict.fromkeys((threads, size) for threads, size, *_ in rows)
    ]
    return markdown(["threads", "pixels", *map(", ".join, jobs)], body)


def reference_lines(name: str) -> str:
    """Returns accuracy of methods between a client alone and all images in one place."""
    if name == "pacs":
        results = Results.read(DATA / "reference_lines_pacs.csv")
        unseen, inside = (results.accuracies(FINAL, split) for split in (TEST, ID_TEST))
    else:
        unseen, inside = ({}, {})
        for row in rows_of(f"reference_lines_{name}"):
            place = (row["column"], int(row["seed"]))
            for split, found in ((TEST, unseen), (ID_TEST, inside)):
                found.setdefault(row["method"], {})[place] = float(row[f"{split}_accuracy"])
    columns = list(dict.fromkeys(column for own in unseen.values() for column, _ in own))
    body = [
        [spelled(method)]
        + [spread_text(average_over_columns(unseen[method], part)) for part in parts(columns)]
        + [spread_text(average_over_columns(inside[method], columns))]
        for method in ("local", "fedavg", "pardon", "centralised")
    ]
    return markdown(["method", *map(readable, columns), "average", "in-domain test"], body)


TRAVEL_NAMES = {
    "validation": "in-domain validation accuracy",
    **{name: own.title for name, own in ESTIMATORS.items()},
    "energy": "energy, thresholded (Liu et al. 2020)",
    "dispersity": "nuclear norm (Deng et al. 2023)",
    "combined": "mean of confidence, ATC, DoC and agreement",
    "left out": "mean accuracy at sites left out",
}


TRAVEL_IMAGES = {
    "digits, fedavg": "digits, FedAvg",
    "digits, pardon": "digits, PARDON",
    "digits, mixstyle": "digits, MixStyle",
    "digits-lite0": "digits, Lite0",
    "pacs-lite0": "PACS, Lite0",
    "pacs-resnet18": "PACS, ResNet-18",
    "emoji-lite0": "emoji, Lite0",
    "digits-lite0, clients": "digits, Lite0, clients",
    "pacs-lite0, clients": "PACS, Lite0, clients",
    "pacs-resnet18, clients": "PACS, ResNet-18, clients",
    "emoji-lite0, clients": "emoji, Lite0, clients",
    "digits, tuned": "digits, fine-tuned",
    "pacs, tuned": "PACS, fine-tuned",
    "emoji, tuned": "emoji, fine-tuned",
}


def grouped(name: str, *columns: str) -> dict[tuple[str, ...], list[dict[str, str]]]:
    """Returns the rows of a file by what some columns say."""
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows_of(name):
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return groups


def mean_error(rows: Sequence[Mapping[str, str]], column: str) -> float:
    """Returns the mean absolute error of estimates, in points."""
    return 100 * statistics.mean(abs(float(row[column]) - float(row["truth"])) for row in rows)


def travel_errors() -> str:
    """Returns the error of each estimator without labels: alone, and calibrated on sites."""
    groups, body = grouped("travel", "images", "estimator"), []
    for name, title in TRAVEL_NAMES.items():
        cells = []
        for own in TRAVEL_IMAGES:
            rows = groups.get((own, name), [])
            alone = f"{mean_error(rows, 'raw'):.1f}" if rows else ""
            fitted = bool(rows) and bool(rows[0]["estimate"])
            cells.append(f"{alone} / {mean_error(rows, 'estimate'):.1f}" if fitted else alone)
        body.append([title, *cells])
    return markdown(["estimator: alone / with sites", *TRAVEL_IMAGES.values()], body)


def travel_intervals() -> str:
    """Returns how often the intervals of the combined estimate hold the truth."""
    groups, body = grouped("travel", "images", "estimator"), []
    for images, title in TRAVEL_IMAGES.items():
        if not (rows := groups.get((images, "combined"), [])):
            continue
        ends = [(float(row["low"]), float(row["high"]), float(row["truth"])) for row in rows]
        held = sum(low <= truth <= high for low, high, truth in ends)
        width = 100 * statistics.mean(high - low for low, high, _ in ends)
        error = f"{mean_error(rows, 'estimate'):.1f}"
        body.append([title, rows[0]["sites"], str(len(rows)), error, f"{held}", f"{width:.0f}"])
    cases, hits = (sum(int(row[place]) for row in body) for place in (2, 4))
    body.append(["all", "", str(cases), "", f"{hits} ({100 * hits / cases:.0f} %)", ""])
    return markdown(["", "sites", "cases", "error", "intervals that held", "mean width"], body)


def travel_labels() -> str:
    """Returns errors and intervals by the number of labels, beside those of labels alone."""
    columns = ("error", "held", "width", "error_alone", "held_alone", "width_alone")
    body = []
    for (count,), rows in grouped("travel_labels", "labels").items():
        means = [100 * statistics.mean(float(row[column]) for row in rows) for column in columns]
        cells = [f"{mean:.{digits}f}" for mean, digits in zip(means, (1, 0, 0) * 2)]
        body.append([count, *(cells if count != "0" else [*cells[:3], "", "", ""])])
    head = ["labels", "error", "held, %", "width"]
    return markdown([*head, *(f"{name}, labels alone" for name in head[1:])], body)


FOLDERS = {
    "new domain": "a domain that took no part",
    "one class": "one of its classes alone",
    "digits-lite0": "digits",
    "emoji-lite0": "emoji",
    "pacs-lite0": "PACS",
    "nuclei-lite0": "microscope images",
}


def travel_folders() -> str:
    """Returns how many folders of images are refused, by what they show and how many there are."""
    groups, body = grouped("travel_folders", "images", "kind"), []
    for images, title in TRAVEL_IMAGES.items():
        for kind, shown in FOLDERS.items():
            if not (rows := groups.get((images, kind), [])):
                continue
            sizes, held = (
                dict.fromkeys(row[name] for row in rows) for name in ("size", "held_out")
            )
            cells = [f"{refused(rows, size=size)} %" for size in sizes]
            each = ", ".join(f"{readable(one)} {refused(rows, held_out=one)}" for one in held)
            body.append([title, shown, *cells, each])
    head = ["model", "folders of", "20 images", "50", "200", "by the domain held out, %"]
    return markdown(head, body)


def refused(rows: Sequence[Mapping[str, str]], **of: str) -> str:
    """Returns the share of folders that are refused in some rows, in percent."""
    own = [row for row in rows if all(row[name] == value for name, value in of.items())]
    share = sum(int(row["refused"]) for row in own) / sum(int(row["folders"]) for row in own)
    return f"{100 * share:.0f}"


def search_table(results: Results) -> str:
    """Returns a search's table: held-out validation after the final round, as Markdown."""
    found = results.accuracies(FINAL, VAL)
    groups: dict[str, Sequence[str]] = {
        f"tested on {readable(name)}": [name] for name in results.columns
    }
    groups["average"] = results.columns
    columns = accuracy_columns(results, FINAL, VAL, groups, published=True)

    def rank(method: str) -> tuple[int, float]:
        """Sorts methods with missing columns last, since their means are not comparable."""
        values = found[method]
        lacks = len(results.columns) - len({name for name, _ in values})
        return lacks, -sum(values.values()) / len(values)

    return to_markdown(by_method(sorted(found, key=rank), columns)).strip()


def parts(columns: Sequence[str]) -> list[Sequence[str]]:
    """Returns every column by itself, then all of them."""
    return [*([column] for column in columns), columns]


def tables() -> dict[str, str]:
    """Returns every table by its name."""
    made: dict[str, str] = {name: campaign(about) for name, about in CAMPAIGNS.items()}
    made |= {name: search_table(Results.read(DATA / f"{name}.csv")) for name in SEARCHES}
    made |= {f"privacy_{name}": accuracy_by_epsilon(name) for name in NOISED}
    return made | {
        "front": front(),
        "advice": advice(),
        "budget_pacs": budgets("budget_pacs"),
        "grid_pacs": by_validation("grid_pacs"),
        "pacs_learning_rate": learning_rates("pacs_learning_rate", "method", "held out", "rate"),
        "emoji_learning_rate": learning_rates("emoji_learning_rate", "held out", "rate"),
        "privacy_ridge": ridge_by_epsilon(),
        "search_pacs": by_validation("search_pacs", plain="12 rounds of 2 steps"),
        "reference_lines_digits": reference_lines("digits"),
        "reference_lines_pacs": reference_lines("pacs"),
        "attacks_server": ranks("server"),
        "attacks_client": ranks("client"),
        "attacks_updates": inversion(),
        "attacks_membership": membership(),
        "scale": scale(),
        "workers": workers(),
        "workers_projection": workers_projection(),
        "workers_nodes": workers_nodes(),
        "speed_steps": training_steps(),
        "bytes_sent": bytes_sent(),
        "closed_form_pacs": closed_form(),
        "closed_form_versions": closed_form_versions(),
        "folder_choice": folder_choice(),
        "folder_defaults": folder_defaults(),
        "robust_updates": robust_updates(),
        "robust_styles": robust_styles(),
        "travel_errors": travel_errors(),
        "travel_intervals": travel_intervals(),
        "travel_labels": travel_labels(),
        "travel_folders": travel_folders(),
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
