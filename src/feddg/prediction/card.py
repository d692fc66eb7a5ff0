"""Model cards: what a model was trained on, how good it is, and what it is for."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData

from feddg.data.data_set import DATA_SETS
from feddg.models.backbones import timm_name
from feddg.prediction.model_file import OWN_WAY, ModelDescription
from feddg.prediction.travel import new_site
from feddg.records import TEST, VAL, NumberRow
from feddg.runs.diagnostics import split_accuracy
from feddg.runs.intervals import wilson
from feddg.runs.reading import LedgerRecord, Run, read_run
from feddg.runs.table import SELECTION_RULES, is_same_model
from feddg.settings import IMAGENET, grouped
from feddg.text import templates_of


def model_card(run: Path | str, about: ModelDescription) -> str:
    """Returns a model card in Markdown, with front matter for Hugging Face.

    It names domains, classes and counts, but no files of training images.

    Args:
        run: the run folder.
        about: the description of the model.

    Raises:
        RunError: the folder is not a run folder.
    """
    record = read_run(Path(run))
    measured = record.table.where(
        weights=SELECTION_RULES.find(about.model).weights, round=about.round
    )
    tested, others = (measured.where(split=split, metric="accuracy").rows for split in (TEST, VAL))
    weights = str((record.settings.get("model") or {}).get("weights") or "none")
    license = weights_license(about.backbone) if weights == IMAGENET else None
    clients = record.remaining
    rows = clients.clients if clients else ()
    domains = [sum(counts) for counts in zip(*(client.domains for client in rows))]
    classes = [sum(counts) for counts in zip(*(client.classes for client in rows))]
    details, plain = record.details, about.adaptation in (None, OWN_WAY)
    own = is_same_model(details, about.model, about.round)
    templates = templates_of("feddg.prediction")
    templates.filters |= {"cell": _cell, "percent": "{:.1%}".format}
    return templates.get_template("model_card.md.j2").render(
        record=record,
        about=about,
        front_matter=_front_matter(record, about, tested, license),
        own_way=OWN_WAY,
        clients=rows,
        domains=list(zip(clients.domains if clients else (), domains)),
        classes=list(zip(clients.classes if clients else (), classes)),
        tested=tested,
        rows=[(row, wilson(row.value, row.effective)) for row in [*tested, *others]],
        mean=split_accuracy(measured, TEST),
        unseen=not any(record.trained_on(row.domain) for row in [*tested, *others]),
        messages=_sent(record.ledger),
        new_site=new_site(record, measured),
        weights=weights,
        license=license,
        releases=list(record.privacy.values()),
        decision=details.decision,
        decided=own and plain,
        subgroups=details.subgroups if own else [],
        forgotten=record.forgotten,
    )


def _front_matter(
    record: Run, about: ModelDescription, tested: Sequence[NumberRow], license: str | None
) -> str:
    definition = DATA_SETS.get(str((record.settings.get("data") or {}).get("source")))
    mirror = definition and definition.publication and definition.publication.mirror
    task = f"{'image' if about.features is None else 'tabular'}-classification"
    data = ModelCardData(
        license=license or "other",
        library_name={"onnx": "onnx", "torch": "pytorch"}.get(about.format, "feddg"),
        pipeline_tag=task,
        tags=["federated-learning", "domain-generalization", record.method],
        datasets=[mirror.name] if mirror else None,
        metrics=["accuracy"] if tested else None,
        model_name=record.name if tested else None,
        eval_results=[
            # The hub tells data sets apart by type and configuration, not by name.
            EvalResult(
                task,
                "held-out-domain",
                row.domain,
                "accuracy",
                round(row.value, 4),
                dataset_config=row.domain,
            )
            for row in tested
        ]
        or None,
    )
    return f"{data.to_yaml()}\n"


def _sent(ledger: LedgerRecord) -> list[tuple[str, list[int], list[str]]]:
    """Returns the messages that left the sites: purposes, bytes of each, names of tensors."""
    sent = grouped((row.purpose, row) for row in ledger.messages if row.direction == "up")
    layouts = {id: [tensor.name for tensor in row.tensors] for id, row in ledger.layouts.items()}
    return [
        (
            purpose,
            [row.bytes for row in rows],
            sorted({name for row in rows for name in layouts.get(row.layout, ())}),
        )
        for purpose, rows in sent.items()
    ]


def _cell(text: str) -> str:
    """Returns text escaped for a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


def weights_license(backbone: str) -> str | None:
    """Returns timm's licence tag of a backbone's ImageNet weights, such as ``apache-2.0``.

    None if unknown: for torchvision's networks, and networks without such weights.
    """
    name = timm_name(backbone)
    if name is None:
        return None
    from timm.models import get_pretrained_cfg

    config = get_pretrained_cfg(name)
    return None if config is None else config.license or None
