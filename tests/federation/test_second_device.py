"""Every method on a device that is not the CPU: same numbers, and the host does not wait."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from feddg.clients.client import Batch, Client
from feddg.data.data_set import find_augmentation
from feddg.data.pixels import ArrayPixels
from feddg.federation.local_training import Steps
from feddg.messages import on_device
from feddg.methods.base import Method, methods
from feddg.models.backbones import register_backbone
from feddg.prediction.predict import predict
from feddg.settings import TrainSettings
from feddg.testing.device import Traffic, traffic
from federations import SmallFederation, federation, same
from trained_runs import SETTINGS, trained_run, write_images

VARIANTS = {
    "pardon, stylized copies of each batch": ("pardon", {"stylized": "on_the_fly"}),
    "pardon, clusters of feature maps": ("pardon", {"local_features": "flatten"}),
    "pardon, ordinary triplets": ("pardon", {"contrastive": "ordinary"}),
    "ccst as PARDON has it": ("ccst", {"variant": "pardon"}),
    "pardon+mixstyle": ("pardon+mixstyle", {}),
    "vista, every image in another style": ("vista", {"style_probability": 1.0}),
}
ALL = {name: (name, {}) for name in sorted(methods())} | VARIANTS


def small(case: str, steps: int, device: str, clients: int = 2) -> SmallFederation:
    """A federation of a few clients; in round 2 they know of each other."""
    name, chosen = ALL[case]
    return federation(
        name,
        settings=chosen,
        sizes=(4,) * clients,
        device=device,
        train=TrainSettings(rounds=2, batch_size=4, local_steps=steps),
        augmentation=find_augmentation("pacs"),
    )


def test_two_devices_do_not_mix(device: str) -> None:
    here, there = torch.ones(3), torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="same device"):
        here + there
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, device=device, generator=torch.Generator())
    with traffic() as seen:
        assert float((there + there.to(here)[0].item()).sum()) == 6
    assert sum(seen.waits.values()) == 2  # the copy to the CPU, and the sum's


def test_a_copy_to_the_device_waits_unless_it_comes_from_pinned_memory(device: str) -> None:
    here, there = torch.ones(3), torch.ones(3, device=device)
    for waits, copy in (
        (1, lambda: here.to(device)),
        (1, lambda: here.to(device, non_blocking=True)),
        (1, lambda: here.pin_memory().to(device)),
        (0, lambda: here.pin_memory().to(device, non_blocking=True)),
        (1, lambda: torch.tensor([1.0, 2.0], device=device)),
        (1, lambda: there[torch.tensor([0, 2])]),
        (1, lambda: there[[0, 2]]),
        (0, lambda: torch.zeros(3, device=device)),
    ):
        with traffic() as seen:
            copy()
        assert sum(seen.waits.values()) == waits
        assert len(seen.sent) == (not torch.equal(torch.zeros(3), copy().cpu()))


def test_tensors_of_all_kinds_go_together_and_keep_their_order_in_memory(device: str) -> None:
    tensors = {
        "whole": torch.arange(3),
        "flags": torch.tensor([True, False]),
        "number": torch.tensor(0.5),
        "nothing": torch.empty(0, 4),
        "last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "turned": torch.rand(2, 3, dtype=torch.float64).T,
    }
    with traffic() as seen:
        there = on_device(tensors, torch.device(device))
    assert (len(seen.sent), seen.waits) == (1, {})
    for name, tensor in tensors.items():
        assert there[name].dtype == tensor.dtype
        assert there[name].stride() == tensor.stride()
        assert torch.equal(there[name].cpu(), tensor), name


MOST_WAITS = {"pardon": 4, "ccst": 7, "copa": 4, "feddg-ga": 5, "afl": 5, "fpl": 6, "ridge": 60}
"""A turn's, with the server's work on it, where they are more than three: stylized copies, made in
every turn only without a cache; which classifiers there are; answers after a round; classes of
prototypes and their groups; the sums of single images."""


QUICK = {
    *("fedavg", "scaffold", "fedbn", "fpl", "mixstyle", "pardon", "ccst", "fedig-a", "feddg-ga"),
    *("ridge", "pardon, stylized copies of each batch"),
}
"""One of each kind; feddg.testing has every method train on the device."""


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in ALL]
)
def test_a_method_does_the_same_on_another_device_and_nothing_waits_for_it(
    case: str, device: str
) -> None:
    _, first = counted(small(case, 1, device))
    found, longer = counted(small(case, 2, device))
    _, wider = counted(small(case, 1, device, clients=4))
    assert {t.device.type for t in found.values()} == {device}
    if case in VARIANTS:  # feddg.testing compares the bits of all methods
        assert same({n: t.cpu() for n, t in found.items()}, small(case, 2, "cpu").run())
    if methods()[ALL[case][0].partition("+")[0]].waits:
        return
    assert longer.waits - first.waits == {}
    steps = turns = 2 * 2  # of two clients in two rounds
    passes = 2 if case == "ridge" else 1  # it sums its images again to answer
    assert len(longer.sent) - len(first.sent) <= passes * steps
    more = sum(wider.waits.values()) - sum(first.waits.values())
    assert more <= MOST_WAITS.get(ALL[case][0].partition("+")[0], 3) * turns


def counted(federation: SmallFederation) -> tuple[dict[str, torch.Tensor], Traffic]:
    """The weights after two rounds, and what passed to and fro in these, after the setup."""
    federation.server.setup()
    with traffic() as seen:
        for _ in range(2):
            federation.server.round()
    return federation.server.state.weights, seen


def test_a_constant_that_is_sent_in_a_step_is_found(device: str) -> None:
    class Sends(Method):
        name = "sends"

        def loss(self, client: Client, batch: Batch) -> dict[str, torch.Tensor]:
            terms = super().loss(client, batch)
            half = torch.tensor([0.5]).to(client.device)
            return terms | {"half": terms["cross_entropy"] * half[0]}

    def run(steps: int) -> Traffic:
        train = TrainSettings(rounds=2, batch_size=4, local_steps=steps)
        return counted(SmallFederation(Sends(), (4, 4), device=device, train=train))[1]

    first, longer = run(1), run(2)
    assert (longer.waits - first.waits).total() == 4
    assert len(longer.sent) - len(first.sent) == 8


def test_an_image_is_sent_once(device: str) -> None:
    images = numpy.arange(10 * 4 * 4 * 3, dtype=numpy.uint8).reshape(10, 4, 4, 3)
    store, there = ArrayPixels(images), torch.device(device)
    with torch.inference_mode(), traffic() as first:  # an evaluation may come first
        store.gather([7, 1, 7], there)
    with traffic() as second:
        again = store.gather([1, 8, 7, 8], there)
    with traffic() as third:
        store.gather([8, 7, 1], there)
    assert torch.equal(again.cpu(), store.gather([1, 8, 7, 8]))
    assert again.is_contiguous(memory_format=torch.channels_last)
    image = 64  # 4 x 4 x 3 bytes, from where a tensor may begin to where the next one may
    assert first.sent == [2 * image + 64, 64]  # images and where they stay; which are taken
    assert second.sent == [1 * image + 64, 64]
    assert third.sent == [64]
    assert not (first.waits + second.waits + third.waits)


@pytest.mark.parametrize("limit", ["SHARE", "LEFT"])
def test_images_that_do_not_fit_are_sent_each_time(
    device: str, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    images = numpy.arange(10 * 4 * 4 * 3, dtype=numpy.uint8).reshape(10, 4, 4, 3)
    share = (images.nbytes - 1) / 2**30
    monkeypatch.setattr(f"feddg.data.pixels.{limit}", share if limit == "SHARE" else 1 - share)
    store, there = ArrayPixels(images), torch.device(device)
    for _ in range(2):
        with traffic() as seen:
            assert torch.equal(store.gather([3, 4], there).cpu(), store.gather([3, 4]))
        assert seen.sent == [128]  # 2 x 4 x 4 x 3 bytes, to where the next tensor may begin


def test_memories_for_which_a_device_has_no_room_wait_on_the_host(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def places(made: SmallFederation) -> set[str]:
        memories = made.transport.memories.values()
        return {tensor.device.type for memory in memories for tensor in memory.values()}

    there, here = small("scaffold", 1, device), small("scaffold", 1, device)
    expected = there.run()
    monkeypatch.setattr("feddg.federation.inprocess.fits", lambda count, device: not count)
    assert same(here.run(), expected)
    assert (places(there), places(here)) == ({device}, {"cpu"})


@pytest.mark.parametrize("name", ["fedbn", "fedig-a", "l2d", "scaffold"])
def test_what_a_checkpoint_holds_goes_to_the_device(name: str, device: str) -> None:
    whole = small(name, 1, device).run()
    part = small(name, 1, device)
    part.run(rounds=1)
    on_disk = part.server.state.to(torch.device("cpu"))
    memories = {id: on_device(t, torch.device("cpu")) for id, t in part.transport.memories.items()}
    assert any(memories.values())
    resumed = small(name, 1, device)
    resumed.resume(on_disk.to(torch.device(device)), memories)
    resumed.server.round()
    assert same(resumed.server.state.weights, whole)


def test_a_run_s_model_predicts_there(device: str, tmp_path: Path) -> None:
    train = SETTINGS["train"] | {"local_steps": 2}
    data = SETTINGS["data"] | {"image_size": 16}
    changes: dict[str, Any] = {"device": device, "train": train, "data": data}
    folder = trained_run(tmp_path / "run", tmp_path / "cache", "fedig", **changes)
    assert len(list(predict(folder, write_images(tmp_path / "new", 3), device=device))) == 3


def layers(count: int) -> str:
    """A backbone with so many layers of normalised convolutions."""

    @register_backbone(name := f"layers-{count}")
    class Layers(nn.Sequential):
        out_features = 4

        def __init__(self) -> None:
            widths = zip((3, *[4] * (count - 1)), [4] * count)
            super().__init__(
                *(nn.Sequential(nn.Conv2d(*pair, 3), nn.BatchNorm2d(4)) for pair in widths),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
            )

    return name


NETWORKS = [layers(2), layers(5)]


class BesideSteps(TorchDispatchMode):
    """Counts what is launched on a device, but for steps; a list of tensors is one launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count, self.at_step, take = 0, False, Steps.take

        def uncounted(steps: Steps, prepared: Any) -> None:
            self.at_step = True
            take(steps, prepared)
            self.at_step = False

        monkeypatch.setattr(Steps, "take", uncounted)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = operation(*args, **(kwargs or {}))
        there = [t for t in tree_leaves([args, made]) if isinstance(t, torch.Tensor)]
        looks = any(r.alias_info and not r.alias_info.is_write for r in operation._schema.returns)
        new = "empty" in operation._schema.name
        if not (self.at_step or looks or new) and any(t.device.type != "cpu" for t in there):
            self.count += 1
        return made


@pytest.mark.parametrize("name", ["fedavg", "fedbn", "silobn", "fedgma", "scaffold", "fedig"])
def test_a_turn_launches_as_much_for_many_tensors_as_for_few(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = BesideSteps(monkeypatch)
    plain = {"optimizer": "sgd", "lr": 0.05} if name == "scaffold" else {}
    train = TrainSettings(rounds=2, batch_size=4, local_steps=1, **plain)
    turns = []
    for backbone in NETWORKS:
        rounds = []
        for clients in (2, 3):
            small = federation(
                name, sizes=(4,) * clients, device=device, train=train, backbone=backbone
            )
            small.server.setup()
            small.server.round()
            before = beside.count
            with beside:
                small.server.round()
            rounds.append(beside.count - before)
        turns.append(rounds[1] - rounds[0])
    assert turns[0] == turns[1]
