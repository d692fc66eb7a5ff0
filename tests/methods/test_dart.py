"""DART: which form a client shows, of how many images, and that forms are what they say."""

import numpy
import pytest
import torch
from scipy.signal import correlate

from feddg.errors import ExperimentError
from feddg.methods import dart
from feddg.methods.composition import build_method
from feddg.rng import stream
from federations import federation, same

ALL = ("plain", "outlines", "convolved", "grey", "contrast")


def images(count=3, side=9):
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(4))


def shown(small, client, step=0):
    """The images of a client as they are, and as a step shows them."""
    client.steps = step
    batch = client.batch(torch.arange(len(client.examples)), client.stream("augment"))
    before, seen = batch.images.clone(), []
    hook = small.network.featurizer.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    small.method.loss(client, batch)
    hook.remove()
    assert batch.images.equal(before)
    return before, small.network.denormalize(seen[0])


def test_grey_and_contrast_are_those_of_numpy():
    array = images().double().numpy()
    grey = numpy.repeat(array.mean(1, keepdims=True), 3, 1)
    numpy.testing.assert_allclose(dart.grey(images()), grey, atol=1e-6)
    middle = array.mean((1, 2, 3), keepdims=True)
    wide = numpy.clip(2 * array - middle, 0, 1)
    numpy.testing.assert_allclose(dart.contrasted(images()), wide, atol=1e-6)


def test_a_random_convolution_is_one_for_all_images_of_a_step():
    network = federation().network
    network.normalize_by((0.0,) * 3, (1.0,) * 3)
    rng = stream(3, "test")
    size = (1, 3, 5, 7)[int(torch.randint(4, (), generator=rng))]
    share = torch.rand((), generator=rng)
    kernel = torch.randn(3, 3, size, size, generator=rng) / (3 * size**2) ** 0.5
    drawn = {"dart/kernel": kernel, "dart/share": share}
    got = dart.convolved_at_random(images(), network, drawn)
    share, kernel = float(share), kernel.double()
    for image, found in zip(images().double(), got):
        padded = numpy.pad(image.numpy(), ((0, 0), (size // 2,) * 2, (size // 2,) * 2))
        across = [correlate(padded, k, "valid", "direct")[0] for k in kernel.numpy()]
        expected = (1 - share) * image.numpy() + share * numpy.stack(across)
        numpy.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("form", ["outlines", "grey", "contrast"])
def test_a_share_of_the_images_is_in_the_form(form):
    small = federation("dart", sizes=(64,), freeze=True, settings={"forms": [form]})
    before, seen = shown(small, small.client())
    made = dart.FORMS[form](before, small.network, None)
    changed = torch.isclose(seen, made, atol=1e-5).flatten(1).all(1)
    as_it_is = torch.isclose(seen, before, atol=1e-5).flatten(1).all(1)
    assert (changed ^ as_it_is).all()
    assert 16 <= int(changed.sum()) <= 48  # 32 +- 4 standard deviations


def form_shown(small, id, round, step):
    before, seen = shown(small, small.client(id, round=round), step)
    changed = ~torch.isclose(seen, before, atol=1e-5).flatten(1).all(1)
    for form in ("outlines", "grey", "contrast"):
        made = dart.FORMS[form](before, small.network, None)
        if torch.allclose(seen[changed], made[changed], atol=1e-5) and changed.any():
            return form
    return "convolved" if changed.any() else "plain"


def test_a_form_lasts_for_a_clients_turn_and_is_drawn_anew_for_the_next():
    small = federation("dart", sizes=(12,) * 6, freeze=True)
    turns = {
        (id, round): {form_shown(small, id, round, step) for step in range(3)}
        for id in range(6)
        for round in (1, 2, 3, 4)
    }
    assert all(len(forms) == 1 for forms in turns.values())
    assert set().union(*turns.values()) == set(ALL)
    assert len({form for (id, _), forms in turns.items() if id == 0 for form in forms}) > 1
    assert len({form for (_, round), forms in turns.items() if round == 1 for form in forms}) > 1


@pytest.mark.parametrize("settings", [{"form_probability": 0.0}, {"forms": ["plain"]}])
def test_without_forms_it_is_fedavg_bit_for_bit(settings):
    assert same(federation("dart", settings=settings).run(1), federation().run(1))


def test_unknown_forms_are_refused():
    with pytest.raises(ExperimentError, match="forms"):
        build_method("dart", {"forms": ["sepia"]})
    with pytest.raises(ExperimentError, match="forms"):
        build_method("dart", {"forms": []})
