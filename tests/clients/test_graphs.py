"""Recorded steps: they give the numbers of ordinary ones, and what cannot be recorded is not."""

import gc
import logging
import random
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autocast_device import with_autocast
from feddg.clients import graphs
from feddg.clients.client import Batch, Client, Prepared, Worker
from feddg.diagnostics import collected
from feddg.federation import local_training
from feddg.messages import Message
from feddg.methods.base import Method, methods
from feddg.settings import TrainSettings
from feddg.testing import MethodFault, check_method
from feddg.testing.methods import a_recorded_step_does_the_same
from federations import SmallFederation, federation, same

VARIANTS = {
    "pardon, stylized copies of each batch": ("pardon", {"stylized": "on_the_fly"}),
    "pardon, as the released code": ("pardon", {"stylization": "released"}),
    "pardon, ordinary triplets": ("pardon", {"contrastive": "ordinary"}),
    "pardon, copies classified too": (
        "pardon",
        {"contrastive": "none", "stylized_cross_entropy": True},
    ),
    "ccst as PARDON has it": ("ccst", {"variant": "pardon"}),
    "ccst, copies of each batch": ("ccst", {"variant": "pardon", "stylized": "on_the_fly"}),
    "pardon+mixstyle": ("pardon+mixstyle", {"mix_probability": 1.0}),
    "vrex, within domains": ("vrex", {"vrex_anneal": 0, "vrex_variance": "within"}),
    "mmd, pairs repeated": ("mmd", {"mmd_pairs": "repeated"}),
    "coral, as its benchmark": ("coral", {"coral_form": "benchmark"}),
    "afl, over domains": ("afl", {"afl_over": "domains"}),
}
ALL = {name: (name, {}) for name in sorted(methods())} | VARIANTS
QUICK = {
    *("fedavg", "scaffold", "fedbn", "fedsr", "fpl", "mixstyle", "pardon", "fedig-a", "randaug"),
    *("elcfs", "pardon, as the released code"),
}
"""One of each kind: plain steps, hooks of an optimizer, layers of its own, draws inside the
network, tensors that grow, layers that are replaced, cached copies, inner steps, none that is
recorded, weights that are seen expanded first, and copies of each batch."""
MIXED = {"fedavg", "fpl", "fedig-a", "pardon, as the released code"}
ROUNDED = {"fpl", "randconv", "vista"}
"""Methods whose recorded steps multiply by rows of zeros besides, which some processors' kernels
add up in another order."""
PLAIN_AT_ONE_DOMAIN = {"fish"}
"""The page counts clients of two domains; those here have one."""
PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"


def both(
    method: str | Method, device: str, rounds: int = 4, settings: Any = None, **fields: Any
) -> tuple[SmallFederation, dict[str, Tensor]]:
    """A federation after rounds with recorded steps, and the weights of ordinary ones."""
    chosen = {"rounds": rounds, "batch_size": 4, "schedule": "linear", "schedule_final": 0.5}
    chosen |= {"optimizer": "sgd", "lr": 0.05} if method == "scaffold" else {}
    chosen |= fields.pop("train", {})
    options = {"sizes": (8, 8), "device": device} | fields

    def made(recorded: bool) -> SmallFederation:
        own = options | {"train": TrainSettings(graphs=recorded, **chosen)}
        if isinstance(method, str):
            own["settings"] = settings or {}
        return federation(method, **own)

    ordinary, recorded = made(False), made(True)
    expected = ordinary.run()
    recorded.run()
    for one, other in zip(ordinary.replies, recorded.replies, strict=True):
        terms = pytest.approx(other.terms, rel=1e-4) if method in ROUNDED else other.terms
        assert one.terms == terms
    return recorded, expected


def on_page() -> dict[str, str]:
    """Whether a method's steps are recorded, as the page says."""
    rows = re.findall(r"^\| ([a-z0-9_-]+) \| (yes|no)", PAGE.read_text("utf-8"), re.MULTILINE)
    assert {name for name, _ in rows} == set(methods())
    return dict(rows)


def far(weights: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """How far weights are from others, as a share of these."""
    ours, theirs = (
        torch.cat([own[name].double().flatten() for name in others]) for own in (weights, others)
    )
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in ALL]
)
def test_replayed_steps_have_the_bits_of_ordinary_ones(case: str, device: str) -> None:
    name, settings = ALL[case]
    rounds = {"mixstyle": 8, "dart": 10}.get(name, 4)
    recorded, expected = both(name, device, rounds, settings)
    if case in ROUNDED:
        assert far(recorded.server.state.weights, expected) < 1e-4
    else:
        assert same(recorded.server.state.weights, expected)
    assert recorded.server.state.round == rounds
    found = recorded.worker.graphs
    if name in methods() and name not in PLAIN_AT_ONE_DOMAIN:
        assert (on_page()[name] == "yes") == bool(found.replayed), found.refused
    assert found.replayed or found.refused or recorded.method.one_round


@pytest.mark.parametrize(
    "case",
    [case if case in MIXED else pytest.param(case, marks=pytest.mark.slow) for case in ALL],
)
def test_replayed_steps_in_mixed_precision_have_the_bits_of_ordinary_ones(
    case: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_autocast()
    new_worker, seen = SmallFederation.new_worker, set[torch.dtype]()
    context = partial(torch.autocast, device, torch.bfloat16, cache_enabled=False)

    def in_bfloat16(self: SmallFederation) -> Worker:
        worker = replace(new_worker(self), autocast=context)
        worker.network.classifier.register_forward_hook(lambda *passed: seen.add(passed[2].dtype))
        return worker

    monkeypatch.setattr(SmallFederation, "new_worker", in_bfloat16)
    name, settings = ALL[case]
    recorded, expected = both(name, device, {"mixstyle": 8, "dart": 10}.get(name, 4), settings)
    if case in ROUNDED:
        assert far(recorded.server.state.weights, expected) < 1e-2
    else:
        assert same(recorded.server.state.weights, expected)
    found = recorded.worker.graphs
    assert found.replayed or found.refused or recorded.method.one_round
    if name in methods() and name not in PLAIN_AT_ONE_DOMAIN:
        assert (on_page()[name] == "yes") == bool(found.replayed), found.refused
    assert torch.bfloat16 in seen or recorded.method.one_round


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in sorted(methods())],
)
def test_a_step_leaves_no_graph_behind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take, left = local_training.Steps.take, list[Tensor]()

    def taken(self: local_training.Steps, prepared: Prepared) -> None:
        take(self, prepared)
        tensors = (each for each in gc.get_objects() if isinstance(each, Tensor))
        left.extend(t for t in tensors if t.grad_fn is not None)

    # Its nodes would add the next gradients, too, on the stream of their own step.
    train = TrainSettings(rounds=1, batch_size=4, optimizer="sgd")
    small = federation(name, sizes=(8,), train=train)
    small.server.setup()
    gc.collect()
    gc.disable()
    try:
        with monkeypatch.context() as during:
            during.setattr(local_training.Steps, "take", taken)
            small.server.round()
    finally:
        gc.enable()
    assert not left


class Reads(Method):
    """A method whose steps depend on what ``value`` finds on the host."""

    name = "reads"

    def __init__(self, value: Callable[[Client, Batch], Any]) -> None:
        super().__init__()
        self.value = value

    def begin(self, client: Client) -> None:
        """Keeps a generator of its own."""
        super().begin(client)
        client.scratch["numbers"] = random.Random(f"{client.id} {client.round}")

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """Scales the loss by it."""
        return {
            name: (1 + self.value(client, batch)) * t
            for name, t in super().loss(client, batch).items()
        }


def noted(client: Client, batch: Batch) -> int:
    client.scratch.setdefault("noted", []).append(batch.labels)
    return 0


FROM_THE_HOST: dict[str, tuple[Callable[[Client, Batch], Any], str]] = {
    "the step": (lambda client, batch: client.steps, "reads client.steps"),
    "the round": (lambda client, batch: client.round, "reads client.round"),
    "the client": (lambda client, batch: client.id, "reads client.id"),
    "labels": (lambda client, batch: int(batch.labels_here[0]), "host's memory"),
    "positions": (lambda client, batch: batch.positions.sum().item(), "host's memory"),
    "a list": (lambda client, batch: 0 * len(batch.labels_here.tolist()), "batch.host_labels"),
    "a stream": (
        lambda client, batch: float(torch.rand((), generator=client.stream("x"))),
        "stream",
    ),
    "an answer": (lambda client, batch: batch.labels.sum().item(), "_local_scalar_dense"),
    "a mask": (lambda client, batch: batch.labels[batch.labels > 0].sum(), "aten.index"),
    "a count": (
        lambda client, batch: batch.labels.bincount(minlength=9)[0] * 0,
        "aten.bincount",
    ),
    "a solver's fault": (
        lambda client, batch: torch.linalg.inv(batch.images.new_ones(1, 1)).sum(),
        "aten._linalg_check_errors",
    ),
    "a constant": (lambda client, batch: torch.tensor([1.0]).to(client.device)[0], "host's memory"),
    "a constant made there": (
        lambda client, batch: torch.tensor(1.0, device=client.device),
        "aten.lift_fresh",
    ),
    "a number sent there": (
        lambda client, batch: torch.tensor(0.5).to(client.device),
        "sends a number of the host",
    ),
    "a number beside a tensor": (
        lambda client, batch: torch.where(batch.images > 0, batch.images, torch.tensor(0.0)).sum(),
        "sends a number of the host",
    ),
    "PyTorch": (lambda client, batch: 0 * float(torch.rand(())), "global generator"),
    "Python": (lambda client, batch: 0 * random.random(), "global generator"),
    "its own": (lambda client, batch: client.scratch["numbers"].random(), "client.scratch"),
    "what it notes": (noted, "client.scratch"),
}


OTHERS = ("the round", "the client", "positions", "a stream", "a constant", "Python", "a count")
"""Found in the same way as what stands beside them."""


@pytest.mark.parametrize(
    "kinds", [FROM_THE_HOST.keys() - OTHERS, pytest.param(OTHERS, marks=pytest.mark.slow)]
)
def test_steps_that_need_the_host_are_ordinary_ones(
    kinds: Collection[str],
    subtests: pytest.Subtests,
    device: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for what in sorted(kinds):
        with subtests.test(what=what):
            caplog.clear()
            value, reason = FROM_THE_HOST[what]
            with caplog.at_level(logging.INFO, "feddg"):
                recorded, expected = both(Reads(value), device)
            assert recorded.worker.graphs.replayed == 0
            assert reason in recorded.worker.graphs.refused["reads"]
            assert same(recorded.server.state.weights, expected)
            assert sum("are not recorded" in line for line in caplog.messages) == 1


def test_a_tensor_of_a_round_that_no_scratch_shows_is_found(device: str) -> None:
    class Hidden(Method):
        name = "hidden"

        def optimizer(self, client: Client) -> torch.optim.Optimizer:
            made = super().optimizer(client)
            own = client.received["classifier.weight"].clone()

            def add(*_: Any) -> None:
                client.network.classifier.weight.grad.add_(own)

            made.register_step_pre_hook(add)
            return made

    recorded, expected = both(Hidden(), device, 6)
    assert "own turn" in recorded.worker.graphs.refused["hidden"]
    assert same(recorded.server.state.weights, expected)


class Coins(Method):
    """Draws between steps, and keeps on the host what steps look at."""

    name = "coins"

    def begin(self, client: Client) -> None:
        """The network is told, too."""
        client.network.late = client.round > 3
        client.scratch["coins"] = client.numpy_stream("coins")

    def draws(self, client: Client, positions: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Throws one."""
        client.scratch["heads"] = bool(client.scratch["coins"].random() < 0.2)
        return super().draws(client, positions, labels)

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """Looks at it."""
        terms = super().loss(client, batch)
        if client.scratch["heads"] or client.network.late:
            terms["penalty"] = 0.1 * client.network.classifier.weight.square().sum()
        return terms


def test_what_the_host_holds_between_steps_makes_another_step(device: str) -> None:
    recorded, expected = both(Coins(), device, 9)
    assert recorded.worker.graphs.replayed > 0
    assert same(recorded.server.state.weights, expected)


class PlainSGD(Method):
    """An optimizer whose rate is a number of the host."""

    name = "plain-sgd"

    def optimizer(self, client: Client) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(client.network.parameters(), client.train.lr)


def test_the_rate_of_an_optimizer_of_ones_own_is_that_of_the_round(device: str) -> None:
    schedule = {"schedule": "step", "schedule_steps": (0.5,), "schedule_final": 0.0}
    recorded, expected = both(PlainSGD(), device, 8, train=schedule)
    assert recorded.worker.graphs.replayed > 0
    assert same(recorded.server.state.weights, expected)


def test_what_a_first_step_makes_is_not_taken_for_what_stays(device: str) -> None:
    class OfItsOwn(Method):
        name = "own"

        def optimizer(self, client: Client) -> torch.optim.Optimizer:
            return torch.optim.SGD(client.network.parameters(), 0.05, momentum=0.5)

    recorded, expected = both(OfItsOwn(), device, 6)
    assert recorded.worker.graphs.replayed == 0
    assert recorded.worker.graphs.refused
    assert same(recorded.server.state.weights, expected)


def test_a_replay_that_does_something_else_is_refused(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(self: graphs.Graphs, step: Callable[[], None], there: torch.device) -> Any:
        def replay() -> None:
            step()
            parameter.data.mul_(1 + 1e-5)

        return replay

    monkeypatch.setattr(graphs.Graphs, "recorded", wrong)
    made = graphs.Turn.__init__
    parameter = torch.nn.Parameter(torch.empty(0))

    def begun(self: graphs.Turn, client: Client, method: Any) -> None:
        nonlocal parameter
        parameter = client.network.classifier.weight
        made(self, client, method)

    monkeypatch.setattr(graphs.Turn, "__init__", begun)
    recorded, expected = both("fedavg", device)
    assert recorded.worker.graphs.replayed == 0
    assert "apart from its replay" in recorded.worker.graphs.refused["fedavg"]
    assert same(recorded.server.state.weights, expected)
    assert any("it is not replayed" in line for line in caplog.messages)


def test_steps_that_differ_by_chance_are_replayed_and_others_to_the_bit() -> None:
    def left(error: float) -> list[torch.Tensor]:
        return [torch.tensor([1 + error, 2.0], dtype=torch.float64)]

    def unknown(value: float) -> list[torch.Tensor]:
        return [torch.tensor([torch.nan, value])]

    assert not graphs._apart(unknown(1.0), [unknown(1.0)], unknown(1.0))
    assert "apart" in graphs._apart(unknown(1.0), [unknown(1.0)], unknown(2.0))
    assert "apart" in graphs._apart(unknown(1.0), [unknown(1.0)], unknown(torch.nan))
    by_chance = [left(0.0), left(1e-5), left(3e-6)]
    assert not graphs._apart(left(0.0), by_chance, left(5e-5))
    assert "apart from its replay" in graphs._apart(left(0.0), by_chance, left(5e-4))
    assert "apart from its replay" in graphs._apart(left(0.0), [left(0.0)] * 3, left(1e-9))


def test_after_a_recording_has_failed_none_begins(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def failing(*_: Any, **__: Any) -> Iterator[None]:
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(graphs.Graphs, "broken", False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", failing)
    with pytest.raises(RuntimeError, match="during capture"):
        graphs.Graphs().recorded(lambda: None, torch.device("cuda"))
    recorded, expected = both("fedavg", device)
    assert recorded.worker.graphs.replayed == 0
    assert same(recorded.server.state.weights, expected)


def test_each_shape_has_a_graph_and_few_are_kept(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(recorded: SmallFederation) -> int:
        return sum(r.replay is not None for r in recorded.worker.graphs.records.values())

    sizes = (6, 6)  # batches of four and of two
    recorded, expected = both("fedavg", device, 5, sizes=sizes)
    assert kept(recorded) == 2
    assert same(recorded.server.state.weights, expected)
    monkeypatch.setattr(graphs, "MOST_RECORDS", 1)  # each shape drives the other one out
    recorded, expected = both("fedavg", device, 4, sizes=sizes)
    assert (kept(recorded), len(recorded.worker.graphs.records)) == (0, 1)
    assert same(recorded.server.state.weights, expected)


def test_a_client_that_was_alone_is_compared_with_the_next_one(device: str) -> None:
    def run(recorded: bool) -> SmallFederation:
        train = TrainSettings(rounds=6, batch_size=4, graphs=recorded)
        small = federation(Remembers(), sizes=(8, 8), device=device, train=train)
        small.server.setup()
        small.server.sample = lambda round, attempt=0: [int(round > 4)]
        for _ in range(6):
            small.server.round()
        return small

    recorded, ordinary = run(True), run(False)
    assert recorded.worker.graphs.replayed > 0
    assert same(recorded.server.state.weights, ordinary.server.state.weights)


class Remembers(Method):
    """Adds to the gradient what only the client has, where a recorded step finds it each time."""

    name = "remembers"

    def begin(self, client: Client) -> None:
        """Takes it from memory."""
        super().begin(client)
        like = client.network.classifier.bias.detach()
        client.scratch["own"] = client.memory.get("own", torch.full_like(like, client.id))
        client.scratch["again"] = [client.scratch["own"]]

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """Adds it, and changes it in place."""
        client.scratch["own"].add_(0.1)
        own = (client.scratch["again"][0] * client.network.classifier.bias).sum()
        return super().loss(client, batch) | {"own": own}

    def report(self, client: Client) -> Message:
        """Keeps it, the very tensor that is changed."""
        client.memory["own"] = client.scratch["own"]
        return super().report(client)


def test_what_a_client_keeps_is_its_own(device: str) -> None:
    recorded, expected = both(Remembers(), device, 6)
    assert recorded.worker.graphs.replayed > 0
    assert same(recorded.server.state.weights, expected)


class Overlaps(Remembers):
    """What it reads is a part of what it changes."""

    def begin(self, client: Client) -> None:
        """Takes a part of it."""
        super().begin(client)
        client.scratch["again"] = [client.scratch["own"][:1]]


def test_a_part_of_a_tensor_that_is_kept_stays_one(device: str) -> None:
    recorded, expected = both(Overlaps(), device, 6)
    assert "own turn" in recorded.worker.graphs.refused["remembers"]
    assert same(recorded.server.state.weights, expected)


class LooksAtAPart(Method):
    """A step that looks at a part of a weight before it uses the whole weight."""

    name = "part"

    def begin(self, client: Client) -> None:
        """Keeps the part."""
        super().begin(client)
        client.scratch["part"] = client.network.classifier.weight.detach()[:1]

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """Adds its length, which has no gradient."""
        length = client.scratch["part"].norm()
        return super().loss(client, batch) | {"length": length}


def test_a_weight_of_which_a_part_is_seen_first_is_put_back_whole(device: str) -> None:
    recorded, expected = both(LooksAtAPart(), device)
    assert recorded.worker.graphs.replayed > 0
    assert same(recorded.server.state.weights, expected)


@pytest.mark.parametrize("when", ["saved", "tried"])
def test_a_recording_for_which_memory_is_too_small_is_left_out(
    when: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    if when == "saved":
        record = graphs.Turn._record

        def recording(self: graphs.Turn, *given: Any) -> None:
            with monkeypatch.context() as during:
                during.setattr(Tensor, "clone", full)
                record(self, *given)

        monkeypatch.setattr(graphs.Turn, "_record", recording)
    else:
        monkeypatch.setattr(graphs.Graphs, "recorded", full)
    recorded, expected = both("fedavg", device)
    assert recorded.worker.graphs.replayed == 0
    assert "out of memory" in recorded.worker.graphs.refused["fedavg"]
    assert same(recorded.server.state.weights, expected)


def test_only_heads_then_all(device: str) -> None:
    recorded, expected = both("fedavg", device, 8, train={"head_rounds": 4})
    assert recorded.worker.graphs.replayed > 8
    assert same(recorded.server.state.weights, expected)


class Notes:
    """Something that a method keeps besides tensors."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []


def test_a_check_finds_what_only_python_does(device: str) -> None:
    class Collects(Method):
        name = "collects"

        def begin(self, client: Client) -> None:
            super().begin(client)
            client.scratch["notes"] = Notes()

        def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
            terms = super().loss(client, batch)
            client.scratch["notes"].losses.append(terms["cross_entropy"].detach())
            return terms

        def report(self, client: Client) -> Message:
            none = torch.zeros((), device=client.device)
            noted = torch.stack([none, *client.scratch["notes"].losses]).sum()
            with torch.no_grad():
                client.network.classifier.bias.add_(noted)
            return super().report(client)

    with pytest.raises(MethodFault, match="with recorded steps"):
        check_method(Collects, [a_recorded_step_does_the_same])


def test_a_check_says_why_steps_are_not_recorded(device: str) -> None:
    with collected() as noted:
        check_method(methods()["rsc"], [a_recorded_step_does_the_same])
    assert [one.code for one in noted] == ["not-recorded"]
    assert "client.round" in noted[0].text
