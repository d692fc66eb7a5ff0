"""The top of a run's page: its result in plain words, what speaks against it, its key numbers."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from feddg.records import ID_TEST, ID_VAL, TEST
from feddg.report.accuracy_section import held_out_accuracy, rounds_text
from feddg.report.blocks import Fact, Facts, Prose
from feddg.report.cost_section import cost_of
from feddg.report.finding_words import (
    beside_words,
    finding_sentence,
    headline_words,
    interval_words,
)
from feddg.report.wording import (
    counted,
    duration,
    listed,
    number,
    percent_sign,
    readable,
    shortened,
    size,
)
from feddg.runs.findings import Finding, Standing, findings, standing
from feddg.runs.reading import FINAL, RunRecord, final_round


def tested_on(run: RunRecord) -> str:
    """``, tested on photo``: the end of a heading, empty when no domain is held out."""
    whose = _held_out_words(run)
    return f", tested on {whose}" if whose else ""


def _held_out_words(run: RunRecord) -> str:
    names = [readable(name) for name in run.held_out(TEST)]
    return listed(names) if len(names) <= 3 else f"{len(names)} held-out domains"


def on_data(runs: Sequence[RunRecord]) -> str:
    """`` on pacs``: the middle of a heading; empty where the runs' data differ or are unknown."""
    names = {_data_name(run) for run in runs}
    name = names.pop() if len(names) == 1 else ""
    return f" on {name}" if name else ""


def _data_name(run: RunRecord) -> str:
    """The data set, or the folder of images."""
    data = run.experiment.get("data") or {}
    source, root = str(data.get("source") or ""), data.get("root")
    return Path(str(root)).name if source == "folder" and root else readable(source)


def data_tags(runs: Sequence[RunRecord]) -> list[str]:
    """Size of the images and the day of the runs, as far as they are recorded."""
    sizes = {(run.experiment.get("data") or {}).get("image_size") for run in runs} - {None}
    tags = [f"{sizes.pop()} pixels a side"] if len(sizes) == 1 else []
    days = sorted(day for run in runs if (day := _day(run)) is not None)
    if days:
        first, last = (f"{day.day} {day:%B %Y}" for day in (days[0], days[-1]))
        tags.append(first if first == last else f"{first} to {last}")
    return tags


def _day(run: RunRecord) -> datetime | None:
    try:
        return datetime.fromisoformat(str(run.environment.get("started")))
    except ValueError:
        return None


def found_in(run: RunRecord) -> list[Finding]:
    """What must be said beside the accuracy of the model that the run serves."""
    rule = run.served
    return findings(run.evaluations, rule.choose(run.evaluations), weights=rule.weights)


def standing_of(run: RunRecord) -> Standing | None:
    """How the held-out test domains stood under the model that the run serves."""
    rule = run.served
    return standing(run.evaluations.of(rule.weights), rule.choose(run.evaluations))


def result_sentence(run: RunRecord) -> str:
    """The result in plain words, with what an accuracy must be read beside."""
    accuracy = held_out_accuracy(run, run.served)
    if accuracy is None:
        return "The held-out test domain has not been evaluated yet."
    round_ = final_round(run.evaluations)
    when = "before any training" if round_ == 0 else f"after {counted(round_ or 0, 'round')}"
    at = standing_of(run)
    interval = f" (95 % interval {interval_words(at.accuracy)})" if at else ""
    start = headline_words(found_in(run))
    when = when if start else f"{when[0].upper()}{when[1:]}"
    sentence = (
        f"{start}{when}, {_model_words(run)} recognised {percent_sign(accuracy)}{interval} of "
        f"the images of {_held_out_words(run)}, which no client trained on."
    )
    return " ".join(part for part in (sentence, beside_words(at) if at else "") if part)


def _model_words(run: RunRecord) -> str:
    rule = run.served
    return "the shared model" if rule is FINAL else f"the shared model ({rule.name.lower()})"


def status_text(run: RunRecord) -> str:
    """The status in a few words."""
    if run.status == "completed":
        return f"completed, {counted(run.rounds_done, 'round')}"
    return f"{run.status}, {rounds_text(run)} rounds"


def notices(run: RunRecord) -> Iterator[Prose]:
    """What to know before trusting the numbers: how the run ended, and what was found in them."""
    if run.status != "completed":
        yield _unfinished(run)
    for sentence in finding_sentences(run):
        yield Prose(sentence, notice=True)


def finding_sentences(run: RunRecord) -> list[str]:
    """The findings as sentences; a run that has not ended is not said to have stopped early."""
    classes = run.clients.classes if run.clients else ()
    return [finding_sentence(finding, classes) for finding in found_in(run)]


def _unfinished(run: RunRecord) -> Prose:
    words = {
        "unfinished": "This run has not ended: it is still going on, or it was cut off.",
        "interrupted": "This run was interrupted.",
        "failed": f"This run failed: {run.error or 'no reason was recorded'}",
    }
    return Prose(
        f"{words.get(run.status, f'The status of this run is {run.status}.')} The page shows "
        f"{rounds_text(run)} rounds; “final round” means the last one evaluated so far.",
        notice=True,
    )


def key_facts(run: RunRecord) -> Facts:
    """The numbers a reader looks for first."""
    rule = run.served
    last = rule.choose(run.evaluations)
    in_domain = rule.measure(run.evaluations, last, ID_TEST)
    split = "test" if in_domain is not None else "validation"
    in_domain = in_domain if in_domain is not None else rule.measure(run.evaluations, last, ID_VAL)
    cost = cost_of(run)
    facts = [
        *_accuracy_facts(run),
        Fact(f"In-domain {split}", percent_sign(in_domain), f"correct, {rule.name.lower()}"),
        *_federation_facts(run),
        Fact("Time", duration(cost.total_seconds), f"{number(cost.images_per_second)} images/s"),
        Fact("Sent by a client", size(cost.bytes.get("up_per_client_round")), "per round"),
    ]
    return Facts(facts)


def _accuracy_facts(run: RunRecord) -> Iterator[Fact]:
    at = standing_of(run)
    rule = run.served.name.lower()
    note = f"95 % interval {interval_words(at.accuracy)}" if at else f"correct, {rule}"
    accuracy = percent_sign(held_out_accuracy(run, run.served))
    yield Fact("Held-out test", accuracy, note, accent=True)
    if at is None:
        return
    if at.balanced is not None:
        chance = f"guessing: {percent_sign(at.chance)}" if at.chance else "mean over classes"
        yield Fact("Balanced accuracy", percent_sign(at.balanced), chance)
    if at.constant is not None:
        note = "share of the images; what always naming it reaches"
        yield Fact("Largest class", percent_sign(at.constant), note)
    if at.most_predicted is not None and at.true is not None:
        class_id, share = at.most_predicted
        classes = run.clients.classes if run.clients else []
        name = shortened(readable(classes[class_id])) if class_id < len(classes) else "one class"
        note = f"“{name}”, {percent_sign(at.true[class_id])} of the images"
        yield Fact("Commonest prediction", percent_sign(share), note)


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
