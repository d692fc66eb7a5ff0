"""Robust aggregation: by hand, and with 1 to 4 of 10 bad clients up to the stated break-down."""

import itertools
import math

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from feddg.errors import ExperimentError, NotEnoughUpdates
from feddg.experiment import Experiment
from feddg.federation.federation import build
from feddg.messages import Update
from feddg.methods.base import Method, Round, State
from feddg.privacy.building import build_defences, defence_of
from feddg.privacy.defence import WeightNames
from feddg.privacy.robust import distance, length, scores, squared_distances
from feddg.settings import DefenceChoice, ServerSettings, TrainSettings
from federations import federation, same
from odd_inputs import NOT_FINITE

NAMES = frozenset({"a", "b"})


def updates_of(rows):
    """One update per row: an entry of two floats, one of the rest, and a counter."""
    return [
        Update(
            k,
            10**k,
            {"a": row[:2].clone(), "b": row[2:].reshape(1, -1).clone(), "n": torch.tensor(k)},
        )
        for k, row in enumerate(rows)
    ]


def aggregated(name, rows, **settings):
    """What a defence makes of FedAvg's server, as one row."""
    rows = torch.as_tensor(rows, dtype=torch.float32)
    defence = defence_of(DefenceChoice(name=name, settings=settings))
    sent = updates_of(torch.zeros(1, rows.shape[1]))[0].weights
    defence.facts, round = WeightNames(NAMES, NAMES), Round(1, [], State(sent))
    state = Method().aggregate(State(sent), defence.collected(iter(updates_of(rows)), round))
    return torch.cat([state.weights["a"], state.weights["b"].flatten()])


def rows_of(clients, places=5, seed=0):
    return torch.randn(clients, places, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("clients", [1, 2, 3, 6, 7])
def test_the_median_is_numpys(clients):
    rows = rows_of(clients)
    expected = torch.from_numpy(numpy.median(rows.numpy(), axis=0))
    torch.testing.assert_close(aggregated("median", rows), expected)


@pytest.mark.parametrize(("clients", "bad"), [(3, 1), (5, 2), (10, 2), (10, 4)])
def test_the_trimmed_mean_is_scipys(clients, bad):
    from scipy.stats import trim_mean

    rows = rows_of(clients)
    expected = torch.from_numpy(trim_mean(rows.numpy(), bad / clients + 1e-9, axis=0))
    torch.testing.assert_close(aggregated("trimmed_mean", rows, bad_clients=bad), expected)


@pytest.mark.parametrize(("bad", "selected"), [(1, 1), (3, 1), (2, 4), (3, 5)])
def test_krum_by_its_definition(bad, selected):
    rows = rows_of(10)
    found = []
    for i in range(10):
        squares = sorted(float((rows[i] - rows[j]).square().sum()) for j in range(10) if j != i)
        found.append(sum(squares[: 10 - bad - 2]))
    chosen = sorted(range(10), key=lambda k: found[k])[:selected]
    expected = rows[sorted(chosen)].mean(0)
    torch.testing.assert_close(
        aggregated("krum", rows, bad_clients=bad, selected=selected), expected
    )


def test_krums_distances_are_those_of_the_weights():
    rows = rows_of(6, 9)
    updates = updates_of(rows + 1000)
    sent = updates_of(torch.full((1, 9), 1000.0))[0].weights
    found = squared_distances(updates, sent, sorted(NAMES))
    changes = (rows + 1000 - 1000).double()
    torch.testing.assert_close(found, torch.cdist(changes, changes).square(), rtol=1e-6, atol=1e-6)
    assert scores(found, 1).shape == (6,)


def test_bounding_shortens_long_changes_only():
    rows = torch.tensor([[3.0, 0, 4, 0], [0.1, 0, 0, 0], [0, 0, 0, -50]])
    expected = torch.tensor([0.6 + 0.1, 0, 0.8, -1.0]) / 3
    torch.testing.assert_close(aggregated("norm_bounding", rows, norm=1.0), expected)


def test_bounding_by_the_median_of_the_rounds_lengths():
    rows = torch.tensor([[1.0, 0, 0], [0, 2, 0], [0, 0, 1000]])
    expected = torch.tensor([1.0, 2, 2]) / 3
    torch.testing.assert_close(aggregated("norm_bounding", rows), expected)


@pytest.mark.parametrize(("norm", "iterations"), [(None, 1), (None, 3), (0.7, 4)])
def test_centred_clipping_is_its_equation(norm, iterations):
    rows = rows_of(7) * torch.tensor([1, 1, 1, 1, 1, 1, 50.0])[:, None]
    points, centre = rows.double().numpy(), numpy.zeros(5)
    for _ in range(iterations):
        lengths = numpy.linalg.norm(points - centre, axis=1)
        tau = numpy.median(lengths) if norm is None else norm
        centre = centre + ((points - centre) * numpy.minimum(1, tau / lengths)[:, None]).mean(0)
    found = aggregated("centred_clipping", rows, norm=norm, iterations=iterations)
    torch.testing.assert_close(found, torch.from_numpy(centre).float(), rtol=1e-5, atol=1e-6)


def test_one_iteration_of_centred_clipping_is_norm_bounding():
    rows = rows_of(6) * torch.arange(1, 7)[:, None]
    torch.testing.assert_close(
        aggregated("centred_clipping", rows, iterations=1), aggregated("norm_bounding", rows)
    )


def test_clients_that_all_agree_are_what_is_agreed_on():
    rows = torch.full((4, 5), 2.0)
    torch.testing.assert_close(aggregated("centred_clipping", rows), rows[0])


def test_centred_clipping_leaves_less_of_bad_clients_than_norm_bounding():
    rows, honest = attacked(3, "opposite")
    near, far = (
        float((aggregated(name, rows) - honest.mean(0)).norm())
        for name in ("centred_clipping", "norm_bounding")
    )
    assert near < 0.5 * far


def test_counters_take_the_lower_median():
    defence = defence_of(DefenceChoice(name="median"))
    (update,) = defence.collected(iter(updates_of(rows_of(4))), Round(1, [], State({})))
    assert update.weights["n"].item() == 1
    assert update.weights["n"].dtype == torch.int64


WITHSTANDS = {
    "median": (4, {}),
    "trimmed_mean": (4, {"bad_clients": 4}),
    "krum": (3, {"bad_clients": 3}),
    "norm_bounding": (4, {}),
}
"""Break-down points of 10 clients, as the defences' modules state them."""


def attacked(bad, attack, seed=0):
    """10 rows around (1, ..., 1), of which the first ``bad`` are bad."""
    honest = 1 + 0.1 * rows_of(10, 40, seed)
    lies = {
        "huge": torch.full((bad, 40), 1e30),
        "opposite": -30 * honest[:bad],
        "alike": torch.full((bad, 40), 5.0),
        "scattered": 1e6 * rows_of(max(bad, 1), 40, seed + 1)[:bad],
    }
    return torch.cat([lies[attack], honest[bad:]]), honest[bad:]


def test_bad_clients_up_to_the_break_down_point_change_little(subtests):
    for (name, bad), attack in itertools.product(
        [(n, b) for n, (most, _) in WITHSTANDS.items() for b in range(1, most + 1)],
        ["huge", "opposite", "alike", "scattered"],
    ):
        with subtests.test(attack=attack, name=name, bad=bad):
            rows, honest = attacked(bad, attack)
            found = aggregated(name, rows, **WITHSTANDS[name][1])
            if name == "norm_bounding":
                # It bounds harm: the mean leaves the honest clients' by at most two norms' share.
                norm = float(rows.double().norm(dim=1).median(dim=0).values)
                limit = 2 * bad / 10 * max(norm, float(honest.norm(dim=1).max())) + 0.5
                assert (found - honest.mean(0)).norm() <= limit
            else:
                low, high = honest.min(0).values - 1e-6, honest.max(0).values + 1e-6
                assert ((low <= found) & (found <= high)).all()
            assert torch.isfinite(aggregated("median", rows)).all()


@pytest.mark.parametrize(
    ("name", "bad", "settings"),
    [
        ("median", 5, {}),
        ("trimmed_mean", 5, {"bad_clients": 4}),
        ("trimmed_mean", 2, {"bad_clients": 1}),
        ("krum", 6, {"bad_clients": 3}),
    ],
)
def test_beyond_the_break_down_point_bad_clients_win(name, bad, settings):
    rows, honest = attacked(bad, "alike")
    found = aggregated(name, rows, **settings)
    assert (found - honest.mean(0)).norm() > 2


def test_the_plain_mean_withstands_nobody():
    rows, _ = attacked(1, "huge")
    mean = Method().aggregate(State({}), updates_of(rows)).weights["a"]
    assert mean.abs().max() > 1e10


@given(
    some.lists(some.lists(some.floats(-100, 100, width=32), min_size=3, max_size=3), min_size=3),
    some.randoms(),
)
def test_a_rank_is_a_rank_in_any_order_and_within_the_range(rows, rng):
    mixed = list(rows)
    rng.shuffle(mixed)
    for name in ("median", "trimmed_mean"):
        one, other = (aggregated(name, part) for part in (rows, mixed))
        torch.testing.assert_close(one, other)
        bounds = torch.tensor(rows)
        assert (one >= bounds.min(0).values - 1e-4).all()
        assert (one <= bounds.max(0).values + 1e-4).all()


# Whole rounds

TRAIN = TrainSettings(rounds=2, batch_size=4, optimizer="sgd", lr=0.05)
TEN = {"sizes": (6,) * 10, "train": TRAIN}


def poisoned(bad, *defences):
    """Ten clients, the first ``bad`` of which send a million everywhere, statistics too.

    Returns:
        The federation, and what its honest clients send.
    """
    free = ServerSettings(largest_change=None)  # what the defences do by themselves
    small, honest = federation(defences=defences, server_settings=free, **TEN), []
    original = small.transport.train

    def train(clients, broadcast):
        for reply in original(clients, broadcast):
            reply = reply.keep()
            if reply.client < bad:
                reply.weights = {n: torch.full_like(t, 10**6) for n, t in reply.weights.items()}
            else:
                honest.append(reply.weights)
            yield reply

    small.transport.train = train
    return small, honest


@pytest.mark.parametrize(("name", "bad"), [("median", 4), ("trimmed_mean", 4), ("krum", 3)])
def test_a_round_with_bad_clients_among_ten_stays_within_the_honest_ones(name, bad):
    small, honest = poisoned(bad, (name, WITHSTANDS[name][1]))
    for key, found in small.run(1).items():
        sent = torch.stack([weights[key] for weights in honest])
        slack = 1e-6 if found.is_floating_point() else 0
        assert (found >= sent.amin(0) - slack).all(), key
        assert (found <= sent.amax(0) + slack).all(), key


def test_bounded_bad_clients_move_a_round_by_less_than_the_norm_and_unbounded_ones_by_far_more():
    small, _ = poisoned(4, ("norm_bounding", {"norm": 0.5}))
    lengths = []
    for federated in (small, poisoned(4)[0]):
        before = {n: t.clone() for n, t in federated.server.state.weights.items()}
        after = federated.run(1)
        parts = [(after[n] - before[n]).double() for n in before if before[n].is_floating_point()]
        lengths.append(sum(float(part.square().sum()) for part in parts) ** 0.5)
    assert lengths[0] <= 0.5 + 1e-6
    assert lengths[1] > 1e6


def test_multi_krum_of_all_but_a_few_learns_as_the_mean_does():
    small = federation(defences=(("krum", {"bad_clients": 1, "selected": 7}),), **TEN)
    small.run(2)
    assert all(torch.isfinite(t).all() for t in small.server.state.weights.values())


def test_clients_at_once_give_the_same_numbers():
    one, other = (federation(defences=(("median", {}),), at_once=n, **TEN).run(1) for n in (1, 3))
    assert same(one, other)


def test_centred_clipping_gives_the_same_numbers_whoever_is_first_done():
    defence = (("centred_clipping", {}),)
    one, other = (federation(defences=defence, at_once=n, **TEN).run(1) for n in (1, 3))
    assert same(one, other)
    assert all(torch.isfinite(tensor).all() for tensor in one.values())


def test_too_few_good_updates_fail_the_round_with_the_reason():
    small = federation(defences=(("krum", {}),), sizes=(6, 6, 6, 0, 0), train=TRAIN)
    with pytest.raises(NotEnoughUpdates, match=r"krum needs 5 .*3 came"):
        small.server.round()
    assert small.server.state.round == 0


# What goes together

COMBINED = {
    ("median", "feddg-ga"): "its own 'aggregate'.*and a median leaves one",
    ("median", "afl"): "its own 'share'",
    ("median", "fedgma"): "its own 'aggregate'",
    ("trimmed_mean", "fpl"): "its own 'aggregate'",
    ("krum", "scaffold"): "Krum leaves some out",
    ("centred_clipping", "scaffold"): "centred clipping leaves one",
    ("krum", "csac"): "its own 'aggregate'",
    ("median", "fedig"): "its own 'aggregate'",
    ("median", "randaug+copa"): "its own 'aggregate'",
    ("norm_bounding", "fpl"): "update/fpl/",
    ("norm_bounding", "scaffold"): "update/scaffold",
    ("krum", "fedbn"): "stay with each client, whose mean a new domain gets",
    ("krum", "silobn"): "stay with each client",
    ("norm_bounding", "fedbn"): "this bound does not hold for them",
    ("norm_bounding", "silobn"): "stay with each client",
}


def test_methods_that_do_not_survive_a_defence_are_refused_with_the_reason(subtests):
    for defence, method in COMBINED:
        with subtests.test(defence=defence, method=method):
            fields = {"data": "digits", "hold_out": "sketch", "clients": 10}
            chosen = Experiment(method=method, defences=defence, **fields)
            with pytest.raises(ExperimentError, match=COMBINED[defence, method]):
                build_defences(chosen, *build(chosen, 10))


def test_methods_that_take_the_plain_mean_survive(subtests):
    for method, defence in itertools.product(
        ["fedavg", "fedbn", "pardon", "elcfs", "silobn", "jigen"],
        ["median", "trimmed_mean", "krum", "norm_bounding", "centred_clipping"],
    ):
        if (defence, method) in COMBINED:
            continue
        with subtests.test(defence=defence, method=method):
            chosen = Experiment(
                data="digits", hold_out="sketch", clients=10, method=method, defences=defence
            )
            assert build_defences(chosen, *build(chosen, 10)).defences


def test_sums_of_images_have_no_robust_mean(subtests):
    """Of it the first or last client would be refused, honest as it is, round after round."""
    for defence in ["median", "trimmed_mean", "krum", "norm_bounding", "centred_clipping"]:
        with subtests.test(defence=defence):
            chosen = Experiment(
                data="digits", hold_out="sketch", clients=10, method="ridge", defences=defence
            )
            with pytest.raises(
                ExperimentError, match=f"{defence} cannot be combined with ridge: .* sums over"
            ):
                build_defences(chosen, *build(chosen, 10))


def test_defences_that_exclude_each_other_are_refused():
    def built(**fields):
        model = {"backbone": "cnn", "weights": None, "normalization": "frozen"}
        data = {"data": "digits", "hold_out": "sketch", "clients": 10, "model": model}
        chosen = Experiment(**data, **fields)
        return build_defences(chosen, *build(chosen, 10))

    for one, other in itertools.permutations(
        ["median", "trimmed_mean", "krum", "centred_clipping"], 2
    ):
        with pytest.raises(ExperimentError, match="each replace the mean; choose one"):
            built(defences=[one, other])
    with pytest.raises(ExperimentError, match="named twice"):
        built(defences=["median", "median"])
    noisy = {"clipping": "fixed", "noise_multiplier": 1.0}
    # By the median of lengths one client changes how much all others are shortened.
    for rule in ("median", "norm_bounding"):
        with pytest.raises(ExperimentError, match="noise is made for a plain mean"):
            built(defences=rule, privacy=noisy)
        assert built(defences=rule, privacy=noisy | {"noised_at": "client"}).defences
    clipped = built(defences=["norm_bounding", "median"], privacy={"clipping": "fixed"})
    assert [defence.name for defence in clipped.defences] == ["clipping", "norm_bounding", "median"]


@pytest.mark.parametrize(
    ("defence", "words"),
    [
        ({"name": "krum", "bad_clients": 4}, "krum needs 11 updates in a round, and there are 10"),
        ({"name": "krum", "selected": 9}, "krum needs 12 updates"),
        ({"name": "trimmed_mean", "bad_clients": 5}, "needs 11 updates"),
    ],
)
def test_more_bad_clients_than_it_withstands_are_refused(defence, words):
    chosen = Experiment(data="digits", hold_out="sketch", clients=10, defences=defence)
    with pytest.raises(ExperimentError, match=words):
        build_defences(chosen, *build(chosen, 10))


# Lengths and robust, against one sum in float64.


def some_weights(seed):
    rng = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(shape, generator=rng)

    return {
        "contiguous": drawn(5, 4, 3, 3),
        "last": drawn(5, 4, 3, 3).to(memory_format=torch.channels_last),
        "turned": drawn(7, 9).t(),
        "every other": drawn(20)[::2],
        "number": drawn(),
        "none": drawn(0),
        "short": drawn(6).bfloat16(),
        "long": drawn(6).double(),
        "half": drawn(3, 3).half(),
    }


def test_they_are_those_of_all_entries_in_float64():
    one, other = some_weights(0), some_weights(1)
    wide = {name: one[name].double() for name in one}
    apart = {name: (one[name] - other[name]).double() for name in one}
    for found, whole in ((length(one, one), wide), (distance(one, other, one), apart)):
        total = sum(float(tensor.square().sum()) for tensor in whole.values())
        assert found == pytest.approx(math.sqrt(total), rel=1e-12)


def test_a_distance_does_not_depend_on_how_either_lies_in_memory():
    one, other = some_weights(0), some_weights(1)
    turned = {n: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t.contiguous()
              for n, t in other.items()}  # fmt: skip
    assert distance(one, other, one) == pytest.approx(distance(one, turned, one), rel=1e-12)


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_what_is_not_finite_makes_them_not_finite(bad):
    one, other = some_weights(0), some_weights(1)
    one["last"][2, 1, 0, 2] = bad
    assert not math.isfinite(distance(one, other, one))
    assert not math.isfinite(length(one, one))


def test_the_square_of_the_largest_float32_is_no_infinity():
    large = {"x": torch.tensor([3e38, 0.0])}
    assert length(large, large) == pytest.approx(3e38)
