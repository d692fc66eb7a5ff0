"""Makes a page about serving weights from the CSV file of a campaign.

    python benchmarks/serving/page.py RESULTS.csv [MORE.csv ...] PAGE.md

Everything between the page's two marks is made anew; what stands around it is kept.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from feddg.comparing.intervals import (
    Accuracies,
    Margin,
    Spread,
    average_over_columns,
    paired_margin,
    spread,
)
from feddg.comparing.kept_results import KeptResult, KeptResults
from feddg.errors import ExperimentError
from feddg.methods.composition import method_class
from feddg.rows import ID_TEST, VAL
from feddg.runs.selection_rules import BEST_IN_DOMAIN, EMA_MEAN, FINAL, TAIL_MEAN

BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"
SEARCH = "<!-- search -->"
"""A page that says this shows validation domains, and one rule."""
BASELINE = "fedavg"
RULES = (FINAL, TAIL_MEAN, EMA_MEAN, BEST_IN_DOMAIN)


def tables(kept: KeptResults) -> str:
    """Returns the tables of the campaign as Markdown."""
    parts = [_coverage(kept), _accuracy(kept), _by_column(kept), _margins(kept)]
    return "\n\n".join([*parts, _explained(kept), _costs(kept)])


def _columns(kept: KeptResults) -> list[str]:
    return list(dict.fromkeys(result.column for result in kept.results))


def _title(method: str) -> str:
    try:
        return method_class(method).title
    except ExperimentError:
        return method


def _coverage(kept: KeptResults) -> str:
    seeds = {method: sorted({r.seed for r in rows}) for method, rows in _by_method(kept).items()}
    most = max(map(len, seeds.values()))
    columns = len(_columns(kept))
    thin = [
        f"{_title(method)} {len(rows)}"
        for method, rows in _by_method(kept).items()
        if len(rows) < most * columns
    ]
    lines = [
        f"{len(kept.results)} runs: {len(seeds)} methods, {columns} columns, up to {most} seeds.",
        f"Machines: {'; '.join(sorted({r.machine for r in kept.results}))}.",
    ]
    if thin:
        lines.append(f"Not all cells are run yet ({most * columns} a method): {', '.join(thin)}.")
    return "\n".join(lines)


def _by_method(kept: KeptResults) -> dict[str, list[KeptResult]]:
    found: dict[str, list[KeptResult]] = {}
    for result in kept.results:
        found.setdefault(result.method, []).append(result)
    return found


def _accuracy(kept: KeptResults) -> str:
    columns = _columns(kept)
    by_rule = {rule: kept.accuracies(rule) for rule in RULES}
    inside = kept.accuracies(TAIL_MEAN, ID_TEST)
    rows = []
    for method in _ranked(kept):
        means = [average_over_columns(by_rule[r].get(method, {}), columns) for r in RULES]
        gain = paired_margin(by_rule[TAIL_MEAN].get(method, {}), by_rule[FINAL].get(method, {}))
        moved = [
            _mean(r.numbers.get(f"movement_{weights}") for r in _by_method(kept)[method])
            for weights in ("last", "tail")
        ]
        rows.append(
            [
                _title(method),
                *map(_spread, means),
                _margin(gain),
                *(_percent(value) for value in moved),
                _spread(average_over_columns(inside.get(method, {}), columns)),
            ]
        )
    heads = [
        "method",
        *(rule.name.lower() for rule in RULES),
        "tail minus final",
        "movement, last",
        "movement, tail",
        "in-domain test, tail",
    ]
    return (
        "Accuracy on the unseen domain, average over the columns, percent, mean ± standard "
        "deviation over the seeds that have every column. *Tail minus final* is paired by column "
        "and seed, with its 95 % interval. *Movement*: mean change between neighbouring rounds of "
        "the second half.\n\n" + _markdown(heads, rows)
    )


def _by_column(kept: KeptResults) -> str:
    columns, found = _columns(kept), kept.accuracies(TAIL_MEAN)
    rows = [
        [
            _title(method),
            *(
                _spread(spread(v for (c, _), v in found[method].items() if c == column))
                for column in columns
            ),
        ]
        for method in _ranked(kept)
    ]
    return "By column, mean of the tail:\n\n" + _markdown(["method", *columns], rows)


def _margins(kept: KeptResults) -> str:
    rows = []
    best = _ranked(kept)[0]
    for method in _ranked(kept)[1:]:
        cells = []
        for rule in (FINAL, TAIL_MEAN):
            found = kept.accuracies(rule)
            cells.append(_margin(paired_margin(found[best], found[method])))
        rows.append([_title(method), *cells])
    return f"{_title(best)} minus each other method, paired by column and seed:\n\n" + _markdown(
        ["method", "final round", "mean of the tail"], rows
    )


def _explained(kept: KeptResults) -> str:
    """How much of each method's lead over plain averaging the mean of the tail explains."""
    final, tail = kept.accuracies(FINAL), kept.accuracies(TAIL_MEAN)
    if BASELINE not in final:
        return f"Without {_title(BASELINE)} nobody's lead can be explained."
    rows = [
        [
            _title(method),
            _margin(paired_margin(final[method], final[BASELINE])),
            _margin(paired_margin(final[method], tail[BASELINE])),
            _margin(paired_margin(tail[method], tail[BASELINE])),
        ]
        for method in _ranked(kept)
        if method != BASELINE
    ]
    name = _title(BASELINE)
    heads = ["method", "both final", f"{name} with its tail", "both with their tails"]
    return (
        f"Lead over {name}, paired by column and seed: as tables have it, with both models of the "
        f"last round; what is left of it when only {name} serves its tail; and when both do.\n\n"
        + _markdown(heads, rows)
    )


def _costs(kept: KeptResults) -> str:
    rows = []
    found = _by_method(kept)
    base = found.get(BASELINE, next(iter(found.values())))
    for method in _ranked(kept):
        shares = [
            _ratio(
                _mean(r.numbers.get(name) for r in found[method]),
                _mean(r.numbers.get(name) for r in base),
            )
            for name in ("bytes", "seconds")
        ]
        rows.append([_title(method), *shares])
    return (
        "What a round costs, as a multiple of FedAvg's. Seconds are of processes that shared their "
        "machine with others.\n\n" + _markdown(["method", "bytes", "seconds"], rows)
    )


def _ranked(kept: KeptResults) -> list[str]:
    """The methods, best mean of the tail first."""
    found = kept.accuracies(TAIL_MEAN)
    common = set.intersection(*(set(values) for values in found.values()))

    def mean(values: Accuracies) -> float:
        return sum(values[key] for key in common) / max(1, len(common))

    return sorted(found, key=lambda method: -mean(found[method]))


def _mean(values: Iterable[float | None]) -> float | None:
    known = spread(value for value in values if value is not None)
    return None if known is None else known.mean


def _ratio(ours: float | None, theirs: float | None) -> str:
    return f"{ours / theirs:.2f}" if ours is not None and theirs else "-"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _spread(found: Spread | None) -> str:
    if found is None:
        return "-"
    deviation = "" if found.deviation is None else f" ± {100 * found.deviation:.1f}"
    return f"{100 * found.mean:.1f}{deviation}"


def _margin(found: Margin | None) -> str:
    if found is None:
        return "-"
    if found.low is None or found.high is None:
        return f"{100 * found.mean:+.1f} ({found.why_no_interval})"
    return f"{100 * found.mean:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def search_table(kept: KeptResults) -> str:
    """Returns the table of a search: held-out validation after the final round, as Markdown."""
    columns, found = _columns(kept), kept.accuracies(FINAL, VAL)
    rows = [
        [
            _title(method),
            *(
                _spread(spread(v for (c, _), v in values.items() if c == column))
                for column in columns
            ),
            _spread(average_over_columns(values, columns)),
        ]
        for method, values in sorted(
            found.items(), key=lambda item: -sum(item[1].values()) / len(item[1])
        )
    ]
    heads = ["candidate", *(f"tested on {c}" for c in columns), "average"]
    return _markdown(heads, rows)


def remade(page: str, kept: KeptResults) -> str:
    """Returns the page with its tables made anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = search_table(kept) if SEARCH in page else tables(kept)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def read(files: Sequence[Path]) -> KeptResults:
    """Returns the results of all files, in their order."""
    results = [result for file in files for result in KeptResults.read(file).results]
    return KeptResults(files[0], results)


def main() -> None:
    """Rewrites the page named last from the results named before it."""
    *files, page = map(Path, sys.argv[1:])
    page.write_text(remade(page.read_text("utf-8"), read(files)), "utf-8")


if __name__ == "__main__":
    main()
