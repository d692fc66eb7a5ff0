"""Whether what a client sends tells that an image was among its own.

Two attacks, each on weights and on what is sent beside them:

* *threshold*: an image is a member if the client's new weights give it a small loss, or if its own
  row lies near the one that was sent (Yeom et al., "Privacy Risk in Machine Learning", CSF 2018);
* *shadow*: clients like it are made of other clients' images, and a logistic regression learns on
  them what members look like (Shokri et al., "Membership Inference Attacks Against Machine Learning
  Models", S&P 2017).

Members and others are of the same domains. 0.5 is chance for the area under the ROC curve.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score, roc_curve
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from feddg.attacks.entries import SentEntry
from feddg.attacks.image_metrics import clustered_mean
from feddg.attacks.senders import Senders, one_each
from feddg.attacks.targets import chosen_clients
from feddg.clients.examples import Examples
from feddg.data.pixels import as_unit
from feddg.errors import RunError
from feddg.messages import Weights
from feddg.methods.base import has_global_model
from feddg.randomness import stream
from feddg.rows import MembershipRow

WEIGHTS = "update/weights"
POINTS = 21
"""Points of a ROC curve that are kept."""
EARLY = 0.01
"""False positive rate at which few but certain finds are counted."""
FEWEST = 4
"""Members and others of a client below which it is left out."""


@dataclass(frozen=True)
class MembershipEffort:
    """How much the attack may take.

    Attributes:
        clients: attacked.
        images: members, and others, asked about for each.
        shadows: made for each.
        seed: of everything that is drawn.
    """

    clients: int = 8
    images: int = 32
    shadows: int = 4
    seed: int = 0


@dataclass(frozen=True)
class _Case:
    """Images of which it is asked whether a client held them.

    Attributes:
        holding: what the client holds.
        asked: the images, members first.
        members: ``(n,)`` bool.
    """

    holding: Examples
    asked: Examples
    members: numpy.ndarray


@dataclass(frozen=True)
class _Victim:
    client: int
    case: _Case
    shadows: list[_Case]
    others_from: str


Evidence = Callable[[Sequence[_Case], Sequence[int] | None], list[numpy.ndarray]]
"""From cases, and the real clients' ids if they are any, to the features of what is asked."""


def membership(
    senders: Senders,
    entries: Sequence[SentEntry],
    effort: MembershipEffort,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[MembershipRow]:
    """Attacks the weights and every entry, by threshold and by shadows.

    Args:
        senders: of the run.
        entries: what is sent beside the weights.
        effort: how much it may take.
        progress: called with (what, done, total).

    Raises:
        RunError: no client has enough images for it.
    """
    victims = list(_victims(senders, effort))
    if not victims:
        raise RunError(
            f"membership needs clients of at least {2 * FEWEST} images, and as many of the same "
            "domains that they do not hold; this run has none"
        )
    evidence: dict[str, Evidence] = {}
    if has_global_model(senders.subject.method, senders.subject.worker.network):
        evidence[WEIGHTS] = lambda cases, ids: list(_losses(senders, cases))
    for entry in entries:
        evidence[entry.key] = _of_entry(senders, entry)
    rows: list[MembershipRow] = []
    for done, (key, look) in enumerate(evidence.items()):
        progress(f"membership by {key}", done, len(evidence))
        rows += _attacks(key, look, victims, effort.seed)
    return rows


def _attacks(
    key: str, look: Evidence, victims: Sequence[_Victim], seed: int
) -> Iterator[MembershipRow]:
    found = look([victim.case for victim in victims], [victim.client for victim in victims])
    shadows = [case for victim in victims for case in victim.shadows]
    of_shadows = iter(look(shadows, None)) if shadows else iter(())
    scores: dict[Literal["threshold", "shadow"], list[numpy.ndarray]] = {
        "threshold": [features[:, 0] for features in found],
        "shadow": [],
    }
    for victim, features in zip(victims, found):
        known = [(next(of_shadows), case.members) for case in victim.shadows]
        if known:
            scores["shadow"].append(_learnt(known, features))
    for attack, by_client in scores.items():
        if len(by_client) == len(victims):
            yield _row(key, attack, by_client, victims, seed)


def _learnt(
    known: Sequence[tuple[numpy.ndarray, numpy.ndarray]], asked: numpy.ndarray
) -> numpy.ndarray:
    """What a logistic regression on shadow clients says of the features asked about."""
    features, members = (numpy.concatenate(part) for part in zip(*known))
    scaler = StandardScaler().fit(features)
    model = LogisticRegression(max_iter=1000).fit(scaler.transform(features), members)
    decided: numpy.ndarray = model.decision_function(scaler.transform(asked))
    return decided


def _row(
    key: str,
    attack: Literal["threshold", "shadow"],
    scores: Sequence[numpy.ndarray],
    victims: Sequence[_Victim],
    seed: int,
) -> MembershipRow:
    members = [victim.case.members for victim in victims]
    areas = [roc_auc_score(m, s) for m, s in zip(members, scores)]
    mean = clustered_mean(torch.tensor(areas), torch.arange(len(areas))).within(0, 1)
    grid = numpy.linspace(0, 1, POINTS)
    curves = [_curve(m, s) for m, s in zip(members, scores)]
    heights = numpy.mean([numpy.interp(grid, *curve) for curve in curves], axis=0)
    early = numpy.mean([numpy.interp(EARLY, *curve) for curve in curves])
    return MembershipRow(
        entry=key,
        attack=attack,
        clients=len(victims),
        members=int(sum(m.sum() for m in members)),
        others=int(sum((~m).sum() for m in members)),
        auc=mean.mean,
        low=mean.low,
        high=mean.high,
        early=float(early),
        curve=tuple((float(x), float(y)) for x, y in zip(grid.round(3), heights.round(4))),
        others_from=victims[0].others_from,
        seed=seed,
    )


def _curve(members: numpy.ndarray, scores: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    false, true, _ = roc_curve(members, scores, drop_intermediate=False)
    return false, true


# --- evidence -------------------------------------------------------------------------------------


def _losses(senders: Senders, cases: Sequence[_Case]) -> Iterator[numpy.ndarray]:
    """Features ``(n, 3)``: minus the loss under the client's weights, its fall, and before."""
    broadcast = senders.broadcast
    before = [_negative_losses(senders, broadcast.weights, case.asked) for case in cases]
    updates: list[Weights] = []
    worker = senders.pretender(
        local_epochs=senders.subject.worker.train.local_epochs,
        local_steps=senders.subject.worker.train.local_steps,
    )
    for update in senders.trained([case.holding for case in cases], worker, broadcast):
        updates.append({name: t.detach().clone() for name, t in update.weights.items()})
    for case, first, weights in zip(cases, before, updates):
        after = _negative_losses(senders, broadcast.weights | weights, case.asked)
        yield numpy.stack([after, after - first, first], axis=1)


def _negative_losses(senders: Senders, weights: Weights, asked: Examples) -> numpy.ndarray:
    subject = senders.subject
    network = subject.network(weights)
    labels = asked.labels
    with torch.inference_mode():
        parts = [
            network(as_unit(asked.images(p), subject.worker.device)).float().cpu()
            for p in torch.arange(len(asked)).split(64)
        ]
    losses = torch.nn.functional.cross_entropy(torch.cat(parts), labels, reduction="none")
    return -losses.numpy().astype(numpy.float64)


def _of_entry(senders: Senders, entry: SentEntry) -> Evidence:
    def look(cases: Sequence[_Case], clients: Sequence[int] | None) -> list[numpy.ndarray]:
        if clients is None:
            sent = senders.pretended(entry, [case.holding for case in cases])
        else:
            by_client = senders.real(entry, clients)
            sent = [by_client[client] for client in clients]
        return [_distances(senders, entry, case, rows) for case, rows in zip(cases, sent)]

    return look


def _distances(senders: Senders, entry: SentEntry, case: _Case, sent: Tensor) -> numpy.ndarray:
    """Features ``(n, 3)``: minus the distance to the nearest row, the best cosine, the length."""
    classes = senders.subject.worker.network.classes
    holdings = one_each(case.asked.images(), case.asked.labels, classes)
    own = torch.cat([rows[:1] for rows in senders.pretended(entry, holdings)]).double()
    centre, scale = own.mean(0), own.std(0).clamp(min=1e-8)
    own, rows = (own - centre) / scale, (sent.double() - centre) / scale
    distances = torch.cdist(own, rows).amin(1)
    unit = [torch.nn.functional.normalize(part, dim=1) for part in (own, rows)]
    cosines = (unit[0] @ unit[1].T).amax(1)
    return torch.stack([-distances, cosines, own.norm(dim=1)], 1).numpy()


# --- who is asked about ---------------------------------------------------------------------------


def _victims(senders: Senders, effort: MembershipEffort) -> Iterator[_Victim]:
    subject = senders.subject
    images, table = subject.images, subject.images.table
    aside = numpy.concatenate([images.splits.id_test, images.splits.id_val])
    clients = chosen_clients(subject, effort.clients, effort.seed)
    for client in clients:
        own = images.examples(client)
        domains = own.domains.unique().numpy()
        chance = stream(effort.seed, "membership", client)
        elsewhere = numpy.setdiff1d(images.splits.train, own.rows.numpy())
        elsewhere = elsewhere[numpy.isin(table.domains[elsewhere], domains)]
        unused = aside[numpy.isin(table.domains[aside], domains)]
        from_aside = len(unused) >= FEWEST
        others = _drawn(unused if from_aside else elsewhere, effort.images, chance)
        rest = numpy.setdiff1d(elsewhere, others)
        members = _drawn(own.rows.numpy(), effort.images, chance)
        count = min(len(members), len(others))
        if count < FEWEST or len(own) < 2 * FEWEST:
            continue
        case = _case(own, members[:count], others[:count], table.labels, table.domains)
        shadows = list(_shadows(own, rest, effort, chance, table.labels, table.domains))
        said = "validation and test images" if from_aside else "other clients"
        yield _Victim(client, case, shadows, said)


def _shadows(
    like: Examples,
    rows: numpy.ndarray,
    effort: MembershipEffort,
    chance: torch.Generator,
    labels: numpy.ndarray,
    domains: numpy.ndarray,
) -> Iterator[_Case]:
    """Clients of as many images of the same domains, none of them the client's own."""
    for _ in range(effort.shadows):
        drawn = _drawn(rows, min(2 * len(like), len(rows)), chance)
        half = len(drawn) // 2
        if half < FEWEST:
            return
        holding = _held_rows(like, drawn[:half], labels, domains)
        count = min(effort.images, half)
        yield _case(holding, drawn[:count], drawn[half : half + count], labels, domains)


def _case(
    holding: Examples,
    members: numpy.ndarray,
    others: numpy.ndarray,
    labels: numpy.ndarray,
    domains: numpy.ndarray,
) -> _Case:
    asked = _held_rows(holding, numpy.concatenate([members, others]), labels, domains)
    return _Case(holding, asked, numpy.arange(len(members) + len(others)) < len(members))


def _held_rows(
    like: Examples, rows: numpy.ndarray, labels: numpy.ndarray, domains: numpy.ndarray
) -> Examples:
    own, of_class, of_domain = map(torch.from_numpy, (rows, labels[rows], domains[rows]))
    return Examples(like.pixels, own, of_class, of_domain, like.classes)


def _drawn(rows: numpy.ndarray, count: int, chance: torch.Generator) -> numpy.ndarray:
    order = torch.randperm(len(rows), generator=chance).numpy()
    drawn: numpy.ndarray = rows[order[:count]]
    return drawn
