"""Accuracy by domain, its intervals, and the outputs it is of."""

import pytest
import torch

from feddg.errors import RunError
from feddg.evaluation.accuracy import Score


def test_scores_are_counted_by_hand():
    import numpy
    import torch

    from feddg.data.pixels import ArrayPixels
    from feddg.evaluation.accuracy import Evaluation

    pixels = ArrayPixels(numpy.arange(5, dtype=numpy.uint8)[:, None, None, None].repeat(3, 3))
    labels, domains = numpy.array([0, 1, 1, 0, 1]), numpy.array([0, 0, 2, 2, 2])

    class Brightness(torch.nn.Module):
        def forward(self, images):
            # Images 0..4 have brightness i / 255: class 1 from image 2 on.
            bright = images.mean((1, 2, 3)) * 255
            return torch.stack([2 - bright - 0.5, bright - 2 + 0.5], 1)

    rows = {"test": numpy.arange(5)}
    evaluation = Evaluation(
        pixels, rows, labels, domains, ("a", "b", "c"), 2, 2, torch.device("cpu")
    )
    scores: list[Score] = evaluation.scores(Brightness())
    assert [(s.domain, s.correct, s.examples) for s in scores] == [("a", 1, 2), ("c", 2, 3)]
    assert scores[1].confusion.tolist() == [[0, 1], [0, 2]]
    undefined = torch.nn.Module()
    undefined.forward = lambda images: torch.full((len(images), 2), torch.nan)
    with pytest.raises(RunError, match="outputs for images of a are not finite"):
        evaluation.scores(undefined)
    # Image 0: logits (1.5, -1.5), label 0. Image 1: (0.5, -0.5), label 1.
    by_hand = (numpy.log(1 + numpy.exp(-3)) + numpy.log(1 + numpy.exp(1))) / 2
    assert scores[0].loss == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize("most", [0, 2**20])
def test_a_frozen_featurizer_sees_every_image_once(monkeypatch, most):
    import numpy

    from feddg.data.pixels import ArrayPixels
    from feddg.evaluation import accuracy
    from feddg.models.backbones import SmallCNN
    from feddg.models.network import Network

    monkeypatch.setattr(accuracy, "MOST_KEPT", most)
    network, seen = Network(SmallCNN(), 3, "linear"), []
    passed = SmallCNN.forward
    monkeypatch.setattr(
        SmallCNN, "forward", lambda own, images: seen.append(len(images)) or passed(own, images)
    )
    random = numpy.random.default_rng(0)
    pixels = ArrayPixels(random.integers(0, 256, (10, 16, 16, 3), numpy.uint8))
    rows, none = {"test": numpy.arange(10)}, numpy.zeros(10, int)
    given = (pixels, rows, none, none, ("a",), 3, 4, torch.device("cpu"))
    evaluation = accuracy.Evaluation(*given)

    def scores() -> tuple[float, float]:
        (found,) = evaluation.scores(network)
        with torch.inference_mode():
            batches = torch.arange(10).split(4)
            images = [
                accuracy.as_unit(pixels.gather(part, torch.device("cpu"))) for part in batches
            ]
            direct = torch.cat([network(part) for part in images])
        assert torch.equal(evaluation.predict(network, rows["test"]), direct)  # bit for bit
        seen.clear()
        evaluation.predict(network, rows["test"])
        return found.loss, sum(seen)

    assert scores()[1] == 10  # a featurizer that is trained sees them in every pass
    network.featurizer.requires_grad_(False)
    before, again = scores()
    assert again == (0 if most else 10)
    with torch.no_grad():
        network.classifier.weight.mul_(2)
    changed, again = scores()
    assert changed != before
    assert again == (0 if most else 10)
    with torch.no_grad():
        next(network.featurizer.parameters()).mul_(2)  # other weights: other features
    assert scores()[0] != changed
    network.featurizer.register_forward_hook(lambda *_: None)
    assert scores()[1] == 10  # whoever watches sees them all


class Order(torch.nn.Module):
    """Notes the batches it is shown; its needs can be set."""

    def __init__(self, needs):
        super().__init__()
        self.needs, self.batches = needs, []

    def forward(self, batch):
        self.batches.append(batch[:, :, 0, 0])
        return batch.mean((2, 3))


def test_streams_are_shuffled_into_even_batches_and_logits_put_back():
    import numpy

    from feddg.data.pixels import ArrayPixels
    from feddg.evaluation.accuracy import Evaluation

    pixels = ArrayPixels(numpy.random.default_rng(0).integers(0, 256, (17, 4, 4, 3), numpy.uint8))
    rows, none = numpy.arange(17), numpy.zeros(17, int)
    measured = Evaluation(pixels, {"test": rows}, none, none, ("a",), 3, 8, torch.device("cpu"))
    in_order, shuffled = Order("one image"), Order("a stream")
    assert torch.equal(measured.predict(in_order, rows), measured.predict(shuffled, rows))
    assert [len(batch) for batch in in_order.batches] == [8, 8, 1]
    assert [len(batch) for batch in shuffled.batches] == [6, 6, 5]
    first, second = (torch.cat(order.batches) for order in (in_order, shuffled))
    assert not torch.equal(first, second)
    assert torch.equal(first.unique(dim=0), second.unique(dim=0))


def test_on_an_accelerator_batches_go_across_domains(device: str) -> None:
    import numpy

    from feddg.data.pixels import ArrayPixels
    from feddg.evaluation.accuracy import Evaluation

    rng = numpy.random.default_rng(0)
    pixels = ArrayPixels(rng.integers(0, 256, (30, 4, 4, 3), dtype=numpy.uint8))
    labels, domains = numpy.arange(30) % 2, numpy.arange(30) % 7
    rows = {"test": numpy.arange(5, 30), "val": numpy.arange(5), "id_test": numpy.arange(0)}
    seen: list[int] = []

    class Counted(torch.nn.Module):
        def forward(self, images):
            seen.append(len(images))
            bright = images.mean((1, 2, 3))
            return torch.stack([0.5 - bright, bright - 0.5], 1)

    def scores(place: str, predictor: torch.nn.Module) -> list[Score]:
        seen.clear()
        names = tuple("abcdefg")
        given = (pixels, rows, labels, domains, names, 2, 16, torch.device(place))
        return Evaluation(*given).scores(predictor)

    class SeesBatches(Counted):
        needs = "batches"

    there = scores(device, Counted())
    assert seen == [16, 14]
    here = scores("cpu", Counted())
    assert len(seen) == 12  # seven domains, and five
    assert [(s.domain, s.split, s.correct) for s in there] == [
        (s.domain, s.split, s.correct) for s in here
    ]
    assert all(one.loss == other.loss for one, other in zip(there, here, strict=True))
    scores(device, SeesBatches())
    assert len(seen) == 12
