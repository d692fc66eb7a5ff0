"""The page of one run."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from feddg.report import charts
from feddg.report.accuracy_section import (
    final_table,
    has_long_splits,
    held_out_accuracy,
    rounds_text,
)
from feddg.report.adaptation_section import adaptation_section
from feddg.report.analyses_section import analyses_sections
from feddg.report.blocks import (
    Block,
    Cell,
    Code,
    Column,
    Fact,
    Facts,
    Fold,
    Gallery,
    Page,
    Pair,
    Prose,
    Section,
    Table,
)
from feddg.report.cost_section import cost_of, cost_of_runs, time_shares
from feddg.report.groups_section import groups_table
from feddg.report.ledger_section import ledger_sentences, ledger_table
from feddg.report.settings_section import mapping_table
from feddg.report.wording import (
    counted,
    duration,
    listed,
    number,
    percent_sign,
    readable,
    size,
    spelled,
)
from feddg.rows import ID_TEST, ID_VAL, TEST, BadImageRow, EvaluationRow
from feddg.runs.reading import RunRecord
from feddg.runs.selection_rules import FINAL, final_round

MOST_LISTED = 50
MOST_CONFUSIONS = 3


def run_page(run: RunRecord) -> Page:
    """Everything about one run."""
    return Page(
        title=f"{spelled(run.method)}{tested_on(run)}",
        lead=result_sentence(run),
        tags=[run.name, status_text(run)],
        opening=[*notices(run), key_facts(run)],
        sections=run_sections(run),
    )


def run_sections(run: RunRecord, with_pictures: bool = True) -> list[Section]:
    """The sections of a run; those about things it did not record are left out."""
    sections = [
        _accuracy_section(run),
        _confusion_section(run),
        pictures_section(run) if with_pictures else None,
        adaptation_section(run),
        *analyses_sections(run),
        _clients_section(run),
        _loss_section(run),
        _ledger_section(run),
        _cost_section(run),
        _details_section(run),
    ]
    return [section for section in sections if section is not None and section.blocks]


# --- headline -----------------------------------------------------------------------------------


def tested_on(run: RunRecord) -> str:
    """``, tested on photo``: the end of a heading, empty when no domain is held out."""
    names = [readable(name) for name in run.held_out(TEST)]
    whose = listed(names) if len(names) <= 3 else f"{len(names)} held-out domains"
    return f", tested on {whose}" if names else ""


def result_sentence(run: RunRecord) -> str:
    """The result in plain words."""
    accuracy = held_out_accuracy(run, FINAL)
    if accuracy is None:
        return "The held-out test domain has not been evaluated yet."
    round_ = final_round(run.evaluations)
    when = "before any training" if round_ == 0 else f"after {counted(round_ or 0, 'round')}"
    held_out = [readable(name) for name in run.held_out(TEST)]
    whose = listed(held_out) if len(held_out) <= 3 else f"{len(held_out)} held-out domains"
    return (
        f"{when[0].upper()}{when[1:]}, the shared model recognised {percent_sign(accuracy)} of "
        f"the images of {whose}, which no client trained on{_guessing(run)}."
    )


def _guessing(run: RunRecord) -> str:
    classes = len(run.clients.classes) if run.clients else 0
    return f" (guessing among {classes} classes: {percent_sign(1 / classes)})" if classes else ""


def status_text(run: RunRecord) -> str:
    """The status in a few words."""
    if run.status == "completed":
        return f"completed, {counted(run.rounds_done, 'round')}"
    return f"{run.status}, {rounds_text(run)} rounds"


def notices(run: RunRecord) -> Iterator[Prose]:
    """What to know before trusting the numbers: a run that is unfinished, interrupted or failed."""
    if run.status == "completed":
        return
    words = {
        "unfinished": "This run has not ended: it is still going on, or it was cut off.",
        "interrupted": "This run was interrupted.",
        "failed": f"This run failed: {run.error or 'no reason was recorded'}",
    }
    yield Prose(
        f"{words.get(run.status, f'The status of this run is {run.status}.')} The page shows "
        f"{rounds_text(run)} rounds; “final round” means the last one evaluated so far.",
        notice=True,
    )


def key_facts(run: RunRecord) -> Facts:
    """The numbers a reader looks for first."""
    last = final_round(run.evaluations)
    accuracy = held_out_accuracy(run, FINAL)
    in_domain = run.evaluations.accuracy(last, ID_TEST)
    split = "test" if in_domain is not None else "validation"
    in_domain = in_domain if in_domain is not None else run.evaluations.accuracy(last, ID_VAL)
    cost = cost_of(run)
    facts = [
        Fact("Held-out test", percent_sign(accuracy), "correct, final round"),
        Fact(f"In-domain {split}", percent_sign(in_domain), "correct, final round"),
        *_federation_facts(run),
        Fact("Time", duration(cost.total_seconds), f"{number(cost.images_per_second)} images/s"),
        Fact("Sent by a client", size(cost.bytes.get("up_per_client_round")), "per round"),
    ]
    return Facts(facts)


def _federation_facts(run: RunRecord) -> Iterator[Fact]:
    settings = run.experiment.get("clients") or {}
    total = len(run.clients.clients) if run.clients else settings.get("number")
    per_round = settings.get("per_round") or total
    if total is not None:
        yield Fact("Clients", number(total), f"{number(per_round)} in each round")
    model = run.experiment.get("model") or {}
    if model.get("backbone"):
        weights = Path(str(model.get("weights") or "none")).name
        yield Fact("Model", str(model["backbone"]), f"starting weights: {weights}")


# --- sections -----------------------------------------------------------------------------------


def _accuracy_section(run: RunRecord) -> Section | None:
    if not run.evaluations.rounds:
        return None
    blocks: list[Block] = [charts.accuracy_curves(run), final_table(run)]
    if has_long_splits(run.evaluations):
        blocks.append(Fold("Every domain", [final_table(run, every_domain=True)]))
    return Section("Accuracy", blocks)


def _confusion_section(run: RunRecord) -> Section | None:
    last = final_round(run.evaluations)
    rows = run.evaluations.at(last, TEST) if last is not None else []
    rows = [row for row in rows if row.confusion]
    if not rows or run.clients is None:
        return None
    classes = run.clients.classes
    blocks: list[Block] = []
    for counts, name in _confusions(rows):
        caption = (
            f"Images of {name}: each row is a true class, each column what the model took it for, "
            "in percent of the row. A perfect model fills the diagonal."
        )
        matrix = charts.confusion_matrix(counts, classes, caption)
        blocks.append(Pair(matrix, charts.class_accuracy(counts, classes)))
    return Section("Mistakes by class", blocks)


def _confusions(rows: Sequence[EvaluationRow]) -> list[tuple[charts.Counts, str]]:
    counts = [np.array(row.confusion, dtype=np.float64) for row in rows]
    if len(rows) > MOST_CONFUSIONS:
        return [(np.sum(counts, axis=0), f"all {len(rows)} held-out test domains")]
    return [(count, readable(row.domain)) for count, row in zip(counts, rows)]


def pictures_section(*runs: RunRecord) -> Section | None:
    """The pictures the runs drew."""
    pictures = [picture for run in runs for picture in run.pictures()]
    return Section("Pictures", [Gallery(pictures)]) if pictures else None


def _clients_section(run: RunRecord) -> Section | None:
    clients = run.clients
    if clients is None or not clients.clients:
        return None
    sizes = sorted(sum(client.domains) for client in clients.clients)
    text = (
        f"{counted(len(sizes), 'client')} hold {counted(sum(sizes), 'training image')}: "
        f"{number(sizes[0])} the smallest, {number(sizes[len(sizes) // 2])} the median, "
        f"{number(sizes[-1])} the largest."
    )
    blocks: list[Block] = [Prose(text), charts.client_heat_map(clients, "domains")]
    if (run.experiment.get("clients") or {}).get("alpha") is not None:
        blocks.append(charts.client_heat_map(clients, "classes"))
    if clients.bad_images:
        blocks.append(_bad_images(clients.bad_images))
    return Section("Who holds what", blocks)


def _bad_images(images: Sequence[BadImageRow]) -> Fold:
    rows = [[Cell(image.path), Cell(image.reason)] for image in images[:MOST_LISTED]]
    columns = [Column("File", numeric=False), Column("Reason", numeric=False)]
    title = f"{counted(len(images), 'image')} could not be used"
    return Fold(title, [Table(columns, rows, _cut_note(len(images)))])


def _cut_note(total: int) -> str:
    return f"The first {MOST_LISTED} of {number(total)}." if total > MOST_LISTED else ""


def _loss_section(run: RunRecord) -> Section | None:
    blocks: list[Block] = []
    if (chart := charts.loss_curves(run.metrics.rounds)) is not None:
        blocks.append(chart)
    refused = [
        [Cell(number(row.round)), Cell(run.client_name(entry.client)), Cell(entry.reason)]
        for row in run.metrics.rounds
        for entry in row.refused
    ]
    if refused:
        columns = [Column(name, numeric=False) for name in ("Round", "Client", "Reason")]
        table = Table(columns, refused[:MOST_LISTED], _cut_note(len(refused)))
        blocks.append(Fold(f"{counted(len(refused), 'update')} refused by the server", [table]))
    return Section("Loss", blocks)


def _ledger_section(run: RunRecord) -> Section | None:
    ledger = run.ledger
    if not ledger.messages:
        return None
    return Section("What left each site", [Prose(ledger_sentences(ledger)), ledger_table(ledger)])


def _cost_section(run: RunRecord) -> Section | None:
    cost = cost_of(run)
    if not cost.total_seconds:
        return None
    return Section("Cost", [time_shares(cost), cost_of_runs([run], ["This run"])])


def _details_section(run: RunRecord) -> Section:
    blocks: list[Block] = []
    setup = run.metrics.setup
    if setup is not None and (groups := groups_table(run, setup)) is not None:
        blocks.append(Fold("Groups of clients before training", [groups]))
    if run.environment:
        environment = mapping_table(run.environment, ("Name", "Value"))
        blocks.append(Fold("Environment", [environment]))
    blocks.append(Fold("Experiment (experiment.yaml)", [Code(run.experiment_text)]))
    return Section("Details", blocks)
