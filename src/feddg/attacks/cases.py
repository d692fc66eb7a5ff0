"""Of which images membership is asked: a client's own, others, and those of shadow clients."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy
import torch

from feddg.attacks.senders import Senders
from feddg.attacks.targets import chosen_clients
from feddg.clients.client import Examples
from feddg.rng import stream

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
class Case:
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
class Victim:
    """A client that is attacked.

    Attributes:
        client: its id.
        case: what is asked of it.
        shadows: made-up clients like it, of others' images.
        others_from: where the images come from that are not its own.
    """

    client: int
    case: Case
    shadows: list[Case]
    others_from: str


def victims_of(senders: Senders, effort: MembershipEffort) -> Iterator[Victim]:
    """Yields the clients that are attacked, with their shadows, all from the effort's seed."""
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
        yield Victim(client, case, shadows, said)


def _shadows(
    like: Examples,
    rows: numpy.ndarray,
    effort: MembershipEffort,
    chance: torch.Generator,
    labels: numpy.ndarray,
    domains: numpy.ndarray,
) -> Iterator[Case]:
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
) -> Case:
    asked = _held_rows(holding, numpy.concatenate([members, others]), labels, domains)
    return Case(holding, asked, numpy.arange(len(members) + len(others)) < len(members))


def _held_rows(
    like: Examples, rows: numpy.ndarray, labels: numpy.ndarray, domains: numpy.ndarray
) -> Examples:
    own, of_class, of_domain = map(torch.from_numpy, (rows, labels[rows], domains[rows]))
    return Examples(like.pixels, own, of_class, of_domain, like.classes)


def _drawn(rows: numpy.ndarray, count: int, chance: torch.Generator) -> numpy.ndarray:
    order = torch.randperm(len(rows), generator=chance).numpy()
    drawn: numpy.ndarray = rows[order[:count]]
    return drawn
