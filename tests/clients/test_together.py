"""Batches across clients: the numbers of batches of their own, in fewer batches."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from feddg.clients import client, together
from feddg.clients.together import Together
from feddg.errors import ClientError
from feddg.messages import Message, Refusal, Update
from feddg.settings import TrainSettings
from feddg.testing.device import traffic
from federations import SmallFederation, federation

SIZES = (4, 9, 3, 5, 2, 22, 6)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ridge": ("ridge", {}, {"trainable": "head"}),
    "a head in closed form": ("fedavg", {}, {"head": "ridge"}),
    "a head of several versions": ("outlines", {}, {"head": "ridge"}),
    "frozen features": ("fedavg", {}, {"trainable": "head"}),
    "losses of clients": ("afl", {}, {}),
    "losses of domains": ("afl", {"afl_over": "domains"}, {}),
    "gaps": ("feddg-ga", {}, {}),
    "pardon": ("pardon", {}, {}),
    "pardon, clusters of maps": ("pardon", {"local_features": "flatten"}, {}),
    "pardon, as the released code": ("pardon", {"stylization": "released"}, {}),
    "ccst": ("ccst", {}, {}),
    "ccst as PARDON has it": ("ccst", {"variant": "pardon"}, {}),
}


@contextmanager
def batches(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Lets batches across clients have so many images.

    Yields how many those of all fixed networks have, and clients' features.
    """
    seen, features = list[int](), dict[str, Tensor]()
    by_image, kept = Together.by_image, client.Client.kept_features

    def noted(self: Together, one: client.Client, name: Any, compute: Any, *more: Any) -> Any:
        def work(clients: list[client.Client]) -> Any:
            seen.append(sum(len(each.examples) for each in clients))
            return compute(clients)

        return by_image(self, one, name, work, *more)

    def kept_features(self: client.Client, seen: Any, digest: str) -> Tensor:
        features[f"of client {self.id}"] = found = kept(self, seen, digest)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(together, "images_at_once", lambda side, device: most)
        patch.setattr(Together, "by_image", noted)
        patch.setattr(client.Client, "kept_features", kept_features)
        yield seen, features


SOME = ("ridge", "a head of several versions", "pardon, clusters of maps", "ccst", "gaps")


@pytest.mark.parametrize(
    "case", [c if c in SOME else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_who_shares_a_batch_does_not_matter(
    case: str, device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, settings, chosen = CASES[case]
    train = TrainSettings(rounds=1, batch_size=32, optimizer="sgd", lr=0.01, **chosen)

    def run(most: int, place: str = device, cache: Path | None = None) -> SmallFederation:
        options = {"sizes": SIZES, "size": 8, "device": place, "cache": cache}
        with batches(monkeypatch, most) as (seen, features):
            made = federation(name, settings=settings, train=train, **options)
            made.fit(1)
        # Solving for a head divides by what differs little between images.
        solved = "ridge" in (name, train.head)
        state = made.server.state
        made.seen, made.found = seen, features if solved else state.weights | state.extras
        return made

    alone = run(0)
    shared, all_at_once, here = run(20), run(1000, cache=tmp_path), run(1000, "cpu")
    assert here.seen == alone.seen  # on a CPU nobody joins
    assert sum(shared.seen) == sum(alone.seen)
    assert len(alone.seen) > len(shared.seen) > len(all_at_once.seen)
    assert max(shared.seen) == max(SIZES)
    for other in (shared, all_at_once, here):
        for one, two in zip(alone.replies, other.replies, strict=True):
            assert one.client == two.client
        assert other.found.keys() == alone.found.keys()
        for entry, tensor in alone.found.items():
            expected, found = (t.cpu().double() for t in (tensor, other.found[entry]))
            # A gap is the difference of two losses, and weighs by its share of the largest.
            close = {"pardon": 0.0, "ccst": 0.0, "feddg-ga": 1e-4}.get(name, 1e-6)
            assert (found - expected).norm() <= close * expected.norm(), entry


def test_clients_with_networks_of_their_own_share_no_outputs(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = federation("feddg-ga+fedbn", sizes=(4, 3), size=8, device=device)
    with batches(monkeypatch, 1000) as (seen, _):
        made.fit(1)
    assert [type(reply) for reply in made.replies] == [Update, Update]
    assert not seen


PHASES: dict[str, tuple[str, dict[str, Any]]] = {
    "losses": ("afl", {}),
    "maps": ("pardon", {"local_features": "flatten"}),
    "features": ("ridge", {}),
}


@pytest.mark.parametrize("phase", PHASES)
def test_launches_grow_with_batches_of_images(
    phase: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "images_at_once", lambda side, device: 20)
    name, settings = PHASES[phase]
    train = TrainSettings(trainable="head" if name == "ridge" else "all")

    def launches(clients: int) -> int:
        """What is launched on the device for clients of five images, besides the first images."""
        made = federation(
            name, settings=settings, train=train, sizes=(5,) * clients, size=8, device=device
        )
        made.pixels.gather(torch.arange(5 * clients), made.worker.device)
        sent = made.method.broadcast(made.server.state)
        made.network.eval()
        with traffic() as seen:
            if phase == "features":
                with_images = Together(
                    made.transport.client(id, sent, made.worker) for id in range(clients)
                )
                done = [each.frozen_features() for each in with_images]
            elif phase == "maps":
                done = [*made.transport.client_statistics(range(clients), sent)]
            else:
                done = [*made.transport.ask(range(clients), sent, phase, Message())]
        assert len(done) == clients
        assert not [reply for reply in done if isinstance(reply[1], Refusal)]
        return seen.launches

    of_batch = launches(1)
    for count in (1, 2, 3):  # a client's own are its weights, and reading them
        assert launches(4 * count) <= count * of_batch + 2 * 4 * count


class Images:
    """Images of a client that is none."""

    def __init__(self, count: int) -> None:
        self.side = 8
        self.count = count

    def __len__(self) -> int:
        return self.count


class One(SimpleNamespace):
    """A client by whom something is asked."""

    __hash__ = object.__hash__


def clients(*counts: int) -> list[Any]:
    """Clients of so many images."""
    there = torch.device("cuda")  # where nothing is done
    return [One(id=id, device=there, examples=Images(count)) for id, count in enumerate(counts)]


class Jobs:
    """Computes something for clients; one of them has nothing to give."""

    def __init__(self, broken: int | None) -> None:
        self.broken, self.computed = broken, list[int]()

    def ask(self, together: Together, one: Any) -> tuple[Tensor, ...]:
        """Each image's client plus one, and times two."""

        def name(other: Any) -> str:
            if other.id == self.broken:
                raise ClientError("it has no style")
            return "numbers"

        def compute(clients: Any) -> tuple[Tensor, ...]:
            numbers = torch.cat([torch.full((len(c.examples),), float(c.id)) for c in clients])
            self.computed.append(len(numbers))
            return numbers + 1, numbers * 2

        return together.by_image(one, name, compute)


@pytest.mark.parametrize("broken", [None, 2])
def test_clients_join_as_far_as_they_fit_and_say_themselves_what_is_wrong(
    broken: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "images_at_once", lambda side, device: 60)
    jobs = Jobs(broken)
    with_jobs = Together(clients(3, 2, 1, 0, 4, 60, 1))
    for one in with_jobs:
        if one.id == broken:
            with pytest.raises(ClientError):
                jobs.ask(with_jobs, one)
        elif len(one.examples):
            more, twice = jobs.ask(with_jobs, one)
            assert more.tolist() == [one.id + 1.0] * len(one.examples)
            assert twice.tolist() == [one.id * 2.0] * len(one.examples)
    assert jobs.computed == ([3 + 2 + 1 + 4, 60, 1] if broken is None else [3 + 2 + 4, 60, 1])
