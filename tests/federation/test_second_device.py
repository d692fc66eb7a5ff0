"""Every method on a device that is not the CPU: same numbers, and the host does not wait."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils import backend_registration

from feddg.data.data_set import find_augmentation
from feddg.data.pixels import ArrayPixels
from feddg.messages import on_device
from feddg.methods.base import methods
from feddg.prediction.predict import predict
from feddg.settings import TrainSettings
from federations import SmallFederation, federation, same
from second_device import second_device, traffic
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


@pytest.fixture
def device() -> Iterator[str]:
    """A device that is not the CPU."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this version of PyTorch has no back ends that are written in Python")
    with second_device() as name:
        yield name


def small(case: str, steps: int, device: str) -> SmallFederation:
    """A federation of two clients; in round 2 they know of each other."""
    name, chosen = ALL[case]
    return federation(
        name,
        settings=chosen,
        sizes=(4, 4),
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


@pytest.mark.parametrize("case", ALL)
def test_a_method_does_the_same_on_another_device_and_no_step_waits_for_it(
    case: str, device: str
) -> None:
    expected = small(case, 1, "cpu").run()
    with traffic() as short:
        found = small(case, 1, device).run()
    with traffic() as long:
        small(case, 2, device).run()
    assert {n: t.device.type for n, t in found.items()} == dict.fromkeys(expected, device)
    assert all(torch.equal(t.cpu(), expected[n]) for n, t in found.items())
    assert long.waits - short.waits == {}


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
    image, number = 4 * 4 * 3, 8
    assert sum(first.sent) == 2 * image + 2 * number + 3 * number
    assert sum(second.sent) == 1 * image + 1 * number + 4 * number
    assert sum(third.sent) == 3 * number


def test_images_that_do_not_fit_are_sent_each_time(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = numpy.arange(10 * 4 * 4 * 3, dtype=numpy.uint8).reshape(10, 4, 4, 3)
    monkeypatch.setattr("feddg.data.pixels.SHARE", (images.nbytes - 1) / 2**30)
    store, there = ArrayPixels(images), torch.device(device)
    for _ in range(2):
        with traffic() as seen:
            assert torch.equal(store.gather([3, 4], there).cpu(), store.gather([3, 4]))
        assert sum(seen.sent) == 2 * 4 * 4 * 3


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
