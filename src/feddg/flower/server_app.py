"""The ServerApp: the coordinator's side, which keeps the run folder."""

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from feddg.clients.client import Worker
from feddg.errors import ExperimentError
from feddg.evaluation.accuracy import Evaluation, Score
from feddg.experiment import Experiment
from feddg.flower.deployment_config import Deployment
from feddg.flower.deployment_file import DeploymentFile
from feddg.flower.grid_transport import FlowerTransport
from feddg.flower.identity import Identities
from feddg.flower.judges import JudgeScores
from feddg.flower.replies import Introduction
from feddg.flower.site import read_experiment
from feddg.flower.site_images import load_pixels, positions, test_images
from feddg.flower.traffic import Traffic, append_to
from feddg.messages import Weights
from feddg.methods.base import require_network_fit
from feddg.methods.composition import method_class
from feddg.models.precision import choose_device
from feddg.records import ClientRow, ClientsTable, RoundRow
from feddg.report import ensure_report
from feddg.runs.context import Prepared, say_of_method
from feddg.runs.execute import Run, carry_out
from feddg.runs.observer import Observer
from feddg.runs.prepare import Progress, build, build_worker, cache_folder, guards_for
from feddg.storage import replace_text

log = logging.getLogger("feddg")
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
    ) -> Prepared:
        return _prepared(grid, deployment, experiment, cache, path)

    cache = Path(deployment.cache).expanduser() if deployment.cache else cache_folder()
    done = carry_out(path, experiment, observer=LogLines(), cache=cache, prepare=prepare)
    ensure_report(path)
    return done


def _prepared(
    grid: Grid, deployment: Deployment, experiment: Experiment, cache: Path, path: Path
) -> Prepared:
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
    say_of_method(method, experiment)
    guards = guards_for(experiment, method, network)
    worker = build_worker(experiment, network, cache)
    return Prepared(
        method,
        worker,
        transport,
        _evaluation(deployment, experiment, classes, worker, cache),
        _clients_table(names, found, classes, so_far.domains),
        JudgeScores(transport, len(classes)),
        guards=guards,
        remote=True,
    )


def _say_who_outweighs(images: Mapping[str, int]) -> None:
    """Says so where one site, by the images that it says it has, nearly is the model."""
    name = max(images, key=images.__getitem__)
    share = images[name] / sum(images.values())
    if len(images) > 2 and share > MOST_SHARE:
        log.warning(
            "site %s says that it has %d images: in a mean by images it is %.0f %% of the model, "
            "whatever the others send; ask it, or use a guard that counts sites alike",
            name,
            images[name],
            100 * share,
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
        log.warning(
            "classes that one site alone has: %s%s; are they spelt as at the others?",
            ", ".join(alone[:5]),
            more,
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

    def promise(self, text: str) -> None:
        """See :class:`Observer`."""
        log.info("%s", text)

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
