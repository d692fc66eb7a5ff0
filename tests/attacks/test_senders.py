"""What a method sends, entry by entry, and whose images it is of."""

import pytest
import torch

from extras import needs
from feddg.api import run as run_experiment
from feddg.attacks.attack import attack_run
from feddg.attacks.senders import (
    STATISTICS,
    MembershipEffort,
    Senders,
    chosen_clients,
    chosen_entries,
    entries_of,
    hashed,
    matched,
    victims_of,
)
from feddg.errors import ExperimentError
from feddg.experiment import Experiment
from feddg.messages import Message
from feddg.methods.composition import build_method
from feddg.models.backbones import build_network
from feddg.rng import stream
from feddg.runs.execute import load_finished_run
from feddg.runs.prepare import images_of
from trained_runs import SETTINGS

pytestmark = needs("torchmetrics")


def test_what_a_method_declares_is_what_can_be_attacked(subtests):
    for method, keys in [
        ("fedavg", []),
        ("feddg-ga", []),
        ("afl", []),
        ("fedprox", []),
        ("ccst", ["statistics/styles"]),
        ("pardon", ["statistics/style"]),
        ("elcfs", ["statistics/amplitudes"]),
        ("fpl", ["update/fpl/prototypes"]),
        ("scaffold", ["update/scaffold/*"]),
        ("fedbn", [STATISTICS]),
        ("fedig", [STATISTICS]),
        ("ccst+fpl", ["statistics/styles", "update/fpl/prototypes"]),
    ]:
        with subtests.test(method=method, keys=keys):
            built = build_method(method, {})
            network = built.network(build_network("cnn", 4, weights=None))
            assert sorted(entries_of(built, network)) == keys


def test_only_rows_that_the_sender_counts_are_rows():
    network = build_network("cnn", 4, weights=None)
    rows = {
        key: entry.has_rows
        for method in ("ccst", "pardon", "elcfs", "fpl")
        for key, entry in entries_of(build_method(method, {}), network).items()
    }
    assert rows == {
        "statistics/styles": True,
        "statistics/style": False,
        "statistics/amplitudes": True,
        "update/fpl/prototypes": True,
    }


def test_a_method_that_shares_nothing_but_weights_says_so():
    network = build_network("cnn", 4, weights=None)
    with pytest.raises(ExperimentError, match="fedavg shares no style"):
        chosen_entries(build_method("fedavg", {}), network, None)
    with pytest.raises(ExperimentError, match="local shares no style"):
        chosen_entries(build_method("local", {}), network, None)
    asked = chosen_entries(build_method("fedavg", {}), network, "statistics")
    assert list(asked) == [STATISTICS]
    with pytest.raises(
        ExperimentError, match=r"ccst sends no 'style'.*it sends: statistics/styles"
    ):
        chosen_entries(build_method("ccst", {}), network, "style")


def test_long_rows_are_hashed_with_their_inner_products():
    rows = torch.randn(2, 40_000, generator=stream(0, "rows"))
    rows[1] += rows[0]
    short = hashed(rows)
    assert short.shape == (2, 16_384)
    assert short[0] @ short[1] == pytest.approx(float(rows[0] @ rows[1]), rel=0.05)
    assert torch.equal(hashed(rows[:, :100]), rows[:, :100])


@pytest.mark.parametrize("method", ["pardon", "ccst"])
def test_what_is_read_is_what_the_run_sent(place, runs, method):
    """The setup is repeated bit for bit: what clients agreed on follows from it."""
    loaded = load_finished_run(runs(method), place / "cache", lambda *_: None)
    (entry,) = entries_of(loaded.method, loaded.network).values()
    sent = Senders(loaded).real(entry, range(6))
    context = loaded.server.state.context.tensors
    if method == "ccst":
        assert torch.equal(torch.cat(list(sent.values())), context["styles"].flatten(1))
    else:
        again = loaded.method.aggregate_statistics(
            [(id, Message({"style": rows.view(2, -1)})) for id, rows in sent.items()]
        )
        assert torch.equal(again.tensors["style"], context["style"])


NOISE = [
    {"clipping": "fixed", "clipping_norm": 1.0, "noise_multiplier": 1.0},
    {"epsilon": 50.0, "noised_at": "client"},
    {"record_epsilon": 8.0},
]


@pytest.mark.parametrize("privacy", NOISE, ids=["at the server", "at clients", "of steps"])
def test_a_noised_run_is_attacked_and_not_gone_on_with(place, runs, quick, privacy):
    pytest.importorskip("dp_accounting", reason="differential privacy is an extra")
    model, train = {"backbone": "cnn_gn", "weights": None}, {"rounds": 2, "local_epochs": 1}
    folder = runs("fedavg", privacy=privacy, model=model, train=train)
    for kind in ("update", "membership"):
        assert attack_run(folder, kind, quick, cache=place / "cache")
    loaded = load_finished_run(folder, place / "cache", lambda *_: None)
    assert loaded.server.state.round == 2
    with pytest.raises(ExperimentError, match="what earlier rounds have cost"):
        loaded.fit(1)


def test_a_row_of_one_image_is_recognised():
    samples = torch.randn(10, 4, generator=stream(0, "samples"))
    own = samples[[7, 2]]
    assert sorted(matched(own, samples, 2, stream(0, "chance"))) == [[0, 7], [1, 2]]
    pooled = samples.mean(0, keepdim=True)
    pairs = matched(pooled, samples, 5, stream(0, "chance"))
    assert [row for row, _ in pairs] == [0] * 5
    assert len({image for _, image in pairs}) == 5


def test_members_and_others_are_alike_in_domain_and_class(place):
    """Clients hold mostly one domain, and images aside are of all: a guess by domain is chance."""
    fields = SETTINGS | {"clients": {"number": 6, "heterogeneity": 0.1}, "train": {"rounds": 1}}
    folder = run_experiment(Experiment(**fields), place / "mixed", cache=place / "cache").folder
    senders = Senders(load_finished_run(folder, place / "cache", lambda *_: None))
    victims = [*victims_of(senders, MembershipEffort(shadows=0))]
    assert victims
    for victim in victims:
        asked = victim.case.asked
        kinds = [*zip(asked.domains.tolist(), asked.labels.tolist())]
        half = len(kinds) // 2
        assert victim.case.members.tolist() == [True] * half + [False] * half
        assert sorted(kinds[:half]) == sorted(kinds[half:])
        assert len(set(asked.rows.tolist())) == len(kinds)


def test_clients_that_hold_too_few_images_are_not_among_those_drawn(place, runs):
    """However few of all clients hold enough."""
    fields = {
        "data": SETTINGS["data"],
        "clients": {"number": 12, "partition": "quantity", "quantity_alpha": 0.5},
    }
    folder = runs("fedavg", **fields)
    loaded = load_finished_run(folder, place / "cache", lambda *_: None)
    sizes = images_of(loaded).partition.sizes
    most = int(sizes.max())
    found = chosen_clients(loaded, 4, 0, most)
    assert found
    assert all(sizes[client] >= most for client in found)
