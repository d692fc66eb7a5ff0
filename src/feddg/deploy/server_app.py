"""The ServerApp: the coordinator's side, which keeps the run folder."""

import json
import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from pydantic import Field, ValidationError

from feddg.clients.client import Worker
from feddg.deploy.site import load_pixels, positions, read_experiment, test_images
from feddg.deploy.transport import FlowerTransport, Identities, Policy
from feddg.deploy.wire import MOST_IMAGES, DeploymentFile, Introduction, Traffic, append_to
from feddg.diagnostics import Diagnostic, emit
from feddg.errors import ExperimentError
from feddg.evaluation.accuracy import Evaluation, Score
from feddg.evaluation.metrics import Predictions, measure
from feddg.experiment import Experiment
from feddg.federation.server import Server
from feddg.messages import Broadcast, Message, Refusal, Weights, plain_text
from feddg.methods.base import require_network_fit
from feddg.methods.composition import method_class
from feddg.models.precision import choose_device
from feddg.records import EVALUATION_ROWS, TEST, ClientRow, ClientsTable, EvaluationRow, RoundRow
from feddg.report import ensure_report
from feddg.runs.context import RunContext
from feddg.runs.execute import Run, carry_out
from feddg.runs.observer import Observer
from feddg.runs.prepare import Progress, build, build_worker, cache_folder, defences_for
from feddg.settings import Positive, Settings
from feddg.storage import replace_text

# What the Flower app's config may say beside the experiment; ``feddg deploy init`` writes it.


class Deployment(Settings):
    """The run config beside the experiment; ``feddg deploy init`` writes it."""

    sites: str = Field(description="names of all sites, comma-separated; the order is part of it")
    evaluation_sites: str = Field("", description="names of sites that only evaluate")
    out: Path = Field(Path("runs"), description="the run folder's parent, at the coordinator")
    test: str = Field("", description="the coordinator's test folder, or digits:DOMAIN; may be ''")
    test_domain: str = Field("", description="what the images of a test folder class/* are called")
    cache: str = Field("", description="the coordinator's cache folder; '' for the user's")
    min_sites: int = Field(0, ge=0, description="sites that must be connected; 0 for all")
    wait_seconds: Positive = Field(
        300.0, description="how long to wait for them, until they have introduced themselves"
    )
    round_deadline: Positive = Field(3600.0, description="seconds a site has for one message")
    poll_seconds: Positive = Field(0.5, description="between two looks at the mailbox")
    unnamed_sites: bool = Field(
        False, description="take nodes whose key has no name, or who have none: to try things out"
    )

    @classmethod
    def read(cls, run_config: Mapping[str, Any]) -> "Deployment":
        """Reads the run config, whose keys may be spelt with ``-``.

        Raises:
            ExperimentError: a key is unknown or wrong.
        """
        known = {k.replace("-", "_"): v for k, v in run_config.items() if k != "experiment"}
        try:
            return cls(**known)
        except ValidationError as error:
            fault = error.errors()[0]
            key = ".".join(str(part) for part in fault["loc"])
            raise ExperimentError(f"the app's config, key {key!r}: {fault['msg']}") from None

    @property
    def site_names(self) -> list[str]:
        """Names of all sites; a site's position is its client id."""
        return _names(self.sites)

    @property
    def judge_names(self) -> list[str]:
        """Names of the sites that only evaluate."""
        return _names(self.evaluation_sites)

    @property
    def minimum(self) -> int:
        """How many sites must be connected."""
        return self.min_sites or len(self.site_names)

    @property
    def policy(self) -> Policy:
        """The transport's patience."""
        return Policy(self.minimum, self.wait_seconds, self.round_deadline, self.poll_seconds)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


# Held-out evaluation where the images are: at sites that never train.


log = logging.getLogger("feddg")


class JudgeScores:
    """Asks the transport's judges for the accuracy of the server's model; they send counts only.

    Args:
        transport: knows who only evaluates.
        classes: how many the federation has.
    """

    def __init__(self, transport: FlowerTransport, classes: int) -> None:
        self._transport, self._classes = transport, classes

    def __call__(
        self, server: Server, broadcast: Broadcast, scores: Sequence[Score]
    ) -> Sequence[Score]:
        """Returns the scores of weights of a round; a judge that fails is logged and left out.

        A domain that somebody else measured, too, gets its site's name; ``scores`` are from before.
        """
        transport = self._transport
        if not transport.judges:
            return []
        found: list[Score] = []
        taken = {score.domain for score in scores}
        for id, reply in transport.evaluate(broadcast):
            told = self._scores(server, id, reply) if isinstance(reply, Message) else reply
            if isinstance(told, Refusal):
                server.ledger.refusal(broadcast.round, id, told.reason)
                log.warning("round %d: no evaluation by %s", broadcast.round, told.reason)
            else:
                found += _told_apart(taken, told, transport.sites[id])
                taken |= {score.domain for score in found}
        return found

    def _scores(self, server: Server, id: int, reply: Message) -> list[Score] | Refusal:
        introduction = self._transport.introductions.get(id)
        held = introduction.domains if introduction is not None else {}
        try:
            return read_scores(reply, self._classes, held)
        except ValueError as error:
            said = plain_text(error, 200)
            return Refusal(id, f"{self._transport.sites[id]}: its scores cannot be used ({said})")


def read_scores(reply: Message, classes: int, held: Mapping[str, int]) -> list[Score]:
    """Returns a judge's checked scores, one for each domain that it counted.

    Args:
        reply: what it sent.
        classes: how many the federation has.
        held: how many images of each domain it introduced itself with.

    Raises:
        ValueError: they are not what it can have counted; says why.
    """
    if reply.tensors or reply.scalars.keys() != {"scores"}:
        raise ValueError("it sent something else, or more")
    rows = EVALUATION_ROWS.parse(str(reply.scalars["scores"]))
    if len({row.domain for row in rows}) < len(rows):
        raise ValueError("it counted a domain twice")
    return [_score(row, classes, held) for row in rows]


def _score(row: EvaluationRow, classes: int, held: Mapping[str, int]) -> Score:
    table = row.confusion
    if table is None or len(table) != classes or any(len(line) != classes for line in table):
        raise ValueError(f"its table is not one of {classes} classes")
    if any(not 0 <= count <= MOST_IMAGES for line in table for count in line):
        raise ValueError("its counts are no numbers of images")
    examples, introduced = sum(map(sum, table)), held.get(row.domain, 0)
    if examples != introduced or not examples:
        shown = plain_text(row.domain, 40)
        raise ValueError(
            f"it counted {examples} images of {shown!r}, but introduced itself with {introduced}"
        )
    confusion = numpy.array(table, dtype=numpy.int64)
    loss = row.loss if math.isfinite(row.loss) else math.nan
    metrics = measure(Predictions(confusion))
    return Score(TEST, row.domain, int(confusion.trace()), examples, loss, confusion, metrics)


def _told_apart(taken: set[str], new: list[Score], site: str) -> list[Score]:
    return [
        replace(score, domain=f"{score.domain} at {site}") if score.domain in taken else score
        for score in new
    ]


DEPLOYMENT, TRAFFIC = "deployment.json", "traffic.jsonl"
MOST_SHARE = 0.8
"""Share of all images above which a site is said to outweigh the others."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Carries out the experiment of the run config, or goes on with it."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        coordinate(grid, context.run_config)
    finally:
        log.removeHandler(handler)


def coordinate(grid: Grid, run_config: Mapping[str, Any]) -> Run:
    """Carries out a deployment's experiment over a grid, or goes on with it.

    Raises:
        FeddgError: the run cannot start or go on; what was computed is kept.
    """
    experiment = read_experiment(run_config)
    require_network_fit(method_class(experiment.method.name))
    deployment = Deployment.read(run_config)
    names = deployment.site_names
    if len(set(names)) < len(names) or len(names) != experiment.clients.number:
        raise ExperimentError(
            f"sites names {len(names)} sites ({', '.join(names)}), each once; "
            f"clients.number is {experiment.clients.number}"
        )
    both = sorted(set(names) & set(deployment.judge_names))
    if both:
        raise ExperimentError(f"site {both[0]!r} trains; it cannot be an evaluation-site as well")
    path = deployment.out.expanduser() / experiment.label

    def prepare(
        experiment: Experiment, cache: Path, progress: Progress, memories: dict[int, Weights]
    ) -> RunContext:
        return _prepared(grid, deployment, experiment, cache, path)

    cache = Path(deployment.cache).expanduser() if deployment.cache else cache_folder()
    done = carry_out(path, experiment, observer=LogLines(), cache=cache, prepare=prepare)
    ensure_report(path)
    return done


def _prepared(
    grid: Grid, deployment: Deployment, experiment: Experiment, cache: Path, path: Path
) -> RunContext:
    names, file = deployment.site_names, path / DEPLOYMENT
    device = choose_device(experiment.device)
    known = DeploymentFile.read(file)
    if known is not None:
        known.require_sites(names)
    run = known.run if known else f"{experiment.id}-{secrets.token_hex(6)}"
    identities = Identities(dict(known.keys) if known else {}, not deployment.unnamed_sites)
    transport = FlowerTransport(
        grid,
        names,
        run,
        deployment.policy,
        device,
        judges=deployment.judge_names,
        traffic=Traffic(append_to(path / TRAFFIC)),
        identities=identities,
        introduced=known.images if known else {},
        held_out=(*experiment.hold_out.test, *experiment.hold_out.val),
    )
    found = transport.gather(deployment.minimum)
    _say_who_outweighs({names[id]: introduction.images for id, introduction in found.items()})
    classes = known.classes if known else _classes(names, found)
    so_far = known or DeploymentFile(run=run, sites=names, classes=classes, domains=[])

    def join(id: int, introduction: Introduction) -> None:
        nonlocal so_far
        # Classes are fixed by the network; a late joiner's domain is new, and numbered as it comes.
        domains = {} if id in transport.judges else introduction.domains
        images = {transport.sites[k]: n for k, n in transport.introduced.items()}
        so_far = so_far.joined(domains, identities.keys, images)
        replace_text(file, so_far.to_text())
        named = {"classes": so_far.classes, "domains": so_far.domains}
        transport.fields = {key: json.dumps(names) for key, names in named.items()}

    for id, introduction in found.items():
        join(id, introduction)
    transport.on_introduction(join)
    method, network = build(experiment, len(classes))
    emit(*method.diagnostics(experiment))
    defences = defences_for(experiment, method, network)
    worker = build_worker(experiment, network, cache)
    return RunContext(
        method,
        worker,
        transport,
        _evaluation(deployment, experiment, classes, worker, cache),
        _clients_table(names, found, classes, so_far.domains),
        JudgeScores(transport, len(classes)),
        defences=defences,
        remote=True,
    )


def _say_who_outweighs(images: Mapping[str, int]) -> None:
    """Says so where one site, by the images that it says it has, nearly is the model."""
    name = max(images, key=images.__getitem__)
    share = images[name] / sum(images.values())
    if len(images) > 2 and share > MOST_SHARE:
        emit(
            Diagnostic(
                "one-site-dominates",
                "warning",
                f"Site {name} says that it has {images[name]} images: in a mean by images it is "
                f"{share:.0%} of the model, whatever the others send.",
                "Ask it, or use a defence that counts sites alike.",
            )
        )


def _classes(names: Sequence[str], found: Mapping[int, Introduction]) -> list[str]:
    """Returns the federation's classes, sorted; says which of them one site alone has."""
    holders: dict[str, list[str]] = {}
    for id, introduction in found.items():
        for name in introduction.classes:
            holders.setdefault(name, []).append(names[id])
    alone = [f"{name!r} ({held[0]})" for name, held in sorted(holders.items()) if len(held) == 1]
    if len(found) > 1 and alone:
        more = f" and {len(alone) - 5} more" if len(alone) > 5 else ""
        emit(
            Diagnostic(
                "class-at-one-site",
                "warning",
                f"Classes that one site alone has: {', '.join(alone[:5])}{more}.",
                "Are they spelt as at the others?",
            )
        )
    return sorted(holders)


def _clients_table(
    names: Sequence[str],
    found: Mapping[int, Introduction],
    classes: Sequence[str],
    domains: Sequence[str],
) -> ClientsTable:
    rows = []
    for id, name in enumerate(names):
        if id in found:
            by_domain, by_class = found[id].domains, found[id].classes
        else:
            by_domain, by_class = {}, {}
        held = [by_domain.get(domain, 0) for domain in domains]
        labels = [by_class.get(name, 0) for name in classes]
        rows.append(ClientRow(id=id, name=name, domains=held, classes=labels))
    return ClientsTable(domains=list(domains), classes=list(classes), clients=rows)


def _evaluation(
    deployment: Deployment, experiment: Experiment, classes: list[str], worker: Worker, cache: Path
) -> Evaluation | None:
    """Returns what the coordinator measures the global model on, if it owns a test folder."""
    if not deployment.test:
        return None
    table, pixels = load_pixels(deployment.test, deployment.test_domain or None, experiment, cache)
    unknown = sorted(set(table.class_names) - set(classes))
    if unknown:
        raise ExperimentError(
            f"class {unknown[0]!r} of the test folder {deployment.test} is at no site; "
            f"sites have: {', '.join(classes)}"
        )
    table = positions(table, classes, list(table.domain_names))
    return test_images(table, pixels, experiment, worker)


class LogLines(Observer):
    """Writes a line per round to the log, where `flwr log` shows it."""

    def diagnostic(self, found: Diagnostic) -> None:
        """See :class:`Observer`."""
        log.info("%s", found)

    def round(self, row: RoundRow) -> None:
        """See :class:`Observer`."""
        good = len(row.clients) - len(row.refused)
        log.info("round %d: %d of %d sites", row.round, good, len(row.clients))

    def scores(self, round: int, scores: Sequence[Score]) -> None:
        """See :class:`Observer`."""
        for score in scores:
            log.info("round %d: %s %s %.4f", round, score.split, score.domain, score.accuracy)

    def end(self, status: str) -> None:
        """See :class:`Observer`."""
        log.info("the run ended: %s", status)
