"""The page of one run, section by section."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from feddg.comparison.results import differing
from feddg.data.partition import in_words, skew_of
from feddg.diagnostics import Diagnostic
from feddg.errors import FeddgError
from feddg.evaluation.metrics import OF_A_DECISION
from feddg.experiment import load_experiment
from feddg.prediction.travel import clients_apart, expected_elsewhere, new_site
from feddg.records import ID_TEST, ID_VAL, SPLITS, TEST, AdaptationRow, SummaryFile
from feddg.report import charts
from feddg.report.blocks import (
    Answers,
    Block,
    Code,
    Facts,
    Fold,
    Gallery,
    Page,
    Prose,
    Section,
    Table,
    section_of,
)
from feddg.report.details import decision_section, subgroups_section
from feddg.report.leaks import leaks_section
from feddg.report.text import AGGREGATE_WORDS, interval_words, sentence, spelled, table_from
from feddg.runs.calibration import Estimate
from feddg.runs.diagnostics import (
    CONSTANT_ANSWER,
    DIVERGED,
    FEW,
    LEARNED_NOTHING,
    STILL_RISING,
    about_result,
    about_run,
    accuracy_interval,
    causes_of_failure,
    lower_rate,
    split_accuracy,
)
from feddg.runs.intervals import ShareInterval
from feddg.runs.reading import (
    EXPERIMENT,
    MISTAKE,
    Run,
    flatten,
    going_on,
    is_run,
    read_adapted,
    read_run,
)
from feddg.runs.summary import summarize
from feddg.runs.table import SELECTION_RULES, NumberTable
from feddg.settings import grouped
from feddg.text import command, counted, listed, readable

MOST_DOMAINS = 12
MOST_CONFUSIONS = 3
MOST_LISTED = 50


def run_page(run: Run) -> Page:
    """Everything about one run; sections without recorded data are left out."""
    adapted = read_adapted(run.folder)
    sections = [
        _accuracy_section(run),
        decision_section(run.details, run),
        subgroups_section(run.details, run),
        metrics_section(run),
        _mistakes_section(run),
        _pictures_section(run),
        section_of(
            "Test-time adaptation", adaptation_table(adapted) if adapted else None, folded=True
        ),
        _clients_section(run),
        _loss_section(run),
        leaks_section(run),
        left_out_section(run),
        _cost_section(run),
        _details_section(run),
        run_steps(run),
    ]
    model, answers = model_sentence(run), verdict(run)
    return Page(
        title=f"{spelled(run.method)}{on_data([run])}{tested_on(run)}",
        lead=result_sentence(run),
        tags=[run.name, _status_text(run)],
        opening=[
            *([Answers(answers)] if answers else []),
            *([Prose(model)] if model else []),
            *notices_of(about_run(run)),
            _key_facts(run),
        ],
        sections=[section for section in sections if section is not None],
    )


# The top of the page: the result in plain words, and the numbers a reader looks for first.


def notices_of(found: Sequence[Diagnostic]) -> list[Block]:
    """The gravest in a box, the others folded."""
    boxes: list[Block] = [Prose(str(diagnostic), notice=True) for diagnostic in found[:1]]
    more = [Prose(str(diagnostic)) for diagnostic in found[1:]]
    return [*boxes, Fold(f"{counted(len(more), 'further note')}", more)] if more else boxes


def tested_on(run: Run) -> str:
    """``, tested on photo``: the end of a heading, empty when no domain is held out."""
    domains = _domain_words(run.held_out(TEST))
    return f", tested on {domains}" if domains else ""


def _domain_words(names: Sequence[str]) -> str:
    return listed([*map(readable, names)]) if len(names) <= 3 else f"{len(names)} held-out domains"


def on_data(runs: Sequence[Run]) -> str:
    """`` on pacs``: the middle of a heading; empty if the runs' data differ or are unknown."""
    names = {_data_name(run) for run in runs}
    name = names.pop() if len(names) == 1 else ""
    return f" on {name}" if name else ""


def _data_name(run: Run) -> str:
    """The data set, or the folder of images."""
    data = run.settings.get("data") or {}
    source, root = str(data.get("source") or ""), data.get("root")
    return Path(str(root)).name if source == "folder" and root else readable(source)


def model_sentence(run: Run) -> str:
    """Which model a page's numbers belong to; empty before any evaluation."""
    if run.result.round is None:
        return ""
    name = f"“{run.default_rule.title.lower()}” (round {run.result.round})"
    return sentence("one_model", name=name, why="")


def result_sentence(run: Run) -> str:
    """The result in plain words, with the reference values of its accuracy."""
    if run.accuracy is None:
        if run.table and not run.held_out(TEST):
            return "No domain is held out for testing; the tables show the other images."
        return "The held-out test domain has not been evaluated yet."
    at = split_accuracy(run.result, whole=run.table)
    measured = run.result.where(split=TEST).domains  # an evaluation site may have failed
    return sentence(
        "result",
        run=run,
        warnings="; ".join(one.short for one in about_result(run) if one.severity == "warning"),
        interval=interval_words(at.accuracy) if at else "",
        domains=_domain_words([name for name in run.held_out(TEST) if name in measured]),
        unseen=not any(map(run.trained_on, measured)),
        at=at,
        constant_answer=CONSTANT_ANSWER,
    )


REFERENCES: Final = {"local": "each site alone", "centralised": "all images in one place"}
"""Methods that runs are compared with, and what they stand for."""
FEW_SITES: Final = 5
FAR_BELOW, SCARCE = 0.2, 0.5
"""A class's recall is low this far below the mean; it is rare below this share of mean images."""


def verdict(run: Run) -> list[tuple[str, str]]:
    """The findings about a run in plain words: questions with known answers.

    Whether the federation was worth it, if the reference lines were run beside it; what to expect
    at a new site; the worst class; what would help most.
    """
    rows: list[tuple[str, str]] = []
    accuracy = run.accuracy
    lines = [(REFERENCES[m], v) for m, v in reference_lines(run).items()]
    if accuracy is not None and lines:
        rows.append(("Worth it?", sentence("worth", accuracy=accuracy, others=lines)))
    expected = new_site(run)
    if expected is not None:
        rows.append(("At a new site", str(expected)))
    measured = run.result.where(split=TEST).domains
    for row in expected_elsewhere(run):
        if row.site not in measured:
            text = f"{Estimate(row.value, row.low, row.high)}, if its "
            text += f"{counted(row.images, 'image')} without labels show the model's classes."
            rows.append((f"At {readable(row.site)}", text))
    worst = _worst_class(run)
    if worst is not None:
        rows.append(("Worst class", worst.text))
    if rows and not {diagnostic.code for diagnostic in about_result(run)} & LEARNED_NOTHING:
        help = _what_helps(run, worst, len(expected.accuracies) if expected else 0)
        rows.append(("What would help most", help))
    return rows


def reference_lines(run: Run) -> dict[str, float]:
    """Accuracy on held-out test images of the reference lines in the same folder, by method.

    Only from runs with the same images at the same sites, model, rounds and seed.
    """
    accuracies = {}
    for method in REFERENCES:
        folders = sorted(run.folder.parent.glob(f"{method}-*")) if method != run.method else ()
        for other in map(read_run, filter(is_run, folders)):
            differ = differing([flatten(run.settings), flatten(other.settings)])
            alike = other.method == method and not any(map(_SAME.match, differ))
            if alike and other.status == "completed" and (value := other.accuracy) is not None:
                accuracies[method] = value
    return accuracies


_SAME = re.compile(
    r"(data|hold_out|seed|model\.(backbone|weights)|train\.rounds"
    r"|clients\.(number|partition|heterogeneity|alpha|shards|quantity_alpha))(\.|$)"
)
"""Settings that runs must share to be compared."""


class _WorstClass(NamedTuple):
    """The class with the lowest recall on held-out test images.

    Attributes:
        number: its index among the classes.
        behind: how far its recall is below the mean of all.
        text: a sentence about it.
    """

    number: int
    behind: float
    text: str


def _worst_class(run: Run) -> _WorstClass | None:
    """The worst of the classes with enough images; None if they are alike, or not counted."""
    classes, confusions = _class_names(run), _confusions(run)
    if not classes or len(confusions) < max(1, len(run.result.where(split=TEST).domains)):
        return None
    counts = np.sum([*confusions.values()], axis=0)
    support = counts.sum(1)
    enough = np.flatnonzero(support >= FEW)
    if len(enough) < 2:
        return None
    recall = np.diagonal(counts)[enough] / support[enough]
    index = int(enough[recall.argmin()])
    others = np.where(np.arange(len(counts)) == index, 0, counts[index])
    text = sentence(
        "worst_class",
        name=classes[index],
        recall=float(recall.min()),
        images=round(support[index]),
        taken_for=classes[int(others.argmax())] if others.any() else "",
    )
    return _WorstClass(index, float(recall.mean() - recall.min()), text)


def _what_helps(run: Run, worst: _WorstClass | None, sites: int) -> str:
    """What would help most: images of a rare class, more sites, or labels at the new site."""
    counts = [client.classes for client in run.remaining.clients] if run.remaining else []
    images = [sum(of_class) for of_class in zip(*counts)]
    if worst is not None and worst.behind > FAR_BELOW and worst.number < len(images):
        count, total = images[worst.number], sum(images)
        if count < SCARCE * total / len(images):
            name = _class_names(run)[worst.number]
            return sentence("more_images", name=name, own=count, total=total)
    return sentence("more_sites" if 0 < sites < FEW_SITES else "label_images", sites=sites)


def _confusions(run: Run) -> dict[str, charts.Counts]:
    """Images by true and predicted class, of each test domain; the mean over models of several."""
    rows = run.result.where(split=TEST, metric="accuracy").rows
    return {row.domain: np.array(row.confusion) / row.models for row in rows if row.confusion}


def _status_text(run: Run) -> str:
    """The status in a few words."""
    done, planned = run.rounds_done, run.rounds_planned
    if run.status == "completed" or planned is None:
        return f"{run.status}, {counted(done, 'round')}"
    return f"{run.status}, {done} of {counted(planned, 'round')}"


def _key_facts(run: Run) -> Facts:
    in_domain = {s: run.result.value(s) for s in (ID_TEST, ID_VAL)}
    split = ID_VAL if in_domain[ID_TEST] is None else ID_TEST
    facts = table_from(
        "facts",
        run=run,
        at=split_accuracy(run.result, whole=run.table),
        split=split,
        accuracy=in_domain[split],
        cost=cost_of(run),
        classes=_class_names(run),
    )
    return Facts(facts.rows)


def _class_names(run: Run) -> Sequence[str]:
    return run.clients.classes if run.clients is not None else ()


# Accuracy by round, and by split, domain and selection rule.


def _accuracy_section(run: Run) -> Section | None:
    if not run.table:
        return None
    blocks: list[Block] = [charts.accuracy_curves(run), final_table(run)]
    if any(len(run.table.where(split=split).domains) > MOST_DOMAINS for split in SPLITS):
        blocks.append(Fold("Every domain", [final_table(run, every_domain=True)]))
    return Section("Accuracy", blocks)


class _Part(NamedTuple):
    """The subject of a table's row: one domain of a split, or all domains if None."""

    split: str
    label: str
    table: NumberTable
    """The numbers of the page's model."""
    domain: str | None
    whole: bool = True
    """Whether it is all that was measured of the split."""
    aggregate: str = "domain_mean"

    @property
    def images(self) -> int:
        return sum(row.examples for row in self.table.where(metric="accuracy"))

    @property
    def interval(self) -> ShareInterval | None:
        return accuracy_interval(self.table)

    def of(self, table: NumberTable, metric: str = "accuracy") -> float | None:
        numbers = table.where(split=self.split)
        if self.domain is None:
            return numbers.value(metric=metric, over=self.aggregate)
        return numbers.values(metric).get(self.domain)


def _parts(run: Run, aggregates: Sequence[str], every_domain: bool = False) -> Iterator[_Part]:
    """The rows of each split: all domains together, if there are several, and each separately.

    Of very many domains, only those with the lowest and the highest accuracy are listed separately.
    """
    for split in SPLITS:
        numbers = run.result.where(split=split)
        names = {domain: readable(domain) for domain in run.table.where(split=split).domains}
        for aggregate in aggregates if len(names) > 1 else ():
            measured, of = len(numbers.domains), len(names)
            count = of if measured == of else f"{measured} of {of}"
            label = f"{AGGREGATE_WORDS[aggregate]} ({count})"
            yield _Part(split, label, numbers, None, aggregate=aggregate)
        whole = len(names) == 1
        accuracies = numbers.values()
        if len(accuracies) > MOST_DOMAINS and not every_domain:
            order = sorted(accuracies, key=accuracies.__getitem__)
            lowest, highest = order[0], order[-1]
            names = {lowest: f"lowest: {names[lowest]}", highest: f"highest: {names[highest]}"}
        for domain, name in names.items():
            yield _Part(split, name, numbers.where(domain=domain), domain, whole)


def final_table(run: Run, every_domain: bool = False, *, brief: bool = False) -> Table:
    """Accuracy by split and domain under each selection rule.

    Args:
        run: The run.
        every_domain: Show all domains of a split even when there are very many; otherwise a long
            list is cut to its mean, lowest and highest.
        brief: Show the page's model alone, without a caption.
    """
    default = run.default_rule
    if brief:
        return table_from("brief", parts=list(_parts(run, [])), rule=default, chosen=run.result)
    chosen = ((rule, rule.of(run.table)) for rule in SELECTION_RULES.values() if rule != default)
    rules = [(default, default.of(run.table)), *(pair for pair in chosen if pair[1])]
    return table_from("final", parts=list(_parts(run, ["domain_mean"], every_domain)), rules=rules)


# Every metric by domain, and over domains, counted in three ways.


def metrics_section(run: Run) -> Section | None:
    """Every metric of the page's model but a decision's, which have a section; None if no other."""
    names = [name for name in run.table.metrics if name not in OF_A_DECISION]
    if len(names) < 2:
        return None
    parts = list(_parts(run, list(AGGREGATE_WORDS)))
    table = table_from("metrics", parts=parts, names=names)
    return Section("Metrics", [table], folded=True)


# Which class was taken for which.


def _mistakes_section(run: Run) -> Section | None:
    classes = _class_names(run)
    counts = {readable(domain): counts for domain, counts in _confusions(run).items()}
    if not counts or not classes:
        return None
    if len(counts) > MOST_CONFUSIONS:
        name = f"all {len(counts)} held-out test domains"
        counts = {name: np.sum(list(counts.values()), axis=0)}
    blocks: list[Block] = []
    for name, confusion in counts.items():
        caption = sentence("confusion_caption", name=name)
        others = confusion - np.diag(np.diagonal(confusion))
        table = table_from("classes", counts=confusion, others=others, classes=classes)
        title = f"{counted(len(classes), 'class', 'classes')} of {name}, one by one"
        blocks += [charts.confusion_matrix(confusion, classes, caption), Fold(title, [table])]
    return Section("Mistakes by class", blocks)


def _pictures_section(run: Run) -> Section | None:
    pictures = run.pictures()
    mistakes = [picture for picture in pictures if picture[0].name.startswith(MISTAKE)]
    others = [picture for picture in pictures if picture not in mistakes]
    return section_of(
        "Pictures",
        Gallery(others) if others else None,
        *((Prose(sentence("mistakes")), Gallery(mistakes, small=True)) if mistakes else ()),
    )


# Test-time adaptation: accuracy under each one that was tried.


def adaptation_table(scores: Sequence[AdaptationRow]) -> Table:
    """Accuracy of the model measured last, a row per adaptation, by domain."""
    newest = scores[-1]
    latest = [row for row in scores if (row.round, row.which) == (newest.round, newest.which)]
    keyed = grouped(((row.adaptation, row.batch_size), row) for row in latest)
    accuracies = {
        key: grouped(((row.split, row.domain), row.accuracy) for row in rows)
        for key, rows in keyed.items()
    }
    places = {place for values in accuracies.values() for place in values}
    return table_from(
        "adaptations",
        accuracies=accuracies,
        places=sorted(places, key=lambda place: (SPLITS.index(place[0]), place[1])),
        rule=SELECTION_RULES.find(newest.which).title.lower(),
        round=newest.round,
    )


# Who holds what: pictures, and a number for each kind of skew.


def _clients_section(run: Run) -> Section | None:
    clients = run.remaining
    if clients is None or not clients.clients:
        return None
    sizes = sorted(sum(client.domains) for client in clients.clients)
    blocks: list[Block] = [Prose(sentence("clients", sizes=sizes))]
    blocks += [charts.client_heat_map(clients, by) for by in ("domains", "classes")]
    if len(sizes) > 1:
        domains = np.array([client.domains for client in clients.clients])
        labels = np.array([client.classes for client in clients.clients])
        blocks += [Prose(line) for line in in_words(skew_of(domains, labels))]
    if bad := clients.bad_images:
        table = table_from("bad_images", rows=bad[:MOST_LISTED], total=len(bad))
        blocks.append(Fold(f"{counted(len(bad), 'image')} could not be used", [table]))
    return Section("Who holds what", blocks, folded=True)


def _loss_section(run: Run) -> Section | None:
    refused = [(row.round, entry) for row in run.rounds for entry in row.refused]
    table = table_from("refused", run=run, rows=refused[:MOST_LISTED], total=len(refused))
    fold = Fold(f"{counted(len(refused), 'update')} refused by the server", [table])
    curves = charts.loss_curves(run.rounds)
    return section_of("Loss", curves, fold if refused else None, folded=True)


# What a run took: time, memory, bytes.


def cost_of(run: Run) -> SummaryFile:
    """The cost of a run: its summary or, before there is one, that of the rows so far.

    Its seconds end in ``other``, if that is more than nothing, and ``total``.
    """
    summary = run.summary
    if summary is None:
        summary = summarize(run, run.status, None, {})
        sent = summary.bytes if run.rounds else {}
        summary = summary.model_copy(update={"peak_memory_bytes": None, "bytes": sent})
    seconds = dict(summary.seconds)
    total = max(seconds.pop("total", 0.0), sum(seconds.values()))
    rest = total - sum(seconds.values())
    if rest > 0.005 * total:
        seconds["other"] = rest
    return summary.model_copy(update={"seconds": seconds | {"total": total}})


def _cost_section(run: Run) -> Section | None:
    cost = cost_of(run)
    if not cost.seconds["total"]:
        return None
    return Section("Cost", [table_from("cost", cost=cost)], folded=True)


# Groups of clients, environment, experiment.


def _details_section(run: Run) -> Section | None:
    groups = [
        (what, [[run.client_name(id) for id in members] for members in parts])
        for what, parts in (run.setup.groups if run.setup else {}).items()
    ]
    table = table_from("groups", groups=groups)
    environment = table_from("environment", values=flatten(run.environment))
    return section_of(
        "Details",
        Fold("Groups of clients before training", [table]) if groups else None,
        Fold("Environment", [environment]) if run.environment else None,
        Fold("Experiment (experiment.yaml)", [Code(run.experiment_text)]),
        folded=True,
    )


MOST_LEFT_OUT = 100
"""Most left-out clients that the page lists."""


def left_out_section(run: Run) -> Section | None:
    """The accuracy of models at each client left out of them; None if it was not measured."""
    rows = [run.setup, *run.rounds]
    measured = [row.left_out for row in rows if row is not None and row.left_out]
    if not measured:
        return None
    accuracies = measured[-1]
    mean, apart = sum(accuracies.values()) / len(accuracies), clients_apart(run) & accuracies.keys()
    text = sentence("left_out", mean=mean, clients=len(accuracies), apart=apart)
    table = run.clients
    holds = {client.id: client.domains for client in table.clients} if table else {}
    lowest = sorted(accuracies.items(), key=lambda pair: pair[1])[:MOST_LEFT_OUT]
    domains = table.domains if table else []
    left_out = table_from("left_out", run=run, accuracies=lowest, domains=domains, holds=holds)
    blocks: list[Block] = [Prose(text), left_out]
    if estimates := expected_elsewhere(run):
        measured_there = run.result.where(split=TEST).values()
        blocks.append(table_from("elsewhere", estimates=estimates, measured=measured_there))
    return Section("Clients left out", blocks, folded=True)


# What to do next: commands that fit what was found.


Step = tuple[str, str]
"""A reason and its command."""
ANOTHER_SEED: Final = (
    "One run cannot tell a difference from chance. Repeat it with other seeds, and with other "
    "methods (--method); `feddg report` shows several runs beside each other:"
)


def run_steps(run: Run) -> Section | None:
    """Commands with their reasons; None if there are none, or the run was not even planned."""
    steps = _steps(run) if run.settings.get("data") else ()
    blocks: list[Block] = [block for why, line in steps for block in (Prose(why), Code(line))]
    return section_of("What to do next", *blocks)


def _steps(run: Run) -> Iterator[Step]:
    # A rate that failed would fail again.
    diverged = run.status == "failed" and DIVERGED in {notice.code for notice in about_run(run)}
    if run.status not in ("completed", "damaged") and not diverged:
        yield "Go on from the last completed round:", going_on(run.folder)
    try:
        experiment = load_experiment(run.folder / EXPERIMENT)
    except FeddgError:
        return  # of another version, or of a package that is not here: it cannot be changed
    codes = {diagnostic.code for diagnostic in about_result(run)}
    if diverged:
        lower = f"{lower_rate(run):g}"
        yield "A lower learning rate may help:", _again(run, "--lr", lower)
    elif codes & LEARNED_NOTHING:
        for cause in causes_of_failure(run):
            if cause.flags:
                yield f"If the cause is {cause.text}:", _again(run, *cause.flags)
    elif STILL_RISING in codes:
        longer = str(2 * experiment.train.rounds)
        yield "Accuracy was still rising at the end:", _again(run, "--rounds", longer)
    if run.status == "completed" and not codes & LEARNED_NOTHING:
        if not (run.folder.parent / "plan.yaml").is_file():  # else it is part of a comparison
            yield ANOTHER_SEED, _again(run, "--seed", str(experiment.seed + 1))
        if not read_adapted(run.folder):
            yield (
                "See what adapting to the unseen domain at test time changes:",
                command("evaluate", str(run.folder)),
            )


def _again(run: Run, *flags: str) -> str:
    """The command to repeat the run with other flags."""
    return command("run", str(run.folder / EXPERIMENT), *flags, "--out", str(run.folder.parent))
