"""What of a network is trained, and that nothing else crosses the wire."""

import pytest
import torch
import torchvision

from feddg.errors import MissingPackage
from feddg.methods.base import Method, methods
from feddg.models.backbones import build_network
from feddg.models.normalization import statistics_names
from feddg.models.trained import add_adapters, trained_by
from feddg.settings import ServerSettings, TrainSettings
from federations import federation, same


def small(method="fedavg", trainable="head", **options):
    """A small federation that trains a part of its network."""
    sgd = {"optimizer": "sgd"} if method == "scaffold" else {}
    train = TrainSettings(
        rounds=2, batch_size=4, local_steps=2, lr=0.01, trainable=trainable, lora_rank=2, **sgd
    )
    server = ServerSettings(largest_change=None)
    return federation(method, train=train, server_settings=server, **options)


def test_under_every_method_the_frozen_featurizer_stays_and_the_head_moves(subtests):
    for method in sorted(methods().keys() - {"local"}):
        with subtests.test(method=method):
            chosen = small(method, embedding="bottleneck")
            frozen = chosen.network.frozen
            before = {n: t.clone() for n, t in chosen.server.state.weights.items()}
            chosen.server.setup()
            row = chosen.server.round()
            assert not row.refused
            after = chosen.server.state.weights
            assert after.keys() == before.keys()
            for name in frozen:
                torch.testing.assert_close(
                    after[name], before[name], rtol=1e-6, atol=0
                )  # FedIG's roots
            assert any(
                not torch.equal(after[n], before[n]) for n in after if n.startswith("classifier")
            )


def sizes_of(chosen, purpose, round):
    """Bytes of each message of a round with a purpose."""
    rows = [row for row in chosen.ledger if row.get("round") == round]
    return [row["bytes"] for row in rows if row["purpose"] == purpose]


def test_only_what_is_trained_is_sent_each_round():
    sizes = {}
    for trainable in ("all", "norm+head", "head"):
        chosen = small(trainable=trainable)
        chosen.server.setup()
        chosen.server.round()
        state, frozen = chosen.network.state_dict(), chosen.network.frozen
        trained = sum(t.nbytes for n, t in state.items() if n not in frozen)
        updates = sizes_of(chosen, "update", 1)
        assert updates
        assert all(trained <= size <= trained + 64 for size in updates)
        sizes[trainable] = trained
        rest = sum(t.nbytes for n, t in state.items() if n in frozen)
        assert sizes_of(chosen, "context", 0) == ([rest] * 3 if frozen else [])
    assert sizes["head"] < sizes["norm+head"] < sizes["all"]


@pytest.mark.parametrize("freeze", [False, True])
def test_norm_and_head_train_normalisation_layers(freeze):
    chosen = small(trainable="norm+head", freeze=freeze)
    before = {n: t.clone() for n, t in chosen.server.state.weights.items()}
    after = chosen.run()
    moved = {n for n in after if not torch.equal(after[n], before[n])}
    statistics = {f"featurizer.{n}" for n in statistics_names(chosen.network.featurizer)}
    assert bool(moved & statistics) != freeze
    in_featurizer = {n for n in moved - statistics if n.startswith("featurizer.")}
    assert in_featurizer
    for name in in_featurizer:
        assert after[name].dim() == 1


def test_features_computed_once_train_the_same_head(monkeypatch, tmp_path):
    kept = small(cache=tmp_path, sizes=(40, 30, 20))
    ours = kept.run()
    assert len(list(tmp_path.glob("*features*"))) == 3
    monkeypatch.setattr(Method, "trains_on_features", lambda method, client: False)
    plain = small(sizes=(40, 30, 20)).run()
    for name in ours:
        torch.testing.assert_close(ours[name], plain[name], rtol=1e-4, atol=1e-6)


def test_defences_and_several_workers_see_what_is_trained():
    plain = small(sizes=(8, 8, 8)).run()
    assert same(small(sizes=(8, 8, 8), at_once=3).run(), plain)
    masked = small(sizes=(8, 8, 8), defences=(("secure_aggregation", {}),))
    found = masked.run()
    for name, tensor in plain.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
    trained = sum(plain[n].numel() for n in plain if n not in masked.network.frozen)
    assert all(size < 8 * (trained + 8) for size in sizes_of(masked, "update", 1))
    noised = small(sizes=(8, 8, 8), privacy={"clipping": "fixed", "clipping_norm": 0.01}).run()
    moved = [n for n in plain if not torch.equal(noised[n], plain[n])]
    assert moved
    assert not set(moved) & masked.network.frozen


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weights, frozen: weights.update({frozen: torch.zeros(3)}), "which is not trained"),
        (lambda weights, frozen: weights.pop("classifier.bias"), "classifier.bias"),
    ],
)
def test_a_client_that_sends_more_or_less_than_what_is_trained_is_refused(change, words):
    chosen = small()
    chosen.server.setup()
    train = chosen.transport.train

    def lying(clients, broadcast):
        for update in train(clients, broadcast):
            if update.client == 1:
                change(update.weights, sorted(chosen.network.frozen)[0])
            yield update

    chosen.transport.train = lying
    row = chosen.server.round()
    assert [refused.client for refused in row.refused] == [1]
    assert words in row.refused[0].reason


def test_adapters_are_trained_and_nothing_under_them():
    pytest.importorskip("peft", reason="low-rank adapters need peft")
    chosen = small(trainable="lora")
    before = {n: t.clone() for n, t in chosen.server.state.weights.items()}
    after = chosen.run()
    moved = {n for n in after if not torch.equal(after[n], before[n])}
    assert all(".lora_" in n or n.startswith("classifier") for n in moved)
    assert any(".lora_B" in n for n in moved)


def test_adapters_are_drawn_from_the_experiments_seed():
    pytest.importorskip("peft", reason="low-rank adapters need peft")

    def drawn(elsewhere, seed):
        torch.manual_seed(elsewhere)
        network = build_network("cnn", 2, weights=None, seed=seed)
        network = trained_by(network, lambda same: same, TrainSettings(trainable="lora"))
        return {n: t for n, t in network.state_dict().items() if ".lora_A" in n}

    once, again, other = drawn(1, 0), drawn(2, 0), drawn(1, 1)
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert not any(torch.equal(once[name], other[name]) for name in once)


def test_torchs_own_attention_has_no_adapter_that_it_does_not_call():
    pytest.importorskip("peft", reason="low-rank adapters need peft")
    network = torchvision.models.VisionTransformer(32, 16, 1, 2, 8, 16)
    add_adapters(network, 2)
    network(torch.rand(2, 3, 32, 32)).sum().backward()
    adapters = {n: p.grad for n, p in network.named_parameters() if ".lora_" in n}
    assert adapters
    assert all(grad is not None for grad in adapters.values())


def test_adapters_without_their_library_say_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MissingPackage, match=r"feddg\[lora\]"):
        small(trainable="lora")


def test_adapters_of_a_vision_transformer_are_a_small_part_of_it():
    pytest.importorskip("peft", reason="low-rank adapters need peft")
    sent = {}
    for trainable in ("all", "lora"):
        chosen = small(trainable=trainable, backbone="test_vit", size=32)
        before = {n: t.clone() for n, t in chosen.server.state.weights.items()}
        after = chosen.run(1)
        moved = {n for n in after if not torch.equal(after[n], before[n])}
        assert any(".lora_B" in n for n in moved) == (trainable == "lora")
        assert any(".attn.qkv." in n for n in moved)
        sent[trainable] = sizes_of(chosen, "update", 1)[0]
    assert sent["lora"] < sent["all"] / 4
