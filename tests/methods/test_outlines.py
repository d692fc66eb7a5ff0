"""Outlines against scipy's edges, and the classifier that it starts from against scikit-learn's."""

import numpy
import pytest
import torch
from scipy.ndimage import sobel

from feddg.methods.outlines import outlines
from feddg.models.closed_form import PENALTIES
from feddg.settings import TrainSettings
from federations import features_of, federation, ridge_of, same


def images(count=3, side=9):
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(4))


def test_an_outline_is_dark_where_colours_change():
    for image, got in zip(images().double().numpy(), outlines(images())):
        edges = numpy.stack(
            [numpy.hypot(sobel(c, 0, mode="nearest"), sobel(c, 1, mode="nearest")) for c in image]
        )
        numpy.testing.assert_allclose(got, 1 - edges / edges.max(), atol=1e-5)


def test_an_image_of_one_colour_is_a_white_page():
    assert outlines(torch.full((1, 3, 4, 4), 0.3)).equal(torch.ones(1, 3, 4, 4))


def test_a_share_of_the_images_is_shown_as_outlines():
    small = federation("outlines", sizes=(64,), freeze=True)
    client = small.client()
    batch = client.batch(torch.arange(64), client.stream("augment"))
    before, seen = batch.images.clone(), []
    hook = small.network.featurizer.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    small.method.loss(client, batch)
    hook.remove()
    drawn, normalize = outlines(before), small.network.normalize
    as_drawn = (seen[0] == normalize(drawn)).flatten(1).all(1)
    as_it_is = (seen[0] == normalize(before)).flatten(1).all(1)
    assert (as_drawn ^ as_it_is).all()
    assert 16 <= int(as_drawn.sum()) <= 48  # 32 +- 4 standard deviations
    assert batch.images.equal(before)


def test_without_outlines_it_is_fedavg_bit_for_bit():
    settings = {"outline_probability": 0.0}
    assert same(federation("outlines", settings=settings).run(1), federation().run(1))


def test_the_classifier_it_starts_from_is_the_ridge_of_images_and_outlines():
    train = TrainSettings(rounds=1, batch_size=16, head="ridge")
    chosen = federation("outlines", sizes=(40, 30, 50), train=train, backbone="cnn_gn")
    chosen.start()
    plain, labels = features_of(chosen)
    rows = torch.cat([chosen.examples(id).rows for id in range(3)])
    drawn = outlines(chosen.pixels.gather(rows).float() / 255)
    with torch.no_grad():
        network = chosen.network.eval()
        shapes = network.featurizer(network.normalize(drawn)).double().numpy()
    weight = chosen.server.state.weights["classifier.weight"].double().numpy()
    every = numpy.concatenate([plain, shapes]), numpy.concatenate([labels, labels])
    found = [ridge_of(*every, penalty).coef_ for penalty in PENALTIES]
    alike = [numpy.corrcoef(weight.ravel(), coef.ravel())[0, 1] for coef in found]
    assert max(alike) == pytest.approx(1, abs=1e-6)


def test_the_other_parts_of_a_composition_see_the_drawings():
    """FedIG passes the batch's images through the network a second time."""
    small, seen = federation("fedig+outlines", sizes=(16,)), []
    hook = small.network.featurizer.register_forward_pre_hook(
        lambda _, x: seen.append(x[0].clone())
    )
    small.server.round()
    hook.remove()
    assert len(seen) > 2
    assert all(first.equal(second) for first, second in zip(seen[::2], seen[1::2]))
