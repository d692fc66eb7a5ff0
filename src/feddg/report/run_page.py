"""The page of one run."""

from collections.abc import Sequence

import numpy as np

from feddg.records import TEST, EvaluationRow
from feddg.report.blocks import (
    Block,
    Cell,
    Code,
    Column,
    Fold,
    Gallery,
    Page,
    Pair,
    Section,
    Table,
    glossary,
)
from feddg.report.charts import (
    Counts,
    accuracy_curves,
    class_accuracy,
    confusion_matrix,
    loss_curves,
)
from feddg.report.leaks import leaks_section
from feddg.report.sections import (
    MOST_LISTED,
    adaptation_section,
    analyses_sections,
    class_table,
    cost_of,
    cut_note,
    data_tags,
    final_table,
    groups_table,
    has_long_splits,
    holdings_section,
    key_facts,
    mapping_table,
    metrics_section,
    notices,
    on_data,
    result_sentence,
    run_cost_table,
    run_steps,
    status_text,
    tested_on,
    time_shares,
)
from feddg.report.text import counted, number, readable, spelled
from feddg.runs.reading import RunRecord, final_round

MOST_CONFUSIONS = 3


def run_page(run: RunRecord) -> Page:
    """Everything about one run."""
    return Page(
        title=f"{spelled(run.method)}{on_data([run])}{tested_on(run)}",
        lead=result_sentence(run),
        tags=[run.name, status_text(run), *data_tags([run])],
        opening=[*notices(run), key_facts(run)],
        sections=[*run_sections(run), *run_steps(run), glossary()],
    )


def run_sections(run: RunRecord) -> list[Section]:
    """The sections of a run; those about things it did not record are left out."""
    sections = [
        _accuracy_section(run),
        metrics_section(run),
        _confusion_section(run),
        _pictures_section(run),
        adaptation_section(run),
        *analyses_sections(run),
        holdings_section(run),
        _loss_section(run),
        leaks_section(run),
        _cost_section(run),
        _details_section(run),
    ]
    return [section for section in sections if section is not None and section.blocks]


# --- sections -----------------------------------------------------------------------------------


def _accuracy_section(run: RunRecord) -> Section | None:
    if not run.evaluations.rounds:
        return None
    blocks: list[Block] = [accuracy_curves(run), final_table(run)]
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
        matrix = confusion_matrix(counts, classes, caption)
        blocks.append(Pair(matrix, class_accuracy(counts, classes)))
        blocks.append(class_table(counts, classes, name))
    return Section("Mistakes by class", blocks)


def _confusions(rows: Sequence[EvaluationRow]) -> list[tuple[Counts, str]]:
    counts = [np.array(row.confusion, dtype=np.float64) for row in rows]
    if len(rows) > MOST_CONFUSIONS:
        return [(np.sum(counts, axis=0), f"all {len(rows)} held-out test domains")]
    return [(count, readable(row.domain)) for count, row in zip(counts, rows)]


def _pictures_section(run: RunRecord) -> Section | None:
    pictures = run.pictures()
    return Section("Pictures", [Gallery(pictures)]) if pictures else None


def _loss_section(run: RunRecord) -> Section | None:
    blocks: list[Block] = []
    if (chart := loss_curves(run.metrics.rounds)) is not None:
        blocks.append(chart)
    refused = [
        [Cell(number(row.round)), Cell(run.client_name(entry.client)), Cell(entry.reason)]
        for row in run.metrics.rounds
        for entry in row.refused
    ]
    if refused:
        columns = [Column(name, numeric=False) for name in ("Round", "Client", "Reason")]
        table = Table(columns, refused[:MOST_LISTED], cut_note(len(refused)))
        blocks.append(Fold(f"{counted(len(refused), 'update')} refused by the server", [table]))
    return Section("Loss", blocks)


def _cost_section(run: RunRecord) -> Section | None:
    cost = cost_of(run)
    if not cost.total_seconds:
        return None
    return Section("Cost", [time_shares(cost), run_cost_table(run)])


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
