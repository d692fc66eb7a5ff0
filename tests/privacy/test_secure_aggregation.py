"""Secure aggregation: the sum is the plain one, nothing else can be read, nobody is asked twice."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from feddg.errors import ClientError, ExperimentError, NotEnoughUpdates
from feddg.experiment import Experiment
from feddg.federation.federation import build
from feddg.messages import Message, Refusal, Update
from feddg.privacy import secure_aggregation as masking
from feddg.privacy.building import build_defences
from feddg.privacy.secure_aggregation import (
    CHECK,
    KEYS,
    MASKED,
    SHARES,
    UNMASK,
    SecureAggregation,
    decoded,
    encoded,
)
from feddg.settings import TrainSettings
from federations import federation, same
from odd_inputs import NOT_FINITE

TRAIN = TrainSettings(rounds=2, batch_size=4)
DEFENCE = (("secure_aggregation", {}),)


def masked(method="fedavg", sizes=(7, 5, 6, 4), **options):
    return federation(method, sizes=sizes, defences=DEFENCE, freeze=True, **options)


# The mathematics


@given(st.integers(0, masking.PRIME - 1), st.integers(2, 5), st.data())
@settings(max_examples=25, deadline=None)
def test_any_threshold_of_shares_makes_a_secret_again_and_fewer_do_not(number, threshold, data):
    secret = number.to_bytes(32, "big")
    shares = masking.split(secret, threshold, 6)
    places = data.draw(st.permutations(range(6)))
    held = {place: shares[place] for place in places[:threshold]}
    assert masking.combined(held, threshold) == secret
    held.pop(places[0])
    assert masking.combined(held, threshold - 1) != secret


def test_shares_are_values_of_a_polynomial_of_the_stated_degree():
    """Gauss' elimination finds its coefficients from any shares; those left over lie on it."""
    secret, threshold, p = masking.new_secret(), 4, masking.PRIME
    values = [int.from_bytes(share, "big") for share in masking.split(secret, threshold, 7)]
    rows = [[pow(x, power, p) for power in range(threshold)] + [values[x - 1]] for x in range(2, 6)]
    for at in range(threshold):
        scale = pow(rows[at][at], -1, p)
        rows[at] = [entry * scale % p for entry in rows[at]]
        for other in range(threshold):
            if other != at:
                pairs = zip(rows[other], rows[at])
                rows[other] = [(one - rows[other][at] * two) % p for one, two in pairs]
    coefficients = [row[-1] for row in rows]
    assert coefficients[0].to_bytes(32, "big") == secret
    assert len(set(coefficients)) == threshold
    for x in (1, 6, 7):
        assert sum(c * x**power for power, c in enumerate(coefficients)) % p == values[x - 1]


def test_shares_of_a_polynomial_written_down_give_its_value_at_zero():
    shares = {x - 1: (1234 + 166 * x + 94 * x * x).to_bytes(32, "big") for x in (2, 4, 5)}
    assert masking.combined(shares, 3) == (1234).to_bytes(32, "big")


def test_the_field_is_that_of_the_largest_prime_of_32_bytes():
    def is_prime(number):  # Miller and Rabin; a composite passes 20 bases less than once in 4^20
        odd, twos = number - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        powers = ([pow(base, odd << k, number) for k in range(twos)] for base in range(2, 22))
        return all(found[0] == 1 or number - 1 in found for found in powers)

    assert is_prime(masking.PRIME)
    assert not any(map(is_prime, range(masking.PRIME + 2, 2**256, 2)))


def test_both_ends_agree_and_nobody_else_does():
    one, other, third = (masking.new_secret() for _ in range(3))
    ours = masking.shared_key(one, masking.public_key(other), "mask")
    assert ours == masking.shared_key(other, masking.public_key(one), "mask")
    assert ours != masking.shared_key(other, masking.public_key(one), "shares")
    assert ours != masking.shared_key(third, masking.public_key(one), "mask")
    with pytest.raises(ClientError, match="invalid public key"):
        masking.shared_key(one, bytes(32), "mask")


def test_a_share_that_was_changed_or_sent_on_is_not_opened():
    key = masking.new_secret()
    content = masking.sealed(key, b"x" * 64, (1, 2, 3))
    assert len(content) == masking.SEALED
    assert masking.opened(key, content, (1, 2, 3)) == b"x" * 64
    changed = bytes([*content[:20], content[20] ^ 1, *content[21:]])
    for wrong, way in ((changed, (1, 2, 3)), (content, (2, 2, 3)), (content, (1, 3, 2))):
        assert masking.opened(key, wrong, way) is None


def test_a_mask_looks_uniform():
    values = masking.mask(masking.new_secret(), 40_000)
    assert stats.kstest(values.astype(float) / 2.0**64, "uniform").pvalue > 1e-9


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(-9, 9, width=32)), min_size=1, max_size=6))
@settings(deadline=None)
def test_a_sum_of_encoded_updates_is_their_mean(clients):
    received = {"a": torch.tensor([0.5, -1.0]), "n": torch.tensor(3)}
    total = numpy.zeros(4, dtype=numpy.uint64)
    for count, change in clients:
        weights = {"a": received["a"] + change, "n": received["n"] + 2}
        total += encoded(Update(0, count, weights), received, count, len(clients))
    mean, images = decoded(total, received)
    assert images == sum(count for count, _ in clients)
    expected = sum(n * c for n, c in clients) / images
    torch.testing.assert_close(mean["a"], received["a"] + expected, rtol=1e-5, atol=1e-6)
    assert mean["n"].item() == 5


@pytest.mark.parametrize("change", [*NOT_FINITE, 1e15])
def test_what_cannot_be_summed_is_refused(change):
    received = {"a": torch.zeros(2)}
    with pytest.raises(ClientError, match="not finite, or too large"):
        encoded(Update(0, 5, {"a": torch.full((2,), change)}), received, 5, 3)


# Whole rounds


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "mixstyle"])
def test_the_aggregate_is_the_plain_one_within_quantisation(method):
    plain = federation(method, sizes=(7, 5, 6, 4), freeze=True)
    hidden = masked(method)
    for small in (plain, hidden):
        small.server.setup()
        small.server.round()
    for name, tensor in plain.server.state.weights.items():
        if tensor.is_floating_point():
            found = hidden.server.state.weights[name]
            torch.testing.assert_close(found, tensor, rtol=1e-6, atol=2**-26)


def test_masks_differ_every_round_and_the_result_does_not():
    runs = [masked() for _ in range(2)]
    seen = [[], []]
    for small, vectors in zip(runs, seen):
        note_masked(small, vectors)
        small.run()
    assert same(runs[0].server.state.weights, runs[1].server.state.weights)
    assert not torch.equal(seen[0][0], seen[1][0])


def note_masked(small, vectors):
    original = small.transport.train

    def train(clients, broadcast):
        for reply in original(clients, broadcast):
            vectors.append(reply.extras.tensors[MASKED].clone())
            yield reply

    small.transport.train = train


def test_what_the_server_holds_says_nothing_of_a_single_update():
    small, vectors = masked(), []
    note_masked(small, vectors)
    small.server.round()
    assert len(vectors) == 4
    for vector in vectors:
        uniform = vector.numpy().view(numpy.uint64).astype(float) / 2.0**64
        assert stats.kstest(uniform, "uniform").pvalue > 1e-9
    pairs = torch.stack(vectors).double()
    assert float(torch.corrcoef(pairs).fill_diagonal_(0).abs().max()) < 0.05


def test_the_ledger_has_every_key_share_and_mask():
    small = masked()
    small.server.round()
    layouts = {row["id"]: row for row in small.ledger if row["kind"] == "layout"}
    rows = [row for row in small.ledger if row["kind"] == "message"]
    held = {
        (row["direction"], row["purpose"]): {t["name"] for t in layouts[row["layout"]]["tensors"]}
        for row in rows
    }
    assert held["up", f"answer:{KEYS}"] == {"keys"}
    assert held["down", f"ask:{SHARES}"] == {"ids", "keys"}
    assert held["up", f"answer:{SHARES}"] == {"shares", "commitments", "commitment"}
    assert held["down", f"ask:{CHECK}"] == {"members", "shares", "commitments"}
    assert held["up", f"answer:{CHECK}"] == {"held"}
    assert held["up", "update"] == {MASKED}
    assert "secure_aggregation/members" in held["down", "train"]
    assert held["down", f"ask:{UNMASK}"] == {"survivors"}
    assert held["up", f"answer:{UNMASK}"] == {"opened"}
    assert not any(name.startswith("weights/") for name in held["up", "update"])


def failing(small, step, client):
    """Has a client fail from a step on."""
    ask, train = small.transport.ask, small.transport.train

    def asked(clients, broadcast, name, question):
        for id, reply in ask(clients, broadcast, name, question):
            yield id, Refusal(id, "the process died") if (name, id) == (step, client) else reply

    def trained(clients, broadcast):
        for reply in train(clients, broadcast):
            dead = step == "train" and reply.client == client
            yield Refusal(client, "the process died") if dead else reply

    small.transport.ask, small.transport.train = asked, trained
    return small


@pytest.mark.parametrize("step", [KEYS, SHARES, CHECK, "train", UNMASK])
def test_a_client_that_dies_is_survived(step):
    small = failing(masked(), step, 2)
    plain = federation(sizes=(7, 5, 6, 4), freeze=True)
    if step != UNMASK:  # there its update is in the sum already
        failing(plain, "train", 2)
    record, _ = small.server.round(), plain.server.round()
    for name, tensor in plain.server.state.weights.items():
        found = small.server.state.weights[name]
        if tensor.is_floating_point():
            torch.testing.assert_close(found, tensor, rtol=1e-6, atol=2**-26)
    assert [refusal.client for refusal in record.refused] == [2]


def test_with_too_few_left_nothing_is_unmasked():
    small = failing(failing(masked(), "train", 1), "train", 2)
    before = {n: t.clone() for n, t in small.server.state.weights.items()}
    with pytest.raises(NotEnoughUpdates, match="needs 3 clients, and 2 are left"):
        small.server.round()
    assert same(small.server.state.weights, before)


# A client's own caution


def at_client(defence, id=0, others=(1, 2)):
    secrets, round = {}, 1
    keys = defence.answer(id, round, KEYS, Message(), secrets).tensors["keys"]
    more = [defence.answer(k, round, KEYS, Message(), {}).tensors["keys"] for k in others]
    told = Message({"ids": torch.tensor([id, *others]), "keys": torch.stack([keys, *more])})
    return secrets, told


def test_a_client_masks_and_opens_once():
    defence, ids = SecureAggregation(), (0, 1, 2)
    secrets = {id: {} for id in ids}
    keys = [defence.answer(id, 1, KEYS, Message(), secrets[id]).tensors["keys"] for id in ids]
    told = Message({"ids": torch.tensor(ids), "keys": torch.stack(keys)})
    heard = checked(defence, ids, secrets, told)
    received = {"a": torch.zeros(3)}
    update = Update(0, 4, {"a": torch.ones(3)})
    defence.mask(update, received, heard, secrets[0])
    with pytest.raises(ClientError, match="one update a round"):
        defence.mask(update, received, heard, secrets[0])
    with pytest.raises(ClientError, match="shared its secrets already"):
        defence.answer(0, 1, SHARES, told, secrets[0])
    left = Message({"survivors": torch.tensor(ids)})
    with pytest.raises(ClientError, match="out of turn"):
        defence.answer(0, 2, UNMASK, left, secrets[0])
    defence.answer(0, 1, UNMASK, left, secrets[0])
    known = {f"known/{name}" for name in ("id", "round", "opened", "tried/1/0")}
    assert set(secrets[0]) == {"round", *known}
    with pytest.raises(ClientError, match="nothing to unmask"):
        defence.answer(0, 1, UNMASK, left, secrets[0])


def checked(defence, ids, secrets, told):
    """Has clients share their secrets and check them; returns what the server tells them next."""
    replies = [defence.answer(id, 1, SHARES, told, secrets[id]).tensors for id in ids]
    table = {n: torch.stack([reply[n] for reply in replies]) for n in ("shares", "commitments")}
    question = Message({"members": torch.tensor(ids), **table})
    for id in ids:
        assert defence.answer(id, 1, CHECK, question, secrets[id]).tensors["held"].all()
    return Message({"members": torch.tensor(ids)})


def test_a_client_is_not_told_anything(subtests):
    for change, words in [
        (lambda t: {"ids": torch.tensor([0, 1])}, "too short"),
        (lambda t: {"ids": torch.tensor([0, 1, 1])}, "one twice"),
        (lambda t: {"ids": torch.tensor([5, 1, 2])}, "lacks this one"),
        (lambda t: {"keys": t["keys"][[1, 1, 2]]}, "another key than its own"),
        (lambda t: {"keys": t["keys"][[0, 1, 1]]}, "the same key twice"),
        (lambda t: {"keys": torch.cat([t["keys"][:2], t["keys"][2:] * 0])}, "same key|is none"),
    ]:
        with subtests.test(words=words):
            defence = SecureAggregation()
            secrets, told = at_client(defence)
            told.tensors |= change(told.tensors)
            if len(told.tensors["ids"]) < len(told.tensors["keys"]):
                told.tensors["keys"] = told.tensors["keys"][: len(told.tensors["ids"])]
            with pytest.raises(ClientError, match=words):
                defence.answer(0, 1, SHARES, told, secrets)


@pytest.mark.parametrize("survivors", [[0, 1], [1, 2, 3], [0, 1, 9], [0, 1, 1]])
def test_too_few_or_strange_survivors_are_not_unmasked(survivors):
    small = masked()
    ask, said = small.transport.ask, []

    def asked(clients, broadcast, name, question):
        if name == UNMASK:
            question = Message({"survivors": torch.tensor(survivors)})
            broadcast.extras = question
        for id, reply in ask(clients, broadcast, name, question):
            said.append((name, id, reply))
            yield id, reply

    small.transport.ask = asked
    with pytest.raises(NotEnoughUpdates):
        small.server.round()
    opened = [(id, reply) for name, id, reply in said if name == UNMASK]
    assert all(
        isinstance(reply, Refusal) for id, reply in opened if id == 0 or survivors != [1, 2, 3]
    )


# What it goes with

MODEL = {"backbone": "cnn", "weights": None, "normalization": "frozen"}


def refused(method="fedavg", **fields):
    base = {"data": "digits", "hold_out": "sketch", "clients": 4, "model": MODEL}
    fields = {"defences": ["secure_aggregation"], **fields}
    experiment = Experiment(**{**base, "method": method, **fields})
    return build_defences(experiment, *build(experiment, 10))


def test_what_it_does_not_go_with_is_refused_before_round_1(subtests):
    for fields, words in [
        ({"method": "feddg-ga"}, "secure_aggregation cannot be combined with feddg-ga: answer"),
        ({"method": "fpl"}, "cannot be combined with fpl: update/fpl"),
        ({"method": "fedgma"}, "own 'aggregate'.*nothing but their sum"),
        ({"method": "pardon"}, "statistics/style .* would see of each client"),
        ({"defences": ["secure_aggregation", "median"]}, "exclude each other: median looks at"),
        ({"defences": ["norm_bounding", "secure_aggregation"]}, "norm_bounding looks at single"),
        ({"privacy": {"clipping": "adaptive"}}, "which client's update was clipped"),
        (
            {
                "privacy": {"epsilon": 8, "sampling": "secret"},
                "clients": {"number": 9, "per_round": 4},
            },
            "set privacy.sampling to public",
        ),
        ({"clients": 2}, "needs 3 updates"),
    ]:
        with subtests.test(words=words), pytest.raises(ExperimentError, match=words):
            refused(**fields)


def test_what_a_method_never_sends_with_its_settings_is_no_reason_to_refuse_it(subtests):
    for method in [
        "group_dro",
        {"name": "pardon", "contrastive": "ordinary"},
        {"name": "pardon+group_dro", "contrastive": "ordinary"},
    ]:
        with subtests.test(method=method):
            assert refused(method).defences
    with pytest.raises(ExperimentError, match="answer:losses"):
        refused("afl")


def test_noise_goes_with_it_and_clients_count_alike():
    defences = refused(privacy={"epsilon": 8})
    assert [defence.name for defence in defences.defences] == ["clipping", "secure_aggregation"]
    small = masked(privacy={"clipping": "fixed", "clipping_norm": 1e6})
    plain = federation(
        sizes=(7, 5, 6, 4), freeze=True, privacy={"clipping": "fixed", "clipping_norm": 1e6}
    )
    for run in (small, plain):
        run.server.round()
    for name in small.server.defences.facts.trained:
        torch.testing.assert_close(
            small.server.state.weights[name], plain.server.state.weights[name], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("more", [{"style_epsilon": 8}, {"open_styles": True}])
def test_pardon_goes_with_it_once_its_styles_are_seen_to(more):
    assert refused("pardon", privacy=more).masking is not None
