"""Rules by which images are dealt out, one by one and put together."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddg.data.partition import Partition, partition
from feddg.data.partitions import PARTITIONS, PartitionRule, register_partition, rules_of
from feddg.errors import DataError, ExperimentError
from feddg.experiment import Experiment


def column(*sizes: int) -> np.ndarray:
    return np.repeat(np.arange(len(sizes)), sizes)


BEFORE = [
    ({"heterogeneity": 0.1}, 4, "6794aa15f372944a"),
    ({"heterogeneity": 0.1}, 30, "2700549ab59da263"),
    ({"heterogeneity": 0.0}, 4, "5f984edc44f57322"),
    ({"heterogeneity": 0.0}, 30, "301cdf6d4c907920"),
    ({"heterogeneity": 1.0}, 4, "9af948a91258f407"),
    ({"heterogeneity": 1.0}, 30, "ec1ad4adec66bc13"),
    ({"heterogeneity": 0.1, "rounding": "official"}, 4, "c275fc8694d2ef0f"),
    ({"heterogeneity": 0.1, "rounding": "official"}, 30, "378dd3de4fe476ee"),
    ({"heterogeneity": 0.3, "alpha": 0.5}, 4, "131d3940a02f02db"),
    ({"heterogeneity": 0.3, "alpha": 0.5}, 30, "a7dac4d31af51f88"),
    ({"heterogeneity": 1.0, "alpha": 0.1, "rounding": "official"}, 4, "26d88ed4cf402886"),
    ({"heterogeneity": 1.0, "alpha": 0.1, "rounding": "official"}, 30, "5451c9383a831627"),
    ({"scheme": "domain"}, 4, "5f984edc44f57322"),
    ({"scheme": "domain"}, 30, "7f11317f4db01625"),
    ({"scheme": "domain", "alpha": 0.3}, 4, "5f984edc44f57322"),
    ({"scheme": "domain", "alpha": 0.3}, 30, "16d952d4e323cbc0"),
]
"""What each image's owner was when two rules were all there were, as a hash."""


@pytest.mark.parametrize(("options", "clients", "expected"), BEFORE)
def test_experiments_of_before_get_the_same_clients_to_the_bit(options, clients, expected):
    domains = np.random.default_rng(0).permutation(column(310, 120, 77, 205))
    labels = np.random.default_rng(1).integers(0, 7, len(domains))
    owners = partition(domains, labels, clients, seed=3, **options).owners
    assert hashlib.blake2b(owners.tobytes(), digest_size=8).hexdigest() == expected


def test_ids_of_before_stay():
    fields = {"data": "digits", "hold_out": "sketch"}
    plain = Experiment(**fields)
    said = Experiment(**fields, clients={"partition": "heterogeneous", "shards": None})
    assert plain.id == said.id
    assert plain.id != Experiment(**fields, clients={"shards": 2}).id


def test_named_rules_are_those_that_settings_mean():
    domains, labels = column(80, 40), np.arange(120) % 4
    for settings, name in (
        ({"alpha": 0.5}, "dirichlet"),
        ({"shards": 2}, "shards"),
        ({"quantity_alpha": 0.5}, "quantity"),
    ):
        meant = partition(domains, labels, 6, seed=0, **settings)
        named = partition(domains, labels, 6, seed=0, scheme=f"heterogeneous+{name}", **settings)
        assert meant.owners.tolist() == named.owners.tolist()
        everywhere = partition(domains, labels, 6, seed=0, scheme=name, **settings)
        iid = partition(domains, labels, 6, seed=0, heterogeneity=1.0, **settings)
        assert everywhere.owners.tolist() == iid.owners.tolist(), "alone: the same mix everywhere"


def label_counts(found: Partition, labels: np.ndarray) -> np.ndarray:
    classes = int(labels.max()) + 1
    return np.array([np.bincount(labels[rows], minlength=classes) for rows in found.rows])


def test_shards_are_mcmahans():
    """100 clients with two shards of ten classes: at most two classes each here, none cut."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 600))
    one_domain = np.zeros_like(labels)
    found = partition(one_domain, labels, 100, scheme="pathological", shards=2, seed=0)
    counts = label_counts(found, labels)
    assert set(found.sizes.tolist()) == {60}
    assert (counts > 0).sum(axis=1).max() <= 2
    assert set(np.unique(counts)) == {0, 30, 60}, "whole shards of 6000 / 200 images"


def test_a_client_holds_the_same_few_classes_of_every_domain():
    domains, labels = np.repeat([0, 1], 1000), np.tile(np.repeat(np.arange(10), 100), 2)
    found = partition(domains, labels, 10, scheme="iid+shards", shards=2, seed=1)
    assert (label_counts(found, labels) > 0).sum(axis=1).max() <= 2
    assert found.counts.tolist() == [[100, 100]] * 10


def test_class_dirichlet_is_yurochkins():
    """One domain: of two classes, client 0's share of each is Beta(alpha, (C - 1) alpha)."""
    alpha, clients, shares = 0.5, 4, []
    labels = np.arange(4000) % 2
    for seed in range(150):
        found = partition(
            labels * 0, labels, clients, scheme="class_dirichlet", alpha=alpha, seed=seed
        )
        shares += (label_counts(found, labels) / 2000)[0].tolist()
    mean, whole = 1 / clients, alpha * clients
    assert np.mean(shares) == pytest.approx(mean, abs=0.04)
    assert np.var(shares) == pytest.approx(mean * (1 - mean) / (whole + 1), rel=0.25)


def test_quantity_shares_are_a_dirichlet_draw():
    alpha, clients, shares = 1.0, 5, []
    domains = np.zeros(5000, dtype=np.int64)
    for seed in range(300):
        found = partition(
            domains, domains, clients, scheme="quantity", quantity_alpha=alpha, seed=seed
        )
        shares.append(found.sizes[0] / 5000)
    mean, whole = 1 / clients, alpha * clients
    assert np.mean(shares) == pytest.approx(mean, abs=0.03)
    assert np.var(shares) == pytest.approx(mean * (1 - mean) / (whole + 1), rel=0.25)


def test_sizes_differ_and_each_client_keeps_its_one_domain():
    domains, labels = column(400, 200), np.arange(600) % 5
    found = partition(
        domains, labels, 8, scheme="domain+shards+quantity", shards=2, quantity_alpha=0.3, seed=2
    )
    assert ((found.counts > 0).sum(axis=1) == 1).all()
    assert np.ptp(found.sizes) > 50
    small = found.sizes <= 80  # a shard of at most 40 images meets at most two classes of 40
    assert small.sum() >= 4
    assert (label_counts(found, labels) > 0)[small].sum(axis=1).max() <= 4


rules = st.tuples(
    st.sampled_from(["heterogeneous", "domain", "iid", ""]),
    st.sampled_from(["dirichlet", "class_dirichlet", "shards", ""]),
    st.sampled_from(["quantity", ""]),
).map(lambda names: "+".join(filter(None, names)))


def keeps_everyone(domains, labels, clients, options) -> bool:
    """Whether no client is empty; official rounding may leave one."""
    try:
        return bool(partition(domains, labels, clients, **options).sizes.all())
    except DataError:
        return False


@given(
    rules.filter(bool),
    st.lists(st.integers(4, 40), min_size=1, max_size=4),
    st.integers(4, 9),
    st.floats(1e-3, 1e3),
    st.sampled_from(["strict", "official"]),
    st.integers(0, 2**32),
)
def test_every_image_goes_to_one_client_and_none_goes_without(
    names, sizes, clients, alpha, rounding, seed
):
    domains = np.random.default_rng(seed).permutation(column(*sizes))
    labels = np.random.default_rng(seed + 1).integers(0, 4, len(domains))
    clients = min(clients, len(domains))
    settings = {
        "alpha": alpha if "dirichlet" in names else None,
        "shards": 1 if "shards" in names else None,
        "quantity_alpha": alpha if "quantity" in names else None,
    }
    options = {"scheme": names, "seed": seed, "rounding": rounding, **settings}
    homes = -(-clients // len(sizes))
    if "domain" in names and (clients < len(sizes) or homes > min(sizes)):
        return  # fewer images in a domain than it has clients
    if rounding == "official" and not keeps_everyone(domains, labels, clients, options):
        return
    found = partition(domains, labels, clients, **options)
    assert sorted(np.concatenate(found.rows).tolist()) == list(range(len(domains)))
    assert found.sizes.all()
    assert partition(domains, labels, clients, **options).owners.tolist() == found.owners.tolist()


@pytest.mark.parametrize(
    ("names", "settings", "message"),
    [
        ("diriclet", {}, "unknown partition 'diriclet' .did you mean 'dirichlet'"),
        ("dirichlet", {}, "dirichlet needs clients.alpha"),
        ("domain+iid", {}, "domain and iid both decide the domains of clients"),
        ("shards", {"shards": 2, "alpha": 1.0}, "shards and dirichlet both decide the labels"),
        ("shards+shards", {"shards": 2}, "both decide the labels"),
        ("domain+", {}, "unknown partition ''"),
        ("quantity", {}, "quantity needs clients.quantity_alpha"),
    ],
)
def test_rules_that_contradict_each_other_are_refused_in_one_line(names, settings, message):
    with pytest.raises(ExperimentError, match=message):
        Experiment(data="digits", hold_out="sketch", clients={"partition": names, **settings})


def test_more_shards_than_images_are_refused():
    with pytest.raises(DataError, match="6 clients with 5 shards each need at least 30"):
        partition(np.zeros(20, int), np.arange(20) % 2, 6, shards=5, seed=0)


def test_another_packages_rule_decides_alone(monkeypatch):
    monkeypatch.setattr(PARTITIONS, "_found", dict(PARTITIONS.items()))
    register_partition(
        PartitionRule(
            name="turns",
            kind="whole",
            summary="in turns",
            decide=lambda dealing: np.arange(len(dealing.labels)) % dealing.clients,
        )
    )
    found = partition(np.zeros(7, int), np.zeros(7, int), 3, scheme="turns", seed=0)
    assert found.owners.tolist() == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(ExperimentError, match=r"turns decides by itself.*leave out quantity"):
        rules_of("turns", {"quantity_alpha": 1.0})
