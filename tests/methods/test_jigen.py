"""JiGen: the permutations, the tiles, the loss, and its limits."""

import pytest
import torch

from feddg.errors import ExperimentError
from feddg.methods.composition import build_method
from feddg.methods.jigen import distant_permutations, shuffled
from federations import federation, same


def test_permutations_are_thirty_one_different_ones_far_from_each_other():
    orders = distant_permutations(30)
    assert orders.shape == (31, 9)
    assert torch.equal(orders[0], torch.arange(9))
    assert torch.equal(orders.sort(1).values, torch.arange(9).expand(31, 9))
    distance = (orders[:, None] != orders[None]).sum(-1)
    between = distance[~torch.eye(31, dtype=torch.bool)]
    assert int(between.min()) == 7
    assert float(between.float().mean()) > 8.2


def test_each_permutation_is_the_farthest_there_is_from_those_before():
    orders = distant_permutations(4)
    # In nine places at most nine differ, and as the rows of a Latin square many can do so at once.
    distance = (orders[:, None] != orders[None]).sum(-1)
    assert torch.equal(distance, 9 - 9 * torch.eye(5, dtype=torch.int64))


def test_tiles_land_where_the_order_says():
    images = torch.rand(2, 3, 12, 9, generator=torch.Generator().manual_seed(0))
    orders = torch.stack([torch.arange(9), torch.tensor([4, 0, 8, 2, 6, 1, 3, 5, 7])])
    result = shuffled(images, orders)
    assert torch.equal(result[0], images[0])
    for place, tile in enumerate(orders[1].tolist()):
        (row, column), (from_row, from_column) = divmod(place, 3), divmod(tile, 3)
        part = result[1, :, row * 4 : row * 4 + 4, column * 3 : column * 3 + 3]
        origin = images[1, :, from_row * 4 :, from_column * 3 :][:, :4, :3]
        assert torch.equal(part, origin)


@pytest.mark.parametrize(("side", "first"), [(32, 1), (31, 0), (30, 0)])
def test_what_three_does_not_divide_stays_in_place_as_a_rim(side, first):
    images = torch.rand(1, 3, side, side)
    assert torch.equal(shuffled(images, torch.arange(9)[None]), images)
    inside = (..., slice(first, first + 30), slice(first, first + 30))
    order = torch.tensor([[4, 0, 8, 2, 6, 1, 3, 5, 7]])
    result, expected = shuffled(images, order), images.clone()
    expected[inside] = shuffled(images[inside], order)
    assert torch.equal(result, expected)
    assert not torch.equal(result, images)


def test_the_loss_is_classification_plus_weighted_puzzle_on_the_same_images():
    small = federation("jigen", sizes=(8,), settings={"whole_share": 0.5}, freeze=True)
    client = small.client()
    batch = client.batch(torch.arange(8), client.stream("augment"))
    terms = small.method.loss(client, batch)
    rng = client.stream("jigsaw", 0)
    whole = torch.rand(8, generator=rng) < 0.5
    puzzles = torch.randint(31, (8,), generator=rng)
    puzzles[whole] = 0
    assert 0 < int(whole.sum()) < 8
    z = small.network.features(shuffled(batch.images, distant_permutations(30)[puzzles]))

    def mean_negative_log(logits, labels):
        chosen = logits.double().log_softmax(1)[torch.arange(8), labels]
        return -chosen.mean()

    expected = mean_negative_log(small.network.classifier(z), batch.labels)
    puzzle = 0.7 * mean_negative_log(small.network.heads["jigsaw"](z), puzzles)
    assert terms.keys() == {"cross_entropy", "jigsaw"}
    torch.testing.assert_close(terms["cross_entropy"].double(), expected)
    torch.testing.assert_close(terms["jigsaw"].double(), puzzle)


def test_without_puzzles_it_trains_as_fedavg_with_an_idle_head():
    settings = {"jigsaw_weight": 0.0, "whole_share": 1.0}
    small, plain = federation("jigen", settings=settings), federation()
    trained = small.run(1)
    heads = {name for name in trained if name.startswith("heads.")}
    assert heads == {"heads.jigsaw.weight", "heads.jigsaw.bias"}
    assert same({n: t for n, t in trained.items() if n not in heads}, plain.run(1))


def test_the_head_starts_from_the_experiments_seed():
    one, again, other = (federation("jigen", seed=seed).network for seed in (0, 0, 1))
    assert torch.equal(one.heads["jigsaw"].weight, again.heads["jigsaw"].weight)
    assert not torch.equal(one.heads["jigsaw"].weight, other.heads["jigsaw"].weight)


def test_bad_settings_are_refused_by_name():
    with pytest.raises(ExperimentError, match="whole_share"):
        build_method("jigen", {"whole_share": 1.5})
    with pytest.raises(ExperimentError, match="did you mean 'jigsaw_weight'"):
        build_method("jigen", {"jigsaw_wait": 1})
