"""The findings of `feddg data inspect`: counts, bad files, and the partition over clients."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from feddg.data.data_set import DATA_SETS, load_images_of
from feddg.data.inspection import SAMPLE, inspect, stored_images
from feddg.data.partition import Skew, in_words, skew_of
from feddg.data.splits import ROLES
from feddg.diagnostics import Diagnostic, Progress, logged_once, silent
from feddg.experiment import Experiment, expand
from feddg.records import ClientsTable
from feddg.runs.prepare import (
    deal,
    is_split,
    load_table,
    near_copy_diagnostics,
    split_diagnostics,
    table_diagnostics,
)
from feddg.settings import merge
from feddg.storage import cache_folder
from feddg.text import counted, print_line

SHOWN_CLIENTS, MOST_MARKS = 20, 40
SHADES = " ░▒▓█"
SHOWN_DOMAINS, SHOWN_FILES = 20, 20
STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def skew_between(clients: ClientsTable) -> Skew:
    """Returns how much clients differ."""
    return skew_of(_counts(clients, "domains"), _counts(clients, "classes"))


def client_data_table(clients: ClientsTable) -> Table:
    """Returns a table of clients: images, main domain, and marks for each domain and class.

    A mark stands for a domain or class (or several neighbours), from blank for none of the client's
    images to full for all of them. If there are many clients, evenly spaced ones are shown.
    """
    domains, classes = _counts(clients, "domains"), _counts(clients, "classes")
    trained = numpy.flatnonzero(domains.sum(axis=0))
    domains = domains[:, trained]
    names = [clients.domains[index] for index in trained.tolist()]
    count = len(clients.clients)
    chosen = numpy.unique(numpy.linspace(0, count - 1, min(count, SHOWN_CLIENTS)).astype(int))
    some = f", {len(chosen)} of them" if len(chosen) < count else ""
    marks = (f"domains ({len(names)})", f"classes ({len(clients.classes)})")
    heads = ("client", Column("images", justify="right"), "main domain")
    title = f"{count} clients{some}: darker marks for larger shares of a client"
    table = Table(*heads, *(Column(name, no_wrap=True) for name in marks), title=title)
    for index in chosen.tolist():
        counts, size = domains[index], int(domains[index].sum())
        main = int(counts.argmax())
        table.add_row(
            escape(clients.clients[index].name),
            f"{size:,}",
            escape(f"{names[main]} {counts[main] / size:.0%}") if size else "-",
            _marks(counts),
            _marks(classes[index]),
        )
    return table


def _counts(clients: ClientsTable, by: str) -> numpy.ndarray:
    return numpy.array([getattr(client, by) for client in clients.clients], dtype=numpy.int64)


def _marks(counts: numpy.ndarray) -> str:
    """Returns one mark per count, or per group of neighbours if there are many."""
    parts = numpy.array_split(counts, min(len(counts), MOST_MARKS))
    sums = numpy.array([part.sum() for part in parts], dtype=numpy.float64)
    shares = sums / sums.sum() if sums.any() else sums
    steps = numpy.ceil(shares * (len(SHADES) - 1)).astype(int)
    return "".join(SHADES[step] for step in steps.tolist())


@logged_once()  # it lists the images again
def inspect_data(
    croissant: Path | None = None, *, progress: Progress = silent, **fields: Any
) -> dict[str, Any]:
    """Counts an experiment's images by domain and class, finds bad files, and partitions them.

    Args:
        croissant: file for metadata as Croissant (``.json``), with a table beside it; none by
            default.
        progress: called with the progress.
        **fields: fields of the experiment.
    """
    experiment = Experiment(**merge({"model": {"weights": None}}, expand(fields)))
    if croissant is not None:  # first: what cannot be written is known before all is decoded
        from feddg.data.croissant import write_croissant

        definition = DATA_SETS.find(experiment.data.source)
        write_croissant(load_images_of(experiment.data), definition, croissant)
    return inspect_experiment(experiment, progress)


def inspect_experiment(experiment: Experiment, progress: Progress) -> dict[str, object]:
    """Decodes the experiment's images and returns the findings, ready for JSON.

    Args:
        experiment: the experiment.
        progress: called with the progress.

    Returns:
        What :func:`feddg.data.inspection.inspect` returns, ``bad_images``, ``diagnostics``
        (warnings and notes, see :class:`feddg.diagnostics.Diagnostic`), ``stored`` (by domain, see
        :func:`feddg.data.inspection.stored_images`), ``ignored`` (files by kind) and, when it is
        known how images are split, ``splits`` (images per role), ``clients`` (as in a run's
        ``clients.json``) and ``skew`` (see :class:`feddg.data.partition.Skew`).

    Raises:
        DataError: there is nothing to inspect.
    """
    loaded = load_table(experiment, cache_folder(), progress)
    table, bad = loaded.table, loaded.bad
    survey = inspect(table)
    survey["stored"] = stored_images(load_images_of(experiment.data))
    survey["ignored"] = {kind: len(paths) for kind, paths in loaded.ignored.items()}
    diagnostics = table_diagnostics(experiment.data, loaded)
    survey["bad_images"] = [image.model_dump() for image in bad]
    stopped = any(diagnostic.severity == "error" for diagnostic in diagnostics)
    if is_split(experiment, table) and not stopped:
        images = deal(experiment, loaded)
        survey["splits"] = {role: len(getattr(images.splits, role)) for role in ROLES}
        survey["clients"] = [client.model_dump() for client in images.held.clients]
        survey["skew"] = asdict(skew_between(images.held))
        diagnostics += split_diagnostics(experiment, loaded, images)
        diagnostics += near_copy_diagnostics(experiment, images)
    else:
        diagnostics += split_diagnostics(experiment, loaded, None)
    survey["diagnostics"] = [asdict(diagnostic) for diagnostic in diagnostics]
    return survey


def print_inspection(found: dict[str, Any]) -> None:
    """Prints the findings of :func:`inspect_experiment`."""
    console = Console()
    many = len(found["domains"]) > SHOWN_DOMAINS
    console.print(_domains_table(found) if many else _classes_table(found))
    if found["stored"]:
        _print_stored(console, found["stored"])
    _print_bad(console, found["bad_images"])
    if "clients" in found:
        console.print("  ".join(f"{role} {count}" for role, count in found["splits"].items()))
        clients = {name: found[name] for name in ("domains", "classes", "clients")}
        print_clients(console, ClientsTable.model_validate(clients))
    for fields in found["diagnostics"]:
        print_diagnostic(console, Diagnostic(**fields))


def print_diagnostic(console: Console, one: Diagnostic) -> None:
    """Prints a diagnostic: severity, text and advice."""
    console.print(f"[{STYLES[one.severity]}]{one.severity}:[/]", end=" ")
    print_line(console, str(one))


def print_clients(console: Console, clients: ClientsTable) -> None:
    """Prints who holds what, and how much clients differ."""
    console.print(client_data_table(clients))
    for line in in_words(skew_between(clients)):
        print_line(console, line)


def _print_stored(console: Console, stored: dict[str, dict[str, Any]]) -> None:
    looked = sum(counts["sampled"] for counts in stored.values())
    title = f"how they are stored (values: of {looked} images, at most {SAMPLE} a domain)"
    table = Table("domain", "sizes", "kinds", "bits", "values", "mean", title=title)
    for domain, row in stored.items():
        sizes = dict.fromkeys(
            "{} x {}".format(*row[size]) for size in ("smallest", "middle", "largest")
        )
        kinds = ", ".join(f"{mode} {count}" for mode, count in row["modes"].items())
        values = f"{row['low']:g} to {row['high']:g}"
        bits = str(row["bits"]) if row["bits"] else "float"
        table.add_row(escape(domain), ", ".join(sizes), kinds, bits, values, f"{row['mean']:.1f}")
    console.print(table)


def _print_bad(console: Console, bad: list[dict[str, str]]) -> None:
    if bad:
        console.print(
            f"[yellow]{counted(len(bad), 'file')} cannot be used and would be left out:[/]"
        )
    for image in bad[:SHOWN_FILES]:
        console.print(f"  {image['path']}: {image['reason']}", markup=False)
    if len(bad) > SHOWN_FILES:
        console.print(f"  ... and {len(bad) - SHOWN_FILES} more")


def _classes_table(survey: dict[str, Any]) -> Table:
    """Returns a table of images per class and domain."""
    table = Table("class", *map(escape, survey["domains"]), title=f"{survey['images']} images")
    for name in survey["classes"]:
        counts = [survey["counts"][domain][name] for domain in survey["domains"]]
        table.add_row(escape(name), *(str(count) if count else "[red]0[/]" for count in counts))
    table.add_section()
    table.add_row("all", *(str(survey["totals"][domain]) for domain in survey["domains"]))
    return table


def _domains_table(survey: dict[str, Any]) -> Table:
    """Returns a table of the largest and smallest domains, if there are many."""
    totals = sorted(survey["totals"].items(), key=lambda item: -item[1])
    half = SHOWN_DOMAINS // 2
    title = f"{survey['images']} images in {len(totals)} domains: the largest and the smallest"
    table = Table("domain", "images", "classes it has", "its smallest class", title=title)
    for shown in (totals[:half], totals[-half:]):
        for domain, total in shown:
            counts = {name: n for name, n in survey["counts"][domain].items() if n}
            least = min(counts, key=lambda name: counts[name], default=None)
            table.add_row(
                escape(domain),
                str(total),
                f"{len(counts)} of {len(survey['classes'])}",
                "-" if least is None else escape(f"{least} ({counts[least]})"),
            )
        table.add_section()
    return table
