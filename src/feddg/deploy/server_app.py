"""The ServerApp: the coordinator's side, which writes the run folder."""

import logging
import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from pydantic import BeforeValidator, Field

from feddg.clients.client import Examples, Worker
from feddg.data.class_names import Numbered, joined
from feddg.data.inspection import about_clients
from feddg.data.sets.features import columns_fault
from feddg.deploy.site import (
    held_out_among,
    list_images,
    load_pixels,
    on_all_images,
    positions,
    read_experiment,
)
from feddg.deploy.transport import DeploymentFile, FlowerTransport, Policy
from feddg.deploy.wire import MOST_IMAGES, TARGETS, Registration
from feddg.diagnostics import Progress, emit, warn
from feddg.errors import ExperimentError, RunError, first_names, nearest, schema_faults
from feddg.evaluation.accuracy import Evaluation, Score
from feddg.evaluation.metrics import Predictions, measure
from feddg.experiment import Experiment, complete
from feddg.federation.federation import Clients, Federation, build
from feddg.federation.server import Server
from feddg.messages import Broadcast, Message, Refusal, plain_text
from feddg.models.precision import choose_device
from feddg.records import (
    DOMAIN_SCORES,
    TEST,
    UNLABELLED,
    VAL,
    ClientRow,
    ClientsTable,
    DomainScore,
    RoundRow,
)
from feddg.report.page import ensure_report
from feddg.runs.execute import carry_out, forget
from feddg.runs.observer import Observer
from feddg.runs.prepare import about_settings, cache_folder
from feddg.runs.reading import CLIENTS, DEPLOYMENT, Run
from feddg.settings import ExperimentSettings, Fields, Positive, Settings, grouped, leaves
from feddg.storage import replace_text

log = logging.getLogger("feddg")

TRAFFIC = "traffic.jsonl"
MOST_LOSS = 1e6
"""A site's mean cross-entropy above this is no number that a mean over sites could use."""


def _split(names: object) -> object:
    """Splits names at commas, because Flower's config has no lists."""
    if not isinstance(names, str):
        return names
    return tuple(name.strip() for name in names.split(",") if name.strip())


_Names = Annotated[tuple[str, ...], BeforeValidator(_split)]


class Deployment(Settings):
    """The deployment's part of the run config, written by ``feddg deploy init``."""

    sites: _Names = Field(description="names of all sites; the order is part of it")
    evaluation_sites: _Names = Field((), description="names of sites that only evaluate")
    out: Path = Field(Path("runs"), description="the run folder's parent, at the coordinator")
    test: str = Field("", description="the coordinator's test folder, or digits:DOMAIN; may be ''")
    test_domain: str = Field("", description="what the images of a test folder class/* are called")
    cache: str = Field("", description="the coordinator's cache folder; '' for the user's")
    min_sites: int = Field(0, ge=0, description="sites that must be connected; 0 for all")
    wait_seconds: Positive = Field(
        300.0, description="how long to wait for them, until they have registered"
    )
    round_deadline: Positive = Field(3600.0, description="seconds a site has for one message")
    poll_seconds: Positive = Field(0.5, description="between two looks at the mailbox")
    forget: str = Field("", description="a site that withdraws from a finished run's model")

    @classmethod
    def read(cls, run_config: Mapping[str, object]) -> "Deployment":
        """Reads the run config; keys may be spelled with ``-``.

        Raises:
            ExperimentError: a key is unknown or wrong.
        """
        fields = {k.replace("-", "_"): v for k, v in run_config.items() if k != "experiment"}
        with schema_faults(ExperimentError, "the app's config: ", cls.model_fields):
            return cls(**fields)

    @property
    def minimum(self) -> int:
        """The number of sites that must be connected."""
        return self.min_sites or len(self.sites)

    @property
    def policy(self) -> Policy:
        """The transport's waiting times."""
        return Policy(self.minimum, self.wait_seconds, self.round_deadline, self.poll_seconds)


def read_unlabelled(reply: Message, site: str, held: Mapping[str, int]) -> Score:
    """Returns what a site without labels measured, checked: how many images, how confidently.

    Args:
        reply: what it sent.
        site: its name.
        held: how many images it registered with.

    Raises:
        ValueError: it cannot have measured that; says why.
    """
    images, confidence = reply.scalars["images"], reply.scalars["confidence"]
    if reply.tensors or type(images) is not int or images != held.get(site) or not images:
        raise ValueError("it measured other images than it registered with")
    if type(confidence) is not float or not 0 <= confidence <= 1:
        raise ValueError("its confidence is none")
    nothing = numpy.zeros((0, 0), numpy.int64)
    return Score(UNLABELLED, site, 0, images, math.nan, nothing, confidence=confidence)


def read_scores(
    reply: Message, classes: int, held: Mapping[str, int], labels: list[int] | None = None
) -> list[Score]:
    """Returns an evaluation site's checked scores, one per domain.

    Args:
        reply: the site's message.
        classes: number of classes.
        held: number of images of each domain it registered with.
        labels: number of images of each class it registered with; None if unknown.

    Raises:
        ValueError: the scores are impossible; the message says why.
    """
    if reply.tensors or reply.scalars.keys() != {"scores"}:
        raise ValueError("it sent something else, or more")
    rows = DOMAIN_SCORES.parse(str(reply.scalars["scores"]))
    if len({row.domain for row in rows}) < len(rows):
        raise ValueError("it counted a domain twice")
    scores = [_score(row, classes, held) for row in rows]
    counted = numpy.sum([score.confusion.sum(1) for score in scores], axis=0).tolist()
    if labels is not None and counted != labels:
        raise ValueError("its images by class are not those it registered with")
    return scores


def _score(row: DomainScore, classes: int, images_of: Mapping[str, int]) -> Score:
    if [*map(len, row.confusion)] != [classes] * classes:
        raise ValueError(f"its table is not one of {classes} classes")
    if not all(0 <= count <= MOST_IMAGES for count in chain(*row.confusion)):
        raise ValueError("its counts are no numbers of images")
    confusion = numpy.array(row.confusion, dtype=numpy.int64)
    examples, registered = int(confusion.sum()), images_of.get(row.domain, 0)
    if examples != registered or not examples:
        shown = plain_text(row.domain, 40)
        raise ValueError(
            f"it counted {examples} images of {shown!r}, but registered with {registered}"
        )
    loss = row.loss if 0 <= row.loss <= MOST_LOSS else math.nan
    counted = row.groups, row.independent
    if counted != (None, None) and not all(n and 1 <= n <= examples for n in counted):
        raise ValueError("its groups of images are no numbers of images")
    of = (TEST, row.domain, int(confusion.trace()), examples, loss, confusion)
    return Score(*of, measure(Predictions(confusion)), counted=counted)


class Sites(Clients):
    """The clients of a deployment, whose images are elsewhere, as they registered.

    Args:
        transport: reaches them.
        val: domains held out for validation; others that are evaluated are test domains.
    """

    def __init__(self, transport: FlowerTransport, val: Collection[str] = ()) -> None:
        self._transport, self._val = transport, val
        self._told = set[int]()

    def __len__(self) -> int:
        return len(self._transport.clients)

    def __getitem__(self, client: int) -> Examples:
        raise IndexError("a site's images are at the site")

    def scores_elsewhere(
        self, server: Server, broadcast: Broadcast, scores: Sequence[Score]
    ) -> Sequence[Score]:
        """Asks the evaluation sites for the accuracy of weights; they send counts only.

        A site that fails is logged and left out. Where there are several, or the domain is measured
        here, the site's name is added, so that a column is always of the same site.
        """
        transport, gathered = self._transport, list[Score]()
        here = {score.domain for score in scores}
        several = len(transport.evaluation_sites) > 1
        for id, reply in transport.evaluate(broadcast):
            new: list[Score] = []
            if isinstance(reply, Message):
                try:
                    new = self._read(reply, id)
                except ValueError as error:
                    reason = f"its scores cannot be used ({plain_text(error, 200)})"
                    reply = Refusal(id, f"{transport.sites[id]}: {reason}")
            if isinstance(reply, Refusal):
                server.ledger.refusal(broadcast.round, id, reply.reason)
                log.warning("round %d: no evaluation by %s", broadcast.round, reply.reason)
            labelled = (score.domain for score in new if score.split != UNLABELLED)
            seen = held_out_among(labelled, self.held.domains)
            if seen and id not in self._told:
                self._told.add(id)
                warn(
                    "evaluated-and-trained",
                    f"{transport.sites[id]} measures {first_names(seen)}, which sites train on: "
                    "that says nothing of unseen domains.",
                    "Name its images otherwise if they are of another domain.",
                )
            for score in new:
                named = replace(score, domain=f"{score.domain} at {transport.sites[id]}")
                # Without labels the domain is the site's name already.
                alike = score.domain in here or (several and score.split != UNLABELLED)
                gathered.append(named if alike else score)
        return gathered

    def _read(self, reply: Message, id: int) -> list[Score]:
        held = self._transport.registry.registrations[id]
        if reply.scalars.keys() == {"images", "confidence"}:
            return [read_unlabelled(reply, self._transport.sites[id], held.domains)]
        labels = [held.classes.get(name, 0) for name in self.held.classes]
        val = held_out_among(held.domains, self._val)
        scores = read_scores(reply, len(labels), held.domains, labels)
        return [replace(s, split=VAL) if s.domain in val else s for s in scores]


def transport_to_programs(
    grid: Grid, sites: Sequence[str], run: str, policy: Policy | None = None, **options: Any
) -> FlowerTransport:
    """Returns a transport to sites with programs of their own, once all have registered.

    >>> fed = feddg.Federation([example], unet, task=task, transport=transport_to_programs(...))

    Args:
        grid: Flower's, as the main function of a ServerApp gets it.
        sites: names of all sites; the order is part of the experiment.
        run: key under which sites store their memory: another one for every run.
        policy: waiting times.
        **options: of :class:`FlowerTransport`; a name belongs to the first key that used it, unless
            ``keys`` is None.

    Raises:
        RunError: a site is missing; names it.
        ExperimentError: classes of the sites cannot be joined by their names.
    """
    with schema_faults(ExperimentError, "transport_to_programs: "):
        known = DeploymentFile(run=run, sites=list(sites), classes=[], domains=[])
    options = {"keys": known.keys, **options}
    transport = FlowerTransport(grid, known, policy or Policy(len(sites)), **options)
    registered = transport.gather(len(sites))
    tables: list[tuple[str, Numbered | None]] = []
    for id, one in registered.items():
        named = [*one.classes] != [TARGETS]
        tables.append((f"site {sites[id]!r}", dict(enumerate(one.classes)) if named else None))
    known.classes.extend(joined(tables) or [TARGETS])
    known.domains.extend(dict.fromkeys(name for one in registered.values() for name in one.domains))
    transport.domains = {id: len(one.domains) for id, one in registered.items()}
    return transport


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Runs the experiment of the run config, or continues it."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        coordinate(grid, context.run_config)
    finally:
        log.removeHandler(handler)


def coordinate(grid: Grid, run_config: Mapping[str, object]) -> Run:
    """Runs a deployment's experiment over a grid, continues it, or takes a site out of its model.

    Raises:
        FeddgError: the run cannot start or continue; earlier results are kept.
    """
    experiment = read_experiment(run_config)
    deployment = Deployment.read(run_config)
    names = deployment.sites
    if len(set(names)) < len(names) or len(names) != experiment.clients.number:
        raise ExperimentError(
            f"sites names {len(names)} sites ({', '.join(names)}), each once; "
            f"clients.number is {experiment.clients.number}"
        )
    if deployment.min_sites > len(names):
        raise ExperimentError(f"min-sites is {deployment.min_sites}; there are {len(names)} sites")
    both = sorted(set(names) & set(deployment.evaluation_sites))
    if both:
        raise ExperimentError(f"site {both[0]!r} trains; it cannot be an evaluation-site as well")
    path = deployment.out.expanduser() / experiment.label

    def prepare(experiment: Experiment, cache: Path, progress: Progress) -> Federation:
        return _prepared(grid, deployment, experiment, cache, path)

    cache = cache_folder(deployment.cache or None).expanduser()
    parts: dict[str, Any] = {"observer": LogLines(), "cache": cache, "prepare": prepare}
    if deployment.forget:
        if deployment.forget not in names:
            known = nearest(deployment.forget, names)
            raise ExperimentError(f"forget names {deployment.forget!r}, which is no site{known}")
        done = forget(path, names.index(deployment.forget), **parts)
    else:
        done = carry_out(path, experiment, **parts, of_sites=True)
    ensure_report(path)
    return done


def _prepared(
    grid: Grid, deployment: Deployment, experiment: Experiment, cache: Path, path: Path
) -> Federation:
    names, file = list(deployment.sites), path / DEPLOYMENT
    device = choose_device(experiment.device)
    known = DeploymentFile.read(file) or DeploymentFile(
        run=f"{experiment.id}-{secrets.token_hex(6)}", sites=names, classes=[], domains=[]
    )
    if names != known.sites:
        raise RunError(
            f"this run was begun with the sites {', '.join(known.sites)}, in this order; the "
            f"app's config names {', '.join(names)}: put them back, or start a new run"
        )
    tested: tuple[str, ...] = ()
    if deployment.test:  # a domain that sites train on is no new site's
        domain = deployment.test_domain or None
        tested = list_images(deployment.test, domain, experiment.data).domain_names
    transport = FlowerTransport(
        grid,
        known,
        deployment.policy,
        device,
        evaluation_sites=deployment.evaluation_sites,
        traffic=path / TRAFFIC,
        keys=known.keys,
        held_out=(*experiment.hold_out.test, *experiment.hold_out.val, *tested),
    )
    registered = transport.gather(deployment.minimum)
    sizes = [registration.images for registration in registered.values()]
    emit(*about_clients(sizes, [names[id] for id in registered]))
    if not known.classes:
        known.classes.extend(_classes(names, registered))

    method, network = build(experiment, len(known.classes))
    sites = Sites(transport, experiment.hold_out.val)

    def join(id: int, registration: Registration) -> None:
        # Classes are fixed by the network; a late joiner's domain is new, and numbered as it comes.
        new = {} if id in transport.evaluation_sites else registration.domains
        known.domains.extend(name for name in new if name not in known.domains)
        before = ClientsTable.read(path / CLIENTS)
        sites.held = _clients_table(known, transport.registry.registrations, before)
        replace_text(file, known.to_text())
        replace_text(path / CLIENTS, sites.held.to_text())

    for id, registration in registered.items():
        join(id, registration)
    transport.registry.on_registration = join
    clients = ((len(site.domains), site.images) for site in registered.values())
    emit(*about_settings(experiment, _said(experiment), method, network, clients))
    federation = Federation(sites, network, method, experiment, transport=transport, cache=cache)
    federation.evaluation = _evaluation(
        deployment, experiment, sites.held, federation.worker, cache
    )
    return federation


def _said(experiment: Experiment) -> Fields:
    """Returns what is not as presets have it: the app's experiment is complete, whoever said it."""
    model, preset = experiment.model.model_dump(mode="json"), experiment.preset
    of = {"data": experiment.data.source, "method": experiment.method.name, "model": model}
    usual = leaves(ExperimentSettings().model_dump(mode="json"))
    usual |= leaves(complete(of | {"preset": preset}))
    return {path: v for path, v in leaves(experiment.given).items() if usual.get(path) != v}


def _classes(names: Sequence[str], registered: Mapping[int, Registration]) -> list[str]:
    """Returns the federation's classes, sorted; warns of classes that only one site has."""
    holders = grouped((name, names[id]) for id, site in registered.items() for name in site.classes)
    alone = [f"{name!r} ({sites[0]})" for name, sites in sorted(holders.items()) if len(sites) == 1]
    if len(registered) > 1 and alone:
        warn(
            "class-at-one-site",
            f"Classes that one site alone has: {first_names(alone)}.",
            "Are they spelt as at the others?",
        )
    return sorted(holders)


def _clients_table(
    known: DeploymentFile, sites: Mapping[int, Registration], before: ClientsTable | None
) -> ClientsTable:
    """Returns what sites registered with; of those that are not back, what was known before."""
    rows, held = [], dict[int, tuple[dict[str, int], dict[str, int]]]()
    if before is not None:
        for row in before.clients:
            by_domain = dict(zip(before.domains, row.domains))
            held[row.id] = by_domain, dict(zip(before.classes, row.classes))
    held |= {id: (site.domains, site.classes) for id, site in sites.items()}
    for id, name in enumerate(known.sites):
        by_domain, by_class = held.get(id, ({}, {}))
        images = [by_domain.get(domain, 0) for domain in known.domains]
        labels = [by_class.get(name, 0) for name in known.classes]
        rows.append(ClientRow(id=id, name=name, domains=images, classes=labels))
    return ClientsTable(
        domains=known.domains, classes=known.classes, clients=rows, features=known.features
    )


def _evaluation(
    deployment: Deployment, experiment: Experiment, sites: ClientsTable, worker: Worker, cache: Path
) -> Evaluation | None:
    """Returns the coordinator's own evaluation, if it has a test folder."""
    if not deployment.test:
        return None
    table, pixels = load_pixels(deployment.test, deployment.test_domain or None, experiment, cache)
    if fault := columns_fault(table.feature_names, sites.features):
        raise ExperimentError(f"{deployment.test} {fault} of the sites; rename or take them out")
    table = positions(table, sites.classes, list(table.domain_names))
    return on_all_images(table, pixels, experiment, worker)


class LogLines(Observer):
    """Writes one log line per round, shown by `flwr log`."""

    def round(self, row: RoundRow) -> None:
        """See :class:`Observer`."""
        refused = {one.client for one in row.refused}  # a round is done again without some
        asked = {*row.clients} | refused
        log.info("round %d: %d of %d sites", row.round, len(asked - refused), len(asked))

    def scores(self, round: int, scores: Sequence[Score]) -> None:
        """See :class:`Observer`."""
        for score in scores:
            log.info("round %d: %s %s %.4f", round, score.split, score.domain, score.accuracy)

    def end(self, status: str) -> None:
        """See :class:`Observer`."""
        log.info("the run ended: %s", status)
