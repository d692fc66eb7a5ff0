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
from feddg.methods import style_exchange
from feddg.settings import TrainSettings
from federations import SmallFederation, federation

SIZES = (4, 9, 3, 5, 2, 22, 6)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ridge": ("ridge", {}, {"trainable": "head"}),
    "a head in closed form": ("fedavg", {}, {"head": "ridge"}),
    "a head of several versions": ("outlines", {}, {"head": "ridge"}),
    "frozen features": ("fedavg", {}, {"trainable": "head"}),
    "pardon": ("pardon", {}, {}),
    "pardon, as the released code": ("pardon", {"stylization": "released"}, {}),
    "ccst": ("ccst", {}, {}),
    "ccst as PARDON has it": ("ccst", {"variant": "pardon"}, {}),
}


@contextmanager
def batches(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Lets batches across clients have so many images.

    Yields those of all fixed networks, and clients' features.
    """
    seen, features = list[int](), dict[str, Tensor]()

    def noted(function: Any, place: int) -> Any:
        def work(*args: Any, **kwargs: Any) -> Any:
            seen.append(len(args[place]))
            return function(*args, **kwargs)

        return work

    with monkeypatch.context() as patch:
        patch.setattr(together, "images_at_once", lambda side, device: most)
        for name in ("measure", "transfer"):
            patch.setattr(style_exchange, name, noted(getattr(style_exchange, name), 1))
        kept = client.Client.kept_features

        def kept_features(self: client.Client, seen: Any, digest: str) -> Tensor:
            features[f"of client {self.id}"] = found = kept(self, noted(seen, 0), digest)
            return found

        patch.setattr(client.Client, "kept_features", kept_features)
        yield seen, features


SOME = ("ridge", "a head of several versions", "pardon", "ccst")


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
        made.seen, made.found = seen, features if solved else made.server.state.weights
        return made

    alone = run(0)
    shared, all_at_once, here = run(20), run(1000, cache=tmp_path), run(1000, "cpu")
    assert here.seen == alone.seen  # on a CPU nobody joins
    assert sum(shared.seen) == sum(alone.seen)
    assert len(alone.seen) > len(shared.seen) > len(all_at_once.seen)
    assert max(shared.seen) == max(SIZES)
    for other in (shared, all_at_once, here):
        for one, two in zip(alone.replies, other.replies, strict=True):
            assert (one.client, one.forwards) == (two.client, two.forwards)
        assert other.found.keys() == alone.found.keys()
        for entry, tensor in alone.found.items():
            expected, found = (t.cpu().double() for t in (tensor, other.found[entry]))
            close = 0.0 if name in ("pardon", "ccst") else 1e-6
            assert (found - expected).norm() <= close * expected.norm(), entry


class Images:
    """Images of a client that is none."""

    def __init__(self, count: int) -> None:
        self.pixels = SimpleNamespace(size=8)
        self.count = count

    def __len__(self) -> int:
        return self.count


class One(SimpleNamespace):
    """A client by whom something is asked."""

    __hash__ = object.__hash__


def clients(*counts: int) -> list[Any]:
    """Clients of so many images."""
    there = torch.device("cuda")  # where nothing is done
    return [
        One(id=id, device=there, examples=Images(count), forwards=0)
        for id, count in enumerate(counts)
    ]


class Jobs:
    """Computes something for clients; one of them has nothing to give."""

    def __init__(self, broken: int | None) -> None:
        self.broken, self.computed = broken, list[int]()

    def ask(self, together: Together, one: Any) -> tuple[Tensor, ...]:
        """Each image's client plus one, and times two; a network would see it three times."""

        def batches(other: Any) -> list[tuple[Tensor]]:
            if other.id == self.broken:
                raise ClientError("it has no style")
            return [(torch.full((len(other.examples),), float(other.id)),)]

        def compute(numbers: Tensor) -> tuple[Tensor, ...]:
            self.computed.append(len(numbers))
            one.forwards += 3 * len(numbers)
            return numbers + 1, numbers * 2

        return together.by_image(one, lambda _: "numbers", batches, compute)


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
            assert one.forwards == 3 * len(one.examples)
    assert jobs.computed == ([3 + 2 + 1 + 4, 60, 1] if broken is None else [3 + 2 + 4, 60, 1])
