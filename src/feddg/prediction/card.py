"""A model card: what a model was trained on, how good it is, and what it is for."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from feddg.diagnostics import Diagnostic
from feddg.records import TEST, VAL, EvaluationRow
from feddg.runs.diagnostics import split_accuracy, wilson
from feddg.runs.reading import LedgerRecord, RunRecord, find_rule, read_run

TAG = "federated-learning"
"""By which our cards are found, and known."""
OWN_WAY = "the method's own"
"""What a file without a test-time adaptation says of it."""
LICENCES = {
    "none": "The weights were trained from random values. They take the terms of the training "
    "images; fill them in.",
    "imagenet": "Training began from torchvision's ImageNet weights, whose images are for "
    "non-commercial research; with the terms of the training images, they bind these weights too.",
}


def model_card(run: Path | str, metadata: Mapping[str, Any]) -> str:
    """Returns a model card in Markdown, with the front matter that Hugging Face reads.

    It names domains, classes and counts, never a file of the training images.

    Args:
        run: the run folder.
        metadata: what the model's file says about itself.

    Raises:
        RunError: the folder holds no run.
    """
    record = read_run(Path(run))
    parts = [
        _front_matter(record, metadata),
        f"# {record.name}: an image classifier for domains nobody trained on",
        *(f"> **{Diagnostic(**one)}**" for one in metadata.get("diagnostics", ())),
        "\n".join(_introduction(record, metadata)),
        "## Trained on\n\n" + "\n".join(_trained_on(record)),
        "## Results\n\n" + "\n".join(_results(record, metadata)),
        "## What left the sites\n\n" + "\n".join(_what_left(record.ledger)),
        "## Use\n\n" + "\n".join(_use(metadata)),
        "## Limits\n\n" + "\n".join(_limits(record, metadata)),
        "## Licence of the weights\n\n" + _licence(record),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(record: RunRecord, metadata: Mapping[str, Any]) -> str:
    results = [
        {
            "task": {"type": "image-classification"},
            "dataset": {"type": "held-out-domain", "name": row.domain},
            "metrics": [{"type": "accuracy", "value": round(row.accuracy, 4)}],
        }
        for row in _measured(record, metadata, TEST)
    ]
    fields: dict[str, Any] = {
        "license": "other",
        "library_name": {"onnx": "onnx", "torch": "pytorch"}.get(metadata["format"], "feddg"),
        "pipeline_tag": "image-classification",
        "tags": [TAG, "domain-generalization", record.method],
    }
    if results:
        fields["model-index"] = [{"name": record.name, "results": results}]
    return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)}---"


def _introduction(record: RunRecord, metadata: Mapping[str, Any]) -> Iterator[str]:
    classes = metadata["class_names"]
    yield (
        f"A {metadata['backbone']} that tells {len(classes)} classes apart, trained by "
        f"{record.method} over {record.rounds_done} rounds of federated learning: sites kept their "
        "images and sent what is listed below."
    )
    yield ""
    yield f"Classes, in the order of the outputs: {', '.join(map(str, classes))}."


def _trained_on(record: RunRecord) -> Iterator[str]:
    clients = record.clients
    if clients is None:
        yield "The run keeps no counts."
        return
    totals = [
        sum(client.domains[i] for client in clients.clients) for i in range(len(clients.domains))
    ]
    yield from ("| domain | training images |", "|---|---:|")
    for name, count in zip(clients.domains, totals):
        if count:
            yield f"| {_cell(name)} | {count} |"
    yield ""
    per_class = [
        sum(client.classes[i] for client in clients.clients) for i in range(len(clients.classes))
    ]
    listed = ", ".join(f"{name} {count}" for name, count in zip(clients.classes, per_class))
    yield f"Held by {len(clients.clients)} clients. Images of each class: {listed}."


def _results(record: RunRecord, metadata: Mapping[str, Any]) -> Iterator[str]:
    round_ = f"{metadata['round']} (`{metadata['model']}`)"
    rows = [*_measured(record, metadata, TEST), *_measured(record, metadata, VAL)]
    if not rows:
        yield "This model was not measured on a held-out domain: nothing is known about others."
        return
    yield f"Accuracy on domains that no site trained on; the model is that of round {round_}."
    if metadata.get("adaptation") not in (None, OWN_WAY):
        yield "It was measured without the test-time adaptation that this file holds."
    yield ""
    yield from ("| domain | split | images | accuracy | 95 % interval |", "|---|---|---:|---:|---|")
    for row in rows:
        share = wilson(row.accuracy, row.examples)
        yield (
            f"| {_cell(row.domain)} | {row.split} | {row.examples} | {row.accuracy:.1%} | "
            f"{share.low:.1%} to {share.high:.1%} |"
        )
    yield ""
    yield from _mean(record, metadata)
    yield (
        "The interval (Wilson) is about the choice of test images. It does not cover another seed "
        "or another domain."
    )


def _mean(record: RunRecord, metadata: Mapping[str, Any]) -> Iterator[str]:
    """The one number of the model, with its reference values."""
    evaluations = record.evaluations.of(find_rule(metadata["model"]).weights)
    found = split_accuracy(evaluations, metadata["round"], TEST)
    if found is None:
        return
    share = found.accuracy
    text = (
        f"Mean over the test domains: **{share.share:.1%}** (95 %: {share.low:.1%} to "
        f"{share.high:.1%})."
    )
    if found.constant is not None:
        text += (
            f" Always answering the most frequent class would be right for {found.constant:.1%}."
        )
    if found.balanced is not None and found.chance is not None:
        text += (
            f" Balanced accuracy, in which every class counts the same: {found.balanced:.1%} "
            f"(guessing: {found.chance:.1%})."
        )
    yield f"{text}\n"


def _what_left(ledger: LedgerRecord) -> Iterator[str]:
    groups: dict[str, list[int]] = {}
    shapes: dict[str, set[str]] = {}
    for message in ledger.messages:
        if message.direction == "up":
            groups.setdefault(message.purpose, []).append(message.bytes)
            layout = ledger.layouts.get(message.layout)
            names = [tensor.name for tensor in layout.tensors] if layout else []
            shapes.setdefault(message.purpose, set()).update(names)
    if not groups:
        yield "The ledger lists no message from a site."
        return
    yield from ("| message | sent | bytes in all | holds |", "|---|---:|---:|---|")
    for purpose, sizes in groups.items():
        held = sorted(shapes[purpose])
        text = f"{len(held)} tensors" if len(held) > 3 else ", ".join(held) or "numbers only"
        yield f"| {_cell(purpose)} | {len(sizes)} | {sum(sizes)} | {_cell(text)} |"
    yield ""
    yield (
        "The run's ledger lists every tensor of every message. Model updates can leak something of "
        "the images behind them."
    )


def _use(metadata: Mapping[str, Any]) -> Iterator[str]:
    size, resize = metadata["image_size"], metadata["resize"]
    yield f"- Input: {metadata['input']}. Resize first to {size} x {size} (`{resize}`)."
    if metadata.get("bits") or metadata.get("bands") or metadata.get("range") == "percentile":
        yield f"- Files become colours as in training: {_colours(metadata)}."
    if metadata.get("tile"):
        yield (
            f"- Larger images are cut into tiles of {metadata['tile']} pixels first, as in "
            "training; each tile has an answer of its own."
        )
    if metadata["format"] == "run":
        yield "- Labels for images: `feddg predict RUN images/ --out labels.csv`."
        yield "- A page and an interface on this machine: `feddg serve RUN`."
        yield "- A file that needs no feddg: `feddg export RUN --onnx model.onnx`."
    elif "outputs" in metadata:
        yield f"- Outputs: {', '.join(f'`{name}`' for name in metadata['outputs'])}."
    if metadata.get("adaptation"):
        yield f"- Adaptation at test time: {metadata['adaptation']}."
    if metadata.get("energy_threshold") is not None:
        yield (
            f"- Warning light: an `energy` above {metadata['energy_threshold']:.4f} marks an image "
            "as unlike those of training; so it does 5 % of in-domain validation images."
        )
    yield (
        "- Intended for: the classes above, in images like those of the domains above, where a "
        "person can overrule the answer."
    )


def _colours(metadata: Mapping[str, Any]) -> str:
    parts = [f"`data.range: {metadata['range']}`"]
    if metadata["bands"]:
        parts.append(f"`data.bands: {metadata['bands']}`")
    if metadata["bits"]:
        parts.append(f"the training images' values used {metadata['bits']} bits")
    return ", ".join(parts)


def _limits(record: RunRecord, metadata: Mapping[str, Any]) -> Iterator[str]:
    yield "- It always answers with one of its classes, also for images that show none of them."
    yield "- Accuracy in a new domain may be lower than in any of the table: measure it first."
    yield "- Probabilities are not calibrated for domains nobody trained on."
    yield "- The warning light misses some foreign images and reports some familiar ones."
    if own := metadata.get("kept_by_clients"):
        yield (
            f"- Under {record.method} every site keeps {own} of the model's tensors as its own. "
            "This model has their average, for sites that took no part; no site predicted with it."
        )
    if not any(_measured(record, metadata, TEST)):
        yield "- No test domain was held out."


def _licence(record: RunRecord) -> str:
    model = record.experiment.get("model") or {}
    start = str(model.get("weights") or "none")
    return LICENCES.get(
        start,
        "Training began from a weights file of the user's own, whose terms, with those of the "
        "training images, bind these weights; fill them in.",
    )


def _measured(record: RunRecord, metadata: Mapping[str, Any], split: str) -> list[EvaluationRow]:
    """The evaluations of the very model that is described, none where it was not measured."""
    rule = find_rule(metadata["model"])
    return record.evaluations.of(rule.weights).at(metadata["round"], split)


def _cell(text: str) -> str:
    """Returns text that cannot break a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")
