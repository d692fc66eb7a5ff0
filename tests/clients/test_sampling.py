"""Who takes part in a round."""

from federations import federation


def test_sampling_is_without_replacement_ascending_and_differs_between_rounds():
    small = federation(sizes=(3,) * 20, per_round=6)
    draws = [small.server.sample(round) for round in range(1, 30)]
    for draw in draws:
        assert len(set(draw)) == 6
        assert draw == sorted(draw)
    assert len({tuple(draw) for draw in draws}) > 20
    assert {id for draw in draws for id in draw} == set(range(20))
    assert small.server.sample(1, attempt=1) != small.server.sample(1)
