"""Membership inference: whether messages of a client reveal that an image was among its own.

Two attacks, each on weights and on what is sent beside them:

* *threshold*: an image is a member if its loss under the client's new weights is small, or if its
  own row is near the one that was sent (Yeom et al., "Privacy Risk in Machine Learning", CSF 2018);
* *shadow*: similar clients are made up from other clients' images, and a logistic regression learns
  from them to recognise members (Shokri et al., "Membership Inference Attacks Against Machine
  Learning Models", S&P 2017).

Members and others are alike in domains and classes. An area under the ROC curve of 0.5 is chance.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy
import torch
from torch import Tensor

from feddg.attacks.image_metrics import clustered_mean
from feddg.attacks.senders import (
    FEWEST_MEMBERS,
    Case,
    MembershipEffort,
    Senders,
    SentEntry,
    Victim,
    victims_of,
)
from feddg.clients.client import Examples
from feddg.data.pixels import as_unit
from feddg.diagnostics import Progress, silent
from feddg.errors import RunError
from feddg.evaluation.metrics import area_under_roc
from feddg.messages import Weights, copied
from feddg.records import MembershipRow

WEIGHTS = "update/weights"
POINTS = 21
"""Number of stored points of a ROC curve."""
EARLY = 0.01
"""False positive rate for the reported true positive rate."""


def membership(
    senders: Senders,
    entries: Sequence[SentEntry],
    effort: MembershipEffort,
    progress: Progress = silent,
    seed: int = 0,
) -> list[MembershipRow]:
    """Attacks the weights and every entry, by threshold and by shadow clients.

    Args:
        senders: the clients of the run.
        entries: what is sent besides the weights.
        effort: size of the attack.
        progress: called with (what, done, total).
        seed: of all random draws.

    Raises:
        RunError: no client has enough images, or the server sees nothing that tells of training.
    """
    hidden = senders.hides_training
    if hidden and not entries:
        raise RunError(f"{hidden}, and nothing else: the membership attack has nothing to read")
    victims = list(victims_of(senders, effort, seed))
    if not victims:
        raise RunError(
            f"membership needs clients of at least {2 * FEWEST_MEMBERS} images, and "
            f"{FEWEST_MEMBERS} of the same domains and classes that they do not hold; this run has "
            "none"
        )
    looked_at = [*([] if hidden else [None]), *entries]
    rows: list[MembershipRow] = []
    for done, entry in enumerate(looked_at):
        key = WEIGHTS if entry is None else entry.key
        progress(f"membership by {key}", done, len(looked_at))
        rows += _attacks(senders, entry, key, victims, seed)
    return rows


def _attacks(
    senders: Senders, entry: SentEntry | None, key: str, victims: Sequence[Victim], seed: int
) -> Iterator[MembershipRow]:
    clients = [victim.client for victim in victims]
    asked = _features(senders, entry, [victim.case for victim in victims], clients)
    shadows = [case for victim in victims for case in victim.shadows]
    of_shadows = iter(_features(senders, entry, shadows) if shadows else ())
    yield _row(key, "threshold", [features[:, 0] for features in asked], victims, seed)
    able = [(victim, features) for victim, features in zip(victims, asked) if victim.shadows]
    learnt = [_learnt([(next(of_shadows), c.members) for c in v.shadows], f) for v, f in able]
    if learnt:
        yield _row(key, "shadow", learnt, [victim for victim, _ in able], seed)


def _learnt(
    shadows: Sequence[tuple[numpy.ndarray, numpy.ndarray]], asked: numpy.ndarray
) -> numpy.ndarray:
    """Returns a logistic regression's scores, trained on shadow clients, for the asked features."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    features, members = (numpy.concatenate(part) for part in zip(*shadows))
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    return model.fit(features, members).decision_function(asked)


def _row(
    key: str,
    attack: Literal["threshold", "shadow"],
    scores: Sequence[numpy.ndarray],
    victims: Sequence[Victim],
    seed: int,
) -> MembershipRow:
    from sklearn.metrics import roc_curve

    members = [victim.case.members for victim in victims]
    areas = [area_under_roc(m, s) for m, s in zip(members, scores)]
    mean = clustered_mean(torch.tensor(areas), torch.arange(len(areas))).within(0, 1)
    grid = numpy.linspace(0, 1, POINTS)
    curves = [roc_curve(m, s, drop_intermediate=False)[:2] for m, s in zip(members, scores)]
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
        seed=seed,
    )


def _losses(senders: Senders, cases: Sequence[Case]) -> Iterator[numpy.ndarray]:
    """Yields features ``(n, 3)``: minus the new loss, the decrease, minus the loss before."""
    broadcast = senders.broadcast
    before = [_negative_losses(senders, broadcast.weights, case.asked) for case in cases]
    worker = senders.pretender(
        local_epochs=senders.loaded.worker.train.local_epochs,
        local_steps=senders.loaded.worker.train.local_steps,
    )
    updates = senders.trained([case.holding for case in cases], worker, broadcast)
    trained = [copied(update.weights) for update in updates]
    for case, first, weights in zip(cases, before, trained):
        after = _negative_losses(senders, broadcast.weights | weights, case.asked)
        yield numpy.stack([after, after - first, first], axis=1)


def _negative_losses(senders: Senders, weights: Weights, asked: Examples) -> numpy.ndarray:
    loaded = senders.loaded
    network = loaded.with_weights(weights)
    labels = asked.labels
    with torch.inference_mode():
        parts = [
            network(as_unit(asked.images(p), loaded.worker.device)).float().cpu()
            for p in torch.arange(len(asked)).split(64)
        ]
    losses = torch.nn.functional.cross_entropy(torch.cat(parts), labels, reduction="none")
    return -losses.numpy().astype(numpy.float64)


def _features(
    senders: Senders,
    entry: SentEntry | None,
    cases: Sequence[Case],
    clients: Sequence[int] | None = None,
) -> list[numpy.ndarray]:
    """Returns the features of the images asked about, from the weights or an entry beside them.

    Args:
        senders: the clients of the run.
        entry: the entry; None for the weights.
        cases: the images.
        clients: the ids of the cases' real clients, if they are any.
    """
    if entry is None:
        return list(_losses(senders, cases))
    if clients is None:
        sent = senders.pretended(entry, [case.holding for case in cases])
    else:
        by_client = senders.real(entry, clients)
        sent = [by_client[client] for client in clients]
    return [_distances(senders, entry, case, rows) for case, rows in zip(cases, sent)]


def _distances(senders: Senders, entry: SentEntry, case: Case, sent: Tensor) -> numpy.ndarray:
    """Returns features ``(n, 3)``: minus the distance to the nearest row, best cosine, norm."""
    pretended = senders.one_each(entry, case.asked.images(), case.asked.labels).double()
    centre, scale = pretended.mean(0), pretended.std(0).clamp(min=1e-8)
    pretended, rows = (pretended - centre) / scale, (sent.double() - centre) / scale
    distances = torch.cdist(pretended, rows).amin(1)
    unit = [torch.nn.functional.normalize(part, dim=1) for part in (pretended, rows)]
    cosines = (unit[0] @ unit[1].T).amax(1)
    return torch.stack([-distances, cosines, pretended.norm(dim=1)], 1).numpy()
